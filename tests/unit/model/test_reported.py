# SPDX-License-Identifier: Apache-2.0
"""Each thing is reported once, until it changes or is over."""

from allotment.model.reported import Reported


def test_a_text_is_new_until_it_is_reported_and_after_it_is_over() -> None:
    reported = Reported[str]()
    assert reported.is_new("disk", "full")
    assert not reported.is_new("disk", "full")
    assert reported.is_new("disk", "gone")
    reported.over("disk")
    assert reported.is_new("disk", "gone")


def test_of_all_that_hold_the_new_ones_are_reported_in_order() -> None:
    reported = Reported[int]()
    assert reported.new_of([3, 1]) == [3, 1]
    assert reported.new_of([1, 2, 3]) == [2]
    assert reported.new_of([2]) == []
    assert reported.new_of([1, 2]) == [1]
