# SPDX-License-Identifier: Apache-2.0
"""Why a pod is where it is, or why it waits: asked of the API server, not of a running scheduler.

Nodes and pods are read once, and the placement that schedules is asked again, as the cluster is
now. What a scheduler knew at another time, and what it holds for pods that are just being bound, is
not known here, and nothing is said about it. What kube-scheduler checks besides (selectors, taints,
CPU of other nodes) it has written into the pod's condition, which is quoted.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Final

from allotment.dialects.allotment import never_asked
from allotment.dialects.foreign import ForeignDialect, ForeignPod
from allotment.dialects.native import applied, wanted_of, written
from allotment.dialects.systems import foreign_dialects
from allotment.dialects.translating import translate
from allotment.kube.cluster_feed import ClusterPod, to_cluster_pod
from allotment.kube.inventories import CORDONS
from allotment.kube.live import LiveCluster
from allotment.kube.objects import to_pod
from allotment.model.clusters import (
    NodeDevice,
    NodeInventory,
    NodeRejection,
    PlacedDevice,
    PodBooking,
    PodNeed,
)
from allotment.model.errors import UsageError
from allotment.model.requests import Request
from allotment.placement.cluster import Cluster
from allotment.placement.kinds import largest
from allotment.placement.refusals import Reason, asked_for, grouped, unknown_node
from allotment.scheduler.admission_rules import IGNORE_LABELS
from allotment.scheduler.explaining_evidence import AskedPod, Condition, Evidence
from allotment.scheduler.explaining_nominations import keep_nominated, keepers
from allotment.scheduler.needs import need_of
from allotment.scheduler.nominations import NominatedCluster
from allotment.scheduler.quota import QuotaBook
from allotment.scheduler.quota_units import units_of

__all__ = [
    "Asked",
    "Explanation",
    "Group",
    "Obstacle",
    "Obstacles",
    "Part",
    "Standing",
    "explained",
]

_ENDED: Final = frozenset({"Succeeded", "Failed"})
_SCHEDULED: Final = "PodScheduled"
_MOST_MODELS: Final = 8


class Standing(StrEnum):
    """How far a pod has come."""

    PLACED = "placed"
    """On a node, with a placement that says what of which GPUs it has."""
    BOUND = "bound"
    """On a node, without one."""
    PENDING = "pending"
    ENDED = "ended"


class Obstacles(StrEnum):
    """What keeps a pod from being placed, before any GPU is looked at."""

    REFUSED = "refused"
    """It cannot be meant as it is written."""
    UNTRANSLATED = "untranslated"
    SCHEDULER = "scheduler"
    QUOTA = "quota"
    NO_INVENTORY = "no-inventory"
    FOREIGN = "foreign"
    """Another system has bound it."""
    UNPLACED = "unplaced"
    """It is on a node, and what is written there of its GPUs does not count."""
    DELETED = "deleted"
    NOMINATED = "nominated"
    """Other pods are being ended for it."""
    KEPT = "kept"
    """What pods leave on a node is for one that is no less important."""


@dataclass(frozen=True, slots=True)
class Obstacle:
    """One of them, in words."""

    kind: Obstacles
    text: str
    hint: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What a container has of one device. Bytes; basis points of its time."""

    uuid: str
    memory: int
    guarantee: int
    index: int | None = None
    """None, as the two that follow: the node does not say that it has this device."""
    model: str | None = None
    memory_total: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A container that asks for GPUs, and what it has of them."""

    name: str
    kind: str
    text: str
    """What it asks for, in words."""
    mode: str
    parts: tuple[Part, ...] = ()


@dataclass(frozen=True, slots=True)
class Group:
    """Nodes that do not do, all for the same."""

    reason: str
    text: str
    """Need and have; of an amount that they have, the most."""
    nodes: tuple[str, ...]
    note: str = ""
    """What there is to be known besides: which models these nodes have, who has cordoned."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """What can be said about a pod."""

    namespace: str
    name: str
    uid: str
    standing: Standing
    scheduler: str
    dialect: str = ""
    """The short name of the syntax that it was written in; empty: Allotment's own, or none."""
    title: str = ""
    """Its name, as a word in a sentence: `HAMi's`."""
    policies: tuple[str, ...] = ()
    """By which nodes are compared, in a chain."""
    is_own_policy: bool = False
    """The pod says by which."""
    containers: tuple[Asked, ...] = ()
    """Those that ask for GPUs; empty: none does, or not in a way that can be meant."""
    node: str = ""
    obstacles: tuple[Obstacle, ...] = ()
    condition: Condition | None = None
    """What the scheduler wrote last, of a pod that waits."""
    nodes: int = 0
    """How many there are, those without devices included."""
    fitting: tuple[str, ...] = ()
    """Where it would have room now, without what it has itself; the best first."""
    proposal: tuple[Asked, ...] = ()
    """Of a pod that waits: what it would get on the best of these."""
    refused: tuple[Group, ...] = ()
    others: tuple[str, ...] = field(default=())
    """Resources of extensions that it asks for, and that Allotment does not place."""

    @property
    def rank(self) -> int | None:
        """The place of its node among those with room, from 1; None: it is not among them."""
        return self.fitting.index(self.node) + 1 if self.node in self.fitting else None


