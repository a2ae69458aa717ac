# SPDX-License-Identifier: Apache-2.0
"""Copies of the native libraries: named by content, immutable, made once."""

import os
import traceback
from pathlib import Path

import pytest

from allotment.devices.simulated import machine_path
from allotment.libraries import SHIM
from allotment.shares.folders import StateFolder, shim_copy, simulated_copy


def test_the_shim_is_copied_once(folder: StateFolder, native_dir: Path) -> None:
    first = shim_copy(folder)
    made = first.stat()
    assert first.read_bytes() == (native_dir / SHIM).read_bytes()
    assert made.st_mode & 0o222 == 0
    assert shim_copy(folder) == first
    assert first.stat().st_ino == made.st_ino
    assert [path.name for path in folder.shims.iterdir()] == [first.parent.name]


def test_a_copy_that_lost_its_file_is_made_whole(folder: StateFolder, native_dir: Path) -> None:
    """Programs would run without the shim, and without a limit."""
    first = shim_copy(folder)
    first.unlink()
    assert shim_copy(folder) == first
    assert first.read_bytes() == (native_dir / SHIM).read_bytes()
    assert [path.name for path in folder.shims.iterdir()] == [first.parent.name]


def test_the_simulated_libraries_have_their_real_names(folder: StateFolder) -> None:
    names = sorted(path.name for path in simulated_copy(folder).iterdir())
    assert names == ["libcuda.so.1", "libnvidia-ml.so.1", "nvidia-cuda-mps-control", "nvidia-smi"]


def test_what_another_user_planted_is_not_used(folder: StateFolder) -> None:
    if os.geteuid():
        pytest.skip("only root can make another's file")
    planted = shim_copy(folder).parent
    second = planted.with_name(f"{planted.name}-{os.geteuid()}")
    second.mkdir()
    (second / SHIM).write_bytes(b"another user's code")
    for path in (planted, second):
        os.chown(path, 12345, 12345)
    own = shim_copy(folder)
    assert own.parent not in {planted, second}
    assert own.read_bytes() == (planted / SHIM).read_bytes()
    assert own.parent.stat().st_uid == 0
    assert shim_copy(folder) == own


def make_all(root: Path, uid: int, start: int) -> None:
    """What the first commands of a user make."""
    os.setegid(uid)
    os.seteuid(uid)
    folder = StateFolder(root)
    os.read(start, 1)  # until all begin
    for path in (shim_copy(folder), simulated_copy(folder), machine_path(root, "t4")):
        assert path.exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_first_commands_of_several_users_do_not_disturb_each_other(
    common_folder: Path, native_dir: Path
) -> None:
    assert native_dir.is_dir()
    for attempt in range(12):
        root = common_folder / str(attempt)
        root.mkdir()
        root.chmod(0o1777)
        StateFolder(root).prepare()
        start, begin = os.pipe()
        children = []
        for uid in (1001, 1002, 1003):
            if (child := os.fork()) == 0:
                try:
                    os.close(begin)
                    make_all(root, uid, start)
                except Exception:  # noqa: BLE001 - the parent sees the status
                    traceback.print_exc()
                    os._exit(1)
                os._exit(0)
            children.append(child)
        os.close(start)
        os.close(begin)
        assert [os.waitstatus_to_exitcode(os.waitpid(each, 0)[1]) for each in children] == [0] * 3
        left = {path.name for path in (root / "simulated").iterdir() if path.name[0] == "."}
        assert left == set()
