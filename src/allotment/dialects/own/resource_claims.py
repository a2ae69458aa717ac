# SPDX-License-Identifier: Apache-2.0
"""What a ResourceClaim asks of its allocated devices: amounts, and our parameters. Pure.

The amounts are an allocation's `consumedCapacity`; the rest is in opaque parameters:

    apiVersion: allotment.dev/v1
    kind: ShareConfig
    mode: soft              # or a list, the best first
    compute: ":80"          # percent of each GPU: a ceiling, or guarantee and ceiling
    class: latency
    weight: 200
    oversubscribe: true

The fields are those of a pod's `allotment.dev/...` annotations, with the same values.
"""

import hashlib
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from fractions import Fraction
from typing import Any, Final

import msgspec

from allotment.dialects.own.annotations import (
    CLASS,
    COMPUTE,
    MODE,
    OVERSUBSCRIBE,
    WEIGHT,
    read_value,
)
from allotment.dialects.own.protocol import (
    ANY_MEMORY,
    ComputeWish,
    PodAnnotations,
    in_modes,
    suiting,
    unsuited,
)
from allotment.model.compute import WHOLE, Compute, revised
from allotment.model.errors import QuantityError, UsageError
from allotment.model.formats import format_bytes, format_percent, meant
from allotment.model.mig import MigPlace, MigProfile
from allotment.model.modes import EXCLUSIVE, MIG, MPS, SOFT, traits_of
from allotment.model.pods import PodUid
from allotment.model.quantities import MemoryAmount, parse_whole
from allotment.model.requests import Request, whole_devices
from allotment.model.shares import ShareId

DRIVER: Final = "gpu.allotment.dev"
API_VERSION: Final = "allotment.dev/v1"
KIND: Final = "ShareConfig"
MEMORY_CAPACITY: Final = "memory"
COMPUTE_CAPACITY: Final = "compute"
"""Percent of a GPU's time."""
SEATS_CAPACITY: Final = "seats"
"""Claims that a GPU still takes: each consumes one. NVIDIA's `shares` are parts of a GPU."""

SHARED_MODES: Final = (SOFT, MPS)
_KEYS: Final = {
    "mode": MODE,
    "compute": COMPUTE,
    "class": CLASS,
    "weight": WEIGHT,
    "oversubscribe": OVERSUBSCRIBE,
}
_PERCENT: Final = WHOLE // 100


class AllocatedDevice(msgspec.Struct, frozen=True, kw_only=True):
    """A result of an allocation."""

    request: str
    """`REQUEST`, or `REQUEST/ALTERNATIVE`."""
    pool: str
    device: str
    share_id: str = ""
    """Which of several allocations of the device; empty: it has one."""
    is_admin: bool = False
    """For a monitor: it sees the device and takes none of it."""
    consumed: Mapping[str, str] = msgspec.field(default_factory=dict)
    """Quantities, by capacity."""


class Parameters(msgspec.Struct, frozen=True, kw_only=True):
    """Opaque parameters of an allocation, for our driver."""

    where: str
    """For errors: `spec.devices.config[0].opaque.parameters`."""
    content: object
    requests: tuple[str, ...] = ()
    """Empty: all of them."""

    def are_for(self, request: str) -> bool:
        """Whether they apply to a request; those of a request apply to all its alternatives."""
        return not self.requests or bool({request, request.partition("/")[0]} & {*self.requests})


class WantedDevices(msgspec.Struct, frozen=True, kw_only=True):
    """One request of a claim, as it was written."""

    request: str
    """`REQUEST`, or `REQUEST/ALTERNATIVE`."""
    device_class: str
    count: int = 1
    amounts: Mapping[str, str] = msgspec.field(default_factory=dict)
    """Quantities, by capacity."""


