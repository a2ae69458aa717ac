# SPDX-License-Identifier: Apache-2.0
"""The machine's processes, as far as shares need them: who lives, and who belongs to which share.

A process belongs to a share when its mount namespace is the share's (it has the share's ledger
mounted, or was recorded as such), when its environment names the share's directory, when it
was recorded as a process of the share, or when it descends from one of those or from the share's
runner: that adopts what the command leaves behind, as long as it lives. Processes that this user
may not look into are passed over: they cannot be this user's share's. Who serves everybody's
processes, as the node agent does, has to see all of them: `unseen_processes` tells.
"""

import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path

from allotment.model.shares import Runner, Share, ShareId
from allotment.shares.traces import read_traces

__all__ = [
    "census",
    "children",
    "children_of",
    "command_of",
    "is_alive",
    "is_in_pod",
    "is_stopped",
    "named",
    "pid_inside",
    "start_time",
    "this_process",
    "unseen_processes",
]

_PROC = Path("/proc")
_MOUNTED_SHARE = re.compile(
    r"^\d+ \d+ \S+ \S*/shares/([0-9a-f]+)/(?:usage|id) /run/allotment/share/(?:usage|id) "
)
# `pod` and a uid, with dashes or, by systemd, underscores (kubelet pkg/kubelet/cm); a static pod's
# is a hash. Seen from within a control group namespace, a pod's other container is `/../ID`.
_POD_GROUP = re.compile(r"[/-]pod[0-9a-f][0-9a-f_-]{31,35}(?![0-9a-f])|:/\.\./", re.MULTILINE)
_UNSEEN = "a share would count as unused while a program runs in it"
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
    return named(os.getpid())


def is_alive(runner: Runner) -> bool:
    """Tell whether the very process that was named still runs (a zombie does not)."""
    if runner.boot_id != _boot_id():
        return False
    fields = _stat(runner.pid)
    return fields is not None and int(fields[19]) == runner.start_time and fields[0] not in "ZX"


def is_stopped(pid: int) -> bool:
    """Tell whether a process is stopped by a signal: SIGCONT starts it, unlike a debugger's."""
    fields = _stat(pid)
    return fields is not None and fields[0] == "T"


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


def named(pid: int) -> Runner:
    """Return what names a process of this machine."""
    return Runner(pid, start_time(pid) or 0, _boot_id())


def children() -> frozenset[int]:
    """Return this process's children; none where the kernel does not list them."""
    try:
        with open("/proc/thread-self/children", encoding="ascii") as file:  # noqa: PTH123 - start-up time
            return frozenset(map(int, file.read().split()))
    except OSError:
        return frozenset()


def children_of(pid: int) -> frozenset[int]:
    """Return another process's children; none where it is gone or the kernel does not list them."""
    found: set[int] = set()
    for path in (_PROC / str(pid) / "task").glob("*/children"):
        with suppress(OSError):  # the thread has ended
            found.update(map(int, path.read_text("ascii").split()))
    return frozenset(found)


def census(
    shares: Iterable[tuple[Share, Path]], *, strangers: Collection[int] = ()
) -> dict[ShareId, set[int]]:
    """Return the processes of each share (a share and its directory), by their number on the host.

    The runner itself is not one of them, nor are `strangers` and what descends from them only.
    """
    known = list(shares)
    members: dict[ShareId, set[int]] = {share.id: set() for share, _ in known}
    by_directory = {str(directory): share.id for share, directory in known}
    roots = {
        share.runner.pid: share.id
        for share, _ in known
        if share.runner is not None and is_alive(share.runner)
    }
    standing = set(roots.values())
    parents, namespaces, by_namespace = _look_around()
    for share, directory in known:
        traces = read_traces(directory)
        here = members[share.id]
        here.update(each.pid for each in traces.members if is_alive(each))
        roots.update(dict.fromkeys(here, share.id))
        # The number is another namespace's when this one is gone: not while someone keeps it.
        if traces.namespace is not None and (
            share.id in standing or any(namespaces.get(pid) == traces.namespace for pid in here)
        ):
            by_namespace.setdefault(traces.namespace, share.id)
    for pid, namespace in namespaces.items():
        found = by_namespace.get(namespace)
        if found is None and by_directory:
            found = by_directory.get(_directory_of_environment(pid))
        if found in members:
            members[found].add(pid)
    for pid in parents:
        found = _share_of_ancestors(pid, parents, roots, strangers)
        if found in members:
            members[found].add(pid)
    return members


