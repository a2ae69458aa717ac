# SPDX-License-Identifier: Apache-2.0
"""`allot devices`: the GPUs of this machine, their use, and the modes that each allows."""

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from allotment.cli.documents import print_document
from allotment.cli.options import DURATION_NS, TABLES, output_option, simulated_option, state_option
from allotment.cli.tables import (
    Column,
    base_names,
    cells_of,
    print_table,
    short_uuid,
    shortened,
)
from allotment.model.errors import UsageError
from allotment.model.formats import format_bytes, format_percent

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from allotment.cli.documents import Document
    from allotment.cli.machines import DeviceRow
    from allotment.cli.mig import MigRow
    from allotment.devices.sources import Problem
    from allotment.model.shares import Share
    from allotment.shares.status import OutsideView

_INTERRUPTED: Final = 130  # 128 + SIGINT, as in shells


@click.group(
    short_help="Show the GPUs, and how much of each is allotted and used.",
    invoke_without_command=True,
)
@simulated_option
@output_option("table", "wide", "name", "json", "yaml")
@state_option
@click.pass_context
def command(
    context: click.Context, *, simulated: str | None, output: str, state: Path | None
) -> None:
    """Show every GPU with its memory, allotted and used memory, utilisation and shares.

    MEMORY is the GPU's total. The driver reserves some of it; the rest can be ALLOTTED to shares.
    MODE is the mode of the shares on the GPU, and the modes that `set-mode` allows. Below each GPU:
    its MIG slices with their users, and processes that use it outside any share. Every option that
    takes a UUID takes the start of it; `-o wide` shows it whole.

    Without --simulated: the real GPUs, and the simulated ones with shares.

    \b
    Examples:
      allot devices
      allot devices --simulated a100-80gb:2,t4 -o json
      allot devices set-mode GPU-4f6e soft,mps
    """  # noqa: D301 - click's mark
    if context.invoked_subcommand is not None:
        return
    from allotment.cli.machines import survey
    from allotment.devices.nvml import readings
    from allotment.shares.folders import StateFolder
    from allotment.shares.mps_daemons import servers
    from allotment.shares.status import current, share_status

    folder = StateFolder.at(state)
    shares = current(folder)
    once = cache(readings)  # one reading for shares and devices
    rows, problems = survey(folder, simulated, shares, once)
    machines = {row.machine for row in rows}
    shown_shares = [
        share for share in shares if share.share and _machine_of(share.share) in machines
    ]
    outside = share_status(shown_shares, once, machines=machines, serving=servers(folder)).outside
    slices: Mapping[str, Sequence[MigRow]] = {}
    if any(row.device.mig for row in rows):
        from allotment.cli.mig import mig_rows

        split = {row.machine for row in rows if row.device.mig}
        slices = mig_rows(
            folder,
            split,
            shares={share.id: share.name for share in shares},
            of_devices={uuid: share.name for share in shares for uuid in share.limits()},
        )
    if output == "name":
        for row in rows:
            click.echo(row.device.uuid)
        return
    if output in TABLES:
        _print(rows, outside, slices, is_wide=output == "wide")
        for problem in problems:
            name = problem.uuid or f"number {problem.index}"
            click.echo(f"warning: GPU {name} does not answer: {problem.message}", err=True)
        return
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
                "mig_slices": [
                    mig_slice.to_document() for mig_slice in slices.get(row.device.uuid, ())
                ],
            }
            for row in rows
        ],
        "problems": [
            {"index": problem.index, "uuid": problem.uuid, "message": problem.message}
            for problem in problems
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
            {"pid": user.pid, "command": user.command, "memory_used_bytes": user.used}
            for user in outside
            if user.uuid == device.uuid
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
    *,
    is_wide: bool = False,
) -> None:
    uuid_of = str if is_wide else short_uuid
    columns = (
        Column("#", is_number=True),
        Column("UUID"),
        Column("MODEL", rank=1),
        Column("MEMORY", rank=5, is_number=True),
        Column("ALLOTTED", is_number=True),
        Column("USED", is_number=True),
        Column("GUARANTEED", rank=4, is_number=True),
        Column("GPU", rank=3, is_number=True),
        Column("SHARES", rank=2, is_number=True),
        Column("MODE"),
        Column("KIND", rank=6),
    )
    listed = list(rows)
    # A command is cut to the width of the model names: it must not push out a column.
    cells = max((len(row.device.name) for row in listed), default=0)
    shown: list[dict[str, str]] = []
    for row in listed:
        shown.append(_device_row(row) | {"UUID": uuid_of(row.device.uuid)})
        shown += [
            _slice_row(entry) | ({"UUID": uuid_of(entry.uuid)} if entry.uuid else {})
            for entry in slices.get(row.device.uuid, ())
        ]
        shown += [_outside_row(entry, cells) for entry in outside if entry.uuid == row.device.uuid]
    print_table(columns, cells_of(columns, shown), is_wide=is_wide)


