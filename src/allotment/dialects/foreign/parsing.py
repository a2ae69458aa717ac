# SPDX-License-Identifier: Apache-2.0
"""Parses words, flags, lists and amounts of foreign pods; errors name pod and key.

Each system's units are converted here once. As in Kubernetes, a fractional amount is refused and
never rounded; the error names the container and the key.
"""

import re
from collections.abc import Iterable
from fractions import Fraction
from typing import Annotated, Final

from msgspec import Meta

from allotment.dialects.own.protocol import MAX_DEVICES, in_modes, refusal, shown, unsuited
from allotment.model.compute import DEFAULT_WEIGHT, WHOLE, Compute, ComputeClass
from allotment.model.errors import QuantityError
from allotment.model.formats import format_bytes, meant
from allotment.model.pods import ContainerKind, ForeignContainer, ForeignPod
from allotment.model.quantities import LEAST_BYTES, MemoryAmount, parse_whole
from allotment.model.requests import ModelRule, Request

MIB: Final = 1 << 20
GIB: Final = 1 << 30
PERCENT: Final = WHOLE // 100
"""Basis points in one percent of a GPU."""
PLACE_ANEW: Final = "restart the pod to place it again"
"""The hint for an unreadable record of another system."""
Name = Annotated[str, Meta(min_length=1, max_length=317, pattern=r"^[^/\s]+/[^/\s]+$")]
"""Name of a resource, annotation or label in settings."""
SchedulerName = Annotated[str, Meta(min_length=1, max_length=253, pattern=r"^[a-z0-9.-]+$")]
"""A name for `spec.schedulerName`."""

_MOST_BYTES = 1 << 48
"""More memory than any GPU has: catches a unit suffix (`4Gi`) on a count of units."""
_WHOLE = re.compile(r"nvidia\.com/(?:gpu(?:\.shared)?|mig-.+)", re.ASCII)
_NUMBER = re.compile(r"[0-9]{1,18}", re.ASCII)
_DECIMAL = re.compile(r"(?=[.0-9]*[0-9])[0-9]{0,12}(?:\.[0-9]{0,18})?", re.ASCII)


