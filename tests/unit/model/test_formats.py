# SPDX-License-Identifier: Apache-2.0
"""Amounts and processes as messages show them."""

from allotment.model.formats import format_pids


def test_the_first_processes_are_named_and_the_others_counted() -> None:
    assert format_pids({18, 17}) == "17, 18"
    assert format_pids(range(1, 9)) == "1, 2, 3, 4, 5, 6, 7, 8"
    assert format_pids(range(1, 12)) == "1, 2, 3, 4, 5, 6, 7, 8 and 3 more"
