# SPDX-License-Identifier: Apache-2.0
"""The driver: tells the cluster of the node's devices, and makes the shares of its claims.

    shares, GPUs, health ──► Pool ──► ResourceSlices ──► kube-scheduler allocates a claim
    kubelet ──NodePrepareResources──► the claim's allocation ──► ShareOrders ──► Tenants

The kubelet does not pass the allocation on: it is read at the API server, with the claim's uid. A
claim has one share for each of its requests, whichever containers and pods use it.
"""

import asyncio
import contextlib
import hashlib
import os
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, NoReturn

import grpc.aio
import structlog

from allotment.agent.allocation.tenants import Tenants
from allotment.agent.allocation.waiting import PodLocks
from allotment.agent.dra.devices import GpuState, Pool, PoolDevice, pool_of
from allotment.agent.kubelet import services
from allotment.agent.kubelet.proto import dra_health_pb2 as health
from allotment.agent.kubelet.proto import dra_pb2 as dra
from allotment.agent.kubelet.proto import pluginregistration_pb2 as registration
from allotment.agent.kubelet.services import Context, MethodHandler
from allotment.agent.node_state import NodeState
from allotment.agent.protocols import Reports
from allotment.devices.facts import NodeFacts
from allotment.devices.timeslices import TimeSlice
from allotment.dialects.foreign.nvidia_claims import DRIVER as NVIDIAS_DRIVER
from allotment.dialects.foreign.nvidia_claims import is_nvidias, read_sharing
from allotment.dialects.own.resource_claims import (
    COMPUTE_CAPACITY,
    AllocatedDevice,
    ClaimSharing,
    DevicePart,
    request_for,
)
from allotment.kube.clients import Api
from allotment.kube.errors import KubeError
from allotment.kube.nodes import OwnNode
from allotment.kube.resource_claims import (
    OwnSlices,
    PreparedDevice,
    ResourceClaim,
    is_allocated,
    read_claim,
    write_prepared,
)
from allotment.kube.watching import Signal
from allotment.model.clusters import TakenPart
from allotment.model.compute import WHOLE
from allotment.model.errors import AllotError, NoDevicesError, NotFoundError
from allotment.model.mig import MigHold, MigSlice
from allotment.model.pods import ContainerKind, Owner, PodUid
from allotment.model.reported import Reported
from allotment.model.shares import Injection, Share, ShareId
from allotment.modes import traits_of
from allotment.shares.booking import booked
from allotment.shares.cdi import KIND
from allotment.shares.monitors import KIND as MONITOR_KIND
from allotment.shares.monitors import Monitors
from allotment.shares.placing import ShareOrder
from allotment.shares.record import LoadedShare

_log = structlog.get_logger("allotment.agent")

NOT_SERVED: Final = "ClaimsNotServed"
"""Reason of an event on the node."""
_STATUS: Final = "ClaimStatus"
_PLUGINS: Final = "plugins"
_REGISTRATIONS: Final = "plugins_registry"
_SOON_S: Final = 10.0
"""For the node's devices to be known, after the agent's start."""
_BYE_S: Final = 0.5
_RETRY_S: Final = 30.0
_FACTS_S: Final = 1.0
_LOOK_S: Final = 300.0
"""Between two looks for claims whose release was lost."""
_HEALTH_S: Final = 30
"""A device without news for so long is unknown to the kubelet."""


