# SPDX-License-Identifier: Apache-2.0
"""Files that appear whole or not at all, and files that another user may have made."""

from __future__ import annotations

import errno
import os
import stat
import threading
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path


def atomic_write(path: Path, content: bytes | str, *, mode: int | None = None) -> None:
    """Write a file, or replace it, in one step: readers see the old content or the new one.

    `mode` None: as the umask has it. Raises `OSError`; then nothing has changed.
    """
    # Never O_CREAT on a file that may be another user's: the kernel refuses that in a folder shared
    # by all users (fs.protected_regular).
    draft = path.with_name(f".{path.name}-{os.urandom(6).hex()}")
    flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        with os.fdopen(os.open(draft, flags, 0o666), "wb") as file:
            if mode is not None:
                os.fchmod(file.fileno(), mode)
            file.write(content.encode() if isinstance(content, str) else content)
        draft.replace(path)
    except BaseException:
        with suppress(OSError):
            draft.unlink(missing_ok=True)
        raise


_BLOCK = 4096


def read_file(path: str, *, most: int | None = None) -> bytes:
    """Read a small file without Python's buffer, which costs more than the file.

    For the files of many shares and processes. `most`: bytes, after which no more is read, in one
    that others can make long. Raises `OSError`.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        blocks = [os.read(descriptor, _BLOCK)]
        size = len(blocks[0])
        while (most is None or size < most) and (more := os.read(descriptor, 16 * _BLOCK)):
            blocks.append(more)
            size += len(more)
        return blocks[0] if len(blocks) == 1 else b"".join(blocks)
    finally:
        os.close(descriptor)


def open_regular(name: str | Path, flags: int, *, folder: int | None = None) -> int:
    """Open a file that another user may have made, without waiting; raise `OSError`.

    Never another kind of file: to open a pipe would wait, and a link leads elsewhere.
    """
    flags |= os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(name, flags, dir_fd=folder)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file", str(name))
    return descriptor


def read_regular(path: str | Path, most: int) -> bytes:
    """Read the first `most` bytes of a file that another user may have made; raise `OSError`."""
    descriptor = open_regular(path, os.O_RDONLY)
    try:
        blocks = []
        left = most
        # In blocks: Python reserves memory for all that a read could return.
        while left and (block := os.read(descriptor, min(16 * _BLOCK, left))):
            blocks.append(block)
            left -= len(block)
        return b"".join(blocks)
    finally:
        os.close(descriptor)


class KeptFiles:
    """Files that stay open, so that the kernel grants no lease on them.

    Root in a container could take one on a file that it may only read (fcntl(2), F_SETLEASE): an
    opening of the file by others waits then, or fails. To keep a file ends a lease, after
    `fs.lease-break-time` (45 s) at the latest. Meanwhile its holder gets no other one.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._descriptors: dict[tuple[int, int], int] = {}
        """By file system and inode."""

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        with self._lock:
            while self._descriptors:
                os.close(self._descriptors.popitem()[1])

    def keep(self, paths: Iterable[Path], flags: int = os.O_RDWR) -> None:
        """Keep files open.

        Passes over a missing file and another user's: its next change reports that.
        """
        for path in paths:
            with suppress(OSError):
                self._keep(path, flags)

    def close_removed(self) -> None:
        """Close the files that were removed. This asks about every one."""
        with self._lock:
            for inode, descriptor in tuple(self._descriptors.items()):
                if os.fstat(descriptor).st_nlink == 0:
                    os.close(self._descriptors.pop(inode))

    def _keep(self, path: Path, flags: int) -> None:
        status = path.stat(follow_symlinks=False)
        inode = status.st_dev, status.st_ino
        if inode in self._descriptors or not stat.S_ISREG(status.st_mode):
            return
        descriptor = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW)
        with self._lock:
            if self._descriptors.setdefault(inode, descriptor) != descriptor:
                os.close(descriptor)  # another thread was first


def without_leases(paths: Iterable[Path], call: Callable[[], int]) -> int:
    """Return the result of a call that opens files without waiting; ends leases on them first.

    The call returns a negative errno value if it fails.
    """
    code = int(call())
    if code == -errno.EAGAIN:
        kept = KeptFiles()
        try:
            kept.keep(paths)
            code = int(call())
        finally:
            kept.close()
    return code


FileIdentity = tuple[int, int]
"""Inode and change time, which differ between a file and its successor."""


def file_identity(path: Path) -> FileIdentity | None:
    """Return a file's identity; None: it does not exist or cannot be read."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_ctime_ns
