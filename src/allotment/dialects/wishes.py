# SPDX-License-Identifier: Apache-2.0
"""What the annotations of a pod say about one of its containers."""

from dataclasses import dataclass, field

from allotment.model.compute import Compute, ComputeClass
from allotment.model.mig import MigPlace
from allotment.model.quantities import MemoryAmount
from allotment.model.requests import Constraints, Preferences

__all__ = ["ComputeWish", "PlacementWish", "Wishes"]


@dataclass(frozen=True, slots=True)
class ComputeWish:
    """`allotment.dev/compute`: percent of each device."""

    text: str
    compute: Compute

    @property
    def names_guarantee(self) -> bool:
        """Does it say what is guaranteed? `:80` is a ceiling and nothing else."""
        return not self.text.lstrip().startswith(":")


@dataclass(frozen=True, slots=True)
class PlacementWish:
    """`allotment.dev/placement`: the devices that a scheduler chose."""

    devices: tuple[str, ...]
    memory_bytes: int | None = None
    """Of each device; None: it does not say."""
    mode: str | None = None
    """How it is enforced there; None: it does not say."""
    slices: tuple[MigPlace, ...] = ()
    """In mode `mig`, which slice of each device: as many as `devices`. Else empty."""


@dataclass(frozen=True, slots=True)
class Wishes:
    """All that is said. None: nothing is."""

    compute: ComputeWish | None = None
    kind: ComputeClass | None = None
    weight: int | None = None
    modes: tuple[str, ...] = ()
    """The best first, or `strongest` alone; empty: left open."""
    mig_profile: str = ""
    may_oversubscribe: bool | None = None
    placement: PlacementWish | None = None
    memory: MemoryAmount | None = None
    """A part of each device."""
    constraints: Constraints = field(default=Constraints())
    preferences: Preferences = field(default=Preferences())
