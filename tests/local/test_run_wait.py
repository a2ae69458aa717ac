# SPDX-License-Identifier: Apache-2.0
"""`allot run --wait`: by order of arrival, until there is room."""

import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from patience import wait_until

Allot = Any  # tests/conftest.py: CommandLine
Process = subprocess.Popen[str]


@pytest.fixture
def begin(allot: Allot, tmp_path: Path) -> Iterator[Callable[..., Process]]:
    """Starts `allot run` with all of a T4's memory but 1 GiB; its notes go to a file."""
    started: list[Process] = []

    def start(name: str, *options: str, memory: str = "13Gi") -> Process:
        share = ["--simulated", "t4", "--memory", memory, "--inject", "environment"]
        command = allot.command("run", *share, *options, "--name", name, "--", "cat")
        with (tmp_path / name).open("w") as notes:
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=notes,
                text=True,
                env=allot.environment(),
                start_new_session=True,
            )
        started.append(process)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        with process:
            pass


def names(allot: Allot) -> list[str]:
    found: list[str] = allot("ps", "-o", "name").stdout.split()
    return found


def noted(tmp_path: Path, name: str, text: str) -> None:
    wait_until(lambda: text in (tmp_path / name).read_text())


def has_begun(allot: Allot, name: str) -> None:
    wait_until(lambda: name in names(allot))


def end(process: Process) -> None:
    process.communicate()
    assert process.returncode == 0


def test_waiting_commands_begin_in_their_order(
    allot: Allot, begin: Callable[..., Process], tmp_path: Path
) -> None:
    holder = begin("holder")
    has_begun(allot, "holder")
    first = begin("first", "--wait")
    noted(tmp_path, "first", "need 13Gi, have 1.6Gi")
    # It would fit, but a stream of small ones must not starve the first.
    small = begin("small", "--wait", memory="1Gi")
    noted(tmp_path, "small", "waiting behind 1 command that came before")
    assert names(allot) == ["holder"]
    end(holder)
    has_begun(allot, "small")
    assert sorted(names(allot)) == ["first", "small"]
    end(first)
    end(small)
    assert (tmp_path / "first").read_text().count("waiting for room") == 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=["Ctrl-C", "killed"])
def test_one_that_ends_gives_its_place_up(
    allot: Allot, begin: Callable[..., Process], tmp_path: Path, number: int
) -> None:
    begin("holder")
    has_begun(allot, "holder")
    first = begin("first", "--wait")
    noted(tmp_path, "first", "waiting for room")
    small = begin("small", "--wait", memory="1Gi")
    noted(tmp_path, "small", "waiting behind 1 command")
    os.killpg(first.pid, number)
    assert first.wait(60) == (130 if number == signal.SIGINT else -number)
    has_begun(allot, "small")
    end(small)
    assert not [path for path in (allot.state / "queue").rglob("*") if path.is_file()]


def test_the_wait_has_a_limit(allot: Allot, begin: Callable[..., Process], tmp_path: Path) -> None:
    begin("holder")
    has_begun(allot, "holder")
    begin("first", "--wait")
    noted(tmp_path, "first", "waiting for room")
    for memory in ("13Gi", "1Gi"):  # at the head of the queue it would fit
        share = ["--simulated", "t4", "--memory", memory, "--wait=100ms"]
        done = allot("run", *share, "--", "true")
        assert done.returncode == 3
        assert "no room within 100ms" in done.stderr


@pytest.mark.parametrize(
    ("options", "text"),
    [(["--memory", "100Gi"], "no GPU here is that large"), (["--count", "2"], "has 1 GPU")],
    ids=["memory", "count"],
)
def test_what_can_never_fit_is_refused_at_once(allot: Allot, options: list[str], text: str) -> None:
    done = allot("run", "--wait", "--simulated", "t4", "--memory", "1Gi", *options, "--", "true")
    assert done.returncode == 3
    assert text in done.stderr


def test_a_time_needs_its_unit(allot: Allot) -> None:
    done = allot("run", "--wait=10", "--simulated", "t4", "--memory", "1Gi", "--", "true")
    assert done.returncode == 2
    assert "--wait" in done.stderr
