# SPDX-License-Identifier: Apache-2.0
"""Many replays: in this process, or in several at once.

Each replay is one task of one process. Processes are started anew and not forked: a fork of a
process with threads may hang. Whoever interrupts gets what had been replayed until then.
"""

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, MutableSequence, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from multiprocessing import connection

from allotment.model.errors import AllotError
from allotment.simulate.arriving import Progress
from allotment.simulate.outcomes import Outcome
from allotment.simulate.scenes import Scene

__all__ = ["Results", "Task", "run_tasks"]

_LOOK_S = 0.1


@dataclass(frozen=True, slots=True)
class Task:
    """One replay that is to be made."""

    policy: str
    seed: int


@dataclass(slots=True)
class Results:
    """What came out so far, in the order of the tasks."""

    outcomes: list[Outcome] = field(default_factory=list)
    was_interrupted: bool = False


def run_tasks(
    scene: Scene, tasks: Sequence[Task], *, jobs: int, progress: Progress | None = None
) -> Results:
    """Replay them all, `jobs` at a time. An interrupt (Ctrl-C) ends it with what there is.

    `progress` hears how much of all is done, ten times a second at most. Raises `AllotError`.
    """
    tell = progress or _nobody
    if jobs <= 1 or len(tasks) <= 1:
        return _alone(scene, tasks, tell)
    return _together(scene, tasks, min(jobs, len(tasks)), tell)


def _nobody(part: float) -> None:
    """Hear nothing."""


def _alone(scene: Scene, tasks: Sequence[Task], tell: Progress) -> Results:
    results = Results()
    try:
        for number, task in enumerate(tasks):
            results.outcomes.append(
                scene.run(task.policy, task.seed, _part(tell, number, len(tasks)))
            )
            tell((number + 1) / len(tasks))
    except KeyboardInterrupt:
        results.was_interrupted = True
    return results


def _part(tell: Progress, number: int, tasks: int) -> Progress:
    return lambda part: tell((number + part) / tasks)


class _Stage:
    """What each worker process has."""

    scene: Scene
    done: MutableSequence[float]
    """By task, from 0 to 1; one place more: not 0 if all is to end."""


class _StoppedError(Exception):
    """The replay was not needed any more."""


def _prepare(scene: Scene, done: MutableSequence[float]) -> None:
    # The terminal's Ctrl-C goes to all processes of the group: the first one ends the others.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _Stage.scene = scene
    _Stage.done = done


def _end_with_parent() -> None:
    """End when the first process is gone, however it went: nobody waits for what is done here."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        connection.wait([parent.sentinel])
        os._exit(1)


def _perform(number: int, task: Task) -> Outcome:
    def heard(part: float) -> None:
        _Stage.done[number] = part
        if _Stage.done[-1]:
            raise _StoppedError

    outcome = _Stage.scene.run(task.policy, task.seed, heard)
    _Stage.done[number] = 1.0
    return outcome


def _together(scene: Scene, tasks: Sequence[Task], jobs: int, tell: Progress) -> Results:
    context = multiprocessing.get_context("spawn")
    done = context.RawArray("d", len(tasks) + 1)
    results = Results()
    futures: list[Future[Outcome]] = []
    with ProcessPoolExecutor(
        jobs, mp_context=context, initializer=_prepare, initargs=(scene, done)
    ) as pool:
        try:
            futures = [pool.submit(_perform, number, task) for number, task in enumerate(tasks)]
            _watch(futures, lambda: tell(sum(done[:-1]) / len(tasks)))
        except KeyboardInterrupt:
            results.was_interrupted = True
        finally:
            done[-1] = 1.0
            pool.shutdown(wait=False, cancel_futures=True)
    results.outcomes = [outcome for each in futures if (outcome := _outcome(each)) is not None]
    return results


def _watch(futures: Sequence[Future[Outcome]], look: Callable[[], None]) -> None:
    """Wait for all, or for the first that fails."""
    waiting: set[Future[Outcome]] = set(futures)
    while waiting:
        ended, waiting = wait(waiting, timeout=_LOOK_S, return_when=FIRST_COMPLETED)
        if any(each.exception() is not None for each in ended):
            return
        look()


def _outcome(future: Future[Outcome]) -> Outcome | None:
    if future.cancelled():
        return None
    try:
        return future.result()
    except _StoppedError:
        return None
    except BrokenProcessPool as error:
        raise AllotError(
            "a process that replayed was ended by somebody, for lack of memory perhaps",
            hint="replay in fewer processes at once: --jobs 1",
        ) from error
