# SPDX-License-Identifier: Apache-2.0
"""A slice on a real GPU: cut for a command, had by it, and gone, with MIG as it was.

It switches MIG, so it is asked for by `--change-settings`, and not on a GPU that somebody uses.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Final

from checks import Check
from daemons import settings_of
from findings import Finding
from grounds import ALLOT, Ground

from allotment.devices.nvml import Nvml
from allotment.model.errors import DoesNotFitError

MEMORY: Final = "4Gi"
_LEAST_BYTES: Final = 4 << 30
_CUTS_WITHIN_S: Final = 300


def cut_one(ground: Ground, *, quick: bool, change_settings: bool) -> Iterator[Check | Finding]:
    """Run a program in a slice of the ground's GPU 0; say why not where that cannot be."""
    name = "a slice is cut for a command, and MIG is then as it was"
    if not change_settings:
        yield _not_tried(name, "it switches MIG: ask for it by --change-settings")
        return
    users = settings_of(ground).computing()
    if users:
        yield _not_tried(name, f"the GPU is in use by {', '.join(map(str, users))}")
        return
    if _is_in_mig_mode(ground):
        yield _not_tried(name, "MIG is on already: what is there is somebody's")
        return
    print("measuring: a slice", file=sys.stderr)
    burn = [sys.executable, "-m", "allotment", "burn", "--memory", "1Gi", "--seconds", "0.5"]
    done = _run(ground, [*burn, "-o", "json"])
    if done.returncode == DoesNotFitError.exit_code:
        yield _not_tried(name, done.stderr.strip().replace("\n", "; "))
        return
    yield _had(done)
    seconds = [_seconds(ground) for _ in range(1 if quick else 3)]
    after = _is_in_mig_mode(ground)
    yield Check(
        name=name,
        is_right=not after,
        seen=f"MIG off before, {'on' if after else 'off'} after",
    )
    yield Finding(
        question="slices",
        name="`allot run --mode mig -- true`: MIG on, a slice cut and removed, MIG off",
        without="",
        seen=f"p50 {statistics.median(seconds):.2f} s",
        reached=max(seconds),
        unit="s",
        target=None,
        samples=len(seconds),
        method="from the command's start to its end",
    )


def _not_tried(name: str, why: str) -> Check:
    return Check(name=name, is_right=None, seen=why)


def _run(ground: Ground, command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    where = ["--gpu", ground.devices[0].uuid]
    where += ["--simulated", ground.spec] if ground.spec else []
    return subprocess.run(
        [*ALLOT, "run", "--mode", "mig", "--memory", MEMORY, *where, "--", *command],
        env=ground.outside(),
        capture_output=True,
        text=True,
        timeout=_CUTS_WITHIN_S,
        check=False,
    )


def _had(done: subprocess.CompletedProcess[str]) -> Check:
    """Look at what a burn had in its slice."""
    name = "a program of mode mig has its slice's memory, and the slice's name"
    try:
        (process,) = json.loads(done.stdout)["processes"]
    except json.JSONDecodeError:
        return Check(name=name, is_right=False, seen=done.stderr.strip()[-500:])
    device = process["device"]
    return Check(
        name=name,
        is_right=done.returncode == 0
        and device["uuid"].startswith("MIG-")
        and device["total_bytes"] >= _LEAST_BYTES,
        seen=f"{device['uuid']}, {device['total_bytes']} bytes, exit status {done.returncode}",
    )


def _seconds(ground: Ground) -> float:
    began = time.monotonic()
    done = _run(ground, ["true"])
    if done.returncode != 0:
        message = f"no slice for `true`: {done.stderr.strip()[-2000:]}"
        raise RuntimeError(message)
    return time.monotonic() - began


def _is_in_mig_mode(ground: Ground) -> bool:
    with Nvml(machine=ground.machine) as source:
        return any(
            each.mig for each in source.inventory().devices if each.uuid == ground.devices[0].uuid
        )
