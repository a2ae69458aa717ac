# SPDX-License-Identifier: Apache-2.0
"""Formats amounts in the units that `quantities` parses, and texts for a terminal."""

import time
from collections.abc import Collection, Iterable

BINARY_UNITS = {f"{prefix}i": 1024 ** (power + 1) for power, prefix in enumerate("KMGTP")}
MEMORY_UNITS = {
    "": 1,
    **BINARY_UNITS,
    **{prefix: 1000 ** (power + 1) for power, prefix in enumerate("kMGTP")},
}
"""Bytes in one of each unit."""

DURATION_UNITS = {
    "ns": 1,
    "us": 10**3,
    "ms": 10**6,
    "s": 10**9,
    "m": 60 * 10**9,
    "h": 3600 * 10**9,
}
"""Nanoseconds in one of each unit."""


def format_uuid(kind: str, digits: str) -> str:
    """A UUID as NVML writes it: `GPU-` or `MIG-`, then the first 32 hexadecimal digits."""
    parts = (digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:32])
    return f"{kind}-{'-'.join(parts)}"


UNKNOWN = "-"
"""Shown in place of an amount."""


def format_bytes(size: float | None) -> str:
    """In the largest unit that keeps at least one whole: `4Gi`, `79.2Gi`, `512Mi`."""
    if size is None:
        return UNKNOWN
    size = round(size)
    for unit, factor in reversed(BINARY_UNITS.items()):
        if abs(size) >= factor:
            if size % factor == 0:
                return f"{size // factor}{unit}"
            return f"{size / factor:.1f}".removesuffix(".0") + unit
    return f"{size}B"


def format_apart(need: int, have: int) -> tuple[str, str]:
    """Format both sizes; in bytes if rounding would hide their difference."""
    texts = format_bytes(need), format_bytes(have)
    return texts if need == have or texts[0] != texts[1] else (f"{need}B", f"{have}B")


def need_and_have(need: int, have: int) -> str:
    """The text of each refusal for memory: `need 40Gi, have 39.6Gi`."""
    return "need {}, have {}".format(*format_apart(need, have))


def format_count(number: int, word: str, words: str | None = None) -> str:
    """`1 process`, `2 processes` (`words`; default: with an s)."""
    return f"{number} {word if number == 1 else words or word + 's'}"


def format_duration(nanoseconds: float) -> str:
    for unit in ("s", "ms", "us"):
        factor = DURATION_UNITS[unit]
        if abs(nanoseconds) >= factor:
            return f"{nanoseconds / factor:.1f}".removesuffix(".0") + unit
    return f"{nanoseconds:.0f}ns"


def utc(seconds: float) -> str:
    """Write a time (seconds after the epoch) as RFC 3339, in UTC."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))


def format_part(part: float | None) -> str:
    """A part of one, in percent: `30 %`."""
    return UNKNOWN if part is None else f"{part * 100:.0f} %"


def format_percent(basis_points: int) -> str:
    """Percent without the sign: `30`, `12.5`, `0.01`."""
    return f"{basis_points / 100:.2f}".rstrip("0").rstrip(".")


_MOST_PIDS = 8


def format_pids(pids: Collection[int]) -> str:
    """Write the first processes of several: `17, 18`, or `1, 2, 3, 4, 5, 6, 7, 8 and 3 more`."""
    shown = ", ".join(map(str, sorted(pids)[:_MOST_PIDS]))
    return f"{shown} and {len(pids) - _MOST_PIDS} more" if len(pids) > _MOST_PIDS else shown


def shortened(text: str, most: int) -> str:
    """The text with at most that many characters; a cut one ends with `...`."""
    return text if len(text) <= most else f"{text[: most - 3]}..."


def meant(word: str, known: Iterable[str]) -> str:
    """The closest known word, as ` (did you mean ...?)`; empty: none is close."""
    from difflib import get_close_matches  # late: only mistakes need it

    close = get_close_matches(word, list(known), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def printable(text: str) -> str:
    r"""Replace control characters, which could change the terminal.

    What is no character, as in a file's name that is not UTF-8, is escaped: `\udcff`.
    """
    if text.isprintable():
        return text
    shown = text.encode(errors="backslashreplace").decode()
    return "".join(character if character.isprintable() else " " for character in shown)


def printable_lines(text: str) -> str:
    """Replace the control characters of each line."""
    return "\n".join(map(printable, text.split("\n")))
