# SPDX-License-Identifier: Apache-2.0
"""`allotment.devices.facts`: the hypervisor's driver in a PCI device's configuration space."""

from __future__ import annotations

import struct
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from allotment.devices.facts import VgpuHost, pcie_root, vgpu_host

FIRST = 0x40


def space(*capabilities: bytes, status: int = 0x10) -> bytes:
    """A configuration space with a chain of capabilities, each `id, next, length, ...`."""
    data = bytearray(256)
    struct.pack_into("<H", data, 0x06, status)
    at = FIRST
    data[0x34] = at if capabilities else 0
    for index, capability in enumerate(capabilities):
        following = (at + len(capability) + 3) & ~3
        data[at : at + len(capability)] = capability
        data[at + 1] = following if index + 1 < len(capabilities) else 0
        at = following
    return bytes(data)


def vendor(data: bytes) -> bytes:
    return bytes((0x09, 0, 3 + len(data))) + data


def record(number: int, data: bytes) -> bytes:
    return bytes((number, 2 + len(data))) + data


POWER = bytes((0x01, 0, 8, 0, 0, 0, 0, 0))
DRIVER = record(0, b"580.126.08" + b"r582_12\0\0\0")


def test_the_root_complex_is_the_top_of_the_kernels_tree(tmp_path: Path) -> None:
    place = tmp_path / "devices" / "pci0000:3a" / "0000:3a:00.0" / "0000:3b:00.0"
    place.mkdir(parents=True)
    link = tmp_path / "bus" / "0000:3b:00.0"
    link.parent.mkdir()
    link.symlink_to(place)
    assert pcie_root(link) == "pci0000:3a"
    assert pcie_root(tmp_path / "bus" / "missing") == ""


def test_the_hosts_driver_is_found_wherever_it_stands() -> None:
    host = VgpuHost("580.126.08", "r582_12")
    assert vgpu_host(space(vendor(b"VF" + DRIVER))) == host
    assert (
        vgpu_host(space(POWER, vendor(b"??"), vendor(b"VF" + record(3, b"abc") + DRIVER))) == host
    )


def test_a_virtual_gpu_whose_host_does_not_tell_is_one_all_the_same() -> None:
    assert vgpu_host(space(vendor(b"VF"))) == VgpuHost("", "")
    assert vgpu_host(space(vendor(b"VF" + bytes((7, 0)) + DRIVER))) == VgpuHost("", "")


def test_a_real_gpu_is_none() -> None:
    assert vgpu_host(space()) is None
    assert vgpu_host(space(POWER, vendor(b"NV" + DRIVER))) is None
    assert vgpu_host(space(vendor(b"VF" + DRIVER), status=0)) is None


def test_the_first_64_bytes_do_not_tell() -> None:
    assert vgpu_host(space(vendor(b"VF" + DRIVER))[:64]) is None


@given(st.binary(max_size=300))
def test_no_bytes_are_too_strange(config: bytes) -> None:
    vgpu_host(config)


@given(st.binary(min_size=1, max_size=192), st.integers(0, 255))
def test_nor_is_any_chain(tail: bytes, first: int) -> None:
    data = bytearray(space()[:FIRST] + tail)
    data[0x34] = first
    vgpu_host(bytes(data))
