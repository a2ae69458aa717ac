# SPDX-License-Identifier: Apache-2.0
"""Configurations of one GPU: what stays, what is made, and why one is impossible."""

from collections import Counter
from collections.abc import Sequence
from itertools import combinations, product

import pytest
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from mig_profiles import layout, piece, profiles

from allotment.model.errors import UsageError
from allotment.model.mig import MigHold, MigLayout, MigSlice
from allotment.placement.mig.arrange import MigAction, MigImpossible, MigPlan, arrange

A100 = "A100-40GB"


def planned(there: MigLayout, counts: dict[str, int]) -> MigPlan:
    plan = arrange(there, counts)
    assert isinstance(plan, MigPlan), str(plan)
    return plan


def after(there: MigLayout, plan: MigPlan) -> list[MigSlice]:
    """Do the steps one by one; each must be legal when its turn comes."""
    by_name = {each.name: each for each in there.profiles}
    slices = list(there.slices)
    drained: set[tuple[int, int]] = set()
    for step in plan.steps:
        assert step.gpu == there.gpu
        number = by_name[step.profile].number
        here = [each for each in slices if (each.profile, each.start) == (number, step.start)]
        match step.action:
            case MigAction.DRAIN:
                assert here[0].hold is MigHold.USED
                drained.add((number, step.start))
            case MigAction.REMOVE:
                assert here[0].hold is MigHold.IDLE or (number, step.start) in drained
                slices.remove(here[0])
            case MigAction.CREATE:
                profile = by_name[step.profile]
                covered = set(range(step.start, step.start + profile.size))
                assert step.start in profile.starts
                assert all(not covered & set(range(s.start, s.start + s.size)) for s in slices)
                assert sum(each.profile == number for each in slices) < profile.most
                slices.append(MigSlice(profile=number, start=step.start, size=profile.size))
    return slices


def counted(there: MigLayout, slices: Sequence[MigSlice]) -> Counter[str]:
    names = {each.number: each.name for each in there.profiles}
    return Counter(names[each.profile] for each in slices)


@pytest.mark.parametrize(
    "counts",
    [
        pytest.param({"1g.5gb": 2, "2g.10gb": 1, "3g.20gb": 1}, id="all-balanced"),
        pytest.param({"3g.20gb": 1, "4g.20gb": 1}, id="3g+4g"),
        pytest.param({"1g.5gb": 7}, id="7x1g"),
        pytest.param({"2g.10gb": 3, "1g.5gb": 1}, id="3x2g+1g"),
        pytest.param({"1g.10gb": 4}, id="4 of twice the memory"),
        pytest.param({"1g.5gb+me": 1, "1g.5gb": 6}, id="+me"),
        pytest.param({"1g.5gb": 0}, id="none"),
    ],
)
def test_a_configuration_is_made_on_an_empty_gpu(counts: dict[str, int]) -> None:
    there = layout(A100)
    made = after(there, planned(there, counts))
    assert counted(there, made) == Counter({name: n for name, n in counts.items() if n})


def test_two_halves_leave_no_slot_for_a_seventh_slice() -> None:
    answer = arrange(layout(A100), {"3g.20gb": 2, "1g.5gb": 1})
    assert isinstance(answer, MigImpossible)
    assert answer.reason == "no slots for 2 x 3g.20gb + 1 x 1g.5gb at once"
    assert answer.hint == "of these, 2 x 3g.20gb or 1 x 3g.20gb + 1 x 1g.5gb fit"


@pytest.mark.parametrize(
    ("counts", "reason", "hint"),
    [
        pytest.param({"2g.48gb": 1}, "no profile 2g.48gb", "1g.5gb, 1g.5gb+me", id="lacking"),
        pytest.param({"1g.5gb+me": 2}, "the GPU can have 1 at once", "at most 1", id="too many"),
    ],
)
def test_what_a_gpu_lacks_is_said(counts: dict[str, int], reason: str, hint: str) -> None:
    answer = arrange(layout(A100), counts)
    assert isinstance(answer, MigImpossible)
    assert reason in answer.reason
    assert hint in answer.hint


def test_less_than_none_cannot_be_meant() -> None:
    with pytest.raises(UsageError, match="-1 instances"):
        arrange(layout(A100), {"1g.5gb": -1})


def test_what_is_there_already_stays() -> None:
    there = layout(A100, piece(A100, "1g.5gb", 1), piece(A100, "3g.20gb", 4))
    plan = planned(there, {"1g.5gb": 2, "2g.10gb": 1, "3g.20gb": 1})
    assert [str(step) for step in plan.steps] == [
        "create 1g.5gb at slot 0",
        "create 2g.10gb at slot 2",
    ]


def test_nothing_is_done_where_all_is_as_it_should_be() -> None:
    there = layout(A100, piece(A100, "7g.40gb", 0))
    assert planned(there, {"7g.40gb": 1}).steps == ()


