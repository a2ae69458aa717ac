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

from allotment.kube.cluster_feed import ClusterPod, to_cluster_pod
from allotment.kube.errors import KubeError
from allotment.kube.objects import PodObject
from allotment.model.clusters import NodeRejection, PodBooking, PodNeed
from allotment.model.errors import UsageError
from allotment.model.pods import PodUid
from allotment.placement.refusals import Reason, grouped
from allotment.scheduler import wire
from allotment.scheduler.binding import CHANGED, Binder, Outcome
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
        Reason.MIG_PROFILE,
        Reason.PROBLEM,
    }
)
"""Whatever pods went from such a node, the pod would not fit there: not worth a preemption."""
_MOST_TEXTS: Final = 12
"""A message with one part for each node would be cut, and help nobody."""
_TOO_MANY: Final = "it does not fit either"


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
        heard = self._heard(arguments.pod)
        pod = heard or to_cluster_pod(arguments.pod)
        if pod.asks is None or pod.node:
            passed = [name for name in asked if pod.node in {"", name}]
            return wire.encode(wire.some_nodes(passed, asked))
        told = self._told if heard is not None else None
        try:
            need = need_of(pod, self._book.settings.needs)
        except UsageError as error:
            text = _sentence(error)
            if told is not None:
                told.refused(pod, text, is_mistaken=True)
            return wire.encode(wire.no_nodes(asked, text))
        names = asked if isinstance(asked, wire.NamesAsked) else asked.keys()
        if heard is None:
            choice = self._book.rank(need, names)
        else:
            if self._receipts is not None and pod.dialect:
                self._receipts.asked(pod.uid, pod.dialect, pod.namespace, body)
            choice = self._book.filter(need, names, now=self._clock(), version=pod.version)
        result = wire.some_nodes(choice.best, asked)
        if not choice.best and asked:
            refusals = _Refusals(choice.refused)
            result.failed_nodes, result.failed_and_unresolvable_nodes = refusals.by_node()
            if told is not None:
                told.rejected(refusals.reasons())
                told.refused(pod, refusals.summary(), is_mistaken=False)
        return wire.encode(result)

    def prioritize(self, body: bytes) -> bytes:
        """Answer with a score for each node.

        A pod that asks for nothing of ours takes CPU and memory that others' GPUs need: where we
        are asked about such pods, the policy says where it is in the way least.
        """
        self._check()
        arguments = wire.read_filter(body)
        names = list(wire.node_names(arguments))
        heard = self._heard(arguments.pod)
        pod = heard or to_cluster_pod(arguments.pod)
        if pod.node:
            return wire.encode([wire.HostPriority(host=name, score=0) for name in names])
        if pod.asks is None:
            return wire.encode(self._out_of_the_way(need_of(pod, self._book.settings.needs), names))
        try:
            need = need_of(pod, self._book.settings.needs)
        except UsageError:
            # Filter has refused it everywhere: nobody asks this but by mistake.
            return wire.encode([wire.HostPriority(host=name, score=0) for name in names])
        if heard is None:
            best = dict.fromkeys(self._book.rank(need, names).best)
            ranked = [*best, *(name for name in sorted(names) if name not in best)]
        else:
            ranked = self._book.prioritize(need, names, now=self._clock(), version=pod.version)
        return wire.encode(_scores(ranked))

    async def bind(self, body: bytes) -> bytes:
        """Bind a pod to a node, with its placement; answer when it is known what became of it.

        What it is given is what the API server says that it asks for now, whoever has said what
        when the node was chosen.
        """
        self._check()
        arguments = wire.read_binding(body)
        try:
            pod = await self._read(arguments)
        except KubeError as error:
            return _unbound(error.message)
        if pod is None:
            return _unbound("the pod is gone, or was never there")
        if pod.node:
            same = pod.node == arguments.node
            return _unbound("" if same else f"the pod is bound to node {pod.node}")
        if pod.asks is None:
            return _unbound((await self._binder.bind_plain(pod, arguments.node)).problem)
        try:
            need = need_of(pod, self._book.settings.needs)
        except UsageError as error:
            return _unbound(_sentence(error))
        chosen_for = self._book.need(pod.uid)
        if chosen_for is not None and chosen_for != need:
            outcome = Outcome(CHANGED)
        else:
            outcome = await self._binder.bind(need, arguments.node, version=pod.version)
        if outcome.problem:
            self._told.unbound(need, arguments.node, outcome.problem)
            if outcome.rejection is not None:
                self._told.rejected({outcome.rejection.reason: 1})
        else:
            self._told.bound(need, self._book.booking(pod.uid))
        return _unbound(outcome.problem)

    def _out_of_the_way(self, need: PodNeed, names: Sequence[str]) -> list[wire.HostPriority]:
        """Score nodes for a pod without GPUs: first all that have none, as kube-scheduler likes."""
        ours = [name for name in names if self._book.cluster.node(name) is not None]
        best = dict.fromkeys(self._book.rank(need, ours).best)
        scores = _scores([*best, *(name for name in sorted(ours) if name not in best)])
        most = (len(ours) + 1) * STEP
        others = (name for name in names if self._book.cluster.node(name) is None)
        return [*scores, *(wire.HostPriority(host=name, score=most) for name in others)]

    def _heard(self, item: PodObject) -> ClusterPod | None:
        """Return a pod as the watch has told of it; None: it has not.

        Whatever else is said of a pod is not believed: anybody who reaches the port can say it.
        """
        uid = item.metadata.uid
        if not uid:
            raise UsageError(
                "the pod has no uid", hint="kube-scheduler sends pods as the API server has them"
            )
        return self._pods(uid)

    async def _read(self, arguments: wire.BindingArguments) -> ClusterPod | None:
        """Return a pod as the watch has told of it, else as the API server has it.

        Raises `KubeError`.
        """
        uid = PodUid(arguments.pod_uid)
        name, namespace = arguments.pod_name, arguments.pod_namespace
        pod = self._pods(uid)
        if pod is None:
            return await self._binder.read(uid=uid, namespace=namespace, name=name)
        return pod if (pod.namespace, pod.name) == (namespace, name) else None

    def _check(self) -> None:
        if not self._leads():
            raise NotLeadingError


