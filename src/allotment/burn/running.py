# SPDX-License-Identifier: Apache-2.0
"""A whole burn from a plan: find the driver, work here or in several processes, hear signals."""

from __future__ import annotations

import contextlib
import os
import signal
from typing import TYPE_CHECKING, Final

from allotment.burn.drivers import LIBRARY, CudaError, Driver
from allotment.burn.processes import Meeting, run_processes
from allotment.burn.reports import BurnReport, ProcessReport
from allotment.burn.working import work
from allotment.model.errors import NoDevicesError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType

    from allotment.burn.plans import BurnPlan

_NO_GPU_HINT: Final = (
    "try a simulated one: `allot run --simulated a100-80gb --memory 4Gi -- allot burn ...`, or for "
    'all programs of this shell: `eval "$(allot env --simulated a100-80gb)"`'
)


def burn(plan: BurnPlan) -> BurnReport:
    """Carry out a plan; SIGINT and SIGTERM end it early with the report so far.

    NoDevicesError without a driver or a device; CudaError when the driver cannot even start.
    """
    with _hearing_signals(patient=False) as heard:
        if plan.processes > 1:
            processes = run_processes(plan, is_stopping=lambda: bool(heard))
        else:
            processes = [work_here(plan, is_stopping=lambda: bool(heard))]
        return BurnReport(plan=plan, processes=processes, ended_by=heard[0] if heard else None)


def work_here(
    plan: BurnPlan,
    *,
    is_stopping: Callable[[], bool],
    meet: Callable[[], None] | None = None,
) -> ProcessReport:
    """Do one process's part in this process; errors as in `burn`."""
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
    """Tell what to do about a missing device: other devices may be there, or be hidden."""
    count = driver.device_count()
    if count == 1:
        return "there is one device here: --device 0"
    if count > 1:
        return f"there are {count} devices here: --device 0 to {count - 1}"
    if "CUDA_VISIBLE_DEVICES" in os.environ:
        value = os.environ["CUDA_VISIBLE_DEVICES"]
        return f"CUDA_VISIBLE_DEVICES is {value!r}, which leaves no device: unset or correct it"
    return _NO_GPU_HINT


def work_as_child(plan: BurnPlan, meeting: Meeting) -> ProcessReport:
    """Do one process's part for a parent, which sends SIGINT to end it early."""
    with _hearing_signals(patient=True) as heard:

        def is_stopping() -> bool:
            return bool(heard)

        return work_here(
            plan, is_stopping=is_stopping, meet=lambda: meeting.attend(is_stopping=is_stopping)
        )


@contextlib.contextmanager
def _hearing_signals(*, patient: bool) -> Iterator[list[int]]:
    """Collect SIGINT and SIGTERM in a list, for the work to look at between the driver's calls.

    A second one acts as it would have without this, unless `patient`: a child hears Ctrl-C from
    the terminal and again from its parent, and means to report both times.
    """
    heard: list[int] = []

    def hear(number: int, _frame: FrameType | None) -> None:
        heard.append(number)
        if not patient:
            signal.signal(number, previous[signal.Signals(number)])

    previous = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    for number in previous:
        signal.signal(number, hear)
    try:
        yield heard
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
