# SPDX-License-Identifier: Apache-2.0
"""Advice on fragmented GPUs: as few start again as can, and all of them have a place if any has."""

from collections.abc import Sequence
from itertools import combinations

import pytest
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from mig_profiles import layout, piece, profiles

from allotment.model.mig import MigHold, MigLayout, MigRequest, MigSlice
from allotment.placement.mig import MigRefusal, choose
from allotment.placement.mig.arrange import MigAction, MigImpossible, MigPlan, arrange
from allotment.placement.mig.drain_plan import plan_drain

A100 = "A100-40GB"


def advised(layouts: Sequence[MigLayout], wanted: dict[str, int]) -> MigPlan:
    plan = plan_drain(layouts, wanted)
    assert isinstance(plan, MigPlan), str(plan)
    return plan


def lines(plan: MigPlan) -> list[str]:
    return [f"{step.gpu} {step}" for step in plan.steps]


def test_what_fits_needs_nobody_to_move() -> None:
    there = layout(A100, piece(A100, "3g.20gb", 4, holder="pod a/b"))
    assert lines(advised([there], {"4g.20gb": 1})) == ["GPU-0 create 4g.20gb at slot 0"]


def test_slices_at_0_1_and_5_are_moved_together() -> None:
    slices = [piece(A100, "1g.5gb", at, holder=f"pod {at}") for at in (0, 1, 5)]
    assert lines(advised([layout(A100, *slices)], {"3g.20gb": 1})) == [
        "GPU-0 drain 1g.5gb at slot 5 of pod 5",
        "GPU-0 remove 1g.5gb at slot 5 of pod 5",
        "GPU-0 create 1g.5gb at slot 2 of pod 5",
        "GPU-0 create 3g.20gb at slot 4",
    ]


def test_idle_ones_are_removed_before_anybody_is_asked() -> None:
    idle = piece(A100, "1g.5gb", 2, hold=MigHold.IDLE)
    used = piece(A100, "1g.5gb", 6, holder="pod a/b")
    assert lines(advised([layout(A100, idle, used)], {"4g.20gb": 1})) == [
        "GPU-0 remove 1g.5gb at slot 2",
        "GPU-0 create 4g.20gb at slot 0",
    ]


def test_who_must_leave_goes_to_another_gpu_first() -> None:
    one = layout(A100, piece(A100, "1g.5gb", 0, holder="pod a/b"), gpu="GPU-1")
    two = layout(A100, piece(A100, "4g.20gb", 0, holder="pod c/d"), gpu="GPU-2")
    assert lines(advised([one, two], {"7g.40gb": 1})) == [
        "GPU-2 create 1g.5gb at slot 4 of pod a/b",
        "GPU-1 drain 1g.5gb at slot 0 of pod a/b",
        "GPU-1 remove 1g.5gb at slot 0 of pod a/b",
        "GPU-1 create 7g.40gb at slot 0",
    ]


def test_who_has_no_place_anywhere_is_named() -> None:
    used = piece(A100, "1g.5gb", 0, holder="pod a/b")
    plan = advised([layout(A100, used)], {"7g.40gb": 1})
    assert [str(step) for step in plan.displaced] == ["drain 1g.5gb at slot 0 of pod a/b"]


def test_whoever_else_has_a_place_gets_it() -> None:
    large = piece(A100, "3g.20gb", 4, holder="pod large")
    one = layout(A100, large, piece(A100, "1g.5gb", 0, holder="pod small"), gpu="GPU-1")
    others = [piece(A100, "4g.20gb", 0), piece(A100, "2g.10gb", 4)]
    plan = advised([one, layout(A100, *others, gpu="GPU-2")], {"7g.40gb": 1})
    assert lines(plan)[0] == "GPU-2 create 1g.5gb at slot 6 of pod small"
    assert [step.holder for step in plan.displaced] == ["pod large"]


def test_two_that_move_are_better_than_one_without_a_place() -> None:
    """Whoever has no place anywhere pays more than all who start again."""
    half = piece(A100, "3g.20gb", 0, holder="pod half")
    ones = [piece(A100, "1g.5gb", at, holder=f"pod {at}") for at in (4, 6)]
    plan = advised([layout(A100, half, *ones)], {"2g.10gb": 1})
    assert plan.displaced == ()


def test_foreign_instances_are_not_moved() -> None:
    foreign = piece(A100, "1g.5gb", 0, hold=MigHold.FOREIGN)
    answer = plan_drain([layout(A100, foreign)], {"4g.20gb": 1})
    assert isinstance(answer, MigImpossible)
    assert answer.reason == "1 x 4g.20gb fits no GPU, even when drained"
    assert "foreign instances" in answer.hint


@pytest.mark.parametrize(
    ("layouts", "wanted", "reason"),
    [
        pytest.param([layout(A100)], {"2g.48gb": 1}, "no profile 2g.48gb", id="lacking"),
        pytest.param([layout(A100)] * 2, {"2g.48gb": 1}, "no profile 2g.48gb", id="all-lacking"),
        pytest.param([layout(A100)], {"3g.20gb": 2, "1g.5gb": 1}, "fits no GPU", id="much"),
        pytest.param([layout(A100, is_enabled=False)], {"1g.5gb": 1}, "switched on", id="off"),
    ],
)
def test_what_cannot_be_is_said(
    layouts: list[MigLayout], wanted: dict[str, int], reason: str
) -> None:
    answer = plan_drain(layouts, wanted)
    assert isinstance(answer, MigImpossible)
    assert reason in answer.reason


