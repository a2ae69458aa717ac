# SPDX-License-Identifier: Apache-2.0
"""Many replays, in this process or in several.

Each task is one replay in one process. Processes are spawned, not forked: a fork of a process with
threads may hang. An interrupt ends the run with the results so far.
"""

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, MutableSequence, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import connection

import msgspec

from allotment.model.errors import AllotError
from allotment.simulate.outcomes import ReplayOutcome
from allotment.simulate.replay import Progress
from allotment.simulate.scenes import Scene

_LOOK_S = 0.1


class Task(msgspec.Struct, frozen=True):
    """One replay to run."""

    policy: str
    seed: int


class Results(msgspec.Struct):
    """The outcomes so far, in the order of the tasks."""

    outcomes: list[ReplayOutcome] = msgspec.field(default_factory=list)
    was_interrupted: bool = False


def run_tasks(
    scene: Scene, tasks: Sequence[Task], *, jobs: int, progress: Progress | None = None
) -> Results:
    """Replay all tasks, `jobs` at a time. Ctrl-C ends it with the results so far.

    `progress` receives the completed part, at most ten times a second. Raises `AllotError`.
    """
    report = progress or (lambda _: None)
    if jobs <= 1 or len(tasks) <= 1:
        return _alone(scene, tasks, report)
    return _together(scene, tasks, min(jobs, len(tasks)), report)


def _alone(scene: Scene, tasks: Sequence[Task], report: Progress) -> Results:
    results = Results()
    try:
        for number, task in enumerate(tasks):
            results.outcomes.append(
                scene.run(task.policy, task.seed, _part(report, number, len(tasks)))
            )
            report((number + 1) / len(tasks))
    except KeyboardInterrupt:
        results.was_interrupted = True
    return results


def _part(report: Progress, number: int, tasks: int) -> Progress:
    return lambda part: report((number + part) / tasks)


class _Stage:
    """The input and progress of a worker process."""

    scene: Scene
    done: MutableSequence[float]
    """Completed part per task, from 0 to 1; one more item: not 0 to stop all."""


class _StoppedError(Exception):
    """The replay is no longer needed."""


def _prepare(scene: Scene, done: MutableSequence[float]) -> None:
    # Ctrl-C in the terminal reaches all processes of the group; the parent ends the others.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _Stage.scene = scene
    _Stage.done = done


def _end_with_parent() -> None:
    """Exit when the parent has ended for any reason."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        connection.wait([parent.sentinel])
        os._exit(1)


def _perform(number: int, task: Task) -> ReplayOutcome:
    def record(part: float) -> None:
        _Stage.done[number] = part
        if _Stage.done[-1]:
            raise _StoppedError

    outcome = _Stage.scene.run(task.policy, task.seed, record)
    _Stage.done[number] = 1.0
    return outcome


def _together(scene: Scene, tasks: Sequence[Task], jobs: int, report: Progress) -> Results:
    context = multiprocessing.get_context("spawn")
    done = context.RawArray("d", len(tasks) + 1)
    results = Results()
    futures: list[Future[ReplayOutcome]] = []
    with ProcessPoolExecutor(
        jobs, mp_context=context, initializer=_prepare, initargs=(scene, done)
    ) as pool:
        try:
            futures = [pool.submit(_perform, number, task) for number, task in enumerate(tasks)]
            _watch(futures, lambda: report(sum(done[:-1]) / len(tasks)))
        except KeyboardInterrupt:
            results.was_interrupted = True
        finally:
            done[-1] = 1.0
            pool.shutdown(wait=False, cancel_futures=True)
    results.outcomes = [outcome for future in futures if (outcome := _outcome(future)) is not None]
    return results


def _watch(futures: Sequence[Future[ReplayOutcome]], report: Callable[[], None]) -> None:
    waiting: set[Future[ReplayOutcome]] = set(futures)
    while waiting:
        ended, waiting = wait(waiting, timeout=_LOOK_S, return_when=FIRST_COMPLETED)
        if any(future.exception() is not None for future in ended):
            return
        report()


def _outcome(future: Future[ReplayOutcome]) -> ReplayOutcome | None:
    if future.cancelled():
        return None
    try:
        return future.result()
    except _StoppedError:
        return None
    except BrokenProcessPool as error:
        raise AllotError(
            "a replay process was killed, perhaps for lack of memory",
            hint="use fewer processes: --jobs 1",
        ) from error
