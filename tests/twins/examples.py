# SPDX-License-Identifier: Apache-2.0
"""How many examples a property test takes, where one costs much more or less than usual."""

from __future__ import annotations

from hypothesis import settings


def examples(factor: float) -> int:
    """So many times the number of the profile in force (tests/conftest.py)."""
    return max(1, round(settings().max_examples * factor))
