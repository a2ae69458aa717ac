# SPDX-License-Identifier: Apache-2.0
"""Who is in a share, who of them uses a GPU, and how they are stopped and go on."""

import os
import signal
from collections.abc import Iterable
from contextlib import suppress

from allotment import ledger
from allotment.model.errors import BusyError, StateError
from allotment.model.shares import Runner, Share
from allotment.shares.lives import Found
from allotment.shares.processes import census, is_alive, is_stopped, named
from allotment.shares.views import ProcessView, Readings, view

__all__ = [
    "ROUNDS",
    "check_ours",
    "gpu_users",
    "members",
    "send",
    "still_stopped",
    "stop",
    "stopped_already",
]

ROUNDS = 8
"""How often is looked for programs that were started while the others were being stopped."""


def members(found: Found, share: Share) -> set[int]:
    """Return the processes of a share by their number on this machine."""
    return census([(share, found.directory)])[share.id]


def gpu_users(found: Found, readings: Readings) -> dict[int, ProcessView]:
    """Return the share's processes that use a GPU, by their number on this machine."""
    again = Found(
        found.id, found.directory, found.share, ledger.read(found.directory), terms=found.terms
    )
    users = {}
    for process in view([again], readings)[0].processes:
        if process.is_enforced and not any(process.used):
            continue  # it has loaded the driver, and nothing of it is on a GPU
        if process.pid is None:
            raise BusyError(
                f"process {process.pid_inside} of share {found.name} ({process.command}) cannot be"
                " found on this machine: its number is one of its container's",
                hint="run `allot` as root, where all processes can be seen",
            )
        users[process.pid] = process
    return users


def check_ours(pids: Iterable[int]) -> None:
    """Raise `StateError` where one of the processes is not ours to stop."""
    for pid in pids:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            continue
        except PermissionError as error:
            raise StateError(
                f"process {pid} is another user's: it cannot be stopped",
                hint="run as its user, or as root",
            ) from error


def stopped_already(found: Found, share: Share) -> tuple[Runner, ...]:
    """Return who of the share is stopped by someone else, its `allot run` (Ctrl-Z) too."""
    there = members(found, share)
    if share.runner and is_alive(share.runner):
        there.add(share.runner.pid)
    return tuple(named(pid) for pid in sorted(there) if is_stopped(pid))


def still_stopped(processes: Iterable[Runner]) -> set[int]:
    """Return which of these live and are stopped, by their number."""
    return {each.pid for each in processes if is_alive(each) and is_stopped(each.pid)}


def stop(found: Found, share: Share) -> set[int]:
    """Stop all programs of the share, and those that they start meanwhile; return them."""
    stopped: set[int] = set()
    for _ in range(ROUNDS):
        new = members(found, share) - stopped
        if not new:
            break
        send(new, signal.SIGSTOP)
        stopped |= new
    return stopped


def send(pids: Iterable[int], number: signal.Signals) -> None:
    """Send a signal to all of these that live."""
    for pid in pids:
        with suppress(ProcessLookupError):  # it has ended: neither stopped nor in the way
            os.kill(pid, number)
