# SPDX-License-Identifier: Apache-2.0
"""Deletes pods that the node cannot serve any more, so that their controllers create them again.

Two causes: the node changed after the pod's devices were chosen, or a GPU with shares is sick and
the configuration says so. A pod stays, with an event, if no controller creates it again, or if
another container of it runs: that one's work would be lost. A placement cannot be changed in place,
because the scheduler books by it.
"""

import asyncio
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Final, NoReturn

from allotment.agent.protocols import Pods, Reports
from allotment.dialects.own.placement import PLACEMENT, read_booking
from allotment.model.errors import AllotError, DoesNotFitError, MisplacedError, UsageError
from allotment.model.pods import ContainerKind, Owner, Pod, PodUid
from allotment.model.shares import Share
from allotment.shares.folders import StateFolder
from allotment.shares.record import note_event

EVICTED: Final = "PodEvicted"
KEPT: Final = "PodNotEvicted"
"""Reasons of events on pods."""
MISPLACED_S: Final = 10.0
"""How long refusals must last. By then the scheduler has the node's new devices."""
NO_ROOM_S: Final = 60.0
"""The same for a GPU without room: programs of an earlier pod may take long to end."""
_LOOK_S: Final = 1.0
_AGAIN_S: Final = 10.0
"""Before another attempt, if the API server refused to delete a pod."""


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


def note_evicted(folder: StateFolder, shares: Collection[Share], pod: PodUid, why: str) -> None:
    """Let `allot events` show the eviction, for each share of the pod."""
    for share in shares:
        if share.owner is not None and share.owner.uid == pod:
            note_event(folder, "evicted", share=share.name, share_id=share.id, text=why)


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
        on_due: Callable[[Collection[str]], None] = lambda _: None,
        on_evicted: Callable[[PodUid, str], None] = lambda *_: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`sick` returns why, by UUID, GPUs lose their pods; `after_s` the time before that.

        `owners` returns the owners of the shares on a GPU. `on_due` gets the GPUs that have been
        sick for long enough, at each look: pods with claims are evicted by Kubernetes, by a taint.
        `on_evicted` gets each deleted pod, and why.
        """
        self._pods = pods
        self._reports = reports
        self._sick = sick
        self._after_s = after_s
        self._owners = owners
        self._on_due = on_due
        self._on_evicted = on_evicted
        self._clock = clock
        self._refused: dict[PodUid, float] = {}
        """Since when the shares of misplaced pods are refused."""
        self._since: dict[str, float] = {}
        """Since when GPUs are sick."""
        self._deleted: set[PodUid] = set()
        self._kept: dict[PodUid, tuple[str, float]] = {}
        """Why pods stay, as last reported, and when that was found."""

    async def refused(self, pod: Pod, containers: Collection[str], error: AllotError) -> None:
        """Evict a pod if the share of these containers is refused for long enough."""
        if not is_misplaced(pod, error):
            self._refused.pop(pod.uid, None)
            return
        after_s = NO_ROOM_S if isinstance(error, DoesNotFitError) else MISPLACED_S
        if self._clock() - self._refused.setdefault(pod.uid, self._clock()) >= after_s:
            why = f"the node changed after its GPUs were chosen: {error.message}"
            await self._evict(pod, containers, why)

    def served(self, pod: PodUid) -> None:
        """A pod has its share."""
        self._refused.pop(pod, None)

    def keep(self, pods: Collection[PodUid]) -> None:
        """Forget all other pods."""
        self._deleted.intersection_update(pods)
        self._kept = {uid: kept for uid, kept in self._kept.items() if uid in pods}
        self._refused = {uid: at for uid, at in self._refused.items() if uid in pods}

    async def run(self) -> NoReturn:
        while True:
            await self.look()
            await asyncio.sleep(_LOOK_S)

    async def look(self) -> None:
        """Evict the pods of GPUs that have been sick for long enough."""
        sick, now = self._sick(), self._clock()
        self._since = {uuid: self._since.get(uuid, now) for uuid in sick}
        due = {uuid for uuid in sick if now - self._since[uuid] >= self._after_s()}
        self._on_due(due)
        reasons: dict[PodUid, dict[str, str]] = {}
        for uuid in due:
            for owner in self._owners(uuid):
                text = f"GPU {uuid} of container {owner.container}: {sick[uuid]}"
                reasons.setdefault(owner.uid, {})[owner.container] = text
        for uid, texts in reasons.items():
            pod = self._pods.get(uid)
            if pod is not None and not pod.has_ended:
                await self._evict(pod, texts, "; ".join(texts.values()))

    async def _evict(self, pod: Pod, containers: Collection[str], why: str) -> None:
        """Delete a pod because of these containers, or report once why it stays."""
        if pod.is_ending or pod.uid in self._deleted:
            return
        kept, when = self._kept.get(pod.uid, ("", 0.0))
        obstacle = _obstacle(pod, containers)
        if not obstacle:
            if kept and self._clock() - when < _AGAIN_S:
                return
            try:
                await self._pods.delete(pod)
            except AllotError as error:
                obstacle = error.one_line()
        if obstacle:
            self._kept[pod.uid] = obstacle, self._clock()
            if obstacle != kept:
                self._reports.pod(pod, KEPT, f"{why}; {obstacle}", is_warning=True)
            return
        self._deleted.add(pod.uid)
        self._on_evicted(pod.uid, why)
        self._reports.count("evictions")
        text = f"deleted, so that its controller creates it again: {why}"
        self._reports.pod(pod, EVICTED, text, is_warning=True)


def _obstacle(pod: Pod, containers: Collection[str]) -> str:
    """Return why a pod has to stay although these containers cannot work; empty: it need not.

    A sidecar only serves other containers.
    """
    if not pod.has_controller:
        return "no controller creates this pod again: delete and create it"
    others = [
        each.name
        for each in pod.containers
        if each.is_running and each.kind is not ContainerKind.SIDECAR
    ]
    if rest := sorted(set(others) - set(containers)):
        return f"its container {', '.join(rest)} runs, and would lose its work: delete the pod"
    return ""
