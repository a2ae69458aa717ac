# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: ANN401 - nvidia-ml-py has no types
"""MIG of simulated GPUs as NVML's clients see it: modes, profiles, what is cut and how."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pynvml
import pytest
from mig_gpu import Gpu, Program, minors, refused

from allotment.devices.models import MODELS
from allotment.devices.packing import MACHINE_VARIABLE
from allotment.devices.simulated import capabilities_path, reset_gpu
from allotment.model.errors import BusyError

IN_USE = pynvml.NVML_ERROR_IN_USE
INVALID = pynvml.NVML_ERROR_INVALID_ARGUMENT
NO_PERMISSION = pynvml.NVML_ERROR_NO_PERMISSION
NOT_FOUND = pynvml.NVML_ERROR_NOT_FOUND
NOT_SUPPORTED = pynvml.NVML_ERROR_NOT_SUPPORTED
NO_ROOM = pynvml.NVML_ERROR_INSUFFICIENT_RESOURCES
MIB = 1 << 20

WITH_MIG = pytest.mark.parametrize("key", [key for key, model in MODELS.items() if model.mig])


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
    with pytest.raises(BusyError, match="joined to it by NVLink"):
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
