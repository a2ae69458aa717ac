# SPDX-License-Identifier: Apache-2.0
"""Serves SharePods of KubeShare 1.0: each gets its pod, and shows the pod's status.

Stands in for KubeShare's device manager: the pod has the SharePod's name and owner, is recreated if
deleted early, and its status is copied. GPUs are chosen as for every pod. All state is at the API
server, so repeats, restarts and two leaders are harmless.
"""

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, NoReturn, Protocol

import msgspec
import structlog

from allotment.dialects.foreign.kubeshare import (
    GROUP,
    KIND,
    is_to_be_made,
    pod_of_sharepod,
    refused_status,
    status_of,
)
from allotment.kube.clients import Backoff
from allotment.kube.errors import ConflictError, DeniedError, KubeError, ObjectMissingError
from allotment.kube.events import Reference
from allotment.kube.sharepods import MADE_FOR, MANIFEST, PodSeen, SharePod, SharePods
from allotment.model.errors import UsageError
from allotment.model.reported import Reported
from allotment.scheduler.admission.rules import IGNORE, IGNORE_LABELS

_AT_ONCE: Final = 8
_EXISTS: Final = "ErrResourceExists"
_REFUSED: Final = "ErrValueError"
"""Both are KubeShare's names."""
_log = structlog.get_logger(__name__)


class SharePodTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Intervals in seconds."""

    look_s: float = 10.0
    """Check whether SharePods are defined."""
    again_s: float = 30.0
    """Check pods that no watch covers; also the longest pause before a retry."""
    first_s: float = 0.5
    """The first pause before a retry."""
    tick_s: float = 0.2


class EventWriter(Protocol):
    """Creates events."""

    def tell(self, about: Reference, *, reason: str, message: str, is_warning: bool) -> None: ...


class _Trouble(msgspec.Struct):
    """A failed SharePod and its next retry."""

    document: Mapping[str, Any]
    backoff: Backoff
    due_at: float


class SharePodKeeper:
    """Serves SharePods while this replica leads. Needs `run` running."""

    def __init__(
        self,
        api: SharePods,
        *,
        leads: Callable[[], bool],
        events: EventWriter,
        ignored_namespaces: frozenset[str] = frozenset(),
        times: SharePodTimes | None = None,
    ) -> None:
        """Ignored namespaces and SharePods are left to other systems."""
        self._api = api
        self._leads = leads
        self._events = events
        self._ignored = ignored_namespaces
        self._times = times or SharePodTimes()
        self._reported = Reported[str]()
        self._forget()

    def _forget(self) -> None:
        self._sharepods: dict[str, SharePod] = {}
        self._pods: dict[str, PodSeen] = {}
        self._pod_uids: dict[tuple[str, str], str] = {}
        self._uids: dict[tuple[str, str], str] = {}
        self._waiting: dict[str, None] = {}
        self._busy: set[str] = set()
        self._troubles: dict[str, _Trouble] = {}
        self._namespaces: dict[str, tuple[float, bool]] = {}
        self._more = asyncio.Event()

    async def run(self) -> NoReturn:
        """Serve forever; idle while SharePods are not defined.

        May be run again after a failure.
        """
        while True:
            if self._leads() and await self._are_defined():
                await self._serve()
            else:
                await asyncio.sleep(self._times.look_s if self._leads() else self._times.tick_s)

    async def _are_defined(self) -> bool:
        try:
            is_defined = await self._api.are_defined()
        except KubeError as error:
            hint = f"`kubectl apply -f {MANIFEST}` to serve SharePods"
            is_denied = isinstance(error, DeniedError)
            if self._reported.is_new(MANIFEST, error.message):
                _log.warning(
                    "SharePods are not served",
                    why=error.message,
                    hint=hint if is_denied else error.hint,
                )
            return False
        if is_defined:
            self._reported.over(MANIFEST)
        return is_defined

    async def _serve(self) -> None:
        self._forget()
        sharepods = self._api.follow(self._sharepod_changed)
        pods = self._api.follow_pods(self._pod_changed)
        _log.info("SharePods are served")
        async with asyncio.TaskGroup() as group:
            following = [group.create_task(feed.run()) for feed in (sharepods, pods)]
            # Load pods first: otherwise each SharePod's pod is read once for nothing.
            async for _ in pods.signal.changes():
                if pods.is_synced or not self._leads():
                    break
            workers = [group.create_task(self._work()) for _ in range(_AT_ONCE)]
            await self._watch_over()
            for task in (*following, *workers):
                task.cancel()
        _log.info("SharePods are no longer served")

    async def _watch_over(self) -> None:
        """Queue retries and periodic checks; return when serving must end."""
        looked_at = again_at = time.monotonic()
        while self._leads():
            await asyncio.sleep(self._times.tick_s)
            now = time.monotonic()
            self._want(uid for uid, trouble in self._troubles.items() if trouble.due_at <= now)
            if now - again_at >= self._times.again_s:
                again_at = now
                self._want(self._sharepods)
            if now - looked_at >= self._times.look_s:
                looked_at = now
                try:
                    if not await self._api.are_defined():
                        return
                except KubeError:
                    continue  # the watches log it

    # ---- changes -----------------------------------------------------------------------

    def _sharepod_changed(self, uid: str, sharepod: SharePod | None) -> None:
        if sharepod is None:
            self._troubles.pop(uid, None)
            gone = self._sharepods.pop(uid, None)
            if gone is not None and self._uids.get((gone.namespace, gone.name)) == uid:
                del self._uids[gone.namespace, gone.name]
            return
        self._sharepods[uid] = sharepod
        self._uids[sharepod.namespace, sharepod.name] = uid
        trouble = self._troubles.get(uid)
        # A change of its status alone is no reason to retry: some refusals are permanent.
        if trouble is None or trouble.document != sharepod.document:
            self._troubles.pop(uid, None)
            self._want((uid,))

    def _pod_changed(self, uid: str, pod: PodSeen | None) -> None:
        about = pod or self._pods.get(uid)
        if about is None:
            return
        name = (about.namespace, about.name)
        if pod is None:
            del self._pods[uid]
            if self._pod_uids.get(name) == uid:
                del self._pod_uids[name]
        else:
            self._pods[uid] = pod
            self._pod_uids[name] = uid
        owner = self._uids.get(name)
        if owner is not None:
            self._want((owner,))

    def _want(self, uids: Iterable[str]) -> None:
        self._waiting.update(dict.fromkeys(uids))
        if self._waiting:
            self._more.set()

    # ---- work ---------------------------------------------------------------------------

    async def _work(self) -> NoReturn:
        while True:
            uid = next((waiting for waiting in self._waiting if waiting not in self._busy), None)
            if uid is None:
                self._more.clear()
                await self._more.wait()
                continue
            del self._waiting[uid]
            sharepod = self._sharepods.get(uid)
            if sharepod is None or not self._leads():
                continue
            self._busy.add(uid)
            try:
                await self._try(sharepod)
            finally:
                self._busy.discard(uid)
            self._want(())  # it may have been queued again meanwhile

    async def _try(self, sharepod: SharePod) -> None:
        try:
            try:
                await self._serve_one(sharepod)
            except _RefusedError as error:
                self._troubled(sharepod)
                await self._refuse(sharepod, error)
                return
        except ObjectMissingError:
            return  # it, or its namespace, was just deleted
        except ConflictError:
            self._troubled(sharepod)  # another write came first: the watch will report it
        except KubeError as error:
            self._troubled(sharepod)
            _log.warning(error.message, sharepod=str(sharepod), hint=error.hint)
        except Exception:  # noqa: BLE001 - a failure for one does not stop the others
            self._troubled(sharepod)
            _log.exception("a SharePod cannot be served", sharepod=str(sharepod))
        else:
            self._troubles.pop(sharepod.uid, None)

    def _troubled(self, sharepod: SharePod) -> None:
        trouble = self._troubles.get(sharepod.uid)
        times = self._times
        backoff = (
            trouble.backoff if trouble else Backoff(first_s=times.first_s, most_s=times.again_s)
        )
        due_at = time.monotonic() + backoff.next()
        self._troubles[sharepod.uid] = _Trouble(sharepod.document, backoff, due_at)

    async def _serve_one(self, sharepod: SharePod) -> None:
        name = (sharepod.namespace, sharepod.name)
        if self._is_shown(sharepod) or await self._is_ignored(sharepod):
            return
        spec = sharepod.document.get("spec")
        if name not in self._pod_uids and not is_to_be_made(spec, sharepod.status):
            return
        pod = await self._api.read_pod(*name)
        if pod is None:
            # The watch may be older than the end in the SharePod's status.
            current = await self._api.read(sharepod)
            if current is None or current.is_ending or not is_to_be_made(spec, current.status):
                return
            sharepod = current
            pod = await self._make(sharepod)
        elif not _is_controlled(pod, by=sharepod):
            problem = f"pod {'/'.join(name)} exists and does not belong to this"
            problem += " SharePod's; hint: delete that pod, or give the SharePod another name"
            raise _RefusedError(_EXISTS, problem)
        status = status_of(pod, sharepod.status)
        if status != sharepod.status:
            await self._api.write_status(sharepod, status)

    def _is_shown(self, sharepod: SharePod) -> bool:
        """Return whether its status shows its pod as the watch last reported it."""
        uid = self._pod_uids.get((sharepod.namespace, sharepod.name))
        shown = sharepod.status.get("PodObjectMeta")
        if uid is None or not isinstance(shown, Mapping):
            return False
        return (shown.get("uid"), shown.get("resourceVersion")) == (uid, self._pods[uid].version)

    async def _is_ignored(self, sharepod: SharePod) -> bool:
        """Return whether it belongs to another system: the webhook ignores its pod too."""
        namespace = sharepod.namespace
        if namespace in self._ignored or _is_left_alone(sharepod.document["metadata"]["labels"]):
            return True
        now = time.monotonic()
        asked_at, is_ignored = self._namespaces.get(namespace, (float("-inf"), False))
        if now - asked_at >= self._times.look_s:
            is_ignored = _is_left_alone(await self._api.namespace_labels(namespace))
            self._namespaces[namespace] = (now, is_ignored)
        return is_ignored

    async def _make(self, sharepod: SharePod) -> dict[str, Any]:
        if sharepod.problem:
            raise _RefusedError(_REFUSED, sharepod.problem)
        try:
            pod = pod_of_sharepod(sharepod.document)
        except UsageError as error:
            raise _RefusedError(_REFUSED, error.one_line()) from error
        metadata = pod["metadata"]
        metadata["labels"] = {**(metadata.get("labels") or {}), MADE_FOR: KIND}
        try:
            made = await self._api.create_pod(sharepod.namespace, pod)
        except (ConflictError, ObjectMissingError):
            raise
        except KubeError as error:
            if error.is_passing:
                raise
            # The message of the webhook, the quota or the validation is for the author.
            raise _RefusedError(_REFUSED, error.message) from error
        _log.info("created pod", sharepod=str(sharepod))
        return made

    async def _refuse(self, sharepod: SharePod, error: "_RefusedError") -> None:
        self._events.tell(
            Reference(KIND, sharepod.name, sharepod.uid, sharepod.namespace, f"{GROUP}/v1"),
            reason=error.reason,
            message=str(error),
            is_warning=True,
        )
        status = refused_status(error.reason, str(error))
        if status == sharepod.status:
            return
        try:
            await self._api.write_status(sharepod, status)
        except (ConflictError, ObjectMissingError):
            return  # it has changed, and is queued again
        except KubeError as problem:
            _log.warning(problem.message, sharepod=str(sharepod), hint=problem.hint)


class _RefusedError(Exception):
    """A SharePod cannot have its pod; the text is for its author."""

    def __init__(self, reason: str, text: str) -> None:
        super().__init__(text)
        self.reason = reason


def _is_left_alone(labels: Mapping[str, str]) -> bool:
    return any(labels.get(label) == IGNORE for label in IGNORE_LABELS)


def _is_controlled(pod: Mapping[str, Any], *, by: SharePod) -> bool:
    owners = pod["metadata"].get("ownerReferences") or ()
    return any(owner.get("controller") and owner.get("uid") == by.uid for owner in owners)
