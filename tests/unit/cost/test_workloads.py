# SPDX-License-Identifier: Apache-2.0
"""Workloads and their advice."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from allotment.cost.workloads import (
    Advice,
    AdviceRules,
    AdviceVerdict,
    ShareHistory,
    advise,
    workload_name,
    workloads,
)
from allotment.model.modes import MODES
from allotment.model.structs import replace

GI = 1 << 30
DAY = 86400.0
RULES = AdviceRules()


@pytest.mark.parametrize(
    ("pod", "name"),
    [
        ("web-6d4b75cb6d-x2x7k", "web"),
        ("web-api-5c9f-6d4b75cb6d-x2x7k", "web-api-5c9f"),
        ("db-0", "db"),
        ("db-12", "db"),
        ("fluent-x2x7k", "fluent"),
        ("nightly-28912345-x2x7k", "nightly"),
        ("sweep-3-x2x7k", "sweep"),
        ("train", "train"),
        ("train-small", "train-small"),  # vowels are in no name that Kubernetes makes
        ("llama-70b", "llama-70b"),
        ("x2x7k", "x2x7k"),
    ],
)
def test_a_workload_has_the_name_of_its_pods(pod: str, name: str) -> None:
    assert workload_name(pod) == name


def share(**more: Any) -> ShareHistory:  # noqa: ANN401 - its fields
    made = ShareHistory(
        namespace="ml",
        workload="web",
        container="main",
        share="1",
        mode="soft",
        gpu_memory=80 * GI,
        price=2_500_000,
        limit=20 * GI,
        guarantee=0.5,
        peak=7 * GI,
        time_p99=0.2,
        gpu_seconds=100.0,
        watched_s=(DAY, DAY),
    )
    return replace(made, **more)


def advised(*shares: ShareHistory, rules: AdviceRules = RULES) -> Advice:
    (workload,) = workloads(shares)
    return advise(workload, rules)


def test_less_where_the_peaks_are_low() -> None:
    advice = advised(share())
    assert advice.verdict is AdviceVerdict.LESS
    assert (advice.memory, advice.guarantee) == (int(8.5 * GI), 0.25)  # 8.4Gi and 24 %
    assert (advice.freed_bytes, advice.freed_compute) == (int(11.5 * GI), 0.25)
    assert advice.saved == round(0.25 * 2_500_000 * 730)  # of 50 %, the larger part


def test_replicas_are_one_workload() -> None:
    first = share(watched_s=(DAY, 0.0), is_present=False, peak=9 * GI, limit=40 * GI)
    second, third = share(share="2", watched_s=(0.0, DAY)), share(share="3", watched_s=(0.0, DAY))
    advice = advised(first, second, third)
    assert (advice.workload.devices, advice.workload.watched_s) == (2, 2 * DAY)
    # What it asks for is the newest, its peak that of all.
    assert (advice.workload.limit, advice.workload.peak) == (20 * GI, 9 * GI)
    assert advice.freed_bytes == 2 * (20 * GI - 11 * GI)
    ended = advised(first)
    assert (ended.workload.devices, ended.workload.limit) == (0, 40 * GI)
    assert "ended" in ended.reasons


def test_more_where_memory_was_refused() -> None:
    advice = advised(share(peak=20 * GI, refusals=3))
    assert (advice.verdict, advice.memory) == (AdviceVerdict.MORE, 25 * GI)
    assert advice.reasons[0] == "refused memory 3 times"
    whole = advised(share(limit=80 * GI, peak=80 * GI, guarantee=0.0, refusals=1))
    assert (whole.verdict, whole.memory) == (AdviceVerdict.KEEP, 80 * GI)
    assert "oversubscription" in whole.reasons[1]
    # A program that was refused its first allocation has no peak.
    first = advised(share(peak=0, time_p99=0.0, gpu_seconds=0.0, refusals=1))
    assert (first.verdict, first.memory) == (AdviceVerdict.MORE, 25 * GI)
    # Those of an earlier, smaller size say nothing of this one.
    before = share(limit=8 * GI, peak=8 * GI, refusals=9, is_present=False)
    assert advised(before, share(share="2")).workload.refusals == 0


def test_more_where_launches_were_held_back() -> None:
    starving = {"held_seconds": DAY}
    advice = advised(share(time_p99=0.5, **starving))
    assert (advice.verdict, advice.guarantee) == (AdviceVerdict.MORE, 0.6)
    assert advice.memory == int(8.5 * GI)
    # At its ceiling a larger guarantee would not help.
    limited = advised(share(guarantee=0.3, ceiling=0.3, time_p99=0.29, **starving))
    assert (limited.guarantee, limited.ceiling) == (None, 0.4)
    # Without a peak of compute, a step more.
    assert advised(share(time_p99=None, **starving)).guarantee == 0.55


def test_nothing_from_too_short_a_time() -> None:
    advice = advised(share(watched_s=(3600.0,), refusals=2))
    assert (advice.verdict, advice.memory, advice.freed_bytes) == (AdviceVerdict.WAIT, None, 0)
    assert advice.reasons == ("refused memory 2 times",)
    assert (
        advised(share(watched_s=(3600.0,)), rules=AdviceRules(least_s=60)).verdict
        is AdviceVerdict.LESS
    )


def test_a_workload_that_never_used_its_gpu() -> None:
    advice = advised(share(peak=0, time_p99=0.0, gpu_seconds=0.0))
    assert (advice.verdict, advice.freed_bytes) == (AdviceVerdict.REMOVE, 20 * GI)
    holds = advised(share(time_p99=0.0, gpu_seconds=0.0))
    assert holds.reasons == ("holds memory and never computed",)


def test_what_is_close_stays() -> None:
    assert advised(share(peak=19 * GI, guarantee=0.0)).verdict is AdviceVerdict.KEEP
    assert advised(share(peak=19 * GI, guarantee=0.0)).memory == 20 * GI


def test_memory_beyond_the_gpu_is_no_peak_above_the_limit() -> None:
    host = advised(share(limit=100 * GI, peak=85 * GI, guarantee=0.0))
    assert (host.verdict, host.memory) == (AdviceVerdict.KEEP, 100 * GI)
    unknown = advised(share(gpu_memory=0))
    assert unknown.memory == int(8.5 * GI)


def test_a_mode_that_suits_better() -> None:
    whole = {"limit": 80 * GI, "guarantee": 0.0, "is_sampled": True}
    small = advised(share(mode="exclusive", **whole))
    assert (small.mode, small.memory) == ("soft", int(8.5 * GI))
    large = advised(share(mode="exclusive", peak=60 * GI, **whole))
    assert (large.mode, large.verdict, large.memory) == ("", AdviceVerdict.KEEP, None)
    assert advised(share(mode="timeslice", **whole)).mode == "soft"
    busy = share(limit=80 * GI, peak=79 * GI, time_p99=0.9, guarantee=0.0)
    assert advised(busy).mode == "exclusive"


HISTORIES = st.builds(
    share,
    share=st.text("ab", min_size=1, max_size=2),
    mode=st.sampled_from(MODES),
    price=st.none() | st.integers(0, 10**12),
    gpu_memory=st.integers(0, 200 * GI),
    limit=st.integers(0, 200 * GI),
    guarantee=st.floats(0, 1),
    ceiling=st.floats(0.01, 1),
    peak=st.none() | st.integers(0, 200 * GI),
    used_p99=st.none() | st.integers(0, 200 * GI),
    time_p99=st.none() | st.floats(0, 4),
    gpu_seconds=st.none() | st.floats(0, 1e9),
    refusals=st.integers(0, 100),
    held_seconds=st.floats(0, 1e9),
    watched_s=st.lists(st.floats(0, DAY), min_size=2, max_size=2).map(tuple),
    is_present=st.booleans(),
)


@given(st.lists(HISTORIES, min_size=1, max_size=4))
def test_no_advice_takes_what_was_needed(shares: list[ShareHistory]) -> None:
    advice = advised(*shares)
    workload = advice.workload
    assert 0 <= workload.watched_s <= 2 * DAY
    if advice.verdict is AdviceVerdict.REMOVE:
        assert not workload.peak
        return
    if advice.memory is not None and advice.memory < workload.limit:
        assert workload.peak is not None
        assert not workload.refusals
        assert advice.memory >= workload.peak
    if advice.guarantee is not None and advice.guarantee < workload.guarantee:
        assert workload.held <= RULES.held
        assert workload.time_p99 is not None
        assert advice.guarantee >= min(workload.time_p99, workload.guarantee)
    if workload.watched_s < RULES.least_s:
        assert advice.memory is advice.guarantee is advice.ceiling is None
