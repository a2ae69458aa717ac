# SPDX-License-Identifier: Apache-2.0
"""`allot fault`: break a simulated GPU on purpose, or mend it."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from allotment.cli.options import simulated_option, state_option

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from allotment.model.devices import Device


@click.command(short_help="Break a simulated GPU on purpose, or mend it.")
@simulated_option
@click.option("--gpu", metavar="UUID|MODEL", help="Which of its GPUs; default: all of them.")
@click.option("--xid", metavar="N", type=click.IntRange(1, 1023), help="Report this XID error.")
@click.option("--lost/--found", default=None, help="Let the GPU fall off the bus, or come back.")
@click.option("--hang", metavar="TIME", help="Let every call on it take this long more; 0 mends.")
@click.option(
    "--counter",
    "counters",
    metavar="NAME=N",
    multiple=True,
    help="Set an error counter, like ecc_volatile_uncorrected=1; several times for several.",
)
@click.option(
    "--nvml/--no-nvml", "nvml", default=None, help="Let NVML be loaded, or not (whole machine)."
)
@click.option(
    "--cuda-init",
    metavar="N",
    type=click.IntRange(0, 999),
    help="Let cuInit fail with this CUresult; 0 mends (whole machine).",
)
@click.option("--clear", is_flag=True, help="Mend everything first.")
@state_option
def command(
    *,
    simulated: str | None,
    gpu: str | None,
    xid: int | None,
    lost: bool | None,
    hang: str | None,
    counters: tuple[str, ...],
    nvml: bool | None,
    cuda_init: int | None,
    clear: bool,
    state: Path | None,
) -> None:
    """Give a simulated GPU a fault, or mend it, and show what is wrong with the machine's GPUs.

    Every program on that simulated machine meets the fault at its next call.

    \b
    Examples:
      allot fault --simulated a100-80gb:2 --gpu GPU-4f6e21b0 --lost
      allot fault --simulated a100-80gb:2 --xid 43
      allot fault --simulated a100-80gb:2 --clear
    """  # noqa: D301 - click's mark
    from allotment.devices.faults import clear_faults, set_driver_fault, set_fault
    from allotment.model.errors import UsageError
    from allotment.model.quantities import parse_duration_ns
    from allotment.shares.folders import StateFolder
    from allotment.shares.sessions import local_devices

    if not simulated:
        raise UsageError(
            "which simulated machine is not said",
            hint="say it as for `allot run`: --simulated a100-80gb:2",
        )
    machine, devices = local_devices(StateFolder.at(state), simulated)
    if machine is None:
        raise UsageError("only simulated GPUs can be broken on purpose")
    chosen = _indices(devices, gpu)
    values = _counters(counters)
    if clear:
        clear_faults(machine)
    for index in chosen:
        set_fault(
            machine,
            index,
            xid=xid,
            lost=lost,
            hang_us=None if hang is None else parse_duration_ns(hang) // 1000,
            counters=values,
        )
    set_driver_fault(
        machine, nvml_not_loaded=None if nvml is None else not nvml, cuda_init_error=cuda_init
    )
    _print(machine, devices)


def _indices(devices: "Sequence[Device]", gpu: str | None) -> list[int]:
    """Return the numbers of the GPUs that are meant, in the machine's order."""
    from allotment.model.errors import NotFoundError
    from allotment.model.quantities import parse_memory
    from allotment.model.requests import Request
    from allotment.placement import is_selected

    request = Request(parse_memory("1Mi"), selectors=(gpu,) if gpu else ())
    chosen = [index for index, each in enumerate(devices) if is_selected(each, request)]
    if not chosen:
        raise NotFoundError(
            f"no GPU of that machine is {gpu!r}", hint="see `allot devices --simulated ...`"
        )
    return chosen


def _counters(texts: tuple[str, ...]) -> "Mapping[str, int]":
    from allotment.model.errors import UsageError

    values = {}
    for text in texts:
        name, _, number = text.partition("=")
        if not (number.isascii() and number.isdecimal() and len(number) < 20):  # noqa: PLR2004 - 64 bits
            raise UsageError(
                f"{text!r} is not a counter with a number",
                hint="write it like ecc_volatile_uncorrected=1",
            )
        values[name] = int(number)
    return values


def _print(machine: Path, devices: "Sequence[Device]") -> None:
    from allotment.cli.tables import Column, print_table
    from allotment.devices.faults import read_driver_faults, read_faults
    from allotment.model.formats import format_duration

    print_table(
        (Column("GPU"), Column("LOST"), Column("HANG"), Column("XIDS"), Column("COUNTERS")),
        [
            (
                device.uuid,
                "yes" if faults.lost else "no",
                format_duration(faults.hang_us * 1000) if faults.hang_us else "no",
                " ".join(map(str, faults.xids)) or "none",
                " ".join(f"{name}={value}" for name, value in faults.counters.items() if value)
                or "none",
            )
            for device, faults in zip(devices, read_faults(machine), strict=True)
        ],
    )
    driver = read_driver_faults(machine)
    if driver.nvml_not_loaded:
        click.echo("whole machine: NVML is not loaded")
    if driver.cuda_init_error:
        click.echo(f"whole machine: cuInit fails with {driver.cuda_init_error}")
