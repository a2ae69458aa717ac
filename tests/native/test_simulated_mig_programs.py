# SPDX-License-Identifier: Apache-2.0

"""Programs of CUDA on simulated MIG devices: what they see, have, and may not take away."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pynvml
import pytest
from mig_gpu import Gpu, Program, refused

from allotment import ledger
from allotment.devices.packing import MACHINE_VARIABLE

MIB = 1 << 20
OUT_OF_MEMORY, NO_DEVICE, UNAVAILABLE = 2, 100, 46
IN_USE = pynvml.NVML_ERROR_IN_USE


#: Prints the MIG devices of the GPU that the named one is part of.
LIST_INSTANCES = """
import sys
import pynvml

pynvml.nvmlInit()
own = pynvml.nvmlDeviceGetHandleByUUID(sys.argv[1])
gpu = pynvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(own)
for index in range(7):
    try:
        print(pynvml.nvmlDeviceGetUUID(pynvml.nvmlDeviceGetMigDeviceHandleByIndex(gpu, index)))
    except pynvml.NVMLError_NotFound:
        pass
"""


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


@pytest.mark.measured
def test_instances_compute_side_by_side(hopper: Gpu, program: Callable[..., Program]) -> None:
    both = [hopper.slice(9, start, 4)[2] for start in (0, 4)]
    apart = [program(hopper.path, CUDA_VISIBLE_DEVICES=uuid) for uuid in both]
    same = [program(hopper.path, CUDA_VISIBLE_DEVICES=both[0]) for _ in range(2)]
    assert [each.ask("begin") for each in (*apart, *same)] == [0, 0, 0, 0]

    def longest(programs: list[Program]) -> float:
        for each in programs:
            each.give("run 600")
        return max(float(each.answer()) for each in programs)

    # A busy machine makes some runs longer, or lets one of the programs begin late.
    side_by_side = min(longest(apart) for _ in range(3))
    in_turns = statistics.median(longest(same) for _ in range(3))
    assert in_turns > 1.6 * side_by_side


def test_nvml_shows_a_share_no_other_instances(
    hopper: Gpu, native_dir: Path, tmp_path: Path
) -> None:
    (_, _, own), (_, _, other) = hopper.slice(9, 0, 4), hopper.slice(9, 4, 4)
    limit = ledger.DevicePolicy(uuid=own, memory_limit=2048 * MIB, context_bytes=520 * MIB)
    ledger.create(tmp_path, ledger.LedgerPolicy(share_id="s", share_name="s", devices=(limit,)))
    machine = {
        **os.environ,
        MACHINE_VARIABLE: str(hopper.path),
        "LD_LIBRARY_PATH": str(native_dir / "simulated"),
    }
    share = {
        "LD_PRELOAD": str(native_dir / "liballotment-shim.so"),
        "ALLOTMENT_SHARE": str(tmp_path),
    }

    def listed(environment: dict[str, str]) -> list[str]:
        done = subprocess.run(
            [sys.executable, "-c", LIST_INSTANCES, own],
            env=environment,
            check=True,
            capture_output=True,
            text=True,
        )
        return done.stdout.split()

    assert sorted(listed(machine)) == sorted([own, other])
    assert listed(machine | share) == [own]


def test_a_process_in_an_instance_counts_against_its_share(
    hopper: Gpu, program: Callable[..., Program], native_dir: Path, tmp_path: Path
) -> None:
    """The shim knows a MIG device by its UUID like any other, and holds the share to its part."""
    _, _, uuid = hopper.slice(9, 0, 4)
    folder = tmp_path / "share"
    folder.mkdir()
    limit = ledger.DevicePolicy(uuid=uuid, memory_limit=2048 * MIB, context_bytes=520 * MIB)
    ledger.create(folder, ledger.LedgerPolicy(share_id="s", share_name="s", devices=(limit,)))
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
