# SPDX-License-Identifier: Apache-2.0
"""Sets of distinct devices for one request: every one that may be taken, the best ones first.

Devices come in the order in which somebody prefers them, and sets in the order that follows from
that. All are found, none that is forbidden (not on one NUMA node, not linked, too much host memory)
is looked into further, and of sets that differ by devices that are alike only the first is made. So
a search that takes the first set that suits misses none, and ends soon where there is none: eight
of sixteen equal GPUs is one set, not 12,870.
"""

from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from allotment.model.placements import Verdict
from allotment.model.requests import Request
from allotment.placement.constraints import Links, are_linked
from allotment.placement.fit import overflow

__all__ = ["Candidate", "Effort", "candidates_of", "selections"]


@dataclass(slots=True)
class Effort:
    """How many more sets, whole and begun, may be looked at."""

    left: int

    @property
    def is_spent(self) -> bool:
        """Has something been left out?"""
        return self.left <= 0

    @contextmanager
    def part(self, most: int) -> Iterator["Effort"]:
        """Lend one search out of several at most so much of it, and count what that has taken."""
        lent = Effort(max(0, min(self.left, most)))
        before = lent.left
        try:
            yield lent
        finally:
            self.left -= before - lent.left


@dataclass(frozen=True, slots=True)
class Candidate:
    """A device that fits by itself."""

    verdict: Verdict
    on_host: int = 0
    """How much more host memory would stand for it."""
    alike: Hashable = None
    """Devices with the same are as good as each other in all that is asked. None: it is alone."""

    @property
    def uuid(self) -> str:
        """Which device it is."""
        return self.verdict.state.device.uuid


def candidates_of(verdicts: Sequence[Verdict]) -> list[Candidate]:
    """Return the devices that fit by themselves, in the same order."""
    return [
        Candidate(verdict, overflow(verdict.state, verdict.need_bytes))
        for verdict in verdicts
        if verdict.fits
    ]


def selections(
    candidates: Sequence[Candidate],
    request: Request,
    *,
    host_budget: int,
    effort: Effort,
    links: Links,
) -> Iterator[tuple[Candidate, ...]]:
    """Yield the sets of `request.count` devices that may be taken together.

    `host_budget` is what host memory there is for them, in bytes. Ends early when the effort is
    spent.
    """
    return _extend((), candidates, _Rules(request, host_budget, effort, links))


@dataclass(frozen=True, slots=True)
class _Rules:
    request: Request
    host_budget: int
    effort: Effort
    links: Links

    def together(self, one: Candidate, other: Candidate) -> bool:
        """May both be in one set?"""
        constraints = self.request.constraints
        if constraints.same_numa:
            nodes = {each.verdict.state.device.numa_node for each in (one, other)}
            if len(nodes) > 1:
                return False
        return not constraints.needs_nvlink or are_linked(self.links, one.uuid, other.uuid)


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
            later = [each for each in later if rules.together(one, each)]
        yield from _extend((*chosen, one), later, rules)
        if one.alike is not None:
            tried.add(one.alike)
