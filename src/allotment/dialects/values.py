# SPDX-License-Identifier: Apache-2.0
"""Values of `allotment.dev/...` annotations that say more than a word: read, and written.

What one function here writes, its neighbour reads back as the same value. Lists are separated by
commas. A character that separates (`,` `;` `=`), a quote or a percent sign inside an item is
written as in an address: `%2C`. Whatever cannot be meant is a `UsageError`.
"""

import re
from collections.abc import Iterable, Mapping
from fractions import Fraction
from typing import Final
from urllib.parse import unquote_to_bytes

from allotment.dialects.protocol import meant, shown
from allotment.model.errors import UsageError
from allotment.model.quantities import MemoryAmount, parse_memory
from allotment.model.requests import DeviceWeights, ModelRule

__all__ = [
    "DEVICE_POLICIES",
    "NODE_POLICIES",
    "NUMA",
    "NVLINK",
    "TOPOLOGIES",
    "is_weights",
    "parse_items",
    "parse_part",
    "parse_rules",
    "parse_tag",
    "parse_weights",
    "parse_words",
    "part_amount",
    "weights_of",
    "written_items",
    "written_part",
    "written_rules",
    "written_tag",
    "written_weights",
]

NUMA: Final = "numa"
NVLINK: Final = "nvlink"
TOPOLOGIES = (NUMA, NVLINK)
"""What all devices of a container can be asked to have in common."""
NODE_POLICIES = ("binpack", "spread", "fragmentation", "topology", "numa")
DEVICE_POLICIES = ("binpack", "spread", "fragmentation", "topology", "numa")
"""What a place may be chosen by, when several fit."""

_MAX_ITEMS = 256
_MAX_WEIGHT = 1_000_000
_SEPARATORS = '%,;="'
_RATIO = re.compile(r"(?P<above>[0-9]{1,18})/(?P<below>[0-9]{1,18})", re.ASCII)
_WEIGHTS = re.compile(
    r"(?:shares|compute|memory)\s*=\s*[0-9]+"
    r"(?:\s*,\s*(?:shares|compute|memory)\s*=\s*[0-9]+)*",
    re.ASCII,
)
_MAX_DECIMALS = 40  # of a percentage, with its digits: `parse_memory` reads 64 characters


# ---- items and lists -----------------------------------------------------------------------------


def written_tag(text: str) -> str:
    """Write one item: any text, so that no list and no container's name is seen in it."""
    last = len(text) - 1
    return "".join(
        _escaped(each) if _has_to_be_escaped(each, at_end=place in {0, last}) else each
        for place, each in enumerate(text)
    )


def parse_tag(text: str) -> str:
    """Read one item. Raises `UsageError`."""
    body = text.strip()
    wrong = next((each for each in ',;="' if each in body), None)
    if wrong is not None:
        problem = f"{shown(body)} has {wrong!r} in it, which separates"
        raise UsageError(problem, hint=f"write it as {_escaped(wrong)}")
    try:
        return unquote_to_bytes(body).decode()
    except UnicodeError as error:
        problem = f"{shown(body)} is not text after its %.. are read"
        raise UsageError(problem, hint="write a percent sign as %25") from error


def written_items(items: Iterable[str]) -> str:
    """Write a list."""
    return ",".join(written_tag(each) for each in items)


def parse_items(text: str) -> tuple[str, ...]:
    """Read a list of at least one item, none of them empty. Raises `UsageError`."""
    return tuple(parse_tag(each) for each in _split(text))


def parse_words(text: str, known: tuple[str, ...]) -> tuple[str, ...]:
    """Read a list of words, each at most once. Raises `UsageError`."""
    words = parse_items(text)
    for place, word in enumerate(words):
        if word not in known:
            problem = f"{shown(word)} is none of its words{meant(word.lower(), known)}"
            raise UsageError(problem, hint=f"write some of: {', '.join(known)}")
        if word in words[:place]:
            raise UsageError(f"it has {word} twice", hint="keep one of them")
    return words


def _split(text: str) -> list[str]:
    parts = text.split(",")
    if len(parts) > _MAX_ITEMS:
        problem = f"it has {len(parts)} items, more than {_MAX_ITEMS}"
        raise UsageError(problem, hint="name fewer of them")
    if any(not each.strip() for each in parts):
        problem = "it is empty" if len(parts) == 1 else "one of its items is empty"
        raise UsageError(problem, hint="write at least one item, separated by commas")
    return parts


def _has_to_be_escaped(character: str, *, at_end: bool) -> bool:
    if character == " ":
        return at_end
    return character in _SEPARATORS or not character.isprintable()


