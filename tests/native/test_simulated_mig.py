# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: ANN401 - nvidia-ml-py has no types
"""MIG of simulated GPUs as NVML's and CUDA's clients see it."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pynvml
import pytest

from allotment import ledger
from allotment.devices import faults, loading
from allotment.devices.faults import MigCall, MigFault
from allotment.devices.models import MODELS
from allotment.devices.simulated import MACHINE_VARIABLE, capabilities_path, reset_gpu
from allotment.model.errors import BusyError, StateError

SLICE = Path(__file__).with_name("cuda_slice.py")
MIB = 1 << 20
OUT_OF_MEMORY, NO_DEVICE, UNAVAILABLE = 2, 100, 46

IN_USE = pynvml.NVML_ERROR_IN_USE
INVALID = pynvml.NVML_ERROR_INVALID_ARGUMENT
NO_PERMISSION = pynvml.NVML_ERROR_NO_PERMISSION
NOT_FOUND = pynvml.NVML_ERROR_NOT_FOUND
NOT_SUPPORTED = pynvml.NVML_ERROR_NOT_SUPPORTED
NO_ROOM = pynvml.NVML_ERROR_INSUFFICIENT_RESOURCES

WITH_MIG = pytest.mark.parametrize("key", [key for key, model in MODELS.items() if model.mig])


@pytest.fixture
def nvml_on(machine: Callable[[str], Path]) -> Iterator[Callable[[str], tuple[Any, Path]]]:
    """nvidia-ml-py on a machine: `nvml, path = nvml_on("h100-80gb")`."""
    used: list[Path] = []

    def start(spec: str) -> tuple[Any, Path]:
        path = machine(spec)
        used.append(path)
        with loading.nvml_of(path) as nvml:
            return nvml, path

    yield start
    for path in used:
        loading.leave(path)


@dataclass(frozen=True)
class Gpu:
    """A GPU with MIG on."""

    nvml: Any
    path: Path
    handle: Any

    def cut(self, number: int, start: int | None = None, size: int = 1) -> Any:
        if start is None:
            return self.nvml.nvmlDeviceCreateGpuInstance(self.handle, number)
        placement = pynvml.c_nvmlGpuInstancePlacement_t(start, size)
        return self.nvml.nvmlDeviceCreateGpuInstanceWithPlacement(
            self.handle, number, ctypes.byref(placement)
        )

    def slice(self, number: int, start: int | None = None, size: int = 1) -> tuple[Any, Any, str]:
        """A GPU instance with one compute instance of all its slices, and its UUID."""
        gpu_instance = self.cut(number, start, size)
        slices = {19: 0, 20: 0, 15: 0, 14: 1, 9: 2, 5: 3, 0: 4}[number]
        compute = self.nvml.nvmlGpuInstanceCreateComputeInstance(gpu_instance, slices)
        device = self.nvml.nvmlComputeInstanceGetInfo_v2(compute).device
        return gpu_instance, compute, self.nvml.nvmlDeviceGetUUID(device)

    def place(self, gpu_instance: Any) -> tuple[int, int, int]:
        info = self.nvml.nvmlGpuInstanceGetInfo(gpu_instance)
        return info.id, info.placement.start, info.placement.size


@pytest.fixture
def hopper(nvml_on: Callable[[str], tuple[Any, Path]]) -> Gpu:
    nvml, path = nvml_on("h100-80gb")
    handle = nvml.nvmlDeviceGetHandleByIndex(0)
    assert nvml.nvmlDeviceSetMigMode(handle, 1) == 0
    return Gpu(nvml, path, handle)


@contextlib.contextmanager
def refused(error: int) -> Iterator[None]:
    with pytest.raises(pynvml.NVMLError) as caught:
        yield
    assert caught.value.value == error


class Program:
    """cuda_slice.py in a process of its own."""

    def __init__(self, machine: Path, library: Path, **variables: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, SLICE],
            env={
                **os.environ,
                MACHINE_VARIABLE: str(machine),
                "LD_LIBRARY_PATH": str(library),
                **variables,
            },
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.has = self.answer()

    def answer(self) -> Any:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())

    def give(self, order: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(order + "\n")
        self.process.stdin.flush()

    def ask(self, order: str) -> Any:
        self.give(order)
        return self.answer()

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def program(native_dir: Path) -> Iterator[Callable[..., Program]]:
    begun: list[Program] = []

    def begin(machine: Path, **variables: str) -> Program:
        begun.append(Program(machine, native_dir / "simulated", **variables))
        return begun[-1]

    yield begin
    for each in begun:
        each.end()


# ---- modes ---------------------------------------------------------------------------------------


def test_a_gpu_without_mig_says_so(nvml_on: Callable[[str], tuple[Any, Path]]) -> None:
    nvml, _ = nvml_on("t4")
    handle = nvml.nvmlDeviceGetHandleByIndex(0)
    with refused(NOT_SUPPORTED):
        nvml.nvmlDeviceGetMigMode(handle)
    with refused(NOT_SUPPORTED):
        nvml.nvmlDeviceSetMigMode(handle, 1)
    with refused(NOT_SUPPORTED):
        nvml.nvmlDeviceGetGpuInstanceProfileInfo(handle, 0)


def test_an_ampere_waits_for_its_reset(nvml_on: Callable[[str], tuple[Any, Path]]) -> None:
    nvml, _ = nvml_on("a100-40gb")
    handle = nvml.nvmlDeviceGetHandleByIndex(0)
    assert nvml.nvmlDeviceSetMigMode(handle, 1) == nvml.NVML_ERROR_RESET_REQUIRED
    assert nvml.nvmlDeviceGetMigMode(handle) == [0, 1]
    with refused(NOT_SUPPORTED):
        nvml.nvmlDeviceCreateGpuInstance(handle, 19)
    assert nvml.nvmlDeviceSetMigMode(handle, 0) == 0
    assert nvml.nvmlDeviceGetMigMode(handle) == [0, 0]


def test_a_reset_puts_a_mode_into_force_and_takes_what_was_cut(
    nvml_on: Callable[[str], tuple[Any, Path]], program: Callable[..., Program]
) -> None:
    nvml, path = nvml_on("a100-40gb:2,a30")
    handle = nvml.nvmlDeviceGetHandleByIndex(0)
    user = program(path, CUDA_VISIBLE_DEVICES="1")
    assert user.ask("begin") == 0
    nvml.nvmlDeviceSetMigMode(handle, 1)
    with pytest.raises(BusyError, match="NVLink joins"):
        reset_gpu(path, 0)
    assert nvml.nvmlDeviceGetMigMode(handle) == [0, 1]
    reset_gpu(path, 2)  # nothing joins it to the others
    user.end()
    reset_gpu(path, 0)
    assert nvml.nvmlDeviceGetMigMode(handle) == [1, 1]
    gpu = Gpu(nvml, path, handle)
    _, _, uuid = gpu.slice(9, 4, 4)
    nvml.nvmlDeviceSetMigMode(handle, 0)
    assert nvml.nvmlDeviceGetMigMode(handle) == [1, 0]
    user = program(path, CUDA_VISIBLE_DEVICES=uuid)
    assert user.ask("begin") == 0
    with pytest.raises(BusyError):
        reset_gpu(path, 0)
    user.end()
    reset_gpu(path, 0)
    assert nvml.nvmlDeviceGetMigMode(handle) == [0, 0]
    with refused(NOT_FOUND):
        nvml.nvmlDeviceGetHandleByUUID(uuid)


def test_a_hopper_switches_at_once_unless_it_is_used(
    nvml_on: Callable[[str], tuple[Any, Path]], program: Callable[..., Program]
) -> None:
    nvml, path = nvml_on("h100-80gb")
    handle = nvml.nvmlDeviceGetHandleByIndex(0)
    user = program(path)
    assert user.ask("begin") == 0
    with refused(IN_USE):
        nvml.nvmlDeviceSetMigMode(handle, 1)
    assert nvml.nvmlDeviceGetMigMode(handle) == [0, 0]
    user.end()
    assert nvml.nvmlDeviceSetMigMode(handle, 1) == 0
    assert nvml.nvmlDeviceGetMigMode(handle) == [1, 1]
    assert nvml.nvmlDeviceGetMaxMigDeviceCount(handle) == 7
    gpu = Gpu(nvml, path, handle)
    gpu_instance = gpu.cut(0)
    with refused(IN_USE):
        nvml.nvmlDeviceSetMigMode(handle, 0)
    nvml.nvmlGpuInstanceDestroy(gpu_instance)
    assert nvml.nvmlDeviceSetMigMode(handle, 0) == 0
    assert nvml.nvmlDeviceGetMaxMigDeviceCount(handle) == 0


# ---- profiles ------------------------------------------------------------------------------------


@WITH_MIG
def test_the_profiles_of_a_model(key: str, nvml_on: Callable[[str], tuple[Any, Path]]) -> None:
    nvml, _ = nvml_on(key)
    handle, model = nvml.nvmlDeviceGetHandleByIndex(0), MODELS[key]
    assert model.mig is not None
    shapes = {shape.place: shape for shape in model.mig.shapes}
    for place in range(0x12):
        shape = shapes.get(place)
        if shape is None:
            with refused(NOT_SUPPORTED):
                nvml.nvmlDeviceGetGpuInstanceProfileInfo(handle, place)
            continue
        info = nvml.nvmlDeviceGetGpuInstanceProfileInfo(handle, place)
        assert (info.id, info.sliceCount, info.instanceCount, info.memorySizeMB) == (
            shape.number,
            shape.slices,
            shape.most,
            shape.memory_mib,
        )
        assert info.name == f"MIG {shape.name_on(model.memory_mib)}"
        assert info.multiprocessorCount == shape.multiprocessors
        old = nvml.nvmlDeviceGetGpuInstanceProfileInfo(handle, place, version=1)
        assert (old.id, old.memorySizeMB) == (info.id, info.memorySizeMB)
        assert placements(nvml, handle, info.id) == [(s, shape.size) for s in shape.starts]
    with refused(INVALID):
        nvml.nvmlDeviceGetGpuInstanceProfileInfo(handle, 0x12)


def placements(nvml: Any, handle: Any, number: int) -> list[tuple[int, int]]:
    count = ctypes.c_uint()
    nvml.nvmlDeviceGetGpuInstancePossiblePlacements(handle, number, None, ctypes.byref(count))
    room = (pynvml.c_nvmlGpuInstancePlacement_t * count.value)()
    nvml.nvmlDeviceGetGpuInstancePossiblePlacements(handle, number, room, ctypes.byref(count))
    return [(each.start, each.size) for each in room]


def test_an_old_driver_tells_no_profiles_while_mig_is_off(
    nvml_on: Callable[[str], tuple[Any, Path]], tmp_path: Path
) -> None:
    description = tmp_path / "old.yaml"
    description.write_text("driver: 535.104.05\ngpus: [h100-80gb]\n")
    nvml, _ = nvml_on(str(description))
    handle = nvml.nvmlDeviceGetHandleByIndex(0)
    with refused(NOT_SUPPORTED):
        nvml.nvmlDeviceGetGpuInstanceProfileInfo(handle, 0)
    nvml.nvmlDeviceSetMigMode(handle, 1)
    assert nvml.nvmlDeviceGetGpuInstanceProfileInfo(handle, 0).id == 19


# ---- cutting -------------------------------------------------------------------------------------


def test_where_the_driver_puts_instances_and_what_ids_they_have(hopper: Gpu) -> None:
    assert [hopper.place(hopper.cut(19))[:2] for _ in range(7)] == [
        (13, 6), (11, 4), (12, 5), (7, 0), (8, 1), (9, 2), (10, 3),
    ]  # fmt: skip
    with refused(NO_ROOM):
        hopper.cut(19)


@pytest.mark.parametrize(
    ("number", "expected"),
    [
        pytest.param(14, [(5, 4), (3, 0), (4, 2)], id="2g"),
        pytest.param(9, [(1, 4), (2, 0)], id="3g"),
        pytest.param(5, [(1, 0)], id="4g"),
        pytest.param(0, [(0, 0)], id="7g"),
        pytest.param(20, [(13, 6)], id="1g+me"),
    ],
)
def test_the_driver_s_own_starts(number: int, expected: list[tuple[int, int]], hopper: Gpu) -> None:
    assert [hopper.place(hopper.cut(number))[:2] for _ in expected] == expected
    with refused(NO_ROOM):
        hopper.cut(number)


def test_ids_are_used_again_and_do_not_collide(hopper: Gpu) -> None:
    assert hopper.place(hopper.cut(9, 4, 4)) == (1, 4, 4)
    four = hopper.cut(5, 0, 4)
    assert hopper.place(four) == (2, 0, 4)
    hopper.nvml.nvmlGpuInstanceDestroy(four)
    assert hopper.place(hopper.cut(9, 0, 4)) == (2, 0, 4)


def test_overlap_and_nonsense_are_refused(hopper: Gpu) -> None:
    hopper.cut(14, 2, 2)
    with refused(NO_ROOM):
        hopper.cut(19, 3)
    with refused(NO_ROOM):
        hopper.cut(5, 0, 4)
    with refused(INVALID):
        hopper.cut(14, 1, 2)  # it cannot begin there
    with refused(INVALID):
        hopper.cut(14, 4, 1)  # nor be so small
    with refused(INVALID):
        hopper.cut(14, 4_000_000_000, 2)
    with refused(INVALID):
        hopper.cut(4711)
    assert hopper.nvml.nvmlDeviceGetGpuInstanceRemainingCapacity(hopper.handle, 19) == 5
    assert hopper.nvml.nvmlDeviceGetGpuInstanceRemainingCapacity(hopper.handle, 9) == 1
    assert hopper.nvml.nvmlDeviceGetGpuInstanceRemainingCapacity(hopper.handle, 20) == 1
    hopper.cut(20, 0)
    assert hopper.nvml.nvmlDeviceGetGpuInstanceRemainingCapacity(hopper.handle, 20) == 0
    with refused(NO_ROOM):
        hopper.cut(20, 1)  # the media engines are given out


def test_media_engines_are_one_instance_s_whatever_its_size(
    nvml_on: Callable[[str], tuple[Any, Path]],
) -> None:
    nvml, path = nvml_on("rtx-pro-6000")
    handle = nvml.nvmlDeviceGetHandleByIndex(0)
    nvml.nvmlDeviceSetMigMode(handle, 1)
    gpu = Gpu(nvml, path, handle)
    gpu.cut(21, 0)
    with refused(NO_ROOM):
        gpu.cut(64, 2, 2)
    assert gpu.place(gpu.cut(35, 2, 2)) == (2, 2, 2)


def test_compute_instances_of_a_gpu_instance(hopper: Gpu) -> None:
    nvml = hopper.nvml
    gpu_instance = hopper.cut(9, 4, 4)
    expected = {
        0: (0, 1, 3, "MIG 1c.3g.40gb"),
        1: (1, 2, 1, "MIG 2c.3g.40gb"),
        2: (2, 3, 1, "MIG 3g.40gb"),
    }
    for number in range(9):
        if number not in expected:
            with refused(NOT_SUPPORTED):
                nvml.nvmlGpuInstanceGetComputeInstanceProfileInfo(gpu_instance, number, 0)
            continue
        info = nvml.nvmlGpuInstanceGetComputeInstanceProfileInfo(gpu_instance, number, 0)
        found = (info.id, info.sliceCount, info.instanceCount, info.name)
        assert found == expected[number]
    first = nvml.nvmlGpuInstanceCreateComputeInstance(gpu_instance, 0)
    with refused(NO_ROOM):
        nvml.nvmlGpuInstanceCreateComputeInstance(gpu_instance, 2)
    second = nvml.nvmlGpuInstanceCreateComputeInstance(gpu_instance, 0)
    infos = [nvml.nvmlComputeInstanceGetInfo_v2(each) for each in (first, second)]
    assert [(i.id, i.placement.start, i.placement.size) for i in infos] == [(0, 0, 1), (1, 1, 1)]
    assert nvml.nvmlDeviceGetName(infos[1].device).endswith("HBM3 MIG 1c.3g.40gb")
    attributes = nvml.nvmlDeviceGetAttributes_v2(infos[1].device)
    assert (attributes.gpuInstanceSliceCount, attributes.computeInstanceSliceCount) == (3, 1)
    assert attributes.multiprocessorCount == 20
    with refused(IN_USE):
        nvml.nvmlGpuInstanceDestroy(gpu_instance)
    with refused(NOT_SUPPORTED):  # 7_SLICE_NVL, of no GPU here
        nvml.nvmlGpuInstanceGetComputeInstanceProfileInfo(hopper.cut(19, 0), 8, 0)


def test_a_mig_device_and_its_successor(hopper: Gpu) -> None:
    nvml = hopper.nvml
    gpu_instance, compute, uuid = hopper.slice(19, 6)
    device = nvml.nvmlDeviceGetMigDeviceHandleByIndex(hopper.handle, 0)
    assert nvml.nvmlDeviceGetUUID(device) == uuid
    assert uuid.startswith("MIG-")
    assert nvml.nvmlDeviceIsMigDeviceHandle(device).value == 1
    assert nvml.nvmlDeviceIsMigDeviceHandle(hopper.handle).value == 0
    assert nvml.nvmlDeviceGetName(device) == "NVIDIA H100 80GB HBM3 MIG 1g.10gb"
    assert nvml.nvmlDeviceGetGpuInstanceId(device) == 13
    assert nvml.nvmlDeviceGetComputeInstanceId(device) == 0
    assert nvml.nvmlDeviceGetIndex(device) == 0
    assert nvml.nvmlDeviceGetMemoryInfo(device).total == 9984 * MIB
    assert nvml.nvmlDeviceGetUUID(
        nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(device)
    ) == nvml.nvmlDeviceGetUUID(hopper.handle)
    assert nvml.nvmlDeviceGetUUID(nvml.nvmlDeviceGetHandleByUUID(uuid)) == uuid
    with refused(NOT_SUPPORTED):
        nvml.nvmlDeviceGetTemperature(device, 0)
    with refused(NOT_FOUND):
        nvml.nvmlDeviceGetMigDeviceHandleByIndex(hopper.handle, 1)
    with refused(INVALID):
        nvml.nvmlDeviceGetMigDeviceHandleByIndex(hopper.handle, 7)
    nvml.nvmlComputeInstanceDestroy(compute)
    with refused(NOT_FOUND):
        nvml.nvmlDeviceGetHandleByUUID(uuid)
    with refused(INVALID):
        nvml.nvmlDeviceGetName(device)
    nvml.nvmlGpuInstanceDestroy(gpu_instance)
    with refused(NOT_FOUND):
        nvml.nvmlGpuInstanceGetInfo(gpu_instance)
    again, _, other = hopper.slice(19, 6)
    assert hopper.place(again) == (13, 6, 1)
    assert other != uuid


def test_instances_outlive_the_process_that_made_them(
    nvml_on: Callable[[str], tuple[Any, Path]], native_dir: Path
) -> None:
    nvml, path = nvml_on("h100-80gb")
    code = """
