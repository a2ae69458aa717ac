# SPDX-License-Identifier: Apache-2.0
"""Pods that kube-scheduler will try soon, and the nodes that it allows them.

Its own questions show which nodes pass its filters for a pod. For a moment, the same nodes are
allowed for pods with the same constraints. A wrong guess costs time: it looks at all nodes then.
"""

import heapq
from collections.abc import Callable, Collection
from itertools import count
from typing import Final, NamedTuple

from allotment.model.clusters import ClusterPod, PodNeed
from allotment.model.pods import PodUid

LEAD: Final = 8
"""kube-scheduler tries so many pods before a nomination for the next one can reach it."""
MOST_AHEAD: Final = 64
"""Nominated pods that it has not tried. It tries them within a second or two."""
AHEAD_S: Final = 5.0
"""A pod that is not tried within this time waits for something else. Nor is its place expected any
longer (`BookSettings.expected_s`)."""
LATE_S: Final = 15.0
"""A nominated pod that is not bound within this time may wait for hours."""
ALLOWED_S: Final = 5.0
"""So soon, a node that came or changed is among the choices. Then the next pod gets no nomination,
so that kube-scheduler asks about all nodes again."""
_MOST_KINDS: Final = 16
"""Constraints whose nodes are kept: each has thousands of names."""


class NextPod(NamedTuple):
    """A pod to nominate, and the nodes to choose from."""

    pod: ClusterPod
    allowed: Collection[str]


class _Nominated(NamedTuple):
    pod: ClusterPod
    since: float
    """When this process first saw the nomination."""


class _Allowed(NamedTuple):
    names: Collection[str]
    until: float


