# SPDX-License-Identifier: Apache-2.0
"""Leader election: a Lease, and the EndpointSlice with the leader's address.

Clocks of two machines are never compared. A follower takes over when the Lease has not *changed*
for its duration, by the follower's own clock. The leader counts from before its last renewal
request, so it always stops first.
"""

import asyncio
import secrets
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import NoReturn, Self

import msgspec
import structlog

from allotment.kube.clients import Api, decoded, find, read
from allotment.kube.errors import ConflictError, KubeError, ObjectMissingError
from allotment.kube.objects import Metadata, Narrow
from allotment.kube.watching import Signal
from allotment.model.structs import replace

_log = structlog.get_logger(__name__)


class LeaseTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds. `lease_s` is whole, as the API server stores it."""

    lease_s: int = 3
    """Without a renewal for so long, another candidate may lead."""
    renew_s: float = 1.0
    margin_s: float = 0.5
    """The leader stops so long before that, to finish what it has begun."""

    @property
    def poll_s(self) -> float:
        """The interval of a follower's reads."""
        return self.renew_s / 2


class LeaseRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The Lease's contents."""

    holder: str = ""
    lease_s: int = 0
    transitions: int = 0
    version: str = ""
    """The Lease's resource version; empty: it does not exist yet."""


class Write(msgspec.Struct, frozen=True):
    """Write this to the Lease if it still has `record.version`."""

    record: LeaseRecord
    is_new_holder: bool


class LeaseCandidate:
    """One process in the election. No I/O; times are of a monotonic clock."""

    def __init__(self, identity: str, times: LeaseTimes) -> None:
        self.identity = identity
        self.times = times
        self._seen: LeaseRecord | None = None
        self._seen_at = float("-inf")
        self._renewed_at = float("-inf")

    @classmethod
    def of_process(cls, name: str, times: LeaseTimes) -> Self:
        """Return this process's candidate, with a unique identity (as client-go does).

        A request of a dead process in the same pod may still arrive, so its successor does not
        inherit the Lease.
        """
        return cls(f"{name}_{secrets.token_hex(4)}", times)

    def observe(self, record: LeaseRecord, *, now: float) -> None:
        if self._seen is None or record.version != self._seen.version:
            self._seen, self._seen_at = record, now
        if record.holder != self.identity:
            self._renewed_at = float("-inf")

    def wanted(self, *, now: float) -> Write | None:
        """Return what to write now; None if another candidate leads, or before a read."""
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
        """Record that the Lease is `record`, by a request that began then."""
        self._seen, self._seen_at, self._renewed_at = record, began, began

    def resigned(self) -> None:
        self._renewed_at = float("-inf")

    def left_s(self, *, now: float) -> float:
        """Return the seconds of leadership left without a renewal; 0 for a follower."""
        return max(0.0, self._renewed_at + self.times.lease_s - self.times.margin_s - now)

    def wait_s(self, *, now: float) -> float:
        times = self.times
        if self.left_s(now=now):
            return max(0.0, self._renewed_at + times.renew_s - now)
        if self._seen is None or not self._seen.holder:
            return times.poll_s
        ends = self._seen_at + self._seen.lease_s
        return min(times.poll_s, max(0.01, ends - now))

    @property
    def term(self) -> int:
        """The number of changes of the leader, as far as is known.

        It also changes for a leader that lost the Lease and acquired it again: its leadership was
        not continuous.
        """
        return self._seen.transitions if self._seen is not None else 0

    @property
    def leader(self) -> str:
        return self._seen.holder if self._seen is not None else ""


