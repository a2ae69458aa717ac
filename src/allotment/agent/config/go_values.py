# SPDX-License-Identifier: Apache-2.0
"""Flags and environment as NVIDIA's programs take them: the syntax of Go and of urfave/cli.

Whoever comes from NVIDIA's plugin has manifests full of these, so `t`, `1m30s` and a comma with
spaces around it mean here what they mean there. Errors are `QuantityError`s and `UsageError`s
without the place, which the caller knows.
"""

import re
from collections.abc import Sequence
from decimal import Decimal
from typing import Final

from allotment.model.errors import QuantityError, UsageError
from allotment.model.formats import DURATION_UNITS

__all__ = [
    "INFINITE",
    "parse_bool",
    "parse_duration",
    "parse_interval",
    "parse_list",
    "parse_numbers",
]

INFINITE: Final = "infinite"
"""What `gfd.sleepInterval` may be besides a duration."""

# strconv.ParseBool
_BOOLS: Final = {
    **dict.fromkeys(("1", "t", "T", "TRUE", "true", "True"), True),
    **dict.fromkeys(("0", "f", "F", "FALSE", "false", "False"), False),
}
# time.ParseDuration, with both letters that stand for micro.
_PIECE: Final = re.compile(r"([0-9]+\.?[0-9]*|\.[0-9]+)(ns|us|µs|μs|ms|s|m|h)", re.ASCII)
_DURATION: Final = re.compile(rf"(?:{_PIECE.pattern})+", re.ASCII)
_LONGEST_TEXT: Final = 64
_LONGEST_S: Final = (2**63 - 1) / 10**9


def parse_bool(text: str) -> bool:
    """Parse what Go takes as a bool; an empty text is false, as urfave/cli has it."""
    if not text:
        return False
    if text not in _BOOLS:
        raise UsageError(f"{text!r} is neither true nor false", hint="write true or false")
    return _BOOLS[text]


def parse_list(texts: Sequence[str]) -> tuple[str, ...]:
    """Parse values with commas between them, given once or several times; no value twice."""
    values = (value.strip() for text in texts for value in text.split(","))
    return tuple(dict.fromkeys(value for value in values if value))


def parse_numbers(texts: Sequence[str]) -> tuple[int, ...]:
    """Parse whole numbers with commas between them."""
    values = parse_list(texts)
    for value in values:
        if not re.fullmatch(r"[-+]?[0-9]{1,18}", value, re.ASCII):
            raise UsageError(f"{value!r} is not a whole number")
    return tuple(int(value) for value in values)


def parse_interval(text: str) -> float | None:
    """Parse an interval (`90s`, `1m30s`, `1.5h`) into seconds; `infinite` is None."""
    if text == INFINITE:
        return None
    hint = f"write a duration with units, like 60s or 1m30s, or {INFINITE}"
    seconds = _seconds(text, hint)
    if not 0 < seconds <= _LONGEST_S:
        problem = "it is zero" if not seconds else "it is too long"
        raise QuantityError(f"{text!r} is not an interval: {problem}", hint=hint)
    return seconds


def parse_duration(text: str, *, most_s: float) -> float:
    """Parse how long something is (`5m`, `0s`) into seconds, up to `most_s`."""
    hint = "write a duration with units, like 30s or 5m"
    seconds = _seconds(text, hint)
    if seconds > most_s:
        raise QuantityError(f"{text!r} is too long: {most_s / 3600:g}h at most", hint=hint)
    return seconds


def _seconds(text: str, hint: str) -> float:
    if len(text) > _LONGEST_TEXT or not _DURATION.fullmatch(text):
        shown = text[:_LONGEST_TEXT]
        raise QuantityError(f"{shown!r} is not a duration", hint=hint)
    nanoseconds = sum(
        Decimal(number) * DURATION_UNITS[unit.replace("µ", "u").replace("μ", "u")]
        for number, unit in _PIECE.findall(text)
    )
    return float(nanoseconds / 10**9)
