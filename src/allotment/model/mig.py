# SPDX-License-Identifier: Apache-2.0
"""MIG's values: profiles, instances, and layouts of GPUs.

A GPU with MIG has eight or four memory slots. A GPU instance covers some of them from a start that
its profile allows, and no two instances overlap. Some profiles, like those with media engines
(`+me`), have an additional limit. All numbers come from the GPU's driver, never from a table.
"""

import re
from collections.abc import Iterable, Mapping
from enum import Enum
from fractions import Fraction

import msgspec

from allotment.model.errors import UsageError
from allotment.model.formats import format_bytes, format_percent

_ID = re.compile(r"(?P<gpu>[^\[\]]+)\[(?P<group>[^\[\]]+)-(?P<position>[0-9]{1,4})\]")


class MigTemplate(msgspec.Struct, frozen=True):
    """A number of equal slices in a group."""

    name: str
    """The profile name: `1g.10gb`."""
    memory_mib: int
    """Requests are compared with this configured amount, not with the driver's."""
    count: int


class MigGroup(msgspec.Struct, frozen=True):
    """A set of slices that one GPU may be cut into at the same time."""

    name: str
    templates: tuple[MigTemplate, ...]

    @property
    def counts(self) -> dict[str, int]:
        counts: dict[str, int] = {}
        for template in self.templates:
            counts[template.name] = counts.get(template.name, 0) + template.count
        return counts

    def positions(self, template: MigTemplate) -> range:
        """Positions of one template's slices; equal templates have different positions."""
        before = 0
        for each in self.templates:
            if each is template:
                break
            before += each.count
        return range(before, before + template.count)

    def at(self, position: int) -> MigTemplate:
        """The template at a position. Raises `UsageError` if the group has no such position."""
        for template in self.templates:
            if position in self.positions(template):
                return template
        total = sum(template.count for template in self.templates)
        raise UsageError(
            f"group {self.name} has no slice at position {position}, only {total} from 0 on",
            hint="another configuration assigned it to the pod: see knownMigGeometries",
        )


class MigModelGroups(msgspec.Struct, frozen=True):
    """The groups of some models, in the order in which they are tried."""

    models: tuple[str, ...]
    """Substrings of model names."""
    groups: tuple[MigGroup, ...] = ()
    profiles: tuple[str, ...] | None = None
    """Allow-list of profile names; None: no list."""

    def is_of(self, model: str) -> bool:
        return any(name in model for name in self.models)


def groups_of(known: Iterable[MigModelGroups], model: str) -> tuple[MigGroup, ...]:
    """Groups of the first entry with a name that is a substring of the model."""
    for each in known:
        if each.groups and each.is_of(model):
            return each.groups
    return ()


def listed_profiles(
    known: Iterable[MigModelGroups], model: str, profiles: "Iterable[MigProfile]"
) -> "tuple[MigProfile, ...] | None":
    """The profiles of a GPU that the allow-list for its model has; None: no restriction.

    If only other models are listed, none, as in HAMi.
    """
    lists = [each for each in known if each.profiles is not None]
    if not lists:
        return None
    every = tuple(profiles)
    listed = next((each.profiles for each in lists if each.is_of(model)), None) or ()
    found = [named_profile(name, every) for name in listed]
    return tuple(profile for profile in every if profile in found)


def named_profile(name: str, profiles: "Iterable[MigProfile]") -> "MigProfile | None":
    """The profile of this name; else the smallest with its compute slices and its attributes.

    HAMi reads only the compute slices: its default list has `7g.79gb` for the A100's `7g.80gb`,
    and the H20's names for the H200 (v2.10 `migmgr.go`, `profileSliceKey`).
    """
    attributes = _attributes(name)
    alike = [
        profile
        for profile in profiles
        if name.startswith(f"{profile.slices}g.") and profile.attributes == attributes
    ]
    exact = (profile for profile in alike if profile.name == name)
    return next(exact, None) or min(alike, key=lambda each: each.memory_bytes, default=None)


def _attributes(name: str) -> str:
    place = next((place for place, letter in enumerate(name) if letter in "+-"), len(name))
    return name[place:]


def allowed_profiles(
    known: Iterable[MigModelGroups], model: str, memory_bytes: int
) -> tuple[str, ...] | None:
    """Profiles that serve a request for `memory_bytes`, by name, the best first.

    From each group in order: the smallest with enough configured memory. None: nothing is
    configured for this model.
    """
    groups = groups_of(known, model)
    if not groups:
        return None
    found: dict[str, None] = {}
    for group in groups:
        serving = [
            template for template in group.templates if template.memory_mib << 20 >= memory_bytes
        ]
        if serving:
            found[min(serving, key=lambda each: each.memory_mib).name] = None
    return tuple(found)


class MigGroupSlot(msgspec.Struct, frozen=True):
    """One slice of a group on one GPU."""

    gpu: str
    """UUID of the GPU."""
    group: str
    position: int

    def __str__(self) -> str:
        return f"{self.gpu}[{self.group}-{self.position}]"

    @classmethod
    def parse(cls, text: str) -> "MigGroupSlot":
        """Raises `UsageError`."""
        found = _ID.fullmatch(text)
        if found is None:
            raise UsageError(
                f"{text!r} is not a slice of a group",
                hint="write GPU-UUID[GROUP-POSITION], as in GPU-0fc3[group2-3]",
            )
        return cls(found["gpu"], found["group"], int(found["position"]))


