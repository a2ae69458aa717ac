# SPDX-License-Identifier: Apache-2.0
"""The state folder: where it is, its version, its lock, and what the system may say against it."""

import errno
import fcntl
import math
import os
import subprocess
import time
from contextlib import nullcontext
from pathlib import Path

import pytest
from click.testing import CliRunner
from users import as_user

from allotment.cli import doctor
from allotment.model.errors import BusyError, StateError
from allotment.model.shares import ShareId
from allotment.shares import folders
from allotment.shares.folders import StateFolder, explained
from allotment.shares.record import note_event, read_events


def test_prepare_makes_a_whole_folder_and_may_be_repeated(tmp_path: Path) -> None:
    folder = StateFolder(tmp_path / "a" / "b")
    assert not folder.exists()
    folder.prepare()
    folder.prepare()
    assert folder.exists()
    names = {path.name for path in folder.root.iterdir()}
    assert names == {
        *("version", "lock", "events"),
        *("shares", "devices", "queue", "shim", "simulated"),
    }
    assert folder.libraries.is_dir()


def test_a_folder_of_all_users_is_so_all_the_way_down(tmp_path: Path) -> None:
    tmp_path.chmod(0o1777)
    folder = StateFolder(tmp_path)
    folder.prepare()
    assert folder.shares.stat().st_mode & 0o7777 == 0o1777
    assert (tmp_path / "lock").stat().st_mode & 0o777 == 0o666


def test_a_folder_of_the_version_before_becomes_of_this_one(tmp_path: Path) -> None:
    folder = StateFolder(tmp_path)
    folder.prepare()
    folder.devices.rmdir()
    (tmp_path / "version").write_text("1\n")
    assert folder.exists()
    assert not folder.devices.exists()  # looking changes nothing
    folder.prepare()
    assert folder.devices.is_dir()
    assert (tmp_path / "version").read_text() == f"{folders.LAYOUT_VERSION}\n"
    assert {path.name[0] for path in tmp_path.iterdir()}.isdisjoint(".")


@pytest.mark.parametrize("version", ["3", "17", "9" * 4000])
def test_a_newer_folder_is_refused_and_left_alone(tmp_path: Path, version: str) -> None:
    (tmp_path / "version").write_text(version)
    with pytest.raises(StateError, match="newer") as caught:
        StateFolder(tmp_path).prepare()
    assert "upgrade" in (caught.value.hint or "")
    assert [path.name for path in tmp_path.iterdir()] == ["version"]


@pytest.mark.parametrize("version", ["", "x", "-1", "0", "1.5", "²"])
def test_what_is_no_version_is_refused(tmp_path: Path, version: str) -> None:
    (tmp_path / "version").write_text(version)
    with pytest.raises(StateError):
        StateFolder(tmp_path).exists()


def test_a_file_in_the_way_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StateError, match="file"):
        StateFolder(tmp_path / "file").prepare()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EDQUOT])
def test_every_failure_says_what_where_and_next(number: int) -> None:
    error = explained(OSError(number, os.strerror(number)), Path("/x/y"), "do it")
    assert error.message == f"/x/y: cannot do it: {os.strerror(number)}"
    assert error.hint


def test_the_lock_excludes_and_waits_a_bounded_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = StateFolder(tmp_path)
    folder.prepare()
    monkeypatch.setattr(folders, "_LOCK_WAIT_S", 0.05)
    with (tmp_path / "lock").open() as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        holder = rf"process {os.getpid()} of \S+ \(uid {os.geteuid()}\) has"
        with pytest.raises(BusyError, match=holder), folder.locked():
            pytest.fail("held by two")
    with folder.locked():
        pass


@pytest.mark.parametrize(
    ("is_moving", "held_s", "is_waited_for"),
    [(True, 120, True), (False, 30, False), (True, 330, False)],
    ids=["passes-on", "is-held", "seems-to-pass-on"],
)
def test_a_lock_that_passes_from_one_to_the_next_is_waited_for(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    *,
    is_moving: bool,
    held_s: int,
    is_waited_for: bool,
) -> None:
    """Hundreds of commands may start at once: each of them has its turn.

    In a folder for all users each of them can hold the lock and change the time of `shares`.
    """
    folder = StateFolder(tmp_path)
    folder.prepare()
    waited_s = 0.0
    with (tmp_path / "lock").open() as other:
        fcntl.flock(other, fcntl.LOCK_EX)

        def sleep(_seconds: float) -> None:
            """A share begins or ends between two looks."""
            nonlocal waited_s
            waited_s += 15
            if is_moving:
                os.utime(folder.shares, (waited_s, waited_s))
            if is_waited_for and waited_s == held_s:
                fcntl.flock(other, fcntl.LOCK_UN)

        monkeypatch.setattr(time, "monotonic", lambda: waited_s)
        monkeypatch.setattr(time, "sleep", sleep)
        with nullcontext() if is_waited_for else pytest.raises(BusyError), folder.locked():
            pass
    assert waited_s == held_s
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith(f"allot: waiting for the lock {folder.root}/lock: process {os.getpid()}")


def test_a_lock_that_is_no_file_is_refused_at_once(tmp_path: Path) -> None:
    folder = StateFolder(tmp_path)
    folder.prepare()
    (tmp_path / "lock").unlink()
    os.mkfifo(tmp_path / "lock")
    with pytest.raises(StateError, match="open the lock"), folder.locked():
        pytest.fail("opened a pipe")


