# SPDX-License-Identifier: Apache-2.0
"""`make cluster`: what it prints works, what ends is started again, Ctrl-C is no error."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import pytest
from testbed.api import Api
from testbed.build import ROOT
from testbed.cluster import Cluster
from testbed.held import Held
from testbed.sandbox import Process
from testbed.waiting import TestbedError, wait_until

_UP = [sys.executable, "-m", "testbed", "up"]
_ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}


@dataclass(slots=True)
class Terminal:
    """A program with a terminal of its own, as `make cluster` has."""

    pid: int
    file: int
    said: str = ""
    status: int | None = None

    def wait_for(self, words: str) -> None:
        """Reads until it says this."""
        while words not in self.said:
            if not self.read():
                raise TestbedError(f"ended without {words!r}:\n{self.said}")

    def read(self) -> bool:
        """Takes what is there; False at the end."""
        try:
            more = os.read(self.file, 4096)
        except OSError:  # how a terminal says it
            more = b""
        self.said += more.decode(errors="replace").replace("\r\n", "\n")
        return bool(more)

    def end(self) -> int:
        """Presses Ctrl-C, reads to the end, returns the exit status."""
        os.write(self.file, b"\x03")
        while self.read():
            pass
        self.status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.status

    def abandon(self) -> None:
        """Ends what a test has left running, whatever it does with Ctrl-C, in bounded time."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(OSError):
                os.killpg(os.tcgetpgrp(self.file), number)
            latest = time.monotonic() + 30
            while time.monotonic() < latest:
                if select.select([self.file], [], [], 1)[0] and not self.read():
                    os.waitpid(self.pid, 0)
                    return


@pytest.fixture
def below_make(tmp_path: Path, testbed_machine: None) -> Iterator[Terminal]:
    """A held cluster below `make`, in a terminal."""
    del testbed_machine
    makefile = tmp_path / "Makefile"
    command = " ".join([*_UP, "--state", str(tmp_path / "state")])
    makefile.write_text(f"cluster:\n\t@PYTHONPATH={Path(__file__).parent} {command}\n")
    pid, file = pty.fork()
    if pid == 0:
        # Whoever runs the tests in the background hands down that Ctrl-C is ignored.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.chdir(ROOT)
        os.execvp("make", ["make", "-f", str(makefile)])
    terminal = Terminal(pid, file)
    yield terminal
    if terminal.status is None:
        terminal.abandon()
    os.close(file)


@pytest.mark.skipif(shutil.which("make") is None, reason="no make")
def test_what_is_printed_works_and_ctrl_c_is_no_error(below_make: Terminal, tmp_path: Path) -> None:
    below_make.wait_for("to end it")
    state = tmp_path / "state"
    description = json.loads((state / "cluster.json").read_text("utf-8"))

    entering = next(line for line in below_make.said.splitlines() if "nsenter" in line)
    for words in ("allot ps", "allot devices"):
        done = subprocess.run(
            ["bash", "-c", f"{entering} -c {words!r}"], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
    assert "A100" in done.stdout

    with contextlib.closing(Api(Path(description["kubeconfig"]))) as api:

        def offers(resource: str) -> bool:
            allocatable = api.get("/api/v1/nodes/node-1")["status"]["allocatable"]
            return str(allocatable.get(resource, "0")) != "0"

        wait_until(lambda: offers("allotment.dev/gpu"), "parts of GPUs")
        # The guide's step, the other way round: the label chooses another one of the ConfigMap.
        label = {"nvidia.com/device-plugin.config": "default"}
        api.patch("/api/v1/nodes/node-1", {"metadata": {"labels": label}})
        wait_until(lambda: offers("nvidia.com/gpu"), "whole GPUs")
        wait_until(lambda: not offers("allotment.dev/gpu"), "no parts of GPUs")

    # Meant for a terminal anywhere: it ends the agent of this cluster alone.
    ending = re.search(r"nsenter .* -- pkill -f '.*'", below_make.said)
    assert ending is not None
    subprocess.run(["bash", "-c", ending[0]], check=True)
    below_make.wait_for("the agent is started again")

    assert below_make.end() == 0
    assert "***" not in below_make.said
    assert {path.name for path in state.iterdir()} == {"logs", "pod-logs"}


def test_options_are_checked_before_anything_is_started(tmp_path: Path) -> None:
    for words, message in (
        (["--simulated", "a100-80gb:x"], "error: --simulated: "),
        (["--config", "absent.yaml"], "error: --config: there is no file"),
    ):
        done = subprocess.run(
            [*_UP, "--state", str(tmp_path / "state"), *words],
            env=_ENVIRONMENT,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 1
        assert message in done.stderr or "needs root" in done.stderr or "(Debian" in done.stderr
        assert not (tmp_path / "state").exists()


def test_a_request_after_the_api_servers_restart_is_sent_on_a_new_connection(
    cluster: Cluster,
) -> None:
    api = cluster.api
    api.get("/api/v1/namespaces/default")
    cluster.restart("kube-apiserver", signal.SIGKILL)
    name = f"after-restart-{time.monotonic_ns()}"
    api.post("/api/v1/namespaces", {"metadata": {"name": name}})
    api.delete(f"/api/v1/namespaces/{name}")


# ---- an agent that ends --------------------------------------------------------------------------


@dataclass(slots=True)
class TwinProcess:
    """A process that ends when told so."""

    pid: int
    is_running: bool = True

    def wait(self, timeout_s: float) -> int:
        del timeout_s
        return -signal.SIGKILL


def start_twin(started: list[TwinProcess]) -> Process:
    """Keeps what was started."""
    started.append(TwinProcess(pid=len(started)))
    return cast("Process", started[-1])


def test_what_ends_at_once_is_started_ever_later(tmp_path: Path) -> None:
    started, now, said = list[TwinProcess](), 0.0, list[str]()
    agent = Held(
        *("agent", start_twin(started)),
        again=lambda: start_twin(started),
        log=tmp_path / "agent.log",
        say=said.append,
        now=lambda: now,
    )
    starts = []
    for _ in range(400):
        now += 1
        started[-1].is_running = False
        before = len(started)
        agent.look()
        if len(started) > before:
            starts.append(now)
    pauses = [after - before for before, after in itertools.pairwise(starts)]
    assert pauses[:5] == [3, 5, 9, 17, 33]  # the pause, and a second until the end is seen
    assert set(pauses[5:]) == {61}
    assert "by SIGKILL" in said[0]


def test_what_ran_long_is_started_soon(tmp_path: Path) -> None:
    started, now = list[TwinProcess](), 0.0
    agent = Held(
        *("agent", start_twin(started)),
        again=lambda: start_twin(started),
        log=tmp_path / "agent.log",
        say=lambda _: None,
        now=lambda: now,
    )
    for _ in range(5):
        now += 100
        started[-1].is_running = False
        agent.look()
        now += 1
        agent.look()
    assert len(started) == 6
