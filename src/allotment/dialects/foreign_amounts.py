# SPDX-License-Identifier: Apache-2.0
"""What several foreign dialects read and write alike: amounts, whole cards, receipts by index.

Each of these systems has units of its own; what they come to is said here once. Kubernetes rounds
nothing: an amount that is no whole number is refused, with the container and the name that has it.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from typing import Annotated, Final

from msgspec import Meta

from allotment.dialects.foreign import ForeignContainer, ForeignPod, NodeView
from allotment.dialects.protocol import refusal, shown
from allotment.model.clusters import PlacedDevice
from allotment.model.compute import DEFAULT_WEIGHT, WHOLE, Compute, ComputeClass
from allotment.model.errors import QuantityError
from allotment.model.formats import format_bytes
from allotment.model.pods import ContainerKind
from allotment.model.quantities import LEAST_BYTES, MemoryAmount, parse_whole
from allotment.model.requests import Request

__all__ = [
    "GIB",
    "MAX_DEVICES",
    "MIB",
    "PERCENT",
    "PLACE_ANEW",
    "Name",
    "SchedulerName",
    "amount_of",
    "bytes_of",
    "compute_of",
    "decimal_of",
    "index_list",
    "is_asked",
    "number_of",
    "of_earlier_placement",
    "refuse_whole",
    "regular_containers",
    "units_of",
    "uuid_at",
    "uuids_by_container",
    "uuids_by_index",
    "whole_cards",
]

MIB: Final = 1 << 20
GIB: Final = 1 << 30
PERCENT: Final = WHOLE // 100
"""Basis points in one percent of a GPU."""
MAX_DEVICES: Final = 1024
"""More GPUs than any node has: what asks for more was meant otherwise."""
PLACE_ANEW: Final = "restart the pod, so that it is placed anew"
"""The hint where what another system wrote cannot be read."""
Name = Annotated[str, Meta(min_length=1, max_length=317, pattern=r"^[^/\s]+/[^/\s]+$")]
"""Of a resource, an annotation or a label, as settings have it."""
SchedulerName = Annotated[str, Meta(min_length=1, max_length=253, pattern=r"^[a-z0-9.-]+$")]
"""As pods have it in `spec.schedulerName`."""

_MOST_BYTES = 1 << 48
"""More memory than any GPU has: a number with a unit (`4Gi`) where units were to be counted."""
_WHOLE = re.compile(r"nvidia\.com/(?:gpu(?:\.shared)?|mig-.+)", re.ASCII)
_NUMBER = re.compile(r"[0-9]{1,18}", re.ASCII)
_DECIMAL = re.compile(r"(?=[.0-9]*[0-9])[0-9]{0,12}(?:\.[0-9]{0,18})?", re.ASCII)


def amount_of(pod: ForeignPod, container: ForeignContainer, name: str) -> int:
    """Return how much of a resource a container asks for, in limits or requests; 0: nothing.

    Raises `UsageError`: it is no whole number, or the two differ, which Kubernetes refuses too.
    """
    texts = [each[name] for each in (container.limits, container.requests) if name in each]
    amounts: set[int] = set()
    for text in texts:
        try:
            amounts.add(parse_whole(text.strip()))
        except QuantityError as error:
            problem, hint = f"{name}: {error.message}", error.hint or "write a whole number"
            raise refusal(pod, container.name, problem, hint=hint) from error
    if len(amounts) > 1:
        problem = f"{name} is {shown(texts[0])} in limits and {shown(texts[1])} in requests"
        raise refusal(pod, container.name, problem, hint="write the same in both, or limits alone")
    return amounts.pop() if amounts else 0


def is_asked(pod: ForeignPod, name: str) -> bool:
    """Ask if any container has some of a resource. What is no amount is taken for it, and refused.

    None of it, however that is written, is as if it were not there.
    """
    texts = (
        each[name]
        for container in pod.containers
        for each in (container.limits, container.requests)
        if name in each
    )
    return any(not _is_zero(each) for each in texts)


def _is_zero(text: str) -> bool:
    try:
        return parse_whole(text.strip()) == 0
    except QuantityError:
        return False


def refuse_whole(
    pod: ForeignPod, containers: Iterable[ForeignContainer], asked: Iterable[str]
) -> None:
    """Refuse containers with whole GPUs of NVIDIA's, where the pod asks for parts by other keys.

    Those keys are no container's, so that nobody else sees the two beside each other.
    """
    for container in containers:
        for name, text in sorted({**container.requests, **container.limits}.items()):
            if _WHOLE.fullmatch(name) and not _is_zero(text):
                problem = f"it asks for {name}, and its pod for a part of a GPU"
                hint = "keep one of them: a container has whole GPUs or a part of one"
                raise refusal(pod, container.name, f"{problem} ({', '.join(asked)})", hint=hint)


def bytes_of(
    pod: ForeignPod, container: str | None, name: str, units: int, *, unit: int = 1
) -> MemoryAmount:
    """Return so many units of memory, of each GPU. Raises `UsageError`: too little, too much."""
    size = units * unit
    if size > _MOST_BYTES:
        problem = f"{name} is {units}, and {units} times {format_bytes(unit)} is more than any GPU"
        hint = f"{name} is a number of {format_bytes(unit)}: write 4, not 4Gi"
        raise refusal(pod, container, f"{problem} has", hint=hint)
    if size < LEAST_BYTES:
        problem = f"{name} comes to {format_bytes(size)} of each GPU, less than 1Mi"
        raise refusal(pod, container, problem, hint="ask for at least 1Mi of each GPU")
    return MemoryAmount(format_bytes(size) if size % MIB == 0 else str(size), size_bytes=size)


def number_of(pod: ForeignPod, container: str | None, name: str, text: str) -> int:
    """Parse a whole number in an annotation, a label or a variable. Raises `UsageError`."""
    body = text.strip()
    if _NUMBER.fullmatch(body):
        return int(body)
    problem = f"{name} is {shown(text)}, which is not a whole number"
    raise refusal(pod, container, problem, hint=f"write {name} in digits alone, like 2")


def decimal_of(pod: ForeignPod, container: str | None, name: str, text: str) -> Fraction:
    """Parse a decimal number (`0.5`, `.5`, `2`, `2.0`), exactly. Raises `UsageError`."""
    body = text.strip()
    if _DECIMAL.fullmatch(body):
        return Fraction(body.removesuffix(".") if not body.startswith(".") else f"0{body}")
    problem = f"{name} is {shown(text)}, which is not a decimal number"
    raise refusal(pod, container, problem, hint=f"write {name} like 0.5")


def compute_of(
    guarantee: Fraction | int,
    ceiling: Fraction | int,
    *,
    weight: int = DEFAULT_WEIGHT,
    kind: ComputeClass = ComputeClass.NORMAL,
) -> Compute:
    """Return the compute for parts of a GPU in [0, 1], rounded up to hundredths of a percent."""
    low, high = (min(WHOLE, int(-(-Fraction(each) * WHOLE // 1))) for each in (guarantee, ceiling))
    return Compute(low, high, weight=weight, kind=kind, is_governed=True)


def whole_cards(count: int) -> Request:
    """Return the request for whole GPUs: all their memory, and all their time guaranteed."""
    everything = MemoryAmount("100%", part=Fraction(1))
    return Request(everything, count=count, compute=Compute(WHOLE, WHOLE, is_governed=True))


# ---- receipts and take-over ----------------------------------------------------------------------


def regular_containers(pod: ForeignPod) -> list[ForeignContainer]:
    """Return a pod's `spec.containers`: by their places these systems count."""
    return [each for each in pod.containers if each.kind == ContainerKind.REGULAR]


