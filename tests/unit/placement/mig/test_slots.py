# SPDX-License-Identifier: Apache-2.0
"""What GPUs can be cut into, counted: NVIDIA's configurations are all reached, and no others."""

from collections.abc import Iterable
from itertools import combinations

import pytest
from mig_profiles import MODELS, piece, profiles

from allotment.model.mig import MigProfile
from allotment.placement.mig.slots import Place, TakenSlots, cover, slots_of

State = frozenset[tuple[str, int]]

SEVENS = [name for name in MODELS if name not in {"A30", "RTX PRO 6000"}]


def reached(there: tuple[MigProfile, ...]) -> dict[State, TakenSlots]:
    """Every state that the planner's starts lead to, from an empty GPU."""
    slots = slots_of(there)
    found: dict[State, TakenSlots] = {frozenset(): TakenSlots()}
    queue: list[State] = [frozenset()]
    for state in queue:
        for profile in there:
            for start in slots.starts(profile, found[state]):
                after = state | {(profile.name, start)}
                if after not in found:
                    found[after] = found[state].plus(Place(profile, start))
                    queue.append(after)
    return found


def legal(there: Iterable[MigProfile]) -> set[State]:
    """Every set of placements of which no two overlap: by trying all sets."""
    places = [
        (each.name, start, cover(start, each.size)) for each in there for start in each.starts
    ]
    found: set[State] = set()
    for count in range(8):
        for some in combinations(places, count):
            mask = 0
            for *_, own in some:
                if mask & own:
                    break
                mask |= own
            else:
                found.add(frozenset((name, start) for name, start, _ in some))
    return found


def maximal(states: Iterable[State]) -> set[State]:
    there = set(states)
    return {each for each in there if not any(each < other for other in there)}


def multisets(states: Iterable[State]) -> set[tuple[str, ...]]:
    return {tuple(sorted(name for name, _ in each)) for each in states}


def maximal_multisets(states: Iterable[State]) -> set[tuple[str, ...]]:
    """Those to which nothing can be added wherever the others are."""
    there = multisets(states)
    return {
        each
        for each in there
        if not any(len(other) == len(each) + 1 and _is_part(each, other) for other in there)
    }


def _is_part(part: tuple[str, ...], whole: tuple[str, ...]) -> bool:
    return all(part.count(name) <= whole.count(name) for name in part)


def plain(model: str, *, with_double: bool) -> tuple[MigProfile, ...]:
    """The profiles without `+me`, and without the 1g of twice the memory."""
    every = profiles(model)
    single = every[0]
    return tuple(
        each
        for each in every
        if not each.attributes and (with_double or each.slices > 1 or each is single)
    )


@pytest.mark.parametrize("model", SEVENS)
def test_gpus_of_seven_slices_have_nvidias_19_maximal_configurations(model: str) -> None:
    states = reached(plain(model, with_double=False))
    assert (len(states), len(multisets(states))) == (298, 38)
    assert len(maximal(states)) == 19
    assert len(maximal_multisets(states)) == 12


@pytest.mark.parametrize("model", SEVENS)
def test_the_profile_of_twice_the_memory_adds_to_them(model: str) -> None:
    states = reached(plain(model, with_double=True))
    assert (len(states), len(multisets(states))) == (723, 78)
    assert len(maximal_multisets(states)) == 28


def test_an_a30_has_four() -> None:
    states = reached(plain("A30", with_double=True))
    assert (len(states), len(multisets(states))) == (26, 10)
    assert maximal_multisets(states) == {
        ("1g.6gb",) * 4,
        ("1g.6gb", "1g.6gb", "2g.12gb"),
        ("2g.12gb", "2g.12gb"),
        ("4g.24gb",),
    }


@pytest.mark.parametrize(
    "there",
    [
        pytest.param(plain("A100-40GB", with_double=False), id="A100"),
        pytest.param(plain("H100-80GB", with_double=True), id="H100 with double memory"),
        pytest.param(plain("A30", with_double=True), id="A30"),
        pytest.param(plain("RTX PRO 6000", with_double=True), id="RTX PRO 6000"),
    ],
)
def test_just_what_does_not_overlap_is_reached(there: tuple[MigProfile, ...]) -> None:
    assert set(reached(there)) == legal(there)


@pytest.mark.parametrize("model", MODELS)
def test_there_is_never_a_second_set_of_media_engines(model: str) -> None:
    media = {each.name for each in profiles(model) if each.has_media}
    there = tuple(each for each in profiles(model) if not each.attributes or each.has_media)
    states = reached(there)
    assert media
    assert max(sum(name in media for name, _ in state) for state in states) == 1


@pytest.mark.parametrize("model", SEVENS)
def test_slices_fit_wherever_slots_do(model: str) -> None:
    slices = {each.name: each.slices for each in profiles(model)}
    states = reached(profiles(model))
    assert max(sum(slices[name] for name, _ in state) for state in states) == 7


def test_a_profile_is_refused_at_its_most_though_slots_are_free() -> None:
    there = profiles("H100-80GB")
    me = next(each for each in there if each.has_media)
    slots = slots_of(there)
    taken = TakenSlots.by([piece("H100-80GB", me.name, 3)])
    assert slots.starts(me, taken) == ()
    assert slots.starts(there[0], taken) == (0, 1, 2, 4, 5, 6)


def test_rooms_are_counted_by_shape_and_apart() -> None:
    slots = slots_of(profiles("A100-40GB"))
    taken = TakenSlots.by([piece("A100-40GB", "1g.5gb", 6)])
    assert slots.rooms(taken.mask) == {
        "1g.5gb": 6,
        "1g.10gb": 3,
        "2g.10gb": 3,
        "3g.20gb": 1,
        "4g.20gb": 1,
        "7g.40gb": 0,
    }


def test_rooms_do_not_count_starts_that_exclude_each_other() -> None:
    odd = MigProfile(
        name="2g.1gb",
        number=1,
        slices=2,
        memory_bytes=1,
        size=2,
        starts=(0, 1, 2),
        most=3,
        multiprocessors=1,
    )
    assert slots_of((odd,)).rooms(0) == {"2g.1gb": 2}
