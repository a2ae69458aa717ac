# SPDX-License-Identifier: Apache-2.0
"""The container image, without a Docker engine: `tools/build_image.py` calls it.

It has three layers: Debian's Python with the libraries that it loads (`debian.py`), the pinned
requirements (`wheels.py`), and Allotment's wheel. `layers.py` and `layout.py` know of files and of
the OCI image specification only. The same commit gives the same
files, and with the same zlib the same layers.
"""

from __future__ import annotations

import hashlib
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
PYTHON = "3.13"  # of Debian 13; also in packages.txt


class ImageError(RuntimeError):
    """The image cannot be built; the message has the next step."""


@dataclass(frozen=True, slots=True)
class Architecture:
    """One architecture by its names: Debian's, which is also OCI's, the kernel's, the loader's."""

    name: str
    machine: str
    loader: str

    @property
    def libraries(self) -> str:
        """The folder of Debian's libraries."""
        return f"usr/lib/{self.machine}-linux-gnu"


ARCHITECTURES = {
    "amd64": Architecture("amd64", "x86_64", "usr/lib64/ld-linux-x86-64.so.2"),
    "arm64": Architecture("arm64", "aarch64", "usr/lib/ld-linux-aarch64.so.1"),
}


def run(
    command: Sequence[str | Path],
    *,
    cwd: Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> str:
    """The standard output of a program.

    Raises:
        ImageError: the program is missing, or failed; with the end of its output.
    """
    words = [str(word) for word in command]
    try:
        done = subprocess.run(
            words, cwd=cwd, env=environment, capture_output=True, text=True, check=False
        )
    except FileNotFoundError as error:
        raise ImageError(f"no {words[0]} on this machine") from error
    if done.returncode:
        said = "\n".join((done.stdout + done.stderr).strip().splitlines()[-15:])
        raise ImageError(f"{' '.join(words[:6])} ... failed with status {done.returncode}\n{said}")
    return done.stdout


def digest(path: Path) -> str:
    """The SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
