# SPDX-License-Identifier: Apache-2.0
"""Why pods wait for GPUs: the last reason of each, and the number of pods by reason.

The reasons are those of refusals, and three more: a fixed list, for the labels of metrics.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Final

from allotment.model.clusters import ClusterPod
from allotment.model.pods import PodUid
from allotment.placement.explain import Reason, RefusalGroup

UNTRIED: Final = "untried"
"""kube-scheduler has not asked about it, or has asked another replica."""
PLACED: Final = "placed"
"""It has a place, and kube-scheduler has not bound it."""
REQUEST: Final = "request"
"""Its request is invalid."""
WAITS: Final = (UNTRIED, PLACED, REQUEST, *(reason.value for reason in Reason))

HOPELESS: Final = frozenset(
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
"""A pod does not fit on such a node even without other pods: preemption is useless."""


class WaitReasons:
    """The pods that ask for GPUs and are not bound. Not thread-safe."""

    def __init__(self) -> None:
        self._reasons: dict[PodUid, str] = {}
        self._counts: Counter[str] = Counter()

    def put(self, pod: ClusterPod) -> None:
        """A pod came or changed."""
        if pod.asks is None or pod.node or pod.is_ending:
            self.gone(pod.uid)
        elif pod.uid not in self._reasons:
            self._set(pod.uid, UNTRIED)

    def gone(self, uid: PodUid) -> None:
        before = self._reasons.pop(uid, None)
        if before is not None:
            self._counts[before] -= 1

    def because(self, uid: PodUid, reason: str) -> None:
        """An answer about a pod. Ignored if it does not wait."""
        if uid in self._reasons:
            self._set(uid, reason if reason in WAITS else Reason.CHANGED.value)

    def counts(self) -> Mapping[str, int]:
        """Return the number of pods by each of `WAITS`."""
        return {reason: self._counts[reason] for reason in WAITS}

    def _set(self, uid: PodUid, reason: str) -> None:
        self.gone(uid)
        self._reasons[uid] = reason
        self._counts[reason] += 1


def reason_of(groups: Iterable[RefusalGroup]) -> str:
    """Return the reason of most nodes, where some would fit the pod if they were free: of these."""
    reasons = [group.reason for group in groups]
    return next((each for each in reasons if each not in HOPELESS), reasons[0] if reasons else "")
