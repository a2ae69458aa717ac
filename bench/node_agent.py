# SPDX-License-Identifier: Apache-2.0
"""What the node agent costs pods and the node, on a real kubelet with simulated GPUs.

    python bench/node_agent.py                       the table (make bench); root, Linux
    python bench/node_agent.py --markdown            also into docs/performance.md
    python bench/node_agent.py --only calls,rest -v  some of it, with what happened
    python bench/node_agent.py --quick -o json       does it work at all?

Targets are shown, and a missed one changes the exit status only with --strict.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "cluster"))

import grpc
from disturbances import Processors
from findings import Finding, Findings, render_markdown, render_text
from node_grounds import NodeGround, node_ground
from node_listing import changing, hanging, preferred
from node_resting import resting
from node_slicing import slicing
from node_starting import calls, fifty
from places import ROOT, facts
from tables import put_between_markers
from testbed.requirements import why_not
from testbed.versions import KUBERNETES
from testbed.waiting import TestbedError

from allotment.model.errors import AllotError

HEAD: Final = ("what", "without", "with the agent", "worst", "target", "")
COMMAND: Final = "python bench/node_agent.py --markdown"

QUESTIONS: Final[dict[str, Callable[[NodeGround], Iterator[Finding]]]] = {
    "calls": calls,
    "fifty": fifty,
    "preferred": preferred,
    "hang": hanging,
    "rest": resting,
    "change": changing,
    "slices": slicing,
}

_FAILURES: Final = (
    OSError,
    RuntimeError,
    AssertionError,
    TestbedError,
    grpc.RpcError,
    subprocess.SubprocessError,
)


def arguments(words: list[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default=",".join(QUESTIONS), help=", ".join(QUESTIONS))
    parser.add_argument("--quick", action="store_true", help="few samples: does it work at all?")
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
    chosen.only = chosen.only.split(",")
    unknown = [name for name in chosen.only if name not in QUESTIONS]
    if unknown:
        parser.error(f"no question {', '.join(unknown)}: choose from {', '.join(QUESTIONS)}")
    return chosen


def measure(chosen: argparse.Namespace) -> Findings:
    """Ask the questions in turn. One that fails takes its own lines away and no others."""
    before = Processors.now()
    found: dict[str, list[Finding]] = {name: [] for name in QUESTIONS}
    failures: dict[str, str] = {}
    with node_ground(is_quick=chosen.quick, is_verbose=chosen.verbose) as ground:
        for name in chosen.only:
            started = time.monotonic()
            print(f"measuring: {name}", file=sys.stderr, flush=True)
            try:
                for finding in QUESTIONS[name](ground):
                    found[name].append(finding)
                    ground.tell(
                        f"{finding.name}: {finding.seen}, {finding.reached:.3g} {finding.unit}"
                    )
            except _FAILURES as error:
                traceback.print_exc()
                failures[name] = (str(error) or type(error).__name__).partition("\n")[0]
            print(f"  {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)
    known = facts("simulated") | {
        "cluster": f"Kubernetes {KUBERNETES}, one node, tests/cluster/testbed",
        "processors": Processors.now().tell_since(before),
    }
    # In whatever order they were asked.
    findings = [finding for name in QUESTIONS for finding in found[name]]
    return Findings(facts=known, findings=findings, failures=failures)


def main(words: list[str]) -> int:
    """Measure and report; 1 when a target was missed under --strict, or something failed."""
    chosen = arguments(words)
    reason = why_not(needs_go=False)
    if reason is not None:
        print(f"not measured: {reason}", file=sys.stderr)
        return 0
    found = measure(chosen)
    if chosen.output == "json":
        print(json.dumps(found.to_document(), indent=2))
    else:
        print(render_text(found, head=HEAD))
    if chosen.markdown is not None:
        body = render_markdown(found, command=COMMAND, head=HEAD)
        put_between_markers(chosen.markdown, name="node-agent", title="Node agent", body=body)
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