class ResourceDriver:
    """The driver of one name on this node. For one event loop; needs `run` running."""

    def __init__(
        self,
        api: Api,
        *,
        node: OwnNode,
        driver: str,
        name: str,
        state: NodeState,
        tenants: Tenants,
        monitors: Monitors,
        reports: Reports,
        facts: Callable[[], NodeFacts],
        set_time_slice: Callable[[str, TimeSlice], None],
        kubelet: Path,
        look_s: float = _LOOK_S,
    ) -> None:
        """Connect the parts.

        `driver` is its own name, `name` the node's; `facts` and `set_time_slice` block; `kubelet`
        is the kubelet's folder, `/var/lib/kubelet`. `look_s`: between two looks for claims that are
        not needed.
        """
        self._api = api
        self._node = node
        self._driver = driver
        self._name = name
        self._state = state
        self._tenants = tenants
        self._monitors = monitors
        self._reports = reports
        self._reported = Reported[str]()
        self._facts = facts
        self._set_time_slice = set_time_slice
        self._kubelet = kubelet
        self._look_s = look_s
        self._locks = PodLocks()
        self._statuses = asyncio.Queue[tuple[ResourceClaim, Sequence[PreparedDevice]]]()
        self._slices = OwnSlices(api, node=name, driver=driver)
        self._pool = Pool()
        self._read: NodeFacts | None = None
        self._renewed = Signal()

    async def run(self) -> NoReturn:
        """Serve the kubelet and keep the node's slices, where the API server has them."""
        await self._slices.until_served()
        while self._read is None:
            try:
                self._read = await asyncio.to_thread(self._facts)
            except NoDevicesError as error:  # another thread is reading, or no GPU answers yet
                _log.info("waiting for the node's facts", why=error.message)
                await asyncio.sleep(_FACTS_S)
        async with asyncio.TaskGroup() as group:
            group.create_task(self._slices.run())
            group.create_task(self._serve())
            group.create_task(self._end_lost())
            group.create_task(self._write_statuses())
        raise AssertionError  # neither ends by itself

    def offer(self, shares: Sequence[LoadedShare], *, is_published: bool = True) -> None:
        """Renew the pool: shares, devices or their health may have changed.

        A driver whose pool is not published gets no new claims, and serves those that it has.
        """
        node = self._node.current
        if node is None or self._read is None:
            return
        pool = pool_of(
            gpus_of(self._state, shares, self._read),
            self._read,
            is_nvidias=self._driver == NVIDIAS_DRIVER,
        )
        if pool != self._pool:
            self._pool = pool
            self._renewed.notify()
        self._slices.want(pool.slices if is_published else (), node_uid=node.uid)

    @property
    def is_settled(self) -> bool:
        """Whether the cluster has the pool as it was offered last."""
        return self._slices.is_settled

    # ---- the kubelet -----------------------------------------------------------------------------

    async def _serve(self) -> NoReturn:
        while True:
            try:
                await self._listen()
            except (OSError, RuntimeError) as error:  # gRPC's error of a socket is the latter
                text = f"cannot serve ResourceClaims in {self._kubelet}: {error}"
                if self._reported.is_new(NOT_SERVED, text):
                    self._reports.node(NOT_SERVED, text, is_warning=True)
            await asyncio.sleep(_RETRY_S)

    async def _listen(self) -> None:
        """Listen at two sockets; the kubelet finds the driver by the one for registrations.

        Their names are new ones at each start: an agent that takes over registers before the former
        one has ended, and the kubelet keeps both.
        """
        mark = os.urandom(4).hex()
        folder = self._kubelet / _PLUGINS / self._driver
        folder.mkdir(mode=0o750, parents=True, exist_ok=True)
        registrations = self._kubelet / _REGISTRATIONS
        registrations.mkdir(mode=0o750, parents=True, exist_ok=True)
        endpoint = folder / f"dra-{mark}.sock"
        announced = registrations / f"{self._driver}-{mark}-reg.sock"
        server = grpc.aio.server()
        server.add_generic_rpc_handlers(services.handlers(self._answers(endpoint)))
        try:
            for path in (endpoint, announced):
                server.add_insecure_port(f"unix:{path}")
            await server.start()
            self._reported.over(NOT_SERVED)
            _log.info("serving resource claims", driver=self._driver, socket=str(endpoint))
            await server.wait_for_termination()
        finally:
            for path in (announced, endpoint):
                with contextlib.suppress(OSError):
                    path.unlink()
            await server.stop(_BYE_S)

    def _answers(self, endpoint: Path) -> Mapping[services.Method[Any, Any], MethodHandler]:
        found: dict[services.Method[Any, Any], MethodHandler] = {
            services.PLUGIN_INFO: partial(self._info, endpoint),
            services.PLUGIN_REGISTERED: self._registered,
        }
        for service in services.DRA_SERVICES.values():
            found[services.prepare_resources(service)] = self._prepare
            found[services.unprepare_resources(service)] = self._unprepare
        for service in services.HEALTH_SERVICES.values():
            found[services.watch_health(service)] = self._watch
        return found

    async def _info(
        self, endpoint: Path, _: registration.InfoRequest, __: Context
    ) -> registration.PluginInfo:
        return registration.PluginInfo(
            type="DRAPlugin",
            name=self._driver,
            endpoint=str(endpoint),
            supported_versions=[*services.DRA_SERVICES, *services.HEALTH_SERVICES],
        )

    async def _registered(
        self, status: registration.RegistrationStatus, _: Context
    ) -> registration.RegistrationStatusResponse:
        if status.plugin_registered:
            _log.info("registered at the kubelet", driver=self._driver)
        else:
            _log.warning("the kubelet refuses the driver", driver=self._driver, why=status.error)
        return registration.RegistrationStatusResponse()

    async def _prepare(
        self, request: dra.NodePrepareResourcesRequest, _: Context
    ) -> dra.NodePrepareResourcesResponse:
        answers = await asyncio.gather(*map(self._prepared, request.claims))
        return dra.NodePrepareResourcesResponse(
            claims={each.uid: answer for each, answer in zip(request.claims, answers, strict=True)}
        )

    async def _unprepare(
        self, request: dra.NodeUnprepareResourcesRequest, _: Context
    ) -> dra.NodeUnprepareResourcesResponse:
        answers = await asyncio.gather(*map(self._released, request.claims))
        return dra.NodeUnprepareResourcesResponse(
            claims={each.uid: answer for each, answer in zip(request.claims, answers, strict=True)}
        )

    async def _watch(
        self, _: health.NodeWatchResourcesRequest, __: Context
    ) -> AsyncIterator[health.NodeWatchResourcesResponse]:
        async for _each in self._renewed.changes():
            yield health.NodeWatchResourcesResponse(
                devices=list(map(self._health_of, self._pool.devices.values()))
            )

    def _health_of(self, device: PoolDevice) -> health.DeviceHealth:
        why = self._state.unusable.get(device.part.uuid, "")
        return health.DeviceHealth(
            device=health.DeviceIdentifier(pool_name=self._name, device_name=device.name),
            health=health.UNHEALTHY if why else health.HEALTHY,
            health_check_timeout_seconds=_HEALTH_S,
            message=why,
        )

    # ---- claims ----------------------------------------------------------------------------------

    async def _prepared(self, asked: dra.Claim) -> dra.NodePrepareResourceResponse:
        try:
            async with self._locks.hold(PodUid(asked.uid)):
                claim = await read_claim(
                    self._api,
                    namespace=asked.namespace,
                    name=asked.name,
                    uid=asked.uid,
                    driver=self._driver,
                )
                await self._wait_for(each.device for each in claim.devices)
                shares = await self._made(claim)
                monitors = await self._shown(claim)
        except AllotError as error:
            return dra.NodePrepareResourceResponse(error=error.one_line())
        names = {request: f"{KIND}={share.device_name}" for request, share in shares.items()}
        self._statuses.put_nowait((claim, self._prepared_devices(claim, shares)))
        return dra.NodePrepareResourceResponse(devices=_answered(claim, {**names, **monitors}))

    def _prepared_devices(
        self, claim: ResourceClaim, shares: Mapping[str, Share]
    ) -> Sequence[PreparedDevice]:
        return [
            PreparedDevice(
                device=each,
                data=status_data(share, self._pool.devices[each.device].part),
                since=share.created,
            )
            for each in claim.devices
            if (share := shares.get(each.request)) is not None
        ]

    async def _write_statuses(self) -> NoReturn:
        """Write what claims have into their status; no container waits for that."""
        while True:
            claim, devices = await self._statuses.get()
            try:
                await write_prepared(self._api, claim, devices, driver=self._driver)
            except KubeError as error:  # the share is complete without it
                if self._reported.is_new(_STATUS, error.message):
                    _log.warning(error.message, hint=error.hint)
            else:
                self._reported.over(_STATUS)

    async def _slice_time(self, claim: ResourceClaim, orders: Mapping[str, ShareOrder]) -> None:
        """Set the time slices that a claim's parameters name. Raises `AllotError`: none is kept."""
        try:
            for request, order in orders.items():
                sharing = _sharing(claim, request, is_slice=bool(order.slices))
                if sharing is None or not traits_of(order.request.mode).is_time_sliced:
                    continue
                wanted = TimeSlice(sharing.time_slice)
                for uuid in order.devices:
                    if wanted != self._usual_time_slice(uuid):
                        await asyncio.to_thread(self._set_time_slice, uuid, wanted)
        except AllotError:
            with contextlib.suppress(AllotError):  # the first error is the one to report
                await self._tenants.release_claim(PodUid(claim.uid))
            raise

    async def _unslice_time(self, uid: str) -> None:
        """Set back what `_slice_time` set: before the share ends, so that a crash repeats it."""
        for share in self._tenants.shares:
            is_its = share.owner is not None and share.owner.is_claim and share.owner.uid == uid
            if not is_its or not traits_of(share.mode).is_time_sliced:
                continue
            for device in share.devices:
                usual = self._usual_time_slice(device.uuid)
                try:
                    await asyncio.to_thread(self._set_time_slice, device.uuid, usual)
                except (
                    AllotError
                ) as error:  # the GPU may be lost: the claim has to end all the same
                    _log.warning(error.message, hint=error.hint)

    def _usual_time_slice(self, uuid: str) -> TimeSlice:
        """Return a GPU's time slice by the node's configuration."""
        return TimeSlice(self._state.offer.time_slices.get(uuid, TimeSlice.DEFAULT))

    async def _released(self, asked: dra.Claim) -> dra.NodeUnprepareResourceResponse:
        uid = PodUid(asked.uid)
        try:
            async with self._locks.hold(uid):
                await self._release(uid)
        except AllotError as error:
            return dra.NodeUnprepareResourceResponse(error=error.one_line())
        return dra.NodeUnprepareResourceResponse()

    async def _release(self, uid: PodUid) -> None:
        await self._unslice_time(uid)
        await asyncio.to_thread(self._monitors.hide, uid)
        await self._tenants.release_claim(uid)

    async def _end_lost(self) -> NoReturn:
        """End what claims have that no kubelet releases any more, as after a node's reset."""
        while True:
            owners = [each.owner for each in self._tenants.shares if each.owner is not None]
            owners += (await asyncio.to_thread(self._monitors.owners)).values()
            mine = (each for each in owners if each.is_claim and each.resource == self._driver)
            for owner in {each.uid: each for each in mine}.values():
                try:
                    await self._end_unneeded(owner)
                except AllotError as error:  # the next look tries again
                    _log.warning(error.message, claim=f"{owner.namespace}/{owner.pod}")
                    if isinstance(error, KubeError):
                        break
            await asyncio.sleep(self._look_s)

    async def _end_unneeded(self, owner: Owner) -> None:
        """End what a claim has that is gone or has no device here. Raises `AllotError`."""
        async with self._locks.hold(owner.uid):  # it may be allocated and prepared again
            is_needed = await is_allocated(
                self._api,
                namespace=owner.namespace,
                name=owner.pod,
                uid=owner.uid,
                driver=self._driver,
                pool=self._name,
            )
            if not is_needed:
                await self._release(owner.uid)
                _log.info("ended a claim without its kubelet", claim=str(owner), uid=owner.uid)

    async def _made(self, claim: ResourceClaim) -> Mapping[str, Share]:
        """Make a claim's shares; return that of each request. Raises `AllotError`."""
        orders = {
            request: self._order(claim, request, group)
            for request, group in _requests(claim, is_admin=False).items()
        }
        shares = await self._tenants.prepare_claim(PodUid(claim.uid), list(orders.values()))
        await self._slice_time(claim, orders)
        by_id = {share.id: share for share in shares}
        return {request: by_id[order.id] for request, order in orders.items()}

    async def _shown(self, claim: ResourceClaim) -> Mapping[str, str]:
        """Make a claim's monitors, of the GPUs of slices too; return the CDI device of each."""
        names = {}
        for request, group in _requests(claim, is_admin=True).items():
            uuids = dict.fromkeys(part.uuid for _, part in self._parts(claim, request, group))
            gpus = [self._state.devices[uuid] for uuid in uuids]
            monitor = _share_id(claim, request)
            owner = _owner(claim, request, driver=self._driver)
            await asyncio.to_thread(self._monitors.show, monitor, owner, gpus)
            names[request] = f"{MONITOR_KIND}={monitor}"
        return names

    async def _wait_for(self, names: Iterable[str]) -> None:
        """Wait for devices that an agent that has just started does not know yet."""
        wanted = set(names)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_SOON_S):
                async for _ in self._renewed.changes():
                    if wanted <= self._pool.devices.keys():
                        return

    def _parts(
        self, claim: ResourceClaim, request: str, group: Sequence[AllocatedDevice]
    ) -> Sequence[tuple[AllocatedDevice, DevicePart]]:
        known = self._pool.devices
        missing = [each.device for each in group if each.device not in known]
        if missing:
            raise NotFoundError(
                f"ResourceClaim {claim}: {', '.join(missing)} is not on node {self._name}",
                hint="its GPU is lost or was replaced: delete the pod, so that another is chosen",
            )
        amounts = claim.capacities.get(request, frozenset())
        return [(each, known[each.device].part_for(amounts)) for each in group]

    def _order(
        self, claim: ResourceClaim, request: str, group: Sequence[AllocatedDevice]
    ) -> ShareOrder:
        parts = self._parts(claim, request, group)
        is_slice = any(part.slice is not None for _, part in parts)
        wanted = request_for(
            parts,
            [each for each in claim.parameters_of(request) if not is_nvidias(each)],
            asks_compute=COMPUTE_CAPACITY in claim.capacities.get(request, ()),
            sharing=_sharing(claim, request, is_slice=is_slice),
        )
        uuids = tuple(part.uuid for _, part in parts)
        return ShareOrder(
            id=_share_id(claim, request),
            owner=_owner(claim, request, driver=self._driver),
            request=wanted,
            devices=uuids,
            slices=tuple(part.slice for _, part in parts if part.slice is not None),
            candidates=uuids,
            injection=Injection.CDI,
        )


