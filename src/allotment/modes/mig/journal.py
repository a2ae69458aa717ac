# SPDX-License-Identifier: Apache-2.0
"""Where the records of one GPU's slices are, and whose turn it is to change them.

    mig/GPU-UUID/lock              held for milliseconds: while a place for a slice is chosen
    mig/GPU-UUID/ID/slice.json     one slice of ours; replaced as a whole, never written into
    mig/GPU-UUID/switched          MIG mode is on for our slices' sake, and goes with the last one;
                                   its text: how often it has been switched on since it was claimed
    mig/GPU-UUID/ID                the folder is locked by whoever works on the slice

A lock ends with its process, however that ends: a record whose folder is not locked is nobody's
work, and can be judged by what the driver shows. The slots of a slice are taken from its first
record on, so that eight slices of one GPU are made side by side, and none waits for another's
driver calls.

Nothing is synchronised to a disk: what a power failure loses here, it loses in the GPU as well.
"""

import fcntl
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Final, NamedTuple, Self

from allotment.model.errors import BusyError, StateError
from allotment.modes.mig.records import SliceRecord, decode, encode

__all__ = ["Found", "Journal", "Work"]

_RECORD: Final = "slice.json"
_LOCK: Final = "lock"
_SWITCHED: Final = "switched"
_DRAFT: Final = ".new-"
_LOCK_WAIT_S: Final = 20.0
_ID_BYTES: Final = 6


