# SPDX-License-Identifier: Apache-2.0
"""A device: a physical GPU or a MIG device, as a machine has it."""

from dataclasses import dataclass

__all__ = ["Device"]


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

    @property
    def allottable_bytes(self) -> int:
        """What can be given to shares, in all."""
        return max(0, self.memory_bytes - self.reserved_bytes)
