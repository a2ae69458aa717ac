# SPDX-License-Identifier: Apache-2.0
"""`allot devices`: the machine's GPUs, and what is allotted and used of each."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from allotment.cli.options import output_option, simulated_option, state_option

if TYPE_CHECKING:
    from collections.abc import Iterable

    from allotment.cli.documents import Document
    from allotment.cli.machines import DeviceRow
    from allotment.devices.sources import Problem


@click.command(short_help="Show the GPUs, and what is allotted and used of each.")
@simulated_option
@output_option("table", "json", "yaml")
@state_option
def command(*, simulated: str | None, output: str, state: Path | None) -> None:
    """Show every GPU: UUID, model, memory in all, allotted to shares and used, utilisation, shares.

    Without --simulated: the machine's own GPUs, and the simulated ones that shares are on.

    \b
    Examples:
      allot devices
      allot devices --simulated a100-80gb:2,t4 -o json
    """  # noqa: D301 - click's mark
    from allotment.cli.machines import survey
    from allotment.shares.folders import StateFolder
    from allotment.shares.views import current

    folder = StateFolder.at(state)
    shares = current(folder)
    rows, problems = survey(folder, simulated, shares)
    if output == "table":
        _print(rows)
        for problem in problems:
            name = problem.uuid or f"number {problem.index}"
            click.echo(f"warning: GPU {name} does not answer: {problem.message}", err=True)
        return
    from allotment.cli.documents import print_document

    print_document(_document(rows, problems), output)


def _document(rows: "Iterable[DeviceRow]", problems: "Iterable[Problem]") -> "Document":
    return {
        "devices": [_device_document(row) for row in rows],
        "problems": [
            {"index": each.index, "uuid": each.uuid, "message": each.message} for each in problems
        ],
    }


def _device_document(row: "DeviceRow") -> "Document":
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
        "gpu_percent": reading.gpu_percent if reading else None,
        "memory_percent": reading.memory_percent if reading else None,
        "temperature_c": reading.temperature_c if reading else None,
        "power_mw": reading.power_mw if reading else None,
        "shares": list(row.shares),
        "processes": [
            {"pid": process.pid, "memory_used_bytes": process.used_bytes}
            for process in (reading.processes if reading else ())
        ],
        "sm_count": device.sm_count,
        "compute_capability": ".".join(map(str, device.compute_capability)),
        "numa_node": device.numa_node,
        "pci_bus_id": device.pci_bus_id,
        "mig": device.mig,
        "problem": row.problem,
    }


def _print(rows: "Iterable[DeviceRow]") -> None:
    from allotment.cli.tables import Column, print_table
    from allotment.model.formats import format_bytes

    columns = (
        Column("#", is_number=True),
        Column("UUID"),
        Column("MODEL"),
        Column("MEMORY", is_number=True),
        Column("ALLOTTED", is_number=True),
        Column("USED", is_number=True),
        Column("GPU", is_number=True),
        Column("SHARES", is_number=True),
        Column("KIND"),
    )
    print_table(
        columns,
        [
            (
                str(row.device.index),
                row.device.uuid,
                row.device.name,
                format_bytes(row.device.memory_bytes),
                format_bytes(row.allotted),
                format_bytes(row.reading.used_bytes) if row.reading else row.problem or "?",
                _percent(row.reading.gpu_percent if row.reading else None),
                str(len(row.shares)),
                "simulated" if row.device.simulated else "real",
            )
            for row in rows
        ],
    )


def _percent(value: int | None) -> str:
    return "-" if value is None else f"{value}%"
