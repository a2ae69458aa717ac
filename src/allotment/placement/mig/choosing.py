# SPDX-License-Identifier: Apache-2.0
"""Which slices serve a request: on which GPUs, of which profile, from which start.

Never refused while a legal place exists. In this order:

1. The smallest profile of the GPU that serves the request and has a place there.
2. GPUs whose MIG mode is on; the others only when these cannot serve all of the request.
3. An idle instance of exactly that profile: it is ready at once. A larger idle one is not given:
   what it has too much would be lost for as long as the slice lives, to save seconds once.
4. The start, on whichever GPU, with the least loss of what else is possible (`scarcity`). Idle
   instances do not count as being there: they are kept to save time, not to keep slots.
5. Of equal ones, the one for which fewer idle instances must go, then the first GPU, lowest start.

Nothing that fits is refused for the sake of what may come: only places are chosen.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from allotment.model.errors import UsageError
from allotment.model.formats import format_bytes, format_percent
from allotment.model.mig import MigHold, MigLayout, MigProfile, MigRequest, MigSlice
from allotment.model.mig_groups import allowed_profiles, listed_profiles
from allotment.placement.mig.scarcity import loss
from allotment.placement.mig.slots import Place, Slots, Taken, cover, slots_of

__all__ = [
    "MigChoice",
    "MigRefusal",
    "choose",
    "is_served",
    "reason_of",
    "room_of",
    "serving",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class MigChoice:
    """One slice that was chosen."""

    gpu: str
    profile: MigProfile
    start: int
    reused: MigSlice | None = None
    """The idle instance that is taken as it is; None: one is to be made."""
    removes: tuple[MigSlice, ...] = ()
    """Idle instances that must go before it can be made."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MigRefusal:
    """Why a request has no place now."""

    request: MigRequest
    reasons: tuple[tuple[str, str], ...]
    """By GPU's UUID, in the order in which they were given."""

    def __str__(self) -> str:
        """Say it in a line."""
        if not self.reasons:
            return f"{self.request}: there is no GPU"
        return f"{self.request}: " + "; ".join(f"{gpu}: {why}" for gpu, why in self.reasons)


class _Site:
    """One GPU while slices are being chosen."""

    def __init__(self, layout: MigLayout, slots: Slots, profiles: tuple[MigProfile, ...]) -> None:
        self.layout = layout
        self.slots = slots
        self.profiles = profiles
        """Those that serve, the smallest first."""
        self._rooms = _rooms(slots, tuple(each.number for each in profiles))
        self.idle = [each for each in layout.slices if each.hold is MigHold.IDLE]
        self.taken = Taken.by(each for each in layout.slices if each.hold is not MigHold.IDLE)

    @property
    def likeness(self) -> tuple[object, ...]:
        """What two GPUs have the same of if it does not matter which of them is taken."""
        return id(self.slots), self.taken, tuple((each.profile, each.start) for each in self.idle)

    def room(self, taken: Taken) -> int:
        """Return how many serving instances fit at once."""
        return self._rooms.of(taken)

    def options(self) -> "Iterator[_Option]":
        """Yield what the smallest serving profile with a place could have here."""
        for profile in self.profiles:
            starts = self.slots.starts(profile, self.taken)
            for start in starts:
                reused = next(
                    (
                        each
                        for each in self.idle
                        if (each.profile, each.start) == (profile.number, start)
                    ),
                    None,
                )
                place = Place(profile, start)
                removed = self._removed(place) if reused is None else ()
                yield _Option(self, place, reused, removed)
            if starts:
                return

    def _removed(self, place: Place) -> tuple[MigSlice, ...]:
        return self.slots.in_the_way(self.idle, self.taken, [place])

    def take(self, option: "_Option") -> None:
        gone = {id(each) for each in (option.reused, *option.removed)}
        self.idle = [each for each in self.idle if id(each) not in gone]
        self.taken = self.taken.plus(option.place)


class _Option(NamedTuple):
    site: _Site
    place: Place
    reused: MigSlice | None
    removed: tuple[MigSlice, ...]


