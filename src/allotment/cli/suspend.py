# SPDX-License-Identifier: Apache-2.0
"""`allot suspend`: stop a share's programs and free its GPU memory."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from allotment.cli.options import complete_share, state_option

if TYPE_CHECKING:
    from allotment.shares.folders import StateFolder


@click.command(short_help="Stop a share's programs, and free its GPU memory.")
@click.argument("share", metavar="SHARE", shell_complete=complete_share)
@click.option(
    "--timeout",
    metavar="SECONDS",
    type=click.FloatRange(min=0.001, max=3600),
    default=30.0,
    show_default=True,
    help="How long GPU work that runs may take to end.",
)
@state_option
def command(*, share: str, timeout: float, state: Path | None) -> None:
    """Stop the programs of SHARE (name or id), and free its GPU memory for others.

    The driver moves what the programs have on the GPU to the host's memory (drivers from 570 on);
    then they are stopped, as by `kill -STOP`. None of the share's memory is booked until `allot
    resume` brings it back, which has to find room again; its guarantee of compute stays its own.

    With an older driver only shares with --oversubscribe can be suspended: then their contexts stay
    on the GPU, and their memory stays booked. Shares of mode mps cannot be suspended.

    \b
    Examples:
      allot suspend train
      allot suspend train --timeout 120
    """  # noqa: D301 - click's mark
    from allotment.cli.machines import readings
    from allotment.model.formats import format_bytes, format_count
    from allotment.model.shares import SuspendedBy
    from allotment.shares.folders import StateFolder
    from allotment.shares.suspending import suspend

    folder = StateFolder.at(state)
    before = _on_gpus(folder, share)
    done = suspend(folder, share, readings, patience_s=timeout)
    text = f"{done.name}: suspended, {format_count(done.programs, 'process', 'processes')} stopped"
    if done.by is SuspendedBy.EVICTION:
        text += "; what can move is on the host, and its memory stays booked"
    elif before > 0:
        text += f"; {format_bytes(before)} moved from GPU to host"
    click.echo(text)
    if not done.programs:
        click.echo(
            f"hint: no program runs in {done.name}: start none before `allot resume {done.name}`,"
            " it would not be stopped",
            err=True,
        )


def _on_gpus(folder: "StateFolder", name: str) -> int:
    """Return how many bytes a share has on its GPUs, its programs without the shim too."""
    from allotment.cli.machines import readings
    from allotment.model.errors import AllotError
    from allotment.shares.lives import find
    from allotment.shares.views import view

    try:
        (seen,) = view([find(folder, name)], readings)
    except AllotError:  # suspending says what is the matter
        return 0
    return sum(device.used - device.host_bytes for device in seen.devices)
