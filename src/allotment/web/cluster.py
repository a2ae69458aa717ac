# SPDX-License-Identifier: Apache-2.0
"""The cluster as a fleet: who has what by the API server, who uses what by the nodes' agents.

One reading serves all viewers. Its pace falls with the number of nodes, so that the API server
passes on at most some twenty metrics pages each second.
"""

import asyncio
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Final

import msgspec

from allotment.kube.clients import Api
from allotment.kube.components import SYSTEM
from allotment.kube.errors import KubeError
from allotment.kube.live import LiveCluster, LivePod, listed, read_cluster
from allotment.kube.objects import Metadata, Narrow
from allotment.kube.quotas import QuotaObject, quota_of
from allotment.metrics.use import GpuUse, ShareUse
from allotment.model.compute import WHOLE
from allotment.placement.explain import in_words
from allotment.scheduler.cluster_use import NodeUse, read_cluster_use
from allotment.scheduler.core.quota import COMPUTE, MEMORY, PART, QuotaBook, QuotaUse
from allotment.scheduler.holdings import (
    ClusterHoldings,
    DeviceHoldings,
    Holder,
    NodeHoldings,
    cluster_holdings,
)
from allotment.web.fleet import (
    Fleet,
    FleetGpu,
    FleetNode,
    FleetShare,
    Happened,
    NamespaceUse,
    WaitingPod,
)

_PACE_S: Final = 15.0
_NODES_PER_S: Final = 20
_MOST_EVENTS: Final = 1000
_SENDERS: Final = ("allotment-agent", "allotment-scheduler")

_UseKey = tuple[str, str, str, str]
"""Namespace, pod or claim, container or request, GPU."""


class _About(Narrow):
    kind: str = ""
    name: str = ""
    namespace: str = ""


class _EventObject(Narrow):
    metadata: Metadata
    involved_object: _About = msgspec.field(default_factory=_About)
    reason: str = ""
    message: str = ""
    last_timestamp: str | None = None
    source: dict[str, str] | None = None


class ClusterSource:
    """A cluster, read by the rights of one client."""

    def __init__(self, api: Api, *, namespace: str = SYSTEM) -> None:
        """`namespace`: of Allotment's installation."""
        self.api: Final = api
        self.pace_s = _PACE_S
        self.live = LiveCluster((), ())
        """As last read."""
        self._namespace = namespace
        self._clock = time.monotonic
        self._counted: dict[_UseKey, tuple[int, float]] = {}
        """GPU time of each share in nanoseconds, and when it was read."""

    async def read(self) -> Fleet:
        """Read it. Raises `KubeError` if nodes or pods cannot be listed."""
        live = await read_cluster(self.api)
        self.pace_s = max(_PACE_S, len(live.nodes) / _NODES_PER_S)
        problems = list(live.problems)
        uses: Sequence[NodeUse] = ()
        try:
            uses = await read_cluster_use(self.api, namespace=self._namespace)
            if not uses and live.nodes:
                problems.append(f"use: no node agent in namespace {self._namespace}")
        except KubeError as error:
            problems.append(f"use: {error.message}")
        quotas: tuple[NamespaceUse, ...] = ()
        events: tuple[Happened, ...] = ()
        try:
            quotas = await self._quotas(live)
        except KubeError as error:
            problems.append(f"quotas: {error.message}")
        try:
            events = await self._events()
        except KubeError as error:
            problems.append(f"events: {error.message}")
        if uses and all(use.is_denied for use in uses):
            problems.append(f"use: {uses[0].problem}")
        self.live = live
        now = self._clock()
        fleet = await asyncio.to_thread(self._fleet, live, uses, now)
        return msgspec.structs.replace(
            fleet, problems=tuple(problems), quotas=quotas, events=events, read_at=time.time()
        )

    def _fleet(self, live: LiveCluster, uses: Sequence[NodeUse], now: float) -> Fleet:
        holdings = cluster_holdings(live)
        rates = self._rates(uses, now)
        return fleet_of(holdings, uses, rates)

    def _rates(self, uses: Sequence[NodeUse], now: float) -> Mapping[_UseKey, float]:
        """Return each share's part of its GPU's time since the last reading."""
        rates = {}
        counted = {}
        for use in uses:
            for share in use.use.shares if use.use else ():
                if share.gpu_ns is None:
                    continue
                key = _key(share)
                before = self._counted.get(key)
                counted[key] = (share.gpu_ns, now)
                if before is not None and now > before[1] and share.gpu_ns >= before[0]:
                    rates[key] = (share.gpu_ns - before[0]) / 1e9 / (now - before[1])
        self._counted = counted
        return rates

    async def _quotas(self, live: LiveCluster) -> tuple[NamespaceUse, ...]:
        path = "/api/v1/resourcequotas"
        items = await listed(self.api, path, QuotaObject, asked="list resourcequotas")
        book = QuotaBook()
        book.set_quotas(quota_of(item) for item in items)
        limited = set(book.namespaces())
        for pod in live.pods:
            if pod.need.namespace in limited and pod.need.containers:
                book.add(pod.need, booking=pod.booking, dialect=pod.dialect)
        return tuple(
            _namespace_use(use) for namespace in book.namespaces() for use in book.usage(namespace)
        )

    async def _events(self) -> tuple[Happened, ...]:
        found: list[Happened] = []
        for sender in _SENDERS:
            items = await listed(
                self.api,
                "/api/v1/events",
                _EventObject,
                asked="list events",
                params={"fieldSelector": f"source={sender}"},
            )
            found += (_happened(item) for item in items)
        found.sort(key=lambda event: -event.time)
        return tuple(found[:_MOST_EVENTS])


