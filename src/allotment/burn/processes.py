# SPDX-License-Identifier: Apache-2.0
"""A burn in several real processes: start them, pass the plan, collect their reports.

Each process is `python -m allotment.burn`, which reads its plan from stdin and answers with its
report on stdout, both JSON. They inherit the environment and therefore the share. A signal that
asks to stop reaches them as SIGINT; one that does not answer is killed, and the report says so.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from allotment.burn.reports import BurnError, ProcessReport
from allotment.model.errors import AllotError, NoDevicesError

if TYPE_CHECKING:
    from collections.abc import Callable

    from allotment.burn.plans import BurnPlan

_POLL_SECONDS: Final = 0.05
_PATIENCE_SECONDS: Final = 10.0


@dataclass(frozen=True, slots=True)
class Meeting:
    """A pipe where the processes of a burn wait for each other.

    Nothing is written to it: its end comes when the last one has closed its writing end, by coming
    here, or by dying.
    """

    read_end: int
    write_end: int

    def attend(self, *, is_stopping: Callable[[], bool]) -> None:
        """Wait until all are there, or were asked to stop."""
        os.close(self.write_end)
        while not is_stopping() and not select.select([self.read_end], [], [], _POLL_SECONDS)[0]:
            pass

    def leave(self) -> None:
        """Take no part: for the parent, when the processes have begun."""
        os.close(self.read_end)
        os.close(self.write_end)


def run_processes(plan: BurnPlan, *, is_stopping: Callable[[], bool]) -> list[ProcessReport]:
    """Run the plan in `plan.processes` processes at once and report all of them.

    A process that ends without a report (killed, or crashed) is reported with an error of its own.
    NoDevicesError when none of them found a device.
    """
    import msgspec

    meeting = Meeting(*os.pipe())
    try:
        workers = [_start(msgspec.json.encode(plan), meeting) for _ in range(plan.processes)]
    finally:
        meeting.leave()
    try:
        _wait(workers, is_stopping=is_stopping)
    finally:
        for worker in workers:
            if worker.poll() is None:
                worker.kill()
    answers = [(worker.communicate(), worker) for worker in workers]
    reports = []
    for (output, complaint), worker in answers:
        try:
            reports.append(msgspec.json.decode(output, type=ProcessReport))
        except msgspec.DecodeError:
            text = complaint.decode("utf-8", "replace").strip()
            if worker.returncode == NoDevicesError.exit_code:
                _raise_no_device(text)
            reports.append(_lost(worker, text, asked_bytes=plan.memory_bytes))
    return reports


def _start(plan: bytes, meeting: Meeting) -> subprocess.Popen[bytes]:
    ends = (meeting.read_end, meeting.write_end)
    worker = subprocess.Popen(
        [sys.executable, "-m", "allotment.burn", *map(str, ends)],
        pass_fds=ends,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    if worker.stdin is not None:
        # A worker that died at once says why in its exit status.
        with contextlib.suppress(BrokenPipeError):
            worker.stdin.write(plan)
        with contextlib.suppress(BrokenPipeError):
            worker.stdin.close()
        worker.stdin = None
    return worker


def _wait(workers: list[subprocess.Popen[bytes]], *, is_stopping: Callable[[], bool]) -> None:
    """Wait until all have ended, or were asked to and had their time."""
    deadline: float | None = None
    for worker in workers:
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                worker.wait(_POLL_SECONDS)
                break
            if deadline is None and is_stopping():
                deadline = time.monotonic() + _PATIENCE_SECONDS
                for other in workers:
                    other.send_signal(signal.SIGINT)
            if deadline is not None and time.monotonic() > deadline:
                return


def _lost(worker: subprocess.Popen[bytes], complaint: str, *, asked_bytes: int) -> ProcessReport:
    if worker.returncode == -signal.SIGINT:
        # Asked to stop before it could listen: nothing was done, and nothing went wrong.
        return ProcessReport(pid=worker.pid, asked_bytes=asked_bytes, interrupted=True)
    if worker.returncode < 0:
        name = f"killed by signal {-worker.returncode}"
    else:
        name = complaint.splitlines()[-1] if complaint else f"ended with {worker.returncode}"
    error = BurnError(code=0, name=name, call="process", at_bytes=0)
    return ProcessReport(pid=worker.pid, asked_bytes=asked_bytes, errors=[error])


def _raise_no_device(text: str) -> None:
    message, _, hint = text.partition("\n")
    if not message:
        raise AllotError("a process of the burn ended without a word")
    raise NoDevicesError(message, hint=hint or None)
