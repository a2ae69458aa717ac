# SPDX-License-Identifier: Apache-2.0
"""The agent's process ends in time: in order where it can, and whatever hangs."""

from __future__ import annotations

import asyncio
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

import allotment
from allotment.agent.shutdown import Shutdown, left_tasks, left_threads

_KUBECONFIG = """
apiVersion: v1
kind: Config
current-context: away
clusters: [{name: away, cluster: {server: "http://127.0.0.1:1"}}]
contexts: [{name: away, context: {cluster: away, user: nobody}}]
users: [{name: nobody, user: {}}]
"""


class Process:
    """What has become of the process: nothing yet, or its status."""

    def __init__(self, bound_s: float, again_s: float = 0.0) -> None:
        self.left: queue.Queue[int] = queue.Queue()
        self.ending = Shutdown(bound_s=bound_s, again_s=again_s, leave=self.left.put)
        self.ending.start()


def test_an_end_that_hangs_is_bounded() -> None:
    async def story() -> float:
        process = Process(bound_s=0.2)
        began = time.monotonic()
        process.ending.receive(signal.SIGTERM)
        await process.ending.wait()
        assert process.ending.has_begun
        assert await asyncio.to_thread(process.left.get, timeout=30) == 1
        return time.monotonic() - began

    assert asyncio.run(story()) >= 0.2


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_at_once(number: signal.Signals) -> None:
    process = Process(bound_s=60)
    process.ending.receive(signal.SIGTERM)
    process.ending.receive(number)
    assert process.left.get(timeout=30) == 128 + number


def test_an_end_without_a_signal_is_bounded() -> None:
    process = Process(bound_s=0.1)
    process.ending.begin()
    assert process.left.get(timeout=30) == 1


def test_the_same_signal_sent_to_process_and_group_is_one() -> None:
    process = Process(bound_s=0.3, again_s=3600)
    process.ending.receive(signal.SIGTERM)
    process.ending.receive(signal.SIGTERM)
    assert process.left.get(timeout=30) == 1  # by its bound, not at once


def test_other_signals_are_nothing() -> None:
    process = Process(bound_s=0.1)
    process.ending.receive(signal.SIGCHLD)
    process.ending.receive(signal.SIGCHLD)
    with pytest.raises(queue.Empty):
        process.left.get(timeout=0.3)
    assert not process.ending.has_begun
    process.ending.begin()


def test_what_is_left_is_named() -> None:
    async def hangs_in_a_test() -> None:
        await asyncio.Event().wait()

    async def story() -> list[str]:
        task = asyncio.create_task(hangs_in_a_test())
        await asyncio.sleep(0)
        found = await asyncio.to_thread(left_tasks, asyncio.get_running_loop())
        task.cancel()
        return found

    assert any(
        re.search(r"hangs_in_a_test \(test_\w+.py:\d+\)", each) for each in asyncio.run(story())
    )
    let_go = threading.Event()
    thread = threading.Thread(target=let_go.wait, name="hangs")
    thread.start()
    try:
        assert any(each.startswith("hangs (threading.py:") for each in left_threads())
    finally:
        let_go.set()
        thread.join()


_HANGING = """
import asyncio, sys, time
from allotment.agent.shutdown import Shutdown

ending = Shutdown(bound_s=0.5)
ending.listen()

async def main():
    if sys.argv[1] == "loop":
        print("there", flush=True)
        time.sleep(60)
    waiting = asyncio.create_task(ending.wait())
    print("there", flush=True)
    await waiting
    await asyncio.Event().wait()

asyncio.run(main())
"""


@pytest.mark.parametrize("what", ["task", "loop"])
def test_a_process_that_hangs_ends_and_says_where(what: str) -> None:
    command = [sys.executable, "-c", _HANGING, what]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as agent:
        assert agent.stdout is not None
        assert agent.stdout.readline() == "there\n"
        agent.send_signal(signal.SIGTERM)
        said = agent.stdout.read()
        assert agent.wait(30) == 1
    assert "the agent has not ended within 0.5 s" in said
    assert {"task": "main (", "loop": "MainThread ("}[what] in said


@pytest.mark.timeout(240)  # agents start, and end within their bound
@pytest.mark.parametrize(
    "numbers", [(0, 3, 4, 7), pytest.param((1, 2, 5, 6), marks=pytest.mark.thorough)], ids=str
)
def test_the_agent_ends_at_a_signal_at_any_time(tmp_path: Path, numbers: tuple[int, ...]) -> None:
    """Without an API server, a kubelet and a configuration: everything waits for something."""
    kubeconfig = tmp_path / "kubeconfig"
    kubeconfig.write_text(_KUBECONFIG)

    def ends_after(number: int) -> str | None:
        folder = tmp_path / str(number)
        (folder / "dp").mkdir(parents=True)
        command = [
            *(sys.executable, "-c", "import sys; from allotment.cli import main; sys.exit(main())"),
            *("agent", "--simulated", "a100-80gb:2", "--metrics-address", "off"),
            *("--kubelet-socket", str(folder / "dp/kubelet.sock"), "--cdi", "off"),
            *("--cdi-dir", str(folder / "cdi"), "--state", str(folder / "state")),
            *("--kubeconfig", str(kubeconfig), "--config-file", str(folder / "none.yaml")),
            *("--output-file=", "--node-name", "n"),
        ]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=folder) as agent:
            assert agent.stderr is not None
            said = agent.stderr.readline()  # from its first line on it hears signals
            time.sleep(number * 0.4)
            agent.send_signal((signal.SIGTERM, signal.SIGINT)[number % 2])
            said += agent.stderr.read()
            status = agent.wait(30)
        for pid in re.findall(r"front started .*pid=(\d+)", said):
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)  # it outlives its agent
        # It bounds its end by itself: one that hangs says so, and its status is not 0.
        is_well = status == 0 and "exiting at once" not in said
        return None if is_well else f"{number}: status {status}\n{said}"

    with ThreadPoolExecutor(4) as pool:
        found = [each for each in pool.map(ends_after, numbers) if each is not None]
    assert not found, "\n".join(found)


def test_nobody_uses_what_loses_cancellations() -> None:
    """`asyncio.wait_for` of Python 3.11 returns instead when its answer comes at that moment."""
    root = Path(allotment.__file__).parent
    uses = [
        str(path.relative_to(root))
        for path in root.rglob("*.py")
        if "asyncio.wait_for(" in path.read_text("utf-8")
    ]
    assert uses == []
