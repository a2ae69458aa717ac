# SPDX-License-Identifier: Apache-2.0
"""The one parser of each kind of amount.

Memory is written as in Kubernetes, `4Gi`, `1.5Gi`, `500M`, plain bytes, or as a part of each
device, `25%`; a trailing `B` is allowed. Durations: `250us`, `2ms`, `1.5s`, `2m`. Invalid text
always raises `QuantityError`, with the text and the accepted units.
"""

import re
from collections.abc import Mapping
from fractions import Fraction
from functools import lru_cache

import msgspec

from allotment.model.errors import QuantityError
from allotment.model.formats import DURATION_UNITS, MEMORY_UNITS, format_bytes

MAX_BYTES = 2**63 - 1
"""The largest amount of memory that Allotment can store."""

LEAST_BYTES = 1 << 20
"""The smallest memory limit of a share on a device."""

_MAX_TEXT = 64  # longer than any amount; keeps int() away from absurd digit strings
_NUMBER = re.compile(r"(?P<number>[0-9]+(?:\.[0-9]+)?|\.[0-9]+)(?P<unit>[^0-9.]*)", re.ASCII)

# apimachinery's pkg/api/resource: a number with a sign, and a suffix of powers of 1024 or 1000, or
# an exponent. `1E` is 10**18, `1E9` is 10**9.
_WHOLE = re.compile(
    r"\+?(?P<number>[0-9]+(?:\.[0-9]*)?|\.[0-9]+)"
    r"(?:[eE](?P<exponent>[+-]?[0-9]{1,3})|(?P<suffix>[KMGTPE]i|[numkMGTPE])?)",
    re.ASCII,
)
_WHOLE_SUFFIXES: Mapping[str, Fraction] = {
    **{suffix: Fraction(10) ** (-3 * (power + 1)) for power, suffix in enumerate("mun")},
    **{unit: Fraction(factor) for unit, factor in MEMORY_UNITS.items()},
    "E": Fraction(10**18),
    "Ei": Fraction(1024**6),
}
_WHOLE_HINT = "write a whole number of it, like 1, 30 or 4Gi"

_MEMORY_HINT = (
    "write an amount with a unit, like 4Gi, 4096Mi, 1.5Gi or 500M (units: Ki Mi Gi Ti Pi in powers"
    " of 1024, k M G T P in powers of 1000, none for bytes)"
)
_PART_HINT = _MEMORY_HINT + ", or a part of each device, like 25%"


class MemoryAmount(msgspec.Struct, frozen=True):
    """Memory on each device: bytes, or a part of the device.

    Exactly one of both is set. `part` is exact and in (0, 1].
    """

    text: str
    size_bytes: int | None = None
    part: Fraction | None = None

    def of(self, device_bytes: int) -> int:
        """Bytes on a device with `device_bytes`, rounded down."""
        if self.size_bytes is not None:
            return self.size_bytes
        return int(device_bytes * (self.part or 0))

    def __str__(self) -> str:
        return self.text


def parse_memory(text: str) -> MemoryAmount:
    """Parse bytes (`4Gi`, at least 1Mi) or a part of each device (`25%`); `QuantityError`."""
    body = text.strip()
    if not body.endswith("%"):
        size = _parse_bytes(text, _PART_HINT)
        if size < LEAST_BYTES:
            raise _too_little(text, size)
        return MemoryAmount(body, size_bytes=size)
    number, unit = _split(text, body[:-1], _PART_HINT)
    if unit:
        raise _refuse(text, f"{unit}% is not a unit", _PART_HINT)
    if number == 0:
        raise _refuse(text, "it is zero", _PART_HINT)
    if number > 100:  # noqa: PLR2004 - a whole device
        raise _refuse(text, "it is more than the whole device", "write 100% for a whole device")
    return MemoryAmount(body, part=number / 100)


def check_part(memory: MemoryAmount, device_bytes: int) -> None:
    """Raise `QuantityError` if a part of this device is less than the smallest limit."""
    size = memory.of(device_bytes)
    if size < LEAST_BYTES:
        raise _refuse(
            memory.text, f"on this device it is {format_bytes(size)}, less than 1Mi", _PART_HINT
        )


def _too_little(text: str, size: int) -> QuantityError:
    body = text.strip()
    number, unit = _split(text, body, _PART_HINT)
    problem = f"it is {size} bytes, less than 1Mi"
    if number * MEMORY_UNITS["Gi"] >= LEAST_BYTES:
        problem += f" (did you mean {body.removesuffix(unit).strip()}Gi?)"
    return _refuse(text, problem, _PART_HINT)


