# SPDX-License-Identifier: Apache-2.0
"""Why a pod is on its node, or why it waits, by the API server's data alone.

Runs the scheduler's placement on nodes and pods read once, without the running scheduler's
reservations. kube-scheduler's own checks (selectors, taints, CPU) are quoted from the pod's
condition.
"""

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Final

import msgspec

from allotment.dialects.foreign.base import ForeignDialect
from allotment.dialects.foreign.settings import foreign_dialects
from allotment.dialects.foreign.translate import applied, native_pod, translate, written
from allotment.dialects.own.allotment import never_asked
from allotment.dialects.own.protocol import in_modes
from allotment.dialects.own.registry import NeedSettings, containers_of, need_of, need_settings
from allotment.kube.cluster_feed import to_cluster_pod
from allotment.kube.inventories import CORDONS
from allotment.kube.live import LiveCluster, LivePod
from allotment.kube.objects import ENDED, claims_of, to_pod
from allotment.model.clusters import (
    ClusterPod,
    NodeDevice,
    NodeInventory,
    PlacedContainer,
    PlacedDevice,
    PodBooking,
    PodNeed,
    TakenPart,
)
from allotment.model.compute import DEFAULT_FLOOR
from allotment.model.errors import UsageError
from allotment.model.modes import SOFT, traits_of
from allotment.model.pods import ForeignPod, Pod, PodUid
from allotment.model.requests import Request
from allotment.model.structs import replace
from allotment.placement.cluster.cluster import Cluster
from allotment.placement.cluster.filters import largest
from allotment.placement.constraints import unsuited
from allotment.placement.explain import (
    UNKNOWN_NODE,
    Reason,
    Refusal,
    RefusalGroup,
    grouped,
    in_words,
    refuse,
)
from allotment.placement.views import Hardware
from allotment.scheduler.admission.rules import IGNORE_LABELS
from allotment.scheduler.core.book import Book
from allotment.scheduler.core.nominations import NominatedCluster, without_host
from allotment.scheduler.core.quota import QuotaBook, units_of
from allotment.scheduler.core.reservations import BookSettings
from allotment.scheduler.explain_evidence import (
    ContainerSummary,
    Evidence,
    Explanation,
    Obstacles,
    PlacedPart,
    Standing,
)

_OURS: Final = "allotment.dev/"
_MOST_MODELS: Final = 8
_PLACED_AGAIN: Final = (
    "if the node refuses its share, the agent deletes the pod within a minute, so that its"
    " controller creates it again; a pod without one: delete and create it"
)


def explained(
    evidence: Evidence,
    *,
    policies: Sequence[str] = ("fragmentation",),
    device_policies: Sequence[str] = ("fragmentation",),
    modes: Sequence[str] = (SOFT,),
    compute_floor: int = DEFAULT_FLOOR,
    clusters: "Clusters | None" = None,
) -> Explanation:
    """Explain a pod's node, or why it waits.

    `modes`, `compute_floor`: the scheduler's settings. `clusters`: of the same reading, if the pod
    has no node. Raises `UsageError` for an unknown policy.
    """
    item, live = evidence.item, evidence.cluster
    kubelet_pod = to_pod(item)  # with the containers' states
    pod = _with_record(to_cluster_pod(item), live)
    resources = {name for container in kubelet_pod.containers for name in container.resources}
    has_started = any(
        container.is_started and any(name.startswith(_OURS) for name in container.resources)
        for container in kubelet_pod.containers
    )
    clusters = clusters or Clusters(live, policies, device_policies, without=pod.uid)
    cluster = clusters.filled
    dialects = foreign_dialects(evidence.settings)
    settings = need_settings(modes, evidence.settings, floor=compute_floor)
    need, dialect, obstacles = _need(evidence, pod, dialects, settings)
    standing = _standing(evidence, pod)
    if item.metadata.deletion_timestamp is not None:
        obstacles.append(refuse(Obstacles.DELETED, "it is being deleted"))
    if standing is Standing.PENDING:
        obstacles += _before(evidence, need, dialect)
    booking = pod.booking if standing is Standing.PLACED else None
    if booking is not None:
        quotas = _quota_book(evidence, pod.namespace)
        obstacles += _resize(
            pod, live, Book(Cluster(), settings=BookSettings(needs=settings), quotas=quotas)
        )
    if standing is Standing.BOUND and pod.problem and (need is not None or has_started):
        node = cluster.node(pod.node)
        usage = None if need is None or node is None else _unplaced(need, node, kubelet_pod)
        if usage is not None:
            cluster.put(usage.node)
            booking = usage.booking
        obstacles.append(_without_placement(pod, usage))
    wanted = None if need is None else largest(need)
    own = wanted.request.preferences.node_policies if wanted is not None else ()
    titles = {each.name: each.title for each in dialects}
    explanation = Explanation(
        namespace=pod.namespace,
        name=pod.name,
        uid=pod.uid,
        standing=standing,
        scheduler=item.spec.scheduler_name,
        dialect=dialect,
        title=titles.get(dialect, f"{dialect}'s" if dialect else ""),
        policies=tuple(own or policies) if wanted is not None else (),
        is_own_policy=bool(own),
        node=pod.node,
        obstacles=tuple(obstacles),
        condition=evidence.condition if standing is Standing.PENDING else None,
        nodes=len(live.nodes) + len(live.without_devices),
        has_started=has_started,
        others=tuple(sorted(name for name in resources if not name.startswith(_OURS))),
        claims=tuple(claims_of(item)),
    )
    if need is None or wanted is None:
        return explanation
    containers = _containers(need, booking, cluster.node(pod.node))
    explanation = replace(explanation, containers=containers)
    if standing is Standing.PLACED and not has_started:
        misplaced = tuple(_misplaced(containers, pod.node))
        explanation = replace(explanation, obstacles=(*explanation.obstacles, *misplaced))
    return _with_nodes(explanation, clusters, need, live)


