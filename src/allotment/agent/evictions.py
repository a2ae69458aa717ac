# SPDX-License-Identifier: Apache-2.0
"""Deletes pods that the node cannot serve any more, so that their controllers create them again.

Two causes: the node changed after the pod's devices were chosen, or a GPU with shares is sick and
the configuration says so. A pod without a controller would be lost: it gets an event only. A
placement cannot be changed in place, because the scheduler books by it.
"""

import asyncio
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Final, NoReturn

from allotment.agent.protocols import Pods, Reports
from allotment.dialects.own.placement import PLACEMENT, read_booking
from allotment.model.errors import AllotError, DoesNotFitError, MisplacedError, UsageError
from allotment.model.pods import Owner, Pod, PodUid

EVICTED: Final = "PodEvicted"
KEPT: Final = "PodNotEvicted"
"""Reasons of events on pods."""
MISPLACED_S: Final = 10.0
"""How long refusals must last. By then the scheduler has the node's new devices."""
NO_ROOM_S: Final = 60.0
"""The same for a GPU without room: programs of an earlier pod may take long to end."""
_LOOK_S: Final = 1.0


def is_misplaced(pod: Pod, error: AllotError) -> bool:
    """Return whether a share was refused because its node changed after the devices were chosen.

    A placement that a user wrote would come back with the next pod: only one for this uid counts.
    """
    if isinstance(error, MisplacedError) and PLACEMENT not in pod.annotations:
        return True
    if not isinstance(error, MisplacedError | DoesNotFitError):
        return False
    try:
        read_booking(pod.annotations.get(PLACEMENT, ""), uid=pod.uid, node=pod.node)
    except UsageError:
        return False
    return True


class Evictions:
    """Needs `run` running for sick GPUs."""

    def __init__(
        self,
        *,
        pods: Pods,
        reports: Reports,
        sick: Callable[[], Mapping[str, str]] = dict,
        after_s: Callable[[], float] = lambda: 0.0,
        owners: Callable[[str], Sequence[Owner]] = lambda _: (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`sick` returns why, by UUID, GPUs lose their pods; `after_s` the time before that.

        `owners` returns the owners of the shares on a GPU.
        """
        self._pods = pods
        self._reports = reports
        self._sick = sick
        self._after_s = after_s
        self._owners = owners
        self._clock = clock
        self._refused: dict[PodUid, float] = {}
        """Since when the shares of misplaced pods are refused."""
        self._since: dict[str, float] = {}
        """Since when GPUs are sick."""
        self._done: set[PodUid] = set()
        """Pods that are deleted, or have their event."""

    async def refused(self, pod: Pod, error: AllotError) -> None:
        """Evict a pod whose share is refused, if that lasts."""
        if not is_misplaced(pod, error):
            self._refused.pop(pod.uid, None)
            return
        after_s = NO_ROOM_S if isinstance(error, DoesNotFitError) else MISPLACED_S
        if self._clock() - self._refused.setdefault(pod.uid, self._clock()) >= after_s:
            await self._evict(pod, f"the node changed after its GPUs were chosen: {error.message}")

    def served(self, pod: PodUid) -> None:
        """A pod has its share."""
        self._refused.pop(pod, None)

    def keep(self, pods: Collection[PodUid]) -> None:
        """Forget all other pods."""
        self._done &= set(pods)
        self._refused = {uid: at for uid, at in self._refused.items() if uid in set(pods)}

    async def run(self) -> NoReturn:
        while True:
            await self.look()
            await asyncio.sleep(_LOOK_S)

    async def look(self) -> None:
        """Evict the pods of GPUs that have been sick for long enough."""
        sick, now = self._sick(), self._clock()
        self._since = {uuid: self._since.get(uuid, now) for uuid in sick}
        for uuid, reason in sick.items():
            if now - self._since[uuid] < self._after_s():
                continue
            for owner in self._owners(uuid):
                pod = self._pods.get(owner.uid)
                if pod is not None and not pod.has_ended:
                    await self._evict(pod, f"GPU {uuid} of container {owner.container}: {reason}")

    async def _evict(self, pod: Pod, why: str) -> None:
        if pod.is_ending or pod.uid in self._done:
            return
        if not pod.has_controller:
            text = f"{why}; no controller creates this pod again: delete and create it"
            self._reports.pod(pod, KEPT, text, is_warning=True)
            self._done.add(pod.uid)
            return
        try:
            await self._pods.delete(pod)
        except AllotError as error:
            # The next refusal or look repeats it.
            self._reports.pod(pod, KEPT, f"{why}; {error.one_line()}", is_warning=True)
            return
        self._done.add(pod.uid)
        self._reports.count("evictions")
        text = f"deleted, so that its controller creates it again: {why}"
        self._reports.pod(pod, EVICTED, text, is_warning=True)
