# SPDX-License-Identifier: Apache-2.0
"""The records of one GPU's slices, and the locks on them.

    mig/GPU-UUID/lock              held for milliseconds, while a slice's place is chosen
    mig/GPU-UUID/ID/slice.json     one slice; replaced as a whole
    mig/GPU-UUID/switched          we switched MIG mode on; its text: how often since the claim
    mig/GPU-UUID/ID                the folder is locked by the process that works on the slice

A process's locks end with it, so an unlocked record can be judged by the driver's state. A record
takes its slots before the driver is called: slices of one GPU are made in parallel. Nothing is
synced to disk: a power failure also clears the GPU.
"""

import fcntl
import os
import shutil
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from enum import Enum, StrEnum, auto
from pathlib import Path
from typing import Final, NamedTuple, Self

import msgspec

from allotment.files import atomic_write, read_regular
from allotment.model.devices import Device
from allotment.model.errors import BusyError, StateError
from allotment.model.mig import MigInstance
from allotment.model.structs import prepared

_VERSION = 1


class Stage(StrEnum):
    """The progress of a slice. Each stage is written before its work begins."""

    INTENDED = "intended"
    """The GPU instance is being created."""
    CUT = "cut"
    """The GPU instance exists, with a known id; the compute instance is being created."""
    READY = "ready"
    """Complete, with a UUID that no other slice will have: held, or warm."""
    LEAVING = "leaving"
    """It is being removed."""


class SliceRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One slice of Allotment."""

    id: str
    gpu: str
    """UUID of the whole GPU."""
    profile: int
    """The driver's number of the profile."""
    name: str
    """Name of the profile: `1g.10gb`."""
    start: int
    size: int
    """Memory slots from `start`."""
    stage: Stage
    holder: str = ""
    """Id of the share that it is made for; empty: none."""
    gpu_instance: int | None = None
    compute_instance: int | None = None
    uuid: str = ""
    """UUID of the MIG device."""
    idle_since: float | None = None
    """Seconds after the epoch since it has no holder."""
    keep_s: float = 0.0
    """How long its last holder keeps it warm after that, in seconds."""


class _Document(msgspec.Struct, frozen=True, kw_only=True):
    """The file. Later versions may add fields; other changes get a new version number."""

    version: int
    slice: SliceRecord


def encode(record: SliceRecord) -> bytes:
    return msgspec.json.encode(_Document(version=_VERSION, slice=record)) + b"\n"


def decode(data: bytes, *, source: str) -> SliceRecord:
    """Read a record; `source` is its file's name for errors. Raises `StateError`."""
    try:
        document = msgspec.json.decode(data, type=prepared(_Document))
    except msgspec.MsgspecError as error:
        raise _unusable(source, f"it is truncated or changed ({error})") from error
    if document.version != _VERSION:
        raise _unusable(source, f"it has version {document.version}, this program reads {_VERSION}")
    return document.slice


def _unusable(source: str, why: str) -> StateError:
    return StateError(
        f"{source}: not a usable record of a MIG slice: {why}",
        hint="remove this file: its slice then counts as foreign, and stays until `allot mig apply`"
        " or nvidia-smi removes it",
    )


_RECORD: Final = "slice.json"
_LONGEST: Final = 1 << 20
_LOCK: Final = "lock"
_SWITCHED: Final = "switched"
_DRAFT: Final = ".new-"
_LOCK_WAIT_S: Final = 20.0
_WRITE: Final = "write the record of a slice"
_READ: Final = "read the record of a slice"
_SWITCH: Final = "write that MIG is switched on"


class SliceWork:
    """One slice's record and the lock on it, until it is closed."""

    def __init__(self, directory: Path, descriptor: int, record: SliceRecord) -> None:
        """`descriptor`: of the locked folder."""
        self._directory = directory
        self._descriptor = descriptor
        self.record = record

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Release the lock; the record stays. May be repeated."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def write(self, record: SliceRecord) -> None:
        """Replace the record in one step. Raises `StateError`."""
        _write(self._directory, record)
        self.record = record

    def forget(self) -> None:
        """Remove the record. Raises `StateError`."""
        with _explaining(self._directory, "remove the record of a slice"):
            # The record first: `sweep` removes a folder without one.
            (self._directory / _RECORD).unlink(missing_ok=True)
            shutil.rmtree(self._directory, ignore_errors=True)


class JournalContents(NamedTuple):
    """All records of a GPU, and the errors of unreadable ones."""

    records: tuple[SliceRecord, ...]
    problems: tuple[StateError, ...] = ()


