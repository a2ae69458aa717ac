# SPDX-License-Identifier: Apache-2.0
"""What a bench reports, and the lines that are stored: one JSON object a result.

A stored line stands alone: it names its question, its commit, its machine and its command.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import msgspec

from bench.harness.quantiles import Summary

SCHEMA: Final = 1
RESULTS: Final = Path(__file__).resolve().parent.parent / "results"
CHECK: Final = "check"
"""The unit of a result that is right or wrong."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One line of a bench's table."""

    name: str
    unit: str
    value: float | None
    """The figure that `target` is for, in `unit`. None: not measured, and `seen` has the reason."""
    method: str = ""
    topic: str = ""
    """Results of one topic share a method."""
    seen: str = ""
    """All that was seen, where `value` is the worst of it."""
    beside: str = ""
    """The same of the base, in the same run."""
    summary: Summary | None = None
    base: Summary | None = None
    target: float | None = None
    at_least: bool = False
    """More is better; else less is."""
    is_required: bool = False
    """A miss is an error and no matter of speed: it fails the run."""
    samples: int = 1

    @property
    def ratio(self) -> float | None:
        """Return the median over the base's median."""
        if self.base is None or self.summary is None or self.base.p50 <= 0:
            return None
        return self.summary.p50 / self.base.p50

    @property
    def is_met(self) -> bool | None:
        """Return whether the target is met; None without one, or without a value."""
        if self.target is None or self.value is None:
            return None
        return self.value >= self.target if self.at_least else self.value <= self.target


def check(name: str, *, is_right: bool | None, seen: str) -> Result:
    """Return the result of an expectation; `is_right` is None where it could not be tried."""
    return Result(
        name=name,
        topic="checks",
        unit=CHECK,
        value=None if is_right is None else float(is_right),
        seen=seen,
        target=1.0,
        at_least=True,
        is_required=True,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Provenance:
    """Where results come from."""

    commit: str
    date: str
    """UTC, ISO 8601."""
    command: str
    machine: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Base:
    """What a result is compared with, in the same run."""

    name: str
    seen: str = ""
    summary: Summary | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """A stored line."""

    schema: int = SCHEMA
    bench: str
    room: str
    question: str
    name: str
    topic: str
    unit: str
    value: float | None
    seen: str
    summary: Summary | None
    n: int
    base: Base | None
    ratio: float | None
    target: float | None
    at_least: bool
    met: bool | None
    is_required: bool
    method: str
    commit: str
    date: str
    command: str
    machine: Mapping[str, str] = field(default_factory=dict)

    def result(self) -> Result:
        """Return what was measured, without its provenance."""
        return Result(
            name=self.name,
            topic=self.topic,
            unit=self.unit,
            value=self.value,
            seen=self.seen,
            beside="" if self.base is None else self.base.seen,
            summary=self.summary,
            base=None if self.base is None else self.base.summary,
            target=self.target,
            at_least=self.at_least,
            is_required=self.is_required,
            method=self.method,
            samples=self.n,
        )


def record(
    result: Result, *, bench: str, room: str, question: str, base: str, provenance: Provenance
) -> Record:
    """Join a result and where it comes from."""
    has_base = result.beside != "" or result.base is not None
    return Record(
        bench=bench,
        room=room,
        question=question,
        name=result.name,
        topic=result.topic,
        unit=result.unit,
        value=result.value,
        seen=result.seen,
        summary=result.summary,
        n=result.samples,
        base=Base(name=base, seen=result.beside, summary=result.base) if has_base else None,
        ratio=result.ratio,
        target=result.target,
        at_least=result.at_least,
        met=result.is_met,
        is_required=result.is_required,
        method=result.method,
        commit=provenance.commit,
        date=provenance.date,
        command=provenance.command,
        machine=dict(provenance.machine),
    )


def to_line(stored: Record) -> str:
    """Return a record as a line of JSON."""
    document: dict[str, Any] = asdict(stored)
    return msgspec.json.encode(document).decode()


def read_records(path: Path) -> list[Record]:
    """Read a file of lines."""
    decoder = msgspec.json.Decoder(Record)
    return [decoder.decode(line) for line in path.read_bytes().splitlines() if line.strip()]


def write_records(folder: Path, records: Iterable[Record]) -> None:
    """Write a file for each bench; an earlier file of that bench is replaced."""
    folder.mkdir(parents=True, exist_ok=True)
    by_bench: dict[str, list[str]] = {}
    for each in records:
        by_bench.setdefault(each.bench, []).append(to_line(each))
    for name, lines in by_bench.items():
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
