# SPDX-License-Identifier: Apache-2.0
"""Two replicas of the scheduler, an API server, and a kube-scheduler that calls whenever it likes.

The server is the judge: what it has bound, by placements that count, may at no time be more than a
device has. Requests are executed late, twice or never; answers are lost; watches lag; leaders die.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from dataclasses import dataclass, field

from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from allotment.dialects.decisions import read_booking, write_booking
from allotment.kube.cluster_feed import ClusterPod
from allotment.model.clusters import (
    NodeDevice,
    NodeInventory,
    PodBooking,
    PodNeed,
    WantedContainer,
)
from allotment.model.compute import Compute
from allotment.model.errors import UsageError
from allotment.model.pods import ContainerKind, Pod, PodUid
from allotment.model.quantities import MemoryAmount
from allotment.model.requests import Request
from allotment.placement.cluster import Cluster
from allotment.scheduler.book import Book, BookSettings, Order, State

MEMORY = 8 << 20
NODES = ("a", "b", "c")
DEVICES = {name: tuple(f"GPU-{name}{number}" for number in range(2)) for name in NODES}
FORGED = "forged"


def inventory(name: str, devices: int = 2) -> NodeInventory:
    return NodeInventory(
        name=name,
        devices=tuple(
            NodeDevice(uuid=uuid, model="M", memory_bytes=MEMORY) for uuid in DEVICES[name]
        )[:devices],
        cpu_milli=4000,
        memory_bytes=1 << 30,
    )


@dataclass
class ServerPod:
    need: PodNeed
    version: int
    node: str = ""
    placement: str = ""
    has_ended: bool = False


@dataclass(frozen=True)
class Request_:  # noqa: N801 - a binding on its way
    order: Order
    replica: int
    text: str


@dataclass
class Server:
    """Pods and nodes, with every change in one order."""

    pods: dict[PodUid, ServerPod] = field(default_factory=dict)
    nodes: dict[str, NodeInventory] = field(default_factory=dict)
    events: list[tuple[str, str, ClusterPod | NodeInventory | None]] = field(default_factory=list)
    version: int = 0

    def changed(self, uid: PodUid) -> None:
        self.version += 1
        there = self.pods.get(uid)
        if there is not None:
            there.version = self.version
        self.events.append(("pod", uid, self.read(uid)))

    def set_node(self, name: str, node: NodeInventory | None) -> None:
        if node is None:
            self.nodes.pop(name, None)
        else:
            self.nodes[name] = node
        self.events.append(("node", name, node))

    def read(self, uid: PodUid) -> ClusterPod | None:
        """As `kube.cluster_feed` reads it."""
        there = self.pods.get(uid)
        if there is None:
            return None
        need = there.need
        same = {"uid": uid, "namespace": "ns", "name": str(uid), "cpu_milli": need.cpu_milli}
        if not there.node:
            asks = Pod(uid=uid, namespace="ns", name=str(uid))
            return ClusterPod(**same, version=str(there.version), asks=asks)  # type: ignore[arg-type]
        booking = None
        if not there.has_ended:
            booking = PodBooking(uid=uid, node=there.node, cpu_milli=need.cpu_milli)
            with contextlib.suppress(UsageError):
                booking = read_booking(
                    there.placement, uid=uid, node=there.node, cpu_milli=need.cpu_milli
                )
        return ClusterPod(**same, node=there.node, booking=booking)  # type: ignore[arg-type]

    def bind(self, request: Request_) -> bool:
        """Execute a binding; whether it has bound the pod."""
        booking = request.order.booking
        there = self.pods.get(booking.uid)
        if there is None or there.node or str(there.version) != request.order.version:
            return False
        there.node, there.placement = booking.node, request.text
        self.changed(booking.uid)
        return True

    def given(self) -> dict[str, tuple[int, int]]:
        """Memory and compute that pods have of each device."""
        sums: dict[str, list[int]] = defaultdict(lambda: [0, 0])
        for uid in self.pods:
            pod = self.read(uid)
            booking = pod.booking if pod else None
            for container in booking.containers if booking else ():
                for device in container.devices:
                    sums[device.uuid][0] += device.memory
                    sums[device.uuid][1] += device.guarantee
        return {uuid: (memory, compute) for uuid, (memory, compute) in sums.items()}


class Replica:
    def __init__(self, server: Server) -> None:
        self.book = Book(
            Cluster(node_policies=("binpack",), device_policies=("binpack",)),
            settings=BookSettings(candidates=2),
        )
        self.server = server
        self.heard = len(server.events)
        for node in server.nodes.values():
            self.book.node_put(node)
        for uid in server.pods:
            pod = server.read(uid)
            assert pod is not None
            self.book.pod_put(pod, now=0.0)

    def hear(self, now: float, number: int | None = None) -> None:
        events = self.server.events[self.heard :][:number]
        self.heard += len(events)
        for kind, name, value in events:
            if isinstance(value, ClusterPod):
                self.book.pod_put(value, now=now)
            elif isinstance(value, NodeInventory):
                self.book.node_put(value)
            elif kind == "pod":
                self.book.pod_gone(PodUid(name))
            else:
                self.book.node_dropped(name)


needs = st.tuples(
    st.integers(1, 2), st.sampled_from([1, 3, 4, 8]), st.sampled_from([0, 30, 50, 100])
)
names_of_nodes = st.lists(st.sampled_from(NODES), min_size=1, unique=True)


class Schedulers(RuleBasedStateMachine):
    uids = Bundle("uids")

    @initialize()
    def begin(self) -> None:
        self.now = 100.0
        self.number = 0
        self.leader = 0
        self.server = Server()
        self.flying: list[Request_] = []
        for name in NODES:
            self.server.set_node(name, inventory(name))
        self.replicas = [Replica(self.server), Replica(self.server)]

    @property
    def book(self) -> Book:
        return self.replicas[self.leader].book

    # ---- people ----------------------------------------------------------------------------------

    @rule(target=uids, asked=needs, cpu=st.sampled_from([0, 1500]))
    def create(self, asked: tuple[int, int, int], cpu: int) -> PodUid:
        self.number += 1
        uid = PodUid(f"pod-{self.number}")
        count, mebibytes, percent = asked
        request = Request(
            MemoryAmount(f"{mebibytes}Mi", size_bytes=mebibytes << 20),
            count=count,
            compute=Compute(percent * 100, 10_000, is_governed=True),
        )
        wanted = WantedContainer(name="main", request=request, kind=ContainerKind.REGULAR)
        need = PodNeed(uid=uid, namespace="ns", name=str(uid), cpu_milli=cpu, containers=(wanted,))
        self.server.pods[uid] = ServerPod(need, 0)
        self.server.changed(uid)
        return uid

    @rule(uid=uids)
    def delete(self, uid: PodUid) -> None:
        if self.server.pods.pop(uid, None) is not None:
            self.server.changed(uid)

    @rule(uid=uids)
    def finish(self, uid: PodUid) -> None:
        pod = self.server.pods.get(uid)
        if pod is not None and pod.node:
            pod.has_ended = True
            self.server.changed(uid)

    @rule(uid=uids)
    def edit(self, uid: PodUid) -> None:
        if uid in self.server.pods:
            self.server.changed(uid)

    @rule(uid=uids, node=st.sampled_from(NODES), other=uids)
    def bind_by_hand_with_anothers_placement(self, uid: PodUid, node: str, other: PodUid) -> None:
        pod = self.server.pods.get(uid)
        stolen = self.server.pods.get(other)
        if pod is not None and stolen is not None and not pod.node and uid != other:
            pod.node, pod.placement = node, stolen.placement or FORGED
            self.server.changed(uid)

    @rule(name=st.sampled_from(NODES), devices=st.integers(0, 2))
    def change_node(self, name: str, devices: int) -> None:
        self.server.set_node(name, inventory(name, devices) if devices else None)

    # ---- kube-scheduler --------------------------------------------------------------------------

    @rule(uid=uids, names=names_of_nodes)
    def filter(self, uid: PodUid, names: list[str]) -> None:
        need, version = self._asked(uid)
        choice = self.book.filter(need, names, now=self.now, version=version)
        assert set(choice.best) <= set(names)
        assert len(set(choice.best)) == len(choice.best) <= 2
        if not choice.best:
            assert set(choice.refused) == set(names)

    @rule(uid=uids, names=names_of_nodes)
    def prioritize(self, uid: PodUid, names: list[str]) -> None:
        need, _ = self._asked(uid)
        assert sorted(self.book.prioritize(need, names, now=self.now)) == sorted(names)

    @rule(uid=uids, node=st.sampled_from(NODES))
    def bind(self, uid: PodUid, node: str) -> None:
        need, version = self._asked(uid)
        order = self.book.begin_bind(need, node, now=self.now, version=version)
        if not isinstance(order, Order):
            return
        booking = order.booking
        assert booking.node == node
        assert self.book.cluster.booking(uid) == booking
        if not order.is_begun:
            text = write_booking(booking)
            assert read_booking(text, uid=uid, node=node, cpu_milli=need.cpu_milli) == booking
            self.flying.append(Request_(order, self.leader, text))

    def _asked(self, uid: PodUid) -> tuple[PodNeed, str]:
        pod = self.server.pods.get(uid)
        if pod is not None:
            self.last = (pod.need, str(pod.version))
            return self.last
        # It asks about a pod that is gone: late, as of some version.
        gone = PodNeed(uid=uid, namespace="ns", name=str(uid), containers=self._some_containers())
        return gone, "1"

    def _some_containers(self) -> tuple[WantedContainer, ...]:
        request = Request(MemoryAmount("1Mi", size_bytes=1 << 20))
        return (WantedContainer(name="main", request=request),)

    # ---- the network -----------------------------------------------------------------------------

    @precondition(lambda self: self.flying)
    @rule(data=st.data(), is_answered=st.booleans(), is_repeated=st.booleans())
    def execute(self, data: st.DataObject, is_answered: bool, is_repeated: bool) -> None:  # noqa: FBT001
        """The server executes a request, and the answer comes or is lost."""
        request = self.flying.pop(data.draw(st.integers(0, len(self.flying) - 1)))
        is_bound = self.server.bind(request)
        if request.replica != self.leader:
            return
        if not is_answered:
            self.book.unknown(request.order.booking.uid, now=self.now)
            if is_repeated:
                self.flying.append(request)
        elif is_bound:
            self.book.bound(request.order.booking.uid, now=self.now)
        else:
            self._conflict(request)

    @precondition(lambda self: self.flying)
    @rule(data=st.data())
    def repeat(self, data: st.DataObject) -> None:
        """A request is not answered in time and made again, while the first may still arrive."""
        request = data.draw(st.sampled_from(self.flying))
        self.replicas[request.replica].book.unknown(request.order.booking.uid, now=self.now)
        self.flying.append(request)

    def _conflict(self, request: Request_) -> None:
        """What `Binder` does: reads the pod. One that has changed is left to kube-scheduler."""
        uid = request.order.booking.uid
        pod = self.server.read(uid)
        self.book.reread(uid, pod, now=self.now)
        if pod is None or not pod.node or pod.booking != request.order.booking:
            self.book.refused(uid, now=self.now)

    @rule(replica=st.integers(0, 1), number=st.integers(1, 5))
    def hear(self, replica: int, number: int) -> None:
        self.replicas[replica].hear(self.now, number)

    @rule(seconds=st.sampled_from([0.1, 1.0, 6.0, 700.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        for replica in self.replicas:
            for each in replica.book.tick(self.now):
                replica.book.reread(each.uid, self.server.read(each.uid), now=self.now)

    @rule(is_killed=st.booleans(), executed=st.integers(0, 3))
    def fail_over(self, is_killed: bool, executed: int) -> None:  # noqa: FBT001
        """The leader is gone; what it has sent is over by the time that the other one leads."""
        for number, request in enumerate(list(self.flying)):
            if request.replica == self.leader:
                self.flying.remove(request)
                if number < executed and self.server.bind(request) and not is_killed:
                    self.book.bound(request.order.booking.uid, now=self.now)
                elif not is_killed:
                    self.book.unknown(request.order.booking.uid, now=self.now)
        if is_killed:
            self.replicas[self.leader] = Replica(self.server)
        else:
            self.book.rest(now=self.now)
        self.leader = 1 - self.leader
        self.replicas[self.leader].hear(self.now)  # the consistent look

    # ---- the judge -------------------------------------------------------------------------------

    @invariant()
    def nothing_is_given_twice(self) -> None:
        for uuid, (memory, compute) in self.server.given().items():
            assert memory <= MEMORY, uuid
            assert compute <= 10_000, uuid

    @invariant()
    def the_books_are_right(self) -> None:
        for replica in self.replicas:
            book = replica.book
            book.cluster.check_invariants()
            for uid in self.server.pods:
                state = book.state(uid)
                held = state in {State.EXPECTED, State.RESERVED, State.UNKNOWN, State.BOUND}
                assert (book.booking(uid) is not None) == held
                if held:
                    assert book.cluster.booking(uid) == book.booking(uid)

    @invariant()
    def who_is_bound_has_a_booking(self) -> None:
        for replica in self.replicas:
            if replica.heard < len(self.server.events):
                continue
            for uid in self.server.pods:
                pod = self.server.read(uid)
                assert pod is not None
                if pod.booking is not None:
                    assert replica.book.cluster.booking(uid) == pod.booking

    def teardown(self) -> None:
        if not hasattr(self, "server"):
            return
        everyone = list(self.server.pods)
        for request in self.flying:
            is_bound = self.server.bind(request)
            book = self.replicas[request.replica].book
            (book.bound if is_bound else book.refused)(request.order.booking.uid, now=self.now)
        self.flying.clear()
        for uid in everyone:
            self.server.pods.pop(uid)
            self.server.changed(uid)
        for replica in self.replicas:
            replica.hear(self.now)
            for _ in range(3):
                self.now += 700.0
                for each in replica.book.tick(self.now):
                    replica.book.reread(each.uid, None, now=self.now)
            assert not any(replica.book.counts().values())
            for number in range(self.number + 1):
                assert replica.book.cluster.booking(PodUid(f"pod-{number}")) is None


TestSchedulers = Schedulers.TestCase
TestSchedulers.settings = hypothesis_settings(
    TestSchedulers.settings, max_examples=80, stateful_step_count=40, deadline=None
)
