# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import re

import msgspec
import pytest

from allotment.burn.drivers import MemoryInfo
from allotment.burn.reports import (
    DOCUMENT,
    BurnDevice,
    BurnError,
    BurnPlan,
    BurnReport,
    Latencies,
    ProcessReport,
    report_lines,
)

GIB = 1 << 30
REFUSAL = BurnError(code=2, name="CUDA_ERROR_OUT_OF_MEMORY", call="cuMemAlloc", at_bytes=GIB)
FAULT = BurnError(code=719, name="CUDA_ERROR_LAUNCH_FAILED", call="cuEventSynchronize", at_bytes=0)
DEVICE = BurnDevice(
    ordinal=0, uuid="GPU-1", name="NVIDIA T4", total_bytes=4 * GIB, multiprocessors=40
)


def process(pid: int, *errors: BurnError) -> ProcessReport:
    latencies = Latencies()
    for duration in (2_000_000, 2_100_000, 9_000_000):
        latencies.add(duration)
    return ProcessReport(
        pid=pid,
        device=DEVICE,
        asked_bytes=3 * GIB,
        got_bytes=GIB,
        memory_before=MemoryInfo(free_bytes=4 * GIB, total_bytes=4 * GIB),
        memory_after=MemoryInfo(free_bytes=3 * GIB, total_bytes=4 * GIB),
        launches=3,
        kernels=6,
        event_seconds=0.25,
        wall_seconds=0.5,
        latencies=latencies,
        errors=list(errors),
    )


def report(*processes: ProcessReport, ended_by: int | None = None) -> BurnReport:
    return BurnReport(plan=BurnPlan(memory_bytes=3 * GIB), processes=processes, ended_by=ended_by)


def test_the_document_sums_the_processes() -> None:
    document = report(process(1), process(2, REFUSAL)).to_document()
    assert document["got_bytes"] == 2 * GIB
    assert document["kernels"] == 12
    assert document["event_seconds"] == pytest.approx(0.5)
    assert document["wall_seconds"] == pytest.approx(0.5)
    assert document["latency_us"]["max"] == pytest.approx(9000)
    assert document["errors"] == 1
    assert document["processes"][1]["errors"] == [
        {"code": 2, "name": "CUDA_ERROR_OUT_OF_MEMORY", "call": "cuMemAlloc", "at_bytes": GIB}
    ]


def test_every_field_of_the_document_is_described() -> None:
    document = report(process(1, REFUSAL)).to_document()
    described = set(re.findall(r"\w+", DOCUMENT))
    assert set(document) | set(document["plan"]) | set(document["processes"][0]) <= described
    assert set(document) == set(re.findall(r"^(\w+)", DOCUMENT, flags=re.MULTILINE))


def test_a_report_survives_its_way_from_another_process() -> None:
    one = process(7, FAULT)
    assert msgspec.json.decode(msgspec.json.encode(one), type=ProcessReport) == one


@pytest.mark.parametrize(
    ("errors", "refused"),
    [((), False), ((REFUSAL,), True), ((REFUSAL, REFUSAL), True), ((REFUSAL, FAULT), False)],
    ids=["none", "refused", "twice", "also a fault"],
)
def test_refused_means_nothing_else_went_wrong(
    errors: tuple[BurnError, ...], *, refused: bool
) -> None:
    assert report(process(1, *errors)).was_refused is refused


def test_the_text_tells_the_same() -> None:
    assert list(report_lines(report(process(1), process(2, REFUSAL), ended_by=2))) == [
        "device    NVIDIA T4, GPU-1, 4Gi, 40 multiprocessors (by the driver)",
        "memory    got 2Gi of 6Gi (plain)",
        "kernels   12 of 2ms in 0.5s, 0.5s between events, waits included",
        "latency   p50 2.1ms, p99 9ms, max 9ms",
        "error     CUDA_ERROR_OUT_OF_MEMORY from cuMemAlloc at 1Gi",
        "process   1: 1Gi of 3Gi, 6 kernels (p50 2.1ms, p99 9ms, max 9ms)",
        "process   2: 1Gi of 3Gi, 6 kernels (p50 2.1ms, p99 9ms, max 9ms) CUDA_ERROR_OUT_OF_MEMORY",
        "stopped   early, by a signal",
    ]


def test_one_process_tells_what_the_driver_had_free() -> None:
    assert "free      4Gi before, 3Gi after, of 4Gi" in list(report_lines(report(process(1))))
