# SPDX-License-Identifier: Apache-2.0
"""A request: what a workload asks for, in any dialect."""

from fractions import Fraction

import msgspec

from allotment.model.compute import WHOLE, Compute
from allotment.model.mig import MigModelGroups
from allotment.model.modes import SOFT
from allotment.model.quantities import MemoryAmount
from allotment.model.structs import replace


class ModelRule(msgspec.Struct, frozen=True):
    """A model name or substring. Case is ignored; a space, `-` and `_` are the same."""

    text: str
    is_exact: bool = False
    """It is the whole model name; else a substring."""


class Constraints(msgspec.Struct, frozen=True):
    """Which devices may serve a request, alone and together."""

    models: tuple[ModelRule, ...] = ()
    """One of these; empty: any."""
    not_models: tuple[ModelRule, ...] = ()
    uuids: tuple[str, ...] = ()
    """One of these, exactly; empty: any."""
    not_uuids: tuple[str, ...] = ()
    affinity: str = ""
    """On devices with a share of this tag; if there are none, on idle devices."""
    anti_affinity: str = ""
    """On no device with a share of this tag."""
    exclusion: str | None = None
    """On no device with a share of another exclusion tag; a missing tag counts as one."""
    is_alone: bool = False
    """On devices without another share at placement. Others may join later, unlike with
    `exclusive`."""
    same_numa: bool = False
    """All devices on one NUMA node."""
    needs_nvlink: bool = False
    """NVLink between each two of its devices."""


class DeviceWeights(msgspec.Struct, frozen=True):
    """Weights for comparing devices of one node. At least one is above 0."""

    shares: int = 1
    compute: int = 1
    memory: int = 1


class Preferences(msgspec.Struct, frozen=True):
    """Policy names in a chain, which choose among fitting places; empty: the default."""

    node_policies: tuple[str, ...] = ()
    device_policies: tuple[str, ...] = ()
    weights: DeviceWeights | None = None


class Request(msgspec.Struct, frozen=True):
    """`count` distinct devices, with `memory` and `compute` on each."""

    memory: MemoryAmount
    count: int = 1
    selectors: tuple[str, ...] = msgspec.field(default=())
    """UUIDs (or prefixes) and model names; a device has to match one. Empty: any device."""
    compute: Compute = msgspec.field(default=Compute())
    floor: int = 0
    """For a request without compute, in mode `soft`: basis points of a device's time that must not
    be guaranteed to others. All such shares of a device use them together."""
    may_oversubscribe: bool = False
    """Its memory may live on the host: the device may be promised beyond its memory."""
    mode: str = SOFT
    """The mode. All shares of a device use the same mode at a time."""
    other_modes: tuple[str, ...] = ()
    """Alternative modes if `mode` has no room, the best first."""
    mig_profile: str = ""
    """The profile in mode `mig`, in NVIDIA's form (`1g.10gb`). Empty: the smallest with at least
    `memory` and the guarantee of `compute`."""
    mig_groups: tuple[MigModelGroups, ...] = ()
    """Allow-list of profiles per model, by configured memory (`allowed_profiles`). If non-empty,
    only listed profiles may be cut, and `mig_profile` must be one of them."""
    constraints: Constraints = msgspec.field(default=Constraints())
    preferences: Preferences = msgspec.field(default=Preferences())

    @property
    def asks_compute(self) -> bool:
        return self.compute.is_governed or self.compute.guarantee > 0

    @property
    def modes(self) -> tuple[str, ...]:
        """All its modes, the best first."""
        return tuple(dict.fromkeys((self.mode, *self.other_modes)))

    def times(self, number: int) -> "Request":
        """The request for `number` parts of one device: memory and guarantee are multiplied."""
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
    """A request for undivided devices: mode `exclusive` or `timeslice`."""
    return Request(MemoryAmount("100%", part=Fraction(1)), count=count, mode=mode)


def replicas_of(number: int, *, count: int = 1) -> Request:
    """A request for enforced replicas, each `1/number` of a device.

    That part of its memory, and of its time as a guarantee, with no ceiling.
    """
    return Request(
        MemoryAmount(f"1/{number} of the GPU", part=Fraction(1, number)),
        count=count,
        compute=Compute(guarantee=WHOLE // number, is_governed=True),
    )
