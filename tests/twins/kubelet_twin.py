# SPDX-License-Identifier: Apache-2.0
"""Twins of what the tenancy stands between: a kubelet, an API server's view, a state folder.

The kubelet's device manager as it was seen (docs/designs/identity.md): ids of init containers go on
to later containers of the pod, entries are written before `PreStartContainer`, those of pods that
are gone stay until the next admission, a container that cannot be started is tried again.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto

from allotment.agent.allocation import Tenants
from allotment.agent.protocols import CheckpointEntry
from allotment.agent.resources import GPU_COMPUTE, GPU_MEMORY, GPU_SHARE, Offer, Resource, Slot
from allotment.model.accounting import beside, phases
from allotment.model.errors import (
    AllotError,
    BusyError,
    DoesNotFitError,
    LimitBelowUseError,
    StateError,
)
from allotment.model.pods import Container, ContainerKind, Owner, Pod, PodUid
from allotment.model.requests import Request
from allotment.model.shares import Injection, Share, ShareDevice, ShareId
from allotment.model.structs import replace
from allotment.shares.placing import ShareOrder, fresh_id
from allotment.shares.pods import NodePolicy

NVIDIA_GPU = "nvidia.com/gpu"
UNIT = 1 << 30
"""What memory is counted in here: a device has ROOM of it."""
ROOM = 10
SOFT_DEVICES = ("GPU-soft-0", "GPU-soft-1")
WHOLE_DEVICES = ("GPU-whole-0", "GPU-whole-1")
OFFER = Offer(
    resources=(
        Resource(
            name=GPU_SHARE,
            mode="soft",
            slots=tuple(Slot(f"share::{number}", None) for number in range(12)),
        ),
        Resource(
            name=NVIDIA_GPU,
            mode="exclusive",
            slots=tuple(Slot(uuid, uuid) for uuid in WHOLE_DEVICES),
        ),
    ),
    modes={
        **dict.fromkeys(SOFT_DEVICES, "soft"),
        **dict.fromkeys(WHOLE_DEVICES, "exclusive"),
    },
    shared=dict.fromkeys(SOFT_DEVICES, ("soft",)),
)


def any_policy(order: ShareOrder) -> NodePolicy:
    """What a twin of the store does not look at."""
    del order
    return NodePolicy(devices=())


# ---- the state folder ----------------------------------------------------------------------------


class StoreTwin:
    """A `ShareStore` in memory. `uses` says whether a process is in a share."""

    def __init__(self, uses: Callable[[ShareId], bool]) -> None:
        self.shares: dict[ShareId, Share] = {}
        self.contents: dict[ShareId, tuple[Owner, tuple[str, ...]]] = {}
        """What each name has ever stood for."""
        self.uses = uses
        self.clock = 1000.0
        self.prepared: list[ShareId] = []
        self.used: dict[ShareId, int] = {}
        """Memory in use, which no limit goes below."""
        self.lock = threading.RLock()
        """As the state folder's: who makes or ends a share is alone."""

    def prepare(self, order: ShareOrder, policy: NodePolicy) -> Share:
        del policy
        with self.lock:
            return self._prepare(order)

    def _prepare(self, order: ShareOrder) -> Share:
        assert order.owner is not None
        self.prepared.append(order.id)
        there = self.shares.get(order.id)
        if there is not None:
            assert there.owner is not None
            if (there.owner.uid, there.owner.container) != (
                order.owner.uid,
                order.owner.container,
            ):
                raise StateError(f"share {order.id} is {there.owner}'s")
            return there
        request = order.request
        need = ROOM if request.memory.size_bytes is None else request.memory.size_bytes // UNIT
        uuids = self._place(order, need)
        share = Share(
            id=order.id,
            name=str(order.owner),
            created=self.clock,
            mode=request.mode,
            devices=tuple(
                ShareDevice(uuid, "T4", need * UNIT, compute=request.compute) for uuid in uuids
            ),
            injection=order.injection or Injection.CDI,
            owner=order.owner,
        )
        self.shares[order.id] = share
        before = self.contents.setdefault(order.id, (order.owner, uuids))
        assert before == (order.owner, uuids), "a name has one content, for ever"
        return share

    def resize(self, share: ShareId, request: Request, policy: NodePolicy) -> Share:
        del policy
        with self.lock:
            found = self.shares[share]
            size = request.memory.size_bytes or 0
            if size < self.used.get(share, 0):
                raise LimitBelowUseError(need=self.used[share], have=size)
            others = sum(
                each.memory_bytes
                for other in self.shares.values()
                for each in other.devices
                if other.id != share and each.uuid == found.devices[0].uuid
            )
            if size + others > ROOM * UNIT:
                raise DoesNotFitError(f"need {size}, have {ROOM * UNIT - others}", hint="less")
            devices = tuple(
                replace(each, memory_bytes=size, compute=request.compute) for each in found.devices
            )
            self.shares[share] = replace(found, devices=devices, is_resized=True)
            return self.shares[share]

    def end(self, share: ShareId) -> None:
        with self.lock:
            if share in self.shares and self.uses(share):
                raise BusyError(f"share {share} is in use")
            self.shares.pop(share, None)

    def owned(self) -> tuple[Share, ...]:
        with self.lock:
            return tuple(self.shares.values())

    def _place(self, order: ShareOrder, need: int) -> tuple[str, ...]:
        room = {
            uuid: ROOM - self.booked(uuid, seen_by=order.owner)
            for uuid in (order.devices or order.candidates or ())
        }
        fitting = sorted((uuid for uuid in room if room[uuid] >= need), key=lambda each: room[each])
        if order.devices and len(fitting) == len(set(order.devices)):
            return order.devices
        if order.devices or len(fitting) < order.request.count:
            raise DoesNotFitError(f"need {need} of each, have {room}", hint="make room")
        return tuple(sorted(fitting[: order.request.count]))

    def booked(self, uuid: str, *, seen_by: Owner | None = None) -> int:
        """How much of a device is given, with each pod's containers counted by phase."""
        pods: dict[PodUid, list[tuple[ShareId, Owner]]] = {}
        sizes: dict[ShareId, int] = {}
        for share in self.shares.values():
            for device in share.devices:
                if device.uuid == uuid and share.owner is not None:
                    sizes[share.id] = device.memory_bytes // UNIT
                    pods.setdefault(share.owner.uid, []).append((share.id, share.owner))
        total = 0
        for uid, members in pods.items():
            own = seen_by is not None and uid == seen_by.uid
            sets = beside(seen_by, members) if own and seen_by else tuple(phases(members))
            total += max((sum(sizes[each] for each in members_) for members_ in sets), default=0)
        return total


