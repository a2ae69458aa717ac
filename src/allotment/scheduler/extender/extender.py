# SPDX-License-Identifier: Apache-2.0
"""kube-scheduler's extender requests: filter, prioritize, bind. Bytes in, bytes out.

Pods without GPU requests pass unchanged. Invalid requests and full nodes are refused with a reason;
nodes with the same reason share one text. Scores differ by more than all of kube-scheduler's
plugins can add, because equal scores are drawn by chance, which undoes packing
(pkg/scheduler/schedule_one.go, `prioritizeNodes`).
"""

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Final, Protocol

from allotment.kube.cluster_feed import to_cluster_pod
from allotment.kube.errors import KubeError
from allotment.kube.objects import claims_of
from allotment.model.clusters import ClusterPod, PodBooking, PodNeed, WantedContainer
from allotment.model.errors import UsageError
from allotment.model.formats import format_count
from allotment.model.pods import PodUid
from allotment.model.structs import replace
from allotment.placement.explain import Refusal, RefusalGroup, grouped
from allotment.scheduler.core.book import Book
from allotment.scheduler.core.wait_reasons import (
    HOPELESS,
    PLACED,
    REQUEST,
    WaitReasons,
    reason_of,
)
from allotment.scheduler.extender import wire
from allotment.scheduler.extender.binder import CHANGED, Binder, BindOutcome
from allotment.scheduler.extender.compat_annotations import ResultAnnotations

STEP: Final = 1000
"""Between ranks. kube-scheduler multiplies it by ten; its plugins give at most a hundred times the
sum of their weights (13 by default)."""

_MOST_TEXTS: Final = 12
"""kube-scheduler truncates messages with one part per node."""
_TOO_MANY: Final = "it does not fit either"


class NotLeadingError(Exception):
    """Another replica leads."""


class ExtenderObserver(Protocol):
    """Receives decisions, for metrics and events."""

    def refused(self, pod: ClusterPod, text: str, *, is_mistaken: bool) -> None:
        """No node fits, or the request is invalid."""

    def rejected(self, reasons: Mapping[str, int]) -> None: ...

    def bound(self, need: PodNeed, booking: PodBooking | None) -> None: ...

    def unbound(self, pod: ClusterPod | PodNeed, node: str, text: str) -> None: ...


class ExtenderTraces(Protocol):
    """Receives when requests about GPU pods began, for their traces."""

    def filtered(
        self,
        pod: ClusterPod,
        annotations: Mapping[str, str],
        *,
        began_ns: int,
        nodes: int,
        fitting: int,
        refusal: str,
    ) -> None:
        """Nodes were chosen. `began_ns`: after the epoch. `refusal`: why no node fits."""

    def binding(self, pod: PodNeed, node: str) -> AbstractContextManager[Callable[[str], None]]:
        """Measure a bind; the callable gets why the pod is not bound."""
        ...


def _ignore(_problem: str) -> None: ...


def _no_claims(_namespace: str, _names: Collection[str]) -> tuple[WantedContainer, ...]:
    return ()


