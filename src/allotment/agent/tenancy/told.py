# SPDX-License-Identifier: Apache-2.0
"""What the owners of shares are told, and how often: once for each thing, not at every retry."""

import re
import time
from collections.abc import Callable, Collection, Iterable

from allotment.agent.device_plugin.refusals import one_line
from allotment.agent.protocols import CheckpointEntry, Reports
from allotment.agent.tenancy.orders import describe, share_of
from allotment.model.errors import AllotError, UsageError
from allotment.model.pods import Pod, PodUid
from allotment.model.shares import Share, ShareId
from allotment.shares.small import too_small

__all__ = ["MISSING", "READY", "REFUSED", "SMALL", "STATE", "TAKEN_OVER", "Told"]

READY = "ShareReady"
SMALL = "ShareSmall"
REFUSED = "ShareRefused"
MISSING = "ShareMissing"
TAKEN_OVER = "ShareTakenOver"
STATE = "ShareStateFailed"
"""Reasons of events, on pods; the last on the node."""

_AGAIN_S = 600.0
"""Before the same is told once more with other figures."""
_FIGURE = re.compile(r"[0-9]+(?:\.[0-9]+)?")


class Told:
    """Events about shares; remembers the last one of each."""

    def __init__(self, reports: Reports, clock: Callable[[], float] = time.time) -> None:
        """`clock` gives seconds."""
        self._reports = reports
        self._clock = clock
        self._last: dict[PodUid, dict[ShareId | None, dict[str, tuple[str, float]]]] = {}
        """Of each share, what was told last for each reason, and when."""
        self._failure = ""

    def ready(self, share: Share) -> None:
        """A container has its share."""
        owner = share.owner
        self._reports.count("shares_made", mode=share.mode)
        if owner is not None:
            self._last.get(owner.uid, {}).pop(share.id, None)
            text = f"container {owner.container}: {describe(share)}"
            self._reports.pod(owner, READY, text, is_warning=False)
            small = too_small(share)
            if small:
                text = f"container {owner.container}: {small}"
                self._reports.pod(owner, SMALL, text, is_warning=True)

    def refused(
        self, pod: Pod | None, claims: Iterable[CheckpointEntry], error: AllotError
    ) -> None:
        """Containers do not get theirs, and wait."""
        self._reports.count("refusals", reason=type(error).__name__)
        self._warn(pod, tuple(claims), REFUSED, one_line(error), key=_key(error))

    def never_asked(self, pod: Pod, error: AllotError) -> None:
        """A container asks for what the kubelet asks no plugin for: it starts, and has no GPU."""
        text = f"it starts without a GPU: {one_line(error)}"
        if self._is_new(pod.uid, None, text, text):
            self._reports.count("refusals", reason=type(error).__name__)
            self._reports.pod(pod, REFUSED, text, is_warning=True)

    def missing(self, pod: Pod, entry: CheckpointEntry, error: AllotError) -> None:
        """A container runs without a share, and none can be made for it."""
        text = f"it runs, and its share cannot be booked: {one_line(error)}"
        self._warn(pod, (entry,), MISSING, text, key=f"{MISSING} {_key(error)}")

    def adopted(self, share: Share, entry: CheckpointEntry) -> None:
        """A container that ran without a share has one."""
        owner = share.owner
        self._reports.count("shares_made", mode=share.mode)
        if owner is None:
            return
        self._last.get(owner.uid, {}).pop(share.id, None)
        start = f"container {owner.container}"
        if entry.share is None:
            text = f"{start} goes on with what another device plugin gave it: {describe(share)}"
            self._reports.pod(owner, TAKEN_OVER, text, is_warning=False)
        else:
            text = f"{start} ran without its share, which is booked again: {describe(share)};"
            text += " its programs are limited from their next start on"
            self._reports.pod(owner, MISSING, text, is_warning=True)

    def failed(self, error: AllotError) -> None:
        """Something about the node's shares as a whole cannot be read or changed."""
        text = one_line(error)
        if text != self._failure:
            self._failure = text
            self._reports.node(STATE, text, is_warning=True)

    def works(self) -> None:
        """What had failed works again."""
        self._failure = ""

    def keep(self, pods: Collection[PodUid]) -> None:
        """Forget what was told about all other pods."""
        for uid in set(self._last) - set(pods):
            del self._last[uid]

    def _is_new(self, uid: PodUid, share: ShareId | None, key: str, text: str) -> bool:
        """Tell whether a text is to be told, and remember it if so."""
        told = self._last.setdefault(uid, {}).setdefault(share, {})
        now = self._clock()
        last, when = told.get(key, ("", -_AGAIN_S))
        if last == text or (last and abs(now - when) < _AGAIN_S):
            return False
        told[key] = (text, now)
        return True

    def _warn(
        self,
        pod: Pod | None,
        claims: tuple[CheckpointEntry, ...],
        reason: str,
        text: str,
        *,
        key: str,
    ) -> None:
        if pod is None:
            return  # nobody can be told but the kubelet, which passes the error on
        # All are remembered, whichever of them is new.
        new = [self._is_new(pod.uid, share_of(each), key, text) for each in claims]
        if not any(new):
            return
        if not text.startswith("pod "):  # else it names pod and container by itself
            names = ", ".join(each.container for each in claims)
            text = f"{'container' if len(claims) == 1 else 'containers'} {names}: {text}"
        self._reports.pod(pod, reason, text, is_warning=True)


def _key(error: AllotError) -> str:
    """Return what stays the same while figures change, but for those in the pod's own text."""
    first = error.message.partition("\n")[0]
    text = first if isinstance(error, UsageError) else _FIGURE.sub("#", first)
    return f"{type(error).__name__} {text}"
