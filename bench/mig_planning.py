# SPDX-License-Identifier: Apache-2.0
"""How many MIG slices are served, by where they are put: our planner beside three simple rules.

    python bench/mig_planning.py                 6 minutes of a processor
    python bench/mig_planning.py --markdown      also into docs/performance.md
    python bench/mig_planning.py --seeds 2 --arrivals 5000

Slices are asked for at random moments (Poisson) and run for random times (exponential, mean 1); who
finds no place is gone. Each rule sees the very same arrivals. The others take the first GPU with a
place; HAMi's rule begins 1g and 3g as high as it can and all others as low as it can.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Final

from mig_exact import Chain
from mig_playing import (
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
from places import ROOT, facts
from tables import put_between_markers

from allotment.model.mig import MigLayout, MigProfile, MigSlice

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


def tables(seeds: Sequence[int], arrivals: int, count: int) -> Iterator[str]:
    """Yield the lines of all tables, as Markdown."""
    results = list(played(seeds, arrivals))
    yield from _service(results)
    yield from ("", *_accepted(results))
    yield from ("", *_exactly())
    yield from ("", *_times(results))
    yield from ("", *_steps(count))


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _head(cells: Sequence[str]) -> list[str]:
    return [_row(cells), _row(["---"] * len(cells))]


def _title(case: Case) -> str:
    gpus = "one" if case.gpus == 1 else str(case.gpus)
    return f"{case.name}, {gpus} {case.model}, {case.load:g} a GPU"


def _service(results: Sequence[tuple[Case, dict[str, list[Outcome]]]]) -> Iterator[str]:
    runs = len(next(iter(results[0][1].values())))
    each = len(results[0][1][OURS][0].seconds)
    yield f"Slots served of slots asked for, percent: means of {runs} seeds of {each:,} slices each"
    yield "(± standard deviation); last, by how much ours is ahead of the best of the others, over"
    yield "the same arrivals (± standard error):"
    yield ""
    yield from _head(["mix, GPUs, load", *(f"`{name}`" for name in RULES), "ahead"])
    for case, outcomes in results:
        figures = {name: percent(of) for name, of in outcomes.items()}
        best = max((name for name in RULES if name != OURS), key=lambda name: fmean(figures[name]))
        ahead = [mine - theirs for mine, theirs in zip(figures[OURS], figures[best], strict=True)]
        error = stdev(ahead) / len(ahead) ** 0.5 if len(ahead) > 1 else 0.0
        yield _row(
            [
                _title(case),
                *(
                    f"{fmean(of):.2f} ± {stdev(of) if len(of) > 1 else 0:.2f}"
                    for of in figures.values()
                ),
                f"{fmean(ahead):+.2f} ± {error:.2f}",
            ]
        )


def _accepted(results: Sequence[tuple[Case, dict[str, list[Outcome]]]]) -> Iterator[str]:
    yield "Accepted of the slices asked for, percent by profile, of the first mix:"
    yield ""
    yield from _head(["GPUs, load", "rule", *ISSUE])
    for case, outcomes in results:
        if case.mix is not ISSUE:
            continue
        for name, of in outcomes.items():
            parts = []
            for profile in ISSUE:
                asked = sum(each.by_profile[profile][0] for each in of)
                served = sum(each.by_profile[profile][1] for each in of)
                parts.append(f"{100 * served / asked:.1f}")
            yield _row([f"{case.gpus}, {case.load:g}", f"`{name}`", *parts])


def _exactly() -> Iterator[str]:
    yield "One GPU in the long run, solved for and not sampled; `optimum` knows mix and load, and"
    yield "is the most that any choice of starts can serve:"
    yield ""
    yield from _head(["mix, GPU, load", *(f"`{name}`" for name in RULES), "`optimum`"])
    for case in EXACT:
        figures = exact(case)
        yield _row([_title(case), *(f"{each:.2f}" for each in figures.values())])


def _times(results: Sequence[tuple[Case, dict[str, list[Outcome]]]]) -> Iterator[str]:
    yield "Processor time of one decision of ours:"
    yield ""
    yield from _head(["GPUs", "p50", "p99"])
    for gpus in (1, 8):
        times = sorted(
            second
            for case, outcomes in results
            if case.gpus == gpus
            for each in outcomes[OURS]
            for second in each.seconds
        )
        yield _row([str(gpus), *(_quantile(times, part) for part in (0.5, 0.99))])
    many = replace(CASES[2], gpus=1000)
    times = sorted(play(many, RULES[OURS], seed=1, arrivals=1500).seconds[1000:])
    yield _row(["1,000", *(_quantile(times, part) for part in (0.5, 0.99))])


def _quantile(ordered: Sequence[float], part: float) -> str:
    return f"{1000 * ordered[int(part * len(ordered))]:.2f} ms"


def _steps(count: int) -> Iterator[str]:
    yield f"{count:,} random steps, a slice made or removed, on each model:"
    yield ""
    yield from _head(["model", "refused", "refused although there was a legal place"])
    for model in GPUS:
        refused, wrongly = steps(model, count=count)
        yield _row([model, f"{refused:,}", str(wrongly)])


def main() -> None:
    """Run it all."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=6, help="how many")
    parser.add_argument("--arrivals", type=int, default=6_000, help="slices asked for, each")
    parser.add_argument("--steps", type=int, default=100_000, help="of the random walk")
    parser.add_argument("--markdown", action="store_true", help="also into docs/performance.md")
    options = parser.parse_args()
    lines = list(tables(range(1, options.seeds + 1), options.arrivals, options.steps))
    busy = f"load average {os.getloadavg()[1]:.0f}"
    there = {name: value for name, value in facts("none").items() if name != "driver"}
    there["processors"] = f"{busy}, other programs included"
    command = " ".join(["python bench/mig_planning.py", *sys.argv[1:]])
    head = [f"Made by `{command}` on:", ""]
    head += [f"- {name}: {value}" for name, value in there.items()]
    body = "\n".join([*head, "", *lines])
    print(body)
    if options.markdown:
        page = Path(ROOT) / "docs" / "performance.md"
        put_between_markers(page, name="mig-planning", title="MIG planning", body=body)


if __name__ == "__main__":
    main()
