# SPDX-License-Identifier: Apache-2.0
"""A simulated machine with several GPUs, and shares that are created as users do.

`allot run` creates the shares, so that the whole path is measured: placement, the device's contract
and leases, the shim. The base runs at the same time on another GPU of the machine, so that whatever
else this computer does meets both alike.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from allotment.devices import simulated
from allotment.devices.packing import read_machine
from allotment.model.devices import Device
from bench.harness.options import Options
from bench.harness.programs import bare_environment, build_programs
from bench.harness.results import Result

GPUS: Final = 6
PROGRAMS: Final = ("brief", "calls", "launches", "load", "sampler", "service", "steps")


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What a share is given: options of `allot run`."""

    compute: str = ""
    """As `--compute`: `30`, `30:100`; empty: the option is left out."""
    share_class: str = ""
    memory: str = "2Gi"
    others: tuple[str, ...] = ()

    def options(self) -> list[str]:
        """Return the words for the command line."""
        words = ["--memory", self.memory, *self.others]
        words += ["--compute", self.compute] if self.compute else []
        words += ["--class", self.share_class] if self.share_class else []
        return words


@dataclass(frozen=True, slots=True, kw_only=True)
class Rig:
    """A machine, a state folder, and what was learned on them so far."""

    programs: Path
    state: Path
    spec: str
    """The value of `--simulated`; empty on real GPUs."""
    machine: Path | None
    devices: tuple[Device, ...]
    verbose: bool
    errors: list[tuple[str, float]] = field(default_factory=list)
    """How far the ledger's figure was from the truth, in percent, by scene."""

    @property
    def facts(self) -> dict[str, str]:
        """Return what is under test."""
        return {"driver": f"simulated, {self.spec}" if self.spec else self.devices[0].name}

    def ledger_error(self) -> Iterator[Result]:
        """Report how far the ledger was off in the scenes so far, and forget them."""
        if not self.errors:
            return
        worst_in, worst = max(self.errors, key=lambda each: abs(each[1]))
        middle = statistics.median(abs(error) for _, error in self.errors)
        yield Result(
            topic="the ledger's figure",
            name="GPU time that the ledger charged, against the simulator's",
            seen=f"median {middle:.2f} %, worst {worst:+.2f} % ({worst_in})",
            value=abs(worst),
            unit="%",
            samples=len(self.errors),
            method="every share of the scenes above, over its whole life",
        )
        self.errors.clear()

    def program(self, name: str, *arguments: str | float) -> list[str]:
        """Return the command line of a compiled program."""
        return [str(self.programs / name), *map(str, arguments)]

    def bare(self, gpu: int | None = None) -> dict[str, str]:
        """Return the environment of a program outside of any share, with one GPU or all."""
        chosen = {} if gpu is None else {"CUDA_VISIBLE_DEVICES": self.devices[gpu].uuid}
        return bare_environment(self.machine) | chosen

    def outside(self) -> dict[str, str]:
        """Return the environment of `allot` itself."""
        return bare_environment(None) | {"ALLOTMENT_STATE": str(self.state)}

    def shared(self, terms: Terms, gpu: int, name: str) -> list[str]:
        """Return the words that come before a command to run it in a share of its own."""
        options = ["--gpu", self.devices[gpu].uuid, "--name", name]
        options += ["--simulated", self.spec] if self.spec else []
        return [*ALLOT, "run", *options, *terms.options(), "--"]


ALLOT: Final = (sys.executable, "-m", "allotment")


@contextmanager
def rig_of(options: Options) -> Iterator[Rig]:
    """Yield the machine that the benches of this room share."""
    with simulated_rig(verbose=options.is_verbose) as rig:
        yield rig


@contextmanager
def simulated_rig(
    *, gpus: int = GPUS, model: str = "a100-80gb", verbose: bool = False
) -> Iterator[Rig]:
    """Make a machine with a state folder of its own, gone at the end."""
    with tempfile.TemporaryDirectory(prefix="allotment-bench-") as folder:
        state = Path(folder) / "state"
        state.mkdir()
        spec = f"{model}:{gpus}"
        machine = simulated.machine_path(state, spec)
        yield Rig(
            programs=build_programs(Path(folder) / "programs", PROGRAMS),
            state=state,
            spec=spec,
            machine=machine,
            devices=read_machine(machine).devices,
            verbose=verbose,
        )


@contextmanager
def real_rig(device: Device, *, verbose: bool = False) -> Iterator[Rig]:
    """Take a real GPU, with a state folder of its own."""
    with tempfile.TemporaryDirectory(prefix="allotment-bench-") as folder:
        state = Path(folder) / "state"
        state.mkdir()
        yield Rig(
            programs=build_programs(Path(folder) / "programs", PROGRAMS),
            state=state,
            spec="",
            machine=None,
            devices=(device,),
            verbose=verbose,
        )
