# SPDX-License-Identifier: Apache-2.0
"""Where instances may begin: a GPU's memory slots as the bits of a number.

The rules are two, and both are the driver's own figures: an instance covers `size` slots from one
of its profile's starts, and no slot is covered twice; and there are never more of a profile than
its `most`, nor more instances with the scarce media engines than the highest `most` among profiles
that take them. In every state that these allow, the compute slices fit as well: they need no rule.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Final, NamedTuple

from allotment.model.mig import MigProfile, MigSlice

__all__ = ["Place", "Slots", "Taken", "cover", "slots_of"]


def cover(start: int, size: int) -> int:
    """Return the slots from `start` on, as bits."""
    return ((1 << size) - 1) << start


class Place(NamedTuple):
    """An instance that is to be: what of, and where."""

    profile: MigProfile
    start: int

    @property
    def mask(self) -> int:
        """The slots that it covers, as bits."""
        return cover(self.start, self.profile.size)


class Taken(NamedTuple):
    """What of a GPU is in use, as far as it matters for what else fits."""

    mask: int = 0
    """Covered slots, as bits."""
    numbers: tuple[int, ...] = ()
    """The profiles' numbers, ascending: as often as there are instances of them."""

    @classmethod
    def by(cls, slices: Iterable[MigSlice]) -> "Taken":
        """Return what these take together."""
        there = tuple(slices)
        mask = 0
        for each in there:
            mask |= cover(each.start, each.size)
        return cls(mask, tuple(sorted(each.profile for each in there)))

    def plus(self, place: Place) -> "Taken":
        """Return it with one more instance."""
        return Taken(self.mask | place.mask, tuple(sorted((*self.numbers, place.profile.number))))


class Slots:
    """The profiles of one GPU model, and what their starts allow. One object for all such GPUs."""

    def __init__(self, profiles: Sequence[MigProfile]) -> None:
        """Take the profiles as the driver reports them."""
        self.profiles = tuple(profiles)
        self.by_number: Mapping[int, MigProfile] = {each.number: each for each in self.profiles}
        self.by_name: Mapping[str, MigProfile] = {each.name: each for each in self.profiles}
        self._media = frozenset(each.number for each in self.profiles if each.has_media)
        self._most_media = max((each.most for each in self.profiles if each.has_media), default=0)
        shapes: dict[str, tuple[int, set[int]]] = {}
        for each in self.profiles:
            shapes.setdefault(each.shape, (each.size, set()))[1].update(each.starts)
        self._shapes = {
            name: (size, tuple(sorted(starts))) for name, (size, starts) in shapes.items()
        }
        self._rooms: dict[int, Mapping[str, int]] = {}
        self._starts: dict[tuple[int, Taken], tuple[int, ...]] = {}

    def starts(self, profile: MigProfile, taken: Taken) -> tuple[int, ...]:
        """Return where one more instance of a profile may begin, ascending."""
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
        """Tell whether there can be one more of a profile beside these, wherever they are."""
        if numbers.count(profile.number) >= profile.most:
            return False
        return not profile.has_media or (
            sum(number in self._media for number in numbers) < self._most_media
        )

    def in_the_way(
        self, idle: Iterable[MigSlice], taken: Taken, places: Iterable[Place]
    ) -> tuple[MigSlice, ...]:
        """Return the idle instances that cannot stay beside new ones.

        `taken`: by all that stays, without the idle ones.
        """
        after = taken
        for place in places:
            after = after.plus(place)
        gone = []
        for each in idle:
            profile = self.by_number.get(each.profile)
            may_stay = profile is None or self.may_be_more(profile, after.numbers)
            if may_stay and not after.mask & cover(each.start, each.size):
                after = Taken(after.mask, (*after.numbers, each.profile))
            else:
                gone.append(each)
        return tuple(gone)

    def rooms(self, mask: int) -> Mapping[str, int]:
        """Return how many instances of each shape fit at once beside covered slots.

        By shape, not by profile: `1g.10gb+me` goes where `1g.10gb` goes, and how many media engines
        are left says nothing about slots.
        """
        known = self._rooms.get(mask)
        if known is None:
            known = self._rooms[mask] = {
                name: _most_apart(size, starts, mask)
                for name, (size, starts) in self._shapes.items()
            }
        return known


def _most_apart(size: int, starts: Iterable[int], mask: int) -> int:
    """Count as many free places as do not overlap: the earliest first, which is exact."""
    count = 0
    for start in starts:
        own = cover(start, size)
        if not mask & own:
            mask |= own
            count += 1
    return count


_MOST_KNOWN: Final = 256
_known: dict[int, tuple[tuple[MigProfile, ...], Slots]] = {}
"""By identity: GPUs that were read together have the very same profiles, and to compare these takes
longer than most of what is asked."""


def slots_of(profiles: tuple[MigProfile, ...]) -> Slots:
    """Return the one `Slots` of these profiles: what it has worked out stays known."""
    found = _known.get(id(profiles))
    if found is None or found[0] is not profiles:
        if len(_known) >= _MOST_KNOWN:
            _known.clear()
        found = _known[id(profiles)] = profiles, _slots_of_equal(profiles)
    return found[1]


@lru_cache(maxsize=64)
def _slots_of_equal(profiles: tuple[MigProfile, ...]) -> Slots:
    return Slots(profiles)
