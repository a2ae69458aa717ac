# SPDX-License-Identifier: Apache-2.0
"""`allot ps`: the shares and their processes."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from allotment.cli.options import output_option, state_option

if TYPE_CHECKING:
    from collections.abc import Iterator

    from allotment.shares.views import (
        ComputeView,
        LossView,
        OutsideView,
        Overview,
        ProcessView,
        ShareView,
    )


_HOST = "HOST"


@click.command(short_help="Show the shares and their processes.")
@output_option("table", "json", "yaml")
@state_option
def command(*, output: str, state: Path | None) -> None:
    """Show every share with its limits and its use of each GPU, and the processes that use it.

    MODE is how a share is held to its limits: `soft`, `mps`, `mig`, `exclusive` or `timeslice`. A
    LIMIT like 12Gi+host is that of an oversubscribed share, and HOST is how much of what it uses
    may lie on the host: all of it while `allot suspend` has it off the GPU. COMPUTE is its
    guarantee and its ceiling in percent of the GPU, its class where that is another than normal,
    and its weight where that is another than 100; it is `-` where none was asked for and nobody
    takes turns. In mode mps it is the part of the multiprocessors of each process. GPU TIME is
    what its kernels took so far: measured where some share of the GPU asked for compute. `allot
    top` shows how much of the GPU that is at the moment.

    ENFORCED is `no` for a process that uses the GPU without the shim (statically linked, an own
    loader): its limit is not in force. It is `exclusive` or `timeslice` for a share of a mode that
    enforces nothing: it has its GPUs alone, or the driver slices their time. Processes that use a
    GPU outside any share come last. A share that ended is removed; one of a pod goes with its pod,
    and is `waiting` while no program is in it.

    \b
    Examples:
      allot ps
      allot ps -o json | jq '.shares[] | select(.enforced | not)'
    """  # noqa: D301 - click's mark
    from allotment.cli.machines import known_machines, readings
    from allotment.shares.folders import StateFolder
    from allotment.shares.mps_daemons import losses, servers
    from allotment.shares.sessions import inside_share, settle_slices
    from allotment.shares.views import current, overview

    folder = StateFolder.at(state)
    shares = current(folder)
    settle_slices(folder, patience_s=10)
    seen = overview(
        shares,
        readings,
        machines=known_machines(folder),
        serving=servers(folder),
        losses=losses(folder),
    )
    if output == "table":
        _print(seen)
        _tell_losses(seen)
    else:
        from allotment.cli.documents import print_document, shares_document

        print_document(shares_document(seen), output)
    if state is not None and not folder.exists() and not inside_share():
        click.echo(f"note: {folder.root} is no state folder: nothing was ever run there", err=True)


def _print(seen: "Overview") -> None:
    from allotment.cli.tables import Column, has_host, print_table

    views = seen.shares
    if not views:
        from allotment.shares.sessions import inside_share

        where = " can be seen from inside of one" if inside_share() else ""
        click.echo(f"No shares{where}.", err=True)
    if not views and not seen.outside:
        return
    columns: tuple[Column, ...] = (
        Column("SHARE"),
        Column("STATE", is_optional=True),
        Column("MODE", is_optional=True),
        Column("GPU"),
        Column("LIMIT", is_number=True),
        Column("USED", is_number=True),
        Column(_HOST, is_number=True, is_optional=True),
        Column("PEAK", is_number=True, is_optional=True),
        Column("COMPUTE"),
        Column("GPU TIME", is_number=True, is_optional=True),
        Column("PID", is_number=True),
        Column("ENFORCED"),
        Column("INJECTION", is_optional=True),
        Column("COMMAND"),
    )
    rows = [row for each in views for row in _rows(each)]
    rows += [_outside_row(each) for each in seen.outside]
    if not any(has_host(device) for each in views for device in each.devices):
        host = [column.heading for column in columns].index(_HOST)
        columns = columns[:host] + columns[host + 1 :]
        rows = [row[:host] + row[host + 1 :] for row in rows]
    print_table(columns, rows)
    for each in views:
        if each.problem:
            click.echo(f"warning: share {each.name}: {each.problem.message}", err=True)
            if each.problem.hint:
                click.echo(f"hint: {each.problem.hint}", err=True)


def _tell_losses(seen: "Overview") -> None:
    """Name the shares whose programs lost what they had on a GPU by the end of its MPS daemon."""
    from allotment.cli.documents import utc

    affected: dict[LossView, list[str]] = {}
    for each in seen.shares:
        for loss in each.losses[-1:]:
            affected.setdefault(loss, []).append(each.name)
    for loss, names in affected.items():
        back = f"; back after {loss.recovered_s} s" if loss.recovered_s is not None else ""
        click.echo(
            f"warning: GPU {loss.uuid}: {loss.reason} ({utc(loss.time)}{back}): programs that ran"
            f" in {', '.join(names)} lost what they had there",
            err=True,
        )
    if affected:
        click.echo(
            "hint: programs that go on with errors of CUDA have to be started again", err=True
        )


def _rows(view: "ShareView") -> "Iterator[tuple[str, ...]]":
    """One row for each device of a share, then one for each process and device that it uses."""
    from allotment.cli.tables import command_of, host_of, limit_of, short_uuid
    from allotment.model.formats import format_bytes

    share = view.share
    command = command_of(view)
    for index, device in enumerate(view.devices):
        yield (
            view.name if index == 0 else "",
            str(view.state) if index == 0 else "",
            (share.mode if share else "?") if index == 0 else "",
            short_uuid(device.uuid),
            limit_of(device),
            format_bytes(device.used),
            host_of(device),
            format_bytes(device.peak),
            _compute(device.compute),
            _gpu_time(device.compute),
            str(share.runner.pid) if share and share.runner and index == 0 else "",
            view.enforcement if index == 0 else "",
            (str(share.injection) if share else "") if index == 0 else "",
            command if index == 0 else "",
        )
    if not view.devices:
        state = str(view.state)
        yield (
            view.name,
            state,
            share.mode if share else "?",
            "?",
            "?",
            "?",
            "",
            "?",
            "?",
            "",
            "",
            "no",
            "",
            command,
        )
    for process in view.processes:
        yield from _process_rows(view, process)


def _outside_row(user: "OutsideView") -> tuple[str, ...]:
    from allotment.cli.tables import OUTSIDE, short_uuid
    from allotment.model.formats import format_bytes

    used = "?" if user.used is None else format_bytes(user.used)
    gpu, pid = short_uuid(user.uuid), str(user.pid)
    return (OUTSIDE, "", "", gpu, "", used, "", "", "", "", pid, "no", "", user.command)


def _compute(compute: "ComputeView | None") -> str:
    from allotment.cli.tables import described

    return described(compute.promised, takes_turns=compute.is_measured) if compute else "-"


def _gpu_time(compute: "ComputeView | None") -> str:
    from allotment.model.formats import format_duration

    if compute is None or not (compute.is_measured or compute.use.gpu_ns):
        return "-"
    return format_duration(compute.use.gpu_ns) if compute.use.gpu_ns else "0s"


def _enforced(view: "ShareView", process: "ProcessView") -> str:
    """Tell of a process; of one in a share that is not enforced at all, nothing is to be told."""
    if view.remark:
        return "-"
    return "yes" if process.is_enforced else "no"


def _process_rows(view: "ShareView", process: "ProcessView") -> "Iterator[tuple[str, ...]]":
    from allotment.cli.tables import short_uuid
    from allotment.model.formats import format_bytes

    pid = str(process.pid if process.pid is not None else process.pid_inside)
    for device, used, peak in zip(view.devices, process.used, process.peak, strict=False):
        if used or peak or len(view.devices) == 1:
            yield (
                "",
                "",
                "",
                short_uuid(device.uuid),
                "",
                format_bytes(used),
                "",
                format_bytes(peak),
                "",
                "",
                pid,
                _enforced(view, process),
                "",
                process.command,
            )
