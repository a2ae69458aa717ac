# SPDX-License-Identifier: Apache-2.0
"""How much else this computer did: figures that were made on a busy one should say so."""

from __future__ import annotations

import os
import resource
from dataclasses import dataclass
from pathlib import Path
from typing import Self

_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True, kw_only=True)
class Processors:
    """Processor time since the computer started, in seconds, of all processors together."""

    everybody: float
    """In use."""
    own: float
    """Of it, by this process and by those that it started and that have ended."""
    total: float
    """In use or not."""

    @classmethod
    def now(cls) -> Self:
        """Read the kernel's accounts."""
        line = Path("/proc/stat").read_text().partition("\n")[0]
        # user, nice, system, idle, iowait, irq, softirq, steal (guests are in user)
        ticks = [int(word) for word in line.split()[1:9]]
        idle = ticks[3] + ticks[4]
        usages = (
            resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
        )
        return cls(
            everybody=(sum(ticks) - idle) / _TICKS,
            own=sum(usage.ru_utime + usage.ru_stime for usage in usages),
            total=sum(ticks) / _TICKS,
        )

    def tell_since(self, before: Processors) -> str:
        """Say who used the processors since then."""
        total = max(self.total - before.total, 1e-9)
        own = (self.own - before.own) / total
        others = max(0.0, (self.everybody - before.everybody) / total - own)
        niceness = os.getpriority(os.PRIO_PROCESS, 0)
        at = f" at nice {niceness}" if niceness else ""
        return f"{own:.0%} used by the bench{at}, {others:.0%} by others"


def load_average() -> float:
    """Tell how many programs want a processor."""
    return os.getloadavg()[0]
