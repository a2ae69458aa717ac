# SPDX-License-Identifier: Apache-2.0
"""A burn's report as lines of text for people."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from allotment.model.formats import format_bytes, format_count, format_duration

if TYPE_CHECKING:
    from collections.abc import Iterator

    from allotment.burn.latencies import Latencies
    from allotment.burn.reports import BurnReport, ProcessReport


def tell(report: BurnReport) -> Iterator[str]:
    """Yield the report's lines; several processes are summed first and then told apart."""
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
    seen = {process.device for process in report.processes if process.device is not None}
    for device in sorted(seen, key=lambda each: each.uuid):
        total = format_bytes(device.total_bytes)
        parts = format_count(device.multiprocessors, "multiprocessor")
        yield f"device    {device.name}, {device.uuid}, {total} and {parts} says the driver"


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
    gpu_seconds = sum(process.gpu_seconds for process in report.processes)
    wall_seconds = max(process.wall_seconds for process in report.processes)
    yield (
        f"kernels   {kernels} of {format_duration(report.plan.kernel_ns)} in "
        f"{wall_seconds:.1f}s, {gpu_seconds:.1f}s between its events, waits included"
    )
    yield f"latency   {_latency(report.latencies())}"


def _errors(report: BurnReport) -> Iterator[str]:
    told = Counter(
        f"{error.name} from {error.call} at {format_bytes(error.at_bytes)}"
        for error in report.errors
    )
    for text, count in told.items():
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
