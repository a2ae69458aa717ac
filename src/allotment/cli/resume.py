# SPDX-License-Identifier: Apache-2.0
"""`allot resume`: bring a suspended share back."""

from pathlib import Path

import click

from allotment.cli.options import BYTES, complete_share, state_option


@click.command(short_help="Bring a suspended share back.")
@click.argument("share", metavar="SHARE", shell_complete=complete_share)
@click.option(
    "--host-memory",
    metavar="SIZE",
    type=BYTES,
    envvar="ALLOTMENT_HOST_MEMORY",
    help="Host memory that may stand for GPU memory, all shares together [env:"
    " ALLOTMENT_HOST_MEMORY; default: half of the machine's].",
)
@state_option
def command(*, share: str, host_memory: int | None, state: Path | None) -> None:
    """Bring the memory of SHARE (name or id) back to its GPUs, and let its programs go on.

    It is refused, with what is needed and what is there, while others have the room.

    \b
    Examples:
      allot resume train
    """  # noqa: D301 - click's mark
    from allotment.cli.machines import devices_of, readings
    from allotment.model.formats import format_count
    from allotment.shares.folders import StateFolder
    from allotment.shares.lives import find
    from allotment.shares.resuming import resume
    from allotment.shares.sessions import refuse_inside

    refuse_inside(f"allot resume {share}")  # before the devices are asked: those of this part only
    folder = StateFolder.at(state)
    devices = devices_of(find(folder, share))
    done = resume(folder, share, readings, devices, host_budget=host_memory)
    if done.has_ended:
        click.echo(f"{done.name}: resumed; its programs have ended")
        return
    programs = format_count(done.programs, "process goes", "processes go")
    click.echo(f"{done.name}: resumed, {programs} on")