# ---- the API server's view -----------------------------------------------------------------------


class PodsTwin:
    """`Pods`, as one agent has heard of them."""

    def __init__(self) -> None:
        self._pods: dict[PodUid, Pod] = {}
        self._changed = asyncio.Event()
        self.is_synced = False
        self.deleted: list[PodUid] = []
        self.annotated: list[PodUid] = []

    def hear(self, uid: PodUid, pod: Pod | None) -> None:
        """One event of the watch."""
        if pod is None:
            self._pods.pop(uid, None)
        else:
            self._pods[uid] = pod
        self._changed.set()

    def get(self, uid: PodUid) -> Pod | None:
        return self._pods.get(uid)

    def all(self) -> tuple[Pod, ...]:
        return tuple(self._pods.values())

    async def delete(self, pod: Pod) -> None:
        self.deleted.append(pod.uid)

    async def annotate(self, pod: Pod, annotations: Mapping[str, str]) -> None:
        assert annotations
        self.annotated.append(pod.uid)

    async def wait_for(self, uid: PodUid, *, timeout_s: float) -> Pod | None:
        waited = 0.0
        while uid not in self._pods and waited < timeout_s:
            await asyncio.sleep(0.001)
            waited += 0.001
        return self._pods.get(uid)

    async def changes(self) -> AsyncIterator[None]:
        while True:
            yield
            await self._changed.wait()
            self._changed.clear()


# ---- the kubelet ---------------------------------------------------------------------------------


class State(Enum):
    """Of a container."""

    WAITING = auto()
    RUNNING = auto()
    FINISHED = auto()


