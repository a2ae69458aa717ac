# SPDX-License-Identifier: Apache-2.0
"""Sets of distinct devices, or of slices, for one request: the best first.

Sets follow the order of preferred devices. The enumeration is complete and prunes forbidden sets
(NUMA, links, host memory) early. Sets that differ only by equal devices appear once: eight of
sixteen equal GPUs is one set, not 12,870.
"""

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import msgspec

from allotment.model.mig import MigHold, MigLayout, MigProfile, MigRequest
from allotment.model.placements import Verdict
from allotment.model.requests import Request
from allotment.placement.constraints import Links, may_join
from allotment.placement.mig import MigRefusal, choose, serving
from allotment.placement.mig.slots import Place, Slots, TakenSlots, cover, loss, slots_of


class Effort(msgspec.Struct):
    """How many more sets, whole and partial, may be examined."""

    left: int

    @property
    def is_spent(self) -> bool:
        """True once a set was skipped."""
        return self.left <= 0

    @contextmanager
    def part(self, most: int) -> Iterator["Effort"]:
        """Lend one of several searches a part of it, and subtract what that used."""
        lent = Effort(max(0, min(self.left, most)))
        before = lent.left
        try:
            yield lent
        finally:
            self.left -= before - lent.left


class Candidate(msgspec.Struct, frozen=True):
    """A device that fits alone."""

    verdict: Verdict
    on_host: int = 0
    """Additional host memory behind it."""
    alike: Hashable = None
    """Devices with equal keys are interchangeable. None: unique."""

    @property
    def uuid(self) -> str:
        return self.verdict.state.device.uuid


def selections(
    candidates: Sequence[Candidate],
    request: Request,
    *,
    host_budget: int,
    effort: Effort,
    links: Links,
) -> Iterator[tuple[Candidate, ...]]:
    """Yield the sets of `request.count` devices that fit together.

    `host_budget` is the host memory for them, in bytes. Ends early when the effort is spent.
    """
    return _extend((), candidates, _Rules(request, host_budget, effort, links))


class _Rules(msgspec.Struct, frozen=True):
    request: Request
    host_budget: int
    effort: Effort
    links: Links


def _extend(
    chosen: tuple[Candidate, ...], rest: Sequence[Candidate], rules: _Rules
) -> Iterator[tuple[Candidate, ...]]:
    missing = rules.request.count - len(chosen)
    if missing == 0:
        yield chosen
        return
    constraints = rules.request.constraints
    has_pairs = missing > 1 and (constraints.same_numa or constraints.needs_nvlink)
    promised = sum(each.on_host for each in chosen)
    tried: set[Hashable] = set()
    for number, one in enumerate(rest):
        if len(rest) - number < missing or rules.effort.is_spent:
            return
        if one.alike is not None and one.alike in tried:
            continue
        if promised + one.on_host > rules.host_budget:
            continue
        rules.effort.left -= 1
        later = rest[number + 1 :]
        if has_pairs:
            device = one.verdict.state.device
            later = [
                other
                for other in later
                if may_join(constraints, rules.links, device, other.verdict.state.device)
            ]
        yield from _extend((*chosen, one), later, rules)
        if one.alike is not None:
            tried.add(one.alike)


class Site(NamedTuple):
    """A GPU with room for at least one of the slices."""

    column: int
    layout: MigLayout
    alike: Hashable
    """GPUs with equal keys are interchangeable. None: unique."""
    handed_on: tuple[tuple[MigProfile, int], ...] = ()
    """The pod's own slices that serve and can be reused, smallest first."""


class CutSite(NamedTuple):
    """An available slice."""

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
) -> Iterator[tuple[CutSite, ...]]:
    """Yield the sets of slices that fit together.

    `groups`: GPUs to choose from together, most preferred first; the last has all. `may_join`:
    whether one container may have slices of both GPUs. `tries_larger`: also larger slices than
    requested, which other containers of the pod may reuse. Ends early when the effort is spent.
    """
    # The pod's own slices would not be a single machine's choice.
    has_own = any(site.handed_on for site in groups[-1])
    for sites in () if has_own else groups:
        chosen = choose([site.layout for site in sites], request)
        if isinstance(chosen, MigRefusal):
            continue
        columns = {site.layout.gpu: site.column for site in sites}
        cuts = tuple(CutSite(columns[each.gpu], each.profile, each.start) for each in chosen)
        if all(may_join(one.column, other.column) for one in cuts for other in cuts):
            effort.left -= 1
            yield cuts
    yield from _All(groups[-1], request, effort, may_join, tries_larger=tries_larger).sets()


class _Known(msgspec.Struct, frozen=True):
    """A GPU's own options."""

    site: Site
    slots: Slots
    taken: TakenSlots


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
            taken = TakenSlots.by(
                slice_ for slice_ in site.layout.slices if slice_.hold is not MigHold.IDLE
            )
            self._sites[site.column] = _Known(site, slots, taken)
            for shape, room in slots.rooms(taken.mask).items():
                totals[shape] = totals.get(shape, 0) + room
        options = [each for there in self._sites.values() for each in self._of(there, totals)]
        self._options = [cut for _, cut in sorted(options, key=lambda option: option[0])]

    def sets(self) -> Iterator[tuple[CutSite, ...]]:
        return self._extend((), 0, {})

    def _of(
        self, there: _Known, totals: dict[str, int]
    ) -> Iterator[tuple[tuple[float, ...], CutSite]]:
        """Yield one GPU's available slices, each with its sort key."""
        site, slots, taken = there.site, there.slots, there.taken
        idle = {
            (slice_.profile, slice_.start)
            for slice_ in site.layout.slices
            if slice_.hold is MigHold.IDLE
        }
        for order, (profile, start) in enumerate(site.handed_on):
            yield (False, order, site.column), CutSite(site.column, profile, start)
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
                # After the pod's own slices.
                key = (not site.layout.is_enabled, rank, is_cut, lost, site.column, start)
                yield (True, *key), CutSite(site.column, profile, start)

    def _extend(
        self, chosen: tuple[CutSite, ...], first: int, more: dict[int, TakenSlots]
    ) -> Iterator[tuple[CutSite, ...]]:
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


def _covers(own: int, slots: Slots, smaller: MigProfile, taken: TakenSlots) -> bool:
    """True if a smaller profile could be within these slots without blocking others.

    The larger one in its place takes those slots, and more. The smaller one could block a request
    for its profile if the profile's count is scarcer than its room.
    """
    if smaller.has_media or smaller.most < slots.rooms(0)[smaller.shape]:
        return False
    return any(cover(start, smaller.size) & ~own == 0 for start in slots.starts(smaller, taken))
