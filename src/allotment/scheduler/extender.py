# SPDX-License-Identifier: Apache-2.0
"""What kube-scheduler asks an extender: filter, prioritize, bind. Bytes in, bytes out.

A pod that asks for nothing of ours passes through as it came. One that cannot be meant is refused
on all nodes with the reason, which kube-scheduler writes into the pod's condition and events; so is
one for which there is no room, with need and have, and nodes that fail alike say the same, so that
it counts them together.

Scores are unique, and a rank apart is more than all of kube-scheduler's own plugins can give: among
equal scores it chooses by chance, which undoes packing. It multiplies an extender's score by its
weight and by ten, and has no bound (pkg/scheduler/schedule_one.go, `prioritizeNodes`).
"""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final, Protocol

import msgspec

from allotment.kube.cluster_feed import ClusterPod, to_cluster_pod
from allotment.kube.objects import PodObject
from allotment.model.clusters import NodeRejection, PodBooking, PodNeed
from allotment.model.errors import UsageError
from allotment.model.pods import PodUid
from allotment.placement.refusals import Reason, grouped
from allotment.scheduler import wire
from allotment.scheduler.binding import Binder
from allotment.scheduler.book import Book
from allotment.scheduler.needs import need_of
from allotment.scheduler.receipts import Receipts

__all__ = ["Extender", "NotLeadingError", "Told"]

STEP: Final = 1000
"""Between ranks: ten thousand after kube-scheduler's factor, and its plugins' scores are at most a
hundred times the sum of their weights (13 by default)."""

_HOPELESS: Final = frozenset(
    {
        Reason.UNKNOWN_NODE,
        Reason.NO_GPU,
        Reason.TOO_FEW_GPUS,
        Reason.MODEL,
        Reason.UUID,
        Reason.MODE,
        Reason.PROBLEM,
    }
)
"""Whatever pods went from such a node, the pod would not fit there: not worth a preemption."""
_MOST_TEXTS: Final = 12
"""A message with one part for each node would be cut, and help nobody."""


class NotLeadingError(Exception):
    """Another replica has to be asked."""


class Told(Protocol):
    """Who is told what was decided: metrics and events."""

    def refused(self, pod: ClusterPod, text: str, *, is_mistaken: bool) -> None:
        """A pod has no place: there is no room, or it cannot be meant."""

    def rejected(self, reasons: Mapping[str, int]) -> None:
        """So many nodes were rejected, by reason."""

    def bound(self, need: PodNeed, booking: PodBooking | None) -> None:
        """A pod was bound."""

    def unbound(self, pod: ClusterPod | PodNeed, node: str, text: str) -> None:
        """A pod was not bound to the node chosen for it."""


