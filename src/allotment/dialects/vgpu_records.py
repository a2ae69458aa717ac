# SPDX-License-Identifier: Apache-2.0
"""The records in which HAMi and Volcano say what a pod's containers were given.

A device is `UUID,NVIDIA,MiB,PERCENT:`, a container the devices one after the other, and containers
are parted by `;`. HAMi has every container, init containers first, and a `;` at the end too.
Volcano has those alone that ask, and none at the end. (HAMi v2.10 `pkg/device/devices.go`; Volcano
`pkg/scheduler/api/devices/nvidia/vgpu/utils.go`.)
"""

import re
from collections.abc import Iterable, Sequence
from typing import Final

from allotment.dialects.foreign import ForeignPod
from allotment.dialects.foreign_amounts import MIB, PERCENT
from allotment.dialects.protocol import refusal, shown
from allotment.model.clusters import PlacedContainer, PlacedDevice, PodBooking
from allotment.model.compute import WHOLE
from allotment.model.errors import UsageError
from allotment.model.formats import format_count
from allotment.model.pods import PodUid
from allotment.model.quantities import MAX_BYTES
from allotment.model.requests import SOFT

__all__ = ["MIG", "MOST_CHARACTERS", "Given", "booked", "decode", "encode"]

MOST_CHARACTERS: Final = 64 << 10
MIG: Final = "mig"
"""How a device with the place of an instance in its name is enforced."""
_TYPE: Final = "NVIDIA"
_MIG = re.compile(r"(?P<uuid>[^\[\]]+)\[(?P<place>[0-9]+-[0-9]+)\]", re.ASCII)
_UUID = re.compile(r"[A-Za-z0-9./_-]{1,128}", re.ASCII)
_NUMBER = re.compile(r"[0-9]{1,18}", re.ASCII)
_FIELDS: Final = 4
_WHOLE_PERCENT: Final = WHOLE // PERCENT

Given = tuple[tuple[PlacedDevice, ...], str]
"""What a container has, and how it is enforced; no devices: it has none."""


def encode(containers: Iterable[Sequence[PlacedDevice]], *, ends: bool) -> str:
    """Write what containers have, in their order; `ends`: with a `;` after the last too."""
    parts = ["".join(map(_encoded, each)) for each in containers]
    return "".join(f"{each};" for each in parts) if ends else ";".join(parts)


def decode(text: str, *, ends: bool) -> tuple[Given, ...]:
    """Read what containers have. Raises `UsageError`: what is wrong, without whose it is."""
    if len(text) > MOST_CHARACTERS:
        problem = f"it has {len(text)} characters, more than {MOST_CHARACTERS}"
        raise UsageError(problem, hint="delete the pod, so that it is placed anew")
    if not text:
        return ()
    return tuple(map(_container, (text.removesuffix(";") if ends else text).split(";")))


def booked(
    pod: ForeignPod, key: str, given: Sequence[Given], names: Sequence[str]
) -> PodBooking | None:
    """Return the booking of what containers of these names have, in their order; None: nothing.

    Raises `UsageError` if the record has another number of containers.
    """
    if len(given) != len(names):
        problem = f"the annotation {key} has {format_count(len(given), 'container')}, the pod"
        problem += f" {len(names)} of which it can speak"
        raise refusal(pod, None, problem, hint="delete the pod, so that it is placed anew")
    had = dict(zip(names, given, strict=True))
    containers = tuple(
        PlacedContainer(
            name=each.name,
            devices=had[each.name][0],
            kind=each.kind,
            place=place,
            mode=had[each.name][1],
        )
        for place, each in enumerate(pod.containers)
        if each.name in had and had[each.name][0]
    )
    return PodBooking(uid=PodUid(""), node=pod.node, containers=containers) if containers else None


def _encoded(device: PlacedDevice) -> str:
    percent = -(-device.guarantee // PERCENT)
    return f"{device.uuid},{_TYPE},{device.memory // MIB},{percent}:"


def _container(text: str) -> Given:
    if not text:
        return (), SOFT
    if not text.endswith(":"):
        raise _wrong(text, "does not end with ':'")
    devices = [_device(each) for each in text[:-1].split(":")]
    modes = {mode for _, mode in devices}
    if len(modes) > 1:
        raise _wrong(text, "has MIG devices beside parts of GPUs")
    return _merged(device for device, _ in devices), modes.pop()


def _merged(devices: Iterable[PlacedDevice]) -> tuple[PlacedDevice, ...]:
    """Return each device once: a container may have several MIG devices of one GPU."""
    found: dict[str, PlacedDevice] = {}
    for each in devices:
        had = found.get(each.uuid, PlacedDevice(each.uuid, 0))
        guarantee = min(WHOLE, had.guarantee + each.guarantee)
        found[each.uuid] = PlacedDevice(each.uuid, had.memory + each.memory, guarantee)
    return tuple(found.values())


def _device(text: str) -> tuple[PlacedDevice, str]:
    fields = text.split(",")
    if len(fields) != _FIELDS:
        raise _wrong(text, f"has {len(fields)} fields, not {_FIELDS}: UUID,{_TYPE},MiB,percent")
    name, word, memory, percent = fields
    if word != _TYPE:
        raise _wrong(text, f"is not of type {_TYPE}")
    if not _NUMBER.fullmatch(memory) or int(memory) * MIB > MAX_BYTES:
        raise _wrong(text, "has no amount of memory in MiB")
    if not _NUMBER.fullmatch(percent):
        raise _wrong(text, "has no percentage")
    mig = _MIG.fullmatch(name)
    uuid = mig["uuid"] if mig else name
    if not _UUID.fullmatch(uuid):
        raise _wrong(text, "has no UUID")
    guarantee = min(int(percent), _WHOLE_PERCENT) * PERCENT
    return PlacedDevice(uuid, int(memory) * MIB, guarantee), MIG if mig else SOFT


def _wrong(text: str, problem: str) -> UsageError:
    hint = "delete the pod, so that it is placed anew"
    return UsageError(f"{shown(text)} {problem}", hint=hint)
