# SPDX-License-Identifier: Apache-2.0
"""A cluster's state at one moment: its nodes with devices, its pods and claims.

Read once by lists. GPUs that other systems gave to running pods count by their records: of all
systems with records, or of those that a scheduler takes over.
"""

import asyncio
from collections.abc import Collection, Mapping, Sequence
from typing import Final, TypeVar

import msgspec

from allotment.dialects.foreign.adoption import adopted_usage
from allotment.dialects.foreign.base import ForeignDialect
from allotment.dialects.foreign.claim_bookings import claim_booking
from allotment.dialects.foreign.settings import SYSTEMS, foreign_dialects
from allotment.dialects.own.placement import PLACEMENT
from allotment.dialects.own.registry import NeedSettings, need_of
from allotment.dialects.own.resource_claims import ResourceClaim
from allotment.kube.clients import Api
from allotment.kube.cluster_feed import stateless, to_cluster_pod
from allotment.kube.errors import DeniedError, GoneError, ObjectMissingError
from allotment.kube.inventories import inventory_of
from allotment.kube.objects import (
    ENDED,
    DatedPod,
    NodeObject,
    PodObject,
)
from allotment.kube.resource_claims import CLAIMS, ClaimObject, allocated_claim
from allotment.kube.watching import decoder_of_lists, pages
from allotment.model.clusters import ClusterPod, NodeInventory, PodBooking, PodNeed
from allotment.model.errors import UsageError
from allotment.model.modes import SOFT
from allotment.model.pods import ForeignPod, Pod, PodUid
from allotment.model.structs import replace

_PAGE: Final = 500
_TRIES: Final = 3

_Item = TypeVar("_Item")


class LivePod(msgspec.Struct, frozen=True, kw_only=True):
    """A pod that runs or waits."""

    need: PodNeed
    booking: PodBooking | None = None
    """Its usage, if bound. Without devices although it requests some: the node's agent chose them,
    and the node's inventory counts them."""
    priority: int = 0
    nominated_node: str = ""
    """For a waiting pod: the node where other pods are being evicted for it."""
    is_ending: bool = False
    created: str = ""
    """RFC 3339 in UTC: sorts as text."""
    dialect: str = ""
    """The dialect of a translated pod."""
    scheduler: str = ""
    """Its `schedulerName`."""
    foreign: ForeignPod | None = None
    """The pod as written, if another system may have given it devices."""
    phase: str = ""
    """Its `status.phase`."""
    resized: PodNeed | None = None
    """What it asks for after an accepted resize; None: the same as `need`."""

    @property
    def can_move(self) -> bool:
        """It requests devices, and its devices are known."""
        if not self.need.containers:
            return False
        return self.booking is None or bool(self.booking.containers)


class LiveCluster(msgspec.Struct, frozen=True):
    """A cluster's state."""

    nodes: tuple[NodeInventory, ...]
    """Sorted by name."""
    pods: tuple[LivePod, ...]
    """In scheduling order: the highest priority first, then the oldest."""
    problems: tuple[str, ...] = ()
    """Objects that could not be read, and are left out."""
    without_devices: tuple[str, ...] = ()
    """Names of nodes without an inventory."""
    claims: tuple[PodBooking, ...] = ()
    """What allocated ResourceClaims take that the nodes do not count yet."""
    allocated: tuple[ResourceClaim, ...] = ()
    """All claims with devices of a driver of ours."""
    addresses: Mapping[str, str] = msgspec.field(default_factory=dict)
    """The internal address of each node with devices."""


class _Claims(msgspec.Struct, frozen=True):
    """The claims with devices of ours."""

    found: tuple[ResourceClaim, ...] = ()
    problem: str = ""
    """Why they are missing."""


async def read_cluster(
    api: Api,
    *,
    dialects: Sequence[ForeignDialect] | None = None,
    systems: Collection[str] = SYSTEMS,
    modes: Sequence[str] = (SOFT,),
) -> LiveCluster:
    """Read nodes and pods. Raises `KubeError`; an invalid object is only a problem.

    `dialects` None: all with default settings. Records of systems outside `systems` are a problem
    too. `modes` are the default modes, the best first.
    """
    nodes, pods, claims = await asyncio.gather(
        listed(api, "/api/v1/nodes", NodeObject, asked="list nodes"),
        listed(api, "/api/v1/pods", DatedPod, asked="list pods"),
        _claims(api),
    )
    read_by = foreign_dialects() if dialects is None else dialects
    settings = NeedSettings(tuple(modes))
    # In a thread: it takes a second for a large cluster, and a page answers others meanwhile.
    return await asyncio.to_thread(_live, nodes, pods, claims, settings, read_by, systems)


def _live(
    nodes: Sequence[NodeObject],
    pods: Sequence[DatedPod],
    claims: _Claims,
    settings: NeedSettings,
    dialects: Sequence[ForeignDialect],
    systems: Collection[str],
) -> LiveCluster:
    problems: list[str] = []
    inventories = {}
    others = []
    addresses = {}
    for node in sorted(nodes, key=lambda node: node.metadata.name):
        try:
            inventory = inventory_of(node)
        except UsageError as error:
            problems.append(error.message)
            continue
        if inventory is None:
            others.append(node.metadata.name)
        else:
            inventories[inventory.name] = inventory
            addresses[inventory.name] = _address(node)
    found = _pods(pods, settings, problems)
    for place, live in enumerate(found):
        try:
            found[place] = _with_devices(live, inventories, dialects, systems)
        except UsageError as error:
            problems.append(f"GPUs of another system: {error.message}")
    found.sort(key=lambda live: (-live.priority, live.created, live.need.uid))
    if claims.problem:
        problems.append(claims.problem)
    bookings = (
        claim_booking(claim, home)
        for claim in claims.found
        if (home := inventories.get(claim.devices[0].pool)) is not None
    )
    return LiveCluster(
        tuple(inventories.values()),
        tuple(found),
        tuple(problems),
        tuple(others),
        tuple(each for each in bookings if each is not None),
        claims.found,
        addresses,
    )


