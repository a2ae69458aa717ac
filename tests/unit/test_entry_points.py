# SPDX-License-Identifier: Apache-2.0
"""Every function that NVIDIA's headers declare has a class: nothing new passes the shim unseen.

The headers come with the test requirements `nvidia-cuda-runtime` and `nvidia-nvml-dev`.
"""

from __future__ import annotations

import importlib.metadata
import re
from collections import Counter
from pathlib import Path

import pytest
import yaml

CUDA_HEADERS = ("cuda.h", "cudaGL.h", "cudaEGL.h", "cudaVDPAU.h")
CLASSES = {"reports", "no_memory", "refused"}
# `#define cuMemFree cuMemFree_v2`, `#define cuMemcpy __CUDA_API_PTDS(cuMemcpy)`
VARIANT = re.compile(
    r"^\s*#\s*define\s+cu[A-Z]\w*\s+(?:__CUDA_API_(PT[SD][ZS])\s*\()?(cu[A-Z]\w*)", re.MULTILINE
)


def header(package: str, name: str) -> str:
    try:
        files = importlib.metadata.files(package) or []
    except importlib.metadata.PackageNotFoundError:
        pytest.skip(f"no {name}: pip install {package}")
    path = next(Path(str(file.locate())) for file in files if file.name == name)
    return re.sub(r"/\*.*?\*/|//[^\n]*", " ", path.read_text(), flags=re.DOTALL)


def cuda_names() -> set[str]:
    """What the driver exports, by its headers: all versions, and their per-thread variants."""
    text = "\n".join(header("nvidia-cuda-runtime", name) for name in CUDA_HEADERS)
    found = set(re.findall(r"\bCUDAAPI\s+(cu[A-Z]\w*)\s*\(", text))
    for per_thread, name in VARIANT.findall(text):
        found |= {name, f"{name}_{per_thread.lower()}"} if per_thread else {name}
    return found - set(re.findall(r"\bstatic inline CUresult (\w+)", text))


def nvml_names() -> set[str]:
    return set(re.findall(r"\bDECLDIR\s+(nvml\w+)\s*\(", header("nvidia-nvml-dev", "nvml.h")))


def plain(name: str) -> str:
    """The name without the mark of a per-thread default stream."""
    return re.sub(r"_pt(ds|sz)$", "", name)


@pytest.fixture(scope="module")
def declared() -> set[str]:
    return cuda_names() | nvml_names()


@pytest.fixture(scope="module")
def owned(root: Path) -> set[str]:
    return set((root / "tests" / "unit" / "shim_exports.txt").read_text().split())


@pytest.fixture(scope="module")
def classes(root: Path) -> dict[str, list[str]]:
    listed = yaml.safe_load((root / "native" / "shim" / "entry_points.yaml").read_text())
    assert listed.keys() == CLASSES
    groups = [group for each in listed.values() for group in each]
    assert all(group.keys() == {"because", "names"} and group["because"] for group in groups)
    return {
        name: [text for group in listed[name] for text in group["names"].split()] for name in listed
    }


def test_headers_are_read(declared: set[str]) -> None:
    assert {
        "cuMemAlloc",
        "cuMemAlloc_v2",
        "cuMemcpy_ptds",
        "cuGLCtxCreate_v2",
        "nvmlInit_v2",
    } <= declared
    assert len(declared) > 1100


def test_every_function_has_one_class(
    declared: set[str], owned: set[str], classes: dict[str, list[str]]
) -> None:
    listed = Counter(name for names in classes.values() for name in names)
    assert [name for name, count in listed.items() if count > 1] == []
    assert sorted({plain(name) for name in declared - owned} - set(listed)) == []
    assert sorted(set(listed) - declared) == []


def test_classes_are_what_the_shim_exports(owned: set[str], classes: dict[str, list[str]]) -> None:
    passed = {*classes["reports"], *classes["no_memory"]}
    assert sorted(passed & owned) == []
    assert sorted(set(classes["refused"]) - owned) == []


def test_variants_of_owned_functions_are_owned(declared: set[str], owned: set[str]) -> None:
    variants = {name for name in declared if plain(name) != name}
    assert sorted(name for name in variants if (name in owned) != (plain(name) in owned)) == []
