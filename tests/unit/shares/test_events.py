# SPDX-License-Identifier: Apache-2.0
"""The events of a state folder: appended, bounded, and never a reason for a command to fail."""

import fcntl
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from click.testing import CliRunner

from allotment.cli.events import command
from allotment.shares.folders import StateFolder
from allotment.shares.record import note_event, read_events
from allotment.shares.recovery import list_shares, recover, remove

if TYPE_CHECKING:
    from allotment.model.shares import Share

Make = Callable[..., "tuple[Share, Path]"]
MOST_BYTES = 256 << 10


def test_the_oldest_are_dropped(folder: StateFolder) -> None:
    folder.prepare()
    for number in range(700):
        note_event(folder, "refused", share=str(number), share_id="0a", text="x" * 500)
        assert (folder.root / "events").stat().st_size <= MOST_BYTES + 1024
    numbers = [int(event.share) for event in read_events(folder)]
    assert numbers == list(range(numbers[0], 700))
    assert len(numbers) > 200
    assert len({event.time for event in read_events(folder)}) == len(numbers)


def test_a_lock_of_another_user_stops_no_command(folder: StateFolder) -> None:
    folder.prepare()
    note_event(folder, "created", share="a", share_id="a")
    path = folder.root / "events"
    with path.open("rb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        note_event(folder, "ended", share="a", share_id="a", text="x" * MOST_BYTES)
        note_event(folder, "created", share="b", share_id="b")
        assert path.stat().st_size > MOST_BYTES  # the next command without this lock shortens it
    assert [event.kind for event in read_events(folder)] == ["created", "ended", "created"]
    note_event(folder, "ended", share="b", share_id="b")
    assert path.stat().st_size < MOST_BYTES


def test_a_pipe_or_a_link_in_its_place_stops_no_command(
    folder: StateFolder, tmp_path: Path
) -> None:
    folder.prepare()
    path, other = folder.root / "events", tmp_path / "other"
    path.unlink()
    os.mkfifo(path)
    note_event(folder, "created", share="a", share_id="a")
    assert read_events(folder) == []
    path.unlink()
    other.write_text("")
    path.symlink_to(other)
    note_event(folder, "created", share="a", share_id="a")
    assert other.read_text() == ""


def test_a_command_that_is_killed_between_copy_and_cut_loses_nothing(
    folder: StateFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.prepare()
    note_event(folder, "created", share="a", share_id="a")
    path = folder.root / "events"
    lines = [path.read_text().replace("created", f"{number:07d}") for number in range(4000)]
    path.write_text("".join(lines))
    copy = os.pwrite

    def killed(*words: Any) -> int:  # noqa: ANN401 - as the system call
        copy(*words)
        raise KeyboardInterrupt

    before = read_events(folder)
    monkeypatch.setattr(os, "pwrite", killed)
    with pytest.raises(KeyboardInterrupt):
        note_event(folder, "ended", share="a", share_id="a")
    monkeypatch.undo()
    after = read_events(folder)
    numbers = [int(event.kind) for event in after]
    assert sorted(set(numbers)) == sorted(numbers)
    kept = [int(event.kind) for event in before][-1000:]
    assert set(kept) <= set(numbers)


def test_a_file_without_end_is_read_in_part(folder: StateFolder) -> None:
    folder.prepare()
    note_event(folder, "created", share="a", share_id="a")
    os.truncate(folder.root / "events", 1 << 40)
    note_event(folder, "ended", share="a", share_id="a")
    assert [event.kind for event in read_events(folder)] == ["ended"]


@pytest.mark.parametrize("time", ["1e300", "-1e300", "4102444800", "NaN", "1e999", "1" * 400])
def test_impossible_times_are_skipped(folder: StateFolder, time: str) -> None:
    folder.prepare()
    line = f'{{"time": {time}, "kind": "created", "share": "a", "id": "a", "text": ""}}\n'
    (folder.root / "events").write_text(line)
    assert read_events(folder) == []


def test_what_is_no_event_is_skipped(folder: StateFolder) -> None:
    folder.prepare()
    note_event(folder, "created", share="a", share_id="a")
    with (folder.root / "events").open("ab") as file:
        file.write(
            b'\xff\n{"time": 1}\n[]\n{"time": "x", "kind": 1, "share": 1, "id": 1, "text": 1}\n'
        )
    note_event(folder, "ended", share="a", share_id="a")
    assert [event.kind for event in read_events(folder)] == ["created", "ended"]


def test_a_folder_without_events_fails_nothing(tmp_path: Path) -> None:
    folder = StateFolder(tmp_path / "state")
    note_event(folder, "created", share="a", share_id="a")  # it does not exist
    folder.prepare()
    (folder.root / "events").unlink()
    note_event(folder, "created", share="a", share_id="a")
    (folder.root / "events").mkdir()
    note_event(folder, "created", share="a", share_id="a")
    assert read_events(folder) == []


def test_damage_is_noted_once(folder: StateFolder, make: Make) -> None:
    share, directory = make(name="broken", runner=None)
    (directory / "share.json").write_text("{")
    for _ in range(2):
        with folder.locked():
            recover(folder)
    events = read_events(folder)
    assert [event.kind for event in events] == ["created", "damaged"]
    assert events[1].id == share.id
    assert "truncated or changed" in events[1].text
    with folder.locked():
        remove(folder, list_shares(folder)[0])
    assert read_events(folder)[-1].kind == "ended"


def test_each_is_shown_once_and_without_control_characters(
    folder: StateFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.prepare()
    note_event(folder, "refused", share="a", share_id="a", text="\x1b[2J\ud800\u202e")
    late = '{"time": 1, "kind": "created", "share": "late", "id": "b", "text": ""}\n'

    pauses = iter([late, ""])  # the third ends the command

    def pause(_: float) -> None:
        with (folder.root / "events").open("a") as file:
            file.write(next(pauses))

    monkeypatch.setattr("time.sleep", pause)
    words = ["--follow", "--state", str(folder.root)]
    shown = CliRunner().invoke(command, words).stdout.splitlines()
    assert [line.split()[1:3] for line in shown] == [["refused", "a"], ["created", "late"]]
    assert shown[0].endswith("refused    a   [2J\\ud800")
