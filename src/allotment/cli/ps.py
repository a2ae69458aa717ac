# SPDX-License-Identifier: Apache-2.0
"""`allot ps`: the shares and their processes."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from allotment.cli.documents import print_document, shares_document
from allotment.cli.options import TABLES, complete_share, output_option, state_option
from allotment.cli.tables import (
    COMMAND_CELLS,
    NAME_CELLS,
    OUTSIDE,
    Column,
    base_names,
    cells_of,
    command_of,
    described,
    has_host,
    host_of,
    limit_of,
    print_table,
    short_uuid,
)
from allotment.model.errors import UsageError
from allotment.model.formats import format_bytes, format_duration, printable, utc
from allotment.model.structs import replace

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from allotment.shares.compute_view import ComputeView
    from allotment.shares.status import LossView, OutsideView, ProcessView, ShareStatus, ShareView


_PACE_S: Final = 1.0


@click.command(short_help="Show the shares and their processes.")
@click.argument("shares", metavar="[SHARE]...", nargs=-1, shell_complete=complete_share)
@click.option(
    "--watch",
    "-w",
    "watches",
    is_flag=True,
    help="Afterwards show each share that changes, until Ctrl-C.",
)
@output_option("table", "wide", "name", "json", "yaml")
@state_option
def command(*, shares: tuple[str, ...], watches: bool, output: str, state: Path | None) -> None:
    """Show every share with its limits, its use of each GPU, and its processes.

    With SHARE (name or id): only these, and nothing outside of shares.

    MODE is how limits are enforced: `soft`, `mps`, `mig`, `exclusive` or `timeslice`. A LIMIT like
    12Gi+host belongs to an oversubscribed share. HOST is the part of its memory that may be on the
    host: all of it while the share is suspended.

    COMPUTE is the guarantee and the ceiling in percent of the GPU. Class and weight follow if they
    are not the defaults (normal, 100). It is `-` if the share has no --compute and programs on the
    GPU take no turns. In mode mps it is the part of the multiprocessors of each process. GPU TIME
    is the time of its kernels, measured if a share on the GPU has --compute. `allot top` shows the
    current rate.

    PID in a share's row is that of its `allot run`. It is empty once that has ended (state `left`):
    the rows below show the processes that remain.

    ENFORCED is `no` for a process that uses the GPU without the shim (statically linked, or its own
    loader): its limit is not in force. It is also `no` for a share that has more than its limit by
    the driver. It is `exclusive` or `timeslice` for modes that enforce
    nothing. Processes outside any share come last. A share is removed when its command or pod
    ends. A pod's share is `waiting` while it has no program.

    \b
    Examples:
      allot ps
      allot ps train -o wide
      allot ps --watch
      allot ps -o json | jq '.shares[] | select(.enforced | not)'
    """  # noqa: D301 - click's mark
    from allotment.cli.machines import status_of
    from allotment.shares.folders import StateFolder
    from allotment.shares.lifecycle import pick
    from allotment.shares.run.command import free_orphan_slices, inside_share
    from allotment.shares.status import current

    if watches and output not in TABLES:
        raise UsageError(
            f"--watch shows a table, not {output}", hint="use -o wide, or leave out --watch"
        )
    folder = StateFolder.at(state)
    loaded = current(folder)
    ids = {pick(loaded, name).id for name in shares}

    def chosen(status: "ShareStatus") -> "ShareStatus":
        if not ids:
            return status
        views = tuple(view for view in status.shares if view.id in ids)
        return replace(status, shares=views, outside=())

    free_orphan_slices(folder, patience_s=10)
    status = chosen(status_of(folder, loaded))
    if output == "name":
        for view in status.shares:
            click.echo(printable(view.name))
    elif output in TABLES:
        if not status.shares:
            where = " are visible from inside a share" if inside_share() else ""
            click.echo(f"No shares{where}.", err=True)
        _print(status, is_wide=output == "wide")
        _warn_of_losses(status)
    else:
        print_document(shares_document(status), output)
    if state is not None and not folder.exists() and not inside_share():
        click.echo(f"note: {folder.root} is not a state folder: it has no shares", err=True)
    if watches:
        later = (chosen(status_of(folder, current(folder))) for _ in _pauses())
        _watch(status, later, is_wide=output == "wide")


def _pauses() -> "Iterator[None]":
    while True:
        time.sleep(_PACE_S)
        yield


def _watch(status: "ShareStatus", later: "Iterable[ShareStatus]", *, is_wide: bool) -> None:
    """Print what differs in each later status."""
    for now in later:
        before = {view.id: _compared(view) for view in status.shares}
        shares = tuple(view for view in now.shares if _compared(view) != before.get(view.id))
        outside = tuple(user for user in now.outside if user not in status.outside)
        if shares or outside:
            _print(replace(now, shares=shares, outside=outside), is_wide=is_wide)
        left = {view.id for view in now.shares}
        for view in status.shares:
            if view.id not in left:
                click.echo(f"{printable(view.name)}: removed")
        status = now


def _compared(view: "ShareView") -> "list[dict[str, str]]":
    """A share's rows without GPU TIME, which rises while a program computes."""
    return [{**row, "GPU TIME": ""} for row in _rows(view)]


