# SPDX-License-Identifier: Apache-2.0
"""Files that a share's programs can write, and so make as long as they like.

What is beyond the length that a file is to have is nobody's: it takes space on a file system that
is small (/run), and that all shares of the machine need.
"""

import os
import stat
from pathlib import Path

__all__ = ["cut_down"]

_BLOCK = 512  # the unit of st_blocks, on every file system
_SLACK = 4 << 20  # what a file system may keep beside a file for reasons of its own: huge pages


def cut_down(path: Path, size: int) -> int:
    """Take away what a file has beyond `size` bytes; return how many bytes longer it was.

    Space that was taken behind the file's end counts as well. Those that have the right length
    mapped are not disturbed, and a file that is shorter stays so. 0 for a file that is not there,
    or is another user's.
    """
    try:
        status = path.lstat()
        if not stat.S_ISREG(status.st_mode) or not _excess(status, size):
            return 0
        flags = os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        descriptor = os.open(path, flags)
        try:
            before = os.fstat(descriptor)
            os.ftruncate(descriptor, min(size, before.st_size))
            after = os.fstat(descriptor)
        finally:
            os.close(descriptor)
    except OSError:
        return 0
    return max(0, _excess(before, size) - _excess(after, size))


def _excess(status: os.stat_result, size: int) -> int:
    longer = status.st_size - size
    space = status.st_blocks * _BLOCK - size
    return max(0, longer, space if space > _SLACK else 0)
