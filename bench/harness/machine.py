# SPDX-License-Identifier: Apache-2.0
"""The computer that measures: what it is, at which commit, and what else it did meanwhile."""

from __future__ import annotations

import os
import platform
import resource
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

ROOT: Final = Path(__file__).resolve().parent.parent.parent
DIRTY: Final = "-dirty"
_TICKS: Final = os.sysconf("SC_CLK_TCK")


def facts() -> dict[str, str]:
    """Return what the figures of this computer depend on."""
    return {
        "machine": f"{_processor()}, {os.cpu_count()} CPUs, {platform.machine()}",
        "system": f"Linux {platform.release()}, {' '.join(platform.libc_ver())}",
        "Python": platform.python_version(),
    }


def commit() -> str:
    """Return the commit of the working tree, with `-dirty` where tracked files differ from it."""
    try:
        name = _git("rev-parse", "--short=12", "HEAD")
        changed = _git("status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"  # an unpacked archive is as good a place to measure
    return name + DIRTY * bool(changed)


def has_commit(name: str) -> bool:
    """Return whether the repository has a commit of that name."""
    try:
        _git("cat-file", "-e", f"{name}^{{commit}}")
    except (OSError, subprocess.CalledProcessError):
        return False
    return True


def cpu_seconds(pid: int) -> float:
    """Return the user and system time of a process."""
    # "pid (name) state ...", and a name may hold anything.
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def _git(*words: str) -> str:
    return subprocess.run(
        ["git", "-C", str(ROOT), *words], check=True, capture_output=True, text=True
    ).stdout.strip()


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return "unknown processor"


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
        line = Path("/proc/stat").read_text(encoding="utf-8").partition("\n")[0]
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

    def use_since(self, before: Processors) -> str:
        """Return which part the bench and other programs used since then."""
        total = max(self.total - before.total, 1e-9)
        own = (self.own - before.own) / total
        others = max(0.0, (self.everybody - before.everybody) / total - own)
        niceness = os.getpriority(os.PRIO_PROCESS, 0)
        at = f" at nice {niceness}" if niceness else ""
        return f"{own:.0%} used by the bench{at}, {others:.0%} by others"
