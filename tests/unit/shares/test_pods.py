# SPDX-License-Identifier: Apache-2.0
"""Shares of pods: made once, whatever is repeated or cut off, and gone with their pod."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from allotment.devices.simulated import machine_path, read_machine
from allotment.ledger import read_contract
from allotment.model.compute import Compute
from allotment.model.devices import Device
from allotment.model.errors import (
    BusyError,
    DoesNotFitError,
    NoDevicesError,
    StateError,
    UsageError,
)
from allotment.model.pods import ContainerKind, Owner, PodUid
from allotment.model.quantities import parse_memory
from allotment.model.requests import (
    EXCLUSIVE,
    SOFT,
    TIMESLICE,
    Request,
    replicas_of,
    whole_devices,
)
from allotment.model.shares import Injection, Runner, Share, ShareId
from allotment.shares import lives
from allotment.shares.folders import StateFolder
from allotment.shares.placing import Order
from allotment.shares.pods import NodeFolders, PodShares
from allotment.shares.resizing import Change, resize

GI = 1 << 30
Sleeper = Callable[..., "subprocess.Popen[bytes]"]


class Node:
    """A node of two simulated T4, and orders of its pods."""

    def __init__(self, root: Path) -> None:
        self.folder = StateFolder(root / "state")
        self.machine = machine_path(root, "t4:2")
        self.devices = read_machine(self.machine).devices
        self.cdi = root / "cdi"
        self.shares = self.restarted()

    def restarted(self) -> PodShares:
        return PodShares(
            self.folder, machine=self.machine, spec="t4:2", folders=NodeFolders(cdi=self.cdi)
        )

    def prepare(self, order: Order) -> Share:
        return self.shares.prepare(order, self.devices)

    def specs(self) -> list[Path]:
        return sorted(self.cdi.iterdir()) if self.cdi.exists() else []

    def check(self) -> None:
        """Nothing is half there, and every seat is some share's."""
        assert [path.name for path in self.folder.shares.iterdir() if "-" in path.name] == []
        found = lives.look(self.folder)
        assert [each.problem for each in found] == [None] * len(found)
        seats = [
            (seat.share_id, path.name)
            for path in self.folder.devices.iterdir()
            for seat in read_contract(path / "contract").seats
        ]
        shares = [each.share for each in found if each.share]
        expected = [
            (share.id, device.uuid)
            for share in shares
            if share.mode == SOFT
            for device in share.devices
        ]
        assert sorted(seats) == sorted(expected)
        specs = [Path(share.cdi_spec) for share in shares if share.cdi_spec]
        assert self.specs() == sorted(specs)
        for spec in specs:
            share = spec.name.removeprefix("allotment.dev-share-").removesuffix(".json")
            assert spec.read_bytes() == (self.folder.shares / share / "cdi.json").read_bytes()


@pytest.fixture
def node(tmp_path: Path, native_dir: Path) -> Node:
    assert native_dir.is_dir()
    return Node(tmp_path)


def owner(
    container: str = "train",
    *,
    pod: str = "one",
    kind: ContainerKind = ContainerKind.REGULAR,
    place: int | None = None,
) -> Owner:
    return Owner(
        uid=PodUid(f"uid-{pod}"),
        namespace="lab",
        pod=pod,
        container=container,
        kind=kind,
        resource="allotment.dev/gpu",
        place=place,
    )


def order(
    number: int = 1,
    memory: str = "4Gi",
    *,
    whose: Owner | None = None,
    request: Request | None = None,
    guarantee: int = 0,
    injection: Injection = Injection.CDI,
    devices: tuple[str, ...] = (),
    candidates: frozenset[str] | None = None,
) -> Order:
    compute = Compute(guarantee * 100, is_governed=guarantee > 0)
    return Order(
        request or Request(parse_memory(memory), compute=compute),
        injection,
        id=ShareId(f"{number:012x}"),
        owner=whose or owner(pod=f"pod-{number}"),
        devices=devices,
        candidates=candidates,
    )


