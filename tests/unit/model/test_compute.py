# SPDX-License-Identifier: Apache-2.0
"""Compute as people write it: what is meant is understood, what cannot be meant is explained."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from allotment.model.compute import (
    Compute,
    ComputeClass,
    greater,
    lesser,
    parse_compute,
    parse_weight,
    revised,
)
from allotment.model.errors import QuantityError
from allotment.model.formats import format_percent


@pytest.mark.parametrize(
    ("text", "guarantee", "ceiling"),
    [
        ("30", 3000, 3000),
        ("30:80", 3000, 8000),
        ("30%:80%", 3000, 8000),
        (" 30 : 80 ", 3000, 8000),
        ("0:100", 0, 10000),
        (":80", 0, 8000),
        ("100", 10000, 10000),
        ("12.5", 1250, 1250),
        ("0.01:.5", 1, 50),
        ("33.33:33.34", 3333, 3334),
    ],
)
def test_what_is_meant(text: str, guarantee: int, ceiling: int) -> None:
    compute = parse_compute(text)
    assert (compute.guarantee, compute.ceiling) == (guarantee, ceiling)
    assert compute.is_governed


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "empty"),
        ("0", "did you mean 0:100?"),
        ("0:0", "never let it run"),
        ("80:30", "did you mean 30:80?"),
        ("30:", "did you mean 30:100?"),
        (":", "ceiling after the colon is missing"),
        ("101", "more than a whole device"),
        ("30:100.01", "more than a whole device"),
        ("-5", "negative"),
        ("30:-5", "negative"),
        ("33.333", "more than two decimals (did you mean 33.33?)"),
        ("0.001:5", "did you mean 0.01?"),
        ("30:80:90", "not a percentage"),
        ("30Gi", "not a percentage"),
        ("half", "not a percentage"),
        ("٣٠", "not a percentage"),
        ("9" * 10_000, "too long"),
    ],
)
def test_what_cannot_be_meant_says_what_and_the_next_step(text: str, says: str) -> None:
    with pytest.raises(QuantityError) as caught:
        parse_compute(text)
    assert says in caught.value.message
    assert "30:80" in (caught.value.hint or "")
    assert ":80 (" in (caught.value.hint or "")
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(("text", "weight"), [("1", 1), (" 300 ", 300), ("10000", 10_000)])
def test_weights(text: str, weight: int) -> None:
    assert parse_weight(text) == weight


@pytest.mark.parametrize("text", ["", "abc", "0", "10001", "1.5", "-1", "٣", "1" * 10_000])
def test_what_is_no_weight_says_what_one_is(text: str) -> None:
    with pytest.raises(QuantityError) as caught:
        parse_weight(text)
    assert "is not a weight: write a whole number from 1 to 10000" in caught.value.message
    assert len(caught.value.message) < 100
    assert caught.value.exit_code == 2


@given(st.integers(0, 10_000), st.integers(1, 10_000))
def test_what_is_shown_is_what_is_read(one: int, other: int) -> None:
    compute = Compute(min(one, other), other, is_governed=True)
    assert parse_compute(str(compute)) == compute
    assert len(format_percent(one)) <= len("99.99")


@given(st.text(max_size=30))
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        compute = parse_compute(text)
    except QuantityError:
        return
    assert 0 <= compute.guarantee <= compute.ceiling <= 10_000
    assert compute.ceiling > 0


def test_who_asks_for_nothing_is_not_governed() -> None:
    assert revised(Compute()) == Compute()
    assert not Compute().is_governed


def test_each_option_changes_its_own() -> None:
    share = revised(Compute(), compute=parse_compute("30:80"))
    assert share == Compute(3000, 8000, is_governed=True)
    share = revised(share, kind=ComputeClass.LATENCY)
    share = revised(share, weight=7)
    assert share == Compute(3000, 8000, 7, ComputeClass.LATENCY, is_governed=True)
    share = revised(share, compute=parse_compute("50"))
    assert share == Compute(5000, 5000, 7, ComputeClass.LATENCY, is_governed=True)


computes = st.builds(
    lambda parts, weight, kind, is_governed: Compute(
        min(parts), max(parts), weight, kind, is_governed=is_governed
    ),
    st.tuples(st.integers(0, 10_000), st.integers(1, 10_000)),
    st.integers(1, 10_000),
    st.sampled_from(ComputeClass),
    st.booleans(),
)


@given(computes, computes)
def test_the_greater_covers_both_and_the_lesser_is_covered(one: Compute, other: Compute) -> None:
    more, less = greater(one, other), lesser(one, other)
    assert {greater(each, more) for each in (one, other, less)} == {more}
    assert {lesser(each, less) for each in (one, other, more)} == {less}
    assert (one == other) is (more == less)


def test_best_effort_may_have_a_guarantee() -> None:
    share = revised(Compute(), compute=parse_compute("10:50"), kind=ComputeClass.BESTEFFORT)
    assert (share.guarantee, share.kind) == (1000, "besteffort")


@pytest.mark.parametrize(
    ("guarantee", "ceiling", "weight"),
    [(5, 4, 1), (-1, 4, 1), (0, 0, 1), (0, 10_001, 1), (0, 1, 0), (0, 1, 10_001)],
)
def test_what_cannot_be_promised_cannot_be_made(guarantee: int, ceiling: int, weight: int) -> None:
    with pytest.raises(ValueError, match=r"\d"):
        Compute(guarantee, ceiling, weight)
