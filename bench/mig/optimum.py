# SPDX-License-Identifier: Apache-2.0
"""One GPU under Poisson arrivals, exactly: what a policy serves, and what the best one would.

A chain of states, which are the sets of covered stretches of slots; all slices run for as long on
average. What a policy serves follows from how often it is in which state; the best policy is found
by policy iteration (Howard), with the service that each state is worth solved for exactly.
"""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from allotment.model.mig import MigProfile

Stretch = tuple[int, int]
Pick = Callable[[tuple[Stretch, ...], MigProfile, Sequence[int]], int]
"""Of the stretches there, what is asked for and the legal starts: the start that is taken."""

_MOST_ROUNDS = 100
_EQUAL = 1e-9
"""A part of the slots that is no gain: states of equal worth would alternate without end."""


class Chain:
    """The states of one GPU on which slices are asked for in some mix."""

    def __init__(
        self, profiles: Sequence[MigProfile], mix: Mapping[str, float], *, load: float
    ) -> None:
        """Enumerate them. `load`: slices asked for in the time that one runs."""
        total = sum(mix.values())
        self._profiles = [each for each in profiles if each.name in mix]
        self._rates = [load * mix[each.name] / total for each in self._profiles]
        self._numbers: dict[tuple[Stretch, ...], int] = {(): 0}
        self._states: list[tuple[Stretch, ...]] = [()]
        self._moves: list[list[list[tuple[int, int]]]] = []
        for state in self._states:
            self._moves.append([self._after(state, each) for each in self._profiles])

    def _after(self, state: tuple[Stretch, ...], profile: MigProfile) -> list[tuple[int, int]]:
        """Return the legal starts of one more slice, and which state each leads to."""
        covered = {slot for start, size in state for slot in range(start, start + size)}
        moves = []
        for start in profile.starts:
            if covered.isdisjoint(range(start, start + profile.size)):
                after = tuple(sorted((*state, (start, profile.size))))
                number = self._numbers.setdefault(after, len(self._numbers))
                if number == len(self._states):
                    self._states.append(after)
                moves.append((start, number))
        return moves

    def __len__(self) -> int:
        """Return how many states there are."""
        return len(self._states)

    def served(self, pick: Pick) -> float:
        """Return what part of the slots asked for a policy serves."""
        chosen = [
            [
                dict(moves)[pick(state, profile, [start for start, _ in moves])] if moves else at
                for profile, moves in zip(self._profiles, self._moves[at], strict=True)
            ]
            for at, state in enumerate(self._states)
        ]
        flow, gain = self._flow(np.array(chosen))
        balance = flow.T.copy()
        balance[0] = 1
        right = np.zeros(len(self))
        right[0] = 1
        return float(np.linalg.solve(balance, right) @ gain) / self._asked

    def best(self) -> float:
        """Return what part the best policy serves that refuses nothing that fits."""
        worth: NDArray[np.float64] = np.zeros(len(self))
        served = -1.0
        for _ in range(_MOST_ROUNDS):
            flow, gain = self._flow(np.array([self._greedy(at, worth) for at in range(len(self))]))
            equations = -flow
            equations[:, 0] = 1  # the gain of any state, in place of the worth of the empty one
            worth = np.asarray(np.linalg.solve(equations, gain), dtype=np.float64)
            before, served, worth[0] = served, float(worth[0]) / self._asked, 0
            if served - before < _EQUAL:
                break
        return served

    def _greedy(self, at: int, worth: NDArray[np.float64]) -> list[int]:
        """Return the state that is worth most after each request; the same where none fits."""
        return [
            max(moves, key=lambda move: worth[move[1]])[1] if moves else at
            for moves in self._moves[at]
        ]

    @property
    def _asked(self) -> float:
        return sum(rate * each.size for rate, each in zip(self._rates, self._profiles, strict=True))

    def _flow(self, chosen: NDArray[np.int64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return the rates between states, and the slots that are given in each, in unit time."""
        count = len(self)
        every = np.arange(count)
        flow, gain = np.zeros((count, count)), np.zeros(count)
        for column, (rate, profile) in enumerate(zip(self._rates, self._profiles, strict=True)):
            target = chosen[:, column]
            np.add.at(flow, (every, target), rate)
            flow[every, every] -= rate
            gain += rate * profile.size * (target != every)
        for at, state in enumerate(self._states):
            for stretch in state:
                after = tuple(each for each in state if each != stretch)
                flow[at, self._numbers[after]] += 1
                flow[at, at] -= 1
        return flow, gain
