# SPDX-License-Identifier: Apache-2.0
"""MIG profiles of simulated models: the profiles that their drivers report.

Only for `models`: an existing GPU's profiles come from its driver. Figures are from transcripts of
`nvidia-smi mig -lgip` and `-lgipp`, if there are any. Extrapolated: sizes of the H100s with 94 and
96 GB and of the large profiles of H200 and B200, and engines of Blackwells.
"""

from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from allotment.model.mig import MigProfile


class Shape(msgspec.Struct, frozen=True):
    """One profile of GPU instances, without its name, which depends on the GPU's memory."""

    place: int
    """NVML's number of the shape, `NVML_GPU_INSTANCE_PROFILE_*`."""
    number: int
    """The id for creating an instance (`nvmlGpuInstanceProfileInfo_t.id`)."""
    slices: int
    size: int
    """Memory slots."""
    starts: tuple[int, ...]
    most: int
    attributes: str
    """`+me`, `-me`, `+gfx`, `+me.all`, or nothing."""
    memory_mib: int
    multiprocessors: int
    engines: tuple[int, int, int, int, int]
    """Engines for copies, decoding, encoding, JPEG and optical flow."""

    @property
    def has_media(self) -> bool:
        """True if it has the media engines, which only one instance of a GPU can have."""
        return self.attributes.startswith("+me")

    def name_on(self, memory_mib: int) -> str:
        """NVIDIA's name of it on a GPU with this much memory."""
        return profile_name(self.slices, self.memory_mib, memory_mib << 20, self.attributes)

    def profile_on(self, memory_mib: int) -> MigProfile:
        """The driver's report of it on a GPU with this much memory."""
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


class Geometry(msgspec.Struct, frozen=True):
    """All profiles of a model."""

    slots: int
    """Memory slots: eight, or four."""
    shapes: tuple[Shape, ...]


_EVERY: Final = tuple(range(7))
_Engines = tuple[int, int, int, int, int]


def _eight_slots(
    memory_mib: Sequence[int], multiprocessors: Sequence[int], engines: Sequence[_Engines]
) -> Geometry:
    """Profiles of A100, H100, H200 and B200: 1g, +me, 1g of double memory, 2g, 3g, 4g, 7g.

    They share placements and numbers.
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
    figures = zip(rows, memory_mib, multiprocessors, engines, strict=True)
    return Geometry(
        8, tuple(Shape(*row, memory, count, own) for row, memory, count, own in figures)
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

# place, number, slices, most, attributes, engines
_QuarterRow = tuple[int, int, int, int, str, _Engines]
_QUARTER_STARTS: Final = {1: (0, 1, 2, 3), 2: (0, 2), 4: (0,)}


def _four_slots(
    memory_mib: Mapping[int, int], multiprocessors: Mapping[int, int], rows: Sequence[_QuarterRow]
) -> Geometry:
    """Profiles of 1, 2 and 4 slices; memory and multiprocessors are by number of slices."""
    return Geometry(
        4,
        tuple(
            Shape(
                place,
                number,
                slices,
                slices,
                _QUARTER_STARTS[slices],
                most,
                attributes,
                memory_mib[slices],
                multiprocessors[slices],
                engines,
            )
            for place, number, slices, most, attributes, engines in rows
        ),
    )


A30: Final = _four_slots(
    {1: 5952, 2: 11968, 4: 24000},
    {1: 14, 2: 28, 4: 56},
    (
        (0x0, 14, 1, 4, "", (1, 0, 0, 0, 0)),
        (0x7, 21, 1, 1, "+me", (1, 1, 0, 1, 1)),
        (0x1, 5, 2, 2, "", (2, 2, 0, 0, 0)),
        (0x8, 6, 2, 1, "+me", (2, 2, 0, 1, 1)),
        (0x3, 0, 4, 1, "", (4, 4, 0, 1, 1)),
    ),
)
RTX_PRO_6000: Final = _four_slots(
    {1: 24192, 2: 48640, 4: 97536},
    {1: 46, 2: 94, 4: 188},
    (
        (0x0, 14, 1, 4, "", (1, 1, 1, 1, 0)),
        (0x7, 21, 1, 1, "+me", (1, 1, 1, 1, 1)),
        (0xA, 47, 1, 4, "+gfx", (1, 1, 1, 1, 0)),
        (0xF, 65, 1, 1, "+me.all", (1, 4, 4, 4, 1)),
        (0xD, 67, 1, 4, "-me", (1, 0, 0, 0, 0)),
        (0x1, 5, 2, 2, "", (2, 2, 2, 2, 0)),
        (0xB, 35, 2, 2, "+gfx", (2, 2, 2, 2, 0)),
        (0x10, 64, 2, 1, "+me.all", (2, 4, 4, 4, 1)),
        (0xE, 66, 2, 2, "-me", (2, 0, 0, 0, 0)),
        (0x3, 0, 4, 1, "", (4, 4, 4, 4, 1)),
        (0xC, 32, 4, 1, "+gfx", (4, 4, 4, 4, 1)),
    ),
)


_MIB: Final = 1 << 20
_GIB: Final = 1 << 30
_EIGHTHS: Final = 8


def profile_name(slices: int, memory_mib: int, total_bytes: int, attributes: str = "") -> str:
    """NVIDIA's profile name: memory in eighths of the GPU's whole gigabytes.

    Source: go-nvlib `pkg/nvlib/device/mig_profile.go`, v0.7.
    """
    eighths = -(-memory_mib * _MIB * _EIGHTHS // total_bytes)
    whole_gb = -(-total_bytes // _GIB)
    # Halves round up: an eighth of a B200's 180 is 22.5, and its profile 1g.23gb.
    size_gb = (2 * eighths * whole_gb + _EIGHTHS) // (2 * _EIGHTHS)
    return f"{slices}g.{size_gb}gb{attributes}"
