# SPDX-License-Identifier: Apache-2.0
"""Waiting for what programs do in their own time: a share, a state, a line in a file."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def wait_until(
    holds: Callable[[], T], what: str = "it did not come", *, patience_s: float = 60
) -> T:
    """Return what `holds` returns once that is true; fail with `what` and what there was instead.

    What comes soon costs nothing, so that `patience_s` is for the slowest of machines.
    """
    deadline = time.monotonic() + patience_s
    while True:
        # Asked once more after the end: a machine that was busy elsewhere is not to blame.
        is_last = time.monotonic() >= deadline
        found = holds()
        if found:
            return found
        assert not is_last, f"{what}: {found!r} after {patience_s:g} s"
        time.sleep(0.02)
