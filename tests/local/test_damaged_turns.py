# SPDX-License-Identifier: Apache-2.0
"""A program damages or forges the file by which its share takes turns: its neighbours compute on.

`allot ps` names the share (docs/designs/compute.md).
"""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from patience import wait_until

Allot = Any  # tests/conftest.py: CommandLine
Begin = Callable[..., "subprocess.Popen[str]"]
RUN = ("run", "--simulated", "a100-80gb:1", "--memory", "1Gi", "--inject", "environment")
BURN = (sys.executable, "-m", "allotment", "burn", "-o", "json", "--memory", "64Mi")
WORK = (*BURN, "--kernel", "1ms", "--seconds")
FORGER = Path(__file__).with_name("turns_forger.py")


def gpu_seconds(allot: Allot, name: str) -> float:
    done = allot("ps", "-o", "json")
    assert done.returncode == 0, done.stderr
    for share in json.loads(done.stdout)["shares"]:
        if share["name"] == name and share["devices"][0]["compute"]:
            return float(share["devices"][0]["compute"]["gpu_seconds"] or 0)
    return 0.0


def remark(allot: Allot, name: str) -> str | None:
    for share in json.loads(allot("ps", "-o", "json").stdout)["shares"]:
        if share["name"] == name:
            return str(share["remark"])
    return None


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


@pytest.mark.parametrize("how", ["truncate", "garbage", "steal", "future"])
def test_a_hostile_neighbour_ends_and_starves_nobody(allot: Allot, begin: Begin, how: str) -> None:
    neighbour = begin("--compute", "40", "--name", "neighbour", "--", *WORK, "600")
    wait_until(lambda: gpu_seconds(allot, "neighbour") > 0.05)
    begin("--compute", "40", "--name", "hostile", "--", sys.executable, str(FORGER), how)
    wait_until(lambda: (remark(allot, "hostile") or "").count("without turns") > 0)
    before = gpu_seconds(allot, "neighbour")
    wait_until(lambda: gpu_seconds(allot, "neighbour") > before + 1)
    assert neighbour.poll() is None
    # A newcomer computes as well.
    done = allot(*RUN, "--compute", "10", "--", *WORK, "0.5")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["kernels"] > 0
