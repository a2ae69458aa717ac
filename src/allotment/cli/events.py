# SPDX-License-Identifier: Apache-2.0
"""`allot events`: what happened to the shares of this machine."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from allotment.cli.options import complete_share, output_option, state_option
from allotment.model.formats import printable, utc

if TYPE_CHECKING:
    from allotment.shares.folders import StateFolder
    from allotment.shares.record import ShareEvent

_PACE_S: Final = 0.5


@click.command(short_help="Show what happened to the shares.")
@click.argument("shares", metavar="[SHARE]...", nargs=-1, shell_complete=complete_share)
@click.option("--follow", "-f", is_flag=True, help="Show later events too, until Ctrl-C.")
@output_option("text", "json")
@state_option
def command(*, shares: tuple[str, ...], follow: bool, output: str, state: Path | None) -> None:
    """Show when shares were created, refused, resized, suspended, resumed, damaged, evicted, ended.

    With SHARE (name or id, also of an ended one): only its events. `lost` names shares whose
    programs lost their GPU state, because their GPU's MPS daemon ended. `evicted` names those whose
    pod the node's agent deleted.

    No daemon watches: each command records what it did and met. A share whose `allot run` was
    killed ends in the events when the next command finds that. The file `events` of the state
    folder has at most 256 KiB; the oldest half is dropped then. With -o json, a line is an event.

    \b
    Examples:
      allot events
      allot events train -f
      allot events -o json | jq 'select(.kind == "refused")'
    """  # noqa: D301 - click's mark
    from allotment.shares.folders import StateFolder

    folder = StateFolder.at(state)
    wanted, found = set(shares), set[str]()
    for event in _events(folder, follows=follow):
        if not shares or {event.share, event.id} & wanted:
            found |= {event.share, event.id} & wanted
            click.echo(_line(event, output))
    for name in sorted(wanted - found):
        click.echo(f"no events of share {name!r}", err=True)


def _events(folder: "StateFolder", *, follows: bool) -> "Iterator[ShareEvent]":
    """Yield each event once: a later one may have an earlier time."""
    shown: set[ShareEvent] = set()
    while True:
        events = _current(folder)
        yield from (event for event in events if event not in shown)
        if not follows:
            return
        shown = set(events) or shown
        time.sleep(_PACE_S)


def _current(folder: "StateFolder") -> "list[ShareEvent]":
    """Return the events, and look for damage that no command has met yet."""
    from allotment.shares.mps_daemons import losses
    from allotment.shares.record import ShareEvent, note_damage, read_events
    from allotment.shares.recovery import list_shares

    if not folder.exists():
        return []
    note_damage(folder, list_shares(folder))
    lost = [
        ShareEvent(loss.time, "lost", share, "", f"GPU {uuid}: {loss.reason}")
        for uuid, each in losses(folder).items()
        for loss in each
        for share in loss.shares
    ]
    return sorted([*read_events(folder), *lost], key=lambda event: event.time)


def _line(event: "ShareEvent", output: str) -> str:
    if output == "json":
        import json

        import msgspec

        return json.dumps(msgspec.structs.asdict(event) | {"time": utc(event.time)})
    line = f"{utc(event.time)}  {event.kind:<9}  {event.share or '-'}  {event.text}"
    return printable(line).rstrip()
