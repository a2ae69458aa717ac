# SPDX-License-Identifier: Apache-2.0
"""Shares of pods by mode, within one pod, without CDI, and on real GPUs."""

import json
from pathlib import Path

import pytest
from pod_node import GI, Node, in_force, order, owner

from allotment.model.devices import Device
from allotment.model.errors import BusyError, DoesNotFitError, NoDevicesError, UsageError
from allotment.model.modes import EXCLUSIVE, SOFT, TIMESLICE
from allotment.model.pods import ContainerKind
from allotment.model.quantities import parse_memory
from allotment.model.requests import Request, whole_devices
from allotment.model.shares import Injection, ShareId
from allotment.model.structs import replace
from allotment.shares import booking, lifecycle, recovery
from allotment.shares.folders import StateFolder
from allotment.shares.pods import NodeFolders, NodePolicy, PodShares
from allotment.shares.resize import LimitChange, resize


def test_an_exclusive_device_is_nobody_elses(node: Node) -> None:
    first, second = (device.uuid for device in node.devices)
    share = node.prepare(order(1, request=whole_devices(1, mode=EXCLUSIVE), devices=(first,)))
    assert share.mode == EXCLUSIVE
    assert share.devices[0].memory_bytes == node.devices[0].allottable_bytes
    assert node.prepare(order(2)).devices[0].uuid == second
    with pytest.raises(DoesNotFitError) as caught:
        node.prepare(order(3, devices=(first,)))
    assert "need a part of it, have none: used in full by lab/pod-1/train" in str(caught.value)
    with pytest.raises(DoesNotFitError) as caught:
        node.prepare(order(4, request=whole_devices(1, mode=EXCLUSIVE), devices=(second,)))
    assert "need it alone, have 1 share on it (lab/pod-2/train)" in str(caught.value)
    node.check()


def test_time_slices_are_beside_one_another_and_no_others(node: Node) -> None:
    first, _ = (device.uuid for device in node.devices)
    for number in range(3):
        node.prepare(order(number, request=whole_devices(1, mode=TIMESLICE), devices=(first,)))
    with pytest.raises(DoesNotFitError) as caught:
        node.prepare(order(9, devices=(first,)))
    assert "need mode soft, have shares of mode timeslice on it (lab/pod-0/train, " in str(
        caught.value
    )
    with pytest.raises(DoesNotFitError, match="need it alone, have 3 shares"):
        node.prepare(order(9, request=whole_devices(1, mode=EXCLUSIVE), devices=(first,)))
    node.check()


def test_a_share_without_a_shim_gets_its_device_and_nothing_else(node: Node) -> None:
    first, _ = (device.uuid for device in node.devices)
    share = node.prepare(order(request=whole_devices(1, mode=EXCLUSIVE), devices=(first,)))
    (spec,) = node.specs()
    edits = json.loads(spec.read_text())["devices"][0]["containerEdits"]
    targets = {each["containerPath"]: each["hostPath"] for each in edits["mounts"]}
    assert "/etc/ld.so.preload" not in targets
    assert not any(target.startswith("/run/allotment/shim") for target in targets)
    assert Path(targets[f"/run/allotment/simulated/devices/{share.id}"]).read_text() == f"{first}\n"
    assert f"/run/allotment/share/{share.id}/id" in targets
    with pytest.raises(UsageError, match="is a pod's"):
        resize(
            node.folder,
            share.id,
            LimitChange(memory=parse_memory("1Gi")),
            node.devices,
            force=False,
        )


def test_a_pods_share_is_not_resized_and_not_removed_by_hand(node: Node) -> None:
    share = node.prepare(order())
    with pytest.raises(UsageError, match="is a pod's"):
        resize(
            node.folder,
            share.id,
            LimitChange(memory=parse_memory("1Gi")),
            node.devices,
            force=False,
        )
    with pytest.raises(BusyError, match="belongs to a pod") as caught:
        lifecycle.destroy(node.folder, lifecycle.find(node.folder, share.id), force=False)
    assert "kubectl -n lab delete pod pod-1" in (caught.value.hint or "")
    lifecycle.destroy(node.folder, lifecycle.find(node.folder, share.id), force=True)
    node.check()


