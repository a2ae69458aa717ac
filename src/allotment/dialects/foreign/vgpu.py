# SPDX-License-Identifier: Apache-2.0
"""Common parts of HAMi and Volcano: requests, records and names of slices.

Amounts are for each GPU. Memory is in MiB, or percent of the GPU; without either it is all memory.
Cores are percent of GPU time, a guarantee; 100 means a GPU without other shares. They are a ceiling
too if the core policy is `force`. By default these systems' monitor lifts the limit while no other
container of the same or a higher priority is active (HAMi v2.10 `cmd/vGPUmonitor/feedback.go`,
HAMi-core `set_env_utilization_switch`, Volcano's plugin `cmd/vgpu-monitor/feedback.go`).
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from typing import Annotated, ClassVar, Final

import msgspec
from msgspec import Meta

from allotment.dialects.foreign.base import ForeignDialect, GivenSlice, NodeView, Translation
from allotment.dialects.foreign.mig_geometries import KnownGeometries, groups_from
from allotment.dialects.foreign.parsing import (
    MIB,
    PERCENT,
    PLACE_ANEW,
    amount_of,
    bytes_of,
    check_count,
    items_of,
    keys_of,
    model_rules,
    units_of,
)
from allotment.dialects.own.annotations import COMPUTE, part_amount
from allotment.dialects.own.protocol import (
    in_modes,
    refusal,
    shown,
    suiting,
    unsuited,
    without_effect,
)
from allotment.model.clusters import PlacedDevice, PodBooking
from allotment.model.compute import WHOLE, Compute, ComputeClass, revised
from allotment.model.errors import UsageError
from allotment.model.formats import format_count
from allotment.model.mig import MigGroup, MigGroupSlot, MigModelGroups, groups_of
from allotment.model.modes import MIG, MPS, SOFT, has_only_slices, traits_of
from allotment.model.pods import ForeignContainer, ForeignPod
from allotment.model.quantities import MemoryAmount
from allotment.model.requests import Constraints, Preferences, Request
from allotment.model.structs import replace

USE_TYPE: Final = "nvidia.com/use-gputype"
NOT_TYPE: Final = "nvidia.com/nouse-gputype"

_ALL_PERCENT: Final = 100
_MOST_SHOWN: Final = 4
_TYPE: Final = "NVIDIA"
_UUID: Final = re.compile(r"[A-Za-z0-9./_-]{1,128}", re.ASCII)
_NUMBER: Final = re.compile(r"[0-9]{1,12}", re.ASCII)
_FIELDS: Final = 4
CORE_POLICY: Final = "GPU_CORE_UTILIZATION_POLICY"
"""An environment variable by a pod's author."""
DEFAULT: Final = "default"
FORCE: Final = "force"
DISABLE: Final = "disable"
_CORE_POLICIES: Final = (DEFAULT, FORCE, DISABLE)
_MODES: Final[Mapping[str, str]] = {"hami-core": SOFT, "mig": MIG, "mps": MPS}


class Names(msgspec.Struct, frozen=True, kw_only=True):
    """Resource names and defaults."""

    count: str
    memory: str
    percentage: str
    cores: str
    factor: int = 1
    """MiB in one of `memory`."""
    default_memory: int = 0
    """Default memory, in units of `memory`; 0: all of it."""
    default_cores: int = 0
    default_count: int = 1
    is_whole_by_default: bool = False
    """All memory without cores means a GPU without other shares."""

    @property
    def amounts(self) -> tuple[str, ...]:
        return (self.memory, self.percentage, self.cores)


