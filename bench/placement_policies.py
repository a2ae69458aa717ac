# SPDX-License-Identifier: Apache-2.0
"""How full clusters get: every policy on every trace, by `allot simulate`.

    python bench/placement_policies.py                      a made-up trace; 3 minutes
    python bench/placement_policies.py --data DIR           the traces `openb`; 20 minutes
    python bench/placement_policies.py --data DIR --markdown    also into docs/performance.md
    python bench/placement_policies.py --data DIR --plot        also docs/images/placement-*.svg
    python bench/placement_policies.py --data DIR --figures FILE    keeps the figures in FILE, and
                                                            replays what it has not got yet alone
    python bench/placement_policies.py --only variants --scale 0.2 [--markdown]
                                                            pods that leave, GPU memory, and the mix

DIR has openb_node_list_gpu_node.csv and openb_pod_list_*.csv (Alibaba's clusterdata,
cluster-trace-gpu-v2023, csv/): they state no licence, so that they are not in this repository.
`--plot` needs the dependency group `bench` (matplotlib).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, Final

from places import ROOT, facts
from tables import put_between_markers

OURS: Final = "fragmentation"
POLICIES: Final = (OURS, "fgd", "binpack", "first-fit", "spread", "random")
SEEDS: Final = "42-51"
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
PARTS: Final = ("traces", "variants")
MARKERS: Final = {"traces": "placement", "variants": "placement-variants"}
"""Of docs/performance.md."""

Documents = dict[str, Any]
"""What `allot simulate` printed, by trace, and by variant under `variants`."""


def arguments(words: list[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data", type=Path, metavar="DIR", help="a folder with the traces openb")
    parser.add_argument("--traces", help="some of them, by commas: default,cpu100")
    parser.add_argument(
        "--policies",
        type=lambda text: [each for each in POLICIES if each in text.split(",")],
        default=list(POLICIES),
    )
    parser.add_argument("--seeds", default=SEEDS)
    parser.add_argument("--variant-seeds", default=SEEDS)
    parser.add_argument("--only", choices=PARTS, help="of both; default: all")
    parser.add_argument("--scale", default="1", help="of the made-up trace: a part of it")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument(
        "--figures", type=Path, metavar="FILE", help="keep them, and go on from them"
    )
    parser.add_argument("--markdown", action="store_true", help="write into docs/performance.md")
    parser.add_argument("--plot", action="store_true", help="draw docs/images/placement-*.svg")
    return parser.parse_args(words)


def traces(chosen: argparse.Namespace) -> dict[str, list[str]]:
    """Return by trace how `allot simulate` is told of it."""
    if chosen.data is None:
        return {MADE_UP: ["--generate", "--scale", chosen.scale]}
    nodes = chosen.data / "openb_node_list_gpu_node.csv"
    found = {
        path.stem.removeprefix("openb_pod_list_"): ["--nodes", str(nodes), "--pods", str(path)]
        for path in sorted(chosen.data.glob("openb_pod_list_*.csv"))
    }
    wanted = chosen.traces.split(",") if chosen.traces else sorted(found, key=_order)
    missing = [name for name in wanted if name not in found]
    if missing or not wanted:
        sys.exit(f"error: {chosen.data} has no openb_pod_list_{(missing or ['*'])[0]}.csv")
    return {name: found[name] for name in wanted}


def _order(name: str) -> tuple[int, str]:
    known = list(TARGETS)
    return (known.index(name) if name in known else len(known), name)


def measure(chosen: argparse.Namespace) -> Documents:
    """Replay what there are no figures of; they are kept after each step."""
    documents: Documents = {"traces": {}, "variants": {}}
    if chosen.figures is not None and chosen.figures.exists():
        documents = json.loads(chosen.figures.read_text())
    documents["machine"] = {key: value for key, value in facts("").items() if key != "driver"}
    told = traces(chosen)
    documents["plotted"] = next((name for name in PLOTTED if name in told), next(iter(told)))
    plotted = [*told[documents["plotted"]], "--seeds", chosen.variant_seeds]
    # By policy first: whoever ends it early has figures to compare.
    for policy in chosen.policies:
        for name, words in told.items() if chosen.only != "variants" else ():
            replay(documents["traces"], name, [*words, "--seeds", chosen.seeds], policy, chosen)
            keep(documents, chosen)
    for policy in chosen.policies:
        for name, more in VARIANTS.items() if chosen.only != "traces" else ():
            if name not in OF_THE_MIX or policy in LEARNERS:
                replay(documents["variants"], name, [*plotted, *more], policy, chosen)
                keep(documents, chosen)
    return documents


def replay(
    found: Documents, name: str, words: Sequence[str], policy: str, chosen: argparse.Namespace
) -> None:
    """Replay one policy, unless there are figures of it."""
    kept = found.get(name, {"runs": [], "summary": []})
    if all(each["policy"] != policy for each in kept["summary"]):
        more = simulate(*words, "--policy", policy, "--jobs", str(chosen.jobs))
        found[name] = {part: [*kept[part], *more[part]] for part in ("runs", "summary")}
    for each in found[name].values():
        each.sort(key=lambda one: POLICIES.index(one["policy"]))


def keep(documents: Documents, chosen: argparse.Namespace) -> None:
    """Write down all figures so far."""
    if chosen.figures is not None:
        chosen.figures.write_text(json.dumps(documents) + "\n")


def simulate(*words: str) -> Any:  # noqa: ANN401 - JSON
    """Run `allot simulate`, and return what it printed."""
    command = [sys.executable, "-m", "allotment", "simulate", *words, "-o", "json"]
    print("$ allot", *command[3:], file=sys.stderr)
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout)


def render(documents: Documents, part: str, *, command: str) -> str:
    """Write the tables of one of `PARTS` as Markdown."""
    lines = [f"Made by `{command}` on:", ""]
    lines += [f"- {name}: {value}" for name, value in documents["machine"].items()]
    if part == "traces":
        found = documents["traces"]
        plotted = documents["plotted"]
        lines += ["", *_traces_table(found), "", *_policies_table(found[plotted], plotted)]
    else:
        lines += ["", *_variants_table(documents["variants"], documents["plotted"])]
    return "\n".join(lines)


def _traces_table(found: Mapping[str, Any]) -> Iterator[str]:
    first = next(iter(found.values()))
    policies = _policies(found)
    seeds = len(first["summary"][0]["seeds"])
    yield f"Percent of all GPUs allocated when 100 % have been asked for, means of {_seeds(seeds)}"
    yield "(± standard deviation):"
    yield ""
    yield _line("trace", *(f"`{name}`" for name in policies), "`fgd`, published", "target")
    yield _line(*["---"] * (len(policies) + 3))
    for name, document in found.items():
        target = TARGETS.get(name)
        by_policy = {each["policy"]: each for each in document["summary"]}
        ours = by_policy.get(OURS)
        yield _line(
            name,
            *(_with_spread(by_policy.get(policy)) for policy in policies),
            f"{PUBLISHED[name]:.2f}" if name in PUBLISHED else "",
            "" if target is None else f"{target} {_verdict(ours, target)}",
        )


def _verdict(ours: Mapping[str, Any] | None, target: float) -> str:
    """Compare with the target as it is shown: to one decimal."""
    if ours is None:
        return ""
    return "met" if round(ours["allocated_pct"]["100"], 2) >= target else "MISSED"


def _policies(found: Mapping[str, Any]) -> list[str]:
    there = {each["policy"] for document in found.values() for each in document["summary"]}
    return [policy for policy in POLICIES if policy in there]


def _with_spread(summary: Mapping[str, Any] | None, *, mark: str = "100") -> str:
    if summary is None:
        return ""
    spread = summary["allocated_pct_stdev"][mark]
    mean = f"{summary['allocated_pct'][mark]:.2f}"
    return mean if spread is None else f"{mean} ± {spread:.2f}"


def _policies_table(document: Mapping[str, Any], trace: str) -> Iterator[str]:
    yield f"Trace {trace}, allocated and fragmented as more is asked for; time of a decision:"
    yield ""
    marks = ("95", "100", "130")
    heads = [f"allocated at {mark} %" for mark in marks]
    yield _line("policy", *heads, "fragmented at 100 %", "decision p50", "p99, worst seed")
    yield _line(*["---"] * 7)
    for each in document["summary"]:
        times = each["decision_ms"]
        yield _line(
            f"`{each['policy']}`",
            *(f"{each['allocated_pct'][mark]:.2f}" for mark in marks),
            f"{each['fragmented_pct']['100']:.2f}",
            f"{times['p50']:.2f} ms",
            f"{times['p99']:.2f} ms",
        )


def _variants_table(found: Mapping[str, Any], trace: str) -> Iterator[str]:
    policies = _policies(found)
    seeds = len(next(iter(found.values()))["summary"][0]["seeds"])
    yield f"The trace {trace}, {'means of ' if seeds > 1 else ''}{_seeds(seeds)} (± standard"
    yield "deviation); where pods leave, as a mean over the second half of the time, and how many"
    yield "had to wait:"
    yield ""
    yield _line("", *(f"`{name}`" for name in policies))
    yield _line(*["---"] * (len(policies) + 1))
    for title, document in found.items():
        by_policy = {each["policy"]: each for each in document["summary"]}
        yield _line(title, *(_variant(by_policy.get(policy)) for policy in policies))


def _variant(summary: Mapping[str, Any] | None) -> str:
    if summary is None or "100" in summary["allocated_pct"]:
        return _with_spread(summary)
    waited = 100 * summary["waited"] / summary["pods"]
    return f"{_with_spread(summary, mark='late')}, {waited:.1f} % wait"


def _seeds(number: int) -> str:
    return f"{number} seed{'s' if number > 1 else ''}"


def _line(*cells: str) -> str:
    return "| " + " | ".join(cells) + " |"


def draw(documents: Documents, folder: Path) -> None:
    """Draw allocated and fragmented over what was asked for, each as an SVG."""
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams.update({"svg.hashsalt": "allotment", "svg.fonttype": "none", "font.size": 10})
    document = documents["traces"][documents["plotted"]]
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


def main(words: list[str]) -> int:
    """Replay, print and, where asked to, write and draw."""
    chosen = arguments(words)
    documents = measure(chosen)
    data = " --data DIR" if chosen.data else f" --scale {chosen.scale}"
    for part in PARTS if chosen.only is None else (chosen.only,):
        command = f"python bench/placement_policies.py{data} --only {part} --markdown"
        body = render(documents, part, command=command)
        print(body)
        if chosen.markdown:
            page = ROOT / "docs" / "performance.md"
            put_between_markers(page, name=MARKERS[part], title="Placement", body=body)
    if chosen.plot:
        draw(documents, ROOT / "docs" / "images")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
