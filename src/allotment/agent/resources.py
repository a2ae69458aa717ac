# SPDX-License-Identifier: Apache-2.0
"""What a node offers: devices, health and configuration in, resources and quantities out. Pure.

GPUs are offered as the rules of the configuration say, MIG devices as its `migStrategy` does
(`migs`): exclusive, or in replicas where `sharing.timeSlicing` names their resource.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from allotment.agent.config.checks import MAX_REPLICAS
from allotment.agent.config.effective import Config
from allotment.agent.config.names import GPU, matches_pattern
from allotment.agent.config.rules import MigUse, matches, mig_use, rule_of, selected
from allotment.agent.config.schema import DeviceRule, ReplicatedResource
from allotment.agent.migs import PER_PROFILE, inherited, serve
from allotment.dialects import allotment
from allotment.model.devices import Device
from allotment.model.errors import UsageError
from allotment.model.formats import format_count
from allotment.model.placements import MAX_MPS_SHARES, MAX_SHARES
from allotment.model.requests import MIG
from allotment.modes.mps import MpsMode
from allotment.shares.modes_of_gpus import Allowed, refusal_on

__all__ = [
    "ENFORCED",
    "EXCLUSIVE",
    "GPU_COMPUTE",
    "GPU_MEMORY",
    "GPU_SHARE",
    "MPS",
    "SOFT",
    "TIMESLICE",
    "Offer",
    "Resource",
    "Slot",
    "as_whole",
    "plan",
]

EXCLUSIVE: Final = "exclusive"
TIMESLICE: Final = "timeslice"
SOFT: Final = "soft"
MPS: Final = "mps"
ENFORCED: Final = frozenset({SOFT, MPS})
"""Modes whose replicas are parts of a device, held to by the ledger."""

_LONGEST_ID: Final = 63
"""Of a device plugin's ids, as NVIDIA's plugin keeps to it."""
_WHOLE_COMPUTE: Final = 100

GPU_SHARE: Final = allotment.GPU
"""How many GPUs a container has a part of; the ids of this resource stand for no device."""
GPU_MEMORY: Final = allotment.GPU_MEMORY
GPU_COMPUTE: Final = allotment.GPU_COMPUTE


@dataclass(frozen=True, slots=True)
class Slot:
    """One id that the kubelet can give to one container."""

    id: str
    """The device's UUID, `UUID::N` for its replica N, or `share::N`, which stands for no device."""
    device: str | None
    """UUID; None: any device of this resource's mode."""
    is_healthy: bool = True
    numa_node: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Resource:
    """A resource that the kubelet is offered. `mode` enforces what is given of it."""

    name: str
    mode: str
    slots: tuple[Slot, ...]
    replicas: int = 1
    """How many slots a device has. In modes soft and mps each is that part of its memory and
    time."""
    fails_above_one: bool = False
    """More than one of it in a container is refused."""
    family: str = ""
    """The resource's name before it was renamed: what the labels' keys begin with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """All that a node offers at a moment."""

    resources: tuple[Resource, ...] = ()
    quantities: Mapping[str, int] = field(default_factory=dict)
    """`GPU_MEMORY` and `GPU_COMPUTE`, for the node's capacity; healthy devices alone count."""
    modes: Mapping[str, str] = field(default_factory=dict)
    """By UUID: the mode of each device."""
    shared: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """By UUID: the modes in which `GPU_SHARE` serves on each of its devices, by turns; the first is
    for who does not say."""
    migs: Mapping[str, MigUse] = field(default_factory=dict)
    """By UUID of the GPUs that are cut for who asks: how."""
    time_slices: Mapping[str, str] = field(default_factory=dict)
    """By UUID: how long a program runs at a time, where a rule says so: `short`, `medium`, ..."""
    problems: tuple[str, ...] = ()
    """What of the configuration does not suit these devices, and is left out."""

    def resource(self, name: str) -> Resource | None:
        """Return the resource of that name."""
        return next((each for each in self.resources if each.name == name), None)

    @property
    def parted(self) -> tuple[str, ...]:
        """UUIDs of the devices that `GPU_SHARE` is of, in parts of any size.

        Replicas of NVIDIA's resources are the kubelet's.
        """
        return tuple(sorted(self.shared))

    def in_mode(self, mode: str) -> tuple[str, ...]:
        """UUIDs of the devices on which `GPU_SHARE` serves in a mode."""
        return tuple(sorted(uuid for uuid, modes in self.shared.items() if mode in modes))