import pynvml as n
n.nvmlInit()
d = n.nvmlDeviceGetHandleByIndex(0)
n.nvmlDeviceSetMigMode(d, 1)
c = n.nvmlGpuInstanceCreateComputeInstance(n.nvmlDeviceCreateGpuInstance(d, 9), 2)
print(n.nvmlDeviceGetUUID(n.nvmlComputeInstanceGetInfo_v2(c).device))
"""
    environment = {
        **os.environ,
        MACHINE_VARIABLE: str(path),
        "LD_LIBRARY_PATH": str(native_dir / "simulated"),
    }
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    handle = nvml.nvmlDeviceGetHandleByIndex(0)
    device = nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, 0)
    assert nvml.nvmlDeviceGetUUID(device) == done.stdout.strip()
    found = (pynvml.c_nvmlGpuInstance_t * 2)()
    count = ctypes.c_uint()
    nvml.nvmlDeviceGetGpuInstances(handle, 9, found, ctypes.byref(count))
    assert count.value == 1
    assert nvml.nvmlGpuInstanceGetInfo(found[0]).id == 1
    assert nvml.nvmlGpuInstanceGetInfo(nvml.nvmlDeviceGetGpuInstanceById(handle, 1)).profileId == 9


def test_a_tenant_may_not_cut(hopper: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = hopper.nvml
    uuid = nvml.nvmlDeviceGetUUID(hopper.handle)
    _, _, own = hopper.slice(19, 0)
    _, _, other = hopper.slice(19, 1)
    monkeypatch.setenv("ALLOTMENT_SIMULATED_DEVICES", uuid)
    with refused(NO_PERMISSION):
        nvml.nvmlDeviceCreateGpuInstance(hopper.handle, 19)
    with refused(NO_PERMISSION):
        nvml.nvmlDeviceSetMigMode(hopper.handle, 0)
    monkeypatch.setenv("ALLOTMENT_SIMULATED_DEVICES", own)
    assert nvml.nvmlDeviceGetUUID(nvml.nvmlDeviceGetHandleByUUID(own)) == own
    with refused(NOT_FOUND):
        nvml.nvmlDeviceGetHandleByUUID(other)
    with refused(NOT_FOUND):
        nvml.nvmlDeviceGetMigDeviceHandleByIndex(hopper.handle, 1)


# ---- a machine that begins so --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "numbers"),
    [
        pytest.param("h100-80gb[mig=1g.10gb*3+3g.40gb]", [9, 19, 19, 19], id="placed"),
        pytest.param("h100-80gb[mig=4g.40gb+3g.40gb@4]", [9, 5], id="ids that collide"),
        pytest.param("h100-80gb[mig=1g.10gb+me+2g.20gb*3]", [14, 14, 14, 20], id="media"),
        pytest.param("h100-80gb[mig=1g.20gb*4]", [15, 15, 15, 15], id="double memory"),
    ],
)
def test_a_machine_can_begin_cut_as_its_driver_would(
    spec: str, numbers: list[int], nvml_on: Callable[[str], tuple[Any, Path]]
) -> None:
    nvml, path = nvml_on(spec)
    gpu = Gpu(nvml, path, nvml.nvmlDeviceGetHandleByIndex(0))
    assert nvml.nvmlDeviceGetMigMode(gpu.handle) == [1, 1]
    devices = [
        nvml.nvmlDeviceGetMigDeviceHandleByIndex(gpu.handle, at) for at in range(len(numbers))
    ]
    assert len({nvml.nvmlDeviceGetUUID(each) for each in devices}) == len(numbers)
    ids = [nvml.nvmlDeviceGetGpuInstanceId(each) for each in devices]
    instances = [nvml.nvmlDeviceGetGpuInstanceById(gpu.handle, each) for each in ids]
    places = [gpu.place(each) for each in instances]
    profiles = [nvml.nvmlGpuInstanceGetInfo(each).profileId for each in instances]
    assert sorted(profiles) == sorted(numbers)
    assert (capabilities_path(path) / f"gpu0/mig/gi{ids[0]}/ci0/access").is_file()
    for device, instance in zip(devices, instances, strict=True):
        compute = nvml.nvmlGpuInstanceGetComputeInstanceById(
            instance, nvml.nvmlDeviceGetComputeInstanceId(device)
        )
        nvml.nvmlComputeInstanceDestroy(compute)
        nvml.nvmlGpuInstanceDestroy(instance)
    again = [
        gpu.cut(number, start, size)
        for number, (_, start, size) in zip(profiles, places, strict=True)
    ]
    # Which of two halves has which id depends on the order of making, and nothing else does.
    assert {gpu.place(each)[1:] for each in again} == {place[1:] for place in places}
    assert {gpu.place(each)[0] for each in again} == set(ids)


# ---- the folder of capabilities ------------------------------------------------------------------


def minors(path: Path) -> dict[str, int]:
    """Each capability file's device minor, by its path."""
    top = capabilities_path(path)
    return {
        str(file.relative_to(top)): int(file.read_text().split()[1])
        for file in top.rglob("*")
        if file.is_file()
    }


