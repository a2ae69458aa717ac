# SPDX-License-Identifier: Apache-2.0
"""`allot mig apply` where GPUs are in use: programs stay in their slices, and shares on theirs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from mig_hands import look, made_by_hand, on_first
from patience import wait_until

from allotment.devices.simulated import machine_path
from allotment.model.errors import BusyError
from allotment.modes.mig.apply import counts_of
from allotment.shares import mps_daemons
from allotment.shares.folders import StateFolder

Allot = Any  # tests/conftest.py: CommandLine


@pytest.fixture
def burning(allot: Allot) -> Iterator[Callable[[str, str], int]]:
    """Starts a program on a MIG device: `burning(spec, uuid)` is its process; ends it at last."""
    started: list[subprocess.Popen[str]] = []

    def start(spec: str, uuid: str) -> int:
        lines = allot("env", "--simulated", spec).stdout
        script = f'{lines}\nexec "$0" -m allotment burn --memory 64Mi --seconds 600'
        process = subprocess.Popen(
            ["bash", "-c", script, sys.executable],
            env=allot.environment(CUDA_VISIBLE_DEVICES=uuid),
            stdout=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        machine = machine_path(allot.state, spec)
        wait_until(
            lambda: process.pid in on_first(machine, lambda device: device.driver.processes()),
            "it did not begin",
        )
        return process.pid

    yield start
    for process in started:
        process.kill()
        process.communicate()


def test_programs_stay_in_their_slices(
    allot: Allot, mig_file: Path, burning: Callable[[str, str], int]
) -> None:
    spec = "h100-80gb"
    machine = machine_path(allot.state, spec)
    used = made_by_hand(machine, "1g.10gb", 2)
    made_by_hand(machine, "3g.40gb", 4)
    pid = burning(spec, used)
    before = look(machine)
    refused = allot("mig", "apply", "-f", mig_file, "-c", "all-7g.80gb", "--simulated", spec)
    assert refused.returncode == BusyError.exit_code
    assert f"1g.10gb at slot 2 by process {pid}" in refused.stderr
    off = allot("mig", "apply", "-f", mig_file, "-c", "all-disabled", "--simulated", spec)
    assert off.returncode == BusyError.exit_code
    assert f"in use by process {pid}" in off.stderr
    assert look(machine) == before, "a refusal changes nothing"
    assert f"processes {pid}" in allot("devices", "--simulated", spec).stdout
    done = allot("mig", "apply", "-f", mig_file, "-c", "all-1g", "--simulated", spec)
    assert done.returncode == 0, done.stderr
    after = look(machine)
    assert counts_of(after) == {"1g.10gb": 7}
    assert used in {each.uuid for each in after.instances}
    assert pid in on_first(machine, lambda device: device.driver.processes())


def test_mode_is_not_switched_under_a_share(allot: Allot, mig_file: Path) -> None:
    spec = "h100-80gb"
    held = subprocess.Popen(
        allot.command("run", "--simulated", spec, "--memory", "1Gi", "--name", "held", "--", "cat"),
        env=allot.environment(),
        stdin=subprocess.PIPE,
    )
    try:
        wait_until(lambda: "held" in allot("ps").stdout)
        words = ("-f", mig_file, "-c", "all-1g", "--simulated", spec)
        refused = allot("mig", "apply", *words)
        assert refused.returncode == BusyError.exit_code
        assert "MIG cannot be switched on while it is in use by share held" in refused.stderr
    finally:
        held.communicate()
    assert allot("mig", "apply", *words).returncode == 0


def test_whose_a_process_is_in_the_way_is_told(allot: Allot, mig_file: Path) -> None:
    """The share of a slice that others cut, and of the GPU: by name, with their processes."""
    spec = "h100-80gb:2"
    machine = machine_path(allot.state, spec)
    uuid = made_by_hand(machine, "1g.10gb", 0)
    options = ("run", "--simulated", spec, "--gpu", uuid, "--memory", "1Gi", "--name", "inner")
    burn = (sys.executable, "-m", "allotment", "burn", "--memory", "64Mi", "--seconds", "600")
    inner = subprocess.Popen(
        allot.command(*options, "--", *burn), env=allot.environment(), stdout=subprocess.DEVNULL
    )
    try:
        pids = wait_until(lambda: on_first(machine, lambda device: device.driver.processes()))
        words = ("-f", mig_file, "-c", "all-7g.80gb", "--simulated", spec)
        refused = allot("mig", "apply", *words)
        assert refused.returncode == BusyError.exit_code
        assert f"1g.10gb at slot 0 by share inner (process {pids[0]})" in refused.stderr
    finally:
        inner.terminate()
        inner.communicate()


def test_an_mps_daemon_that_no_share_needs_makes_way(allot: Allot, mig_file: Path) -> None:
    spec = "h100-80gb"
    options = ("--mode", "mps", "--memory", "1Gi", "--compute", "0:50")
    share = subprocess.Popen(
        allot.command("run", "--simulated", spec, *options, "--", "sh", "-c", "echo; cat"),
        env=allot.environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert share.stdout is not None
    assert share.stdout.readline() == b"\n"
    machine = machine_path(allot.state, spec)
    place = mps_daemons.place_of(StateFolder(allot.state), look(machine).uuid)
    keeper = place.status().supervisor
    assert keeper is not None
    os.kill(keeper, signal.SIGSTOP)  # it waits for the next share for as long as that
    words = ("-f", mig_file, "-c", "all-1g", "--simulated", spec)
    try:
        share.communicate(timeout=60)
        planned = allot("mig", "plan", *words)
        assert planned.returncode == 0, planned.stdout
        assert place.status().holds_gpu, "a plan changes nothing"
    finally:
        os.kill(keeper, signal.SIGCONT)
    done = allot("mig", "apply", *words)
    assert done.returncode == 0, done.stderr
    assert not place.status().holds_gpu
    assert counts_of(look(machine)) == {"1g.10gb": 7}
