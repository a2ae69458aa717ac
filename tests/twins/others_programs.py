# SPDX-License-Identifier: Apache-2.0
"""Other systems' own programs, from the folder that a variable names: plain, or packed by xz."""

from __future__ import annotations

import lzma
import os
from pathlib import Path


def program_from(variable: str, name: str, unpacked: Path) -> Path | None:
    """Returns where a program is, once it is unpacked; None: it is not there."""
    folder = os.environ.get(variable, "")
    plain, packed = Path(folder, name), Path(folder, f"{name}.xz")
    if folder and plain.exists():
        return plain
    if not folder or not packed.exists():
        return None
    path = unpacked / name
    if not path.exists():
        path.write_bytes(lzma.decompress(packed.read_bytes()))
        path.chmod(0o755)
    return path
