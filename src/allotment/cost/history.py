# SPDX-License-Identifier: Apache-2.0
"""What was paid for a cluster's GPUs, as Prometheus has its past.

A cost is summed hour by hour, with means over each hour; what was absent counts as 0. Instants are
5 minutes apart, as long as Prometheus shows a series after its last sample. A day is asked for at a
time, so that no answer depends on the number of days.
"""

import asyncio
from collections import Counter
from collections.abc import Iterable
from typing import Final

import msgspec

from allotment.cost.bills import Bill
from allotment.cost.prices import MICROS, Prices
from allotment.cost.prometheus import Prometheus, PrometheusError, TimeSeries
from allotment.cost.splitting import (
    OUTSIDE,
    Account,
    GpuHour,
    ShareHour,
    accounts,
    unpriced_models,
)
from allotment.model.errors import NotFoundError
from allotment.model.modes import traits_of

STEP_S: Final = 300
_HOUR_S: Final = 3600
DAY_S: Final = 86400
_INSTANTS: Final = _HOUR_S // STEP_S

# One series for each share and device, whatever Prometheus adds (`instance`), and whatever changes
# (`class`).
_NAMES: Final = ("namespace", "pod", "container", "claim", "request")
_SHARE: Final = ("share", "gpu", "device", "mode")
SHARE_LABELS: Final = ", ".join((*_NAMES, *(f"exported_{name}" for name in _NAMES[:3]), *_SHARE))
GPU_LABELS: Final = "gpu, model, currency"

Key = tuple[str, str]
"""A share's id and its device."""


class Span(msgspec.Struct, frozen=True):
    """A range of whole days, in seconds after the epoch."""

    end: float
    days: int

    @property
    def begin(self) -> float:
        return self.ends()[0] - DAY_S

    def ends(self) -> list[float]:
        """Return the end of each day, oldest first.

        A second before a multiple of the step: so a range has the same instants, whether
        Prometheus counts its beginning (2.x) or not (3.x).
        """
        last = self.end // STEP_S * STEP_S - 1
        return [last - DAY_S * back for back in reversed(range(self.days))]


def now(metric: str, *, by: str = SHARE_LABELS) -> str:
    return f"max by ({by}) ({metric})"


def _mean(metric: str, *, by: str = SHARE_LABELS) -> str:
    """Return the mean over an hour, with 0 where there is nothing."""
    return f"sum_over_time(({now(metric, by=by)})[1h:5m]) / {_INSTANTS}"


def _present(metric: str, *, by: str = SHARE_LABELS) -> str:
    """Return the part of an hour in which there was a series."""
    return f"count_over_time(({now(metric, by=by)})[1h:5m]) / {_INSTANTS}"


_GPU_HOURS: Final = {
    "present": _present("allotment_gpu_info", by=GPU_LABELS),
    "total": _mean("allotment_gpu_memory_total_bytes", by=GPU_LABELS),
    "reserved": _mean("allotment_gpu_memory_reserved_bytes", by=GPU_LABELS),
    "outside": _mean("allotment_gpu_memory_outside_bytes", by=GPU_LABELS),
    "price": f"avg_over_time(({now('allotment_gpu_price_per_hour', by=GPU_LABELS)})[1h:5m])",
}
_SHARE_HOURS: Final = {
    "present": _present("allotment_share_memory_limit_bytes"),
    "limit": _mean("allotment_share_memory_limit_bytes"),
    "guarantee": _mean("allotment_share_compute_guaranteed_ratio"),
    "used": _mean("allotment_share_memory_used_bytes"),
    "seconds": now("increase(allotment_share_gpu_seconds_total[1h])") + f" / {_HOUR_S}",
    "utilization": f"sum_over_time(({now('allotment_share_utilization_ratio')})[1h:1m]) / 60",
}


class _GpuFacts(msgspec.Struct):
    """What was found of one GPU at one hour."""

    present: float = 0.0
    total: float = 0.0
    reserved: float = 0.0
    outside: float = 0.0
    price: float | None = None


class _ShareFacts(msgspec.Struct):
    """What was found of one share on one device at one hour."""

    namespace: str
    gpu: str
    device: str
    mode: str
    present: float = 0.0
    limit: float = 0.0
    guarantee: float = 0.0
    used: float = 0.0
    seconds: float | None = None
    utilization: float | None = None


class _Watched(msgspec.Struct):
    """The time in which a GPU was watched: parts of hours."""

    first: float
    last: float
    at_first: float
    at_last: float
    total: float

    def add(self, time: float, present: float) -> None:
        self.total += present
        if time < self.first:
            self.first, self.at_first = time, present
        elif time > self.last:
            self.last, self.at_last = time, present

    def missing(self) -> float:
        """Return the hours between the first and the last without figures."""
        between = (self.last - self.first) / _HOUR_S - 1
        return max(0.0, between - (self.total - self.at_first - self.at_last))


