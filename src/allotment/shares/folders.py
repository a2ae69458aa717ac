# SPDX-License-Identifier: Apache-2.0
"""The state folder: its place, layout, version and lock; copies of the native libraries in it.

    version                 the layout's number
    lock                    flock: held while a share is placed and made, changed or removed
    events                  what happened to shares, one line each, the oldest dropped
    queue/                  commands that wait for room, one file each, by arrival
    shares/ID/              policy and usage (the ledger), share.json; made whole by one rename
    devices/UUID/           contract and seats: how the shares of a device take turns
    modes/UUID.json         the modes that a GPU may have, if restricted
    mig/UUID/               our MIG slices, and the lock for choosing their places
    mps/UUID/               the files of a GPU's MPS control daemon
    monitors/ID/            a claim's container that sees GPUs and takes nothing of them
    shim/HASH/              an immutable copy of the shim, named by its content
    simulated/              simulated machines, a copy of the simulated libraries, loader caches

The folder is `--state`, else ALLOTMENT_STATE, else /run/allotment where that is writable (root's,
or shared by all users when an administrator made it with mode 1777, or by a group's with mode
1770), else the user's own.
"""

import errno
import math
import os
import pwd
import re
import shutil
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Self

from allotment.files import atomic_write, open_regular, read_regular
from allotment.libraries import SHIM, SIMULATED, library_path
from allotment.model.errors import BusyError, StateError
from allotment.model.shares import ShareId

LAYOUT_VERSION = 2
_OLDEST_VERSION = 1  # without devices/: upgraded when a share is created
RUN_FOLDER = Path("/run/allotment")
CONFIG_FILE = Path("/etc/allotment/config.yaml")
_INSIDE = "share"
"""In RUN_FOLDER, a program finds its share there, before any variable names another."""
_LOCK_WAIT_S = 20.0
_LOCK_LONGEST_S = 300.0
_LOCK_NOTE_S = 5.0
_QUEUE_POLL_S = 0.2
_LONGEST_VERSION = 4096
_LONGEST_PATH = 960  # the ledger's library keeps a share's directory in 1024 bytes
_OF_GROUP = stat.S_ISVTX | stat.S_IWGRP
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_ELSEWHERE = "choose another folder with --state or ALLOTMENT_STATE"


def default_root() -> Path:
    """Return the state folder of this user on this machine; it may not exist."""
    named = os.environ.get("ALLOTMENT_STATE")
    if named:
        return Path(named).absolute()
    present = RUN_FOLDER if RUN_FOLDER.exists() else RUN_FOLDER.parent
    if os.access(present, os.W_OK | os.X_OK):
        return RUN_FOLDER
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime:
        return Path(runtime) / "allotment"
    home = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")  # noqa: PTH111 - never raises
    return Path(home) / "allotment"


def explained(error: OSError, path: Path, doing: str) -> StateError:
    """Turn a system error about a path into an error with the next step."""
    hint = {
        errno.ENOSPC: f"free some space there, or {_ELSEWHERE}",
        errno.EDQUOT: f"free some of your quota, or {_ELSEWHERE}",
        errno.EROFS: f"it is on a read-only file system: {_ELSEWHERE}",
        errno.ENAMETOOLONG: _ELSEWHERE,
        errno.ENOTDIR: f"a file is where a folder should be: {_ELSEWHERE}",
    }.get(error.errno or 0, f"make it yours and writable, or {_ELSEWHERE}")
    return StateError(f"{path}: cannot {doing}: {error.strerror or error}", hint=hint)


def user_name(uid: int) -> str:
    """Return `bob (uid 1000)`, or `uid 1000` for a user without a name here."""
    try:
        return f"{pwd.getpwuid(uid).pw_name} (uid {uid})"
    except KeyError:
        return f"uid {uid}"


def note(text: str) -> None:
    """Write a line to standard error, if it is open."""
    with suppress(OSError):
        os.write(2, f"allot: {text}\n".encode())


def is_common(mode: int) -> bool:
    """Whether a state folder is shared: by all users (1777), or by those of its group (1770)."""
    return bool(mode & stat.S_IWOTH) or mode & _OF_GROUP == _OF_GROUP


