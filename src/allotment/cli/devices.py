# SPDX-License-Identifier: Apache-2.0
"""`allot devices`: the machine's GPUs, what is used of each, and what each may be used for."""

from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from allotment.cli.options import output_option, simulated_option, state_option

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from allotment.cli.documents import Document
    from allotment.cli.machines import DeviceRow
    from allotment.cli.mig_rows import MigRow
    from allotment.devices.sources import Problem
    from allotment.model.shares import Share
    from allotment.shares.views import OutsideView

_INTERRUPTED: Final = 130  # 128 + SIGINT, as shells have it


@click.group(
    short_help="Show the GPUs, and what is allotted and used of each.",
    invoke_without_command=True,
)
@simulated_option
@output_option("table", "json", "yaml")
@state_option
@click.pass_context
def command(
    context: click.Context, *, simulated: str | None, output: str, state: Path | None
) -> None:
    """Show every GPU: UUID, model, memory in all, allotted to shares and used, utilisation, shares.

    MEMORY is what the GPU has. The driver keeps some of it for itself; the rest is what shares are
    ALLOTTED of. MODE is that of the shares that are on it, and what `set-mode` has said about it.
    Under each GPU: the MIG slices that it is cut into and who has each, and the processes that use
    it outside any share.

    Without --simulated: the machine's own GPUs, and the simulated ones that shares are on.

    \b
    Examples:
      allot devices
      allot devices --simulated a100-80gb:2,t4 -o json
      allot devices set-mode GPU-4f6e soft,mps
    """  # noqa: D301 - click's mark
    if context.invoked_subcommand is not None:
        return
    from functools import cache

    from allotment.cli.machines import readings, survey
    from allotment.shares.folders import StateFolder
    from allotment.shares.mps_daemons import servers
    from allotment.shares.views import current, overview

    folder = StateFolder.at(state)
    shares = current(folder)
    once = cache(readings)  # the shares' figures and the devices' are of the same moment
    rows, problems = survey(folder, simulated, shares, once)
    machines = {row.machine for row in rows}
    here = [each for each in shares if each.share and _machine_of(each.share) in machines]
    outside = overview(here, once, machines=machines, serving=servers(folder)).outside
    slices: Mapping[str, Sequence[MigRow]] = {}
    if any(row.device.mig for row in rows):
        from allotment.cli.mig_rows import mig_rows

        split = {row.machine for row in rows if row.device.mig}
        slices = mig_rows(
            folder,
            split,
            shares={each.id: each.name for each in shares},
            of_devices={uuid: each.name for each in shares for uuid in each.limits()},
        )
    if output == "table":
        _print(rows, outside, slices)
        for problem in problems:
            name = problem.uuid or f"number {problem.index}"
            click.echo(f"warning: GPU {name} does not answer: {problem.message}", err=True)
        return
    from allotment.cli.documents import print_document

    print_document(_document(rows, problems, outside, slices), output)


def _machine_of(share: "Share") -> Path | None:
    return Path(share.machine) if share.machine else None


def _document(
    rows: "Iterable[DeviceRow]",
    problems: "Iterable[Problem]",
    outside: "Sequence[OutsideView]",
    slices: "Mapping[str, Sequence[MigRow]]",
) -> "Document":
    return {
        "devices": [
            {
                **_device_document(row, outside),
                "mig_slices": [each.to_document() for each in slices.get(row.device.uuid, ())],
            }
            for row in rows
        ],
        "problems": [
            {"index": each.index, "uuid": each.uuid, "message": each.message} for each in problems
        ],
    }


