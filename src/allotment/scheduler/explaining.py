# SPDX-License-Identifier: Apache-2.0
"""Why a pod is where it is, or why it waits: asked of the API server, not of a running scheduler.

Nodes and pods are read once, and the placement that schedules is asked again, as the cluster is
now. What a scheduler knew at another time, and what it holds for pods that are just being bound, is
not known here, and nothing is said about it. What kube-scheduler checks besides (selectors, taints,
CPU of other nodes) it has written into the pod's condition, which is quoted.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from allotment.dialects.allotment import never_asked
from allotment.dialects.foreign import ForeignDialect, ForeignPod
from allotment.dialects.modes import in_modes
from allotment.dialects.native import applied, native_pod, written
from allotment.dialects.systems import foreign_dialects
from allotment.dialects.translating import translate
from allotment.kube.cluster_feed import ClusterPod, to_cluster_pod
from allotment.kube.inventories import CORDONS
from allotment.kube.live import LiveCluster
from allotment.kube.objects import ENDED, to_pod
from allotment.model.clusters import (
    NodeDevice,
    NodeInventory,
    NodeRejection,
    PlacedDevice,
    PodBooking,
    PodNeed,
    Taken,
)
from allotment.model.errors import UsageError
from allotment.model.pods import Pod
from allotment.model.requests import MPS, SOFT, Request
from allotment.placement.cluster import Cluster
from allotment.placement.kinds import largest
from allotment.placement.refusals import Reason, asked_for, grouped, unknown_node
from allotment.scheduler.admission_rules import IGNORE_LABELS
from allotment.scheduler.explaining_answers import (
    Asked,
    Explanation,
    Group,
    Obstacle,
    Obstacles,
    Part,
    Standing,
)
from allotment.scheduler.explaining_evidence import AskedPod, Condition, Evidence
from allotment.scheduler.explaining_nominations import keep_nominated, keepers
from allotment.scheduler.explaining_unplaced import Unplaced, unplaced
from allotment.scheduler.needs import NeedSettings, containers_of, need_of, need_settings
from allotment.scheduler.nominations import NominatedCluster
from allotment.scheduler.quota import QuotaBook
from allotment.scheduler.quota_units import units_of

__all__ = ["explained"]

_OURS: Final = "allotment.dev/"
_SCHEDULED: Final = "PodScheduled"
_MOST_MODELS: Final = 8


def explained(
    evidence: Evidence,
    *,
    policies: Sequence[str] = ("fragmentation",),
    device_policies: Sequence[str] = ("fragmentation",),
    modes: Sequence[str] = (SOFT,),
) -> Explanation:
    """Say why a pod is where it is, or why it waits.

    `modes`: of pods that leave it open. Raises `UsageError` for a policy that is not there.
    """
    item, live = evidence.item, evidence.cluster
    # Before `to_cluster_pod`, which drops what containers are doing.
    whole = to_pod(item)
    resources = sorted({name for each in whole.containers for name in each.resources})
    has_started = any(
        each.is_started and any(name.startswith(_OURS) for name in each.resources)
        for each in whole.containers
    )
    pod = to_cluster_pod(item)
    cluster = _cluster(pod, live, policies, device_policies)
    known = foreign_dialects(evidence.settings)
    needs = need_settings(modes, evidence.settings)
    need, dialect, obstacles = _need(evidence, pod, known, needs)
    titles = {each.name: each.title for each in known}
    pod = _with_record(pod, live)
    standing = _standing(item, pod)
    if item.metadata.deletion_timestamp is not None:
        obstacles.append(Obstacle(Obstacles.DELETED, "it is being deleted"))
    if standing is Standing.PENDING:
        obstacles += _before(evidence, need, dialect)
    booking = pod.booking if standing is Standing.PLACED else None
    if standing is Standing.BOUND and pod.problem and (need is not None or has_started):
        found = _unplaced(whole, need, cluster)
        if found is not None:
            cluster.put(found.node)
            booking = found.booking
        obstacles.append(_without_placement(pod, found))
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
        has_started=has_started,
        others=tuple(each for each in resources if not each.startswith(_OURS)),
    )
    if need is None or not need.containers:
        return explanation
    explanation = replace(explanation, containers=_asked(need, booking, cluster.node(pod.node)))
    wanted = largest(need)
    own = wanted.request.preferences.node_policies if wanted is not None else ()
    explanation = replace(explanation, policies=tuple(own or policies), is_own_policy=bool(own))
    if standing is Standing.ENDED:
        return explanation
    explanation = _placed(explanation, cluster, need, live)
    if standing is Standing.PENDING and not explanation.fitting:
        all_of_them = (*explanation.obstacles, *_kept(live, need))
        return replace(explanation, obstacles=all_of_them, beyond=_beyond(live, need))
    return explanation


def _beyond(live: LiveCluster, need: PodNeed) -> Group | None:
    """Say why a pod had room nowhere if nobody else were there; None: it had, or nobody knows."""
    cluster = Cluster()
    for node in live.nodes:
        devices = tuple(replace(each, taken=Taken(), problem="") for each in node.devices)
        cluster.put(replace(node, devices=devices))
    ranking = cluster.rank(need)
    rejections = list(ranking.refused.values())
    if ranking.best or not rejections or any(x.reason == Reason.UNDECIDED for x in rejections):
        return None
    text, names = grouped(rejections)[0]
    return Group(next(x.reason for x in rejections if x.node == names[0]), text, names)


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
    if item.status.phase in ENDED:
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


def _unplaced(pod: Pod, need: PodNeed | None, cluster: Cluster) -> Unplaced | None:
    """Find what its node's agent has given a pod; None: nothing, as far as can be seen."""
    node = cluster.node(pod.node)
    if need is None or node is None:
        return None
    running = {each.name for each in pod.containers if each.is_started and not each.has_finished}
    return unplaced(need, node, running)


