# SPDX-License-Identifier: Apache-2.0
"""`allot resume`: resumes a suspended share."""

from pathlib import Path

import click

from allotment.cli.options import complete_share, host_memory_option, state_option
from allotment.model.formats import format_count


@click.command(short_help="Resume a suspended share.")
@click.argument("share", metavar="SHARE", shell_complete=complete_share)
@host_memory_option
@state_option
def command(*, share: str, host_memory: int | None, state: Path | None) -> None:
    """Move the memory of SHARE (name or id) back to its GPUs, and continue its programs.

    Fails, with the needed and the free memory, while other shares use the memory.

    \b
    Examples:
      allot resume train
    """  # noqa: D301 - click's mark
    from allotment.cli.machines import devices_of
    from allotment.devices.nvml import readings
    from allotment.shares.folders import StateFolder
    from allotment.shares.lifecycle import find
    from allotment.shares.resume import resume
    from allotment.shares.run.command import refuse_inside

    # Before devices are read: inside a share they are a part.
    refuse_inside(f"allot resume {share}")
    folder = StateFolder.at(state)
    devices = devices_of(find(folder, share))
    done = resume(folder, share, readings, devices, host_budget=host_memory)
    if done.has_ended:
        click.echo(f"{done.name}: resumed; its programs have ended")
        return
    programs = format_count(done.programs, "process continues", "processes continue")
    click.echo(f"{done.name}: resumed, {programs}")