class VgpuDialect(ForeignDialect):
    """HAMi's resources, under any names."""

    domain: ClassVar[str]
    """Of the annotations in which the system records assignments."""
    mode_key: ClassVar[str]
    counts_recorded_amounts: ClassVar[bool] = False
    """Recorded amounts count in a take-over, if they are larger than the request."""
    uuid_keys: ClassVar[tuple[str, str]]
    """The annotations with wanted and with refused UUIDs."""

    def __init__(
        self,
        names: Names,
        geometries: Iterable[KnownGeometries],
        modes: frozenset[str],
        *,
        core_policy: str = DEFAULT,
        record_mib: int = 1,
    ) -> None:
        """`modes`: those that nodes offer. `core_policy`: for containers without one.

        `record_mib`: MiB in one unit of memory in the records.
        """
        self._names = names
        self._groups = groups_from(geometries)
        self._modes = modes
        self._core_policy = core_policy
        self._record_unit = MIB * record_mib
        self.resources = (names.count, *names.amounts)

    def translate(self, pod: ForeignPod) -> Translation:
        constraints, preferences = self.rules_of(pod)
        modes, words = sharing_modes(pod, self.mode_key, self._modes)
        notes = [*words]
        requests: dict[str, Request] = {}
        for container in pod.containers:
            request = self._amounts(pod, container, notes)
            if request is not None:
                is_alone = constraints.is_alone or request.constraints.is_alone
                request = replace(
                    request,
                    constraints=replace(constraints, is_alone=is_alone),
                    preferences=preferences,
                )
                request = self.adjusted(pod, container, request, notes)
                policy = core_policy_of(container, self._core_policy, notes)
                request = _with_ceiling(pod, request, policy, modes)
                requests[container.name], ignored = in_sharing_modes(
                    pod, container.name, request, modes, key=self.mode_key
                )
                notes += ignored
        return self.translation(
            pod, requests, notes=notes, named_modes=requests if modes else frozenset()
        )

    def rules_of(self, pod: ForeignPod) -> tuple[Constraints, Preferences]:
        """The pod's annotations about GPUs, for all its containers, with HAMi's model rules."""
        wanted, refused = (items_of(pod.annotations.get(key, "")) for key in self.uuid_keys)
        constraints = Constraints(
            models=model_rules(pod, USE_TYPE, refuses=False),
            not_models=model_rules(pod, NOT_TYPE, refuses=True),
            uuids=wanted,
            not_uuids=refused,
        )
        return constraints, Preferences()

    def adjusted(
        self,
        pod: ForeignPod,  # noqa: ARG002
        container: ForeignContainer,  # noqa: ARG002
        request: Request,
        notes: list[str],  # noqa: ARG002
    ) -> Request:
        """The request with the system's further settings; `notes` gets the ignored ones."""
        return request

    def _amounts(
        self, pod: ForeignPod, container: ForeignContainer, notes: list[str]
    ) -> Request | None:
        """A container's amounts; None: it asks for no GPU. Raises `UsageError`."""
        names = self._names
        amounts = keys_of(container, names.amounts)
        count = _count(pod, container, names, amounts)
        if count == 0:
            return None
        where = f"container {container.name!r}"
        memory = _memory(pod, container, names)
        if amount_of(pod, container, names.memory) and names.percentage in amounts:
            notes.append(f"{where}: {names.percentage}: {names.memory} already sets the memory")
        cores = amount_of(pod, container, names.cores)
        if names.cores not in amounts:
            is_whole = names.is_whole_by_default and memory.part == 1
            cores = _ALL_PERCENT if is_whole else names.default_cores
        if cores > _ALL_PERCENT:
            notes.append(f"{where}: {names.cores} is {cores}: more than 100 percent counts as 100")
            cores = _ALL_PERCENT
        points = cores * PERCENT
        compute = Compute(points, points, is_governed=True) if cores else Compute()
        constraints = Constraints(is_alone=cores == _ALL_PERCENT)
        return Request(memory, count=count, compute=compute, constraints=constraints)

    # ---- records ---------------------------------------------------------------------------------

    def bound(self, booking: PodBooking, *, now: float) -> Mapping[str, str]:
        """Annotations with node and time (Unix seconds)."""
        moment = str(int(now))
        return {
            f"{self.domain}/vgpu-node": booking.node,
            f"{self.domain}/vgpu-time": moment,
            f"{self.domain}/bind-time": moment,
            f"{self.domain}/bind-phase": "success",
        }

    def encode(
        self, containers: Iterable[Sequence[PlacedDevice]], node: NodeView, *, ends: bool
    ) -> str:
        """Write the containers' devices, in order; `ends`: add a trailing `;`."""
        parts = [
            "".join(
                f"{name_of(device, self._groups, node)},{_TYPE},"
                f"{device.memory // self._record_unit},"
                f"{units_of(device.guarantee, PERCENT)}:"
                for device in devices
            )
            for devices in containers
        ]
        return "".join(f"{part};" for part in parts) if ends else ";".join(parts)

    def recorded(
        self, pod: ForeignPod, node: NodeView, key: str, *orders: Sequence[str], ends: bool
    ) -> Mapping[str, Sequence[str | GivenSlice]]:
        """Read an annotation with the containers' GPUs and MIG devices, by container name.

        `orders`: candidate lists of containers, the likelier first; the first list of the right
        length counts. Empty for a record of another node: it was copied from another pod. Raises
        `UsageError`.
        """
        text = pod.annotations.get(key)
        if text is None or pod.annotations.get(f"{self.domain}/vgpu-node") != pod.node:
            return {}
        if len(text) > MOST_CHARACTERS:
            raise _wrong(pod, key, f"has {len(text)} characters, more than {MOST_CHARACTERS}")
        parts = (text.removesuffix(";") if ends else text).split(";") if text else []
        given = [
            [self._device(pod, key, device, node) for device in _devices(pod, key, part)]
            for part in parts
        ]
        names = next((order for order in orders if len(order) == len(given)), None)
        if names is None:
            problem = f"has {format_count(len(given), 'container')}, the pod has {len(orders[-1])}"
            raise _wrong(pod, key, f"{problem} that it can describe")
        return {name: devices for name, devices in zip(names, given, strict=True) if devices}

    def _device(self, pod: ForeignPod, key: str, text: str, node: NodeView) -> str | GivenSlice:
        fields = text.split(",")
        if len(fields) != _FIELDS:
            problem = f"has {shown(text)} with {len(fields)} fields, not {_FIELDS}"
            raise _wrong(pod, key, f"{problem}: UUID,{_TYPE},MiB,percent")
        name, word, memory, cores = fields
        if word != _TYPE:
            raise _wrong(pod, key, f"has {shown(text)}, which is not of type {_TYPE}")
        device: str | GivenSlice = name
        if name.endswith("]"):
            try:
                device = slice_of(MigGroupSlot.parse(name), self._groups, node)
            except UsageError as error:
                raise _wrong(pod, key, f"has {shown(text)}: {error.message}") from error
        if not _UUID.fullmatch(device if isinstance(device, str) else device.uuid):
            raise _wrong(pod, key, f"has {shown(text)}, which has no UUID")
        if not self.counts_recorded_amounts:
            return device
        return replace(
            GivenSlice(device) if isinstance(device, str) else device,
            memory_bytes=_recorded(memory) * self._record_unit,
            guarantee=min(WHOLE, _recorded(cores) * PERCENT),
        )


