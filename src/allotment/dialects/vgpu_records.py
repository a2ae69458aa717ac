# SPDX-License-Identifier: Apache-2.0
"""The records in which HAMi and Volcano say what a pod's containers were given.

A device is `UUID,NVIDIA,MiB,PERCENT:`, a container the devices one after the other, and containers
are parted by `;`. A MIG device of Volcano, and of HAMi up to v2.9, is `UUID[GROUP-POSITION]`: its
GPU, and which slice of which group of those that the administrator allows (`model.mig_groups`).
HAMi has every container, init containers first, and a `;` at the end too.
Volcano has those alone that ask, and none at the end. (HAMi v2.10 `pkg/device/devices.go`; Volcano
`pkg/scheduler/api/devices/nvidia/vgpu/utils.go`.)
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

from allotment.dialects.foreign import ForeignPod, GivenSlice
from allotment.dialects.foreign_amounts import MIB, PERCENT, PLACE_ANEW
from allotment.dialects.protocol import refusal, shown
from allotment.model.clusters import PlacedDevice, PodBooking
from allotment.model.errors import UsageError
from allotment.model.formats import format_count
from allotment.model.mig_groups import MigGroupSlot

__all__ = ["MOST_CHARACTERS", "bound", "encode", "recorded"]

MOST_CHARACTERS: Final = 64 << 10
_TYPE: Final = "NVIDIA"
_UUID = re.compile(r"[A-Za-z0-9./_-]{1,128}", re.ASCII)
_FIELDS: Final = 4


def encode(
    containers: Iterable[Sequence[PlacedDevice]],
    *,
    ends: bool,
    named: Callable[[PlacedDevice], str] = lambda device: device.uuid,
) -> str:
    """Write what containers have, in their order; `ends`: with a `;` after the last too.

    `named`: how a device is called.
    """
    parts = ["".join(_encoded(one, named(one)) for one in each) for each in containers]
    return "".join(f"{each};" for each in parts) if ends else ";".join(parts)


def bound(domain: str, booking: PodBooking, *, now: float) -> Mapping[str, str]:
    """Return what both write besides, in their domain: the node, and when. Unix seconds."""
    moment = str(int(now))
    return {
        f"{domain}/vgpu-node": booking.node,
        f"{domain}/vgpu-time": moment,
        f"{domain}/bind-time": moment,
        f"{domain}/bind-phase": "success",
    }


def recorded(
    pod: ForeignPod,
    key: str,
    *orders: Sequence[str],
    ends: bool,
    slice_of: Callable[[MigGroupSlot], GivenSlice],
) -> Mapping[str, Sequence[str | GivenSlice]]:
    """Read an annotation as the GPUs and MIG devices that containers have, by their names.

    `orders` has the containers of which it may speak, the likelier ones first: those count that are
    as many as it has. Raises `UsageError`.
    """
    text = pod.annotations[key]
    if len(text) > MOST_CHARACTERS:
        raise _wrong(pod, key, f"has {len(text)} characters, more than {MOST_CHARACTERS}")
    found = (text.removesuffix(";") if ends else text).split(";") if text else []
    given = [_container(pod, key, each, slice_of) for each in found]
    names = next((each for each in orders if len(each) == len(given)), None)
    if names is None:
        problem = f"has {format_count(len(given), 'container')}, the pod {len(orders[-1])}"
        raise _wrong(pod, key, f"{problem} of which it can speak")
    return {name: devices for name, devices in zip(names, given, strict=True) if devices}


def _encoded(device: PlacedDevice, name: str) -> str:
    percent = -(-device.guarantee // PERCENT)
    return f"{name},{_TYPE},{device.memory // MIB},{percent}:"


def _container(
    pod: ForeignPod, key: str, text: str, slice_of: Callable[[MigGroupSlot], GivenSlice]
) -> list[str | GivenSlice]:
    if not text:
        return []
    if not text.endswith(":"):
        raise _wrong(pod, key, f"has {shown(text)}, which does not end with ':'")
    return [_device(pod, key, each, slice_of) for each in text[:-1].split(":")]


def _device(
    pod: ForeignPod, key: str, text: str, slice_of: Callable[[MigGroupSlot], GivenSlice]
) -> str | GivenSlice:
    """Return the UUID of one device, or the GPU that it is a MIG device of and which."""
    fields = text.split(",")
    if len(fields) != _FIELDS:
        problem = f"has {shown(text)} with {len(fields)} fields, not {_FIELDS}"
        raise _wrong(pod, key, f"{problem}: UUID,{_TYPE},MiB,percent")
    name, word, _, _ = fields
    if word != _TYPE:
        raise _wrong(pod, key, f"has {shown(text)}, which is not of type {_TYPE}")
    found: str | GivenSlice = name
    if name.endswith("]"):
        try:
            found = slice_of(MigGroupSlot.parse(name))
        except UsageError as error:
            raise _wrong(pod, key, f"has {shown(text)}: {error.message}") from error
    if not _UUID.fullmatch(found if isinstance(found, str) else found.uuid):
        raise _wrong(pod, key, f"has {shown(text)}, which has no UUID")
    return found


def _wrong(pod: ForeignPod, key: str, problem: str) -> UsageError:
    return refusal(pod, None, f"the annotation {key} {problem}", hint=PLACE_ANEW)
