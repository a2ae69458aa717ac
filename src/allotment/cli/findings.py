# SPDX-License-Identifier: Apache-2.0
"""Findings of `allot doctor`, of a machine or of a cluster, and how they are printed."""

import os
from collections.abc import Iterator, Sequence
from enum import StrEnum

import click
import msgspec

from allotment.cli.documents import print_document
from allotment.cli.groups import wants_colour
from allotment.model.errors import PrerequisiteError
from allotment.model.formats import printable_lines

_COLOURS = {"ok": "green", "note": "yellow", "missing": "red"}


class CheckResult(StrEnum):
    """The result of a check."""

    OK = "ok"
    NOTE = "note"
    """Works with limits."""
    MISSING = "missing"
    """Allotment does not work without it."""


class Finding(msgspec.Struct, frozen=True):
    """The result of one check.

    `fix` is empty if there is nothing to do. With `OK` it is an optional improvement.
    """

    name: str
    outcome: CheckResult
    detail: str
    fix: str = ""


def print_findings(findings: Sequence[Finding], output: str) -> int:
    """Print findings, and return the exit code: 8 if an essential prerequisite is missing."""
    missing = any(finding.outcome is CheckResult.MISSING for finding in findings)
    if output != "table":
        checks = [
            {
                **msgspec.structs.asdict(finding),
                "outcome": str(finding.outcome),
                "fix": finding.fix or None,
            }
            for finding in findings
        ]
        print_document({"usable": not missing, "checks": checks}, output)
    else:
        colour = wants_colour()
        for finding in findings:
            word = click.style(f"{finding.outcome:<8}", fg=_COLOURS[finding.outcome])
            text = printable_lines(f"{finding.name}: {finding.detail}")
            click.echo(f"{word} {text}", color=colour)
            if finding.fix:
                # A check that passed has an improvement, not a fix.
                word = "hint" if finding.outcome is CheckResult.OK else "fix"
                click.echo(f"{'':8}   {word}: {printable_lines(finding.fix)}")
    return PrerequisiteError.exit_code if missing else 0


def examine_allowance() -> Iterator[Finding]:
    """Check the machine's configuration, and show what this user may have."""
    # Late: few machines have it.
    from allotment.model.errors import AllotError
    from allotment.shares.allowances import read_config, unknown_names
    from allotment.shares.folders import CONFIG_FILE

    name = str(CONFIG_FILE)
    try:
        config = read_config()
    except AllotError as error:
        yield Finding(name, CheckResult.MISSING, error.message, error.hint or "")
        return
    if config is None:
        return
    allowance = config.allowance(os.geteuid())
    yield Finding(name, CheckResult.OK, f"ceilings of {allowance.user}: {allowance}")
    if unknown := ", ".join(unknown_names(config)):
        yield Finding(
            f"{name}: names",
            CheckResult.NOTE,
            f"this machine has no {unknown}",
            "correct the names, or remove them: they have no effect",
        )