def test_a_claims_share_is_neither_and_the_next_step_is_a_claims(node: Node) -> None:
    whose = replace(owner("gpu", pod="mine"), is_claim=True)
    share = node.prepare(order(whose=whose))
    assert share.name == "lab/mine/gpu"
    loaded = lifecycle.find(node.folder, share.name)
    change = LimitChange(memory=parse_memory("1Gi"))
    with pytest.raises(UsageError, match="is a ResourceClaim's") as refused:
        resize(node.folder, share.id, change, node.devices, force=False)
    with pytest.raises(BusyError, match="belongs to a ResourceClaim") as caught:
        lifecycle.destroy(node.folder, loaded, force=False)
    for hint in (refused.value.hint, caught.value.hint):
        assert "kubectl -n lab describe resourceclaim mine" in (hint or "")


def test_an_ended_init_containers_part_goes_on_to_the_next(node: Node) -> None:
    init = owner("fetch", kind=ContainerKind.INIT, place=0)
    main = owner("train", place=1)
    device = (node.devices[0].uuid,)
    one = node.prepare(order(1, "12Gi", whose=init, guarantee=80, devices=device))
    two = node.prepare(order(2, "10Gi", whose=main, guarantee=60, devices=device))
    assert (in_force(node, one), in_force(node, two)) == (0, 60)
    assert booking.booked(recovery.list_shares(node.folder))[device[0]].memory == 12 * GI
    assert booking.booked(recovery.list_shares(node.folder))[device[0]].guaranteed == 8000
    # The kubelet starts the pod anew: its init container first.
    assert node.prepare(order(1, "12Gi", whose=init, guarantee=80, devices=device)) == one
    assert (in_force(node, one), in_force(node, two)) == (80, 0)
    node.prepare(order(2, "10Gi", whose=main, guarantee=60, devices=device))
    assert (in_force(node, one), in_force(node, two)) == (0, 60)
    with pytest.raises(DoesNotFitError, match="have 20 %"):
        node.prepare(order(3, "1Gi", guarantee=30, devices=device))
    node.prepare(order(3, "1Gi", guarantee=20, devices=device))
    node.check()


def test_a_container_goes_where_its_pod_has_room_already(node: Node) -> None:
    init = owner("fetch", kind=ContainerKind.INIT, place=0)
    first, second = (device.uuid for device in node.devices)
    node.prepare(order(1, "8Gi", whose=init, devices=(first,)))
    node.prepare(order(2, "4Gi", devices=(second,)))  # which is fuller for who has nothing yet
    assert node.prepare(order(3, "8Gi", whose=owner(place=1))).devices[0].uuid == first
    assert booking.allotted(recovery.list_shares(node.folder)) == {first: 8 * GI, second: 4 * GI}


def test_a_sidecar_runs_beside_what_comes_after_it(node: Node) -> None:
    sidecar = owner("log", kind=ContainerKind.SIDECAR, place=0)
    init = owner("fetch", kind=ContainerKind.INIT, place=1)
    main = owner("train", place=2)
    device = (node.devices[0].uuid,)
    room = node.devices[0].allottable_bytes
    part = room // 2 // GI
    node.prepare(order(1, f"{part}Gi", whose=sidecar, devices=device))
    with pytest.raises(DoesNotFitError):
        node.prepare(order(2, f"{part + 2}Gi", whose=init, devices=device))
    node.prepare(order(2, f"{part}Gi", whose=init, devices=device))
    node.prepare(order(3, f"{part}Gi", whose=main, devices=device))
    assert booking.booked(recovery.list_shares(node.folder))[device[0]].memory == 2 * part * GI


def test_an_exclusive_device_goes_on_within_its_pod(node: Node) -> None:
    device = (node.devices[0].uuid,)
    whole = whole_devices(1, mode=EXCLUSIVE)
    init = owner("fetch", kind=ContainerKind.INIT, place=0)
    node.prepare(order(1, whose=init, request=whole, devices=device))
    node.prepare(order(2, whose=owner(place=1), request=whole, devices=device))
    with pytest.raises(DoesNotFitError):
        node.prepare(order(3, whose=owner("more", place=2), request=whole, devices=device))


def test_a_restart_takes_nothing_from_those_beside_it(node: Node) -> None:
    init = owner("fetch", kind=ContainerKind.INIT, place=0)
    device = (node.devices[0].uuid,)
    orders = [
        order(1, "1Gi", whose=init, guarantee=90, devices=device),
        order(2, "1Gi", whose=owner("one", place=1), guarantee=40, devices=device),
        order(3, "1Gi", whose=owner("two", place=2), guarantee=50, devices=device),
    ]
    shares = [node.prepare(each) for each in orders]
    # `one` has the ids of the ended init container: when it restarts both are made ready.
    for again in (orders[0], orders[1]):
        node.prepare(again)
    assert [in_force(node, share) for share in shares] == [0, 40, 50]


