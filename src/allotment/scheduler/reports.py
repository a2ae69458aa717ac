# SPDX-License-Identifier: Apache-2.0
"""What people are told: figures, and events on pods. Nothing here decides anything."""

import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Final

import structlog

from allotment.kube.cluster_feed import ClusterPod
from allotment.kube.events import Events, Reference
from allotment.metrics.scheduler import SchedulerMetrics
from allotment.model.clusters import PodBooking, PodNeed

__all__ = ["Reports"]

_SAME_S: Final = 300.0
"""The same is said of a pod once in so long: kube-scheduler asks again at every change of the
cluster, and says it in its own event each time."""
_MOST_KNOWN: Final = 4096
_MOST_LOGGED: Final = 20
"""Of pods that cannot be taken over, by name; how many there are, a figure says."""
_log = structlog.get_logger(__name__)


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
        self._said: OrderedDict[str, tuple[str, float]] = OrderedDict()

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

    def _say(self, pod: ClusterPod | PodNeed, reason: str, text: str) -> None:
        if self._events is None:
            return
        now = self._clock()
        said = self._said.get(pod.uid)
        if said is not None and said[0] == text and now - said[1] < _SAME_S:
            return
        self._said[pod.uid] = (text, now)
        self._said.move_to_end(pod.uid)
        while len(self._said) > _MOST_KNOWN:
            self._said.popitem(last=False)
        about = Reference("Pod", pod.name, pod.uid, pod.namespace)
        self._events.tell(about, reason=reason, message=text, is_warning=True)
