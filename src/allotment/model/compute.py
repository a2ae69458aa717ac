# SPDX-License-Identifier: Apache-2.0
"""Compute: a share's part of a device's time, as written by users and as booked.

`30` is a guarantee and a ceiling of 30 % of each device. `30:80` guarantees 30 and allows 80 while
time is spare. `0:100` has no guarantee and no ceiling. Percentages have two decimals at most and
are kept in basis points: 10000 is a whole device.
"""

import re
from collections.abc import Callable, Iterator
from enum import StrEnum
from fractions import Fraction
from typing import Any

import msgspec

from allotment.model.errors import QuantityError
from allotment.model.formats import format_percent
from allotment.model.structs import replace

WHOLE = 10_000
"""A whole device, in basis points."""
DEFAULT_WEIGHT = 100
DEFAULT_FLOOR = 500
"""Basis points of a device's time that no guarantee takes from shares without a compute request."""
MAX_WEIGHT = 10_000

_MAX_TEXT = 24  # longer than any two percentages
_PERCENT = re.compile(r"(?P<number>[0-9]+(?:\.[0-9]+)?|\.[0-9]+)%?", re.ASCII)
_HINT = (
    "write percent of a device: 30 (a guarantee and a ceiling), 30:80 (a guarantee of 30, "
    "up to 80 while time is spare), 0:100 (spare time only), or :80 (spare time, up to 80)"
)
_WEIGHT = re.compile(r"[0-9]{1,6}", re.ASCII)


class ComputeClass(StrEnum):
    """Order of shares where guarantees and weights leave a choice."""

    LATENCY = "latency"
    """Starts as soon as another share's current kernel ends."""
    NORMAL = "normal"
    BESTEFFORT = "besteffort"
    """Beyond its guarantee it uses only time that all others leave."""


_URGENCY = tuple(reversed(ComputeClass))
"""The most urgent class last."""


class Compute(msgspec.Struct, frozen=True):
    """A share's part of each of its devices. Basis points: 10000 is a whole device.

    The default applies to shares without a compute request: `is_governed` is false. While this is
    true of all shares of a device, they do not take turns.
    """

    guarantee: int = 0
    ceiling: int = WHOLE
    weight: int = DEFAULT_WEIGHT
    """Relative weight for time above the guarantees: 1 to 10000."""
    kind: ComputeClass = ComputeClass.NORMAL
    is_governed: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.guarantee <= self.ceiling <= WHOLE or self.ceiling == 0:
            raise ValueError((self.guarantee, self.ceiling))
        if not 1 <= self.weight <= MAX_WEIGHT:
            raise ValueError(self.weight)

    def __str__(self) -> str:
        return f"{format_percent(self.guarantee)}:{format_percent(self.ceiling)}"


MOST_COMPUTE = Compute(WHOLE, WHOLE, MAX_WEIGHT, ComputeClass.LATENCY)
"""Allows all that a share can have."""


def parse_compute(text: str) -> Compute:
    """Parse `30`, `30:80`, `30%:80%` or `:80`; raise `QuantityError`."""
    body = text.strip()
    if len(body) > _MAX_TEXT:
        raise _refuse(f"{body[:20]}...", "it is too long")
    first, colon, second = body.partition(":")
    if not colon:
        guarantee = ceiling = _basis_points(text, body)
    elif not second.strip():
        problem = "the ceiling after the colon is missing"
        raise _refuse(text, f"{problem} (did you mean {first.strip() or 0}:100?)")
    else:
        guarantee = _basis_points(text, first) if first.strip() else 0
        ceiling = _basis_points(text, second)
    if ceiling == 0:
        problem = "a ceiling of 0 would never let it run"
        raise _refuse(text, f"{problem} (did you mean 0:100?)")
    if guarantee > ceiling:
        turned = f"{format_percent(ceiling)}:{format_percent(guarantee)}"
        problem = f"the guarantee ({format_percent(guarantee)} %) is more than the ceiling"
        raise _refuse(text, f"{problem} ({format_percent(ceiling)} %); did you mean {turned}?")
    return Compute(guarantee, ceiling, is_governed=True)


def parse_weight(text: str) -> int:
    body = text.strip()
    if _WEIGHT.fullmatch(body) and 1 <= int(body) <= MAX_WEIGHT:
        return int(body)
    shown = text if len(text) <= _MAX_TEXT else f"{text[:20]}..."
    raise QuantityError(
        f"{shown!r} is not a weight: write a whole number from 1 to {MAX_WEIGHT}",
        hint=(
            f"a share with weight 200 gets twice as much as one with {DEFAULT_WEIGHT}, the default"
        ),
    )


def revised(
    before: Compute,
    *,
    compute: Compute | None = None,
    weight: int | None = None,
    kind: ComputeClass | None = None,
) -> Compute:
    """Return `before` with new guarantee and ceiling, weight or class.

    Any change puts the share under turns. Of `compute` only guarantee and ceiling count.
    """
    after = before
    if compute is not None:
        after = replace(after, guarantee=compute.guarantee, ceiling=compute.ceiling)
    if weight is not None:
        after = replace(after, weight=weight)
    if kind is not None:
        after = replace(after, kind=kind)
    asked = compute is not None or weight is not None or kind is not None
    return replace(after, is_governed=before.is_governed or asked)


def greater(one: Compute, other: Compute) -> Compute:
    """Return the least compute that allows all that either of the two allows."""
    return _each(max, one, other)


def lesser(one: Compute, other: Compute) -> Compute:
    """Return the most compute that both of the two allow."""
    return _each(min, one, other)


def _each(choose: Callable[..., Any], one: Compute, other: Compute) -> Compute:
    """Choose each amount of the two: by `max` the one that allows more, by `min` the other."""
    return Compute(
        choose(one.guarantee, other.guarantee),
        choose(one.ceiling, other.ceiling),
        choose(one.weight, other.weight),
        choose(one.kind, other.kind, key=_URGENCY.index),
        is_governed=not choose(not one.is_governed, not other.is_governed),
    )


def exceeds(compute: Compute, allowed: Compute) -> bool:
    """Return whether it allows more than the allowed one, in any of its amounts."""
    return greater(compute, allowed) != allowed


def in_full(compute: Compute) -> str:
    """Return all amounts as a text."""
    if not compute.is_governed:
        return f"{compute} without turns"
    return f"{compute} (weight {compute.weight}, class {compute.kind})"


def beyond(allowed: Compute, asked: Compute) -> Iterator[str]:
    """Yield the amounts of `asked` that are more than the allowed ones, with need and have."""
    for word in ("guarantee", "ceiling"):
        need, have = getattr(asked, word), getattr(allowed, word)
        if need > have:
            yield f"{word} (need {format_percent(need)} percent, have {format_percent(have)})"


def _basis_points(text: str, part: str) -> int:
    body = part.strip()
    if not body:
        raise _refuse(text, "it is empty")
    if body.startswith("-"):
        raise _refuse(text, "it is negative")
    match = _PERCENT.fullmatch(body)
    if match is None:
        raise _refuse(text, f"{body!r} is not a percentage")
    exact = Fraction(match["number"]) * 100
    if exact > WHOLE:
        raise _refuse(text, f"{body.removesuffix('%')} % is more than a whole device")
    if exact.denominator != 1:
        nearest = format_percent(max(1, int(exact)))
        raise _refuse(text, f"{body!r} has more than two decimals (did you mean {nearest}?)")
    return int(exact)


def _refuse(text: str, problem: str) -> QuantityError:
    return QuantityError(f"{text!r} is not an amount of compute: {problem}", hint=_HINT)
