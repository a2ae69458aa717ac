# SPDX-License-Identifier: Apache-2.0
"""What a ResourceClaim asks of its devices, and how its parameters are refused."""

from __future__ import annotations

from typing import Any

import pytest

from allotment.dialects.own.resource_claims import (
    AllocatedDevice,
    DevicePart,
    Parameters,
    read_parameters,
    request_for,
)
from allotment.model.compute import Compute, ComputeClass
from allotment.model.errors import UsageError
from allotment.model.mig import MigPlace
from allotment.model.requests import Request

GI = 1 << 30
WHERE = "status.allocation.devices.config[0].opaque.parameters"
PLACE = MigPlace("1g.10gb", 3)


def parameters(**fields: Any) -> Parameters:  # noqa: ANN401 - any field
    content = {"apiVersion": "allotment.dev/v1", "kind": "ShareConfig", **fields}
    return Parameters(where=WHERE, content=content)


def part(
    *, memory: str = "4Gi", compute: str = "30", uuid: str = "GPU-0"
) -> tuple[AllocatedDevice, DevicePart]:
    consumed = {"memory": memory, "compute": compute}
    device = AllocatedDevice(request="gpu", pool="n", device="gpu-0", consumed=consumed)
    return device, DevicePart(uuid=uuid)


def undivided(**fields: Any) -> tuple[AllocatedDevice, DevicePart]:  # noqa: ANN401 - any field
    device = AllocatedDevice(request="gpu", pool="n", device="gpu-0-whole")
    return device, DevicePart(uuid="GPU-0", **fields)


def asked(*given: Parameters, asks_compute: bool = True) -> Request:
    return request_for([part()], given, asks_compute=asks_compute)


def test_amounts_are_the_consumed_capacity() -> None:
    request = asked()
    assert (request.memory.size_bytes, request.mode, request.count) == (4 * GI, "soft", 1)
    assert request.compute == Compute(3000, 3000, is_governed=True)
    assert request.floor == 0


def test_compute_that_nobody_asked_for_is_neither_guarantee_nor_ceiling() -> None:
    request = request_for([part(compute="5")], (), asks_compute=False)
    assert request.compute == Compute()
    assert request.floor == 500


def test_several_devices_have_the_same_amounts() -> None:
    request = request_for([part(), part(uuid="GPU-1")], (), asks_compute=True)
    assert request.count == 2
    with pytest.raises(UsageError, match="different amounts"):
        request_for([part(), part(memory="5Gi", uuid="GPU-1")], (), asks_compute=True)


def test_parameters_are_as_annotations() -> None:
    given = {"class": "latency", "weight": 200, "oversubscribe": True}
    request = asked(parameters(compute=":80", mode="soft", **given))
    assert request.compute == Compute(3000, 8000, 200, ComputeClass.LATENCY, is_governed=True)
    assert request.may_oversubscribe


def test_a_list_of_modes_is_tried_in_its_order() -> None:
    request = asked(parameters(mode=["mps", "soft"]))
    assert request.modes == ("mps", "soft")


def test_later_parameters_win() -> None:
    request = asked(parameters(weight=200, compute=":80"), parameters(weight=300))
    assert (request.compute.weight, request.compute.ceiling) == (300, 8000)


@pytest.mark.parametrize(
    ("requests", "request_name", "expected"),
    [
        ((), "a", True),
        (("a",), "a", True),
        (("a",), "a/first", True),
        (("a/first",), "a/first", True),
        (("a/first",), "a/second", False),
        (("b",), "a", False),
    ],
)
def test_parameters_are_for_their_requests(
    requests: tuple[str, ...], request_name: str, *, expected: bool
) -> None:
    found = Parameters(where=WHERE, content={}, requests=requests)
    assert found.are_for(request_name) is expected


def test_a_whole_gpu_is_exclusive() -> None:
    request = request_for([undivided(is_whole=True)], (), asks_compute=False)
    assert (request.mode, request.count) == ("exclusive", 1)


