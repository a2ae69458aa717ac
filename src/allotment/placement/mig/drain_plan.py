# SPDX-License-Identifier: Apache-2.0
"""Which workloads to restart so that a request fits on one GPU.

An instance cannot move: its user ends, and it is removed and created elsewhere. The plan leaves the
fewest users without a place, then restarts the fewest, then removes the fewest idle instances.
Choices on the chosen GPU are exhaustive; places on other GPUs are searched within a bound.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import combinations
from typing import NamedTuple

import msgspec

from allotment.model.mig import MigHold, MigLayout, MigProfile, MigSlice
from allotment.placement.mig.arrange import (
    MigAction,
    MigImpossible,
    MigPlan,
    fillings,
    format_counts,
    hardest_first,
    plan_of,
    wanted_profiles,
)
from allotment.placement.mig.slots import Place, Slots, TakenSlots, scarcity, slots_of

_MOST_LOOKS = 20_000
"""Places tried on other GPUs for drained users; a count, so that results repeat."""


class _Settled(NamedTuple):
    """A drained slice and its new place on another GPU, by that GPU's number."""

    slice: MigSlice
    gpu: int
    place: Place


class _Way(msgspec.Struct, frozen=True, kw_only=True):
    """One way to make room on one GPU."""

    cost: tuple[int, int, int, float]
    gpu: int
    drained: tuple[MigSlice, ...]
    places: tuple[Place, ...]
    """On this GPU: places of the request, and of drained users that stay on it."""
    staying: tuple[MigSlice, ...]
    settled: tuple[_Settled, ...]


class _Gpu:
    def __init__(self, layout: MigLayout) -> None:
        self.layout = layout
        self.slots: Slots = slots_of(layout.profiles)
        self.used = [slice_ for slice_ in layout.slices if slice_.hold is MigHold.USED]
        self.idle = [slice_ for slice_ in layout.slices if slice_.hold is MigHold.IDLE]
        self.foreign = [slice_ for slice_ in layout.slices if slice_.hold is MigHold.FOREIGN]
        self.taken = TakenSlots.on(layout)

    def profile_of(self, piece: MigSlice) -> MigProfile | None:
        return self.slots.by_number.get(piece.profile)

    def removed(
        self, places: Iterable[Place], *, drained: Sequence[MigSlice]
    ) -> tuple[MigSlice, ...]:
        return self.slots.in_the_way(self.idle, self.without(drained), places)

    def without(self, drained: Sequence[MigSlice]) -> TakenSlots:
        stay = (slice_ for slice_ in self.used if slice_ not in drained)
        return TakenSlots.by([*self.foreign, *stay])


def plan_drain(layouts: Sequence[MigLayout], wanted: Mapping[str, int]) -> MigPlan | MigImpossible:
    """A plan that makes room for the request on one of these GPUs.

    `wanted`: additional instances of each profile, by name, on one GPU. Foreign instances stay.
    Drained workloads restart on the same GPU or another one, if any has a place.
    """
    gpus = [_Gpu(layout) for layout in layouts if layout.is_enabled]
    if not gpus:
        return MigImpossible(reason="no GPU has MIG switched on")
    best: _Way | None = None
    lacks: list[MigImpossible] = []
    for number, gpu in enumerate(gpus):
        profiles = wanted_profiles(gpu.slots, wanted)
        if isinstance(profiles, MigImpossible):
            lacks.append(profiles)
            continue
        for way in _ways(gpus, number, profiles):
            if best is None or way.cost < best.cost:
                best = way
    if best is not None:
        return _plan(gpus, best)
    if len(lacks) == len(gpus) and len(set(lacks)) == 1:
        return lacks[0]
    if any(each.foreign for each in gpus):
        hint = "foreign instances are in the way; Allotment does not touch them"
    else:
        hint = "ask for fewer: they do not fit on an empty GPU either"
    return MigImpossible(
        reason=f"{format_counts(wanted)} fits no GPU, even when drained", hint=hint
    )


def _ways(gpus: Sequence[_Gpu], number: int, wanted: Sequence[MigProfile]) -> Iterator[_Way]:
    gpu = gpus[number]
    for many in range(len(gpu.used) + 1):
        has_all = False
        for drained in combinations(gpu.used, many):
            way = _way(gpus, number, wanted, drained)
            if way is not None:
                yield way
                has_all = has_all or not way.cost[0]
        if has_all:
            return  # more would restart, and no fewer lose their place


