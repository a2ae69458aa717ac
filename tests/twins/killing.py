# SPDX-License-Identifier: Apache-2.0
"""Kills an operation at any of its steps."""

import contextlib
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from allotment.model.errors import DoesNotFitError, UsageError
from allotment.shares.failpoints import KILL_VARIABLE

_KILLED = 77
_STEPS = frozenset(
    {
        *("open", "os.chmod", "os.link", "os.mkdir", "os.remove", "os.rename", "os.rmdir"),
        "shutil.rmtree",
    }
)
"""Everything that an operation does outside of its process; a kill comes before one of them."""


def kill_after(steps: int, root: Path, operation: Callable[[], object]) -> bool:
    """Run an operation in a child that dies before its step of that number below a folder.

    Return whether it died: a shorter operation, or one that is refused, ends by itself.
    """
    child = os.fork()
    if child:
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert code in {0, _KILLED}
        return code == _KILLED
    left = steps

    def count(event: str, arguments: tuple[object, ...]) -> None:
        nonlocal left
        if event in _STEPS and any(str(each).startswith(str(root)) for each in arguments[:2]):
            left -= 1
            if left < 0:
                os._exit(_KILLED)

    sys.addaudithook(count)
    try:
        operation()
    except (DoesNotFitError, UsageError):
        pass  # refused before it came so far
    except BaseException:  # noqa: BLE001 - the child must not go on as the test
        os._exit(1)
    os._exit(0)


def killed_at(point: str, operation: Callable[[], object]) -> bool:
    """Run an operation in a child that dies at a failpoint; return whether it came there."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    os.environ[KILL_VARIABLE] = point
    with contextlib.suppress(BaseException):  # the child must not go on as the test
        operation()
    os._exit(0)
