# SPDX-License-Identifier: Apache-2.0
"""A file is written whole or not at all; a kept one is leased to no other program."""

import fcntl
from pathlib import Path

import pytest

from allotment.files import KeptFiles, atomic_write


def test_the_new_content_replaces_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "status.json"
    atomic_write(path, "{}\n")
    atomic_write(path, b"[]\n", mode=0o600)
    assert path.read_text() == "[]\n"
    assert path.stat().st_mode & 0o777 == 0o600
    assert list(tmp_path.iterdir()) == [path]


def test_a_write_that_fails_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "status.json"
    path.mkdir()
    (path / "kept").touch()
    with pytest.raises(OSError, match="directory"):
        atomic_write(path, "{}")
    assert list(tmp_path.iterdir()) == [path]


def test_a_link_in_its_place_is_replaced_not_followed(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("mine")
    path = tmp_path / "status.json"
    path.symlink_to(victim)
    atomic_write(path, "{}")
    assert victim.read_text() == "mine"
    assert not path.is_symlink()


def test_a_file_is_kept_until_it_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "policy"
    path.touch()
    kept = KeptFiles()
    with path.open("rb") as file:
        kept.keep([path, tmp_path / "missing"])
        with pytest.raises(BlockingIOError):
            fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_RDLCK)
        path.unlink()
        kept.close_removed()
        fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_RDLCK)