def _escaped(character: str) -> str:
    return "".join(f"%{byte:02X}" for byte in character.encode("utf-8", "replace"))


# ---- models --------------------------------------------------------------------------------------


def written_rules(rules: Iterable[ModelRule]) -> str:
    """Write models; a name that has to be the whole one stands in quotes."""
    return ",".join(
        f'"{written_tag(each.text)}"' if each.is_exact else written_tag(each.text) for each in rules
    )


def parse_rules(text: str) -> tuple[ModelRule, ...]:
    """Read models: `A100,"Tesla T4"`. Raises `UsageError`."""
    return tuple(_rule(each.strip()) for each in _split(text))


def _rule(text: str) -> ModelRule:
    is_exact = len(text) > 1 and text[0] == text[-1] == '"'
    name = parse_tag(text[1:-1] if is_exact else text)
    if not name.strip():
        raise UsageError("a model's name is empty", hint='write some of it: A100, or "Tesla T4"')
    return ModelRule(name, is_exact=is_exact)


# ---- parts of memory -----------------------------------------------------------------------------


def part_amount(part: Fraction) -> MemoryAmount:
    """Return the amount for a part of each device, as `parse_part` would read it."""
    return MemoryAmount(written_part(part), part=part)


def written_part(part: Fraction) -> str:
    """Write a part in (0, 1] of each device: `50%`, and `1/3` where no percentage is exact."""
    percent = part * 100
    digits = 0
    rest = percent.denominator
    while rest % 2 == 0 or rest % 5 == 0:
        rest //= 10 if rest % 10 == 0 else 2 if rest % 2 == 0 else 5
        digits += 1
    if rest != 1 or digits > _MAX_DECIMALS:
        return f"{part.numerator}/{part.denominator}"
    if digits == 0:
        return f"{percent.numerator}%"
    scaled = percent * 10**digits
    whole, decimals = divmod(scaled.numerator // scaled.denominator, 10**digits)
    return f"{whole}.{decimals:0{digits}d}".rstrip("0") + "%"


def parse_part(text: str) -> MemoryAmount:
    """Read a part of each device. Raises `UsageError`."""
    body = text.strip()
    if body.endswith("%"):
        amount = parse_memory(body)
        return part_amount(amount.part) if amount.part else amount
    match = _RATIO.fullmatch(body)
    above, below = (int(match["above"]), int(match["below"])) if match else (0, 1)
    if not 0 < above <= below:
        problem = f"{shown(body)} is not a part of each GPU"
        raise UsageError(
            problem,
            hint="write percent, like 50%, or a ratio, like 1/3; an amount like 4Gi belongs to"
            " the resource allotment.dev/gpu-memory",
        )
    return part_amount(Fraction(above, below))


# ---- weights -------------------------------------------------------------------------------------


def is_weights(text: str) -> bool:
    """Is it one value of `allotment.dev/gpu-weights`, and not one for each container?"""
    return _WEIGHTS.fullmatch(text.strip()) is not None


def written_weights(weights: DeviceWeights) -> str:
    """Write what counts how much."""
    return f"shares={weights.shares},compute={weights.compute},memory={weights.memory}"


def parse_weights(text: str) -> DeviceWeights:
    """Read `shares=1,compute=1,memory=3`; what is not named counts nothing. Raises `UsageError`."""
    hint = "write whole numbers, at least one above 0: shares=1,compute=1,memory=3"
    found: dict[str, int] = {}
    for part in text.split(",") if is_weights(text) else ():
        name, _, digits = (each.strip() for each in part.partition("="))
        if name in found:
            raise UsageError(f"{name} is there twice", hint=hint)
        found[name] = int(digits) if len(digits) <= len(str(_MAX_WEIGHT)) else _MAX_WEIGHT + 1
    return weights_of(found, shown(text.strip()), hint=hint)


def weights_of(found: Mapping[str, int], text: str, *, hint: str) -> DeviceWeights:
    """Return the weights; `found` has some of `shares`, `compute`, `memory`."""
    if not any(found.values()):
        raise UsageError(f"{text} is no set of weights with one above 0", hint=hint)
    if max(found.values()) > _MAX_WEIGHT:
        raise UsageError(f"{text} has a weight above {_MAX_WEIGHT}", hint=hint)
    if min(found.values()) < 0:
        raise UsageError(f"{text} has a weight below 0", hint=hint)
    return DeviceWeights(
        shares=found.get("shares", 0),
        compute=found.get("compute", 0),
        memory=found.get("memory", 0),
    )