def shared_folder_command(root: Path) -> str:
    """Return an administrator's command that creates a state folder for all users."""
    return f"mkdir -p -m 1777 {root} && allot doctor --state {root}"


class StateFolder:
    """The paths of one state folder, its version check and its lock."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.shares = root / "shares"
        self.queue = root / "queue"
        self.devices = root / "devices"
        self.modes = root / "modes"
        self.mps = root / "mps"
        self.mig = root / "mig"
        self.monitors = root / "monitors"
        self.shims = root / "shim"
        self.simulated = root / "simulated"
        self.libraries = self.simulated / "lib"

    @classmethod
    def at(cls, root: Path | None) -> Self:
        """Return the folder at `root`, or the default one."""
        return cls(root.absolute() if root else default_root())

    def share(self, share: ShareId) -> Path:
        return self.shares / share

    def exists(self) -> bool:
        """Whether the folder exists and can be read; raise `StateError` if it is newer."""
        return self._version() is not None

    def _version(self) -> int | None:
        path = self.root / "version"
        try:
            text = read_regular(path, _LONGEST_VERSION).decode("ascii").strip()
        except FileNotFoundError:
            return None
        except (OSError, UnicodeDecodeError) as error:
            cause = error if isinstance(error, OSError) else OSError(errno.EINVAL, "not a number")
            raise explained(cause, path, "read the state folder's version") from error
        number = int(text) if text.isascii() and text.isdecimal() and len(text) < 9 else 0  # noqa: PLR2004 - int() is slow on absurd ones
        if _OLDEST_VERSION <= number <= LAYOUT_VERSION:
            return number
        if text.isascii() and text.isdecimal() and text.strip("0"):
            raise StateError(
                f"{self.root} was made by a newer Allotment (its layout is version {text[:20]},"
                f" this one reads {LAYOUT_VERSION})",
                hint=f"upgrade this Allotment, or {_ELSEWHERE}; nothing was changed",
            )
        raise StateError(
            f"{path}: {text[:20]!r} is not a version",
            hint=f"remove the folder if no share of it runs, or {_ELSEWHERE}",
        )

    def prepare(self, *, mode: int | None = None) -> None:
        """Create the missing parts of the folder; raise `StateError` if it cannot be used.

        `mode` replaces the folder's permissions (the node agent's folder is for root alone); None:
        unchanged, or readable for all.
        """
        length = len(os.fsencode(self.root))
        if length > _LONGEST_PATH:
            raise StateError(
                f"{str(self.root)[:60]}...: the path of the state folder has {length} bytes, at"
                f" most {_LONGEST_PATH} can be",
                hint=_ELSEWHERE,
            )
        version = self._version()
        if mode is not None:
            self._close(mode)
        if version == LAYOUT_VERSION and self._check_owners():
            self._check_writable()
            self._close_shares()
            return
        try:
            self.root.mkdir(mode=0o755, parents=True, exist_ok=True)
            self._check_owners()
            self._make_parts(self.root.stat().st_mode & 0o7777)
            self._check_owners()  # another user may have made one meanwhile
            self._close_shares()
            # Last: a folder with a version is complete.
            if version is None:
                _make_file(self.root / "version", f"{LAYOUT_VERSION}\n".encode(), 0o644)
            elif version < LAYOUT_VERSION:
                atomic_write(self.root / "version", f"{LAYOUT_VERSION}\n", mode=0o644)
        except OSError as error:
            path = Path(error.filename) if isinstance(error.filename, str) else self.root
            raise explained(error, path, "make the state folder") from error
        self._version()

    def share_names(self) -> list[str]:
        """Return the names in the folder of the shares, without links; raise `OSError`.

        Where another user can make a link, it leads to any folder.
        """
        folder = os.open(self.shares, _FOLDER)
        try:
            with os.scandir(folder) as entries:
                return sorted(each.name for each in entries if not each.is_symlink())
        finally:
            os.close(folder)

    def open_events(self, flags: int) -> int:
        """Open the file of events, which is for all who may make shares here; raise `OSError`."""
        return open_regular(self.root / "events", flags)

    @contextmanager
    def in_turn(
        self, machine: str, *, until: float, notice: Callable[[int], None]
    ) -> Iterator[None]:
        """Wait until no earlier caller for this machine is left, then be the first until the end.

        `notice` gets the number of earlier callers each time that it changes. A process that waits
        without an end (`until` is infinite) sleeps in the kernel; one that was killed loses its
        place. Raises `TimeoutError` at `until`, of the monotonic clock.
        """
        import fcntl

        name = f"{time.time_ns():020d}-{os.getpid()}-{machine}"
        draft = f".{name}"
        flags = os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            queue = self._open_queue()
            try:
                # Until it is locked, no other user may open it: they could lock it before.
                descriptor = os.open(draft, flags, 0o600, dir_fd=queue)
            except OSError:
                os.close(queue)
                raise
        except OSError as error:
            raise explained(error, self.queue, "wait in turn there") from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)  # before others see it: its owner lives
            os.fchmod(descriptor, 0o644)
            os.rename(draft, name, src_dir_fd=queue, dst_dir_fd=queue)
            while earlier := [
                each for each in _tickets(queue, machine, name) if not _has_gone(queue, each)
            ]:
                notice(len(earlier))
                _await_end(queue, earlier[-1], until)
            yield
        finally:
            for each in (draft, name):
                with suppress(FileNotFoundError):
                    os.unlink(each, dir_fd=queue)
            os.close(descriptor)
            os.close(queue)

    def _open_queue(self) -> int:
        """Open the queue's folder: what is removed in it must be in no folder of another's choice.

        Raises `OSError`, and `StateError` if it is another user's.
        """
        queue = os.open(self.queue, _FOLDER)
        try:
            self._check_owner(self.queue, os.fstat(queue))
        except StateError:
            os.close(queue)
            raise
        return queue

    def _close(self, mode: int) -> None:
        """Set the folder's permissions; they also keep others out of its subfolders."""
        try:
            self.root.mkdir(mode=mode, parents=True, exist_ok=True)
            if self.root.stat().st_mode & 0o7777 != mode:
                self.root.chmod(mode)
        except OSError as error:
            raise explained(error, self.root, "make the state folder") from error

    def _close_shares(self) -> None:
        """Keep other users from the shares' files, unless the folder is for all users.

        Every user inside a share may then write them: its mounts lead past these folders.
        """
        for folder in (self.shares, self.devices, self.queue):
            try:
                # Not by its path: where a folder is for all users, that may become a link.
                descriptor = os.open(folder, _FOLDER)
            except OSError as error:
                raise explained(error, folder, "keep other users out of it") from error
            try:
                mode = os.fstat(descriptor).st_mode
                if mode & 0o077 and not mode & 0o002:
                    os.fchmod(descriptor, 0o700)
            finally:
                os.close(descriptor)

    def is_closed(self) -> bool:
        """Whether only its owner reaches the shares' files by their paths."""
        return not any(each.stat().st_mode & 0o077 for each in (self.shares, self.devices))

    def _make_parts(self, permissions: int) -> None:
        is_for_all = is_common(permissions)
        if is_for_all:  # a group's as well: others do not come past the folder itself
            permissions = 0o1777
        parts = (self.shares, self.devices, self.queue, self.shims, self.simulated, self.libraries)
        for folder in parts:
            with suppress(FileExistsError):
                folder.mkdir()
                folder.chmod(permissions)  # subfolders are shared by all users like the root
        mode = 0o666 if is_for_all else 0o644
        for name in ("lock", "events"):
            _make_file(self.root / name, b"", mode)
        if is_for_all:  # root's, so that no user can close, remove or replace it
            for folder in self._inside():
                with suppress(FileExistsError):
                    folder.mkdir()

    def _inside(self) -> tuple[Path, ...]:
        """Where programs look for their share: any user could make that in a folder for all."""
        if self.root != RUN_FOLDER or not self.root.is_dir():
            return ()
        return (self.root / _INSIDE,) if is_common(self.root.stat().st_mode) else ()

    def _check_owners(self) -> bool:
        """Refuse what another user could replace: shares, libraries, the lock and the events.

        A folder's owner may rename any file in it, whatever its mode, and a file's owner may close
        or remove it. Programs would take a share of another user's making for theirs. So only root
        may create what all users use. Returns whether nothing is missing.
        """
        is_complete = True
        folders = (self.shares, self.devices, self.queue, *self._inside())
        libraries = (self.shims, self.simulated, self.libraries)
        files = (self.root / "lock", self.root / "events", self.root / "version")
        for path in (self.root, *folders, *libraries, *files):
            try:
                status = path.stat(follow_symlinks=path == self.root)
            except FileNotFoundError:
                root = self.root.stat()
                is_for_all = is_common(root.st_mode) and os.geteuid() != 0
                if root.st_uid in {0, os.geteuid()} and not is_for_all:
                    is_complete = False
                    continue
                raise StateError(
                    f"{path} does not exist, and only root may create it: {self.root} is for all"
                    " users",
                    hint=f"run as root: {shared_folder_command(self.root)}",
                ) from None
            self._check_owner(path, status)
        return is_complete

    def _check_owner(self, path: Path, status: os.stat_result) -> None:
        if status.st_uid in {0, os.geteuid()}:
            return
        if stat.S_ISDIR(status.st_mode):
            could = "replace what is in it"
            hint = f"{_ELSEWHERE}; one for all users is root's: {shared_folder_command(self.root)}"
        else:
            could = "close or remove it"
            hint = f"run as root: chown -h root {path}"
        raise StateError(
            f"{path} belongs to another user (uid {status.st_uid}), who could {could}", hint=hint
        )

    def _check_writable(self) -> None:
        if not os.access(self.shares, os.W_OK | os.X_OK):
            read_only = os.statvfs(self.shares).f_flag & os.ST_RDONLY
            number = errno.EROFS if read_only else errno.EACCES
            raise explained(OSError(number, os.strerror(number)), self.shares, "make shares there")

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the folder's lock: one process at a time places, changes or removes shares.

        Raises `BusyError` if no share begins or ends for `_LOCK_WAIT_S` while it is held, and after
        `_LOCK_LONGEST_S` in any case: where a folder is for all users, each of them can hold it.
        Raises `StateError` for a folder of another user than root.
        """
        path = self.root / "lock"
        try:
            self._check_owners()  # what is changed or removed is in this folder, and in no other
            descriptor = open_regular(path, os.O_RDONLY)
        except OSError as error:
            raise explained(error, path, "open the lock") from error
        try:
            self._await_lock(path, descriptor)
            yield
        finally:
            os.close(descriptor)  # releases the lock

    def _await_lock(self, path: Path, descriptor: int) -> None:
        import fcntl

        begun = looked = time.monotonic()
        seen = self._last_change()
        pause_s = 0.001
        is_noted = False
        while True:
            with suppress(BlockingIOError):
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            now = time.monotonic()
            if now - looked > _LOCK_WAIT_S:
                before, seen, looked = seen, self._last_change(), now
                if before == seen or now - begun > _LOCK_LONGEST_S:
                    raise BusyError(
                        f"{path} was not free for {now - begun:.0f} s:"
                        f" {lock_holder(descriptor)} has its lock",
                        hint="it may be stopped: end it, or try again;"
                        f" `fuser -v {path}` lists the processes that can have it",
                    )
            if not is_noted and now - begun > _LOCK_NOTE_S:
                is_noted = True
                note(f"waiting for the lock {path}: {lock_holder(descriptor)} has it")
            time.sleep(pause_s)
            pause_s = min(pause_s * 1.5, 0.02)

    def _last_change(self) -> int:
        """Return when a share last began or ended; 0: unknown."""
        try:
            return self.shares.stat().st_mtime_ns
        except OSError:
            return 0


def lock_holder(descriptor: int) -> str:
    """Name the process that has a file's lock (flock), by the kernel's list of locks."""
    status = os.fstat(descriptor)
    device = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}"
    with suppress(OSError):
        for line in Path("/proc/locks").read_text("ascii").splitlines():
            # 1: FLOCK ADVISORY WRITE 4711 fd:01:262153 0 EOF
            fields = line.split()
            if fields[1] == "FLOCK" and fields[5] == f"{device}:{status.st_ino}":
                owner = Path("/proc", fields[4]).stat().st_uid
                return f"process {fields[4]} of {user_name(owner)}"
    return "a process that is not known here"


def _tickets(queue: int, machine: str, before: str) -> list[str]:
    form = re.compile(rf"[0-9]{{20}}-[0-9]+-{re.escape(machine)}")
    return sorted(name for name in os.listdir(queue) if form.fullmatch(name) and name < before)


def _has_gone(queue: int, ticket: str) -> bool:
    """Whether the owner has ended; its file is removed, unless it is another user's.

    What no `allot` made, or what cannot be opened, is no ticket.
    """
    import fcntl

    try:
        descriptor = open_regular(ticket, os.O_RDONLY, folder=queue)
    except OSError:
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)
    with suppress(OSError):
        os.unlink(ticket, dir_fd=queue)
    return True


def _await_end(queue: int, ticket: str, until: float) -> None:
    import fcntl

    if math.isinf(until):
        with suppress(OSError):
            descriptor = open_regular(ticket, os.O_RDONLY, folder=queue)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_SH)
            finally:
                os.close(descriptor)
        return
    while not _has_gone(queue, ticket):
        if time.monotonic() > until:
            raise TimeoutError
        time.sleep(_QUEUE_POLL_S)


def _make_file(path: Path, content: bytes, mode: int) -> None:
    """Create a file with its content in one step, unless it exists.

    Never O_CREAT on a file that may be another user's: the kernel refuses that in a folder shared
    by all users (fs.protected_regular).
    """
    if path.exists():
        return
    draft = path.with_name(f".{path.name}-{os.urandom(6).hex()}")
    flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(draft, flags, 0o600)
    try:
        os.write(descriptor, content)
        os.fchmod(descriptor, mode)
        os.link(draft, path)
    except FileExistsError:
        pass  # another `allot` was first, with the same content
    finally:
        os.close(descriptor)
        draft.unlink()


_SIMULATED_FILES = (
    "libcuda.so.1",
    "libnvidia-ml.so.1",
    "nvidia-cuda-mps-control",
    "nvidia-smi",
)


def shim_copy(folder: StateFolder) -> Path:
    """Return the path of the shim's copy; creates it if necessary."""
    return _copy([library_path(SHIM)], folder.shims) / SHIM


