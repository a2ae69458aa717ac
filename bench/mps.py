# SPDX-License-Identifier: Apache-2.0
"""What MPS brings beside taking turns, and how soon a daemon that was killed is back.

    python bench/mps.py                       the table, on a simulated GPU, as root
    python bench/mps.py --markdown            also into docs/performance.md
    python bench/mps.py --quick -o json       does it work at all?

Two programs run the same small kernels: without shares (the driver slices time), in two shares of
half the GPU's time (mode soft), and in two shares of half its multiprocessors (mode mps).
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

from findings import Finding, Findings, render_markdown, render_text
from places import ROOT, facts
from tables import put_between_markers

from allotment.devices.simulated import SimulatedMachine, machine_path
from allotment.libraries import SIMULATED, library_path
from allotment.modes.mps import DaemonState, MpsPlace, MpsStatus

LOAD: Final = Path(__file__).with_name("mps_load.py")
SPEC: Final = "a100-80gb:2"
BLOCKS: Final = 40  # 20 of 108 multiprocessors
THROUGHPUT_TARGET: Final = 1.5
BACK_TARGET_S: Final = 2.0
_PATIENCE_S: Final = 60.0


class Stage:
    """A state folder with a simulated machine of two GPUs."""

    def __init__(self, root: Path) -> None:
        """Make the machine; the programs start later."""
        self.root = root
        self.machine = machine_path(root, SPEC)
        self.uuids = [each.uuid for each in SimulatedMachine(self.machine).devices()]
        self.environment = {**os.environ, "ALLOTMENT_STATE": str(root)}

    def status(self, gpu: int = 0) -> MpsStatus:
        """Tell how a GPU's daemon is."""
        return MpsPlace(self.root / "mps" / self.uuids[gpu]).status()

    def bare(self, *words: str) -> subprocess.Popen[str]:
        """Start a load without a share."""
        variables = {
            "LD_LIBRARY_PATH": str(library_path(SIMULATED)),
            "ALLOTMENT_SIMULATED_MACHINE": str(self.machine),
        }
        return _start([sys.executable, str(LOAD), *words], {**self.environment, **variables})

    def share(self, mode: str, *words: str, gpu: int = 0) -> subprocess.Popen[str]:
        """Start a load in a share of half a GPU."""
        command = [
            *(sys.executable, "-m", "allotment", "run", "--simulated", SPEC, "--memory", "4Gi"),
            *("--mode", mode, "--compute", "50", "--gpu", self.uuids[gpu]),
            *("--", sys.executable, str(LOAD), *words),
        ]
        return _start(command, self.environment)

    def close(self) -> None:
        """End the daemons and who keeps them."""
        for gpu in range(len(self.uuids)):
            status = self.status(gpu)
            for pid in filter(None, (status.supervisor, status.daemon)):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def _start(command: list[str], environment: dict[str, str]) -> subprocess.Popen[str]:
    started = subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    if _line(started) != "ready":
        message = f"{' '.join(command)} did not start"
        raise RuntimeError(message)
    return started


def _line(program: subprocess.Popen[str]) -> str:
    return program.stdout.readline().strip() if program.stdout else ""


def _begin(programs: list[subprocess.Popen[str]]) -> None:
    for each in programs:
        if each.stdin:
            each.stdin.write("\n")
            each.stdin.flush()


def _kernels(programs: list[subprocess.Popen[str]]) -> int:
    """Let loads run together, and return how many kernels they ended."""
    _begin(programs)
    done = [int(_line(each)) for each in programs]
    for each in programs:
        each.communicate()
    return sum(done)