def test_a_slice_is_of_its_profile() -> None:
    request = request_for([undivided(slice=PLACE)], (), asks_compute=False)
    assert (request.mode, request.mig_profile) == ("mig", "1g.10gb")


@pytest.mark.parametrize(
    "others",
    [undivided(is_whole=True), part(uuid="GPU-1"), undivided(slice=MigPlace("2g.20gb", 0))],
)
def test_types_are_not_mixed_in_one_request(others: tuple[AllocatedDevice, DevicePart]) -> None:
    with pytest.raises(UsageError, match="different types or profiles"):
        request_for([undivided(slice=PLACE), others], (), asks_compute=True)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"wieght": 200}, r"\.wieght is unknown.*weight"),
        ({"weight": "heavy"}, r"\.weight: "),
        ({"weight": {"a": 1}}, r"\.weight: it is neither a text nor a number"),
        ({"class": "fast"}, r"\.class: 'fast'"),
        ({"compute": "40:80"}, r"\.compute guarantees 40 percent, but"),
        ({"compute": ":20"}, r"\.compute has a ceiling below the 30 percent"),
        ({"mode": "mig"}, r"\.mode: a part of a GPU has mode soft or mps, not mig"),
        ({"mode": "timeslice"}, r"\.mode: a part of a GPU has mode soft or mps, not timeslice"),
        ({"mode": "sfot"}, r"\.mode: .*soft"),
        ({"oversubscribe": "perhaps"}, r"\.oversubscribe: 'perhaps'"),
        ({"apiVersion": "allotment.dev/v2"}, r"parameters has apiVersion 'allotment.dev/v2'"),
    ],
)
def test_wrong_parameters_name_their_path(fields: dict[str, Any], text: str) -> None:
    with pytest.raises(UsageError, match=text) as caught:
        asked(parameters(**fields))
    assert caught.value.message.startswith(WHERE)
    assert caught.value.hint or "weight" in fields


@pytest.mark.parametrize("content", [None, [], "soft", 3])
def test_parameters_that_are_no_object_are_refused(content: object) -> None:
    with pytest.raises(UsageError, match="is not an object"):
        read_parameters(Parameters(where=WHERE, content=content))


@pytest.mark.parametrize(
    "fields",
    [
        {"compute": ":80"},
        {"weight": 2},
        {"class": "latency"},
        {"mode": "soft"},
        {"mode": "timeslice"},
    ],
)
@pytest.mark.parametrize("device", [undivided(is_whole=True), undivided(slice=PLACE)])
def test_parameters_without_effect_are_refused(
    fields: dict[str, Any], device: tuple[AllocatedDevice, DevicePart]
) -> None:
    with pytest.raises(UsageError, match="has no effect on a device of mode"):
        request_for([device], [parameters(**fields)], asks_compute=False)


@pytest.mark.parametrize("consumed", [{}, {"memory": "4Gi"}, {"memory": "x", "compute": "1"}])
def test_an_allocation_without_amounts_names_the_feature(consumed: dict[str, str]) -> None:
    device = AllocatedDevice(request="gpu", pool="n", device="gpu-0", consumed=consumed)
    with pytest.raises(UsageError, match="consumedCapacity") as caught:
        request_for([(device, DevicePart(uuid="GPU-0"))], (), asks_compute=True)
    assert "DRAConsumableCapacity" in (caught.value.hint or "")


@pytest.mark.parametrize("amounts", [("0", "30"), ("4Gi", "101"), ("4Gi", "1E")])
def test_an_allocation_that_no_scheduler_makes_is_refused(amounts: tuple[str, str]) -> None:
    """Anyone with the right to write a claim's status can forge it."""
    memory, compute = amounts
    with pytest.raises(UsageError, match="consumedCapacity is impossible"):
        request_for([part(memory=memory, compute=compute)], (), asks_compute=True)
