# SPDX-License-Identifier: Apache-2.0
"""Amounts: what is understood, what is refused, and that nothing else ever comes out."""

from contextlib import suppress
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from allotment.model.errors import QuantityError
from allotment.model.formats import (
    MEMORY_UNITS,
    format_bytes,
    format_count,
    format_duration,
    format_part,
)
from allotment.model.quantities import (
    LEAST_BYTES,
    MAX_BYTES,
    check_part,
    parse_bytes,
    parse_duration_ns,
    parse_memory,
    parse_whole,
)

GI = 1 << 30


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("4Gi", 4 * GI),
        ("4096Mi", 4 * GI),
        ("1.5Gi", 3 * GI // 2),
        (".5Gi", GI // 2),
        ("500M", 500_000_000),
        ("1k", 1000),
        ("1Ki", 1024),
        ("2Ti", 2 << 40),
        ("1P", 10**15),
        ("4GiB", 4 * GI),
        ("4GB", 4_000_000_000),
        ("1073741824", GI),
        (" 4Gi ", 4 * GI),
        ("1.0001", 2),  # a part of a byte is rounded up, as Kubernetes does
    ],
)
def test_memory_is_understood(text: str, size: int) -> None:
    assert parse_bytes(text) == size
    if size >= LEAST_BYTES:
        assert parse_memory(text).of(80 * GI) == size


@pytest.mark.parametrize(
    ("text", "part"),
    [("25%", Fraction(1, 4)), ("100%", Fraction(1)), ("12.5%", Fraction(1, 8)), ("1 %", None)],
)
def test_parts_are_exact(text: str, part: Fraction | None) -> None:
    if part is None:
        with pytest.raises(QuantityError):
            parse_memory(text)
    else:
        assert parse_memory(text).part == part


def test_four_quarters_are_never_more_than_the_whole() -> None:
    assert 4 * parse_memory("25%").of(4 * GI + 3) <= 4 * GI + 3


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "empty"),
        ("  ", "empty"),
        ("%", "empty"),
        ("0", "zero"),
        ("0Gi", "zero"),
        ("0.0Gi", "zero"),
        ("0%", "zero"),
        ("-1Gi", "negative"),
        ("-5%", "negative"),
        ("101%", "more than the whole"),
        ("9999999Pi", "more than any device"),
        ("NaN", "not a number"),
        ("inf", "not a number"),
        ("1e3", "not"),
        ("4XB", "unknown unit 'XB'"),
        ("4g", "did you mean Gi or G?"),
        ("4gb", "did you mean Gi or G?"),
        ("4B", "unknown unit"),
        ("4.Gi", "not a number"),
        ("Gi", "not a number"),
        ("٤Gi", "not a number"),
        ("4Gi4", "not a number"),
        ("25%%", "not a unit"),
        ("9" * 5000, "too long"),
        ("5", "did you mean 5Gi?"),
        ("0.001", "did you mean 0.001Gi?"),
        ("0.0001", "less than 1Mi"),
        ("1023Ki", "did you mean 1023Gi?"),
        ("1k", "did you mean 1Gi?"),
        ("1KiB", "did you mean 1Gi?"),
        ("0.5Mi", "did you mean 0.5Gi?"),
        ("0.0001G", "less than 1Mi"),
    ],
)
def test_what_is_no_amount_is_named(text: str, says: str) -> None:
    with pytest.raises(QuantityError) as caught:
        parse_memory(text)
    assert says in caught.value.message
    assert caught.value.exit_code == 2
    assert caught.value.hint


# Text that comes close: a free choice of letters hardly ever makes a number with a unit.
almost = st.from_regex(r"[-+]?[0-9.]{0,6} ?[kKMGTPi]{0,2}[iB%]{0,2}", fullmatch=True)


@given(st.text(max_size=80) | almost)
def test_any_text_is_an_amount_or_a_quantity_error(text: str) -> None:
    for parse in (parse_memory, parse_bytes, parse_duration_ns):
        with suppress(QuantityError):
            parse(text)


@given(st.integers(1, MAX_BYTES), st.sampled_from(sorted(MEMORY_UNITS)))
def test_whole_units_come_back(number: int, unit: str) -> None:
    size = number * MEMORY_UNITS[unit]
    if size > MAX_BYTES:
        with pytest.raises(QuantityError):
            parse_bytes(f"{number}{unit}")
    else:
        assert parse_bytes(f"{number}{unit}") == size


