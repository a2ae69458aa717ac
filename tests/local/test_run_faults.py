# SPDX-License-Identifier: Apache-2.0
"""`allot run` where a GPU has a problem: shares go to the others, and refusals say so."""

import json
import shutil
from typing import Any

import pytest

Allot = Any  # tests/conftest.py: CommandLine
SPEC = ("--simulated", "a100-80gb:2")
RUN = ("run", *SPEC, "--inject", "environment", "--memory", "1Gi")


@pytest.fixture
def uuids(allot: Allot) -> list[str]:
    """The machine's GPUs, the first of which is lost."""
    devices = json.loads(allot("devices", *SPEC, "-o", "json").stdout)["devices"]
    found = [str(each["uuid"]) for each in devices]
    assert allot("fault", *SPEC, "--gpu", found[0], "--lost").returncode == 0
    return found


def test_a_lost_gpu_takes_no_share(allot: Allot, uuids: list[str]) -> None:
    done = allot(*RUN, "--", *allot.command("devices", "-o", "json"))
    (device,) = json.loads(done.stdout)["devices"]
    assert device["uuid"] == uuids[1]


@pytest.mark.parametrize("words", [("--count", "2"), ("--gpu",)])
def test_a_refusal_names_the_lost_gpu(
    allot: Allot, uuids: list[str], words: tuple[str, ...]
) -> None:
    chosen = (*words, uuids[0]) if words == ("--gpu",) else words
    done = allot(*RUN, *chosen, "--", "true")
    assert done.returncode == 3
    assert f"{uuids[0]} (NVIDIA A100-SXM4-80GB): the GPU is lost" in done.stderr
    assert "hint: " in done.stderr


def test_a_gpu_that_came_back_takes_shares(allot: Allot, uuids: list[str]) -> None:
    assert allot("fault", *SPEC, "--gpu", uuids[0], "--found").returncode == 0
    done = allot(*RUN, "--count", "2", "--", "true")
    assert done.returncode == 0, done.stderr


def test_fault_shows_what_is_wrong_with_the_whole_machine(allot: Allot) -> None:
    done = allot("fault", *SPEC, "--no-nvml", "--cuda-init", "999")
    assert "whole machine: NVML is not loaded\n" in done.stdout
    assert "whole machine: cuInit fails with 999\n" in done.stdout
    assert "whole machine" not in allot("fault", *SPEC, "--clear").stdout


def test_a_demo_on_a_real_gpu_fails_at_once_without_one(allot: Allot) -> None:
    if shutil.which("nvidia-smi"):
        pytest.skip("there may be a GPU here")
    done = allot("demo", "--real")
    assert (done.returncode, done.stdout) == (5, "")
    assert "hint: " in done.stderr
