# SPDX-License-Identifier: Apache-2.0
"""`allot resize`: another limit for a share that runs."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from allotment.cli.options import MEMORY, complete_share, state_option

if TYPE_CHECKING:
    from allotment.model.quantities import MemoryAmount


@click.command(short_help="Change a share's limit while its programs run.")
@click.argument("share", metavar="SHARE", shell_complete=complete_share)
@click.option(
    "--memory",
    metavar="SIZE",
    type=MEMORY,
    required=True,
    help="New memory on each of its GPUs: 6Gi, or a part of the GPU like 25%.",
)
@click.option(
    "--force",
    is_flag=True,
    help="Go below what is used: then new allocations fail until the use fits.",
)
@state_option
def command(*, share: str, memory: "MemoryAmount", force: bool, state: Path | None) -> None:
    """Change the memory limit of SHARE (name or id) on each of its GPUs, while it runs.

    Its programs see the new limit at their next call. What does not fit beside the other shares is
    refused, and so is a limit below what is used, unless forced; then nothing is taken away.

    \b
    Examples:
      allot resize train --memory 6Gi
      allot resize train --memory 2Gi --force
    """  # noqa: D301 - click's mark
    from allotment.cli.machines import devices_of
    from allotment.model.formats import format_bytes
    from allotment.shares.folders import StateFolder
    from allotment.shares.lives import find
    from allotment.shares.resizing import resize

    folder = StateFolder.at(state)
    found = find(folder, share)
    again = resize(folder, found.id, memory, devices_of(found), force=force)
    limits = ", ".join(f"{uuid[:12]} {format_bytes(size)}" for uuid, size in again.limits().items())
    click.echo(f"{again.name}: {limits}")
