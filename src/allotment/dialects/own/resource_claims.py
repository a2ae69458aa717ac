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

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

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
    PodAnnotations,
    in_modes,
    suiting,
    unsuited,
)
from allotment.model.compute import WHOLE, Compute, revised
from allotment.model.errors import QuantityError, UsageError
from allotment.model.formats import format_bytes, format_percent, meant
from allotment.model.mig import MigPlace
from allotment.model.modes import EXCLUSIVE, MIG, MPS, SOFT
from allotment.model.quantities import MemoryAmount, parse_whole
from allotment.model.requests import Request, whole_devices

DRIVER: Final = "gpu.allotment.dev"
API_VERSION: Final = "allotment.dev/v1"
KIND: Final = "ShareConfig"
MEMORY_CAPACITY: Final = "memory"
COMPUTE_CAPACITY: Final = "compute"
"""Percent of a GPU's time."""

_SHARED_MODES: Final = (SOFT, MPS)
_KEYS: Final = {
    "mode": MODE,
    "compute": COMPUTE,
    "class": CLASS,
    "weight": WEIGHT,
    "oversubscribe": OVERSUBSCRIBE,
}
_PERCENT: Final = WHOLE // 100


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocatedDevice:
    """A result of an allocation."""

    request: str
    """`REQUEST`, or `REQUEST/ALTERNATIVE`."""
    pool: str
    device: str
    share_id: str = ""
    """Which of several allocations of the device; empty: it has one."""
    is_admin: bool = False
    """For a monitor: it sees the device and takes none of it."""
    consumed: Mapping[str, str] = field(default_factory=dict)
    """Quantities, by capacity."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """Opaque parameters of an allocation, for our driver."""

    where: str
    """For errors: `spec.devices.config[0].opaque.parameters`."""
    content: object
    requests: tuple[str, ...] = ()
    """Empty: all of them."""

    def are_for(self, request: str) -> bool:
        """Whether they apply to a request; those of a request apply to all its alternatives."""
        return not self.requests or bool({request, request.partition("/")[0]} & {*self.requests})


@dataclass(frozen=True, slots=True, kw_only=True)
class DevicePart:
    """An allocated device as the node knows it. One of these is true of it."""

    uuid: str
    """Of the GPU."""
    is_whole: bool = False
    slice: MigPlace | None = None
    is_monitor: bool = False
    """For claims with adminAccess alone."""


def request_for(
    devices: Sequence[tuple[AllocatedDevice, DevicePart]],
    parameters: Iterable[Parameters],
    *,
    asks_compute: bool,
) -> Request:
    """Return the request for all devices of one claim's request.

    Later parameters win over earlier ones. `asks_compute`: the claim names an amount of compute;
    else what it consumes is a default, which is kept free of others' guarantees and is no ceiling.
    Raises `UsageError`.
    """
    wishes = PodAnnotations()
    where = ""
    for each in parameters:
        where = each.where
        wishes = _read(wishes, each)
    parts = [part for _, part in devices]
    if any(part.is_monitor for part in parts):
        raise UsageError(
            "a device of type monitor gives no part of its GPU",
            hint="write adminAccess: true to see the GPU, or claim one of type share, gpu or mig",
        )
    count = len(parts)
    if all(part.is_whole for part in parts):
        _check_is_undivided(wishes, EXCLUSIVE, where)
        return whole_devices(count, mode=EXCLUSIVE)
    if profiles := {part.slice.profile for part in parts if part.slice is not None}:
        _check_is_undivided(wishes, MIG, where)
        if len(profiles) == 1 and all(part.slice is not None for part in parts):
            return Request(ANY_MEMORY, count=count, mode=MIG, mig_profile=profiles.pop())
    if profiles or any(part.is_whole for part in parts):
        raise UsageError(
            "the devices of one request are of different types or profiles",
            hint="claim each in a request of its own, or select one type:"
            f" device.attributes['{DRIVER}'].type == 'share'",
        )
    return _of_parts([each for each, _ in devices], wishes, where, asks_compute=asks_compute)


def read_parameters(parameters: Parameters) -> PodAnnotations:
    """Read opaque parameters. Raises `UsageError`, which names the path."""
    return _read(PodAnnotations(), parameters)


def _read(wishes: PodAnnotations, parameters: Parameters) -> PodAnnotations:
    where, content = parameters.where, parameters.content
    if not isinstance(content, Mapping):
        raise UsageError(f"{where} is not an object", hint=_EXAMPLE)
    found = content.get("apiVersion"), content.get("kind")
    if found != (API_VERSION, KIND):
        raise UsageError(
            f"{where} has apiVersion {found[0]!r} and kind {found[1]!r}", hint=_EXAMPLE
        )
    for name, value in content.items():
        if name in {"apiVersion", "kind"}:
            continue
        path = f"{where}.{name}"
        if name not in _KEYS:
            raise UsageError(
                f"{path} is unknown{meant(str(name), _KEYS)}",
                hint=f"the fields are: {', '.join(_KEYS)}",
            )
        try:
            wishes = read_value(wishes, _KEYS[name], _text(value))
        except UsageError as error:
            raise UsageError(f"{path}: {error.message}", hint=error.hint) from error
    return wishes


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


def _check_is_undivided(wishes: PodAnnotations, mode: str, where: str) -> None:
    """Refuse parameters that a whole GPU or a slice cannot obey."""
    written = {
        "compute": wishes.compute is not None,
        "class": wishes.kind is not None,
        "weight": wishes.weight is not None,
        "oversubscribe": bool(wishes.may_oversubscribe),
        "mode": wishes.modes not in {(), (mode,)},
    }
    for name, is_there in written.items():
        if is_there:
            raise UsageError(
                f"{where}.{name} has no effect on a device of mode {mode}",
                hint="remove it, or claim a part of a GPU (share.allotment.dev)",
            )


def _of_parts(
    devices: Sequence[AllocatedDevice],
    wishes: PodAnnotations,
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
    request = Request(
        MemoryAmount(format_bytes(size), size_bytes=size),
        count=len(devices),
        compute=_compute(percent * _PERCENT, wishes, where, asks_compute=asks_compute),
        floor=0 if asks_compute else percent * _PERCENT,
        may_oversubscribe=bool(wishes.may_oversubscribe),
    )
    modes = wishes.modes or (suiting(request, _SHARED_MODES) or (SOFT,))[:1]
    for mode in modes:
        if mode not in _SHARED_MODES:
            raise UsageError(
                f"{where}.mode: a part of a GPU has mode {' or '.join(_SHARED_MODES)}, not {mode}",
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
    return memory, compute


def _compute(guarantee: int, wishes: PodAnnotations, where: str, *, asks_compute: bool) -> Compute:
    """Return the compute of each device, from its capacity and the parameters."""
    wish = wishes.compute
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
    return revised(Compute(), compute=compute, weight=wishes.weight, kind=wishes.kind)
