# SPDX-License-Identifier: Apache-2.0
"""Files that appear whole or not at all."""

import os
from contextlib import suppress
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


def read_file(path: str) -> bytes:
    """Read a small file without Python's buffer, which costs more than the file.

    For the files of many shares and processes. Raises `OSError`.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        content = os.read(descriptor, _BLOCK)
        while more := os.read(descriptor, 16 * _BLOCK):
            content += more
        return content
    finally:
        os.close(descriptor)


FileIdentity = tuple[int, int]
"""Inode and change time, which differ between a file and its successor."""


def file_identity(path: Path) -> FileIdentity | None:
    """Return a file's identity; None: it does not exist or cannot be read."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_ctime_ns
