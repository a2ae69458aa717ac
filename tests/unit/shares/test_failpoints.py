# SPDX-License-Identifier: Apache-2.0
"""Fault points: nothing, unless a test names one."""

import os
import signal
import subprocess
import sys

import pytest

PROGRAM = """
from allotment.shares.failpoints import failpoint
for number in range(3):
    failpoint("one.done")
    failpoint("other.done")
    print(number, flush=True)
"""


@pytest.mark.parametrize(
    ("point", "passed"),
    [("", 3), ("none.done", 3), ("one.done", 0), ("other.done:2", 1), ("one.done:9", 3)],
)
def test_a_process_ends_at_the_point_that_is_named(point: str, passed: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "ALLOTMENT_KILL_AT": point},
    )
    assert done.stdout.split() == [str(number) for number in range(passed)]
    assert done.returncode == (0 if passed == 3 else -signal.SIGKILL)
