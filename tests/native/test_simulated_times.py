# SPDX-License-Identifier: Apache-2.0
"""The simulated machine's own account of GPU time, against what programs were told to use."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from allotment.devices.packing import read_machine
from allotment.devices.simulated import GpuTimes, ProcessTime, gpu_times
from allotment.model.errors import StateError

MS = 1_000_000
# Launches kernels of the times given on standard input, one line each, and says when they are over.
PROGRAM = """
import ctypes, sys
cuda = ctypes.CDLL("libcuda.so.1")
def call(name, *arguments):
    result = getattr(cuda, name)(*arguments)
    assert result == 0, (name, result)
context, module, function = (ctypes.c_void_p() for _ in range(3))
call("cuInit", 0)
call("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
call("cuCtxSetCurrent", context)
ptx = b".version 7.0\\n.target sm_50\\n.address_size 64\\n" \\
      b".visible .entry allot_spin(.param .u64 n)\\n{ ret; }\\n"
call("cuModuleLoadData", ctypes.byref(module), ptx)
call("cuModuleGetFunction", ctypes.byref(function), module, b"allot_spin")
print("ready", flush=True)
for line in sys.stdin:
    for word in line.split():
        value = ctypes.c_ulonglong(int(word))
        parameters = (ctypes.c_void_p * 1)(ctypes.addressof(value))
        call("cuLaunchKernel", function, 1, 1, 1, 1, 1, 1, 0, None, parameters, None)
    print("launched", flush=True)
    call("cuCtxSynchronize")
    print("done", flush=True)
"""


@pytest.fixture
def path(machine: Callable[[str], Path]) -> Path:
    return machine("t4:2")


@pytest.fixture
def start(path: Path, native_dir: Path) -> Iterator[Callable[[], subprocess.Popen[str]]]:
    """Starts the program above, ready to launch."""
    started: list[subprocess.Popen[str]] = []

    def make() -> subprocess.Popen[str]:
        program = subprocess.Popen(
            [sys.executable, "-c", PROGRAM],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={
                **os.environ,
                "ALLOTMENT_SIMULATED_MACHINE": str(path),
                "LD_LIBRARY_PATH": str(native_dir / "simulated"),
            },
        )
        started.append(program)
        assert answer(program) == "ready"
        return program

    yield make
    for program in started:
        program.kill()
        program.communicate()


def answer(program: subprocess.Popen[str]) -> str:
    assert program.stdout is not None
    return program.stdout.readline().strip()


def launch(program: subprocess.Popen[str], *nanoseconds: int) -> None:
    assert program.stdin is not None
    program.stdin.write(" ".join(map(str, nanoseconds)) + "\n")
    program.stdin.flush()
    assert answer(program) == "launched"


def times_of(path: Path) -> GpuTimes:
    return gpu_times(path)[read_machine(path).devices[0].uuid]


def of_process(times: GpuTimes, program: subprocess.Popen[str]) -> ProcessTime:
    return next(row for row in times.processes if row.pid == program.pid)


def test_each_process_has_what_its_kernels_took(
    path: Path, start: Callable[[], subprocess.Popen[str]]
) -> None:
    one, other = start(), start()
    launch(one, 3 * MS, 5 * MS)
    launch(other, 7 * MS)
    assert answer(one) == answer(other) == "done"
    times = times_of(path)
    assert of_process(times, one).busy_ns == 8 * MS
    assert of_process(times, other).busy_ns == 7 * MS
    assert times.busy_ns == 15 * MS
    assert of_process(times, one).memory_bytes > 0
    idle = gpu_times(path)[read_machine(path).devices[1].uuid]
    assert idle.busy_ns == 0


def test_an_idle_reader_sees_the_present(
    path: Path, start: Callable[[], subprocess.Popen[str]]
) -> None:
    # The program sleeps until its kernel is over; nobody but the reader moves the engine.
    program = start()
    launch(program, 60_000 * MS)
    first = times_of(path)
    time.sleep(0.05)
    second = times_of(path)
    passed = second.now_ns - first.now_ns
    assert passed >= 50 * MS
    assert of_process(second, program).busy_ns - of_process(first, program).busy_ns == passed
    assert second.busy_ns - first.busy_ns == passed


def test_an_ended_process_is_still_told_of(
    path: Path, start: Callable[[], subprocess.Popen[str]]
) -> None:
    times_of(path)  # the reader's own place is taken before
    program = start()
    launch(program, 3 * MS)
    assert answer(program) == "done"
    assert of_process(times_of(path), program).lives
    program.kill()
    program.wait()
    # The reader looks for dead ones when it asks for memory, as NVML does.
    row = of_process(times_of(path), program)
    assert not row.lives
    assert row.busy_ns == 3 * MS
    assert row.memory_bytes == 0


def test_one_process_by_its_number(
    path: Path, native_dir: Path, start: Callable[[], subprocess.Popen[str]]
) -> None:
    program = start()
    launch(program, 4 * MS)
    assert answer(program) == "done"
    code = """
import ctypes, sys
nvml = ctypes.CDLL(sys.argv[1])
busy = ctypes.c_ulonglong()
print(nvml.allotSimulatedProcessBusy(int(sys.argv[2]), 0, ctypes.byref(busy)), busy.value)
print(nvml.allotSimulatedProcessBusy(1, 0, ctypes.byref(busy)))
print(nvml.allotSimulatedProcessBusy(int(sys.argv[2]), 7, ctypes.byref(busy)))
"""
    library = native_dir / "simulated" / "libnvidia-ml.so.1"
    done = subprocess.run(
        [sys.executable, "-c", code, library, str(program.pid)],
        env={**os.environ, "ALLOTMENT_SIMULATED_MACHINE": str(path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == ["0", str(4 * MS), "-3", "-19"]


def test_a_file_that_is_no_machine_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "machine"
    path.write_bytes(b"")
    with pytest.raises(StateError):
        gpu_times(path)
