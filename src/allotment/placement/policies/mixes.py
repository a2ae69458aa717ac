# SPDX-License-Identifier: Apache-2.0
"""The mix: which kinds of pods come, and how often; learnt from those that came, or known."""

from collections.abc import Mapping
from dataclasses import replace

from allotment.placement.arrays import Kind

__all__ = ["Mix"]

_GROWTH = 1.25
"""`epoch` goes up each time that so many times as many pods have come."""


class Mix:
    """How often each kind comes.

    A learnt mix changes with each arrival; `epoch` says when it is worth to look at it again.
    """

    def __init__(self) -> None:
        self.epoch = 0
        self._counts: dict[Kind, float] = {}
        self._arrived = 0
        self._next = 1.0
        self._is_known = False

    def arrived(self, kind: Kind) -> None:
        """Count one more pod of this kind, unless the mix is known."""
        if self._is_known:
            return
        self._counts[kind] = self._counts.get(kind, 0.0) + 1.0
        self._arrived += 1
        if self._arrived >= self._next:
            self._next = self._arrived * _GROWTH
            self.epoch += 1

    def expect(self, mix: Mapping[Kind, float]) -> None:
        """Take the mix from somebody who knows it: counts or frequencies, of any scale."""
        self._counts = dict(mix)
        self._is_known = True
        self.epoch += 1

    def typical(self, part: float) -> list[tuple[Kind, float]]:
        """Return the most frequent kinds that make up this part of all pods, with frequencies.

        Frequencies are of all pods, and so sum to about `part`. Ties go by what the kinds ask for.
        """
        total = sum(self._counts.values())
        chosen: list[tuple[Kind, float]] = []
        reached = 0.0
        for kind, count in sorted(self._counts.items(), key=_order):
            if reached >= part * total:
                break
            chosen.append((kind, count / total))
            reached += count
        return chosen


def _order(each: tuple[Kind, float]) -> tuple[float, list[str], str]:
    """Return what sorts kinds. A set's own text is in another order in each process."""
    kind, count = each
    return -count, sorted(kind.models or ()), repr(replace(kind, models=None))
