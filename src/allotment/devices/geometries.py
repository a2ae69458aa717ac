# SPDX-License-Identifier: Apache-2.0
"""What simulated models can be cut into with MIG: the profiles that their drivers report.

A table for `models`, and for nobody else: what a GPU at hand can be cut into its driver says
(`model/mig.py`), a simulated one's too. Numbers, placements and sizes are those of transcripts of
`nvidia-smi mig -lgip` and `-lgipp` where there are any; sizes of the H100s with 94 and 96 GB,
of the large profiles of H200 and B200, and engines of Blackwells are in proportion to them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from allotment.devices.mig_names import profile_name
from allotment.model.mig import MigProfile

__all__ = [
    "A30",
    "A100_40GB",
    "A100_80GB",
    "B200",
    "H100_80GB",
    "H100_94GB",
    "H100_96GB",
    "H200",
    "RTX_PRO_6000",
    "Geometry",
    "Shape",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """One profile of GPU instances, without its name: that follows from the GPU's memory."""

    place: int
    """NVML's number of the shape, `NVML_GPU_INSTANCE_PROFILE_*`."""
    number: int
    """What creating an instance is told (`nvmlGpuInstanceProfileInfo_t.id`)."""
    slices: int
    size: int
    """Memory slots."""
    starts: tuple[int, ...]
    most: int
    memory_mib: int
    multiprocessors: int
    attributes: str = ""
    """`+me`, `-me`, `+gfx`, `+me.all`, or nothing."""
    engines: tuple[int, int, int, int, int] = (1, 0, 0, 0, 0)
    """For copies, decoding, encoding, JPEG and optical flow."""

    @property
    def has_media(self) -> bool:
        """It has the media engines of which a GPU has one set: one instance at a time can."""
        return self.attributes.startswith("+me")

    def name_on(self, memory_mib: int) -> str:
        """Return NVIDIA's name of it on a GPU with so much memory."""
        return profile_name(self.slices, self.memory_mib, memory_mib << 20, self.attributes)

    def profile_on(self, memory_mib: int) -> MigProfile:
        """Return what the driver of a GPU with so much memory reports of it."""
        return MigProfile(
            name=self.name_on(memory_mib),
            number=self.number,
            slices=self.slices,
            memory_bytes=self.memory_mib << 20,
            size=self.size,
            starts=self.starts,
            most=self.most,
            multiprocessors=self.multiprocessors,
            has_media=self.has_media,
        )


@dataclass(frozen=True, slots=True)
class Geometry:
    """All that a model can be cut into."""

    slots: int
    """Memory slots: eight, or four."""
    shapes: tuple[Shape, ...]


_EVERY: Final = tuple(range(7))
_Engines = tuple[int, int, int, int, int]


def _eight_slots(
    memory_mib: Sequence[int], multiprocessors: Sequence[int], engines: Sequence[_Engines]
) -> Geometry:
    """Return what A100, H100, H200 and B200 have: 1g, +me, 1g of twice the memory, 2g, 3g, 4g, 7g.

    Placements and numbers are the same on all of them.
    """
    # place, number, slices, size, starts, most, attributes
    rows: tuple[tuple[int, int, int, int, tuple[int, ...], int, str], ...] = (
        (0x0, 19, 1, 1, _EVERY, 7, ""),
        (0x7, 20, 1, 1, _EVERY, 1, "+me"),
        (0x9, 15, 1, 2, (0, 2, 4, 6), 4, ""),
        (0x1, 14, 2, 2, (0, 2, 4), 3, ""),
        (0x2, 9, 3, 4, (0, 4), 2, ""),
        (0x3, 5, 4, 4, (0,), 1, ""),
        (0x4, 0, 7, 8, (0,), 1, ""),
    )
    return Geometry(
        8,
        tuple(
            Shape(
                place=place,
                number=number,
                slices=slices,
                size=size,
                starts=starts,
                most=most,
                attributes=attributes,
                memory_mib=memory,
                multiprocessors=count,
                engines=own,
            )
            for (place, number, slices, size, starts, most, attributes), memory, count, own in zip(
                rows, memory_mib, multiprocessors, engines, strict=True
            )
        ),
    )


_A100_SMS: Final = (14, 14, 14, 28, 42, 56, 98)
_A100_ENGINES: Final[tuple[_Engines, ...]] = (
    (1, 0, 0, 0, 0),
    (1, 1, 0, 1, 1),
    (1, 1, 0, 0, 0),
    (2, 1, 0, 0, 0),
    (3, 2, 0, 0, 0),
    (4, 2, 0, 0, 0),
    (7, 5, 0, 1, 1),
)
_H100_SMS: Final = (16, 16, 26, 32, 60, 64, 132)
_H100_ENGINES: Final[tuple[_Engines, ...]] = (
    (1, 1, 0, 1, 0),
    (1, 1, 0, 1, 1),
    (1, 1, 0, 1, 0),
    (2, 2, 0, 2, 0),
    (3, 3, 0, 3, 0),
    (4, 4, 0, 4, 0),
    (8, 7, 0, 7, 1),
)

