# SPDX-License-Identifier: Apache-2.0
"""The events of a state folder: appended, bounded, and never a reason for a command to fail."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

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


def test_later_ones_alone(folder: StateFolder) -> None:
    folder.prepare()
    for name in ("a", "b"):
        note_event(folder, "created", share=name, share_id=name)
    first, second = read_events(folder)
    assert read_events(folder, after=first.time) == [second]


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
