# SPDX-License-Identifier: Apache-2.0
"""Waiting with an end: nothing here waits longer than it says, or fails without a word."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, TypeVar

T = TypeVar("T")

PATIENCE_S: Final = 90.0
"""For what takes seconds on an idle machine: a busy one may take ten times as long. What comes soon
costs no more for it."""

_LONGEST_PAUSE_S: Final = 0.5


class TestbedError(Exception):
    """Something of the test cluster did not come about; the message has the end of its log."""

    # Its name begins like a test's; pytest asks here.
    __test__ = False


def wait_until(
    condition: Callable[[], T | None],
    what: str,
    *,
    timeout_s: float = PATIENCE_S,
    every_s: float = 0.05,
    explain: Callable[[], str] = str,
) -> T:
    """Calls `condition` until it returns something true, and returns that.

    Args:
        condition: May raise TestbedError to end the waiting, as when the process has died.
        what: What is waited for, as in "no {what} after 5 s".
        timeout_s: For how long.
        every_s: The pause between two calls. It grows with the time that was waited, since each
            look takes time from what is waited for.
        explain: What to add to the error: the tail of a log, a pod's state.

    Raises:
        TestbedError: it did not come about in time.
    """
    begin = time.monotonic()
    while True:
        # Asked once more after the end: a machine that was busy elsewhere is not to blame.
        waited = time.monotonic() - begin
        is_last = waited >= timeout_s
        found = condition()
        if found:
            return found
        if is_last:
            raise TestbedError(f"no {what} after {timeout_s:g} s\n{explain()}")
        time.sleep(max(every_s, min(waited / 20, _LONGEST_PAUSE_S)))


def tail(path: Path, *, lines: int = 25) -> str:
    """The last lines of a log, under its name; a note where there is none."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        return f"({error})"
    return "\n".join([f"--- {path}", *text.splitlines()[-lines:]])
