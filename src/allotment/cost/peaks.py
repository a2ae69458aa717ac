# SPDX-License-Identifier: Apache-2.0
"""The peaks of a cluster's shares over days, as Prometheus has them.

Each day is asked for at its end. Maxima of days are exact; a percentile is that of the highest day.
"""

import asyncio
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Final

import msgspec

from allotment.cost.history import (
    GPU_LABELS,
    SHARE_LABELS,
    STEP_S,
    Key,
    Span,
    nothing,
    now,
    one_currency,
    share_key,
)
from allotment.cost.prices import MICROS, Prices
from allotment.cost.prometheus import Prometheus, TimeSeries
from allotment.cost.workloads import ShareHistory, workload_name
from allotment.model.structs import replace

_AVERAGED: Final = "15m"
"""Compute is advised by the time that a share used in so long: shorter peaks borrow or wait."""


def _most(metric: str) -> str:
    return now(f"max_over_time({metric}[1d])")


def _last(metric: str, *, by: str = SHARE_LABELS) -> str:
    return now(f"last_over_time({metric}[1d])", by=by)


def _p99(expression: str) -> str:
    return f"quantile_over_time(0.99, ({now(expression)})[1d:5m])"


_DAILY: Final = {
    "watched": f"count_over_time(({now('allotment_share_memory_limit_bytes')})[1d:5m]) * {STEP_S}",
    "limit": _last("allotment_share_memory_limit_bytes"),
    "guarantee": _last("allotment_share_compute_guaranteed_ratio"),
    "ceiling": _last("allotment_share_compute_ceiling_ratio"),
    "peak": _most("allotment_share_memory_peak_bytes"),
    "used": _most("allotment_share_memory_used_bytes"),
    "used_p99": _p99("allotment_share_memory_used_bytes"),
    "time_p99": _p99(f"rate(allotment_share_gpu_seconds_total[{_AVERAGED}])"),
    "utilization_p99": _p99(f"avg_over_time(allotment_share_utilization_ratio[{_AVERAGED}])"),
    "gpu_seconds": _most("allotment_share_gpu_seconds_total"),
    "refusals": _most("allotment_share_memory_refusals_total"),
    "held_seconds": _most("allotment_share_held_seconds_total"),
}
"""By day and share. Counters begin with the share, and never begin again."""
_BEFORE: Final = {
    "gpu_seconds": now("allotment_share_gpu_seconds_total"),
    "refusals": now("allotment_share_memory_refusals_total"),
    "held_seconds": now("allotment_share_held_seconds_total"),
}
_OF_GPUS: Final = {
    "info": _last("allotment_gpu_info", by=GPU_LABELS),
    "total": _last("allotment_gpu_memory_total_bytes", by=GPU_LABELS),
    "reserved": _last("allotment_gpu_memory_reserved_bytes", by=GPU_LABELS),
    "price": _last("allotment_gpu_price_per_hour", by=GPU_LABELS),
}


class _Seen(msgspec.Struct):
    """What was found of one share on one device, over all days."""

    series: TimeSeries
    watched: list[float]
    figures: dict[str, float] = msgspec.field(default_factory=dict)
    before: dict[str, float] = msgspec.field(default_factory=dict)
    is_present: bool = False

    def count(self, name: str) -> float | None:
        """Return how much a counter has grown in the range."""
        last = self.figures.get(name)
        return None if last is None else max(0.0, last - self.before.get(name, 0.0))


class Histories(msgspec.Struct, frozen=True, kw_only=True):
    """The shares of a range."""

    shares: list[ShareHistory]
    models: Mapping[str, int]
    """GPUs by model."""
    currency: str


