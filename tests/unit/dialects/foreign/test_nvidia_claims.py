# SPDX-License-Identifier: Apache-2.0
"""NVIDIA's parameters of claims: what each becomes, and the path in each error."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest

from allotment.dialects.foreign.nvidia_claims import is_nvidias, read_sharing
from allotment.dialects.own.resource_claims import (
    AllocatedDevice,
    ClaimSharing,
    DevicePart,
    Parameters,
    request_for,
)
from allotment.model.errors import UsageError
from allotment.model.mig import MigPlace
from allotment.model.requests import Request

GI = 1 << 30
WHERE = "spec.devices.config[0].opaque.parameters"
VERSION = "resource.nvidia.com/v1beta1"


def parameters(kind: str = "GpuConfig", *requests: str, **fields: Any) -> Parameters:  # noqa: ANN401
    content = {"apiVersion": VERSION, "kind": kind, **fields}
    return Parameters(where=WHERE, content=content, requests=requests)


def config(strategy: str | None = "MPS", **fields: Any) -> Parameters:  # noqa: ANN401
    named = {} if strategy is None else {"strategy": strategy}
    return parameters(sharing={**named, **fields})


def mps(**fields: Any) -> Parameters:  # noqa: ANN401
    return config(mpsConfig=fields)


def shared(*given: Parameters) -> ClaimSharing:
    found = read_sharing(given, is_slice=False)
    assert found is not None
    return found


def device(uuid: str = "GPU-0", **fields: Any) -> tuple[AllocatedDevice, DevicePart]:  # noqa: ANN401
    consumed = {"memory": "8Gi", "compute": "5"}
    allocated = AllocatedDevice(request="gpu", pool="n", device="gpu-0", consumed=consumed)
    return allocated, DevicePart(uuid=uuid, **fields)


def asked(
    given: Parameters, *devices: tuple[AllocatedDevice, DevicePart], is_whole: bool = True
) -> Request:
    parts = devices or (device(is_whole=is_whole),)
    return request_for(parts, (), asks_compute=False, sharing=shared(given))


def test_parameters_of_either_format_are_told_apart() -> None:
    assert is_nvidias(parameters())
    assert is_nvidias(Parameters(where=WHERE, content={"apiVersion": "resource.nvidia.com/v9"}))
    others: list[object] = [{"apiVersion": "allotment.dev/v1"}, {}, {"apiVersion": 1}, [], None]
    for other in others:
        assert not is_nvidias(Parameters(where=WHERE, content=other))


@pytest.mark.parametrize("interval", ["Default", "Short", "Medium", "Long"])
def test_time_slicing_is_mode_timeslice_with_its_interval(interval: str) -> None:
    given = config("TimeSlicing", timeSlicingConfig={"interval": interval})
    assert shared(given).time_slice == interval.lower()
    assert asked(given).mode == "timeslice"


def test_time_slicing_without_an_interval_has_the_drivers() -> None:
    assert shared(config("TimeSlicing")).time_slice == "default"
    assert shared(config("TimeSlicing", timeSlicingConfig={})).time_slice == "default"


def test_mps_has_the_percentage_and_the_limit_of_its_parameters() -> None:
    limit = "10Gi"
    given = mps(defaultActiveThreadPercentage=50, defaultPinnedDeviceMemoryLimit=limit)
    request = asked(given)
    assert (request.mode, request.memory.size_bytes) == ("mps", 10 * GI)
    assert (request.compute.guarantee, request.compute.ceiling) == (0, 5000)


def test_mps_without_limits_has_all_of_its_gpu() -> None:
    request = asked(config())
    assert request.mode == "mps"
    assert request.memory.part == Fraction(1)
    assert request.compute.ceiling == 10_000


@pytest.mark.parametrize(
    ("text", "size"), [("1G", 953 << 20), ("10M", 9 << 20), ("2Gi", 2 * GI), (4 * GI, 4 * GI)]
)
def test_limits_are_rounded_down_to_mib_as_nvidias_are(text: str | int, size: int) -> None:
    assert shared(mps(defaultPinnedDeviceMemoryLimit=text)).memory_bytes == size


@pytest.mark.parametrize("key", ["0", "GPU-0"])
def test_a_limit_for_a_device_goes_before_the_default(key: str) -> None:
    given = mps(
        defaultPinnedDeviceMemoryLimit="10Gi", defaultPerDevicePinnedMemoryLimit={key: "5Gi"}
    )
    assert asked(given).memory.size_bytes == 5 * GI


def test_the_last_parameters_count_alone() -> None:
    last = shared(mps(defaultActiveThreadPercentage=50), config("TimeSlicing"))
    assert (last.mode, last.ceiling) == ("timeslice", 10_000)
    assert read_sharing([mps(), parameters()], is_slice=False) is None


def test_parameters_for_all_requests_skip_devices_of_another_kind() -> None:
    slices = parameters("MigDeviceConfig", sharing={"strategy": "TimeSlicing"})
    assert read_sharing([slices], is_slice=True) is None
    assert read_sharing([slices], is_slice=False) is None
    assert read_sharing([config()], is_slice=True) is None


@pytest.mark.parametrize(
    ("kind", "is_slice", "hint"),
    [("GpuConfig", True, "MigDeviceConfig"), ("MigDeviceConfig", False, "GpuConfig")],
)
def test_parameters_for_a_request_of_another_kind_are_refused(
    kind: str,
    is_slice: bool,  # noqa: FBT001 - a parameter
    hint: str,
) -> None:
    with pytest.raises(UsageError, match=f"{kind} is not for the request's device") as caught:
        read_sharing([parameters(kind, "gpu")], is_slice=is_slice)
    assert caught.value.hint == f"write kind: {hint}"


def test_a_slice_has_no_sharing_of_its_own() -> None:
    slices = parameters("MigDeviceConfig", sharing={"strategy": "TimeSlicing"})
    sharing = read_sharing([slices], is_slice=True)
    place = device(slice=MigPlace("1g.10gb", 3))
    request = request_for([place], (), asks_compute=False, sharing=sharing)
    assert (request.mode, request.mig_profile) == ("mig", "1g.10gb")


SHARING = f"{WHERE}.sharing"
MPS_CONFIG = f"{SHARING}.mpsConfig"
WRONG = {
    "not an object": (Parameters(where=WHERE, content=[]), f"{WHERE} is not an object"),
    "version": (
        Parameters(where=WHERE, content={"apiVersion": "resource.nvidia.com/v9"}),
        f"{WHERE}.apiVersion is 'resource.nvidia.com/v9', which is unknown",
    ),
    "kind": (
        parameters("GpuConfg"),
        f"{WHERE}.kind is 'GpuConfg', which is unknown (did you mean 'GpuConfig'?)",
    ),
    "no kind": (
        Parameters(where=WHERE, content={"apiVersion": VERSION}),
        f"{WHERE}.kind is None, which is unknown",
    ),
    "vfio": (
        parameters("VfioDeviceConfig"),
        f"{WHERE}.kind: VfioDeviceConfig passes a GPU through to a virtual machine",
    ),
    "field": (parameters(sharng={}), f"{WHERE}.sharng is unknown"),
    "inner field": (
        mps(defaultActiveThreads=50),
        f"{MPS_CONFIG}.defaultActiveThreads is unknown",
    ),
    "type": (
        mps(defaultActiveThreadPercentage="50"),
        f"{MPS_CONFIG}.defaultActiveThreadPercentage: expected int, got str",
    ),
    "sharing is a text": (parameters(sharing="MPS"), f"{SHARING}: expected object, got str"),
    "strategy": (
        config("Mps"),
        f"{SHARING}.strategy: unknown sharing strategy 'Mps'",
    ),
    "no strategy": (config(None), f"{SHARING}.strategy: unknown sharing strategy ''"),
    "interval": (
        config("TimeSlicing", timeSlicingConfig={"interval": "Invalid"}),
        f"{SHARING}.timeSlicingConfig.interval: unknown time-slice interval 'Invalid'",
    ),
    "time slicing with MPS": (
        config("TimeSlicing", mpsConfig={}),
        f"{SHARING}.mpsConfig: cannot be used with the strategy TimeSlicing",
    ),
    "MPS with time slicing": (
        config("MPS", timeSlicingConfig={}),
        f"{SHARING}.timeSlicingConfig: cannot be used with the strategy MPS",
    ),
    "percentage": (
        mps(defaultActiveThreadPercentage=-1),
        f"{MPS_CONFIG}.defaultActiveThreadPercentage is -1",
    ),
    "percentage above": (
        mps(defaultActiveThreadPercentage=101),
        f"{MPS_CONFIG}.defaultActiveThreadPercentage is 101",
    ),
    "small limit": (
        mps(defaultPinnedDeviceMemoryLimit="1000k"),
        f"{MPS_CONFIG}.defaultPinnedDeviceMemoryLimit: 1000k is less than 1Mi",
    ),
    "limit": (
        mps(defaultPinnedDeviceMemoryLimit="ten"),
        f"{MPS_CONFIG}.defaultPinnedDeviceMemoryLimit: ",
    ),
    "limit of a device": (
        mps(defaultPerDevicePinnedMemoryLimit={"0": "1"}),
        f"{MPS_CONFIG}.defaultPerDevicePinnedMemoryLimit.0: 1 is less than 1Mi",
    ),
    "MPS in a slice": (
        parameters("MigDeviceConfig", sharing={"strategy": "MPS"}),
        f"{SHARING}.strategy: MPS inside a MIG slice is not served",
    ),
    "an interval in a slice": (
        parameters("MigDeviceConfig", sharing={"strategy": "TimeSlicing", "timeSlicingConfig": {}}),
        f"{SHARING}.timeSlicingConfig is unknown",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_errors_name_the_path(name: str) -> None:
    given, message = WRONG[name]
    with pytest.raises(UsageError) as caught:
        read_sharing([given], is_slice=False)
    assert caught.value.message.startswith(message)


def test_mps_is_of_one_gpu() -> None:
    pair = device(is_whole=True), device("GPU-1", is_whole=True)
    with pytest.raises(UsageError, match="sharing: mode mps: a share has one GPU"):
        asked(config(), *pair)
    assert asked(config("TimeSlicing"), *pair).count == 2


def test_a_limit_for_another_device_is_refused() -> None:
    given = mps(defaultPerDevicePinnedMemoryLimit={"1": "5Gi"})
    with pytest.raises(UsageError, match="a memory limit is for device '1'"):
        asked(given)


def test_a_part_of_a_gpu_can_have_mps() -> None:
    given = mps(defaultActiveThreadPercentage=50, defaultPinnedDeviceMemoryLimit="4Gi")
    request = asked(given, is_whole=False)
    assert (request.mode, request.memory.size_bytes) == ("mps", 4 * GI)
    assert request.compute.ceiling == 5000
    assert asked(config(), is_whole=False).memory.size_bytes == 8 * GI
    with pytest.raises(UsageError, match="limit 10Gi is more than the 8Gi that are claimed"):
        asked(mps(defaultPinnedDeviceMemoryLimit="10Gi"), is_whole=False)


def test_a_part_of_a_gpu_takes_turns_without_a_time_slice_of_its_own() -> None:
    assert asked(config("TimeSlicing"), is_whole=False).mode == "soft"
    given = config("TimeSlicing", timeSlicingConfig={"interval": "Long"})
    with pytest.raises(UsageError, match="sharing: a time slice of its own has no effect"):
        asked(given, is_whole=False)


def test_both_formats_for_one_device_are_refused() -> None:
    own = Parameters(
        where="spec.devices.config[1].opaque.parameters",
        content={"apiVersion": "allotment.dev/v1", "kind": "ShareConfig"},
    )
    with pytest.raises(UsageError, match=r"config\[0\].*is beside .*config\[1\]"):
        request_for([device()], [own], asks_compute=False, sharing=shared(config()))
