# SPDX-License-Identifier: Apache-2.0
"""SharePods of KubeShare 1.0 are served: each gets its pod, and shows what becomes of it.

It stands in for KubeShare's device manager, and keeps to its ways: the pod has the SharePod's name
and belongs to it, is made anew where it went before its end, and is copied into the SharePod's
status. Which GPU it is, is decided as for every pod: by the webhook, kube-scheduler, the extender.

Nothing is remembered that is not at the API server: a pod is found by its name, and its owner says
whose it is. So repeats, restarts and two replicas that believe to lead for a moment are harmless:
the second pod of one name is refused, and a status is written by the version that it was read in.
"""

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, NoReturn, Protocol

import structlog

from allotment.dialects.kubeshare_sharepods import (
    GROUP,
    KIND,
    is_to_be_made,
    pod_of_sharepod,
    refused_status,
    status_of,
)
from allotment.kube.backoff import Backoff
from allotment.kube.errors import ConflictError, DeniedError, KubeError, ObjectMissingError
from allotment.kube.events import Reference
from allotment.kube.sharepods import MADE_FOR, MANIFEST, PodSeen, SharePod, SharePods
from allotment.model.errors import AllotError, UsageError
from allotment.scheduler.admission_rules import IGNORE, IGNORE_LABELS

__all__ = ["SharePodKeeper", "SharePodTimes"]

_AT_ONCE: Final = 8
_EXISTS: Final = "ErrResourceExists"
_REFUSED: Final = "ErrValueError"
"""Both as KubeShare names them."""
_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class SharePodTimes:
    """Seconds."""

    look_s: float = 10.0
    """So often is looked whether SharePods have been defined, or are no more."""
    again_s: float = 30.0
    """So often is looked at each whose pod no watch tells of; and so long at most until what was
    refused is tried again."""
    first_s: float = 0.5
    """What was refused is tried again after so long at first."""
    tick_s: float = 0.2


class Teller(Protocol):
    """Who makes events."""

    def tell(self, about: Reference, *, reason: str, message: str, is_warning: bool) -> None:
        """Make an event, some time soon."""


@dataclass(slots=True)
class _Trouble:
    """Something is wrong with a SharePod: when it is tried again as it is."""

    document: Mapping[str, Any]
    backoff: Backoff
    due_at: float


