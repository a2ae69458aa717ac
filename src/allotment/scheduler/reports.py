# SPDX-License-Identifier: Apache-2.0
"""What people are told: figures, and events on pods. Nothing here decides anything."""

import re
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import structlog

from allotment.kube.cluster_feed import ClusterPod
from allotment.kube.events import Events, Reference
from allotment.metrics.scheduler import SchedulerMetrics
from allotment.model.clusters import PodBooking, PodNeed
from allotment.model.compute import WHOLE
from allotment.placement.totals import ModelTotals
from allotment.scheduler.certificates_keeping import Door
from allotment.scheduler.guards import Failure

__all__ = ["Reports", "model_figures"]

_SAME_S: Final = 300.0
"""The same is said of a pod again after so long, and then after twice as long each time up to an
hour: kube-scheduler asks again at every change of the cluster, and says it in its own event each
time."""
_MOST_SAME_S: Final = 3600.0
_OTHER_S: Final = 60.0
"""Something else of the same kind, after so long: which nodes lack what changes with every pod."""
_AMOUNT: Final = re.compile(r"\d[\d.,]*")
_MOST_KNOWN: Final = 4096
_MOST_LOGGED: Final = 20
"""Of pods that cannot be taken over, by name; how many there are, a figure says."""
_HANDSHAKES: Final[Mapping[tuple[Door, Failure], str]] = {
    (Door.EXTENDER, Failure.DISTRUSTED): "who asks the extender does not trust its certificate: if"
    " it is kube-scheduler, start it again, as it reads whom to trust at its start alone",
    (Door.EXTENDER, Failure.NO_CERTIFICATE): "who asks the extender shows no certificate: if it is"
    " kube-scheduler, its configuration lacks certFile and keyFile (--print-config)",
    (Door.EXTENDER, Failure.WRONG_CERTIFICATE): "who asks the extender shows a certificate that is"
    " not of its authority: if it is kube-scheduler, give it that of the Secret --client-secret",
    (Door.WEBHOOK, Failure.DISTRUSTED): "who asks the webhook does not trust its certificate: if it"
    " is the API server, caBundle of the MutatingWebhookConfiguration is not what is kept there",
    (Door.WEBHOOK, Failure.NO_CERTIFICATE): "who asks the webhook shows no certificate: if it is"
    " the API server, its --admission-control-config-file names none for this Service",
    (Door.WEBHOOK, Failure.WRONG_CERTIFICATE): "who asks the webhook shows a certificate of an"
    " authority that is not in --webhook-client-ca",
}
"""Of the others there are figures: anybody may knock."""
_HANDSHAKES_SAME_S: Final = 3600.0
_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class _Said:
    """What was said of a pod last, for one reason."""

    gist: str
    """The text without its amounts, which change with every pod that ends."""
    at: float
    pause_s: float


class Reports:
    """Tells of decisions and certificates.

    An `extender.Told`, and a `certificates_keeping.Told`.
    """

    def __init__(
        self,
        metrics: SchedulerMetrics,
        events: Events | None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Without `events` nobody writes them."""
        self._metrics = metrics
        self._events = events
        self._clock = clock
        self._not_taken_over = 0
        self._said: OrderedDict[str, dict[str, _Said]] = OrderedDict()
        """By pod and reason."""
        self._handshakes: dict[str, float] = {}
        """When each was logged."""

    def refused(self, pod: ClusterPod, text: str, *, is_mistaken: bool) -> None:
        """A pod has no place."""
        self._metrics.count("pods_refused", "mistake" if is_mistaken else "room")
        self._say(pod, "BadRequest" if is_mistaken else "DoesNotFit", text)

    def rejected(self, reasons: Mapping[str, int]) -> None:
        """So many nodes were rejected, by reason."""
        for reason, number in reasons.items():
            self._metrics.count("node_rejections", reason, by=number)

    def bound(self, need: PodNeed, booking: PodBooking | None) -> None:
        """A pod was bound."""
        del booking
        self._metrics.count("pods_bound")
        self._said.pop(need.uid, None)

    def unbound(self, pod: ClusterPod | PodNeed, node: str, text: str) -> None:
        """A pod was not bound to the node chosen for it."""
        self._metrics.count("pods_unbound")
        self._say(pod, "NotBound", f"not bound to node {node}: {text}")

    def not_taken_over(self, pod: ClusterPod, text: str) -> None:
        """What another system has given a pod that runs cannot be read, and is not counted."""
        self._not_taken_over += 1
        if self._not_taken_over <= _MOST_LOGGED:
            _log.warning("a pod's GPUs are not counted", pod=str(pod), why=text)
        self._say(pod, "NotTakenOver", f"its GPUs are not counted, and may be given again: {text}")

    def passed_over(self, pod: ClusterPod, text: str) -> None:
        """What a pod says in another system's words, and has no effect."""
        self._say(pod, "NotHonoured", f"not honoured: {text}")

    def handshake_failed(self, door: Door, failure: Failure) -> None:
        """Somebody came by TLS and was not let in, or went away."""
        self._metrics.count(f"{door}_handshakes_failed", failure)
        text = _HANDSHAKES.get((door, failure))
        now = self._clock()
        if text and now - self._handshakes.get(text, -_HANDSHAKES_SAME_S) >= _HANDSHAKES_SAME_S:
            self._handshakes[text] = now
            _log.warning(text)

    def secret_amiss(self, name: str, uid: str, *, reason: str, text: str) -> None:
        """A Secret of certificates, as NAMESPACE/NAME, is not as it should be."""
        if self._events is not None:
            namespace, _, own = name.partition("/")
            about = Reference("Secret", own, uid, namespace)
            self._events.tell(about, reason=reason, message=text, is_warning=True)

    def _say(self, pod: ClusterPod | PodNeed, reason: str, text: str) -> None:
        if self._events is None:
            return
        if not self._is_news(pod.uid, reason, _AMOUNT.sub("", text)):
            return
        about = Reference("Pod", pod.name, pod.uid, pod.namespace)
        self._events.tell(about, reason=reason, message=text, is_warning=True)

    def _is_news(self, uid: str, reason: str, gist: str) -> bool:
        now = self._clock()
        of_pod = self._said.setdefault(uid, {})
        said = of_pod.get(reason)
        pause_s = _SAME_S
        if said is not None:
            is_same = said.gist == gist
            if now - said.at < (said.pause_s if is_same else _OTHER_S):
                return False
            if is_same:
                pause_s = min(_MOST_SAME_S, said.pause_s * 2)
        of_pod[reason] = _Said(gist, now, pause_s)
        self._said.move_to_end(uid)
        while len(self._said) > _MOST_KNOWN:
            self._said.popitem(last=False)
        return True


def model_figures(totals: Mapping[str, ModelTotals]) -> Mapping[str, Mapping[str, float]]:
    """Return what there is and what is given of each model, by the names of its figures."""
    return {
        model: {
            "devices": each.devices,
            "memory_bytes": each.memory,
            "memory_allocated_bytes": each.memory_allocated,
            "memory_fragmented_bytes": each.memory_fragmented,
            "compute": each.guarantee / WHOLE,
            "compute_allocated": each.guarantee_allocated / WHOLE,
            "compute_fragmented": each.guarantee_fragmented / WHOLE,
        }
        for model, each in totals.items()
    }