async def past_bill(prometheus: Prometheus, span: Span, prices: Prices) -> Bill:
    """Return what was paid in a range. Raises `PrometheusError`, `NotFoundError`.

    A price of `prices` goes before that of the metric.
    """
    models: dict[str, str] = {}
    watched: dict[str, _Watched] = {}
    currencies = {prices.currency}
    found: dict[str | None, Account] = {}
    unpriced: set[str] = set()
    for end in span.ends():
        gpus, shares, of_gpus = await _day(prometheus, end, models)
        currencies |= {
            currency for gpu, currency in of_gpus if prices.of(models.get(gpu, "")) is None
        }
        for (gpu, time), facts in gpus.items():
            new = _Watched(time, time, facts.present, facts.present, 0.0)
            watched.setdefault(gpu, new).add(time, facts.present)
        hours = [
            _hour(facts, models.get(gpu, ""), shares.get((gpu, time), ()), prices)
            for (gpu, time), facts in gpus.items()
        ]
        unpriced |= unpriced_models(hours)
        for name, account in accounts(hours).items():
            found[name] = found.get(name, Account()) + account
    if not watched:
        raise nothing(span)
    return Bill(
        accounts=found,
        models=Counter(models.values()),
        currency=one_currency(currencies),
        is_present=False,
        begin=span.begin,
        end=span.ends()[-1],
        unwatched=sum(each.missing() for each in watched.values()),
        unpriced_models=unpriced,
    )


def nothing(span: Span) -> NotFoundError:
    days = "the last day" if span.days == 1 else f"the last {span.days} days"
    return NotFoundError(
        f"Prometheus has no metric allotment_gpu_info of {days}",
        hint="let it scrape the node agents: docs/reference/metrics.md",
    )


def one_currency(currencies: Iterable[str]) -> str:
    """Raises `PrometheusError` for several: nothing converts them."""
    found = sorted({each for each in currencies if each})
    if len(found) > 1:
        raise PrometheusError(
            f"the prices of the GPUs are in several currencies: {', '.join(found)}",
            hint="give prices in one with --price and --currency",
        )
    return found[0] if found else ""


async def _day(
    prometheus: Prometheus, end: float, models: dict[str, str]
) -> tuple[
    dict[tuple[str, float], _GpuFacts],
    dict[tuple[str, float], list[_ShareFacts]],
    set[tuple[str, str]],
]:
    """Read a day's hours, each by GPU and its end, and the currency of each GPU's price.

    Adds the models of GPUs to `models`.
    """
    start = end - DAY_S + _HOUR_S

    async def ask(query: str) -> list[TimeSeries]:
        return await prometheus.over(query, start=start, end=end, step_s=_HOUR_S)

    names = [*_GPU_HOURS, *_SHARE_HOURS]
    answers = await asyncio.gather(*map(ask, (*_GPU_HOURS.values(), *_SHARE_HOURS.values())))
    of_gpus = dict(zip(names[: len(_GPU_HOURS)], answers, strict=False))
    of_shares = dict(zip(names[len(_GPU_HOURS) :], answers[len(_GPU_HOURS) :], strict=True))
    gpus: dict[tuple[str, float], _GpuFacts] = {}
    for each in of_gpus["present"]:
        models[each.label("gpu")] = each.label("model")
    for name, found in of_gpus.items():
        for each in found:
            for time, number in each.points:
                _add(gpus.setdefault((each.label("gpu"), time), _GpuFacts()), name, number)
    shares: dict[tuple[Key, float], _ShareFacts] = {}
    for name, found in of_shares.items():
        for each in found:
            for time, number in each.points:
                _add(shares.setdefault((share_key(each), time), _share_facts(each)), name, number)
    by_gpu: dict[tuple[str, float], list[_ShareFacts]] = {}
    for (_, time), share in shares.items():
        by_gpu.setdefault((share.gpu, time), []).append(share)
    currencies = {(each.label("gpu"), each.label("currency")) for each in of_gpus["price"]}
    watched = {key: facts for key, facts in gpus.items() if facts.present}
    return watched, by_gpu, currencies


def _add(facts: _GpuFacts | _ShareFacts, name: str, number: float) -> None:
    """Add a figure. Series of one share that differ in a label follow each other in time."""
    before = getattr(facts, name) or 0.0 if name != "price" else 0.0
    setattr(facts, name, before + number)


def share_key(series: TimeSeries) -> Key:
    return series.label("share"), series.label("device") or series.label("gpu")


def _share_facts(series: TimeSeries) -> _ShareFacts:
    return _ShareFacts(
        namespace=series.label("namespace"),
        gpu=series.label("gpu"),
        device=series.label("device"),
        mode=series.label("mode"),
    )


def _hour(gpu: _GpuFacts, model: str, shares: Iterable[_ShareFacts], prices: Prices) -> GpuHour:
    # Means with 0 where the GPU was absent: what it has for shares while it was there.
    memory = (gpu.total - gpu.reserved) / gpu.present
    price = prices.of(model)
    if price is None and gpu.price is not None:
        price = round(gpu.price * MICROS)
    parts = [_share_hour(each, memory) for each in shares]
    if gpu.outside > 0 and memory > 0:
        used = gpu.outside / memory
        parts.append(ShareHour(namespace=OUTSIDE, memory=used, memory_used=used))
    return GpuHour(model=model, present=gpu.present, price=price, shares=tuple(parts))


def _share_hour(share: _ShareFacts, memory: float) -> ShareHour:
    is_whole = bool(share.mode) and traits_of(share.mode).is_exclusive
    return ShareHour(
        namespace=share.namespace,
        memory=share.present if is_whole else share.limit / memory if memory > 0 else 0.0,
        # That of a MIG device is a part of the device; its memory says which part that is.
        guarantee=0.0 if share.device else share.guarantee,
        memory_used=share.used / memory if memory > 0 else 0.0,
        time_used=share.utilization if share.seconds is None else share.seconds,
    )
