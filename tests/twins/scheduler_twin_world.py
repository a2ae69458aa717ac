# SPDX-License-Identifier: Apache-2.0
"""Two replicas of the scheduler over one API server, on a loop and a clock cranked by hand.

Book, keeper, quotas, extender and binder are the real ones. The server carries requests out when it
is told to: late, in another order, without an answer, or never. It keeps what it was asked, and
checks each binding that it carries out against what the pod asks for at that moment.
"""

from __future__ import annotations

import asyncio
import copy
import json
import math
from collections import defaultdict
from collections.abc import Coroutine, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from fractions import Fraction
from random import Random
from typing import Any

from scheduler_twin import cluster_pod_of

from allotment.dialects.own.placement import PLACEMENT, read_booking
from allotment.kube.bindings import Binding
from allotment.kube.clients import Backoff
from allotment.kube.errors import ConflictError, DeniedError, KubeError, UnreachableError
from allotment.model.clusters import (
    ClusterPod,
    NamespaceQuota,
    NodeDevice,
    NodeInventory,
    PodBooking,
    PodNeed,
)
from allotment.model.pods import PodUid
from allotment.placement.cluster.cluster import Cluster
from allotment.scheduler.core.book import Book
from allotment.scheduler.core.cluster_events import ClusterEventHandler
from allotment.scheduler.core.quota import QuotaBook
from allotment.scheduler.core.reservations import BookSettings
from allotment.scheduler.extender.binder import Binder
from allotment.scheduler.extender.extender import Extender, NotLeadingError

MEMORY = 8 << 20
NODES = {"a": 1, "b": 2}
"""With their GPUs: few, so that pods come into each other's way."""
LATE_S = 60.0
LEASE_S = 2.5
QUOTA = 3
MEMORY_NOTE = "allotment.dev/memory"
PARTS = {
    "12.5%": Fraction(1, 8),
    "37.5%": Fraction(3, 8),
    "50%": Fraction(1, 2),
    "100%": Fraction(1),
}


def inventory(name: str, devices: int) -> NodeInventory:
    return NodeInventory(
        name=name,
        devices=tuple(
            NodeDevice(uuid=f"GPU-{name}{number}", model="M", memory_bytes=MEMORY)
            for number in range(devices)
        ),
        cpu_milli=4000,
        memory_bytes=1 << 30,
    )


class CrankedLoop(asyncio.SelectorEventLoop):
    """Runs what is to be run now, and no further: its time is what it was told."""

    def __init__(self) -> None:
        self.now = 1000.0
        super().__init__()
        self.errors: list[Mapping[str, Any]] = []
        self.set_exception_handler(lambda _, context: self.errors.append(context))

    def time(self) -> float:
        return self.now

    def settle(self) -> None:
        """Run until nothing is left that could be run now."""
        is_busy = True
        while is_busy:
            self.call_soon(self.stop)
            self.run_forever()
            timers = self._scheduled  # type: ignore[attr-defined]
            is_due = bool(timers) and timers[0].when() <= self.now
            is_busy = bool(self._ready) or is_due  # type: ignore[attr-defined]
        assert not self.errors, self.errors


@dataclass(eq=False)
class Call:
    """A request of a replica."""

    of: Replica
    asked: Binding | PodUid
    answer: asyncio.Future[Any]
    result: Any = None
    is_carried_out: bool = False
    late_until: float = math.inf
    """Nobody waits for the answer: it is carried out until then, or never."""

    def __str__(self) -> str:
        return f"{'bind' if isinstance(self.asked, Binding) else 'read'} of {self.of.name}"


