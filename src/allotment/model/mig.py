# SPDX-License-Identifier: Apache-2.0
"""MIG's words: what a GPU can be cut into, and what has been cut.

A GPU with MIG has a row of memory slots, eight or four. A GPU instance covers some of them from a
start that its profile allows, and no two cover the same one: that is the whole rule, but for
profiles of which there can be fewer at once than would fit (the media engines of `+me`).
All numbers here come from the driver that answers for the GPU, never from a table of models.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from fractions import Fraction

from allotment.model.formats import format_bytes, format_percent
from allotment.model.mig_groups import MigModelGroups

__all__ = [
    "MigGpu",
    "MigHold",
    "MigInstance",
    "MigLayout",
    "MigPlace",
    "MigProfile",
    "MigRequest",
    "MigSlice",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class MigProfile:
    """A shape of GPU instance that a GPU offers (`nvmlGpuInstanceProfileInfo_t`)."""

    name: str
    """As NVIDIA writes it: `1g.10gb`, `1g.10gb+me`, `2g.48gb+gfx`."""
    number: int
    """What `nvmlDeviceCreateGpuInstance` is told; the same shape has another number elsewhere."""
    slices: int
    """Compute slices: the G of `Gg.Xgb`."""
    memory_bytes: int
    size: int
    """Memory slots that an instance covers."""
    starts: tuple[int, ...]
    """Slots at which an instance may begin, ascending."""
    most: int
    """Instances of it that can be there at once."""
    multiprocessors: int
    has_media: bool = False
    """It takes media engines of which there are few (`+me`, `+me.all`)."""

    @property
    def shape(self) -> str:
        """Its name without attributes: profiles of one shape cover the same slots."""
        return self.name.removesuffix(self.attributes)

    def of_compute(self, slices: int) -> str:
        """Name the MIG device that has so many of its compute slices: `1c.3g.40gb` has a part."""
        return self.name if slices == self.slices else f"{slices}c.{self.name}"

    @property
    def attributes(self) -> str:
        """What is behind the memory in its name: `+me`, `-me`, `+gfx`, or nothing."""
        for place, letter in enumerate(self.name):
            if letter in "+-":
                return self.name[place:]
        return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class MigInstance:
    """A GPU instance that is there, with its one compute instance where that has been made."""

    profile: int
    """Its profile's number."""
    start: int
    size: int
    gpu_instance: int
    """The driver's id; it is used again after the instance has gone."""
    compute_instance: int | None = None
    uuid: str = ""
    """Of the MIG device, `MIG-...`: another one each time that it is made; empty without one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MigGpu:
    """What one GPU's driver says of MIG."""

    uuid: str
    """The whole GPU's."""
    is_enabled: bool
    is_pending: bool
    """The mode asked for, which differs from the one in force until the GPU is reset (Ampere)."""
    profiles: tuple[MigProfile, ...]
    instances: tuple[MigInstance, ...] = ()


@dataclass(frozen=True, slots=True, order=True)
class MigPlace:
    """Where on its GPU a slice is, or is to be: what a scheduler decides."""

    profile: str
    """By name, `1g.10gb`: profiles' numbers differ from GPU to GPU."""
    start: int


class MigHold(Enum):
    """What may become of an instance when slots are wanted for another one."""

    IDLE = "idle"
    """Nobody uses it: it may be removed at once."""
    USED = "used"
    """Somebody uses it who could be asked to start again elsewhere."""
    FOREIGN = "foreign"
    """Somebody else made it: it is never touched."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MigSlice:
    """A stretch of a GPU's slots, as a planner sees it: there already, or decided."""

    profile: int
    """Its profile's number."""
    start: int
    size: int
    hold: MigHold = MigHold.USED
    holder: str = ""
    """Who has it, in whatever words its owner is known by. Empty: nobody, or unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MigLayout:
    """One GPU as a planner sees it."""

    gpu: str
    """The whole GPU's UUID."""
    profiles: tuple[MigProfile, ...]
    slices: tuple[MigSlice, ...] = ()
    is_enabled: bool = True
    """Its MIG mode is on. Where it is off it could be switched on, which takes the whole GPU."""
    model: str = ""
    """The GPU's: by which an administrator's groups are known."""

    @classmethod
    def of(
        cls,
        gpu: MigGpu,
        *,
        holds: Mapping[int, tuple[MigHold, str]],
        decided: Iterable[MigSlice] = (),
    ) -> "MigLayout":
        """Return a GPU with its instances.

        `holds`: how each is held and by whom, by its GPU instance's id; others are foreign.
        `decided`: slices that are to be made, for somebody who will use them.
        """
        unknown = (MigHold.FOREIGN, "")
        return cls(
            gpu=gpu.uuid,
            profiles=gpu.profiles,
            slices=(
                *(
                    MigSlice(
                        profile=each.profile,
                        start=each.start,
                        size=each.size,
                        hold=holds.get(each.gpu_instance, unknown)[0],
                        holder=holds.get(each.gpu_instance, unknown)[1],
                    )
                    for each in gpu.instances
                ),
                *decided,
            ),
            is_enabled=gpu.is_enabled,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class MigRequest:
    """Slices that somebody asks for: by a profile's name, or by what they are to have at least."""

    profile: str = ""
    """As NVIDIA writes it, `1g.10gb+me`; empty: any that has the following."""
    memory_bytes: int = 0
    memory_part: Fraction | None = None
    """Of what the GPU's largest profile has, where bytes are not told."""
    compute: int = 0
    """Basis points of what the GPU's largest profile has in multiprocessors."""
    attributes: str = ""
    """Exactly those of the profile where none is named: `+me`, `+gfx`, or nothing."""
    count: int = 1
    """So many slices, each with all of that, on whichever GPUs."""
    groups: tuple[MigModelGroups, ...] = ()
    """On GPUs of their models one of those that they allow, by the memory that is written there."""

    def __str__(self) -> str:
        """Say what is asked for, as in a sentence."""
        times = f"{self.count} x " if self.count > 1 else ""
        if self.profile:
            return times + self.profile
        wants = [format_bytes(self.memory_bytes)] if self.memory_bytes else []
        if self.memory_part is not None:
            wants.append(f"{format_percent(round(self.memory_part * 10_000))} % of its memory")
        wants += [f"{self.compute / 100:g} % of a GPU"] if self.compute else []
        wants += [self.attributes] if self.attributes else []
        return times + (" and ".join(wants) or "any profile")
