# SPDX-License-Identifier: Apache-2.0
"""Measuring where other programs may take the machine for a while."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
_ROUNDS = 5


def undisturbed(measure: Callable[[], T], is_undisturbed: Callable[[T], bool]) -> T:
    """Return the first measurement that other load has not spoilt; else the last of five.

    Load moves a figure in one direction only, so that one good round shows what the code can do,
    and what is broken is bad in every round. Assert on what is returned; what load cannot move
    belongs into `measure`, where it has to hold in every round.
    """
    for _ in range(_ROUNDS - 1):
        found = measure()
        if is_undisturbed(found):
            return found
    return measure()