class _Refusals:
    """Why no node does, in words: nodes that fail alike say the same."""

    def __init__(self, refused: Mapping[str, NodeRejection]) -> None:
        try:
            self._groups = grouped(refused.values())
            self._refused = refused
        except LookupError:
            # Ranked out and yet with room: what is known of the cluster changes with every event.
            text = "it has room after all; the pod is tried again"
            self._groups, self._refused = [(text, tuple(refused))], {}

    def by_node(self) -> tuple[dict[str, str], dict[str, str]]:
        """Return what to say of each node, and of each where no preemption would help.

        Without a percent sign: kube-scheduler 1.36 takes it for a format's when it writes the event
        (`30 %!o(MISSING)f compute`).
        """
        failed: dict[str, str] = {}
        hopeless: dict[str, str] = {}
        for number, (text, names) in enumerate(self._groups):
            said = text.replace(" %", " percent") if number < _MOST_TEXTS else _TOO_MANY
            target = hopeless if self._reason(names) in _HOPELESS else failed
            target.update(dict.fromkeys(names, said))
        return failed, hopeless

    def reasons(self) -> dict[str, int]:
        """Return how many nodes are refused for each reason."""
        reasons: dict[str, int] = {}
        for _, names in self._groups:
            reason = self._reason(names)
            reasons[reason] = reasons.get(reason, 0) + len(names)
        return reasons

    def summary(self) -> str:
        """Return need and have of all nodes, in one line."""
        parts = [f"{text} ({len(names)} nodes)" for text, names in self._groups[:3]]
        rest = sum(len(names) for _, names in self._groups[3:])
        return "; ".join([*parts, f"{rest} more nodes do not do either"] if rest else parts)

    def _reason(self, names: Sequence[str]) -> str:
        return self._refused[names[0]].reason if names[0] in self._refused else ""


def _scores(ranked: Sequence[str]) -> list[wire.HostPriority]:
    last = len(ranked)
    return [
        wire.HostPriority(host=name, score=(last - rank) * STEP) for rank, name in enumerate(ranked)
    ]


def _sentence(error: UsageError) -> str:
    return f"{error.message} ({error.hint})" if error.hint else error.message


def _unbound(problem: str) -> bytes:
    return wire.encode(wire.BindingResult(error=problem))
