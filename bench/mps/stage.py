# SPDX-License-Identifier: Apache-2.0
"""A simulated machine of two GPUs, and loads on them with and without shares."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from allotment.devices.simulated import SimulatedMachine, machine_path
from allotment.libraries import SIMULATED, library_path
from allotment.modes.mps.state import MpsPlace, MpsStatus
from bench.harness.options import Options
from bench.harness.programs import line_of

LOAD: Final = Path(__file__).with_name("load.py")
SPEC: Final = "a100-80gb:2"
BLOCKS: Final = 40  # 20 of 108 multiprocessors
PATIENCE_S: Final = 60.0


class Stage:
    """A state folder with a simulated machine of two GPUs."""

    def __init__(self, root: Path) -> None:
        """Make the machine; the programs start later."""
        self.root = root
        self.machine = machine_path(root, SPEC)
        self.uuids = [each.uuid for each in SimulatedMachine(self.machine).devices()]
        self.environment = {**os.environ, "ALLOTMENT_STATE": str(root)}

    @property
    def facts(self) -> dict[str, str]:
        """Return what is under test."""
        return {"driver": f"simulated, {SPEC}"}

    def status(self, gpu: int = 0) -> MpsStatus:
        """Return how a GPU's daemon is."""
        return MpsPlace(self.root / "mps" / self.uuids[gpu]).status()

    def bare(self, *words: str) -> subprocess.Popen[str]:
        """Start a load without a share."""
        variables = {
            "LD_LIBRARY_PATH": str(library_path(SIMULATED)),
            "ALLOTMENT_SIMULATED_MACHINE": str(self.machine),
        }
        return _started([sys.executable, str(LOAD), *words], {**self.environment, **variables})

    def share(self, mode: str, *words: str, gpu: int = 0) -> subprocess.Popen[str]:
        """Start a load in a share of half a GPU."""
        command = [
            *(sys.executable, "-m", "allotment", "run", "--simulated", SPEC, "--memory", "4Gi"),
            *("--mode", mode, "--compute", "50", "--gpu", self.uuids[gpu]),
            *("--", sys.executable, str(LOAD), *words),
        ]
        return _started(command, self.environment)

    def close(self) -> None:
        """End the daemons and their supervisors."""
        for gpu in range(len(self.uuids)):
            status = self.status(gpu)
            for pid in filter(None, (status.supervisor, status.daemon)):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def _started(command: list[str], environment: dict[str, str]) -> subprocess.Popen[str]:
    started = subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    if line_of(started) != "ready":
        message = f"{' '.join(command)} did not start"
        raise RuntimeError(message)
    return started


def begin(programs: Sequence[subprocess.Popen[str]]) -> None:
    """Let loads run."""
    for each in programs:
        if each.stdin:
            each.stdin.write("\n")
            each.stdin.flush()


def kernels(programs: Sequence[subprocess.Popen[str]]) -> int:
    """Let loads run together, and return how many kernels they ended."""
    begin(programs)
    done = [int(line_of(each)) for each in programs]
    for each in programs:
        each.communicate()
    return sum(done)


@contextmanager
def stage(_options: Options) -> Iterator[Stage]:
    """Yield a stage whose daemons end with it."""
    with tempfile.TemporaryDirectory(prefix="allotment-bench-") as folder:
        made = Stage(Path(folder) / "state")
        try:
            yield made
        finally:
            made.close()