def _with_nodes(
    explanation: Explanation, clusters: "Clusters", need: PodNeed, live: LiveCluster
) -> Explanation:
    """Add the nodes that fit, and the refusals of the others."""
    cluster = clusters.filled
    if explanation.standing is Standing.ENDED:
        return explanation
    ranking = cluster.rank(need)
    groups = [replace(group, note=_note(group, cluster)) for group in grouped(ranking.refused)]
    # Nodes without GPUs matter least: they come last.
    groups += grouped(dict.fromkeys(live.without_devices, UNKNOWN_NODE))
    explanation = replace(explanation, fitting=tuple(ranking.best), refused=tuple(groups))
    if explanation.standing is not Standing.PENDING:
        return explanation
    if not ranking.best:
        obstacles = (*explanation.obstacles, *_kept(live, need))
        return replace(explanation, obstacles=obstacles, beyond=_beyond(clusters.empty, need))
    best = ranking.best[0]
    booking = cluster.place(need, best)
    if isinstance(booking, Refusal):
        return explanation
    return replace(explanation, proposal=_containers(need, booking, cluster.node(best)))


def _note(group: RefusalGroup, cluster: Cluster) -> str:
    """Add facts to a refusal: the models of these nodes, or their cordons."""
    nodes = [node for name in group.nodes if (node := cluster.node(name)) is not None]
    devices = [device for node in nodes for device in node.devices]
    if group.reason == Reason.MODEL:
        models = sorted({device.model for device in devices})
        more = ", ..." if len(models) > _MOST_MODELS else ""
        return f"they are {', '.join(models[:_MOST_MODELS])}{more}"
    if group.reason == Reason.PROBLEM and any(device.problem == "cordoned" for device in devices):
        return f"GPUs are cordoned: see the nodes' annotation {CORDONS[0]}"
    return ""


def _beyond(empty: Cluster, need: PodNeed) -> RefusalGroup | None:
    """Return why a pod would fit on no empty node; None if it would, or if that is unknown."""
    ranking = empty.rank(need)
    groups = grouped(ranking.refused)
    if ranking.best or not groups or any(each.reason == Reason.UNDECIDED for each in groups):
        return None
    return groups[0]


# ---- the cluster without the pod -----------------------------------------------------------------


def _with_record(pod: ClusterPod, live: LiveCluster) -> ClusterPod:
    """Add the booking that another system recorded on the pod."""
    if pod.foreign is not None:
        for other in live.pods:
            booking = other.booking
            if other.need.uid == pod.uid and booking is not None and booking.node == pod.node:
                return replace(pod, booking=booking)
    return pod


def _standing(evidence: Evidence, pod: ClusterPod) -> Standing:
    if evidence.item.status.phase in ENDED:
        return Standing.ENDED
    if not pod.node:
        return Standing.PENDING
    return Standing.PLACED if pod.booking and pod.booking.containers else Standing.BOUND


