# SPDX-License-Identifier: Apache-2.0
"""The machine's processes, as far as shares need them: who lives, and who belongs to which share.

A process belongs to a share when its mount namespace has the share's ledger mounted, when its
environment names the share's directory, or when it descends from the share's runner. Processes
that this user may not look into are passed over: they cannot be this user's share's.
"""

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path

from allotment.model.shares import Runner, Share, ShareId

__all__ = ["census", "command_of", "is_alive", "pid_inside", "this_process"]

_PROC = Path("/proc")
_MOUNTED_SHARE = re.compile(
    r"^\d+ \d+ \S+ \S*/shares/([0-9a-f]+)/usage /run/allotment/share/usage "
)
_SHARE_VARIABLE = b"ALLOTMENT_SHARE="


@cache
def _boot_id() -> str:
    try:
        return (_PROC / "sys/kernel/random/boot_id").read_text().strip()
    except OSError:  # not everywhere readable; pid and start time still tell processes apart
        return ""


def _stat(pid: int) -> list[str] | None:
    """Return the fields of /proc/PID/stat from the third on, or None when it is gone."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:  # noqa: PTH123 - per process
            text = file.read()
    except OSError:
        return None
    return text[text.rindex(")") + 2 :].split()


def start_time(pid: int) -> int | None:
    """Return when a process started, in clock ticks after boot; None when it is gone."""
    fields = _stat(pid)
    return int(fields[19]) if fields else None


def this_process() -> Runner:
    """Return what names this process."""
    return Runner(os.getpid(), start_time(os.getpid()) or 0, _boot_id())


def is_alive(runner: Runner) -> bool:
    """Tell whether the very process that was named still runs (a zombie does not)."""
    if runner.boot_id != _boot_id():
        return False
    fields = _stat(runner.pid)
    return fields is not None and int(fields[19]) == runner.start_time and fields[0] not in "ZX"


def pid_inside(pid: int) -> int:
    """Return a process's number as it sees it itself, in the innermost pid namespace."""
    try:
        with open(f"/proc/{pid}/status", encoding="utf-8", errors="replace") as file:  # noqa: PTH123 - per process
            for line in file:
                if line.startswith("NSpid:"):
                    return int(line.split()[-1])
    except OSError:
        pass  # gone meanwhile: its number is as good as any
    return pid


def command_of(pid: int) -> str:
    """Return a process's command line in one line, or an empty text when it is gone."""
    try:
        data = (_PROC / str(pid) / "cmdline").read_bytes()
    except OSError:
        return ""
    return data.rstrip(b"\0").replace(b"\0", b" ").decode(errors="replace")


def _pids() -> Iterator[int]:
    for name in os.listdir("/proc"):  # noqa: PTH208 - names are all that is needed
        if name.isdecimal():
            yield int(name)


def _share_of_mounts(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/mountinfo", encoding="utf-8", errors="replace") as file:  # noqa: PTH123 - per process
            for line in file:
                found = _MOUNTED_SHARE.match(line)
                if found:
                    return found[1]
    except OSError:
        pass  # gone meanwhile
    return ""


def _directory_of_environment(pid: int) -> str:
    try:
        data = (_PROC / str(pid) / "environ").read_bytes()
    except OSError:
        return ""
    for variable in data.split(b"\0"):
        if variable.startswith(_SHARE_VARIABLE):
            return os.fsdecode(variable.removeprefix(_SHARE_VARIABLE))
    return ""


def census(shares: Iterable[tuple[Share, Path]]) -> dict[ShareId, set[int]]:
    """Return the processes of each share (a share and its directory), by their number on the host.

    The runner itself is not one of them.
    """
    known = list(shares)
    members: dict[ShareId, set[int]] = {share.id: set() for share, _ in known}
    by_directory = {str(directory): share.id for share, directory in known}
    runners = {
        share.runner.pid: share.id
        for share, _ in known
        if share.runner is not None and is_alive(share.runner)
    }
    by_namespace: dict[str, str] = {}
    parents: dict[int, int] = {}
    for pid in _pids():
        fields = _stat(pid)
        if fields is None or fields[0] in "ZX":
            continue
        parents[pid] = int(fields[1])
        try:
            namespace = os.readlink(f"/proc/{pid}/ns/mnt")  # noqa: PTH115 - no path: `mnt:[1]`
        except OSError:
            continue  # another user's, or gone
        if namespace not in by_namespace:
            by_namespace[namespace] = _share_of_mounts(pid)
        found = ShareId(by_namespace[namespace])
        if not found and by_directory:
            found = by_directory.get(_directory_of_environment(pid), ShareId(""))
        if found in members:
            members[found].add(pid)
    for pid in parents:
        found = _share_of_ancestors(pid, parents, runners)
        if found:
            members[found].add(pid)
    return members


def _share_of_ancestors(
    pid: int, parents: Mapping[int, int], runners: Mapping[int, ShareId]
) -> ShareId:
    """Return the share whose runner is the nearest such ancestor of a process."""
    seen = 0
    parent = parents.get(pid, 0)
    while parent and seen < len(parents):
        if parent in runners:
            return runners[parent]
        parent = parents.get(parent, 0)
        seen += 1
    return ShareId("")
