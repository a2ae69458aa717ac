# SPDX-License-Identifier: Apache-2.0
"""`allot devices`: the machine's GPUs, and what is allotted and used of each."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from allotment.cli.options import output_option, simulated_option, state_option

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from allotment.cli.documents import Document
    from allotment.cli.machines import DeviceRow
    from allotment.devices.sources import Problem
    from allotment.model.shares import Share
    from allotment.shares.views import OutsideView


@click.command(short_help="Show the GPUs, and what is allotted and used of each.")
@simulated_option
@output_option("table", "json", "yaml")
@state_option
def command(*, simulated: str | None, output: str, state: Path | None) -> None:
    """Show every GPU: UUID, model, memory in all, allotted to shares and used, utilisation, shares.

    MEMORY is what the GPU has. The driver keeps some of it for itself; the rest is what shares are
    ALLOTTED of. Under each GPU: the processes that use it outside any share.

    Without --simulated: the machine's own GPUs, and the simulated ones that shares are on.

    \b
    Examples:
      allot devices
      allot devices --simulated a100-80gb:2,t4 -o json
    """  # noqa: D301 - click's mark
    from functools import cache

    from allotment.cli.machines import readings, survey
    from allotment.shares.folders import StateFolder
    from allotment.shares.views import current, overview

    folder = StateFolder.at(state)
    shares = current(folder)
    once = cache(readings)  # the shares' figures and the devices' are of the same moment
    rows, problems = survey(folder, simulated, shares, once)
    machines = {row.machine for row in rows}
    here = [each for each in shares if each.share and _machine_of(each.share) in machines]
    outside = overview(here, once, machines=machines).outside
    if output == "table":
        _print(rows, outside)
        for problem in problems:
            name = problem.uuid or f"number {problem.index}"
            click.echo(f"warning: GPU {name} does not answer: {problem.message}", err=True)
        return
    from allotment.cli.documents import print_document

    print_document(_document(rows, problems, outside), output)


def _machine_of(share: "Share") -> Path | None:
    return Path(share.machine) if share.machine else None


def _document(
    rows: "Iterable[DeviceRow]", problems: "Iterable[Problem]", outside: "Sequence[OutsideView]"
) -> "Document":
    return {
        "devices": [_device_document(row, outside) for row in rows],
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
        "problem": row.problem,
    }


def _print(rows: "Iterable[DeviceRow]", outside: "Sequence[OutsideView]") -> None:
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
                "simulated" if row.device.simulated else "real",
            )
        )
        shown += [_outside_row(each, cells) for each in outside if each.uuid == row.device.uuid]
    print_table(columns, shown)


def _outside_row(user: "OutsideView", cells: int) -> tuple[str, ...]:
    """Return the row of a process outside; its command has as many cells as the models' names."""
    from allotment.cli.tables import OUTSIDE, shortened
    from allotment.model.formats import format_bytes

    used = "?" if user.used is None else format_bytes(user.used)
    who, command = f"{OUTSIDE} {user.pid}", shortened(user.command, cells)
    return ("", who, command, "", "", used, "", "", "", "")


def _percent(value: int | None) -> str:
    return "-" if value is None else f"{value}%"
