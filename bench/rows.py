# SPDX-License-Identifier: Apache-2.0
"""The rows of the bench's table: what was measured, beside what it is measured against."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantiles:
    """Two percentiles of the same samples, in the row's unit."""

    p50: float
    p99: float

    def scaled(self, factor: float) -> Quantiles:
        """Convert to another unit."""
        return Quantiles(p50=self.p50 * factor, p99=self.p99 * factor)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the table.

    `added` is the median of the differences within pairs (or the plain value, where nothing is
    compared), and it is what `limit` is a target for; both are in `unit`.
    """

    name: str
    unit: str
    added: float
    limit: float | None
    samples: int
    method: str
    bare: Quantiles | None = None
    share: Quantiles | None = None

    @property
    def ratio(self) -> float | None:
        """Tell how many times longer the median takes inside a share."""
        if self.bare is None or self.share is None or self.bare.p50 <= 0:
            return None
        return self.share.p50 / self.bare.p50

    @property
    def is_met(self) -> bool | None:
        """Tell whether the target is met; None without one."""
        return None if self.limit is None else self.added <= self.limit

    def to_document(self) -> dict[str, Any]:
        """Give the row as JSON's types."""
        document = {
            field.name: getattr(self, field.name)
            for field in fields(self)
            if field.name not in {"bare", "share"}
        }
        for name, quantiles in (("bare", self.bare), ("share", self.share)):
            document[name] = (
                None if quantiles is None else {"p50": quantiles.p50, "p99": quantiles.p99}
            )
        return document | {"ratio": self.ratio, "is_met": self.is_met}


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """A whole run: where and how it was made, and its rows."""

    facts: dict[str, str]
    rows: tuple[Row, ...]
    failures: dict[str, str]
    """Questions that got no answer, and why."""

    def to_document(self) -> dict[str, Any]:
        """Give the JSON document: `version`, `machine` (facts by name), `rows`, `failures`."""
        return {
            "version": 1,
            "machine": self.facts,
            "rows": [row.to_document() for row in self.rows],
            "failures": self.failures,
        }