def explained(
    evidence: Evidence,
    *,
    policies: Sequence[str] = ("fragmentation",),
    device_policies: Sequence[str] = ("fragmentation",),
) -> Explanation:
    """Say why a pod is where it is, or why it waits.

    Raises `UsageError` for a policy that is not there.
    """
    item, live = evidence.item, evidence.cluster
    # Before `to_cluster_pod`, which drops what containers are doing.
    resources = sorted({name for each in to_pod(item).containers for name in each.resources})
    pod = to_cluster_pod(item)
    cluster = _cluster(pod, live, policies, device_policies)
    known = foreign_dialects(evidence.settings)
    need, dialect, obstacles = _need(evidence, pod, known)
    titles = {each.name: each.title for each in known}
    pod = _with_record(pod, live)
    standing = _standing(item, pod)
    if item.metadata.deletion_timestamp is not None:
        obstacles.append(Obstacle(Obstacles.DELETED, "it is being deleted"))
    if standing is Standing.PENDING:
        obstacles += _before(evidence, need, dialect)
    if standing is Standing.BOUND and pod.problem:
        hint = "its node's agent says which GPUs it has: `allot ps` there"
        obstacles.append(Obstacle(Obstacles.UNPLACED, pod.problem, hint))
    explanation = Explanation(
        namespace=pod.namespace,
        name=pod.name,
        uid=pod.uid,
        standing=standing,
        scheduler=item.spec.scheduler_name,
        dialect=dialect,
        title=titles.get(dialect, f"{dialect}'s" if dialect else ""),
        node=pod.node,
        obstacles=tuple(obstacles),
        condition=_condition(item) if standing is Standing.PENDING else None,
        nodes=len(live.nodes) + len(live.without_devices),
        others=tuple(each for each in resources if not each.startswith("allotment.dev/")),
    )
    if need is None or not need.containers:
        return explanation
    booking = pod.booking if standing is Standing.PLACED else None
    explanation = replace(explanation, containers=_asked(need, booking, cluster.node(pod.node)))
    wanted = largest(need)
    own = wanted.request.preferences.node_policies if wanted is not None else ()
    explanation = replace(explanation, policies=tuple(own or policies), is_own_policy=bool(own))
    if standing is Standing.ENDED:
        return explanation
    explanation = _placed(explanation, cluster, need, live)
    if standing is Standing.PENDING and not explanation.fitting:
        kept = _kept(live, need)
        return replace(explanation, obstacles=(*explanation.obstacles, *kept))
    return explanation


def _placed(
    explanation: Explanation, cluster: Cluster, need: PodNeed, live: LiveCluster
) -> Explanation:
    """Add which nodes have room, and why the others have none."""
    ranking = cluster.rank(need)
    rejections = [*ranking.refused.values(), *map(unknown_node, live.without_devices)]
    by_name = {each.node: each for each in rejections}
    groups = tuple(
        Group(by_name[names[0]].reason, text, names, _note(by_name[names[0]], names, cluster))
        for text, names in grouped(rejections)
    )
    # Nodes that are none of ours are the least of what anybody wants to know.
    groups = tuple(sorted(groups, key=lambda each: each.reason == Reason.UNKNOWN_NODE))
    proposal: tuple[Asked, ...] = ()
    if explanation.standing is Standing.PENDING and ranking.best:
        best = ranking.best[0]
        found = cluster.place(need, best)
        if not isinstance(found, NodeRejection):
            proposal = _asked(need, found, cluster.node(best))
    return replace(explanation, fitting=tuple(ranking.best), refused=groups, proposal=proposal)