def test_the_capabilities_are_those_of_what_is_cut(
    nvml_on: Callable[[str], tuple[Any, Path]],
) -> None:
    nvml, path = nvml_on("h100-80gb:2")
    handle = nvml.nvmlDeviceGetHandleByIndex(1)
    nvml.nvmlDeviceSetMigMode(handle, 1)
    gpu = Gpu(nvml, path, handle)
    system = {"mig/config": 1, "mig/monitor": 2}
    assert minors(path) == system
    gpu_instance, compute, _ = gpu.slice(19, 6)
    first = 3 + 135 + 13 * 9
    assert minors(path) == {
        **system,
        "gpu1/mig/gi13/access": first,
        "gpu1/mig/gi13/ci0/access": first + 1,
    }
    nvml.nvmlComputeInstanceDestroy(compute)
    assert minors(path) == {**system, "gpu1/mig/gi13/access": first}
    nvml.nvmlGpuInstanceDestroy(gpu_instance)
    assert minors(path) == system
    assert not (capabilities_path(path) / "gpu1/mig/gi13").exists()


# ---- faults --------------------------------------------------------------------------------------


def test_calls_fail_on_demand_each_alone(hopper: Gpu) -> None:
    nvml, unknown = hopper.nvml, pynvml.NVML_ERROR_UNKNOWN
    faults.set_mig_fault(hopper.path, 0, MigCall.CREATE_COMPUTE, MigFault(error=unknown))
    gpu_instance = hopper.cut(19)
    with refused(unknown):
        nvml.nvmlGpuInstanceCreateComputeInstance(gpu_instance, 0)
    assert faults.read_faults(hopper.path)[0].mig == {
        MigCall.CREATE_COMPUTE: MigFault(error=unknown)
    }
    faults.clear_faults(hopper.path)
    assert faults.read_faults(hopper.path)[0].mig == {}
    compute = nvml.nvmlGpuInstanceCreateComputeInstance(gpu_instance, 0)
    for call in (MigCall.DESTROY_COMPUTE, MigCall.DESTROY_GPU, MigCall.SET_MODE):
        faults.set_mig_fault(hopper.path, 0, call, MigFault(error=pynvml.NVML_ERROR_TIMEOUT))
    with refused(pynvml.NVML_ERROR_TIMEOUT):
        nvml.nvmlComputeInstanceDestroy(compute)
    with refused(pynvml.NVML_ERROR_TIMEOUT):
        nvml.nvmlGpuInstanceDestroy(gpu_instance)
    with refused(pynvml.NVML_ERROR_TIMEOUT):
        nvml.nvmlDeviceSetMigMode(hopper.handle, 0)
    faults.set_mig_fault(hopper.path, 0, MigCall.RESET, MigFault(error=unknown))
    with pytest.raises(StateError, match="cannot be reset"):
        reset_gpu(hopper.path, 0)