class MigProfile(msgspec.Struct, frozen=True, kw_only=True):
    """A shape of GPU instance that a GPU offers (`nvmlGpuInstanceProfileInfo_t`)."""

    name: str
    """NVIDIA's name: `1g.10gb`, `1g.10gb+me`, `2g.48gb+gfx`."""
    number: int
    """The id for `nvmlDeviceCreateGpuInstance`; the same shape has another id on other models."""
    slices: int
    """Compute slices: the G of `Gg.Xgb`."""
    memory_bytes: int
    size: int
    """Memory slots that an instance covers."""
    starts: tuple[int, ...]
    """Slots where an instance can start, ascending."""
    most: int
    """Most instances at the same time."""
    multiprocessors: int
    has_media: bool = False
    """It uses media engines, which are few (`+me`, `+me.all`)."""

    @property
    def shape(self) -> str:
        """The name without attributes: profiles of one shape cover the same slots."""
        return self.name.removesuffix(self.attributes)

    def of_compute(self, slices: int) -> str:
        """Name of the MIG device with this many compute slices: `1c.3g.40gb` has a part of them."""
        return self.name if slices == self.slices else f"{slices}c.{self.name}"

    @property
    def attributes(self) -> str:
        """The name's suffix after the memory: `+me`, `-me`, `+gfx`, or empty."""
        return _attributes(self.name)


class MigInstance(msgspec.Struct, frozen=True, kw_only=True):
    """An existing GPU instance, with its one compute instance if that exists."""

    profile: int
    """Profile id."""
    start: int
    size: int
    gpu_instance: int
    """The driver's id; the driver reuses it after removal."""
    compute_instance: int | None = None
    uuid: str = ""
    """UUID of the MIG device, `MIG-...`: new with each creation; empty without a compute instance.
    """


class MigGpu(msgspec.Struct, frozen=True, kw_only=True):
    """The MIG state of one GPU, as its driver reports it."""

    uuid: str
    """UUID of the whole GPU."""
    is_enabled: bool
    is_pending: bool
    """The pending mode; it differs from the current one until the GPU is reset (Ampere)."""
    profiles: tuple[MigProfile, ...]
    instances: tuple[MigInstance, ...] = ()


class MigPlace(msgspec.Struct, frozen=True, order=True):
    """The place of a slice on its GPU, as decided by a scheduler."""

    profile: str
    """Profile name, `1g.10gb`: profile ids differ among GPUs."""
    start: int


class MigHold(Enum):
    """Whether an instance may be removed for another one."""

    IDLE = "idle"
    """Idle: it may be removed at once."""
    USED = "used"
    """In use, but its user can be asked to restart elsewhere."""
    FOREIGN = "foreign"
    """Foreign: created by another tool and never touched."""


class MigSlice(msgspec.Struct, frozen=True, kw_only=True):
    """A range of slots for the planner: an existing or decided slice."""

    profile: int
    """Profile id."""
    start: int
    size: int
    hold: MigHold = MigHold.USED
    holder: str = ""
    """Name of its user, for display. Empty: unused, or unknown."""


class MigLayout(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU for the planner."""

    gpu: str
    """UUID of the whole GPU."""
    profiles: tuple[MigProfile, ...]
    slices: tuple[MigSlice, ...] = ()
    is_enabled: bool = True
    """MIG is on. If off it can be switched on, which needs the whole GPU idle."""
    model: str = ""
    """Model of the GPU, which selects an administrator's groups."""

    @classmethod
    def of(
        cls,
        gpu: MigGpu,
        *,
        holds: Mapping[int, tuple[MigHold, str]],
        decided: Iterable[MigSlice] = (),
    ) -> "MigLayout":
        """The layout of a GPU with its instances.

        `holds`: hold and user of each, by GPU instance id; other instances are foreign. `decided`:
        slices to be created and used.
        """
        unknown = (MigHold.FOREIGN, "")
        return cls(
            gpu=gpu.uuid,
            profiles=gpu.profiles,
            slices=(
                *(
                    MigSlice(
                        profile=instance.profile,
                        start=instance.start,
                        size=instance.size,
                        hold=holds.get(instance.gpu_instance, unknown)[0],
                        holder=holds.get(instance.gpu_instance, unknown)[1],
                    )
                    for instance in gpu.instances
                ),
                *decided,
            ),
            is_enabled=gpu.is_enabled,
        )


class MigRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request for slices: by profile name, or by minimum size."""

    profile: str = ""
    """NVIDIA's name, `1g.10gb+me`; empty: any profile that meets the other fields."""
    memory_bytes: int = 0
    memory_part: Fraction | None = None
    """A part of the GPU's largest profile, if bytes are not given."""
    compute: int = 0
    """Basis points of what the GPU's largest profile has in multiprocessors."""
    attributes: str = ""
    """Exactly those of the profile where none is named: `+me`, `+gfx`, or nothing."""
    count: int = 1
    """Number of slices, each of this size, on any of the GPUs."""
    groups: tuple[MigModelGroups, ...] = ()
    """Allow-lists by model, with the configured memory."""

    def __str__(self) -> str:
        """The request as part of a sentence."""
        times = f"{self.count} x " if self.count > 1 else ""
        if self.profile:
            return times + self.profile
        wants = [format_bytes(self.memory_bytes)] if self.memory_bytes else []
        if self.memory_part is not None:
            wants.append(f"{format_percent(round(self.memory_part * 10_000))} % of its memory")
        wants += [f"{self.compute / 100:g} % of a GPU"] if self.compute else []
        wants += [self.attributes] if self.attributes else []
        return times + (" and ".join(wants) or "any profile")
