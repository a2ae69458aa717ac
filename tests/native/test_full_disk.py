# SPDX-License-Identifier: Apache-2.0
"""A simulated machine on a disk without room: errors, never SIGBUS."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from allotment.devices import layout
from allotment.devices.packing import identity, pack, pack_mig
from allotment.devices.simulated import parse_spec
from allotment.shares.run.namespace import can_unshare

Allot = Any  # tests/conftest.py: CommandLine

pytestmark = pytest.mark.skipif(not can_unshare(), reason="mounting a tmpfs needs CAP_SYS_ADMIN")


def on_tmpfs(allot: Allot, size: int, script: str) -> subprocess.CompletedProcess[str]:
    """Run a script with its state folder on a file system of so many bytes."""
    mount = f'mount -t tmpfs -o size={size} none "$STATE" && {script}'
    return subprocess.run(
        ["unshare", "--mount", "sh", "-c", mount],
        env=allot.environment(STATE=str(allot.state), PYTHON=sys.executable),
        capture_output=True,
        text=True,
        check=False,
        timeout=50,
    )


def test_a_machine_that_does_not_fit_is_not_made(allot: Allot) -> None:
    script = (
        '"$PYTHON" -m allotment devices --simulated t4; echo "$?"; find "$STATE/simulated" -type f'
    )
    done = on_tmpfs(allot, 64 << 10, script)
    assert done.stdout == "6\n", done.stdout + done.stderr
    assert "No space left on device" in done.stderr
    assert "hint: it needs 6 MiB" in done.stderr


def test_a_context_whose_ring_does_not_fit_is_out_of_memory(allot: Allot, native_dir: Path) -> None:
    described = parse_spec("t4")
    name = identity(pack(described), pack_mig(described))
    machine = allot.state / "simulated" / name / "machine"
    script = (
        '"$PYTHON" -m allotment devices --simulated t4 >/dev/null && '
        'dd if=/dev/zero of="$STATE/full" bs=4k status=none; '
        f"LD_LIBRARY_PATH={native_dir / 'simulated'} ALLOTMENT_SIMULATED_MACHINE={machine} "
        '"$PYTHON" -m allotment burn --memory 64Mi --seconds 0.1; echo "$?"'
    )
    done = on_tmpfs(allot, layout.MACHINE_RINGS_AT + (256 << 10), script)
    assert "CUDA_ERROR_OUT_OF_MEMORY from cuDevicePrimaryCtxRetain" in done.stdout, done.stderr
    assert done.stdout.endswith("\n9\n"), done.stdout + done.stderr
