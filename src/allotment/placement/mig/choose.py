# SPDX-License-Identifier: Apache-2.0
"""Which slices serve a request: GPUs, profiles and starts.

Never refused while a legal place exists. In order of precedence:

1. The smallest serving profile with a place.
2. GPUs with MIG on, if they serve the whole request.
3. An idle instance of exactly that profile.
4. The start with the least loss for later requests (`slots`).
5. The fewest idle instances to remove, then the first GPU, then the lowest start.
"""

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache

import msgspec

from allotment.model.errors import UsageError
from allotment.model.formats import format_bytes, format_percent
from allotment.model.mig import (
    MigHold,
    MigLayout,
    MigProfile,
    MigRequest,
    MigSlice,
    allowed_profiles,
    listed_profiles,
)
from allotment.model.structs import replace
from allotment.placement.mig.slots import Place, Slots, TakenSlots, cover, loss, slots_of


class MigChoice(msgspec.Struct, frozen=True, kw_only=True):
    """One chosen slice."""

    gpu: str
    profile: MigProfile
    start: int
    reused: MigSlice | None = None
    """The idle instance to reuse; None: create one."""
    removes: tuple[MigSlice, ...] = ()
    """Idle instances to remove before creation."""

    @property
    def place(self) -> Place:
        return Place(self.profile, self.start)


class MigRefusal(msgspec.Struct, frozen=True, kw_only=True):
    """Why a request has no place now."""

    request: MigRequest
    reasons: tuple[tuple[str, str], ...]
    """By GPU UUID, in the given order."""

    def __str__(self) -> str:
        if not self.reasons:
            return f"{self.request}: there is no GPU"
        return f"{self.request}: " + "; ".join(f"{gpu}: {why}" for gpu, why in self.reasons)


class _Site:
    """One GPU during the choice."""

    def __init__(self, layout: MigLayout, slots: Slots, profiles: tuple[MigProfile, ...]) -> None:
        self.layout = layout
        self.slots = slots
        self.profiles = profiles
        """Those that serve, the smallest first."""
        self._rooms = _rooms(slots, tuple(profile.number for profile in profiles))
        self.idle = [slice_ for slice_ in layout.slices if slice_.hold is MigHold.IDLE]
        self.taken = TakenSlots.on(layout)

    @property
    def likeness(self) -> tuple[object, ...]:
        """Key under which two GPUs are interchangeable."""
        return id(self.slots), self.taken, tuple((each.profile, each.start) for each in self.idle)

    def room(self, taken: TakenSlots) -> int:
        return self._rooms.of(taken)

    def options(self) -> Iterator[MigChoice]:
        idle = {(slice_.profile, slice_.start): slice_ for slice_ in self.idle}
        for profile in self.profiles:
            starts = self.slots.starts(profile, self.taken)
            for start in starts:
                reused = idle.get((profile.number, start))
                choice = MigChoice(gpu=self.layout.gpu, profile=profile, start=start, reused=reused)
                if reused is None:
                    removes = self.slots.in_the_way(self.idle, self.taken, [choice.place])
                    choice = replace(choice, removes=removes)
                yield choice
            if starts:
                return

    def take(self, choice: MigChoice) -> None:
        gone = (choice.reused, *choice.removes)
        self.idle = [slice_ for slice_ in self.idle if slice_ not in gone]
        self.taken = self.taken.plus(choice.place)


def choose(layouts: Sequence[MigLayout], request: MigRequest) -> tuple[MigChoice, ...] | MigRefusal:
    """Choose slices for the whole request, or explain the refusal.

    A GPU's profiles are those that its driver reports, also while MIG is off. Raises `UsageError`
    for an invalid request.
    """
    _check(request)
    on = [layout for layout in layouts if layout.is_enabled]
    for among in (on, layouts) if len(on) < len(layouts) else (on,):
        sites = _sites(among, request)
        chosen = _all_of(sites, request.count)
        if chosen is not None:
            return tuple(chosen)
    return MigRefusal(
        request=request,
        reasons=tuple(
            (site.layout.gpu, _reason(site, request)) for site in _sites(layouts, request)
        ),
    )


def room_of(layout: MigLayout, request: MigRequest) -> int:
    numbers = tuple(each.number for each in _serving_on(layout, request))
    return _rooms(slots_of(layout.profiles), numbers).of(TakenSlots.on(layout)) if numbers else 0


