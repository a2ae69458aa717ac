# SPDX-License-Identifier: Apache-2.0
"""Where compute is measured: a simulated machine with several GPUs, and shares made as users do.

Shares are made by `allot run`, so that the whole path is measured: placing, the device's contract
and leases, the shim. What is to be compared runs at the same time on another GPU of the machine,
so that whatever else this computer does meets both alike.
"""

from __future__ import annotations

import sys
import tempfile
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

from places import bare_environment, build_programs

from allotment.devices import simulated

if TYPE_CHECKING:
    from collections.abc import Iterator

    from allotment.model.devices import Device

GPUS: Final = 6
PROGRAMS: Final = ("brief", "launches", "load", "sampler", "service", "steps")


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What a share is given: options of `allot run`."""

    compute: str = ""
    """As `--compute`: `30`, `30:100`; empty: the option is left out."""
    share_class: str = ""
    memory: str = "2Gi"
    others: tuple[str, ...] = ()

    def options(self) -> list[str]:
        """Give the words for the command line."""
        words = ["--memory", self.memory, *self.others]
        words += ["--compute", self.compute] if self.compute else []
        words += ["--class", self.share_class] if self.share_class else []
        return words


@dataclass(frozen=True, slots=True, kw_only=True)
class Ground:
    """A machine, a state folder, and what was learned on them so far."""

    programs: Path
    state: Path
    spec: str
    """How `--simulated` is told the machine; empty on real GPUs."""
    machine: Path | None
    devices: tuple[Device, ...]
    verbose: bool
    errors: list[tuple[str, float]] = field(default_factory=list)
    """How far the ledger's figure was from the truth, in percent, by scene."""

    def program(self, name: str, *arguments: str | float) -> list[str]:
        """Give the command line of a compiled program."""
        return [str(self.programs / name), *map(str, arguments)]

    def bare(self, gpu: int | None = None) -> dict[str, str]:
        """Give the environment of a program outside of any share, with one GPU or all."""
        chosen = {} if gpu is None else {"CUDA_VISIBLE_DEVICES": self.devices[gpu].uuid}
        return bare_environment(self.machine) | chosen

    def outside(self) -> dict[str, str]:
        """Give the environment of `allot` itself."""
        return bare_environment(None) | {"ALLOTMENT_STATE": str(self.state)}

    def shared(self, terms: Terms, gpu: int, name: str) -> list[str]:
        """Give the words that come before a command to run it in a share of its own."""
        options = ["--gpu", self.devices[gpu].uuid, "--name", name]
        options += ["--simulated", self.spec] if self.spec else []
        return [*ALLOT, "run", *options, *terms.options(), "--"]


ALLOT: Final = (sys.executable, "-m", "allotment")


@contextmanager
def ground(
    *, gpus: int = GPUS, model: str = "a100-80gb", verbose: bool = False
) -> Iterator[Ground]:
    """Make a machine with a state folder of its own, gone at the end."""
    with tempfile.TemporaryDirectory(prefix="allotment-bench-") as folder:
        state = Path(folder) / "state"
        state.mkdir()
        spec = f"{model}:{gpus}"
        machine = simulated.machine_path(state, spec)
        yield Ground(
            programs=build_programs(Path(folder) / "programs", PROGRAMS),
            state=state,
            spec=spec,
            machine=machine,
            devices=simulated.read_machine(machine).devices,
            verbose=verbose,
        )


@contextmanager
def real_ground(device: Device, *, verbose: bool = False) -> Iterator[Ground]:
    """Take a real GPU, with a state folder of its own."""
    with tempfile.TemporaryDirectory(prefix="allotment-bench-") as folder:
        state = Path(folder) / "state"
        state.mkdir()
        yield Ground(
            programs=build_programs(Path(folder) / "programs", PROGRAMS),
            state=state,
            spec="",
            machine=None,
            devices=(device,),
            verbose=verbose,
        )
