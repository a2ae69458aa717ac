# SPDX-License-Identifier: Apache-2.0
"""All questions of the bench, by the name that the command line has for them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from amounts import Sizes
from limits import filling, killing, sizes_on_disk, storming
from places import Place, facts
from rows import Bench, Row
from speeds import calls, commands, crowded_calls, initialising, starting

QUESTIONS: Final[dict[str, Callable[[Place, Sizes], Iterator[Row]]]] = {
    "calls": calls,
    "crowded": crowded_calls,
    "init": initialising,
    "start": starting,
    "storm": storming,
    "fill": filling,
    "kill": killing,
    "run": commands,
    "size": sizes_on_disk,
}


def measure(place: Place, sizes: Sizes, *, only: Sequence[str]) -> Bench:
    """Ask the questions in turn, telling on stderr which one it is.

    A question that fails takes its own rows away and no others: a run on a borrowed GPU is not
    repeated lightly.
    """
    rows: list[Row] = []
    failures: dict[str, str] = {}
    for name in only:
        print(f"measuring: {name}", file=sys.stderr)
        try:
            rows.extend(QUESTIONS[name](place, sizes))
        except (OSError, RuntimeError, subprocess.SubprocessError) as error:
            failures[name] = str(error)
    return Bench(facts=facts(place.driver), rows=tuple(rows), failures=failures)