def throughput(stage: Stage, *, kernel_us: int, seconds: float, rounds: int) -> list[Finding]:
    """Compare the three ways, in turn in each round."""
    words = (str(kernel_us), str(BLOCKS), str(seconds))
    had: dict[str, list[float]] = {"bare": [], "soft": [], "mps": []}
    for _ in range(rounds):
        for way, figures in had.items():
            begin = [
                stage.bare(*words) if way == "bare" else stage.share(way, *words) for _ in range(2)
            ]
            figures.append(_kernels(begin) / seconds)
            if way == "mps":
                _await_stopped(stage)  # the GPU is kept for MPS clients until then
    rate = {way: statistics.median(figures) for way, figures in had.items()}
    ratios = [mps / bare for mps, bare in zip(had["mps"], had["bare"], strict=True)]
    return [
        Finding(
            question="throughput",
            name=f"two programs, kernels of {kernel_us} µs on 20 of 108 multiprocessors",
            without=f"{rate['bare']:.0f} kernels/s",
            seen=f"{rate['mps']:.0f} kernels/s (mode soft: {rate['soft']:.0f})",
            reached=statistics.median(ratios),
            unit="x",
            target=THROUGHPUT_TARGET,
            at_least=True,
            samples=rounds,
            method=f"{seconds:.0f} s with both under way; ratio to the driver's time slicing,"
            f" least of {rounds} rounds {min(ratios):.2f}",
        )
    ]


def _await_stopped(stage: Stage) -> None:
    deadline = time.monotonic() + _PATIENCE_S
    while stage.status().state is not DaemonState.STOPPED:
        if time.monotonic() > deadline:
            message = "the daemon does not stop"
            raise RuntimeError(message)
        time.sleep(0.1)


def kills(stage: Stage, *, rounds: int) -> list[Finding]:
    """Kill the daemon under load, and see when it serves again, and what the other GPU noticed."""
    outside, named = [], 0
    other = stage.share("mps", "200", str(BLOCKS), "600", gpu=1)
    _begin([other])
    for _ in range(rounds):
        loads = [stage.share("mps", "200", str(BLOCKS), "600") for _ in range(2)]
        _begin(loads)
        time.sleep(0.3)
        before = stage.status()
        if before.daemon is None:
            message = "there is no daemon to kill"
            raise RuntimeError(message)
        began = time.monotonic()
        os.kill(before.daemon, signal.SIGKILL)
        while stage.status().restarts == before.restarts:
            if time.monotonic() - began > _PATIENCE_S:
                message = "the daemon does not come back"
                raise RuntimeError(message)
            time.sleep(0.005)
        outside.append(time.monotonic() - began)
        named += len(stage.status().losses[-1].shares) == len(loads)
        for each in loads:
            each.communicate()
    undisturbed = other.poll() is None
    other.terminate()
    other.communicate()
    return [
        Finding(
            question="kills",
            name="daemon killed under load: ready for clients again",
            without="",
            seen=f"p50 {statistics.median(outside):.2f} s",
            reached=max(outside),
            unit="s",
            target=BACK_TARGET_S,
            samples=rounds,
            method="SIGKILL with two shares computing; until the status says that a server is"
            f" active; both shares named in {named} of {rounds}; the program on the other GPU"
            f" {'ran on' if undisturbed else 'WAS DISTURBED'}",
        )
    ]


def main() -> int:
    """Measure, and tell."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="one short round of each")
    parser.add_argument("--markdown", action="store_true", help="also into docs/performance.md")
    parser.add_argument("-o", "--output", choices=("table", "json"), default="table")
    parser.add_argument("--strict", action="store_true", help="status 1 for a missed target")
    asked = parser.parse_args()
    seconds, rounds = (0.5, 1) if asked.quick else (3.0, 3)
    with tempfile.TemporaryDirectory(prefix="allotment-bench-") as folder:
        stage = Stage(Path(folder) / "state")
        try:
            found = [
                *throughput(stage, kernel_us=200, seconds=seconds, rounds=rounds),
                *throughput(stage, kernel_us=50, seconds=seconds, rounds=rounds),
                *kills(stage, rounds=1 if asked.quick else 5),
            ]
        finally:
            stage.close()
    results = Findings(facts=facts("simulated"), findings=found, failures={})
    if asked.markdown:
        body = render_markdown(results, command="python bench/mps.py --markdown")
        page = ROOT / "docs" / "performance.md"
        put_between_markers(page, name="mps", title="MPS", body=body)
    text = json.dumps(results.to_document(), indent=2)
    sys.stdout.write((text if asked.output == "json" else render_text(results)) + "\n")
    missed = any(each.is_met is False for each in found)
    return int(asked.strict and missed)


if __name__ == "__main__":
    sys.exit(main())