def test_a_call_takes_long_on_demand(hopper: Gpu) -> None:
    faults.set_mig_fault(hopper.path, 0, MigCall.CREATE_GPU, MigFault(slow_us=300_000))
    begun = time.monotonic()
    hopper.cut(19)
    assert time.monotonic() - begun >= 0.3


@pytest.mark.parametrize(
    ("fault", "made"),
    [
        pytest.param(MigFault(ends_before=True), 0, id="before"),
        pytest.param(MigFault(ends_after=True), 1, id="after"),
    ],
)
def test_a_process_ends_at_a_call_on_demand(
    fault: MigFault, made: int, hopper: Gpu, native_dir: Path
) -> None:
    faults.set_mig_fault(hopper.path, 0, MigCall.CREATE_GPU, fault)
    code = "import pynvml as n; n.nvmlInit(); d = n.nvmlDeviceGetHandleByIndex(0); "
    code += "n.nvmlDeviceCreateGpuInstance(d, 19)"
    environment = {
        **os.environ,
        MACHINE_VARIABLE: str(hopper.path),
        "LD_LIBRARY_PATH": str(native_dir / "simulated"),
    }
    done = subprocess.run([sys.executable, "-c", code], env=environment, check=False)
    assert done.returncode == -signal.SIGKILL
    left = hopper.nvml.nvmlDeviceGetGpuInstanceRemainingCapacity(hopper.handle, 19)
    assert left == 7 - made
    # Its lock has gone with it, and the next one puts right what it has left undone.
    faults.clear_faults(hopper.path)
    hopper.cut(19)
    told = {name for name in minors(hopper.path) if name.endswith("access")}
    assert len(told) == 1 + made


