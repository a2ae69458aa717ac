# SPDX-License-Identifier: Apache-2.0
"""`allotment.devices.facts` on simulated machines: facts, and GPUs that are silent."""

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
from allotment.devices.facts import DeviceFacts, FactReader
from allotment.devices.models import MODELS
from allotment.devices.simulated import SimulatedMachine
from allotment.model.errors import NoDevicesError

pytestmark = pytest.mark.usefixtures("native_dir")

BRANDS = {"GeForce": "GeForce", "T4": "Tesla", "A100": "Nvidia"}


def test_a_machine_tells_its_driver_and_its_gpus(machine: Callable[[str], Path]) -> None:
    path = machine("a100-80gb:2,t4,rtx4090")
    facts = FactReader(machine=path, patience_s=60).read()
    described = SimulatedMachine(path).devices()
    assert (facts.driver_version, facts.cuda_version) == ("580.95.05", (13, 0))
    assert facts.problems == ()
    assert facts.devices == tuple(
        DeviceFacts(
            uuid=device.uuid,
            name=device.name,
            memory_mib=device.memory_bytes >> 20,
            compute_capability=device.compute_capability,
            brand=next(word for name, word in BRANDS.items() if name in device.name),
            pci_class=0x0300 if "GeForce" in device.name else 0x0302,
            is_mig_capable="A100" in device.name,
        )
        for device in described
    )


@pytest.mark.parametrize("key", sorted(MODELS))
def test_every_model_has_facts(machine: Callable[[str], Path], key: str) -> None:
    (device,) = FactReader(machine=machine(key), patience_s=60).read().devices
    model = MODELS[key]
    assert (device.name, device.memory_mib) == (model.name, model.memory_mib)
    assert device.is_mig_capable == (model.mig is not None)
    assert device.fabric is None, "one machine is no cluster"


def test_a_sick_gpu_costs_neither_the_others_nor_a_second_thread(
    machine: Callable[[str], Path],
) -> None:
    path = machine("t4:4")
    uuids = [device.uuid for device in SimulatedMachine(path).devices()]
    faults.set_fault(path, 1, lost=True)
    faults.set_fault(path, 2, hang_us=60_000_000)
    reader = FactReader(machine=path, patience_s=3.0)
    before = time.monotonic()
    first = reader.read()
    assert time.monotonic() - before < 20, "a GPU that hangs was waited for"
    assert [device.uuid for device in first.devices] == [uuids[0], uuids[3]]
    assert [(each.index, each.message) for each in first.problems] == [
        (1, "NVML: GPU is lost"),
        (2, "it has not answered in time"),
    ]
    threads = threading.active_count()
    took = []
    for _ in range(5):
        before = time.monotonic()
        again = reader.read()
        took.append(time.monotonic() - before)
        assert [each.index for each in again.problems] == [1, 2]
    assert min(took) < 2.5, "it was waited for again each time"
    assert threading.active_count() <= threads
    faults.clear_faults(path)
    reader.close()


def test_a_gpu_that_falls_silent_keeps_its_facts(machine: Callable[[str], Path]) -> None:
    path = machine("t4:2")
    reader = FactReader(machine=path, patience_s=20.0)
    healthy = reader.read()
    faults.set_fault(path, 0, lost=True)
    sick = reader.read()
    assert sick.devices == healthy.devices
    assert [(each.uuid, each.message) for each in sick.problems] == [
        (healthy.devices[0].uuid, "NVML: GPU is lost")
    ]
    faults.clear_faults(path)
    assert reader.read() == healthy


def test_two_machines_do_not_mix(machine: Callable[[str], Path]) -> None:
    one, other = (
        FactReader(machine=machine("t4:2"), patience_s=60),
        FactReader(machine=machine("h200"), patience_s=60),
    )
    for _ in range(3):
        assert [each.name for each in one.read().devices] == ["Tesla T4"] * 2
        assert [each.name for each in other.read().devices] == ["NVIDIA H200"]


def test_a_driver_that_is_not_there_is_told_and_asked_again(
    machine: Callable[[str], Path],
) -> None:
    path = machine("t4")
    reader = FactReader(machine=path, patience_s=60)
    faults.set_driver_fault(path, nvml_not_loaded=True)
    with pytest.raises(NoDevicesError):
        reader.read()
    faults.clear_faults(path)
    assert [each.name for each in reader.read().devices] == ["Tesla T4"]


_ASK = """
import sys
from pathlib import Path
from allotment.devices.facts import FactReader
reader = FactReader(sysfs=Path(sys.argv[1]))
for device in (reader.read(), reader.read())[1].devices:
    print(device.name, hex(device.pci_class), device.vgpu_host)
"""


def _guest() -> bytes:
    """The configuration space of a virtual GPU."""
    data = bytearray(256)
    data[0x06], data[0x34] = 0x10, 0x40
    capability = b"VF" + bytes((0, 22)) + b"580.126.08" + b"r582_12\0\0\0"
    data[0x40:0x43] = bytes((0x09, 0, 3 + len(capability)))
    data[0x43 : 0x43 + len(capability)] = capability
    return bytes(data)


_GUEST = _guest()


def test_the_drivers_library_is_asked_and_the_kernel_told_first(
    machine: Callable[[str], Path], native_dir: Path, tmp_path: Path
) -> None:
    path = machine("t4:3")
    devices = SimulatedMachine(path).devices()
    for device, pci_class in zip(devices, ("0x030000\n", "strange\n"), strict=False):
        folder = tmp_path / "bus/pci/devices" / device.pci_bus_id.lower()[-12:]
        folder.mkdir(parents=True)
        (folder / "class").write_text(pci_class)
        (folder / "config").write_bytes(_GUEST if pci_class.startswith("0x") else b"")
    told = subprocess.run(
        [sys.executable, "-c", _ASK, str(tmp_path)],
        env={
            **os.environ,
            "ALLOTMENT_SIMULATED_MACHINE": str(path),
            "LD_LIBRARY_PATH": str(native_dir / "simulated"),
        },
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert told.splitlines() == [
        "Tesla T4 0x300 VgpuHost(driver_version='580.126.08', driver_branch='r582_12')",
        "Tesla T4 0x302 None",
        "Tesla T4 0x302 None",
    ]
