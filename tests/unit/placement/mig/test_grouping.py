# SPDX-License-Identifier: Apache-2.0
"""Volcano's and HAMi's groups of slices: the first that matches, and positions both ways."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from allotment.model.errors import UsageError
from allotment.model.mig import (
    MigGroup,
    MigGroupSlot,
    MigModelGroups,
    MigTemplate,
    groups_of,
)

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
    with pytest.raises(UsageError, match=f"group2 has no slice at position {position}, only 4"):
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
    with pytest.raises(UsageError, match="not a slice of a group"):
        MigGroupSlot.parse(text)
