# SPDX-License-Identifier: Apache-2.0
"""`allot rm`: remove shares."""

from pathlib import Path

import click

from allotment.cli.options import complete_share, state_option


@click.command(short_help="Remove shares.")
@click.argument(
    "shares", metavar="SHARE...", nargs=-1, required=True, shell_complete=complete_share
)
@click.option(
    "--force",
    is_flag=True,
    help="Also when processes use it: they keep their memory limit, it is free for others, and they"
    " have the compute that others leave.",
)
@state_option
def command(*, shares: tuple[str, ...], force: bool, state: Path | None) -> None:
    """Remove shares by name or id. One that is in use is refused, unless forced.

    A suspended one is refused in any case while its programs live: they could never go on.

    \b
    Examples:
      allot rm train
      allot rm 4f6e21b0c3d2 --force
    """  # noqa: D301 - click's mark
    from allotment.shares.folders import StateFolder
    from allotment.shares.lives import destroy, find
    from allotment.shares.sessions import refuse_inside, settle_slices

    refuse_inside(f"allot rm {' '.join(shares)}")
    folder = StateFolder.at(state)
    for found in [find(folder, name) for name in shares]:
        destroy(folder, found, force=force)
        click.echo(found.name)
    settle_slices(folder)
