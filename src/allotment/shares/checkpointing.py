# SPDX-License-Identifier: Apache-2.0
"""The driver's checkpoint of several processes: of all, or of none."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Protocol

from allotment.devices.checkpoints import Checkpoints, DriverRefusal, ProcessState
from allotment.shares.processes import is_alive, named

__all__ = ["Checkpointer", "DriverOf", "bring_back", "driver_of", "put_back", "states", "take_off"]


class Checkpointer(Protocol):
    """What suspending needs of a driver; `Checkpoints` is it. All of it raises `DriverRefusal`."""

    def state(self, pid: int) -> ProcessState:
        """Return how the driver sees a process."""
        ...

    def lock(self, pid: int, *, timeout_ms: int) -> None:
        """Hold back its calls."""
        ...

    def checkpoint(self, pid: int) -> None:
        """Move its GPU memory to the host."""
        ...

    def restore(self, pid: int) -> None:
        """Move it back."""
        ...

    def unlock(self, pid: int) -> None:
        """Let it go on."""
        ...


DriverOf = Callable[[Path | None], AbstractContextManager[Checkpointer]]
"""The driver of a simulated machine (its file) or of this computer (None)."""


def driver_of(machine: Path | None) -> Checkpoints:
    """Return the driver of a simulated machine, or of this computer."""
    return Checkpoints(machine=machine)


def states(driver: Checkpointer, pids: Iterable[int]) -> Mapping[int, ProcessState]:
    """Return how the driver sees these processes; those that it does not know are left out."""
    known = {}
    for pid in sorted(pids):
        with suppress(DriverRefusal):
            known[pid] = driver.state(pid)
    return known


def take_off(driver: Checkpointer, pids: Iterable[int], patience_s: float) -> None:
    """Lock all, then checkpoint all: while one is still running it may use another's memory.

    `patience_s` is how long the running work of each may take to end. Raises `DriverRefusal`; what
    was done stays so.
    """
    locked = []
    for pid in pids:
        with _unless_gone(pid):
            if driver.state(pid) is ProcessState.RUNNING:
                driver.lock(pid, timeout_ms=max(1, round(patience_s * 1000)))
            locked.append(pid)
    for pid in locked:
        with _unless_gone(pid):
            if driver.state(pid) is ProcessState.LOCKED:
                driver.checkpoint(pid)


def bring_back(driver: Checkpointer, pids: Collection[int]) -> None:
    """Restore all, then let all go on. Raises `DriverRefusal`; what was restored stays locked."""
    for pid in sorted(pids):
        with _unless_gone(pid):
            if driver.state(pid) is ProcessState.CHECKPOINTED:
                driver.restore(pid)
    for pid in sorted(pids):
        with _unless_gone(pid):
            if driver.state(pid) is ProcessState.LOCKED:
                driver.unlock(pid)


def put_back(driver: Checkpointer, pids: Collection[int]) -> None:
    """Take those off again that were restored already, as far as the driver does it."""
    for pid in sorted(pids):
        with suppress(DriverRefusal):
            if driver.state(pid) is ProcessState.LOCKED:
                driver.checkpoint(pid)


@contextmanager
def _unless_gone(pid: int) -> Iterator[None]:
    """Let a refusal pass when the process has ended: nothing of it is on a GPU then."""
    before = named(pid)
    try:
        yield
    except DriverRefusal:
        if is_alive(before):
            raise
