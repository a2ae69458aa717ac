# SPDX-License-Identifier: Apache-2.0
"""What is replayed: everything that one replay needs but its policy and its seed."""

from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Final, Protocol

from allotment.model.errors import UsageError
from allotment.placement.policies import POLICIES, Policy, make
from allotment.simulate import arriving, leaving
from allotment.simulate.arriving import Counts, Progress
from allotment.simulate.outcomes import Arrivals, Departures, Outcome, decisions_of
from allotment.simulate.placers import ArrayPlacer, mix_of
from allotment.simulate.traces import Trace, TracePod, capacity_milli
from allotment.simulate.workloads import Visit, as_listed, drawn, timed

__all__ = ["Scene", "TraceScene", "check_policies"]

_KNOWS_THE_MIX: Final = frozenset({"fgd"})
"""Policies that are told which pods come how often, unless one says otherwise: as published."""


class Scene(Protocol):
    """Something to replay. It can be sent to another process."""

    def run(self, policy: str, seed: int, progress: Progress) -> Outcome:
        """Replay it once. The same arguments give the same outcome, but for times."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceScene:
    """A trace, and how its pods come."""

    trace: Trace
    tune: float | None = 1.3
    """What the pods ask for in all (with departures: on average at a time), over all that there is;
    None: every pod of the trace comes once."""
    has_departures: bool = False
    is_mix_known: bool | None = None
    """Whether policies know beforehand which pods come how often; None: each as published."""

    def __post_init__(self) -> None:
        """Refuse what nothing could be said about."""
        if not capacity_milli(self.trace.nodes):
            raise UsageError("the nodes have no GPU", hint="the column gpu says how many each has")

    def run(self, policy: str, seed: int, progress: Progress) -> Outcome:
        """Draw the pods and replay them."""
        begun = perf_counter()
        placer = ArrayPlacer(self.trace.nodes, self._policy(policy, seed), pods=self.trace.pods)
        number, story, counts = self._replay(placer, seed, progress)
        return Outcome(
            policy=policy,
            seed=seed,
            pods=number,
            placed=counts.placed,
            impossible=counts.impossible,
            story=story,
            decisions=decisions_of(counts.decided_ns),
            seconds=perf_counter() - begun,
        )

    def _replay(
        self, placer: ArrayPlacer, seed: int, progress: Progress
    ) -> tuple[int, Arrivals | Departures, Counts]:
        capacity = capacity_milli(self.trace.nodes)
        if self.has_departures:
            visits = self.visits(seed)
            return len(visits), *leaving.replay_visits(
                placer, visits, capacity_milli=capacity, progress=progress
            )
        pods = self.pods(seed)
        return len(pods), *arriving.replay(placer, pods, capacity_milli=capacity, progress=progress)

    def pods(self, seed: int) -> Sequence[TracePod]:
        """Return the pods in the order in which they come."""
        if self.tune is None:
            return as_listed(self.trace.pods, seed=seed)
        capacity = capacity_milli(self.trace.nodes)
        return drawn(self.trace.pods, capacity_milli=capacity, tune=self.tune, seed=seed)

    def visits(self, seed: int) -> Sequence[Visit]:
        """Return the pods with when they come and for how long."""
        capacity = capacity_milli(self.trace.nodes)
        return timed(self.trace.pods, capacity_milli=capacity, tune=self.tune, seed=seed)

    def _policy(self, name: str, seed: int) -> Policy:
        policy = make(name, seed=seed)
        known = name in _KNOWS_THE_MIX if self.is_mix_known is None else self.is_mix_known
        if known:
            policy.expect(mix_of(self.trace.pods))
        return policy


def check_policies(names: Sequence[str]) -> None:
    """Raise `UsageError` for a name that no policy has."""
    for name in names:
        if name not in POLICIES:
            make(name)