class Journal:
    """The records of one GPU's slices."""

    __slots__ = ("folder",)

    def __init__(self, folder: Path) -> None:
        """`folder` is the GPU's; it is made with its first record."""
        self.folder = folder

    def read(self) -> JournalContents:
        """Read all records, ordered by start."""
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
        records.sort(key=lambda record: (record.start, record.id))
        return JournalContents(tuple(records), tuple(problems))

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the lock under which places on this GPU are chosen.

        Waits a bounded time, then raises `BusyError`: another process's driver call may hang.
        """
        self._prepare()
        path = self.folder / _LOCK
        with _explaining(path, "open the lock"):
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
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
            os.close(descriptor)  # releases the lock

    def begin(self, record: SliceRecord) -> SliceWork:
        """Write the first record of a slice, under the lock. Raises `StateError`."""
        directory = self.folder / record.id
        draft = self.folder / f"{_DRAFT}{record.id}"
        with ExitStack() as undo, _explaining(directory, _WRITE):
            draft.mkdir(mode=0o755)
            undo.callback(shutil.rmtree, draft, ignore_errors=True)
            descriptor = _open(draft)
            undo.callback(os.close, descriptor)
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _write(draft, record)
            draft.rename(directory)
            undo.pop_all()
        return SliceWork(directory, descriptor, record)

    def take(self, name: str) -> SliceWork | None:
        """Lock a slice's record; None: it is gone, or another process has the lock.

        Raises `StateError` for an unreadable record.
        """
        directory = self.folder / name
        with ExitStack() as undo, _explaining(directory, _READ):
            try:
                descriptor = _open(directory)
            except FileNotFoundError:
                return None
            undo.callback(os.close, descriptor)
            if not _try_lock(descriptor):
                return None
            record = _read(directory)  # again: another process may have changed it
            if record is None:
                return None
            undo.pop_all()
        return SliceWork(directory, descriptor, record)

    def is_free(self, name: str) -> bool:
        """True if no process works on the slice."""
        work = self.take(name)
        if work is not None:
            work.close()
            return True
        return not (self.folder / name).is_dir()

    def sweep(self) -> None:
        """Remove drafts and folders without a record, under the lock: a crash left them."""
        for directory in self._directories(drafts=True):
            is_draft = directory.name.startswith(_DRAFT)
            if is_draft or not (directory / _RECORD).exists():
                with suppress(OSError):
                    descriptor = _open(directory)
                    try:
                        if _try_lock(descriptor):
                            shutil.rmtree(directory, ignore_errors=True)
                    finally:
                        os.close(descriptor)

    @property
    def is_switched(self) -> bool:
        """True if Allotment switched the GPU's MIG mode on, or is about to."""
        return (self.folder / _SWITCHED).exists()

    @property
    def claim(self) -> int:
        """The number of the current claim on the MIG mode, unique for each claim; 0: none."""
        try:
            return (self.folder / _SWITCHED).stat().st_mtime_ns
        except OSError:
            return 0

    @property
    def times_switched(self) -> int:
        """How often the mode was switched on under the current claim.

        Before each time but the first, another tool had switched it off.
        """
        try:
            return int((self.folder / _SWITCHED).read_text(encoding="ascii") or "0")
        except (OSError, ValueError):
            return 0

    def count_switched(self) -> None:
        """Count that the mode is switched on, under the lock and the same claim.

        Raises `StateError`.
        """
        path = self.folder / _SWITCHED
        draft = self.folder / f".{_SWITCHED}"
        # A claim that was given up meanwhile is not counted.
        with _explaining(path, _SWITCH), suppress(FileNotFoundError):
            claim = path.stat().st_mtime_ns
            draft.write_text(str(self.times_switched + 1), encoding="ascii")
            os.utime(draft, ns=(claim, claim))
            draft.replace(path)

    def note_switched(self) -> None:
        """Claim the MIG mode, before it is switched on. Raises `StateError`."""
        self._prepare()
        path = self.folder / _SWITCHED
        with _explaining(path, _SWITCH):
            path.touch(mode=0o644)
            os.truncate(path, 0)  # a new claim, which has not switched it on yet

    def forget_switched(self) -> None:
        """Give up the claim on the MIG mode. Raises `StateError`."""
        path = self.folder / _SWITCHED
        with _explaining(path, "forget that MIG was switched on"):
            path.unlink(missing_ok=True)

    def _directories(self, *, drafts: bool = False) -> list[Path]:
        with _explaining(self.folder, "read the slices"):
            try:
                paths = [path for path in self.folder.iterdir() if path.is_dir()]
            except FileNotFoundError:
                return []
        return sorted(path for path in paths if drafts or not path.name.startswith("."))

    def _prepare(self) -> None:
        """Make the folder; refuse one in which another user could write records."""
        with _explaining(self.folder, "make the folder of a GPU's slices"):
            for folder in (self.folder.parent, self.folder):
                folder.mkdir(mode=0o755, exist_ok=True)
                status = folder.lstat()
                if status.st_uid not in {0, os.geteuid()}:
                    raise StateError(
                        f"{folder} belongs to another user (uid {status.st_uid}), whose records"
                        " could have slices removed",
                        hint=f"let root remove it: rm -r {folder}",
                    )