def test_a_share_is_its_containers_by_name_and_its_ids_by_device(node: Node) -> None:
    share = node.prepare(order(0xAB))
    assert (share.id, share.name) == ("0000000000ab", "lab/pod-171/train")
    assert share.owner == owner(pod="pod-171")
    (path,) = node.specs()
    spec = json.loads(path.read_text())
    assert (spec["kind"], spec["devices"][0]["name"]) == ("allotment.dev/share", share.id)
    mounts = {
        each["containerPath"]: each["hostPath"]
        for each in spec["devices"][0]["containerEdits"]["mounts"]
    }
    assert all(Path(path).exists() for path in mounts.values())
    assert mounts["/run/allotment/share/policy"].endswith(f"{share.id}/policy")
    assert mounts["/usr/lib/libcuda.so.1"]
    assert Path(mounts["/run/allotment/simulated/devices"]).read_text() == (
        f"{share.devices[0].uuid}\n"
    )
    assert node.folder.root.stat().st_mode & 0o777 == 0o700
    assert lives.find(node.folder, "lab/pod-171/train").id == share.id
    assert node.shares.owned() == (share,)
    node.check()


def test_doing_it_again_changes_nothing(node: Node) -> None:
    first = node.prepare(order())
    before = {path: path.stat().st_mtime_ns for path in node.folder.shares.rglob("*")}
    (spec,) = node.specs()
    stamp = spec.stat().st_mtime_ns
    assert node.prepare(order()) == first
    assert node.restarted().prepare(order(memory="8Gi"), node.devices) == first
    assert before == {path: path.stat().st_mtime_ns for path in node.folder.shares.rglob("*")}
    assert spec.stat().st_mtime_ns == stamp
    node.check()


def test_an_id_is_one_containers(node: Node) -> None:
    node.prepare(order())
    with pytest.raises(StateError, match="asked for by lab/other/train"):
        node.prepare(order(whose=owner(pod="other")))


def test_a_start_that_was_cut_off_is_not_in_the_way_of_another(
    tmp_path: Path, native_dir: Path
) -> None:
    """A container has a seat and no share yet; the one that gave way to it starts again."""
    assert native_dir.is_dir()
    node = Node(tmp_path)
    first = order(1, whose=owner("fetch", kind=ContainerKind.INIT, place=0), guarantee=80)
    node.prepare(first)
    cut_off(tmp_path, "prepare", "create.recorded")
    assert in_force(node, node.prepare(first)) == 80


def test_a_spec_that_was_lost_comes_back_as_it_was(node: Node) -> None:
    node.prepare(order())
    (spec,) = node.specs()
    content = spec.read_bytes()
    spec.unlink()
    node.prepare(order())
    assert spec.read_bytes() == content


def test_a_spec_of_another_content_is_never_rewritten(node: Node) -> None:
    node.cdi.mkdir()
    spec = node.cdi / "allotment.dev-share-000000000001.json"
    spec.write_text("{}")
    with pytest.raises(StateError, match="of another share"):
        node.prepare(order())
    assert not spec.exists()
    assert node.shares.owned() == ()
    node.prepare(order())
    node.check()


def test_a_cdi_folder_that_cannot_be_written_leaves_nothing(node: Node) -> None:
    node.cdi.write_text("")
    with pytest.raises(StateError, match="CDI spec") as caught:
        node.prepare(order())
    assert "another folder" in (caught.value.hint or "")
    assert node.shares.owned() == ()
    node.cdi.unlink()
    node.check()


def test_a_share_ends_with_its_spec(node: Node) -> None:
    share = node.prepare(order())
    node.shares.end(share.id)
    node.shares.end(share.id)
    assert node.shares.owned() == ()
    node.check()


def test_a_share_in_use_does_not_end(node: Node, sleeper: Sleeper) -> None:
    share = node.prepare(order())
    process = sleeper(ALLOTMENT_SHARE=str(node.folder.share(share.id)))
    with pytest.raises(BusyError, match=str(process.pid)):
        node.shares.end(share.id)
    process.communicate()
    node.shares.end(share.id)
    assert node.shares.owned() == ()


def test_a_damaged_share_is_told_and_can_be_ended(node: Node) -> None:
    share = node.prepare(order(memory="12Gi"))
    (node.folder.share(share.id) / "share.json").write_text("{}")
    assert node.shares.owned() == ()
    assert [each.id for each in node.shares.damaged()] == [share.id]
    with pytest.raises(StateError, match=r"share\.json"):
        node.prepare(order(memory="12Gi"))
    node.prepare(order(2, memory="12Gi"))
    with pytest.raises(DoesNotFitError):
        node.prepare(order(3, memory="12Gi"))
    node.shares.end(share.id)
    node.prepare(order(3, memory="12Gi"))
    node.check()