class SharePodKeeper:
    """Serves the SharePods, where there are any, while this replica leads. `run` has to run."""

    def __init__(
        self,
        api: SharePods,
        *,
        leads: Callable[[], bool],
        events: Teller,
        ignored_namespaces: frozenset[str] = frozenset(),
        times: SharePodTimes | None = None,
    ) -> None:
        """Ask nothing yet. In namespaces and of SharePods that are ignored, nothing is done."""
        self._api = api
        self._leads = leads
        self._events = events
        self._ignored = ignored_namespaces
        self._times = times or SharePodTimes()
        self._problem = ""
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
        """Serve for ever; with nothing to do where nobody has defined SharePods.

        After a failure it may be run again.
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
            hint = f"`kubectl apply -f {MANIFEST}`, if SharePods are to be served"
            is_denied = isinstance(error, DeniedError)
            self._say("SharePods are not served", error.message, hint if is_denied else error.hint)
            return False
        if is_defined:
            self._say("", "", None)
        return is_defined

    def _say(self, what: str, why: str, hint: str | None) -> None:
        """Log once for each kind of trouble."""
        if what and why != self._problem:
            _log.warning(what, why=why, hint=hint)
        self._problem = why

    async def _serve(self) -> None:
        """Follow and serve, until this replica leads no more or the definition is gone."""
        self._forget()
        sharepods = self._api.follow(self._sharepod_changed)
        pods = self._api.follow_pods(self._pod_changed)
        _log.info("SharePods are served")
        async with asyncio.TaskGroup() as group:
            following = [group.create_task(each.run()) for each in (sharepods, pods)]
            # Which pods are there is known first: else each SharePod's is read once for nothing.
            async for _ in pods.signal.changes():
                if pods.is_synced or not self._leads():
                    break
            workers = [group.create_task(self._work()) for _ in range(_AT_ONCE)]
            await self._watch_over()
            for each in (*following, *workers):
                each.cancel()
        _log.info("SharePods are not served any more")

    async def _watch_over(self) -> None:
        """Return when it is over; have looked at again what nobody tells of."""
        looked_at = again_at = time.monotonic()
        while self._leads():
            await asyncio.sleep(self._times.tick_s)
            now = time.monotonic()
            self._want(uid for uid, each in self._troubles.items() if each.due_at <= now)
            if now - again_at >= self._times.again_s:
                again_at = now
                self._want(self._sharepods)
            if now - looked_at >= self._times.look_s:
                looked_at = now
                try:
                    if not await self._api.are_defined():
                        return
                except KubeError:
                    continue  # whoever follows them has said it

    # ---- what has changed -----------------------------------------------------------------------

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
        # Its own status is no reason to try the same again: there are refusals that never repeat.
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

    # ---- what is done ---------------------------------------------------------------------------

    async def _work(self) -> NoReturn:
        while True:
            uid = next((each for each in self._waiting if each not in self._busy), None)
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
            self._want(())  # it may have been wanted again meanwhile

    async def _try(self, sharepod: SharePod) -> None:
        """Serve one SharePod; what is wrong is told, and tried again later."""
        try:
            try:
                await self._serve_one(sharepod)
            except _RefusedError as error:
                self._troubled(sharepod)
                await self._refuse(sharepod, error)
                return
        except ObjectMissingError:
            return  # it, or its namespace, has just been deleted
        except ConflictError:
            self._troubled(sharepod)  # somebody else was first; the watch is about to tell
        except KubeError as error:
            self._troubled(sharepod)
            _log.warning(error.message, sharepod=str(sharepod), hint=error.hint)
        except Exception:  # noqa: BLE001 - what one of them has is no other's trouble
            self._troubled(sharepod)
            _log.exception("a SharePod cannot be served", sharepod=str(sharepod))
        else:
            self._troubles.pop(sharepod.uid, None)

    def _troubled(self, sharepod: SharePod) -> None:
        known = self._troubles.get(sharepod.uid)
        times = self._times
        backoff = known.backoff if known else Backoff(first_s=times.first_s, most_s=times.again_s)
        due_at = time.monotonic() + backoff.next()
        self._troubles[sharepod.uid] = _Trouble(sharepod.document, backoff, due_at)

    async def _serve_one(self, sharepod: SharePod) -> None:
        name = (sharepod.namespace, sharepod.name)
        if self._is_told(sharepod) or await self._is_ignored(sharepod):
            return
        spec = sharepod.document.get("spec")
        if name not in self._pod_uids and not is_to_be_made(spec, sharepod.status):
            return
        pod = await self._api.read_pod(*name)
        if pod is None:
            # What the watch has told may be older than the end that was written there.
            known = await self._api.read(sharepod)
            if known is None or known.is_ending or not is_to_be_made(spec, known.status):
                return
            sharepod = known
            pod = await self._make(sharepod)
        elif not _is_controlled(pod, by=sharepod):
            problem = f"pod {'/'.join(name)} is there already and is not this"
            problem += " SharePod's; hint: delete that pod, or give the SharePod another name"
            raise _RefusedError(_EXISTS, problem)
        status = status_of(pod, sharepod.status)
        if status != sharepod.status:
            await self._api.write_status(sharepod, status)

    def _is_told(self, sharepod: SharePod) -> bool:
        """Tell whether its status has its pod as that is, as far as the watch tells."""
        uid = self._pod_uids.get((sharepod.namespace, sharepod.name))
        told = sharepod.status.get("PodObjectMeta")
        if uid is None or not isinstance(told, Mapping):
            return False
        return (told.get("uid"), told.get("resourceVersion")) == (uid, self._pods[uid].version)

    async def _is_ignored(self, sharepod: SharePod) -> bool:
        """Tell whether it is another system's: the webhook would not touch its pod."""
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
            raise _RefusedError(_REFUSED, _said(error)) from error
        metadata = pod["metadata"]
        metadata["labels"] = {**(metadata.get("labels") or {}), MADE_FOR: KIND}
        try:
            made = await self._api.create_pod(sharepod.namespace, pod)
        except (ConflictError, ObjectMissingError):
            raise
        except KubeError as error:
            if error.is_passing:
                raise
            # The webhook's words, the quota's, the validation's: they are for the author.
            raise _RefusedError(_REFUSED, error.message) from error
        _log.info("pod made", sharepod=str(sharepod))
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
            return  # it has changed, and is looked at again
        except KubeError as problem:
            _log.warning(problem.message, sharepod=str(sharepod), hint=problem.hint)


class _RefusedError(Exception):
    """A SharePod cannot have its pod; the text is for its author."""

    def __init__(self, reason: str, text: str) -> None:
        super().__init__(text)
        self.reason = reason


def _said(error: AllotError) -> str:
    return f"{error.message}; hint: {error.hint}" if error.hint else error.message


def _is_left_alone(labels: Mapping[str, str]) -> bool:
    return any(labels.get(each) == IGNORE for each in IGNORE_LABELS)


def _is_controlled(pod: Mapping[str, Any], *, by: SharePod) -> bool:
    owners = pod["metadata"].get("ownerReferences") or ()
    return any(each.get("controller") and each.get("uid") == by.uid for each in owners)