# ---- CUDA ----------------------------------------------------------------------------------------


def plain(uuid: str) -> str:
    return uuid.removeprefix("MIG-").removeprefix("GPU-").replace("-", "")


def test_a_program_has_one_mig_device(hopper: Gpu, program: Callable[..., Program]) -> None:
    uuid = hopper.nvml.nvmlDeviceGetUUID(hopper.handle)
    assert program(hopper.path).has == NO_DEVICE  # MIG is on, and nothing is cut
    _, _, small = hopper.slice(19, 6)
    _, _, large = hopper.slice(9, 0, 4)
    expected = {
        "count": 1,
        "name": "NVIDIA H100 80GB HBM3 MIG 3g.40gb",
        "total": 40448 * MIB,
        "multiprocessors": 60,
        "uuid": plain(large),
        "parent": plain(uuid),
    }
    assert program(hopper.path, CUDA_VISIBLE_DEVICES=large).has == expected
    assert program(hopper.path, CUDA_VISIBLE_DEVICES=f"{large},{small}").has == expected
    assert program(hopper.path, CUDA_VISIBLE_DEVICES=f"MIG-{uuid}/2/0").has == expected
    # Of the devices of a GPU the first by ids: 3g at 0 has 2, 1g at 6 has 13.
    for visible in ({}, {"CUDA_VISIBLE_DEVICES": "0"}, {"CUDA_VISIBLE_DEVICES": uuid}):
        assert program(hopper.path, **visible).has == expected
    held = program(hopper.path, ALLOTMENT_SIMULATED_DEVICES=small)
    assert held.has["uuid"] == plain(small)
    for unknown in ("MIG-00000000-0000-0000-0000-000000000000", f"MIG-{uuid}/7/0", "1"):
        assert program(hopper.path, CUDA_VISIBLE_DEVICES=unknown).has == NO_DEVICE


