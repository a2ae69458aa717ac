# SPDX-License-Identifier: Apache-2.0
"""Descriptions as bytes: what follows from them, and that nothing is lost on the way."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from allotment.devices import layout
from allotment.devices.descriptions import GpuDescription, MachineDescription, parse_short
from allotment.devices.model_facts import Fabric
from allotment.devices.models import MODELS
from allotment.devices.packing import identity, link_peers, numa_nodes, pack, pack_mig, unpack

UUIDS = ["GPU-26c0dc67-7439-0043-9fa4-57aa8646e1c6", "GPU-bf056700-765e-5e0c-38d6-63dea8095aa2"]

MACHINES = st.lists(st.sampled_from(list(MODELS.values())), min_size=1, max_size=16).map(
    lambda models: MachineDescription(
        gpus=tuple(
            GpuDescription(model=model, memory_bytes=model.memory_mib << 20) for model in models
        )
    )
)


@given(MACHINES)
def test_what_is_packed_can_be_read(machine: MachineDescription) -> None:
    facts = unpack(pack(machine))
    assert facts.driver_version == machine.driver_version
    assert facts.cuda_version == machine.cuda_version
    assert (facts.timeslice_us, facts.kernel_us) == (machine.timeslice_us, machine.kernel_us)
    for gpu, device in zip(machine.gpus, facts.devices, strict=True):
        assert device.name == gpu.model.name
        assert device.memory_bytes == gpu.memory_bytes
        assert device.reserved_bytes == gpu.model.reserved_mib << 20
        assert device.context_bytes == gpu.model.context_mib << 20
        assert device.sm_count == gpu.model.sm_count
        assert device.compute_capability == gpu.model.core.compute_capability
        assert device.simulated
    assert len({device.uuid for device in facts.devices}) == len(machine.gpus)
    addresses = [device.pci_bus_id for device in facts.devices]
    assert addresses == sorted(set(addresses)), "NVML counts in the order of the bus"


@given(MACHINES)
def test_links_have_two_ends(machine: MachineDescription) -> None:
    peers = link_peers(machine.gpus)
    for one, links in enumerate(peers):
        for other in (peer for peer in links if peer >= 0):
            assert other != one
            assert peers[other].count(one) == links.count(other)
            assert machine.gpus[one].model.key == machine.gpus[other].model.key
        model = machine.gpus[one].model
        assert all(peer == -1 for peer in links[model.nvlinks :])
        assert (-2 in links) is (model.fabric is Fabric.SWITCH)


@given(MACHINES)
def test_the_same_description_is_the_same_machine(machine: MachineDescription) -> None:
    assert pack(machine) == pack(machine)
    assert len(identity(pack(machine), pack_mig(machine))) == 16


def test_another_description_is_another_machine() -> None:
    texts = ["t4", "t4:2", "a10", "t4[memory=8Gi]", "t4[numa=1]", "t4[ecc=off]"]
    machines = [parse_short(text) for text in texts]
    assert len({identity(pack(machine), pack_mig(machine)) for machine in machines}) == len(texts)
    uuids = {unpack(pack(machine)).devices[0].uuid for machine in machines}
    assert len(uuids) == len(texts)


def test_uuids_are_stable() -> None:
    # Users write them into files: they must not change from release to release for no reason.
    uuids = [device.uuid for device in unpack(pack(parse_short("a100-80gb,t4"))).devices]
    assert uuids == UUIDS


@pytest.mark.parametrize(
    ("text", "nodes"),
    [("t4", [0]), ("t4:4", [0, 0, 1, 1]), ("t4:3", [0, 0, 1]), ("t4[numa=1],t4", [1, 1])],
)
def test_numa_nodes_go_by_halves(text: str, nodes: list[int]) -> None:
    assert numa_nodes(parse_short(text).gpus) == nodes


@pytest.mark.parametrize(
    ("text", "first"),
    [
        ("v100-16gb:2", [1] * 6),
        ("v100-16gb:4", [1, 3, 2, 2, 3, 1]),
        ("a30:2", [1] * 4),
        ("a100-80gb", [-2] * 12),
        ("gh200", [-1] * 18),
    ],
)
def test_links_of_the_first_gpu(text: str, first: list[int]) -> None:
    links = link_peers(parse_short(text).gpus)[0]
    assert links[: len(first)] == first


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda _: b"", "too few"),
        (lambda data: data[:-1], "too few"),
        (lambda data: b"\0" * len(data), "magic number"),
        (lambda data: data[:8] + b"\xff\xff\xff\xff" + data[12:], "version 4294967295"),
        (lambda data: data[:12] + b"\0\0\0\0" + data[16:], "GPUs is 0"),
        (lambda data: data[:12] + b"\x11\0\0\0" + data[16:], "GPUs is 17"),
    ],
    ids=["empty", "short", "zeros", "version", "none", "many"],
)
def test_other_bytes_are_refused(damage: object, says: str) -> None:
    assert callable(damage)
    with pytest.raises(ValueError, match=says):
        unpack(damage(pack(parse_short("t4"))))


@given(st.binary(max_size=300), st.integers(16, layout.MACHINE_SIZE))
def test_noise_after_a_right_beginning_never_crashes(noise: bytes, at: int) -> None:
    data = bytearray(pack(parse_short("t4:16")))
    data[at : at + len(noise)] = noise
    assert len(unpack(bytes(data).ljust(layout.MACHINE_SIZE)).devices) == 16


def test_the_layout_is_the_headers(root: Path, cc: list[str]) -> None:
    if not shutil.which(cc[0]):
        pytest.skip(f"no {cc[0]}")
    tool = root / "tools" / "generate_machine_layout.py"
    done = subprocess.run([sys.executable, tool, "--check", "--cc", " ".join(cc)], check=False)
    assert done.returncode == 0, "run tools/generate_machine_layout.py"
