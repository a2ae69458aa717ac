# SPDX-License-Identifier: Apache-2.0
"""Failpoints: named steps where a test kills a process, to check the recovery.

`failpoint("prepare.drafted")` does nothing unless ALLOTMENT_KILL_AT names that step: then the
process kills itself there, like the kernel's OOM killer. `NAME:3` is its third pass. Without a test
it costs one dictionary access.
"""

import os
import signal

KILL_VARIABLE = "ALLOTMENT_KILL_AT"

_passed: dict[str, int] = {}


def failpoint(name: str) -> None:
    """Mark a step: everything before it is done, nothing after it."""
    target = os.environ.get(KILL_VARIABLE)
    if target is None:
        return
    point, _, passes = target.partition(":")
    if point == name:
        _passed[name] = _passed.get(name, 0) + 1
        if _passed[name] == int(passes or 1):
            os.kill(os.getpid(), signal.SIGKILL)