class WaitingPods:
    """In kube-scheduler's order: by priority, then by arrival. No pod is nominated twice."""

    def __init__(
        self, *, clock: Callable[[], float], leads: Callable[[], bool] = lambda: True
    ) -> None:
        """Pods that come while another replica leads are left out: it is asked about them."""
        self._clock = clock
        self._leads = leads
        self._pods: dict[PodUid, ClusterPod] = {}
        """Pods that may be nominated."""
        self._queues: dict[str, list[tuple[int, int, PodUid]]] = {}
        """The same by constraints, as heaps; some of their pods do not wait any more."""
        self._queued = 0
        """Entries of all queues."""
        self._passed: set[PodUid] = set()
        """Waiting pods that are tried, nominated or left out."""
        self._ahead: dict[PodUid, float] = {}
        """Nominated and not tried, with the time."""
        self._nominated: dict[PodUid, _Nominated] = {}
        """Waiting pods that show a nomination of this or an earlier leader."""
        self._allowed: dict[str, _Allowed] = {}
        """By constraints."""
        self._arrivals = count()

    def put(self, pod: ClusterPod, need: PodNeed | None) -> None:
        """A pod came or changed; `need` is None for no request or an invalid one."""
        uid = pod.uid
        if pod.node or pod.is_ending or need is None or not need.containers:
            self.gone(uid)
        elif pod.tried_first:
            self._pods.pop(uid, None)
            self._passed.add(uid)
            since = self._nominated[uid].since if uid in self._nominated else self._clock()
            self._nominated[uid] = _Nominated(pod, since)
        elif uid in self._passed or pod.nominated_node or not pod.constraints:
            self._pods.pop(uid, None)
            self._nominated.pop(uid, None)
            if pod.nominated_node:  # by kube-scheduler, which has tried it
                self._ahead.pop(uid, None)
        elif not self._leads():
            self._pods.pop(uid, None)
            self._passed.add(uid)
        else:
            before = self._pods.get(uid)
            self._pods[uid] = pod
            if before is None or before.constraints != pod.constraints:
                self._push(pod)

    def gone(self, uid: PodUid) -> None:
        self._pods.pop(uid, None)
        self._nominated.pop(uid, None)
        self._ahead.pop(uid, None)
        self._passed.discard(uid)

    def tried(self, pod: ClusterPod, names: Collection[str]) -> None:
        """kube-scheduler asks about a pod on these nodes."""
        self._pods.pop(pod.uid, None)
        self._ahead.pop(pod.uid, None)
        self._passed.add(pod.uid)
        if (pod.tried_first or pod.nominated_node) and len(names) == 1:
            return  # it asks about the nominated node before all others
        now = self._clock()
        known = self._allowed.get(pod.constraints)
        # A large pod passes on fewer nodes than its constraints allow: more names are better.
        if known is None or known.until <= now or len(known.names) < len(names):
            self._allowed.pop(pod.constraints, None)
            self._allowed[pod.constraints] = _Allowed(names, now + ALLOWED_S)
            if len(self._allowed) > _MOST_KINDS:
                del self._allowed[next(iter(self._allowed))]

    def next(self) -> NextPod | None:
        """Take the next pod to nominate.

        None: enough are ahead, no pod waits, or kube-scheduler has not asked lately about one with
        the same constraints. Pods that it will have tried by then are left out.
        """
        now = self._clock()
        self._ahead = {uid: at for uid, at in self._ahead.items() if now - at < AHEAD_S}
        if len(self._ahead) >= MOST_AHEAD:
            return None
        kinds = [kind for kind, known in self._allowed.items() if known.until > now]
        for _ in range(0 if self._ahead else LEAD):
            self._take(kinds)
        taken = self._take(kinds)
        if taken is None:
            return None
        self._ahead[taken.uid] = now
        return NextPod(taken, self._allowed[taken.constraints].names)

    def is_ahead(self, uid: PodUid) -> bool:
        """Whether a pod that was taken is not bound, gone, tried, or nominated already."""
        return uid in self._ahead and uid not in self._nominated

    def check_invariants(self) -> None:
        """Raise `AssertionError` unless each waiting pod is queued once, and in no other state."""
        entries = {(kind, each[-1]) for kind, queue in self._queues.items() for each in queue}
        waiting = {(pod.constraints, uid) for uid, pod in self._pods.items()}
        wrong = {
            "miscounted": self._queued != sum(map(len, self._queues.values())),
            "empty queues": not all(self._queues.values()),
            "not queued": waiting - entries,
            "nominated twice": self._pods.keys() & (self._passed | self._nominated.keys()),
            "too many ahead": len(self._ahead) > MOST_AHEAD,
            "too many constraints": len(self._allowed) > _MOST_KINDS,
        }
        if any(wrong.values()):
            raise AssertionError(wrong)

    def _take(self, kinds: Collection[str]) -> ClusterPod | None:
        """Take the first pod of these queues."""
        heads = [(head, kind) for kind in kinds if (head := self._head(kind)) is not None]
        if not heads:
            return None
        uid = self._pop(min(heads)[-1])
        self._passed.add(uid)
        return self._pods.pop(uid)

    def _head(self, kind: str) -> tuple[int, int, PodUid] | None:
        """Return the first entry of a queue whose pod waits."""
        queue = self._queues.get(kind, [])
        while queue:
            pod = self._pods.get(queue[0][-1])
            if pod is not None and pod.constraints == kind:
                return queue[0]
            self._pop(kind)
        return None

    def _pop(self, kind: str) -> PodUid:
        queue = self._queues[kind]
        uid = heapq.heappop(queue)[-1]
        self._queued -= 1
        if not queue:
            del self._queues[kind]
        return uid

    def late(self) -> list[ClusterPod]:
        """Return pods whose nomination is of no use any more: kube-scheduler does not bind them.

        It counts their CPU and memory on that node until the nomination is withdrawn.
        """
        before = self._clock() - LATE_S
        return [each.pod for each in self._nominated.values() if each.since <= before]

    def _push(self, pod: ClusterPod) -> None:
        entry = (-pod.priority, next(self._arrivals), pod.uid)
        heapq.heappush(self._queues.setdefault(pod.constraints, []), entry)
        self._queued += 1
        # Without questions nothing is taken from them.
        if self._queued > 2 * len(self._pods) + MOST_AHEAD:
            for kind, queue in list(self._queues.items()):
                left = [
                    entry
                    for entry in queue
                    if (known := self._pods.get(entry[-1])) and known.constraints == kind
                ]
                heapq.heapify(left)
                self._queues[kind] = left
                if not left:
                    del self._queues[kind]
            self._queued = sum(map(len, self._queues.values()))