def _resize(pod: ClusterPod, live: LiveCluster, book: Book) -> list[Refusal]:
    """Return why a pod's `allotment.dev/resize` is not in force; empty if it is.

    The book is empty, and filled here.
    """
    for node in live.nodes:
        book.node_put(node)
    for claim in live.claims:
        book.claim_put(claim)
    for other in live.pods:
        if other.booking is not None:
            book.cluster.book(other.booking)
    book.pod_put(pod, now=0.0)
    book.watch_resize(pod)
    if pod.uid not in book.resizes:
        return []
    planned = book.plan_resize(pod)
    if isinstance(planned, Refusal):
        return [refuse(Obstacles.RESIZE, f"not resized: {planned.text}", hint=planned.hint)]
    text = f"its resize is not in force on node {pod.node} yet; its larger amounts count until then"
    hint = "see its events: ResizeRefused has the reason if the node cannot carry it out"
    return [refuse(Obstacles.RESIZE, text, hint=hint)]


class Clusters:
    """The cluster as it was read, with all pods but one, and with none. Each is made once."""

    def __init__(
        self,
        live: LiveCluster,
        policies: Sequence[str] = ("fragmentation",),
        device_policies: Sequence[str] = ("fragmentation",),
        *,
        without: PodUid | None = None,
    ) -> None:
        """`without`: a pod whose booking is left out."""
        self._live = live
        self._policies = policies
        self._device_policies = device_policies
        self._without = without

    @cached_property
    def filled(self) -> NominatedCluster:
        """All nodes, the pods' bookings, and what is reserved for nominated pods."""
        live = self._live
        cluster = NominatedCluster(
            node_policies=self._policies, device_policies=self._device_policies
        )
        for claim in live.claims:
            cluster.book(claim)
        for pod in sorted(live.pods, key=lambda one: (one.created, one.need.uid)):
            if pod.booking is not None and pod.need.uid != self._without:
                cluster.book(pod.booking)
            if pod.need.containers:
                cluster.arrived(pod.need)
        # After the bookings: each node is written once.
        for node in live.nodes:
            cluster.put(node)
        for nominated in _nominated(live):
            booking = _reserved(cluster, nominated, live)
            if booking is not None:
                cluster.keep(nominated.need, booking)
        return cluster

    @cached_property
    def empty(self) -> Cluster:
        """All nodes, as if their GPUs were free and healthy."""
        cluster = Cluster()
        for node in self._live.nodes:
            devices = (replace(device, taken=TakenPart(), problem="") for device in node.devices)
            cluster.put(replace(node, devices=tuple(devices)))
        return cluster


def _nominated(live: LiveCluster) -> Iterator[LivePod]:
    """Yield the nominated pods, the most important first."""
    return (
        pod
        for pod in live.pods
        if pod.nominated_node and pod.booking is None and pod.need.containers
    )


def _reserved(cluster: Cluster, pod: LivePod, live: LiveCluster) -> PodBooking | None:
    """Choose the GPUs of a nominated pod: of ending pods first, then of any lower priority."""
    node = pod.nominated_node
    lower = [
        other
        for other in live.pods
        if other.booking is not None
        and other.booking.node == node
        and other.priority < pod.priority
    ]
    for victims in ([other for other in lower if other.is_ending], lower):
        gone = [other.need.uid for other in victims]
        placed = cluster.place(without_host(pod.need), node, without=gone)
        if isinstance(placed, PodBooking):
            return placed
    return None


class UnplacedUsage(msgspec.Struct, frozen=True):
    """The devices that a node's agent gave a pod."""

    node: NodeInventory
    """The node without the pod's usage."""
    booking: PodBooking
    """Devices of those containers for which they are certain."""
    choices: tuple[str, ...] = ()
    """UUIDs of the candidate devices of the other containers."""


def _unplaced(need: PodNeed, node: NodeInventory, pod: Pod) -> UnplacedUsage | None:
    """Find the devices that the node's agent gave a pod, by the node's usage; None if none fit.

    Only running containers use devices.
    """
    running = {
        container.name
        for container in pod.containers
        if container.is_started and not container.has_finished
    }
    devices = {device.uuid: device for device in node.devices}
    placed = []
    choices: dict[str, None] = {}
    for container in need.containers:
        if container.name not in running:
            continue
        request = container.request
        candidates = _candidates(replace(node, devices=tuple(devices.values())), request)
        if len(candidates) < request.count:
            return None
        parts = []
        for device in candidates[: request.count]:
            part = _requested_part(device, request)
            if device.taken.shares == 1:
                # The only share on this device: a different size means that it was resized.
                part = PlacedDevice(device.uuid, device.taken.memory, device.taken.guarantee)
            devices[device.uuid] = replace(device, taken=_less(device.taken, part))
            parts.append(part)
        if len(candidates) == request.count:
            placed.append(
                PlacedContainer(
                    name=container.name,
                    devices=tuple(parts),
                    kind=container.kind,
                    place=container.place,
                    mode=request.mode,
                )
            )
        else:
            choices |= dict.fromkeys(device.uuid for device in candidates)
    if not placed and not choices:
        return None
    booking = PodBooking(uid=need.uid, node=node.name, containers=tuple(placed))
    return UnplacedUsage(replace(node, devices=tuple(devices.values())), booking, tuple(choices))


