# SPDX-License-Identifier: Apache-2.0
"""A machine to measure on, a fresh share on it, and the environments of both sides."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from allotment import ledger
from allotment.devices import simulated
from allotment.devices.nvml import Nvml
from allotment.devices.packing import read_machine
from allotment.devices.sources import Problem
from allotment.libraries import SHIM, library_path
from allotment.model.devices import Device
from bench.harness.options import Options
from bench.harness.programs import bare_environment, build_programs

SIMULATED_SPEC: Final = "a100-80gb"
PROGRAMS: Final = ("calls", "fill", "hold", "initialise", "nothing", "start", "storm", "watch")


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareRig:
    """A machine to measure on, and the folder of the compiled programs."""

    programs: Path
    work: Path
    device: Device
    machine: Path | None
    """The simulated machine's file; None on real GPUs."""
    spec: str
    """The value of `--simulated`; empty on real GPUs."""
    driver: str

    @property
    def facts(self) -> dict[str, str]:
        """Return what is under test."""
        return {"driver": self.driver}

    def bare(self) -> dict[str, str]:
        """Return the environment of a program that has the whole machine."""
        return bare_environment(self.machine)

    def inside(self, share: Path) -> dict[str, str]:
        """Return the environment of a program inside a share."""
        return self.bare() | self.added(share)

    def added(self, share: Path) -> dict[str, str]:
        """Return what a share adds to the environment, where no mount namespace carries it."""
        return {"LD_PRELOAD": str(library_path(SHIM)), "ALLOTMENT_SHARE": str(share)}

    def make_share(self, name: str, limit_bytes: int) -> Path:
        """Make a share of the device."""
        share = self.work / name
        share.mkdir()
        limited = ledger.DevicePolicy(
            uuid=self.device.uuid,
            memory_limit=limit_bytes,
            context_bytes=self.device.context_bytes,
        )
        ledger.create(
            share, ledger.LedgerPolicy(share_id=name, share_name=name, devices=(limited,))
        )
        return share

    def used_by(self, pid: int) -> int | None:
        """Ask NVML, outside of any share, how many bytes of the device a process has."""
        with Nvml(machine=self.machine) as source:
            reading = source.readings()[self.device.uuid]
        if isinstance(reading, Problem):
            return None
        return sum(each.used_bytes or 0 for each in reading.processes if each.pid == pid)

    def program(self, name: str, *arguments: str | int) -> list[str]:
        """Return the command line of a compiled program."""
        return [str(self.programs / name), *map(str, arguments)]


@contextmanager
def share_rig(_options: Options) -> Iterator[ShareRig]:
    """Make a simulated machine of its own, gone at the end."""
    with tempfile.TemporaryDirectory(prefix="allotment-bench-") as folder:
        work = Path(folder)
        machine = simulated.machine_path(work, SIMULATED_SPEC)
        yield ShareRig(
            programs=build_programs(work / "programs", PROGRAMS),
            work=work,
            device=read_machine(machine).devices[0],
            machine=machine,
            spec=SIMULATED_SPEC,
            driver=f"simulated, {SIMULATED_SPEC}",
        )
