# SPDX-License-Identifier: Apache-2.0
"""Where a GPU's control daemon has its files, and what is written down about it.

    mps/UUID/pipe/          the daemon's pipe directory: its clients find it by that
    mps/UUID/shares/PART    the pipe directory of a share's programs (`parts`)
    mps/UUID/log/           the daemon's and its servers' own log files
    mps/UUID/lock           held by whoever supervises the daemon
    mps/UUID/status.json    how it is, and what the GPU's compute mode was before
    mps/UUID/wanted         there while somebody waits for the GPU to be no longer kept for MPS
    mps/UUID/wake           a pipe: the supervisor looks at once, a share has come
    mps/UUID/events.log     what the supervisor did, a line each

A status is replaced as a whole by the supervisor alone; everybody reads it. It is a journal too:
what has to be put back is in it before it is changed. `msgspec` is loaded where there is one to be
read or written, so that commands that only show start fast on a machine without MPS.
"""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Final

from allotment.model.errors import StateError

__all__ = [
    "OLDER",
    "WITH_NAMESPACES",
    "DaemonState",
    "Journal",
    "Loss",
    "MpsPlace",
    "MpsStatus",
    "process_start",
]

_LONGEST_SOCKET: Final = 107
"""Bytes of a path in `sockaddr_un` (unix(7)); the driver's own programs use the path as it is."""
_LONGEST_NAME: Final = "pipe/control_privileged"
OLDER: Final = 2
WITH_NAMESPACES: Final = 3
"""Versions of a daemon's protocol: the older one is in every driver with MPS."""
_MOST_EVENTS: Final = 256 << 10


class DaemonState(StrEnum):
    """How a GPU's control daemon is."""

    STOPPED = "stopped"
    STARTING = "starting"
    READY = "ready"
    """It has answered a command, and a server is active."""
    FAULTED = "faulted"
    """A program's fault has ended all clients of the GPU; new ones wait until these have left."""
    STOPPING = "stopping"
    FAILED = "failed"
    """It cannot be started; `problem` says why."""


@dataclass(frozen=True, slots=True)
class Loss:
    """Programs that lost what they had on the GPU, and why."""

    time: float
    """Seconds after the epoch."""
    reason: str
    shares: tuple[str, ...]
    """Names of the shares that were on the GPU."""
    recovered_s: float | None = None
    """Seconds until the daemon was ready again; None: it is not, or it never left."""


@dataclass(frozen=True, slots=True)
class MpsStatus:
    """What is known of one GPU's control daemon."""

    state: DaemonState = DaemonState.STOPPED
    daemon: int | None = None
    """Its process id."""
    daemon_start: int = 0
    """Field 22 of its `/proc/PID/stat`, so that a later process of the number is not it."""
    supervisor: int | None = None
    mode_before: int | None = None
    """The GPU's compute mode as it is to be put back; None: it is nothing of ours."""
    is_exclusive: bool = False
    """The GPU lets nobody in but MPS clients."""
    restarts: int = 0
    losses: tuple[Loss, ...] = field(default=())
    """The last few, oldest first."""
    problem: str = ""
    hint: str = ""
    protocol: int = 0
    """Of the daemon, the last one where none runs: 2, or 3 with a namespace for each share. It
    stays for as long as the GPU is kept. 0: none yet."""
    older_because: str = ""
    """Why the daemon has the older protocol, where the driver has protocol 3."""
    parts: tuple[str, ...] = ()
    """Names of the shares' parts that are made: their programs can start."""
    is_busy: bool = False
    """The problem is that the GPU is somebody else's, and may be over when they have ended."""

    @property
    def has_namespaces(self) -> bool:
        """Whether the daemon itself holds each share to its part."""
        return self.protocol == WITH_NAMESPACES

    @property
    def holds_gpu(self) -> bool:
        """Whether nobody but MPS clients may be on the GPU, or a daemon is there."""
        return self.mode_before is not None or self.daemon is not None