def _candidates(node: NodeInventory, request: Request) -> list[NodeDevice]:
    """The devices whose usage may contain a share of this request."""
    candidates = []
    for device, hardware in zip(node.devices, Hardware(node).devices, strict=True):
        taken, part = device.taken, _requested_part(device, request)
        if (
            taken.mode == request.mode
            and taken.shares > 0
            and part.memory <= taken.memory
            and part.guarantee <= taken.guarantee
            and not unsuited(hardware, request.constraints)
        ):
            candidates.append(device)
    return candidates


def _requested_part(device: NodeDevice, request: Request) -> PlacedDevice:
    memory = request.memory.of(device.memory_bytes)
    return PlacedDevice(device.uuid, memory, request.compute.guarantee)


def _less(taken: TakenPart, part: PlacedDevice) -> TakenPart:
    if taken.shares == 1:
        return TakenPart()
    return replace(
        taken,
        memory=taken.memory - part.memory,
        guarantee=taken.guarantee - part.guarantee,
        shares=taken.shares - 1,
    )


# ---- obstacles -----------------------------------------------------------------------------------


def _without_placement(pod: ClusterPod, usage: UnplacedUsage | None) -> Refusal:
    text, hint = pod.problem, "run `allot ps` on its node to see which GPUs it has"
    if usage is not None:
        text += ", and its node's agent chose its GPUs"
        if not usage.choices:
            return refuse(Obstacles.UNPLACED, f"{text}, as the node's usage shows")
        text += f": judging by the node's usage, one of {', '.join(usage.choices)}"
    return refuse(Obstacles.UNPLACED, text, hint=hint)


def _misplaced(containers: Sequence[ContainerSummary], node: str) -> Iterator[Refusal]:
    """Name the chosen devices that the node does not offer in the container's mode."""
    for container in containers:
        for uuid, device in ((part.placed.uuid, part.device) for part in container.parts):
            if device is None:
                text = f"node {node} does not offer GPU {uuid}, which was chosen for it"
            elif container.mode not in device.modes:
                text = f"GPU {uuid} was chosen in mode {container.mode}, and node {node} offers it"
                text += f" in mode {' or '.join(device.modes) or 'none'}"
            else:
                continue
            text = f"container {container.name}: {text}: the node has changed since then"
            yield refuse(Obstacles.MISPLACED, text, hint=_PLACED_AGAIN)


def _kept(live: LiveCluster, need: PodNeed) -> Iterator[Refusal]:
    """Name the nominated pods whose reservations hold against this one."""
    for nominated in _nominated(live):
        node = nominated.nominated_node
        if nominated.need.uid == need.uid:
            text = f"pods are being evicted for it on node {node}"
            yield refuse(Obstacles.NOMINATED, text, hint="it binds when they have ended")
        elif nominated.priority >= need.priority:
            text = f"GPUs of node {node} are reserved for pod {nominated.need}"
            hint = "other pods are being evicted for it, and pods of lower priority cannot use them"
            yield refuse(Obstacles.KEPT, text, hint=hint)


def _need(
    evidence: Evidence, pod: ClusterPod, dialects: Sequence[ForeignDialect], needs: NeedSettings
) -> tuple[PodNeed | None, str, list[Refusal]]:
    """Return the pod's request, its dialect, and its problems.

    An untranslated pod is read as the webhook would read it.
    """
    try:
        if pod.node and pod.foreign is None:
            return need_of(pod, needs), pod.dialect, []
        translation = translate(evidence.foreign, dialects)
        if translation is None:
            need = need_of(pod, needs)
            error = None if need.containers else never_asked(to_pod(evidence.item))
            if error is not None:
                raise error
            return need, pod.dialect, []
        changes = written(evidence.foreign, translation)
        asks = native_pod(applied(evidence.foreign, changes))
        containers = containers_of(asks, translation.dialect, needs)
    except UsageError as error:
        refusal = refuse(Obstacles.REFUSED, error.message, hint=error.hint or "")
        return None, pod.dialect, [refusal]
    title = next(dialect.title for dialect in dialects if dialect.name == translation.dialect)
    need = replace(need_of(replace(pod, asks=None)), containers=containers)
    if pod.node:
        text = f"it uses {title} syntax, and that system bound it"
        return need, translation.dialect, [refuse(Obstacles.FOREIGN, text)]
    return need, translation.dialect, [_untranslated(evidence.foreign, title)]