def test_whole_gpus_beside_one_that_is_cut(
    nvml_on: Callable[[str], tuple[Any, Path]], program: Callable[..., Program]
) -> None:
    nvml, path = nvml_on("h100-80gb:3")
    handle = nvml.nvmlDeviceGetHandleByIndex(1)
    nvml.nvmlDeviceSetMigMode(handle, 1)
    _, _, uuid = Gpu(nvml, path, handle).slice(19, 6)
    assert program(path).has["count"] == 2
    assert program(path, CUDA_VISIBLE_DEVICES="0,1,2").has["count"] == 1
    assert program(path, CUDA_VISIBLE_DEVICES="1").has["uuid"] == plain(uuid)


def test_an_instance_s_memory_ends_where_it_does(
    hopper: Gpu, program: Callable[..., Program]
) -> None:
    nvml = hopper.nvml
    _, _, uuid = hopper.slice(19, 6)
    _, _, beside = hopper.slice(19, 5)
    one = program(hopper.path, CUDA_VISIBLE_DEVICES=uuid)
    assert one.ask("begin") == 0
    free, total = one.ask("free")
    assert total == 9984 * MIB
    assert one.ask(f"take {free - 8 * MIB}") == 0
    assert one.ask(f"take {16 * MIB}") == OUT_OF_MEMORY
    device = nvml.nvmlDeviceGetHandleByUUID(uuid)
    assert nvml.nvmlDeviceGetMemoryInfo(device).free == 8 * MIB
    other = program(hopper.path, CUDA_VISIBLE_DEVICES=beside)
    assert other.ask("begin") == 0
    assert other.ask(f"take {16 * MIB}") == 0
    assert nvml.nvmlDeviceGetMemoryInfo(hopper.handle).used > free


