# SPDX-License-Identifier: Apache-2.0
"""Reports decisions and certificates as metrics and events. Decides nothing."""

import re
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Final

import msgspec
import structlog

from allotment.dialects.own.placement import RESIZE
from allotment.kube.events import Events, Reference
from allotment.metrics.scheduler import SchedulerMetrics
from allotment.metrics.tracing import PodTraces
from allotment.model.clusters import ClusterPod, PodBooking, PodNeed
from allotment.placement.explain import Refusal
from allotment.scheduler.admission.webhook import REVIEWED, review_times
from allotment.scheduler.tls.context import HandshakeFailure
from allotment.scheduler.tls.rotation import TlsEndpoint

_SAME_S: Final = 300.0
"""The same text about a pod is repeated after this time, then after twice as long each time, up to
an hour: kube-scheduler retries at every change of the cluster, with an event of its own."""
_MOST_SAME_S: Final = 3600.0
_OTHER_S: Final = 60.0
"""A different text of the same kind: which nodes lack what changes with every pod."""
_AMOUNT: Final = re.compile(r"\d[\d.,]*")
_MOST_KNOWN: Final = 4096
_MOST_LOGGED: Final = 20
"""Pods of other systems that are logged by name; a metric has the number of all."""
_PROBLEMS: Final[Mapping[HandshakeFailure, str]] = {
    HandshakeFailure.DISTRUSTED: "does not trust its certificate",
    HandshakeFailure.NO_CERTIFICATE: "shows no certificate",
    HandshakeFailure.WRONG_CERTIFICATE: "shows a certificate of another authority",
}
"""Other failures only count in metrics: any client may connect."""
_ADVICE: Final[Mapping[TlsEndpoint, Mapping[HandshakeFailure, str]]] = {
    TlsEndpoint.EXTENDER: {
        HandshakeFailure.DISTRUSTED: "kube-scheduler, restart it: it reads trusted authorities only"
        " at start",
        HandshakeFailure.NO_CERTIFICATE: "kube-scheduler, its configuration lacks certFile and"
        " keyFile (--print-config)",
        HandshakeFailure.WRONG_CERTIFICATE: "kube-scheduler, give it that of the Secret"
        " --client-secret",
    },
    TlsEndpoint.WEBHOOK: {
        HandshakeFailure.DISTRUSTED: "the API server, another program changed caBundle of the"
        " MutatingWebhookConfiguration",
        HandshakeFailure.NO_CERTIFICATE: "the API server, its --admission-control-config-file names"
        " none for this Service",
        HandshakeFailure.WRONG_CERTIFICATE: "the API server, add its authority to"
        " --webhook-client-ca",
    },
}
"""The likely client, and the next step."""
_HANDSHAKES_SAME_S: Final = 3600.0
_log = structlog.get_logger(__name__)


class _Report(msgspec.Struct, frozen=True):
    """The last report about a pod for one reason."""

    gist: str
    """The text without amounts, which change with every pod that ends."""
    at: float
    pause_s: float