class Work:
    """One slice's record, with the right to change it, as long as it is entered."""

    def __init__(self, directory: Path, descriptor: int, record: SliceRecord) -> None:
        """Take over a locked folder."""
        self._directory = directory
        self._descriptor = descriptor
        self.record = record

    def __enter__(self) -> Self:
        """Keep the right until the end of the block."""
        return self

    def __exit__(self, *_: object) -> None:
        """Give it back; the record stays as it is."""
        self.close()

    def close(self) -> None:
        """Give it back before the end of the block; may be repeated."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def write(self, record: SliceRecord) -> None:
        """Put another record in the place of this one, in one step. Raises `StateError`."""
        _write(self._directory, record)
        self.record = record

    def forget(self) -> None:
        """Remove the record: from here on it stands for nothing. Raises `StateError`."""
        try:
            # The record first: a folder without one is nothing, and swept by whoever looks.
            (self._directory / _RECORD).unlink(missing_ok=True)
            shutil.rmtree(self._directory, ignore_errors=True)
        except OSError as error:
            raise _explained(error, self._directory, "remove the record of a slice") from error


class Found(NamedTuple):
    """What the journal has: all records, and what of it cannot be read."""

    records: tuple[SliceRecord, ...]
    problems: tuple[StateError, ...] = ()


class Journal:
    """The records of one GPU's slices."""

    __slots__ = ("folder",)

    def __init__(self, folder: Path) -> None:
        """Name the GPU's folder; it is made with its first record."""
        self.folder = folder

    def read(self) -> Found:
        """Return all records, by start; of a GPU that never had a slice, none."""
        records: list[SliceRecord] = []
        problems: list[StateError] = []
        for directory in self._directories():
            try:
                record = _read(directory)
            except StateError as error:
                problems.append(error)
            else:
                if record is not None:
                    records.append(record)
        return Found(
            tuple(sorted(records, key=lambda each: (each.start, each.id))), tuple(problems)
        )

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Be the only one who chooses places on this GPU.

        Waits a bounded time, and raises `BusyError` after it: another's driver may hang.
        """
        self._prepare()
        path = self.folder / _LOCK
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise _explained(error, path, "open the lock") from error
        try:
            deadline = time.monotonic() + _LOCK_WAIT_S
            while not _try_lock(descriptor):
                if time.monotonic() > deadline:
                    raise BusyError(
                        f"another `allot` has held {path} for {_LOCK_WAIT_S:.0f} s",
                        hint="its GPU may hang: see `nvidia-smi`, and `fuser -v` on that file",
                    )
                time.sleep(0.005)
            yield
        finally:
            os.close(descriptor)  # gives the lock back

    def begin(self, record: SliceRecord) -> Work:
        """Write the first record of a slice, under the lock. Raises `StateError`."""
        directory = self.folder / record.id
        draft = self.folder / f"{_DRAFT}{record.id}"
        try:
            draft.mkdir(mode=0o755)
            descriptor = os.open(draft, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise _explained(error, draft, "write the record of a slice") from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _write(draft, record)
            draft.rename(directory)
        except OSError as error:
            os.close(descriptor)
            shutil.rmtree(draft, ignore_errors=True)
            raise _explained(error, directory, "write the record of a slice") from error
        except StateError:
            os.close(descriptor)
            shutil.rmtree(draft, ignore_errors=True)
            raise
        return Work(directory, descriptor, record)

    def take(self, name: str) -> Work | None:
        """Take the right to change a slice's record; None: it is gone, or somebody has it.

        Raises `StateError` for a record that cannot be read.
        """
        directory = self.folder / name
        try:
            descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise _explained(error, directory, "read the record of a slice") from error
        with ExitStack() as undo:
            undo.callback(os.close, descriptor)
            if not _try_lock(descriptor):
                return None
            record = _read(directory)  # now that nobody else changes it
            if record is None:
                return None
            undo.pop_all()
        return Work(directory, descriptor, record)

    def is_free(self, name: str) -> bool:
        """Tell whether nobody works on a slice (any more)."""
        work = self.take(name)
        if work is not None:
            with work:
                return True
        return not (self.folder / name).is_dir()

    def sweep(self) -> None:
        """Remove what a crash left of writing, under the lock: drafts, and folders of no record."""
        for directory in self._directories(drafts=True):
            is_draft = directory.name.startswith(_DRAFT)
            if is_draft or not (directory / _RECORD).exists():
                with suppress(OSError):
                    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                    try:
                        if _try_lock(descriptor):
                            shutil.rmtree(directory, ignore_errors=True)
                    finally:
                        os.close(descriptor)

    @property
    def is_switched(self) -> bool:
        """Tell whether we have switched the GPU's MIG mode on, or are about to."""
        return (self.folder / _SWITCHED).exists()

    @property
    def claim(self) -> int:
        """Return which claim on the MIG mode is in force, another number each time; 0: none."""
        try:
            return (self.folder / _SWITCHED).stat().st_mtime_ns
        except OSError:
            return 0

    @property
    def times_switched(self) -> int:
        """Return how often the mode was switched on under the claim in force.

        Each time but the first others had switched it off before.
        """
        try:
            return int((self.folder / _SWITCHED).read_text(encoding="ascii") or "0")
        except (OSError, ValueError):
            return 0

    def count_switched(self) -> None:
        """Write down that the mode is switched on, under the lock. Raises `StateError`.

        The claim stays the one that it is.
        """
        path = self.folder / _SWITCHED
        draft = self.folder / f".{_SWITCHED}"
        try:
            claim = path.stat().st_mtime_ns
            draft.write_text(str(self.times_switched + 1), encoding="ascii")
            os.utime(draft, ns=(claim, claim))
            draft.replace(path)
        except FileNotFoundError:
            return  # given up since: the mode is others' from here on
        except OSError as error:
            raise _explained(error, path, "write that MIG is switched on") from error

    def note_switched(self) -> None:
        """Write down, before it is done, that the MIG mode is our doing. Raises `StateError`."""
        self._prepare()
        path = self.folder / _SWITCHED
        try:
            path.touch(mode=0o644)
            os.truncate(path, 0)  # another claim, under which it was never switched
        except OSError as error:
            raise _explained(error, path, "write that MIG is switched on") from error

    def forget_switched(self) -> None:
        """Leave the MIG mode to others: it is off again, or theirs. Raises `StateError`."""
        path = self.folder / _SWITCHED
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise _explained(error, path, "forget that MIG was switched on") from error

    def new_id(self) -> str:
        """Return a name that no slice has had."""
        return os.urandom(_ID_BYTES).hex()

    def _directories(self, *, drafts: bool = False) -> list[Path]:
        try:
            found = [each for each in self.folder.iterdir() if each.is_dir()]
        except FileNotFoundError:
            return []
        except OSError as error:
            raise _explained(error, self.folder, "read the slices") from error
        return sorted(each for each in found if drafts or not each.name.startswith("."))

    def _prepare(self) -> None:
        """Make the folder; refuse one in which another user could write records."""
        try:
            for folder in (self.folder.parent, self.folder):
                folder.mkdir(mode=0o755, exist_ok=True)
                status = folder.lstat()
                if status.st_uid not in {0, os.geteuid()}:
                    raise StateError(
                        f"{folder} belongs to another user (uid {status.st_uid}), who could have"
                        " slices removed by writing records",
                        hint=f"let root remove it: rm -r {folder}",
                    )
        except OSError as error:
            raise _explained(error, self.folder, "make the folder of a GPU's slices") from error


def _read(directory: Path) -> SliceRecord | None:
    path = directory / _RECORD
    try:
        data = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise _explained(error, path, "read the record of a slice") from error
    return decode(data, source=str(path))


def _write(directory: Path, record: SliceRecord) -> None:
    path = directory / _RECORD
    draft = directory / f".{_RECORD}"
    try:
        draft.write_bytes(encode(record))
        draft.replace(path)
    except OSError as error:
        with suppress(OSError):
            draft.unlink(missing_ok=True)
        raise _explained(error, path, "write the record of a slice") from error


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _explained(error: OSError, path: Path, doing: str) -> StateError:
    return StateError(
        f"{path}: cannot {doing}: {error.strerror or error}",
        hint="make it yours and writable, or choose another folder with --state or ALLOTMENT_STATE",
    )
