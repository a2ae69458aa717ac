# SPDX-License-Identifier: Apache-2.0
"""A node's offer: devices, health and configuration in, resources and quantities out. Pure.

GPUs are offered by the configuration's rules, MIG devices by its `migStrategy` (`mig.strategy`):
exclusive, or in replicas if `sharing.timeSlicing` names their resource.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Final

import msgspec

from allotment.agent.config.checks import MAX_REPLICAS, MigUse, matches, mig_use, rule_of, selected
from allotment.agent.config.schema import (
    GPU,
    Config,
    DeviceRule,
    ReplicatedResource,
    matches_pattern,
)
from allotment.agent.mig.strategy import PER_PROFILE, inherited, serve
from allotment.devices.models import tabled_profiles
from allotment.dialects.own import allotment
from allotment.model.devices import Device
from allotment.model.errors import UsageError
from allotment.model.formats import format_count
from allotment.model.modes import EXCLUSIVE, MPS, SOFT, TIMESLICE, has_slices, traits_of
from allotment.model.placements import MAX_SHARES
from allotment.model.structs import replace
from allotment.modes import ledger_mode
from allotment.modes.mps.mode import MpsMode
from allotment.shares.mode_policy import ModePolicy, refusal_on

_LONGEST_ID: Final = 63
"""Of a device plugin's ids, as in NVIDIA's plugin."""
_WHOLE_COMPUTE: Final = 100

GPU_SHARE: Final = allotment.GPU
"""The number of GPUs of which a container gets a part; its ids name no device."""
GPU_MEMORY: Final = allotment.GPU_MEMORY
GPU_COMPUTE: Final = allotment.GPU_COMPUTE


class Slot(msgspec.Struct, frozen=True):
    """One id for the kubelet to give to one container."""

    id: str
    """The device's UUID, `UUID::N` for its replica N, or `share::N` of no device."""
    device: str | None
    """UUID; None: any device of this resource's mode."""
    is_healthy: bool = True
    numa_node: int | None = None


class Resource(msgspec.Struct, frozen=True, kw_only=True):
    """A resource for the kubelet. `mode` enforces its parts."""

    name: str
    mode: str
    slots: tuple[Slot, ...]
    replicas: int = 1
    """Slots of a device. In modes soft and mps each is an equal part of its memory and time."""
    fails_above_one: bool = False
    """A container may have one of it at most."""
    family: str = ""
    """The resource's name before it was renamed: the labels' keys begin with it."""

    @property
    def devices_by_slot(self) -> Mapping[str, str | None]:
        """The device of each slot, by the slot's id."""
        return {slot.id: slot.device for slot in self.slots}

    @property
    def amount(self) -> str:
        """How many slots are healthy, for the log."""
        healthy = sum(slot.is_healthy for slot in self.slots)
        return f"{healthy}" if healthy == len(self.slots) else f"{healthy} of {len(self.slots)}"


class Offer(msgspec.Struct, frozen=True, kw_only=True):
    """A node's resources, quantities and modes at one moment."""

    resources: tuple[Resource, ...] = ()
    quantities: Mapping[str, int] = msgspec.field(default_factory=dict)
    """`GPU_MEMORY` and `GPU_COMPUTE`, for the node's capacity; healthy devices alone count."""
    modes: Mapping[str, str] = msgspec.field(default_factory=dict)
    """By UUID: the mode of each device."""
    shared: Mapping[str, tuple[str, ...]] = msgspec.field(default_factory=dict)
    """By UUID: the modes of each device of `GPU_SHARE`, one at a time; the first is the default."""
    mig_uses: Mapping[str, MigUse] = msgspec.field(default_factory=dict)
    """By UUID: how a GPU is cut on demand."""
    time_slices: Mapping[str, str] = msgspec.field(default_factory=dict)
    """By UUID: the driver's time slice, if a rule sets one: `short`, `medium`, ..."""
    problems: tuple[str, ...] = ()
    """Parts of the configuration that do not suit these devices, and have no effect."""

    def resource(self, name: str) -> Resource | None:
        """Return the resource of that name."""
        return next((each for each in self.resources if each.name == name), None)

    @property
    def parted(self) -> tuple[str, ...]:
        """UUIDs of the devices of `GPU_SHARE`, in parts of any size."""
        return tuple(sorted(self.shared))

    def in_mode(self, mode: str) -> tuple[str, ...]:
        """Return the UUIDs of the devices of `GPU_SHARE` in a mode."""
        return tuple(sorted(uuid for uuid, modes in self.shared.items() if mode in modes))