def units_of(size: int, unit: int) -> int:
    """Return how many units hold so many bytes."""
    return -(-size // unit)


def index_list(devices: Sequence[PlacedDevice], node: NodeView) -> str:
    """Write devices as `0,1`; empty if one of them is not known to the node."""
    if not all(each.uuid in node.indexes for each in devices):
        return ""
    return ",".join(str(node.indexes[each.uuid]) for each in devices)


def uuids_by_container(
    pod: ForeignPod, keys: Mapping[str, str], *, node: NodeView
) -> Mapping[str, Sequence[str]]:
    """Read annotations of `0,1`, each of a container: `keys` has these by their names' keys."""
    return {
        container: uuids_by_index(pod, key, pod.annotations[key], node=node)
        for key, container in keys.items()
        if key in pod.annotations
    }


def of_earlier_placement(names: Iterable[str]) -> tuple[str, ...]:
    """Say that annotations with these names are not read; nothing, if there are none."""
    listed = ", ".join(names)
    return (f"{listed}: of an earlier placement, written anew at binding",) if listed else ()


def uuids_by_index(pod: ForeignPod, name: str, text: str, *, node: NodeView) -> list[str]:
    """Read `0,1` as UUIDs of the node's GPUs. Raises `UsageError`."""
    found: list[str] = []
    for part in text.split(","):
        uuid = uuid_at(pod, name, part, node=node)
        if uuid in found:
            problem = f"the annotation {name} names GPU {part.strip()} twice"
            raise refusal(pod, None, problem, hint=PLACE_ANEW)
        found.append(uuid)
    return found


def uuid_at(pod: ForeignPod, name: str, text: str, *, node: NodeView) -> str:
    """Read an index as the UUID of one of the node's GPUs. Raises `UsageError`."""
    uuids = {index: uuid for uuid, index in node.indexes.items()}
    index = number_of(pod, None, f"the annotation {name}", text)
    if index in uuids:
        return uuids[index]
    problem = f"the annotation {name} names GPU {index}, which the node has not"
    there = ", ".join(map(str, sorted(uuids))) or "none"
    raise refusal(pod, None, problem, hint=f"the node has the GPUs: {there}")
