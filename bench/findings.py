# SPDX-License-Identifier: Apache-2.0
"""What a bench found: one line of its table for each measure, beside the target."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

HEAD: Final = ("what", "without limits", "in shares", "worst", "target", "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One line. `reached` is the figure that `target` is for, in `unit`."""

    question: str
    name: str
    without: str
    """The same programs without limits, in the same run."""
    seen: str
    reached: float
    unit: str
    target: float | None
    at_least: bool = False
    """Is more better? Else less is."""
    samples: int
    method: str

    @property
    def is_met(self) -> bool | None:
        """Tell whether the target is met; None without one."""
        if self.target is None:
            return None
        return self.reached >= self.target if self.at_least else self.reached <= self.target

    def to_document(self) -> dict[str, Any]:
        """Give the finding as JSON's types."""
        return asdict(self) | {"is_met": self.is_met}


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """A whole run."""

    facts: Mapping[str, str]
    findings: Sequence[Finding]
    failures: Mapping[str, str]

    def to_document(self) -> dict[str, Any]:
        """Give the JSON document: `version`, `machine`, `findings`, `failures`."""
        return {
            "version": 1,
            "machine": dict(self.facts),
            "findings": [finding.to_document() for finding in self.findings],
            "failures": dict(self.failures),
        }


def render_text(found: Findings, *, head: Sequence[str] = HEAD) -> str:
    """Write the facts and the table for a terminal."""
    cells = [head, *(_cells(finding) for finding in found.findings)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(head))]
    lines = [f"{name:<11}{value}" for name, value in found.facts.items()]
    lines.append("")
    lines += [
        "  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip()
        for line in cells
    ]
    lines += [f"{name}: NOT MEASURED: {why}" for name, why in found.failures.items()]
    return "\n".join(lines)


def render_markdown(found: Findings, *, command: str, head: Sequence[str] = HEAD) -> str:
    """Write the same for a page of the documentation, with the command that makes it."""
    lines = [f"Made by `{command}` on:", ""]
    lines += [f"- {name}: {value}" for name, value in found.facts.items()]
    lines += ["", _line(head), _line(("---",) * len(head))]
    lines += [_line(_cells(finding)) for finding in found.findings]
    lines += ["", "How each is measured:", ""]
    methods: dict[str, str] = {}
    for finding in found.findings:
        methods.setdefault(finding.question, finding.method)
    lines += [f"- **{question}**: {method}." for question, method in methods.items()]
    lines += [f"- **{name}**: not measured: {why}." for name, why in found.failures.items()]
    return "\n".join(lines)


def number(value: float) -> str:
    """Write a number with the digits that mean something."""
    if value == int(value) or abs(value) >= 1000:
        return f"{value:.0f}"
    return f"{value:.3g}"


def _cells(finding: Finding) -> tuple[str, ...]:
    target = ""
    if finding.target is not None:
        sign = "≥" if finding.at_least else "≤"
        target = f"{sign} {number(finding.target)} {finding.unit}"
    verdict = {None: "", True: "met", False: "MISSED"}[finding.is_met]
    reached = f"{number(finding.reached)} {finding.unit}"
    return (finding.name, finding.without, finding.seen, reached, target, verdict)


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"
