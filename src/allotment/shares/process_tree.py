# SPDX-License-Identifier: Apache-2.0
"""The machine's processes: which are alive, and which belong to a share.

A process belongs to a share by its mount namespace (with the share's ledger mounted, or recorded),
the share's record, or by descent from such a process or from the share's runner. A record counts
only for processes of its owner, unless that is root. A process's environment, which it chooses,
counts only in shares that are injected by it, and only for programs of the share's owner. Processes
that this user may not inspect belong to other users' shares, and are skipped. The node agent has to
see all processes (`unseen_processes`).
"""

import os
import re
import signal
import struct
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import NamedTuple

from allotment.files import read_file
from allotment.ledger import ProcessUse
from allotment.ledger.layout import NAME_BYTES
from allotment.model.formats import format_pids
from allotment.model.pods import PodUid
from allotment.model.shares import Injection, Runner, Share, ShareId
from allotment.shares.record import read_traces

_PROC = Path("/proc")
_MOUNTED_SHARE = re.compile(
    rb"^\d+ \d+ (\S+) (\S*)/([0-9a-f]+)/(?:usage|id)"
    rb" /run/allotment/share/(?:[0-9a-f]+/)?(?:usage|id) ",
    re.MULTILINE,
)
_MOUNT_ID = re.compile(rb"^mnt_id:\s*(\d+)$", re.MULTILINE)
_ESCAPED = re.compile(rb"\\([0-7]{3})")
# `pod` and a uid, with dashes or, by systemd, underscores (kubelet pkg/kubelet/cm); a static pod's
# is a hash. Seen from within a control group namespace, a pod's other container is `/../ID`.
_POD_GROUP = re.compile(rb"[/-]pod[0-9a-f][0-9a-f_-]{31,35}(?![0-9a-f])|:/\.\./", re.MULTILINE)
_CONTAINER_GROUP = re.compile(
    rb"[/-]pod([0-9a-f][0-9a-f_-]{31,35})(?:\.slice)?/(?:[a-z-]+-)?([0-9a-f]{64})?"
)
_UNSEEN = "a share would count as unused while a program runs in it"
_SHARE_VARIABLE = b"ALLOTMENT_SHARE="
_AT_SECURE = 23  # <elf.h>
_PF_KTHREAD = 0x00200000  # <linux/sched.h>
_PAGE = 4096
_LONGEST = 4 << 20
_READ_ONLY = os.O_RDONLY | os.O_CLOEXEC
_NONE: frozenset[ShareId] = frozenset()
_OF_CONTAINERS = frozenset({Injection.CDI, Injection.MOUNTS})
_NO_USER = -1
_JOINS_S = 2


_Image = tuple[bytes, ...]
"""A process and its program: its start time, and where code, arguments and environment are."""


@cache
def _boot_id() -> str:
    try:
        return (_PROC / "sys/kernel/random/boot_id").read_text().strip()
    except OSError:  # not always readable; PID and start time still identify a process
        return ""


def _read(pid: int | str, name: str) -> bytes:
    """Read a file of a process in /proc; empty if the process is gone or another user's.

    Of a very long one, the start: each process may have 100,000 mounts, and any arguments.
    """
    try:
        return read_file(f"{_PROC}/{pid}/{name}", most=_LONGEST)
    except OSError:
        return b""


def _stat(pid: int) -> list[bytes] | None:
    """The fields of /proc/PID/stat from the third on; None: the process is gone."""
    try:
        descriptor = os.open(f"{_PROC}/{pid}/stat", _READ_ONLY)
        try:
            data = os.read(descriptor, _PAGE)  # always whole: it is one record of the kernel's
        finally:
            os.close(descriptor)
    except OSError:
        return None
    return data[data.rindex(b")") + 2 :].split() if data else None


def start_time(pid: int) -> int | None:
    """Clock ticks after boot; None: the process is gone."""
    fields = _stat(pid)
    return int(fields[19]) if fields else None