def _device_document(row: "DeviceRow", outside: "Sequence[OutsideView]") -> "Document":
    device, reading = row.device, row.reading
    return {
        "uuid": device.uuid,
        "name": device.name,
        "index": device.index,
        "simulated": device.simulated,
        "memory_total_bytes": device.memory_bytes,
        "memory_reserved_bytes": device.reserved_bytes,
        "memory_allottable_bytes": device.allottable_bytes,
        "memory_allotted_bytes": row.allotted,
        "memory_used_bytes": reading.used_bytes if reading else None,
        "compute_guaranteed_percent": row.guaranteed / 100,
        "gpu_percent": reading.gpu_percent if reading else None,
        "memory_percent": reading.memory_percent if reading else None,
        "temperature_c": reading.temperature_c if reading else None,
        "power_mw": reading.power_mw if reading else None,
        "shares": list(row.shares),
        "processes": [
            {"pid": process.pid, "memory_used_bytes": process.used_bytes}
            for process in (reading.processes if reading else ())
        ],
        "outside": [
            {"pid": each.pid, "command": each.command, "memory_used_bytes": each.used}
            for each in outside
            if each.uuid == device.uuid
        ],
        "sm_count": device.sm_count,
        "compute_capability": ".".join(map(str, device.compute_capability)),
        "numa_node": device.numa_node,
        "pci_bus_id": device.pci_bus_id,
        "mig": device.mig,
        "mode": row.mode or None,
        "allowed_modes": None if row.allowed is None else list(row.allowed.modes),
        "draining": row.is_draining,
        "problem": row.problem,
    }


def _print(
    rows: "Iterable[DeviceRow]",
    outside: "Sequence[OutsideView]",
    slices: "Mapping[str, Sequence[MigRow]]",
) -> None:
    from allotment.cli.tables import Column, print_table
    from allotment.model.formats import format_bytes, format_percent

    columns = (
        Column("#", is_number=True),
        Column("UUID"),
        Column("MODEL"),
        Column("MEMORY", is_number=True, is_optional=True),
        Column("ALLOTTED", is_number=True),
        Column("USED", is_number=True),
        Column("GUARANTEED", is_number=True, is_optional=True),
        Column("GPU", is_number=True, is_optional=True),
        Column("SHARES", is_number=True, is_optional=True),
        Column("MODE"),
        Column("KIND"),
    )
    known = list(rows)
    # A process takes no room that the GPUs' own rows need not: no column is left out for it.
    cells = max((len(row.device.name) for row in known), default=0)
    shown: list[tuple[str, ...]] = []
    for row in known:
        shown.append(
            (
                str(row.device.index),
                row.device.uuid,
                row.device.name,
                format_bytes(row.device.memory_bytes),
                f"{format_bytes(row.allotted)} of {format_bytes(row.device.allottable_bytes)}",
                format_bytes(row.reading.used_bytes) if row.reading else row.problem or "?",
                f"{format_percent(row.guaranteed)}%",
                _percent(row.reading.gpu_percent if row.reading else None),
                str(len(row.shares)),
                _mode(row),
                "simulated" if row.device.simulated else "real",
            )
        )
        shown += [_slice_row(each) for each in slices.get(row.device.uuid, ())]
        shown += [_outside_row(each, cells) for each in outside if each.uuid == row.device.uuid]
    print_table(columns, shown)


def _slice_row(piece: "MigRow") -> tuple[str, ...]:
    """Return the row of a MIG slice, under its GPU's."""
    from allotment.model.formats import format_bytes

    memory = "?" if piece.memory_bytes is None else format_bytes(piece.memory_bytes)
    name = f"{piece.profile}, {piece.place}"
    return ("", piece.uuid or "(half made)", name, memory, piece.user, "", "", "", "", "", "MIG")


def _outside_row(user: "OutsideView", cells: int) -> tuple[str, ...]:
    """Return the row of a process outside; its command has as many cells as the models' names."""
    from allotment.cli.tables import OUTSIDE, shortened
    from allotment.model.formats import format_bytes

    used = "?" if user.used is None else format_bytes(user.used)
    who, command = f"{OUTSIDE} {user.pid}", shortened(user.command, cells)
    return ("", who, command, "", "", used, "", "", "", "", "")


def _mode(row: "DeviceRow") -> str:
    """Say which mode a GPU is in, and which it is for: `soft`, `soft, drains for mig`."""
    if row.allowed is None:
        return row.mode or "-"
    modes = "/".join(row.allowed.modes) or "nothing"
    if row.is_draining:
        return f"{row.mode}, drains for {modes}"
    return f"{row.mode}, only {modes}" if row.mode and row.mode != modes else f"only {modes}"