def core_policy_of(container: ForeignContainer, default: str, notes: list[str]) -> str:
    """The container's policy, or the default; `notes` gets an unknown word."""
    policy = container.environment.get(CORE_POLICY, default).lower() or DEFAULT
    if policy not in _CORE_POLICIES:
        words = ", ".join(_CORE_POLICIES)
        problem = f"{CORE_POLICY} is {shown(policy)}, which is none of: {words}"
        notes.append(f"container {container.name!r}: {problem}")
        return DEFAULT
    return policy


def _with_ceiling(
    pod: ForeignPod, request: Request, policy: str, modes: tuple[str, ...]
) -> Request:
    """The request as it is, with its cores as ceiling, or without a ceiling.

    They are the ceiling in mode `mps`, which enforces nothing else, and beside the author's own
    `allotment.dev/compute`, which may raise or lower it.
    """
    is_of_daemon = any(traits_of(mode).needs_daemon for mode in modes)
    is_forced = policy == FORCE or (policy == DEFAULT and is_of_daemon)
    if is_forced or COMPUTE in pod.annotations:
        return request
    return replace(request, compute=replace(request.compute, ceiling=WHOLE))


def _recorded(text: str) -> int:
    """As Volcano reads it: 0 if it is no number."""
    return int(text) if _NUMBER.fullmatch(text) else 0


def _devices(pod: ForeignPod, key: str, text: str) -> list[str]:
    if text and not text.endswith(":"):
        raise _wrong(pod, key, f"has {shown(text)}, which lacks a ':' at its end")
    return text[:-1].split(":") if text else []


def _wrong(pod: ForeignPod, key: str, problem: str) -> UsageError:
    return refusal(pod, None, f"the annotation {key} {problem}", hint=PLACE_ANEW)


