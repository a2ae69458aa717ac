# SPDX-License-Identifier: Apache-2.0
"""Who has what, as Aliyun's gpushare shows it: `kubectl inspect gpushare` and its extender's JSON.

Byte for byte in its formats (gpushare-device-plugin cmd/inspect/display.go,
gpushare-scheduler-extender pkg/scheduler/inspect.go), with the figures of `allot inspect`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Final

import msgspec

from allotment.dialects.foreign.parsing import units_of
from allotment.model.formats import MEMORY_UNITS
from allotment.model.pods import PodUid
from allotment.scheduler.holdings import DeviceHoldings, NodeHoldings, Tenant, node_holdings

if TYPE_CHECKING:
    from allotment.dialects.own.resource_claims import ResourceClaim
    from allotment.placement.nodes import Node
    from allotment.scheduler.core.book import Book

UNITS: Final[Mapping[str, int]] = {"GiB": MEMORY_UNITS["Gi"], "MiB": MEMORY_UNITS["Mi"]}
_PADDING: Final = 2
"""Blanks after the widest cell of a column, in Go's text/tabwriter as gpushare sets it."""


class _Wire(msgspec.Struct, rename={"total": "totalGPU", "used": "usedGPU", "devices": "devs"}):
    """An object of the JSON."""


class GpuSharePod(_Wire):
    """A pod on one device. Amounts are in gpushare's units of memory, as in all objects."""

    name: str
    namespace: str
    used: int


class GpuShareDevice(_Wire):
    """A device, by its index."""

    id: int
    total: int
    used: int
    pods: list[GpuSharePod]


class GpuShareNode(_Wire):
    """A node with devices."""

    name: str
    total: int
    used: int
    devices: list[GpuShareDevice]


class GpuShareAnswer(_Wire, omit_defaults=True):
    """The answer of `GET /gpushare-scheduler/inspect`, and of `inspect/NODE`."""

    nodes: tuple[GpuShareNode, ...]
    error: str = ""


def fitting_unit(nodes: Iterable[NodeHoldings]) -> str:
    """Return the unit in which no amount of a pod is a fraction: GiB, or MiB."""
    amounts = (
        part.memory for node in nodes for each in node.devices for part in each.parts.values()
    )
    return "MiB" if any(amount % UNITS["GiB"] for amount in amounts) else "GiB"


def wire_node(node: NodeHoldings, *, unit: str) -> GpuShareNode:
    """Return a node in the JSON's form. What a node's agent counts belongs to no pod."""
    devices = [
        GpuShareDevice(
            id=each.device.index,
            total=each.device.memory_bytes // UNITS[unit],
            used=units_of(each.allotted_bytes, UNITS[unit]),
            pods=[
                GpuSharePod(name=name, namespace=namespace, used=used)
                for namespace, name, used in _pods(each, unit)
            ],
        )
        for each in node.devices
    ]
    return GpuShareNode(
        name=node.name,
        total=sum(each.total for each in devices),
        used=sum(each.used for each in devices),
        devices=devices,
    )


def _pods(device: DeviceHoldings, unit: str) -> list[tuple[str, str, int]]:
    names: dict[PodUid, tuple[str, str]] = {
        each.uid: (each.namespace, each.name) for each in device.holders
    }
    return [(*names[uid], units_of(device.parts[uid].memory, UNITS[unit])) for uid in names]


class GpuShareInspection:
    """Answers gpushare's clients from the scheduler's book. For one event loop."""

    def __init__(
        self,
        book: Book,
        *,
        unit: str = "GiB",
        claim: Callable[[PodUid], ResourceClaim | None] = lambda _uid: None,
    ) -> None:
        """`unit` is gpushare's `--memory-unit`; `claim` returns a known claim."""
        self._book = book
        self._unit = unit
        self._claim = claim

    async def answer(self, name: str = "") -> bytes:
        """Return the JSON of a node, or of all. Other requests are answered in between."""
        nodes = self._book.cluster.nodes
        if name and name not in nodes:
            error = f"node {name!r} shares no GPU"
            return msgspec.json.encode(GpuShareAnswer(nodes=(), error=error))
        found = []
        for each in [name] if name else sorted(nodes):
            node = nodes.get(each)
            if node is not None:
                holdings = node_holdings(node, self._tenants(node))
                found.append(wire_node(holdings, unit=self._unit))
            await asyncio.sleep(0)
        return msgspec.json.encode(GpuShareAnswer(nodes=tuple(found)))

    def _tenants(self, node: Node) -> Iterator[Tenant]:
        for uid, booking in node.bookings.items():
            named = self._book.need(uid) or self._claim(uid)
            if booking.containers and named is not None:
                yield Tenant(booking=booking, namespace=named.namespace, name=named.name)