def _without_placement(pod: ClusterPod, found: Unplaced | None) -> Obstacle:
    hint = "its node's agent says which GPUs it has: `allot ps` there"
    if found is None:
        return Obstacle(Obstacles.UNPLACED, pod.problem, hint)
    text = f"{pod.problem}, and its node's agent chose what it has"
    if found.choices:
        text += f": by what is taken there, of {', '.join(found.choices)}"
        return Obstacle(Obstacles.UNPLACED, text, hint)
    return Obstacle(Obstacles.UNPLACED, f"{text}, as follows from what is taken there")


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
    evidence: Evidence, pod: ClusterPod, dialects: Sequence[ForeignDialect], needs: NeedSettings
) -> tuple[PodNeed | None, str, list[Obstacle]]:
    """Return what the pod asks for, whose syntax that is, and what is wrong with it.

    A pod that nobody has translated is read as the webhook would have.
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
    placed = {each.name: each for each in booking.containers} if booking else {}
    return tuple(
        Asked(
            name=each.name,
            kind=str(each.kind),
            text=f"{_in_words(each.request)}{_where(each.request)}",
            mode=each.request.mode if has is None else has.mode,
            parts=()
            if has is None
            else tuple(_part(one, devices.get(one.uuid)) for one in has.devices),
        )
        for each in need.containers
        for has in (placed.get(each.name),)
    )


def _in_words(request: Request) -> str:
    """Say what is asked for, in each of the modes that would do: `a MIG slice ..., or a GPU ...`.

    Slices and whole GPUs are called so; what else is alike is told apart by the mode.
    """
    modes = (request.mode, *request.other_modes)
    texts: dict[str, None] = {}
    for mode in modes:
        text = asked_for(in_modes(request, (mode,)))
        if mode == MPS:
            text += " by MPS"
        texts[text] = None
    return ", or ".join(texts)


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
        slice=placed.slice,
        index=device.index if device is not None else None,
        model=device.model if device is not None else None,
        memory_total=device.memory_bytes if device is not None else None,
    )