def clock_ticks() -> float:
    """Return the time since boot, as `start_time` has it."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) * os.sysconf("SC_CLK_TCK")


def began_after(pid: int, ticks: float) -> bool:
    """Tell whether a process began since then, or so shortly before that it joined no share yet."""
    start = start_time(pid)
    return start is not None and start > ticks - _JOINS_S * os.sysconf("SC_CLK_TCK")


def is_alive(runner: Runner) -> bool:
    """True if exactly this process still runs; a zombie does not."""
    if runner.boot_id != _boot_id():
        return False
    fields = _stat(runner.pid)
    return fields is not None and int(fields[19]) == runner.start_time and fields[0] not in b"ZX"


def kill(pids: Iterable[int]) -> list[int]:
    """Kill processes; those that have ended are skipped. Return those that may not be killed."""
    refused = []
    for pid in pids:
        try:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        except PermissionError:
            refused.append(pid)
    return refused


def is_running(pid: int) -> bool:
    """False if the process is gone, or a zombie."""
    fields = _stat(pid)
    return fields is not None and fields[0] not in b"ZX"


def is_stopped(pid: int) -> bool:
    """True if a signal stopped the process, which SIGCONT continues; false for a debugger."""
    fields = _stat(pid)
    return fields is not None and fields[0] == b"T"


def pid_inside(pid: int) -> int:
    """The PID of a process in its innermost PID namespace."""
    pids = _status(pid, b"NSpid:")
    return int(pids[-1]) if pids else pid


def names_inside(pid: int) -> set[tuple[int, int | None]]:
    """How a process may name itself in its ledger: its PID and start time as seen inside.

    A time namespace moves the clock of start times. A process that entered one names itself by the
    time before, or after an exec by the other.
    """
    number, start = pid_inside(pid), start_time(pid)
    names = {(number, start)}
    for line in _read(pid, "timens_offsets").splitlines():
        clock, seconds, _ = line.split()
        if clock == b"boottime" and start is not None:
            names.add((number, start + int(seconds) * os.sysconf("SC_CLK_TCK")))
    return names


def _status(pid: int, name: bytes) -> list[bytes]:
    """The words of a line of /proc/PID/status; empty: the process is gone."""
    for line in _read(pid, "status").splitlines():
        if line.startswith(name):
            return line.split()[1:]
    return []


def host_pid(process: ProcessUse, inside: Mapping[tuple[int, int | None], int]) -> int | None:
    """The PID on the machine of a slot's process, by the names that it may have inside.

    Without a member of that name it is what programs wrote. Of a process that this user may not
    inspect, that is shown, and never acted on.
    """
    pid = inside.get((process.pid, process.start_time))
    if pid is None and start_time(process.pid) == process.start_time:
        try:
            _inspect(process.pid)
        except PermissionError:
            return process.pid
        except OSError:
            return None
    return pid


def attached(
    processes: Iterable[ProcessUse], directory: Path, members: Collection[int]
) -> set[int]:
    """The slots' processes that are no members, and have the share's ledger mapped.

    So a program is found that shows no other mark: it has overwritten its environment, say. Their
    PIDs have to be the machine's.
    """
    others = {
        each.pid
        for each in processes
        if each.pid not in members and start_time(each.pid) == each.start_time
    }
    try:
        inode = os.stat(f"{directory}/usage").st_ino if others else 0  # noqa: PTH116 - plain path
    except OSError:  # the share is gone
        return set()
    mapping = re.compile(rb" %d +/.*/usage\b" % inode)
    return {pid for pid in others if mapping.search(_read(pid, "maps"))}


def command_of(pid: int) -> str:
    """The command line of a process; empty if it is gone."""
    return _read(pid, "cmdline").rstrip(b"\0").replace(b"\0", b" ").decode(errors="replace")


def whole_command(start: str, pid: int | None) -> str:
    """Return a process's command line, of which its slot in the ledger has the start.

    If the process cannot be read, the start ends with its last whole argument.
    """
    if len(start.encode()) < NAME_BYTES - 1:
        return start
    if pid is not None and (command := command_of(pid)):
        return command
    arguments = start.rpartition(" ")[0]
    return f"{arguments} ..." if arguments else start


def _pids() -> Iterator[int]:
    for name in os.listdir("/proc"):  # noqa: PTH208 - names are all that is needed
        if name.isdecimal():
            yield int(name)


def _directory_of_environment(pid: int) -> str:
    environment = _read(pid, "environ")
    if _SHARE_VARIABLE not in environment:  # most programs of the machine
        return ""
    for variable in environment.split(b"\0"):
        if variable.startswith(_SHARE_VARIABLE) and not _is_set_user_id(pid):
            return os.fsdecode(variable.removeprefix(_SHARE_VARIABLE))
    return ""


class _Environments:
    """The shares that programs' environments name, each read once."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[_Image, str]] = {}

    def directory(self, pid: int, image: _Image) -> str:
        known = self._known.get(pid)
        if known is None or known[0] != image:
            known = self._known[pid] = (image, _directory_of_environment(pid))
        return known[1]

    def forget_others(self, pids: Collection[int]) -> None:
        # A copy: other threads may add to it meanwhile.
        self._known = {pid: known for pid, known in [*self._known.items()] if pid in pids}