def test_processes_are_listed_by_instance(hopper: Gpu, program: Callable[..., Program]) -> None:
    nvml = hopper.nvml
    _, _, first = hopper.slice(19, 6)
    _, _, second = hopper.slice(9, 0, 4)
    users = {}
    for uuid in (first, second):
        users[uuid] = program(hopper.path, CUDA_VISIBLE_DEVICES=uuid)
        assert users[uuid].ask("begin") == 0
    all_of_it = nvml.nvmlDeviceGetComputeRunningProcesses(hopper.handle)
    assert {(each.pid, each.gpuInstanceId, each.computeInstanceId) for each in all_of_it} == {
        (users[first].process.pid, 13, 0),
        (users[second].process.pid, 2, 0),
    }
    device = nvml.nvmlDeviceGetHandleByUUID(second)
    own = nvml.nvmlDeviceGetComputeRunningProcesses(device)
    assert [each.pid for each in own] == [users[second].process.pid]


def test_what_is_used_cannot_be_destroyed(hopper: Gpu, program: Callable[..., Program]) -> None:
    nvml = hopper.nvml
    gpu_instance, compute, uuid = hopper.slice(19, 6)
    user = program(hopper.path, CUDA_VISIBLE_DEVICES=uuid)
    late = program(hopper.path, CUDA_VISIBLE_DEVICES=uuid)
    assert user.ask("begin") == 0
    with refused(IN_USE):
        nvml.nvmlComputeInstanceDestroy(compute)
    with refused(IN_USE):
        nvml.nvmlGpuInstanceDestroy(gpu_instance)
    with refused(IN_USE):
        nvml.nvmlDeviceSetMigMode(hopper.handle, 0)
    user.end()
    nvml.nvmlComputeInstanceDestroy(compute)
    nvml.nvmlGpuInstanceDestroy(gpu_instance)
    hopper.slice(19, 6)
    # It knew the instance that was there before.
    assert late.ask("retain") == UNAVAILABLE


