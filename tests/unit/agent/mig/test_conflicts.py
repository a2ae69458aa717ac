# SPDX-License-Identifier: Apache-2.0
"""How long MIG is left off that others switch off: once is an accident, twice a fight."""

from __future__ import annotations

from pathlib import Path

import pytest
from gpus import gpu
from hypothesis import given
from hypothesis import strategies as st
from kubelet_twin import ReportsTwin
from mig_twin import A100

from allotment.agent.mig.conflicts import (
    FIRST_PAUSE_S,
    LAST_PAUSE_S,
    WITHIN_S,
    MigConflict,
    MigConflicts,
)
from allotment.agent.mig.state import CutGpu
from allotment.agent.node_state import NodeState
from allotment.shares.folders import StateFolder

GAPS = st.lists(st.integers(0, int(3 * LAST_PAUSE_S)), min_size=1, max_size=30)


def test_the_first_time_is_let_pass_and_the_second_is_not() -> None:
    first = MigConflict().again(1000.0)
    assert first.left_s(1000.0) == 0
    second = first.again(1000.0 + WITHIN_S)
    assert second.left_s(1000.0 + WITHIN_S) == FIRST_PAUSE_S
    assert first.again(1001.0 + WITHIN_S).left_s(1001.0 + WITHIN_S) == 0, "too long ago"


@given(GAPS)
def test_pauses_double_as_long_as_it_goes_on(gaps: list[int]) -> None:
    fight, now = MigConflict(), 0
    for gap in gaps:
        before, now = fight, now + gap
        fight = before.again(now)
        goes_on = before.times and gap <= WITHIN_S + before.pause_s
        assert fight.times == (before.times + 1 if goes_on else 1)
        if not goes_on:
            assert fight.pause_s == 0
        elif before.pause_s:
            assert fight.pause_s == min(2 * before.pause_s, LAST_PAUSE_S)
        else:
            assert fight.pause_s == FIRST_PAUSE_S
        assert fight.left_s(now) == fight.pause_s
        assert fight.left_s(now + fight.pause_s) == 0
        # A fight that goes on after each pause is never taken for a new one.
        assert fight.again(now + fight.pause_s + WITHIN_S).times == fight.times + 1


def on(claim: int, times: int) -> CutGpu:
    return CutGpu(profiles=A100, is_enabled=True, claim=claim, times_switched=times)


@pytest.mark.parametrize(
    ("looks", "told"),
    [
        ([on(5, 4)], []),  # another agent's to tell
        ([on(5, 1), on(5, 1), on(7, 1), on(0, 0), on(9, 1)], []),
        ([on(5, 0), on(5, 1)], []),
        ([on(5, 1), on(5, 2), on(5, 2)], ["MigSwitchedOff"]),
        ([on(5, 1), on(5, 2), on(5, 3)], ["MigSwitchedOff", "MigPaused"]),
        ([on(5, 1), on(5, 3)], ["MigPaused"]),
        ([on(0, 0), on(5, 2)], ["MigSwitchedOff"]),
        ([on(5, 2), on(7, 3)], ["MigPaused"]),
    ],
)
def test_what_was_switched_on_again_before_anybody_looked_counts(
    tmp_path: Path, looks: list[CutGpu], told: list[str]
) -> None:
    reports = ReportsTwin()
    state = NodeState()
    fights = MigConflicts(
        StateFolder(tmp_path),
        machine=None,
        reports=reports,
        state=state,
        clock=lambda: 1000.0,
    )
    for found in looks:
        fights.judge(gpu(0), found)
    assert reports.reasons("node") == told
    assert bool(state.mig_paused) == ("MigPaused" in told)
