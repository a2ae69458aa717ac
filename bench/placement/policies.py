# SPDX-License-Identifier: Apache-2.0
"""How full clusters get: every policy on every trace, by `allot simulate`.

`--data DIR` has openb_node_list_gpu_node.csv and openb_pod_list_*.csv (Alibaba's clusterdata,
cluster-trace-gpu-v2023, csv/): they state no licence, so that they are not in this repository.
`--figures FILE` keeps the figures, and a later run replays only what it has not got yet. `--plot`
needs the dependency group `bench` (matplotlib).
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, Final

from allotment.model.errors import UsageError
from allotment.simulate.outcomes import CLAIMS
from bench.harness.machine import ROOT
from bench.harness.options import Options
from bench.harness.quantiles import Summary
from bench.harness.results import Result
from bench.harness.runner import NoRig

OURS: Final = "fragmentation"
POLICIES: Final = (OURS, "fgd", "binpack", "first-fit", "spread", "random", CLAIMS)
"""The last one: pods as resource claims, where kube-scheduler takes the first devices that fit."""
SEEDS: Final = range(42, 52)
MADE_UP: Final = "made up"
PLOTTED: Final = ("default", MADE_UP)
"""The trace that is drawn: the first of these that was replayed."""
TARGETS: Final[Mapping[str, float]] = {
    "default": 95.4,
    "cpu100": 95.4,
    "gpushare40": 94.0,
    "multigpu20": 95.9,
    "gpuspec20": 95.5,
}
"""For `fragmentation`, percent of all GPUs allocated when 100 % have been asked for."""
PUBLISHED: Final[Mapping[str, float]] = {
    "default": 95.23,
    "cpu050": 95.00,
    "cpu100": 95.21,
    "cpu200": 94.82,
    "cpu250": 93.20,
    "gpushare40": 93.96,
    "gpushare60": 91.25,
    "gpushare80": 89.08,
    "gpushare100": 86.64,
    "multigpu20": 95.53,
    "multigpu30": 96.36,
    "multigpu40": 96.91,
    "multigpu50": 97.09,
    "gpuspec10": 94.66,
    "gpuspec20": 94.66,
    "gpuspec25": 93.91,
    "gpuspec33": 87.84,
}
"""Of `fgd`, by its authors: means of ten seeds."""
VARIANTS: Final[Mapping[str, Sequence[str]]] = {
    "GPU memory counts as well": ("--gpu-memory",),
    "pods leave, 95 % asked for at a time": ("--departures", "--tune", "0.95"),
    "pods leave, 120 % asked for at a time": ("--departures", "--tune", "1.2"),
    "the mix known beforehand": ("--mix", "known"),
    "the mix learnt by all": ("--mix", "learnt"),
}
"""What else is asked of the plotted trace."""
OF_THE_MIX: Final = ("the mix known beforehand", "the mix learnt by all")
LEARNERS: Final = (OURS, "fgd")
"""The others do not heed the mix."""

Documents = dict[str, Any]
"""What `allot simulate` printed, by trace, and by variant under `variants`."""


def traces(options: Options) -> dict[str, list[str]]:
    """Return the words for `allot simulate`, by trace."""
    if options.data is None:
        scale = options.scale or (0.02 if options.is_quick else 1.0)
        return {MADE_UP: ["--generate", "--scale", f"{scale:g}"]}
    nodes = options.data / "openb_node_list_gpu_node.csv"
    found = {
        path.stem.removeprefix("openb_pod_list_"): ["--nodes", str(nodes), "--pods", str(path)]
        for path in sorted(options.data.glob("openb_pod_list_*.csv"))
    }
    wanted = options.traces or sorted(found, key=_order)
    missing = [name for name in wanted if name not in found]
    if missing or not wanted:
        raise UsageError(f"{options.data} has no openb_pod_list_{(missing or ['*'])[0]}.csv")
    return {name: found[name] for name in wanted}


def _order(name: str) -> tuple[int, str]:
    known = list(TARGETS)
    return (known.index(name) if name in known else len(known), name)


class Replays:
    """Figures of `allot simulate`; `--figures` keeps them after each step."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self.documents: Documents = {"traces": {}, "variants": {}}
        if options.figures is not None and options.figures.exists():
            self.documents = json.loads(options.figures.read_text())
        self.traces = traces(options)
        names = [name for name in PLOTTED if name in self.traces]
        self.plotted: str = next(iter([*names, *self.traces]))
        self.policies = self._policies()
        seeds = options.seeds or (range(42, 43) if options.is_quick else SEEDS)
        self._seeds = ("--seeds", f"{seeds[0]}-{seeds[-1]}" if len(seeds) > 1 else f"{seeds[0]}")

    def _policies(self) -> list[str]:
        quick = (*POLICIES[:2], CLAIMS) if self._options.is_quick else POLICIES
        chosen = self._options.policies or quick
        unknown = [each for each in chosen if each not in POLICIES]
        if unknown:
            raise UsageError(
                f"--policies: no {', '.join(unknown)}", hint=f"choose from {', '.join(POLICIES)}"
            )
        return [each for each in POLICIES if each in chosen]

    def replay_traces(self) -> Documents:
        """Replay every trace; by policy first: a run that is ended early has figures to compare."""
        for policy in self.policies:
            for name, words in self.traces.items():
                self._replay("traces", name, words, policy)
        return dict(self.documents["traces"])

    def replay_variants(self) -> Documents:
        """Replay the variants of one trace."""
        for policy in self.policies:
            for name, more in VARIANTS.items():
                if name not in OF_THE_MIX or policy in LEARNERS:
                    self._replay("variants", name, [*self.traces[self.plotted], *more], policy)
        return dict(self.documents["variants"])

    def _replay(self, part: str, name: str, words: Sequence[str], policy: str) -> None:
        found = self.documents[part].get(name, {"runs": [], "summary": []})
        if all(each["policy"] != policy for each in found["summary"]):
            asked = ("first-fit", "--dra") if policy == CLAIMS else (policy,)
            words = [*words, *self._seeds, "--policy", *asked, "--jobs", str(self._options.jobs)]
            more = simulate(*words)
            for kind, each in found.items():
                each += [one for one in more[kind] if one["policy"] == policy]
        for each in found.values():
            each.sort(key=lambda one: POLICIES.index(one["policy"]))
        self.documents[part][name] = found
        if self._options.figures is not None:
            self._options.figures.write_text(json.dumps(self.documents) + "\n")