def _pods(items: Sequence[DatedPod], settings: NeedSettings, problems: list[str]) -> list[LivePod]:
    pods = []
    requests = _Requests(settings)
    for item in items:
        is_leaving = not item.spec.node_name and item.metadata.deletion_timestamp is not None
        if item.status.phase in ENDED or is_leaving:
            continue
        pod = to_cluster_pod(item, requests.read)
        try:
            need = requests.need(pod)
        except UsageError as error:
            problems.append(error.message)
            if not pod.node:
                continue
            need = need_of(replace(pod, asks=None))  # its devices are in use all the same
        pods.append(
            LivePod(
                need=need,
                booking=pod.booking,
                priority=pod.priority,
                nominated_node=pod.nominated_node,
                is_ending=pod.is_ending,
                created=item.metadata.creation_timestamp,
                dialect=pod.dialect,
                scheduler=item.spec.scheduler_name,
                foreign=pod.foreign,
                phase=item.status.phase,
                resized=_resized(pod, settings),
            )
        )
    return pods


class _Requests:
    """The pods' requests: pods that a controller creates alike are parsed once."""

    def __init__(self, settings: NeedSettings) -> None:
        self._settings = settings
        self._asks: dict[tuple[object, ...], Pod] = {}
        self._needs: dict[tuple[int, str], PodNeed] = {}
        """By the request's containers, which pods that are alike share, and the dialect."""

    def read(self, item: PodObject, uid: PodUid) -> Pod:
        meta, spec = item.metadata, item.spec
        written = (meta.annotations or {}).items()
        key = (
            msgspec.json.encode((spec.containers, spec.init_containers, spec.restart_policy)),
            bytes(spec.resource_claims),
            tuple(each for each in written if each[0] != PLACEMENT),
            meta.deletion_timestamp is None,
            item.status.phase,
        )
        known = self._asks.get(key)
        if known is None:
            known = self._asks[key] = stateless(item, uid)
        return replace(known, uid=uid, namespace=meta.namespace, name=meta.name)

    def need(self, pod: ClusterPod) -> PodNeed:
        """Raises `UsageError`."""
        if pod.asks is None:
            return need_of(pod, self._settings)
        key = id(pod.asks.containers), pod.dialect
        known = self._needs.get(key)
        if known is None:
            known = self._needs[key] = need_of(pod, self._settings)
        return replace(
            known,
            uid=pod.uid,
            namespace=pod.namespace,
            name=pod.name,
            cpu_milli=pod.cpu_milli,
            memory_bytes=pod.memory_bytes,
            priority=pod.priority,
        )


def _address(node: NodeObject) -> str:
    addresses = node.status.addresses or ()
    return next((each.address for each in addresses if each.type == "InternalIP"), "")


def _resized(pod: ClusterPod, settings: NeedSettings) -> PodNeed | None:
    """Return what a pod asks for after its accepted resize; None: it has none that can be read."""
    wish = pod.booking.resize.wish if pod.booking is not None else ""
    if not wish:
        return None
    try:
        return need_of(pod, settings, resize=wish)
    except UsageError:
        return None  # the booking has the amounts


async def _claims(api: Api) -> _Claims:
    """Return none of a server without claims."""
    try:
        items = await listed(api, CLAIMS, ClaimObject, asked="list resourceclaims")
    except ObjectMissingError:
        return _Claims()
    except DeniedError as error:
        return _Claims(problem=f"claims: {error.message}")
    return _Claims(tuple(claim for item in items if (claim := allocated_claim(item)) is not None))


def _with_devices(
    pod: LivePod,
    nodes: Mapping[str, NodeInventory],
    dialects: Sequence[ForeignDialect],
    systems: Collection[str],
) -> LivePod:
    """Add the devices of another system's record. Raises `UsageError`."""
    node = nodes.get(pod.booking.node) if pod.booking is not None else None
    if pod.foreign is None or pod.booking is None or node is None:
        return pod
    usage = adopted_usage(pod.foreign, node, dialects, uid=pod.need.uid, systems=systems)
    if usage is None:
        return pod
    return replace(pod, booking=replace(pod.booking, containers=usage.containers))


async def listed(
    api: Api, path: str, kind: type[_Item], *, asked: str, params: Mapping[str, str] | None = None
) -> list[_Item]:
    """Return a whole list; list again if it expired between two pages."""
    decoder = decoder_of_lists(kind)
    paged = {"limit": str(_PAGE), **(params or {})}
    for attempt in range(_TRIES):
        try:
            lists = pages(api, path, decoder, asked=asked, params=paged)
            return [item async for page in lists for item in page.items or ()]
        except GoneError:
            if attempt == _TRIES - 1:
                raise
    raise AssertionError
