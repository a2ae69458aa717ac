# SPDX-License-Identifier: Apache-2.0
"""Finding commands as a shell does, and running them as if nothing were between."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from allotment.model.errors import (
    CommandNotExecutableError,
    CommandNotFoundError,
    PrerequisiteError,
)
from allotment.shares.run import child_process
from allotment.shares.run.child_process import SignalState, find_program, signals_held, start, wait


@pytest.fixture
def signals() -> Iterator[SignalState]:
    with signals_held() as before:
        yield before


@pytest.fixture
def bin_folder(tmp_path: Path) -> Path:
    for name, mode in (("good", 0o755), ("plain", 0o644)):
        (tmp_path / name).write_text("#!/bin/sh\nexit 7\n")
        (tmp_path / name).chmod(mode)
    (tmp_path / "folder").mkdir()
    (tmp_path / "bare").write_text("exit 8\n")
    (tmp_path / "bare").chmod(0o755)
    (tmp_path / "lost").write_text("#!/no/such/interpreter\n")
    (tmp_path / "lost").chmod(0o755)
    return tmp_path


def test_a_command_is_found_on_the_path(bin_folder: Path) -> None:
    program = find_program(["good", "x"], f"/nowhere:{bin_folder}")
    assert program.path == str(bin_folder / "good")
    assert program.arguments == ("good", "x")


def test_the_path_goes_on_after_what_cannot_be_executed(bin_folder: Path, tmp_path: Path) -> None:
    later = tmp_path / "later"
    later.mkdir()
    (later / "plain").symlink_to("/bin/true")
    assert find_program(["plain"], f"{bin_folder}:{later}").path == str(later / "plain")


@pytest.mark.parametrize("name", ["missing", "/no/such/command", "folder", ""])
def test_not_found_is_127(bin_folder: Path, name: str) -> None:
    with pytest.raises(CommandNotFoundError) as caught:
        find_program([name], str(bin_folder))
    assert caught.value.exit_code == 127


@pytest.mark.parametrize("name", ["plain", "./plain", "./folder"])
def test_not_executable_is_126(
    bin_folder: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(bin_folder)
    with pytest.raises(CommandNotExecutableError) as caught:
        find_program([name], str(bin_folder))
    assert caught.value.exit_code == 126


@pytest.mark.parametrize(("name", "status"), [("good", 7), ("bare", 8)])
def test_scripts_run_as_a_shell_has_it(
    bin_folder: Path, name: str, status: int, signals: SignalState
) -> None:
    program = find_program([name], str(bin_folder))
    assert os.waitstatus_to_exitcode(wait(start(program, os.environ, signals=signals))) == status


def test_an_end_whose_signal_another_thread_got_is_seen(
    bin_folder: Path, signals: SignalState, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child_process, "_LOOK_S", 0.05)
    monkeypatch.delattr(signal, "sigwaitinfo")  # it waits without an end: the test would hang
    child = start(find_program(["good"], str(bin_folder)), os.environ, signals=signals)
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    signal.sigtimedwait({signal.SIGCHLD}, 0)  # gone, unless another thread has got it already
    answers = [(0, 0)]  # as before its end
    waitpid = os.waitpid
    monkeypatch.setattr(os, "waitpid", lambda *given: answers.pop() if answers else waitpid(*given))
    assert os.waitstatus_to_exitcode(wait(child)) == 7


def test_a_missing_interpreter_is_told(bin_folder: Path, signals: SignalState) -> None:
    with pytest.raises(CommandNotExecutableError) as caught:
        start(find_program(["lost"], str(bin_folder)), os.environ, signals=signals)
    assert "interpreter" in (caught.value.hint or "")


def test_what_fails_before_the_program_starts_is_told(
    bin_folder: Path, signals: SignalState
) -> None:
    def fail() -> None:
        raise PermissionError(1, "Operation not permitted", "/etc/ld.so.preload")

    with pytest.raises(PrerequisiteError, match=r"ld\.so\.preload: Operation not permitted"):
        start(find_program(["good"], str(bin_folder)), os.environ, signals=signals, prepare=fail)


def test_the_program_sees_the_environment_that_was_given(
    tmp_path: Path, signals: SignalState
) -> None:
    out = tmp_path / "out"
    program = find_program(["sh", "-c", f'echo "$A" > {out}'], os.environ["PATH"])
    assert wait(start(program, {"A": "b"}, signals=signals)) == 0
    assert out.read_text() == "b\n"


_LOOKED_AT = """
import os, signal
from allotment.shares.run import child_process as run
run._LOOK_S = 0.2
with run.signals_held() as signals:
    loop = "trap '' USR1; while :; do kill -USR1 $PPID; done"
    program = run.find_program(["sh", "-c", loop], None)
    child = run.start(program, os.environ, signals=signals)
    print(run.wait(child, look=lambda: os.kill(child, signal.SIGKILL)))
"""


def test_signals_do_not_put_off_the_look() -> None:
    """In a process of its own: the signals are for one that has a single thread."""
    done = subprocess.run([sys.executable, "-c", _LOOKED_AT], capture_output=True, check=True)
    assert int(done.stdout) == signal.SIGKILL
