# SPDX-License-Identifier: Apache-2.0
"""The command line of all benches: one parser, one set of options."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from bench.harness.results import RESULTS

_OUTPUTS: Final = ("table", "markdown", "json")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How to measure. None: the bench's own size."""

    is_quick: bool = False
    is_verbose: bool = False
    # compute
    caps: Sequence[int] | None = None
    kernels: Sequence[str] | None = None
    patterns: Sequence[str] | None = None
    splits: Sequence[Sequence[int]] | None = None
    # clusters
    nodes: int | None = None
    pods: int | None = None
    seed: int | None = None
    policy: str = "fragmentation"
    candidates: int = 1
    most: int | None = None
    samples: int | None = None
    # traces
    trace_nodes: Path | None = None
    trace_pods: Path | None = None
    without_plain: bool = False
    data: Path | None = None
    traces: Sequence[str] | None = None
    policies: Sequence[str] | None = None
    seeds: range | None = None
    scale: float | None = None
    jobs: int = 1
    figures: Path | None = None
    plot: bool = False
    arrivals: int | None = None
    steps: int | None = None
    # a real GPU
    is_simulated: bool = False
    change_settings: bool = False
    python: str = sys.executable

    def pick(self, number: int, quick: int) -> int:
        """Return a size: the whole one, or enough to see that it works."""
        return quick if self.is_quick else number


def parser() -> argparse.ArgumentParser:
    """Return the parser of `python -m bench`."""
    made = argparse.ArgumentParser(
        prog="python -m bench",
        description="Measure what Allotment costs and how well it holds.",
        epilog="`--list` shows each bench: its question, how long it takes, what it needs.",
    )
    made.add_argument("names", nargs="*", metavar="NAME", help="a bench or a room; default: a set")
    made.add_argument("--list", action="store_true", help="list the benches and end")
    made.add_argument("--quick", action="store_true", help="seconds each: does it work at all?")
    made.add_argument("--strict", action="store_true", help="fail when a target is missed")
    made.add_argument("-v", "--verbose", action="store_true", help="what happened, on stderr")
    made.add_argument("-o", "--output", choices=_OUTPUTS, default="table")
    made.add_argument(
        "--results",
        type=Path,
        metavar="DIR",
        help="store the results below this folder; default: bench/results, and none with --quick",
    )
    made.add_argument("--no-store", action="store_true", help="do not store the results")
    _add_sizes(made)
    gpu = made.add_argument_group("the room gpu")
    gpu.add_argument("--simulated", action="store_true", help="a dry run on a simulated GPU")
    gpu.add_argument(
        "--change-settings",
        action="store_true",
        help="set the compute mode while MPS runs, and switch MIG for a slice; both are put back",
    )
    gpu.add_argument("--python", default=sys.executable, help="a Python that has PyTorch")
    return made


def _add_sizes(made: argparse.ArgumentParser) -> None:
    compute = made.add_argument_group("the room compute")
    compute.add_argument("--caps", type=_numbers, metavar="N[,N]", help="ceilings; at most five")
    compute.add_argument("--kernels", type=_words, metavar="K[,K]", help="lengths of kernels")
    compute.add_argument("--patterns", type=_words, metavar="P[,P]", help="ways of launching")
    compute.add_argument("--splits", type=_splits, metavar="A/B[,A/B]", help="guarantees")
    sizes = made.add_argument_group("the rooms placement, scheduler and mig")
    sizes.add_argument("--nodes", type=int, metavar="N", help="of the cluster")
    sizes.add_argument("--pods", type=int, metavar="N", help="that come and go")
    sizes.add_argument("--seed", type=int, metavar="N")
    sizes.add_argument("--policy", default="fragmentation", help="of placement")
    sizes.add_argument("--candidates", type=int, default=1, help="nodes that filter returns")
    sizes.add_argument("--most", type=int, metavar="N", help="nodes that rank returns")
    sizes.add_argument("--samples", type=int, metavar="N", help="pods, of slice-start")
    sizes.add_argument("--arrivals", type=int, metavar="N", help="slices asked for, of mig-planner")
    sizes.add_argument("--steps", type=int, metavar="N", help="of mig-planner's random walk")
    traces = made.add_argument_group("replay, policies and variants")
    traces.add_argument("--trace-nodes", type=Path, metavar="CSV", help="openb's columns")
    traces.add_argument("--trace-pods", type=Path, metavar="CSV", help="likewise")
    traces.add_argument(
        "--without-plain",
        action="store_true",
        help="kube-scheduler places pods without GPUs by itself",
    )
    traces.add_argument("--data", type=Path, metavar="DIR", help="a folder with the traces openb")
    traces.add_argument("--traces", type=_words, metavar="T[,T]", help="some of them")
    traces.add_argument("--policies", type=_words, metavar="P[,P]", help="some of them")
    traces.add_argument("--seeds", type=_range, metavar="A-B", help="seeds from A to B")
    traces.add_argument("--scale", type=float, help="a part of the made-up trace")
    traces.add_argument("--jobs", type=int, default=1, help="processes that replay")
    traces.add_argument("--figures", type=Path, metavar="FILE", help="keep them, and resume")
    traces.add_argument("--plot", action="store_true", help="draw docs/images/placement-*.svg")


def options_of(chosen: argparse.Namespace) -> Options:
    """Return the parsed command line's options."""
    return Options(
        is_quick=chosen.quick,
        is_verbose=chosen.verbose,
        is_simulated=chosen.simulated,
        **{
            name: getattr(chosen, name)
            for name in (
                *("caps", "kernels", "patterns", "splits", "nodes", "pods", "seed", "policy"),
                *("candidates", "most", "samples", "trace_nodes", "trace_pods", "without_plain"),
                *("data", "traces", "policies", "seeds", "scale", "jobs", "figures", "plot"),
                *("arrivals", "steps", "change_settings", "python"),
            )
        },
    )


def results_folder(chosen: argparse.Namespace) -> Path | None:
    """Return where results are stored; None: nowhere."""
    if chosen.no_store:
        return None
    if chosen.results is not None:
        return Path(chosen.results)
    return None if chosen.quick else RESULTS


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(word) for word in text.split(","))


def _splits(text: str) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(int(part) for part in word.split("/")) for word in text.split(","))


def _range(text: str) -> range:
    first, _, last = text.partition("-")
    return range(int(first), int(last or first) + 1)
