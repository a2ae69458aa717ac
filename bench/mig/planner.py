# SPDX-License-Identifier: Apache-2.0
"""How many MIG slices are served, by where they are put: our planner beside three simple rules.

Slices are asked for at random moments (Poisson) and run for random times (exponential, mean 1); who
finds no place is gone. Each rule sees the very same arrivals. The others take the first GPU with a
place; HAMi's rule begins 1g and 3g as high as it can and all others as low as it can.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from statistics import fmean, stdev
from typing import Final

from allotment.model.mig import MigLayout, MigProfile, MigSlice
from bench.harness.options import Options
from bench.harness.quantiles import summarize
from bench.harness.results import Result
from bench.harness.runner import NoRig
from bench.mig.arrivals import (
    GPUS,
    ISSUE,
    LARGE,
    OURS,
    QUARTERS,
    RULES,
    SMALL,
    Case,
    Outcome,
    Pick,
    play,
    profiles_of,
    steps,
)
from bench.mig.optimum import Chain

_UNKNOWN: Final = -1
"""The profile of a slice of which only its slots matter."""
CASES: Final = (
    Case("mixed", "A100-40GB", ISSUE, 1, 1.5),
    Case("mixed", "A100-40GB", ISSUE, 8, 1.5),
    Case("mixed", "A100-40GB", ISSUE, 8, 2.5),
    Case("small", "A100-40GB", SMALL, 8, 4.0),
    Case("large", "A100-40GB", LARGE, 8, 1.0),
    Case("large", "A100-40GB", LARGE, 8, 2.0),
    Case("quarters", "A30", QUARTERS, 8, 2.0),
)
EXACT: Final = (
    Case("mixed", "A100-40GB", ISSUE, 1, 0.75),
    Case("mixed", "A100-40GB", ISSUE, 1, 1.5),
    Case("mixed", "A100-40GB", ISSUE, 1, 2.5),
    Case("small", "A100-40GB", SMALL, 1, 2.5),
    Case("large", "A100-40GB", LARGE, 1, 1.5),
    Case("quarters", "A30", QUARTERS, 1, 1.5),
)


def exact(case: Case) -> dict[str, float]:
    """Return what each rule serves on one GPU in the long run, and the best one, in percent."""
    profiles = profiles_of(case.model)
    chain = Chain(profiles, case.mix, load=case.load)

    def by(rule: Pick) -> float:
        def pick(state: tuple[tuple[int, int], ...], profile: MigProfile, _: Sequence[int]) -> int:
            there = tuple(
                MigSlice(profile=_UNKNOWN, start=start, size=size) for start, size in state
            )
            place = rule([MigLayout(gpu="0", profiles=profiles, slices=there)], profile)
            assert place is not None
            return place[1]

        return 100 * chain.served(pick)

    return {name: by(rule) for name, rule in RULES.items()} | {"optimum": 100 * chain.best()}


def played(seeds: Sequence[int], arrivals: int) -> Iterator[tuple[Case, dict[str, list[Outcome]]]]:
    """Play all cases with all rules."""
    for case in CASES:
        yield (
            case,
            {
                name: [play(case, rule, seed=seed, arrivals=arrivals) for seed in seeds]
                for name, rule in RULES.items()
            },
        )


def percent(outcomes: Sequence[Outcome]) -> list[float]:
    """Return the part of the slots asked for that was served, of each seed."""
    return [100 * each.served / each.asked for each in outcomes]


def mig_planner(_rig: NoRig, options: Options) -> Iterator[Result]:
    """Play all cases with all rules, solve small ones exactly, and walk at random."""
    seeds = options.seeds or range(1, options.pick(6, 2) + 1)
    arrivals = options.arrivals or options.pick(6000, 300)
    count = options.steps or options.pick(100_000, 500)
    results = list(played(seeds, arrivals))
    for case, outcomes in results:
        yield _service(case, outcomes)
    for case, outcomes in results:
        if case.mix is ISSUE:
            yield from _accepted(case, outcomes)
    for case in EXACT[:1] if options.is_quick else EXACT:
        yield _exact(case)
    yield from _times(results)
    if not options.is_quick:
        many = play(replace(CASES[2], gpus=1000), RULES[OURS], seed=1, arrivals=1500)
        yield _time("1,000 GPUs", many.seconds[1000:])
    for model in GPUS:
        yield _steps(model, count)


def _title(case: Case) -> str:
    gpus = "one" if case.gpus == 1 else str(case.gpus)
    return f"{case.name}, {gpus} {case.model}, {case.load:g} a GPU"


def _service(case: Case, outcomes: dict[str, list[Outcome]]) -> Result:
    figures = {name: percent(of) for name, of in outcomes.items()}
    best = max((name for name in RULES if name != OURS), key=lambda name: fmean(figures[name]))
    ahead = [mine - theirs for mine, theirs in zip(figures[OURS], figures[best], strict=True)]
    error = stdev(ahead) / len(ahead) ** 0.5 if len(ahead) > 1 else 0.0
    others = ", ".join(f"`{name}` {_spread(figures[name])}" for name in RULES if name != OURS)
    return Result(
        name=f"served: {_title(case)}",
        topic="service",
        unit="points",
        value=fmean(ahead),
        seen=f"{_spread(figures[OURS])} %; ahead {fmean(ahead):+.2f} ± {error:.2f}",
        beside=f"{others} %",
        samples=len(ahead),
        method="slots served of slots asked for, percent: means over the seeds"
        f" (± standard deviation) of {len(outcomes[OURS][0].seconds):,} slices each; ahead: of the"
        " best of the others, over the same arrivals (± standard error)",
    )


def _spread(figures: Sequence[float]) -> str:
    return f"{fmean(figures):.2f} ± {stdev(figures) if len(figures) > 1 else 0:.2f}"


def _accepted(case: Case, outcomes: dict[str, list[Outcome]]) -> Iterator[Result]:
    for name, of in outcomes.items():
        parts = []
        for profile in ISSUE:
            wanted = sum(each.by_profile[profile][0] for each in of)
            served = sum(each.by_profile[profile][1] for each in of)
            parts.append(f"{profile} {100 * served / max(1, wanted):.1f}")
        yield Result(
            name=f"accepted by `{name}`: {_title(case)}",
            topic="accepted",
            unit="%",
            value=100 * sum(_served(each) for each in of) / sum(len(each.seconds) for each in of),
            seen=", ".join(parts),
            samples=len(of),
            method="slices accepted of those asked for, percent: of all, and by profile",
        )


def _served(outcome: Outcome) -> int:
    return sum(served for _, served in outcome.by_profile.values())


def _exact(case: Case) -> Result:
    figures = exact(case)
    rules = ", ".join(f"`{name}` {figures[name]:.2f}" for name in RULES if name != OURS)
    return Result(
        name=f"in the long run: {_title(case)}",
        topic="optimum",
        unit="points",
        value=figures["optimum"] - figures[OURS],
        seen=f"{figures[OURS]:.2f} %; optimum {figures['optimum']:.2f} %",
        beside=f"{rules} %",
        method="solved for and not sampled; the optimum knows mix and load, and is the most that"
        " any choice of starts serves; the figure is how far below it the planner is",
    )


def _times(results: Sequence[tuple[Case, dict[str, list[Outcome]]]]) -> Iterator[Result]:
    for gpus in (1, 8):
        seconds = [
            second
            for case, outcomes in results
            if case.gpus == gpus
            for each in outcomes[OURS]
            for second in each.seconds
        ]
        yield _time("1 GPU" if gpus == 1 else f"{gpus} GPUs", seconds)


def _time(gpus: str, seconds: Sequence[float]) -> Result:
    summary = summarize([1000 * each for each in seconds])
    return Result(
        name=f"one decision, {gpus}: p99",
        topic="decision",
        unit="ms",
        value=summary.p99,
        summary=summary,
        samples=len(seconds),
        method="processor time, p50 / p99",
    )


def _steps(model: str, count: int) -> Result:
    refused, wrongly = steps(model, count=count)
    return Result(
        name=f"refused although there was a legal place: {model}",
        topic="random steps",
        unit="refusals",
        value=wrongly,
        seen=f"{wrongly} of {refused:,} refusals",
        target=0.0,
        is_required=True,
        samples=count,
        method=f"{count:,} random steps, a slice created or removed",
    )
