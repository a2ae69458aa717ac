# SPDX-License-Identifier: Apache-2.0
"""Immutable copies of the native libraries in the state folder, named by their content.

Running programs map these files. An upgrade of Allotment brings other content and so another
name: it never touches what a running share uses.
"""

import os
import shutil
from pathlib import Path

from allotment.libraries import SHIM, SIMULATED, library_path
from allotment.shares.folders import StateFolder, explained

__all__ = ["is_trusted", "shim_copy", "simulated_copy"]

_SIMULATED_FILES = ("libcuda.so.1", "libnvidia-ml.so.1", "nvidia-cuda-mps-control")


def shim_copy(folder: StateFolder) -> Path:
    """Return the path of the shim's copy, making it if it is not there yet."""
    return _copy([library_path(SHIM)], folder.shims) / SHIM


def simulated_copy(folder: StateFolder) -> Path:
    """Return the folder with the copies of the simulated libraries, and of their programs."""
    source = library_path(SIMULATED)
    return _copy([source / name for name in _SIMULATED_FILES], folder.libraries)


def _copy(sources: list[Path], parent: Path) -> Path:
    """Copy files into `parent/HASH/`, whole or not at all; return that folder."""
    import hashlib

    digest = hashlib.sha256()
    for source in sources:
        digest.update(source.read_bytes())
    target = parent / digest.hexdigest()[:32]
    if target.is_dir() and not is_trusted(target):
        target = target.with_name(f"{target.name}-{os.geteuid()}")
    if target.is_dir():
        return target
    draft = parent / f".new-{os.urandom(6).hex()}"
    try:
        draft.mkdir()
        draft.chmod(0o755)
        for source in sources:
            shutil.copyfile(source, draft / source.name)
            (draft / source.name).chmod(0o555)
        draft.rename(target)
    except OSError as error:
        shutil.rmtree(draft, ignore_errors=True)
        if target.is_dir():
            return target  # another `allot` was first
        raise explained(error, target, "copy the native libraries") from error
    return target


def is_trusted(target: Path) -> bool:
    """Tell whether a file is root's or one's own: in a folder of all users anyone may make one."""
    return target.lstat().st_uid in {0, os.geteuid()}
