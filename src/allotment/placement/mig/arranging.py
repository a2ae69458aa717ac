# SPDX-License-Identifier: Apache-2.0
"""A whole configuration for one GPU, so many of each profile, from whatever is there.

As many of the instances that somebody uses stay as can, then as many idle ones; what is missing is
made where most stays possible. The search is exact: if the configuration is refused, no starts
whatever would do, and no other choice of what stays keeps more.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import combinations

from allotment.model.errors import UsageError
from allotment.model.mig import MigHold, MigLayout, MigProfile, MigSlice
from allotment.placement.mig.plans import MigImpossible, MigPlan, plan_of
from allotment.placement.mig.scarcity import scarcity
from allotment.placement.mig.slots import Place, Slots, Taken, slots_of

__all__ = ["arrange", "fillings", "hardest_first", "wanted_profiles"]

_MOST_SHOWN = 3


def arrange(layout: MigLayout, counts: Mapping[str, int]) -> MigPlan | MigImpossible:
    """Return how a GPU comes to have exactly so many instances of each profile, by its name.

    Foreign instances stay, and count as part of it. Who is to be drained for it is in the plan, for
    the caller to refuse. Raises `UsageError` for a count below 0.
    """
    slots = slots_of(layout.profiles)
    wanted = wanted_profiles(slots, counts)
    if isinstance(wanted, MigImpossible):
        return wanted
    fixed = [each for each in layout.slices if each.hold is MigHold.FOREIGN]
    missing = _without(wanted, fixed)
    if missing is None:
        return _foreign(slots, fixed, counts)
    movable = [each for each in layout.slices if each.hold is not MigHold.FOREIGN]
    best: tuple[tuple[int, int, float], tuple[MigSlice, ...], tuple[Place, ...]] | None = None
    for kept in _subsets(movable):
        more = _without(missing, kept)
        used = sum(each.hold is MigHold.USED for each in kept)
        keeps = -used, used - len(kept)
        if best is not None and keeps > best[0][:2]:
            break
        if more is None:
            continue
        there = Taken.by([*fixed, *kept])
        for places in fillings(slots, there, more):
            cost = *keeps, scarcity(slots, _mask(there, places))
            if best is None or cost < best[0]:
                best = cost, kept, places
    if best is None:
        return _too_much(slots, Taken.by(fixed), missing)
    _, kept, places = best
    gone = [each for each in movable if not any(each is one for one in kept)]
    made = [(place, "") for place in places]
    return MigPlan(steps=tuple(plan_of(layout.gpu, slots, gone=gone, made=made)))


def wanted_profiles(slots: Slots, counts: Mapping[str, int]) -> list[MigProfile] | MigImpossible:
    """Return a profile as often as it is asked for, the largest first: hard ones fail early."""
    wanted: list[MigProfile] = []
    for name, count in counts.items():
        if count < 0:
            raise UsageError(f"{name}: {count} instances", hint="give 0 or more")
        profile = slots.by_name.get(name)
        if profile is None and count:
            names = ", ".join(slots.by_name) or "no MIG at all"
            return MigImpossible(reason=f"the GPU has no profile {name}", hint=f"it has {names}")
        if profile is not None and count > profile.most:
            return MigImpossible(
                reason=f"{count} x {name}: the GPU can have {profile.most} at once",
                hint=f"ask for at most {profile.most}",
            )
        if profile is not None:
            wanted += [profile] * count
    return hardest_first(wanted)


def hardest_first(profiles: Iterable[MigProfile]) -> list[MigProfile]:
    """Return the profiles in the order in which `fillings` is quickest, equal ones together."""
    return sorted(profiles, key=lambda each: (-each.size, len(each.starts), each.number))


def fillings(
    slots: Slots, taken: Taken, wanted: Sequence[MigProfile]
) -> Iterator[tuple[Place, ...]]:
    """Yield all ways to have all of these beside what is taken, but for the order of equals.

    `wanted`: equal ones one after the other.
    """
    hopeless: set[tuple[int, Taken, int]] = set()

    def rest(number: int, there: Taken, after: int) -> Iterator[tuple[Place, ...]]:
        if number == len(wanted):
            yield ()
            return
        key = number, there, after
        if key in hopeless:
            return
        profile, found = wanted[number], False
        for start in slots.starts(profile, there):
            if start <= after:
                continue
            place = Place(profile, start)
            is_equal = number + 1 < len(wanted) and wanted[number + 1] is profile
            for others in rest(number + 1, there.plus(place), start if is_equal else -1):
                found = True
                yield (place, *others)
        if not found:
            hopeless.add(key)

    return rest(0, taken, -1)


def _mask(taken: Taken, places: Sequence[Place]) -> int:
    mask = taken.mask
    for each in places:
        mask |= each.mask
    return mask


def _subsets(movable: Sequence[MigSlice]) -> Iterator[tuple[MigSlice, ...]]:
    """Yield what could stay: with the most used ones first, of these with the most idle ones."""
    used = [each for each in movable if each.hold is MigHold.USED]
    idle = [each for each in movable if each.hold is not MigHold.USED]
    for many in range(len(used), -1, -1):
        for more in range(len(idle), -1, -1):
            for some in combinations(used, many):
                for others in combinations(idle, more):
                    yield *some, *others


def _without(wanted: Sequence[MigProfile], there: Sequence[MigSlice]) -> list[MigProfile] | None:
    """Return what is missing beside these; None where one of them is not wanted."""
    missing = list(wanted)
    for each in there:
        profile = next((one for one in missing if one.number == each.profile), None)
        if profile is None:
            return None
        missing.remove(profile)
    return missing


def _foreign(slots: Slots, fixed: Sequence[MigSlice], counts: Mapping[str, int]) -> MigImpossible:
    there = [
        f"{profile.name} at slot {each.start}"
        for each in fixed
        if (profile := slots.by_number.get(each.profile)) is not None
    ]
    asked = _told([(name, count) for name, count in counts.items() if count]) or "none"
    return MigImpossible(
        reason=f"others have made {', '.join(there)}, which {asked} leaves no room for",
        hint="have whoever made them remove them, or ask for them as well",
    )


def _too_much(slots: Slots, taken: Taken, wanted: Sequence[MigProfile]) -> MigImpossible:
    """Say that no starts would do, and how much of it would fit."""
    largest = sorted(_largest(slots, taken, wanted), key=lambda part: (-_size(part), _names(part)))
    parts = [_told(_names(each)) for each in largest[:_MOST_SHOWN]]
    beside = " beside what others have made" if taken.mask else ""
    return MigImpossible(
        reason=f"no slots for {_told(_names(wanted))} at once{beside}",
        hint=f"of these, {' or '.join(parts)} fit" if any(parts) else "",
    )


def _largest(
    slots: Slots, taken: Taken, wanted: Sequence[MigProfile]
) -> Iterator[tuple[MigProfile, ...]]:
    """Yield the parts of it that fit and to which nothing of the rest can be added."""
    begun: set[tuple[MigProfile, ...]] = {()}
    while begun:
        more: set[tuple[MigProfile, ...]] = set()
        for part in begun:
            larger = {
                _with(wanted, part, one)
                for one in set(wanted)
                if part.count(one) < wanted.count(one)
            }
            fitting = {
                each for each in larger if next(fillings(slots, taken, each), None) is not None
            }
            if not fitting:
                yield part
            more |= fitting
        begun = more


def _with(
    wanted: Sequence[MigProfile], part: Sequence[MigProfile], one: MigProfile
) -> tuple[MigProfile, ...]:
    """Return a part with one more, in the order of the whole."""
    return tuple(sorted((*part, one), key=wanted.index))


def _size(part: Sequence[MigProfile]) -> int:
    return sum(each.size for each in part)


def _names(part: Sequence[MigProfile]) -> list[tuple[str, int]]:
    names = [each.name for each in part]
    return [(name, names.count(name)) for name in dict.fromkeys(names)]


def _told(names: Sequence[tuple[str, int]]) -> str:
    return " + ".join(f"{count} x {name}" for name, count in names)
