# SPDX-License-Identifier: Apache-2.0
"""A burn in this process or in several, each with its own report.

Each process is `python -m allotment.burn`: plan on stdin, report on stdout, both JSON. They inherit
the environment and therefore the share. A signal to stop reaches them as SIGINT; a process that
does not end in time is killed and reported as such.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Final

import msgspec

from allotment.burn.drivers import LIBRARY, CudaError, Driver
from allotment.burn.reports import BurnError, BurnReport, ProcessReport
from allotment.burn.worker import work
from allotment.model.errors import AllotError, NoDevicesError
from allotment.model.structs import prepared

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType

    from allotment.burn.reports import BurnPlan


_POLL_SECONDS: Final = 0.05
_PATIENCE_SECONDS: Final = 10.0


class Meeting(msgspec.Struct, frozen=True):
    """A pipe as a barrier for the processes of a burn.

    Nothing is written to it. Its end is readable once every process has closed its writing end, by
    arriving here or by dying.
    """

    read_end: int
    write_end: int

    def attend(self, *, is_stopping: Callable[[], bool]) -> None:
        """Wait until all processes arrive, or until asked to stop."""
        os.close(self.write_end)
        while not is_stopping() and not select.select([self.read_end], [], [], _POLL_SECONDS)[0]:
            pass

    def leave(self) -> None:
        """Close both ends: for the parent, after the processes have started."""
        os.close(self.read_end)
        os.close(self.write_end)


def run_processes(plan: BurnPlan, *, is_stopping: Callable[[], bool]) -> list[ProcessReport]:
    """Run the plan in `plan.processes` parallel processes and return their reports.

    A process that ends without a report (killed or crashed) is reported with an error. Raises
    NoDevicesError if a process found no device.
    """
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
            reports.append(msgspec.json.decode(output, type=prepared(ProcessReport)))
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
        # The exit status of a worker that died at once explains the failure.
        with contextlib.suppress(BrokenPipeError):
            worker.stdin.write(plan)
        with contextlib.suppress(BrokenPipeError):
            worker.stdin.close()
        worker.stdin = None
    return worker


def _wait(workers: list[subprocess.Popen[bytes]], *, is_stopping: Callable[[], bool]) -> None:
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
        # Interrupted before it could catch the signal: no work done, no error.
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
        raise AllotError("a process of the burn ended without a report or an error message")
    raise NoDevicesError(message, hint=hint or None)


_NO_GPU_HINT: Final = (
    "use a simulated GPU: `allot run --simulated a100-80gb --memory 4Gi -- allot burn ...`, or for "
    'all programs of this shell: `eval "$(allot env --simulated a100-80gb)"`'
)


def burn(plan: BurnPlan) -> BurnReport:
    """Run a plan; SIGINT and SIGTERM end it early with the report so far.

    Raises NoDevicesError without a driver or a device, and CudaError if the driver cannot start.
    """
    with _collected_signals(patient=False) as signals:
        if plan.processes > 1:
            processes = run_processes(plan, is_stopping=lambda: bool(signals))
        else:
            processes = [work_here(plan, is_stopping=lambda: bool(signals))]
        return BurnReport(plan=plan, processes=processes, ended_by=signals[0] if signals else None)


def work_here(
    plan: BurnPlan,
    *,
    is_stopping: Callable[[], bool],
    meet: Callable[[], None] | None = None,
) -> ProcessReport:
    """Do one process's work in this process; errors as in `burn`."""
    try:
        driver = Driver.load()
    except OSError as error:
        raise NoDevicesError(f"no CUDA driver: {error}", hint=_NO_GPU_HINT) from error
    try:
        return work(driver, plan, is_stopping=is_stopping, meet=meet)
    except CudaError as error:
        if not error.is_missing_device:
            raise
        what = f"no CUDA device {plan.device} to burn on ({LIBRARY}: {error.message})"
        raise NoDevicesError(what, hint=_hint(driver)) from error


def _hint(driver: Driver) -> str:
    """Suggest a fix for a missing device: another number, or CUDA_VISIBLE_DEVICES."""
    count = driver.device_count()
    if count == 1:
        return "this process sees one device: --device 0"
    if count > 1:
        return f"this process sees {count} devices: --device 0 to {count - 1}"
    if "CUDA_VISIBLE_DEVICES" in os.environ:
        value = os.environ["CUDA_VISIBLE_DEVICES"]
        return f"CUDA_VISIBLE_DEVICES={value!r} hides all devices: unset or correct it"
    return _NO_GPU_HINT


def work_as_child(plan: BurnPlan, meeting: Meeting) -> ProcessReport:
    """Do one process's work for a parent, which sends SIGINT to end it early."""
    with _collected_signals(patient=True) as signals:

        def is_stopping() -> bool:
            return bool(signals)

        return work_here(
            plan, is_stopping=is_stopping, meet=lambda: meeting.attend(is_stopping=is_stopping)
        )


@contextlib.contextmanager
def _collected_signals(*, patient: bool) -> Iterator[list[int]]:
    """Collect SIGINT and SIGTERM in a list, which the work checks between driver calls.

    A second signal has its previous effect, unless `patient`: a child gets Ctrl-C from the terminal
    and again from its parent, and must still report.
    """
    signals: list[int] = []

    def collect(number: int, _frame: FrameType | None) -> None:
        signals.append(number)
        if not patient:
            signal.signal(number, previous[signal.Signals(number)])

    previous = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    for number in previous:
        signal.signal(number, collect)
    try:
        yield signals
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