def _device_row(row: "DeviceRow") -> dict[str, str]:
    device, reading = row.device, row.reading
    return {
        "#": str(device.index),
        "MODEL": device.name,
        "MEMORY": format_bytes(device.memory_bytes),
        "ALLOTTED": f"{format_bytes(row.allotted)} of {format_bytes(device.allottable_bytes)}",
        "USED": format_bytes(reading.used_bytes) if reading else row.problem or "?",
        "GUARANTEED": f"{format_percent(row.guaranteed)}%",
        "GPU": _percent(reading.gpu_percent if reading else None),
        "SHARES": str(len(row.shares)),
        "MODE": _mode(row),
        "KIND": "simulated" if device.simulated else "real",
    }


def _slice_row(piece: "MigRow") -> dict[str, str]:
    return {
        "UUID": "(incomplete)",
        "MODEL": f"{piece.profile}, {piece.place}",
        "MEMORY": "?" if piece.memory_bytes is None else format_bytes(piece.memory_bytes),
        "ALLOTTED": piece.user,
        "KIND": "MIG",
    }


def _outside_row(user: "OutsideView", cells: int) -> dict[str, str]:
    """Return the row of a process outside any share; `cells` limits its command."""
    return {
        "UUID": f"outside {user.pid}",
        "MODEL": shortened(base_names(user.command), cells),
        "USED": "?" if user.used is None else format_bytes(user.used),
    }


def _mode(row: "DeviceRow") -> str:
    """Return the mode of a GPU and its allowed modes: `soft`, `soft, drains for mig`."""
    if row.allowed is None:
        return row.mode or "-"
    modes = "/".join(row.allowed.modes) or "none"
    if row.is_draining:
        return f"{row.mode}, drains for {modes}"
    return f"{row.mode}, only {modes}" if row.mode and row.mode != modes else f"only {modes}"


def _percent(value: int | None) -> str:
    return "-" if value is None else f"{value}%"


@command.command("set-mode", short_help="Set the modes that a GPU allows.")
@click.argument("gpu", metavar="GPU")
@click.argument("modes", metavar="MODE[,MODE...]")
@click.option(
    "--drain",
    is_flag=True,
    help="If shares of other modes are on the GPU: refuse new ones, and wait for their end.",
)
@click.option(
    "--timeout",
    "timeout_ns",
    type=DURATION_NS,
    metavar="DURATION",
    help="How long to wait, like 5m. Draining continues after that.  [default: no limit]",
)
@click.option(
    "--reset",
    is_flag=True,
    help="Allow a reset if the GPU needs one to switch MIG (A100, A30). It is reset once unused,"
    " together with the GPUs that NVLink joins to it.",
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
    timeout_ns: float | None,
    reset: bool,
    simulated: str | None,
    state: Path | None,
) -> int:
    """Allow only shares of these modes on a GPU (its UUID, or the start of it).

    The modes are soft, mps, mig, exclusive and timeslice; `default` allows all again. The setting
    applies to all commands until it is changed or the machine restarts. All shares on a GPU use the
    same mode; if several are allowed, the first share decides.

    `allot run` creates soft, mps and mig shares. A GPU that allows only exclusive or timeslice gets
    none of them. It is for programs outside shares, and on a node for containers that use it whole.

    With mig alone, MIG is switched on and stays on. Without mig, MIG is switched off once no slice
    is used. Idle slices are removed; foreign slices cause an error. Running programs are never
    killed.

    If shares of other modes are on the GPU, the command fails with exit code 7 and changes nothing.
    With --drain it waits for their end. After a timeout or Ctrl-C the GPU continues to drain;
    `allot devices set-mode GPU default` cancels that.

    \b
    Examples:
      allot devices set-mode GPU-4f6e soft,mps
      allot devices set-mode GPU-4f6e mig --drain --timeout 5m
      allot devices set-mode GPU-4f6e default
    """  # noqa: D301 - click's mark
    from allotment.cli.machines import device_named
    from allotment.modes import mode_named
    from allotment.shares.drain import ModeChange
    from allotment.shares.folders import StateFolder
    from allotment.shares.mode_policy import parse_modes
    from allotment.shares.run.command import refuse_inside

    above = context.parent.params if context.parent else {}
    folder = StateFolder.at(state or above.get("state"))
    wanted = parse_modes(modes)
    if timeout_ns is not None and not drain:
        raise UsageError("--timeout needs --drain", hint="add --drain, or remove --timeout")
    patience_s = float("inf") if timeout_ns is None else timeout_ns / 1e9
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
                f"\nGPU {device.uuid} continues to drain for {', '.join(wanted)}; to cancel:"
                f" allot devices set-mode {device.uuid} default",
                err=True,
            )
        return _INTERRUPTED
    if wanted is not None and all(mode_named(mode).remark for mode in wanted):
        click.echo(
            f"note: `allot run` and `allot cdi` create no shares of mode {' or '.join(wanted)}."
            f" GPU {device.uuid} is for programs without a share, and on a node for containers"
            " that request it by NVIDIA's resources",
            err=True,
        )
    return 0