class _Found:
    """What the answers say of all shares and GPUs, day by day."""

    def __init__(self, span: Span) -> None:
        self._days = span.days
        self.shares: dict[Key, _Seen] = {}
        self.gpus: dict[str, dict[str, float]] = {}
        self.models: dict[str, str] = {}
        self._currencies: set[tuple[str, str]] = set()

    def add_shares(self, name: str, series: Iterable[TimeSeries], day: int) -> None:
        for each in series:
            new = _Seen(each, [0.0] * self._days)
            _add(self.shares.setdefault(share_key(each), new), name, each.points[-1][1], day)

    def add_gpus(self, name: str, series: Iterable[TimeSeries]) -> None:
        for each in series:
            gpu = each.label("gpu")
            self.gpus.setdefault(gpu, {})[name] = each.points[-1][1]
            if name == "info":
                self.models[gpu] = each.label("model")
            self._currencies.add((gpu, each.label("currency")))

    def add_before(self, name: str, series: Iterable[TimeSeries]) -> None:
        for each in series:
            if share_key(each) in self.shares:
                self.shares[share_key(each)].before[name] = each.points[-1][1]

    def currency(self, prices: Prices) -> str:
        of_agents = {
            currency
            for gpu, currency in self._currencies
            if prices.of(self.models.get(gpu, "")) is None
        }
        return one_currency({prices.currency, *of_agents})

    def histories(self, prices: Prices) -> list[ShareHistory]:
        found = ((each, each.series.label("gpu")) for each in self.shares.values())
        return [
            _history(each, self.gpus.get(gpu, {}), self.models.get(gpu, ""), prices)
            for each, gpu in found
        ]


async def share_histories(prometheus: Prometheus, span: Span, prices: Prices) -> Histories:
    """Return all shares of a range. Raises `PrometheusError`, `NotFoundError`."""
    found, ends = _Found(span), span.ends()

    async def ask(queries: Mapping[str, str], at: float) -> Iterable[tuple[str, list[TimeSeries]]]:
        answers = await asyncio.gather(*(prometheus.instant(one, at) for one in queries.values()))
        return zip(queries, answers, strict=True)

    for day, end in enumerate(ends):
        for name, series in await ask(_DAILY, end):
            found.add_shares(name, series, day)
        for name, series in await ask(_OF_GPUS, end):
            found.add_gpus(name, series)
    if not found.models:
        raise nothing(span)
    for name, series in await ask(_BEFORE, span.begin):
        found.add_before(name, series)
    for each in await prometheus.instant(now("allotment_share_memory_limit_bytes"), ends[-1]):
        if share_key(each) in found.shares:
            found.shares[share_key(each)].is_present = True
    return Histories(
        shares=found.histories(prices),
        models=Counter(found.models.values()),
        currency=found.currency(prices),
    )


_NEWEST: Final = {"limit", "guarantee", "ceiling"}


def _add(seen: _Seen, name: str, number: float, day: int) -> None:
    if name == "watched":
        seen.watched[day] += number
    elif name in _NEWEST or name not in seen.figures:
        seen.figures[name] = number
    else:
        seen.figures[name] = max(seen.figures[name], number)


def _history(seen: _Seen, gpu: Mapping[str, float], model: str, prices: Prices) -> ShareHistory:
    label, figures = seen.series.label, seen.figures
    pod = label("pod")
    price = prices.of(model)
    if price is None and "price" in gpu:
        price = round(gpu["price"] * MICROS)
    peak, used = figures.get("peak"), figures.get("used")
    most = max((each for each in (peak, used) if each is not None), default=None)
    found = ShareHistory(
        namespace=label("namespace"),
        workload=workload_name(pod) if pod else label("claim") or label("share"),
        container=label("container") or label("request"),
        share=label("share"),
        mode=label("mode"),
        gpu_memory=int(gpu.get("total", 0.0) - gpu.get("reserved", 0.0)),
        price=price,
        limit=int(figures.get("limit", 0.0)),
        guarantee=0.0 if label("device") else figures.get("guarantee", 0.0),
        ceiling=figures.get("ceiling", 1.0),
        peak=None if most is None else int(most),
        time_p99=figures.get("time_p99", figures.get("utilization_p99")),
        gpu_seconds=seen.count("gpu_seconds"),
        refusals=round(seen.count("refusals") or 0.0),
        held_seconds=seen.count("held_seconds") or 0.0,
        watched_s=tuple(seen.watched),
        is_present=seen.is_present,
        is_sampled=peak is None,
    )
    p99 = figures.get("used_p99")
    return found if p99 is None else replace(found, used_p99=int(p99))
