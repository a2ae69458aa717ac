# SPDX-License-Identifier: Apache-2.0
"""Ends the agent's process in time after a signal, even if the event loop or a driver hangs.

A hung process would keep the state folder's lock, and block the next agent. So a thread receives
the signals, and exits at the time limit or at a second signal. Nothing is lost: each step of the
agent may be its last. `signal.set_wakeup_fd` reaches the thread even if the main thread is busy.
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

_log = structlog.get_logger("allotment.agent")

BOUND_S: Final = 7.0
"""The time limit. A DaemonSet's pod is killed after 10 s."""
_LOG_S: Final = 1.0
"""The time limit of the last log message: standard error may hang, too."""
_AGAIN_S: Final = 1.0
"""A repetition within this time is the same signal: `timeout`, and programs that forward Ctrl-C,
signal both the process and its group."""
_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)


class Shutdown:
    """Receives SIGTERM and SIGINT for the rest of the process. One instance, in the main thread.

    `leave` exits at once, with a status.
    """

    def __init__(
        self,
        *,
        bound_s: float = BOUND_S,
        again_s: float = _AGAIN_S,
        leave: Callable[[int], object] = os._exit,
    ) -> None:
        self._bound_s = bound_s
        self._again_s = again_s
        self._leave = leave
        self._wake_read, self._wake_write = os.pipe()  # open as long as the process
        os.set_blocking(self._wake_write, False)
        self._has_begun = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ended: asyncio.Event | None = None
        self._lock = threading.Lock()

    def listen(self) -> None:
        """Replace all handlers of these signals."""
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        for number in _SIGNALS:
            signal.signal(number, _nothing)
        self.start()

    def start(self) -> None:
        threading.Thread(target=self._run, name="ending", daemon=True).start()

    def receive(self, number: int) -> None:
        """Take a signal, as the interpreter writes it."""
        with contextlib.suppress(OSError):  # full: the thread has been woken
            os.write(self._wake_write, bytes((number,)))

    def begin(self) -> None:
        """Start the time limit without a signal: the agent ends by itself."""
        self.receive(0)

    async def wait(self) -> None:
        ended = asyncio.Event()
        with self._lock:
            self._loop, self._ended = asyncio.get_running_loop(), ended
            if self._has_begun.is_set():
                return
        await ended.wait()

    @property
    def has_begun(self) -> bool:
        return self._has_begun.is_set()

    def _run(self) -> None:
        deadline: float | None = None
        signalled = math.inf  # when first
        while True:
            left_s = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not select.select([self._wake_read], [], [], left_s)[0]:
                self._log(f"the agent has not ended within {self._bound_s:g} s: exiting at once")
                self._leave(1)
                return
            for number in os.read(self._wake_read, 64):
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
                    self._log("second signal: exiting at once")
                    self._leave(128 + number)
                    return

    def _start_end(self) -> None:
        with self._lock:
            self._has_begun.set()
            if self._loop is None or self._ended is None:
                return
            with contextlib.suppress(RuntimeError):  # closed: it ends anyway
                self._loop.call_soon_threadsafe(self._ended.set)

    def _log(self, message: str) -> None:
        """Log what still runs, unless logging hangs."""
        tasks, threads = left_tasks(self._loop), left_threads()
        logger = threading.Thread(target=_write, args=(message, tasks, threads), daemon=True)
        logger.start()
        logger.join(_LOG_S)


def _write(message: str, tasks: list[str], threads: list[str]) -> None:
    _log.warning(message, tasks=tasks, threads=threads)
    sys.stderr.flush()


def left_tasks(loop: asyncio.AbstractEventLoop | None) -> list[str]:
    """Return the positions of the loop's tasks; from any thread."""
    if loop is None or loop.is_closed():
        return []
    positions = []
    for task in asyncio.all_tasks(loop):
        coroutine = task.get_coro()
        name = getattr(coroutine, "__qualname__", task.get_name())
        with contextlib.suppress(RuntimeError):  # it runs meanwhile
            frames = task.get_stack(limit=1)
            positions.append(f"{name} ({_place(frames[0])})" if frames else name)
    return sorted(positions)


def left_threads() -> list[str]:
    """Return the positions of Python's other threads."""
    frames = sys._current_frames()  # noqa: SLF001 - documented, and meant for this
    return sorted(
        f"{thread.name} ({_place(frames[thread.ident])})"
        for thread in threading.enumerate()
        if thread is not threading.current_thread() and thread.ident in frames
    )


def _place(frame: FrameType) -> str:
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"  # noqa: PTH119 - a name


def _nothing(number: int, frame: FrameType | None) -> None:
    """Keep the default handler from ending the process: the thread handles the signal."""
