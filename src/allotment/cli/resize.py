# SPDX-License-Identifier: Apache-2.0
"""`allot resize`: other limits for a share that runs."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from allotment.cli.options import (
    BYTES,
    MEMORY,
    changed_compute_options,
    complete_share,
    state_option,
)
from allotment.cli.tables import described

if TYPE_CHECKING:
    from collections.abc import Iterator

    from allotment.model.compute import Compute
    from allotment.model.quantities import MemoryAmount
    from allotment.shares.lives import Found


@click.command(short_help="Change a share's limits while its programs run.")
@click.argument("share", metavar="SHARE", shell_complete=complete_share)
@click.option(
    "--memory",
    metavar="SIZE",
    type=MEMORY,
    help="New memory on each of its GPUs: 6Gi, or a part of the GPU like 25%.",
)
@changed_compute_options
@click.option(
    "--host-memory",
    metavar="SIZE",
    type=BYTES,
    envvar="ALLOTMENT_HOST_MEMORY",
    help="As `allot run` has it.",
)
@click.option(
    "--force",
    is_flag=True,
    help="Go below the memory that is used: then new allocations fail until the use fits.",
)
@state_option
@click.pass_context
def command(
    ctx: click.Context,
    *,
    share: str,
    memory: "MemoryAmount | None",
    compute: "Compute | None",
    kind: str | None,
    weight: int | None,
    host_memory: int | None,
    force: bool,
    state: Path | None,
) -> None:
    """Change what SHARE (name or id) has of each of its GPUs, while it runs.

    Its programs see a new memory limit at their next call; another --compute, --class or --weight
    is in force when this ends. What is not named stays as it is. What does not fit beside the
    other shares is refused, and so is a memory limit below what is used, unless forced; then
    nothing is changed.

    In mode mps --memory goes down, and up again to what the share began with; compute stays. In
    mode mig nothing can be changed: a slice is the hardware's.

    \b
    Examples:
      allot resize train --memory 6Gi
      allot resize train --compute 30:80
      allot resize train --memory 2Gi --force
    """  # noqa: D301 - click's mark
    from allotment.cli.machines import devices_of
    from allotment.model.compute import ComputeClass
    from allotment.model.errors import UsageError
    from allotment.shares.folders import StateFolder
    from allotment.shares.lives import find
    from allotment.shares.resizing import Change, resize
    from allotment.shares.sessions import refuse_inside

    refuse_inside(f"allot resize {share}")  # before the devices are asked: those of this part only
    change = Change(memory, compute, weight, ComputeClass(kind) if kind else None, host_memory)
    if change.memory is None and not change.is_of_compute:
        raise UsageError(
            "what to change is not said",
            hint="say it by --memory, --compute, --class or --weight",
        )
    is_typed = ctx.get_parameter_source("host_memory") is click.core.ParameterSource.COMMANDLINE
    if is_typed and change.memory is None:
        raise UsageError(
            "--host-memory says how far a new --memory may go, and there is none",
            hint="add --memory, or leave it out",
        )
    folder = StateFolder.at(state)
    found = find(folder, share)
    again = resize(folder, found.id, change, devices_of(found), force=force)
    click.echo(f"{again.name}: {', '.join(_parts(again))}")


def _parts(found: "Found") -> "Iterator[str]":
    """Tell what the share has of each device."""
    from allotment.cli.tables import short_uuid
    from allotment.model.formats import format_bytes

    for uuid, size in found.limits().items():
        terms = found.terms.get(uuid)
        compute = ""
        if terms is not None and terms.compute.is_governed:
            compute = f" {described(terms.compute)}"
        yield f"{short_uuid(uuid)} {format_bytes(size)}{compute}"
