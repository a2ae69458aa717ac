# SPDX-License-Identifier: Apache-2.0
"""The files of a GPU's control daemon, and its status.

    mps/UUID/pipe/          the daemon's pipe directory: its clients find it by that
    mps/UUID/shares/PART    the pipe directory of a share's programs (`Parts`)
    mps/UUID/log/           the daemon's and its servers' own log files
    mps/UUID/lock           held by the daemon's supervisor
    mps/UUID/status.json    the daemon's status, and the GPU's compute mode before
    mps/UUID/wanted         exists while another mode waits for the GPU
    mps/UUID/wake           a pipe: a share was created, the supervisor checks at once
    mps/UUID/events.log     the supervisor's actions, a line each

Only the supervisor replaces the status; all read it. It is a journal too: it has a setting's old
value before the setting is changed.
"""

import fcntl
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Final

import msgspec

from allotment.files import atomic_write, open_regular, read_regular
from allotment.model.errors import StateError
from allotment.model.structs import prepared, replace

_LONGEST_SOCKET: Final = 107
"""Bytes of a path in `sockaddr_un` (unix(7)); the driver's own programs use the path as it is."""
_LONGEST_NAME: Final = "pipe/control_privileged"
OLDER: Final = 2
WITH_NAMESPACES: Final = 3
"""Versions of a daemon's protocol: the older one is in every driver with MPS."""
_MOST_EVENTS: Final = 256 << 10
_LONGEST: Final = 1 << 20
"""Bytes of a status that are read."""


class DaemonState(StrEnum):
    """State of a GPU's control daemon."""

    STOPPED = "stopped"
    STARTING = "starting"
    READY = "ready"
    """It has answered a command, and a server is active."""
    FAULTED = "faulted"
    """A program's fault has ended all clients of the GPU; new ones wait until these have ended."""
    STOPPING = "stopping"
    FAILED = "failed"
    """It cannot be started; `problem` has the reason."""


class Loss(msgspec.Struct, frozen=True):
    """Programs that lost their GPU state, and the reason."""

    time: float
    """Seconds after the epoch."""
    reason: str
    shares: tuple[str, ...]
    """Names of the shares that were on the GPU."""
    recovered_s: float | None = None
    """Seconds until the daemon was ready again; None: it is not, or it kept running."""


class MpsStatus(msgspec.Struct, frozen=True):
    """The recorded status of one GPU's control daemon."""

    state: DaemonState = DaemonState.STOPPED
    daemon: int | None = None
    """Its process id."""
    daemon_start: int = 0
    """Field 22 of its `/proc/PID/stat`, which differs for a later process with the number."""
    supervisor: int | None = None
    mode_before: int | None = None
    """The GPU's compute mode to restore; None: unchanged by us."""
    is_exclusive: bool = False
    """The GPU admits only MPS clients."""
    restarts: int = 0
    losses: tuple[Loss, ...] = msgspec.field(default=())
    """The last few, oldest first."""
    problem: str = ""
    hint: str = ""
    protocol: int = 0
    """The current or last daemon's: 2, or 3 with a namespace for each share; unchanged while the
    GPU is reserved. 0: none yet."""
    older_because: str = ""
    """Why the daemon has the older protocol although the driver has protocol 3."""
    parts: tuple[str, ...] = ()
    """Names of the ready parts: their programs can start."""
    is_busy: bool = False
    """The problem is other programs on the GPU, and may end with them."""

    @property
    def has_namespaces(self) -> bool:
        """The daemon itself limits each share to its part."""
        return self.protocol == WITH_NAMESPACES

    @property
    def holds_gpu(self) -> bool:
        """The GPU is reserved for MPS clients, or a daemon exists."""
        return self.mode_before is not None or self.daemon is not None