@st.composite
def fragmented(draw: st.DrawFn) -> MigLayout:
    """A GPU that has been used for a while."""
    model = draw(st.sampled_from([A100, A100, "A30"]))
    there = [each for each in profiles(model) if not each.has_media]
    slices: list[MigSlice] = []
    covered: set[int] = set()
    for number in range(draw(st.integers(0, 6))):
        wanted = draw(st.sampled_from(there))
        start = draw(st.sampled_from(wanted.starts))
        own = set(range(start, start + wanted.size))
        if covered & own:
            continue
        covered |= own
        hold = draw(st.sampled_from([*[MigHold.USED] * 4, MigHold.IDLE, MigHold.FOREIGN]))
        slices.append(
            MigSlice(
                profile=wanted.number, start=start, size=wanted.size, hold=hold, holder=f"{number}"
            )
        )
    return layout(model, *slices)


def done(layouts: Sequence[MigLayout], plan: MigPlan) -> dict[str, list[MigSlice]]:
    """Do the steps one by one; each must be legal when its turn comes."""
    there = {each.gpu: list(each.slices) for each in layouts}
    names = {each.gpu: {one.name: one for one in each.profiles} for each in layouts}
    drained: set[tuple[str, int]] = set()
    for step in plan.steps:
        slices, profile = there[step.gpu], names[step.gpu][step.profile]
        match step.action:
            case MigAction.DRAIN:
                drained.add((step.gpu, step.start))
            case MigAction.REMOVE:
                (gone,) = (
                    each
                    for each in slices
                    if (each.profile, each.start) == (profile.number, step.start)
                )
                is_drained = gone.hold is MigHold.USED and (step.gpu, step.start) in drained
                assert is_drained or gone.hold is MigHold.IDLE
                slices.remove(gone)
            case MigAction.CREATE:
                covered = set(range(step.start, step.start + profile.size))
                assert step.start in profile.starts
                assert all(not covered & set(range(s.start, s.start + s.size)) for s in slices)
                slices.append(
                    MigSlice(
                        profile=profile.number,
                        start=step.start,
                        size=profile.size,
                        holder=step.holder,
                    )
                )
    return there


@settings(max_examples=examples(2))
@given(there=fragmented(), data=st.data())
def test_no_fewer_would_do(there: MigLayout, data: st.DataObject) -> None:
    names = [each.name for each in there.profiles if not each.has_media]
    wanted = data.draw(st.sampled_from(names))
    used = [each for each in there.slices if each.hold is MigHold.USED]
    stay = [each for each in there.slices if each.hold is MigHold.FOREIGN]
    number = {each.name: each.number for each in there.profiles}
    by_number = {each.number: each.name for each in there.profiles}
    least: tuple[int, int] | None = None
    for count in range(len(used) + 1):
        for gone in combinations(used, count):
            rest = [*stay, *(each for each in used if each not in gone)]
            for lost in range(count + 1):
                for again in combinations(gone, count - lost):
                    counts = {wanted: 1}
                    for each in again:
                        name = by_number[each.profile]
                        counts[name] = counts.get(name, 0) + 1
                    if _fits(there, rest, counts):
                        least = min(least or (9, 9), (lost, count))
    plan = plan_drain([there], {wanted: 1})
    assert isinstance(plan, MigPlan) == (least is not None)
    if isinstance(plan, MigImpossible):
        return
    assert (len(plan.displaced), len(plan.those(MigAction.DRAIN))) == least
    slices = done([there], plan)[there.gpu]
    assert any(each.profile == number[wanted] and not each.holder for each in slices)
    lost_ones = {each.holder for each in plan.displaced}
    kept = {each.holder for each in slices}
    assert {each.holder for each in used} - lost_ones <= kept
    assert {each.holder for each in stay} <= kept


def _fits(there: MigLayout, rest: Sequence[MigSlice], counts: dict[str, int]) -> bool:
    """Is there room for these beside the rest? As a configuration of all of it."""
    fixed = [
        MigSlice(profile=each.profile, start=each.start, size=each.size, hold=MigHold.FOREIGN)
        for each in rest
    ]
    names = {each.number: each.name for each in there.profiles}
    total = dict(counts)
    for each in rest:
        total[names[each.profile]] = total.get(names[each.profile], 0) + 1
    alone = MigLayout(gpu=there.gpu, profiles=there.profiles, slices=tuple(fixed))
    return isinstance(arrange(alone, total), MigPlan)


@given(first=fragmented(), second=fragmented(), data=st.data())
def test_of_two_gpus_nobody_loses_a_place_that_is_there(
    first: MigLayout, second: MigLayout, data: st.DataObject
) -> None:
    layouts = [
        MigLayout(gpu=f"GPU-{number}", profiles=each.profiles, slices=each.slices)
        for number, each in enumerate((first, second))
    ]
    wanted = data.draw(st.sampled_from([each.name for each in first.profiles]))
    plan = plan_drain(layouts, {wanted: 1})
    if isinstance(plan, MigImpossible):
        assert isinstance(choose(layouts, MigRequest(profile=wanted)), MigRefusal)
        return
    there = done(layouts, plan)
    drained = len(plan.those(MigAction.DRAIN))
    alone = [plan_drain([each], {wanted: 1}) for each in layouts]
    for answer in alone:
        if isinstance(answer, MigPlan):
            assert len(plan.displaced) <= len(answer.displaced)
    if not isinstance(choose(layouts, MigRequest(profile=wanted)), MigRefusal):
        assert drained == 0
    for each in plan.displaced:
        left = [
            MigLayout(gpu=one.gpu, profiles=one.profiles, slices=tuple(there[one.gpu]))
            for one in layouts
        ]
        assert isinstance(choose(left, MigRequest(profile=each.profile)), MigRefusal)
