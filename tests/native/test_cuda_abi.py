# SPDX-License-Identifier: Apache-2.0
"""The hand-written CUDA declarations against NVIDIA's own header.

The header is not ours to commit. It comes with the test requirement `nvidia-cuda-runtime`; where
that is not installed, `ALLOTMENT_CUDA_INCLUDE` may name the folder that has `cuda.h`.
"""

import importlib.util
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

INCLUDE = Path(__file__).parents[2] / "native" / "include"
PROGRAM = """\
#define __CUDA_API_VERSION_INTERNAL
#include <stddef.h>
#include <stdio.h>
#include "%(header)s"
static const long long facts[] = {
%(facts)s
};
int main(void) {
  for (size_t i = 0; i < sizeof facts / sizeof *facts; i++) printf("%%lld\\n", facts[i]);
}
"""
NO_PROFILER = re.compile(r"CU_ENTRY\w*\(cuProfiler")


def _real_include() -> Path | None:
    named = os.environ.get("ALLOTMENT_CUDA_INCLUDE")
    if named:
        return Path(named)
    spec = importlib.util.find_spec("nvidia")
    for root in spec.submodule_search_locations or () if spec else ():
        found = next(iter(sorted(Path(root).glob("*/include/cuda.h"))), None)
        if found:
            return found.parent
    return None


@pytest.fixture(scope="module")
def real_include() -> Path:
    found = _real_include()
    if found is None:
        pytest.skip("no cuda.h: pip install nvidia-cuda-runtime")
    return found


@pytest.fixture(scope="module")
def compiler() -> str:
    found = shutil.which("cc")
    if found is None:
        pytest.skip("no C compiler `cc`")
    return found


def _declarations() -> str:
    return "\n".join(path.read_text() for path in sorted((INCLUDE / "cuda_abi").glob("*.h")))


def _facts(text: str) -> list[str]:
    """One C expression a fact: a value, a size, or the offset of a field."""
    facts: list[str] = []
    for body in re.findall(r"typedef enum \w+ \{(.*?)\n\}", text, re.DOTALL):
        facts += [f"(long long){name}" for name in re.findall(r"^  (\w+) = ", body, re.MULTILINE)]
    facts += [f"(long long){name}" for name in re.findall(r"X\((CUDA_\w+),", text)]
    for body, name in re.findall(
        r"typedef (?:struct|union) \w+ \{\n(.*?)\n\} (\w+);", text, re.DOTALL
    ):
        facts.append(f"(long long)sizeof({name})")
        for field in re.findall(
            r"^  (?:[^ \n}][^\n]*[ *]|\} )(\w+)(?:\[\d+\])*;$", body, re.MULTILINE
        ):
            if field not in {"struct", "union"}:
                facts.append(f"(long long)offsetof({name}, {field})")
    return facts


def _values(compiler: str, folder: Path, header: str, include: Path, facts: list[str]) -> list[int]:
    lines = ",\n".join(facts)
    source = folder / f"{header.replace('.', '_')}_facts.c"
    source.write_text(PROGRAM % {"header": header, "facts": lines})
    program = source.with_suffix("")
    subprocess.run([compiler, "-w", "-I", include, source, "-o", program], check=True)
    printed = subprocess.run([program], check=True, capture_output=True, text=True).stdout
    return [int(line) for line in printed.split()]


def test_values_and_layouts_are_those_of_the_real_header(
    tmp_path: Path, compiler: str, real_include: Path
) -> None:
    facts = _facts(_declarations())
    assert len(facts) > 1000
    ours = _values(compiler, tmp_path, "cuda_abi.h", INCLUDE, facts)
    theirs = _values(compiler, tmp_path, "cuda.h", real_include, facts)
    wrong = [
        (fact, our, their)
        for fact, our, their in zip(facts, ours, theirs, strict=True)
        if our != their
    ]
    assert wrong == []


def test_prototypes_are_those_of_the_real_header(
    tmp_path: Path, compiler: str, real_include: Path
) -> None:
    text = _declarations()
    macros = "".join(
        re.findall(
            r"^#define CU_ENTRY.*?(?=^#define CU_ENTRY|^#endif)", text, re.DOTALL | re.MULTILINE
        )
    )
    entries = re.findall(r"^CU_ENTRY\w*\(.*?\)\);$", text, re.DOTALL | re.MULTILINE)
    assert len(entries) > 300
    # Declaring a function twice is an error unless both declarations agree.
    source = tmp_path / "prototypes.c"
    source.write_text(
        '#define __CUDA_API_VERSION_INTERNAL\n#include "cuda.h"\n'
        + macros
        + "\n".join(entry for entry in entries if not NO_PROFILER.match(entry))
    )
    done = subprocess.run(
        [compiler, "-std=c11", "-w", "-I", real_include, "-fsyntax-only", source],
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