def is_served(layout: MigLayout, request: MigRequest) -> bool:
    return bool(_serving_on(layout, request))


def reason_of(layout: MigLayout, request: MigRequest) -> str:
    return _reason(_sites([layout], request)[0], request)


def _check(request: MigRequest) -> None:
    problem = ""
    if request.count < 1:
        problem = f"{request.count} slices"
    elif min(request.memory_bytes, request.compute, request.memory_part or 0) < 0:
        problem = "a negative amount of memory or compute"
    if problem:
        raise UsageError(f"a request for {problem} is invalid", hint="ask for 1 or more")


def _sites(layouts: Iterable[MigLayout], request: MigRequest) -> list[_Site]:
    return [
        _Site(layout, slots_of(layout.profiles), _serving_on(layout, request)) for layout in layouts
    ]


def _serving_on(layout: MigLayout, request: MigRequest) -> tuple[MigProfile, ...]:
    # Only groups depend on the model.
    model = layout.model if request.groups else ""
    return _serving(slots_of(layout.profiles), request, model)


@lru_cache(maxsize=1024)
def _serving(slots: Slots, request: MigRequest, model: str) -> tuple[MigProfile, ...]:
    return serving(slots.profiles, request, model=model)


def serving(
    profiles: Iterable[MigProfile], request: MigRequest, *, model: str = ""
) -> tuple[MigProfile, ...]:
    """The profiles that meet a request, smallest first.

    With groups for this model: their allowed profiles, in their order, by configured memory. With
    allow-lists: only listed profiles.

    Memory is the instance's real size, less than its name: 9.6 GiB for `1g.10gb`. Compute is a part
    of the largest profile's multiprocessors.
    """
    every = tuple(profiles)
    most = max((profile.multiprocessors for profile in every), default=0)
    listed = listed_profiles(request.groups, model, every)
    usable = every if listed is None else listed
    allowed = allowed_profiles(request.groups, model, request.memory_bytes)
    if allowed is not None and not request.profile:
        named = {profile.name: profile for profile in usable}
        return tuple(
            named[name]
            for name in allowed
            if name in named and named[name].multiprocessors * 10_000 >= request.compute * most
        )
    least = request.memory_bytes
    if request.memory_part is not None:
        largest = max((profile.memory_bytes for profile in every), default=0)
        least = max(least, int(request.memory_part * largest))
    fitting = (
        profile
        for profile in usable
        if (
            profile.name == request.profile
            if request.profile
            else profile.attributes == request.attributes
        )
        and profile.memory_bytes >= least
        and profile.multiprocessors * 10_000 >= request.compute * most
    )
    return tuple(
        sorted(
            fitting,
            key=lambda profile: (
                profile.size,
                profile.slices,
                profile.memory_bytes,
                profile.number,
            ),
        )
    )


_MOST_LOOKED = 1_000
"""Limit on ways to fill one GPU for one question. No real GPU has 600; made-up profiles can have
millions."""
_MOST_KEPT = 16_384


class _Rooms:
    """Number of instances of some profiles that fit at the same time, by used slots.

    Exact, unless the limit is reached: then a lower bound.
    """

    def __init__(self, slots: Slots, numbers: tuple[int, ...]) -> None:
        self._slots = slots
        self._profiles = [slots.by_number[number] for number in numbers]
        self._known: dict[TakenSlots, int] = {}
        self._left = 0

    def of(self, taken: TakenSlots) -> int:
        known = self._known.get(taken)
        if known is not None:
            return known
        if len(self._known) > _MOST_KEPT:
            self._known.clear()
        self._left = _MOST_LOOKED
        found = self._known[taken] = self._most(taken)
        return found

    def _most(self, taken: TakenSlots) -> int:
        known = self._known.get(taken)
        if known is not None:
            return known
        self._left -= 1
        if self._left < 0:
            return 0
        most = 0
        for profile in self._profiles:
            for start in self._slots.starts(profile, taken):
                most = max(most, 1 + self._most(taken.plus(Place(profile, start))))
        if self._left >= 0:
            self._known[taken] = most
        return most


@lru_cache(maxsize=256)
def _rooms(slots: Slots, numbers: tuple[int, ...]) -> _Rooms:
    return _Rooms(slots, numbers)


