# SPDX-License-Identifier: Apache-2.0
"""A folder as a layer: one tar with the same bytes from the same content.

Owners, times and the machine's umask do not count. A file is executable or not, a folder is open to
all, and a hard link is a file of its own.
"""

from __future__ import annotations

import gzip
import hashlib
import os
import stat
import tarfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, cast

# Python's default. 9 takes twice the time for 1 % of the size.
COMPRESSION = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """A compressed layer in a file."""

    path: Path
    digest: str
    diff_id: str
    """The digest of the uncompressed tar."""
    size: int
    unpacked: int
    """The bytes of its files."""


class _Hashing:
    """Writes on, and counts what it wrote by its digest."""

    def __init__(self, into: BinaryIO) -> None:
        self._into = into
        self._hash = hashlib.sha256()

    def write(self, content: bytes) -> int:
        self._hash.update(content)
        return self._into.write(content)

    def flush(self) -> None:
        self._into.flush()

    @property
    def digest(self) -> str:
        return f"sha256:{self._hash.hexdigest()}"


def write_layer(
    root: Path, path: Path, *, epoch: int, modes: Mapping[str, int] | None = None
) -> Layer:
    """Packs what is below `root` into `path`, a gzipped tar.

    `epoch`: the time of every entry. `modes`: of entries that need others than 0755 and 0644.
    """
    unpacked = 0
    with path.open("wb") as file:
        packed = _Hashing(file)
        # Without a name and a time in the header.
        with gzip.GzipFile(
            filename="",
            mode="wb",
            fileobj=cast("BinaryIO", packed),
            mtime=0,
            compresslevel=COMPRESSION,
        ) as compressed:
            plain = _Hashing(cast("BinaryIO", compressed))
            with tarfile.open(
                fileobj=cast("BinaryIO", plain), mode="w|", format=tarfile.PAX_FORMAT
            ) as tar:
                for name in _names(root):
                    entry = _entry(root, name, epoch, modes or {})
                    if entry.isreg():
                        unpacked += entry.size
                        with (root / name).open("rb") as content:
                            tar.addfile(entry, content)
                    else:
                        tar.addfile(entry)
    return Layer(
        path=path,
        digest=packed.digest,
        diff_id=plain.digest,
        size=path.stat().st_size,
        unpacked=unpacked,
    )


def _names(root: Path) -> Iterator[str]:
    """All below `root`, a folder before its content; links are not followed."""
    found = [
        os.path.relpath(Path(folder) / name, root)
        for folder, folders, files in os.walk(root)
        for name in (*folders, *files)
    ]
    return iter(sorted(found, key=os.fsencode))


def _entry(root: Path, name: str, epoch: int, modes: Mapping[str, int]) -> tarfile.TarInfo:
    """The entry of one file, of root's, in the layer's own modes.

    Raises:
        ValueError: it is neither a file nor a folder nor a symbolic link.
    """
    path = root / name
    status = path.lstat()
    entry = tarfile.TarInfo(name)
    entry.mtime = epoch
    if stat.S_ISLNK(status.st_mode):
        entry.type = tarfile.SYMTYPE
        entry.linkname = os.readlink(path)  # noqa: PTH115  a Path would lose a final slash
        entry.mode = 0o777
    elif stat.S_ISDIR(status.st_mode):
        entry.type = tarfile.DIRTYPE
        entry.mode = modes.get(name, 0o755)
    elif stat.S_ISREG(status.st_mode):
        entry.size = status.st_size
        entry.mode = modes.get(name, 0o755 if status.st_mode & stat.S_IXUSR else 0o644)
    else:
        raise ValueError(f"{path} is neither a file nor a folder nor a symbolic link")
    return entry