def plan(
    devices: Sequence[Device],
    unhealthy: Mapping[str, str],
    config: Config,
    *,
    allowed: Mapping[str, Allowed] | None = None,
) -> Offer:
    """Decide what a node with these devices offers; `unhealthy` is why, by UUID.

    `allowed` is what was said of GPUs' modes, by UUID: one that is for none of its modes has slots
    that say that they are not to be had.

    `devices` are GPUs and what MIG has cut them into; their order does not matter. A device that is
    unhealthy keeps its slots, which say so, and its mode; it counts in no quantity. A MIG device is
    as healthy as its GPU.
    """
    problems: list[str] = []
    dynamic = _dynamic(devices, config)
    served = serve(_in_order(devices), config, dynamic=dynamic)
    problems += served.problems
    usable = _usable(served.devices, problems)
    unhealthy = inherited(unhealthy, usable)
    rules = _rules(_in_order(devices), usable, config, problems)
    named = {each.uuid: served.names.get(each.uuid) or _name(each, config) for each in usable}
    shared = _shared(usable, named, config, problems, dynamic=dynamic)
    parts = [
        _Part(
            device=each,
            family=named[each.uuid],
            mode=_mode(each, rules.get(each.uuid), shared.get(each.uuid), config, problems),
            shared=shared.get(each.uuid),
            modes=rules[each.uuid].shared if each.uuid in rules else (),
        )
        for each in usable
    ]
    parts = list(_settled(parts, problems))
    if served.is_refused:
        parts = [each for each in parts if each.resource is None]
    unhealthy = {**unhealthy, **_kept(parts, allowed or {})}
    loose = [as_whole(each.device) for each in parts if each.resource is None]
    offered = [_offered(name, of, unhealthy, config) for name, of in _by_resource(parts).items()]
    if served.is_refused:
        offered.append(Resource(name=GPU, mode=EXCLUSIVE, slots=(), family=GPU))
    _warn_of_mixtures(offered, problems)
    modes = {each.device.uuid: each.mode for each in parts}
    loose_modes = {
        each.device.uuid: each.modes or (each.mode,) for each in parts if each.resource is None
    }
    uses = {uuid: mig_use(rules[uuid]) for uuid in loose_modes if uuid in rules}
    return Offer(
        resources=tuple(sorted([*offered, *_shares(loose, unhealthy, config)], key=_name_of)),
        quantities=_quantities(loose, unhealthy),
        modes=modes,
        shared=loose_modes,
        migs={uuid: use for uuid, use in uses.items() if use is not None},
        time_slices={
            uuid: rule.time_slice
            for uuid, rule in rules.items()
            if rule.time_slice is not None and modes[uuid] == TIMESLICE
        },
        problems=tuple(problems),
    )


# ---- which devices, and what for -----------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """One device, and what it is for."""

    device: Device
    family: str
    mode: str
    shared: ReplicatedResource | None
    """By what it is replicated; of no meaning in mode exclusive."""
    modes: tuple[str, ...] = ()
    """Those of its rule in which `GPU_SHARE` serves."""

    @property
    def is_loose(self) -> bool:
        """Whether it can be `GPU_SHARE` alone: one mode, and parts of one size, is not its way."""
        return len(self.modes) > 1 or MIG in self.modes

    @property
    def replicas(self) -> int:
        """How many slots it has; 1: itself."""
        return self.shared.replicas if self.shared and self.mode != EXCLUSIVE else 1

    @property
    def resource(self) -> str | None:
        """The resource that it is offered as; None: `GPU_SHARE`."""
        if self.is_loose:
            return None
        if self.shared is None or self.mode == EXCLUSIVE:
            return None if self.mode in ENFORCED else self.family
        return self.shared.rename or self.family


def _kept(parts: Sequence[_Part], allowed: Mapping[str, Allowed]) -> Mapping[str, str]:
    """Return why, by UUID, for devices that are for none of the modes that they are offered in."""
    return {
        each.device.uuid: whys[0]
        for each in parts
        if allowed
        and (
            whys := [refusal_on(allowed, each.device, mode) for mode in each.modes or (each.mode,)]
        )
        and all(whys)
    }


def _in_order(devices: Sequence[Device]) -> tuple[Device, ...]:
    """Return devices by their numbers, each once."""
    ordered = sorted(devices, key=lambda device: device.place)
    by_uuid = {each.uuid: each for each in reversed(ordered)}
    return tuple(reversed(by_uuid.values()))


def _usable(devices: Sequence[Device], problems: list[str]) -> tuple[Device, ...]:
    """Return the devices that the kubelet's ids can name."""
    usable = []
    for device in devices:
        if len(device.uuid) > _LONGEST_ID - len(f"::{MAX_REPLICAS}"):
            problems.append(f"{_said(device)} has too long a UUID for the kubelet's ids")
        else:
            usable.append(device)
    return tuple(usable)


