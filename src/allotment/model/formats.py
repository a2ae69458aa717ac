# SPDX-License-Identifier: Apache-2.0
"""Amounts as Allotment shows them, in the units that `quantities` reads."""

__all__ = [
    "BINARY_UNITS",
    "DURATION_UNITS",
    "MEMORY_UNITS",
    "format_bytes",
    "format_count",
    "format_duration",
    "format_percent",
]

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


def format_bytes(size: int) -> str:
    """Write bytes in the largest unit that keeps at least one whole: `4Gi`, `79.2Gi`, `512Mi`."""
    for unit, factor in reversed(BINARY_UNITS.items()):
        if abs(size) >= factor:
            if size % factor == 0:
                return f"{size // factor}{unit}"
            return f"{size / factor:.1f}".removesuffix(".0") + unit
    return f"{size}B"


def format_count(number: int, word: str, words: str | None = None) -> str:
    """Write how many there are: `1 process`, `2 processes` (`words`; by default with an s)."""
    return f"{number} {word if number == 1 else words or word + 's'}"


def format_duration(nanoseconds: float) -> str:
    """Write a duration: `250us`, `2ms`, `1.5s`."""
    for unit in ("s", "ms", "us"):
        factor = DURATION_UNITS[unit]
        if abs(nanoseconds) >= factor:
            return f"{nanoseconds / factor:.1f}".removesuffix(".0") + unit
    return f"{nanoseconds:.0f}ns"


def format_percent(basis_points: int) -> str:
    """Write basis points as percent, without the sign: `30`, `12.5`, `0.01`."""
    return f"{basis_points / 100:.2f}".rstrip("0").rstrip(".")