def test_an_idle_one_goes_before_one_in_use() -> None:
    used = piece(A100, "1g.5gb", 0, holder="pod a/b")
    idle = piece(A100, "1g.5gb", 4, hold=MigHold.IDLE)
    plan = planned(layout(A100, used, idle), {"1g.5gb": 1})
    assert [str(step) for step in plan.steps] == ["remove 1g.5gb at slot 4"]


def test_of_equals_the_one_stays_that_leaves_most_possible() -> None:
    idle = [piece(A100, "1g.5gb", at, hold=MigHold.IDLE) for at in (0, 6)]
    plan = planned(layout(A100, *idle), {"1g.5gb": 1})
    assert [str(step) for step in plan.steps] == ["remove 1g.5gb at slot 0"]


def test_only_who_stands_in_the_way_is_drained() -> None:
    slices = [piece(A100, "1g.5gb", at, holder=f"pod {at}") for at in (0, 4, 5)]
    plan = planned(layout(A100, *slices), {"1g.5gb": 3, "4g.20gb": 1})
    assert [str(step) for step in plan.steps] == [
        "drain 1g.5gb at slot 0 of pod 0",
        "remove 1g.5gb at slot 0 of pod 0",
        "create 4g.20gb at slot 0",
        "create 1g.5gb at slot 6",
    ]


def test_foreign_instances_are_left_alone_and_counted() -> None:
    there = layout(A100, piece(A100, "1g.5gb", 0, hold=MigHold.FOREIGN))
    assert counted(there, after(there, planned(there, {"1g.5gb": 2})))["1g.5gb"] == 2
    answer = arrange(there, {"3g.20gb": 2})
    assert isinstance(answer, MigImpossible)
    assert answer.reason == ("foreign instances 1g.5gb at slot 0 are in the way of 2 x 3g.20gb")
    answer = arrange(there, {"1g.5gb": 1, "4g.20gb": 1})
    assert isinstance(answer, MigImpossible)
    assert "beside foreign instances" in answer.reason


def possible(there: MigLayout, fixed: Sequence[MigSlice], counts: dict[str, int]) -> bool:
    """Can there be exactly these, with `fixed` among them? By trying all starts."""
    names = {each.number: each.name for each in there.profiles}
    missing = Counter(counts) - counted(there, fixed)
    if counted(there, fixed) - Counter(counts):
        return False
    by_name = {each.name: each for each in there.profiles}
    taken = [set(range(each.start, each.start + each.size)) for each in fixed]
    media = sum(by_name[names[each.profile]].has_media for each in fixed)
    media += sum(by_name[name].has_media * count for name, count in missing.items())
    if media > 1 or any(count > by_name[name].most for name, count in counts.items()):
        return False
    choices = [combinations(by_name[name].starts, count) for name, count in missing.items()]
    sizes = [by_name[name].size for name in missing]
    for starts in product(*choices):
        covers = list(taken)
        for size, some in zip(sizes, starts, strict=True):
            covers += [set(range(start, start + size)) for start in some]
        if sum(map(len, covers)) == len(set().union(*covers)):
            return True
    return False


@st.composite
def begun(draw: st.DrawFn) -> tuple[MigLayout, dict[str, int]]:
    """A GPU with slices somehow, and a configuration for it."""
    model = draw(st.sampled_from([A100, "A30"]))
    there = [each for each in profiles(model) if each.size < 8]
    slices: list[MigSlice] = []
    covered: set[int] = set()
    for _ in range(draw(st.integers(0, 5))):
        wanted = draw(st.sampled_from(there))
        start = draw(st.sampled_from(wanted.starts))
        own = set(range(start, start + wanted.size))
        if covered & own or wanted.has_media:
            continue
        covered |= own
        hold = draw(st.sampled_from([MigHold.USED, MigHold.USED, MigHold.IDLE, MigHold.FOREIGN]))
        slices.append(MigSlice(profile=wanted.number, start=start, size=wanted.size, hold=hold))
    names = draw(st.lists(st.sampled_from([each.name for each in there]), max_size=5))
    return layout(model, *slices), dict(Counter(names))


@settings(max_examples=examples(2))
@given(case=begun())
def test_no_plan_keeps_more_and_none_is_missed(case: tuple[MigLayout, dict[str, int]]) -> None:
    there, counts = case
    fixed = [each for each in there.slices if each.hold is MigHold.FOREIGN]
    movable = [each for each in there.slices if each.hold is not MigHold.FOREIGN]
    keeps = [
        (sum(each.hold is MigHold.USED for each in some), len(some))
        for count in range(len(movable) + 1)
        for some in combinations(movable, count)
        if possible(there, [*fixed, *some], counts)
    ]
    plan = arrange(there, counts)
    assert isinstance(plan, MigPlan) == bool(keeps)
    if isinstance(plan, MigImpossible):
        return
    made = after(there, plan)
    assert counted(there, made) == Counter(counts)
    stayed = [each for each in movable if any(each is one for one in made)]
    used = sum(each.hold is MigHold.USED for each in stayed)
    assert (used, len(stayed)) == max(keeps)