def amount_of(pod: ForeignPod, container: ForeignContainer, name: str) -> int:
    """A container's amount of a resource, from limits or requests; 0: none.

    Raises `UsageError` if it is not a whole number or the two differ, as Kubernetes does.
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
    """True if any container has some of a resource; an invalid amount counts, to be refused.

    Zero, in any notation, does not count.
    """
    texts = (
        each[name]
        for container in pod.containers
        for each in (container.limits, container.requests)
        if name in each
    )
    return any(not _is_zero(text) for text in texts)


def _is_zero(text: str) -> bool:
    try:
        return parse_whole(text.strip()) == 0
    except QuantityError:
        return False


def refuse_whole(
    pod: ForeignPod, containers: Iterable[ForeignContainer], asked: Iterable[str]
) -> None:
    """Refuse containers with NVIDIA's whole GPUs if the pod asks for parts by other keys.

    Those keys belong to the pod, so no other check compares the two.
    """
    for container in containers:
        for name, text in sorted({**container.requests, **container.limits}.items()):
            if _WHOLE.fullmatch(name) and not _is_zero(text):
                problem = f"it asks for {name}, but its pod asks for a part of a GPU"
                hint = "keep one of them: a container gets whole GPUs or a part of one"
                raise refusal(pod, container.name, f"{problem} ({', '.join(asked)})", hint=hint)


def bytes_of(
    pod: ForeignPod, container: str | None, name: str, units: int, *, unit: int = 1
) -> MemoryAmount:
    """Units as memory of each GPU. Raises `UsageError` for too small or large amounts."""
    size = units * unit
    if size > _MOST_BYTES:
        problem = f"{name} is {units}, and {units} times {format_bytes(unit)} is more than any GPU"
        hint = f"{name} is a number of {format_bytes(unit)}: write 4, not 4Gi"
        raise refusal(pod, container, f"{problem} has", hint=hint)
    if size < LEAST_BYTES:
        problem = f"{name} is {format_bytes(size)} of each GPU, less than 1Mi"
        raise refusal(pod, container, problem, hint="ask for at least 1Mi of each GPU")
    return MemoryAmount(format_bytes(size) if size % MIB == 0 else str(size), size_bytes=size)


def number_of(pod: ForeignPod, container: str | None, name: str, text: str) -> int:
    """A whole number from an annotation, label or variable. Raises `UsageError`."""
    body = text.strip()
    if _NUMBER.fullmatch(body):
        return int(body)
    problem = f"{name} is {shown(text)}, which is not a whole number"
    raise refusal(pod, container, problem, hint=f"write {name} in digits alone, like 2")


def decimal_of(pod: ForeignPod, container: str | None, name: str, text: str) -> Fraction:
    """A decimal number (`0.5`, `.5`, `2`, `2.0`), exactly. Raises `UsageError`."""
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
    """Compute for parts of a GPU in [0, 1], rounded up to hundredths of a percent."""
    low, high = (min(WHOLE, int(-(-Fraction(each) * WHOLE // 1))) for each in (guarantee, ceiling))
    return Compute(low, high, weight=weight, kind=kind, is_governed=True)


def whole_cards(count: int) -> Request:
    everything = MemoryAmount("100%", part=Fraction(1))
    return Request(everything, count=count, compute=Compute(WHOLE, WHOLE, is_governed=True))


def in_mode(pod: ForeignPod, container: str, request: Request, mode: str, *, hint: str) -> Request:
    """The request in the mode that the pod names. Raises `UsageError`."""
    if why := unsuited(request, mode):
        problem = f"its part must be shared by {mode.upper()}, where {why}"
        raise refusal(pod, container, problem, hint=hint)
    return in_modes(request, (mode,))


def check_count(pod: ForeignPod, container: str | None, name: str, count: int) -> None:
    """Refuse a number of GPUs that no node has."""
    if count > MAX_DEVICES:
        problem = f"{name} is {count}, more GPUs than any node has"
        raise refusal(pod, container, problem, hint="ask for no more GPUs than one node has")


def regular_containers(pod: ForeignPod) -> list[ForeignContainer]:
    """`spec.containers`: these systems count containers by their positions."""
    return [container for container in pod.containers if container.kind == ContainerKind.REGULAR]


def units_of(size: int, unit: int) -> int:
    return -(-size // unit)


def of_earlier_placement(names: Iterable[str]) -> tuple[str, ...]:
    """A note that annotations with these names are ignored; empty if there are none."""
    listed = ", ".join(names)
    return (f"{listed}: from an earlier placement, rewritten at binding",) if listed else ()


_TRUE = frozenset({"1", "t", "T", "TRUE", "true", "True"})
_FALSE = frozenset({"0", "f", "F", "FALSE", "false", "False"})
_VENDOR = "nvidia"


def keys_of(container: ForeignContainer, names: Iterable[str]) -> tuple[str, ...]:
    return tuple(name for name in names if name in container.limits or name in container.requests)


def resources_in(pod: ForeignPod, names: Iterable[str]) -> tuple[str, ...]:
    """Those of the resources that a container names, even with an amount of zero."""
    return tuple(
        name for name in names if any(keys_of(container, (name,)) for container in pod.containers)
    )


def items_of(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(each for part in text.split(",") if (each := part.strip())))


def word_of(
    pod: ForeignPod, name: str, text: str, known: Iterable[str], *, container: str | None = None
) -> str:
    """One of the known words; `name` is of an annotation. Raises `UsageError`."""
    words, word = tuple(known), text.strip()
    if word in words:
        return word
    problem = f"the annotation {name} is {shown(text)}{meant(word.lower(), words)}"
    raise refusal(pod, container, problem, hint=f"write one of: {', '.join(words)}; or remove it")


def flag_of(text: str) -> bool | None:
    """As Go's `strconv.ParseBool`; None: not a flag."""
    word = text.strip()
    return word in _TRUE if word in _TRUE | _FALSE else None


def model_rules(pod: ForeignPod, key: str, *, refuses: bool) -> tuple[ModelRule, ...]:
    """Model rules from HAMi's annotation: substrings of a device's type.

    The type is the model, prefixed by `NVIDIA-` if missing. `refuses`: these models are excluded.
    Raises `UsageError` if that excludes every GPU.
    """
    found: dict[ModelRule, None] = {}
    for item in items_of(pod.annotations.get(key, "")):
        plain = item.casefold().replace(" ", "-").replace("_", "-")
        if plain in f"{_VENDOR}-":
            if not refuses:
                return ()  # matches every NVIDIA GPU
            problem = f"the annotation {key} has {shown(item)}, which matches every NVIDIA GPU"
            raise refusal(pod, None, problem, hint="name a model, or remove the annotation")
        found[ModelRule(item)] = None
        if plain.startswith(f"{_VENDOR}-"):
            found[ModelRule(item[len(_VENDOR) + 1 :])] = None
    return tuple(found)