def choose(layouts: Sequence[MigLayout], request: MigRequest) -> tuple[MigChoice, ...] | MigRefusal:
    """Choose slices for all of a request, or say why there are none.

    The profiles of a GPU are those that its driver reports, also while its mode is off. Raises
    `UsageError` where a request cannot be meant.
    """
    _check(request)
    on = [each for each in layouts if each.is_enabled]
    for among in (on, layouts) if len(on) < len(layouts) else (on,):
        sites = _sites(among, request)
        chosen = _all_of(sites, request.count)
        if chosen is not None:
            return tuple(
                MigChoice(
                    gpu=each.site.layout.gpu,
                    profile=each.place.profile,
                    start=each.place.start,
                    reused=each.reused,
                    removes=each.removed,
                )
                for each in chosen
            )
    return MigRefusal(
        request=request,
        reasons=tuple(
            (each.layout.gpu, _reason(each, request)) for each in _sites(layouts, request)
        ),
    )


def room_of(layout: MigLayout, request: MigRequest) -> int:
    """Return how many slices that serve a request could be had of a GPU at once."""
    numbers = tuple(each.number for each in _serving_on(layout, request))
    taken = Taken.by(each for each in layout.slices if each.hold is not MigHold.IDLE)
    return _rooms(slots_of(layout.profiles), numbers).of(taken) if numbers else 0


def is_served(layout: MigLayout, request: MigRequest) -> bool:
    """Tell whether a GPU has any profile that serves a request, be there room or not."""
    return bool(_serving_on(layout, request))


def reason_of(layout: MigLayout, request: MigRequest) -> str:
    """Say why a GPU has no place for one such slice."""
    return _reason(_sites([layout], request)[0], request)


def _check(request: MigRequest) -> None:
    problem = ""
    if request.count < 1:
        problem = f"{request.count} slices"
    elif min(request.memory_bytes, request.compute, request.memory_part or 0) < 0:
        problem = "less than nothing of memory or compute"
    if problem:
        raise UsageError(f"a request for {problem} cannot be meant", hint="ask for 1 or more")


def _sites(layouts: Iterable[MigLayout], request: MigRequest) -> list[_Site]:
    return [_Site(each, slots_of(each.profiles), _serving_on(each, request)) for each in layouts]


def _serving_on(layout: MigLayout, request: MigRequest) -> tuple[MigProfile, ...]:
    # Groups are by model, and nothing else is.
    model = layout.model if request.groups else ""
    return _serving(slots_of(layout.profiles), request, model)


@lru_cache(maxsize=1024)
def _serving(slots: Slots, request: MigRequest, model: str) -> tuple[MigProfile, ...]:
    return serving(slots.profiles, request, model=model)


def serving(
    profiles: Iterable[MigProfile], request: MigRequest, *, model: str = ""
) -> tuple[MigProfile, ...]:
    """Return the profiles that have what a request asks for at least, the smallest first.

    Where it comes with groups of slices for GPUs of this model, those that they allow, in their
    order, and by what is written there of memory. With lists of profiles, no others.

    Memory is what the driver says that an instance has, which is less than its name: 9.6 GiB of a
    `1g.10gb`. Compute is a part of the largest profile's multiprocessors.
    """
    every = tuple(profiles)
    most = max((each.multiprocessors for each in every), default=0)
    listed = listed_profiles(request.groups, model)
    there = tuple(each for each in every if listed is None or each.name in listed)
    allowed = allowed_profiles(request.groups, model, request.memory_bytes)
    if allowed is not None and not request.profile:
        named = {each.name: each for each in there}
        return tuple(
            named[name]
            for name in allowed
            if name in named and named[name].multiprocessors * 10_000 >= request.compute * most
        )
    least = request.memory_bytes
    if request.memory_part is not None:
        largest = max((each.memory_bytes for each in every), default=0)
        least = max(least, int(request.memory_part * largest))
    fitting = (
        each
        for each in there
        if (
            each.name == request.profile
            if request.profile
            else each.attributes == request.attributes
        )
        and each.memory_bytes >= least
        and each.multiprocessors * 10_000 >= request.compute * most
    )
    return tuple(
        sorted(fitting, key=lambda each: (each.size, each.slices, each.memory_bytes, each.number))
    )


_MOST_LOOKED = 1_000
"""Ways to fill one GPU that are looked at for one question. No real one has 600 of them; profiles
that somebody made up can have millions."""
_MOST_KEPT = 16_384


class _Rooms:
    """How many instances of some profiles fit at once, by what is taken.

    Exact, unless there is more to look at than any GPU has: then as many as have been found.
    """

    def __init__(self, slots: Slots, numbers: tuple[int, ...]) -> None:
        self._slots = slots
        self._profiles = [slots.by_number[each] for each in numbers]
        self._known: dict[Taken, int] = {}
        self._left = 0

    def of(self, taken: Taken) -> int:
        """Return how many more fit."""
        known = self._known.get(taken)
        if known is not None:
            return known
        if len(self._known) > _MOST_KEPT:
            self._known.clear()
        self._left = _MOST_LOOKED
        found = self._known[taken] = self._most(taken)
        return found

    def _most(self, taken: Taken) -> int:
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