def sharing_modes(
    pod: ForeignPod, key: str, modes: frozenset[str]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The annotation's modes, out of `modes`, in its order; and a note about unknown words.

    No modes: the annotation is missing, and the mode left open. Raises `UsageError` if it has none
    of the modes.
    """
    text = pod.annotations.get(key)
    if text is None:
        return (), ()
    # HAMi searches the annotation for the name of a GPU's mode: it may contain several, and `migg`
    # contains `mig` (HAMi v2.10 `pkg/device/nvidia/device.go`, `checkType`).
    wanted = [_MODES[word] for word in sorted(_MODES, key=text.find) if word in text]
    allowed = tuple(mode for mode in wanted if mode in modes)
    if allowed:
        unknown = [word for word in items_of(text) if word not in _MODES]
        words = " and ".join(map(shown, unknown[:_MOST_SHOWN]))
        note = f"{key}: allowed words are {', '.join(_MODES)}; ignored {words}; read as"
        return allowed, (f"{note} {_words(allowed)}",) if unknown else ()
    if not wanted:
        problem = f"the annotation {key} is {shown(text)}, which contains no allowed word"
        raise refusal(pod, None, problem, hint=f"write one of: {', '.join(_MODES)}")
    problem = f"the annotation {key} asks for GPUs in mode {_words(wanted)}, which no node has"
    hint = "remove it, or write hami-core for shares enforced by software"
    raise refusal(pod, None, problem, hint=hint)


def _words(modes: Sequence[str]) -> str:
    words = {mode: word for word, mode in _MODES.items()}
    return " or ".join(words[mode] for mode in modes)


def in_sharing_modes(
    pod: ForeignPod, container: str, request: Request, modes: tuple[str, ...], *, key: str
) -> tuple[Request, tuple[str, ...]]:
    """The request in the annotation's modes, and notes about ignored settings.

    `key` is the annotation. Raises `UsageError` if none of the modes suits the request.
    """
    if not modes:
        return request, ()
    notes = []
    if has_only_slices(modes):
        # Settings that these systems apply to all pods, or to pods that compete for GPU time.
        request = replace(request, may_oversubscribe=False)
    if all(request.compute.kind in traits_of(mode).ignores for mode in modes):
        notes.append(f"its priority: shares do not take turns in mode {_words(modes)}")
        request = replace(request, compute=revised(request.compute, kind=ComputeClass.NORMAL))
    suited = suiting(request, modes)
    if not suited:
        why = unsuited(request, modes[0]) or " and ".join(without_effect(request, modes[0]))
        problem = f"{key} asks for mode {modes[0]}, where {why}"
        hint = (
            "write how many MiB of memory each slice needs"
            if traits_of(modes[0]).is_slice
            else f"ask for one GPU, or write {key}: hami-core"
        )
        raise refusal(pod, container, problem, hint=hint)
    for mode in modes:
        if mode not in suited:
            why = unsuited(request, mode) or f"{without_effect(request, mode)[0]} has no effect"
            notes.append(f"{key}, mode {mode}: {why}")
    return in_modes(request, suited), tuple(f"container {container!r}: {note}" for note in notes)


def _count(
    pod: ForeignPod, container: ForeignContainer, names: Names, amounts: tuple[str, ...]
) -> int:
    is_there = bool(keys_of(container, (names.count,)))
    count = amount_of(pod, container, names.count)
    if not is_there:
        return names.default_count if amounts else 0
    check_count(pod, container.name, names.count, count)
    if count == 0 and any(amount_of(pod, container, amount) for amount in amounts):
        problem = f"it asks for {' and '.join(amounts)} of {names.count}: 0"
        raise refusal(pod, container.name, problem, hint=f"write `{names.count}: 1`")
    return count


def _memory(pod: ForeignPod, container: ForeignContainer, names: Names) -> MemoryAmount:
    unit = MIB * names.factor
    amount = amount_of(pod, container, names.memory)
    percentage = amount_of(pod, container, names.percentage)
    if amount:
        return bytes_of(pod, container.name, names.memory, amount, unit=unit)
    if keys_of(container, (names.percentage,)):
        if not 0 < percentage <= _ALL_PERCENT:
            problem = f"{names.percentage} is {percentage}"
            hint = "write 1 to 100, or leave it out for all of the memory"
            raise refusal(pod, container.name, problem, hint=hint)
        return part_amount(Fraction(percentage, _ALL_PERCENT))
    if names.default_memory:
        return bytes_of(pod, container.name, names.memory, names.default_memory, unit=unit)
    return part_amount(Fraction(1))


_MOST: Final = 4096
MOST_CHARACTERS: Final = 64 << 10
"""Of a record."""
_Small = Annotated[int, Meta(ge=0, lt=_MOST)]
_Text = Annotated[str, Meta(min_length=1, max_length=128)]


class _Where(msgspec.Struct, frozen=True):
    start: Annotated[int, Meta(ge=0, lt=64)]
    size: Annotated[int, Meta(ge=0, le=64)]


class _Allocation(msgspec.Struct, frozen=True, rename="camel"):
    container_index: _Small
    device_index: _Small
    gpu_uuid: _Text = msgspec.field(name="gpuUUID")
    profile: _Text
    placement: _Where


_decoder: Final = msgspec.json.Decoder(Annotated[list[_Allocation], Meta(max_length=_MOST)])


# ---- places in groups ----------------------------------------------------------------------------


def slice_of(slot: MigGroupSlot, known: Sequence[MigModelGroups], node: NodeView) -> GivenSlice:
    """The slice at a position of a group. Raises `UsageError` for an invalid position.

    For an unknown group: an unknown slice of the GPU.
    """
    for group in groups_of(known, node.models.get(slot.gpu, "")):
        if group.name == slot.group:
            template = group.at(slot.position)
            rank = slot.position - group.positions(template).start
            return GivenSlice(slot.gpu, template.name, rank=rank)
    return GivenSlice(slot.gpu)


def name_of(device: PlacedDevice, known: Sequence[MigModelGroups], node: NodeView) -> str:
    """A device's name: for a slice of a known group, its position in it.

    Slices are created where there is room, so the start slot determines the position.
    """
    if device.slice is None:
        return device.uuid
    profiles = node.profiles.get(device.uuid, ())
    starts = next(
        (profile.starts for profile in profiles if profile.name == device.slice.profile), ()
    )
    rank = starts.index(device.slice.start) if device.slice.start in starts else 0
    for group in groups_of(known, node.models.get(device.uuid, "")):
        places = _positions(group, device.slice.profile)
        if places:
            return str(MigGroupSlot(device.uuid, group.name, places[rank % len(places)]))
    return device.uuid


def _positions(group: MigGroup, profile: str) -> list[int]:
    return [
        position
        for template in group.templates
        if template.name == profile
        for position in group.positions(template)
    ]


# ---- allocations ---------------------------------------------------------------------------------


def allocations(pod: ForeignPod, booking: PodBooking, node: NodeView) -> str:
    """The slices of a pod in HAMi v2.10's format; empty: none."""
    had = {each.name: each.devices for each in booking.containers}
    found = [
        _Allocation(
            container_index=container_index,
            device_index=device_index,
            gpu_uuid=device.uuid,
            profile=device.slice.profile,
            placement=_Where(device.slice.start, _size(device, node)),
        )
        for container_index, container in enumerate(pod.containers)
        for device_index, device in enumerate(had.get(container.name, ()))
        if device.slice is not None
    ]
    return msgspec.json.encode(found).decode() if found else ""


def _size(device: PlacedDevice, node: NodeView) -> int:
    profiles = node.profiles.get(device.uuid, ())
    place = device.slice
    return next(
        (profile.size for profile in profiles if place and profile.name == place.profile), 0
    )


def allocations_of(
    pod: ForeignPod, key: str, given: Mapping[str, Sequence[str | GivenSlice]]
) -> Mapping[str, Sequence[str | GivenSlice]]:
    """Add the slices' places to the devices of a record. Raises `UsageError` if unreadable.

    An allocation counts only for a device in the pod's record, on the same GPU.
    """
    text = pod.annotations.get(key)
    if not text:
        return given
    if len(text) > MOST_CHARACTERS:
        raise _wrong(pod, key, f"has {len(text)} characters, more than {MOST_CHARACTERS}")
    try:
        allocations = _decoder.decode(text)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise _wrong(pod, key, f"is not a list of slices: {str(error)[:200]}") from error
    places = {(each.container_index, each.device_index): each for each in allocations}
    if len(places) != len(allocations):
        raise _wrong(pod, key, "names a container's device twice")
    indexes = {each.name: index for index, each in enumerate(pod.containers)}
    return {
        name: [
            _placed(device, places.get((indexes[name], index)))
            for index, device in enumerate(devices)
        ]
        for name, devices in given.items()
    }


def _placed(device: str | GivenSlice, its: _Allocation | None) -> str | GivenSlice:
    uuid = device if isinstance(device, str) else device.uuid
    if its is None or its.gpu_uuid != uuid:
        return device
    return GivenSlice(uuid, its.profile, its.placement.start)
