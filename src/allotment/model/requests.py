# SPDX-License-Identifier: Apache-2.0
"""A request: what a workload asks for, in whatever syntax it was written."""

from dataclasses import dataclass, field, replace
from fractions import Fraction

from allotment.model.compute import WHOLE, Compute
from allotment.model.mig_groups import MigModelGroups
from allotment.model.quantities import MemoryAmount

__all__ = [
    "EXCLUSIVE",
    "MIG",
    "MPS",
    "SOFT",
    "TIMESLICE",
    "Constraints",
    "DeviceWeights",
    "ModelRule",
    "Preferences",
    "Request",
    "replicas_of",
    "whole_devices",
]

SOFT = "soft"
EXCLUSIVE = "exclusive"
TIMESLICE = "timeslice"
MPS = "mps"
MIG = "mig"


@dataclass(frozen=True, slots=True)
class ModelRule:
    """A model as somebody names it. Case does not matter; a space, `-` and `_` are the same."""

    text: str
    is_exact: bool = False
    """It is the whole name of the model; else some part of it."""


@dataclass(frozen=True, slots=True)
class Constraints:
    """Which devices may serve a request at all, and which of them together."""

    models: tuple[ModelRule, ...] = ()
    """One of these; empty: any."""
    not_models: tuple[ModelRule, ...] = ()
    uuids: tuple[str, ...] = ()
    """One of these, whole; empty: any."""
    not_uuids: tuple[str, ...] = ()
    affinity: str = ""
    """On devices that a share with this tag is on; where there are none, on idle ones."""
    anti_affinity: str = ""
    """On no device that a share with this tag is on."""
    exclusion: str | None = None
    """On no device that a share with another exclusion tag is on; none at all counts as a tag."""
    is_alone: bool = False
    """On devices without any other share now. Others may come later, unlike with `exclusive`."""
    same_numa: bool = False
    """All its devices on one NUMA node."""
    needs_nvlink: bool = False
    """Each of its devices linked to each other one by NVLink."""


@dataclass(frozen=True, slots=True)
class DeviceWeights:
    """What counts how much when devices of one node are compared. At least one is above 0."""

    shares: int = 1
    compute: int = 1
    memory: int = 1


@dataclass(frozen=True, slots=True)
class Preferences:
    """Which of the places that fit is taken: names of policies in a chain; empty: the default."""

    node_policies: tuple[str, ...] = ()
    device_policies: tuple[str, ...] = ()
    weights: DeviceWeights | None = None


@dataclass(frozen=True, slots=True)
class Request:
    """`count` distinct devices, with `memory` and `compute` on each."""

    memory: MemoryAmount
    count: int = 1
    selectors: tuple[str, ...] = field(default=())
    """UUIDs (or their beginnings) and model names; a device has to match one. Empty: any device."""
    compute: Compute = field(default=Compute())
    may_oversubscribe: bool = False
    """Its memory may live on the host: the device may be promised to more than it holds."""
    mode: str = SOFT
    """How it is to be enforced. The shares of a device at one time are all of one mode."""
    other_modes: tuple[str, ...] = ()
    """How it may be enforced where `mode` has no room for it, the best first."""
    mig_profile: str = ""
    """The one that is to be cut in mode `mig`, as NVIDIA writes it (`1g.10gb`); empty: the smallest
    with as much as `memory` and the guarantee of `compute`, which are a floor in that mode."""
    mig_groups: tuple[MigModelGroups, ...] = ()
    """Which slices an administrator allows on GPUs of some models, in another system's words. Of
    these models one is cut that they allow (`mig_groups.allowed_profiles`), by the memory that is
    written there; of listed profiles no others. One that `mig_profile` names has to be listed
    where there are lists, and nothing else of this has an effect on it."""
    constraints: Constraints = field(default=Constraints())
    preferences: Preferences = field(default=Preferences())

    def times(self, number: int) -> "Request":
        """Return the request for so many parts of one device: amounts and guarantee together."""
        if number == 1:
            return self
        memory = self.memory
        if memory.size_bytes is not None:
            memory = replace(memory, size_bytes=memory.size_bytes * number)
        elif memory.part is not None:
            memory = replace(memory, part=min(Fraction(1), memory.part * number))
        compute = self.compute
        guarantee = min(WHOLE, compute.guarantee * number)
        ceiling = min(WHOLE, compute.ceiling * number)
        return replace(
            self,
            memory=replace(memory, text=f"{number} times {self.memory.text}"),
            compute=replace(compute, guarantee=guarantee, ceiling=ceiling),
            count=1,
        )


def whole_devices(count: int, *, mode: str) -> Request:
    """Return the request for devices that nothing parts: mode `exclusive` or `timeslice`."""
    return Request(MemoryAmount("100%", part=Fraction(1)), count=count, mode=mode)


def replicas_of(number: int, *, count: int = 1) -> Request:
    """Return the request for replicas that are enforced: each is one part in `number` of a device.

    That part of its memory, and as a guarantee of its time; all of its time while others leave it.
    """
    return Request(
        MemoryAmount(f"1/{number} of the GPU", part=Fraction(1, number)),
        count=count,
        compute=Compute(guarantee=WHOLE // number, is_governed=True),
    )