def new_id() -> str:
    """Return a new name for a slice."""
    return os.urandom(6).hex()


def _open(directory: Path) -> int:
    return os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)


def _read(directory: Path) -> SliceRecord | None:
    path = directory / _RECORD
    with _explaining(path, _READ):
        try:
            data = read_regular(path, _LONGEST)
        except (FileNotFoundError, NotADirectoryError):
            return None
    return decode(data, source=str(path))


def _write(directory: Path, record: SliceRecord) -> None:
    path = directory / _RECORD
    with _explaining(path, _WRITE):
        atomic_write(path, encode(record))


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextmanager
def _explaining(path: Path, doing: str) -> Iterator[None]:
    """Raise `StateError` with the next step in place of `OSError`."""
    try:
        yield
    except OSError as error:
        raise StateError(
            f"{path}: cannot {doing}: {error.strerror or error}",
            hint="make it yours and writable, or choose another folder with --state or"
            " ALLOTMENT_STATE",
        ) from error


class RecordVerdict(Enum):
    """What to do about a record that no process works on."""

    KEEP = auto()
    """The slice is complete."""
    REMOVE = auto()
    """Its instance is ours and unusable."""
    FORGET = auto()
    """Its instance does not exist, or is not ours."""


def judge(record: SliceRecord, instance: MigInstance | None, *, is_used: bool) -> RecordVerdict:
    """Judge a record by `instance`, the result of `stands_for`.

    `is_used`: the instance has processes.
    """
    if instance is None:
        return RecordVerdict.FORGET
    match record.stage:
        case Stage.READY:
            return RecordVerdict.KEEP
        case Stage.CUT if is_used:
            return RecordVerdict.FORGET
        case _:
            return RecordVerdict.REMOVE


def stands_for(record: SliceRecord, instances: Iterable[MigInstance]) -> MigInstance | None:
    """Return the instance of a record; None: it does not exist.

    The driver does not record ownership, and reuses ids and places.
    """
    place = record.profile, record.start
    instance = next((each for each in instances if (each.profile, each.start) == place), None)
    if instance is None:
        return None
    is_whole = instance.compute_instance is not None
    is_same_id = instance.gpu_instance == record.gpu_instance
    is_same_uuid = instance.uuid == record.uuid
    match record.stage:
        case Stage.INTENDED:
            is_ours = not is_whole
        case Stage.CUT:
            is_ours = is_same_id
        case Stage.READY:
            is_ours = is_same_uuid
        case Stage.LEAVING:
            # The compute instance is removed first, and the UUID with it.
            is_ours = is_same_uuid if is_whole else is_same_id
    return instance if is_ours else None


def record_of(records: Iterable[SliceRecord], instance: MigInstance) -> SliceRecord | None:
    """Return the record that stands for an instance; None: it is foreign."""
    return next((record for record in records if stands_for(record, (instance,))), None)


def foreign(
    records: Collection[SliceRecord], instances: Iterable[MigInstance]
) -> tuple[MigInstance, ...]:
    """Return the instances without a record: another tool created them."""
    return tuple(each for each in instances if record_of(records, each) is None)


def without_own(folder: Path, slices: Sequence[Device]) -> tuple[Device, ...]:
    """Return the MIG devices without a record below `folder`; reads files.

    Raises `StateError` if the records cannot be listed.
    """
    gpus = {each.slice_of.gpu for each in slices if each.slice_of is not None}
    records = [record for gpu in gpus for record in Journal(folder / gpu).read().records]
    return tuple(
        each for each in slices if not any(_is_device_of(record, each) for record in records)
    )


def _is_device_of(record: SliceRecord, device: Device) -> bool:
    """True if a MIG device belongs to a record, by UUID or by the ids of an unfinished one.

    A compute instance exists before its record has the UUID, and stays so if its maker dies.
    """
    if record.uuid:
        return record.uuid == device.uuid
    cut = device.slice_of
    return cut is not None and (record.gpu, record.gpu_instance) == (cut.gpu, cut.gpu_instance)
