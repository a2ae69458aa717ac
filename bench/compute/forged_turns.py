# SPDX-License-Identifier: Apache-2.0
"""Do programs compute on while a neighbour damages or forges the file by which it takes turns?"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Final

from bench.compute.rig import Rig, Terms
from bench.compute.scene import Part, Recording, Stage, kill_below, play
from bench.compute.sizes import kernel_words
from bench.harness.machine import ROOT
from bench.harness.options import Options
from bench.harness.results import Result

_FORGER: Final = ROOT / "tests" / "local" / "turns_forger.py"
_ATTACKS: Final = {
    "truncate": "truncates it",
    "garbage": "writes nonsense into it",
    "future": "claims a time in the future",
    "steal": "claims the turn again and again",
}
_VICTIMS: Final = 2
_FILES_OF_ITS_OWN: Final = Terms(compute="20:100", others=("--inject", "environment"))


def forged_turns(rig: Rig, options: Options) -> Iterator[Result]:
    """Measure, for each attack, the longest wait of two neighbours, and what they get."""
    seconds = options.pick(30, 3)
    gone = 0
    for how, what in _ATTACKS.items():
        recording = _play(rig, how, float(seconds))
        first, last = recording.begun_ns, recording.ended_ns
        answers = [each[0] for each in recording.answers]
        gone += sum(each["kernels"] == 0 for each in answers)
        percents = [recording.percent(at, from_ns=first, to_ns=last) for at in range(2 * _VICTIMS)]
        stalls = [each["gap_ns"]["max"] / 1e9 for each in answers]
        yield Result(
            topic="a forger of turns",
            name=f"a share {what}: longest wait of its neighbours",
            beside=f"{max(stalls[_VICTIMS:]):.2f} s, {sum(percents[_VICTIMS:]):.0f} % of the GPU",
            seen=f"{max(stalls[:_VICTIMS]):.2f} s, {sum(percents[:_VICTIMS]):.0f} % of the GPU",
            value=max(stalls[:_VICTIMS]),
            unit="s",
            target=12.0,
            samples=_VICTIMS,
            method=f"two shares of 40:100 that always want more, for {seconds} s, and a third that "
            "computes nothing and does this without end; beside it the same two without it; the "
            "longest time between two ends of about 1 ms of a program's work, and what both have "
            "together",
        )
    yield Result(
        topic="a forger of turns",
        name="neighbours that such an attack ends",
        value=gone,
        unit="programs",
        target=0.0,
        is_required=True,
        samples=_VICTIMS * len(_ATTACKS),
    )


def _play(rig: Rig, how: str, seconds: float) -> Recording:
    command = rig.program("load", *kernel_words("200us"), "--seconds", seconds)
    parts = [
        Part(command=command, gpu=gpu, terms=Terms(compute="40:100"), name=f"gpu-{gpu}-{number}")
        for gpu in range(2)
        for number in range(_VICTIMS)
    ]

    def attack(_stage: Stage) -> None:
        forger = subprocess.Popen(
            [*rig.shared(_FILES_OF_ITS_OWN, 0, "forger"), sys.executable, str(_FORGER), how],
            env=rig.outside(),
            stderr=subprocess.DEVNULL,
        )
        try:
            time.sleep(seconds)
        finally:
            kill_below(forger.pid)
            forger.wait()

    return play(rig, parts, meanwhile=attack)