def simulate(*words: str) -> Any:  # noqa: ANN401 - JSON
    """Run `allot simulate`, and return what it printed."""
    command = [sys.executable, "-m", "allotment", "simulate", *words, "-o", "json"]
    print("$ allot", *command[3:], file=sys.stderr)
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout)


def policies(_rig: NoRig, options: Options) -> Iterator[Result]:
    """Replay every policy on every trace."""
    replays = Replays(options)
    found = replays.replay_traces()
    for trace, document in found.items():
        for summary in document["summary"]:
            yield _allocated(trace, summary)
    for summary in found[replays.plotted]["summary"]:
        yield from _in_detail(replays.plotted, summary)
    if options.plot:
        draw(found[replays.plotted], ROOT / "docs" / "images")


def variants(_rig: NoRig, options: Options) -> Iterator[Result]:
    """Replay one trace where pods leave, GPU memory counts, or the mix is known."""
    replays = Replays(options)
    for title, document in replays.replay_variants().items():
        for summary in document["summary"]:
            yield _variant(title, summary)


def _allocated(trace: str, summary: Mapping[str, Any]) -> Result:
    policy = summary["policy"]
    published = PUBLISHED.get(trace) if policy == "fgd" else None
    return Result(
        name=f"allocated, trace {trace}: `{policy}`",
        topic="allocated",
        unit="%",
        # Compared as it is shown.
        value=round(summary["allocated_pct"]["100"], 2),
        seen=f"{_with_spread(summary, '100')} %",
        beside="" if published is None else f"{published:.2f} %, published",
        target=TARGETS.get(trace) if policy == OURS else None,
        at_least=True,
        samples=len(summary["seeds"]),
        method="percent of all GPUs allocated when 100 % have been asked for, mean of the seeds"
        " (± standard deviation)",
    )


