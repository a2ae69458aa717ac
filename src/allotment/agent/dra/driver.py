# SPDX-License-Identifier: Apache-2.0
"""The driver: tells the cluster of the node's devices, and makes the shares of its claims.

    shares, GPUs, health ──► Pool ──► ResourceSlices ──► kube-scheduler allocates a claim
    kubelet ──NodePrepareResources──► the claim's allocation ──► ShareOrders ──► Tenants

The kubelet does not pass the allocation on: it is read at the API server, with the claim's uid. A
claim has one share for each of its requests, whichever containers and pods use it.
"""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, NoReturn, TypeVar

import grpc.aio
import structlog

from allotment.agent.allocation.tenants import Tenants
from allotment.agent.allocation.waiting import PodLocks
from allotment.agent.dra.devices import (
    Pool,
    PoolDevice,
    gpus_of,
    orders_of,
    owner_of,
    parts_of,
    pool_of,
    status_data,
)
from allotment.agent.dra.pods import ClaimPods
from allotment.agent.kubelet import services
from allotment.agent.kubelet.proto import dra_health_pb2 as health
from allotment.agent.kubelet.proto import dra_pb2 as dra
from allotment.agent.kubelet.proto import pluginregistration_pb2 as registration
from allotment.agent.kubelet.services import Context, MethodHandler
from allotment.agent.node_state import NodeState
from allotment.agent.protocols import Pods, Reports
from allotment.devices.facts import NodeFacts
from allotment.devices.timeslices import TimeSlice
from allotment.dialects.foreign.claim_bookings import sharing_of
from allotment.dialects.foreign.nvidia_claims import DRIVER as NVIDIAS_DRIVER
from allotment.dialects.own.resource_claims import ResourceClaim
from allotment.kube.claim_status import PreparedDevice, write_prepared
from allotment.kube.clients import Api, until_served
from allotment.kube.errors import KubeError
from allotment.kube.nodes import OwnNode
from allotment.kube.resource_claims import API, OwnSlices, is_allocated, read_claim
from allotment.kube.watching import Signal
from allotment.model.errors import (
    AllotError,
    DoesNotFitError,
    NoDevicesError,
    UsageError,
)
from allotment.model.pods import Owner, PodUid
from allotment.model.reported import Reported
from allotment.model.shares import Share
from allotment.modes import traits_of
from allotment.shares.cdi import KIND
from allotment.shares.monitors import KIND as MONITOR_KIND
from allotment.shares.monitors import Monitors
from allotment.shares.placing import ShareOrder, in_allowed_modes
from allotment.shares.record import LoadedShare

_log = structlog.get_logger("allotment.agent")
_T = TypeVar("_T")

