# SPDX-License-Identifier: Apache-2.0
"""GPUs as tests want them: an A100 but for what a test is about."""

from __future__ import annotations

from typing import Any

from allotment.model.devices import Device, DeviceSlice
from allotment.model.structs import replace

A100 = "NVIDIA A100-SXM4-80GB"


def gpu(index: int = 0, **changes: Any) -> Device:  # noqa: ANN401 - any field of a device
    """One GPU of a machine, by its number there."""
    made = Device(
        uuid=f"GPU-{index}",
        name=A100,
        index=index,
        memory_bytes=80 << 30,
        sm_count=108,
        compute_capability=(8, 0),
        numa_node=None,
        pci_bus_id=f"00000000:{index:02X}:00.0",
        simulated=True,
        mig=False,
    )
    return replace(made, **changes)


def mig_slice(of: Device, number: int, profile: str = "1g.10gb", **changes: Any) -> Device:  # noqa: ANN401 - any field of a device
    """One MIG device of a GPU, by its number there."""
    made = replace(
        of,
        uuid=f"MIG-{of.index}{number}",
        memory_bytes=10 << 30,
        mig=False,
        reserved_bytes=0,
        slice_of=DeviceSlice(
            gpu=of.uuid,
            number=number,
            profile=profile,
            gpu_instance=7 + number,
            compute_instance=0,
        ),
    )
    return replace(made, **changes)
