# SPDX-License-Identifier: Apache-2.0
"""The length of a GPU's time slices: as nvidia-smi sets it, and as simulated GPUs keep it."""

import os
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from rounds import undisturbed

from allotment.devices import layout
from allotment.devices.packing import read_machine
from allotment.devices.simulated import gpu_times
from allotment.devices.timeslices import (
    TimeSlice,
    set_time_slice,
)
from allotment.model.errors import NotFoundError, PrerequisiteError

MS = 1_000_000
PROGRAM = """
import ctypes, sys
cuda = ctypes.CDLL("libcuda.so.1")
def call(name, *arguments):
    assert getattr(cuda, name)(*arguments) == 0, name
context, module, function = (ctypes.c_void_p() for _ in range(3))
call("cuInit", 0)
call("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
call("cuCtxSetCurrent", context)
ptx = b".version 7.0\\n.target sm_50\\n.address_size 64\\n" \\
      b".visible .entry allot_spin(.param .u64 n)\\n{ ret; }\\n"
call("cuModuleLoadData", ctypes.byref(module), ptx)
call("cuModuleGetFunction", ctypes.byref(function), module, b"allot_spin")
value = ctypes.c_ulonglong(int(sys.argv[1]))
parameters = (ctypes.c_void_p * 1)(ctypes.addressof(value))
call("cuLaunchKernel", function, 1, 1, 1, 1, 1, 1, 0, None, parameters, None)
print("launched", flush=True)
call("cuCtxSynchronize")
"""


def slice_us(machine: Path, uuid: str) -> int:
    """The length of a GPU's turns in the machine file."""
    facts = read_machine(machine)
    number = [device.uuid for device in facts.devices].index(uuid)
    at = layout.MACHINE_FIELDS["gpus"][0] + number * layout.GPU_SIZE
    with machine.open("rb") as file:
        file.seek(at + layout.GPU_FIELDS["timeslice_us"][0])
        (own_us,) = struct.unpack("<I", file.read(4))
    return int(own_us) or facts.timeslice_us


@pytest.fixture
def start(native_dir: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts a program with one long kernel."""
    started: list[subprocess.Popen[str]] = []

    def make(path: Path, kernel_ns: int) -> subprocess.Popen[str]:
        program = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(kernel_ns)],
            stdout=subprocess.PIPE,
            text=True,
            env={
                **os.environ,
                "ALLOTMENT_SIMULATED_MACHINE": str(path),
                "LD_LIBRARY_PATH": str(native_dir / "simulated"),
            },
        )
        started.append(program)
        assert program.stdout is not None
        assert program.stdout.readline() == "launched\n"
        return program

    yield make
    for program in started:
        program.kill()
        program.communicate()


def spread(path: Path, *, within_s: float) -> int:
    """How far the two programs' times ever are apart, in nanoseconds."""
    uuid = read_machine(path).devices[0].uuid
    begin = {each.pid: each.busy_ns for each in gpu_times(path)[uuid].processes if each.lives}
    assert len(begin) == 2
    apart = []
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        had = [
            each.busy_ns - begin[each.pid]
            for each in gpu_times(path)[uuid].processes
            if each.pid in begin
        ]
        apart.append(had[0] - had[1])
        time.sleep(0.005)
    return max(apart) - min(apart)


@pytest.mark.measured
def test_a_longer_slice_is_a_longer_turn(
    tmp_path: Path,
    machine: Callable[[str], Path],
    start: Callable[..., subprocess.Popen[str]],
) -> None:
    description = tmp_path / "machine.yaml"
    description.write_text("timeslice: 40ms\ngpus: [t4]\n")
    path = machine(str(description))
    uuid = read_machine(path).devices[0].uuid
    for _ in range(2):
        start(path, 60_000 * MS)

    def found(length: TimeSlice) -> int:
        set_time_slice(uuid, length, machine=path)
        time.sleep(0.4)
        return spread(path, within_s=1.2)

    # Turn by turn, one is ahead by half a slice, then the other.
    assert found(TimeSlice.LONG) > 100 * MS
    short = undisturbed(partial(found, TimeSlice.SHORT), lambda apart: apart < 40 * MS)
    assert short < 40 * MS


def test_each_gpu_has_its_own(machine: Callable[[str], Path]) -> None:
    path = machine("t4:2")
    first, second = (device.uuid for device in read_machine(path).devices)
    lengths = [*TimeSlice, TimeSlice.DEFAULT]
    seen = []
    for length in lengths:
        set_time_slice(second, length, machine=path)
        seen.append(slice_us(path, second))
    assert seen == [2000, 1000, 4000, 8000, 2000]
    assert slice_us(path, first) == 2000
    with pytest.raises(NotFoundError, match="GPU-0"):
        set_time_slice("GPU-0", TimeSlice.LONG, machine=path)


@pytest.mark.parametrize(("length", "number"), list(zip(TimeSlice, range(4), strict=True)))
def test_real_gpus_are_set_by_nvidia_smi(tmp_path: Path, length: TimeSlice, number: int) -> None:
    said = tmp_path / "said"
    program = tmp_path / "nvidia-smi"
    program.write_text(f'#!/bin/sh\necho "$@" > {said}\n')
    program.chmod(0o755)
    set_time_slice("GPU-1", length, command=(str(program),))
    assert said.read_text().split() == [
        "compute-policy",
        "-i",
        "GPU-1",
        f"--set-timeslice={number}",
    ]


def test_what_nvidia_smi_says_is_told(tmp_path: Path) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho Not Supported\nexit 3\n")
    program.chmod(0o755)
    with pytest.raises(PrerequisiteError, match="GPU-1 to long: Not Supported"):
        set_time_slice("GPU-1", TimeSlice.LONG, command=(str(program),))
    with pytest.raises(PrerequisiteError, match="is missing; it is needed"):
        set_time_slice("GPU-1", TimeSlice.LONG, command=(str(tmp_path / "none"),))