def _note(rejection: NodeRejection, names: Sequence[str], cluster: Cluster) -> str:
    """Say what a refusal leaves open: of which other models, and who has taken GPUs out."""
    nodes = [node for each in names if (node := cluster.node(each)) is not None]
    devices = [device for node in nodes for device in node.devices]
    if rejection.reason == Reason.MODEL:
        models = sorted({each.model for each in devices})
        more = ", ..." if len(models) > _MOST_MODELS else ""
        return f"they are {', '.join(models[:_MOST_MODELS])}{more}"
    if rejection.reason == Reason.PROBLEM and any(each.problem == "cordoned" for each in devices):
        return f"somebody has cordoned GPUs there: see the nodes' annotation {CORDONS[0]}"
    return ""


def _with_record(pod: ClusterPod, live: LiveCluster) -> ClusterPod:
    """Add what another system has given the pod, by its record."""
    if pod.foreign is None:
        return pod
    known = next((each for each in live.pods if each.need.uid == pod.uid), None)
    is_same = known is not None and known.booking is not None and known.booking.node == pod.node
    return replace(pod, booking=known.booking) if known is not None and is_same else pod


def _standing(item: AskedPod, pod: ClusterPod) -> Standing:
    if item.status.phase in _ENDED:
        return Standing.ENDED
    if not pod.node:
        return Standing.PENDING
    has = pod.booking is not None and pod.booking.containers
    return Standing.PLACED if has else Standing.BOUND


def _cluster(
    pod: ClusterPod, live: LiveCluster, policies: Sequence[str], device_policies: Sequence[str]
) -> Cluster:
    """Return the cluster without the pod, knowing who else has come."""
    cluster = NominatedCluster(node_policies=policies, device_policies=device_policies)
    for node in live.nodes:
        cluster.put(node)
    for each in sorted(live.pods, key=lambda one: (one.created, one.need.uid)):
        if each.booking is not None and each.need.uid != pod.uid:
            cluster.book(each.booking)
        if each.need.containers:
            cluster.arrived(each.need)
    keep_nominated(cluster, live)
    return cluster


def _kept(live: LiveCluster, need: PodNeed) -> list[Obstacle]:
    """Say for whom pods are being ended, of those that this one does not get past."""
    found = []
    for each in keepers(live, need):
        if each.need.uid == need.uid:
            text = f"pods are being ended for it on node {each.nominated_node}"
            hint = "it is bound when they have ended"
            found.append(Obstacle(Obstacles.NOMINATED, text, hint))
        else:
            text = f"GPUs of node {each.nominated_node} are kept for pod {each.need}"
            hint = "other pods are being ended for it, and nobody of a lower priority gets them"
            found.append(Obstacle(Obstacles.KEPT, text, hint))
    return found


def _need(
    evidence: Evidence, pod: ClusterPod, dialects: Sequence[ForeignDialect]
) -> tuple[PodNeed | None, str, list[Obstacle]]:
    """Return what the pod asks for, whose syntax that is, and what is wrong with it.

    A pod that nobody has translated is read as the webhook would have.
    """
    try:
        if pod.node and pod.foreign is None:
            return need_of(pod), pod.dialect, []
        translation = translate(evidence.foreign, dialects)
        if translation is None:
            need = need_of(pod)
            error = None if need.containers else never_asked(to_pod(evidence.item))
            if error is not None:
                raise error
            return need, pod.dialect, []
        changes = written(evidence.foreign, translation)
        containers = wanted_of(applied(evidence.foreign, changes))
    except UsageError as error:
        return None, pod.dialect, [Obstacle(Obstacles.REFUSED, error.message, error.hint or "")]
    title = next(each.title for each in dialects if each.name == translation.dialect)
    need = replace(need_of(replace(pod, asks=None)), containers=containers)
    if pod.node:
        text = f"it is written in {title} words, and that system has bound it"
        return need, translation.dialect, [Obstacle(Obstacles.FOREIGN, text)]
    return need, translation.dialect, [_untranslated(evidence.foreign, title)]


