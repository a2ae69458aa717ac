# SPDX-License-Identifier: Apache-2.0
"""`allot doctor`: what this machine lacks, and the fix."""

from pathlib import Path

import click

from allotment.cli.options import output_option, state_option

_COLOURS = {"ok": "green", "note": "yellow", "missing": "red"}


@click.command(short_help="Name what this machine lacks, and the fix.")
@output_option("table", "json", "yaml")
@state_option
def command(*, output: str, state: Path | None) -> int:
    """Look at everything that Allotment needs of this machine, and name the fix of what it lacks.

    Ends with 0, or with 8 when something indispensable is missing.

    \b
    Example:
      allot doctor
    """  # noqa: D301 - click's mark
    import os

    from allotment.cli.checks import Outcome, examine
    from allotment.model.errors import PrerequisiteError
    from allotment.shares.folders import StateFolder

    findings = list(examine(StateFolder.at(state)))
    missing = any(each.outcome is Outcome.MISSING for each in findings)
    if output != "table":
        from allotment.cli.documents import print_document

        checks = [
            {
                "name": each.name,
                "outcome": str(each.outcome),
                "detail": each.detail,
                "fix": each.fix or None,
            }
            for each in findings
        ]
        print_document({"usable": not missing, "checks": checks}, output)
    else:
        colour = False if os.environ.get("NO_COLOR") else None
        for each in findings:
            word = click.style(f"{each.outcome:<8}", fg=_COLOURS[each.outcome])
            click.echo(f"{word} {each.name}: {each.detail}", color=colour)
            if each.fix:
                # Where all is well it is no fix, but what more could be had.
                word = "hint" if each.outcome is Outcome.OK else "fix"
                click.echo(f"{'':8}   {word}: {each.fix}")
    return PrerequisiteError.exit_code if missing else 0
