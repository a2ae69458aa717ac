# SPDX-License-Identifier: Apache-2.0
"""Which of several processes leads: a Lease (coordination.k8s.io/v1), as client-go uses it.

Clocks of two machines are never compared. Who follows looks when the object last *changed*, by its
own clock, and takes it over when it has not changed for as long as it says that it lasts. Who leads
counts from before it asked for its last renewal, and so is never surer of it than anybody else.
"""

import asyncio
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import NoReturn, Self

import msgspec
import structlog

from allotment.kube.clients import Api
from allotment.kube.errors import ConflictError, KubeError, ObjectMissingError
from allotment.kube.objects import Metadata
from allotment.kube.signals import Signal

__all__ = ["Candidate", "LeaseElection", "LeaseRecord", "LeaseTimes", "Write", "since_boot"]

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseTimes:
    """Seconds. `lease_s` is whole: the API server keeps it so."""

    lease_s: int = 3
    """Without a renewal for so long, another one may lead."""
    renew_s: float = 1.0
    margin_s: float = 0.5
    """So long before that, who leads stops: what it has begun is to be over by then."""

    @property
    def poll_s(self) -> float:
        """How often a follower looks."""
        return self.renew_s / 2


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseRecord:
    """What the object says."""

    holder: str = ""
    lease_s: int = 0
    transitions: int = 0
    version: str = ""
    """The object's; empty: there is none yet."""


@dataclass(frozen=True, slots=True)
class Write:
    """Make the object say this, if it is still of `record.version`."""

    record: LeaseRecord
    is_new_holder: bool


class Candidate:
    """One process's part in the election. No I/O; times are of a clock that only goes forward."""

    def __init__(self, identity: str, times: LeaseTimes) -> None:
        """Lead nobody yet."""
        self.identity = identity
        self.times = times
        self._seen: LeaseRecord | None = None
        self._seen_at = float("-inf")
        self._renewed_at = float("-inf")

    @classmethod
    def of_process(cls, name: str, times: LeaseTimes) -> Self:
        """Return this process's, for which no other of its name is taken (as client-go does).

        A request of one that died may still be under way when its successor in the same pod begins:
        that one waits for the Lease as everybody does.
        """
        return cls(f"{name}_{secrets.token_hex(4)}", times)

    def observe(self, record: LeaseRecord, *, now: float) -> None:
        """Take note of what the object says."""
        if self._seen is None or record.version != self._seen.version:
            self._seen, self._seen_at = record, now
        if record.holder != self.identity:
            self._renewed_at = float("-inf")

    def wanted(self, *, now: float) -> Write | None:
        """Return what is to be written now; None: another one leads, or nothing is known."""
        seen = self._seen
        if seen is None:
            return None
        is_own = seen.holder == self.identity
        if seen.holder and not is_own and now < self._seen_at + seen.lease_s:
            return None
        record = replace(
            seen,
            holder=self.identity,
            lease_s=self.times.lease_s,
            transitions=seen.transitions + (not is_own and bool(seen.version)),
        )
        return Write(record, is_new_holder=not is_own)

    def written(self, record: LeaseRecord, *, began: float) -> None:
        """Take note that the object says `record`, by a request that began then."""
        self._seen, self._seen_at, self._renewed_at = record, began, began

    def resigned(self) -> None:
        """Lead no more."""
        self._renewed_at = float("-inf")

    def left_s(self, *, now: float) -> float:
        """Return for how long this one leads without another renewal; 0: it does not."""
        return max(0.0, self._renewed_at + self.times.lease_s - self.times.margin_s - now)

    def wait_s(self, *, now: float) -> float:
        """Return how long to wait before the next look."""
        times = self.times
        if self.left_s(now=now):
            return max(0.0, self._renewed_at + times.renew_s - now)
        if self._seen is None or not self._seen.holder:
            return times.poll_s
        ends = self._seen_at + self._seen.lease_s
        return min(times.poll_s, max(0.01, ends - now))

    @property
    def term(self) -> int:
        """How often the Lease has gone from one to another, as far as is known.

        Also where this one did not look in time: who leads in another term than before has not led
        all the while.
        """
        return self._seen.transitions if self._seen is not None else 0

    @property
    def leader(self) -> str:
        """Who leads, as far as is known."""
        return self._seen.holder if self._seen is not None else ""