def plan(
    devices: Sequence[Device],
    unhealthy: Mapping[str, str],
    config: Config,
    *,
    allowed: Mapping[str, ModePolicy] | None = None,
) -> Offer:
    """Return the offer of a node with these GPUs and MIG devices, in any order.

    `unhealthy` is why, by UUID. An unhealthy device keeps its mode and its slots, which are marked
    unhealthy; it counts in no quantity. A MIG device is as healthy as its GPU. `allowed` are mode
    policies by UUID: a GPU whose policy excludes all its modes counts as unhealthy.

    NVIDIA's resources have no slots where `migStrategy` single or MPS cannot serve them: whole GPUs
    must not be handed out in place of parts. NVIDIA's plugin does not start then.
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
            rule=rules.get(each.uuid),
            mode=_mode(each, rules.get(each.uuid), shared.get(each.uuid), config, problems),
            shared=shared.get(each.uuid),
        )
        for each in usable
    ]
    parts = list(_settled(parts, problems))
    shares = [each for each in parts if each.resource is None]
    refused = {GPU: GPU} if served.is_refused else {}
    if unshared := list(_unshared(parts)):
        refused |= {each.resource: each.family for each in parts if each.resource is not None}
        problems += [f"{each}; {_WITHHELD}" for each in unshared]
    if refused:
        parts = shares
    unhealthy = {**unhealthy, **_kept(parts, allowed or {})}
    offered = [_offered(name, of, unhealthy, config) for name, of in _by_resource(parts).items()]
    offered += [
        Resource(name=name, mode=EXCLUSIVE, slots=(), family=family)
        for name, family in refused.items()
    ]
    _warn_of_mixtures(offered, problems)
    shared_devices = [as_whole(each.device) for each in shares]
    offered += _shares(shared_devices, unhealthy, config)
    mig_uses = {
        each.device.uuid: use
        for each in shares
        if each.rule is not None and (use := mig_use(each.rule)) is not None
    }
    return Offer(
        resources=tuple(sorted(offered, key=attrgetter("name"))),
        quantities=_quantities(shared_devices, unhealthy, mig_uses),
        modes={each.device.uuid: each.mode for each in parts},
        shared={each.device.uuid: each.modes for each in shares},
        mig_uses=mig_uses,
        time_slices={
            each.device.uuid: each.rule.time_slice
            for each in parts
            if each.rule
            and each.rule.time_slice is not None
            and traits_of(each.mode).is_time_sliced
        },
        problems=tuple(problems),
    )


# ---- which devices, and what for -----------------------------------------------------------------


class _Part(msgspec.Struct, frozen=True, kw_only=True):
    """One device, with its mode and its resource."""

    device: Device
    family: str
    rule: DeviceRule | None
    mode: str
    shared: ReplicatedResource | None
    """Its replication; without effect in mode exclusive."""

    @property
    def modes(self) -> tuple[str, ...]:
        """The modes in which it may serve as `GPU_SHARE`."""
        return (self.rule.shared if self.rule else ()) or (self.mode,)

    @property
    def is_exclusive(self) -> bool:
        return traits_of(self.mode).is_exclusive

    @property
    def is_only_shared(self) -> bool:
        """Whether `GPU_SHARE` must offer it: it has several modes, or slices of several sizes."""
        return len(self.modes) > 1 or has_slices(self.modes)

    @property
    def replicas(self) -> int:
        """Its number of slots."""
        return self.shared.replicas if self.shared and not self.is_exclusive else 1

    @property
    def resource(self) -> str | None:
        """The resource that offers it; None: `GPU_SHARE`."""
        if self.is_only_shared:
            return None
        if self.shared is None or self.is_exclusive:
            return None if ledger_mode(self.mode) else self.family
        return self.shared.rename or self.family


def _kept(parts: Sequence[_Part], allowed: Mapping[str, ModePolicy]) -> Mapping[str, str]:
    """Return why, by UUID, devices' mode policies exclude all modes of their offer."""
    if not allowed:
        return {}
    reasons = {
        each.device.uuid: [refusal_on(allowed, each.device, mode) for mode in each.modes]
        for each in parts
    }
    return {uuid: whys[0] for uuid, whys in reasons.items() if all(whys)}


