# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import re
import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest

from allotment.burn.drivers import SPIN_ENTRY, SPIN_PTX


def assembler() -> Path | None:
    """Find NVIDIA's assembler: a toolkit's, or that of the PyPI package nvidia-cuda-nvcc."""
    found = shutil.which("ptxas")
    if found is not None:
        return Path(found)
    package = find_spec("nvidia")
    for root in package.submodule_search_locations or () if package is not None else ():
        for path in Path(root).glob("*/bin/ptxas"):
            return path
    return None


def test_the_entry_is_the_one_that_is_looked_up() -> None:
    assert re.findall(rb"\.entry\s+(\w+)", SPIN_PTX) == [SPIN_ENTRY]


def test_every_driver_of_interest_reads_the_text() -> None:
    head = SPIN_PTX.split()
    assert head[:6] == [b".version", b"6.0", b".target", b"sm_50", b".address_size", b"64"]
    assert SPIN_PTX.isascii()


@pytest.mark.parametrize("target", ["sm_75", "sm_80", "sm_90"])
def test_the_assembler_accepts_it(target: str, tmp_path: Path) -> None:
    ptxas = assembler()
    if ptxas is None:
        pytest.skip("no ptxas: install the CUDA toolkit, or nvidia-cuda-nvcc from PyPI")
    source = tmp_path / "spin.ptx"
    source.write_bytes(SPIN_PTX)
    subprocess.run([ptxas, f"-arch={target}", source, "-o", tmp_path / "spin.cubin"], check=True)
