# SPDX-License-Identifier: Apache-2.0
"""Which parts of the compute benches to run, and how long each scene takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Self

from allotment.model.errors import UsageError
from bench.harness.options import Options

_MOST_CAPS: Final = 5
CAPS: Final = (10, 30, 50, 70, 90)
# Nanoseconds, as load.c takes them. Of mixed and varying kernels each length has the same part of
# the time; mixed ones are different functions, varying ones are one function called differently.
KERNELS: Final = {
    "20us": "20000",
    "200us": "200000",
    "2ms": "2000000",
    "20ms": "20000000",
    "mixed": "20000,200000,2000000,20000000",
    "varying": "20000,200000,2000000,20000000",
}
# Options of load.c, and how many processes.
PATTERNS: Final[dict[str, tuple[tuple[str, ...], int]]] = {
    "stream": ((), 1),
    "streams": (("--streams", "4"), 1),
    "threads": (("--threads", "4"), 1),
    "graph": (("--graph", "1000"), 1),
    "processes": ((), 4),
    "quarters": (("--streams", "4", "--fills-one-in", "4"), 1),
}
# What is asked of one pattern and one split alone.
VARYING: Final = "varying"
# Patterns that are asked for kernels of one length alone, as far as that is asked for.
ONLY_KERNELS: Final = {"graph": "20us", "quarters": "200us"}
SPLITS: Final = ((30, 70), (10, 90), (33, 33, 33), (20, 20, 20, 20, 20), (5, 5, 90))


def kernel_words(name: str) -> list[str]:
    """Return load.c's words for kernels of that name."""
    return ["--kernels", KERNELS[name], *(["--one-function"] if name == VARYING else [])]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """All of a bench, or the part that is being worked on."""

    quick: bool = False
    caps: Sequence[int] = CAPS
    kernels: Sequence[str] = tuple(KERNELS)
    patterns: Sequence[str] = tuple(PATTERNS)
    splits: Sequence[Sequence[int]] = SPLITS

    @classmethod
    def of(cls, options: Options) -> Self:
        """Return what the command line chose; UsageError for an unknown name."""
        for name, chosen, known in (
            ("--kernels", options.kernels, tuple(KERNELS)),
            ("--patterns", options.patterns, tuple(PATTERNS)),
        ):
            unknown = [each for each in chosen or () if each not in known]
            if unknown:
                message = f"{name}: no {', '.join(unknown)}"
                raise UsageError(message, hint=f"choose from {', '.join(known)}")
        return cls(
            quick=options.is_quick,
            caps=tuple(options.caps or (CAPS[1:2] if options.is_quick else CAPS))[:_MOST_CAPS],
            kernels=options.kernels or (("200us",) if options.is_quick else tuple(KERNELS)),
            patterns=options.patterns or (("stream",) if options.is_quick else tuple(PATTERNS)),
            splits=options.splits or (SPLITS[:1] if options.is_quick else SPLITS),
        )

    @property
    def window_seconds(self) -> float:
        """How long a ceiling's window is."""
        return 0.5 if self.quick else 2.0

    @property
    def capped_seconds(self) -> float:
        """How long a scene with a ceiling is, the first second included."""
        return 1.7 if self.quick else 4.2

    @property
    def split_seconds(self) -> float:
        """How long a contended scene is measured, after its first second."""
        return 1.0 if self.quick else 5.0

    @property
    def brief_seconds(self) -> float:
        """How long short processes run one after the other."""
        return 1.5 if self.quick else 5.0

    @property
    def long_seconds(self) -> float:
        """How long the windows are in which kernels of 500 ms are measured."""
        return 2.0 if self.quick else 10.0

    @property
    def service_seconds(self) -> float:
        """How long a service answers requests."""
        return 2.0 if self.quick else 20.0

    @property
    def wakes(self) -> int:
        """How often a sleeping neighbour wakes."""
        return 1 if self.quick else 3

    @property
    def pairs(self) -> int:
        """Bursts of launches to time."""
        return 300 if self.quick else 5000

    @property
    def starts(self) -> int:
        """Shares to start and stop."""
        return 6 if self.quick else 200

    @property
    def job_ms(self) -> int:
        """GPU time of each of two jobs that do not fit together."""
        return 1000 if self.quick else 10_000
