# SPDX-License-Identifier: Apache-2.0
"""`allot suspend`: stops the programs of a share and frees its GPU memory."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from allotment.cli.options import complete_share, state_option
from allotment.model.errors import AllotError
from allotment.model.formats import format_bytes, format_count

if TYPE_CHECKING:
    from allotment.shares.folders import StateFolder


@click.command(short_help="Stop a share's programs, and free its GPU memory.")
@click.argument("share", metavar="SHARE", shell_complete=complete_share)
@click.option(
    "--timeout",
    metavar="SECONDS",
    type=click.FloatRange(min=0.001, max=3600),
    default=30.0,
    help="How long to wait for running GPU work to end.",
)
@state_option
def command(*, share: str, timeout: float, state: Path | None) -> None:
    """Stop the programs of SHARE (name or id), and free its GPU memory for others.

    The driver (570 or later) moves the programs' GPU memory to the host. Then they are stopped, as
    by `kill -STOP`. The share's memory is not booked until `allot resume`, which needs free memory
    again. Its compute guarantee stays booked.

    With an older driver only shares with --oversubscribe can be suspended: their contexts stay on
    the GPU, and their memory stays booked. Only shares of mode soft can be suspended.

    \b
    Examples:
      allot suspend train
      allot suspend train --timeout 120
    """  # noqa: D301 - click's mark
    from allotment.devices.nvml import readings
    from allotment.model.shares import SuspendedBy
    from allotment.shares.folders import StateFolder
    from allotment.shares.suspend import suspend

    folder = StateFolder.at(state)
    before = _on_gpus(folder, share)
    done = suspend(folder, share, readings, patience_s=timeout)
    text = f"{done.name}: suspended, {format_count(done.programs, 'process', 'processes')} stopped"
    if done.by is SuspendedBy.EVICTION:
        text += "; movable memory is on the host, and the share's memory stays booked"
    elif before > 0:
        text += f"; {format_bytes(before)} moved from GPU to host"
    click.echo(text)
    if not done.programs:
        click.echo(
            f"hint: no program runs in {done.name}. A program started before"
            f" `allot resume {done.name}` would not be stopped",
            err=True,
        )


def _on_gpus(folder: "StateFolder", name: str) -> int:
    """Return the bytes that a share uses on its GPUs, with programs without the shim."""
    from allotment.devices.nvml import readings
    from allotment.shares.lifecycle import find
    from allotment.shares.status import view

    try:
        (status,) = view([find(folder, name)], readings)
    except AllotError:  # `suspend` reports the error
        return 0
    return sum(device.used - device.host_bytes for device in status.devices)