def _in_order(devices: Sequence[Device]) -> tuple[Device, ...]:
    """Return each device once, by their numbers."""
    ordered = sorted(devices, key=lambda device: device.place)
    by_uuid = {each.uuid: each for each in reversed(ordered)}
    return tuple(reversed(by_uuid.values()))


def _usable(devices: Sequence[Device], problems: list[str]) -> tuple[Device, ...]:
    """Return the devices whose UUIDs fit into the kubelet's ids."""
    most = _LONGEST_ID - len(f"::{MAX_REPLICAS}")
    problems += [
        f"{_said(each)} has too long a UUID for the kubelet's ids"
        for each in devices
        if len(each.uuid) > most
    ]
    return tuple(each for each in devices if len(each.uuid) <= most)


def _rules(
    devices: Sequence[Device], usable: Sequence[Device], config: Config, problems: list[str]
) -> Mapping[str, DeviceRule]:
    """Return the rule of each usable GPU, by UUID. MIG devices have none."""
    rules = config.allotment.devices
    gpus = [each for each in usable if each.slice_of is None]
    numbers = {each.uuid: rule_of(each, rules) for each in gpus}
    for number, rule in enumerate(rules if devices else ()):
        if number in numbers.values():
            continue
        if any(matches(each, rule.match) for each in gpus):
            why = "earlier rules match all its GPUs"
        elif any(each.mig and matches(each, rule.match) for each in devices):
            why = "the GPUs that it matches are in MIG mode, and rules are for whole GPUs"
        elif any(each.slice_of is not None and matches(each, rule.match) for each in devices):
            why = "it matches MIG devices, and each of them is offered as a whole"
        else:
            why = "it matches no GPU here"
        problems.append(f"allotment.devices[{number}] has no effect: {why}")
    return {uuid: rules[number] for uuid, number in numbers.items() if number is not None}


def _dynamic(devices: Sequence[Device], config: Config) -> frozenset[str]:
    """Return the UUIDs of the GPUs that are cut on demand."""
    rules = config.allotment.devices
    numbers = {each.uuid: rule_of(each, rules) for each in devices if each.slice_of is None}
    return frozenset(
        uuid
        for uuid, number in numbers.items()
        if number is not None and mig_use(rules[number]) is not None
    )


def as_whole(device: Device) -> Device:
    """Return a GPU as it is without MIG."""
    return replace(device, mig=False) if device.mig else device


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
    """Return each device's replication, by UUID. `dynamic` GPUs are cut on demand."""
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
        problems += [
            f"{place} has no effect on {_said(device)}: an earlier entry applies"
            for device in chosen
            if shared.setdefault(device.uuid, entry) is not entry
        ]
    if absent:
        names = " or ".join(dict.fromkeys(absent))
        cut = any(each.startswith(PER_PROFILE) for each in absent) and dynamic
        more = "; a slice that is cut for a container is not shared" if cut else ""
        problems.append(f"{config.sharing_key}: no GPU of this node is {names}{more}")
    return shared


_WITHHELD: Final = "no GPU is offered by NVIDIA's resources until the configuration is corrected"


