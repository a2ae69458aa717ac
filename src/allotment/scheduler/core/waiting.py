# SPDX-License-Identifier: Apache-2.0
"""Pods that kube-scheduler will try next, and the nodes that it allows them.

kube-scheduler's own requests show which nodes pass its filters for a pod. For a moment, the same
nodes are allowed for pods with the same constraints.
"""

import heapq
from collections.abc import Callable, Collection
from itertools import count
from typing import Final, NamedTuple

from allotment.model.clusters import ClusterPod, PodNeed
from allotment.model.pods import PodUid

MOST_AHEAD: Final = 256
"""Pods with a nomination that kube-scheduler has not tried yet."""
AHEAD_S: Final = 30.0
"""A pod that is not tried within this time is held back elsewhere."""
ALLOWED_S: Final = 2.0
"""So soon, a node that came or changed is among the choices."""
_MOST_KINDS: Final = 64


class NextPod(NamedTuple):
    """A pod to nominate, and the nodes to choose from."""

    pod: ClusterPod
    allowed: Collection[str]


class _Allowed(NamedTuple):
    names: Collection[str]
    until: float


class WaitingPods:
    """In kube-scheduler's order: by priority, then by arrival."""

    def __init__(self, *, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._pods: dict[PodUid, ClusterPod] = {}
        """Pods that wait for their first try and have no nomination."""
        self._queues: dict[str, list[tuple[int, int, PodUid]]] = {}
        """The same by constraints, as heaps; some of them are not in `_pods` any more."""
        self._tried: set[PodUid] = set()
        self._ahead: dict[PodUid, float] = {}
        """Nominated and not tried yet, with the time."""
        self._allowed: dict[str, _Allowed] = {}
        self._arrivals = count()

    def put(self, pod: ClusterPod, need: PodNeed | None) -> None:
        """A pod came or changed; `need` is None for no request or an invalid one."""
        uid = pod.uid
        if pod.node or pod.is_ending or need is None or not need.containers:
            self.gone(uid)
        elif pod.nominated_node or not pod.constraints or uid in self._tried or uid in self._ahead:
            self._pods.pop(uid, None)
        else:
            before = self._pods.get(uid)
            self._pods[uid] = pod
            if before is None or before.constraints != pod.constraints:
                queue = self._queues.setdefault(pod.constraints, [])
                heapq.heappush(queue, (-pod.priority, next(self._arrivals), uid))

    def gone(self, uid: PodUid) -> None:
        self._pods.pop(uid, None)
        self._ahead.pop(uid, None)
        self._tried.discard(uid)

    def tried(self, pod: ClusterPod, names: Collection[str]) -> bool:
        """kube-scheduler asks about a pod on these nodes. Return whether on all that it allows."""
        self._pods.pop(pod.uid, None)
        self._ahead.pop(pod.uid, None)
        self._tried.add(pod.uid)
        if pod.nominated_node and len(names) == 1:
            return False  # it asks about the nominated node first
        now = self._clock()
        known = self._allowed.get(pod.constraints)
        # The pod's size leaves nodes out as well: more nodes are closer to what is allowed.
        if known is None or known.until <= now or len(known.names) < len(names):
            self._allowed.pop(pod.constraints, None)
            self._allowed[pod.constraints] = _Allowed(names, now + ALLOWED_S)
            if len(self._allowed) > _MOST_KINDS:
                del self._allowed[next(iter(self._allowed))]
        return True

    def next(self) -> NextPod | None:
        """Take the next pod to nominate; None: enough are ahead, or no other pod waits.

        The first pod is left out if no pod is ahead of it: kube-scheduler tries it already.
        """
        now = self._clock()
        for uid in [uid for uid, at in self._ahead.items() if now - at >= AHEAD_S]:
            del self._ahead[uid]
        while len(self._ahead) < MOST_AHEAD:
            heads = [
                (queue[0], key)
                for key, known in self._allowed.items()
                if known.until > now and (queue := self._waiting_in(key))
            ]
            if not heads:
                return None
            (_, _, uid), key = min(heads)
            heapq.heappop(self._queues[key])
            pod = self._pods.pop(uid)
            is_first = not self._ahead
            self._ahead[uid] = now
            if not is_first:
                return NextPod(pod, self._allowed[key].names)
        return None

    def _waiting_in(self, constraints: str) -> list[tuple[int, int, PodUid]]:
        queue = self._queues.get(constraints, [])
        while queue and self._is_over(queue[0][2], constraints):
            heapq.heappop(queue)
        if not queue:
            self._queues.pop(constraints, None)
        return queue

    def _is_over(self, uid: PodUid, constraints: str) -> bool:
        pod = self._pods.get(uid)
        return pod is None or pod.constraints != constraints