def _rules(
    devices: Sequence[Device], usable: Sequence[Device], config: Config, problems: list[str]
) -> Mapping[str, DeviceRule]:
    """Return the rule that counts for each usable GPU, by UUID. What MIG has cut has none."""
    rules = config.allotment.devices
    gpus = [each for each in usable if each.slice_of is None]
    numbers = {each.uuid: rule_of(each, rules) for each in gpus}
    for number, rule in enumerate(rules if devices else ()):
        if number in numbers.values():
            continue
        if any(matches(each, rule.match) for each in gpus):
            why = "earlier rules have all GPUs that it matches"
        elif any(each.mig and matches(each, rule.match) for each in devices):
            why = "the GPUs that it matches are in MIG mode, and rules are for whole ones"
        elif any(each.slice_of is not None and matches(each, rule.match) for each in devices):
            why = "what it matches are MIG devices, each of which is given as a whole"
        else:
            why = "it matches no GPU here"
        problems.append(f"allotment.devices[{number}] has no effect: {why}")
    return {uuid: rules[number] for uuid, number in numbers.items() if number is not None}


def _dynamic(devices: Sequence[Device], config: Config) -> frozenset[str]:
    """Return the UUIDs of the GPUs that are cut for who asks."""
    rules = config.allotment.devices
    numbers = {each.uuid: rule_of(each, rules) for each in devices if each.slice_of is None}
    return frozenset(
        uuid
        for uuid, number in numbers.items()
        if number is not None and mig_use(rules[number]) is not None
    )


def as_whole(device: Device) -> Device:
    """Return a GPU as it is when it is not cut: that its memory is the slices' is of no moment."""
    return replace(device, mig=False, reserved_bytes=0) if device.mig else device


def _name(device: Device, config: Config) -> str:
    names = (
        each.name for each in config.gpu_patterns if matches_pattern(each.pattern, device.name)
    )
    return next(names, GPU)


def _shared(
    devices: Sequence[Device],
    named: Mapping[str, str],
    config: Config,
    problems: list[str],
    *,
    dynamic: Collection[str],
) -> Mapping[str, ReplicatedResource]:
    """Return by what each device is replicated, by UUID. `dynamic` are cut for who asks."""
    shared: dict[str, ReplicatedResource] = {}
    absent = []
    entries = config.sharing.resources if config.sharing and devices else ()
    for number, entry in enumerate(entries):
        place = f"{config.sharing_key}.resources[{number}]"
        of = [each for each in devices if named[each.uuid] == entry.name]
        if not of:
            absent.append(entry.name)
            continue
        try:
            chosen = selected(of, entry.devices)
        except UsageError as error:
            problems.append(f"{place}.devices has no effect: {error.message}")
            continue
        if config.mps is not None:
            chosen = _under_mps(chosen, entry, place, problems)
        problems += [
            f"{place} has no effect on {_said(device)}: an earlier entry has it"
            for device in chosen
            if shared.setdefault(device.uuid, entry) is not entry
        ]
    if absent:
        names = " or ".join(dict.fromkeys(absent))
        cut = any(each.startswith(PER_PROFILE) for each in absent) and dynamic
        more = "; slices that are cut for a container are its alone" if cut else ""
        problems.append(f"{config.sharing_key}: no GPU of this node is {names}{more}")
    return shared


def _under_mps(
    devices: Sequence[Device], entry: ReplicatedResource, place: str, problems: list[str]
) -> tuple[Device, ...]:
    """Return those that MPS can share so many ways, with NVIDIA's words where it has some."""
    kept = []
    for device in devices:
        why = MpsMode().fits(device)
        if device.slice_of is not None or device.mig:
            why = "sharing using MPS is not supported for MIG devices"
        elif not why and entry.replicas > MAX_MPS_SHARES:
            why = (
                f"invalid device maximum allowed replicas exceeded: {entry.replicas} >"
                f" {MAX_MPS_SHARES}"
            )
        if why:
            problems.append(f"{place} has no effect on {_said(device)}: {why}")
        else:
            kept.append(device)
    return tuple(kept)


def _mode(
    device: Device,
    rule: DeviceRule | None,
    shared: ReplicatedResource | None,
    config: Config,
    problems: list[str],
) -> str:
    by_mps = config.mps is not None
    if rule is None:
        return (MPS if by_mps else TIMESLICE) if shared else EXCLUSIVE
    if rule.first == TIMESLICE and (shared is None or by_mps):
        problems.append(
            f"{_said(device)} is exclusive, not timeslice: sharing.timeSlicing does not name it"
        )
        return EXCLUSIVE
    return rule.first