class Extender:
    """Three of the four questions; `preempting` has the other one.

    Each raises `UsageError` for a body that is none.
    """

    def __init__(
        self,
        book: Book,
        binder: Binder,
        *,
        told: Told,
        pods: Callable[[str], ClusterPod | None],
        leads: Callable[[], bool] = lambda: True,
        receipts: Receipts | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`pods` finds a pod by its uid among all that have been heard of."""
        self._book = book
        self._binder = binder
        self._told = told
        self._pods = pods
        self._leads = leads
        self._receipts = receipts
        self._clock = clock

    def filter(self, body: bytes) -> bytes:
        """Answer which of the nodes do for a pod: the best ones, best first."""
        self._check()
        arguments = wire.read_filter(body)
        asked = wire.node_names(arguments)
        pod = self._pod(arguments.pod)
        if pod.asks is None or pod.node:
            passed = [name for name in asked if pod.node in {"", name}]
            return wire.encode(wire.some_nodes(passed, asked))
        try:
            need = need_of(pod)
        except UsageError as error:
            return self._mistaken(pod, error, asked)
        if self._receipts is not None and pod.dialect:
            self._receipts.asked(pod.uid, pod.dialect, pod.namespace, body)
        names = asked if isinstance(asked, wire.NamesAsked) else asked.keys()
        choice = self._book.filter(need, names, now=self._clock(), version=pod.version)
        result = wire.some_nodes(choice.best, asked)
        if not choice.best and asked:
            result.failed_nodes, result.failed_and_unresolvable_nodes = self._failed(
                pod, choice.refused
            )
        return wire.encode(result)

    def prioritize(self, body: bytes) -> bytes:
        """Answer with a score for each node."""
        self._check()
        arguments = wire.read_filter(body)
        names = list(wire.node_names(arguments))
        pod = self._pod(arguments.pod)
        if pod.asks is None:
            return wire.encode([wire.HostPriority(host=name, score=0) for name in names])
        try:
            need = need_of(pod)
        except UsageError:
            # Filter has refused it everywhere: nobody asks this but by mistake.
            return wire.encode([wire.HostPriority(host=name, score=0) for name in names])
        ranked = self._book.prioritize(need, names, now=self._clock())
        return wire.encode(_scores(ranked))

    async def bind(self, body: bytes) -> bytes:
        """Bind a pod to a node, with its placement; answer when it is known what became of it."""
        self._check()
        arguments = wire.read_binding(body)
        uid = PodUid(arguments.pod_uid)
        known = self._book.need(uid)
        if known is None:
            # Another replica, or this one before it was started anew, has chosen the node.
            pod = self._pods(uid)
            if pod is None or (pod.namespace, pod.name) != (
                arguments.pod_namespace,
                arguments.pod_name,
            ):
                return _unbound("the pod is not known here; it is tried again")
            try:
                known = (need_of(pod), pod.version)
            except UsageError as error:
                return _unbound(_sentence(error))
            if pod.node:
                same = pod.node == arguments.node
                return _unbound("" if same else f"the pod is bound to node {pod.node}")
        need, version = known
        outcome = await self._binder.bind(need, arguments.node, version=version)
        if outcome.problem:
            self._told.unbound(need, arguments.node, outcome.problem)
            if outcome.rejection is not None:
                self._told.rejected({outcome.rejection.reason: 1})
        else:
            self._told.bound(need, self._book.booking(uid))
        return _unbound(outcome.problem)

    def _pod(self, item: PodObject) -> ClusterPod:
        """Say what a pod is to a scheduler. The watch has mostly told of this very version."""
        uid, version = item.metadata.uid, item.metadata.resource_version
        if not uid:
            raise UsageError(
                "the pod has no uid", hint="kube-scheduler sends pods as the API server has them"
            )
        heard = self._pods(uid)
        if heard is not None and version and heard.version == version:
            return heard
        return to_cluster_pod(item)

    def _check(self) -> None:
        if not self._leads():
            raise NotLeadingError

    def _mistaken(
        self,
        pod: ClusterPod,
        error: UsageError,
        asked: wire.NamesAsked | Mapping[str, msgspec.Raw],
    ) -> bytes:
        text = _sentence(error)
        self._told.refused(pod, text, is_mistaken=True)
        result = wire.some_nodes((), asked)
        result.failed_and_unresolvable_nodes = dict.fromkeys(asked, text)
        return wire.encode(result)

    def _failed(
        self, pod: ClusterPod, refused: Mapping[str, NodeRejection]
    ) -> tuple[dict[str, str], dict[str, str]]:
        """Return what to say of each node, and of each where no preemption would help."""
        try:
            groups = grouped(refused.values())
        except LookupError:
            # Ranked out and yet with room: what is known of the cluster changes with every event.
            groups = [("it has room after all; the pod is tried again", tuple(refused))]
            refused = {}
        failed: dict[str, str] = {}
        hopeless: dict[str, str] = {}
        reasons: dict[str, int] = {}
        for number, (text, names) in enumerate(groups):
            reason = refused[names[0]].reason if names[0] in refused else ""
            reasons[reason] = reasons.get(reason, 0) + len(names)
            said = text if number < _MOST_TEXTS else "it does not fit either"
            target = hopeless if reason in _HOPELESS else failed
            target.update(dict.fromkeys(names, said))
        self._told.rejected(reasons)
        self._told.refused(pod, _summary(groups), is_mistaken=False)
        return failed, hopeless


def _scores(ranked: Sequence[str]) -> list[wire.HostPriority]:
    last = len(ranked)
    return [
        wire.HostPriority(host=name, score=(last - rank) * STEP) for rank, name in enumerate(ranked)
    ]


def _summary(groups: Sequence[tuple[str, tuple[str, ...]]]) -> str:
    """Return need and have of all nodes, in one line."""
    parts = [f"{text} ({len(names)} nodes)" for text, names in groups[:3]]
    rest = sum(len(names) for _, names in groups[3:])
    return "; ".join([*parts, f"{rest} more nodes do not do either"] if rest else parts)


def _sentence(error: UsageError) -> str:
    return f"{error.message} ({error.hint})" if error.hint else error.message


def _unbound(problem: str) -> bytes:
    return wire.encode(wire.BindingResult(error=problem))