@given(st.integers(1, MAX_BYTES // 2))
def test_what_is_shown_can_be_read(size: int) -> None:
    shown = format_bytes(size)
    text = shown if shown.endswith("i") else shown.removesuffix("B")
    assert abs(parse_bytes(text) - size) <= size * 0.06


@pytest.mark.parametrize(
    ("size", "shown"),
    [(0, "0B"), (100, "100B"), (4 * GI, "4Gi"), (4 * GI + 1, "4Gi"), (3 * GI // 2, "1.5Gi"),
     (99.6, "100B"), (None, "-")],
)  # fmt: skip
def test_bytes_are_shown(size: float | None, shown: str) -> None:
    assert format_bytes(size) == shown


@pytest.mark.parametrize(("part", "shown"), [(0.304, "30 %"), (1.5, "150 %"), (None, "-")])
def test_parts_are_shown(part: float | None, shown: str) -> None:
    assert format_part(part) == shown


def test_one_is_not_many() -> None:
    assert [format_count(number, "share") for number in range(3)] == [
        "0 shares", "1 share", "2 shares",
    ]  # fmt: skip
    assert format_count(1, "process", "processes") == "1 process"
    assert format_count(2, "process", "processes") == "2 processes"


@pytest.mark.parametrize(
    ("text", "nanoseconds"),
    [
        ("2ms", 2_000_000),
        ("250us", 250_000),
        ("1.5s", 1_500_000_000),
        ("1h", 3600 * 10**9),
        ("0", 0),
    ],
)
def test_durations(text: str, nanoseconds: int) -> None:
    assert parse_duration_ns(text) == nanoseconds


@pytest.mark.parametrize("text", ["2", "2min", "-1s", "", "1e3s", "99999999999h"])
def test_what_is_no_duration_is_refused(text: str) -> None:
    with pytest.raises(QuantityError):
        parse_duration_ns(text)


@pytest.mark.parametrize(
    ("nanoseconds", "shown"), [(5, "5ns"), (1500, "1.5us"), (2_000_000, "2ms"), (10**9, "1s")]
)
def test_durations_are_shown(nanoseconds: int, shown: str) -> None:
    assert format_duration(nanoseconds) == shown


def test_a_part_that_comes_to_nothing_is_refused() -> None:
    check_part(parse_memory("1Mi"), 80 * GI)
    check_part(parse_memory("0.01%"), 80 * GI)
    with pytest.raises(QuantityError, match="less than 1Mi"):
        check_part(parse_memory("0.0001%"), 80 * GI)


@pytest.mark.parametrize(
    ("text", "amount"),
    [
        ("0", 0),
        ("30", 30),
        ("+30", 30),
        ("4Gi", 4 * GI),
        ("0.5Gi", GI // 2),
        ("100k", 100_000),
        ("1e9", 10**9),
        ("12E2", 1200),
        ("1E", 10**18),
        ("2Ei", 2 << 60),
        ("1000m", 1),
        ("1e-0", 1),
        ("10e-1", 1),
        ("3.", 3),
        ("9223372036854775807", MAX_BYTES),
    ],
)
def test_a_quantity_of_whole_things_is_what_kubernetes_takes_it_for(text: str, amount: int) -> None:
    assert parse_whole(text) == amount


@pytest.mark.parametrize(
    "text",
    [
        "",
        "500m",
        "1.5",
        "-1",
        "1 Gi",
        "Gi",
        "1gi",
        "1GB",
        "0x10",
        "1e",
        "1e9999",
        "9Ei",
        "1_0",
        "٣",
    ],
)
def test_what_is_no_quantity_of_whole_things_is_refused_with_its_text(text: str) -> None:
    with pytest.raises(QuantityError) as caught:
        parse_whole(text)
    assert repr(text) in caught.value.message
    assert caught.value.hint


@given(st.text(max_size=80) | st.from_regex(r"[0-9]{1,70}(\.[0-9]*)?[a-zA-Z]{0,2}[0-9]{0,9}"))
def test_no_text_of_a_quantity_raises_anything_else(text: str) -> None:
    with suppress(QuantityError):
        assert 0 <= parse_whole(text) <= MAX_BYTES
