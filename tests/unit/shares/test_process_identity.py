# SPDX-License-Identifier: Apache-2.0
"""processes.json: what is written is what is read, and damage is nothing known."""

from collections.abc import Callable
from pathlib import Path
from subprocess import Popen

import pytest

from allotment.model.shares import Runner, Share
from allotment.model.structs import replace
from allotment.shares import lifecycle
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
        assert len(lifecycle.recover(folder)) == 1
        process.communicate()
        assert lifecycle.recover(folder) == []
