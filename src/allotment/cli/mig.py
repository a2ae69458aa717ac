# SPDX-License-Identifier: Apache-2.0
"""`allot mig`: cut GPUs into MIG instances as a file says, and say how they are cut."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, TypeVar

import click

from allotment.cli.options import output_option, simulated_option, state_option

if TYPE_CHECKING:
    from allotment.cli.mig_plans import Planned
    from allotment.modes.mig.files import Entry

_F = TypeVar("_F", bound=Callable[..., Any])
_NOT_AS_ASKED = 1
_DIGITS = 4


@click.group(short_help="Cut GPUs into MIG instances, as a file says.")
def command() -> None:
    """Cut GPUs into MIG instances as a file says, and say how they are cut.

    The file is the one of NVIDIA's mig-parted, version v1.

    \b
    Examples:
      allot mig plan -f config.yaml -c all-balanced
      allot mig plan --fit 3g.40gb
      allot mig apply -f config.yaml -c all-balanced
      allot mig assert -f config.yaml -c all-balanced
      allot mig export
    """  # noqa: D301 - click's mark


def file_options(function: _F, *, required: bool = True) -> _F:
    """Add `-f` and `-c`."""
    options = (
        click.option(
            "-f",
            "--config-file",
            "file",
            metavar="FILE",
            type=click.File(encoding="utf-8"),
            required=required,
            help="Configurations, in mig-parted's format; - is standard input.",
        ),
        click.option(
            "-c",
            "--selected-config",
            "name",
            metavar="NAME",
            help="Which of them; may be left out where there is one.",
        ),
    )
    for option in reversed(options):
        function = option(function)
    return function


@command.command(short_help="Make the GPUs as a configuration says.")
@file_options
@simulated_option
@state_option
def apply(*, file: TextIO, name: str | None, simulated: str | None, state: Path | None) -> int:
    """Switch MIG on or off and make and remove instances, until the GPUs are as the file says.

    Only what differs is touched: instances that are wanted stay, and so do the programs in them.
    Where something has to go that is in use, nothing at all is done, and its users are named.

    \b
    Example:
      allot mig apply -f config.yaml -c all-1g.10gb
    """  # noqa: D301 - click's mark
    from allotment.cli.mig_runs import MigRun
    from allotment.shares.folders import StateFolder

    run = MigRun(StateFolder.at(state), simulated)
    failed = False
    for planned, outcome in run.apply(_entries(file, name)):
        click.echo(f"GPU {planned.index} {planned.uuid}: {outcome.text}", err=outcome.is_error)
        failed |= outcome.is_error
    return _NOT_AS_ASKED if failed else 0


@command.command("assert", short_help="Ask whether the GPUs are as a configuration says.")
@file_options
@simulated_option
@state_option
def assert_(*, file: TextIO, name: str | None, simulated: str | None, state: Path | None) -> int:
    """End with 0 if the GPUs that the configuration names are as it says, and with 1 if not.

    What differs is told on standard error. Where the instances are does not matter, nor who made
    them. Ends with 2 for a file that cannot be meant.

    \b
    Example:
      allot mig assert -f config.yaml -c all-balanced || allot mig apply -f config.yaml -c all-balanced
    """  # noqa: D301, E501 - click's mark
    from allotment.cli.mig_runs import MigRun
    from allotment.shares.folders import StateFolder

    different = MigRun(StateFolder.at(state), simulated).differences(_entries(file, name))
    for index, text in different:
        click.echo(f"GPU {index}: {text}", err=True)
    if not different:
        click.echo("the configuration is in force")
    return _NOT_AS_ASKED if different else 0


@command.command(short_help="Print how the GPUs are cut, as a configuration.")
@click.option(
    "-c",
    "--config-label",
    "name",
    metavar="NAME",
    default="current",
    show_default=True,
    help="What the configuration is to be called.",
)
@output_option("yaml", "json")
@simulated_option
@state_option
def export(*, name: str, output: str, simulated: str | None, state: Path | None) -> None:
    """Print how the GPUs are cut as a file that `apply`, `assert` and mig-parted read.

    \b
    Example:
      allot mig export > now.yaml
    """  # noqa: D301 - click's mark
    from allotment.cli.documents import print_document
    from allotment.cli.mig_runs import MigRun
    from allotment.shares.folders import StateFolder

    print_document(MigRun(StateFolder.at(state), simulated).document(name), output)


@command.command(short_help="Show what apply would do, or how a slice would come to fit.")
@partial(file_options, required=False)
@click.option(
    "--fit",
    "wanted",
    metavar="PROFILE[:N]",
    multiple=True,
    help="In place of a file: how a GPU comes to have room for so many slices of this profile more;"
    " several times for several.",
)
@output_option("table", "json", "yaml")
@simulated_option
@state_option
def plan(
    *,
    file: TextIO | None,
    name: str | None,
    wanted: tuple[str, ...],
    output: str,
    simulated: str | None,
    state: Path | None,
) -> int:
    """Show what `apply` would do to each GPU, or why it would not; nothing is changed.

    With --fit: how slices come to fit that do not fit as it is, in the way that costs others least:
    an idle MIG device that is there, a GPU whose MIG is off, or which slices have to go, and whose
    programs start again where. An instance in use cannot be moved.

    Ends with 0 where all of it could be done (or is so already), and where not as `apply` would:
    with 2 for what a GPU cannot have, with 7 where somebody is in the way.

    \b
    Examples:
      allot mig plan -f config.yaml -c all-balanced
      allot mig plan --fit 3g.40gb --fit 1g.10gb:2
    """  # noqa: D301 - click's mark
    from allotment.cli.mig_plans import plan_document, plan_rows
    from allotment.cli.mig_runs import MigRun
    from allotment.shares.folders import StateFolder

    if (file is None) == (not wanted):
        raise click.UsageError("give either a file (-f) or what is to fit (--fit)")
    run = MigRun(StateFolder.at(state), simulated)
    planned = run.advice(_counts(wanted)) if file is None else run.plans(_entries(file, name))
    if output == "table":
        from allotment.cli.tables import Column, print_table

        columns = (
            Column("#", is_number=True),
            Column("UUID"),
            Column("STEP"),
            Column("PROFILE"),
            Column("SLOT", is_number=True),
            Column("REMARK"),
        )
        print_table(columns, plan_rows(planned))
    else:
        from allotment.cli.documents import print_document

        print_document(plan_document(planned), output)
    for each in planned:
        if each.error is not None and each.error.hint:
            click.echo(f"GPU {each.index} {each.uuid}: hint: {each.error.hint}", err=True)
    return _status(planned)


def _counts(wanted: tuple[str, ...]) -> dict[str, int]:
    """Read what `--fit` says: how many of each profile."""
    from allotment.model.errors import UsageError

    counts: dict[str, int] = {}
    for each in wanted:
        name, _, number = each.partition(":")
        if number and not (number.isascii() and number.isdecimal() and len(number) < _DIGITS):
            raise UsageError(f"--fit {each}: {number} is no count", hint="write it like 1g.10gb:2")
        counts[name] = counts.get(name, 0) + int(number or 1)
    return counts


def _status(planned: "list[Planned]") -> int:
    """Return the exit code that `apply` would end with, by the first reason why it would not."""
    return next((each.error.exit_code for each in planned if each.error), 0)


def _entries(file: TextIO, name: str | None) -> "tuple[Entry, ...]":
    """Read the file and choose a configuration of it."""
    from allotment.agent.config.documents import read
    from allotment.model.errors import UsageError
    from allotment.modes.mig.files import parse_configurations, select

    source = file.name
    try:
        text = file.read()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{source}: cannot be read: {error}") from error
    return select(
        parse_configurations(read(text, source=source), source=source), name, source=source
    )
