# SPDX-License-Identifier: Apache-2.0
"""`allotment.dev/placement`: written by the scheduler, read by nodes and the scheduler.

    {"version": 1, "node": "n1", "pod": "UID",
     "containers": {"train": {"devices": ["GPU-..."], "memory": BYTES, "guarantee": 3000},
                    "infer": {"devices": ["GPU-..."], "memory": BYTES, "guarantee": 1428,
                              "mode": "mig", "slices": [["1g.10gb", 4]]}}}

After a resize it also has `"resize": {"wish": "memory:6Gi", "generation": 1}`. A restarted
scheduler restores bookings from it. Defaults are omitted; `memories` and `guarantees`
appear if devices differ. It counts only with the pod's own uid and node: the API server generates
the uid, so it cannot be forged earlier. The admission policy restricts later edits.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from allotment.dialects.own.protocol import PlacementWish, refusal, shown
from allotment.model.clusters import AcceptedResize, PlacedContainer, PlacedDevice, PodBooking
from allotment.model.compute import WHOLE
from allotment.model.errors import UsageError
from allotment.model.formats import meant
from allotment.model.mig import MigPlace
from allotment.model.modes import SOFT, traits_of
from allotment.model.pods import ContainerKind, Pod, PodUid
from allotment.model.quantities import MAX_BYTES
from allotment.model.structs import replace

PLACEMENT = "allotment.dev/placement"
PLACEMENT_VERSION = 1
RESIZE = "allotment.dev/resize"
KEPT_CHARACTERS = 64 << 10
"""Limit for all our annotations of a pod; longer ones are cut."""
LEFT_OUT = (
    f"(left out: a pod's allotment.dev/... annotations may have {KEPT_CHARACTERS} characters)"
)
"""In place of a cut value. Readers refuse it."""

_REMOVE = (
    f"create the pod again without the annotation {PLACEMENT}: a scheduler writes it, or the node"
    " chooses"
)

PlacedSlice = tuple[
    Annotated[str, Meta(min_length=1, max_length=64)],
    Annotated[int, Meta(ge=0, lt=64)],
]
"""A profile's name, and its start slot."""


MOST_CHARACTERS: Final = 64 << 10
"""Length limit of the annotation: many times the need of the largest pod on the largest node."""

_Text = Annotated[str, Meta(max_length=256)]
_Uuid = Annotated[str, Meta(min_length=1, max_length=128)]
_Bytes = Annotated[int, Meta(ge=0, le=MAX_BYTES)]
_Points = Annotated[int, Meta(ge=0, le=WHOLE)]


class _Container(msgspec.Struct, frozen=True, omit_defaults=True):
    devices: Annotated[tuple[_Uuid, ...], Meta(min_length=1, max_length=256)]
    memory: _Bytes | None = None
    """Bytes of each device; None: see `memories`."""
    memories: Annotated[tuple[_Bytes, ...], Meta(max_length=256)] = ()
    guarantee: _Points = 0
    guarantees: Annotated[tuple[_Points, ...], Meta(max_length=256)] = ()
    """Guarantee of each device, in place of `guarantee`."""
    floor: _Points = 0
    """Part of each device's time that is not guaranteed to others. Only the scheduler reads it."""
    part: _Points | None = None
    """As in `PlacedContainer`. Only the scheduler reads it."""
    kind: str = ContainerKind.REGULAR.value
    place: Annotated[int, Meta(ge=0, le=1 << 16)] = 0
    mode: Annotated[str, Meta(max_length=64)] | None = None
    """None: soft."""
    slices: Annotated[tuple[PlacedSlice, ...], Meta(max_length=256)] = ()
    affinity: _Text = ""
    anti_affinity: _Text = ""
    exclusion: _Text | None = None
    oversubscribe: bool = False


class _Resize(msgspec.Struct, frozen=True):
    """The fields of `AcceptedResize`."""

    wish: Annotated[str, Meta(max_length=MOST_CHARACTERS)]
    generation: Annotated[int, Meta(ge=1, lt=1 << 53)]


