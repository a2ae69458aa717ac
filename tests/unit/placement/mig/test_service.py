# SPDX-License-Identifier: Apache-2.0
"""How much is served in the long run, beside other rules: `bench/mig/planner.py`, in small."""

import pytest
from bench.mig.arrivals import ISSUE, OURS, RULES, Case, play, profiles_of
from bench.mig.optimum import Chain

from allotment.model.mig import MigLayout, MigProfile, MigRequest, MigSlice
from allotment.placement.mig import MigChoice, choose

Stretch = tuple[int, int]


def test_one_gpu_serves_what_the_best_rule_would() -> None:
    """Exactly 70.11 % of the slots asked for, where the optimum is 70.12."""
    profiles = profiles_of("A100-40GB")
    chain = Chain(profiles, ISSUE, load=1.5)

    def pick(state: tuple[Stretch, ...], profile: MigProfile, _: object) -> int:
        there = tuple(MigSlice(profile=-1, start=start, size=size) for start, size in state)
        layout = MigLayout(gpu="", profiles=profiles, slices=there)
        answer = choose([layout], MigRequest(profile=profile.name))
        assert isinstance(answer, tuple)
        assert isinstance(answer[0], MigChoice)
        return answer[0].start

    served, best = chain.served(pick), chain.best()
    assert best == pytest.approx(0.7012, abs=0.0001)
    assert served >= 0.70
    assert best - served < 0.0002


@pytest.mark.timeout(120)
@pytest.mark.parametrize("load", [1.5, 2.5])
def test_eight_gpus_serve_more_than_by_any_of_the_simple_rules(load: float) -> None:
    case = Case("mixed", "A100-40GB", ISSUE, 8, load)
    outcomes = {name: play(case, rule, seed=1, arrivals=3000) for name, rule in RULES.items()}
    served = {name: each.served / each.asked for name, each in outcomes.items()}
    assert served[OURS] > max(of for name, of in served.items() if name != OURS)
    largest = {name: each.by_profile["7g.40gb"][1] for name, each in outcomes.items()}
    assert largest[OURS] >= max(largest.values())