def _all_of(sites: Sequence[_Site], count: int) -> list[MigChoice] | None:
    """Choose one after the other, so that the rest always has a place."""
    totals = _totals(sites)
    chosen: list[MigChoice] = []
    for left in range(count - 1, -1, -1):
        # The last slice has no successor to leave room for, nor has a single one.
        spare = sum(each.room(each.taken) for each in sites) - left if left else None
        best = _best(sites, totals, spare=spare)
        if best is None:
            return None
        site, choice = best
        before = site.slots.rooms(site.taken.mask)
        site.take(choice)
        after = site.slots.rooms(site.taken.mask)
        for shape, room in before.items():
            totals[shape] += after[shape] - room
        chosen.append(choice)
    return chosen


def _totals(sites: Iterable[_Site]) -> dict[str, int]:
    totals: dict[str, int] = {}
    for site in sites:
        for shape, room in site.slots.rooms(site.taken.mask).items():
            totals[shape] = totals.get(shape, 0) + room
    return totals


def _best(
    sites: Iterable[_Site], totals: dict[str, int], *, spare: int | None
) -> tuple[_Site, MigChoice] | None:
    """The best choice of all, with its GPU; None: no place is free.

    `spare`: how many serving places may be lost with it, itself included; None: any number.
    """
    best: tuple[_Site, MigChoice] | None = None
    least: tuple[bool, float, int] | None = None
    seen: set[tuple[object, ...]] = set()
    for site in sites:
        likeness = site.likeness
        if likeness in seen:
            continue
        seen.add(likeness)
        for option in site.options():
            after = site.taken.plus(option.place)
            if spare is not None and site.room(site.taken) - site.room(after) > spare:
                continue
            cost = (
                option.reused is None,
                loss(site.slots, totals, before=site.taken.mask, after=after.mask),
                len(option.removes),
            )
            if least is None or cost < least:
                best, least = (site, option), cost
    return best


def _reason(site: _Site, request: MigRequest) -> str:
    names = ", ".join(each.name for each in site.slots.profiles)
    if not site.slots.profiles:
        return "has no MIG"
    if not site.profiles:
        if request.profile and request.profile not in site.slots.by_name:
            return f"has no profile {request.profile}, but {names}"
        if serving(site.slots.profiles, replace(request, groups=())):
            listed = listed_profiles(request.groups, site.layout.model, site.slots.profiles)
            if listed is not None:
                allowed = ", ".join(each.name for each in listed) or "no profile"
                return f"may only be cut into {allowed}, by the administrator's list"
        return _too_small(site.slots, request)
    room = site.room(site.taken)
    if room:
        return f"has room for {room} of {request.count}"
    profile = site.profiles[0]
    if not site.slots.may_be_more(profile, site.taken.numbers):
        why = f"has the most {profile.name} or profiles with its engines that fit"
    else:
        starts = ", ".join(map(str, profile.starts))
        why = f"{profile.name} can start at slot {starts}"
    return f"{why}: {_taken_by(site.layout.slices, profile)}"


def _too_small(slots: Slots, request: MigRequest) -> str:
    among = [profile for profile in slots.profiles if profile.attributes == request.attributes]
    if request.profile:
        among = [slots.by_name[request.profile]]
    if not among:
        return f"has no profile with {request.attributes}"
    largest = max(among, key=lambda each: (each.memory_bytes, each.multiprocessors))
    most = max(profile.multiprocessors for profile in slots.profiles)
    compute = format_percent(10_000 * largest.multiprocessors // most)
    has = f"{largest.name} has {format_bytes(largest.memory_bytes)} and {compute} %"
    if not request.profile:
        return f"{has} at most"
    lacks = [format_bytes(request.memory_bytes)] * (request.memory_bytes > largest.memory_bytes)
    if largest.multiprocessors * 10_000 < request.compute * most:
        lacks.append(f"{format_percent(request.compute)} %")
    return f"{has}, need {' and '.join(lacks)}"


def _taken_by(slices: Iterable[MigSlice], profile: MigProfile) -> str:
    wanted = 0
    for start in profile.starts:
        wanted |= cover(start, profile.size)
    parts = []
    for each in sorted(slices, key=lambda each: each.start):
        if each.hold is MigHold.IDLE or not cover(each.start, each.size) & wanted:
            continue
        last = each.start + each.size - 1
        where = f"slot {each.start}" if each.size == 1 else f"slots {each.start}-{last}"
        whose = each.holder or ("others" if each.hold is MigHold.FOREIGN else "another process")
        parts.append(f"{where} of {whose}")
    return ", ".join(parts)
