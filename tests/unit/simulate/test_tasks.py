# SPDX-License-Identifier: Apache-2.0
"""Several replays: alone and in several processes the same; interrupted, what is done is there."""

import os
import signal
from dataclasses import dataclass
from pathlib import Path

import pytest

from allotment.model.errors import AllotError, UsageError
from allotment.simulate.outcomes import ReplayOutcome
from allotment.simulate.replay import Progress
from allotment.simulate.scenes import TraceScene
from allotment.simulate.tasks import Task, run_tasks
from allotment.simulate.workloads import generate

ROOT = Path(__file__).resolve().parents[3]
SCENE = TraceScene(trace=generate(seed=2, scale=0.01))
TASKS = [Task(policy, seed) for policy in ("first-fit", "random") for seed in (1, 2)]


@pytest.fixture(autouse=True)
def _found_in_other_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a process that is started anew find this module, also where pytest is no `-m pytest`."""
    monkeypatch.syspath_prepend(ROOT)


def test_together_they_come_out_as_alone() -> None:
    heard: list[float] = []
    alone = run_tasks(SCENE, TASKS, jobs=1, progress=heard.append)
    together = run_tasks(SCENE, TASKS, jobs=2)
    stories = [(each.policy, each.seed, each.story) for each in alone.outcomes]
    assert [(each.policy, each.seed, each.story) for each in together.outcomes] == stories
    assert [each[:2] for each in stories] == [(each.policy, each.seed) for each in TASKS]
    assert heard[-1] == 1
    assert not together.was_interrupted


@dataclass(frozen=True)
class Trouble:
    """A scene that does what its seed says."""

    parent: int

    def run(self, policy: str, seed: int, progress: Progress) -> ReplayOutcome:
        if seed == 1:
            return SCENE.run(policy, seed, progress)
        if seed == 2:  # Ctrl-C on a terminal goes to all processes of the group
            os.kill(self.parent, signal.SIGINT)
            if os.getpid() != self.parent:
                os.kill(os.getpid(), signal.SIGINT)
            for _ in range(100_000):
                progress(0.5)
        if seed == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        raise UsageError("it is wrong", hint="make it right")


@pytest.mark.parametrize("jobs", [1, 2])
def test_an_interrupt_leaves_what_is_done(jobs: int) -> None:
    tasks = [Task("first-fit", 1), Task("first-fit", 2), Task("first-fit", 2)]
    # With two, the first has to be done before the others begin.
    results = run_tasks(Trouble(os.getpid()), tasks if jobs == 1 else tasks[:2], jobs=jobs)
    assert results.was_interrupted
    assert {each.seed for each in results.outcomes} <= {1}
    if jobs == 1:
        assert len(results.outcomes) == 1


@pytest.mark.parametrize("jobs", [1, 2])
def test_what_is_wrong_in_a_replay_is_raised(jobs: int) -> None:
    with pytest.raises(UsageError, match="it is wrong") as raised:
        run_tasks(Trouble(0), [Task("x", 4), Task("x", 4)], jobs=jobs)
    assert raised.value.hint == "make it right"


def test_a_process_that_is_killed_is_said() -> None:
    with pytest.raises(AllotError, match="replay process was killed") as raised:
        run_tasks(Trouble(0), [Task("x", 3), Task("x", 3)], jobs=2)
    assert "--jobs 1" in (raised.value.hint or "")
