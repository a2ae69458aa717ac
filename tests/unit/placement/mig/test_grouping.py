# SPDX-License-Identifier: Apache-2.0
"""Volcano's and HAMi's groups of slices: the first that matches, and positions both ways."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mig_profiles import layout, piece

from allotment.model.errors import UsageError
from allotment.model.mig import MigHold, MigSlice
from allotment.model.mig_groups import (
    MigGroup,
    MigGroupSlot,
    MigModelGroups,
    MigTemplate,
    groups_of,
)
from allotment.placement.mig import (
    MigChoice,
    MigImpossible,
    pick_of_groups,
    start_in_group,
)

A100 = "A100-80GB"
GPU = "GPU-0fc3eda5-e98b-a25b-5b0d-cf5c855d1448"
SEVEN = MigGroup("group1", (MigTemplate("1g.10gb", 10_240, 7),))
TWOS = MigGroup("group2", (MigTemplate("2g.20gb", 20_480, 3), MigTemplate("1g.10gb", 10_240, 1)))
HALVES = MigGroup("group3", (MigTemplate("3g.40gb", 40_960, 2),))
GROUPS = (SEVEN, TWOS, HALVES)
KNOWN = (
    MigModelGroups(("A30",), (MigGroup("0", (MigTemplate("1g.6gb", 6_144, 4),)),)),
    MigModelGroups(("A100-SXM4-80GB", "A100 80GB PCIe"), GROUPS),
)


def test_a_models_groups_are_those_of_the_first_entry_that_is_part_of_its_name() -> None:
    assert groups_of(KNOWN, "NVIDIA A100-SXM4-80GB") == GROUPS
    assert groups_of(KNOWN, "NVIDIA H100 80GB HBM3") == ()


def test_a_position_is_the_place_among_all_slices_as_listed() -> None:
    """Volcano's own example: behind three 2g.20gb, the 1g.10gb of its second group is at 3."""
    one = TWOS.templates[1]
    assert list(TWOS.positions(one)) == [3]
    assert TWOS.at(3) is one
    assert str(MigGroupSlot(GPU, "group2", 3)) == f"{GPU}[group2-3]"


@pytest.mark.parametrize("position", [4, 9999])
def test_a_position_that_a_group_lacks_is_refused(position: int) -> None:
    with pytest.raises(UsageError, match=f"group2 has no slice at position {position}, but 4"):
        TWOS.at(position)


@given(
    gpu=st.from_regex(r"GPU-[0-9a-f-]{1,36}", fullmatch=True),
    group=st.from_regex(r"[a-z0-9]([a-z0-9-]{0,20}[a-z0-9])?", fullmatch=True),
    position=st.integers(0, 9999),
)
def test_ids_are_read_as_they_are_written(gpu: str, group: str, position: int) -> None:
    slot = MigGroupSlot(gpu, group, position)
    assert MigGroupSlot.parse(str(slot)) == slot


@pytest.mark.parametrize("text", ["", GPU, f"{GPU}[79]", f"{GPU}[7-9", f"{GPU}7-9]", f"{GPU}[7--]"])
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="no slice of a group"):
        MigGroupSlot.parse(text)


@pytest.mark.parametrize(
    ("memory_mib", "used", "slot"),
    [
        pytest.param(10_000, [], "group1-0", id="first group"),
        pytest.param(15_000, [], "group2-0", id="first that is large enough"),
        pytest.param(40_000, [], "group3-0", id="last"),
        pytest.param(50_000, [], None, id="none"),
        pytest.param(10_000, ["group1-0", "group1-2"], "group1-1", id="next of the group"),
        pytest.param(10_000, ["group2-1"], "group2-3", id="the smallest of its group"),
        pytest.param(10_000, ["group2-3"], "group2-0", id="a larger one of its group"),
        pytest.param(40_000, ["group2-0"], None, id="never another group"),
    ],
)
def test_a_gpu_keeps_to_its_group(memory_mib: int, used: list[str], slot: str | None) -> None:
    given_out = [MigGroupSlot.parse(f"{GPU}[{each}]") for each in used]
    picked = pick_of_groups(GROUPS, GPU, given_out, memory_mib=memory_mib)
    assert picked == (None if slot is None else MigGroupSlot.parse(f"{GPU}[{slot}]"))


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 2, 1, 0), (3, 0, 1, 2), (1, 3, 0, 2)], ids=str)
def test_all_of_a_group_has_its_place_in_any_order(order: tuple[int, ...]) -> None:
    slices: list[MigSlice] = []
    for position in order:
        choice = start_in_group(layout(A100, *slices), TWOS, position)
        assert isinstance(choice, MigChoice)
        assert choice.profile.name == TWOS.at(position).name
        slices.append(piece(A100, choice.profile.name, choice.start))
    assert len({each.start for each in slices}) == 4
    answer = start_in_group(layout(A100, *slices), TWOS, 0)
    assert isinstance(answer, MigImpossible)
    assert answer.reason == "all slices 2g.20gb of group group2 are used"


def test_idle_instances_are_used_again_or_go() -> None:
    kept = piece(A100, "2g.20gb", 4, hold=MigHold.IDLE)
    choice = start_in_group(layout(A100, kept), TWOS, 0)
    assert isinstance(choice, MigChoice)
    assert choice.reused == kept
    other = piece(A100, "7g.80gb", 0, hold=MigHold.IDLE)
    choice = start_in_group(layout(A100, other), TWOS, 0)
    assert isinstance(choice, MigChoice)
    assert choice.removes == (other,)


def test_slices_of_another_group_are_not_touched() -> None:
    there = layout(A100, piece(A100, "3g.40gb", 4, holder="pod a/b"))
    answer = start_in_group(there, TWOS, 0)
    assert isinstance(answer, MigImpossible)
    assert "3g.40gb at slot 4" in answer.reason
