# SPDX-License-Identifier: Apache-2.0
"""`allot top` on a terminal: keys, sizes, and the terminal as it was afterwards."""

import fcntl
import os
import pty
import re
import select
import signal
import struct
import termios
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

Allot = Any  # tests/conftest.py: CommandLine


class Screen:
    """`allot top` on a terminal of its own."""

    def __init__(self, command: list[str], environment: dict[str, str]) -> None:
        self.pid, self.descriptor = pty.fork()
        if self.pid == 0:
            os.execvpe(command[0], command, environment)
        self.seen = ""
        self.resize(24, 120)

    def resize(self, lines: int, columns: int) -> None:
        fcntl.ioctl(self.descriptor, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def expect(self, pattern: str, timeout_s: float = 60) -> None:
        deadline = time.monotonic() + timeout_s
        while not (found := re.search(pattern, self.seen)):
            left = deadline - time.monotonic()
            size = os.get_terminal_size(self.descriptor)
            assert left > 0, f"{pattern!r} did not come, but {self.seen[-2000:]!r} at {size}"
            if select.select([self.descriptor], [], [], left)[0]:
                text = os.read(self.descriptor, 65536).decode(errors="replace")
                self.seen += re.sub(r"\x1b\[[0-9;]*m", "", text)
        self.seen = self.seen[found.end() :]

    def send(self, text: str) -> None:
        os.write(self.descriptor, text.encode())

    def modes(self) -> list[Any]:
        return termios.tcgetattr(self.descriptor)[:4]

    def status(self) -> int:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            ended, status = os.waitpid(self.pid, os.WNOHANG)
            if ended:
                self.pid = 0
                return os.waitstatus_to_exitcode(status)
            if select.select([self.descriptor], [], [], 0.02)[0]:
                try:
                    self.seen += os.read(self.descriptor, 65536).decode(errors="replace")
                except OSError:
                    time.sleep(0.01)  # the other side is closed
        pytest.fail("it did not end")

    def close(self) -> None:
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        os.close(self.descriptor)


@pytest.fixture
def screen(allot: Allot) -> Iterator[Callable[..., Screen]]:
    """Opens `allot top`, with a share to look at."""
    made = allot("cdi", "create", "--simulated", "t4", "--memory", "4Gi", "--name", "train",
                 "--cdi-dir", allot.state / "cdi")  # fmt: skip
    assert made.returncode == 0, made.stderr
    opened: list[Screen] = []

    def start(*words: str) -> Screen:
        environment = allot.environment(TERM="xterm-256color")
        # A program that loaded readline, such as pytest's workers' parent, hands down a size.
        for name in ("LINES", "COLUMNS", "NO_COLOR"):
            environment.pop(name, None)
        opened.append(Screen(allot.command("top", "--interval", "300ms", *words), environment))
        return opened[-1]

    yield start
    for each in opened:
        each.close()


@pytest.mark.parametrize("key", ["q", "\x03"])
def test_it_shows_shares_obeys_keys_and_leaves_the_terminal_as_it_was(
    screen: Callable[..., Screen], key: str
) -> None:
    top = screen()
    before = top.modes()
    top.expect("train")
    top.expect("q quit")
    assert top.modes() != before
    top.send("s")
    top.expect("by limit")
    top.send("s")
    top.expect("by gpu")
    top.send("\x1b[B+-k")
    top.send(key)
    assert top.status() == 0
    assert top.modes() == before
    assert "\x1b[?1049l" in top.seen  # the screen that was there before is back


def test_it_follows_the_size_of_the_terminal(screen: Callable[..., Screen]) -> None:
    top = screen()
    top.expect("COMMAND")
    top.resize(24, 40)
    top.expect(r"SHARE\s+USED OF LIMIT\s+ENFORCED")
    top.expect(r"q quit  s sort")
    top.resize(4, 40)
    top.expect(r"↓ \d+ more lines\s+q quit")
    top.send("q")
    assert top.status() == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_signals_put_the_terminal_back(
    screen: Callable[..., Screen], number: signal.Signals
) -> None:
    top = screen()
    before = top.modes()
    top.expect("q quit")
    os.kill(top.pid, number)
    top.status()
    assert top.modes() == before
    assert "\x1b[?1049l" in top.seen


def test_into_a_pipe_it_is_plain_and_ends(allot: Allot, screen: Callable[..., Screen]) -> None:
    assert callable(screen)
    done = allot("top")
    assert done.returncode == 0
    assert "train" in done.stdout
    assert "USED OF LIMIT" in done.stdout
    assert "\x1b" not in done.stdout
    assert not set(done.stdout) & set("▏▎▍▌▋▊▉█")
    # Both tell of the same memory.
    (allotted,) = re.findall(r"4Gi of [0-9.]+Gi", done.stdout)
    assert allotted in allot("devices").stdout


def test_on_a_dumb_terminal_it_is_plain_and_ends(
    allot: Allot, screen: Callable[..., Screen]
) -> None:
    assert callable(screen)
    top = Screen(allot.command("top"), allot.environment(TERM="dumb"))
    top.expect("train")
    assert top.status() == 0
    assert "\x1b" not in top.seen
    top.close()
