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

__all__ = ["Reports"]

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
_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class _Said:
    """What was said of a pod last, for one reason."""

    gist: str
    """The text without its amounts, which change with every pod that ends."""
    at: float
    pause_s: float


class Reports:
    """Tells of decisions. An `extender.Told`."""

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
