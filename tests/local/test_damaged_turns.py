# SPDX-License-Identifier: Apache-2.0
"""A program cuts the file short by which a GPU's shares take turns: the next share computes again.

Who met the file while it was short is ended (docs/designs/compute.md), and that is all.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from patience import wait_until

from allotment.devices.simulated import machine_path
from allotment.ledger.lease_layout import LEASES_FILE_SIZE

Allot = Any  # tests/conftest.py: CommandLine
Begin = Callable[..., "subprocess.Popen[str]"]
RUN = ("run", "--simulated", "a100-80gb:1", "--memory", "1Gi", "--inject", "environment")
BURN = (sys.executable, "-m", "allotment", "burn", "-o", "json", "--memory", "64Mi")
WORK = (*BURN, "--kernel", "1ms", "--seconds")
PATIENCE_S = 60.0


def gpu_seconds(allot: Allot, name: str) -> float:
    done = allot("ps", "-o", "json")
    assert done.returncode == 0, done.stderr
    for share in json.loads(done.stdout)["shares"]:
        if share["name"] == name and share["devices"][0]["compute"]:
            return float(share["devices"][0]["compute"]["gpu_seconds"] or 0)
    return 0.0


def leases(allot: Allot) -> Path:
    (device,) = (allot.state / "devices").iterdir()
    return Path(device / "leases")


def pid_of(allot: Allot, name: str) -> int:
    (share,) = json.loads(allot("ps", "-o", "json").stdout)["shares"]
    assert share["name"] == name
    (process,) = share["processes"]
    return int(process["pid"])


@pytest.fixture
def begin(allot: Allot) -> Iterator[Begin]:
    """Starts `allot run`, and ends it afterwards."""
    started: list[subprocess.Popen[str]] = []

    def start(*words: str) -> "subprocess.Popen[str]":
        process = subprocess.Popen(
            allot.command(*RUN, *words),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=allot.environment(),
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.terminate()
        process.communicate()


def test_the_next_share_computes(allot: Allot, begin: Begin) -> None:
    cutter = begin("--compute", "40", "--name", "cutter", "--", *WORK, "600")
    wait_until(lambda: gpu_seconds(allot, "cutter") > 0.05)
    os.truncate(leases(allot), 0)
    cutter.communicate(timeout=PATIENCE_S)
    assert cutter.returncode == -signal.SIGBUS
    done = allot(*RUN, "--compute", "60", "--", *WORK, "0.5")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["kernels"] > 0
    assert leases(allot).stat().st_size == LEASES_FILE_SIZE


def test_who_did_not_meet_it_goes_on(
    allot: Allot, begin: Begin, stop: Callable[[Path, int], None]
) -> None:
    neighbour = begin("--compute", "40", "--name", "neighbour", "--", *WORK, "600")
    wait_until(lambda: gpu_seconds(allot, "neighbour") > 0.05)
    pid = pid_of(allot, "neighbour")
    stop(machine_path(allot.state, RUN[2]), pid)
    os.truncate(leases(allot), 0)
    next_one = begin("--compute", "60", "--name", "next", "--", *WORK, "600")
    wait_until(lambda: gpu_seconds(allot, "next") > 0.05)
    os.kill(pid, signal.SIGCONT)
    # What the device was used for is counted anew, and both have it.
    wait_until(lambda: min(gpu_seconds(allot, each) for each in ("next", "neighbour")) > 0.3)
    for process in (next_one, neighbour):
        process.terminate()
        said, complained = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 128 + signal.SIGTERM, complained
        assert json.loads(said)["kernels"] > 50
