# SPDX-License-Identifier: Apache-2.0
"""Groups of MIG slices that an administrator allows, as Volcano and HAMi have them, and their ids.

Their ConfigMap lists for some models which sets of slices a GPU may be cut into:
`knownMigGeometries: [{models, allowedGeometries: [{group, geometries: [{name, memory, count}]}]}]`.
A slice is named `GPU-UUID[GROUP-POSITION]` in a pod's annotations: its place among all slices of
the group, in the order in which they are listed. (Volcano v1.13, mig.go of its vgpu devices; HAMi
up to v2.9 has no names of groups, but their numbers, from 0.) HAMi from v2.10 on lists profiles in
their place, of which the driver says the rest: `migProfileAllowlist: [{models, profiles}]`.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from allotment.model.errors import UsageError

__all__ = [
    "MigGroup",
    "MigGroupSlot",
    "MigModelGroups",
    "MigTemplate",
    "allowed_profiles",
    "groups_of",
    "listed_profiles",
]

_ID = re.compile(r"(?P<gpu>[^\[\]]+)\[(?P<group>[^\[\]]+)-(?P<position>[0-9]{1,4})\]")


@dataclass(frozen=True, slots=True)
class MigTemplate:
    """So many equal slices of a group."""

    name: str
    """The profile's: `1g.10gb`."""
    memory_mib: int
    """What a request is compared with: what is written there, not what the driver says."""
    count: int


@dataclass(frozen=True, slots=True)
class MigGroup:
    """What one GPU may be cut into, all of it at once."""

    name: str
    templates: tuple[MigTemplate, ...]

    @property
    def counts(self) -> dict[str, int]:
        """How many there are of each profile, by its name."""
        counts: dict[str, int] = {}
        for each in self.templates:
            counts[each.name] = counts.get(each.name, 0) + each.count
        return counts

    def positions(self, template: MigTemplate) -> range:
        """Return the positions of one template's slices: of this very one, if another is equal."""
        before = 0
        for each in self.templates:
            if each is template:
                break
            before += each.count
        return range(before, before + template.count)

    def at(self, position: int) -> MigTemplate:
        """Return whose slice has a position. Raises `UsageError` where the group has none such."""
        for each in self.templates:
            if position in self.positions(each):
                return each
        total = sum(each.count for each in self.templates)
        raise UsageError(
            f"group {self.name} has no slice at position {position}, but {total} from 0 on",
            hint="the pod was given it by another configuration: see knownMigGeometries",
        )


@dataclass(frozen=True, slots=True)
class MigModelGroups:
    """The groups of some models, in the order in which they are tried."""

    models: tuple[str, ...]
    """Parts of models' names."""
    groups: tuple[MigGroup, ...] = ()
    profiles: tuple[str, ...] | None = None
    """These and no others, by name, of whatever memory; None: they are not listed."""

    def is_of(self, model: str) -> bool:
        """Tell whether a model is one of them."""
        return any(name in model for name in self.models)


def groups_of(known: Iterable[MigModelGroups], model: str) -> tuple[MigGroup, ...]:
    """Return the groups of a model: of the first entry of which any name is a part of its name."""
    for each in known:
        if each.groups and each.is_of(model):
            return each.groups
    return ()


def listed_profiles(known: Iterable[MigModelGroups], model: str) -> tuple[str, ...] | None:
    """Return the only profiles that a model may be cut into, by name; None: nothing is said.

    Where they are listed for other models alone, there are none, as HAMi has it.
    """
    lists = [each for each in known if each.profiles is not None]
    if not lists:
        return None
    return next((each.profiles for each in lists if each.is_of(model)), ())


def allowed_profiles(
    known: Iterable[MigModelGroups], model: str, memory_bytes: int
) -> tuple[str, ...] | None:
    """Return which profiles serve a request for so much memory, by name, the best first.

    That is of each group, in their order, the smallest with as much by what is written there. None:
    nothing is written about GPUs of this model.
    """
    groups = groups_of(known, model)
    if not groups:
        return None
    found: dict[str, None] = {}
    for group in groups:
        serving = [each for each in group.templates if each.memory_mib << 20 >= memory_bytes]
        if serving:
            found[min(serving, key=lambda each: each.memory_mib).name] = None
    return tuple(found)


@dataclass(frozen=True, slots=True)
class MigGroupSlot:
    """One slice of a group on one GPU."""

    gpu: str
    """Its UUID."""
    group: str
    position: int

    def __str__(self) -> str:
        """Write it as annotations have it."""
        return f"{self.gpu}[{self.group}-{self.position}]"

    @classmethod
    def parse(cls, text: str) -> "MigGroupSlot":
        """Read it. Raises `UsageError`."""
        found = _ID.fullmatch(text)
        if found is None:
            raise UsageError(
                f"{text!r} is no slice of a group",
                hint="it has the form GPU-UUID[GROUP-POSITION], as in GPU-0fc3[group2-3]",
            )
        return cls(found["gpu"], found["group"], int(found["position"]))