A100_40GB: Final = _eight_slots(
    (4864, 4864, 9856, 9856, 19968, 19968, 40192), _A100_SMS, _A100_ENGINES
)
A100_80GB: Final = _eight_slots(
    (9856, 9856, 19968, 19968, 40192, 40192, 80384), _A100_SMS, _A100_ENGINES
)
H100_80GB: Final = _eight_slots(
    (9984, 9984, 20096, 20096, 40448, 40448, 81152), _H100_SMS, _H100_ENGINES
)
H100_94GB: Final = _eight_slots(
    (11776, 11776, 23808, 23808, 47616, 47616, 95232), _H100_SMS, _H100_ENGINES
)
H100_96GB: Final = _eight_slots(
    (12032, 12032, 24192, 24192, 48640, 48640, 97536), _H100_SMS, _H100_ENGINES
)
H200: Final = _eight_slots(
    (16384, 16384, 33280, 33280, 71424, 71424, 143360), _H100_SMS, _H100_ENGINES
)
B200: Final = _eight_slots(
    (20992, 20992, 45312, 45312, 91648, 91648, 183040),
    (18, 18, 30, 36, 70, 76, 148),
    (
        (2, 1, 0, 1, 0),
        (2, 1, 0, 1, 1),
        (2, 1, 0, 1, 0),
        (4, 2, 0, 2, 0),
        (6, 3, 0, 3, 0),
        (8, 4, 0, 4, 0),
        (14, 7, 0, 7, 1),
    ),
)

_QUARTERS: Final = (0, 1, 2, 3)
_HALVES: Final = (0, 2)

A30: Final = Geometry(
    4,
    (
        Shape(
            place=0x0,
            number=14,
            slices=1,
            size=1,
            starts=_QUARTERS,
            most=4,
            memory_mib=5952,
            multiprocessors=14,
        ),
        Shape(
            place=0x7,
            number=21,
            slices=1,
            size=1,
            starts=_QUARTERS,
            most=1,
            memory_mib=5952,
            multiprocessors=14,
            attributes="+me",
            engines=(1, 1, 0, 1, 1),
        ),
        Shape(
            place=0x1,
            number=5,
            slices=2,
            size=2,
            starts=_HALVES,
            most=2,
            memory_mib=11968,
            multiprocessors=28,
            engines=(2, 2, 0, 0, 0),
        ),
        Shape(
            place=0x8,
            number=6,
            slices=2,
            size=2,
            starts=_HALVES,
            most=1,
            memory_mib=11968,
            multiprocessors=28,
            attributes="+me",
            engines=(2, 2, 0, 1, 1),
        ),
        Shape(
            place=0x3,
            number=0,
            slices=4,
            size=4,
            starts=(0,),
            most=1,
            memory_mib=24000,
            multiprocessors=56,
            engines=(4, 4, 0, 1, 1),
        ),
    ),
)


def _quarters(
    place: int, number: int, slices: int, attributes: str, *, most: int, engines: _Engines
) -> Shape:
    """Return a shape of the RTX PRO 6000: as many slots as slices."""
    starts = {1: _QUARTERS, 2: _HALVES, 4: (0,)}[slices]
    return Shape(
        place=place,
        number=number,
        slices=slices,
        size=slices,
        starts=starts,
        most=most,
        memory_mib={1: 24192, 2: 48640, 4: 97536}[slices],
        multiprocessors={1: 46, 2: 94, 4: 188}[slices],
        attributes=attributes,
        engines=engines,
    )


RTX_PRO_6000: Final = Geometry(
    4,
    (
        _quarters(0x0, 14, 1, "", most=4, engines=(1, 1, 1, 1, 0)),
        _quarters(0x7, 21, 1, "+me", most=1, engines=(1, 1, 1, 1, 1)),
        _quarters(0xA, 47, 1, "+gfx", most=4, engines=(1, 1, 1, 1, 0)),
        _quarters(0xF, 65, 1, "+me.all", most=1, engines=(1, 4, 4, 4, 1)),
        _quarters(0xD, 67, 1, "-me", most=4, engines=(1, 0, 0, 0, 0)),
        _quarters(0x1, 5, 2, "", most=2, engines=(2, 2, 2, 2, 0)),
        _quarters(0xB, 35, 2, "+gfx", most=2, engines=(2, 2, 2, 2, 0)),
        _quarters(0x10, 64, 2, "+me.all", most=1, engines=(2, 4, 4, 4, 1)),
        _quarters(0xE, 66, 2, "-me", most=2, engines=(2, 0, 0, 0, 0)),
        _quarters(0x3, 0, 4, "", most=1, engines=(4, 4, 4, 4, 1)),
        _quarters(0xC, 32, 4, "+gfx", most=1, engines=(4, 4, 4, 4, 1)),
    ),
)
