# SPDX-License-Identifier: Apache-2.0
"""The modes: how a share is enforced. Their names, and what is true of all shares of a mode.

Other rooms ask for a trait and do not compare names. `allotment.modes` has what a mode does.
"""

from collections.abc import Collection, Iterable, Mapping
from typing import Final, Literal, get_args

import msgspec

SOFT: Final = "soft"
MPS: Final = "mps"
MIG: Final = "mig"
EXCLUSIVE: Final = "exclusive"
TIMESLICE: Final = "timeslice"

PartMode = Literal["soft", "mps", "mig"]
"""A share of this mode has a part of a GPU."""
PodMode = Literal[PartMode, "exclusive"]
"""A GPU may be in this mode by turns, as `allotment.dev/gpu` is asked for."""
ModeName = Literal[PodMode, "timeslice"]

DEFAULT_MODE: Final = SOFT
PART_MODES: Final[tuple[PartMode, ...]] = get_args(PartMode)
POD_MODES: Final[tuple[PodMode, ...]] = get_args(PodMode)
MODES: Final[tuple[ModeName, ...]] = get_args(ModeName)
"""All, in the order in which they are shown and stored."""
STRONGEST_FIRST: Final = (MIG, SOFT, MPS)
"""Apart by hardware; by turns; side by side, where one's fault ends the others."""


class Traits(msgspec.Struct, frozen=True, kw_only=True):
    """Facts about all shares of a mode, for code that does not depend on the mode itself."""

    has_shim: bool = False
    """Its programs load the shim."""
    takes_turns: bool = False
    """Its programs take turns on a device, by the device's contract."""
    is_slice: bool = False
    """Its devices are MIG devices cut for it, which takes the driver's time."""
    needs_daemon: bool = False
    """Its programs are clients of the GPU's MPS control daemon."""
    is_exclusive: bool = False
    """A share has its devices alone; any other process on them is an intruder."""
    is_time_sliced: bool = False
    """The driver gives its programs their turns, and a share is promised no part of a device."""
    ignores: frozenset[str] = frozenset()
    """Settings of compute without effect: `weight`, `ceiling`, `class`, or a class by its name."""
    least_ceiling: int = 0
    """Basis points; it cannot enforce a lower ceiling."""
    least_bytes: int = 0
    """With less memory, CUDA's own contexts may leave none for its programs."""
    fixed_because: str = ""
    """Why its limits cannot change; empty: they can."""
    pinned_because: str = ""
    """Why its programs cannot be taken off a GPU and brought back; empty: they can."""

    @property
    def enforces_compute(self) -> bool:
        """Whether a share has its part of a device's compute: by turns, hardware or MPS."""
        return self.takes_turns or self.is_slice or self.needs_daemon


_NO_SHIM: Final = "Allotment is not in it"
TRAITS: Final[Mapping[str, Traits]] = {
    # A CUDA context alone takes 300 to 500 MiB.
    SOFT: Traits(has_shim=True, takes_turns=True, least_bytes=512 << 20),
    MPS: Traits(
        has_shim=True,
        needs_daemon=True,
        ignores=frozenset({"weight", "latency"}),
        least_ceiling=100,  # The driver treats less than 1 % as no limit.
        pinned_because="its programs are clients of MPS, and the driver is not known to checkpoint"
        " those without harm",
    ),
    MIG: Traits(
        has_shim=True,
        is_slice=True,
        ignores=frozenset({"weight", "class", "latency", "ceiling"}),
        fixed_because="its slice is the hardware's",
    ),
    EXCLUSIVE: Traits(is_exclusive=True, fixed_because=_NO_SHIM),
    TIMESLICE: Traits(is_time_sliced=True, fixed_because=_NO_SHIM),
}
_SLICED: Final = frozenset(mode for mode, traits in TRAITS.items() if traits.is_slice)


def traits_of(mode: str) -> Traits:
    """Return the traits of a mode; an unknown one counts as the default mode."""
    return TRAITS.get(mode) or TRAITS[DEFAULT_MODE]


def has_slices(modes: Iterable[str]) -> bool:
    """True if the shares of one of these modes are slices."""
    return not _SLICED.isdisjoint(modes)


def has_only_slices(modes: Collection[str]) -> bool:
    """True if there are modes, and the shares of all of them are slices."""
    return bool(modes) and _SLICED.issuperset(modes)


def joined_by_mode(texts: Mapping[str, str], separator: str = "; ") -> str:
    """Join what is said of each mode, as in `mode mig: TEXT; mode soft: TEXT`; no empty text."""
    return separator.join(f"mode {mode}: {text}" for mode, text in texts.items() if text)


def mode_of_all(modes: Iterable[str]) -> str:
    """The mode of a device whose shares have these modes; empty: none, or unknown.

    They differ only after a fault: then one that takes no turns counts.
    """
    known = filter(None, modes)
    return min(known, key=lambda mode: (traits_of(mode).takes_turns, mode), default="")