def test_mounts_are_known_before_the_share_and_there_after_it(node: Node) -> None:
    share = ShareId(f"{1:012x}")
    mounts = node.shares.mounts(share, mode=SOFT, devices=2)
    assert not all(Path(each.host_path).exists() for each in mounts)
    node.prepare(order(request=Request(parse_memory("1Gi"), count=2), injection=Injection.MOUNTS))
    missing = [each.host_path for each in mounts if not Path(each.host_path).exists()]
    assert missing == []
    writable = {each.container_path for each in mounts if not each.is_read_only}
    assert writable == {
        f"/run/allotment/share/{share}/usage",
        f"/run/allotment/share/{share}/seat-0",
        f"/run/allotment/share/{share}/seat-1",
        "/run/allotment/simulated/machine",
    }
    preload = next(each for each in mounts if each.container_path == "/etc/ld.so.preload")
    (line,) = Path(preload.host_path).read_text().splitlines()
    shim = next(each for each in mounts if each.container_path == str(Path(line).parent))
    assert (Path(shim.host_path) / Path(line).name).exists()
    assert node.specs() == []
    # Which nodes a container gets was said before anybody knew which devices it has.
    assert len((node.folder.share(share) / "devices").read_text().split()) == 2
    node.check()


def test_without_a_shim_there_is_little_to_mount(node: Node) -> None:
    mounts = node.shares.mounts(ShareId("0a"), mode=EXCLUSIVE, devices=1)
    assert {each.container_path for each in mounts if each.container_path.startswith("/run")} == {
        "/run/allotment/share/0a/id",
        "/run/allotment/simulated/machine",
        "/run/allotment/simulated/devices/0a",
    }
    assert not any(each.container_path.startswith("/etc") for each in mounts)


@pytest.fixture
def real(tmp_path: Path, native_dir: Path, devices: tuple[Device, ...]) -> PodShares:
    """The shares of a node with a driver, as far as its files go."""
    assert native_dir.is_dir()
    root = tmp_path / "root"
    (root / "dev").mkdir(parents=True)
    for name in ("nvidiactl", "nvidia-uvm", *(f"nvidia{each.index}" for each in devices)):
        (root / "dev" / name).write_text("")
    folders = NodeFolders(cdi=tmp_path / "cdi", driver_root=root)
    return PodShares(StateFolder(tmp_path / "state"), folders=folders)


@pytest.mark.parametrize("mode", [SOFT, EXCLUSIVE, TIMESLICE])
def test_a_container_has_the_nodes_of_its_devices_alone(
    real: PodShares, devices: tuple[Device, ...], tmp_path: Path, mode: str
) -> None:
    request = Request(parse_memory("1Gi")) if mode == SOFT else whole_devices(1, mode=mode)
    share = real.prepare(
        order(request=request, devices=(devices[1].uuid,)), NodePolicy(devices=devices)
    )
    (spec,) = (tmp_path / "cdi").iterdir()
    edits = json.loads(spec.read_text())["devices"][0]["containerEdits"]
    nodes = ["/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia1"]
    assert [node["path"] for node in edits["deviceNodes"]] == nodes
    targets = {mount["containerPath"] for mount in edits["mounts"]}
    assert ("/etc/ld.so.preload" in targets) == (mode == SOFT)
    assert not any("simulated" in target for target in targets)
    assert real.device_nodes(devices) == (*nodes[:2], "/dev/nvidia0", "/dev/nvidia1")
    assert not (tmp_path / "state" / "shares" / share.id / "devices").exists()


def test_a_driver_that_lost_a_node_is_told_and_leaves_nothing(
    real: PodShares, devices: tuple[Device, ...], tmp_path: Path
) -> None:
    (tmp_path / "root/dev/nvidia1").unlink()
    with pytest.raises(NoDevicesError, match="/dev/nvidia1"):
        real.prepare(order(devices=(devices[1].uuid,)), NodePolicy(devices=devices))
    assert list((tmp_path / "state/shares").iterdir()) == []
    assert real.owned() == ()
