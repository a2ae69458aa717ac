# SPDX-License-Identifier: Apache-2.0
"""Where the bench measures: a machine, a fresh share on it, and the environments of both sides."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from allotment import ledger
from allotment.devices import simulated
from allotment.devices.nvml import Nvml
from allotment.devices.sources import Problem
from allotment.libraries import SHIM, SIMULATED, library_path
from allotment.model.errors import NoDevicesError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from allotment.model.devices import Device

ROOT: Final = Path(__file__).resolve().parent.parent
PROGRAMS: Final = Path(__file__).resolve().parent / "programs"
SIMULATED_SPEC: Final = "a100-80gb"

_FLAGS: Final = ("-std=c11", "-D_GNU_SOURCE", "-O2", "-Wall", "-Wextra", "-Wno-unused-parameter")
_PROGRAMS: Final = ("calls", "fill", "hold", "initialise", "nothing", "start", "storm", "watch")
_PARTS: Final = ("driver", "lanes")
_DROPPED: Final = ("LD_PRELOAD", "LD_LIBRARY_PATH", "CUDA_VISIBLE_DEVICES")


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A machine to measure on, and the folder of the compiled programs."""

    programs: Path
    work: Path
    device: Device
    machine: Path | None
    """The simulated machine's file; None on real GPUs."""
    spec: str
    """How `--simulated` is told the machine; empty on real GPUs."""
    driver: str

    def bare(self) -> dict[str, str]:
        """Give the environment of a program that has the whole machine."""
        return bare_environment(self.machine)

    def inside(self, share: Path) -> dict[str, str]:
        """Give the environment of a program inside a share."""
        return self.bare() | self.added(share)

    def added(self, share: Path) -> dict[str, str]:
        """Give what a share adds to the environment, where no mount namespace carries it."""
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
        ledger.create(share, ledger.Policy(share_id=name, share_name=name, devices=(limited,)))
        return share

    def used_by(self, pid: int) -> int | None:
        """Ask NVML, outside of any share, how many bytes of the device a process has."""
        with Nvml(machine=self.machine) as source:
            reading = source.readings()[self.device.uuid]
        if isinstance(reading, Problem):
            return None
        return sum(each.used_bytes or 0 for each in reading.processes if each.pid == pid)

    def program(self, name: str, *arguments: str | int) -> list[str]:
        """Give the command line of a compiled program."""
        return [str(self.programs / name), *map(str, arguments)]


@contextmanager
def simulated_place() -> Iterator[Place]:
    """Make a simulated machine of its own, gone at the end."""
    with tempfile.TemporaryDirectory(prefix="allotment-bench-") as folder:
        work = Path(folder)
        machine = simulated.machine_path(work, SIMULATED_SPEC)
        yield Place(
            programs=build_programs(work / "programs"),
            work=work,
            device=simulated.read_machine(machine).devices[0],
            machine=machine,
            spec=SIMULATED_SPEC,
            driver=f"simulated, {SIMULATED_SPEC}",
        )


@contextmanager
def real_place() -> Iterator[Place]:
    """Take the first GPU of this computer; NoDevicesError when there is none."""
    with Nvml() as source:
        devices = source.inventory().devices
    if not devices:
        raise NoDevicesError("NVML knows no GPU here", hint="--simulated for a dry run")
    with tempfile.TemporaryDirectory(prefix="allotment-bench-") as folder:
        yield Place(
            programs=build_programs(Path(folder) / "programs"),
            work=Path(folder),
            device=devices[0],
            machine=None,
            spec="",
            driver=f"{devices[0].name}, NVIDIA driver {_driver_version()}",
        )


def bare_environment(machine: Path | None) -> dict[str, str]:
    """Give the environment of a program that is in no share; on a simulated machine, if any."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in _DROPPED and not name.startswith("ALLOTMENT_")
    }
    if machine is not None:
        kept["LD_LIBRARY_PATH"] = str(library_path(SIMULATED))
        kept["ALLOTMENT_SIMULATED_MACHINE"] = str(machine)
    return kept


def build_programs(folder: Path, names: Collection[str] = ()) -> Path:
    """Compile the bench's C programs with the machine's compiler, else with ziglang's.

    All of those that run.py needs, or those of `names`.
    """
    folder.mkdir()
    compiler = _compiler()
    for name in names or _PROGRAMS:
        source = PROGRAMS / f"{name}.c"
        parts = [part for part in _PARTS if f'#include "{part}.h"' in source.read_text()]
        # What one part is made of, another needs.
        parts = ["driver", "lanes"] if "lanes" in parts else parts
        sources = [source, *(PROGRAMS / f"{part}.c" for part in parts)]
        subprocess.run(
            [
                *compiler,
                *_FLAGS,
                f"-I{ROOT / 'native'}",
                f"-I{ROOT / 'native' / 'include'}",
                *map(str, sources),
                "-o",
                str(folder / source.stem),
                "-ldl",
                "-lpthread",
            ],
            check=True,
        )
    return folder


def facts(driver: str) -> dict[str, str]:
    """Say on what the numbers were made."""
    return {
        "driver": driver,
        "machine": f"{_processor()}, {os.cpu_count()} CPUs, {platform.machine()}",
        "system": f"Linux {platform.release()}, {' '.join(platform.libc_ver())}",
        "Python": platform.python_version(),
        "commit": _commit(),
    }


def _driver_version() -> str:
    text = Path("/proc/driver/nvidia/version")
    if not text.exists():
        return "unknown"
    found = re.search(r"\b\d{3}\.\d+(?:\.\d+)?\b", text.read_text())
    return found[0] if found is not None else "unknown"


def _compiler() -> list[str]:
    for name in (os.environ.get("CC", "cc"), "gcc", "clang"):
        try:
            subprocess.run([name, "--version"], check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError):
            continue
        return [name]
    return [sys.executable, "-m", "ziglang", "cc"]


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return "unknown processor"


def _commit() -> str:
    try:
        answer = subprocess.run(
            ["git", "-C", str(ROOT), "describe", "--always", "--dirty"],
            check=True,
            capture_output=True,
            text=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"  # an unpacked archive is as good a place to measure
    return answer.stdout.strip()