_environments = _Environments()


def _is_set_user_id(pid: int) -> bool:
    """Whether a process gained rights when it began: the loader ignored its variables then.

    Programs such as sudo run as root with the variables of the user that calls them.
    """
    data = _read(pid, "auxv")
    return (_AT_SECURE, 1) in struct.iter_unpack("@LL", data[: len(data) // 16 * 16])


def named(pid: int) -> Runner:
    """Identify a process of this machine, also after its PID is reused."""
    return Runner(pid, start_time(pid) or 0, _boot_id())


def children() -> frozenset[int]:
    """The children of this process; empty if the kernel does not list them."""
    try:
        with open("/proc/thread-self/children", encoding="ascii") as file:  # noqa: PTH123 - start-up time
            return frozenset(map(int, file.read().split()))
    except OSError:
        return frozenset()


def children_of(pid: int) -> frozenset[int]:
    """The children of another process; empty if it is gone or the kernel does not list them."""
    pids: set[int] = set()
    for path in (_PROC / str(pid) / "task").glob("*/children"):
        with suppress(OSError):  # the thread has ended
            pids.update(map(int, path.read_text("ascii").split()))
    return frozenset(pids)


class Census(NamedTuple):
    """What runs of some shares at one moment."""

    members: dict[ShareId, set[int]]
    """The processes of each share, by PID on the host, without its runner."""
    running: set[ShareId]
    """Those whose runner lives, as `living_runner` has it."""


def census(
    shares: Iterable[tuple[Share, Path]], *, excluded: Collection[int] = ()
) -> dict[ShareId, set[int]]:
    """The processes of each share (with its directory), by PID on the host.

    Without the runner, `excluded`, and processes that descend only from these.
    """
    return take_census(shares, excluded=excluded).members


def take_census(shares: Iterable[tuple[Share, Path]], *, excluded: Collection[int] = ()) -> Census:
    """As `census`, with the shares whose runner lives."""
    known = list(shares)
    members: dict[ShareId, set[int]] = {share.id: set() for share, _ in known}
    users = {share.id: _only_user(share, directory) for share, directory in known}
    owners = {share.id: _record_owner(directory) for share, directory in known}
    by_directory = {
        str(directory): share.id
        for share, directory in known
        if share.injection is Injection.ENVIRONMENT
    }
    machine = _scan({directory.parent for _, directory in known})
    runners = {
        share.id: share.runner.pid
        for share, _ in known
        if share.runner is not None and machine.has(share.runner, owners[share.id])
    }
    roots = {pid: {share_id} for share_id, pid in runners.items()}
    recorded = _recorded_namespaces(known, machine, members, owners)
    for pid, namespace in machine.namespaces.items():
        recorders = recorded.get(namespace, _NONE)
        found = {each for each in recorders if _is_of(pid, owners[each])}
        claimed = machine.mounted.get(namespace, _NONE) & members.keys()
        if by_directory and not found and not claimed:
            named_share = by_directory.get(_environments.directory(pid, machine.images[pid]))
            claimed = {named_share} if named_share else set()
        if found or claimed:
            for share_id in found | {each for each in claimed if _is_of(pid, users[each])}:
                members[share_id].add(pid)
    _environments.forget_others(machine.images)
    for share_id, pids in members.items():
        for pid in pids:
            roots.setdefault(pid, set()).add(share_id)
    for pid in machine.parents:
        for share_id in _shares_of_ancestors(pid, machine.parents, roots, excluded):
            members[share_id].add(pid)
    return Census(members, set(runners))


def _recorded_namespaces(
    shares: Iterable[tuple[Share, Path]],
    machine: "_Scan",
    members: Mapping[ShareId, set[int]],
    owners: Mapping[ShareId, int | None],
) -> dict[int, set[ShareId]]:
    """The shares of namespaces by what is recorded, which adds to the members."""
    recorded: dict[int, set[ShareId]] = {}
    for share, directory in shares:
        traces, owner = read_traces(directory), owners[share.id]
        pids = members[share.id]
        pids.update(each.pid for each in traces.members if machine.has(each, owner))
        # Without a process in it, the namespace's number may have been reused.
        if traces.namespace is not None and (
            (share.runner is not None and machine.has(share.runner, owner))
            or any(machine.namespaces.get(pid) == traces.namespace for pid in pids)
        ):
            recorded.setdefault(traces.namespace, set()).add(share.id)
    return recorded


def living_runner(share: Share, directory: Path) -> Runner | None:
    """The process that the share belongs to, if it lives and the record may name it."""
    runner = share.runner
    if runner is None or not is_alive(runner) or not _is_of(runner.pid, _record_owner(directory)):
        return None
    return runner


def _record_owner(directory: Path) -> int | None:
    """The only user whose processes a share's record may name; None: all users, as it is root's.

    In a folder for all users each can write a record of its own, and any process into it.
    """
    try:
        return os.stat(directory).st_uid or None  # noqa: PTH116 - for each share
    except OSError:  # it is gone
        return _NO_USER


def _only_user(share: Share, directory: Path) -> int | None:
    """The only user whose processes can claim to be in a share; None: all users.

    Mounts of its files show it, unless other users reach these by their path: in a folder for all
    users each could mount them, in a namespace of its own. A container's programs may be any user,
    and can change mode and owner of the files: these say nothing there.
    """
    if share.injection in _OF_CONTAINERS:
        return None
    is_by_variable = share.injection is Injection.ENVIRONMENT
    try:
        status = os.stat(directory if is_by_variable else f"{directory}/usage")  # noqa: PTH116 - for each share
    except OSError:  # a mode without a ledger, or the share is gone
        return None
    return None if status.st_mode & 0o002 else status.st_uid


def _is_of(pid: int, user: int | None) -> bool:
    """Whether a process is of a user, by its real user. All users, if it is None."""
    return user is None or _status(pid, b"Uid:")[:1] == [b"%d" % user]


def unseen_processes() -> str | None:
    """Why processes of pods cannot be inspected; None: all can.

    For an agent's start: a share with unseen processes would count as unused, and its devices would
    be given to others. Processes outside of pods do not matter.
    """
    if os.getpid() == 1:
        return f"only this process of the node can be seen: the pod needs hostPID; {_UNSEEN}"
    denied = []
    for pid in _pids():
        try:
            _inspect(pid)
        except PermissionError:
            if is_in_pod(pid):
                denied.append(pid)
        except OSError:
            continue  # gone
    if not denied:
        return None
    return (
        f"{len(denied)} processes of pods cannot be inspected (PID {format_pids(denied)}):"
        " run as root with the capability SYS_PTRACE and no AppArmor or SELinux profile;"
        f" {_UNSEEN}"
    )


def is_in_pod(pid: int, uid: str = "") -> bool:
    """True if a process is in a pod, by its control groups, which every user may read.

    With `uid`: in this pod.
    """
    groups = _read(pid, "cgroup")
    if uid:
        own = rb"pod%b(?![0-9a-f-])" % re.escape(uid.encode())
        return re.search(own, groups.replace(b"_", b"-")) is not None
    return _POD_GROUP.search(groups) is not None


class PodGroup(NamedTuple):
    """The container whose control group a process is in."""

    pod: PodUid
    container: str
    """The runtime's id; empty: it is not in the group's name."""


def pod_group(pid: int) -> PodGroup | None:
    """The container of a process, by its control groups; None: not in a pod, or gone."""
    match = _CONTAINER_GROUP.search(_read(pid, "cgroup"))
    if match is None:
        return None
    uid = match[1].replace(b"_", b"-").decode()
    return PodGroup(PodUid(uid), (match[2] or b"").decode())


def _inspect(pid: int) -> tuple[int, str]:
    """A process's mount namespace and root folder.

    Raises `PermissionError` without the right to trace it (ptrace(2), PTRACE_MODE_READ_FSCREDS): it
    has to be of the same user, without more capabilities, or the caller needs CAP_SYS_PTRACE.
    Raises another `OSError` if the process is gone.
    """
    # The link is read, and not followed.
    namespace = int(os.readlink(f"/proc/{pid}/ns/mnt")[5:-1])  # noqa: PTH115 - `mnt:[1]`
    return namespace, os.readlink(f"/proc/{pid}/root")  # noqa: PTH115 - as it is written


class _Scan(NamedTuple):
    """The machine's processes at one moment, without the kernel's own and zombies."""

    parents: dict[int, int]
    namespaces: dict[int, int]
    """Of those that this user may inspect."""
    mounted: dict[int, set[ShareId]]
    """The shares of namespaces, by their mounts."""
    images: dict[int, _Image]

    def has(self, process: Runner, user: int | None) -> bool:
        """Whether exactly this process is one of them, and of that user; None: of any."""
        image = self.images.get(process.pid)
        return (
            image is not None
            and int(image[0]) == process.start_time
            and process.boot_id == _boot_id()
            and _is_of(process.pid, user)
        )


def _scan(folders: Iterable[Path]) -> _Scan:
    """Look at every process.

    Mounts count of files in `folders`, the shares' folders. A process in its own root folder sees
    only the mounts below it. So they are read once for each namespace and root folder.
    """
    places = set(map(_place, folders))
    parents: dict[int, int] = {}
    namespaces: dict[int, int] = {}
    mounted: dict[int, set[ShareId]] = {}
    images: dict[int, _Image] = {}
    inspected: set[tuple[int, str]] = set()
    for pid in _pids():
        fields = _stat(pid)
        if fields is None or fields[0] in b"ZX" or int(fields[6]) & _PF_KTHREAD:
            continue
        parents[pid] = int(fields[1])
        images[pid] = (fields[19], *fields[23:26], *fields[45:49])
        try:
            view = _inspect(pid)
        except OSError:
            continue  # another user's, or gone
        namespace = namespaces[pid] = view[0]
        if namespace in mounted or view in inspected:
            continue
        inspected.add(view)
        mounts = _MOUNTED_SHARE.findall(_read(pid, "mountinfo"))
        if found := {
            ShareId(share.decode())
            for device, folder, share in mounts
            if (device, _plain(folder)) in places
        }:
            mounted[namespace] = found
    return _Scan(parents, namespaces, mounted, images)


def _place(folder: Path) -> tuple[bytes, bytes] | None:
    """The file system of a folder and its path there, as every mountinfo has them; None: unknown.

    A tenant can mount a file of the same name at the same path, but no other file of this place.
    """
    try:
        descriptor = os.open(folder, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        path = os.readlink(f"/proc/self/fd/{descriptor}")  # noqa: PTH115 - as it is written
        number = _MOUNT_ID.search(_read("self", f"fdinfo/{descriptor}"))
    finally:
        os.close(descriptor)
    for line in _read("self", "mountinfo").splitlines():
        fields = line.split()
        if number and fields[0] == number[1]:
            root, target = (_plain(field).rstrip(b"/") for field in fields[3:5])
            return fields[2], root + os.fsencode(path).removeprefix(target)
    return None


def _plain(path: bytes) -> bytes:
    """A path of mountinfo, where blanks and backslashes are written in octal."""
    return _ESCAPED.sub(lambda match: bytes((int(match[1], 8),)), path)


def _shares_of_ancestors(
    pid: int,
    parents: Mapping[int, int],
    roots: Mapping[int, set[ShareId]],
    excluded: Collection[int],
) -> Collection[ShareId]:
    """The shares of the nearest ancestor that is a share's runner or process."""
    seen = 0
    while pid and seen < len(parents) and pid not in excluded:
        pid = parents.get(pid, 0)
        if pid in roots:
            return roots[pid]
        seen += 1
    return ()
