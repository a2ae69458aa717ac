# SPDX-License-Identifier: Apache-2.0
"""The cluster's figures for a scrape, read from the books.

One step of the event loop copies what is needed; the text is made in the thread of the scrape. Only
the leader has them: another replica would count everything twice, and knows no reservation.
"""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Final

import msgspec
import numpy as np
import structlog

from allotment.metrics.scheduler import AMOUNTS, MOST_KINDS, Series, labelled, write_cluster
from allotment.model.compute import WHOLE
from allotment.model.formats import format_bytes, format_percent
from allotment.placement.cluster.arrays import FloatArray, IntArray, PodShape
from allotment.placement.cluster.cluster import ModelTotals, NodeTotals
from allotment.placement.policies.fragmentation import PackingValues
from allotment.scheduler.core.book import Book
from allotment.scheduler.core.cluster_events import KnownClaims
from allotment.scheduler.core.quota import (
    COMPUTE,
    DEVICES,
    MEMORY,
    PART,
    Charge,
    QuotaBook,
    QuotaUse,
)
from allotment.scheduler.core.wait_reasons import WaitReasons

_log = structlog.get_logger(__name__)

PATIENCE_S: Final = 2.0
"""How long a scrape waits for the event loop."""
_FRESH_S: Final = 1.0
"""Scrapes within this time share a text: any pod may connect."""

_FIELDS: Final[Mapping[str, tuple[str, int]]] = {
    "devices": ("devices", 1),
    "devices_idle": ("idle", 1),
    "devices_whole": ("whole", 1),
    "shares": ("shares", 1),
    "slices": ("slices", 1),
    "memory_bytes": ("memory", 1),
    "memory_allocated_bytes": ("memory_allocated", 1),
    "memory_fragmented_bytes": ("memory_fragmented", 1),
    "compute": ("guarantee", WHOLE),
    "compute_allocated": ("guarantee_allocated", WHOLE),
    "compute_fragmented": ("guarantee_fragmented", WHOLE),
}
"""By name of `AMOUNTS`: the field of `ModelTotals`, and its unit."""
_UNITS: Final = {MEMORY: "bytes", PART: "gpus", COMPUTE: "gpus", DEVICES: "devices"}


class Snapshot(msgspec.Struct, frozen=True):
    """The books at one moment."""

    models: Mapping[str, ModelTotals]
    nodes: NodeTotals
    claims: Mapping[str, int]
    """Allocated ones by node."""
    waiting_claims: int
    pods: Mapping[str, int]
    """Waiting ones by reason."""
    quotas: Sequence[QuotaUse]
    namespaces: Mapping[str, Charge]
    standing: PackingValues | None
    values: Mapping[str, float]
    """Of `standing`, by node."""


class Books(msgspec.Struct, frozen=True):
    """All that the figures are read from."""

    book: Book
    quotas: QuotaBook
    claims: KnownClaims
    waits: WaitReasons

    def snapshot(self) -> Snapshot:
        cluster = self.book.cluster
        waiting, by_node = self.claims.counts()
        standing = cluster.standing()
        names = cluster.arrays.names
        values = standing.values.tolist() if standing is not None else ()
        return Snapshot(
            models=cluster.totals(),
            nodes=cluster.totals_by_node(),
            claims=by_node,
            waiting_claims=waiting,
            pods=self.waits.counts(),
            quotas=[use for name in self.quotas.namespaces() for use in self.quotas.usage(name)],
            namespaces=self.quotas.bound(),
            standing=standing,
            values={name: value for name, value in zip(names, values, strict=False) if name},
        )


