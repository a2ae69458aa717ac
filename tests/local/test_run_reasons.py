# SPDX-License-Identifier: Apache-2.0
"""Why `allot run` does not take a mode or a GPU, as a user reads it."""

from __future__ import annotations

from typing import Any

import pytest

from allotment.devices.simulated import SimulatedMachine, machine_path
from allotment.model.errors import DoesNotFitError

Allot = Any  # tests/conftest.py: CommandLine
SPEC = "h100-80gb:2"


def test_gpus_that_are_kept_for_other_modes_are_not_called_unable(allot: Allot) -> None:
    for device in SimulatedMachine(machine_path(allot.state, SPEC)).devices():
        allot("devices", "set-mode", "--simulated", SPEC, device.uuid, "soft")
    done = allot("run", "--simulated", SPEC, "--mode", "mig", "--memory", "4Gi", "--", "true")
    assert done.returncode == DoesNotFitError.exit_code
    assert "kept for mode soft" in done.stderr
    assert "hint: `allot devices` shows what GPUs are for" in done.stderr


@pytest.mark.parametrize(
    ("spec", "modes", "reasons"),
    [
        ("p100", "mig,mps,soft", {"mig": "has no MIG", "mps": "MPS shares no GPU before Volta"}),
        ("a100-80gb", "mig,soft", {"mig": "MIG is off, and this GPU needs a reset for it"}),
    ],
)
def test_a_mode_that_is_not_had_says_why(
    allot: Allot, spec: str, modes: str, reasons: dict[str, str]
) -> None:
    words = ("--mode", modes, "--memory", "8Gi", "--name", "one")
    done = allot("run", "--simulated", spec, *words, "--", "true")
    assert done.returncode == 0
    told = done.stderr.splitlines()
    assert len(told) == len(reasons)
    for line, (mode, reason) in zip(told, reasons.items(), strict=True):
        head = f"warning: share one is of mode soft, and not {mode}: "
        assert line.startswith(head + reason)
