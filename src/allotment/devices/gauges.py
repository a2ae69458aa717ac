# SPDX-License-Identifier: Apache-2.0
"""What a GPU reports for metrics, beside its `Reading` and its health: clocks, energy, links."""

from __future__ import annotations

from types import ModuleType
from typing import Any, Final

import msgspec

from allotment.devices.nvml import optional

_ALL_LINKS: Final = 0xFFFFFFFF
_KIB: Final = 1 << 10


class Gauges(msgspec.Struct, frozen=True, kw_only=True):
    """A GPU's figures at one moment. None: not reported by this model or driver.

    Counts of traffic are since the driver was loaded, or the GPU was reset.
    """

    sm_clock_mhz: int | None = None
    memory_clock_mhz: int | None = None
    memory_temperature_c: int | None = None
    nvlink_sent_bytes: int | None = None
    """Payload over all links together."""
    nvlink_received_bytes: int | None = None
    pcie_replays: int | None = None


def read_gauges(nvml: ModuleType, handle: Any) -> Gauges:  # noqa: ANN401 - a pointer to a device
    fields = {
        "temperature": nvml.NVML_FI_DEV_MEMORY_TEMP,
        "sent": (nvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX, _ALL_LINKS),
        "received": (nvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX, _ALL_LINKS),
        "replays": nvml.NVML_FI_DEV_PCIE_REPLAY_COUNTER,
    }
    values = field_values(nvml, handle, fields)
    sent, received = values.get("sent"), values.get("received")
    return Gauges(
        sm_clock_mhz=optional(nvml, nvml.nvmlDeviceGetClockInfo, handle, nvml.NVML_CLOCK_SM),
        memory_clock_mhz=optional(nvml, nvml.nvmlDeviceGetClockInfo, handle, nvml.NVML_CLOCK_MEM),
        # NVML answers 0 for a memory without a sensor.
        memory_temperature_c=values.get("temperature") or None,
        nvlink_sent_bytes=None if sent is None else sent * _KIB,
        nvlink_received_bytes=None if received is None else received * _KIB,
        pcie_replays=values.get("replays"),
    )


def field_values(
    nvml: ModuleType,
    handle: Any,  # noqa: ANN401 - a pointer to a device
    fields: dict[str, Any],
) -> dict[str, int]:
    """Ask for several field values in one call; return those that the GPU reports, by name.

    A field is NVML's number, or a pair with its scope.
    """
    values = nvml.nvmlDeviceGetFieldValues(handle, list(fields.values()))
    return {
        name: _number(nvml, value)
        for name, value in zip(fields, values, strict=True)
        if value.nvmlReturn == nvml.NVML_SUCCESS
    }


def _number(nvml: ModuleType, value: Any) -> int:  # noqa: ANN401 - a field value has no type
    """Read a field value by its own type: the driver chooses one, and the rest is stale bytes."""
    names = {
        nvml.NVML_VALUE_TYPE_UNSIGNED_INT: "uiVal",
        nvml.NVML_VALUE_TYPE_UNSIGNED_LONG: "ulVal",
        nvml.NVML_VALUE_TYPE_UNSIGNED_LONG_LONG: "ullVal",
        nvml.NVML_VALUE_TYPE_SIGNED_LONG_LONG: "sllVal",
        nvml.NVML_VALUE_TYPE_SIGNED_INT: "siVal",
        nvml.NVML_VALUE_TYPE_UNSIGNED_SHORT: "usVal",
    }
    return int(getattr(value.value, names.get(value.valueType, "ullVal")))