class ClusterFigures:
    """The text of the cluster's figures. Any thread but the event loop's may ask for it."""

    def __init__(
        self,
        snapshot: Callable[[], Snapshot],
        *,
        leads: Callable[[], bool],
        patience_s: float = PATIENCE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._snapshot = snapshot
        self._leads = leads
        self._patience_s = patience_s
        self._clock = clock
        self._loop: asyncio.AbstractEventLoop | None = None
        self._lock = threading.Lock()
        self._read_at = float("-inf")
        self._last: Snapshot | None = None
        self._texts: dict[bool, bytes] = {}

    def start(self) -> None:
        """Call it in the event loop that owns the books."""
        self._loop = asyncio.get_running_loop()

    def text(self, is_open: bool) -> bytes:  # noqa: FBT001 - its only argument
        """Return the figures in Prometheus' format, or in that of OpenMetrics."""
        with self._lock:
            if self._clock() - self._read_at >= _FRESH_S:
                self._last = self._taken()
                self._read_at = self._clock()
                self._texts.clear()
            if is_open not in self._texts:
                self._texts[is_open] = write_cluster(series(self._last), is_open=is_open)
            return self._texts[is_open]

    def _taken(self) -> Snapshot | None:
        """Return the books as they are; None if this replica does not lead, or hangs."""
        if self._loop is None or not self._leads():
            return None
        taken: Future[Snapshot | None] = Future()

        def take() -> None:
            if taken.set_running_or_notify_cancel():
                try:
                    taken.set_result(self._snapshot() if self._leads() else None)
                except Exception as error:  # noqa: BLE001 - the other metrics must not fail with it
                    _log.exception("defect: the cluster's figures cannot be read")
                    taken.set_exception(error)

        try:
            self._loop.call_soon_threadsafe(take)
            return taken.result(timeout=self._patience_s)
        except Exception:  # noqa: BLE001 - it was logged, or the loop hangs or has ended
            taken.cancel()
            return None


def series(taken: Snapshot | None) -> Iterator[Series]:
    """Yield all metrics of `CLUSTER`; without a snapshot only that there is none."""
    yield Series("cluster_read", [""], [int(taken is not None)])
    if taken is None:
        return
    models = np.array(list(taken.models.values()), dtype=np.int64)
    yield from _amounts("device", list(taken.models), models.reshape(-1, len(_FIELDS)))
    yield from _amounts("node", taken.nodes.names, taken.nodes.sums)
    yield _by("node_claims", taken.claims)
    if taken.standing is not None:
        yield _by("node_packing_value", taken.values)
        yield from _of_kinds(taken.standing)
    yield _by("pods_waiting", taken.pods)
    states = {"waiting": taken.waiting_claims, "allocated": sum(taken.claims.values())}
    yield _by("claims", states)
    yield from _of_quotas(taken.quotas)
    amounts = taken.namespaces
    yield _by("namespace_devices", {name: each[DEVICES] for name, each in amounts.items()})
    yield _by("namespace_memory_bytes", {name: each[MEMORY] for name, each in amounts.items()})
    yield _by("namespace_compute", {name: each[COMPUTE] / WHOLE for name, each in amounts.items()})


def _amounts(what: str, names: Sequence[str], sums: IntArray) -> Iterator[Series]:
    labels = [labelled(f"{what}_devices", name) for name in names]
    for name in AMOUNTS:
        field, unit = _FIELDS[name]
        column = sums[:, ModelTotals._fields.index(field)]
        yield Series(f"{what}_{name}", labels, (column if unit == 1 else column / unit).tolist())


def _by(name: str, values: Mapping[str, float]) -> Series:
    return Series(name, [labelled(name, each) for each in values], list(values.values()))


def _of_kinds(standing: PackingValues) -> Iterator[Series]:
    # Typical kinds differ by steps of their amounts: in words, two of them may be the same.
    places = {kind_text(kind): place for place, kind in enumerate(standing.kinds[:MOST_KINDS])}
    columns: Mapping[str, FloatArray] = {
        "kind_frequency_ratio": standing.frequencies,
        "kind_slots": standing.slots,
        "kind_slot_price": standing.prices,
    }
    for name, column in columns.items():
        yield _by(name, {text: float(column[place]) for text, place in places.items()})


def kind_text(kind: PodShape) -> str:
    """Return a kind of pods in words: `1 soft, 30 %, 8Gi, A100`."""
    parts = [f"{kind.count} {kind.mode}"]
    if kind.guarantee:
        parts.append(f"{format_percent(kind.guarantee)} %")
    if kind.device_memory_part is not None:
        parts.append(f"{format_percent(int(kind.device_memory_part * WHOLE))} % of memory")
    elif kind.device_memory_bytes:
        parts.append(format_bytes(kind.device_memory_bytes))
    if kind.models is not None:
        parts.append("|".join(sorted(kind.models)))
    if kind.cpu_milli:
        parts.append(f"{kind.cpu_milli}m CPU")
    if kind.memory_bytes:
        parts.append(f"{format_bytes(kind.memory_bytes)} of host memory")
    return ", ".join(parts)


def _of_quotas(quotas: Sequence[QuotaUse]) -> Iterator[Series]:
    labels = [
        labelled("quota_used", each.namespace, each.quota, each.key, _UNITS[each.measure])
        for each in quotas
    ]
    units = [WHOLE if _UNITS[each.measure] == "gpus" else 1 for each in quotas]
    for name in ("used", "hard"):
        amounts = [getattr(each, name) for each in quotas]
        values = [amount / unit for amount, unit in zip(amounts, units, strict=True)]
        yield Series("quota_used" if name == "used" else "quota_limit", labels, values)
