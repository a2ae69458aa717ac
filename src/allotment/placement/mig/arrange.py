# SPDX-License-Identifier: Apache-2.0
"""A whole configuration for one GPU, a count of each profile, from its current instances.

As many used instances as possible stay, then as many idle ones; missing ones are created where most
stays possible. The search is exact: a refused configuration fits nowhere, and no other choice keeps
more.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import Enum
from itertools import combinations

import msgspec

from allotment.model.errors import UsageError
from allotment.model.mig import MigHold, MigLayout, MigProfile, MigSlice
from allotment.placement.mig.slots import Place, Slots, TakenSlots, scarcity, slots_of


class MigAction(Enum):
    """The action of one step."""

    DRAIN = "drain"
    """The holder ends, and restarts where the plan has a place for it."""
    REMOVE = "remove"
    CREATE = "create"


class MigStep(msgspec.Struct, frozen=True, kw_only=True):
    """One step on one GPU."""

    action: MigAction
    gpu: str
    profile: str
    """The profile's name; a number if the driver reports no such profile."""
    start: int
    holder: str = ""
    """The slice's current or returning user; empty: unknown."""

    def __str__(self) -> str:
        whose = f" of {self.holder}" if self.holder else ""
        return f"{self.action.value} {self.profile} at slot {self.start}{whose}"


class MigPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Steps in order; empty if no change is needed."""

    steps: tuple[MigStep, ...]
    displaced: tuple[MigStep, ...] = ()
    """Drains without a new slice for the holder: it has no place."""

    def those(self, action: MigAction) -> tuple[MigStep, ...]:
        return tuple(step for step in self.steps if step.action is action)


class MigImpossible(msgspec.Struct, frozen=True, kw_only=True):
    """Why there is no plan, and what would help."""

    reason: str
    hint: str = ""

    def __str__(self) -> str:
        return self.reason


def plan_of(
    gpu: str,
    slots: Slots,
    *,
    gone: Iterable[MigSlice],
    made: Iterable[tuple[Place, str]],
) -> list[MigStep]:
    """Steps on one GPU: drain used slices, remove all of `gone`, then create."""
    leaving = sorted(gone, key=lambda slice_: slice_.start)

    def of(action: MigAction, slice_: MigSlice) -> MigStep:
        profile = slots.by_number.get(slice_.profile)
        name = str(slice_.profile) if profile is None else profile.name
        return MigStep(
            action=action, gpu=gpu, profile=name, start=slice_.start, holder=slice_.holder
        )

    return [
        *(of(MigAction.DRAIN, slice_) for slice_ in leaving if slice_.hold is MigHold.USED),
        *(of(MigAction.REMOVE, slice_) for slice_ in leaving),
        *(
            MigStep(
                action=MigAction.CREATE,
                gpu=gpu,
                profile=place.profile.name,
                start=place.start,
                holder=holder,
            )
            for place, holder in sorted(made, key=lambda each: each[0].start)
        ),
    ]


_MOST_SHOWN = 3


def arrange(layout: MigLayout, counts: Mapping[str, int]) -> MigPlan | MigImpossible:
    """A plan for exactly these counts of instances, by profile name, on one GPU.

    Foreign instances stay and count. The plan lists drained holders, which the caller may refuse.
    Raises `UsageError` for a count below 0.
    """
    slots = slots_of(layout.profiles)
    wanted = wanted_profiles(slots, counts)
    if isinstance(wanted, MigImpossible):
        return wanted
    fixed = [slice_ for slice_ in layout.slices if slice_.hold is MigHold.FOREIGN]
    missing = _without(wanted, fixed)
    if missing is None:
        return _foreign(slots, fixed, counts)
    movable = [slice_ for slice_ in layout.slices if slice_.hold is not MigHold.FOREIGN]
    best: tuple[tuple[int, int, float], tuple[MigSlice, ...], tuple[Place, ...]] | None = None
    for kept in _subsets(movable):
        more = _without(missing, kept)
        used = sum(slice_.hold is MigHold.USED for slice_ in kept)
        keeps = -used, used - len(kept)
        if best is not None and keeps > best[0][:2]:
            break
        if more is None:
            continue
        taken = TakenSlots.by([*fixed, *kept])
        for places in fillings(slots, taken, more):
            cost = *keeps, scarcity(slots, taken.plus(*places).mask)
            if best is None or cost < best[0]:
                best = cost, kept, places
    if best is None:
        return _too_much(slots, TakenSlots.by(fixed), missing)
    _, kept, places = best
    gone = [slice_ for slice_ in movable if slice_ not in kept]
    made = [(place, "") for place in places]
    return MigPlan(steps=tuple(plan_of(layout.gpu, slots, gone=gone, made=made)))


def wanted_profiles(slots: Slots, counts: Mapping[str, int]) -> list[MigProfile] | MigImpossible:
    """Each profile as often as requested, largest first, so that hard ones fail early."""
    wanted: list[MigProfile] = []
    for name, count in counts.items():
        if count < 0:
            raise UsageError(f"{name}: {count} instances", hint="give 0 or more")
        profile = slots.by_name.get(name)
        if profile is None and count:
            names = ", ".join(slots.by_name) or "no MIG profiles"
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
    """The order in which `fillings` is quickest, with equal profiles together."""
    return sorted(profiles, key=lambda each: (-each.size, len(each.starts), each.number))


def fillings(
    slots: Slots, taken: TakenSlots, wanted: Sequence[MigProfile]
) -> Iterator[tuple[Place, ...]]:
    """Yield all ways to add all of these, up to the order of equal ones.

    `wanted`: equal ones are adjacent.
    """
    hopeless: set[tuple[int, TakenSlots, int]] = set()

    def rest(number: int, used: TakenSlots, after: int) -> Iterator[tuple[Place, ...]]:
        if number == len(wanted):
            yield ()
            return
        key = number, used, after
        if key in hopeless:
            return
        profile, is_possible = wanted[number], False
        for start in slots.starts(profile, used):
            if start <= after:
                continue
            place = Place(profile, start)
            is_equal = number + 1 < len(wanted) and wanted[number + 1] is profile
            for others in rest(number + 1, used.plus(place), start if is_equal else -1):
                is_possible = True
                yield (place, *others)
        if not is_possible:
            hopeless.add(key)

    return rest(0, taken, -1)


def _subsets(movable: Sequence[MigSlice]) -> Iterator[tuple[MigSlice, ...]]:
    """Yield sets that could stay: most used ones first, then most idle ones."""
    used = [each for each in movable if each.hold is MigHold.USED]
    idle = [each for each in movable if each.hold is not MigHold.USED]
    for many in range(len(used), -1, -1):
        for more in range(len(idle), -1, -1):
            for some in combinations(used, many):
                for others in combinations(idle, more):
                    yield *some, *others


def _without(wanted: Sequence[MigProfile], kept: Sequence[MigSlice]) -> list[MigProfile] | None:
    missing = list(wanted)
    for slice_ in kept:
        profile = next((one for one in missing if one.number == slice_.profile), None)
        if profile is None:
            return None
        missing.remove(profile)
    return missing


def _foreign(slots: Slots, fixed: Sequence[MigSlice], counts: Mapping[str, int]) -> MigImpossible:
    instances = [
        f"{profile.name} at slot {slice_.start}"
        for slice_ in fixed
        if (profile := slots.by_number.get(slice_.profile)) is not None
    ]
    asked = format_counts(counts) or "none"
    return MigImpossible(
        reason=f"foreign instances {', '.join(instances)} are in the way of {asked}",
        hint="remove them with the tool that made them, or add them to the request",
    )


def _too_much(slots: Slots, taken: TakenSlots, wanted: Sequence[MigProfile]) -> MigImpossible:
    """No arrangement fits; name the largest parts that would."""
    largest = sorted(
        _largest(slots, taken, wanted),
        key=lambda part: (-sum(profile.size for profile in part), list(_counts(part).items())),
    )
    parts = [format_counts(_counts(part)) for part in largest[:_MOST_SHOWN]]
    beside = " beside foreign instances" if taken.mask else ""
    return MigImpossible(
        reason=f"no slots for {format_counts(_counts(wanted))} at once{beside}",
        hint=f"of these, {' or '.join(parts)} fit" if any(parts) else "",
    )


def _largest(
    slots: Slots, taken: TakenSlots, wanted: Sequence[MigProfile]
) -> Iterator[tuple[MigProfile, ...]]:
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
    return tuple(sorted((*part, one), key=wanted.index))


def _counts(part: Sequence[MigProfile]) -> Counter[str]:
    return Counter(profile.name for profile in part)


def format_counts(counts: Mapping[str, int]) -> str:
    """`2 x 1g.10gb + 1 x 3g.40gb`, without profiles of count 0."""
    return " + ".join(f"{count} x {name}" for name, count in counts.items() if count)
