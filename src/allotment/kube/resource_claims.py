# SPDX-License-Identifier: Apache-2.0
"""ResourceClaims and ResourceSlices at the API server (`resource.k8s.io/v1`, Kubernetes 1.34)."""

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, NoReturn

import msgspec
import structlog

from allotment.dialects.foreign.nvidia_claims import DRIVER as NVIDIAS_DRIVER
from allotment.dialects.own.resource_claims import (
    DRIVER,
    AllocatedDevice,
    Parameters,
    ResourceClaim,
    WantedDevices,
)
from allotment.kube.clients import Api, Backoff, PatchKind, find
from allotment.kube.errors import ConflictError, KubeError, ObjectMissingError
from allotment.kube.objects import Metadata, Narrow
from allotment.kube.watching import Followed, Subject
from allotment.model.errors import StateError, UsageError
from allotment.model.pods import PodUid

API: Final = "/apis/resource.k8s.io/v1"
CLAIMS: Final = f"{API}/resourceclaims"
"""Of all namespaces."""
SLICES: Final = f"{API}/resourceslices"
DRIVERS: Final = (DRIVER, NVIDIAS_DRIVER)
"""The names that Allotment's driver has by its configuration."""
_GATHER_S: Final = 0.02

_log = structlog.get_logger(__name__)


# ---- claims --------------------------------------------------------------------------------------


class _Result(Narrow):
    request: str = ""
    driver: str = ""
    pool: str = ""
    device: str = ""
    share_id: str | None = msgspec.field(default=None, name="shareID")
    admin_access: bool | None = None
    consumed_capacity: dict[str, str] | None = None


class _Opaque(Narrow):
    driver: str = ""
    parameters: msgspec.Raw = msgspec.Raw(b"null")


class _Config(Narrow):
    source: str = ""
    requests: list[str] | None = None
    opaque: _Opaque | None = None


class _Devices(Narrow):
    results: list[_Result] | None = None
    config: list[_Config] | None = None


class _Allocation(Narrow):
    devices: _Devices | None = None


class _User(Narrow):
    resource: str = ""
    name: str = ""
    uid: str = ""


class _Status(Narrow):
    allocation: _Allocation | None = None
    devices: list[dict[str, Any]] | None = None
    reserved_for: list[_User] | None = None


class _Capacity(Narrow):
    requests: dict[str, str] | None = None


class Selector(Narrow):
    """Of a request or a device class."""

    cel: dict[str, str] | None = None


class Toleration(Narrow):
    """Of a device's taints."""

    key: str = ""
    operator: str = "Equal"
    value: str = ""
    effect: str = ""


class RequestedDevices(Narrow):
    """An exact request, or an alternative with its name."""

    name: str = ""
    device_class_name: str = ""
    count: int | None = None
    allocation_mode: str = ""
    admin_access: bool | None = None
    selectors: list[Selector] | None = None
    tolerations: list[Toleration] | None = None
    capacity: _Capacity | None = None

    @property
    def amounts(self) -> Mapping[str, str]:
        """The capacities that it names."""
        return (self.capacity.requests if self.capacity else None) or {}


class _Request(Narrow):
    name: str = ""
    exactly: RequestedDevices | None = None
    first_available: list[RequestedDevices] | None = None


class _Requests(Narrow):
    requests: list[_Request] | None = None
    constraints: list[dict[str, Any]] | None = None


class _Spec(Narrow):
    devices: _Requests | None = None


class ClaimObject(Narrow):
    """A ResourceClaim."""

    metadata: Metadata
    spec: _Spec | None = None
    status: _Status | None = None

    def requests(self) -> Iterator[tuple[str, RequestedDevices]]:
        """Yield its requests, `REQUEST` or `REQUEST/ALTERNATIVE`."""
        for request in (
            self.spec.devices.requests if self.spec and self.spec.devices else None
        ) or ():
            if request.exactly is not None:
                yield request.name, request.exactly
            for each in request.first_available or ():
                yield f"{request.name}/{each.name}", each

    def results(self) -> Sequence[_Result]:
        """Return its allocated devices, of all drivers."""
        allocation = self.status.allocation if self.status else None
        return (allocation.devices.results if allocation and allocation.devices else None) or ()


_CLAIM = msgspec.json.Decoder(ClaimObject)


