# SPDX-License-Identifier: Apache-2.0
"""`allotment.dev/placement` as the scheduler writes it, and reads it again to know what it booked.

    {"version": 1, "node": "n1", "pod": "UID",
     "containers": {"train": {"devices": ["GPU-..."], "memory": BYTES, "guarantee": 3000},
                    "infer": {"devices": ["GPU-..."], "memory": BYTES, "guarantee": 1428,
                              "mode": "mig", "slices": [["1g.10gb", 4]]}}}

What `placements` reads of it on the node is the same; the rest is what a booking is made of, so
that a scheduler that starts anew books what was decided, and not what the pod's other annotations,
which its owner may edit, have come to say since. What is as usual is left out; `memories` and
`guarantees` are written where devices have different ones, as slices of two profiles do.

A placement counts only with the pod's own uid and the node that the pod is on. A uid is made up by
the API server when a pod is created, so that nobody can have written it before; who may write the
annotation afterwards is the admission policy's business.
"""

from collections.abc import Mapping
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from allotment.dialects.placements import (
    PLACEMENT,
    PLACEMENT_VERSION,
    PlacedSlice,
    problem_of_devices,
)
from allotment.model.clusters import PlacedContainer, PlacedDevice, PodBooking
from allotment.model.compute import WHOLE
from allotment.model.errors import UsageError
from allotment.model.mig import MigPlace
from allotment.model.pods import ContainerKind, PodUid
from allotment.model.quantities import MAX_BYTES
from allotment.model.requests import MIG, SOFT

__all__ = ["MOST_CHARACTERS", "placement_of", "read_booking", "write_booking"]

MOST_CHARACTERS: Final = 64 << 10
"""Of the annotation: many times what the largest pod of the largest node needs."""

_Text = Annotated[str, Meta(max_length=256)]
_Uuid = Annotated[str, Meta(min_length=1, max_length=128)]
_Bytes = Annotated[int, Meta(ge=0, le=MAX_BYTES)]
_Points = Annotated[int, Meta(ge=0, le=WHOLE)]


class _Container(msgspec.Struct, frozen=True, omit_defaults=True):
    devices: Annotated[tuple[_Uuid, ...], Meta(min_length=1, max_length=256)]
    memory: _Bytes | None = None
    """Of each device; None: of each its own, in `memories`."""
    memories: Annotated[tuple[_Bytes, ...], Meta(max_length=256)] = ()
    guarantee: _Points = 0
    guarantees: Annotated[tuple[_Points, ...], Meta(max_length=256)] = ()
    """Of each device its own, in place of `guarantee`."""
    kind: str = ContainerKind.REGULAR.value
    place: Annotated[int, Meta(ge=0, le=1 << 16)] = 0
    mode: Annotated[str, Meta(max_length=64)] = SOFT
    slices: Annotated[tuple[PlacedSlice, ...], Meta(max_length=256)] = ()
    affinity: _Text = ""
    anti_affinity: _Text = ""
    exclusion: _Text | None = None
    oversubscribe: bool = False


class _Placement(msgspec.Struct, frozen=True):
    version: int
    node: str
    pod: str
    containers: dict[str, _Container]


_encoder: Final = msgspec.json.Encoder(order="deterministic")
_decoder: Final = msgspec.json.Decoder(_Placement)


def write_booking(booking: PodBooking) -> str:
    """Write the annotation. The same booking always gives the same text."""
    return _encoder.encode(
        _Placement(
            version=PLACEMENT_VERSION,
            node=booking.node,
            pod=booking.uid,
            containers={each.name: _written(each) for each in booking.containers},
        )
    ).decode()


def read_booking(
    text: str, *, uid: PodUid, node: str, cpu_milli: int = 0, memory_bytes: int = 0
) -> PodBooking:
    """Read what was decided for the pod with this uid on this node.

    Raises `UsageError` for what is no placement, and for that of another pod or node.
    """
    if len(text) > MOST_CHARACTERS:
        raise _refused(f"it has {len(text)} characters, more than {MOST_CHARACTERS}")
    try:
        placement = _decoder.decode(text)
        containers = tuple(_read(name, each) for name, each in placement.containers.items())
    except (msgspec.MsgspecError, UnicodeError, RecursionError, ValueError) as error:
        raise _refused(str(error)) from error
    if placement.version != PLACEMENT_VERSION:
        raise _refused(f"it is of version {placement.version}, not {PLACEMENT_VERSION}")
    if placement.pod != uid:
        raise _refused("it was decided for another pod")
    if placement.node != node:
        raise _refused("it was decided for another node")
    return PodBooking(
        uid=uid,
        node=node,
        cpu_milli=cpu_milli,
        memory_bytes=memory_bytes,
        containers=tuple(sorted(containers, key=_by_place)),
    )


def placement_of(annotations: Mapping[str, str] | None) -> str:
    """Return the annotation's text; empty: there is none."""
    return annotations.get(PLACEMENT, "") if annotations else ""


def _by_place(container: PlacedContainer) -> tuple[int, str]:
    return (container.place, container.name)


def _written(container: PlacedContainer) -> _Container:
    memories = tuple(each.memory for each in container.devices)
    is_same = len(set(memories)) == 1
    guarantees = tuple(each.guarantee for each in container.devices)
    is_alike = len(set(guarantees)) == 1
    slices = tuple(each.slice for each in container.devices if each.slice is not None)
    return _Container(
        devices=tuple(each.uuid for each in container.devices),
        memory=memories[0] if is_same else None,
        memories=() if is_same else memories,
        guarantee=guarantees[0] if is_alike else 0,
        guarantees=() if is_alike else guarantees,
        kind=container.kind.value,
        place=container.place,
        mode=container.mode,
        slices=tuple((each.profile, each.start) for each in slices),
        affinity=container.affinity,
        anti_affinity=container.anti_affinity,
        exclusion=container.exclusion,
        oversubscribe=container.may_oversubscribe,
    )


def _read(name: str, written: _Container) -> PlacedContainer:
    """Raises `ValueError`."""
    memories = written.memories
    if written.memory is not None:
        memories = (written.memory,) * len(written.devices)
    if len(memories) != len(written.devices):
        raise ValueError(f"container {name[:64]!r} has {len(memories)} amounts of memory")
    if written.mode != MIG and len(set(written.devices)) != len(written.devices):
        raise ValueError(f"container {name[:64]!r} has a device twice")
    guarantees = written.guarantees or (written.guarantee,) * len(written.devices)
    if len(guarantees) != len(written.devices):
        raise ValueError(f"container {name[:64]!r} has {len(guarantees)} guarantees")
    slices = tuple(MigPlace(*each) for each in written.slices)
    if problem := problem_of_devices(written.devices, slices, mode=written.mode):
        raise ValueError(f"container {name[:64]!r} has {problem}")
    places: tuple[MigPlace | None, ...] = slices or (None,) * len(written.devices)
    return PlacedContainer(
        name=name,
        devices=tuple(
            PlacedDevice(*each)
            for each in zip(written.devices, memories, guarantees, places, strict=True)
        ),
        kind=ContainerKind(written.kind),
        place=written.place,
        mode=written.mode,
        affinity=written.affinity,
        anti_affinity=written.anti_affinity,
        exclusion=written.exclusion,
        may_oversubscribe=written.oversubscribe,
    )


def _refused(problem: str) -> UsageError:
    return UsageError(
        f"the annotation {PLACEMENT} is not taken for a placement: {problem}",
        hint="it is written at binding, by the scheduler alone: remove it",
    )