def test_others_on_the_node_are_seen_at_once(node: Node) -> None:
    node.prepare(order())
    for device in node.devices:
        made, _ = lives.create(
            node.folder,
            Order(Request(parse_memory("10Gi"), selectors=(device.uuid,)), Injection.ENVIRONMENT),
            node.devices,
        )
    with pytest.raises(DoesNotFitError, match="10Gi"):
        node.prepare(order(2, "5Gi"))
    lives.destroy(node.folder, lives.find(node.folder, made.id), force=False)
    node.prepare(order(2, "5Gi"))


def test_what_ended_without_care_makes_room(node: Node, dead_runner: Runner) -> None:
    node.folder.prepare()
    request = Request(parse_memory("14Gi"), count=2)
    gone = Order(request, Injection.ENVIRONMENT, runner=dead_runner)
    lives.create(node.folder, gone, node.devices)
    share = node.prepare(order(memory="14Gi"))
    assert [each.id for each in lives.look(node.folder)] == [share.id]


def test_devices_that_were_chosen_are_followed(node: Node) -> None:
    first, second = (device.uuid for device in node.devices)
    share = node.prepare(order(devices=(second,)))
    assert [each.uuid for each in share.devices] == [second]
    with pytest.raises(DoesNotFitError, match="need 13Gi, have"):
        node.prepare(order(2, "13Gi", devices=(second,)))
    with pytest.raises(DoesNotFitError, match=f"need GPU GPU-gone.*have {min(first, second)}"):
        node.prepare(order(3, devices=("GPU-gone",)))
    node.check()


