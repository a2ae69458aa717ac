# SPDX-License-Identifier: Apache-2.0
"""The simulated NVML names a process by its number in the caller's pid namespace."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from allotment.shares.run.namespace import can_unshare

pytestmark = [
    pytest.mark.skipif(not can_unshare(), reason="a pid namespace of its own needs CAP_SYS_ADMIN"),
    pytest.mark.timeout(240),
]

MIB = 1 << 20
OWN_NAMESPACE = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child")

# Takes memory and computes until its input ends; says by what number it knows itself.
HOLDER = """
import ctypes, os, sys
cuda = ctypes.CDLL("libcuda.so.1")
def call(name, *arguments):
    result = getattr(cuda, name)(*arguments)
    assert result == 0, (name, result)
context, module, function = (ctypes.c_void_p() for _ in range(3))
memory, value = ctypes.c_ulonglong(), ctypes.c_ulonglong(600 * 10**9)
call("cuInit", 0)
call("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
call("cuCtxSetCurrent", context)
call("cuMemAlloc_v2", ctypes.byref(memory), ctypes.c_size_t(int(sys.argv[1]) << 20))
ptx = b".version 7.0\\n.target sm_50\\n.address_size 64\\n" \\
      b".visible .entry allot_spin(.param .u64 n)\\n{ ret; }\\n"
call("cuModuleLoadData", ctypes.byref(module), ptx)
call("cuModuleGetFunction", ctypes.byref(function), module, b"allot_spin")
parameters = (ctypes.c_void_p * 1)(ctypes.addressof(value))
call("cuLaunchKernel", function, 1, 1, 1, 1, 1, 1, 0, None, parameters, None)
print(os.getpid(), flush=True)
sys.stdin.read()
os._exit(0)
"""

# Prints who is on the first GPU, twice, since what was found out is kept; and who computes there.
LOOK = """
import json, time
import pynvml
pynvml.nvmlInit()
device = pynvml.nvmlDeviceGetHandleByIndex(0)
for _ in range(2):
    processes = pynvml.nvmlDeviceGetComputeRunningProcesses(device)
    used = sorted([each.pid, each.usedGpuMemory >> 20] for each in processes)
busy = []
deadline = time.monotonic() + 30
while len(busy) < len(used) and time.monotonic() < deadline:
    time.sleep(0.1)
    samples = pynvml.nvmlDeviceGetProcessUtilization(device, 0) if used else []
    busy = sorted({each.pid for each in samples})
print(json.dumps([used, busy]))
"""

Seen = tuple[dict[int, int], list[int]]
Look = Callable[..., Seen]


@pytest.fixture
def environment(machine: Callable[[str], Path], native_dir: Path) -> dict[str, str]:
    return {
        **os.environ,
        "ALLOTMENT_SIMULATED_MACHINE": str(machine("a100-80gb")),
        "LD_LIBRARY_PATH": str(native_dir / "simulated"),
    }


@pytest.fixture
def hold(environment: dict[str, str]) -> Iterator[Callable[..., tuple[int, int]]]:
    """Starts a program with so many MiB; returns its number here and the one that it knows."""
    started: list[subprocess.Popen[str]] = []

    def start(mebibytes: int, *wrapper: str) -> tuple[int, int]:
        program = subprocess.Popen(
            [*wrapper, sys.executable, "-c", HOLDER, str(mebibytes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        started.append(program)
        assert program.stdout is not None
        inside = int(program.stdout.readline())
        if not wrapper:
            return program.pid, inside
        children = Path(f"/proc/{program.pid}/task/{program.pid}/children").read_text("ascii")
        return int(children), inside

    yield start
    for program in started:
        program.send_signal(signal.SIGKILL)
        program.communicate()


@pytest.fixture
def look(environment: dict[str, str]) -> Look:
    """Returns who is seen on the GPU, with their MiB, and who computes there."""

    def run(*wrapper: str) -> Seen:
        done = subprocess.run(
            [*wrapper, sys.executable, "-c", LOOK],
            capture_output=True,
            text=True,
            check=False,
            timeout=90,
            env=environment,
        )
        assert done.returncode == 0, done.stderr
        used, busy = json.loads(done.stdout)
        assert len({pid for pid, _ in used}) == len(used), "one is there twice"
        return dict(used), busy

    return run


def test_a_process_of_an_inner_namespace_has_its_number_here(
    hold: Callable[..., tuple[int, int]], look: Look
) -> None:
    first, inside = hold(1000, *OWN_NAMESPACE)
    second, also_inside = hold(2000, *OWN_NAMESPACE)
    ours, _ = hold(3000)
    assert inside == also_inside == 1
    used, busy = look()
    assert set(used) == {first, second, ours}
    assert used[first] + 1000 == used[second]
    assert used[second] + 1000 == used[ours]
    assert busy == sorted(used)


def test_who_cannot_be_seen_from_a_namespace_is_left_out(
    hold: Callable[..., tuple[int, int]], look: Look
) -> None:
    first, inside = hold(1000, *OWN_NAMESPACE)
    hold(2000, *OWN_NAMESPACE)
    hold(3000)
    assert look(*OWN_NAMESPACE) == ({}, [])
    used, busy = look("nsenter", "--target", str(first), "--pid", "--mount")
    assert (list(used), busy) == ([inside], [inside])
    assert 1000 <= used[inside] < 2000