class Extender:
    """Three of the four requests; `preemption` has the fourth.

    Each raises `UsageError` for an invalid body.
    """

    def __init__(
        self,
        book: Book,
        binder: Binder,
        *,
        observer: ExtenderObserver,
        pods: Callable[[str], ClusterPod | None],
        leads: Callable[[], bool] = lambda: True,
        results: ResultAnnotations | None = None,
        tried: Callable[[ClusterPod, Collection[str]], None] = lambda _pod, _names: None,
        claims: Callable[[str, Collection[str]], tuple[WantedContainer, ...]] = _no_claims,
        waits: WaitReasons | None = None,
        traces: ExtenderTraces | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`tried` gets each pod that filter was asked about, and the nodes, after the choice.

        `claims` returns what a pod with claims of these names in a namespace will take. `waits`
        gets the reason of each answer.
        """
        self._book = book
        self._binder = binder
        self._observer = observer
        self._pods = pods
        self._leads = leads
        self._results = results
        self._tried = tried
        self._claims = claims
        self._waits = waits or WaitReasons()
        self._traces = traces
        self._clock = clock

    def filter(self, body: bytes) -> bytes:
        self._check()
        began_ns = time.time_ns() if self._traces is not None else 0
        sent, asked = wire.read_filter(body)
        # Other fields of the body are not trusted: any client that reaches the port can write them.
        reported = self._pods(sent.metadata.uid)
        pod = reported or to_cluster_pod(sent)
        if pod.asks is None or pod.node:
            passed = [name for name in asked if pod.node in {"", name}]
            return wire.encode(wire.some_nodes(passed, asked))
        observer = self._observer if reported is not None else None
        try:
            need = self._book.needs.of(pod)
        except UsageError as error:
            text = error.one_line()
            self._waits.because(pod.uid, REQUEST)
            if observer is not None:
                observer.refused(pod, text, is_mistaken=True)
            return wire.encode(wire.no_nodes(asked, text))
        names = asked if isinstance(asked, wire.NamesAsked) else asked.keys()
        if reported is None:
            choice = self._book.rank(need, names)
        else:
            if self._results is not None and pod.dialect:
                self._results.asked(pod.uid, pod.dialect, pod.namespace, body)
            choice = self._book.filter(need, names, now=self._clock(), version=pod.version)
            self._tried(pod, names)
        result = wire.some_nodes(choice.best, asked)
        refusal = ""
        if choice.best:
            self._waits.because(need.uid, PLACED)
        elif asked:
            groups = _groups(choice.refused)
            self._waits.because(need.uid, reason_of(groups))
            result.failed_nodes, result.failed_and_unresolvable_nodes = _by_node(groups)
            if observer is not None:
                refusal = _summary(groups)
                observer.rejected(_by_reason(groups))
                observer.refused(pod, refusal, is_mistaken=False)
        if self._traces is not None and reported is not None:
            self._traces.filtered(
                pod,
                sent.metadata.annotations or {},
                began_ns=began_ns,
                nodes=len(asked),
                fitting=len(choice.best),
                refusal=refusal,
            )
        return wire.encode(result)

    def prioritize(self, body: bytes) -> bytes:
        """Answer with a score for each node.

        For pods without GPUs and for pods with claims, with the best nodes only.
        """
        self._check()
        sent, asked = wire.read_filter(body)
        names = list(asked)
        reported = self._pods(sent.metadata.uid)
        pod = reported or to_cluster_pod(sent)
        need = None
        if not pod.node:
            # An invalid request is a mistake: filter refused the pod on all nodes.
            with suppress(UsageError):
                need = self._book.needs.of(pod)
        if need is None:
            return wire.encode([wire.HostPriority(host=name, score=0) for name in names])
        if pod.asks is None:
            claimed = tuple(claims_of(sent))
            wanted = self._claims(pod.namespace, claimed) if claimed else ()
            if wanted:
                choice = self._book.rank(replace(need, containers=wanted), names)
                return wire.encode(_scores(choice.best))
            return wire.encode(self._out_of_the_way(need, names))
        if reported is None:
            best = dict.fromkeys(self._book.rank(need, names).best)
            ranked = [*best, *(name for name in sorted(names) if name not in best)]
        else:
            ranked = self._book.prioritize(need, names, now=self._clock(), version=pod.version)
        return wire.encode(_scores(ranked))

    async def bind(self, body: bytes) -> bytes:
        """Bind a pod to a node with its placement; answer when the outcome is known.

        The request is the pod's at the API server, not that of the filter call.
        """
        self._check()
        arguments = wire.read_binding(body)
        try:
            pod = await self._read(arguments)
        except KubeError as error:
            return _unbound(error.message)
        if pod is None:
            return _unbound("the pod does not exist")
        if pod.node:
            same = pod.node == arguments.node
            return _unbound("" if same else f"the pod is bound to node {pod.node}")
        if pod.asks is None:
            return _unbound((await self._binder.bind_plain(pod, arguments.node)).problem)
        try:
            need = self._book.needs.of(pod)
        except UsageError as error:
            return _unbound(error.one_line())
        chosen_for = self._book.need(pod.uid)
        if chosen_for is not None and chosen_for != need:
            outcome = BindOutcome(CHANGED)
        else:
            outcome = await self._bind(need, arguments.node, version=pod.version)
        if outcome.problem:
            self._observer.unbound(need, arguments.node, outcome.problem)
            if outcome.reason:
                self._observer.rejected({outcome.reason: 1})
                self._waits.because(need.uid, outcome.reason)
        else:
            self._observer.bound(need, self._book.booking(pod.uid))
        return _unbound(outcome.problem)

    async def _bind(self, need: PodNeed, node: str, *, version: str) -> BindOutcome:
        traces = self._traces
        with nullcontext(_ignore) if traces is None else traces.binding(need, node) as ended:
            outcome = await self._binder.bind(need, node, version=version)
            ended(outcome.problem)
        return outcome

    def _out_of_the_way(self, need: PodNeed, names: Sequence[str]) -> list[wire.HostPriority]:
        """Return where a pod's CPU and memory cost GPU pods least: nodes without GPUs, if any.

        kube-scheduler adds 0 for a node that is left out. Scores for all cost more than the search.
        """
        others = [name for name in names if self._book.cluster.node(name) is None]
        if others:
            return [wire.HostPriority(host=name, score=STEP) for name in others]
        return _scores(self._book.rank(need, names).best)

    async def _read(self, arguments: wire.BindingArguments) -> ClusterPod | None:
        """Return a pod from the watch, else from the API server. Raises `KubeError`."""
        uid = PodUid(arguments.pod_uid)
        name, namespace = arguments.pod_name, arguments.pod_namespace
        pod = self._pods(uid)
        if pod is None:
            return await self._binder.read(uid=uid, namespace=namespace, name=name)
        return pod if (pod.namespace, pod.name) == (namespace, name) else None

    def _check(self) -> None:
        if not self._leads():
            raise NotLeadingError


def _groups(refused: Mapping[str, Refusal]) -> list[RefusalGroup]:
    try:
        return grouped(refused)
    except LookupError:
        # Ranked out, but it fits by now: the cluster changes with every event.
        return [RefusalGroup("", "state changed; retrying", tuple(refused))]


def _by_node(groups: Sequence[RefusalGroup]) -> tuple[dict[str, str], dict[str, str]]:
    """Return the text for each node, and for each node where preemption is useless.

    Without a percent sign: kube-scheduler 1.36 uses the text as a format string in its event
    (`30 %!o(MISSING)f compute`).
    """
    failed: dict[str, str] = {}
    hopeless: dict[str, str] = {}
    for number, group in enumerate(groups):
        text = group.text.replace(" %", " percent") if number < _MOST_TEXTS else _TOO_MANY
        target = hopeless if group.reason in HOPELESS else failed
        target.update(dict.fromkeys(group.nodes, text))
    return failed, hopeless


def _by_reason(groups: Iterable[RefusalGroup]) -> Counter[str]:
    reasons: Counter[str] = Counter()
    for group in groups:
        reasons[group.reason] += len(group.nodes)
    return reasons


def _summary(groups: Sequence[RefusalGroup]) -> str:
    texts = [f"{group.text} ({format_count(len(group.nodes), 'node')})" for group in groups[:3]]
    if rest := sum(len(group.nodes) for group in groups[3:]):
        texts.append(f"and {format_count(rest, 'more node')}")
    return "; ".join(texts)


def _scores(ranked: Sequence[str]) -> list[wire.HostPriority]:
    last = len(ranked)
    return [
        wire.HostPriority(host=name, score=(last - rank) * STEP) for rank, name in enumerate(ranked)
    ]


def _unbound(problem: str) -> bytes:
    return wire.encode(wire.BindingResult(error=problem))