@dataclass
class ContainerTwin:
    """A container: what it asks for, and how it is."""

    name: str
    kind: ContainerKind
    resource: str | None = None
    count: int = 1
    memory: int | None = None
    """Of each device, in UNITs."""
    compute: int | None = None
    """Percent of each device."""
    state: State = State.WAITING
    has_run: bool = False
    restarts: int = 0
    share: ShareId | None = None
    """What it runs with."""

    def limits(self) -> dict[str, int]:
        found = {} if self.resource is None else {self.resource: self.count}
        if self.memory is not None:
            found[GPU_MEMORY] = self.memory * UNIT * self.count
        if self.compute is not None:
            found[GPU_COMPUTE] = self.compute * self.count
        return found


@dataclass
class PodTwin:
    """A pod on the node."""

    uid: PodUid
    containers: list[ContainerTwin]
    has_ended: bool = False
    annotations: dict[str, str] = field(default_factory=dict)
    has_controller: bool = False

    def seen(self) -> Pod:
        """How the kubelet tells the API server of it."""
        return Pod(
            uid=self.uid,
            namespace="team",
            name=f"pod-{self.uid}",
            node="node-1",
            annotations=self.annotations,
            containers=tuple(
                Container(
                    each.name,
                    each.kind,
                    each.limits(),
                    has_finished=each.state is State.FINISHED or self.has_ended,
                    is_started=each.has_run,
                    is_running=each.state is State.RUNNING,
                    restarts=each.restarts,
                )
                for each in self.containers
            ),
            has_ended=self.has_ended,
            has_controller=self.has_controller,
        )

    def next_to_start(self) -> list[ContainerTwin]:
        """Those that the kubelet would start: one init container after the other, then the rest."""
        for each in self.containers:
            if each.kind is ContainerKind.INIT and each.state is not State.FINISHED:
                return [each] if each.state is State.WAITING else []
            if each.kind is ContainerKind.SIDECAR and each.state is State.WAITING:
                return [each]
        return [
            each
            for each in self.containers
            if each.kind is ContainerKind.REGULAR and each.state is State.WAITING
        ]