def _in_detail(trace: str, summary: Mapping[str, Any]) -> Iterator[Result]:
    policy, samples, times = summary["policy"], len(summary["seeds"]), summary["decision_ms"]
    marks = ("95", "100", "130")
    yield Result(
        name=f"free and of no use, trace {trace}: `{policy}`",
        topic="fragmented",
        unit="%",
        value=summary["fragmented_pct"]["100"],
        seen="allocated at "
        + ", ".join(f"{mark} %: {summary['allocated_pct'][mark]:.2f} %" for mark in marks),
        samples=samples,
        method="when 100 % have been asked for; beside it what is allocated as more is asked for",
    )
    yield Result(
        name=f"one decision, trace {trace}: `{policy}`",
        topic="decision",
        unit="ms",
        value=times["p99"],
        summary=Summary(p50=times["p50"], p99=times["p99"]),
        samples=samples,
        method="p50, and p99 of the worst seed",
    )


def _variant(title: str, summary: Mapping[str, Any]) -> Result:
    leave = "100" not in summary["allocated_pct"]
    mark = "late" if leave else "100"
    waited = f", {100 * summary['waited'] / summary['pods']:.1f} % wait" if leave else ""
    return Result(
        name=f"{title}: `{summary['policy']}`",
        topic="variants",
        unit="%",
        value=round(summary["allocated_pct"][mark], 2),
        seen=f"{_with_spread(summary, mark)} %{waited}",
        samples=len(summary["seeds"]),
        method="percent of all GPUs allocated (± standard deviation); where pods leave, as a mean"
        " over the second half of the time, and how many had to wait",
    )


def _with_spread(summary: Mapping[str, Any], mark: str) -> str:
    spread = summary["allocated_pct_stdev"][mark]
    mean = f"{summary['allocated_pct'][mark]:.2f}"
    return mean if spread is None else f"{mean} ± {spread:.2f}"


def draw(document: Mapping[str, Any], folder: Path) -> None:
    """Draw allocated and fragmented over what was asked for, each as an SVG."""
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams.update({"svg.hashsalt": "allotment", "svg.fonttype": "none", "font.size": 10})
    lines = {
        summary["policy"]: curve(document["runs"], summary["policy"])
        for summary in document["summary"]
    }
    _draw_one(
        {name: (points["arrived_pct"], points["allocated_pct"]) for name, points in lines.items()},
        folder / "placement-allocated.svg",
        title="allocated, % of all GPUs",
        limits=((80, 131), (75, 100)),
    )
    _draw_one(
        {name: (points["arrived_pct"], points["fragmented_pct"]) for name, points in lines.items()},
        folder / "placement-fragmented.svg",
        title="free and of no use, % of all GPUs",
        limits=((0, 131), (0, 20)),
    )


def curve(runs: Sequence[Mapping[str, Any]], policy: str) -> dict[str, list[float]]:
    """Return the mean of a policy's curves: all have a point at each 5 % that arrived."""
    curves = [run["curve"] for run in runs if run["policy"] == policy]
    length = min(len(each["arrived_pct"]) for each in curves)
    return {
        name: [fmean(each[name][place] for each in curves) for place in range(length)]
        for name in ("arrived_pct", "allocated_pct", "fragmented_pct")
    }


def _draw_one(
    lines: Mapping[str, tuple[Sequence[float], Sequence[float]]],
    path: Path,
    *,
    title: str,
    limits: tuple[tuple[float, float], tuple[float, float]],
) -> None:
    from matplotlib import pyplot as plt

    figure, panel = plt.subplots(figsize=(8, 4.5))
    for name, (across, up) in lines.items():
        width = 2.2 if name == OURS else 1.3
        panel.plot(across, up, color=f"C{POLICIES.index(name)}", linewidth=width, label=name)
    panel.set_xlabel("asked for so far, % of all GPUs")
    panel.set_ylabel(title)
    panel.set_xlim(*limits[0])
    panel.set_ylim(*limits[1])
    panel.axvline(100, color="0.8", linewidth=0.8, zorder=0)
    panel.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    panel.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)
    # The writer leaves blanks at the ends of lines.
    path.write_text("\n".join(line.rstrip() for line in path.read_text().splitlines()) + "\n")
