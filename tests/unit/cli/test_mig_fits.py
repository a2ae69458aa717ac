# SPDX-License-Identifier: Apache-2.0
"""How slices come to fit: the way that costs others least, and who would have to do what."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mig_profiles import profiles

from allotment.cli.mig_fits import FitGpu, PlanStep, ways_to_fit
from allotment.model.errors import DoesNotFitError
from allotment.model.mig import MigGpu, MigInstance
from allotment.model.structs import replace
from allotment.modes.mig.apply import Occupied

H100 = "H100-80GB"
NAMES = [each.name for each in profiles(H100)]


def gpu(
    number: int = 0,
    *places: tuple[str, int],
    is_on: bool = True,
    used: dict[int, str] | None = None,
    ours: tuple[int, ...] = (),
    whole: tuple[str, ...] = (),
    takes_at_once: bool = True,
    kept: str = "",
) -> FitGpu:
    """A GPU with instances at these places: their ids are the slots that they begin at."""
    by_name = {each.name: each for each in profiles(H100)}
    instances = tuple(
        MigInstance(
            profile=by_name[name].number,
            start=start,
            size=by_name[name].size,
            gpu_instance=start,
            compute_instance=0,
            uuid=f"MIG-{number}-{start}",
        )
        for name, start in places
    )
    here = MigGpu(
        uuid=f"GPU-{number}",
        is_enabled=is_on,
        is_pending=is_on,
        profiles=profiles(H100),
        instances=instances,
    )
    users = {start: (who,) for start, who in (used or {}).items()}
    return FitGpu(
        number=number,
        gpu=here,
        occupied=Occupied(whole=whole, instances=users),
        of_others=frozenset(each.start for each in instances) - set(ours),
        takes_at_once=takes_at_once,
        kept=kept,
    )


def words(ways: dict[str, tuple[PlanStep, ...]]) -> list[tuple[str, str, str]]:
    return [(uuid, step.word, step.profile) for uuid, steps in ways.items() for step in steps]


FULL = gpu(0, ("3g.40gb", 0), ("3g.40gb", 4), used={0: "share a", 4: "share b"})
OFF = gpu(1, is_on=False)


def test_room_that_is_there_is_taken_first() -> None:
    idle = gpu(0, ("3g.40gb", 4))
    found = ways_to_fit([OFF, idle], {"3g.40gb": 1})
    assert words(found) == [("GPU-0", "make", "3g.40gb")]


def test_an_idle_device_of_others_is_taken_before_anything_is_switched_or_removed() -> None:
    used = gpu(0, ("3g.40gb", 0), ("3g.40gb", 4), used={0: "share a"})
    [[step]] = ways_to_fit([used, OFF], {"3g.40gb": 1}).values()
    assert (step.word, step.slot) == ("use", 4)
    assert step.remark == "MIG-0-4, cut by others: `allot run --mig 3g.40gb --mig-reuse`"
    assert words(ways_to_fit([used, OFF], {"3g.40gb": 2}))[0] == ("GPU-1", "switch MIG on", "")


def test_a_slice_that_was_cut_for_a_share_is_not_reused_but_makes_way() -> None:
    warm = gpu(0, ("3g.40gb", 0), ("3g.40gb", 4), used={0: "share a"}, ours=(0, 4))
    found = ways_to_fit([warm, OFF], {"3g.40gb": 1})
    assert words(found) == [("GPU-0", "remove", "3g.40gb"), ("GPU-0", "make", "3g.40gb")]


@pytest.mark.parametrize(
    ("other", "how"),
    [
        (OFF, "unused: `allot run --mig` does this automatically"),
        (
            replace(OFF, takes_at_once=False),
            "needs a reset: `allot devices set-mode GPU-1 mig --reset`",
        ),
        (
            replace(OFF, kept="kept for mode soft"),
            "kept for mode soft: `allot devices set-mode GPU-1",
        ),
        (
            replace(OFF, kept="kept for mode soft", is_nodes=True),
            "kept for mode soft: add mig to its node's allotment.dev/device-modes: `kubectl",
        ),
        (
            replace(OFF, takes_at_once=False, is_nodes=True),
            "needs a reset: `mig: {reset: true}` in the GPU's rule",
        ),
    ],
    ids=["at once", "by a reset", "kept", "kept by the node", "reset by the node"],
)
def test_a_gpu_whose_mig_is_off_is_switched_before_anybody_ends(other: FitGpu, how: str) -> None:
    [[switch, make]] = ways_to_fit([FULL, other], {"3g.40gb": 1}).values()
    assert (switch.word, make.word, make.profile) == ("switch MIG on", "make", "3g.40gb")
    assert switch.remark.startswith(how)


def test_of_those_that_could_be_switched_the_easiest_is_taken() -> None:
    hard = replace(gpu(2, is_on=False), takes_at_once=False)
    kept = replace(gpu(3, is_on=False), kept="kept for mode soft")
    assert set(ways_to_fit([kept, hard, OFF], {"1g.10gb": 1})) == {"GPU-1"}
    assert set(ways_to_fit([kept, hard], {"1g.10gb": 1})) == {"GPU-2"}


def test_who_would_have_to_end_is_named_last() -> None:
    busy = gpu(1, is_on=False, whole=("share c (process 12)",))
    drained = ways_to_fit([FULL, busy], {"3g.40gb": 1})
    assert words(drained)[0] == ("GPU-0", "drain", "3g.40gb")
    [steps] = ways_to_fit([busy], {"3g.40gb": 1}).values()
    assert [each.word for each in steps] == ["drain", "switch MIG on", "make"]
    assert steps[0].remark == "share c (process 12)"
    assert steps[1].remark == "`allot run --mig` does this automatically once the GPU is unused"


@pytest.mark.parametrize(
    ("gpus", "wanted", "reason"),
    [
        ([], {"1g.10gb": 1}, "no GPU of this machine supports MIG"),
        ([OFF], {"3g.40gb": 3}, "3 x 3g.40gb: the GPU can have 2 at once"),
        ([OFF], {"1g.5gb": 1}, "has no profile 1g.5gb"),
        (
            [replace(OFF, gpu=replace(OFF.gpu, profiles=()))],
            {"1g.10gb": 1},
            "only when it is on",
        ),
    ],
)
def test_what_fits_in_no_way(gpus: list[FitGpu], wanted: dict[str, int], reason: str) -> None:
    with pytest.raises(DoesNotFitError) as refused:
        ways_to_fit(gpus, wanted)
    assert reason in refused.value.message
    assert refused.value.hint


GPUS = st.builds(
    gpu,
    st.just(0),
    st.sampled_from([("1g.10gb", 0), ("3g.40gb", 0), ("7g.80gb", 0), ("2g.20gb", 2)]),
    is_on=st.just(True),
    used=st.sampled_from([None, {0: "share a"}, {2: "share a"}]),
    ours=st.sampled_from([(), (0, 2)]),
)


@given(first=GPUS, off=st.booleans(), name=st.sampled_from(NAMES))
def test_nobody_is_drained_while_another_gpu_is_free(
    first: FitGpu,
    off: bool,  # noqa: FBT001
    name: str,
) -> None:
    """One slice of any profile fits on an empty GPU: then it costs nobody anything."""
    gpus = [first, *([OFF] if off else [])]
    steps = words(ways_to_fit(gpus, {name: 1}))
    assert steps
    drains = [each for each in steps if each[1] == "drain"]
    assert not (off and drains)
    assert (steps[-1][1], steps[-1][2]) in {("make", name), ("use", name)} or drains