def _sharing(claim: ResourceClaim, request: str, *, is_slice: bool) -> ClaimSharing | None:
    """Return how a request's device is shared, by NVIDIA's parameters. Raises `UsageError`."""
    return read_sharing(filter(is_nvidias, claim.parameters_of(request)), is_slice=is_slice)


def gpus_of(
    state: NodeState, shares: Sequence[LoadedShare], facts: NodeFacts | None
) -> Sequence[GpuState]:
    """Return the GPUs, the fullest first: kube-scheduler takes the first that fits."""
    claims = {each.id for each in shares if each.owner and each.owner.is_claim}
    others = booked([each for each in shares if each.id not in claims])
    everything = booked(shares)
    by_uuid = {each.uuid: each for each in facts.devices} if facts else {}
    gpus = [each for each in state.devices.values() if each.slice_of is None]

    def filled(uuid: str) -> int:
        booking = everything.get(uuid)
        return booking.memory if booking else 0

    def slices(uuid: str) -> tuple[MigSlice, ...]:
        cut = state.cut_gpus.get(uuid)
        return tuple(
            each
            for each in (cut.slices if cut else ())
            if each.hold is not MigHold.IDLE and each.holder not in claims
        )

    return [
        GpuState(
            device=gpu,
            facts=by_uuid.get(gpu.uuid),
            cut=state.cut_gpus.get(gpu.uuid),
            taken=TakenPart(booking.memory, booking.guaranteed, booking.shares, booking.mode)
            if (booking := others.get(gpu.uuid))
            else TakenPart(),
            slices=slices(gpu.uuid),
            problem=state.unusable.get(gpu.uuid, "")
            or ("cordoned" if gpu.uuid in state.cordoned else ""),
            is_evicted=gpu.uuid in state.evicted,
        )
        for gpu in sorted(gpus, key=lambda each: (-filled(each.uuid), each.place))
    ]


