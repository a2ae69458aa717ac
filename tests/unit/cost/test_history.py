# SPDX-License-Identifier: Apache-2.0
"""What follows from Prometheus' answers: hours of GPUs, and the peaks of shares."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from typing import Any

import pytest

from allotment.cost.bills import Bill
from allotment.cost.history import Span, past_bill
from allotment.cost.peaks import share_histories
from allotment.cost.prices import Prices, prices_of
from allotment.cost.prometheus import Prometheus, PrometheusError, TimeSeries
from allotment.cost.splitting import GPU_HOUR, OUTSIDE, Split
from allotment.cost.workloads import ShareHistory

GI = 1 << 30
SPAN = Span(1_000_000_200.0, 2)
A100 = "NVIDIA A100-SXM4-80GB"
SHARE = {"share": "s1", "gpu": "GPU-a", "mode": "soft", "namespace": "ml", "pod": "web-0"}

Answers = Mapping[str, list[tuple[Mapping[str, str], float]]]
"""By metric: labels and the value at each hour, or day."""


class PrometheusTwin(Prometheus):
    """Answers by the metric that a query names, but for the hours in `gaps`."""

    def __init__(self, answers: Answers, gaps: range = range(0)) -> None:
        self._answers, self._gaps = answers, gaps

    async def instant(self, query: str, at: float) -> list[TimeSeries]:
        (metric,) = set(re.findall(r"allotment_\w+", query))
        if "watched" in self._answers and query.startswith("count_over_time"):
            metric = "watched"
        return [
            TimeSeries(labels, ((at, value),)) for labels, value in self._answers.get(metric, [])
        ]

    async def over(
        self, query: str, *, start: float, end: float, step_s: float
    ) -> list[TimeSeries]:
        times = range(int(start), int(end) + 1, int(step_s))
        shown = [at for at in times if (at - SPAN.begin) // 3600 - 1 not in self._gaps]
        (metric,) = set(re.findall(r"allotment_\w+", query))
        if query.startswith("count_over_time"):
            metric = f"present {metric}"
        return [
            TimeSeries(labels, tuple((float(at), value) for at in shown))
            for labels, value in self._answers.get(metric, [])
        ]


def gpu(uuid: str = "GPU-a", **more: float) -> Answers:
    labels = {"gpu": uuid}
    figures = {"memory_total_bytes": 81.0 * GI, "memory_reserved_bytes": 1.0 * GI, **more}
    return {
        "present allotment_gpu_info": [({**labels, "model": A100}, 1.0)],
        "allotment_gpu_info": [({**labels, "model": A100}, 1.0)],
        **{f"allotment_gpu_{name}": [(labels, value)] for name, value in figures.items()},
    }


def share(labels: Mapping[str, str] = SHARE, **figures: float) -> Answers:
    return {
        "present allotment_share_memory_limit_bytes": [(labels, 1.0)],
        **{f"allotment_share_{name}": [(labels, value)] for name, value in figures.items()},
    }


def paid(answers: Answers, prices: Prices = Prices(), gaps: range = range(0)) -> Bill:  # noqa: B008
    return asyncio.run(past_bill(PrometheusTwin(answers, gaps), SPAN, prices))


def test_hours_are_split_and_added_up() -> None:
    past = paid(
        {
            **gpu(memory_outside_bytes=8.0 * GI),
            **share(
                memory_limit_bytes=20.0 * GI, memory_used_bytes=10.0 * GI, gpu_seconds_total=0.1
            ),
        },
        prices_of({"a100": 2.5}, "EUR"),
    )
    assert past.accounts[None].hours == Split(unallocated=round(48 * 0.65 * GPU_HOUR))
    assert past.accounts[OUTSIDE].hours.held == round(48 * 0.1 * GPU_HOUR)
    ml = past.accounts["ml"]
    assert (ml.hours.paid, ml.hours.unused) == (12 * GPU_HOUR, 6 * GPU_HOUR)
    assert ml.money.paid == 12 * GPU_HOUR * 2_500_000
    assert (past.models, past.currency, past.unwatched) == ({A100: 1}, "EUR", 0)


def test_labels_that_prometheus_renamed_are_found() -> None:
    labels = {**SHARE, "namespace": "agents", "exported_namespace": "lab"}
    past = paid({**gpu(), **share(labels, memory_limit_bytes=20.0 * GI)})
    assert past.accounts.keys() == {None, "lab"}


def test_a_whole_gpu_is_allocated_whatever_its_limit_says() -> None:
    past = paid({**gpu(), **share({**SHARE, "mode": "exclusive"}, memory_limit_bytes=70.0 * GI)})
    assert past.accounts["ml"].hours.allocated == 48 * GPU_HOUR


def test_a_mig_device_counts_by_its_memory() -> None:
    labels = {**SHARE, "mode": "mig", "device": "MIG-1"}
    figures = {"memory_limit_bytes": 10.0 * GI, "compute_guaranteed_ratio": 1.0}
    account = paid({**gpu(), **share(labels, **figures, memory_used_bytes=5.0 * GI)}).accounts["ml"]
    assert account.hours.allocated == 6 * GPU_HOUR
    assert account.unmeasured == account.hours.held == 3 * GPU_HOUR


def test_hours_without_figures_are_counted_apart() -> None:
    past = paid(gpu(), gaps=range(10, 15))
    assert past.accounts[None].hours.paid == 43 * GPU_HOUR
    assert past.unwatched == 5
    assert paid(gpu(), gaps=range(40, 48)).unwatched == 0  # it has left
    assert past.unpriced_models == {A100}


def test_prices_of_the_agents_are_in_one_currency() -> None:
    prices = [({"gpu": "GPU-a", "currency": "EUR"}, 2.5)]
    answers: dict[str, Any] = {**gpu(), "allotment_gpu_price_per_hour": prices}
    past = paid(answers)
    assert (past.currency, past.accounts[None].money.paid) == ("EUR", 48 * GPU_HOUR * 2_500_000)
    with pytest.raises(PrometheusError, match="EUR, USD"):
        paid(answers, prices_of({"t4": 1}, "USD"))
    # A price that is given goes before.
    assert paid(answers, prices_of({"a100": 1}, "USD")).currency == "USD"


def peaks(answers: Answers) -> ShareHistory:
    (found,) = asyncio.run(share_histories(PrometheusTwin(answers), SPAN, Prices())).shares
    return found


def test_the_peaks_of_a_share() -> None:
    figures: dict[str, Any] = {
        "memory_limit_bytes": 20.0 * GI,
        "memory_peak_bytes": 7.0 * GI,
        "memory_used_bytes": 6.0 * GI,
        "compute_guaranteed_ratio": 0.5,
        "gpu_seconds_total": 0.25,
        "memory_refusals_total": 3.0,
    }
    answers: dict[str, Any] = {**gpu(), **share(**figures), "watched": [(SHARE, 3600.0)]}
    found = peaks(answers)
    assert (found.workload, found.limit, found.peak) == ("web", 20 * GI, 7 * GI)
    assert (found.watched_s, found.is_present, found.is_sampled) == ((3600, 3600), True, False)
    # The counter had as much when the range began.
    assert (found.refusals, found.gpu_memory) == (0, 80 * GI)
    del answers["allotment_share_memory_peak_bytes"]
    sampled = peaks(answers)
    assert (sampled.peak, sampled.is_sampled) == (6 * GI, True)
