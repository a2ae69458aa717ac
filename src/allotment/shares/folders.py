# SPDX-License-Identifier: Apache-2.0
"""The state folder: where shares live on a machine, and the one place that names paths in it.

    version                 the layout's number
    lock                    flock: held while a share is placed and made, changed or removed
    shares/ID/              policy and usage (the ledger), share.json; made whole by one rename
    devices/UUID/           contract and leases: how the shares of a device take turns
    modes/UUID.json         what a GPU may be used for, where somebody has said so
    mig/UUID/               MIG slices that are ours, and the lock for choosing their places
    shim/HASH/              an immutable copy of the shim, named by its content
    simulated/              simulated machines, a copy of the simulated libraries, loader caches

The folder is `--state`, else ALLOTMENT_STATE, else /run/allotment where that is writable (root's,
or shared by all users when an administrator made it with mode 1777), else the user's own.
"""

import errno
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Self

from allotment.model.errors import BusyError, StateError
from allotment.model.shares import ShareId

__all__ = [
    "LAYOUT_VERSION",
    "RUN_FOLDER",
    "StateFolder",
    "default_root",
    "explained",
    "shared_folder_command",
]

LAYOUT_VERSION = 2
_OLDEST_VERSION = 1  # without devices/: becomes of this version where a share is made
RUN_FOLDER = Path("/run/allotment")
_LOCK_WAIT_S = 20.0
_LONGEST_PATH = 960  # the ledger's library keeps a share's directory in 1024 bytes
_ELSEWHERE = "choose another folder with --state or ALLOTMENT_STATE"


def default_root() -> Path:
    """Return the state folder of this user on this machine, whether it is there or not."""
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
    """Turn what the system said about a path into an error with the next step."""
    hint = {
        errno.ENOSPC: f"free some space there, or {_ELSEWHERE}",
        errno.EDQUOT: f"free some of your quota, or {_ELSEWHERE}",
        errno.EROFS: f"it is on a read-only file system: {_ELSEWHERE}",
        errno.ENAMETOOLONG: _ELSEWHERE,
        errno.ENOTDIR: f"a file is where a folder should be: {_ELSEWHERE}",
    }.get(error.errno or 0, f"make it yours and writable, or {_ELSEWHERE}")
    return StateError(f"{path}: cannot {doing}: {error.strerror or error}", hint=hint)


def shared_folder_command(root: Path) -> str:
    """Return what an administrator runs to make a state folder for all users."""
    folders = ("", "/shares", "/devices", "/shim", "/simulated", "/simulated/lib")
    return "mkdir -p -m 1777 " + " ".join(f"{root}{each}" for each in folders)