# ---- the table -----------------------------------------------------------------------------------


def summary(nodes: Sequence[NodeHoldings], *, unit: str) -> str:
    """Return what `kubectl inspect gpushare` prints."""
    shown = [(node, wire_node(node, unit=unit)) for node in nodes if node.devices]
    pending = {node.name: _pending(node, unit) for node, _ in shown if node.unlocated}
    width = max((len(wire.devices) for _, wire in shown), default=0)
    headings = ["NAME", "IPADDRESS", *(f"GPU{i}(Allocated/Total)" for i in range(width))]
    if pending:
        headings.append("PENDING(Allocated)")
    lines = ["\t".join([*headings, f"GPU Memory({unit})"])]
    for node, wire in shown:
        used = wire.used + pending.get(node.name, 0)
        by_id = {each.id: f"{each.used}/{each.total}" for each in wire.devices}
        cells = [node.name, node.address or "unknown"]
        cells += [by_id.get(i, "0/0") for i in range(width)]
        if pending:
            cells.append(str(pending.get(node.name, "")))
        lines.append("\t".join([*cells, f"{used}/{wire.total}"]))
    dashes = len(lines[1].encode()) + 1 + 20 if shown else 0
    lines += ["-" * dashes, "Allocated/Total GPU Memory In Cluster:"]
    used = sum(wire.used for _, wire in shown) + sum(pending.values())
    lines.append(f"{_of(used, sum(wire.total for _, wire in shown))}\t")
    return _tabulated(lines)


def details(nodes: Sequence[NodeHoldings], *, unit: str) -> str:
    """Return what `kubectl inspect gpushare -d` prints."""
    lines = []
    dashes = all_used = all_total = 0
    for node in nodes:
        if not node.devices:
            continue
        wire = wire_node(node, unit=unit)
        indexes = [each.id for each in wire.devices]
        headings = ["NAME", "NAMESPACE", *(f"GPU{index}(Allocated)" for index in indexes)]
        if node.unlocated:
            headings.append("Pending(Allocated)")
            indexes.append(-1)
        lines += ["", f"NAME:\t{node.name}", f"IPADDRESS:\t{node.address or 'unknown'}", ""]
        lines.append("\t".join([*headings, ""]))
        rows = [
            _row(pod.name, pod.namespace, pod.used, at=device.id, indexes=indexes)
            for device in wire.devices
            for pod in device.pods
        ]
        rows += [
            _row(each.name, each.namespace, _asked(each, unit), at=-1, indexes=indexes)
            for each in node.unlocated
        ]
        dashes = dashes or sum(len(row.encode()) + 1 for row in rows) + 10
        used = wire.used + (_pending(node, unit) if node.unlocated else 0)
        lines += rows
        lines += [f"Allocated :\t{used} ({_percent(used, wire.total)}%)\t"]
        lines += [f"Total :\t{wire.total} \t", "-" * dashes]
        all_used, all_total = all_used + used, all_total + wire.total
    lines += ["", "", f"Allocated/Total GPU Memory In Cluster:\t{_of(all_used, all_total)}\t"]
    return _tabulated(lines)


def _row(name: str, namespace: str, used: int, *, at: int, indexes: Sequence[int]) -> str:
    amounts = (str(used) if index == at else "0" for index in indexes)
    return "\t".join([name, namespace, *amounts, ""])


def _pending(node: NodeHoldings, unit: str) -> int:
    return sum(_asked(each, unit) for each in node.unlocated)


def _asked(tenant: Tenant, unit: str) -> int:
    """Return what a pod without known devices asks for, in units; a part of a GPU is unknown."""
    containers = tenant.need.containers if tenant.need else ()
    size = sum(each.request.count * (each.request.memory.size_bytes or 0) for each in containers)
    return units_of(size, UNITS[unit])


def _percent(used: int, total: int) -> int:
    return used * 100 // total if total else 0


def _of(used: int, total: int) -> str:
    return f"{used}/{total} ({_percent(used, total)}%)"


def _tabulated(lines: Iterable[str]) -> str:
    """Align cells as Go's text/tabwriter does.

    A tab ends a cell. Cells at the same place of lines that follow each other are a column; what
    comes after a line's last tab is in none.
    """
    rows = [line.split("\t") for line in lines]
    _align(rows, 0)
    return "".join("".join(row) + "\n" for row in rows)


def _align(rows: Sequence[list[str]], column: int) -> None:
    for has_cell, group in groupby(rows, key=lambda row: len(row) - 1 > column):
        if has_cell:
            block = list(group)
            width = max(len(row[column]) for row in block) + _PADDING
            for row in block:
                row[column] = row[column].ljust(width)
            _align(block, column + 1)
