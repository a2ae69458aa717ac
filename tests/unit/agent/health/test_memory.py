# SPDX-License-Identifier: Apache-2.0
"""`allotment.agent.health.records`: what the next agent knows."""

from __future__ import annotations

from pathlib import Path

import pytest

from allotment.agent.health.records import HURT, HealthState, Memory, Need, Record
from allotment.agent.health.xids import Action
from allotment.devices.watching import Vitals
from allotment.model.errors import StateError

HURT_GPU = Record(
    state=HealthState.UNHEALTHY,
    need=Need.RESET,
    reason="XID 95 (uncontained memory error): reset the GPU",
    action=Action.RESET_GPU,
    xid=95,
    vitals=Vitals(ecc_uncorrected=3, energy_mj=900),
)
LOST_GPU = Record(
    state=HealthState.UNHEALTHY, need=Need.ANSWER, reason="lost", was_away=True, is_lost=True
)
SILENT_GPU = Record(state=HealthState.UNHEALTHY, need=Need.ANSWER, reason="silent")


def test_the_next_agent_knows_who_waits_for_a_reset_and_who_is_lost(tmp_path: Path) -> None:
    records = {"GPU-1": HURT_GPU, "GPU-2": LOST_GPU, "GPU-3": Record(), "GPU-4": SILENT_GPU}
    Memory(tmp_path).write(records)
    assert Memory(tmp_path).read() == {"GPU-1": HURT_GPU, "GPU-2": LOST_GPU}
    assert list(tmp_path.iterdir()) == [tmp_path / HURT]


def test_nothing_is_written_where_nothing_is_to_be_kept(tmp_path: Path) -> None:
    Memory(tmp_path).write({"GPU-1": Record()})
    assert list(tmp_path.iterdir()) == []


def test_what_is_over_is_forgotten(tmp_path: Path) -> None:
    Memory(tmp_path).write({"GPU-1": HURT_GPU})
    later = Memory(tmp_path)
    later.read()
    later.write({"GPU-1": Record()})
    assert Memory(tmp_path).read() == {}


@pytest.mark.parametrize("text", ["", "{", "[]", '{"gpus":{"GPU-1":{}}}', '{"gpus":3}'])
def test_what_cannot_be_read_is_like_nothing(tmp_path: Path, text: str) -> None:
    (tmp_path / HURT).write_text(text)
    memory = Memory(tmp_path)
    assert memory.read() == {}
    memory.write({"GPU-1": HURT_GPU})
    assert memory.read() == {"GPU-1": HURT_GPU}


def test_an_action_of_a_newer_agent_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / HURT).write_text('{"gpus":{"GPU-1":{"reason":"it glows","action":"cool"}}}')
    record = Memory(tmp_path).read()["GPU-1"]
    assert (record.reason, record.action, record.need) == ("it glows", None, Need.RESET)


def test_a_folder_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    with pytest.raises(StateError, match="cannot write"):
        Memory(tmp_path / "none").write({"GPU-1": HURT_GPU})