def _all_of(sites: Sequence[_Site], count: int) -> list[_Option] | None:
    """Choose one after the other, each so that the rest still has its place."""
    totals = _totals(sites)
    chosen: list[_Option] = []
    for left in range(count - 1, -1, -1):
        # The last one has nobody to leave room for, and so has a request for one alone.
        spare = sum(each.room(each.taken) for each in sites) - left if left else None
        option = _best(sites, totals, spare=spare)
        if option is None:
            return None
        site = option.site
        before = site.slots.rooms(site.taken.mask)
        site.take(option)
        after = site.slots.rooms(site.taken.mask)
        for shape, room in before.items():
            totals[shape] += after[shape] - room
        chosen.append(option)
    return chosen


def _totals(sites: Iterable[_Site]) -> dict[str, int]:
    totals: dict[str, int] = {}
    for site in sites:
        for shape, room in site.slots.rooms(site.taken.mask).items():
            totals[shape] = totals.get(shape, 0) + room
    return totals


def _best(sites: Iterable[_Site], totals: dict[str, int], *, spare: int | None) -> _Option | None:
    """Return the best place of all; None: there is none.

    `spare`: how many places that serve may be lost with it, itself included; None: any number.
    """
    best: _Option | None = None
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
                len(option.removed),
            )
            if least is None or cost < least:
                best, least = option, cost
    return best


def _reason(site: _Site, request: MigRequest) -> str:
    """Say why a GPU has no place, or not enough of them."""
    names = ", ".join(each.name for each in site.slots.profiles)
    if not site.slots.profiles:
        return "has no MIG"
    if not site.profiles:
        if request.profile and request.profile not in site.slots.by_name:
            return f"has no profile {request.profile}, but {names}"
        if serving(site.slots.profiles, replace(request, groups=())):
            listed = listed_profiles(request.groups, site.layout.model)
            if listed is not None:
                allowed = ", ".join(listed) or "no profile"
                return f"may be cut into {allowed} and nothing else, by its administrator's list"
        return _too_small(site.slots, request)
    room = site.room(site.taken)
    if room:
        return f"has room for {room} of {request.count}"
    profile = site.profiles[0]
    if not site.slots.may_be_more(profile, site.taken.numbers):
        why = f"has as many {profile.name} or others with its engines as it can have"
    else:
        starts = ", ".join(map(str, profile.starts))
        why = f"{profile.name} may begin at slot {starts}"
    return f"{why}: {_taken_by(site.layout.slices, profile)}"


def _too_small(slots: Slots, request: MigRequest) -> str:
    among = [each for each in slots.profiles if each.attributes == request.attributes]
    if request.profile:
        among = [slots.by_name[request.profile]]
    if not among:
        return f"has no profile with {request.attributes}"
    largest = max(among, key=lambda each: (each.memory_bytes, each.multiprocessors))
    most = max(each.multiprocessors for each in slots.profiles)
    compute = format_percent(10_000 * largest.multiprocessors // most)
    has = f"{largest.name} has {format_bytes(largest.memory_bytes)} and {compute} %"
    if not request.profile:
        return f"{has} and no more"
    lacks = [format_bytes(request.memory_bytes)] * (request.memory_bytes > largest.memory_bytes)
    if largest.multiprocessors * 10_000 < request.compute * most:
        lacks.append(f"{format_percent(request.compute)} %")
    return f"{has}, and is to have {' and '.join(lacks)}"


def _taken_by(slices: Iterable[MigSlice], profile: MigProfile) -> str:
    """Name what stands where a profile could be."""
    wanted = 0
    for start in profile.starts:
        wanted |= cover(start, profile.size)
    parts = []
    for each in sorted(slices, key=lambda each: each.start):
        if each.hold is MigHold.IDLE or not cover(each.start, each.size) & wanted:
            continue
        last = each.start + each.size - 1
        where = f"slot {each.start}" if each.size == 1 else f"slots {each.start}-{last}"
        whose = each.holder or ("others" if each.hold is MigHold.FOREIGN else "somebody")
        parts.append(f"{where} of {whose}")
    return ", ".join(parts)
