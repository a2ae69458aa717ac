# SPDX-License-Identifier: Apache-2.0
"""Values of annotations: what is written reads back, and any text is a value or refused."""

from collections.abc import Callable
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from allotment.dialects.own.annotations import (
    TOPOLOGIES,
    is_weights,
    parse_items,
    parse_part,
    parse_rules,
    parse_tag,
    parse_weights,
    parse_words,
    part_amount,
    written_items,
    written_part,
    written_rules,
    written_tag,
    written_weights,
)
from allotment.model.errors import UsageError
from allotment.model.requests import DeviceWeights, ModelRule


@given(st.text())
def test_any_text_is_a_tag_that_nothing_is_seen_in(text: str) -> None:
    shown = written_tag(text)
    assert parse_tag(shown) == text
    assert not set(shown) & set(',;="')
    assert shown == shown.strip()
    assert shown.isprintable()


@given(st.lists(st.text(min_size=1), min_size=1, max_size=5))
def test_lists(items: list[str]) -> None:
    assert parse_items(written_items(items)) == tuple(items)
    rules = [ModelRule(text, is_exact=bool(len(text) % 2)) for text in items if text.strip()]
    assert not rules or parse_rules(written_rules(rules)) == tuple(rules)


@pytest.mark.parametrize(
    ("part", "text"),
    [
        (Fraction(1), "100%"),
        (Fraction(1, 2), "50%"),
        (Fraction(1, 8), "12.5%"),
        (Fraction(1, 10_000), "0.01%"),
        (Fraction(3, 1000), "0.3%"),
        (Fraction(1, 3), "1/3"),
        (Fraction(1, 7 * 2), "1/14"),
        (Fraction(1, 2**60), f"1/{2**60}"),
    ],
)
def test_parts(part: Fraction, text: str) -> None:
    assert written_part(part) == text


@given(st.fractions(Fraction(1, 10**15), 1, max_denominator=10**17))
def test_parts_read_back(part: Fraction) -> None:
    assert parse_part(written_part(part)) == part_amount(part)


def test_weights() -> None:
    weights = DeviceWeights(shares=1, compute=0, memory=3)
    assert parse_weights(written_weights(weights)) == weights
    assert parse_weights(" memory = 2 ") == DeviceWeights(shares=0, compute=0, memory=2)
    assert is_weights("shares=1,compute=1")
    assert not is_weights("train=shares=1,compute=1")


@pytest.mark.parametrize(
    ("parse", "text", "said"),
    [
        (parse_tag, "a,b", "contains ','"),
        (parse_tag, "%FF", "is not valid text"),
        (parse_items, "", "it is empty"),
        (parse_items, "a,,b", "one of its items is empty"),
        (parse_items, ",".join("a" * 300), "more than 256"),
        (parse_rules, '""', "a model's name is empty"),
        (parse_rules, 'a"b', "contains '\"'"),
        (parse_part, "4Gi", "is not a part of each GPU"),
        (parse_part, "3/2", "is not a part of each GPU"),
        (parse_part, "0/2", "is not a part of each GPU"),
        (parse_part, "101%", "more than the whole device"),
        (parse_part, "0%", "it is zero"),
        (parse_weights, "shares=0", "no weight above 0"),
        (parse_weights, "shares=1,shares=2", "shares is listed twice"),
        (parse_weights, f"shares={'9' * 5000}", "above 1000000"),
        (parse_weights, "slots=1", "no weight above 0"),
        (lambda text: parse_words(text, TOPOLOGIES), "nvlnk", "did you mean 'nvlink'?"),
        (lambda text: parse_words(text, TOPOLOGIES), "numa,numa", "it has numa twice"),
    ],
)
def test_refused(parse: Callable[[str], object], text: str, said: str) -> None:
    with pytest.raises(UsageError) as refused:
        parse(text)
    assert said in refused.value.message
    assert refused.value.hint


@given(st.text(max_size=40) | st.from_regex(r"[0-9a-z%/,;=\"]{0,12}", fullmatch=True))
def test_any_text_is_a_value_or_refused(text: str) -> None:
    for parse in (parse_tag, parse_items, parse_rules, parse_part, parse_weights):
        refused: UsageError | None = None
        try:
            parse(text)
        except UsageError as error:
            refused = error
        assert refused is None or refused.hint