def _settled(parts: Sequence[_Part], problems: list[str]) -> Iterator[_Part]:
    """Take the replicas from enforced devices that cannot be told from their resource's others.

    A resource is of one mode, and its replicas are of one size where they are enforced: a container
    cannot say which it wants. Such a device is shared by `GPU_SHARE` instead, and is exclusive
    where it was `sharing.mps` that replicated it.
    """
    for part in parts:
        if part.is_loose and part.shared is not None:
            problems.append(
                f"{_said(part.device)} is shared as {GPU_SHARE}, not by replicas: its rule has"
                f" modes {', '.join(part.modes)}"
            )
        if part.mode not in ENFORCED or part.resource is None:
            yield part
            continue
        others = [each for each in parts if each.resource == part.resource]
        why = ""
        if any(each.mode != part.mode for each in others):
            why = f"{part.resource} has GPUs of other modes"
        elif any(each.replicas != others[0].replicas for each in others):
            why = f"GPUs of {part.resource} have other numbers of replicas"
        elif part.replicas > MAX_SHARES:
            why = f"{part.replicas} are more than the {MAX_SHARES} that can take turns on a GPU"
        if why and part.mode == MPS:
            problems.append(f"{_said(part.device)} is exclusive, not shared by MPS: {why}")
            yield replace(part, mode=EXCLUSIVE, shared=None)
            continue
        if why:
            problems.append(
                f"{_said(part.device)} is shared as {GPU_SHARE}, not by replicas: {why}"
            )
        yield replace(part, shared=None) if why else part


# ---- resources and quantities --------------------------------------------------------------------


def _by_resource(parts: Sequence[_Part]) -> Mapping[str, list[_Part]]:
    groups: dict[str, list[_Part]] = {}
    for part in parts:
        if part.resource is not None:
            groups.setdefault(part.resource, []).append(part)
    return groups


def _offered(
    name: str, parts: Sequence[_Part], unhealthy: Mapping[str, str], config: Config
) -> Resource:
    """Offer the devices of one of NVIDIA's resources."""
    replicas = max(each.replicas for each in parts)
    fails = bool(config.sharing and config.sharing.fail_requests_greater_than_one)
    return Resource(
        name=name,
        mode=next((each.mode for each in parts if each.mode != EXCLUSIVE), EXCLUSIVE),
        slots=tuple(slot for each in parts for slot in _slots(each, unhealthy)),
        replicas=replicas,
        fails_above_one=fails and replicas > 1,
        family=parts[0].family,
    )


def _slots(part: _Part, unhealthy: Mapping[str, str]) -> Iterator[Slot]:
    uuid = part.device.uuid
    ids = [f"{uuid}::{number}" for number in range(part.replicas)] if part.replicas > 1 else [uuid]
    for each in ids:
        yield Slot(each, uuid, uuid not in unhealthy, part.device.numa_node)


def _shares(
    devices: Sequence[Device], unhealthy: Mapping[str, str], config: Config
) -> Iterator[Resource]:
    """Offer soft devices by slots that stand for none of them: the last ones for unhealthy ones."""
    per_device = config.allotment.shares_per_device
    healthy = sum(each.uuid not in unhealthy for each in devices) * per_device
    if devices:
        yield Resource(
            name=GPU_SHARE,
            mode=SOFT,
            slots=tuple(
                Slot(f"share::{number}", None, number < healthy)
                for number in range(len(devices) * per_device)
            ),
            family=GPU_SHARE,
        )


def _quantities(devices: Sequence[Device], unhealthy: Mapping[str, str]) -> Mapping[str, int]:
    """Count what can be asked for of the soft devices; nothing where there is none."""
    if not devices:
        return {}
    healthy = [each for each in devices if each.uuid not in unhealthy]
    return {
        GPU_MEMORY: sum(each.allottable_bytes for each in healthy),
        GPU_COMPUTE: _WHOLE_COMPUTE * len(healthy),
    }


def _warn_of_mixtures(resources: Sequence[Resource], problems: list[str]) -> None:
    """Say where a container cannot tell a whole GPU from a replica."""
    for resource in resources:
        whole = sum(slot.id == slot.device for slot in resource.slots)
        if whole and resource.replicas > 1:
            problems.append(
                f"{resource.name} has {format_count(whole, 'whole GPU')} beside replicas, and a"
                " container cannot say which it wants: renameByDefault in the configuration's"
                " sharing tells them apart"
            )


def _name_of(resource: Resource) -> str:
    return resource.name


def _said(device: Device) -> str:
    kind = "GPU" if device.slice_of is None else "MIG device"
    return f"{kind} {device.index_text} ({device.uuid})"
