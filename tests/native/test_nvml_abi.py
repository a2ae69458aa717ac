# SPDX-License-Identifier: Apache-2.0
"""The hand-written NVML declarations against nvidia-ml-py's, and against NVIDIA's own header.

The header is not ours to commit. It comes with the test requirement `nvidia-nvml-dev`.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pynvml
import pytest

INCLUDE = Path(__file__).parents[2] / "native" / "include"
HEADERS = [INCLUDE / name for name in ("nvml_abi.h", "nvml_abi_mig.h")]

# nvidia-ml-py's name of a structure, where it is not c_ and ours.
OTHER_NAMES = {
    "nvmlProcessInfo_t": "c_nvmlProcessInfo_v2_t",
    "nvmlPciInfo_t": "nvmlPciInfo_t",
    "nvmlEccErrorCounts_t": "c_nvmlEccErrorCounts_t",
    "nvmlRowRemapperHistogramValues_t": "c_nvmlRowRemapperHistogramValues",
}


def header_text() -> str:
    return "".join(path.read_text() for path in HEADERS)


def structures() -> dict[str, list[str]]:
    """Our structures and their members, by the header's text."""
    text = re.sub(r"//.*", "", header_text())
    found: dict[str, list[str]] = {}
    for body, names in re.findall(r"typedef struct \w+ \{(.*?)\n\} ([^;]+);", text, re.DOTALL):
        flat = re.sub(r"(?:struct|union) \{.*?\} (\w+)", r"int \1", body, flags=re.DOTALL)
        members = re.findall(r"(\w+)(?:\[[^\]]*\])?;", flat)
        found |= {name.strip(): members for name in names.split(",")}
    return found


def facts() -> list[str]:
    """One C expression a fact: a size, an offset, a value."""
    found = []
    for name, members in structures().items():
        found.append(f"sizeof({name})")
        found += [f"offsetof({name}, {member})" for member in members]
    text = header_text()
    found += re.findall(r"^#define (nvml\w+_v\d) ", text, re.MULTILINE)
    return found + re.findall(r"\b(NVML_[A-Z0-9_]+) = ", text)


def values(
    expressions: list[str], header: str, include: Path, cc: list[str], tmp: Path
) -> list[int]:
    """What a compiler says that the expressions are."""
    source, program = tmp / "facts.c", tmp / "facts"
    lines = "".join(f'  printf("%lld\\n", (long long)({each}));\n' for each in expressions)
    source.write_text(
        f'#include <stddef.h>\n#include <stdio.h>\n#include "{header}"\n'
        f"int main(void) {{\n{lines}  return 0;\n}}\n"
    )
    subprocess.run([*cc, "-w", "-I", include, source, "-o", program], check=True)
    done = subprocess.run([program], check=True, capture_output=True, text=True)
    return [int(line) for line in done.stdout.split()]


@pytest.fixture
def real_include() -> Path:
    try:
        files = importlib.metadata.files("nvidia-nvml-dev") or []
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("no nvml.h: pip install nvidia-nvml-dev")
    return next(Path(str(file.locate())).parent for file in files if file.name == "nvml.h")


def test_values_and_layouts_are_those_of_the_real_header(
    tmp_path: Path, cc: list[str], real_include: Path
) -> None:
    real = (real_include / "nvml.h").read_text()
    # Some enumerators are ours alone: names for values that the header has as macros.
    shared = [each for each in facts() if not re.fullmatch(r"NVML_\w+", each) or each in real]
    assert len(shared) > 300
    ours = values(shared, "nvml_abi.h", INCLUDE, cc, tmp_path)
    theirs = values(shared, "nvml.h", real_include, cc, tmp_path)
    differences = [f for f, our, their in zip(shared, ours, theirs, strict=True) if our != their]
    assert differences == []


def ctypes_pairs() -> Iterator[tuple[str, type[ctypes.Structure]]]:
    for name in structures():
        spelled = OTHER_NAMES.get(name, f"c_{name}")
        found = getattr(pynvml, spelled, None) or getattr(pynvml, spelled.removesuffix("_t"), None)
        if found is not None:
            yield name, found


def test_layouts_are_those_of_nvidia_ml_py(tmp_path: Path, cc: list[str]) -> None:
    pairs = list(ctypes_pairs())
    assert len(pairs) > 25
    expressions, theirs = [], []
    for name, structure in pairs:
        expressions.append(f"sizeof({name})")
        theirs.append(ctypes.sizeof(structure))
        for member in structures()[name]:
            if hasattr(structure, member):
                expressions.append(f"offsetof({name}, {member})")
                theirs.append(getattr(structure, member).offset)
    ours = values(expressions, "nvml_abi.h", INCLUDE, cc, tmp_path)
    assert [
        (fact, our, their)
        for fact, our, their in zip(expressions, ours, theirs, strict=True)
        if our != their
    ] == []


def test_results_are_those_of_nvidia_ml_py() -> None:
    ours = dict(re.findall(r"(NVML_(?:SUCCESS|ERROR_\w+)) = (\d+)", header_text()))
    theirs = {
        name: value
        for name, value in vars(pynvml).items()
        if re.fullmatch(r"NVML_(SUCCESS|ERROR_[A-Z_]+)", name) and name in ours
    }
    assert len(theirs) > 25
    assert {name: int(value) for name, value in ours.items() if name in theirs} == theirs
