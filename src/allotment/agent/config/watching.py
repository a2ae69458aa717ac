# SPDX-License-Identifier: Apache-2.0
"""Follows a configuration file, or a folder of them, as the kubelet mounts ConfigMaps.

The kubelet swaps a symlink above the file, so that the path stays and its inode changes; an editor
renames; `echo >` writes in place. Asking the file system twice a second sees all of these, needs
no descriptors, and costs some 50 µs each time; inotify would have to follow each link of the way.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Final, TypeVar

from allotment.agent.config.documents import MAX_TEXT
from allotment.model.errors import AllotError, NotFoundError, StateError, UsageError

__all__ = ["PATIENCE_S", "PERIOD_S", "watch_file", "watch_folder"]

_T = TypeVar("_T")

PERIOD_S: Final = 0.5
PATIENCE_S: Final = 10.0
"""For one reading: a file on a network file system that is gone blocks for as long as it likes."""
_HIDDEN: Final = ".."
"""Names that begin so are the kubelet's own: `..data`, `..2026_11_21_18_00_00.123`."""


async def watch_file(
    path: Path, *, period_s: float = PERIOD_S, patience_s: float = PATIENCE_S
) -> AsyncIterator[str | AllotError]:
    """Yield the file's text now, and each time that it differs; an error once where it cannot be.

    Never ends by itself.
    """
    async for each in _watched(lambda: _read(path), path, period_s, patience_s):
        yield each


async def watch_folder(
    path: Path, *, period_s: float = PERIOD_S, patience_s: float = PATIENCE_S
) -> AsyncIterator[Mapping[str, str] | AllotError]:
    """Yield the texts of the folder's files by name, now and each time that they differ.

    Never ends by itself.
    """
    async for each in _watched(lambda: _read_all(path), path, period_s, patience_s):
        yield each


async def _watched(
    read: Callable[[], _T], path: Path, period_s: float, patience_s: float
) -> AsyncIterator[_T | AllotError]:
    last: object = None
    reading: asyncio.Task[_T] | None = None
    try:
        while True:
            # A reading that hangs is waited for again, never started anew beside it.
            reading = reading or asyncio.create_task(asyncio.to_thread(read))
            heard: _T | AllotError
            await asyncio.wait({reading}, timeout=patience_s)
            if reading.done():
                heard = _outcome(reading)
                reading = None
            else:
                heard = StateError(f"{path}: no answer within {patience_s:.0f} s", hint=_MOUNTED)
            said = (type(heard), str(heard)) if isinstance(heard, AllotError) else heard
            if said != last:
                last = said
                yield heard
            await asyncio.sleep(period_s)
    finally:
        if reading is not None:
            reading.cancel()


def _outcome(reading: asyncio.Task[_T]) -> _T | AllotError:
    try:
        return reading.result()
    except AllotError as error:
        return error


_MOUNTED: Final = (
    "name the file by --config-file (CONFIG_FILE); in a container, see that it is mounted there"
)


def _read(path: Path) -> str:
    try:
        with path.open("rb") as file:
            raw = file.read(4 * MAX_TEXT + 1)
    except FileNotFoundError as error:
        raise NotFoundError(
            f"error opening config file: {path} does not exist", hint=_MOUNTED
        ) from error
    except OSError as error:
        raise StateError(
            f"error opening config file: {path}: {error.strerror}", hint=_MOUNTED
        ) from error
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: it is not UTF-8 (byte {error.start})") from error


def _read_all(path: Path) -> Mapping[str, str]:
    try:
        files = sorted(each for each in path.iterdir() if not each.name.startswith(_HIDDEN))
    except OSError as error:
        raise StateError(
            f"error reading directory: {path}: {error.strerror}", hint=_MOUNTED
        ) from error
    return {each.name: _read(each) for each in files if each.is_file()}
