# SPDX-License-Identifier: Apache-2.0
"""Flags and variables mean what they mean to Go and urfave/cli."""

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from allotment.agent.config.options import parse_bool, parse_interval, parse_list, parse_numbers
from allotment.model.errors import UsageError


@pytest.mark.parametrize("text", ["1", "t", "T", "true", "TRUE", "True"])
def test_true(text: str) -> None:
    assert parse_bool(text)


@pytest.mark.parametrize("text", ["0", "f", "F", "false", "FALSE", "False", ""])
def test_false_and_an_empty_text_is(text: str) -> None:
    assert not parse_bool(text)


@pytest.mark.parametrize("text", ["yes", "on", "tRUE", " true", "2"])
def test_no_bool(text: str) -> None:
    with pytest.raises(UsageError, match="neither true nor false"):
        parse_bool(text)


@pytest.mark.parametrize(
    ("texts", "values"),
    [
        (["envvar"], ("envvar",)),
        (["envvar, cdi-cri"], ("envvar", "cdi-cri")),
        (["a", "b,a"], ("a", "b")),
        ([""], ()),
        ([",,"], ()),
    ],
    ids=str,
)
def test_lists_have_commas_and_may_be_repeated(texts: list[str], values: tuple[str, ...]) -> None:
    assert parse_list(texts) == values


def test_numbers() -> None:
    assert parse_numbers(["0, 1", "2"]) == (0, 1, 2)
    with pytest.raises(UsageError, match="'x' is not a whole number"):
        parse_numbers(["0,x"])


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("60s", 60),
        ("1m30s", 90),
        ("1.5h", 5400),
        ("1h0m0.5s", 3600.5),
        (".5s", 0.5),
        ("5.s", 5),
        ("250ms", 0.25),
        ("7µs", 7e-6),
        ("7μs", 7e-6),
        ("infinite", None),
    ],
)
def test_intervals(text: str, seconds: float | None) -> None:
    assert parse_interval(text) == seconds


@pytest.mark.parametrize("text", ["", "60", "1d", "-1s", "0s", "1m 30s", "s", "Infinite", "9" * 70])
def test_no_interval(text: str) -> None:
    with pytest.raises(UsageError, match="is not a"):
        parse_interval(text)


@given(st.text(max_size=30))
def test_no_text_raises_anything_else(text: str) -> None:
    for parse in (parse_bool, parse_interval, lambda each: parse_numbers([each])):
        with contextlib.suppress(UsageError):
            parse(text)


@given(st.integers(1, 99), st.integers(0, 59), st.integers(0, 59))
def test_pieces_add_up(hours: int, minutes: int, seconds: int) -> None:
    text = f"{hours}h{minutes}m{seconds}s"
    assert parse_interval(text) == hours * 3600 + minutes * 60 + seconds