def followed_claim(item: ClaimObject) -> ResourceClaim | None:
    """Return a claim that waits, or that has devices of a driver of ours; None: another one."""
    if item.status is not None and item.status.allocation is not None:
        return allocated_claim(item)
    return ResourceClaim(
        uid=item.metadata.uid,
        namespace=item.metadata.namespace,
        name=item.metadata.name,
        wanted=tuple(
            WantedDevices(
                request=name,
                device_class=each.device_class_name,
                count=each.count or 1,
                amounts=each.amounts,
            )
            for name, each in item.requests()
        ),
    )


async def read_claim(
    api: Api, *, namespace: str, name: str, uid: str | None, driver: str
) -> ResourceClaim:
    """Read a claim; raise `StateError` if it is gone, replaced or not allocated, `KubeError`.

    `uid`: None: whichever has the name.
    """
    found = await find_claim(api, namespace=namespace, name=name, uid=uid)
    if found is None:
        raise StateError(
            f"ResourceClaim {namespace}/{name} ({uid}) is gone, or another one has its name",
            hint="the kubelet asks again for the present one, if a pod uses it",
        )
    claim = _served(found, driver)
    if claim is None:
        raise StateError(
            f"ResourceClaim {namespace}/{name} is not allocated",
            hint="a scheduler allocates it when it binds a pod",
        )
    return claim


def reported_devices(found: ClaimObject) -> tuple[Mapping[str, Any], ...]:
    return tuple((found.status.devices if found.status else None) or ())


def _served(found: ClaimObject, driver: str) -> ResourceClaim | None:
    """Return what a claim has of one driver; None: it is not allocated."""
    allocation = found.status.allocation if found.status else None
    if allocation is None or allocation.devices is None:
        return None
    return ResourceClaim(
        uid=found.metadata.uid,
        namespace=found.metadata.namespace,
        name=found.metadata.name,
        driver=driver,
        devices=tuple(
            AllocatedDevice(
                request=each.request,
                pool=each.pool,
                device=each.device,
                share_id=each.share_id or "",
                is_admin=bool(each.admin_access),
                consumed=each.consumed_capacity or {},
            )
            for each in found.results()
            if each.driver == driver
        ),
        parameters=tuple(
            _parameters(allocation.devices.config, where="status.allocation.devices", driver=driver)
        ),
        capacities={name: frozenset(each.amounts) for name, each in found.requests()},
        tolerant=frozenset(name for name, each in found.requests() if each.tolerations),
        version=found.metadata.resource_version,
        reported=reported_devices(found),
        pods=tuple(
            PodUid(each.uid)
            for each in (found.status.reserved_for if found.status else None) or ()
            if each.resource == "pods"
        ),
    )


def allocated_claim(item: ClaimObject) -> ResourceClaim | None:
    """Return a claim as far as it has devices of a driver of ours; None: it has none."""
    claims = (_served(item, driver) for driver in DRIVERS)
    return next((each for each in claims if each is not None and each.devices), None)


def _parameters(
    configs: Sequence[_Config] | None, *, where: str, driver: str
) -> Iterator[Parameters]:
    for place, each in enumerate(configs or ()):
        if each.opaque is not None and each.opaque.driver == driver:
            yield Parameters(
                where=f"{where}.config[{place}].opaque.parameters",
                content=msgspec.json.decode(each.opaque.parameters),
                requests=tuple(each.requests or ()),
            )


class _Written(Narrow):
    """A level of a ResourceClaim, of a template for them, or of a DeviceClass.

    The configurations are in `spec.devices`, `spec.spec.devices` and `spec`.
    """

    config: list[_Config] | None = None
    devices: "_Written | None" = None
    spec: "_Written | None" = None


class _Names(Narrow):
    name: str = ""
    generate_name: str = ""


class _Specification(_Written):
    extended_resource_name: str | None = None
    """Of a DeviceClass."""


class _Named(_Written):
    metadata: _Names = msgspec.field(default_factory=_Names)
    spec: _Specification | None = None


_NAMED = msgspec.json.Decoder(_Named)


class WrittenObject(msgspec.Struct, frozen=True, kw_only=True):
    """A ResourceClaim, a ResourceClaimTemplate or a DeviceClass, as far as a driver reads it."""

    name: str
    parameters: Sequence[Parameters]
    extended_resource: str
    """The name by which pods ask for devices of the class; empty: none."""