def since_boot() -> float:
    """Return seconds that have passed, those among them in which this machine slept.

    `time.monotonic` stands still while a machine is suspended, or moved to another host: whoever
    led before would lead on after it, though another one has begun to.
    """
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class LeaseElection:
    """Keeps a candidate in the election. `run` has to be running."""

    def __init__(
        self,
        api: Api,
        *,
        namespace: str,
        name: str,
        candidate: Candidate,
        clock: Callable[[], float] = since_boot,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """Take part by the Lease of this name."""
        self._api = api
        self._folder = f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases"
        self._path = f"{self._folder}/{name}"
        self._name = name
        self._namespace = namespace
        self._clock = clock
        self._wall = wall
        self._acquired = ""
        self.candidate = candidate
        self.problem: KubeError | None = None
        """Why the object cannot be read or written at present."""
        self.signal = Signal()
        """Of each look."""

    def left_s(self) -> float:
        """Return for how long this process leads without another renewal; 0: it does not."""
        return self.candidate.left_s(now=self._clock())

    async def run(self) -> NoReturn:
        """Take part for ever."""
        while True:
            try:
                async with asyncio.timeout(self.candidate.times.lease_s / 2):
                    await self._round()
                self._tell(None)
            except KubeError as error:
                self._tell(error)
            except TimeoutError:
                self._tell(KubeError(f"the lease {self._name} was not answered for in time"))
            self.signal.notify()
            await asyncio.sleep(self.candidate.wait_s(now=self._clock()))

    async def resign(self) -> None:
        """Let another one lead at once. Raises `KubeError`."""
        if not self.left_s():
            return
        self.candidate.resigned()
        write = self.candidate.wanted(now=self._clock())
        if write is not None:
            await self._write(replace(write.record, holder="", lease_s=1), renews=False)

    async def _round(self) -> None:
        candidate = self.candidate
        if not candidate.left_s(now=self._clock()):
            candidate.observe(await self._read(), now=self._clock())
        write = candidate.wanted(now=self._clock())
        if write is None:
            return
        began = self._clock()
        if write.is_new_holder:
            self._acquired = _time(self._wall())
        try:
            candidate.written(await self._write(write.record, renews=True), began=began)
        except ConflictError:
            # Another one was first, or our own write of before had gone through after all.
            candidate.observe(await self._read(), now=self._clock())
            return
        if write.is_new_holder:
            _log.info("leading", lease=self._name, transitions=write.record.transitions)

    async def _read(self) -> LeaseRecord:
        try:
            body = await self._api.get(self._path, asked=f"get lease {self._name}")
        except ObjectMissingError:
            return LeaseRecord()
        return _record(body)

    async def _write(self, record: LeaseRecord, *, renews: bool) -> LeaseRecord:
        now = _time(self._wall())
        spec: dict[str, object] = {
            "holderIdentity": record.holder,
            "leaseDurationSeconds": record.lease_s,
            "leaseTransitions": record.transitions,
            "renewTime": now,
        }
        if renews and self._acquired:
            spec["acquireTime"] = self._acquired
        if not record.version:
            item = {
                "apiVersion": "coordination.k8s.io/v1",
                "kind": "Lease",
                "metadata": {"name": self._name, "namespace": self._namespace},
                "spec": spec,
            }
            return _record(await self._api.create(self._folder, item, asked="create leases"))
        change = {"metadata": {"resourceVersion": record.version}, "spec": spec}
        return _record(await self._api.patch(self._path, change, asked="patch leases"))

    def _tell(self, problem: KubeError | None) -> None:
        if problem is not None and self.problem is None:
            _log.warning(problem.message, lease=self._name, hint=problem.hint)
        self.problem = problem


class _Spec(msgspec.Struct, rename="camel"):
    holder_identity: str | None = None
    lease_duration_seconds: int | None = None
    lease_transitions: int | None = None


class _Lease(msgspec.Struct):
    metadata: Metadata
    spec: _Spec = msgspec.field(default_factory=_Spec)


_decoder = msgspec.json.Decoder(_Lease)


def _record(body: bytes) -> LeaseRecord:
    try:
        lease = _decoder.decode(body)
    except (msgspec.MsgspecError, UnicodeError) as error:
        raise KubeError(f"the API server's lease is not understood: {error}") from error
    return LeaseRecord(
        holder=lease.spec.holder_identity or "",
        lease_s=lease.spec.lease_duration_seconds or 0,
        transitions=lease.spec.lease_transitions or 0,
        version=lease.metadata.resource_version,
    )


def _time(seconds: float) -> str:
    """Write a time as `MicroTime` is written."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