class MpsPlace(msgspec.Struct, frozen=True):
    """One GPU's files."""

    root: Path

    @property
    def pipes(self) -> Path:
        """The daemon's pipe directory."""
        return self.root / "pipe"

    @property
    def logs(self) -> Path:
        """The folder of the daemon's log files."""
        return self.root / "log"

    @property
    def parts(self) -> Path:
        """The folder of the shares' pipe directories."""
        return self.root / "shares"

    def part(self, name: str) -> Path:
        """Return the pipe directory of a share's programs, which may be a link to the daemon's."""
        return self.parts / name

    def prepare(self, *, simulated: bool) -> None:
        """Create the folders, readable for all users; raise `StateError`."""
        longest = len(os.fsencode(self.root / _LONGEST_NAME))
        if not simulated and longest > _LONGEST_SOCKET:
            raise StateError(
                f"{self.root}: the control daemon's sockets would have paths of {longest} bytes, at"
                f" most {_LONGEST_SOCKET} can be",
                hint="choose a state folder with a shorter path by --state or ALLOTMENT_STATE",
            )
        folders = (self.root.parent, self.root, self.pipes, self.parts, self.logs)
        try:
            for folder in folders:
                folder.mkdir(exist_ok=True)
                self.check_owner()
            for folder in folders:
                folder.chmod(0o755)
        except OSError as error:
            raise StateError(f"{self.root}: cannot be made: {error.strerror}") from error

    def check_owner(self) -> None:
        """Raise `StateError` if another user made the folders, and may have put links into them."""
        for folder in (self.root.parent, self.root):
            try:
                status = folder.lstat()
            except FileNotFoundError:
                return
            if status.st_uid in {0, os.geteuid()} and stat.S_ISDIR(status.st_mode):
                continue
            raise StateError(
                f"{folder} belongs to another user (uid {status.st_uid}), who could lead its files"
                " elsewhere",
                hint=f"let root remove it: rm -r {folder}",
            )

    def status(self) -> MpsStatus:
        """Return the recorded status; an empty one if it cannot be read."""
        try:
            data = read_regular(self.root / "status.json", _LONGEST)
        except OSError:
            return MpsStatus()
        try:
            return msgspec.json.decode(data, type=prepared(MpsStatus))
        except msgspec.MsgspecError:
            return MpsStatus()

    def is_written(self) -> bool:
        """Whether a status exists; False shows a supervisor that its files were removed."""
        return (self.root / "status.json").exists()

    def write(self, status: MpsStatus) -> None:
        """Replace the status; raise `StateError`."""
        path = self.root / "status.json"
        try:
            atomic_write(path, msgspec.json.encode(status) + b"\n")
        except OSError as error:
            raise StateError(f"{path}: cannot be written: {error.strerror}") from error

    def ask_for_way(self) -> None:
        """Request that an unused daemon stops at once. Without write access: wait."""
        with suppress(OSError, StateError):
            self.check_owner()
            (self.root / "wanted").touch()

    def is_wanted(self) -> bool:
        """Whether `ask_for_way` was called."""
        return (self.root / "wanted").exists()

    def forget_wish(self) -> None:
        """Withdraw the request: the GPU was released, or new shares need it."""
        with suppress(OSError, StateError):
            self.check_owner()
            (self.root / "wanted").unlink(missing_ok=True)

    def listen(self) -> int:
        """Return a descriptor that is readable after `wake`; raise `StateError`."""
        path = self.root / "wake"
        try:
            if not path.is_fifo():
                path.unlink(missing_ok=True)
                os.mkfifo(path, 0o600)
            return os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            raise StateError(f"{path}: cannot be made: {error.strerror}") from error

    def wake(self) -> None:
        """Make the supervisor, if any, check the shares at once."""
        with suppress(OSError, StateError):
            self.check_owner()
            descriptor = os.open(self.root / "wake", os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                os.write(descriptor, b"x")
            finally:
                os.close(descriptor)

    def log(self, message: str) -> None:
        """Append a line to events.log, unless the disk is full."""
        path = self.root / "events.log"
        with suppress(OSError):
            if path.exists() and path.stat().st_size > _MOST_EVENTS:
                path.replace(path.with_suffix(".log.1"))
            with path.open("a", encoding="utf-8") as file:
                file.write(f"{datetime.now(UTC).isoformat(timespec='milliseconds')} {message}\n")

    @contextmanager
    def owned(self) -> Iterator[bool]:
        """Be the supervisor meanwhile; False if another process is.

        The kernel releases the lock with its holder. Raises `StateError` in another user's folder.
        """
        self.check_owner()
        descriptor = os.open(self.root / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
            else:
                yield True
        finally:
            os.close(descriptor)

    def serves(self, part: str) -> bool:
        """Whether programs of a part can start: a supervised daemon is ready.

        The kernel shows whether it lives: a new supervisor may not have checked yet.
        """
        status = self.status()
        return (
            status.state in {DaemonState.READY, DaemonState.FAULTED}
            and status.daemon is not None
            and process_start(status.daemon) == status.daemon_start
            and part in status.parts
            and self.is_owned()
        )

    def is_owned(self) -> bool:
        """Whether a process supervises the daemon now."""
        with suppress(OSError):
            descriptor = open_regular(self.root / "lock", os.O_RDONLY)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
            finally:
                os.close(descriptor)
        return False


class MpsJournal:
    """The supervisor's copy of the status; each change is written at once."""

    def __init__(self, place: MpsPlace) -> None:
        """Take over the previous supervisor's status, without its problem."""
        self.place = place
        self.status = replace(
            place.status(), supervisor=os.getpid(), problem="", hint="", is_busy=False
        )

    def write(self, **changes: object) -> None:
        """Change these fields; raise `StateError`, with the change made in `status` alone."""
        self.status = replace(self.status, **changes)  # type: ignore[arg-type]
        self.place.write(self.status)


def process_start(pid: int) -> int | None:
    """Return field 22 of /proc/PID/stat (proc(5)): clock ticks after boot; None: it has ended."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    fields = text[text.rindex(")") + 2 :].split()
    return None if fields[0] in "ZX" else int(fields[19])