def _unshared(parts: Sequence[_Part]) -> Iterator[str]:
    """Say, in NVIDIA's words, which devices MPS cannot share as their resource requires."""
    for part in parts:
        is_of_mps = traits_of(part.mode).needs_daemon
        if not is_of_mps or part.shared is None or part.resource is None:
            continue
        device, why = part.device, MpsMode().fits(part.device)
        others = [each for each in parts if each.resource == part.resource]
        if device.slice_of is not None or device.mig:
            why = "sharing using MPS is not supported for MIG devices"
        elif not why and part.replicas > device.mps_clients:
            why = (
                f"invalid device maximum allowed replicas exceeded: {part.replicas} >"
                f" {device.mps_clients}"
            )
        elif not why:
            why = _mixture(part, others)
        if why:
            yield f"{_said(device)} cannot be shared by MPS: {why}"


def _mixture(part: _Part, others: Sequence[_Part]) -> str:
    """Why a container would have to choose among the devices of a resource; empty: it need not."""
    if any(each.mode != part.mode for each in others):
        return f"{part.resource} has GPUs of other modes"
    if any(each.replicas != others[0].replicas for each in others):
        return f"GPUs of {part.resource} have other numbers of replicas"
    return ""


def _mode(
    device: Device,
    rule: DeviceRule | None,
    shared: ReplicatedResource | None,
    config: Config,
    problems: list[str],
) -> str:
    if rule is None:
        return (TIMESLICE if config.mps is None else MPS) if shared else EXCLUSIVE
    if traits_of(rule.first).is_time_sliced and shared is None:
        problems.append(
            f"{_said(device)} is exclusive, not timeslice: sharing.timeSlicing does not name it"
        )
        return EXCLUSIVE
    return rule.first


def _settled(parts: Sequence[_Part], problems: list[str]) -> Iterator[_Part]:
    """Move enforced devices out of resources whose other devices differ in mode or replicas.

    A container cannot choose among the devices of a resource, so all must have one mode and one
    size of replicas. Such a device becomes part of `GPU_SHARE`. `_unshared` judges those of MPS.
    """
    for part in parts:
        if part.is_only_shared and part.shared is not None:
            problems.append(
                f"{_said(part.device)} is shared as {GPU_SHARE}, not by replicas: its rule has"
                f" modes {', '.join(part.modes)}"
            )
        if not traits_of(part.mode).takes_turns or part.resource is None:
            yield part
            continue
        others = [each for each in parts if each.resource == part.resource]
        why = _mixture(part, others)
        if not why and part.replicas > MAX_SHARES:
            why = f"{part.replicas} are more than the {MAX_SHARES} that can take turns on a GPU"
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
        mode=next((each.mode for each in parts if not each.is_exclusive), EXCLUSIVE),
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
    """Offer devices in parts, by slots of no device; the last slots are for unhealthy devices."""
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


def _quantities(
    devices: Sequence[Device], unhealthy: Mapping[str, str], mig_uses: Collection[str]
) -> Mapping[str, int]:
    """Return the amounts of healthy devices, for the node's capacity.

    They do not depend on whether MIG is on at present. An H100's largest slice has more memory
    than the driver leaves to other modes.
    """
    if not devices:
        return {}
    healthy = [each for each in devices if each.uuid not in unhealthy]
    return {
        GPU_MEMORY: sum(_most_memory(each, may_be_cut=each.uuid in mig_uses) for each in healthy),
        GPU_COMPUTE: _WHOLE_COMPUTE * len(healthy),
    }


def _most_memory(device: Device, *, may_be_cut: bool) -> int:
    slices = tabled_profiles(device) if may_be_cut else ()
    return max(device.allottable_bytes, *(each.memory_bytes for each in slices), 0)


def _warn_of_mixtures(resources: Sequence[Resource], problems: list[str]) -> None:
    """Report resources that mix whole GPUs and replicas."""
    for resource in resources:
        whole = sum(slot.id == slot.device for slot in resource.slots)
        if whole and resource.replicas > 1:
            problems.append(
                f"{resource.name} has {format_count(whole, 'whole GPU')} beside replicas, and a"
                " container cannot choose between them: renameByDefault in the configuration's"
                " sharing separates them"
            )


def _said(device: Device) -> str:
    kind = "GPU" if device.slice_of is None else "MIG device"
    return f"{kind} {device.index_text} ({device.uuid})"
