# SPDX-License-Identifier: Apache-2.0
"""`make cluster CLUSTER_ARGS=--scheduler`, as a person uses it: what is printed is pasted."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from installing import ROOT
from testbed.waiting import tail, wait_until

_TESTBED = [sys.executable, "-m", "testbed"]
_ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
_EXAMPLES = ROOT / "examples" / "dialects"


@dataclass(frozen=True, slots=True)
class Tried:
    """A cluster that another process holds."""

    process: subprocess.Popen[bytes]
    state: Path
    output: Path

    @property
    def said(self) -> str:
        return self.output.read_text("utf-8")

    def wait_for(self, words: str) -> None:
        def is_said() -> bool:
            assert words in self.said or self.process.poll() is None, self.said
            return words in self.said

        wait_until(is_said, repr(words), timeout_s=150, explain=lambda: tail(self.output))

    def lines(self, first: str) -> list[str]:
        """The indented lines below one that begins so."""
        said = iter(self.said.splitlines())
        next(line for line in said if line.startswith(first))
        found = []
        for line in said:
            if not line.startswith("  "):
                break
            found.append(line)
        return found

    def paste(self, *lines: str) -> str:
        """Runs lines in a shell after those that say where the cluster is; what they print."""
        where = [each for each in self.said.splitlines() if each.startswith(("export ", "alias "))]
        script = "\n".join(["shopt -s expand_aliases", *where, *lines])
        done = subprocess.run(
            ["bash", "-e", "-c", script], capture_output=True, text=True, check=False, timeout=120
        )
        assert done.returncode == 0, f"{script}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def down(self) -> str:
        return subprocess.run(
            [*_TESTBED, "down", "--state", str(self.state)],
            env=_ENVIRONMENT, capture_output=True, text=True, check=True, timeout=120,
        ).stdout  # fmt: skip


@pytest.fixture(scope="module")
def tried(testbed_machine: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tried]:
    del testbed_machine
    folder = tmp_path_factory.mktemp("tried")
    with (folder / "output").open("wb") as output:
        process = subprocess.Popen(
            [*_TESTBED, "up", "--scheduler", "--state", str(folder / "state")],
            env=_ENVIRONMENT, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
        )  # fmt: skip
    made = Tried(process, folder / "state", folder / "output")
    try:
        made.wait_for("to end it")
        yield made
    finally:
        if process.poll() is None:
            made.down()
        process.wait(60)


def _phase(name: str, phase: str) -> str:
    wanted = f"--for=jsonpath='{{.status.phase}}'={phase}"
    return f"kubectl wait {wanted} pod/{name} --timeout=90s"


def test_what_is_printed_of_the_scheduler_works(tried: Tried) -> None:
    lines = tried.lines("The scheduler runs")
    assert any("hami.yaml" in line for line in lines)
    shown = tried.paste(*lines)
    assert "pod/gpu-pod created" in shown
    # HAMi's example asks for 3000 MiB of each of two GPUs; its program saw the same.
    assert f'"memory":{3000 << 20}' in shown
    assert f'"total_bytes": {3000 << 20}' in shown


def test_a_pod_that_runs_is_explained(tried: Tried) -> None:
    explaining = next(line for line in tried.lines("The scheduler runs") if "explain" in line)
    tried.paste(f"kubectl apply -f {tried.state / 'pod.yaml'}", _phase("quarter", "Running"))
    shown = tried.paste(explaining.replace("gpu-pod", "quarter"))
    assert "is placed on node node-1" in shown
    assert "scheduler: allotment-scheduler" in shown


def test_a_scheduler_that_ends_is_started_again_and_serves(tried: Tried) -> None:
    tried.paste(*tried.lines("It runs without a pod"))
    tried.wait_for("the scheduler is started again")
    # A pod that names another system's scheduler, and an object of another system's kind.
    for file, name in (("kai-memory", "gpu-memory"), ("kubeshare-sharepod", "sharepod1")):
        apply = f"kubectl apply -f {_EXAMPLES / file}.yaml"
        exists = f"kubectl get pod {name}"
        tried.paste(*(f"until {each}; do sleep 1; done" for each in (apply, exists)))
        tried.paste(_phase(name, "Succeeded"))


def test_it_ends_and_leaves_its_logs_alone(tried: Tried) -> None:
    assert "The cluster is gone." in tried.down()
    assert tried.process.wait(60) == 0
    assert {path.name for path in tried.state.iterdir()} == {"logs", "pod-logs"}


def test_nodes_without_gpus_are_refused(tmp_path: Path, testbed_machine: None) -> None:
    del testbed_machine
    done = subprocess.run(
        [*_TESTBED, "up", "--scheduler", "--fake-nodes", "3", "--state", str(tmp_path / "state")],
        env=_ENVIRONMENT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert "error: --scheduler: the nodes of --fake-nodes have no GPUs" in done.stderr
    assert not (tmp_path / "state").exists()