NOT_SERVED: Final = "ClaimsNotServed"
"""Reason of an event on the node."""
_STATUS: Final = "ClaimStatus"
_PLUGINS: Final = "plugins"
_REGISTRATIONS: Final = "plugins_registry"
_MARKS: Final = "[0-9a-f]" * 8
"""In the names of our sockets, and of no other driver's."""
SOON_S: Final = 10.0
"""For the node's devices to be known, after the agent's start."""
_POD_S: Final = 1.0
"""For a claim's pod to be reported: the kubelet knows it already."""
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
        pods: Pods,
        monitors: Monitors,
        reports: Reports,
        facts: Callable[[], NodeFacts],
        set_time_slice: Callable[[str, TimeSlice], None],
        kubelet: Path,
        look_s: float = _LOOK_S,
        tell_s: float = _HEALTH_S / 3,
        pod_s: float = _POD_S,
        soon_s: float = SOON_S,
    ) -> None:
        """Connect the parts.

        `driver` is its own name, `name` the node's; `facts` and `set_time_slice` block; `kubelet`
        is the kubelet's folder, `/var/lib/kubelet`. `look_s`: between two looks for claims that are
        not needed; `tell_s`: between two reports of health; `pod_s`: the longest wait for a claim's
        pod to be reported; `soon_s`: likewise, for a claim's devices to be known.
        """
        self._api = api
        self._node = node
        self._driver = driver
        self._name = name
        self._state = state
        self._tenants = tenants
        self._users = ClaimPods(
            api,
            driver=driver,
            pool=name,
            pods=pods,
            orders=self._orders,
            retry=self._prepared_now,
            pod_s=pod_s,
        )
        self._monitors = monitors
        self._reports = reports
        self._reported = Reported[str]()
        self._facts = facts
        self._set_time_slice = set_time_slice
        self._kubelet = kubelet
        self._look_s = look_s
        self._tell_s = tell_s
        self._soon_s = soon_s
        self._locks = PodLocks()
        self._working = set[asyncio.Task[Any]]()
        self._left = set[PodUid]()
        """Failed claims whose devices are not all released."""
        self._is_registered = asyncio.Event()
        self._statuses = asyncio.Queue[tuple[ResourceClaim, Sequence[PreparedDevice]]]()
        self._slices = OwnSlices(api, node=name, driver=driver, on_refused=self._tell_refused)
        self._pool = Pool()
        self._read: NodeFacts | None = None
        self._renewed = Signal()

    async def run(self) -> NoReturn:
        """Serve the kubelet and keep the node's slices, where the API server has them."""
        await until_served(self._api, API, on_absent=_tell_absent)
        while self._read is None:
            try:
                self._read = await asyncio.to_thread(self._facts)
            except NoDevicesError as error:  # another thread is reading, or no GPU answers yet
                _log.info("waiting for the node's facts", why=error.message)
                await asyncio.sleep(_FACTS_S)
        async with asyncio.TaskGroup() as group:
            group.create_task(self._publish())
            group.create_task(self._serve())
            group.create_task(self._end_lost())
            group.create_task(self._write_statuses())
            group.create_task(self._keep_telling())
            group.create_task(self._users.run())
        raise AssertionError  # neither ends by itself

    async def _publish(self) -> NoReturn:
        """Keep the slices once the kubelet can prepare claims: it tries again after minutes."""
        await self._is_registered.wait()
        await self._slices.run()

    def offer(self, shares: Sequence[LoadedShare], *, is_published: bool = True) -> None:
        """Renew the pool: shares, devices or their health may have changed.

        A driver whose pool is not published gets no new claims, and serves those that it has.
        """
        node = self._node.current
        if node is None or self._read is None:
            return
        pool = pool_of(
            gpus_of(self._state, shares, self._read, driver=self._driver),
            self._read,
            is_nvidias=self._driver == NVIDIAS_DRIVER,
        )
        if pool != self._pool:
            self._pool = pool
            self._renewed.notify()
        books = self._pool, self._state.mode_policies, frozenset(each.id for each in shares)
        self._users.renew(books)
        self._slices.want(pool.slices if is_published else (), node_uid=node.uid)

    def _tell_refused(self, error: KubeError) -> None:
        """Report slices that the API server does not take: the API may be an older one."""
        if self._reported.is_new(NOT_SERVED, error.message):
            self._reports.node(NOT_SERVED, error.message, is_warning=True)

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

        Their names are new ones at each start: those of an agent that was killed are no longer
        answered, and the kubelet takes each for a driver of its own. They are removed.
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
            _remove_others(folder.glob(f"dra-{_MARKS}.sock"), endpoint)
            _remove_others(registrations.glob(f"{self._driver}-{_MARKS}-reg.sock"), announced)
            self._reported.over(NOT_SERVED)
            _log.info("serving resource claims", driver=self._driver, socket=str(endpoint))
            await server.wait_for_termination()
        finally:
            for path in (announced, endpoint):
                with contextlib.suppress(OSError):
                    path.unlink()
            await server.stop(_BYE_S)
            for task in self._working:
                task.cancel()

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
            self._is_registered.set()
            self._users.registered()
            _log.info("registered at the kubelet", driver=self._driver)
        else:
            _log.warning("the kubelet refuses the driver", driver=self._driver, why=status.error)
        return registration.RegistrationStatusResponse()

    async def _prepare(
        self, request: dra.NodePrepareResourcesRequest, _: Context
    ) -> dra.NodePrepareResourcesResponse:
        answers = await asyncio.gather(*(self._finish(self._prepared(e)) for e in request.claims))
        return dra.NodePrepareResourcesResponse(
            claims={each.uid: answer for each, answer in zip(request.claims, answers, strict=True)}
        )

    async def _unprepare(
        self, request: dra.NodeUnprepareResourcesRequest, _: Context
    ) -> dra.NodeUnprepareResourcesResponse:
        answers = await asyncio.gather(*(self._finish(self._released(e)) for e in request.claims))
        return dra.NodeUnprepareResourcesResponse(
            claims={each.uid: answer for each, answer in zip(request.claims, answers, strict=True)}
        )

    async def _finish(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Do work to its end, also if the kubelet waits no longer (45 s): it asks again."""
        task = asyncio.create_task(work)
        self._working.add(task)
        task.add_done_callback(self._working.discard)
        return await asyncio.shield(task)

    async def _watch(
        self, _: health.NodeWatchResourcesRequest, __: Context
    ) -> AsyncIterator[health.NodeWatchResourcesResponse]:
        async for _each in self._renewed.changes():
            yield health.NodeWatchResourcesResponse(
                devices=list(map(self._health_of, self._pool.devices.values()))
            )

    async def _keep_telling(self) -> NoReturn:
        """Tell the health of the devices again before the kubelet forgets it."""
        while True:
            await asyncio.sleep(self._tell_s)
            self._renewed.notify()

    def _health_of(self, device: PoolDevice) -> health.DeviceHealth:
        why = self._state.unusable.get(device.part.uuid, "")
        return health.DeviceHealth(
            device=health.DeviceIdentifier(pool_name=self._name, device_name=device.name),
            health=health.UNHEALTHY if why else health.HEALTHY,
            health_check_timeout_seconds=_HEALTH_S,
            message=why,
        )

    # ---- claims ----------------------------------------------------------------------------------

    async def _prepared_now(self, asked: dra.Claim) -> bool:
        """Prepare a claim whose preparation failed; return whether it is prepared now."""
        return not (await self._finish(self._prepared(asked, is_retry=True))).error

    async def _prepared(
        self, asked: dra.Claim, *, is_retry: bool = False
    ) -> dra.NodePrepareResourceResponse:
        try:
            async with self._locks.hold(PodUid(asked.uid)):
                if is_retry and not self._users.is_failed(asked.uid):
                    return dra.NodePrepareResourceResponse(error="settled meanwhile")
                claim = await read_claim(
                    self._api,
                    namespace=asked.namespace,
                    name=asked.name,
                    uid=asked.uid,
                    driver=self._driver,
                )
                await self._wait_for(each.device for each in claim.devices)
                shares, monitors = await self._given(claim)
                self._users.settled(asked.uid)
                self._left.discard(PodUid(asked.uid))
        except AllotError as error:
            if not is_retry:
                self._users.failed(asked)
            return dra.NodePrepareResourceResponse(error=error.one_line())
        names = {request: f"{KIND}={share.device_name}" for request, share in shares.items()}
        self._statuses.put_nowait((claim, self._prepared_devices(claim, shares)))
        return dra.NodePrepareResourceResponse(devices=_answered(claim, {**names, **monitors}))

    def _prepared_devices(
        self, claim: ResourceClaim, shares: Mapping[str, Share]
    ) -> Sequence[PreparedDevice]:
        known = self._pool.devices  # a device may have left it meanwhile
        return [
            PreparedDevice(
                device=each,
                data=status_data(share, known[each.device].part),
                since=share.created,
            )
            for each in claim.devices
            if (share := shares.get(each.request)) is not None and each.device in known
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
        """Set the time slices that a claim's parameters name. Raises `AllotError`."""
        for request, order in orders.items():
            sharing = sharing_of(claim, request, is_slice=bool(order.slices))
            if sharing is None or not traits_of(order.request.mode).is_time_sliced:
                continue
            wanted = TimeSlice(sharing.time_slice)
            for uuid in order.devices:
                if wanted != self._usual_time_slice(uuid):
                    await asyncio.to_thread(self._set_time_slice, uuid, wanted)

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
                except AllotError as error:  # the claim ends, also if its GPU is lost
                    _log.warning(error.message, hint=error.hint)

    def _usual_time_slice(self, uuid: str) -> TimeSlice:
        """Return a GPU's time slice by the node's configuration."""
        return TimeSlice(self._state.offer.time_slices.get(uuid, TimeSlice.DEFAULT))

    async def _released(self, asked: dra.Claim) -> dra.NodeUnprepareResourceResponse:
        uid = PodUid(asked.uid)
        try:
            async with self._locks.hold(uid):
                self._users.settled(uid)
                await self._release(uid)
        except AllotError as error:
            return dra.NodeUnprepareResourceResponse(error=error.one_line())
        return dra.NodeUnprepareResourceResponse()

    async def _release(self, uid: PodUid) -> None:
        await self._unslice_time(uid)
        try:
            await asyncio.to_thread(self._monitors.hide, uid)
        finally:
            await self._tenants.release_claim(uid)
        self._left.discard(uid)

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

    def _orders(self, claim: ResourceClaim) -> Mapping[str, ShareOrder]:
        return orders_of(claim, self._pool, node=self._name)

    async def _given(self, claim: ResourceClaim) -> tuple[Mapping[str, Share], Mapping[str, str]]:
        """Make a claim's shares and monitors, by request. Raises `AllotError`.

        On failure a claim that had none before keeps none: its containers do not run.
        """
        orders = self._orders(claim)
        await self._end_former(claim, orders.values())
        owners = [share.owner for share in self._tenants.shares]
        if claim.requests(is_admin=True):
            owners += (await asyncio.to_thread(self._monitors.owners)).values()
        uid = PodUid(claim.uid)
        is_new = all(owner is None or owner.uid != uid for owner in owners)
        try:
            return await self._made(claim, orders), await self._shown(claim)
        except AllotError:
            if is_new or uid in self._left:
                self._left.add(uid)
                with contextlib.suppress(AllotError):  # the first error is the one to report
                    await self._release(uid)
            raise

    async def _made(
        self, claim: ResourceClaim, orders: Mapping[str, ShareOrder]
    ) -> Mapping[str, Share]:
        """Make a claim's shares; return that of each request. Raises `AllotError`."""
        before = {share.id for share in self._tenants.shares}
        if not before.issuperset(order.id for order in orders.values()):
            # What runs already is not taken back.
            orders = {name: self._allowed(claim, name, each) for name, each in orders.items()}
            await self._users.check(claim, orders)
        shares = await self._tenants.prepare_claim(PodUid(claim.uid), list(orders.values()))
        await self._slice_time(claim, orders)
        by_id = {share.id: share for share in shares}
        return {request: by_id[order.id] for request, order in orders.items()}

    def _allowed(self, claim: ResourceClaim, request: str, order: ShareOrder) -> ShareOrder:
        """Return an order in the modes that its GPUs may have. Raises `AllotError`.

        No scheduler reads modes. But a device with a taint was given before that, unless the claim
        tolerates it: such a claim keeps its mode.
        """
        names = (each.device for each in claim.devices if each.request == request)
        is_tainted = any(self._pool.devices[name].document.get("taints") for name in names)
        if is_tainted and request not in claim.tolerant:
            return order
        try:
            return in_allowed_modes(order, self._state.mode_policies)
        except DoesNotFitError as error:
            raise UsageError(
                f"ResourceClaim {claim}, request {request}: {error.message}", hint=error.hint
            ) from error

    async def _end_former(self, claim: ResourceClaim, orders: Iterable[ShareOrder]) -> None:
        """End what a claim had from a former allocation, whose release was lost."""
        wanted = {order.id: order for order in orders}
        uid = PodUid(claim.uid)
        for share in self._tenants.shares:
            owner = share.owner
            if owner is None or (owner.uid, owner.resource) != (uid, self._driver):
                continue
            order = wanted.get(share.id)
            if order is None or not self._is_there(share, order):
                await self._release(uid)
                return

    def _is_there(self, share: Share, order: ShareOrder) -> bool:
        """Whether a share has the devices and places of an order, as far as they are known."""
        held = {
            (uuid, each.start)
            for uuid in order.devices
            if (cut := self._state.cut_gpus.get(uuid)) is not None
            for each in cut.slices
            if each.holder == share.id
        }
        chosen = {(uuid, at.start) for uuid, at in zip(order.devices, order.slices, strict=False)}
        uuids = {each.driver_uuid for each in share.devices}
        return uuids == {*order.devices} and (not held or held == chosen)

    async def _shown(self, claim: ResourceClaim) -> Mapping[str, str]:
        """Make a claim's monitors, of the GPUs of slices too; return the CDI device of each."""
        names = {}
        for request, group in claim.requests(is_admin=True).items():
            parts = parts_of(claim, request, group, self._pool, node=self._name)
            uuids = dict.fromkeys(part.uuid for _, part in parts)
            gpus = [each for uuid in uuids if (each := self._state.devices.get(uuid)) is not None]
            monitor = claim.share_id(request)
            owner = owner_of(claim, request)
            await asyncio.to_thread(self._monitors.show, monitor, owner, gpus)
            names[request] = f"{MONITOR_KIND}={monitor}"
        return names

    async def _wait_for(self, names: Iterable[str]) -> None:
        """Wait for devices that an agent that has just started does not know yet."""
        wanted = set(names)
        if wanted <= self._pool.devices.keys():
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._soon_s):
                async for _ in self._renewed.changes():
                    if wanted <= self._pool.devices.keys():
                        return


def _tell_absent() -> None:
    _log.info("the API server has no such API: no claims are served", api=API)


def _remove_others(sockets: Iterable[Path], own: Path) -> None:
    for path in sockets:
        if path != own:
            with contextlib.suppress(OSError):
                path.unlink()


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