class ResourceClaim(msgspec.Struct, frozen=True, kw_only=True):
    """A claim, as far as one driver serves it."""

    uid: str
    namespace: str
    name: str
    driver: str = DRIVER
    devices: tuple[AllocatedDevice, ...] = ()
    """Empty: it is not allocated."""
    wanted: tuple[WantedDevices, ...] = ()
    """Its requests, while it is not allocated."""
    parameters: tuple[Parameters, ...] = ()
    """The class's first: later ones win."""
    capacities: Mapping[str, frozenset[str]] = msgspec.field(default_factory=dict)
    """The capacities that each request names, by `REQUEST` or `REQUEST/ALTERNATIVE`."""
    tolerant: frozenset[str] = frozenset()
    """Requests that tolerate taints of devices, likewise."""
    version: str = ""
    """As it was read: the server refuses a status for another one."""
    reported: tuple[Mapping[str, Any], ...] = ()
    """`status.devices`, of all drivers."""
    pods: tuple[PodUid, ...] = ()
    """Those that may use it."""

    def parameters_of(self, request: str) -> list[Parameters]:
        """Return the parameters that apply to a request."""
        return [each for each in self.parameters if each.are_for(request)]

    def requests(self, *, is_admin: bool = False) -> Mapping[str, Sequence[AllocatedDevice]]:
        """Return the devices of each request: of monitors, or of the others."""
        groups: dict[str, list[AllocatedDevice]] = {}
        for each in self.devices:
            if each.is_admin is is_admin:
                groups.setdefault(each.request, []).append(each)
        return groups

    def share_id(self, request: str) -> ShareId:
        """Return the id of a request's share: a repeated preparation finds it."""
        return ShareId(hashlib.sha256(f"{self.uid}/{request}".encode()).hexdigest()[:12])

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


class DevicePart(msgspec.Struct, frozen=True, kw_only=True):
    """An allocated device as the node knows it. One of these is true of it."""

    uuid: str
    """Of the GPU."""
    is_whole: bool = False
    slice: MigPlace | None = None
    is_monitor: bool = False
    """For claims with adminAccess alone."""


# ---- names of devices ----------------------------------------------------------------------------

_PREFIX: Final = "GPU-"
_SHORT: Final = 8
_WHOLE: Final = "-whole"
_MONITOR: Final = "-monitor"
_NAME: Final = re.compile(r"gpu-(?P<start>.{8,}?)(?P<way>-whole|-monitor|-mig-.+)?")


def gpu_names(uuids: Sequence[str]) -> Mapping[str, str]:
    """Return the device name of each GPU: the start of its UUID, as long as it has to be."""
    bare = {uuid: uuid.removeprefix(_PREFIX).lower() for uuid in uuids}
    length = _SHORT
    while len({text[:length] for text in bare.values()}) < len(bare):
        length += 1
    return {uuid: f"gpu-{text[:length].strip('-')}" for uuid, text in bare.items()}


def whole_name(gpu: str) -> str:
    return gpu + _WHOLE


def monitor_name(gpu: str) -> str:
    return gpu + _MONITOR


def slice_name(gpu: str, place: MigPlace) -> str:
    # `1g.24gb+me` and `1g.24gb-me` are two profiles of one GPU.
    word = re.sub(r"[^a-z0-9]+", "-", place.profile.replace("-", "-no-")).strip("-")
    return f"{gpu}-mig-{word}-{place.start}"


def part_named(
    name: str,
    gpus: Mapping[str, Sequence[MigProfile]],
    *,
    driver: str,
    amounts: Collection[str] = (),
) -> DevicePart | None:
    """Return what a device of a node's pool stands for; None: no part of these GPUs.

    `gpus` are profiles by UUID; a slice of an unknown one has no profile. `amounts` are the
    capacities that a claim names: NVIDIA's device is the whole GPU without them.
    """
    found = _NAME.fullmatch(name)
    if found is None:
        return None
    start, way = found["start"], found["way"] or ""
    uuids = [each for each in gpus if each.removeprefix(_PREFIX).lower().startswith(start)]
    if len(uuids) != 1:
        return None
    (uuid,) = uuids
    if way in {_WHOLE, _MONITOR}:
        return DevicePart(uuid=uuid, is_whole=way == _WHOLE, is_monitor=way == _MONITOR)
    if way:
        places = (MigPlace(each.name, at) for each in gpus[uuid] for at in each.starts)
        same = (each for each in places if slice_name(f"gpu-{start}", each) == name)
        return DevicePart(uuid=uuid, slice=next(same, MigPlace("", 0)))
    is_whole = driver != DRIVER and not {MEMORY_CAPACITY, COMPUTE_CAPACITY} & {*amounts}
    return DevicePart(uuid=uuid, is_whole=is_whole)


# ---- requests ------------------------------------------------------------------------------------


