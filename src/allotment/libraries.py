# SPDX-License-Identifier: Apache-2.0
"""Where the native libraries of this installation are."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Final

from allotment.model.errors import LibraryBrokenError, LibraryMissingError

if TYPE_CHECKING:
    import ctypes

LEDGER: Final = "liballotment-ledger.so"
SHIM: Final = "liballotment-shim.so"
SIMULATED: Final = "simulated"
SIMULATED_CUDA: Final = "simulated/libcuda.so.1"
SIMULATED_NVML: Final = "simulated/libnvidia-ml.so.1"


def library_path(name: str) -> Path:
    """Return the absolute path of a library (or folder) built for this machine's architecture.

    Raises:
        LibraryMissingError: the package was installed without its native part.
    """
    path = Path(__file__).resolve().parent / "_native" / os.uname().machine / name
    if not path.exists():
        raise LibraryMissingError(path)
    return path


def load_library(name: str) -> ctypes.CDLL:
    """Load a library of this installation.

    Raises:
        LibraryMissingError: the package was installed without its native part.
        LibraryBrokenError: the file is cut off, or another machine's.
    """
    import ctypes  # late: most commands load none

    path = library_path(name)
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise LibraryBrokenError(path, str(error).removeprefix(f"{path}: ")) from error
