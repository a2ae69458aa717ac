# SPDX-License-Identifier: Apache-2.0
"""`allot burn` as a process of its own, on a simulated GPU and in a share of one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from patience import wait_until
from rounds import undisturbed

from allotment import ledger
from allotment.devices import simulated
from allotment.devices.faults import set_fault
from allotment.devices.packing import read_machine

Allot = Any  # tests/conftest.py: CommandLine
MIB = 1 << 20
GIB = 1 << 30
APIS = ["plain", "async", "pool", "vmm", "managed", "array"]
# What the driver takes at once: pools grow by more than one allocation needs.
GRANULES = {"async": 32 * MIB, "pool": 32 * MIB}
LIMIT = 2 * GIB


class Gpu:
    """A simulated GPU, and a share of it."""

    def __init__(self, machine: Path, native: Path, folder: Path) -> None:
        self.machine = machine
        self.device = read_machine(machine).devices[0]
        self.share = folder / "share"
        self.share.mkdir()
        policy = ledger.DevicePolicy(
            uuid=self.device.uuid, memory_limit=LIMIT, context_bytes=self.device.context_bytes
        )
        ledger.create(self.share, ledger.LedgerPolicy("burn", "burn", (policy,)))
        self.bare = {
            **os.environ,
            "LD_LIBRARY_PATH": str(native / "simulated"),
            "ALLOTMENT_SIMULATED_MACHINE": str(machine),
        }
        self.shared = {
            **self.bare,
            "LD_PRELOAD": str(native / "liballotment-shim.so"),
            "ALLOTMENT_SHARE": str(self.share),
        }

    def used(self) -> int:
        ledger.reap(self.share)
        ledger.reap(self.share, asked_ns=time.clock_gettime_ns(time.CLOCK_BOOTTIME))
        return ledger.read(self.share).devices[0].used

    def pids(self) -> set[int]:
        return {process.pid for process in ledger.read(self.share).processes}

    def wait_until(self, condition: Callable[[], bool]) -> None:
        wait_until(condition)


@pytest.fixture
def gpu(machine: Callable[[str], Path], native_dir: Path, tmp_path: Path) -> Gpu:
    return Gpu(machine("t4"), native_dir, tmp_path)


def start(*options: str, environment: dict[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "allotment", "burn", *options],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def burn(*options: str, environment: dict[str, str]) -> tuple[dict[str, Any], int]:
    program = start(*options, "-o", "json", environment=environment)
    output, complaint = program.communicate(timeout=120)
    assert not complaint
    return json.loads(output), program.returncode


def test_a_part_of_the_multiprocessors_is_told(allot: Allot) -> None:
    words = ("--memory", "64Mi", "--launches", "1", "-o", "json")
    share = ("run", "--simulated", "l4", "--memory", "1Gi")
    part = ("--mode", "mps", "--compute", "25")
    for options, number in (((), 58), (part, 14)):
        program = (sys.executable, "-m", "allotment", "burn", *words)
        done = allot(*share, *options, "--", *program)
        assert done.returncode == 0, done.stderr
        (process,) = json.loads(done.stdout)["processes"]
        assert process["device"]["multiprocessors"] == number


@pytest.mark.parametrize("api", APIS)
def test_a_whole_gpu_gives_what_is_asked(gpu: Gpu, api: str) -> None:
    options = ("--memory", "700Mi", "--api", api, "--seconds", "0.05")
    report, status = burn(*options, environment=gpu.bare)
    (process,) = report["processes"]
    assert status == 0
    assert process["device"]["uuid"] == gpu.device.uuid
    assert process["memory_before"]["total_bytes"] == gpu.device.allottable_bytes
    assert report["got_bytes"] == 700 * MIB
    taken = process["memory_before"]["free_bytes"] - process["memory_after"]["free_bytes"]
    # Managed memory is on the GPU only when a kernel has touched it.
    assert taken == 0 if api == "managed" else taken >= 700 * MIB
    assert report["kernels"] == report["launches"] > 0


@pytest.mark.parametrize("api", APIS)
def test_a_share_gives_all_of_its_limit_and_no_more(gpu: Gpu, api: str) -> None:
    options = ("--memory", "4Gi", "--chunk", "2Mi", "--api", api)
    report, status = burn(*options, environment=gpu.shared)
    (process,) = report["processes"]
    assert status == 9
    assert process["device"]["total_bytes"] == process["memory_before"]["total_bytes"] == LIMIT
    assert report["got_bytes"] <= process["memory_before"]["free_bytes"]
    assert process["memory_after"]["free_bytes"] < GRANULES.get(api, 2 * MIB)
    (error,) = process["errors"]
    assert error["name"] == "CUDA_ERROR_OUT_OF_MEMORY"
    assert error["at_bytes"] == report["got_bytes"]
    assert report["kernels"] == 0
    assert gpu.used() == 0


def test_a_slice_is_named_as_everywhere_else(
    allot: Allot, tmp_path: Path, native_dir: Path
) -> None:
    spec = ("--simulated", "h100-80gb")
    halves = tmp_path / "halves.yaml"
    halves.write_text(
        "version: v1\nmig-configs:\n"
        "  halves: [{devices: all, mig-enabled: true, mig-devices: {3g.40gb: 2}}]\n"
    )
    assert allot("mig", "apply", "-f", halves, *spec).returncode == 0
    (device,) = json.loads(allot("devices", *spec, "-o", "json").stdout)["devices"]
    for each in device["mig_slices"]:
        environment = {
            **os.environ,
            "LD_LIBRARY_PATH": str(native_dir / "simulated"),
            "ALLOTMENT_SIMULATED_MACHINE": str(simulated.machine_path(allot.state, spec[1])),
            "CUDA_VISIBLE_DEVICES": each["uuid"],
        }
        report, _ = burn("--memory", "64Mi", "--seconds", "0.05", environment=environment)
        assert report["processes"][0]["device"]["uuid"] == each["uuid"]


def test_a_part_is_of_what_the_driver_calls_the_device(gpu: Gpu) -> None:
    options = ("--memory", "25%", "--kernel", "0", "--seconds", "0")
    report, status = burn(*options, environment=gpu.shared)
    assert status == 0
    assert report["got_bytes"] == LIMIT // 4


def test_graphs_and_streams_run_all_of_their_kernels(gpu: Gpu) -> None:
    options = ("--graph", "5", "--streams", "3", "--kernel", "1ms", "--seconds", "0.1")
    report, status = burn(*options, environment=gpu.shared)
    assert status == 0
    assert report["launches"] >= 3
    assert report["kernels"] == 5 * report["launches"]
    # Each launch lies between its two events, and so do its five kernels.
    assert report["event_seconds"] >= 0.001 * report["kernels"] * 0.99
    assert report["latency_us"]["p50"] >= 5000 * 0.99


@pytest.mark.parametrize("streams", ["1", "2", "4"])
def test_it_ends_after_the_launches_that_were_asked_for(gpu: Gpu, streams: str) -> None:
    options = ("--launches", "3", "--streams", streams, "--kernel", "1ms", "--seconds", "0")
    report, status = burn(*options, environment=gpu.shared)
    assert status == 0
    assert report["launches"] == 3


@pytest.mark.measured
def test_kernels_fill_the_gpu_and_never_run_at_once(gpu: Gpu) -> None:
    options = ("--launches", "20", "--streams", "4", "--kernel", "5ms")
    right = pytest.approx(20 * 0.005, rel=0.2)

    def event_seconds() -> float:
        report, _ = burn(*options, environment=gpu.shared)
        assert report["wall_seconds"] >= 20 * 0.005 * 0.99
        return float(report["event_seconds"])

    assert undisturbed(event_seconds, right.__eq__) == right


def test_requests_come_at_their_rate(gpu: Gpu) -> None:
    options = ("--rate", "50", "--launches", "10", "--kernel", "1ms")
    report, _ = burn(*options, environment=gpu.shared)
    # The first comes at once, the tenth after nine fiftieths of a second.
    assert report["wall_seconds"] >= 9 / 50
    assert report["event_seconds"] >= 10 * 0.001 * 0.99


def test_a_late_request_has_waited_since_it_was_due(gpu: Gpu) -> None:
    options = ("--rate", "100", "--launches", "5", "--kernel", "30ms")
    report, _ = burn(*options, environment=gpu.shared)
    # The fifth was due after 40 ms, when the second was running, and ends after 150.
    assert report["latency_us"]["max"] >= (150 - 40) * 1000 * 0.99


def test_processes_are_real_and_add_up(gpu: Gpu) -> None:
    options = ("--processes", "3", "--memory", "64Mi", "--seconds", "0.2")
    report, status = burn(*options, environment=gpu.shared)
    assert status == 0
    assert len({process["pid"] for process in report["processes"]}) == 3
    assert report["got_bytes"] == 3 * 64 * MIB
    assert report["kernels"] == sum(process["kernels"] for process in report["processes"])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["SIGINT", "SIGTERM"])
@pytest.mark.parametrize("processes", ["1", "2"])
def test_a_signal_ends_it_with_the_report_so_far(
    gpu: Gpu, number: signal.Signals, processes: str
) -> None:
    options = ("--processes", processes, "--memory", "64Mi", "--seconds", "600", "-o", "json")
    program = start(*options, environment=gpu.shared)
    context = gpu.device.context_bytes
    gpu.wait_until(lambda: gpu.used() >= int(processes) * (context + 64 * MIB))
    program.send_signal(number)
    output, complaint = program.communicate(timeout=120)
    report = json.loads(output)
    assert not complaint
    assert program.returncode == 128 + number
    assert report["interrupted"]
    assert report["got_bytes"] == int(processes) * 64 * MIB


def test_a_killed_process_is_told_apart_from_the_others(gpu: Gpu) -> None:
    options = ("--processes", "2", "--memory", "64Mi", "--seconds", "3", "-o", "json")
    program = start(*options, environment=gpu.shared)
    gpu.wait_until(lambda: len(gpu.pids() - {program.pid}) == 2)
    victim = min(gpu.pids() - {program.pid})
    os.kill(victim, signal.SIGKILL)
    output, _ = program.communicate(timeout=120)
    report = json.loads(output)
    lost = next(each for each in report["processes"] if each["pid"] == victim)
    other = next(each for each in report["processes"] if each["pid"] != victim)
    assert program.returncode == 1
    assert [error["name"] for error in lost["errors"]] == ["killed by signal 9"]
    assert not other["errors"]
    assert other["kernels"] > 0


def test_a_gpu_that_falls_off_the_bus_is_reported(gpu: Gpu) -> None:
    options = ("--memory", "64Mi", "--seconds", "600", "-o", "json")
    program = start(*options, environment=gpu.shared)
    gpu.wait_until(lambda: gpu.used() >= gpu.device.context_bytes + 64 * MIB)
    set_fault(gpu.machine, 0, lost=True)
    output, complaint = program.communicate(timeout=120)
    (process,) = json.loads(output)["processes"]
    assert not complaint
    assert program.returncode == 1
    assert process["errors"]
    assert all(error["name"] != "CUDA_ERROR_OUT_OF_MEMORY" for error in process["errors"])


def test_what_processes_got_in_sum_they_had_at_the_same_time(gpu: Gpu) -> None:
    options = ("--processes", "2", "--memory", "2Gi", "--seconds", "0.2")
    report, status = burn(*options, environment=gpu.shared)
    assert status == 9
    assert LIMIT // 2 < report["got_bytes"] < LIMIT


@pytest.mark.parametrize("processes", ["1", "2"])
def test_no_room_for_the_context_is_a_lack_of_memory(gpu: Gpu, processes: str) -> None:
    ledger.set_limit(gpu.share, 0, MIB)
    options = ("--processes", processes, "--memory", "64Mi", "--seconds", "0.1")
    report, status = burn(*options, environment=gpu.shared)
    assert status == 9
    for process in report["processes"]:
        (error,) = process["errors"]
        assert (error["name"], error["call"]) == (
            "CUDA_ERROR_OUT_OF_MEMORY",
            "cuDevicePrimaryCtxRetain",
        )


@pytest.mark.parametrize("processes", ["1", "2"])
@pytest.mark.parametrize(
    ("options", "variables", "hint"),
    [
        (("--device", "1"), {}, "this process sees one device: --device 0"),
        ((), {"CUDA_VISIBLE_DEVICES": ""}, "CUDA_VISIBLE_DEVICES=''"),
    ],
)
def test_a_missing_device_has_its_own_next_step(
    gpu: Gpu, processes: str, options: tuple[str, ...], variables: dict[str, str], hint: str
) -> None:
    program = start("--processes", processes, *options, environment={**gpu.bare, **variables})
    _, complaint = program.communicate(timeout=120)
    assert program.returncode == 5
    assert f"hint: {hint}" in complaint


@pytest.mark.parametrize("processes", ["1", "2"])
def test_no_driver_is_an_error_with_a_next_step(processes: str) -> None:
    environment = {**os.environ, "LD_LIBRARY_PATH": "", "NO_COLOR": "1"}
    program = start("--processes", processes, environment=environment)
    output, complaint = program.communicate(timeout=120)
    if program.returncode != 5:
        pytest.skip("this machine has a GPU")
    assert not output
    assert complaint.startswith("error: no CUDA driver")
    assert "hint: " in complaint
    assert "--simulated" in complaint


def test_a_device_that_is_not_there(gpu: Gpu) -> None:
    program = start("--device", "7", environment=gpu.shared)
    _, complaint = program.communicate(timeout=120)
    assert program.returncode == 5
    assert "no CUDA device 7" in complaint


def test_touched_memory_is_written(gpu: Gpu) -> None:
    options = ("--memory", "8Mi", "--api", "managed", "--touch", "--seconds", "0")
    report, status = burn(*options, environment=gpu.shared)
    assert status == 0
    assert report["got_bytes"] == 8 * MIB
