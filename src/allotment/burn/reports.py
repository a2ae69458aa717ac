# SPDX-License-Identifier: Apache-2.0
"""What a burn reports: values, their sums over processes, and the stable JSON document.

The document's fields are described in `DOCUMENT`, which `allot burn --help` prints; fields may be
added in later versions, and the meaning of a field never changes under the same `version`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from allotment.burn.drivers import OUT_OF_MEMORY, MemoryInfo
from allotment.burn.latencies import Latencies

if TYPE_CHECKING:
    from collections.abc import Sequence

    from allotment.burn.plans import BurnPlan

VERSION: Final = 1

DOCUMENT: Final = """\
version         1
plan            what was asked, of each process: memory_bytes, memory_fraction, chunk_bytes, api,
                touch, kernel_ns, graph_nodes, streams, processes, seconds, launches, rate, device
asked_bytes     memory asked for, all processes
got_bytes       memory that the driver granted, all processes
launches        finished launches (of kernels, or of graphs with --graph)
kernels         finished kernels
gpu_seconds     time between the event before and the event after each launch, summed; what it
                waited for other programs' work in between is in it
wall_seconds    the longest time that a process spent in launching
latency_us      p50, p99 and max from before a launch (with --rate: from when it was due, if the one
                before was late) until its end was seen; null without launches
interrupted     true when a signal ended the burn early
errors          number of errors, refusals included
processes       per process: pid, device (ordinal, uuid, name, total_bytes, multiprocessors: as many
                as this process may have), asked_bytes, got_bytes, memory_before and memory_after
                (what cuMemGetInfo told after the context was made, and after the last allocation:
                free_bytes, total_bytes; null when it was not reached), launches, kernels,
                gpu_seconds, wall_seconds, latency_us, interrupted, errors (code, name, call,
                at_bytes: what the process held at that moment)
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class BurnError:
    """One error: the CUresult (0 for what is not the driver's), and the bytes held then."""

    code: int
    name: str
    call: str
    at_bytes: int

    @property
    def is_refusal(self) -> bool:
        """Tell whether this is the driver's word for too little memory."""
        return self.code == OUT_OF_MEMORY


@dataclass(frozen=True, slots=True, kw_only=True)
class BurnDevice:
    """The device as the driver describes it to this process."""

    ordinal: int
    uuid: str
    name: str
    total_bytes: int
    multiprocessors: int
    """Those that this process has: a part of the GPU's in a share of mode mps."""


@dataclass(slots=True, kw_only=True)
class ProcessReport:
    """What one process did; filled while it works, so that an interrupted one has its part."""

    pid: int
    device: BurnDevice | None = None
    asked_bytes: int = 0
    got_bytes: int = 0
    memory_before: MemoryInfo | None = None
    memory_after: MemoryInfo | None = None
    launches: int = 0
    kernels: int = 0
    gpu_seconds: float = 0.0
    wall_seconds: float = 0.0
    latencies: Latencies = field(default_factory=Latencies)
    interrupted: bool = False
    errors: list[BurnError] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class BurnReport:
    """What all processes of a burn did; `ended_by` is the signal that ended it early, if any."""

    plan: BurnPlan
    processes: Sequence[ProcessReport]
    ended_by: int | None = None

    @property
    def errors(self) -> list[BurnError]:
        """List the errors of all processes."""
        return [error for process in self.processes for error in process.errors]

    @property
    def was_interrupted(self) -> bool:
        """Tell whether a signal ended the burn early."""
        return self.ended_by is not None or any(process.interrupted for process in self.processes)

    @property
    def was_refused(self) -> bool:
        """Tell whether every error is a lack of memory, and there is one."""
        return bool(self.errors) and all(error.is_refusal for error in self.errors)

    def latencies(self) -> Latencies:
        """Add up the histograms of all processes."""
        merged = Latencies()
        for process in self.processes:
            merged.merge(process.latencies)
        return merged

    def to_document(self) -> dict[str, Any]:
        """Give the JSON document that `DOCUMENT` describes."""
        return {
            "version": VERSION,
            "plan": {name: getattr(self.plan, name) for name in self.plan.__dataclass_fields__},
            "asked_bytes": sum(process.asked_bytes for process in self.processes),
            "got_bytes": sum(process.got_bytes for process in self.processes),
            "launches": sum(process.launches for process in self.processes),
            "kernels": sum(process.kernels for process in self.processes),
            "gpu_seconds": round(sum(process.gpu_seconds for process in self.processes), 6),
            "wall_seconds": round(
                max((process.wall_seconds for process in self.processes), default=0.0), 6
            ),
            "latency_us": _latency_document(self.latencies()),
            "interrupted": self.was_interrupted,
            "errors": len(self.errors),
            "processes": [_process_document(process) for process in self.processes],
        }


def _latency_document(latencies: Latencies) -> dict[str, float] | None:
    median, high = latencies.quantile_ns(0.5), latencies.quantile_ns(0.99)
    if median is None or high is None:
        return None
    return {
        "p50": median / 1000,
        "p99": high / 1000,
        "max": latencies.largest_ns / 1000,
    }


def _process_document(process: ProcessReport) -> dict[str, Any]:
    return {
        "pid": process.pid,
        "device": _fields(process.device),
        "asked_bytes": process.asked_bytes,
        "got_bytes": process.got_bytes,
        "memory_before": _fields(process.memory_before),
        "memory_after": _fields(process.memory_after),
        "launches": process.launches,
        "kernels": process.kernels,
        "gpu_seconds": round(process.gpu_seconds, 6),
        "wall_seconds": round(process.wall_seconds, 6),
        "latency_us": _latency_document(process.latencies),
        "interrupted": process.interrupted,
        "errors": [_fields(error) for error in process.errors],
    }


def _fields(value: BurnDevice | MemoryInfo | BurnError | None) -> dict[str, Any] | None:
    if value is None:
        return None
    return {name: getattr(value, name) for name in value.__dataclass_fields__}
