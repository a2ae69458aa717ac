# SPDX-License-Identifier: Apache-2.0
"""`allotment.dev/placement`: what a scheduler decided for a pod, as it is written on the pod.

    {"version": 1, "node": "...", "pod": "UID",
     "containers": {"NAME": {"devices": ["GPU-..."], "memory": BYTES_PER_DEVICE},
                    "SLICED": {"devices": ["GPU-...", "GPU-..."], "memory": BYTES_PER_SLICE,
                               "mode": "mig", "slices": [["1g.10gb", 4], ["1g.10gb", 5]]}}}

`node`, `pod`, `memory` and `mode` may be missing. `pod` keeps a placement from being taken for that
of a copy of the pod: people copy pods with all that is written on them. Fields that are not known
are passed over: a newer scheduler may write more, and `version` goes up when their meaning changes.

In mode `mig` each device has a slice, by its profile and the slot where it begins. Who has several
slices of a GPU has that one several times; in any other mode a device can be there once.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated

import msgspec

from allotment.dialects.protocol import meant, refusal, shown
from allotment.dialects.wishes import PlacementWish
from allotment.model.mig import MigPlace
from allotment.model.pods import Pod
from allotment.model.quantities import MAX_BYTES
from allotment.model.requests import MIG

__all__ = [
    "LEFT_OUT",
    "MOST_CHARACTERS",
    "PLACEMENT",
    "PLACEMENT_VERSION",
    "PlacedSlice",
    "placements_of",
    "problem_of_devices",
]

PLACEMENT = "allotment.dev/placement"
PLACEMENT_VERSION = 1
MOST_CHARACTERS = 64 << 10
"""Of all annotations of ours on a pod; what is beyond is not kept."""
LEFT_OUT = (
    f"(left out: a pod's allotment.dev/... annotations may have {MOST_CHARACTERS} characters)"
)
"""In place of such a value. Whoever reads annotations refuses it."""

_REMOVE = (
    f"remove the annotation {PLACEMENT}, so that the node chooses, or let a scheduler write it"
)

PlacedSlice = tuple[
    Annotated[str, msgspec.Meta(min_length=1, max_length=64)],
    Annotated[int, msgspec.Meta(ge=0, lt=64)],
]
"""A profile's name, and the slot where it begins."""


class _Placed(msgspec.Struct, frozen=True):
    devices: Annotated[list[Annotated[str, msgspec.Meta(min_length=1)]], msgspec.Meta(min_length=1)]
    # msgspec takes bounds within int64 alone, and refuses what is beyond by itself then.
    memory: Annotated[int, msgspec.Meta(ge=1, le=MAX_BYTES)] | None = None
    mode: str | None = None
    slices: list[PlacedSlice] = []


class _Placement(msgspec.Struct, frozen=True):
    version: int
    containers: dict[str, _Placed]
    node: str | None = None
    pod: str | None = None


def placements_of(pod: Pod, takers: Mapping[str, bool]) -> dict[str, PlacementWish]:
    """Read the annotation, by container; empty where there is none. Raises `UsageError`.

    `takers` has the pod's containers that ask for GPUs: whether their devices can be chosen.
    """
    text = pod.annotations.get(PLACEMENT)
    if text is None:
        return {}
    placement = _parse(pod, text)
    if placement.version != PLACEMENT_VERSION:
        problem = f"{PLACEMENT} is of version {placement.version}, this node reads"
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
            problem += "asks for no GPU" if there else f"the pod has not{meant(name, takers)}"
            raise refusal(pod, None, problem, hint=_REMOVE)
        if not takers[name]:
            problem = f"{PLACEMENT} names this container, but the kubelet chooses its devices"
            raise refusal(pod, name, problem, hint=_REMOVE)
    return {name: _wish(pod, name, placed) for name, placed in placement.containers.items()}


def problem_of_devices(
    devices: Sequence[str], slices: Sequence[MigPlace], *, mode: str | None
) -> str:
    """Say what is wrong with the slices of these devices, as what a container has; empty: nothing.

    Devices that are named twice are looked at in mode `mig` alone, where each is of another slice.
    """
    if mode != MIG:
        return f"slices in mode {mode or 'that it does not say'}" if slices else ""
    if len(slices) != len(devices):
        return f"{len(slices)} slices of {len(devices)} devices"
    if len(set(zip(devices, slices, strict=True))) < len(devices):
        return "a slice twice"
    return ""


def _wish(pod: Pod, name: str, placed: _Placed) -> PlacementWish:
    slices = tuple(MigPlace(*each) for each in placed.slices)
    if problem := problem_of_devices(placed.devices, slices, mode=placed.mode):
        raise refusal(pod, name, f"{PLACEMENT} has {problem}", hint=_REMOVE)
    return PlacementWish(tuple(placed.devices), placed.memory, placed.mode, slices)


def _parse(pod: Pod, text: str) -> _Placement:
    try:
        return msgspec.json.decode(text, type=_Placement)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        problem = f"{PLACEMENT} is no placement: {error}"
        raise refusal(pod, None, problem, hint=_REMOVE) from error