def test_the_place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ALLOTMENT_STATE", str(tmp_path / "named"))
    assert StateFolder.at(None).root == tmp_path / "named"
    assert StateFolder.at(tmp_path / "other").root == tmp_path / "other"
    monkeypatch.delenv("ALLOTMENT_STATE")
    monkeypatch.setattr(folders, "RUN_FOLDER", tmp_path / "run" / "allotment")
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/7")
    assert StateFolder.at(None).root == Path("/run/user/7/allotment")
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    monkeypatch.setenv("XDG_STATE_HOME", "/home/u/state")
    assert StateFolder.at(None).root == Path("/home/u/state/allotment")
    (tmp_path / "run").mkdir()
    assert StateFolder.at(None).root == tmp_path / "run" / "allotment"


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to others")
NOBODY = 65534
DAEMON = 1


@needs_root
@pytest.mark.parametrize(
    ("name", "could"),
    [
        *(
            (name, "replace what is in it")
            for name in ("shares", "devices", "queue", "shim", "simulated", "simulated/lib")
        ),
        ("lock", "close or remove it"),
        ("version", "close or remove it"),
    ],
)
def test_what_another_user_owns_is_not_trusted(tmp_path: Path, name: str, could: str) -> None:
    folder = StateFolder(tmp_path / "state")
    folder.prepare()
    os.chown(folder.root / name, NOBODY, NOBODY)
    with pytest.raises(
        StateError, match=rf"another user \(uid 65534\), who could {could}"
    ) as caught:
        folder.prepare()
    if "remove it" in could:
        subprocess.run((caught.value.hint or "").partition(": ")[2].split(), check=True)
        folder.prepare()


@needs_root
@pytest.mark.parametrize("has_folders", [False, True], ids=["nothing", "folders"])
def test_only_root_makes_what_all_users_share(common_folder: Path, *, has_folders: bool) -> None:
    folder = StateFolder(common_folder)
    if has_folders:
        folder.prepare()
        for name in ("lock", "version", "events"):
            (folder.root / name).unlink()
    with as_user(NOBODY), pytest.raises(StateError, match="only root may create it") as caught:
        folder.prepare()
    assert folder.shares.exists() == has_folders
    assert not folder.exists()
    hint = (caught.value.hint or "").partition(": ")[2]
    assert hint == f"mkdir -p -m 1777 {common_folder} && allot doctor --state {common_folder}"
    CliRunner().invoke(doctor.command, ["--state", str(common_folder)])
    with as_user(NOBODY):
        folder.prepare()
        with folder.locked():
            note_event(folder, "created", share="a", share_id=ShareId("1"), text="")
    assert folder.shares.stat().st_mode & 0o7777 == 0o1777
    assert {path.stat().st_uid for path in folder.root.iterdir()} == {0}
    assert [each.share for each in read_events(folder)] == ["a"]


@needs_root
def test_a_folder_of_a_group_is_for_its_members_alone(common_folder: Path) -> None:
    common_folder.chmod(0o1770)
    os.chown(common_folder, 0, NOBODY)
    folder = StateFolder(common_folder)
    folder.prepare()
    folder.prepare()
    assert folder.root.stat().st_mode & 0o7777 == 0o1770
    assert folder.shares.stat().st_mode & 0o7777 == 0o1777
    assert not folder.is_closed()
    before = os.getegid()
    os.setegid(NOBODY)
    try:
        with as_user(DAEMON):
            folder.prepare()
            with folder.locked():
                note_event(folder, "created", share="a", share_id=ShareId("1"), text="")
    finally:
        os.setegid(before)
    with as_user(DAEMON), pytest.raises(StateError):
        folder.prepare()


@needs_root
@pytest.mark.parametrize("mode", [0o770, 0o2775, 0o1755], ids=oct)
def test_a_folder_that_a_group_may_only_write_is_its_owner_s(tmp_path: Path, mode: int) -> None:
    """As a umask of 002 makes it."""
    tmp_path.chmod(mode)
    folder = StateFolder(tmp_path)
    folder.prepare()
    assert folder.is_closed()


@needs_root
@pytest.mark.parametrize("is_link", [False, True], ids=["folder", "link"])
def test_no_file_of_another_users_queue_is_removed(
    common_folder: Path, tmp_path: Path, *, is_link: bool
) -> None:
    folder = StateFolder(common_folder)
    folder.prepare()
    folder.queue.rmdir()
    chosen = tmp_path if is_link else folder.queue
    chosen.mkdir(exist_ok=True)
    if is_link:
        folder.queue.symlink_to(tmp_path)
    else:
        os.chown(folder.queue, NOBODY, NOBODY)
    kept = chosen / f"{1:020d}-1-real"
    kept.write_text("root's")
    with pytest.raises(StateError), folder.in_turn("real", until=math.inf, notice=print):
        pytest.fail("it had its turn there")
    assert kept.exists()
    os.lchown(folder.queue, NOBODY, NOBODY)
    with pytest.raises(StateError, match="belongs to another user"):
        folder.prepare()


def test_only_dead_places_in_the_queue_are_removed(tmp_path: Path) -> None:
    folder = StateFolder(tmp_path / "state")
    folder.prepare()
    (tmp_path / "file").write_text("")
    (folder.queue / f"{1:020d}-1-real").symlink_to(tmp_path / "file")
    os.mkfifo(folder.queue / f"{2:020d}-1-real")
    others = ["0", f"{3:020d}-1-t4", f"{4:020d}-x-real", f"{5:020d}-1-real.d"]
    dead = f"{6:020d}-1-real"
    for name in (*others, dead):
        (folder.queue / name).write_text("")
    for until in (math.inf, 0.0):
        with folder.in_turn("real", until=until, notice=lambda _: pytest.fail("none waits")):
            own = max(folder.queue.iterdir())
            assert own.stat().st_mode & 0o777 == 0o644  # other users wait for its lock
    names = {path.name for path in folder.queue.iterdir()}
    assert names == {f"{1:020d}-1-real", f"{2:020d}-1-real", *others}
    assert (tmp_path / "file").exists()
