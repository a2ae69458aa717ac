# SPDX-License-Identifier: Apache-2.0
"""Equal values share a number while it is used; a reused number has no old meaning."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from allotment.placement.cluster.numbers import Numbers

steps = st.lists(st.tuples(st.booleans(), st.integers(0, 9)), max_size=60)


@pytest.mark.parametrize("spare", [0, 2])
@given(steps=steps)
def test_a_reader_who_looks_at_what_changed_knows_every_value(
    spare: int, steps: list[tuple[bool, int]]
) -> None:
    numbers: Numbers[int] = Numbers(spare=spare)
    uses: Counter[int] = Counter()
    by_value: dict[int, int] = {}
    known: dict[int, object] = {}
    seen = 0
    for is_taken, value in steps:
        if is_taken:
            by_value[value] = numbers.take(value)
            uses[value] += 1
        elif uses[value]:
            numbers.release(by_value[value])
            uses[value] -= 1
        if value % 2:
            known |= {each: numbers.value(each) for each in numbers.since(seen).tolist()}
            seen = numbers.changes
        numbers.check_invariants([by_value[each] for each in uses.elements()])
    known |= {each: numbers.value(each) for each in numbers.since(seen).tolist()}
    assert all(known[by_value[value]] == value for value in +uses)
    assert len({by_value[value] for value in +uses}) == len(+uses)


def test_a_number_without_uses_is_given_to_another_value() -> None:
    numbers: Numbers[str] = Numbers()
    first = numbers.take("a")
    numbers.release(first)
    seen = numbers.changes
    assert numbers.take("b") == first
    assert numbers.since(seen).tolist() == [first]


def test_a_value_that_comes_back_counts_as_changed_unless_it_was_spared() -> None:
    plain: Numbers[str] = Numbers()
    sparing: Numbers[str] = Numbers(spare=1)
    for numbers, changed in ((plain, [0]), (sparing, [])):
        numbers.release(numbers.take("a"))
        seen = numbers.changes
        numbers.take("a")
        assert numbers.since(seen).tolist() == changed


def test_there_are_no_more_numbers_than_were_used_at_a_time() -> None:
    numbers: Numbers[int] = Numbers(spare=3)
    for value in range(100):
        numbers.release(numbers.take(value))
    assert len(numbers) == 4
    assert numbers.capacity == 16