def _untranslated(pod: ForeignPod, title: str) -> Obstacle:
    labels = [each for each in IGNORE_LABELS if pod.labels.get(each) == "ignore"]
    text = f"it is written in {title} words, and was not translated when it was created"
    if labels:
        text += f": its label {labels[0]}=ignore says so"
        hint = "create it anew without that label"
    else:
        hint = (
            "the webhook was not there, or leaves its namespace alone: see whether"
            " MutatingWebhookConfiguration allotment-scheduler is there, and create the pod anew"
        )
    return Obstacle(Obstacles.UNTRANSLATED, text, hint)


def _before(evidence: Evidence, need: PodNeed | None, dialect: str) -> list[Obstacle]:
    """Return what keeps a pod waiting whatever GPUs there are."""
    found = []
    if need is not None and need.containers:
        found += _of_scheduler(evidence)
        found += _of_quota(evidence, need, dialect)
        if not evidence.cluster.nodes:
            text = "no node has published its GPUs"
            hint = "does `allot agent` run there? It writes the annotation allotment.dev/devices"
            found.append(Obstacle(Obstacles.NO_INVENTORY, text, hint))
    elif _condition(evidence.item) is None:
        found += _of_scheduler(evidence)
    return found


def _of_scheduler(evidence: Evidence) -> list[Obstacle]:
    name = evidence.item.spec.scheduler_name
    placed = [
        each.scheduler
        for each in evidence.cluster.pods
        if each.foreign is None and each.booking is not None and each.booking.containers
    ]
    found = []
    if _condition(evidence.item) is None:
        text = f"no scheduler has said anything about it; it names {name!r}"
        hint = f"see whether a kube-scheduler runs that has a profile {name!r}"
        found.append(Obstacle(Obstacles.SCHEDULER, text, hint))
    if placed and name not in placed:
        names = " and ".join(sorted({repr(each) for each in placed}))
        text = f"it names the scheduler {name!r}; pods that have a placement here name {names}"
        hint = f"unless {name!r} asks `allot scheduler` too, it does not see parts of GPUs"
        found.append(Obstacle(Obstacles.SCHEDULER, text, hint))
    return found


def _of_quota(evidence: Evidence, need: PodNeed, dialect: str) -> list[Obstacle]:
    """Ask as the scheduler does: against the pods that are bound."""
    book = QuotaBook(units=units_of(evidence.settings))
    book.set_quotas(evidence.quotas)
    for each in evidence.cluster.pods:
        if each.need.namespace == need.namespace and each.need.containers:
            book.add(each.need, booking=each.booking, dialect=each.dialect)
    rejection = book.check(need, dialect=dialect)
    if rejection is None:
        return []
    return [Obstacle(Obstacles.QUOTA, rejection.text, rejection.hint)]


def _condition(item: AskedPod) -> Condition | None:
    return next((each for each in item.status.conditions or () if each.type == _SCHEDULED), None)


def _asked(
    need: PodNeed, booking: PodBooking | None, node: NodeInventory | None
) -> tuple[Asked, ...]:
    """Say what each container asks for, and what of it a booking gives."""
    devices = {each.uuid: each for each in node.devices} if node is not None else {}
    placed = {each.name: each.devices for each in booking.containers} if booking else {}
    return tuple(
        Asked(
            name=each.name,
            kind=str(each.kind),
            text=f"{asked_for(each.request)}{_where(each.request)}",
            mode=each.request.mode,
            parts=tuple(_part(one, devices.get(one.uuid)) for one in placed.get(each.name, ())),
        )
        for each in need.containers
    )


def _where(request: Request) -> str:
    """Say on which GPUs it may be, as far as `asked_for` does not."""
    wanted = request.constraints
    texts = [
        f"on {' or '.join(wanted.uuids)}" if wanted.uuids else "",
        f"not on {', '.join(wanted.not_uuids)}" if wanted.not_uuids else "",
        f"beside {wanted.affinity!r}" if wanted.affinity else "",
        f"not beside {wanted.anti_affinity!r}" if wanted.anti_affinity else "",
        f"with none but {wanted.exclusion!r}" if wanted.exclusion else "",
    ]
    return "".join(f", {each}" for each in texts if each)


def _part(placed: PlacedDevice, device: NodeDevice | None) -> Part:
    return Part(
        uuid=placed.uuid,
        memory=placed.memory,
        guarantee=placed.guarantee,
        index=device.index if device is not None else None,
        model=device.model if device is not None else None,
        memory_total=device.memory_bytes if device is not None else None,
    )