def _print(status: "ShareStatus", *, is_wide: bool = False) -> None:
    views = status.shares
    if not views and not status.outside:
        return
    is_suspended = any(view.state == "suspended" for view in views)
    columns: tuple[Column, ...] = (
        Column("SHARE", least=NAME_CELLS),
        Column("STATE", rank=0 if is_suspended else 4),
        Column("MODE", rank=5),
        Column("GPU", rank=1),
        Column("LIMIT", is_number=True),
        Column("USED", is_number=True),
        Column("HOST", rank=6, is_number=True),
        Column("PEAK", rank=7, is_number=True),
        Column("COMPUTE", rank=3),
        Column("GPU TIME", rank=8, is_number=True),
        Column("PID", rank=2, is_number=True),
        Column("ENFORCED"),
        Column("INJECTION", rank=9),
        Column("COMMAND", least=COMMAND_CELLS),
    )
    if not any(has_host(device) for view in views for device in view.devices):
        columns = tuple(column for column in columns if column.heading != "HOST")
    rows = [row for view in views for row in _rows(view)]
    rows += [_outside_row(view) for view in status.outside]
    if not is_wide:
        rows = [row | {"GPU": short_uuid(row.get("GPU", ""))} for row in rows]
    print_table(columns, cells_of(columns, rows), is_wide=is_wide)
    for view in views:
        for remark in filter(None, (view.excess, view.without_turns)):
            _warn(f"warning: share {view.name}: {remark}")
        if view.problem:
            _warn(f"warning: share {view.name}: {view.problem.message}")
            if view.problem.hint:
                _warn(f"hint: {view.problem.hint}")


def _warn(line: str) -> None:
    """Print a line with what other users or programs may have chosen."""
    click.echo(printable(line), err=True)


def _warn_of_losses(status: "ShareStatus") -> None:
    """Name the shares whose programs lost their GPU state when an MPS daemon ended."""
    affected: dict[LossView, list[str]] = {}
    for view in status.shares:
        for loss in view.losses[-1:]:
            affected.setdefault(loss, []).append(view.name)
    for loss, names in affected.items():
        recovery = f"; back after {loss.recovered_s} s" if loss.recovered_s is not None else ""
        _warn(
            f"warning: GPU {loss.uuid}: {loss.reason} ({utc(loss.time)}{recovery}): programs"
            f" in {', '.join(names)} lost their memory and contexts there"
        )
    if affected:
        click.echo("hint: restart programs that report CUDA errors", err=True)


def _rows(view: "ShareView") -> "Iterator[dict[str, str]]":
    """Yield a row per device of the share, then a row per process and device."""
    share = view.share
    of_share = {
        "SHARE": view.name,
        "STATE": str(view.state),
        "MODE": share.mode if share else "?",
        "PID": str(share.runner.pid) if share and share.runner and view.state != "left" else "",
        "ENFORCED": view.enforcement,
        "INJECTION": str(share.injection) if share else "",
        "COMMAND": command_of(view),
    }
    for index, device in enumerate(view.devices):
        yield (of_share if index == 0 else {}) | {
            "GPU": device.uuid,
            "LIMIT": limit_of(device),
            "USED": format_bytes(device.used),
            "HOST": host_of(device),
            "PEAK": format_bytes(device.peak),
            "COMPUTE": _compute(device.compute),
            "GPU TIME": _gpu_time(device.compute),
        }
    if not view.devices:
        unknown = dict.fromkeys(("GPU", "LIMIT", "USED", "PEAK", "COMPUTE"), "?")
        yield of_share | unknown | {"PID": "", "ENFORCED": "no", "INJECTION": ""}
    for process in view.processes:
        yield from _process_rows(view, process)
    for pid, command in view.remaining:
        yield {"PID": str(pid), "COMMAND": base_names(command)}


def _outside_row(user: "OutsideView") -> dict[str, str]:
    return {
        "SHARE": OUTSIDE,
        "GPU": user.uuid,
        "USED": "?" if user.used is None else format_bytes(user.used),
        "PID": str(user.pid),
        "ENFORCED": "no",
        "COMMAND": base_names(user.command),
    }


def _compute(compute: "ComputeView | None") -> str:
    return described(compute.promised, takes_turns=compute.is_measured) if compute else "-"


def _gpu_time(compute: "ComputeView | None") -> str:
    if compute is None or not (compute.is_measured or compute.use.gpu_ns):
        return "-"
    return format_duration(compute.use.gpu_ns) if compute.use.gpu_ns else "0s"


def _enforced(view: "ShareView", process: "ProcessView") -> str:
    """Return `-` for a process of a share whose mode enforces nothing."""
    if view.remark:
        return "-"
    return "yes" if process.is_enforced else "no"


def _process_rows(view: "ShareView", process: "ProcessView") -> "Iterator[dict[str, str]]":
    pid = process.pid if process.pid is not None else process.pid_inside
    for device, used, peak in zip(view.devices, process.used, process.peak, strict=False):
        if used or peak or len(view.devices) == 1:
            yield {
                "GPU": device.uuid,
                "USED": format_bytes(used),
                "PEAK": format_bytes(peak),
                "PID": str(pid),
                "ENFORCED": _enforced(view, process),
                "COMMAND": base_names(process.command),
            }