class ClaimSharing(msgspec.Struct, frozen=True, kw_only=True):
    """How the programs of one claim share its GPU, by another driver's parameters."""

    where: str
    """For errors: `spec.devices.config[0].opaque.parameters.sharing`."""
    mode: str
    """Of a whole GPU."""
    time_slice: str = "default"
    """The driver's time slice, in mode `timeslice`."""
    ceiling: int = WHOLE
    memory_bytes: int | None = None
    """None: all that the device has."""
    memory_by_device: Mapping[str, int] = msgspec.field(default_factory=dict)
    """By UUID, or by the place among the devices; it goes before `memory_bytes`."""


def request_for(
    devices: Sequence[tuple[AllocatedDevice, DevicePart]],
    parameters: Iterable[Parameters],
    *,
    asks_compute: bool,
    sharing: ClaimSharing | None = None,
) -> Request:
    """Return the request for all devices of one claim's request.

    Later parameters win over earlier ones. `asks_compute`: the claim names an amount of compute;
    else what it consumes is a default, which is kept free of others' guarantees and is no ceiling.
    Raises `UsageError`.
    """
    annotations = PodAnnotations()
    where = ""
    for each in parameters:
        where = each.where
        annotations = _read(annotations, each)
    if sharing is not None and where:
        raise UsageError(
            f"{sharing.where} is beside {where}: both say how a device is shared",
            hint="leave one of them out",
        )
    parts = [part for _, part in devices]
    if any(part.is_monitor for part in parts):
        raise UsageError(
            "a device of type monitor gives no part of its GPU",
            hint="write adminAccess: true to see the GPU, or claim one of type share, gpu or mig",
        )
    count = len(parts)
    if all(part.is_whole for part in parts):
        _check_is_undivided(annotations, EXCLUSIVE, where)
        if sharing is not None:
            return _shared_wholly(parts, sharing)
        return whole_devices(count, mode=EXCLUSIVE)
    if profiles := {part.slice.profile for part in parts if part.slice is not None}:
        _check_is_undivided(annotations, MIG, where)
        if len(profiles) == 1 and all(part.slice is not None for part in parts):
            return Request(ANY_MEMORY, count=count, mode=MIG, mig_profile=profiles.pop())
    if profiles or any(part.is_whole for part in parts):
        raise UsageError(
            "the devices of one request are of different types or profiles",
            hint="claim each in a request of its own, or select one type:"
            f" device.attributes['{DRIVER}'].type == 'share'",
        )
    if sharing is not None:
        annotations, where = _as_annotations(parts, sharing), sharing.where
    return _of_parts([each for each, _ in devices], annotations, where, asks_compute=asks_compute)


def _shared_wholly(parts: Sequence[DevicePart], sharing: ClaimSharing) -> Request:
    """Return the request for whole GPUs that the programs of a claim share."""
    if not traits_of(sharing.mode).needs_daemon:
        return whole_devices(len(parts), mode=sharing.mode)
    memory = _limit(parts, sharing) or MemoryAmount("100%", part=Fraction(1))
    compute = revised(Compute(), compute=Compute(0, sharing.ceiling))
    request = Request(memory, count=len(parts), compute=compute, mode=MPS)
    if problem := unsuited(request, MPS):
        raise UsageError(
            f"{sharing.where}: mode {MPS}: {problem}", hint="claim each GPU in a request of its own"
        )
    return request


def _as_annotations(parts: Sequence[DevicePart], sharing: ClaimSharing) -> PodAnnotations:
    """Return what a sharing means for parts of GPUs, which others share, too."""
    if traits_of(sharing.mode).needs_daemon:
        text = f":{format_percent(sharing.ceiling)}"
        compute = ComputeWish(text, Compute(0, sharing.ceiling))
        return PodAnnotations(modes=(MPS,), memory=_limit(parts, sharing), compute=compute)
    if sharing.time_slice != "default":
        raise UsageError(
            f"{sharing.where}: a time slice of its own has no effect on a part of a GPU, whose"
            " programs take turns by their shares of compute",
            hint="leave the interval out, or claim the whole GPU: name no amount of memory",
        )
    return PodAnnotations()


