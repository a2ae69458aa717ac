# SPDX-License-Identifier: Apache-2.0
"""The examples do what their README says."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

Run = Callable[..., subprocess.CompletedProcess[str]]
SHARE = ("run", "--simulated", "a100-80gb", "--memory", "4Gi", "--")


@pytest.mark.usefixtures("native_dir")
def test_a_c_program_takes_its_share(
    allot: Run, cc: Sequence[str], root: Path, tmp_path: Path
) -> None:
    program = tmp_path / "fill"
    source = root / "examples" / "fill.c"
    subprocess.run([*cc, "-o", str(program), str(source), "-ldl"], check=True)
    done = allot(*SHARE, program)
    lines = done.stdout.splitlines()
    assert done.returncode == 0, done.stderr
    assert lines[0].endswith(" of 4096 MiB free")
    assert lines[1].startswith("got 3")
    assert lines[1].endswith(" MiB, then CUDA_ERROR_OUT_OF_MEMORY")


@pytest.mark.usefixtures("native_dir")
def test_cuda_and_nvml_show_the_same(allot: Run, root: Path) -> None:
    pytest.importorskip("cuda.bindings")
    done = allot(*SHARE, sys.executable, root / "examples" / "see_my_share.py")
    assert done.returncode == 0, done.stderr
    device, cuda, nvml = done.stdout.splitlines()
    assert device.startswith("device: NVIDIA A100")
    assert cuda.split()[1:] == nvml.split()[1:]
    assert cuda.endswith(" of 4096 MiB free")


@pytest.mark.usefixtures("native_dir")
def test_two_at_once(root: Path, state_dir: Path, tmp_path: Path) -> None:
    allot = tmp_path / "allot"
    allot.write_text(f'#!/bin/sh\nexec {sys.executable} -m allotment "$@"\n')
    allot.chmod(0o755)
    environment = {
        **os.environ,
        "ALLOTMENT_STATE": str(state_dir),
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
    }
    done = subprocess.run(
        ["sh", str(root / "examples" / "two_at_once.sh")],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "the greedy one ended with 9" in done.stdout
    assert "the modest one ended with 0" in done.stdout
