# SPDX-License-Identifier: Apache-2.0
"""What the simulated driver says of MIG, as `devices.mig` and the node's facts have it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from allotment.devices import faults
from allotment.devices.facts import FactReader, MigFacts
from allotment.devices.geometries import profile_name
from allotment.devices.mig_machine import MigDevice, MigMachine
from allotment.devices.nvml import Nvml
from allotment.devices.simulated import SimulatedMachine
from allotment.devices.sources import Reading
from allotment.model.errors import AllotError, DoesNotFitError, NotFoundError, UsageError
from allotment.model.mig import MigGpu
from allotment.model.structs import replace

pytestmark = pytest.mark.usefixtures("native_dir")

GIB = 1 << 30


def ask(path: Path, question: Callable[[MigDevice], object]) -> object:
    with MigMachine(path) as gpus:
        answer = gpus.ask(question, patience_s=20)[0][1]
    if isinstance(answer, Exception):
        raise answer
    return answer


def make(device: MigDevice, name: str, start: int) -> str:
    gpu = device.driver.look()
    profile = next(each for each in gpu.profiles if each.name == name)
    made = device.driver.create_gpu_instance(profile, start)
    return device.driver.create_compute_instance(made, profile).uuid


# Sizes as NVIDIA's tools print them: GPU and instance in MiB, and what it is called.
@pytest.mark.parametrize(
    ("total_gib", "slices", "memory_mib", "name"),
    [
        (39.5, 1, 4864, "1g.5gb"),
        (39.5, 1, 9856, "1g.10gb"),
        (39.5, 3, 20096, "3g.20gb"),
        (39.5, 7, 40192, "7g.40gb"),
        (79.25, 1, 9856, "1g.10gb"),
        (79.25, 1, 19968, "1g.20gb"),
        (93.6, 1, 11008, "1g.12gb"),
        (93.6, 3, 47488, "3g.47gb"),
        (95.2, 3, 48384, "3g.48gb"),
        (140.4, 1, 16384, "1g.18gb"),
        (140.4, 2, 33280, "2g.35gb"),
        (140.4, 3, 71424, "3g.71gb"),
        (179.1, 1, 22000, "1g.23gb"),
        (179.1, 2, 45500, "2g.45gb"),
        (23.5, 1, 5952, "1g.6gb"),
        (23.5, 2, 11968, "2g.12gb"),
    ],
)
def test_profiles_are_named_as_nvidia_names_them(
    total_gib: float, slices: int, memory_mib: int, name: str
) -> None:
    assert profile_name(slices, memory_mib, int(total_gib * GIB)) == name


@pytest.mark.parametrize(
    ("spec", "names"),
    [
        ("a100-40gb", "1g.5gb 1g.5gb+me 1g.10gb 2g.10gb 3g.20gb 4g.20gb 7g.40gb"),
        ("a100-80gb", "1g.10gb 1g.10gb+me 1g.20gb 2g.20gb 3g.40gb 4g.40gb 7g.80gb"),
        ("h100-80gb", "1g.10gb 1g.10gb+me 1g.20gb 2g.20gb 3g.40gb 4g.40gb 7g.80gb"),
        ("h200", "1g.18gb 1g.18gb+me 1g.35gb 2g.35gb 3g.71gb 4g.71gb 7g.141gb"),
        ("b200", "1g.23gb 1g.23gb+me 1g.45gb 2g.45gb 3g.90gb 4g.90gb 7g.180gb"),
        ("a30", "1g.6gb 1g.6gb+me 2g.12gb 2g.12gb+me 4g.24gb"),
    ],
)
def test_all_profiles_are_found(machine: Callable[[str], Path], spec: str, names: str) -> None:
    gpu = ask(machine(spec), lambda device: device.driver.look())
    assert isinstance(gpu, MigGpu)
    assert sorted(each.name for each in gpu.profiles) == sorted(names.split())
    assert {each.name for each in gpu.profiles if each.has_media} == {
        each for each in names.split() if "+me" in each
    }


def test_a_compute_instance_takes_all_of_a_7g(machine: Callable[[str], Path]) -> None:
    """NVML names a profile of seven slices twice, and one of them cannot be made."""

    def question(device: MigDevice) -> str:
        device.driver.set_mode(is_on=True)
        return make(device, "7g.80gb", 0)

    path = machine("h100-80gb")
    assert str(ask(path, question)).startswith("MIG-")
    [device] = FactReader(machine=path, patience_s=60).read().devices
    assert device.mig_devices is not None
    assert [(each.gi_slices, each.ci_slices) for each in device.mig_devices] == [(7, 7)]
    with Nvml(machine=path) as source:  # what runs in it is in no figure of the GPU
        (reading,) = source.readings().values()
    assert isinstance(reading, Reading)
    assert reading.gpu_percent is reading.memory_percent is None


def test_errors_say_what_was_not_done_to_which_gpu(machine: Callable[[str], Path]) -> None:
    path = machine("h100-80gb,t4")

    def question(device: MigDevice) -> list[AllotError]:
        driver = device.driver
        driver.set_mode(is_on=True)
        make(device, "1g.10gb", 6)
        small = next(each for each in driver.look().profiles if each.name == "1g.10gb")
        found = []
        for attempt in (
            lambda: driver.create_gpu_instance(small, 6),
            lambda: driver.destroy_gpu_instance(99),
            lambda: driver.create_gpu_instance(replace(small, number=77), 0),
        ):
            with pytest.raises(AllotError) as caught:
                attempt()
            assert driver.uuid in caught.value.message
            assert caught.value.hint
            found.append(caught.value)
        return found

    errors = ask(path, question)
    assert isinstance(errors, list)
    assert [type(each) for each in errors[:2]] == [DoesNotFitError, NotFoundError]
    with MigMachine(path) as gpus:
        answers = gpus.ask(lambda device: device.driver.look(), patience_s=20)
    assert isinstance(answers[1][1], UsageError), "a T4 has no MIG"


def test_a_gpu_that_hangs_keeps_no_other_waiting(machine: Callable[[str], Path]) -> None:
    path = machine("h100-80gb:3")
    faults.set_fault(path, 1, hang_us=5_000_000)
    with MigMachine(path) as gpus:
        answers = gpus.ask(lambda device: device.driver.look(), patience_s=2)
        assert [isinstance(each, MigGpu) for _, each in answers] == [True, False, True]
    assert "has not answered within 2 s" in str(answers[1][1])


def test_mig_devices_are_among_the_nodes_facts(machine: Callable[[str], Path]) -> None:
    path = machine("h100-80gb:2")

    def question(device: MigDevice) -> None:
        if device.index == 0:
            device.driver.set_mode(is_on=True)
            make(device, "3g.40gb", 4)
            make(device, "1g.10gb+me", 3)

    ask(path, question)
    reader = FactReader(machine=path, patience_s=60)
    split, whole = reader.read().devices
    assert (split.is_mig_enabled, whole.is_mig_enabled, whole.mig_devices) == (True, False, None)
    assert split.mig_devices is not None
    small, large = split.mig_devices
    assert small.profile == "1g.10gb+me"
    assert large == MigFacts(
        profile="3g.40gb",
        memory_mib=large.memory_mib,
        multiprocessors=60,
        gi_slices=3,
        ci_slices=3,
        copy_engines=3,
        decoders=3,
        encoders=0,
        jpeg_engines=large.jpeg_engines,
        ofa_engines=large.ofa_engines,
    )
    assert 39 << 10 < large.memory_mib < 40 << 10
    assert [each.uuid for each in SimulatedMachine(path).devices()] == [split.uuid, whole.uuid]