def _namespace_use(use: QuotaUse) -> NamespaceUse:
    limit = f"{use.quota} {use.key}"
    if use.measure == MEMORY:
        kind, used, hard = "bytes", float(use.used), float(use.hard)
    elif use.measure in {PART, COMPUTE}:
        kind, used, hard = "part", use.used / WHOLE, use.hard / WHOLE
    else:
        kind, used, hard = "number", float(use.used), float(use.hard)
    return NamespaceUse(namespace=use.namespace, limit=limit, used=used, hard=hard, kind=kind)


def _happened(item: _EventObject) -> Happened:
    about = item.involved_object
    return Happened(
        time=_seconds(item.last_timestamp or ""),
        kind=item.reason,
        subject=f"{about.namespace}/{about.name}" if about.namespace else about.name,
        text=item.message,
        namespace=about.namespace,
        node=(item.source or {}).get("host", ""),
    )


def _seconds(text: str) -> float:
    try:
        return datetime.fromisoformat(text).astimezone(UTC).timestamp()
    except ValueError:
        return 0.0


def _key(share: ShareUse) -> _UseKey:
    if share.claim:
        return (share.namespace, share.claim, share.request, share.device)
    return (share.namespace, share.pod, share.container, share.device)


def fleet_of(
    holdings: ClusterHoldings,
    uses: Sequence[NodeUse],
    rates: Mapping[_UseKey, float],
) -> Fleet:
    """Join who has what with who uses what. Pure."""
    by_node = {use.node: use for use in uses}
    return Fleet(
        nodes=tuple(_node(node, by_node.get(node.name), rates) for node in holdings.nodes),
        waiting=tuple(map(_waiting, holdings.waiting)),
    )


def _waiting(pod: LivePod) -> WaitingPod:
    need = pod.need
    return WaitingPod(
        namespace=need.namespace,
        name=need.name,
        request="; ".join(in_words(container.request) for container in need.containers),
        priority=pod.priority,
        created=pod.created,
        nominated=pod.nominated_node,
    )


def _node(node: NodeHoldings, use: NodeUse | None, rates: Mapping[_UseKey, float]) -> FleetNode:
    reported = use.use if use else None
    shares: dict[_UseKey, list[ShareUse]] = {}
    for share in reported.shares if reported else ():
        shares.setdefault((*_key(share)[:3], share.gpu), []).append(share)
    gpus = {gpu.uuid: gpu for gpu in reported.gpus} if reported else {}
    devices = (_gpu(each, gpus.get(each.device.uuid), shares, rates) for each in node.devices)
    return FleetNode(
        name=node.name, gpus=tuple(devices), problem=use.problem if use and not reported else ""
    )


def _gpu(
    held: DeviceHoldings,
    use: GpuUse | None,
    shares: dict[_UseKey, list[ShareUse]],
    rates: Mapping[_UseKey, float],
) -> FleetGpu:
    device = held.device
    made = []
    for holder in held.holders:
        of_holder = shares.get((holder.namespace, holder.name, holder.container, device.uuid), [])
        # Several slices of one GPU: in the order of both lists.
        made.append(_share(holder, device.uuid, of_holder.pop(0) if of_holder else None, rates))
    return FleetGpu(
        uuid=device.uuid,
        index=device.index,
        model=device.model,
        mode=held.mode or (use.mode if use else ""),
        memory_total=device.memory_bytes,
        memory_used=use.memory_used if use else None,
        memory_allocated=held.allotted_bytes,
        guaranteed=held.guaranteed / WHOLE,
        utilization=use.utilization if use else None,
        temperature_c=use.temperature_c if use else None,
        power_mw=use.power_mw if use else None,
        problem=device.problem,
        shares=tuple(made),
    )


def _share(
    holder: Holder, gpu: str, use: ShareUse | None, rates: Mapping[_UseKey, float]
) -> FleetShare:
    share = FleetShare(
        id=f"{holder.uid}.{holder.container}",
        name=f"{holder.name}/{holder.container}",
        namespace=holder.namespace,
        pod="" if holder.is_claim else holder.name,
        container=holder.container,
        mode=holder.mode,
        state=holder.phase or ("claim" if holder.is_claim else ""),
        device=gpu,
        memory_limit=holder.memory_bytes,
        guarantee=holder.guarantee / WHOLE if holder.guarantee else None,
        ceiling=holder.compute.ceiling / WHOLE if holder.compute else None,
    )
    if use is None:
        return share
    rate = rates.get(_key(use))
    return msgspec.structs.replace(
        share,
        device=use.device or gpu,
        memory_used=use.memory_used,
        memory_peak=use.memory_peak,
        refusals=use.refusals,
        gpu_time=use.utilization if rate is None else rate,
        is_enforced=use.is_enforced,
    )