@dataclass(frozen=True, slots=True)
class MpsPlace:
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
        """Make the folders, for users of every kind to go through; raise `StateError`."""
        longest = len(os.fsencode(self.root / _LONGEST_NAME))
        if not simulated and longest > _LONGEST_SOCKET:
            raise StateError(
                f"{self.root}: the control daemon's sockets would have paths of {longest} bytes, at"
                f" most {_LONGEST_SOCKET} can be",
                hint="choose a state folder with a shorter path by --state or ALLOTMENT_STATE",
            )
        try:
            for folder in (self.root.parent, self.root, self.pipes, self.parts, self.logs):
                folder.mkdir(exist_ok=True)
                folder.chmod(0o755)
        except OSError as error:
            raise StateError(f"{self.root}: cannot be made: {error.strerror}") from error

    def status(self) -> MpsStatus:
        """Return what is written down; of what cannot be read, that nothing is known."""
        try:
            data = (self.root / "status.json").read_bytes()
        except OSError:
            return MpsStatus()
        import msgspec

        try:
            return msgspec.json.decode(data, type=MpsStatus)
        except msgspec.MsgspecError:
            return MpsStatus()

    def is_written(self) -> bool:
        """Tell whether anything is written down: a supervisor finds that its place was removed."""
        return (self.root / "status.json").exists()

    def write(self, status: MpsStatus) -> None:
        """Replace what is written down; raise `StateError`."""
        import msgspec

        path = self.root / "status.json"
        draft = path.with_name(".status.json")
        try:
            draft.write_bytes(msgspec.json.encode(status) + b"\n")
            draft.replace(path)
        except OSError as error:
            raise StateError(f"{path}: cannot be written: {error.strerror}") from error

    def ask_for_way(self) -> None:
        """Have a daemon that no share needs stop at once; who may not write here has to wait."""
        with suppress(OSError):
            (self.root / "wanted").touch()

    def is_wanted(self) -> bool:
        """Tell whether somebody waits for that."""
        return (self.root / "wanted").exists()

    def forget_wish(self) -> None:
        """Take note that the GPU was given back, or that shares came first."""
        with suppress(OSError):
            (self.root / "wanted").unlink(missing_ok=True)

    def listen(self) -> int:
        """Return a descriptor that can be read from when `wake` was called; raise `StateError`."""
        path = self.root / "wake"
        try:
            if not path.is_fifo():
                path.unlink(missing_ok=True)
                os.mkfifo(path, 0o600)
            return os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            raise StateError(f"{path}: cannot be made: {error.strerror}") from error

    def wake(self) -> None:
        """Have the supervisor look at the shares at once; without one nothing happens."""
        with suppress(OSError):
            descriptor = os.open(self.root / "wake", os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                os.write(descriptor, b"x")
            finally:
                os.close(descriptor)

    def tell(self, message: str) -> None:
        """Add a line to the log of what was done; a full disk takes none."""
        path = self.root / "events.log"
        with suppress(OSError):
            if path.exists() and path.stat().st_size > _MOST_EVENTS:
                path.replace(path.with_suffix(".log.1"))
            with path.open("a", encoding="utf-8") as log:
                log.write(f"{datetime.now(UTC).isoformat(timespec='milliseconds')} {message}\n")

    @contextmanager
    def owned(self) -> Iterator[bool]:
        """Be the supervisor meanwhile; False where there is one already.

        The kernel gives the lock up with its holder.
        """
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
        """Tell whether programs of a part can start: a daemon is ready, and somebody keeps it.

        That it lives is asked of the kernel: who has just begun to keep it has not looked yet.
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
        """Tell whether somebody supervises now."""
        with suppress(OSError), self.owned() as mine:
            return not mine
        return False


class Journal:
    """A GPU's status as its supervisor has it: what changes is written down at once."""

    def __init__(self, place: MpsPlace) -> None:
        """Take over what a supervisor before left; its problem is over until it comes again."""
        self.place = place
        self.status = replace(
            place.status(), supervisor=os.getpid(), problem="", hint="", is_busy=False
        )

    def write(self, **changes: object) -> None:
        """Change these fields; raise `StateError`, with the change made in `status` alone."""
        self.status = replace(self.status, **changes)  # type: ignore[arg-type]
        self.place.write(self.status)


def process_start(pid: int) -> int | None:
    """Return field 22 of /proc/PID/stat (proc(5)): clock ticks after boot; None: it is gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    fields = text[text.rindex(")") + 2 :].split()
    return None if fields[0] in "ZX" else int(fields[19])