class StateFolder:
    """The paths of one state folder, its version check and its lock."""

    def __init__(self, root: Path) -> None:
        """Name a folder; nothing is read or made yet."""
        self.root = root
        self.shares = root / "shares"
        self.devices = root / "devices"
        self.mig = root / "mig"
        self.shims = root / "shim"
        self.simulated = root / "simulated"
        self.libraries = self.simulated / "lib"

    @classmethod
    def at(cls, root: Path | None) -> Self:
        """Return the folder at `root`, or the default one."""
        return cls(root.absolute() if root else default_root())

    def share(self, share: ShareId) -> Path:
        """Return the directory of a share."""
        return self.shares / share

    def exists(self) -> bool:
        """Tell whether the folder is there and can be read; raise `StateError` if newer."""
        return self._version() is not None

    def _version(self) -> int | None:
        path = self.root / "version"
        try:
            text = path.read_text("ascii").strip()
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
        """Make what is missing of the folder; raise `StateError` where it cannot be used.

        `mode` is the folder's permissions, whatever they were before (the node agent's folder is
        for root alone); None: those that it has, or for everyone to read.
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
        if version == LAYOUT_VERSION and self.shares.is_dir() and self.devices.is_dir():
            self._check_owners()
            self._check_writable()
            return
        try:
            self.root.mkdir(mode=0o755, parents=True, exist_ok=True)
            self._check_owners()
            here = self.root.stat().st_mode & 0o7777
            for folder in (
                self.shares,
                self.devices,
                self.shims,
                self.simulated,
                self.libraries,
            ):
                if not folder.is_dir():
                    folder.mkdir(exist_ok=True)
                    folder.chmod(here)  # a folder shared by all users is so all the way down
            _make_file(self.root / "lock", b"", 0o666 if here & 0o002 else 0o644)
            # Last: a folder with a version is complete.
            if version is None:
                _make_file(self.root / "version", f"{LAYOUT_VERSION}\n".encode(), 0o644)
            elif version < LAYOUT_VERSION:
                _replace_file(self.root / "version", f"{LAYOUT_VERSION}\n".encode(), 0o644)
        except OSError as error:
            path = Path(error.filename) if isinstance(error.filename, str) else self.root
            raise explained(error, path, "make the state folder") from error
        self.exists()

    def _close(self, mode: int) -> None:
        """Give the folder these permissions. What is below it needs no others: none gets there."""
        try:
            self.root.mkdir(mode=mode, parents=True, exist_ok=True)
            if self.root.stat().st_mode & 0o7777 != mode:
                self.root.chmod(mode)
        except OSError as error:
            raise explained(error, self.root, "make the state folder") from error

    def _check_owners(self) -> None:
        """Refuse folders in which another user could put a share or a library in place of ours.

        The owner of a folder may rename what others have in it, whatever its mode. In one that is
        for all users only root may therefore make the folders that all use.
        """
        for folder in (
            self.root,
            self.shares,
            self.devices,
            self.shims,
            self.simulated,
            self.libraries,
        ):
            try:
                status = folder.stat()
            except FileNotFoundError:
                if self.root.stat().st_uid in {0, os.geteuid()} and not self._is_for_others():
                    continue
                raise StateError(
                    f"{folder} is not there, and root has to make it: {self.root} is for all users",
                    hint=f"let root make it: {shared_folder_command(self.root)}",
                ) from None
            if status.st_uid not in {0, os.geteuid()}:
                raise StateError(
                    f"{folder} belongs to another user (uid {status.st_uid}), who could replace"
                    " what is in it",
                    hint=f"{_ELSEWHERE}; one for all users is root's:"
                    f" {shared_folder_command(self.root)}",
                )

    def _is_for_others(self) -> bool:
        return bool(self.root.stat().st_mode & 0o002) and os.geteuid() != 0

    def _check_writable(self) -> None:
        if not os.access(self.shares, os.W_OK | os.X_OK):
            read_only = os.statvfs(self.shares).f_flag & os.ST_RDONLY
            number = errno.EROFS if read_only else errno.EACCES
            raise explained(OSError(number, os.strerror(number)), self.shares, "make shares there")

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the folder's lock: one at a time places, makes, changes or removes shares.

        Waits a bounded time; raises `BusyError` when another holds it for that long.
        """
        import fcntl

        path = self.root / "lock"
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise explained(error, path, "open the lock") from error
        try:
            deadline = time.monotonic() + _LOCK_WAIT_S
            pause_s = 0.001
            while not _try_lock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB):
                if time.monotonic() > deadline:
                    raise BusyError(
                        f"another `allot` has held {path} for {_LOCK_WAIT_S:.0f} s",
                        hint="see who by `fuser -v` on that file; it may be stopped",
                    )
                time.sleep(pause_s)
                pause_s = min(pause_s * 1.5, 0.02)
            yield
        finally:
            os.close(descriptor)  # gives the lock back


def _try_lock(descriptor: int, operation: int) -> bool:
    import fcntl

    try:
        fcntl.flock(descriptor, operation)
    except BlockingIOError:
        return False
    return True


def _replace_file(path: Path, content: bytes, mode: int) -> None:
    """Put another file in the place of one, in one step."""
    draft = path.with_name(f".{path.name}-{os.urandom(6).hex()}")
    _make_file(draft, content, mode)
    draft.replace(path)


def _make_file(path: Path, content: bytes, mode: int) -> None:
    """Make a file with its content at once, unless it is there.

    Never O_CREAT on a file that may be another's: the kernel refuses that in a folder shared by
    all users (fs.protected_regular).
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