class _Placement(msgspec.Struct, frozen=True, kw_only=True):
    version: int
    node: str | None = None
    """The scheduler writes node and pod; the node's agent does without them."""
    pod: str | None = None
    containers: dict[str, _Container]
    resize: _Resize | msgspec.UnsetType = msgspec.UNSET


_encoder: Final = msgspec.json.Encoder(order="deterministic")
_decoder: Final = msgspec.json.Decoder(_Placement)


def _decode(text: str) -> _Placement:
    """Raises `ValueError`."""
    if len(text) > MOST_CHARACTERS:
        raise ValueError(f"it has {len(text)} characters, more than {MOST_CHARACTERS}")
    try:
        return _decoder.decode(text)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise ValueError(str(error)) from error


def placements_of(pod: Pod, takers: Mapping[str, bool]) -> dict[str, PlacementWish]:
    """Read the annotation, which the pod has, by container. Raises `UsageError`.

    `takers`: the containers with GPUs, and whether a scheduler can choose their devices.
    """
    try:
        placement = _decode(pod.annotations[PLACEMENT])
    except ValueError as error:
        raise refusal(
            pod, None, f"{PLACEMENT} is not a placement: {error}", hint=_REMOVE
        ) from error
    if placement.version != PLACEMENT_VERSION:
        problem = f"{PLACEMENT} has version {placement.version}, this node reads"
        problem += f" {PLACEMENT_VERSION}"
        raise refusal(pod, None, problem, hint="upgrade the node's agent, or " + _REMOVE)
    if placement.pod not in {None, pod.uid}:
        problem = f"{PLACEMENT} was decided for another pod (uid {shown(str(placement.pod))})"
        raise refusal(pod, None, problem, hint=_REMOVE)
    if placement.node not in {None, pod.node}:
        problem = f"{PLACEMENT} was decided for node {shown(str(placement.node))}, the pod is on"
        raise refusal(pod, None, f"{problem} {pod.node!r}", hint=_REMOVE)
    for name in placement.containers:
        if name not in takers:
            there = pod.container(name)
            problem = f"{PLACEMENT} names container {shown(name)}, which "
            problem += "asks for no GPU" if there else f"is not in the pod{meant(name, takers)}"
            raise refusal(pod, None, problem, hint=_REMOVE)
        if not takers[name]:
            problem = f"{PLACEMENT} names this container, but the kubelet chooses its devices"
            raise refusal(pod, name, problem, hint=_REMOVE)
    is_resized = _accepted(placement, pod.uid, pod.node).generation > 0
    return {
        name: replace(_wish(pod, name, placed), is_resized=is_resized)
        for name, placed in placement.containers.items()
    }


def accepted_resize(pod: Pod) -> AcceptedResize:
    """Return the resize that counts for a pod on its node.

    With a placement it is the one that the scheduler accepted, otherwise the pod's own text. A
    placement in a template cannot name the pod: no resize in it counts.
    """
    text = pod.annotations.get(PLACEMENT)
    if text is None:
        return AcceptedResize(pod.annotations.get(RESIZE, ""))
    try:
        return _accepted(_decode(text), pod.uid, pod.node)
    except ValueError:
        return AcceptedResize()  # reading the placement reports it


def _accepted(placement: _Placement, uid: str, node: str) -> AcceptedResize:
    resize = placement.resize
    is_of_pod = (placement.pod, placement.node) == (uid, node)
    if not isinstance(resize, _Resize) or not is_of_pod:
        return AcceptedResize()
    return AcceptedResize(resize.wish, resize.generation)


def problem_of_devices(
    devices: Sequence[str], slices: Sequence[MigPlace], *, mode: str | None
) -> str:
    """What is wrong with the slices of a container's devices; empty: nothing.

    Only in mode `mig` may a device repeat, each time with another slice.
    """
    if not (mode and traits_of(mode).is_slice):
        return f"slices in mode {mode or '(none)'}" if slices else ""
    if len(slices) != len(devices):
        return f"{len(slices)} slices of {len(devices)} devices"
    if len(set(zip(devices, slices, strict=True))) < len(devices):
        return "a slice twice"
    return ""


