# SPDX-License-Identifier: Apache-2.0
"""What a share costs, beside the bare driver in the same run.

    python bench/run.py                      the table (make bench)
    python bench/run.py --markdown           also into docs/performance.md
    python bench/run.py --only calls,init    some of the questions
    python bench/run.py -o json --quick      a document; few samples

Targets are shown, and a missed one changes the exit status only with --strict: the machine that
measures is often busy with other things.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from amounts import Sizes
from measuring import QUESTIONS, measure
from places import ROOT, simulated_place
from tables import put_between_markers, render_markdown, render_text

from allotment.model.errors import AllotError


def arguments(words: list[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--only",
        default=",".join(QUESTIONS),
        help=f"questions, separated by commas: {', '.join(QUESTIONS)}",
    )
    parser.add_argument("--quick", action="store_true", help="few samples: does it work at all?")
    parser.add_argument("--strict", action="store_true", help="fail when a target is missed")
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


def main(words: list[str]) -> int:
    """Measure and report; 1 when a target was missed under --strict."""
    chosen = arguments(words)
    with simulated_place() as place:
        bench = measure(place, Sizes(quick=chosen.quick), only=chosen.only)
    if chosen.output == "json":
        print(json.dumps(bench.to_document(), indent=2))
    else:
        print(render_text(bench))
    if chosen.markdown is not None:
        body = render_markdown(bench, command="python bench/run.py --markdown")
        put_between_markers(
            chosen.markdown, name="bench", title="Beside the bare simulated driver", body=body
        )
    missed = [row.name for row in bench.rows if row.is_met is False]
    return 1 if bench.failures or (missed and chosen.strict) else 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except AllotError as error:
        print(f"error: {error.message}", file=sys.stderr)
        if error.hint:
            print(f"\nhint: {error.hint}", file=sys.stderr)
        sys.exit(error.exit_code)