def _limit(parts: Sequence[DevicePart], sharing: ClaimSharing) -> MemoryAmount | None:
    """Return the limit on each device; None: none."""
    size = sharing.memory_bytes
    uuids = [part.uuid for part in parts]
    places = {**{str(place): uuid for place, uuid in enumerate(uuids)}, **{u: u for u in uuids}}
    for key, limit in sharing.memory_by_device.items():
        if key not in places:
            raise UsageError(
                f"{sharing.where}: a memory limit is for device {key!r}, which is not the claim's",
                hint=f"write the limit for {' or '.join(map(repr, places))}",
            )
        size = limit
    return None if size is None else MemoryAmount(format_bytes(size), size_bytes=size)


def read_parameters(parameters: Parameters) -> PodAnnotations:
    """Read opaque parameters. Raises `UsageError`, which names the path of each problem."""
    return _read(PodAnnotations(), parameters)


def in_one(errors: Sequence[UsageError]) -> UsageError:
    """Return one error with the messages of several, and each of their hints once."""
    hints = dict.fromkeys(each.hint for each in errors if each.hint)
    return UsageError("\n".join(each.message for each in errors), hint="; ".join(hints) or None)


def _read(annotations: PodAnnotations, parameters: Parameters) -> PodAnnotations:
    where, content = parameters.where, parameters.content
    if not isinstance(content, Mapping):
        raise UsageError(f"{where} is not an object", hint=_EXAMPLE)
    found = content.get("apiVersion"), content.get("kind")
    if found != (API_VERSION, KIND):
        raise UsageError(
            f"{where} has apiVersion {found[0]!r} and kind {found[1]!r}", hint=_EXAMPLE
        )
    problems = []
    for name, value in content.items():
        if name in {"apiVersion", "kind"}:
            continue
        path = f"{where}.{name}"
        if name not in _KEYS:
            text, hint = f"{path} is unknown{meant(str(name), _KEYS)}", ", ".join(_KEYS)
            problems.append(UsageError(text, hint=f"the fields are: {hint}"))
            continue
        try:
            annotations = read_value(annotations, _KEYS[name], _text(value))
        except UsageError as error:
            problems.append(UsageError(f"{path}: {error.message}", hint=error.hint))
    if problems:
        raise in_one(problems)
    return annotations


_EXAMPLE: Final = f"write apiVersion: {API_VERSION}, kind: {KIND}"