def _wish(pod: Pod, name: str, placed: _Container) -> PlacementWish:
    slices = tuple(MigPlace(*each) for each in placed.slices)
    problem = problem_of_devices(placed.devices, slices, mode=placed.mode)
    if placed.memory == 0:
        problem = "no memory of a device"
    if problem:
        raise refusal(pod, name, f"{PLACEMENT} has {problem}", hint=_REMOVE)
    return PlacementWish(placed.devices, placed.memory, placed.mode, slices)


def write_booking(booking: PodBooking) -> str:
    """Write the annotation. The same booking always gives the same text."""
    return _encoder.encode(
        _Placement(
            version=PLACEMENT_VERSION,
            node=booking.node,
            pod=booking.uid,
            containers={each.name: _written(each) for each in booking.containers},
            resize=_Resize(booking.resize.wish, booking.resize.generation)
            if booking.resize.generation
            else msgspec.UNSET,
        )
    ).decode()


def read_booking(
    text: str, *, uid: PodUid, node: str, cpu_milli: int = 0, memory_bytes: int = 0
) -> PodBooking:
    """Read the booking of the pod with this uid on this node.

    Raises `UsageError` for an invalid placement, and for another pod's or node's.
    """
    try:
        placement = _decode(text)
        containers = tuple(_read(name, each) for name, each in placement.containers.items())
    except ValueError as error:
        raise _refused(str(error)) from error
    if placement.version != PLACEMENT_VERSION:
        raise _refused(f"it has version {placement.version}, not {PLACEMENT_VERSION}")
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
        resize=_accepted(placement, uid, node),
    )


def placement_of(annotations: Mapping[str, str] | None) -> str:
    return annotations.get(PLACEMENT, "") if annotations else ""


def _by_place(container: PlacedContainer) -> tuple[int, str]:
    return (container.place, container.name)


def _written(container: PlacedContainer) -> _Container:
    memories = tuple(each.memory for each in container.devices)
    # A container that has whole GPUs asks for less at times: nodes hold `memory` to its request.
    is_same = len(set(memories)) == 1 and not traits_of(container.mode).is_exclusive
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
        mode=None if container.mode == SOFT else container.mode,
        slices=tuple((each.profile, each.start) for each in slices),
        affinity=container.affinity,
        anti_affinity=container.anti_affinity,
        exclusion=container.exclusion,
        oversubscribe=container.may_oversubscribe,
        floor=container.floor,
        part=container.part,
    )


def _read(name: str, written: _Container) -> PlacedContainer:
    memories = written.memories
    if written.memory is not None:
        memories = (written.memory,) * len(written.devices)
    if len(memories) != len(written.devices):
        raise ValueError(f"container {name[:64]!r} has {len(memories)} amounts of memory")
    mode = SOFT if written.mode is None else written.mode
    if not traits_of(mode).is_slice and len(set(written.devices)) != len(written.devices):
        raise ValueError(f"container {name[:64]!r} has a device twice")
    guarantees = written.guarantees or (written.guarantee,) * len(written.devices)
    if len(guarantees) != len(written.devices):
        raise ValueError(f"container {name[:64]!r} has {len(guarantees)} guarantees")
    slices = tuple(MigPlace(*each) for each in written.slices)
    if problem := problem_of_devices(written.devices, slices, mode=mode):
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
        mode=mode,
        affinity=written.affinity,
        anti_affinity=written.anti_affinity,
        exclusion=written.exclusion,
        may_oversubscribe=written.oversubscribe,
        floor=written.floor,
        part=written.part,
    )


def _refused(problem: str) -> UsageError:
    return UsageError(
        f"the annotation {PLACEMENT} is not accepted as a placement: {problem}",
        hint="remove it: only the scheduler writes it, at binding",
    )