def test_instances_compute_side_by_side(hopper: Gpu, program: Callable[..., Program]) -> None:
    both = [hopper.slice(9, start, 4)[2] for start in (0, 4)]
    programs = [program(hopper.path, CUDA_VISIBLE_DEVICES=uuid) for uuid in both]
    assert [each.ask("begin") for each in programs] == [0, 0]
    for each in programs:
        each.give("run 600")
    side_by_side = max(each.answer() for each in programs)
    same = [program(hopper.path, CUDA_VISIBLE_DEVICES=both[0]) for _ in range(2)]
    assert [each.ask("begin") for each in same] == [0, 0]
    for each in same:
        each.give("run 600")
    in_turns = max(each.answer() for each in same)
    assert in_turns > 1.6 * side_by_side


def test_a_process_in_an_instance_counts_against_its_share(
    hopper: Gpu, program: Callable[..., Program], native_dir: Path, tmp_path: Path
) -> None:
    """The shim knows a MIG device by its UUID like any other, and holds the share to its part."""
    _, _, uuid = hopper.slice(9, 0, 4)
    folder = tmp_path / "share"
    folder.mkdir()
    limit = ledger.DevicePolicy(uuid=uuid, memory_limit=2048 * MIB, context_bytes=520 * MIB)
    ledger.create(folder, ledger.Policy(share_id="s", share_name="s", devices=(limit,)))
    tenant = program(
        hopper.path,
        LD_PRELOAD=str(native_dir / "liballotment-shim.so"),
        ALLOTMENT_SHARE=str(folder),
        ALLOTMENT_SIMULATED_DEVICES=uuid,
    )
    assert (tenant.has["count"], tenant.has["uuid"]) == (1, plain(uuid))
    assert tenant.has["total"] == 2048 * MIB
    assert tenant.ask("begin") == 0
    assert tenant.ask(f"take {1024 * MIB}") == 0
    assert tenant.ask(f"take {1024 * MIB}") == OUT_OF_MEMORY
    (use,) = ledger.read(folder).devices
    assert use.used == (1024 + 520) * MIB
