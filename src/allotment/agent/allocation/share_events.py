# SPDX-License-Identifier: Apache-2.0
"""Events about shares, on their pods: one for each cause, and not at every retry."""

import re
import time
from collections.abc import Callable, Collection, Iterable, Iterator

from allotment.agent.allocation.orders import describe, share_of
from allotment.agent.plugin.serving import MOST_EVENT
from allotment.agent.protocols import CheckpointEntry, Reports
from allotment.model.errors import AllotError, UsageError
from allotment.model.pods import Pod, PodUid
from allotment.model.reported import Reported
from allotment.model.shares import Injection, Share, ShareId
from allotment.shares.placing import memory_warning

READY = "ShareReady"
SMALL = "ShareSmall"
UNGUARDED = "ShareUnguarded"
REFUSED = "ShareRefused"
MISSING = "ShareMissing"
TAKEN_OVER = "ShareTakenOver"
RESIZED = "Resized"
RESIZE_REFUSED = "ResizeRefused"
STATE = "ShareStateFailed"
"""Reasons of events, on pods; the last on the node."""

_AGAIN_S = 600.0
"""Before the same is reported once more with other figures."""
_FIGURE = re.compile(r"[0-9]+(?:\.[0-9]+)?")


class ShareEvents:
    """Makes the events, and remembers the last one of each share and reason."""

    def __init__(self, reports: Reports, clock: Callable[[], float] = time.time) -> None:
        """`clock` gives seconds."""
        self._reports = reports
        self._clock = clock
        self._last: dict[PodUid, dict[ShareId | None, dict[str, tuple[str, float]]]] = {}
        """By pod, share and reason: the last text and its time."""
        self._reported = Reported[str]()

    def ready(self, share: Share, pod: Pod | None) -> None:
        """A container has its share. Report what of its pod removes the share's guards, too."""
        self._made(share, READY, f": {describe(share)}", is_warning=False)
        if share.owner is None:
            return
        part, container = share.owner.part, share.owner.container
        notes = [(SMALL, memory_warning(share))]
        if pod is not None:
            notes += [(UNGUARDED, text) for text in guards_missing(pod, container)]
        for reason, text in notes:
            if text:
                message = f"{part}: {text}"
                self._reports.pod(share.owner, reason, message, is_warning=True)

    def refused(
        self, pod: Pod | None, claims: Iterable[CheckpointEntry], error: AllotError
    ) -> None:
        """Containers wait, because their share was refused."""
        self._reports.count("refusals", reason=type(error).__name__)
        self._warn(pod, tuple(claims), REFUSED, error.one_line(longest=MOST_EVENT), key=_key(error))

    def never_asked(self, pod: Pod, error: AllotError) -> None:
        """A container starts without a GPU: the kubelet calls no plugin for its request."""
        text = f"it starts without a GPU: {error.one_line(longest=MOST_EVENT)}"
        if self._is_new(pod.uid, None, text, text):
            self._reports.count("refusals", reason=type(error).__name__)
            self._reports.pod(pod, REFUSED, text, is_warning=True)

    def missing(self, pod: Pod, entry: CheckpointEntry, error: AllotError) -> None:
        """A container runs without a share, and none can be made for it."""
        text = (
            f"running without a share: could not register it: {error.one_line(longest=MOST_EVENT)}"
        )
        self._warn(pod, (entry,), MISSING, text, key=f"{MISSING} {_key(error)}")

    def adopted(self, share: Share, entry: CheckpointEntry) -> None:
        """A container that ran without a share has one."""
        text = describe(share)
        if entry.share is None:
            text = f" keeps the devices that another device plugin gave it: {text}"
            self._made(share, TAKEN_OVER, text, is_warning=False)
        else:
            text = f" ran without its share, which is booked again: {text}; its programs are"
            text += " limited from their next start on"
            self._made(share, MISSING, text, is_warning=True)

    def resized(self, share: Share) -> None:
        """A running container's share has other amounts."""
        owner = share.owner
        if owner is not None:
            self._last.get(owner.uid, {}).pop(share.id, None)
            text = f"{owner.part}: {describe(share)}"
            self._reports.pod(owner, RESIZED, text, is_warning=False)

    def resize_refused(self, pod: Pod, share: Share, wish: str, error: AllotError) -> None:
        """A running container's share stays as it is; the agent retries."""
        text = f"not resized to {wish}: {error.one_line(longest=MOST_EVENT)}"
        if share.owner is not None and self._is_new(
            pod.uid, share.id, f"{wish} {_key(error)}", text
        ):
            text = f"container {share.owner.container}: {text}"
            self._reports.pod(pod, RESIZE_REFUSED, text, is_warning=True)

    def failed(self, error: AllotError) -> None:
        """The node's shares, or the checkpoint, cannot be read or changed."""
        text = error.one_line(longest=MOST_EVENT)
        if self._reported.is_new(STATE, text):
            self._reports.node(STATE, text, is_warning=True)

    def works(self) -> None:
        """The last failure is over."""
        self._reported.over(STATE)

    def keep(self, pods: Collection[PodUid]) -> None:
        """Forget the events of all other pods."""
        for uid in set(self._last) - set(pods):
            del self._last[uid]

    def _made(self, share: Share, reason: str, text: str, *, is_warning: bool) -> None:
        """Count a new share, and make an event whose text follows the container's name."""
        self._reports.count("shares_made", mode=share.mode)
        if share.injection is Injection.MOUNTS:
            self._reports.count("cdi_fallback", mode=share.mode)
        owner = share.owner
        if owner is not None:
            self._last.get(owner.uid, {}).pop(share.id, None)
            text = f"{owner.part}{text}"
            self._reports.pod(owner, reason, text, is_warning=is_warning)

    def _is_new(self, uid: PodUid, share: ShareId | None, key: str, text: str) -> bool:
        """Return whether a text is to be reported, and remember it if so."""
        reported = self._last.setdefault(uid, {}).setdefault(share, {})
        now = self._clock()
        last, when = reported.get(key, ("", -_AGAIN_S))
        if last == text or (last and abs(now - when) < _AGAIN_S):
            return False
        reported[key] = (text, now)
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
            return  # an event needs a pod; the kubelet passes the error on
        # A list: all are remembered, even if the first one is new.
        new = [self._is_new(pod.uid, share_of(each), key, text) for each in claims]
        if not any(new):
            return
        if not text.startswith("pod "):  # else it names pod and container by itself
            names = ", ".join(each.container for each in claims)
            text = f"{'container' if len(claims) == 1 else 'containers'} {names}: {text}"
        self._reports.pod(pod, reason, text, is_warning=True)


def guards_missing(pod: Pod, container: str) -> Iterator[str]:
    """Yield what a pod's author can do beyond the container's share, or nothing has checked."""
    found = pod.container(container)
    if found is not None and found.is_privileged:
        yield "it is privileged: it can open every GPU of the node and change every limit"
    if pod.has_host_pids:
        yield "its pod has hostPID: its programs can end those of other shares"
    if pod.is_static:
        yield "its pod is static: no webhook, no quota and no scheduler has checked its request"


def _key(error: AllotError) -> str:
    """Return the error's text without changing figures. Those of the pod's own text stay."""
    first = error.message.partition("\n")[0]
    text = first if isinstance(error, UsageError) else _FIGURE.sub("#", first)
    return f"{type(error).__name__} {text}"
