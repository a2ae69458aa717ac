# SPDX-License-Identifier: Apache-2.0
"""What the scheduler does beside a real kube-scheduler: pods a second, latencies, and bad days.

    python bench/scheduler.py                     the table; root, Linux
    python bench/scheduler.py --only rate         pods with GPUs against pods that ask only CPU
    python bench/scheduler.py --only cost         the same in processor time, by process
    python bench/scheduler.py --only replay [--nodes CSV --pods CSV] [--seed N]
                                                  a whole trace, beside `allot simulate`
    python bench/scheduler.py --only latency      filter and prioritize by themselves
    python bench/scheduler.py --only delay        600 pods while each binding takes 2 s
    python bench/scheduler.py --only restart      100 pods right after a restart
    python bench/scheduler.py --only failover     two replicas, the leader killed, again and again
    python bench/scheduler.py --only start        5,000 nodes and 30,000 pods: to ready, memory
    python bench/scheduler.py --figures FILE --markdown
                                                  keep what was found by question, and write all of
                                                  it into docs/performance.md
    python bench/scheduler.py --quick -o json     does it work at all?

Nodes say what they have and have no kubelet: a scheduler sees nothing else of them.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "cluster"))

from disturbances import Processors
from places import ROOT, facts
from scheduler_cost import costs
from scheduler_days import delays, failovers, restarts
from scheduler_figures import Figure, Scale, in_markdown, shown
from scheduler_latency import latencies
from scheduler_rate import rates
from scheduler_replay import replays
from scheduler_start import starts
from tables import put_between_markers
from testbed.requirements import why_not
from testbed.versions import KUBERNETES

_COMMAND: Final = "python bench/scheduler.py --figures FILE --markdown"
QUESTIONS: Final[dict[str, Callable[[Scale], Iterator[Figure]]]] = {
    "latency": latencies,
    "rate": rates,
    "cost": costs,
    "delay": delays,
    "restart": restarts,
    "failover": failovers,
    "start": starts,
    "replay": replays,
}


def _arguments() -> tuple[argparse.Namespace, list[str]]:
    """What was asked for, and the questions."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", metavar="Q[,Q]", help=f"of {', '.join(QUESTIONS)}")
    parser.add_argument("--quick", action="store_true", help="a tenth of everything")
    parser.add_argument("-o", "--output", choices=["table", "json"], default="table")
    parser.add_argument("--figures", type=Path, metavar="FILE", help="keep them, with earlier ones")
    parser.add_argument("--markdown", action="store_true", help="write into docs/performance.md")
    parser.add_argument("--policy", default="fragmentation")
    parser.add_argument("--candidates", type=int, default=1)
    parser.add_argument("--nodes", type=Path, metavar="CSV", help="of replay: openb's columns")
    parser.add_argument("--pods", type=Path, metavar="CSV", help="likewise")
    parser.add_argument("--seed", type=int, default=42, help="likewise")
    parser.add_argument(
        "--without-plain",
        action="store_true",
        help="likewise: kube-scheduler places pods without GPUs by itself",
    )
    options = parser.parse_args()
    if (options.nodes is None) != (options.pods is None):
        parser.error("--nodes and --pods belong together")
    chosen = options.only.split(",") if options.only else list(QUESTIONS)
    for each in chosen:
        if each not in QUESTIONS:
            parser.error(f"{each!r} is none of {', '.join(QUESTIONS)}")
    return options, chosen


def main() -> int:
    """Answer what was asked; 1: something was given twice, or lost."""
    options, chosen = _arguments()
    if (reason := why_not()) is not None and set(chosen) != {"latency"}:
        print(reason, file=sys.stderr)
        return 1
    scale = Scale(
        is_quick=options.quick,
        policy=options.policy,
        candidates=options.candidates,
        trace=(options.nodes, options.pods) if options.nodes is not None else None,
        seed=options.seed,
        ranks_all=not options.without_plain,
    )
    before = Processors.now()
    kept = _kept(options.figures)
    for each in chosen:
        kept[each] = []
        for figure in QUESTIONS[each](scale):
            kept[each].append(figure)
            if options.output == "table":
                print(shown(figure), flush=True)
        if options.figures is not None:
            document = {name: [one.as_json() for one in some] for name, some in kept.items()}
            options.figures.write_text(json.dumps(document, indent=1), encoding="utf-8")
    found = [figure for each in chosen for figure in kept[each]]
    if options.output == "json":
        print(json.dumps([figure.as_json() for figure in found], indent=1))
    if options.markdown:
        _write(kept, processors=Processors.now().tell_since(before))
    return 1 if any(figure.is_wrong for figure in found) else 0


def _write(kept: Mapping[str, Sequence[Figure]], *, processors: str) -> None:
    """Put all of it into the page, in whatever order it was asked."""
    known = facts("none: nodes say what they have") | {
        "cluster": f"Kubernetes {KUBERNETES}, nodes without a kubelet",
        "processors": processors,
    }
    figures = [figure for name in QUESTIONS for figure in kept.get(name, ())]
    body = in_markdown(figures, facts=known, command=_COMMAND)
    page = ROOT / "docs" / "performance.md"
    put_between_markers(page, name="scheduler", title="Scheduler", body=body)


def _kept(path: Path | None) -> dict[str, list[Figure]]:
    """What an earlier run found, by question."""
    if path is None or not path.exists():
        return {}
    document = json.loads(path.read_text(encoding="utf-8"))
    return {name: [Figure.of(each) for each in some] for name, some in document.items()}


if __name__ == "__main__":
    sys.exit(main())
