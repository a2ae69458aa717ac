# SPDX-License-Identifier: Apache-2.0
"""processes.json: what is written is what is read, and damage is nothing known."""

import os
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from subprocess import PIPE, Popen

import pytest

from allotment.model.shares import Runner, Share
from allotment.model.structs import replace
from allotment.shares import process_tree, recovery
from allotment.shares.folders import StateFolder
from allotment.shares.process_tree import census, named
from allotment.shares.record import Traces, read_traces, write_traces

Make = Callable[..., tuple[Share, Path]]
Sleeper = Callable[..., "Popen[bytes]"]


def test_traces_come_back(tmp_path: Path) -> None:
    traces = Traces(4026531840, (Runner(17, 4711, "boot"), Runner(18, 4712, "boot")))
    write_traces(tmp_path, traces)
    assert read_traces(tmp_path) == traces
    assert [path.name for path in tmp_path.iterdir()] == ["processes.json"]


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", "1", '{"namespace": 1}', '{"namespace": 1, "members": [[1]]}', "[" * 9999],
)
def test_damage_is_nothing_known(tmp_path: Path, text: str) -> None:
    (tmp_path / "processes.json").write_text(text)
    assert read_traces(tmp_path) == Traces()


def test_who_was_recorded_is_a_member_and_no_later_process_of_that_number(
    make: Make, sleeper: Sleeper
) -> None:
    share, directory = make(runner=None)
    process = named(sleeper().pid)
    write_traces(directory, Traces(members=(process,)))
    assert census([(share, directory)]) == {share.id: {process.pid}}
    write_traces(directory, Traces(members=(replace(process, start_time=1),)))
    assert census([(share, directory)]) == {share.id: set()}


def test_a_namespace_is_not_known_by_its_number_alone(make: Make, sleeper: Sleeper) -> None:
    share, directory = make(runner=None)
    process = named(sleeper().pid)
    own = Path("/proc/self/ns/mnt").stat().st_ino
    write_traces(directory, Traces(own))
    assert census([(share, directory)]) == {share.id: set()}
    write_traces(directory, Traces(own, (process,)))
    assert process.pid in census([(share, directory)])[share.id]


def test_a_share_without_runner_is_kept_for_who_was_recorded(
    folder: StateFolder, make: Make, dead_runner: Runner, sleeper: Sleeper
) -> None:
    _, directory = make(runner=dead_runner)
    process = sleeper()
    write_traces(directory, Traces(members=(named(process.pid),)))
    with folder.locked():
        assert len(recovery.recover(folder)) == 1
        process.communicate()
        assert recovery.recover(folder) == []


NOBODY = 65534
needs_root = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("setpriv") is None, reason="another user is root's to make"
)


@contextmanager
def parent_and_child(*prefix: str) -> Iterator[tuple[int, int]]:
    """Two processes, by PID."""
    program = [*prefix, "/bin/sh", "-c", "sleep 60 & echo $!; wait"]
    with Popen(program, stdout=PIPE) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        try:
            yield parent.pid, child
        finally:
            os.kill(child, signal.SIGKILL)


def naming(kind: str, share: Share, directory: Path, pid: int) -> Share:
    """The share with a record that names a process as its own."""
    if kind == "runner":
        return replace(share, runner=named(pid))
    if kind == "member":
        write_traces(directory, Traces(members=(named(pid),)))
        return share
    namespace = Path(f"/proc/{pid}/ns/mnt").stat().st_ino
    write_traces(directory, Traces(namespace, (named(pid),)))
    return share


@needs_root
@pytest.mark.parametrize("kind", ["runner", "member", "namespace"])
def test_a_record_names_no_process_of_another_user(make: Make, kind: str) -> None:
    """In a folder for all users each can write any record."""
    share, directory = make(runner=None)
    with parent_and_child() as (victim, child):
        claiming = naming(kind, share, directory, victim)
        assert child in census([(claiming, directory)])[share.id]
        os.chown(directory, NOBODY, NOBODY)
        assert census([(claiming, directory)]) == {share.id: set()}
        assert process_tree.living_runner(claiming, directory) is None


@needs_root
def test_a_record_takes_no_processes_from_another_share(make: Make) -> None:
    with parent_and_child() as (runner, child):
        share, directory = make(runner=named(runner))
        other, forged = make(runner=named(runner))
        os.chown(forged, NOBODY, NOBODY)
        expected = {share.id: {child}, other.id: set()}
        assert census([(share, directory), (other, forged)]) == expected


@needs_root
def test_a_record_names_processes_of_its_owner(make: Make) -> None:
    share, directory = make(runner=None)
    os.chown(directory, NOBODY, NOBODY)
    become = ("setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups")
    with parent_and_child(*become) as (runner, child):
        claiming = naming("runner", share, directory, runner)
        assert census([(claiming, directory)]) == {share.id: {child}}
        assert process_tree.living_runner(claiming, directory) == claiming.runner