class SchedulerReports:
    """Reports decisions and certificates.

    An `extender.ExtenderObserver` and a `tls.rotation.RotationObserver`.
    """

    def __init__(
        self,
        metrics: SchedulerMetrics,
        events: Events | None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Without `events` it only counts and logs."""
        self._metrics = metrics
        self._events = events
        self._clock = clock
        self._not_taken_over = 0
        self._reports: OrderedDict[str, dict[str, _Report]] = OrderedDict()
        """The last report by pod and reason."""
        self._handshakes: dict[tuple[TlsEndpoint, HandshakeFailure], float] = {}
        """The time of each log line."""

    def refused(self, pod: ClusterPod, text: str, *, is_mistaken: bool) -> None:
        self._metrics.count("pods_refused", "mistake" if is_mistaken else "room")
        self._report(pod, "BadRequest" if is_mistaken else "DoesNotFit", text)

    def rejected(self, reasons: Mapping[str, int]) -> None:
        for reason, number in reasons.items():
            self._metrics.count("node_rejections", reason, by=number)

    def bound(self, need: PodNeed, booking: PodBooking | None) -> None:
        del booking
        self._metrics.count("pods_bound")
        self._reports.pop(need.uid, None)

    def unbound(self, pod: ClusterPod | PodNeed, node: str, text: str) -> None:
        self._metrics.count("pods_unbound")
        self._report(pod, "NotBound", f"not bound to node {node}: {text}")

    def not_taken_over(self, pod: ClusterPod, text: str) -> None:
        """Another system's record on a running pod is invalid, so it does not count."""
        self._not_taken_over += 1
        if self._not_taken_over <= _MOST_LOGGED:
            _log.warning("a pod's GPUs are not counted", pod=str(pod), why=text)
        self._report(
            pod, "NotTakenOver", f"its GPUs are not counted, and other pods may get them: {text}"
        )

    def passed_over(self, pod: ClusterPod, text: str) -> None:
        self._report(pod, "NotHonoured", f"not honoured: {text}")

    def resize_refused(self, pod: ClusterPod, refusal: Refusal) -> None:
        """Each wish is reported by itself: its author waits for the answer."""
        hint = f"; hint: {refusal.hint}" if refusal.hint else ""
        text = f"not resized: {refusal.text}{hint}"
        wish = pod.asks.annotations.get(RESIZE, "") if pod.asks is not None else ""
        self._report(pod, "ResizeRefused", text, cause=wish)

    def handshake_failed(self, endpoint: TlsEndpoint, failure: HandshakeFailure) -> None:
        self._metrics.count(f"{endpoint}_handshakes_failed", failure)
        problem, now = _PROBLEMS.get(failure), self._clock()
        last = self._handshakes.get((endpoint, failure), -_HANDSHAKES_SAME_S)
        if problem is not None and now - last >= _HANDSHAKES_SAME_S:
            self._handshakes[endpoint, failure] = now
            advice = _ADVICE[endpoint][failure]
            _log.warning(f"a client of the {endpoint} {problem}: if it is {advice}")

    def secret_amiss(self, name: str, uid: str, *, reason: str, text: str) -> None:
        if self._events is not None:
            namespace, _, own = name.partition("/")
            about = Reference("Secret", own, uid, namespace)
            self._events.tell(about, reason=reason, message=text, is_warning=True)

    def _report(
        self, pod: ClusterPod | PodNeed, reason: str, text: str, *, cause: str = ""
    ) -> None:
        """Report a text; another `cause` makes it news."""
        gist = _AMOUNT.sub("", text)
        if self._events is not None and self._is_news(pod.uid, f"{reason} {cause}", gist):
            about = Reference("Pod", pod.name, pod.uid, pod.namespace)
            self._events.tell(about, reason=reason, message=text, is_warning=True)

    def _is_news(self, uid: str, reason: str, gist: str) -> bool:
        now = self._clock()
        reports = self._reports.setdefault(uid, {})
        last = reports.get(reason)
        pause_s = _SAME_S
        if last is not None:
            is_same = last.gist == gist
            if now - last.at < (last.pause_s if is_same else _OTHER_S):
                return False
            if is_same:
                pause_s = min(_MOST_SAME_S, last.pause_s * 2)
        reports[reason] = _Report(gist, now, pause_s)
        self._reports.move_to_end(uid)
        while len(self._reports) > _MOST_KNOWN:
            self._reports.popitem(last=False)
        return True


class _Filtered(msgspec.Struct):
    """What filter answered about a waiting pod."""

    first_ns: int
    """When the first answer ended."""
    last_ns: int
    requests: int = 1
    fits: bool = False


class SchedulingTraces:
    """Records the scheduler's part of pods' traces. An `extender.ExtenderTraces`.

    Of a waiting pod the first answer counts, and each one by which it fits: kube-scheduler asks
    again at every change of the cluster.
    """

    def __init__(self, traces: PodTraces, *, clock_ns: Callable[[], int] = time.time_ns) -> None:
        """`clock_ns` returns nanoseconds after the epoch."""
        self._traces = traces
        self._clock_ns = clock_ns
        self._pods: OrderedDict[str, _Filtered] = OrderedDict()

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
        now = self._clock_ns()
        known = self._pods.get(pod.uid)
        if known is None:
            known = self._pods[pod.uid] = _Filtered(now, now)
            if len(self._pods) > _MOST_KNOWN:
                self._pods.popitem(last=False)
            self._reviewed(pod, annotations, now)
        elif not fitting:
            known.requests += 1
            return
        else:
            known.requests += 1
            if not known.fits:
                self._traces.record(
                    "wait for room", pod, began_ns=known.first_ns, ended_ns=began_ns
                )
        self._traces.record(
            "filter",
            pod,
            began_ns=began_ns,
            ended_ns=now,
            attributes={
                "allotment.nodes": nodes,
                "allotment.nodes_returned": fitting,
                "allotment.requests": known.requests,
            },
            problem=refusal,
        )
        known.last_ns, known.fits = now, bool(fitting)

    @contextmanager
    def binding(self, pod: PodNeed, node: str) -> Iterator[Callable[[str], None]]:
        known = self._pods.get(pod.uid)
        if known is not None:
            now = self._clock_ns()
            self._traces.record("wait for bind", pod, began_ns=known.last_ns, ended_ns=now)
        problem = ""

        def end(text: str) -> None:
            nonlocal problem
            problem = text
            ended(text)

        with self._traces.measure("bind", pod, {"k8s.node.name": node}) as ended:
            yield end
        if not problem:
            self._pods.pop(pod.uid, None)

    def _reviewed(self, pod: ClusterPod, annotations: Mapping[str, str], now: int) -> None:
        """Record the webhook's review: the pod had no UID then, so the webhook noted the times."""
        times = review_times(annotations.get(REVIEWED, ""))
        if times is not None and times[0] <= times[1] <= now:
            self._traces.record("webhook", pod, began_ns=times[0], ended_ns=times[1])
