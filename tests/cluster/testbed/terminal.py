# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C for this process alone, also below `make`.

A terminal's Ctrl-C goes to all of the foreground's process group, so that `make` would end with
`*** Interrupt` and an error's status although the program below it ended in order. As a group of
its own in the foreground, this process is the only one that hears of it.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def foreground() -> Iterator[None]:
    """Takes the terminal for the length of a `with`; nothing where there is none to take."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # no terminal, or in its background
            terminal = os.open("/dev/tty", os.O_RDWR | os.O_CLOEXEC)
            stack.callback(os.close, terminal)
            before = os.tcgetpgrp(terminal)
            # The leader of the group is who the shell started: there is nobody above to spare.
            if before == os.getpgrp() != os.getpid():
                _take(terminal)
                stack.callback(_give_back, terminal, before)
        yield


def _take(terminal: int) -> None:
    # The shell waits for `make` and would not see this process stop. A function and not SIG_IGN,
    # which programs started from here would inherit.
    signal.signal(signal.SIGTSTP, lambda *_: None)
    os.setpgid(0, 0)
    # Whoever does so from the background is stopped, else.
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTTOU})
    try:
        os.tcsetpgrp(terminal, os.getpgrp())
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def _give_back(terminal: int, group: int) -> None:
    with contextlib.suppress(OSError):  # it was closed
        os.tcsetpgrp(terminal, group)