class KubeletTwin:
    """One node's kubelet, with its device manager and its checkpoint."""

    def __init__(self, offer: Offer = OFFER) -> None:
        self.offer = offer
        self.pods: dict[PodUid, PodTwin] = {}
        self.table: list[CheckpointEntry] = []
        self.is_checkpoint_removed = False
        self.is_damaged = False
        """Its checkpoint stays unreadable, whatever it writes."""
        self.checkpoint_writes = 0
        """How often it was asked to write all that it knows."""
        self.news: deque[tuple[PodUid, Pod | None]] = deque()
        """What the API server has not been told yet, or the agent not by it."""

    def entries(self) -> tuple[CheckpointEntry, ...]:
        if self.is_damaged:
            raise StateError("no checkpoint")
        return () if self.is_checkpoint_removed else tuple(self.table)

    def write_checkpoint(self) -> None:
        """It writes all that it knows, at each list of devices."""
        self.is_checkpoint_removed = False
        self.checkpoint_writes += 1

    def running(self) -> Iterator[tuple[PodTwin, ContainerTwin]]:
        for pod in self.pods.values():
            for container in pod.containers:
                if container.state is State.RUNNING and container.resource is not None:
                    yield pod, container

    def uses(self, share: ShareId) -> bool:
        """Is a process seen in it? In a whole GPU that was handed in without CDI, none ever is."""
        return any(
            container.share == share and container.resource == GPU_SHARE
            for _, container in self.running()
        )

    def tell(self, pod: PodTwin) -> None:
        self.news.append((pod.uid, pod.seen()))

    def admit(self, pod: PodTwin, tenancy: Tenants | None) -> bool:
        """Take a pod in: ids for each of its containers. `tenancy` None: another plugin answers."""
        self.table = [each for each in self.table if each.pod in self.pods]
        self.table = [each for each in self.table if not self.pods[each.pod].has_ended]
        self.pods[pod.uid] = pod
        if not self._allocate(pod, tenancy):
            pod.has_ended = True
        self.tell(pod)
        return not pod.has_ended

    def _allocate(self, pod: PodTwin, tenancy: Tenants | None) -> bool:
        reuse: dict[str, set[str]] = {}
        for container in pod.containers:
            if container.resource is None:
                continue
            ids = self._take(container, reuse.setdefault(container.resource, set()))
            if ids is None:
                return False
            share = None
            if tenancy is not None:
                share = fresh_id()
            self.table.append(
                CheckpointEntry(
                    pod=pod.uid,
                    container=container.name,
                    resource=container.resource,
                    ids=frozenset(ids),
                    share=share,
                    injection=Injection.NONE if share is None else Injection.CDI,
                )
            )
        return True

    def _take(self, container: ContainerTwin, reuse: set[str]) -> set[str] | None:
        resource = self.offer.resource(container.resource or "")
        assert resource is not None
        given = {each for entry in self.table for each in entry.ids}
        free = [slot.id for slot in resource.slots if slot.id not in given]
        ids = set([*sorted(reuse), *free][: container.count])
        if len(ids) < container.count:
            return None
        if container.kind is ContainerKind.INIT:
            reuse |= ids
        else:
            reuse -= ids
        return ids

    def entry(self, pod: PodTwin, container: ContainerTwin) -> CheckpointEntry:
        return next(
            each for each in self.table if (each.pod, each.container) == (pod.uid, container.name)
        )

    async def start(
        self,
        pod: PodTwin,
        container: ContainerTwin,
        tenancy: Tenants,
        resolves: Callable[[ShareId], bool],
    ) -> str:
        """Start a container; return why it waits. `resolves`: does the runtime know the name?"""
        if container.resource is None:
            self._runs(pod, container, None)
            return ""
        entry = self.entry(pod, container)
        try:
            await tenancy.pre_start(container.resource, entry.ids)
        except AllotError as error:
            return error.message
        if pod.uid not in self.pods or container.state is not State.WAITING:
            return ""
        if entry.share is not None and not resolves(entry.share):
            return "unresolvable CDI devices"
        self._runs(pod, container, entry.share)
        return ""

    def _runs(self, pod: PodTwin, container: ContainerTwin, share: ShareId | None) -> None:
        container.restarts += container.has_run
        container.state, container.has_run, container.share = State.RUNNING, True, share
        self.tell(pod)

    def finish(self, pod: PodTwin, container: ContainerTwin, *, for_good: bool) -> None:
        """A container's process ends."""
        container.state = State.FINISHED if for_good else State.WAITING
        container.share = None
        regular = [each for each in pod.containers if each.kind is ContainerKind.REGULAR]
        if all(each.state is State.FINISHED for each in regular):
            pod.has_ended = True
            for each in pod.containers:
                each.state, each.share = State.FINISHED, None
        self.tell(pod)

    def new_sandbox(self, pod: PodTwin) -> None:
        """All of a pod's containers end and start anew; nobody is told before they run."""
        for each in pod.containers:
            each.state, each.share = State.WAITING, None

    def delete(self, pod: PodTwin) -> None:
        """A pod goes, containers first."""
        del self.pods[pod.uid]
        self.news.append((pod.uid, None))

    def forget(self, tenancy: Tenants) -> None:
        """The checkpoint is lost: all pods are given ids anew when the kubelet starts."""
        self.table = []
        for pod in self.pods.values():
            if not pod.has_ended and not self._allocate(pod, tenancy):
                raise AssertionError(pod)


class ReportsTwin:
    """`Reports` that remembers."""

    def __init__(self) -> None:
        self.events: list[tuple[str, str, str]] = []
        self.counts: list[tuple[str, dict[str, str]]] = []
        self.gauges: dict[tuple[str, ...], float] = {}
        """As they were set last, by name and the labels' values."""

    def pod(self, subject: Pod | Owner, reason: str, message: str, *, is_warning: bool) -> None:
        del is_warning
        name = subject.pod if isinstance(subject, Owner) else subject.name
        self.events.append((name, reason, message))

    def node(self, reason: str, message: str, *, is_warning: bool) -> None:
        del is_warning
        self.events.append(("node", reason, message))

    def count(self, name: str, **labels: str) -> None:
        self.counts.append((name, labels))

    def observe(self, name: str, value: float, **labels: str) -> None:
        del name, value, labels

    def gauge(self, name: str, value: float, **labels: str) -> None:
        self.gauges[(name, *labels.values())] = value

    def reasons(self, pod: str) -> list[str]:
        return [reason for name, reason, _ in self.events if name == pod]
