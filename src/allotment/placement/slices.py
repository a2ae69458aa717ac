# SPDX-License-Identifier: Apache-2.0
"""Sets of slices for one request, over the GPUs of one node: every one that may be had.

The first is what `mig.choose` takes. Where that leaves none for another container of the pod, the
others follow: all sets there are but for those that differ by GPUs that are alike, and those with a
larger slice where a smaller one that serves as well would be in it. Those that the pod has already,
for a container that is never in use at once with this one, come first: they are there anyway.
"""

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from allotment.model.mig import MigHold, MigLayout, MigProfile, MigRequest
from allotment.placement.mig import MigRefusal, choose, serving
from allotment.placement.mig.scarcity import loss
from allotment.placement.mig.slots import Place, Slots, Taken, cover, slots_of
from allotment.placement.selections import Effort

__all__ = ["Cut", "Site", "slice_sets"]


class Site(NamedTuple):
    """A GPU that has room for one of the slices at least."""

    column: int
    layout: MigLayout
    alike: Hashable
    """GPUs with the same are as good as each other. None: it is alone."""
    handed_on: tuple[tuple[MigProfile, int], ...] = ()
    """Slices of the pod itself that serve and that may be had as well, the smallest first."""


class Cut(NamedTuple):
    """A slice that may be had."""

    column: int
    profile: MigProfile
    start: int


def slice_sets(
    groups: Sequence[Sequence[Site]],
    request: MigRequest,
    *,
    effort: Effort,
    may_join: Callable[[int, int], bool],
    tries_larger: bool = False,
) -> Iterator[tuple[Cut, ...]]:
    """Yield the sets that may be taken together.

    `groups`: GPUs that may be chosen from together, those that are liked best first; the last has
    all of them. `may_join`: may one container have slices of both of these? `tries_larger`: also
    larger ones than are asked for, which other containers of the pod may have in turn. Ends early
    when the effort is spent.
    """
    # What the pod has anyway is not what one machine would choose.
    has_own = any(site.handed_on for site in groups[-1])
    for sites in () if has_own else groups:
        chosen = choose([each.layout for each in sites], request)
        if isinstance(chosen, MigRefusal):
            continue
        columns = {each.layout.gpu: each.column for each in sites}
        cuts = tuple(Cut(columns[each.gpu], each.profile, each.start) for each in chosen)
        if all(may_join(one.column, other.column) for one in cuts for other in cuts):
            effort.left -= 1
            yield cuts
    yield from _All(groups[-1], request, effort, may_join, tries_larger=tries_larger).sets()


@dataclass(frozen=True, slots=True)
class _Known:
    """What a GPU has by itself."""

    site: Site
    slots: Slots
    taken: Taken


class _All:
    """All sets of slices, each once."""

    def __init__(
        self,
        sites: Sequence[Site],
        request: MigRequest,
        effort: Effort,
        may_join: Callable[[int, int], bool],
        *,
        tries_larger: bool,
    ) -> None:
        self._request = request
        self._tries_larger = tries_larger
        self._effort = effort
        self._may_join = may_join
        known: dict[int, Slots] = {}
        self._sites: dict[int, _Known] = {}
        totals: dict[str, int] = {}
        for site in sites:
            profiles = site.layout.profiles
            slots = known.get(id(profiles)) or known.setdefault(id(profiles), slots_of(profiles))
            taken = Taken.by(each for each in site.layout.slices if each.hold is not MigHold.IDLE)
            self._sites[site.column] = _Known(site, slots, taken)
            for shape, room in slots.rooms(taken.mask).items():
                totals[shape] = totals.get(shape, 0) + room
        options = [each for there in self._sites.values() for each in self._of(there, totals)]
        self._options = [cut for _, cut in sorted(options, key=lambda option: option[0])]

    def sets(self) -> Iterator[tuple[Cut, ...]]:
        """Yield them, the best single slices first."""
        return self._extend((), 0, {})

    def _of(self, there: _Known, totals: dict[str, int]) -> Iterator[tuple[tuple[float, ...], Cut]]:
        """Yield what can be had of one GPU, each with what it is compared by."""
        site, slots, taken = there.site, there.slots, there.taken
        idle = {
            (each.profile, each.start) for each in site.layout.slices if each.hold is MigHold.IDLE
        }
        for order, (profile, start) in enumerate(site.handed_on):
            yield (False, order, site.column), Cut(site.column, profile, start)
        profiles = serving(slots.profiles, self._request, model=site.layout.model)
        for rank, profile in enumerate(profiles):
            for start in slots.starts(profile, taken):
                own = cover(start, profile.size)
                is_within = any(_covers(own, slots, each, taken) for each in profiles[:rank])
                if is_within and not self._tries_larger:
                    continue
                after = taken.plus(Place(profile, start))
                lost = loss(slots, totals, before=taken.mask, after=after.mask)
                is_cut = (profile.number, start) not in idle
                # Behind those that the pod has.
                key = (not site.layout.is_enabled, rank, is_cut, lost, site.column, start)
                yield (True, *key), Cut(site.column, profile, start)

    def _extend(
        self, chosen: tuple[Cut, ...], first: int, more: dict[int, Taken]
    ) -> Iterator[tuple[Cut, ...]]:
        if len(chosen) == self._request.count:
            yield chosen
            return
        tried: set[Hashable] = set()
        for number in range(first, len(self._options)):
            if self._effort.is_spent:
                return
            cut = self._options[number]
            there = self._sites[cut.column]
            taken = more.get(cut.column, there.taken)
            is_there = (cut.profile, cut.start) in there.site.handed_on
            if not is_there and cut.start not in there.slots.starts(cut.profile, taken):
                continue
            if not all(self._may_join(cut.column, each.column) for each in chosen):
                continue
            likeness = (there.site.alike, cut.profile.number, cut.start)
            is_fresh = there.site.alike is not None and cut.column not in more
            if is_fresh and likeness in tried:
                continue
            self._effort.left -= 1
            then = taken if is_there else taken.plus(Place(cut.profile, cut.start))
            yield from self._extend((*chosen, cut), number + 1, {**more, cut.column: then})
            if is_fresh:
                tried.add(likeness)


def _covers(own: int, slots: Slots, smaller: MigProfile, taken: Taken) -> bool:
    """Tell whether one of a smaller profile could be within these slots, and keep nobody out.

    Who takes the larger one in its place takes those slots, and more. It could keep somebody out
    who wants another of its profile, if there can be fewer of that than have room.
    """
    if smaller.has_media or smaller.most < slots.rooms(0)[smaller.shape]:
        return False
    return any(cover(start, smaller.size) & ~own == 0 for start in slots.starts(smaller, taken))
