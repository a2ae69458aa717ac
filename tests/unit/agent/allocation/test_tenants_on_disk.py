# SPDX-License-Identifier: Apache-2.0
"""`Tenants` on a real state folder: what the twins stand for holds there, too."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from pathlib import Path

import pytest
from kubelet_twin import (
    UNIT,
    ContainerTwin,
    KubeletTwin,
    PodsTwin,
    PodTwin,
    ReportsTwin,
)

from allotment.agent.allocation import Patience, Tenants
from allotment.agent.evictions import Evictions
from allotment.agent.resources import GPU_COMPUTE, GPU_SHARE, Offer, Resource, Slot
from allotment.devices.packing import read_machine
from allotment.devices.simulated import machine_path
from allotment.ledger import read_contract
from allotment.model.pods import Container, ContainerKind, PodUid
from allotment.model.shares import ShareId
from allotment.model.structs import replace
from allotment.shares.folders import StateFolder
from allotment.shares.pods import NodeFolders, NodePolicy, PodShares

INIT, REGULAR = ContainerKind.INIT, ContainerKind.REGULAR
HASTE = Patience(deadline=20, pod=0.05, room=(0.0,), departure=(), look=0.05)


class Node:
    """A node of two simulated T4, one of them for parts and the other given as a whole."""

    def __init__(self, root: Path) -> None:
        machine = machine_path(root, "t4:2")
        self.devices = read_machine(machine).devices
        soft, whole = (device.uuid for device in self.devices)
        self.soft = soft
        self.offer = Offer(
            resources=(
                Resource(
                    name=GPU_SHARE,
                    mode="soft",
                    slots=tuple(Slot(f"share::{number}", None) for number in range(8)),
                ),
                Resource(name="nvidia.com/gpu", mode="exclusive", slots=(Slot(whole, whole),)),
            ),
            modes={soft: "soft", whole: "exclusive"},
            shared={soft: ("soft",)},
        )
        self.folder = StateFolder(root / "state")
        self.cdi = root / "cdi"
        self.sick: dict[str, str] = {}
        self.cordoned: set[str] = set()
        self.kept: dict[str, str] = {}
        self.kubelet = KubeletTwin(self.offer)
        self.pods = PodsTwin()
        self.pods.is_synced = True
        self.reports = ReportsTwin()
        self.tenants = Tenants(
            checkpoint=self.kubelet,
            pods=self.pods,
            evictions=Evictions(pods=self.pods, reports=self.reports),
            offer=lambda: self.offer,
            reports=self.reports,
            store=PodShares(
                self.folder,
                machine=machine,
                spec="t4:2",
                folders=NodeFolders(cdi=self.cdi),
            ),
            policy=lambda _: NodePolicy(
                devices=self.devices,
                unhealthy=self.sick,
                cordoned=self.cordoned,
                kept=self.kept,
            ),
            patience=HASTE,
        )

    def admit(self, uid: str, *containers: ContainerTwin) -> PodTwin:
        pod = PodTwin(PodUid(uid), list(containers))
        assert self.kubelet.admit(pod, self.tenants)
        self.hear()
        return pod

    def hear(self) -> None:
        while self.kubelet.news:
            self.pods.hear(*self.kubelet.news.popleft())

    async def start(self, pod: PodTwin, number: int = 0) -> str:
        return await self.kubelet.start(
            pod, pod.containers[number], self.tenants, lambda share: self.spec(share).exists()
        )

    def spec(self, share: ShareId) -> Path:
        return self.cdi / f"allotment.dev-share-{share}.json"

    def change(self, pod: PodTwin, **annotations: str) -> None:
        """Change annotations of a pod, without their prefix, as the agent hears."""
        pod.annotations = {f"allotment.dev/{key}": text for key, text in annotations.items()}
        self.pods.hear(pod.uid, pod.seen())

    def guarantees(self) -> dict[str, int]:
        """What each share of the soft GPU is guaranteed of it at the moment."""
        contract = read_contract(self.folder.devices / self.soft / "contract")
        return {seat.share_id: seat.terms.compute.guarantee for seat in contract.seats}


@pytest.fixture
def node(tmp_path: Path, native_dir: Path) -> Node:
    assert native_dir.is_dir()
    return Node(tmp_path)


Story = Callable[[], Coroutine[object, object, None]]


def tell(node: Node, story: Story) -> None:
    async def told() -> None:
        try:
            await node.tenants.adopt()
            await story()
        finally:
            await node.tenants.close()

    asyncio.run(told())


def part(
    name: str = "main",
    kind: ContainerKind = REGULAR,
    *,
    memory: int | None = 4,
    compute: int | None = None,
) -> ContainerTwin:
    return ContainerTwin(name, kind, resource=GPU_SHARE, memory=memory, compute=compute)


def test_a_share_comes_with_its_container_and_goes_with_its_pod(node: Node) -> None:
    async def story() -> None:
        pod = node.admit("1", part())
        assert await node.start(pod) == ""
        (share,) = node.tenants.shares
        assert [device.memory_bytes for device in share.devices] == [4 * UNIT]
        assert node.spec(share.id).exists()
        assert (node.folder.shares / share.id).is_dir()
        node.kubelet.delete(pod)
        node.hear()
        await node.tenants.look()
        assert list(node.cdi.iterdir()) == []
        assert list(node.folder.shares.iterdir()) == []

    tell(node, story)


def test_a_whole_gpu_and_parts_do_not_meet(node: Node) -> None:
    async def story() -> None:
        whole = ContainerTwin("main", REGULAR, resource="nvidia.com/gpu")
        pods = [node.admit("1", whole), node.admit("2", part())]
        assert [await node.start(pod) for pod in pods] == ["", ""]
        devices = {share.mode: share.devices[0].uuid for share in node.tenants.shares}
        assert devices == {mode: uuid for uuid, mode in node.offer.modes.items()}

    tell(node, story)


def test_a_cordoned_gpu_takes_nothing_but_what_a_scheduler_has_placed_there(node: Node) -> None:
    async def story() -> None:
        before, placed, after = (node.admit(name, part()) for name in ("1", "2", "3"))
        assert await node.start(before) == ""
        node.cordoned.add(node.soft)
        said = await node.start(after)
        assert "cordoned" in said
        assert node.soft in said
        chosen = {"version": 1, "containers": {"main": {"devices": [node.soft]}}}
        placed.annotations["allotment.dev/placement"] = json.dumps(chosen)
        node.pods.hear(placed.uid, placed.seen())
        assert await node.start(placed) == ""
        # What is there goes on, also when it starts again.
        assert await node.start(before) == ""
        node.cordoned.clear()
        assert await node.start(after) == ""

    tell(node, story)


def test_a_gpu_that_somebody_else_keeps_is_passed_over_in_every_mode(node: Node) -> None:
    async def story() -> None:
        node.kept[node.soft] = "it is in compute mode PROHIBITED, set outside Allotment"
        pod = node.admit("1", part())
        assert "compute mode PROHIBITED" in await node.start(pod)
        node.kept.clear()
        assert await node.start(pod) == ""

    tell(node, story)


def test_what_does_not_fit_says_need_and_have(node: Node) -> None:
    async def story() -> None:
        assert await node.start(node.admit("1", part(memory=10))) == ""
        said = await node.start(node.admit("2", part(memory=10)))
        assert "need 10Gi, have " in said
        assert node.soft in said

    tell(node, story)


def test_an_unhealthy_gpu_takes_nothing_new_and_keeps_what_it_has(node: Node) -> None:
    async def story() -> None:
        pod = node.admit("1", part())
        assert await node.start(pod) == ""
        node.sick = {node.soft: "XID 79: it has fallen off the bus"}
        assert "XID 79" in await node.start(node.admit("2", part()))
        chosen = PodTwin(PodUid("3"), [part()])
        placement = {"version": 1, "containers": {"main": {"devices": [node.soft]}}}
        chosen.annotations["allotment.dev/placement"] = json.dumps(placement)
        node.kubelet.admit(chosen, node.tenants)
        node.hear()
        assert "XID 79" in await node.start(chosen)
        node.kubelet.finish(pod, pod.containers[0], for_good=False)
        assert await node.start(pod) == ""

    tell(node, story)


def test_an_init_container_and_its_successor_have_the_same_guarantee_in_turn(node: Node) -> None:
    async def story() -> None:
        init, main = part("init", INIT, compute=70), part(compute=60)
        pod = node.admit("1", init, main)
        first, second = (str(each.share) for each in node.kubelet.table)
        assert await node.start(pod, 0) == ""
        assert node.guarantees() == {first: 7000, second: 0}
        node.kubelet.news.clear()
        node.kubelet.finish(pod, init, for_good=True)
        node.kubelet.news.clear()  # its end is not heard of yet
        assert await node.start(pod, 1) == ""
        node.hear()
        await node.tenants.look()
        assert node.guarantees()[second] == 6000

    tell(node, story)


def test_amounts_are_decided_once(node: Node) -> None:
    async def story() -> None:
        pod = node.admit("1", part())
        assert await node.start(pod) == ""
        before = node.tenants.shares
        node.kubelet.finish(pod, pod.containers[0], for_good=False)
        changed = pod.seen()
        bigger = Container("main", REGULAR, {GPU_SHARE: 1, GPU_COMPUTE: 90})
        node.pods.hear(pod.uid, replace(changed, containers=(bigger,)))
        assert await node.start(pod) == ""
        assert node.tenants.shares == before

    tell(node, story)


FORGED = """{"version": 1, "node": "node-1", "pod": "1",
"containers": {"main": {"devices": ["DEVICE"], "memory": 10737418240}},
"resize": {"wish": "memory:10Gi", "generation": 1}}"""


@pytest.mark.parametrize(
    ("memory", "begun", "later", "need"),
    [
        pytest.param(4, {}, {"placement": FORGED}, "memory (need 10Gi, have 4Gi)", id="placement"),
        pytest.param(
            None,
            {"memory": "25%"},
            {"memory": "75%", "resize": "memory:75%"},
            "memory (need ",
            id="part",
        ),
        pytest.param(
            4,
            {"compute": ":50"},
            {"compute": ":90", "resize": "class:latency"},
            "ceiling (need 90 percent, have 50)",
            id="compute",
        ),
    ],
)
def test_later_annotations_get_a_pod_no_more_than_it_asked_for_at_its_start(
    node: Node, memory: int | None, begun: dict[str, str], later: dict[str, str], need: str
) -> None:
    """Nothing but the agent's record says what that was, where no policy guards annotations."""

    async def story() -> None:
        pod = PodTwin(PodUid("1"), [part(memory=memory)])
        node.change(pod, **begun)
        assert node.kubelet.admit(pod, node.tenants)
        node.hear()
        assert await node.start(pod) == ""
        before = node.tenants.shares
        node.change(pod, **{key: text.replace("DEVICE", node.soft) for key, text in later.items()})
        await node.tenants.look()
        assert node.tenants.shares == before
        (text,) = [text for _, reason, text in node.reports.events if reason == "ResizeRefused"]
        assert "more than its pod asked for at its start" in text
        assert need in text

    tell(node, story)


def test_a_pod_that_began_with_less_than_its_request_grows_to_its_request(node: Node) -> None:
    async def story() -> None:
        pod = PodTwin(PodUid("1"), [part(memory=4)])
        node.change(pod, resize="memory:2Gi")
        assert node.kubelet.admit(pod, node.tenants)
        node.hear()
        assert await node.start(pod) == ""
        for wish, has in (("", 2), ("memory:3Gi", 3), (None, 4), ("memory:5Gi", 4)):
            if wish != "":
                node.change(pod, **({} if wish is None else {"resize": wish}))
            await node.tenants.look()
            (share,) = node.tenants.shares
            assert [each.memory_bytes for each in share.devices] == [has * UNIT]
        assert "memory (need 5Gi, have 4Gi)" in node.reports.events[-1][2]

    tell(node, story)
