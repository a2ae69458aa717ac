# SPDX-License-Identifier: Apache-2.0
"""What is said where no GPU can serve, whatever is on it: why each cannot, and the next step."""

from __future__ import annotations

import pytest
from gpus import gpu

from allotment.model.devices import Device
from allotment.model.errors import DoesNotFitError
from allotment.model.quantities import parse_memory
from allotment.model.requests import MPS, SOFT, Request
from allotment.model.shares import Injection
from allotment.shares.placing import Order, place

CUT = gpu(mig=True, memory_bytes=0)
OLD = gpu(compute_capability=(6, 0))


@pytest.mark.parametrize(
    ("device", "mode", "why", "next_step"),
    [
        (CUT, SOFT, "it is in MIG mode", "switch MIG off"),
        (CUT, MPS, "it is cut by MIG", "switch MIG off"),
        (OLD, MPS, "before Volta", "another mode"),
    ],
)
def test_a_gpu_that_cannot_serve_says_why(
    device: Device, mode: str, why: str, next_step: str
) -> None:
    order = Order(Request(parse_memory("4Gi"), mode=mode), Injection.ENVIRONMENT)
    with pytest.raises(DoesNotFitError) as caught:
        place(order, [device], {})
    assert f"{device.uuid} ({device.name}): " in caught.value.message
    assert why in caught.value.message
    assert next_step in (caught.value.hint or "")
    assert place(order, [device, gpu(1)], {}).devices[0].device.uuid == "GPU-1"