def since_boot() -> float:
    """Return the seconds since boot, including time asleep.

    `time.monotonic` stops while a machine is suspended or migrated: its process would still believe
    to lead afterwards.
    """
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class LeaseElection:
    """Keeps a candidate in the election. Needs `run` running."""

    def __init__(
        self,
        api: Api,
        *,
        namespace: str,
        name: str,
        candidate: LeaseCandidate,
        clock: Callable[[], float] = since_boot,
        wall: Callable[[], float] = time.time,
    ) -> None:
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
        """Why the Lease cannot be read or written at present."""
        self.signal = Signal()
        """Notified after each round."""

    def left_s(self) -> float:
        return self.candidate.left_s(now=self._clock())

    async def run(self) -> NoReturn:
        while True:
            try:
                async with asyncio.timeout(self.candidate.times.lease_s / 2):
                    await self._round()
                self._tell(None)
            except KubeError as error:
                self._tell(error)
            except TimeoutError:
                self._tell(KubeError(f"no answer about lease {self._name} in time"))
            self.signal.notify()
            await asyncio.sleep(self.candidate.wait_s(now=self._clock()))

    async def resign(self) -> None:
        """Release the Lease at once. Raises `KubeError`."""
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
            # Another candidate was first, or our earlier write had succeeded after all.
            candidate.observe(await self._read(), now=self._clock())
            return
        if write.is_new_holder:
            _log.info("leading", lease=self._name, transitions=write.record.transitions)

    async def _read(self) -> LeaseRecord:
        lease = await find(self._api, self._path, _decoder, asked=f"get lease {self._name}")
        return LeaseRecord() if lease is None else _record(lease)

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
            asked = "create leases"
            body = await self._api.create(self._folder, item, asked=asked)
        else:
            change = {"metadata": {"resourceVersion": record.version}, "spec": spec}
            asked = "patch leases"
            body = await self._api.patch(self._path, change, asked=asked)
        return _record(decoded(_decoder, body, asked=asked))

    def _tell(self, problem: KubeError | None) -> None:
        if problem is not None and self.problem is None:
            _log.warning(problem.message, lease=self._name, hint=problem.hint)
        self.problem = problem


class _Spec(Narrow):
    holder_identity: str | None = None
    lease_duration_seconds: int | None = None
    lease_transitions: int | None = None


class _Lease(Narrow):
    metadata: Metadata
    spec: _Spec = msgspec.field(default_factory=_Spec)


_decoder = msgspec.json.Decoder(_Lease)


def _record(lease: _Lease) -> LeaseRecord:
    return LeaseRecord(
        holder=lease.spec.holder_identity or "",
        lease_s=lease.spec.lease_duration_seconds or 0,
        transitions=lease.spec.lease_transitions or 0,
        version=lease.metadata.resource_version,
    )


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


class _Conditions(Narrow):
    ready: bool | None = None


class _EndpointObject(Narrow):
    addresses: list[str] = msgspec.field(default_factory=list)
    conditions: _Conditions = msgspec.field(default_factory=_Conditions)


class _Port(Narrow):
    name: str | None = None
    port: int | None = None


class _Slice(Narrow):
    metadata: Metadata
    endpoints: list[_EndpointObject] | None = None
    ports: list[_Port] | None = None


_DECODER = msgspec.json.Decoder(_Slice)


class Endpoint(msgspec.Struct, frozen=True):
    """An address and a named port."""

    address: str
    """An IP address."""
    port: int
    name: str
    """The name of the Service's port."""


class ServiceEndpoint:
    """The single endpoint of a Service without a selector."""

    def __init__(self, api: Api, *, namespace: str, service: str, is_ipv6: bool = False) -> None:
        """There is a slice for each IP family, with the family in its name."""
        self.name = f"{service}-ipv6" if is_ipv6 else f"{service}-ipv4"
        self._api = api
        self._path = f"/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices/{self.name}"
        self.title = f"{namespace}/{self.name}"

    async def read(self) -> tuple[str, Endpoint | None]:
        """Return the slice's version and its endpoint; None if it has none or several.

        Raises `KubeError`.
        """
        asked = f"get endpoint slice {self.title}"
        try:
            item = await read(self._api, self._path, _DECODER, asked=asked)
        except ObjectMissingError as error:
            raise KubeError(
                f"no endpoint slice {self.title}: kube-scheduler needs it to find the leader",
                hint="kubectl apply -f deploy/manifests/scheduler.yaml",
                status=error.status,
            ) from error
        return item.metadata.resource_version, _endpoint(item)

    async def write(self, endpoint: Endpoint, *, version: str) -> None:
        """Make this the only endpoint.

        Raises `ConflictError` if the slice has another version, `KubeError`.
        """
        change = {
            "metadata": {"resourceVersion": version},
            "endpoints": [{"addresses": [endpoint.address], "conditions": {"ready": True}}],
            "ports": [{"name": endpoint.name, "port": endpoint.port, "protocol": "TCP"}],
        }
        await self._api.patch(self._path, change, asked=f"patch endpoint slice {self.title}")


def _endpoint(item: _Slice) -> Endpoint | None:
    try:
        (one,) = item.endpoints or []
        (port,) = item.ports or []
        (address,) = one.addresses
    except ValueError:
        return None
    if not one.conditions.ready or not port.port:
        return None
    return Endpoint(address, port.port, port.name or "")
