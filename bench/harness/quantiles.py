# SPDX-License-Identifier: Apache-2.0
"""The one definition of a quantile: the smallest value that this part of the values do not exceed.

No interpolation, so that each figure was really measured. The C programs report their own
quantiles (programs/lanes.c).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """A distribution in one unit. None: the program that measured does not report it."""

    p50: float
    p99: float
    min: float | None = None
    max: float | None = None
    n: int | None = None

    def scaled(self, factor: float) -> Summary:
        """Convert to another unit."""
        return Summary(
            p50=self.p50 * factor,
            p99=self.p99 * factor,
            min=None if self.min is None else self.min * factor,
            max=None if self.max is None else self.max * factor,
            n=self.n,
        )


def quantile(values: Sequence[float], part: float) -> float:
    """Return the smallest value that `part` of the values do not exceed."""
    return sorted(values)[max(0, math.ceil(part * len(values)) - 1)]


def summarize(values: Sequence[float]) -> Summary:
    """Summarize the samples."""
    return Summary(
        p50=quantile(values, 0.5),
        p99=quantile(values, 0.99),
        min=min(values),
        max=max(values),
        n=len(values),
    )
