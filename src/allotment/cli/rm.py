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
    help="Remove it even while processes use it. They keep their memory limit, but the memory"
    " becomes free for other shares. They get the compute that other shares leave.",
)
@state_option
def command(*, shares: tuple[str, ...], force: bool, state: Path | None) -> None:
    """Remove shares by name or id. A share in use is refused, unless --force is given.

    A suspended share is refused even with --force while its programs live: they could not resume.

    \b
    Examples:
      allot rm train
      allot rm 4f6e21b0c3d2 --force
    """  # noqa: D301 - click's mark
    from allotment.shares.folders import StateFolder
    from allotment.shares.lifecycle import destroy, find
    from allotment.shares.run.command import free_orphan_slices, refuse_inside

    refuse_inside(f"allot rm {' '.join(shares)}")
    folder = StateFolder.at(state)
    for share in [find(folder, name) for name in shares]:
        destroy(folder, share, force=force)
        click.echo(share.name)
    free_orphan_slices(folder)
