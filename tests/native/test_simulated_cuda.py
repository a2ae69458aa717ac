# SPDX-License-Identifier: Apache-2.0
"""The simulated libcuda.so.1 as a library: what it exports, and a real client on it.

What the driver does is tested in C (native/tests/simulated), also under sanitizers.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from elftools.elf.elffile import ELFFile
from elftools.elf.sections import SymbolTableSection

CLIENT = Path(__file__).with_name("cuda_bindings_client.py")
TABLE = Path(__file__).parents[2] / "native" / "simulated" / "cuda" / "symbols.inc"
ROW = re.compile(r"SYMBOL(?:_OWN)?\((\w+), (\d+), (\w+)\)")
MIB = 1 << 20


@pytest.fixture
def library(native_dir: Path) -> Path:
    return native_dir / "simulated" / "libcuda.so.1"


def exported(library: Path) -> set[str]:
    with library.open("rb") as file:
        symbols = ELFFile(file).get_section_by_name(".dynsym")
        assert isinstance(symbols, SymbolTableSection)
        return {
            symbol.name
            for symbol in symbols.iter_symbols()
            if symbol.name
            and symbol["st_shndx"] != "SHN_UNDEF"
            and symbol["st_info"]["bind"] == "STB_GLOBAL"
        }


def test_exactly_the_table_of_entry_points_is_exported(library: Path) -> None:
    rows = ROW.findall(TABLE.read_text())
    assert len(rows) > 600
    assert exported(library) == {symbol for _, _, symbol in rows}


def test_the_table_is_in_order_for_its_binary_search() -> None:
    rows = [(name, int(version)) for name, version, _ in ROW.findall(TABLE.read_text())]
    assert rows == sorted(rows)


@pytest.mark.skipif(
    importlib.util.find_spec("cuda") is None, reason="cuda-bindings is not installed"
)
# These bindings ask for entry points that came with CUDA 12.8 and 13.0.
@pytest.mark.parametrize(("cuda", "version"), [("13.0", 13000), ("13.2", 13020)])
def test_cuda_bindings_run_unchanged(
    library: Path, machine: Callable[[str], Path], tmp_path: Path, cuda: str, version: int
) -> None:
    description = tmp_path / "machine.yaml"
    description.write_text(f"cuda: {cuda}\ngpus:\n  - model: a100-80gb\n    count: 2\n")
    environment = {
        **os.environ,
        "LD_LIBRARY_PATH": str(library.parent),
        "ALLOTMENT_SIMULATED_MACHINE": str(machine(str(description))),
    }
    done = subprocess.run(
        [sys.executable, CLIENT], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    elapsed = seen.pop("kernel_ms")
    assert seen == {
        "name": "NVIDIA A100-SXM4-80GB",
        "devices": 2,
        "version": version,
        "total": (81920 - 764) * MIB,
        "taken": (64 + 32) * MIB,
        "same": True,
        "too_much": "CUDA_ERROR_OUT_OF_MEMORY",
        "nodes": 2,
    }
    # A slower clock would be a fault; a busy test machine only delays what is measured outside.
    assert 3.0 <= elapsed < 3.5
