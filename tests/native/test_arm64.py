# SPDX-License-Identifier: Apache-2.0
"""The arm64 libraries of the wheel hold a share's limit, under emulation on an x86-64 machine."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import build_native
from allotment import ledger
from allotment.devices.packing import read_machine

ARCH = "aarch64"
SYSTEM = Path("/usr/aarch64-linux-gnu")
HOST = build_native.NATIVE / "tests" / "arm64" / "host_share.c"
LIMIT = 1 << 30


@pytest.fixture
def emulator() -> str:
    """The command that runs arm64 programs, or a skip."""
    if platform.machine() == ARCH:
        pytest.skip("this machine is arm64: every other test is this one")
    found = shutil.which("qemu-aarch64") or shutil.which("qemu-aarch64-static")
    if found is None or not (SYSTEM / "lib" / "libc.so.6").exists():
        pytest.skip("no arm64 here (Debian: apt-get install qemu-user libc6-arm64-cross)")
    return found


@pytest.mark.thorough
@pytest.mark.timeout(300)  # builds four libraries, unless ziglang remembers them
def test_a_share_is_exact(emulator: str, machine: Callable[[str], Path], tmp_path: Path) -> None:
    build_native.build(ARCH, tmp_path)
    libraries = tmp_path / ARCH
    host = tmp_path / "host"
    subprocess.run(
        [
            *(sys.executable, "-m", "ziglang", "cc", "-target", f"{ARCH}-linux-gnu.2.17"),
            *("-std=c11", "-D_GNU_SOURCE", "-O1", "-UNDEBUG", "-I", "include"),
            *(str(HOST), "-ldl", "-o", str(host)),
        ],
        cwd=build_native.NATIVE,
        check=True,
    )
    path = machine("t4")
    (device,) = read_machine(path).devices
    share = tmp_path / "share"
    share.mkdir()
    limit = ledger.DevicePolicy(
        uuid=device.uuid, memory_limit=LIMIT, context_bytes=device.context_bytes
    )
    ledger.create(share, ledger.LedgerPolicy(share_id="arm", share_name="arm", devices=(limit,)))
    done = subprocess.run(
        [
            *(emulator, "-L", str(SYSTEM)),
            *("-E", f"LD_PRELOAD={libraries / 'liballotment-shim.so'}"),
            *("-E", f"LD_LIBRARY_PATH={libraries / 'simulated'}"),
            str(host),
        ],
        env={
            **os.environ,
            "ALLOTMENT_SHARE": str(share),
            "ALLOTMENT_SIMULATED_MACHINE": str(path),
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr
    (use,) = ledger.read(share).devices
    assert use.refusals == 1
    assert use.peak <= LIMIT