def _untranslated(pod: ForeignPod, title: str) -> Refusal:
    text = f"it uses {title} syntax, and was not translated when it was created"
    label = next((label for label in IGNORE_LABELS if pod.labels.get(label) == "ignore"), None)
    if label is not None:
        text += f": it has the label {label}=ignore"
        return refuse(Obstacles.UNTRANSLATED, text, hint="recreate it without that label")
    hint = (
        "the webhook was missing, or ignores its namespace: check that"
        " MutatingWebhookConfiguration allotment-scheduler exists, and recreate the pod"
    )
    return refuse(Obstacles.UNTRANSLATED, text, hint=hint)


def _before(evidence: Evidence, need: PodNeed | None, dialect: str) -> Iterator[Refusal]:
    """Yield the obstacles of a waiting pod that come before any node."""
    has_need = need is not None and bool(need.containers)
    if has_need or evidence.condition is None:
        yield from _of_scheduler(evidence)
    if need is None or not has_need:
        return
    over = _quota_book(evidence, need.namespace).check(need, dialect=dialect)
    if over is not None:
        yield over
    if not evidence.cluster.nodes:
        hint = "check that `allot agent` runs on the nodes: it writes allotment.dev/devices"
        yield refuse(Obstacles.NO_INVENTORY, "no node has published its GPUs", hint=hint)


def _of_scheduler(evidence: Evidence) -> Iterator[Refusal]:
    name = evidence.item.spec.scheduler_name
    others = {
        pod.scheduler
        for pod in evidence.cluster.pods
        if pod.foreign is None and pod.booking is not None and pod.booking.containers
    }
    if evidence.condition is None:
        text = f"no scheduler has reported on it; it names {name!r}"
        hint = f"check that a kube-scheduler with a profile {name!r} runs"
        yield refuse(Obstacles.SCHEDULER, text, hint=hint)
    if others and name not in others:
        names = " and ".join(sorted(map(repr, others)))
        text = f"it names the scheduler {name!r}; placed pods of this cluster name {names}"
        hint = f"unless {name!r} uses `allot scheduler` too, it does not see parts of GPUs"
        yield refuse(Obstacles.SCHEDULER, text, hint=hint)


def _quota_book(evidence: Evidence, namespace: str) -> QuotaBook:
    """The quotas with the usage of the bound pods, as bind checks them."""
    book = QuotaBook(units=units_of(evidence.settings))
    book.set_quotas(evidence.quotas)
    for pod in evidence.cluster.pods if evidence.quotas else ():
        if pod.need.namespace == namespace and pod.need.containers:
            book.add(pod.need, booking=pod.booking, dialect=pod.dialect)
    return book


# ---- requests and devices ------------------------------------------------------------------------


def _containers(
    need: PodNeed, booking: PodBooking | None, node: NodeInventory | None
) -> tuple[ContainerSummary, ...]:
    devices = {device.uuid: device for device in node.devices} if node is not None else {}
    placed = {container.name: container for container in booking.containers} if booking else {}
    summaries = []
    for container in need.containers:
        booked = placed.get(container.name)
        parts = () if booked is None else booked.devices
        summary = ContainerSummary(
            name=container.name,
            kind=str(container.kind),
            text=_described(container.request),
            mode=container.request.mode if booked is None else booked.mode,
            parts=tuple(PlacedPart(part, devices.get(part.uuid)) for part in parts),
        )
        summaries.append(summary)
    return tuple(summaries)


def _described(request: Request) -> str:
    """Describe a request in each of its modes, with its constraints.

    For example `a MIG slice ..., or a GPU ..., not beside 'web'`. Slices and whole GPUs differ in
    the text; MPS is named.
    """
    wanted = request.constraints
    modes = [
        in_words(in_modes(request, (mode,))) + (" by MPS" if traits_of(mode).needs_daemon else "")
        for mode in (request.mode, *request.other_modes)
    ]
    texts = (
        ", or ".join(dict.fromkeys(modes)),
        f"on {' or '.join(wanted.uuids)}" if wanted.uuids else "",
        f"not on {', '.join(wanted.not_uuids)}" if wanted.not_uuids else "",
        f"beside {wanted.affinity!r}" if wanted.affinity else "",
        f"not beside {wanted.anti_affinity!r}" if wanted.anti_affinity else "",
        f"with none but {wanted.exclusion!r}" if wanted.exclusion else "",
    )
    return ", ".join(filter(None, texts))