def simulated_copy(folder: StateFolder) -> Path:
    """Return the folder with the copies of the simulated libraries and programs."""
    source = library_path(SIMULATED)
    return _copy([source / name for name in _SIMULATED_FILES], folder.libraries)


def _copy(sources: list[Path], parent: Path) -> Path:
    """Copy files into `parent/HASH/`, whole or not at all; return that folder."""
    import hashlib

    digest = hashlib.sha256()
    for source in sources:
        digest.update(source.read_bytes())
    target = trusted_path(parent / digest.hexdigest()[:32])
    names = {source.name for source in sources}
    if _has(target, names):
        return target
    draft = parent / f".new-{os.urandom(6).hex()}"
    try:
        draft.mkdir()
        draft.chmod(0o755)
        for source in sources:
            shutil.copyfile(source, draft / source.name)
            (draft / source.name).chmod(0o555)
        if is_trusted(target):  # it has lost a file: programs would run without the shim
            for name in names:
                (draft / name).replace(target / name)
            draft.rmdir()
        else:
            draft.rename(target)
    except OSError as error:
        shutil.rmtree(draft, ignore_errors=True)
        if is_trusted(target) and _has(target, names):
            return target  # another `allot` was first
        if os.path.lexists(target) and not is_trusted(target):
            return _copy(sources, parent)  # another user's was first: ours goes beside it
        raise explained(error, target, "copy the native libraries") from error
    return target


def _has(folder: Path, names: set[str]) -> bool:
    try:
        return names <= {path.name for path in folder.iterdir()}
    except FileNotFoundError:
        return False


def is_trusted(target: Path) -> bool:
    """Whether a file is there, and root's or this user's: where all may write, anyone makes one."""
    try:
        return target.lstat().st_uid in {0, os.geteuid()}
    except FileNotFoundError:
        return False


def trusted_path(path: Path) -> Path:
    """Return the path, or one beside it if another user has made that.

    What is there then is root's or this user's. Whoever makes it checks that again.
    """
    if is_trusted(path) or not os.path.lexists(path):
        return path
    for name in sorted(os.listdir(path.parent)):  # noqa: PTH208 - start-up time
        if name.startswith(f"{path.name}-") and is_trusted(path.with_name(name)):
            return path.with_name(name)
    return path.with_name(f"{path.name}-{os.urandom(6).hex()}")
