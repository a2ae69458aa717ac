# SPDX-License-Identifier: Apache-2.0
"""`allot run` on a terminal: Ctrl-C, Ctrl-Z, a resized window, a hang-up, interactive shells."""

import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from patience import wait_until

from allotment.shares.run.namespace import can_unshare

Allot = Any  # tests/conftest.py: CommandLine
RUN = ("run", "--simulated", "t4", "--memory", "1Gi")
INJECT = "namespace" if can_unshare() else "environment"


class Terminal:
    """A program on a terminal of its own, as its session's leader."""

    def __init__(self, command: list[str], environment: dict[str, str]) -> None:
        self.pid, self.descriptor = pty.fork()
        if self.pid == 0:
            os.execvpe(command[0], command, environment)
        self.seen = ""

    def expect(self, pattern: str, timeout_s: float = 60) -> str:
        """Read until the pattern has come; return what came up to its end, which is done with."""
        deadline = time.monotonic() + timeout_s
        while not (found := re.search(pattern, self.seen)):
            left = deadline - time.monotonic()
            assert left > 0, f"{pattern!r} did not come, but {self.seen!r}"
            if select.select([self.descriptor], [], [], left)[0]:
                try:
                    data = os.read(self.descriptor, 4096)
                except OSError:
                    data = b""
                assert data, f"{pattern!r} did not come, but {self.seen!r} and the end"
                self.seen += data.decode(errors="replace")
        came, self.seen = self.seen[: found.end()], self.seen[found.end() :]
        return came

    def in_front(self) -> str:
        """Name the program that has the terminal."""
        try:
            leader = Path(f"/proc/{os.tcgetpgrp(self.descriptor)}/comm")
            return leader.read_text().strip()
        except OSError:  # it has just changed hands
            return ""

    def send(self, text: str) -> None:
        os.write(self.descriptor, text.encode())

    def resize(self, lines: int, columns: int) -> None:
        fcntl.ioctl(self.descriptor, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def status(self, timeout_s: float = 60) -> int:
        """Wait for the end of the program: its exit code, or minus its signal."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            ended, status = os.waitpid(self.pid, os.WNOHANG)
            if ended:
                self.pid = 0
                return os.waitstatus_to_exitcode(status)
            if select.select([self.descriptor], [], [], 0.02)[0]:
                try:
                    os.read(self.descriptor, 4096)
                except OSError:
                    time.sleep(0.01)  # the other side is closed; the end is near
        pytest.fail("it did not end")

    def close(self) -> None:
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        os.close(self.descriptor)


@pytest.fixture
def terminal(allot: Allot) -> Iterator[Callable[..., Terminal]]:
    """Starts programs, each on a terminal of its own."""
    opened: list[Terminal] = []

    def open_one(*command: str) -> Terminal:
        one = Terminal(list(command), allot.environment(PS1="PROMPT> ", TERM="dumb"))
        opened.append(one)
        return one

    yield open_one
    for one in opened:
        one.close()


def allot_run(allot: Allot, *command: str) -> list[str]:
    return list(allot.command(*RUN, "--inject", INJECT, "--", *command))


def test_ctrl_c_comes_once(allot: Allot, terminal: Callable[..., Terminal]) -> None:
    script = "trap 'echo got' INT; echo ready; read x; read x; echo end; exit 4"
    one = terminal(*allot_run(allot, "sh", "-c", script))
    one.expect("ready")
    one.send("\x03")
    one.expect("got")
    one.send("a\nb\n")
    assert "got" not in one.expect("end")
    assert one.status() == 4


def test_ctrl_c_ends_what_does_not_care(allot: Allot, terminal: Callable[..., Terminal]) -> None:
    one = terminal(*allot_run(allot, "sh", "-c", "echo ready; exec sleep 50"))
    one.expect("ready")
    one.send("\x03")
    assert one.status() == -signal.SIGINT
    assert list((allot.state / "shares").iterdir()) == []


def test_a_resized_window_is_seen(allot: Allot, terminal: Callable[..., Terminal]) -> None:
    script = "trap 'stty size' WINCH; echo ready; while :; do sleep 0.05; done"
    one = terminal(*allot_run(allot, "sh", "-c", script))
    one.expect("ready")
    one.resize(33, 77)
    one.expect("33 77")


def test_a_hang_up_ends_all(allot: Allot, terminal: Callable[..., Terminal]) -> None:
    one = terminal(*allot_run(allot, "sh", "-c", "echo ready; exec sleep 50"))
    one.expect("ready")
    os.kill(one.pid, signal.SIGHUP)
    assert one.status() == -signal.SIGHUP
    assert list((allot.state / "shares").iterdir()) == []


def test_ctrl_z_gives_the_shell_its_prompt_and_fg_goes_on(
    allot: Allot, terminal: Callable[..., Terminal], tmp_path: Path
) -> None:
    command = subprocess.list2cmdline(allot_run(allot, "sh", str(tmp_path / "script")))
    (tmp_path / "script").write_text("echo ready; read x; echo line $x; exit 6\n")
    shell = terminal("bash", "--norc", "--noprofile", "-i")
    shell.expect("PROMPT> ")
    shell.send(f"{command}\n")
    shell.expect("ready\r\n")
    shell.send("\x1a")
    shell.expect("Stopped")
    shell.expect("PROMPT> ")
    shell.send("fg\n")
    shell.expect("script")
    shell.send("again\n")
    shell.expect("line again")
    shell.expect("PROMPT> ")
    shell.send("echo status $?\n")
    shell.expect("status 6")


def test_an_interactive_shell_has_its_jobs(allot: Allot, terminal: Callable[..., Terminal]) -> None:
    one = terminal(*allot_run(allot, "bash", "--norc", "--noprofile", "-i"))
    one.expect("PROMPT> ")
    assert "no job control" not in one.seen
    one.send("sleep 50\n")
    wait_until(lambda: one.in_front() == "sleep")
    one.send("\x1a")
    one.expect("Stopped")
    one.send("kill -9 %1; while kill -0 %1; do sleep 0.1; done\n")
    one.expect("Killed")
    one.send("exit 3\n")
    assert one.status() == 3


def test_in_a_pipeline_the_others_keep_the_terminal(
    allot: Allot, terminal: Callable[..., Terminal]
) -> None:
    command = subprocess.list2cmdline(allot_run(allot, "echo", "data"))
    shell = terminal("bash", "--norc", "--noprofile", "-i")
    shell.expect("PROMPT> ")
    shell.send(f"{command} | (cat; read x < /dev/tty; echo got $x)\n")
    shell.expect("data\r\n")
    shell.send("typed\n")
    shell.expect("got typed")


def test_a_suspended_share_says_so_in_its_terminal(
    allot: Allot, terminal: Callable[..., Terminal], tmp_path: Path
) -> None:
    run = (*RUN, "--name", "job", "--inject", INJECT, "--", "sh", tmp_path / "script")
    (tmp_path / "script").write_text("echo ready; read x; echo line $x; exit 6\n")
    shell = terminal("bash", "--norc", "--noprofile", "-i")
    shell.expect("PROMPT> ")
    shell.send(f"{subprocess.list2cmdline(map(str, allot.command(*run)))}\n")
    shell.expect("ready\r\n")
    for _ in range(2):
        assert allot("suspend", "job").returncode == 0
        shell.expect("allot: suspended; `allot resume job` brings it back\r\n")
        shell.expect("Stopped")
        shell.expect("PROMPT> ")
        assert allot("resume", "job").returncode == 0
        shell.send("fg\n")
        wait_until(lambda: shell.in_front() not in {"", "bash"})
    os.kill(int(shell_child(allot)), signal.SIGSTOP)  # by another: that is not our news
    assert "allot: suspended" not in shell.expect("Stopped")
    shell.send("fg\n")
    shell.send("again\n")
    shell.expect("line again")


def shell_child(allot: Allot) -> str:
    """The only share's command."""
    (share,) = json.loads(allot("ps", "-o", "json").stdout)["shares"]
    children = Path(f"/proc/{share['runner_pid']}/task/{share['runner_pid']}/children")
    return children.read_text()
