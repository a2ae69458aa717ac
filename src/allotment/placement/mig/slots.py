# SPDX-License-Identifier: Apache-2.0
"""Where instances may start: a GPU's memory slots as bits of an integer.

Both rules use the driver's figures. An instance covers `size` slots from one of its profile's
starts, without overlap. A profile has at most `most` instances, and profiles with scarce media
engines share the highest `most` among them. Compute slices then always fit.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Final, NamedTuple

from allotment.model.mig import MigHold, MigLayout, MigProfile, MigSlice


def cover(start: int, size: int) -> int:
    return ((1 << size) - 1) << start


class Place(NamedTuple):
    """A planned instance: profile and start."""

    profile: MigProfile
    start: int

    @property
    def mask(self) -> int:
        return cover(self.start, self.profile.size)


class TakenSlots(NamedTuple):
    """What is in use on a GPU, reduced to what affects further instances."""

    mask: int = 0
    """Covered slots, as bits."""
    numbers: tuple[int, ...] = ()
    """Profile ids, ascending, one for each instance."""

    @classmethod
    def by(cls, slices: Iterable[MigSlice]) -> "TakenSlots":
        users = tuple(slices)
        mask = 0
        for slice_ in users:
            mask |= cover(slice_.start, slice_.size)
        return cls(mask, tuple(sorted(slice_.profile for slice_ in users)))

    @classmethod
    def on(cls, layout: MigLayout) -> "TakenSlots":
        """What all slices of a GPU but the idle ones use."""
        return cls.by(slice_ for slice_ in layout.slices if slice_.hold is not MigHold.IDLE)

    def plus(self, *places: Place) -> "TakenSlots":
        mask = self.mask
        for place in places:
            mask |= place.mask
        numbers = (*self.numbers, *(place.profile.number for place in places))
        return TakenSlots(mask, tuple(sorted(numbers)))


class Slots:
    """The profiles of one GPU model and the rules of their starts. All such GPUs share it."""

    def __init__(self, profiles: Sequence[MigProfile]) -> None:
        self.profiles = tuple(profiles)
        self.by_number: Mapping[int, MigProfile] = {
            profile.number: profile for profile in self.profiles
        }
        self.by_name: Mapping[str, MigProfile] = {
            profile.name: profile for profile in self.profiles
        }
        self._media = frozenset(profile.number for profile in self.profiles if profile.has_media)
        self._most_media = max(
            (profile.most for profile in self.profiles if profile.has_media), default=0
        )
        shapes: dict[str, tuple[int, set[int]]] = {}
        for profile in self.profiles:
            shapes.setdefault(profile.shape, (profile.size, set()))[1].update(profile.starts)
        self._shapes = {
            name: (size, tuple(sorted(starts))) for name, (size, starts) in shapes.items()
        }
        self._rooms: dict[int, Mapping[str, int]] = {}
        self._starts: dict[tuple[int, TakenSlots], tuple[int, ...]] = {}

    def starts(self, profile: MigProfile, taken: TakenSlots) -> tuple[int, ...]:
        """The free starts for one more instance, ascending."""
        key = profile.number, taken
        known = self._starts.get(key)
        if known is None:
            known = self._starts[key] = (
                tuple(
                    start for start in profile.starts if not taken.mask & cover(start, profile.size)
                )
                if self.may_be_more(profile, taken.numbers)
                else ()
            )
        return known

    def may_be_more(self, profile: MigProfile, numbers: Sequence[int]) -> bool:
        """True if the profile's count allows one more, regardless of slots."""
        if numbers.count(profile.number) >= profile.most:
            return False
        return not profile.has_media or (
            sum(number in self._media for number in numbers) < self._most_media
        )

    def in_the_way(
        self, idle: Iterable[MigSlice], taken: TakenSlots, places: Iterable[Place]
    ) -> tuple[MigSlice, ...]:
        """The idle instances that conflict with new ones.

        `taken`: by all others that stay.
        """
        after = taken.plus(*places)
        gone = []
        for each in idle:
            profile = self.by_number.get(each.profile)
            may_stay = profile is None or self.may_be_more(profile, after.numbers)
            if may_stay and not after.mask & cover(each.start, each.size):
                after = TakenSlots(after.mask, (*after.numbers, each.profile))
            else:
                gone.append(each)
        return tuple(gone)

    def rooms(self, mask: int) -> Mapping[str, int]:
        """Number of instances of each shape that fit at the same time beside covered slots.

        By shape, not profile: `1g.10gb+me` fits where `1g.10gb` fits, and media engines do not
        affect slots.
        """
        known = self._rooms.get(mask)
        if known is None:
            known = self._rooms[mask] = {
                name: _most_apart(size, starts, mask)
                for name, (size, starts) in self._shapes.items()
            }
        return known


def _most_apart(size: int, starts: Iterable[int], mask: int) -> int:
    """Number of free places without overlap: earliest first, which is exact."""
    count = 0
    for start in starts:
        own = cover(start, size)
        if not mask & own:
            mask |= own
            count += 1
    return count


_MOST_KNOWN: Final = 256
_known: dict[int, tuple[tuple[MigProfile, ...], Slots]] = {}
"""By identity: GPUs read together share the profile objects, and comparing them is slow."""


def slots_of(profiles: tuple[MigProfile, ...]) -> Slots:
    found = _known.get(id(profiles))
    if found is None or found[0] is not profiles:
        if len(_known) >= _MOST_KNOWN:
            _known.clear()
        found = _known[id(profiles)] = profiles, _slots_of_equal(profiles)
    return found[1]


@lru_cache(maxsize=64)
def _slots_of_equal(profiles: tuple[MigProfile, ...]) -> Slots:
    return Slots(profiles)


_DIGITS = 12
"""Sums are rounded to this many decimals, so that equal losses are equal in any order."""


def loss(slots: Slots, totals: Mapping[str, int], *, before: int, after: int) -> float:
    """The loss when covered slots change from `before` to `after`.

    `totals`: instances of each shape that fit on all GPUs in question.
    """
    then = slots.rooms(after)
    lost = 0.0
    for shape, room in slots.rooms(before).items():
        gone = room - then[shape]
        if gone:
            total = totals[shape]
            lost += gone / ((total + 1) * (total + 1 - gone))
    return round(lost, _DIGITS)


def scarcity(slots: Slots, mask: int) -> float:
    return round(sum(1 / (room + 1) for room in slots.rooms(mask).values()), _DIGITS)