def _text(value: object) -> str:
    """Return a value as an annotation would have it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list):
        return ",".join(map(str, value))
    if isinstance(value, str | int):
        return str(value)
    raise UsageError("it is neither a text nor a number", hint="write it as in an annotation")


def _check_is_undivided(annotations: PodAnnotations, mode: str, where: str) -> None:
    """Refuse parameters that a whole GPU or a slice cannot obey."""
    written = {
        "compute": annotations.compute is not None,
        "class": annotations.kind is not None,
        "weight": annotations.weight is not None,
        "oversubscribe": bool(annotations.may_oversubscribe),
        "mode": annotations.modes not in {(), (mode,)},
    }
    for name, is_there in written.items():
        if is_there:
            raise UsageError(
                f"{where}.{name} has no effect on a device of mode {mode}",
                hint="remove it, or claim a part of a GPU (share.allotment.dev)",
            )


def _of_parts(
    devices: Sequence[AllocatedDevice],
    annotations: PodAnnotations,
    where: str,
    *,
    asks_compute: bool,
) -> Request:
    amounts = {_amounts(each) for each in devices}
    if len(amounts) > 1:
        raise UsageError(
            "the devices of one request have different amounts",
            hint="claim each in a request of its own",
        )
    ((size, percent),) = amounts
    if annotations.memory is not None:
        limit = annotations.memory.of(size)
        if limit > size:
            raise UsageError(
                f"{where}: the memory limit {annotations.memory} is more than the"
                f" {format_bytes(size)} that are claimed",
                hint="raise capacity.requests.memory, or lower the limit",
            )
        size = limit
    request = Request(
        MemoryAmount(format_bytes(size), size_bytes=size),
        count=len(devices),
        compute=_compute(percent * _PERCENT, annotations, where, asks_compute=asks_compute),
        floor=0 if asks_compute else percent * _PERCENT,
        may_oversubscribe=bool(annotations.may_oversubscribe),
    )
    modes = annotations.modes or (suiting(request, SHARED_MODES) or (SOFT,))[:1]
    for mode in modes:
        if mode not in SHARED_MODES:
            raise UsageError(
                f"{where}.mode: a part of a GPU has mode {' or '.join(SHARED_MODES)}, not {mode}",
                hint="claim gpu.allotment.dev for a whole GPU, mig.allotment.dev for a slice",
            )
        if problem := unsuited(request, mode):
            raise UsageError(f"{where}.mode: mode {mode}: {problem}")
    return in_modes(request, modes)


def _amounts(device: AllocatedDevice) -> tuple[int, int]:
    """Return bytes, and percent of the GPU's time."""
    try:
        memory, compute = (
            parse_whole(device.consumed[name]) for name in (MEMORY_CAPACITY, COMPUTE_CAPACITY)
        )
    except (KeyError, QuantityError) as error:
        raise UsageError(
            f"device {device.device}: its consumedCapacity has no amount of memory and compute",
            hint="the cluster needs DRAConsumableCapacity, which is on in Kubernetes 1.36",
        ) from error
    if not (memory and compute <= WHOLE // _PERCENT):
        raise UsageError(
            f"device {device.device}: its consumedCapacity is impossible: memory {memory}, compute"
            f" {compute}",
            hint="see which users may write the status of ResourceClaims",
        )
    return memory, compute


def _compute(
    guarantee: int, annotations: PodAnnotations, where: str, *, asks_compute: bool
) -> Compute:
    """Return the compute of each device, from its capacity and the parameters."""
    wish = annotations.compute
    compute = Compute(guarantee, guarantee) if asks_compute and guarantee else None
    guarantee = guarantee if asks_compute else 0
    if wish is not None:
        if wish.names_guarantee and wish.compute.guarantee != guarantee:
            raise UsageError(
                f"{where}.compute guarantees {format_percent(wish.compute.guarantee)} percent, but"
                f" the capacity that is claimed is {format_percent(guarantee)}",
                hint=f"write the ceiling alone, like :{format_percent(wish.compute.ceiling)}, and"
                " the guarantee in capacity.requests.compute",
            )
        if wish.compute.ceiling < guarantee:
            raise UsageError(
                f"{where}.compute has a ceiling below the {format_percent(guarantee)} percent that"
                " are claimed",
                hint=f"raise it to {format_percent(guarantee)} at least",
            )
        compute = Compute(guarantee, wish.compute.ceiling)
    return revised(Compute(), compute=compute, weight=annotations.weight, kind=annotations.kind)


# ---- what a claim consumes of a capacity ---------------------------------------------------------


class _ValidRange(msgspec.Struct, frozen=True):
    min: str | None = None
    max: str | None = None
    step: str | None = None


class _RequestPolicy(msgspec.Struct, frozen=True, rename="camel"):
    default: str | None = None
    valid_range: _ValidRange | None = None
    valid_values: tuple[str, ...] | None = None


class Capacity(msgspec.Struct, frozen=True, rename="camel"):
    """An amount of a device in a ResourceSlice."""

    value: str = "0"
    request_policy: _RequestPolicy | None = None

    def consumption(self) -> "Consumption":
        """Return the rule for claims. Raises `QuantityError` if an amount is no whole number."""
        policy = self.request_policy or _RequestPolicy()
        values = policy.valid_values or ()
        between = policy.valid_range or _ValidRange()
        return Consumption(
            total=(total := parse_whole(self.value)),
            default=total if policy.default is None else parse_whole(policy.default),
            least=parse_whole(between.min or "0"),
            most=total if between.max is None else parse_whole(between.max),
            step=parse_whole(between.step or "1") or 1,
            values=tuple(sorted(map(parse_whole, values))),
        )


class Consumption(msgspec.Struct, frozen=True, kw_only=True):
    """What kube-scheduler counts for a claim (`consumable_capacity.go`, v1.34)."""

    total: int
    default: int
    least: int
    most: int
    step: int
    values: tuple[int, ...]
    """If there are some, a claim consumes one of these."""

    def of(self, asked: int | None) -> int | None:
        """Return the amount, rounded up; None: the claim asks for more than one claim can have."""
        if asked is None:
            return self.default
        if self.values:
            return next((each for each in self.values if each >= asked), None)
        steps = max(0, -(-(asked - self.least) // self.step))
        amount = self.least + steps * self.step
        return amount if amount <= self.most else None