def parse_bytes(text: str) -> int:
    """Parse memory into bytes, fractions rounded up; raise `QuantityError`."""
    return _parse_bytes(text, _MEMORY_HINT)


def _parse_bytes(text: str, hint: str) -> int:
    number, unit = _split(text, text.strip(), hint)
    factor = MEMORY_UNITS.get(unit)
    if factor is None and len(unit) > 1:
        factor = MEMORY_UNITS.get(unit.removesuffix("B"))
    if factor is None:
        raise _refuse(text, f"unknown unit {unit!r}{_meant(unit)}", hint)
    size = -((-number * factor) // 1)
    if size == 0:
        raise _refuse(text, "it is zero", hint)
    if size > MAX_BYTES:
        raise _refuse(text, "it is more than any device can have", hint)
    return int(size)


def parse_whole(text: str) -> int:
    """Parse a Kubernetes quantity of a whole-number resource; zero included.

    Raises `QuantityError` for a fraction (`500m`), a negative amount and more than 2**63 - 1, as
    the API server does for extended resources.
    """
    amount = _quantity(text)
    if amount.denominator != 1:
        raise _refuse(text, "it is not a whole number", _WHOLE_HINT)
    return int(amount)


def parse_rounded_up(text: str, *, parts: int = 1) -> int:
    """Parse any Kubernetes quantity into `parts` of one, rounded up as in Kubernetes.

    CPU with `parts=1000` is in thousandths of a core: `Quantity.MilliValue`. Raises `QuantityError`
    for a negative amount and for more than 2**63 - 1.
    """
    amount = _quantity(text) * parts
    if amount > MAX_BYTES:
        raise _refuse(text, "it is more than 2**63 - 1", _WHOLE_HINT)
    return -int(-amount // 1)


@lru_cache(maxsize=4096)
def _quantity(text: str) -> Fraction:
    """Cached: a cluster uses few different quantities."""
    if len(text) > _MAX_TEXT:
        raise _refuse(f"{text[:20]}...", "it is too long", _WHOLE_HINT)
    if text.startswith("-"):
        raise _refuse(text, "it is negative", _WHOLE_HINT)
    match = _WHOLE.fullmatch(text)
    if match is None:
        raise _refuse(text, "it is not a Kubernetes quantity", _WHOLE_HINT)
    if match["exponent"] is not None:
        factor = Fraction(10) ** int(match["exponent"])
    else:
        factor = _WHOLE_SUFFIXES[match["suffix"] or ""]
    amount = Fraction(match["number"].removesuffix(".")) * factor
    if amount > MAX_BYTES:
        raise _refuse(text, "it is more than 2**63 - 1", _WHOLE_HINT)
    return amount


def parse_duration_ns(text: str) -> int:
    """Parse a duration (`250us`, `2ms`, `1.5s`, `2m`, `1h`) into nanoseconds, zero included.

    A bare `0` needs no unit. Raises `QuantityError`.
    """
    hint = "write a duration with a unit, like 250us, 2ms, 1.5s or 2m (units: ns us ms s m h)"
    number, unit = _split(text, text.strip(), hint)
    if number == 0 and not unit:
        return 0
    factor = DURATION_UNITS.get(unit)
    if factor is None:
        problem = f"unknown unit {unit!r}" if unit else "the unit is missing"
        raise _refuse(text, problem, hint)
    nanoseconds = int(number * factor)
    if nanoseconds > MAX_BYTES:
        raise _refuse(text, "it is too long", hint)
    return nanoseconds


def _split(text: str, body: str, hint: str) -> tuple[Fraction, str]:
    if not body:
        raise _refuse(text, "it is empty", hint)
    if len(body) > _MAX_TEXT:
        raise _refuse(f"{body[:20]}...", "it is too long", hint)
    if body.startswith("-"):
        raise _refuse(text, "it is negative", hint)
    match = _NUMBER.fullmatch(body)
    if match is None:
        raise _refuse(text, "it is not a number with a unit", hint)
    return Fraction(match["number"]), match["unit"]


def _meant(unit: str) -> str:
    """The known unit closest to `unit`, as a suffix for the message."""
    stem = unit.lower().removesuffix("b").removesuffix("i")
    close = [known for known in MEMORY_UNITS if known and known.lower().removesuffix("i") == stem]
    return f" (did you mean {' or '.join(close)}?)" if close and len(unit) > 0 else ""


def _refuse(text: str, problem: str, hint: str) -> QuantityError:
    return QuantityError(f"{text!r} is not an amount: {problem}", hint=hint)