@dataclass
class Server:
    """Pods as they are written, and everything that was told of them, in one order."""

    loop: CrankedLoop
    pods: dict[PodUid, dict[str, Any]] = field(default_factory=dict)
    remembered: dict[PodUid, dict[str, Any]] = field(default_factory=dict)
    """Pods as they were last, also those that are gone: kube-scheduler asks late."""
    nodes: dict[str, NodeInventory] = field(default_factory=dict)
    events: list[tuple[str, str, ClusterPod | NodeInventory | None]] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    version: int = 0
    wrong: list[str] = field(default_factory=list)
    """Bindings with a placement of something else than was asked for."""
    _as_read: dict[PodUid, ClusterPod | None] = field(default_factory=dict)

    def changed(self, uid: PodUid) -> None:
        self.version += 1
        pod = self.pods.get(uid)
        if pod is not None:
            pod["metadata"]["resourceVersion"] = str(self.version)
            self.remembered[uid] = copy.deepcopy(pod)
        self._as_read[uid] = None if pod is None else cluster_pod_of(pod)
        self.events.append(("pod", uid, self.read(uid)))

    def set_node(self, name: str, node: NodeInventory | None) -> None:
        if node is None:
            self.nodes.pop(name, None)
        else:
            self.nodes[name] = node
        self.events.append(("node", name, node))

    def read(self, uid: PodUid) -> ClusterPod | None:
        return self._as_read.get(uid)

    # ---- requests --------------------------------------------------------------------------------

    def carry_out(self, call: Call) -> None:
        """Do what was asked; the answer stays here."""
        if call.is_carried_out:
            return
        call.is_carried_out = True
        if isinstance(call.asked, Binding):
            call.result = self._bind(call.asked)
        else:
            call.result = self.read(call.asked)

    def answer(self, call: Call) -> None:
        """Carry a request out if that is still to be done, and let its answer arrive."""
        self.carry_out(call)
        self.calls.remove(call)
        if not call.answer.done():
            if isinstance(call.result, KubeError):
                call.answer.set_exception(call.result)
            else:
                call.answer.set_result(call.result)

    def fail(self, call: Call, error: KubeError) -> None:
        """Answer with an error; what has not been done is not done any more."""
        self.calls.remove(call)
        if not call.answer.done():
            call.answer.set_exception(error)

    def lose(self, call: Call) -> None:
        """Let whoever asked give up waiting. It may be carried out for some time yet."""
        if not call.answer.done():
            call.answer.set_exception(UnreachableError("no answer in time"))
        self.abandoned(call)

    def abandoned(self, call: Call) -> None:
        call.late_until = min(call.late_until, self.loop.now + LATE_S)
        if call.is_carried_out and call in self.calls:
            self.calls.remove(call)

    def expire(self) -> None:
        """Forget what is too late by now."""
        self.calls = [each for each in self.calls if self.loop.now < each.late_until]

    def _bind(self, binding: Binding) -> KubeError | None:
        pod = self.pods.get(binding.uid)
        if pod is None or pod["metadata"]["uid"] != binding.uid:
            return ConflictError("the uid is another one", status=409)
        if binding.version != pod["metadata"]["resourceVersion"]:
            return ConflictError("the version is another one", status=409)
        if pod["spec"].get("nodeName"):
            return ConflictError("it is bound already", status=409)
        self._check(pod, binding)
        pod["spec"]["nodeName"] = binding.node
        pod["metadata"]["annotations"] |= dict(binding.annotations)
        self.changed(binding.uid)
        return None

    def _check(self, pod: dict[str, Any], binding: Binding) -> None:
        found = read_booking(binding.annotations[PLACEMENT], uid=binding.uid, node=binding.node)
        [container] = found.containers
        given = [(each.memory, each.guarantee) for each in container.devices]
        limits = pod["spec"]["containers"][0]["resources"]["limits"]
        number = int(limits["allotment.dev/gpu"])
        memory = int(MEMORY * PARTS[pod["metadata"]["annotations"][MEMORY_NOTE]])
        percent = int(limits.get("allotment.dev/gpu-compute", 0))
        asked = [(memory, percent * 100 // number)] * number
        if given != asked:
            self.wrong.append(f"{binding.uid}: asked for {asked}, given {given}")

    # ---- the judge -------------------------------------------------------------------------------

    def bookings(self) -> Iterator[PodBooking]:
        for uid in self.pods:
            pod = self.read(uid)
            if pod is not None and pod.booking is not None:
                yield pod.booking

    def given(self) -> dict[str, tuple[int, int]]:
        """Memory and compute that pods have of each device."""
        sums: dict[str, list[int]] = defaultdict(lambda: [0, 0])
        for booking in self.bookings():
            for container in booking.containers:
                for device in container.devices:
                    sums[device.uuid][0] += device.memory
                    sums[device.uuid][1] += device.guarantee
        return {uuid: (memory, compute) for uuid, (memory, compute) in sums.items()}


class _Api:
    """The way of one replica to the server."""

    def __init__(self, server: Server, replica: Replica) -> None:
        self._server = server
        self._replica = replica

    async def bind(self, binding: Binding) -> None:
        await self._ask(binding)

    async def read(self, *, uid: PodUid, namespace: str, name: str) -> ClusterPod | None:
        del namespace, name
        found = await self._ask(uid)
        assert found is None or isinstance(found, ClusterPod)
        return found

    async def _ask(self, asked: Binding | PodUid) -> object:
        loop = asyncio.get_running_loop()
        call = Call(self._replica, asked, loop.create_future())
        self._server.calls.append(call)
        try:
            return await call.answer
        except asyncio.CancelledError:
            self._server.abandoned(call)
            raise


class Nobody:
    """Is told, and remembers nothing."""

    def refused(self, pod: ClusterPod, text: str, *, is_mistaken: bool) -> None:
        assert text, (pod, is_mistaken)

    def rejected(self, reasons: Mapping[str, int]) -> None:
        assert all(reasons), reasons

    def bound(self, need: PodNeed, booking: PodBooking | None) -> None:
        del need, booking

    def unbound(self, pod: ClusterPod | PodNeed, node: str, text: str) -> None:
        assert text, (pod, node)


class Replica:
    """One process. `lease_until` is what it believes."""

    def __init__(self, server: Server, name: str) -> None:
        self.server, self.loop, self.name = server, server.loop, name
        self.lease_until = -math.inf
        self.quotas = QuotaBook()
        hard = {"limits.allotment.dev/gpu": str(QUOTA)}
        self.quotas.set_quotas([NamespaceQuota(namespace="ns", name="q", hard=hard)])
        self.book = Book(
            Cluster(node_policies=("binpack",), device_policies=("binpack",)),
            settings=BookSettings(candidates=2),
            quotas=self.quotas,
        )
        self.keeper = ClusterEventHandler(self.book, self.quotas, clock=self.loop.time)
        self.pods: dict[str, ClusterPod] = {}
        self.binder = Binder(
            self.book,
            _Api(server, self),
            clock=self.loop.time,
            left_s=self.left_s,
            backoff=lambda: Backoff(first_s=0.2, most_s=5.0, random=Random(1)),  # noqa: S311
            late_s=LATE_S,
        )
        self.extender = Extender(
            self.book,
            self.binder,
            observer=Nobody(),
            pods=self.pods.get,
            leads=lambda: bool(self.left_s()),
            clock=self.loop.time,
        )
        self.tasks: set[asyncio.Task[Any]] = set()
        self.rereading: set[PodUid] = set()
        self.heard = len(server.events)
        for node in server.nodes.values():
            self.keeper.node_put(node)
        for uid in server.pods:
            self._take(uid, server.read(uid))

    def left_s(self) -> float:
        return max(0.0, self.lease_until - self.loop.now)

    def hear(self, number: int | None = None) -> None:
        """The watch tells of some more changes; None: of all."""
        events = self.server.events[self.heard :][:number]
        self.heard += len(events)
        for kind, name, value in events:
            if kind == "pod":
                assert value is None or isinstance(value, ClusterPod)
                self._take(PodUid(name), value)
            elif isinstance(value, NodeInventory):
                self.keeper.node_put(value)
            else:
                self.keeper.node_dropped(name)
        self.loop.settle()

    def _take(self, uid: PodUid, pod: ClusterPod | None) -> None:
        if pod is None:
            if self.pods.pop(uid, None) is not None:
                self.keeper.pod_gone(uid)
        elif self.pods.get(uid) != pod:
            self.pods[uid] = pod
            self.keeper.pod_put(pod)

    def start(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = self.loop.create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        self.loop.settle()
        return task

    def tick(self) -> None:
        for each in self.book.tick(self.loop.now):
            if each.uid not in self.rereading:
                self.rereading.add(each.uid)
                self.start(self._reread(each.uid, each.namespace, each.name))

    async def _reread(self, uid: PodUid, namespace: str, name: str) -> None:
        with suppress(KubeError):
            await self.binder.reread(uid, namespace, name)
        self.rereading.discard(uid)

    def kill(self) -> None:
        """End it: what it has asked for, nobody waits for any more."""
        self.lease_until = -math.inf
        for task in [*self.tasks, *self.binder._tasks.values()]:  # noqa: SLF001 - all at once
            task.cancel()
        self.loop.settle()


class World:
    """The server, and both replicas, one of which leads."""

    def __init__(self) -> None:
        self.loop = CrankedLoop()
        self.server = Server(self.loop)
        for name, devices in NODES.items():
            self.server.set_node(name, inventory(name, devices))
        self.replicas = [Replica(self.server, "first"), Replica(self.server, "second")]
        self.leading = 0
        self.pass_time(0)

    @property
    def leader(self) -> Replica:
        return self.replicas[self.leading]

    def close(self) -> None:
        for each in self.replicas:
            each.kill()
        self.loop.close()

    def pass_time(self, seconds: float, *, renews: bool = True) -> None:
        self.loop.now += seconds
        if renews:
            self.leader.lease_until = self.loop.now + LEASE_S
        self.server.expire()
        self.loop.settle()

    def change_leader(self, how: str, carried_out: Random) -> None:
        """Let the other replica lead.

        What the one before has asked for is over by then, carried out or not: a server ends what
        nobody waits for any more. (One that does not, can be obeyed late; no test can help that.)
        """
        old = self.leader
        if how == "cut off":
            self.pass_time(LEASE_S + 0.5, renews=False)
        elif how == "killed":
            old.kill()
        else:  # it ends by itself, and says so
            old.lease_until = -math.inf
            old.book.step_down(now=self.loop.now)
            drained = old.start(old.binder.drain(timeout_s=5))
            for call in list(self.server.calls):
                if call.of is old and carried_out.random() < 0.7:
                    self.server.answer(call)
            self.loop.settle()
            self.pass_time(5.0, renews=False)
            assert drained.done()
        for call in list(self.server.calls):
            if call.of is old and isinstance(call.asked, Binding):
                assert call.answer.done(), f"{call}: still under way without a Lease"
                if carried_out.random() < 0.5:
                    self.server.carry_out(call)
                self.server.calls.remove(call)
        if how == "killed":
            self.replicas[self.leading] = Replica(self.server, old.name)
        self.leading = 1 - self.leading
        self.leader.hear()
        self.pass_time(0)
        old.book.step_down(now=self.loop.now)
        self.loop.settle()

    # ---- kube-scheduler --------------------------------------------------------------------------

    def filter(self, pod: dict[str, Any], names: list[str]) -> list[str]:
        body = {"Pod": pod, "Nodes": None, "NodeNames": names}
        answer = json.loads(self.leader.extender.filter(json.dumps(body).encode()))
        found = answer.get("NodeNames") or []
        assert set(found) <= set(names)
        assert len(set(found)) == len(found) <= 2
        return list(found)

    def prioritize(self, pod: dict[str, Any], names: list[str]) -> None:
        body = {"Pod": pod, "Nodes": None, "NodeNames": names}
        answer = json.loads(self.leader.extender.prioritize(json.dumps(body).encode()))
        assert sorted(each["Host"] for each in answer) == sorted(names)

    def bind(self, uid: PodUid, node: str) -> None:
        """Have a pod bound; who is told that it is, is told the truth."""
        body = {"PodName": str(uid), "PodNamespace": "ns", "PodUID": str(uid), "Node": node}
        replica = self.leader

        async def asked() -> None:
            try:
                answer = json.loads(await replica.extender.bind(json.dumps(body).encode()))
            except NotLeadingError:
                return
            pod = self.server.pods.get(uid)
            if not answer["Error"] and pod is not None:
                assert pod["spec"].get("nodeName") == node, "bound, it was said"

        replica.start(asked())


REFUSED = DeniedError("no", status=403)
BUSY = KubeError("too many requests", status=429)
BROKEN = KubeError("etcd is away", status=500)
