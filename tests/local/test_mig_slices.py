# SPDX-License-Identifier: Apache-2.0
"""`allotment.devices.mig_slices`: what a driver tells of MIG devices, and their device nodes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sized
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest

from allotment.agent.inventory import GpuWatch
from allotment.cli.mig import mig_rows
from allotment.devices.mig import GpuMig, read_mig
from allotment.devices.mig_machine import MigDevice, MigMachine
from allotment.devices.mig_slices import capability_nodes, mig_slices
from allotment.devices.simulated import capabilities_path, machine_path
from allotment.devices.watching import Look, NvmlSession
from allotment.model.devices import Device
from allotment.model.errors import NoDevicesError
from allotment.model.mig import MigGpu
from allotment.model.pods import ContainerKind, Owner, PodUid
from allotment.model.requests import whole_devices
from allotment.model.shares import Injection, ShareId
from allotment.model.structs import replace
from allotment.modes.mig.journal import Journal, without_own
from allotment.modes.mig.slices import Slices
from allotment.shares.folders import StateFolder
from allotment.shares.placing import ShareOrder
from allotment.shares.pods import NodeFolders, NodePolicy, PodShares

SPEC = "h100-80gb[mig=1g.10gb*2+3g.40gb],h100-80gb"


@contextmanager
def opened(path: Path) -> Iterator[NvmlSession]:
    session = NvmlSession(path)
    session.open()
    try:
        yield session
    finally:
        session.close()


def slices(session: NvmlSession, index: int = 0) -> tuple[Device, ...]:
    look = session.look(index)
    assert isinstance(look, Look)
    return look.slices


def test_mig_devices_are_told_with_their_gpu(machine: Callable[[str], Path]) -> None:
    with opened(machine(SPEC)) as session:
        whole = session.look(0)
        assert isinstance(whole, Look)
        assert whole.device.mig
        found = whole.slices
        assert slices(session, 1) == ()
        nvml = session.nvml
        handle = nvml.nvmlDeviceGetHandleByIndex(0)
        by_number = [
            str(nvml.nvmlDeviceGetUUID(nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, number)))
            for number in range(3)
        ]
    assert [each.uuid for each in found] == by_number
    assert [each.index_text for each in found] == ["0:0", "0:1", "0:2"]
    assert sorted(each.name.rpartition(" ")[2] for each in found) == [
        "1g.10gb",
        "1g.10gb",
        "3g.40gb",
    ]
    for each in found:
        assert each.slice_of is not None
        assert each.slice_of.gpu == whole.device.uuid
        assert not each.mig
        assert each.pci_bus_id == whole.device.pci_bus_id
        assert 0 < each.memory_bytes < whole.device.memory_bytes
        assert each.allottable_bytes == each.memory_bytes
        assert 0 < each.sm_count < whole.device.sm_count


@pytest.mark.parametrize("read", [read_mig, mig_slices])
def test_a_slice_removed_while_it_is_read_fails_nobody(
    machine: Callable[[str], Path], read: Callable[[ModuleType, object, object], object]
) -> None:
    """Another process may remove one between NVML's list and a query of what was listed."""
    with opened(machine(SPEC)) as session:
        nvml = ModuleType("nvml")
        vars(nvml).update(vars(session.nvml))

        def removes(compute: object) -> object:
            vars(nvml)["nvmlComputeInstanceGetInfo"] = session.nvml.nvmlComputeInstanceGetInfo
            info = session.nvml.nvmlComputeInstanceGetInfo(compute)
            session.nvml.nvmlComputeInstanceDestroy(compute)
            return info

        vars(nvml)["nvmlComputeInstanceGetInfo"] = removes
        whole = session.look(0)
        assert isinstance(whole, Look)
        handle = nvml.nvmlDeviceGetHandleByIndex(0)
        found = read(nvml, handle, whole.device)
        if isinstance(found, MigGpu):
            found = [each for each in found.instances if each.compute_instance is not None]
        assert isinstance(found, Sized)
        assert len(found) == 2


def test_mig_devices_come_and_go(machine: Callable[[str], Path]) -> None:
    with opened(machine(SPEC)) as session:
        before = slices(session)
        gone = next(each for each in before if each.name.endswith("1g.10gb"))
        assert gone.slice_of is not None
        driver = GpuMig(session.nvml, gone.slice_of.gpu)
        driver.destroy_compute_instances(gone.slice_of.gpu_instance)
        driver.destroy_gpu_instance(gone.slice_of.gpu_instance)
        assert driver.users(gone.slice_of.gpu_instance) == ()
        less = slices(session)
        assert {each.uuid for each in less} == {each.uuid for each in before} - {gone.uuid}
        profile = next(each for each in driver.look().profiles if each.name == "1g.10gb")
        made = driver.create_gpu_instance(profile, profile.starts[0])
        # A GPU instance alone can be given to nobody.
        assert slices(session) == less
        uuid = driver.create_compute_instance(made, profile).uuid
        assert {each.uuid for each in slices(session)} == {uuid, *(each.uuid for each in less)}
        assert uuid != gone.uuid


