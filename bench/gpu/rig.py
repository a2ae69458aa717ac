# SPDX-License-Identifier: Apache-2.0
"""The GPU under test: the first real one, or a simulated one for a dry run."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from allotment.devices.nvml import Nvml
from allotment.model.errors import NoDevicesError, PrerequisiteError
from bench.compute.rig import Rig, real_rig, simulated_rig
from bench.harness.options import Options
from bench.harness.programs import build_programs
from bench.overhead.rig import PROGRAMS, SIMULATED_SPEC, ShareRig, share_rig


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuRig:
    """One GPU, and the Python that programs of PyTorch run with."""

    shares: ShareRig
    options: Options
    torch: str | None
    """Its version; None where that Python has none that can use the GPU."""

    @property
    def facts(self) -> dict[str, str]:
        """Return what is under test."""
        return self.shares.facts | {"PyTorch": self.torch or "none"}

    def machine(self, model: str = SIMULATED_SPEC) -> AbstractContextManager[Rig]:
        """Return the GPU with a fresh state folder; `model` is for a dry run."""
        if self.options.is_simulated:
            return simulated_rig(gpus=1, model=model, verbose=self.options.is_verbose)
        return real_rig(self.shares.device, verbose=self.options.is_verbose)

    def require_torch(self) -> None:
        """Raise PrerequisiteError where PyTorch is missing on a real GPU."""
        if self.torch is None and not self.options.is_simulated:
            raise PrerequisiteError(
                f"{self.options.python} has no PyTorch that can use {self.shares.device.name}",
                hint="pip install torch, or name another Python with --python",
            )


@contextmanager
def gpu_rig(options: Options) -> Iterator[GpuRig]:
    """Yield the GPU under test; NoDevicesError where there is none."""
    with share_rig(options) if options.is_simulated else _real_shares() as shares:
        torch = _torch_version(options.python, shares)
        yield GpuRig(shares=shares, options=options, torch=torch)


def _torch_version(python: str, shares: ShareRig) -> str | None:
    command = (
        "import torch; assert torch.cuda.is_available(); "
        "print(torch.__version__, 'CUDA', torch.version.cuda)"
    )
    try:
        answer = subprocess.run(
            [python, "-W", "ignore", "-c", command],
            env=shares.bare(),
            check=True,
            capture_output=True,
            text=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return answer.stdout.strip()


@contextmanager
def _real_shares() -> Iterator[ShareRig]:
    """Take the first GPU of this computer; NoDevicesError when there is none."""
    with Nvml() as source:
        devices = source.inventory().devices
    if not devices:
        raise NoDevicesError("NVML reports no GPU here", hint="--simulated for a dry run")
    with tempfile.TemporaryDirectory(prefix="allotment-bench-") as folder:
        yield ShareRig(
            programs=build_programs(Path(folder) / "programs", PROGRAMS),
            work=Path(folder),
            device=devices[0],
            machine=None,
            spec="",
            driver=f"{devices[0].name}, NVIDIA driver {_driver_version()}",
        )


def _driver_version() -> str:
    text = Path("/proc/driver/nvidia/version")
    if not text.exists():
        return "unknown"
    found = re.search(r"\b\d{3}\.\d+(?:\.\d+)?\b", text.read_text())
    return found[0] if found is not None else "unknown"
