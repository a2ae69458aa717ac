# SPDX-License-Identifier: Apache-2.0
"""What a new simulated machine's GPUs are cut into, from `1g.10gb*3+3g.40gb@0`.

Only for machines that begin so: afterwards the simulated driver cuts, whose ids and starts these
are (native/simulated/nvml/cuts.c). Pure: a text goes in, placed instances and their bytes come out.
"""

import hashlib
import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from allotment.devices import layout
from allotment.devices.geometries import Geometry, Shape
from allotment.model.errors import UsageError

__all__ = ["Cut", "pack_cuts", "parse_cuts"]

_ITEM: Final = re.compile(
    r"(?P<profile>[0-9]+g\.[0-9]+gb(?:[+-][a-z.]+)?)(?:\*(?P<count>[1-8]))?(?:@(?P<start>[0-7]))?"
)
# Where the driver looks first, on eight slots (cuts.c, driver_choice).
_DRIVER_STARTS: Final = (6, 4, 5, 0, 1, 2, 3, 7)
_HALF: Final = 4
_WHOLE: Final = 8
_ORDINARY_SLICES: Final = 3


@dataclass(frozen=True, slots=True)
class Cut:
    """A GPU instance with one compute instance of all its slices."""

    shape: Shape
    start: int


def parse_cuts(text: str, geometry: Geometry, memory_mib: int, place: str) -> tuple[Cut, ...]:
    """Parse profiles joined by `+`, each with `*COUNT` or `@START`; `place` names it in errors.

    Those without a start come to starts that leave room for all. Raises `UsageError`.
    """
    names = {shape.name_on(memory_mib): shape for shape in geometry.shapes}
    fixed: list[Cut] = []
    free: list[Shape] = []
    for part in re.split(r"\+(?=[0-9])", text):
        item = _ITEM.fullmatch(part.strip())
        shape = names.get(item["profile"]) if item else None
        if item is None or shape is None:
            raise UsageError(
                f"{place}.mig: {part.strip()!r} is no MIG profile of this GPU",
                hint=f"join some of {', '.join(names)} by +, with *COUNT or @START",
            )
        if item["start"] is None:
            free += [shape] * int(item["count"] or 1)
        elif item["count"] is None and int(item["start"]) in shape.starts:
            fixed.append(Cut(shape, int(item["start"])))
        else:
            starts = ", ".join(map(str, shape.starts))
            raise UsageError(
                f"{place}.mig: {part.strip()!r} cannot begin there",
                hint=f"one {item['profile']} begins at {starts}",
            )
    free.sort(key=lambda shape: -shape.size)
    placed = _place((), [*fixed, *free], geometry)
    if placed is None:
        raise UsageError(f"{place}.mig: {text!r} does not fit on one GPU")
    return placed


def _place(
    made: tuple[Cut, ...], left: Sequence[Cut | Shape], geometry: Geometry
) -> tuple[Cut, ...] | None:
    """Place what is left beside what is made, or say None. Depth first: there are eight slots."""
    if not left:
        return made
    first, *others = left
    shape = first if isinstance(first, Shape) else first.shape
    order = _DRIVER_STARTS if geometry.slots == _WHOLE else range(geometry.slots)
    starts = [start for start in order if start in shape.starts]
    for start in starts if isinstance(first, Shape) else [first.start]:
        cut = Cut(shape, start)
        if all(_go_together(cut, each) for each in made) and _count(made, shape) < shape.most:
            placed = _place((*made, cut), others, geometry)
            if placed is not None:
                return placed
    return None


def _count(made: Sequence[Cut], shape: Shape) -> int:
    return sum(each.shape is shape for each in made)


def _go_together(one: Cut, other: Cut) -> bool:
    if one.shape.has_media and other.shape.has_media:
        return False
    return one.start + one.shape.size <= other.start or other.start + other.shape.size <= one.start


def _instance_id(cut: Cut, slots: int, taken: Sequence[int]) -> int:
    """NVML's id of a GPU instance (cuts.c, id_for)."""
    if slots == _WHOLE and cut.shape.size == _HALF:
        first = 2 if cut.shape.slices == _ORDINARY_SLICES and cut.start == 0 else 1
        return first if first not in taken else 3 - first
    return slots // cut.shape.size - 1 + cut.start // cut.shape.size


def pack_cuts(cuts: Sequence[Cut], slots: int, seed: str) -> bytes:
    """Return `allot_gpu_mig` of native/simulated/machine.h, with MIG on. `seed` makes the UUIDs."""
    data = bytearray(layout.GPU_MIG_SIZE)
    fields = layout.GPU_MIG_FIELDS
    struct.pack_into("<I", data, fields["enabled"][0], 1)
    struct.pack_into("<I", data, fields["pending"][0], 1)
    taken: list[int] = []
    for cut in cuts:
        taken.append(_instance_id(cut, slots, taken))
        instance = {"there": 1, "id": taken[-1], "profile": cut.shape.place}
        at = fields["instances"][0] + cut.start * layout.GPU_INSTANCE_SIZE
        for name, value in instance.items():
            struct.pack_into("<I", data, at + layout.GPU_INSTANCE_FIELDS[name][0], value)
        compute = {
            "there": 1,
            "id": 0,
            "slices": cut.shape.slices,
            "sm_count": cut.shape.multiprocessors,
        }
        at = fields["computes"][0] + cut.start * layout.COMPUTE_INSTANCE_SIZE
        for name, value in compute.items():
            struct.pack_into("<I", data, at + layout.COMPUTE_INSTANCE_FIELDS[name][0], value)
        digest = hashlib.sha256(f"{seed}/mig/{cut.start}".encode()).hexdigest()
        parts = (digest[:8], digest[8:12], digest[12:16], digest[16:20], digest[20:32])
        uuid = f"MIG-{'-'.join(parts)}".encode()
        struct.pack_into("48s", data, at + layout.COMPUTE_INSTANCE_FIELDS["uuid"][0], uuid)
    return bytes(data)