def test_parts_of_an_instance_are_named_as_nvidia_does(machine: Callable[[str], Path]) -> None:
    with opened(machine("h100-80gb[mig=on]")) as session:
        nvml = session.nvml
        handle = nvml.nvmlDeviceGetHandleByIndex(0)
        driver = GpuMig(nvml, str(nvml.nvmlDeviceGetUUID(handle)))
        profile = next(each for each in driver.look().profiles if each.name == "3g.40gb")
        inside = nvml.nvmlDeviceGetGpuInstanceById(
            handle, driver.create_gpu_instance(profile, profile.starts[0])
        )
        smallest = nvml.nvmlGpuInstanceGetComputeInstanceProfileInfo(inside, 0, 0, 1)
        for _ in range(2):
            nvml.nvmlGpuInstanceCreateComputeInstance(inside, smallest.id)
        found = slices(session)
    assert [each.slice_of.profile for each in found if each.slice_of] == ["1c.3g.40gb"] * 2
    assert len({each.slice_of.compute_instance for each in found if each.slice_of}) == 2


def test_device_nodes_have_the_numbers_that_the_driver_tells(
    machine: Callable[[str], Path], tmp_path: Path
) -> None:
    path = machine(SPEC)
    with opened(path) as session:
        found = slices(session)
    tree = capabilities_path(path)
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/devices").write_text(
        "Character devices:\n195 nvidia\n234 nvidia-caps-imex-channels\n511 nvidia-caps\n"
    )
    numbers = set()
    for each in found:
        nodes = capability_nodes(each, 0, root=tmp_path, capabilities=tree)
        assert each.slice_of is not None
        own = tree / f"gpu0/mig/gi{each.slice_of.gpu_instance}"
        for node, file in zip(nodes, (own / "access", own / "ci0/access"), strict=True):
            numbers.add(node.minor)
            assert f"DeviceFileMinor: {node.minor}\n" in file.read_text("ascii")
            assert (node.path, node.major) == (f"/dev/nvidia-caps/nvidia-cap{node.minor}", 511)
    assert len(numbers) == 2 * len(found)
    whole = replace(found[0], slice_of=None)
    assert capability_nodes(whole, 0, root=tmp_path, capabilities=tree) == ()


def test_an_instance_that_went_is_refused(machine: Callable[[str], Path], tmp_path: Path) -> None:
    path = machine(SPEC)
    with opened(path) as session:
        (first, *_) = slices(session)
    with pytest.raises(NoDevicesError, match=r"MIG device 0:0 .* no device node") as caught:
        capability_nodes(first, 5, root=tmp_path, capabilities=capabilities_path(path))
    assert "allot devices" in (caught.value.hint or "")


def test_what_allotment_made_is_not_offered(machine: Callable[[str], Path], tmp_path: Path) -> None:
    path = machine("h100-80gb[mig=1g.10gb@0+1g.10gb@1]")
    seen: list[tuple[Device, ...]] = []

    async def script() -> None:
        watch = GpuWatch(machine=path, poll_s=0.1, offerable=partial(without_own, tmp_path))
        tasks = [asyncio.create_task(watch.run())]
        await watch.first_look()
        seen.append(watch.current.slices)
        gpu = watch.current.devices[0].uuid
        with MigMachine(path) as gpus:

            def cut(device: MigDevice) -> str:
                with Slices(device.driver, Journal(tmp_path / gpu)).cut(
                    "2g.20gb", 2, holder="one"
                ) as work:
                    return work.record.uuid

            ((_, own),) = await asyncio.to_thread(gpus.ask, cut, patience_s=30)
            foreign = await asyncio.to_thread(gpus.ask, by_hand, patience_s=30)
            assert isinstance(own, str)
            assert isinstance(foreign[0][1], str)
            async with asyncio.timeout(90):
                while len(watch.current.slices) < 3:  # noqa: ASYNC110 - a poll brings it
                    await asyncio.sleep(0.02)
            uuids = {each.uuid for each in watch.current.slices}
        assert uuids == {foreign[0][1], *(each.uuid for each in seen[0])}
        assert own not in uuids
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(script())
    assert len(seen[0]) == 2


def by_hand(device: MigDevice) -> str:
    """Cuts one as nvidia-smi does, and returns its UUID."""
    profile = next(each for each in device.driver.look().profiles if each.name == "1g.10gb")
    made = device.driver.create_gpu_instance(profile, 6)
    return device.driver.create_compute_instance(made, profile).uuid


def test_a_pods_slice_is_shown_with_its_share(state_dir: Path) -> None:
    spec = "h100-80gb[mig=1g.10gb*2]"
    path = machine_path(state_dir, spec)
    folder = StateFolder(state_dir)
    with opened(path) as session:
        found = slices(session)
    uuid = found[1].uuid
    pods = PodShares(folder, machine=path, spec=spec, folders=NodeFolders(cdi=state_dir / "cdi"))
    owner = Owner(
        uid=PodUid("u"),
        namespace="lab",
        pod="one",
        container="main",
        kind=ContainerKind.REGULAR,
        resource="nvidia.com/mig-1g.10gb",
    )
    share = pods.prepare(
        ShareOrder(
            request=whole_devices(1, mode="exclusive"),
            injection=Injection.CDI,
            id=ShareId("0123456789ab"),
            owner=owner,
            devices=(uuid,),
            candidates=frozenset([uuid]),
        ),
        NodePolicy(devices=found),
    )
    assert (folder.share(share.id) / "devices").read_text("ascii") == f"{uuid}\n"
    (rows,) = mig_rows(
        folder, [path], shares={}, of_devices={each.uuid: share.name for each in share.devices}
    ).values()
    assert {row.uuid: (row.share, row.state) for row in rows} == {
        found[0].uuid: (None, "static"),
        uuid: ("lab/one/main", "static"),
    }
