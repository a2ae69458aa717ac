# SPDX-License-Identifier: Apache-2.0
"""What planners are given: a GPU with what is on it, and how requests read."""

import pytest
from mig_profiles import piece, profiles

from allotment.model.mig import MigGpu, MigHold, MigInstance, MigLayout, MigRequest

GIB = 2**30


def test_instances_that_nobody_names_are_foreign() -> None:
    gpu = MigGpu(
        uuid="GPU-0",
        is_enabled=True,
        is_pending=True,
        profiles=profiles("A100-40GB"),
        instances=(
            MigInstance(profile=19, start=0, size=1, gpu_instance=7),
            MigInstance(profile=19, start=6, size=1, gpu_instance=13),
        ),
    )
    decided = piece("A100-40GB", "2g.10gb", 4, holder="pod c/d")
    layout = MigLayout.of(gpu, holds={13: (MigHold.USED, "pod a/b")}, decided=[decided])
    assert [(each.start, each.hold, each.holder) for each in layout.slices] == [
        (0, MigHold.FOREIGN, ""),
        (6, MigHold.USED, "pod a/b"),
        (4, MigHold.USED, "pod c/d"),
    ]
    assert (layout.gpu, layout.is_enabled) == ("GPU-0", True)


@pytest.mark.parametrize(
    ("request_", "text"),
    [
        (MigRequest(profile="1g.10gb+me"), "1g.10gb+me"),
        (MigRequest(profile="2g.10gb", count=2), "2 x 2g.10gb"),
        (MigRequest(memory_bytes=8 * GIB, compute=2_500), "8Gi and 25 % of a GPU"),
        (MigRequest(attributes="+gfx"), "+gfx"),
        (MigRequest(), "any profile"),
    ],
    ids=str,
)
def test_requests_read_as_people_ask(request_: MigRequest, text: str) -> None:
    assert str(request_) == text


@pytest.mark.parametrize(
    ("name", "shape", "attributes"),
    [
        ("1g.24gb", "1g.24gb", ""),
        ("1g.24gb+me.all", "1g.24gb", "+me.all"),
        ("2g.48gb-me", "2g.48gb", "-me"),
    ],
)
def test_attributes_are_what_is_behind_the_memory(name: str, shape: str, attributes: str) -> None:
    profile = next(each for each in profiles("RTX PRO 6000") if each.name == name)
    assert (profile.shape, profile.attributes) == (shape, attributes)
