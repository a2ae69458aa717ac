# SPDX-License-Identifier: Apache-2.0
"""A device of a machine: a physical GPU or a MIG device."""

from typing import Final

import msgspec

MPS_CLIENTS: Final = 48
"""Clients of one MPS server, at least (docs.nvidia.com/deploy/mps), one for each share.

A scheduler does not know a node's driver, and NVIDIA's plugin counts no more.
"""


def mps_clients(cuda_version: int) -> int:
    """Clients of one MPS server, by the driver's CUDA version: 60 since 13.1 (r590)."""
    return 60 if cuda_version >= 13_010 else MPS_CLIENTS  # noqa: PLR2004 - as the driver writes it


class DeviceSlice(msgspec.Struct, frozen=True, kw_only=True):
    """The slice that a MIG device is."""

    gpu: str
    """UUID of the whole GPU."""
    number: int
    """NVML index among the MIG devices of its GPU: the M of `N:M`."""
    profile: str
    """Like `1g.10gb+me`; `1c.3g.40gb` for a part of a GPU instance's compute."""
    gpu_instance: int
    compute_instance: int


class Device(msgspec.Struct, frozen=True):
    """A GPU or MIG device. `index` is for display only: it can change with each boot."""

    uuid: str
    name: str
    """Model name from NVML, like `NVIDIA A100-SXM4-80GB`."""
    index: int
    memory_bytes: int
    """Total memory, as NVML (v1) reports `total`."""
    sm_count: int
    compute_capability: tuple[int, int]
    numa_node: int | None
    pci_bus_id: str
    simulated: bool
    mig: bool
    reserved_bytes: int = 0
    """Of `memory_bytes`, the driver's reserve; programs can never use it."""
    context_bytes: int = 0
    """Expected size of a process's first CUDA context; 0: unknown."""
    slice_of: DeviceSlice | None = None
    """For a MIG device: its slice; `index`, bus and node are the GPU's. None: a whole GPU."""
    mps_clients: int = MPS_CLIENTS
    """Most shares in mode `mps`."""

    @property
    def allottable_bytes(self) -> int:
        """Bytes available to shares in total; 0 in MIG mode, where MIG devices have them."""
        if self.mig and self.slice_of is None:
            return 0
        return max(0, self.memory_bytes - self.reserved_bytes)

    @property
    def place(self) -> tuple[int, int, str]:
        """Sort key: by number, each GPU before its MIG devices."""
        return (self.index, -1 if self.slice_of is None else self.slice_of.number, self.uuid)

    @property
    def index_text(self) -> str:
        """Its number in NVIDIA's notation: `0`, or `0:1` for a MIG device."""
        if self.slice_of is None:
            return str(self.index)
        return f"{self.index}:{self.slice_of.number}"
