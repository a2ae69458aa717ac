# SPDX-License-Identifier: Apache-2.0
"""`allotment.devices.nvml` on simulated machines: inventory, figures, and GPUs that are silent."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from allotment.devices import faults
from allotment.devices.models import MODELS
from allotment.devices.nvml import Nvml
from allotment.devices.simulated import SimulatedMachine
from allotment.devices.sources import Problem, Reading
from allotment.model.errors import NoDevicesError, StateError
from allotment.model.structs import replace

pytestmark = pytest.mark.usefixtures("native_dir")


def test_nvml_and_the_file_tell_the_same_devices(machine: Callable[[str], Path]) -> None:
    path = machine("a100-80gb:2,t4,rtx4090")
    with Nvml(machine=path) as source:
        assert source.inventory() == SimulatedMachine(path).inventory()


def test_every_device_has_figures(machine: Callable[[str], Path]) -> None:
    path = machine("a100-80gb,t4")
    with Nvml(machine=path) as source:
        readings = source.readings()
    assert list(readings) == [device.uuid for device in SimulatedMachine(path).devices()]
    first, second = readings.values()
    assert isinstance(first, Reading)
    assert isinstance(second, Reading)
    assert (first.used_bytes, first.gpu_percent, first.processes) == (0, 0, ())
    assert (first.power_mw, second.power_mw) == (58_000, 9_000)


def test_one_bad_gpu_hides_no_other(machine: Callable[[str], Path]) -> None:
    path = machine("t4:4")
    uuids = [device.uuid for device in SimulatedMachine(path).devices()]
    faults.set_fault(path, 1, lost=True)
    faults.set_fault(path, 2, hang_us=60_000_000)
    with Nvml(machine=path, patience_s=2.0) as source:
        before = time.monotonic()
        inventory = source.inventory()
        readings = source.readings()
        assert time.monotonic() - before < 20, "a GPU that hangs was waited for"
        faults.clear_faults(path)
    assert [device.index for device in inventory.devices] == [0, 3]
    assert inventory.problems == (
        Problem(1, uuids[1], "NVML: GPU is lost"),
        Problem(2, uuids[2], "it has not answered in time"),
    )
    assert [isinstance(readings[uuid], Reading) for uuid in uuids] == [True, False, False, True]


def test_a_process_is_told_with_how_busy_it_kept_the_gpu(
    machine: Callable[[str], Path], native_dir: Path
) -> None:
    path = machine("t4")
    environment = {
        **os.environ,
        "ALLOTMENT_SIMULATED_MACHINE": str(path),
        "LD_LIBRARY_PATH": str(native_dir / "simulated"),
    }
    burn = [sys.executable, "-m", "allotment", "burn", "--memory", "64Mi"]
    busy = [*burn, "--kernel", "50ms", "--seconds", "600"]
    with (
        subprocess.Popen(busy, env=environment, stdout=subprocess.DEVNULL) as process,
        Nvml(machine=path) as source,
    ):
        try:
            for _ in range(400):
                (reading,) = source.readings().values()
                assert isinstance(reading, Reading)
                found = {each.pid: each.gpu_percent for each in reading.processes}
                if (found.get(process.pid) or 0) > 50:
                    break
                time.sleep(0.05)
            else:
                pytest.fail(f"{process.pid} is not busy in {found}")
        finally:
            process.kill()
    with Nvml(machine=path) as source:
        (reading,) = source.readings().values()
    assert isinstance(reading, Reading)
    assert reading.processes == ()


def test_machines_do_not_mix(machine: Callable[[str], Path]) -> None:
    one, other = machine("t4:2"), machine("h200")
    with Nvml(machine=one) as first, Nvml(machine=other) as second:
        for _ in range(3):
            assert [device.name for device in first.inventory().devices] == ["Tesla T4"] * 2
            assert [device.name for device in second.inventory().devices] == ["NVIDIA H200"]


def test_threads_take_turns(machine: Callable[[str], Path]) -> None:
    paths = [machine("t4:2"), machine("h200"), machine("l4:3")]
    failures: list[object] = []

    def ask(path: Path, count: int) -> None:
        for _ in range(10):
            with Nvml(machine=path) as source:
                found = len(source.inventory().devices)
                if found != count:
                    failures.append((path, found))

    threads = [
        threading.Thread(target=ask, args=pair) for pair in zip(paths, (2, 1, 3), strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_the_environment_is_left_as_it_was(machine: Callable[[str], Path]) -> None:
    before = dict(os.environ)
    with Nvml(machine=machine("t4")) as source:
        source.readings()
        assert dict(os.environ) == before


def test_a_driver_that_is_not_loaded_is_said(machine: Callable[[str], Path]) -> None:
    path = machine("t4")
    faults.set_driver_fault(path, nvml_not_loaded=True)
    with pytest.raises(NoDevicesError, match="Driver Not Loaded"), Nvml(machine=path):
        pass
    faults.clear_faults(path)
    with Nvml(machine=path) as source:
        assert len(source.inventory().devices) == 1


def test_a_file_that_is_no_machine_is_said(tmp_path: Path) -> None:
    with pytest.raises(StateError, match="cannot read the simulated machine"):
        Nvml(machine=tmp_path / "none")


def test_without_a_driver_the_hint_is_a_simulated_gpu() -> None:
    if Path("/proc/driver/nvidia").exists():
        pytest.skip("a real driver is here")
    with pytest.raises(NoDevicesError) as caught, Nvml():
        pass
    assert "--simulated" in (caught.value.hint or "")


@pytest.mark.parametrize(
    "models", [sorted(MODELS)[::2], sorted(MODELS)[1::2]], ids=["half", "rest"]
)
def test_a_real_librarys_devices_are_described_by_nvml_alone(
    machine: Callable[[str], Path], native_dir: Path, models: list[str]
) -> None:
    # Found by its name and without a file to read from, the simulated library is any driver's.
    path = machine(",".join(models))  # a machine has at most 16 GPUs
    code = (
        "from allotment.devices.nvml import Nvml\n"
        "with Nvml() as source: print(*source.inventory().devices, sep='\\n')\n"
        "with Nvml() as source: assert len(source.readings()) == len(source.inventory().devices)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={
            **os.environ,
            "ALLOTMENT_SIMULATED_MACHINE": str(path),
            "LD_LIBRARY_PATH": str(native_dir / "simulated"),
            "PYTHONPATH": os.pathsep.join(sys.path),
        },
        capture_output=True,
        text=True,
        check=True,
    )
    expected = [
        replace(device, simulated=False, context_bytes=0, numa_node=None)
        for device in SimulatedMachine(path).devices()
    ]
    assert done.stdout.splitlines() == [repr(device) for device in expected]
