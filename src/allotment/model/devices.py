# SPDX-License-Identifier: Apache-2.0
"""A device: a physical GPU or a MIG device, as a machine has it."""

from dataclasses import dataclass

__all__ = ["Device", "DeviceSlice"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSlice:
    """Which slice of which GPU a MIG device is."""

    gpu: str
    """The whole GPU's UUID."""
    number: int
    """NVML's of the MIG device, among those of its GPU: the M of `N:M`."""
    profile: str
    """Written like `1g.10gb+me`; `1c.3g.40gb` for a part of a GPU instance's compute."""
    gpu_instance: int
    compute_instance: int


@dataclass(frozen=True, slots=True)
class Device:
    """A GPU, named by its UUID. `index` is for showing only: it may change from start to start."""

    uuid: str
    name: str
    """The model as NVML names it, like `NVIDIA A100-SXM4-80GB`."""
    index: int
    memory_bytes: int
    """All of its memory, as NVML (v1) reports `total`."""
    sm_count: int
    compute_capability: tuple[int, int]
    numa_node: int | None
    pci_bus_id: str
    simulated: bool
    mig: bool
    reserved_bytes: int = 0
    """Of `memory_bytes`, what the driver keeps for itself: no program can ever have it."""
    context_bytes: int = 0
    """What the first CUDA context of a process is expected to cost; 0: unknown."""
    slice_of: DeviceSlice | None = None
    """Of a MIG device: what it is cut from, whose `index`, bus and node it has. None: a GPU."""

    @property
    def allottable_bytes(self) -> int:
        """What can be given to shares, in all."""
        return max(0, self.memory_bytes - self.reserved_bytes)

    @property
    def place(self) -> tuple[int, int, str]:
        """What sorts devices: by number, each GPU before what is cut from it."""
        return (self.index, -1 if self.slice_of is None else self.slice_of.number, self.uuid)

    @property
    def index_text(self) -> str:
        """Its number as NVIDIA's tools write it: `0`, and `0:1` for a MIG device."""
        if self.slice_of is None:
            return str(self.index)
        return f"{self.index}:{self.slice_of.number}"
