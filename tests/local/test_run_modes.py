# SPDX-License-Identifier: Apache-2.0
"""`allot run` with several modes that would do: what one of them cannot give, the next does."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from allotment.devices.compute_modes import ComputeMode, GpuSettings
from allotment.devices.packing import read_machine
from allotment.devices.simulated import machine_path
from allotment.model.errors import DoesNotFitError, UsageError

Allot = Any  # tests/conftest.py: CommandLine
SPEC = "a100-80gb:2"
Settings = Callable[[ComputeMode], None]


@pytest.fixture
def set_mode(allot: Allot) -> Settings:
    """Sets the compute mode of both GPUs, as somebody else would."""

    def carry_out(mode: ComputeMode) -> None:
        file: Path = machine_path(allot.state, SPEC)
        for each in read_machine(file).devices:
            GpuSettings(each.uuid, machine=file).set_compute_mode(mode)

    return carry_out


def run(allot: Allot, modes: str, *options: str) -> subprocess.CompletedProcess[str]:
    words = ("--memory", "1Gi", "--name", "train", *options)
    words = ("--simulated", SPEC, "--mode", modes, *words, "--", "true")
    done: subprocess.CompletedProcess[str] = allot("run", *words)
    return done


def test_a_gpu_that_is_kept_for_others_clients_is_shared_by_turns(
    allot: Allot, set_mode: Settings
) -> None:
    set_mode(ComputeMode.EXCLUSIVE_PROCESS)
    alone = run(allot, "mps")
    assert (alone.returncode, "in compute mode EXCLUSIVE_PROCESS" in alone.stderr) == (7, True)
    done = run(allot, "mps,soft")
    assert done.returncode == 0, done.stderr
    assert done.stderr.startswith("warning: share train is of mode soft, and not mps: GPU GPU-")
    assert "is in compute mode EXCLUSIVE_PROCESS, set outside Allotment" in done.stderr
    assert "No shares" in allot("ps").stderr


@pytest.mark.parametrize(
    ("modes", "option", "why"),
    [
        ("mps,soft", ("--count", "2"), "not mps: a share of mode mps is of one GPU, not of 2"),
        ("mps,soft", ("--compute", "0.5"), "not mps: 0.5 % of a GPU's compute is less than"),
        ("mig,soft", ("--count", "2"), "not mig: a program can use only one MIG device"),
        ("mig,soft", ("--memory", "25%"), "not mig: a percentage needs a known GPU"),
        (
            "mig,soft",
            ("--oversubscribe",),
            "not mig: the memory of a slice cannot be promised twice",
        ),
    ],
)
def test_what_a_mode_cannot_give_the_next_one_does(
    allot: Allot, modes: str, option: tuple[str, ...], why: str
) -> None:
    done = run(allot, modes, *option)
    assert done.returncode == 0, done.stderr
    assert f"warning: share train is of mode soft, and {why}" in done.stderr


def test_what_none_of_the_modes_can_give_cannot_be_meant(allot: Allot) -> None:
    done = run(allot, "mps,mig", "--count", "2")
    assert done.returncode == UsageError.exit_code
    assert "mode mps: a share of mode mps is of one GPU" in done.stderr
    assert "\nmode mig: a program can use only one MIG device" in done.stderr
    assert "hint: ask for one GPU, or for --mode soft" in done.stderr


def test_the_hint_is_of_a_mode_that_could_give_it(allot: Allot) -> None:
    done = run(allot, "soft,mps", "--count", "2", "--memory", "200Gi")
    assert done.returncode == DoesNotFitError.exit_code
    assert "hint: ask for less: no GPU here is that large" in done.stderr
    done = run(allot, "soft,mig", "--memory", "200Gi", "--count", "2")
    assert done.returncode == DoesNotFitError.exit_code
    assert "hint: ask for less: no GPU here is that large" in done.stderr


@pytest.mark.parametrize("option", [("--name", "-"), ("--gpu", "a30")])
def test_what_no_mode_is_about_is_said_once(allot: Allot, option: tuple[str, str]) -> None:
    done = run(allot, "mps,soft", *option)
    assert done.returncode in {2, 4}
    assert "mode mps" not in done.stderr
