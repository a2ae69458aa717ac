# SPDX-License-Identifier: Apache-2.0
"""Fault points: where a test lets a process be killed, to see what is left and what mends it.

`step("prepare.drafted")` does nothing, unless ALLOTMENT_KILL_AT names that step: then the process
kills itself there, as if the machine's memory had run out at this instruction. `NAME:3` is the
third time that it gets there. Nothing is set up, so that a step costs one look at a dictionary.
"""

import os
import signal

__all__ = ["KILL_VARIABLE", "step"]

KILL_VARIABLE = "ALLOTMENT_KILL_AT"

_passed: dict[str, int] = {}


def step(name: str) -> None:
    """Mark that everything up to here is done, and nothing after it."""
    wanted = os.environ.get(KILL_VARIABLE)
    if wanted is not None:
        _reach(name, wanted)


def _reach(name: str, wanted: str) -> None:
    point, _, times = wanted.partition(":")
    if point != name:
        return
    _passed[name] = _passed.get(name, 0) + 1
    if _passed[name] == int(times or 1):
        os.kill(os.getpid(), signal.SIGKILL)