def _way(
    gpus: Sequence[_Gpu],
    number: int,
    wanted: Sequence[MigProfile],
    drained: tuple[MigSlice, ...],
) -> _Way | None:
    """The best way that drains exactly these; None: not enough."""
    gpu = gpus[number]
    if next(fillings(gpu.slots, gpu.without(drained), wanted), None) is None:
        return None
    best: _Way | None = None
    for many in range(len(drained), -1, -1):
        for staying in combinations(drained, many):
            again = [profile for each in staying if (profile := gpu.profile_of(each)) is not None]
            if len(again) < many:
                continue
            filled = _best_filling(gpu, drained, [*wanted, *again])
            if filled is None:
                continue
            leaving = [slice_ for slice_ in drained if slice_ not in staying]
            settled = _settle(gpus, number, leaving)
            way = _Way(
                cost=(len(leaving) - len(settled), len(drained), *filled[0]),
                gpu=number,
                drained=drained,
                places=filled[1],
                staying=staying,
                settled=settled,
            )
            if best is None or way.cost < best.cost:
                best = way
        if best is not None and not best.cost[0]:
            break
    return best


def _best_filling(
    gpu: _Gpu, drained: Sequence[MigSlice], wanted: Iterable[MigProfile]
) -> tuple[tuple[int, float], tuple[Place, ...]] | None:
    best: tuple[tuple[int, float], tuple[Place, ...]] | None = None
    taken = gpu.without(drained)
    for places in fillings(gpu.slots, taken, hardest_first(wanted)):
        mask = taken.plus(*places).mask
        cost = len(gpu.removed(places, drained=drained)), scarcity(gpu.slots, mask)
        if best is None or cost < best[0]:
            best = cost, places
    return best


def _settle(gpus: Sequence[_Gpu], left: int, leaving: Sequence[MigSlice]) -> tuple[_Settled, ...]:
    names = {each.number: each.name for each in gpus[left].slots.profiles}
    queue = sorted(leaving, key=lambda each: -each.size)
    looks = _MOST_LOOKS
    best: tuple[_Settled, ...] = ()

    def rest(at: int, taken: tuple[TakenSlots, ...], done: tuple[_Settled, ...]) -> bool:
        """Continue the search; True once nothing better is possible."""
        nonlocal looks, best
        if len(done) > len(best):
            best = done
        if at == len(queue) or looks <= 0:
            return len(best) == len(queue) or looks <= 0
        seen: set[tuple[int, TakenSlots]] = set()
        for number, gpu in enumerate(gpus):
            key = id(gpu.slots), taken[number]
            profile = gpu.slots.by_name.get(names.get(queue[at].profile, ""))
            if number == left or profile is None or key in seen:
                continue
            seen.add(key)
            for start in gpu.slots.starts(profile, taken[number]):
                looks -= 1
                place = Place(profile, start)
                after = (*taken[:number], taken[number].plus(place), *taken[number + 1 :])
                if rest(at + 1, after, (*done, _Settled(queue[at], number, place))):
                    return True
        # Without it, the others may still all have their place.
        could_be = len(done) + len(queue) - at - 1
        return could_be > len(best) and rest(at + 1, taken, done)

    rest(0, tuple(each.taken for each in gpus), ())
    return best


def _plan(gpus: Sequence[_Gpu], way: _Way) -> MigPlan:
    gpu = gpus[way.gpu]
    steps = []
    # Elsewhere first: users get a new place before the GPU is recut.
    for number, other in enumerate(gpus):
        moved = [user for user in way.settled if user.gpu == number]
        if moved:
            places = [(user.place, user.slice.holder) for user in moved]
            idle = other.removed((user.place for user in moved), drained=())
            steps += plan_of(other.layout.gpu, other.slots, gone=idle, made=places)
    gone = [*way.drained, *gpu.removed(way.places, drained=way.drained)]
    steps += plan_of(gpu.layout.gpu, gpu.slots, gone=gone, made=_with_holders(way))
    again = [*way.staying, *(user.slice for user in way.settled)]
    lost = {slice_.start for slice_ in way.drained if slice_ not in again}
    return MigPlan(
        steps=tuple(steps),
        displaced=tuple(
            step for step in steps if step.action is MigAction.DRAIN and step.start in lost
        ),
    )


def _with_holders(way: _Way) -> Iterator[tuple[Place, str]]:
    """Each place with its returning user; the request itself has none yet.

    Equal profiles are interchangeable, so staying users get any of theirs.
    """
    waiting = list(way.staying)
    for place in way.places:
        user = next((user for user in waiting if user.profile == place.profile.number), None)
        if user is not None:
            waiting.remove(user)
        yield place, "" if user is None else user.holder