def written_object(content: bytes | msgspec.Raw, *, driver: str) -> WrittenObject:
    """Read an object as its author wrote it. Raises `UsageError`."""
    try:
        found = _NAMED.decode(content)
        parameters = [*_within(found, "", driver)]
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise UsageError(f"it has no readable configuration: {error}") from error
    return WrittenObject(
        name=found.metadata.name or found.metadata.generate_name,
        parameters=parameters,
        extended_resource=(found.spec.extended_resource_name if found.spec else None) or "",
    )


def _within(level: _Written, where: str, driver: str) -> Iterator[Parameters]:
    yield from _parameters(level.config, where=where, driver=driver)
    for name, inner in (("devices", level.devices), ("spec", level.spec)):
        if inner is not None:
            yield from _within(inner, f"{where}.{name}" if where else name, driver)


async def is_allocated(
    api: Api, *, namespace: str, name: str, uid: str, driver: str, pool: str
) -> bool:
    """Return whether a claim exists and has devices of a driver's pool. Raises `KubeError`."""
    found = await find_claim(api, namespace=namespace, name=name, uid=uid)
    results = found.results() if found is not None else ()
    return any((each.driver, each.pool) == (driver, pool) for each in results)


async def find_claim(api: Api, *, namespace: str, name: str, uid: str | None) -> ClaimObject | None:
    """Return a claim; None: it is gone, or another one has its name."""
    path = f"{API}/namespaces/{namespace}/resourceclaims/{name}"
    found = await find(api, path, _CLAIM, asked=f"read ResourceClaim {namespace}/{name}")
    return found if found is not None and uid in {None, found.metadata.uid} else None


# ---- slices --------------------------------------------------------------------------------------


class _Slice(Narrow):
    metadata: Metadata
    spec: dict[str, Any] = msgspec.field(default_factory=dict)


_SLICE = msgspec.json.Decoder(_Slice)


class _Stored(msgspec.Struct, frozen=True):
    """A slice at the server."""

    name: str
    uid: str
    spec: Mapping[str, Any]


Content = Mapping[str, Any]
"""A slice's `devices` or `sharedCounters`, as JSON."""


