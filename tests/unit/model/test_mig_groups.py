# SPDX-License-Identifier: Apache-2.0
"""Which profiles groups allow for so much memory."""

import pytest

from allotment.model.mig import (
    MigGroup,
    MigModelGroups,
    MigTemplate,
    allowed_profiles,
    groups_of,
    listed_profiles,
)

MI = 1 << 20
KNOWN = (
    MigModelGroups(
        ("A100-SXM4-40GB", "A100-PCIE-40GB"),
        (
            MigGroup("group1", (MigTemplate("1g.5gb", 5120, 7),)),
            MigGroup("group2", (MigTemplate("2g.10gb", 10240, 3), MigTemplate("1g.5gb", 5120, 1))),
            MigGroup("group3", (MigTemplate("3g.20gb", 20480, 2),)),
        ),
    ),
)


@pytest.mark.parametrize(
    ("memory_mib", "names"),
    [
        (1, ("1g.5gb", "3g.20gb")),
        (5120, ("1g.5gb", "3g.20gb")),  # as it is written, and not as the driver has it
        (5121, ("2g.10gb", "3g.20gb")),
        (20480, ("3g.20gb",)),
        (20481, ()),
    ],
)
def test_of_each_group_the_smallest_that_serves(memory_mib: int, names: tuple[str, ...]) -> None:
    assert allowed_profiles(KNOWN, "NVIDIA A100-SXM4-40GB", memory_mib * MI) == names


def test_of_other_models_nothing_is_said() -> None:
    assert allowed_profiles(KNOWN, "NVIDIA H100 80GB HBM3", MI) is None
    assert allowed_profiles((), "NVIDIA A100-SXM4-40GB", MI) is None


def test_lists_of_profiles_are_no_groups_and_leave_out_all_other_models() -> None:
    group = MigGroup("g", (MigTemplate("1g.5gb", 5120, 7),))
    known = (
        MigModelGroups(("A100",), (group,)),
        MigModelGroups(("A100", "A30"), profiles=("1g.5gb", "1g.6gb")),
    )
    assert groups_of(known, "NVIDIA A30") == ()
    assert groups_of(known, "NVIDIA A100-SXM4-40GB") == (group,)
    assert listed_profiles(known, "NVIDIA A100-SXM4-40GB") == ("1g.5gb", "1g.6gb")
    assert listed_profiles(known, "NVIDIA H100") == ()
    assert listed_profiles(known[:1], "NVIDIA H100") is None


def test_a_list_of_profiles_does_not_hide_the_groups_behind_it() -> None:
    group = MigGroup("g", (MigTemplate("1g.5gb", 5120, 7),))
    known = (
        MigModelGroups(("A100",), profiles=("1g.5gb",)),
        MigModelGroups(("A100",), (group,)),
    )
    assert groups_of(known, "NVIDIA A100-SXM4-40GB") == (group,)
