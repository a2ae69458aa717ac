# SPDX-License-Identifier: Apache-2.0
"""A histogram of durations with bounded size and bounded relative error.

A burn may run for days and in many processes, so samples are not kept: each falls into one of 64
buckets an octave, which makes a quantile wrong by at most 0.6 % (and half a nanosecond), and
histograms of several processes add up exactly.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

_BUCKETS_PER_OCTAVE = 64


@dataclass(slots=True)
class Latencies:
    """Durations in nanoseconds, counted by bucket."""

    counts: dict[int, int] = field(default_factory=dict)
    largest_ns: int = 0

    def add(self, nanoseconds: int) -> None:
        """Count one duration; zero and less count as one nanosecond."""
        duration = max(1, nanoseconds)
        self._count(round(math.log2(duration) * _BUCKETS_PER_OCTAVE), 1)
        self.largest_ns = max(self.largest_ns, duration)

    def merge(self, other: Latencies) -> None:
        """Add another histogram's counts to this one's."""
        for bucket, count in other.counts.items():
            self._count(bucket, count)
        self.largest_ns = max(self.largest_ns, other.largest_ns)

    def quantile_ns(self, fraction: float) -> int | None:
        """Tell the duration that `fraction` (0 to 1) of the samples do not exceed; None if none."""
        total = sum(self.counts.values())
        if total == 0:
            return None
        rank = max(1, math.ceil(fraction * total))
        seen = 0
        for bucket in sorted(self.counts):
            seen += self.counts[bucket]
            if seen >= rank:
                # The largest sample is known exactly, and no quantile may pass it.
                return min(round(2 ** (bucket / _BUCKETS_PER_OCTAVE)), self.largest_ns)
        return self.largest_ns

    def _count(self, bucket: int, count: int) -> None:
        self.counts[bucket] = self.counts.get(bucket, 0) + count
