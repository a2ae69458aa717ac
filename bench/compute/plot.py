# SPDX-License-Identifier: Apache-2.0
"""Draw guarantee, ceiling and borrowing over time, from a scene that is played for it.

    make plot                                     into docs/images/compute.svg
    python -m bench.compute.plot FILE.svg         needs the dependency group `bench` (matplotlib)
    python -m bench.compute.plot --data FILE.json only the figures

Two GPUs at once: a share of 30:100 beside one of 70, and a share of 30:60 beside one of 70. Both
70s sleep and wake.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any, Final

from bench.compute.rig import Rig, Terms, simulated_rig
from bench.compute.scene import SECOND, Part, play
from bench.compute.sizes import kernel_words
from bench.harness.machine import ROOT

_SECONDS: Final = 11.0
_ASLEEP: Final = ((0.0, 3.0), (6.0, 8.0))
_AWAKE: Final = "3-6,8-11"
_WINDOW_NS: Final = SECOND // 4
_PERIOD_MS: Final = 25
_STORIES: Final = (
    ("30:100", "guarantee 30 %, ceiling 100 %", 100),
    ("30:60", "guarantee 30 %, ceiling 60 %", 60),
)


def record(place: Rig) -> dict[str, Any]:
    """Play the scene; for each share the middle of each window, and its percent of the GPU."""
    steady = place.program("load", *kernel_words("200us"), "--seconds", _SECONDS)
    parts = []
    for gpu, (compute, _, _) in enumerate(_STORIES):
        parts += [
            Part(command=steady, gpu=gpu, terms=Terms(compute=compute), name=f"worker-{gpu}"),
            Part(
                command=[*steady, "--phases", _AWAKE],
                gpu=gpu,
                terms=Terms(compute="70"),
                name=f"sleeper-{gpu}",
            ),
        ]
    recording = play(place, parts, period_ms=_PERIOD_MS)
    lines = []
    for part in range(len(parts)):
        windows = recording.windows(
            part,
            length_ns=_WINDOW_NS,
            from_ns=recording.begun_ns,
            to_ns=recording.begun_ns + int(_SECONDS * SECOND),
        )
        lines.append(
            [
                ((start + _WINDOW_NS // 2 - recording.begun_ns) / SECOND, percent)
                for start, percent in windows
            ]
        )
    return {"stories": [lines[0:2], lines[2:4]]}


def draw(data: dict[str, Any], path: Path) -> None:
    """Draw the recorded scene as an SVG that is the same for the same figures."""
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams.update({"svg.hashsalt": "allotment", "svg.fonttype": "none", "font.size": 10})
    from matplotlib import pyplot as plt

    figure, panels = plt.subplots(len(_STORIES), 1, figsize=(8, 6), sharex=True)
    for panel, lines, (compute, words, ceiling) in zip(
        panels, data["stories"], _STORIES, strict=True
    ):
        for begin, end in _ASLEEP:
            panel.axvspan(begin, end, color="0.93", linewidth=0)
        panel.axhline(30, color="C0", linewidth=0.8, linestyle="--")
        panel.axhline(ceiling, color="C0", linewidth=0.8, linestyle=":")
        for line, colour, label in zip(
            lines, ("C0", "C1"), (f"share of {compute}", "share of 70"), strict=True
        ):
            panel.plot(*zip(*line, strict=True), color=colour, linewidth=1.5, label=label)
        panel.set_title(f"{words}; beside it a 70 that sleeps and wakes", fontsize=10)
        panel.set_ylabel("% of the GPU's time")
        panel.set_ylim(-3, 108)
        panel.set_xlim(0, _SECONDS)
        panel.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
        panel.spines[["top", "right"]].set_visible(False)
    panels[-1].set_xlabel(
        "seconds (each point: a quarter of a second around it; grey: the 70 sleeps;\n"
        "dashed: guarantee; dotted: ceiling)"
    )
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    # The writer leaves blanks at the ends of lines.
    path.write_text("\n".join(line.rstrip() for line in path.read_text().splitlines()) + "\n")


def main(words: list[str]) -> int:
    """Play and draw."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "file", nargs="?", type=Path, default=ROOT / "docs" / "images" / "compute.svg"
    )
    parser.add_argument("--data", type=Path, help="write the figures here and draw nothing")
    chosen = parser.parse_args(words)
    with simulated_rig(gpus=len(_STORIES)) as place:
        data = record(place)
    if chosen.data is not None:
        chosen.data.write_text(json.dumps(data) + "\n")
    else:
        draw(data, chosen.file)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