def status_data(share: Share, part: DevicePart) -> Mapping[str, Any]:
    """Return what a claim's status says about one device of its share, as `allot ps` names it."""
    profile = part.slice.profile if part.slice is not None else ""
    device = next(
        (
            each
            for each in share.devices
            if part.uuid in {each.uuid, each.gpu} and profile in {"", each.profile}
        ),
        None,
    )
    is_enforced = traits_of(share.mode).has_shim
    data: dict[str, Any] = {"share": share.id, "mode": share.mode, "enforced": is_enforced}
    if is_enforced and device is not None:
        data["memory_limit_bytes"] = device.memory_bytes
        data["compute"] = {
            "guarantee_percent": device.compute.guarantee * 100 / WHOLE,
            "ceiling_percent": device.compute.ceiling * 100 / WHOLE,
        }
    return data


def _requests(claim: ResourceClaim, *, is_admin: bool) -> Mapping[str, Sequence[AllocatedDevice]]:
    """Return the devices of each request: of monitors, or of the others."""
    groups: dict[str, list[AllocatedDevice]] = {}
    for each in claim.devices:
        if each.is_admin is is_admin:
            groups.setdefault(each.request, []).append(each)
    return groups


def _share_id(claim: ResourceClaim, request: str) -> ShareId:
    return ShareId(hashlib.sha256(f"{claim.uid}/{request}".encode()).hexdigest()[:12])


def _owner(claim: ResourceClaim, request: str, *, driver: str) -> Owner:
    return Owner(
        uid=PodUid(claim.uid),
        namespace=claim.namespace,
        pod=claim.name,
        container=request,
        kind=ContainerKind.REGULAR,
        resource=driver,
        is_claim=True,
    )


def _answered(claim: ResourceClaim, names: Mapping[str, str]) -> list[dra.Device]:
    """Return the devices of a claim; the first of each request brings its CDI device."""
    found = []
    told = set()
    for each in claim.devices:
        ids = [] if each.request in told else [names[each.request]]
        told.add(each.request)
        found.append(
            dra.Device(
                request_names=[each.request.partition("/")[0]],
                pool_name=each.pool,
                device_name=each.device,
                cdi_device_ids=ids,
                share_id=each.share_id or None,
            )
        )
    return found
