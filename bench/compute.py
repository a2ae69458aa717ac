# SPDX-License-Identifier: Apache-2.0
"""How good shares of GPU time are, beside the same programs without limits in the same run.

    python bench/compute.py                              the table (make bench)
    python bench/compute.py --markdown                   also into docs/performance.md
    python bench/compute.py --only splits,latency -v     some of it, with what happened
    python bench/compute.py --only ceilings --caps 30 --kernels 200us --patterns stream
    python bench/compute.py --quick -o json              does it work at all?

Targets are shown, and a missed one changes the exit status only with --strict.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from asked import CAPS, KERNELS, PATTERNS, SPLITS, Asked
from capping import capping
from churning import churning
from crowding import crowding
from disturbances import Processors
from exceeding import exceeding
from findings import Finding, Findings, render_markdown, render_text
from grounds import Ground, ground
from launching import launching
from lending import lending
from places import ROOT, facts
from serving import serving
from splitting import splitting
from tables import put_between_markers
from waiting import waiting

from allotment.model.errors import AllotError

QUESTIONS: Final[dict[str, Callable[[Ground, Asked], Iterator[Finding]]]] = {
    "launches": launching,
    "ceilings": capping,
    "splits": splitting,
    "long": exceeding,
    "waiting": waiting,
    "lending": lending,
    "latency": serving,
    "oversubscribed": crowding,
    "starts": churning,
}


def arguments(words: list[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default=",".join(QUESTIONS), help=", ".join(QUESTIONS))
    parser.add_argument("--caps", default=",".join(map(str, CAPS)), help="at most five")
    parser.add_argument("--kernels", default=",".join(KERNELS), help=", ".join(KERNELS))
    parser.add_argument("--patterns", default=",".join(PATTERNS), help=", ".join(PATTERNS))
    parser.add_argument("--splits", default=",".join("/".join(map(str, split)) for split in SPLITS))
    parser.add_argument("--quick", action="store_true", help="short: does it work at all?")
    parser.add_argument("--strict", action="store_true", help="fail when a target is missed")
    parser.add_argument("-v", "--verbose", action="store_true", help="what happened, on stderr")
    parser.add_argument("-o", "--output", choices=["text", "json"], default="text")
    parser.add_argument(
        "--markdown",
        nargs="?",
        type=Path,
        const=ROOT / "docs" / "performance.md",
        help="also write the table into this page, between its markers",
    )
    chosen = parser.parse_args(words)
    for name, known in (("only", QUESTIONS), ("kernels", KERNELS), ("patterns", PATTERNS)):
        named = getattr(chosen, name).split(",")
        unknown = [each for each in named if each not in known]
        if unknown:
            parser.error(f"no {', '.join(unknown)}: choose from {', '.join(known)}")
        setattr(chosen, name, named)
    return chosen


def asked_for(chosen: argparse.Namespace) -> Asked:
    """Turn the command line into what to measure."""
    return Asked(
        quick=chosen.quick,
        caps=tuple(int(cap) for cap in chosen.caps.split(","))[:5],
        kernels=tuple(chosen.kernels),
        patterns=tuple(chosen.patterns),
        splits=tuple(
            tuple(int(part) for part in split.split("/")) for split in chosen.splits.split(",")
        ),
    )


def measure(place: Ground, chosen: argparse.Namespace) -> Findings:
    """Ask the questions in turn. One that fails takes its own lines away and no others."""
    before = Processors.now()
    found: list[Finding] = []
    failures: dict[str, str] = {}
    for name in chosen.only:
        started = time.monotonic()
        print(f"measuring: {name}", file=sys.stderr)
        try:
            for finding in QUESTIONS[name](place, asked_for(chosen)):
                found.append(finding)
                if place.verbose:
                    print(
                        f"  {finding.name}: {finding.seen}, {finding.reached:.3g} {finding.unit}",
                        file=sys.stderr,
                    )
        except (OSError, RuntimeError, subprocess.SubprocessError) as error:
            failures[name] = str(error)
        print(f"  {time.monotonic() - started:.0f} s", file=sys.stderr)
    if place.errors:
        found.append(_error_of_ledger(place))
    known = facts(f"simulated, {place.spec}") | {"processors": Processors.now().tell_since(before)}
    return Findings(facts=known, findings=found, failures=failures)


def _error_of_ledger(place: Ground) -> Finding:
    worst = max(place.errors, key=lambda each: abs(each[1]))
    middle = sorted(abs(error) for _, error in place.errors)[len(place.errors) // 2]
    return Finding(
        question="the ledger's figure",
        name="GPU time that the ledger charged, against the simulator's",
        without="",
        seen=f"median {middle:.2f} %, worst {worst[1]:+.2f} % ({worst[0]})",
        reached=abs(worst[1]),
        unit="%",
        target=None,
        samples=len(place.errors),
        method="every share of the scenes above, over its whole life",
    )


def main(words: list[str]) -> int:
    """Measure and report; 1 when a target was missed under --strict, or something failed."""
    chosen = arguments(words)
    with ground(verbose=chosen.verbose) as place:
        found = measure(place, chosen)
    if chosen.output == "json":
        print(json.dumps(found.to_document(), indent=2))
    else:
        print(render_text(found))
    if chosen.markdown is not None:
        body = render_markdown(found, command="python bench/compute.py --markdown")
        put_between_markers(chosen.markdown, name="compute", title="Shares of time", body=body)
    missed = [finding.name for finding in found.findings if finding.is_met is False]
    return 1 if found.failures or (missed and chosen.strict) else 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except AllotError as error:
        print(f"error: {error.message}", file=sys.stderr)
        if error.hint:
            print(f"\nhint: {error.hint}", file=sys.stderr)
        sys.exit(error.exit_code)
