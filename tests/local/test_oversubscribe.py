# SPDX-License-Identifier: Apache-2.0
"""Shares whose memory may live on the host: what is placed, what moves, and when nothing does."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rounds import undisturbed

Allot = Any  # tests/conftest.py: CommandLine
GI = 1 << 30
MI = 1 << 20
SMALL = "t4[memory=2498Mi]"  # of which the driver leaves 2 GiB
BURN = (sys.executable, "-m", "allotment", "burn", "-o", "json")


def place(allot: Allot, tmp_path: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    """Makes a share that stays."""
    done = allot("cdi", "create", "--simulated", SMALL, "--cdi-dir", tmp_path / "cdi", *words)
    assert isinstance(done, subprocess.CompletedProcess)
    return done


# ---- placing ----


def test_without_the_option_nothing_is_promised_twice(allot: Allot, tmp_path: Path) -> None:
    assert place(allot, tmp_path, "--memory", "1500Mi").returncode == 0
    refused = place(allot, tmp_path, "--memory", "1500Mi")
    assert refused.returncode == 3
    assert "need 1.5Gi" in refused.stderr
    # Host memory is of no use to a share that may not use it.
    refused = place(allot, tmp_path, "--memory", "1500Mi", "--host-memory", "100Gi")
    assert refused.returncode == 3


def test_the_host_budget_is_kept(allot: Allot, tmp_path: Path) -> None:
    def ask(memory: str) -> "subprocess.CompletedProcess[str]":
        return place(allot, tmp_path, "--memory", memory, "--oversubscribe", "--host-memory", "2Gi")

    assert ask("1536Mi").returncode == 0
    assert ask("1536Mi").returncode == 0  # 1 GiB more than the GPU has: half of the budget
    refused = ask("1536Mi")
    assert refused.returncode == 3
    assert re.search(r"need 1\.5Gi, have 1Gi", refused.stderr), refused.stderr
    assert ask("1Gi").returncode == 0
    assert ask("1Mi").returncode == 3
    # One that may not live on the host would push the others there.
    assert place(allot, tmp_path, "--memory", "1Mi", "--host-memory", "2Gi").returncode == 3
    assert place(allot, tmp_path, "--memory", "1Gi", "--host-memory", "3Gi").returncode == 0


def test_shares_that_may_not_live_on_the_host_fit_the_gpu_together(
    allot: Allot, tmp_path: Path
) -> None:
    assert place(allot, tmp_path, "--memory", "2Gi", "--oversubscribe").returncode == 0
    assert place(allot, tmp_path, "--memory", "1536Mi").returncode == 0
    refused = place(allot, tmp_path, "--memory", "1Gi")
    assert refused.returncode == 3
    assert "have 512Mi" in refused.stderr


def test_a_limit_beyond_the_gpu_needs_the_option(allot: Allot) -> None:
    run = ("run", "--simulated", SMALL, "--memory", "3Gi")
    refused = allot(*run, "--", "true")
    assert refused.returncode == 3
    done = allot(
        *run, "--oversubscribe", "--host-memory", "4Gi", "--inject", "environment",
        "--", *BURN, "--memory", "2560Mi", "--seconds", "0.2",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (process,) = json.loads(done.stdout)["processes"]
    assert process["got_bytes"] >= 2560 * MI
    assert process["device"]["total_bytes"] == 3 * GI


@pytest.mark.parametrize("options", [[], ["--oversubscribe"]], ids=["plain", "oversubscribed"])
def test_the_limit_holds_either_way(allot: Allot, options: list[str]) -> None:
    done = allot(
        "run", "--simulated", SMALL, "--memory", "1Gi", "--inject", "environment", *options,
        "--", *BURN, "--memory", "1500Mi", "--seconds", "0.2",
    )  # fmt: skip
    assert done.returncode == 9, done.stderr
    (process,) = json.loads(done.stdout)["processes"]
    assert [error["name"] for error in process["errors"]] == ["CUDA_ERROR_OUT_OF_MEMORY"]
    assert process["got_bytes"] <= GI


def test_an_oversubscribed_share_is_marked(allot: Allot, tmp_path: Path) -> None:
    assert place(allot, tmp_path, "--memory", "1Gi", "--name", "plain").returncode == 0
    assert "HOST" not in allot("ps").stdout
    assert "-" in line_of(allot, "plain").split()
    made = place(allot, tmp_path, "--memory", "1536Mi", "--name", "over", "--oversubscribe")
    assert made.returncode == 0, made.stderr
    assert "HOST" in allot("ps").stdout
    # What it has on the host; and it takes turns, though it asked for no compute.
    assert line_of(allot, "over").split()[4:9] == ["1.5Gi+host", "0B", "0B", "0B", "0:100"]
    assert line_of(allot, "plain").split()[4:9] == ["1Gi", "0B", "-", "0B", "0:100"]


def line_of(allot: Allot, name: str) -> str:
    """What `allot ps` shows of a share."""
    (line,) = [each for each in allot("ps").stdout.splitlines() if each.startswith(name)]
    return str(line)


# ---- moving ----

# Takes memory, runs kernels for a while, and tells what its share's ledger says then.
JOB = """
import ctypes, struct, sys, time
sys.path.insert(0, sys.argv[2])
from cuda_holder import PTX, check
cuda = ctypes.CDLL("libcuda.so.1")
context, module, kernel = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
check(cuda.cuInit(0))
check(cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0))
check(cuda.cuCtxSetCurrent(context))
for part in range(4):
    pointer = ctypes.c_uint64()
    check(cuda.cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(int(sys.argv[1]) // 4)))
check(cuda.cuModuleLoadData(ctypes.byref(module), PTX))
check(cuda.cuModuleGetFunction(ctypes.byref(kernel), module, b"allot_spin"))
duration = ctypes.c_uint64(2_000_000)
arguments = (ctypes.c_void_p * 1)(ctypes.addressof(duration))
print("ready", flush=True)
sys.stdin.readline()
for _ in range(int(sys.argv[3])):
    check(cuda.cuLaunchKernel(kernel, 40, 1, 1, 1024, 1, 1, 0, None, arguments, None))
    check(cuda.cuCtxSynchronize())
print("done", flush=True)
sys.stdin.readline()
"""


def run_together(allot: Allot, megabytes: int, kernels: int) -> list[dict[str, Any]]:
    """Runs the same job in two shares at a time; returns what is shown of their devices."""
    native = Path(__file__).parents[1] / "native"
    command = allot.command(
        "run", "--simulated", SMALL, "--memory", f"{megabytes + 150}Mi", "--oversubscribe",
        "--inject", "environment", "--", sys.executable, "-c", JOB,
        str(megabytes * MI), native, str(kernels),
    )  # fmt: skip
    jobs = [
        subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=allot.environment(),
        )
        for _ in range(2)
    ]
    try:
        expect(jobs, "ready")
        for job in jobs:
            assert job.stdin is not None
            job.stdin.write("\n")
            job.stdin.flush()
        expect(jobs, "done")
        shown = allot("ps", "-o", "json")
    finally:
        for job in jobs:
            job.communicate("\n")
    assert shown.returncode == 0, shown.stderr
    return [share["devices"][0] for share in json.loads(shown.stdout)["shares"]]


def expect(jobs: list["subprocess.Popen[str]"], word: str) -> None:
    for job in jobs:
        assert job.stdout is not None
        assert job.stdout.readline() == f"{word}\n"


@pytest.mark.measured
def test_sets_that_do_not_fit_move_as_wholes_and_seldom(allot: Allot) -> None:
    megabytes = 1800

    def found() -> tuple[list[int], int]:
        devices = run_together(allot, megabytes, kernels=1000)
        assert all(each["memory_host_bytes"] == megabytes * MI for each in devices)
        moved = [each["memory_moved_bytes"] for each in devices]
        assert sum(moved) > 0
        return moved, max(each["compute"]["leases"] for each in devices)

    def is_seldom(found: tuple[list[int], int]) -> bool:
        return max(found[0]) <= 6 * megabytes * MI and found[1] <= 40

    # 4 s of kernels, and moving takes 0.15 s for one and 0.15 s for the other: a turn is 3 s long.
    # A turn of the quantum alone, 10 ms, would have moved both sets a hundred times.
    measured = undisturbed(found, is_seldom)
    assert is_seldom(measured), measured


@pytest.mark.measured
def test_where_all_fits_nothing_moves_and_turns_are_short(allot: Allot) -> None:
    def leases() -> int:
        devices = run_together(allot, 500, kernels=200)
        assert [each["memory_moved_bytes"] for each in devices] == [0, 0]
        return sum(each["compute"]["leases"] for each in devices)

    assert undisturbed(leases, lambda leases: leases >= 20) >= 20
