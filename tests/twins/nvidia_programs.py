# SPDX-License-Identifier: Apache-2.0
"""NVIDIA's own programs, from the folder NVIDIA_PROGRAMS: as they are, or packed by xz."""

from __future__ import annotations

import lzma
import os
from pathlib import Path


def nvidia_program_at(name: str, unpacked: Path) -> Path | None:
    """Returns where a program is, once it is unpacked; None: it is not there."""
    folder = os.environ.get("NVIDIA_PROGRAMS", "")
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