class OwnSlices(Followed[_Slice, _Stored]):
    """This node's ResourceSlices of one driver, followed and kept as wanted. Needs `run` running.

    The pool has the node's name. A change within one slice is one write. A change of several gives
    the pool a new generation, and until all slices have it a scheduler allocates nothing there.
    """

    def __init__(
        self,
        api: Api,
        *,
        node: str,
        driver: str,
        backoff: Backoff | None = None,
        on_refused: Callable[[KubeError], None] = lambda _: None,
    ) -> None:
        """`on_refused` gets the error when the server refuses a slice."""
        super().__init__(
            api,
            Subject(
                name=f"ResourceSlices of node {node}",
                path=SLICES,
                fields={"spec.driver": driver, "spec.nodeName": node},
                item=_Slice,
                convert=_stored,
            ),
            backoff=backoff,
        )
        self._api = api
        self._node = node
        self._driver = driver
        self._on_refused = on_refused
        self._owner: Mapping[str, Any] | None = None
        self._wanted: tuple[Content, ...] | None = None
        self._written: dict[str, tuple[Content, Mapping[str, Any]]] = {}
        """What was last written to each slice, and what the server made of it."""
        self._latest: dict[str, _Stored] = {}
        """The answers to our writes."""
        self._backoff = Backoff(first_s=0.1, most_s=10.0)

    def want(self, contents: Sequence[Content], *, node_uid: str) -> None:
        """Keep these slices, in this order, from now on."""
        wanted = tuple(contents)
        if wanted != self._wanted or self._owner is None or self._owner["uid"] != node_uid:
            self._wanted = wanted
            self._owner = {
                "apiVersion": "v1",
                "kind": "Node",
                "name": self._node,
                "uid": node_uid,
                "controller": True,
            }
            self._following.signal.notify()

    async def run(self) -> NoReturn:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(super().run())
            await self._keep()
        raise AssertionError  # neither ends by itself

    @property
    def is_settled(self) -> bool:
        """Whether the slices at the server are those wanted."""
        return self._wanted is not None and self.is_synced and not any(self._plan())

    async def _keep(self) -> NoReturn:
        async for _ in self.changes():
            if self._wanted is None or not self.is_synced:
                continue
            await asyncio.sleep(_GATHER_S)
            try:
                await self._write()
            except KubeError as error:
                _log.warning(error.message, hint=error.hint)
                if not error.is_passing and not isinstance(error, ConflictError):
                    self._on_refused(error)
                await asyncio.sleep(self._backoff.next(at_least_s=error.retry_after_s))
                self._following.recheck()
                self._following.signal.notify()
            else:
                self._backoff.reset()
        raise AssertionError  # changes() does not end

    def _plan(self) -> tuple[list[int], list[_Stored]]:
        """Return the numbers of the slices to write, and those to delete."""
        wanted = self._wanted or ()
        there = self._there()
        names = [self._name(number) for number in range(len(wanted))]
        surplus = [each for name, each in there.items() if name not in names]
        changed = [
            number
            for number, (name, content) in enumerate(zip(names, wanted, strict=True))
            if not self._is_as(content, there.get(name), count=len(wanted))
        ]
        if len({_generation(each) for each in there.values()}) > 1:  # a write was cut off
            changed = list(range(len(wanted)))
        return changed, surplus

    def _there(self) -> dict[str, _Stored]:
        """Return the slices by name, as the server has them: a watch may be late."""
        found = {each.name: each for each in self._following.values.values()}
        for name, latest in self._latest.items():
            if name in found and _generation(found[name]) < _generation(latest):
                found[name] = latest
        return found

    def _is_as(self, content: Content, stored: _Stored | None, *, count: int) -> bool:
        if stored is None or stored.spec.get("pool", {}).get("resourceSliceCount") != count:
            return False
        present = _content(stored.spec)
        written = self._written.get(stored.name)
        return present == content or (written is not None and written == (content, present))

    async def _write(self) -> None:
        wanted = self._wanted or ()
        changed, surplus = self._plan()
        if not changed and not surplus:
            return
        stored = self._there()
        generations = {_generation(each) for each in stored.values()}
        generation = max(generations, default=0)
        if len(changed) > 1 or surplus or len(generations) > 1 or len(stored) != len(wanted):
            generation += 1
            changed = list(range(len(wanted)))
        for number in changed:
            await self._put(number, wanted[number], stored, generation, count=len(wanted))
        for each in surplus:
            asked = f"delete ResourceSlice {each.name}"
            try:
                await self._api.delete(f"{SLICES}/{each.name}", uid=each.uid, asked=asked)
            except (ObjectMissingError, ConflictError):
                continue  # the watch tells

    async def _put(
        self,
        number: int,
        content: Content,
        stored: Mapping[str, _Stored],
        generation: int,
        *,
        count: int,
    ) -> None:
        name = self._name(number)
        pool = {"name": self._node, "generation": generation, "resourceSliceCount": count}
        if name in stored:
            empty = {key: None for key in _content(stored[name].spec) if key not in content}
            answer = await self._api.patch(
                f"{SLICES}/{name}",
                {"spec": {**empty, **content, "pool": pool}},
                asked=f"change ResourceSlice {name}",
                kind=PatchKind.MERGE,
            )
        else:
            answer = await self._api.create(
                SLICES,
                {
                    "apiVersion": "resource.k8s.io/v1",
                    "kind": "ResourceSlice",
                    "metadata": {"name": name, "ownerReferences": [self._owner]},
                    "spec": {
                        "driver": self._driver,
                        "nodeName": self._node,
                        **content,
                        "pool": pool,
                    },
                },
                asked=f"create ResourceSlice {name}",
            )
        self._latest[name] = after = _stored(_SLICE.decode(answer))
        self._written[name] = content, _content(after.spec)

    def _name(self, number: int) -> str:
        return f"{self._node}-{self._driver}-{number:02d}"


_SLICE = msgspec.json.Decoder(_Slice)
_FIXED: Final = {"driver", "nodeName", "pool"}


def _stored(item: _Slice) -> _Stored:
    return _Stored(item.metadata.name, item.metadata.uid, item.spec)


def _generation(stored: _Stored) -> int:
    return int(stored.spec.get("pool", {}).get("generation", 0))


def _content(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Return a slice's spec without what all have, and without the times that the server adds."""
    content = {key: value for key, value in spec.items() if key not in _FIXED}
    if "devices" in content:
        content["devices"] = [_without_times(each) for each in content["devices"]]
    return content


def _without_times(device: Mapping[str, Any]) -> Mapping[str, Any]:
    taints = device.get("taints")
    if not taints:
        return device
    bare = [{key: text for key, text in each.items() if key != "timeAdded"} for each in taints]
    return {**device, "taints": bare}
