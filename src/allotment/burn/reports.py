# SPDX-License-Identifier: Apache-2.0
"""A burn's plan, its report with sums over processes, and the stable JSON document.

`DOCUMENT` describes the fields, and `allot burn --help` prints it. Later versions may add fields;
the meaning of a field never changes within one `version`.
"""

from __future__ import annotations

import math
from collections import Counter
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final

import msgspec

from allotment.burn.drivers import OUT_OF_MEMORY, MemoryInfo
from allotment.model.errors import UsageError
from allotment.model.formats import format_bytes, format_count, format_duration

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


_BUCKETS_PER_OCTAVE = 64


class BurnPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The work of each process of a burn; sizes in bytes, per process.

    `memory_fraction` (0 to 1) is a part of the device's memory as the driver reports it, used if
    `memory_bytes` is 0. `kernel_ns` 0 runs no kernels: the memory is held for `seconds`.
    `graph_nodes` 0 launches single kernels, else graphs of that many kernels in a row.
    `launches` above 0 ends after that many launches; else `seconds` ends the work.
    `rate` above 0 launches at this rate per second, like requests to a service; else each launch
    follows the end of the one before.
    """

    memory_bytes: int = 0
    memory_fraction: float = 0.0
    chunk_bytes: int = 64 << 20
    api: str = "plain"
    touch: bool = False
    kernel_ns: int = 2_000_000
    graph_nodes: int = 0
    streams: int = 1
    processes: int = 1
    seconds: float = 5.0
    launches: int = 0
    rate: float = 0.0
    device: int = 0

    def __post_init__(self) -> None:
        if self.touch and self.api == "array":
            raise UsageError("--touch: arrays have no address to write to", hint="remove --touch")
        if self.graph_nodes and not self.kernel_ns:
            raise UsageError("a graph needs kernels", hint="remove --kernel 0 or --graph")
        if (self.launches or self.rate) and not self.kernel_ns:
            raise UsageError(
                "launches need kernels", hint="remove --kernel 0, or --launches and --rate"
            )
        if self.rate and self.streams > 1:
            raise UsageError(
                "--rate uses one stream: requests run one after the other",
                hint="remove --streams or --rate",
            )

    @property
    def kernels_per_launch(self) -> int:
        return max(1, self.graph_nodes)


class Latencies(msgspec.Struct):
    """A histogram of durations in nanoseconds."""

    counts: dict[int, int] = msgspec.field(default_factory=dict)
    largest_ns: int = 0

    def add(self, nanoseconds: int) -> None:
        """Count one duration; zero and less count as 1 ns."""
        duration = max(1, nanoseconds)
        self._count(round(math.log2(duration) * _BUCKETS_PER_OCTAVE), 1)
        self.largest_ns = max(self.largest_ns, duration)

    def merge(self, other: Latencies) -> None:
        for bucket, count in other.counts.items():
            self._count(bucket, count)
        self.largest_ns = max(self.largest_ns, other.largest_ns)

    def quantile_ns(self, fraction: float) -> int | None:
        """Return the nearest-rank quantile, `fraction` from 0 to 1; None without samples."""
        total = sum(self.counts.values())
        if total == 0:
            return None
        rank = max(1, math.ceil(fraction * total))
        counted = 0
        for bucket in sorted(self.counts):
            counted += self.counts[bucket]
            if counted >= rank:
                # The largest sample is exact, and no quantile may exceed it.
                return min(round(2 ** (bucket / _BUCKETS_PER_OCTAVE)), self.largest_ns)
        return self.largest_ns

    def _count(self, bucket: int, count: int) -> None:
        self.counts[bucket] = self.counts.get(bucket, 0) + count


VERSION: Final = 1

DOCUMENT: Final = """\
version         1
plan            the options, per process: memory_bytes, memory_fraction,
                chunk_bytes, api, touch, kernel_ns, graph_nodes, streams,
                processes, seconds, launches, rate, device
asked_bytes     memory requested, all processes
got_bytes       memory that the driver granted, all processes
launches        finished launches (of kernels, or of graphs with --graph)
kernels         finished kernels
event_seconds   time between the event before and the event after each
                launch, summed; includes waits for the work of other
                programs
wall_seconds    the longest time that a process spent launching
latency_us      p50, p99 and max from before a launch (with --rate: from its
                due time, if the one before was late) until its end was
                observed; null without launches
interrupted     true if a signal ended the burn early
errors          number of errors, refusals included
processes       per process: pid, device (ordinal, uuid, name, total_bytes,
                multiprocessors available to this process), asked_bytes,
                got_bytes, memory_before and memory_after (cuMemGetInfo
                after the creation of the context, and after the last
                allocation: free_bytes, total_bytes; null if not reached),
                launches, kernels, event_seconds, wall_seconds, latency_us,
                interrupted, errors (code, name, call, at_bytes: memory held
                by the process at that time)
