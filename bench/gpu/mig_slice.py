# SPDX-License-Identifier: Apache-2.0
"""A slice on a real GPU: created for a command, used by it, and removed, with MIG as before.

It switches MIG, so it is asked for by `--change-settings`, and not on a GPU in use.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Final

from allotment.devices.nvml import Nvml
from allotment.model.errors import DoesNotFitError
from bench.compute.rig import ALLOT, Rig
from bench.gpu.daemons import settings_of
from bench.gpu.rig import GpuRig
from bench.harness.options import Options
from bench.harness.results import Result, check

MIG_MODEL: Final = "h100-80gb"
"""Simulated: its MIG is switched without a reset."""
MEMORY: Final = "4Gi"
_LEAST_BYTES: Final = 4 << 30
_CUTS_WITHIN_S: Final = 300


def gpu_mig(gpu: GpuRig, options: Options) -> Iterator[Result]:
    """Run a program in a slice."""
    with gpu.machine(MIG_MODEL) as rig:
        yield from _slice(rig, quick=options.is_quick, change_settings=options.change_settings)


def _slice(rig: Rig, *, quick: bool, change_settings: bool) -> Iterator[Result]:
    """Run a program in a slice of the rig's GPU 0; report why where that is impossible."""
    name = "a slice is cut for a command, and MIG is then as it was"
    if not change_settings:
        yield _not_tried(name, "it switches MIG: ask for it by --change-settings")
        return
    users = settings_of(rig).computing()
    if users:
        yield _not_tried(name, f"the GPU is in use by {', '.join(map(str, users))}")
        return
    if _is_in_mig_mode(rig):
        yield _not_tried(name, "MIG is on already: its slices are in use")
        return
    burn = [sys.executable, "-m", "allotment", "burn", "--memory", "1Gi", "--seconds", "0.5"]
    done = _run(rig, [*burn, "-o", "json"])
    if done.returncode == DoesNotFitError.exit_code:
        yield _not_tried(name, done.stderr.strip().replace("\n", "; "))
        return
    yield _had(done)
    seconds = [_seconds(rig) for _ in range(1 if quick else 3)]
    after = _is_in_mig_mode(rig)
    yield check(
        name=name,
        is_right=not after,
        seen=f"MIG off before, {'on' if after else 'off'} after",
    )
    yield Result(
        topic="slices",
        name="`allot run --mode mig -- true`: MIG on, a slice cut and removed, MIG off",
        seen=f"p50 {statistics.median(seconds):.2f} s",
        value=max(seconds),
        unit="s",
        target=None,
        samples=len(seconds),
        method="from the command's start to its end",
    )


def _not_tried(name: str, why: str) -> Result:
    return check(name=name, is_right=None, seen=why)


def _run(rig: Rig, command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    where = ["--gpu", rig.devices[0].uuid]
    where += ["--simulated", rig.spec] if rig.spec else []
    return subprocess.run(
        [*ALLOT, "run", "--mode", "mig", "--memory", MEMORY, *where, "--", *command],
        env=rig.outside(),
        capture_output=True,
        text=True,
        timeout=_CUTS_WITHIN_S,
        check=False,
    )


def _had(done: subprocess.CompletedProcess[str]) -> Result:
    """Check what a burn got in its slice."""
    name = "a program of mode mig has its slice's memory, and the slice's name"
    try:
        (process,) = json.loads(done.stdout)["processes"]
    except json.JSONDecodeError:
        return check(name=name, is_right=False, seen=done.stderr.strip()[-500:])
    device = process["device"]
    return check(
        name=name,
        is_right=done.returncode == 0
        and device["uuid"].startswith("MIG-")
        and device["total_bytes"] >= _LEAST_BYTES,
        seen=f"{device['uuid']}, {device['total_bytes']} bytes, exit status {done.returncode}",
    )


def _seconds(rig: Rig) -> float:
    began = time.monotonic()
    done = _run(rig, ["true"])
    if done.returncode != 0:
        message = f"no slice for `true`: {done.stderr.strip()[-2000:]}"
        raise RuntimeError(message)
    return time.monotonic() - began


def _is_in_mig_mode(rig: Rig) -> bool:
    with Nvml(machine=rig.machine) as source:
        return any(
            each.mig for each in source.inventory().devices if each.uuid == rig.devices[0].uuid
        )