def test_parts_of_one_device_add_up(node: Node) -> None:
    first, second = (device.uuid for device in node.devices)
    share = node.prepare(order(request=replicas_of(4, count=3), devices=(first, second, first)))
    whole = node.devices[0].allottable_bytes
    parts = {each.uuid: (each.memory_bytes, each.compute.guarantee) for each in share.devices}
    assert parts == {first: (whole // 2, 5000), second: (whole // 4, 2500)}
    assert {each.compute.ceiling for each in share.devices} == {10_000}
    node.check()


def test_only_candidates_serve(node: Node) -> None:
    first, second = (device.uuid for device in node.devices)
    share = node.prepare(order(candidates=frozenset({second})))
    assert share.devices[0].uuid == second
    with pytest.raises(DoesNotFitError, match=f"{first} .*not for mode soft, by the node's"):
        node.prepare(order(2, "13Gi", candidates=frozenset({second})))


def test_more_devices_than_there_are_is_said_so(node: Node) -> None:
    asked = order()
    with pytest.raises(DoesNotFitError) as refused:
        node.prepare(replace(asked, request=replace(asked.request, count=9)))
    number = len(node.devices)
    assert refused.value.message == f"asks for parts of 9 GPUs; this node has {number}"
    assert refused.value.hint == f"ask for at most {number}"
    uuid = node.devices[0].uuid
    with pytest.raises(DoesNotFitError, match="parts of 2 GPUs; this node has 1 of mode soft"):
        node.prepare(
            replace(
                asked,
                request=replace(asked.request, count=2),
                candidates=frozenset({uuid}),
            )
        )


def test_many_may_start_at_once(node: Node) -> None:
    with ThreadPoolExecutor(8) as threads:
        numbers = [*range(30), *range(30)]
        made = list(threads.map(lambda number: node.prepare(order(number, "512Mi")), numbers))
        assert made[:30] == made[30:]
        for ended in threads.map(node.shares.end, [share.id for share in made[:10]]):
            assert ended is None
    assert {share.id for share in node.shares.owned()} == {share.id for share in made[10:30]}
    node.check()


# ---- modes ---------------------------------------------------------------------------------------


def test_an_exclusive_device_is_nobody_elses(node: Node) -> None:
    first, second = (device.uuid for device in node.devices)
    share = node.prepare(order(1, request=whole_devices(1, mode=EXCLUSIVE), devices=(first,)))
    assert share.mode == EXCLUSIVE
    assert share.devices[0].memory_bytes == node.devices[0].allottable_bytes
    assert node.prepare(order(2)).devices[0].uuid == second
    with pytest.raises(DoesNotFitError) as caught:
        node.prepare(order(3, devices=(first,)))
    assert "need a part of it, have none: all of it is given to lab/pod-1/train" in str(
        caught.value
    )
    with pytest.raises(DoesNotFitError) as caught:
        node.prepare(order(4, request=whole_devices(1, mode=EXCLUSIVE), devices=(second,)))
    assert "need it alone, have 1 share there (lab/pod-2/train)" in str(caught.value)
    node.check()


def test_time_slices_are_beside_one_another_and_no_others(node: Node) -> None:
    first, _ = (device.uuid for device in node.devices)
    for number in range(3):
        node.prepare(order(number, request=whole_devices(1, mode=TIMESLICE), devices=(first,)))
    with pytest.raises(DoesNotFitError) as caught:
        node.prepare(order(9, devices=(first,)))
    assert "need mode soft, have shares of mode timeslice there (lab/pod-0/train, " in str(
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
    assert Path(targets["/run/allotment/simulated/devices"]).read_text() == f"{first}\n"
    assert "/run/allotment/share/id" in targets
    with pytest.raises(UsageError, match="is a pod's"):
        resize(node.folder, share.id, Change(memory=parse_memory("1Gi")), node.devices, force=False)


def test_a_pods_share_is_not_resized_and_not_removed_by_hand(node: Node) -> None:
    share = node.prepare(order())
    with pytest.raises(UsageError, match="is a pod's"):
        resize(node.folder, share.id, Change(memory=parse_memory("1Gi")), node.devices, force=False)
    with pytest.raises(BusyError, match="is a pod's") as caught:
        lives.destroy(node.folder, lives.find(node.folder, share.id), force=False)
    assert "kubectl -n lab delete pod pod-1" in (caught.value.hint or "")
    lives.destroy(node.folder, lives.find(node.folder, share.id), force=True)
    node.check()


# ---- containers of one pod -----------------------------------------------------------------------


def in_force(node: Node, share: Share) -> int:
    (device,) = share.devices
    contract = read_contract(node.folder.devices / device.uuid / "contract")
    (found,) = [each for each in contract.seats if each.share_id == share.id]
    return found.terms.compute.guarantee // 100


def test_an_ended_init_containers_part_goes_on_to_the_next(node: Node) -> None:
    init = owner("fetch", kind=ContainerKind.INIT, place=0)
    main = owner("train", place=1)
    device = (node.devices[0].uuid,)
    one = node.prepare(order(1, "12Gi", whose=init, guarantee=80, devices=device))
    two = node.prepare(order(2, "10Gi", whose=main, guarantee=60, devices=device))
    assert (in_force(node, one), in_force(node, two)) == (0, 60)
    assert lives.booked(lives.look(node.folder))[device[0]].memory == 12 * GI
    assert lives.booked(lives.look(node.folder))[device[0]].guaranteed == 8000
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
    assert lives.allotted(lives.look(node.folder)) == {first: 8 * GI, second: 4 * GI}


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
    assert lives.booked(lives.look(node.folder))[device[0]].memory == 2 * part * GI


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


# ---- without CDI ---------------------------------------------------------------------------------


def test_mounts_are_known_before_the_share_and_there_after_it(node: Node) -> None:
    share = ShareId(f"{1:012x}")
    mounts = node.shares.mounts(share, mode=SOFT, devices=2)
    assert not all(Path(each.host_path).exists() for each in mounts)
    node.prepare(order(request=Request(parse_memory("1Gi"), count=2), injection=Injection.MOUNTS))
    missing = [each.host_path for each in mounts if not Path(each.host_path).exists()]
    assert missing == []
    writable = {each.container_path for each in mounts if not each.is_read_only}
    assert writable == {
        "/run/allotment/share/usage",
        "/run/allotment/share/leases-0",
        "/run/allotment/share/leases-1",
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
        "/run/allotment/share/id",
        "/run/allotment/simulated/machine",
        "/run/allotment/simulated/devices",
    }
    assert not any(each.container_path.startswith("/etc") for each in mounts)


# ---- real GPUs -----------------------------------------------------------------------------------


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
    share = real.prepare(order(request=request, devices=(devices[1].uuid,)), devices)
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
        real.prepare(order(devices=(devices[1].uuid,)), devices)
    assert list((tmp_path / "state/shares").iterdir()) == []
    assert real.owned() == ()


# ---- cut off -------------------------------------------------------------------------------------

CHILD = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import test_pods
node = test_pods.Node(Path(sys.argv[2]))
if sys.argv[3] == "end":
    node.shares.end(test_pods.order(2).id)
else:
    node.prepare(test_pods.pair()[1])
"""


def pair() -> tuple[Order, Order]:
    """An init container's order, and that of the one that follows it on the same device."""
    init = owner("fetch", kind=ContainerKind.INIT, place=0)
    return (
        order(1, "12Gi", whose=init, guarantee=80),
        order(2, "10Gi", whose=owner("train", place=1), guarantee=60),
    )


PREPARE = [
    "prepare.begun",
    "settle.changed",
    "create.placed",
    "create.drafted",
    "create.enforced",
    "create.filled",
    "create.recorded",
    "create.shown",
    "prepare.made",
    "publish.drafted",
    "publish.shown",
]
END = ["end.begun", "remove.unpublished", "remove.hidden", "remove.freed", "remove.cleared"]


def cut_off(root: Path, what: str, point: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(Path(__file__).parent), str(root), what],
        env={**os.environ, "ALLOTMENT_KILL_AT": point},
        check=False,
    )
    assert done.returncode == -signal.SIGKILL, f"it never came to {point}"


@pytest.mark.parametrize("point", PREPARE)
def test_whatever_is_cut_off_is_finished_by_the_next_try(
    tmp_path: Path, native_dir: Path, point: str
) -> None:
    assert native_dir.is_dir()
    node = Node(tmp_path)
    first = node.prepare(pair()[0])
    cut_off(tmp_path, "prepare", point)
    shown = {path: path.read_bytes() for path in node.specs() if path.suffix == ".json"}
    share = node.prepare(pair()[1])
    assert {path: path.read_bytes() for path in shown} == shown
    assert in_force(node, share) == 60
    assert in_force(node, first) == 0
    node.check()


@pytest.mark.parametrize("point", PREPARE)
def test_what_is_cut_off_and_never_tried_again_is_tidied(
    tmp_path: Path, native_dir: Path, point: str
) -> None:
    assert native_dir.is_dir()
    node = Node(tmp_path)
    node.prepare(pair()[0])
    cut_off(tmp_path, "prepare", point)
    for share in node.shares.owned():
        node.shares.end(share.id)
    node.shares.tidy()
    node.check()
    assert node.shares.owned() == ()
    assert node.specs() == []


@pytest.mark.parametrize("point", END)
def test_an_end_that_is_cut_off_is_finished(tmp_path: Path, native_dir: Path, point: str) -> None:
    assert native_dir.is_dir()
    node = Node(tmp_path)
    first, second = (node.prepare(each) for each in pair())
    cut_off(tmp_path, "end", point)
    node.shares.end(second.id)
    node.shares.tidy()
    node.check()
    assert node.shares.owned() == (first,)


def test_specs_of_other_state_folders_are_not_ours_to_remove(node: Node) -> None:
    node.prepare(order())
    other = node.cdi / "allotment.dev-share-0000000000ff.json"
    other.write_text('{"hostPath": "/elsewhere/shares/0000000000ff/policy"}')
    stray = node.cdi / "allotment.dev-share-0000000000fe.json"
    stray.write_text(f'{{"hostPath": "{node.folder.shares}/0000000000fe/policy"}}')
    old, young, cut = (
        node.cdi / f".allotment.dev-share-{number:012x}.json.new" for number in (0xFD, 0xFC, 1)
    )
    for draft in (old, young, cut):
        draft.write_text("")
    os.utime(old, (1, 1))
    node.shares.tidy()
    assert other.exists()
    assert not old.exists()
    assert young.exists()
    assert not cut.exists()
    assert not stray.exists()
    assert len(node.specs()) == 3


def test_an_order_needs_an_id_and_an_owner(node: Node) -> None:
    with pytest.raises(ValueError, match="Order"):
        node.prepare(replace(order(), id=None))