"""


class BurnError(msgspec.Struct, frozen=True, kw_only=True):
    """One error: the CUresult (0 if not from the driver), and the bytes held at that time."""

    code: int
    name: str
    call: str
    at_bytes: int

    @property
    def is_refusal(self) -> bool:
        return self.code == OUT_OF_MEMORY


class BurnDevice(msgspec.Struct, frozen=True, kw_only=True):
    """The device as the driver reports it to this process."""

    ordinal: int
    uuid: str
    name: str
    total_bytes: int
    multiprocessors: int
    """Available to this process: in mode mps a part of those of the GPU."""


class ProcessReport(msgspec.Struct, kw_only=True):
    """The work of one process; filled as it proceeds, so that an interrupt loses nothing."""

    pid: int
    device: BurnDevice | None = None
    asked_bytes: int = 0
    got_bytes: int = 0
    memory_before: MemoryInfo | None = None
    memory_after: MemoryInfo | None = None
    launches: int = 0
    kernels: int = 0
    event_seconds: float = 0.0
    wall_seconds: float = 0.0
    latencies: Latencies = msgspec.field(default_factory=Latencies)
    interrupted: bool = False
    errors: list[BurnError] = msgspec.field(default_factory=list)


class BurnReport(msgspec.Struct, frozen=True, kw_only=True):
    """The work of all processes; `ended_by` is the signal that ended it early, if any."""

    plan: BurnPlan
    processes: Sequence[ProcessReport]
    ended_by: int | None = None

    @property
    def errors(self) -> list[BurnError]:
        return [error for process in self.processes for error in process.errors]

    @property
    def was_interrupted(self) -> bool:
        return self.ended_by is not None or any(process.interrupted for process in self.processes)

    @property
    def was_refused(self) -> bool:
        """Whether there are errors, and all are refusals of memory."""
        return bool(self.errors) and all(error.is_refusal for error in self.errors)

    def latencies(self) -> Latencies:
        merged = Latencies()
        for process in self.processes:
            merged.merge(process.latencies)
        return merged

    def to_document(self) -> dict[str, Any]:
        return {
            "version": VERSION,
            "plan": msgspec.structs.asdict(self.plan),
            "asked_bytes": sum(process.asked_bytes for process in self.processes),
            "got_bytes": sum(process.got_bytes for process in self.processes),
            "launches": sum(process.launches for process in self.processes),
            "kernels": sum(process.kernels for process in self.processes),
            "event_seconds": round(sum(process.event_seconds for process in self.processes), 6),
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
    fields = msgspec.to_builtins(process)
    fields["event_seconds"] = round(process.event_seconds, 6)
    fields["wall_seconds"] = round(process.wall_seconds, 6)
    fields["latencies"] = _latency_document(process.latencies)
    return {"latency_us" if name == "latencies" else name: fields[name] for name in fields}


def report_lines(report: BurnReport) -> Iterator[str]:
    """Yield the lines of the report: the sum over processes, then each of several processes."""
    yield from _devices(report)
    yield from _memory(report)
    yield from _kernels(report)
    yield from _errors(report)
    if len(report.processes) > 1:
        for process in report.processes:
            yield _process(process)
    if report.was_interrupted:
        yield "stopped   early, by a signal"


def _devices(report: BurnReport) -> Iterator[str]:
    devices = {process.device for process in report.processes if process.device is not None}
    for device in sorted(devices, key=attrgetter("uuid")):
        total = format_bytes(device.total_bytes)
        multiprocessors = format_count(device.multiprocessors, "multiprocessor")
        yield f"device    {device.name}, {device.uuid}, {total}, {multiprocessors} (by the driver)"


def _memory(report: BurnReport) -> Iterator[str]:
    asked = sum(process.asked_bytes for process in report.processes)
    got = sum(process.got_bytes for process in report.processes)
    if asked:
        yield f"memory    got {format_bytes(got)} of {format_bytes(asked)} ({report.plan.api})"
    if len(report.processes) == 1:
        before, after = report.processes[0].memory_before, report.processes[0].memory_after
        if before is not None and after is not None:
            yield (
                f"free      {format_bytes(before.free_bytes)} before, "
                f"{format_bytes(after.free_bytes)} after, of {format_bytes(after.total_bytes)}"
            )


def _kernels(report: BurnReport) -> Iterator[str]:
    kernels = sum(process.kernels for process in report.processes)
    if not kernels:
        return
    event_seconds = sum(process.event_seconds for process in report.processes)
    wall_seconds = max(process.wall_seconds for process in report.processes)
    yield (
        f"kernels   {kernels} of {format_duration(report.plan.kernel_ns)} in "
        f"{wall_seconds:.1f}s, {event_seconds:.1f}s between events, waits included"
    )
    yield f"latency   {_latency(report.latencies())}"


def _errors(report: BurnReport) -> Iterator[str]:
    counts = Counter(
        f"{error.name} from {error.call} at {format_bytes(error.at_bytes)}"
        for error in report.errors
    )
    for text, count in counts.items():
        yield f"error     {text}" + (f" ({count} times)" if count > 1 else "")


def _process(process: ProcessReport) -> str:
    parts = [f"process   {process.pid}:"]
    if process.asked_bytes:
        parts.append(f"{format_bytes(process.got_bytes)} of {format_bytes(process.asked_bytes)},")
    parts.append(format_count(process.kernels, "kernel"))
    if process.latencies.counts:
        parts.append(f"({_latency(process.latencies)})")
    parts += [error.name for error in process.errors]
    return " ".join(parts)


def _latency(latencies: Latencies) -> str:
    median, high = latencies.quantile_ns(0.5) or 0, latencies.quantile_ns(0.99) or 0
    return (
        f"p50 {format_duration(median)}, p99 {format_duration(high)}, "
        f"max {format_duration(latencies.largest_ns)}"
    )
