# SPDX-License-Identifier: Apache-2.0
"""Which profiles groups allow for so much memory."""

import pytest
from foreign_pods import load_settings
from mig_profiles import profiles

from allotment.dialects.foreign.settings import mig_groups_of
from allotment.model.mig import (
    MigGroup,
    MigModelGroups,
    MigProfile,
    MigTemplate,
    allowed_profiles,
    groups_of,
    listed_profiles,
    named_profile,
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
    assert names(known, "NVIDIA A100-SXM4-40GB", profiles("A100-40GB")) == ["1g.5gb"]
    assert names(known, "NVIDIA H100", profiles("H100-80GB")) == []
    assert listed_profiles(known[:1], "NVIDIA H100", profiles("H100-80GB")) is None


def test_a_list_of_profiles_does_not_hide_the_groups_behind_it() -> None:
    group = MigGroup("g", (MigTemplate("1g.5gb", 5120, 7),))
    known = (
        MigModelGroups(("A100",), profiles=("1g.5gb",)),
        MigModelGroups(("A100",), (group,)),
    )
    assert groups_of(known, "NVIDIA A100-SXM4-40GB") == (group,)


HAMIS_DEFAULT = """
hami:
  migProfileAllowlist:
  - models: [A30]
    profiles: [1g.6gb, 2g.12gb, 4g.24gb]
  - models: [A100-SXM4-40GB, A100-40GB-PCIe, A100-PCIE-40GB]
    profiles: [1g.5gb, 2g.10gb, 3g.20gb, 7g.40gb]
  - models: [A100-SXM4-80GB, A100-80GB-PCIe, A100-PCIE-80GB]
    profiles: [1g.10gb, 2g.20gb, 3g.40gb, 7g.79gb]
  - models: [H20, H100 on GH200]
    profiles: [1g.12gb, 2g.24gb, 3g.48gb, 7g.96gb]
  - models: [H200 NVL, H200-SXM5]
    profiles: [1g.18gb, 2g.35gb, 3g.71gb, 7g.141gb]
  - models: [RTX PRO 6000 Blackwell Server Edition]
    profiles: [1g.24gb, 2g.48gb, 4g.96gb]
"""
"""Of the chart of HAMi v2.10 (`templates/scheduler/device-configmap.yaml`)."""


@pytest.mark.parametrize(
    ("model", "gpu", "expected"),
    [
        ("NVIDIA A30", "A30", "1g.6gb 2g.12gb 4g.24gb"),
        ("NVIDIA A100-SXM4-40GB", "A100-40GB", "1g.5gb 2g.10gb 3g.20gb 7g.40gb"),
        ("NVIDIA A100-SXM4-80GB", "A100-80GB", "1g.10gb 2g.20gb 3g.40gb 7g.80gb"),
        # `H20` is a part of the name, so that the first of the two entries counts.
        ("NVIDIA H200", "H200", "1g.18gb 2g.35gb 3g.71gb 7g.141gb"),
        (
            "NVIDIA RTX PRO 6000 Blackwell Server Edition",
            "RTX PRO 6000",
            "1g.24gb 2g.48gb 4g.96gb",
        ),
        ("NVIDIA B200", "B200", ""),
    ],
)
def test_hamis_default_list_is_read_by_compute_slices(model: str, gpu: str, expected: str) -> None:
    known = mig_groups_of(load_settings(HAMIS_DEFAULT))["hami"]
    assert sorted(names(known, model, profiles(gpu))) == expected.split()


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("1g.20gb", "1g.20gb"),
        ("1g.12gb", "1g.10gb"),
        ("1g.12gb+me", "1g.10gb+me"),
        ("7g.79gb", "7g.80gb"),
        ("2g.20gb+gfx", None),
        ("8g.80gb", None),
        ("1", None),
        ("", None),
    ],
)
def test_a_profile_is_found_by_name_or_by_compute_slices(name: str, found: str | None) -> None:
    profile = named_profile(name, profiles("A100-80GB"))
    assert (profile.name if profile else None) == found


def names(
    known: tuple[MigModelGroups, ...], model: str, every: tuple[MigProfile, ...]
) -> list[str]:
    listed = listed_profiles(known, model, every)
    assert listed is not None
    return [profile.name for profile in listed]