def unseen_processes() -> str | None:
    """Say which processes of pods may not be looked into, and why; None: all can be seen.

    For an agent's start: a share whose processes it cannot see would count as unused, and what it
    holds would be given to others while a program uses it. Processes that are in no pod do not
    matter: a machine may keep some of its own from everybody.
    """
    if os.getpid() == 1:
        return f"no process of the node but this one can be seen: the pod needs hostPID; {_UNSEEN}"
    denied = []
    for pid in _pids():
        try:
            _look_at(pid)
        except PermissionError:
            if is_in_pod(pid):
                denied.append(pid)
        except OSError:
            continue  # gone
    if not denied:
        return None
    some = ", ".join(map(str, sorted(denied)[:8]))
    return (
        f"{len(denied)} processes of pods cannot be looked into (PID {some}): it takes root with"
        f" the capability SYS_PTRACE, and no AppArmor or SELinux profile; {_UNSEEN}"
    )


def is_in_pod(pid: int) -> bool:
    """Tell whether a process is in a pod, going by what everybody may read: its control groups."""
    try:
        text = (_PROC / str(pid) / "cgroup").read_text("utf-8", errors="replace")
    except OSError:
        return False
    return _POD_GROUP.search(text) is not None


def _look_at(pid: int) -> tuple[int, str]:
    """Return a process's mount namespace and root folder.

    Raises `PermissionError` without the right to trace it (ptrace(2), PTRACE_MODE_READ_FSCREDS):
    that of its user, with no more capabilities than the one who looks, or CAP_SYS_PTRACE. Raises
    another `OSError` when it is gone.
    """
    # Read as a link, not followed: that is allowed wherever looking is.
    namespace = int(os.readlink(f"/proc/{pid}/ns/mnt")[5:-1])  # noqa: PTH115 - `mnt:[1]`
    return namespace, os.readlink(f"/proc/{pid}/root")  # noqa: PTH115 - as it is written


def _look_around() -> tuple[dict[int, int], dict[int, int], dict[int, ShareId]]:
    """Return every process's parent and mount namespace, and the namespaces known by their mounts.

    A process in a root folder of its own sees only the mounts below that: it says nothing about
    its namespace unless it has the share's mount. So one look is taken for each root folder.
    """
    parents: dict[int, int] = {}
    namespaces: dict[int, int] = {}
    by_namespace: dict[int, ShareId] = {}
    looked: set[tuple[int, str]] = set()
    for pid in _pids():
        fields = _stat(pid)
        if fields is None or fields[0] in "ZX":
            continue
        parents[pid] = int(fields[1])
        try:
            view = _look_at(pid)
        except OSError:
            continue  # another user's, or gone
        namespace = namespaces[pid] = view[0]
        if namespace in by_namespace or view in looked:
            continue
        looked.add(view)
        found = _share_of_mounts(pid)
        if found:
            by_namespace[namespace] = ShareId(found)
    return parents, namespaces, by_namespace


def _share_of_ancestors(
    pid: int, parents: Mapping[int, int], roots: Mapping[int, ShareId], strangers: Collection[int]
) -> ShareId | None:
    """Return the share whose root (its runner, a process of it) is the nearest such ancestor."""
    seen = 0
    while pid and seen < len(parents) and pid not in strangers:
        pid = parents.get(pid, 0)
        if pid in roots:
            return roots[pid]
        seen += 1
    return None
