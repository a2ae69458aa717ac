# SPDX-License-Identifier: Apache-2.0
"""Whom to ask to start again, so that what is wanted fits on one GPU.

An instance cannot be moved: whoever uses it ends, it is removed, and made again elsewhere. Among
all ways the one is taken that leaves the fewest without a place anywhere, then asks the fewest to
start again, then removes the fewest idle instances, then leaves most possible. On the GPU that is
looked at, every choice is tried; on the others, those who must leave it are placed by a search.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import NamedTuple

from allotment.model.mig import MigHold, MigLayout, MigProfile, MigSlice
from allotment.placement.mig.arranging import fillings, hardest_first, wanted_profiles
from allotment.placement.mig.plans import MigAction, MigImpossible, MigPlan, plan_of
from allotment.placement.mig.scarcity import scarcity
from allotment.placement.mig.slots import Place, Slots, Taken, slots_of

__all__ = ["advise"]

_MOST_LOOKS = 20_000
"""Places that are tried on other GPUs for those who must leave one; by count, so that the same is
answered again."""


class _Settled(NamedTuple):
    """A drained slice and its new place on another GPU, by that GPU's number."""

    slice: MigSlice
    gpu: int
    place: Place


@dataclass(frozen=True, slots=True, kw_only=True)
class _Way:
    """One way to make room on one GPU."""

    cost: tuple[int, int, int, float]
    gpu: int
    drained: tuple[MigSlice, ...]
    places: tuple[Place, ...]
    """On the GPU itself: of what is wanted, and of those that stay there."""
    staying: tuple[MigSlice, ...]
    settled: tuple[_Settled, ...]


class _Gpu:
    """One GPU that is looked at."""

    def __init__(self, layout: MigLayout) -> None:
        self.layout = layout
        self.slots: Slots = slots_of(layout.profiles)
        self.used = [each for each in layout.slices if each.hold is MigHold.USED]
        self.idle = [each for each in layout.slices if each.hold is MigHold.IDLE]
        self.foreign = [each for each in layout.slices if each.hold is MigHold.FOREIGN]
        self.taken = Taken.by([*self.used, *self.foreign])

    def profile_of(self, piece: MigSlice) -> MigProfile | None:
        return self.slots.by_number.get(piece.profile)

    def removed(
        self, places: Iterable[Place], *, drained: Sequence[MigSlice]
    ) -> tuple[MigSlice, ...]:
        """Return the idle instances that cannot stay beside new ones."""
        return self.slots.in_the_way(self.idle, self.without(drained), places)

    def without(self, drained: Sequence[MigSlice]) -> Taken:
        """Return what is taken once these have gone, and all idle ones."""
        stay = (each for each in self.used if not _is_among(each, drained))
        return Taken.by([*self.foreign, *stay])


def _is_among(piece: MigSlice, pieces: Iterable[MigSlice]) -> bool:
    return any(piece is each for each in pieces)


def advise(layouts: Sequence[MigLayout], wanted: Mapping[str, int]) -> MigPlan | MigImpossible:
    """Return how one of these GPUs comes to have room for all of this, and has it.

    `wanted`: how many more of each profile, by name, on one GPU. Foreign instances stay.
    Whoever is drained starts again on the same GPU or on another of these, if any has a place.
    """
    gpus = [_Gpu(each) for each in layouts if each.is_enabled]
    if not gpus:
        return MigImpossible(reason="no GPU has MIG switched on")
    best: _Way | None = None
    lacks: MigImpossible | None = None
    for number, gpu in enumerate(gpus):
        profiles = wanted_profiles(gpu.slots, wanted)
        if isinstance(profiles, MigImpossible):
            lacks = profiles
            continue
        for way in _ways(gpus, number, profiles):
            if best is None or way.cost < best.cost:
                best = way
    if best is not None:
        return _plan(gpus, best)
    told = " + ".join(f"{count} x {name}" for name, count in wanted.items() if count)
    if lacks is not None and len(gpus) == 1:
        return lacks
    if any(each.foreign for each in gpus):
        hint = "instances that others have made are in the way: they are not touched"
    else:
        hint = "ask for fewer: they do not fit on an empty GPU either"
    return MigImpossible(reason=f"no GPU can have {told}, whoever leaves it", hint=hint)


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
            return  # more would start again, and no fewer lose their place


def _way(
    gpus: Sequence[_Gpu],
    number: int,
    wanted: Sequence[MigProfile],
    drained: tuple[MigSlice, ...],
) -> _Way | None:
    """Return the best way to make room by draining exactly these; None: that is not enough."""
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
            leaving = [each for each in drained if not _is_among(each, staying)]
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
    """Return the places that remove the fewest idle instances and leave most possible."""
    best: tuple[tuple[int, float], tuple[Place, ...]] | None = None
    taken = gpu.without(drained)
    for places in fillings(gpu.slots, taken, hardest_first(wanted)):
        mask = taken.mask
        for each in places:
            mask |= each.mask
        cost = len(gpu.removed(places, drained=drained)), scarcity(gpu.slots, mask)
        if best is None or cost < best[0]:
            best = cost, places
    return best


def _settle(gpus: Sequence[_Gpu], left: int, leaving: Sequence[MigSlice]) -> tuple[_Settled, ...]:
    """Find places on the other GPUs for as many as can be of those that leave one."""
    names = {each.number: each.name for each in gpus[left].slots.profiles}
    queue = sorted(leaving, key=lambda each: -each.size)
    looks = _MOST_LOOKS
    best: tuple[_Settled, ...] = ()

    def rest(at: int, taken: tuple[Taken, ...], done: tuple[_Settled, ...]) -> bool:
        """Go on from here; true when nothing better is to be found."""
        nonlocal looks, best
        if len(done) > len(best):
            best = done
        if at == len(queue) or looks <= 0:
            return len(best) == len(queue) or looks <= 0
        seen: set[tuple[int, Taken]] = set()
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
    # Elsewhere first: whoever leaves has a place to go to before the GPU is cut anew.
    for number, other in enumerate(gpus):
        here = [each for each in way.settled if each.gpu == number]
        if here:
            places = [(each.place, each.slice.holder) for each in here]
            idle = other.removed((each.place for each in here), drained=())
            steps += plan_of(other.layout.gpu, other.slots, gone=idle, made=places)
    gone = [*way.drained, *gpu.removed(way.places, drained=way.drained)]
    steps += plan_of(gpu.layout.gpu, gpu.slots, gone=gone, made=_with_holders(way))
    again = [*way.staying, *(each.slice for each in way.settled)]
    lost = {each.start for each in way.drained if not _is_among(each, again)}
    return MigPlan(
        steps=tuple(steps),
        displaced=tuple(
            each for each in steps if each.action is MigAction.DRAIN and each.start in lost
        ),
    )


def _with_holders(way: _Way) -> Iterator[tuple[Place, str]]:
    """Yield each place with who is to have it again; what is wanted has nobody yet.

    Equal profiles are as good as each other, so that those who stay take any of theirs.
    """
    waiting = list(way.staying)
    for place in way.places:
        one = next((each for each in waiting if each.profile == place.profile.number), None)
        if one is not None:
            waiting.remove(one)
        yield place, "" if one is None else one.holder