def _percent(value: int | None) -> str:
    return "-" if value is None else f"{value}%"


@command.command("set-mode", short_help="Say what a GPU may be used for from now on.")
@click.argument("gpu", metavar="GPU")
@click.argument("modes", metavar="MODE[,MODE...]")
@click.option(
    "--drain",
    is_flag=True,
    help="Where shares of other modes are on it: let none of theirs come, and wait for their end.",
)
@click.option(
    "--timeout",
    metavar="DURATION",
    help="How long to wait, like 5m; it goes on draining after that.  [default: for ever]",
)
@click.option(
    "--reset",
    is_flag=True,
    help="A GPU that takes MIG with a reset only (A100, A30) may be reset once nobody uses it, and"
    " with it those that NVLink joins to it.",
)
@simulated_option
@state_option
@click.pass_context
def set_mode(
    context: click.Context,
    *,
    gpu: str,
    modes: str,
    drain: bool,
    timeout: str | None,
    reset: bool,
    simulated: str | None,
    state: Path | None,
) -> int:
    """Say that a GPU (its UUID, or the start of it) is for shares of these modes alone.

    The modes are soft, mps, mig, exclusive and timeslice; `default` is all of them again. What is
    said holds for whoever makes shares, until something else is said or the machine starts anew.
    The shares of a GPU at one time are of one mode; where several may be, whoever comes first says.

    `allot run` makes soft, mps and mig shares. A GPU for exclusive or timeslice alone takes none of
    them: it is left to programs outside of shares, and on a node to containers that get it whole.

    For mig alone, MIG is switched on, and stays on; without mig among the modes it is switched off,
    once no slice is used. Slices that are kept warm go, those that others made are refused.

    Where shares of other modes are on the GPU nothing is done (exit code 7), or with --drain they
    are waited for. Nobody is ended. When the waiting is over or cut off by Ctrl-C, the GPU goes on
    draining; `allot devices set-mode GPU default` takes that back.

    \b
    Examples:
      allot devices set-mode GPU-4f6e soft,mps
      allot devices set-mode GPU-4f6e mig --drain --timeout 5m
      allot devices set-mode GPU-4f6e default
    """  # noqa: D301 - click's mark
    from allotment.cli.machines import device_named
    from allotment.model.errors import UsageError
    from allotment.model.quantities import parse_duration_ns
    from allotment.modes import mode_named
    from allotment.shares.changing_modes import ModeChange
    from allotment.shares.folders import StateFolder
    from allotment.shares.modes_of_gpus import parse_modes
    from allotment.shares.sessions import refuse_inside

    above = context.parent.params if context.parent else {}
    folder = StateFolder.at(state or above.get("state"))
    wanted = parse_modes(modes)
    if timeout is not None and not drain:
        raise UsageError("--timeout is of --drain", hint="add --drain, or leave it out")
    patience_s = parse_duration_ns(timeout) / 1e9 if timeout else float("inf")
    refuse_inside(f"allot devices set-mode {gpu} {modes}")
    machine, device = device_named(folder, simulated or above.get("simulated"), gpu)
    change = ModeChange(
        folder=folder,
        device=device,
        machine=machine,
        modes=wanted,
        may_reset=reset,
        tell=lambda text: click.echo(text, err=True),
    )
    try:
        click.echo(change.carry_out(patience_s=patience_s if drain else None))
    except KeyboardInterrupt:
        if wanted is not None:
            click.echo(
                f"\nGPU {device.uuid} goes on draining for {', '.join(wanted)}; to take that back:"
                f" allot devices set-mode {device.uuid} default",
                err=True,
            )
        return _INTERRUPTED
    if wanted is not None and all(mode_named(each).remark for each in wanted):
        click.echo(
            f"note: `allot run` and `allot cdi` make no shares of mode {' or '.join(wanted)}. On"
            f" one machine GPU {device.uuid} is left to programs that run without a share, on a"
            " node to containers that get it by NVIDIA's resources",
            err=True,
        )
    return 0
