# SPDX-License-Identifier: Apache-2.0
"""The end of the agent's process: at a signal, in time, whatever hangs.

Ending in order is the event loop's work, and may take for ever: a thread in a driver, a file system
that does not answer, a task that does not go. A process that stays keeps the state folder's lock,
and the next agent waits for it. So a thread of its own hears the signals, and ends the process when
its time is up, or at a second signal. Nothing is lost by that: every step that the agent takes may
be its last one.

The thread is told by the interpreter's signal handler in C (`signal.set_wakeup_fd`), so that it
hears also while the main thread is busy.
"""

import asyncio
import contextlib
import math
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Final

import structlog

__all__ = ["BOUND_S", "Ending", "left_tasks", "left_threads"]

_log = structlog.get_logger("allotment.agent")

BOUND_S: Final = 7.0
"""How long an end may take. A DaemonSet's pod has 10 s, and is killed then without a word."""
_TELL_S: Final = 1.0
"""How long telling what is left may take: standard error may be what hangs."""
_AGAIN_S: Final = 1.0
"""What comes within so long is the same signal once more: `timeout`, and a terminal's Ctrl-C under
another program that passes it on, send theirs to the process and to its group."""
_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)


class Ending:
    """Hears SIGTERM and SIGINT, for the rest of the process. Made in the main thread, once.

    `leave` ends the process at once, with an exit status.
    """

    def __init__(
        self,
        *,
        bound_s: float = BOUND_S,
        again_s: float = _AGAIN_S,
        leave: Callable[[int], object] = os._exit,
    ) -> None:
        """Know of no end yet."""
        self._bound_s = bound_s
        self._again_s = again_s
        self._leave = leave
        self._ear, self._mouth = os.pipe()  # as long as the process: nobody closes them
        os.set_blocking(self._mouth, False)
        self._has_begun = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ended: asyncio.Event | None = None
        self._lock = threading.Lock()

    def listen(self) -> None:
        """Hear signals from now on, in place of whoever did."""
        signal.set_wakeup_fd(self._mouth, warn_on_full_buffer=False)
        for number in _SIGNALS:
            signal.signal(number, _nothing)
        self.start()

    def start(self) -> None:
        """Start the thread."""
        threading.Thread(target=self._run, name="ending", daemon=True).start()

    def heard(self, number: int) -> None:
        """Hear of a signal, as the interpreter tells of it."""
        with contextlib.suppress(OSError):  # full: it has been told
            os.write(self._mouth, bytes((number,)))

    def begin(self) -> None:
        """Let the time run from now on, without a signal: the agent ends by itself."""
        self.heard(0)

    async def wait(self) -> None:
        """Return when the end has begun."""
        ended = asyncio.Event()
        with self._lock:
            self._loop, self._ended = asyncio.get_running_loop(), ended
            if self._has_begun.is_set():
                return
        await ended.wait()

    @property
    def has_begun(self) -> bool:
        """Whether it is to end."""
        return self._has_begun.is_set()

    def _run(self) -> None:
        deadline: float | None = None
        signalled = math.inf  # when first
        while True:
            left_s = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not select.select([self._ear], [], [], left_s)[0]:
                self._tell(f"it has not ended within {self._bound_s:g} s, and is ended at once")
                self._leave(1)
                return
            for number in os.read(self._ear, 64):
                if number and number not in _SIGNALS:
                    continue
                now = time.monotonic()
                is_second = number and now - signalled >= self._again_s
                if number:
                    signalled = min(signalled, now)
                if deadline is None:
                    deadline = now + self._bound_s
                    self._start_end()
                elif is_second:
                    self._tell("a second signal: ended at once")
                    self._leave(128 + number)
                    return

    def _start_end(self) -> None:
        with self._lock:
            self._has_begun.set()
            if self._loop is None or self._ended is None:
                return
            with contextlib.suppress(RuntimeError):  # it is closed: it ends anyway
                self._loop.call_soon_threadsafe(self._ended.set)

    def _tell(self, what: str) -> None:
        """Say what is left, unless even that hangs."""
        tasks, threads = left_tasks(self._loop), left_threads()
        teller = threading.Thread(target=_say, args=(what, tasks, threads), daemon=True)
        teller.start()
        teller.join(_TELL_S)


def _say(what: str, tasks: list[str], threads: list[str]) -> None:
    _log.warning(what, tasks=tasks, threads=threads)
    sys.stderr.flush()


def left_tasks(loop: asyncio.AbstractEventLoop | None) -> list[str]:
    """Return where the loop's tasks are; from any thread."""
    if loop is None or loop.is_closed():
        return []
    found = []
    for task in asyncio.all_tasks(loop):
        coroutine = task.get_coro()
        name = getattr(coroutine, "__qualname__", task.get_name())
        with contextlib.suppress(RuntimeError):  # it goes on meanwhile
            frames = task.get_stack(limit=1)
            found.append(f"{name} ({_place(frames[0])})" if frames else name)
    return sorted(found)


def left_threads() -> list[str]:
    """Return where the threads are that are not this one, and not those of libraries."""
    frames = sys._current_frames()  # noqa: SLF001 - documented, and meant for this
    return sorted(
        f"{each.name} ({_place(frames[each.ident])})"
        for each in threading.enumerate()
        if each is not threading.current_thread() and each.ident in frames
    )


def _place(frame: FrameType) -> str:
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"  # noqa: PTH119 - a name


def _nothing(number: int, frame: FrameType | None) -> None:
    """Take a signal that the thread has heard of; without a handler it would end the process."""
