# SPDX-License-Identifier: Apache-2.0
"""`allot fault`: injects faults into simulated GPUs."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from allotment.cli.options import DURATION_NS, simulated_option, state_option
from allotment.cli.tables import Column, print_table
from allotment.model.errors import NotFoundError, UsageError
from allotment.model.formats import format_duration
from allotment.model.structs import replace

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from allotment.devices.faults import MigCall, MigFault
    from allotment.model.devices import Device

_LAST_NVML_ERROR = 999


@click.command(short_help="Inject a fault into a simulated GPU, or clear it.")
@simulated_option
@click.option("--gpu", metavar="UUID|MODEL", help="Its GPU.  [default: all its GPUs]")
@click.option("--xid", metavar="N", type=click.IntRange(1, 1023), help="Report this XID error.")
@click.option("--lost/--found", default=None, help="Let the GPU fall off the bus, or return to it.")
@click.option(
    "--hang",
    "hang_ns",
    metavar="TIME",
    type=DURATION_NS,
    help="Delay every call on it by this time; 0 clears.",
)
@click.option(
    "--counter",
    "counters",
    metavar="NAME=N",
    multiple=True,
    help="Set an error counter, like ecc_volatile_uncorrected=1. May be repeated.",
)
@click.option(
    "--nvml/--no-nvml", "nvml", default=None, help="Let NVML load or fail (whole machine)."
)
@click.option(
    "--cuda-init",
    metavar="N",
    type=click.IntRange(0, 999),
    help="Let cuInit fail with this CUresult; 0 clears (whole machine).",
)
@click.option(
    "--release",
    "release_ns",
    metavar="TIME",
    type=DURATION_NS,
    help="Free a program's memory this long after its end; 0 clears (whole machine).",
)
@click.option(
    "--mig-slow",
    metavar="CALL=TIME",
    multiple=True,
    help="Delay a MIG call by this time: set-mode, create-gpu, create-compute, destroy-gpu,"
    " destroy-compute, reset.",
)
@click.option(
    "--mig-error",
    metavar="CALL=N",
    multiple=True,
    help="Let a MIG call do nothing and return this nvmlReturn_t; 0 clears.",
)
@click.option(
    "--reset",
    is_flag=True,
    help="Reset the GPU like `nvidia-smi --gpu-reset`: this applies a pending MIG mode, and starts"
    " the counters of energy and volatile ECC errors anew.",
)
@click.option("--clear", is_flag=True, help="Clear all faults and XIDs first.")
@state_option
def command(
    *,
    simulated: str | None,
    gpu: str | None,
    xid: int | None,
    lost: bool | None,
    hang_ns: int | None,
    counters: tuple[str, ...],
    nvml: bool | None,
    cuda_init: int | None,
    release_ns: int | None,
    mig_slow: tuple[str, ...],
    mig_error: tuple[str, ...],
    reset: bool,
    clear: bool,
    state: Path | None,
) -> None:
    """Inject faults into simulated GPUs or clear them, and show the faults of the machine.

    Every program on that simulated machine meets the fault at its next call.

    \b
    Examples:
      allot fault --simulated a100-80gb:2 --gpu GPU-4f6e21b0 --lost
      allot fault --simulated a100-80gb:2 --xid 43
      allot fault --simulated a100-80gb:2 --mig-slow create-gpu=2s
      allot fault --simulated a100-80gb:2 --mig-error create-compute=23
      allot fault --simulated a100-80gb:2 --reset
      allot fault --simulated a100-80gb:2 --clear
    """  # noqa: D301 - click's mark
    from allotment.devices.faults import clear_faults, set_driver_fault, set_fault, set_mig_fault
    from allotment.devices.simulated import reset_gpu
    from allotment.model.quantities import parse_duration_ns
    from allotment.shares.folders import StateFolder
    from allotment.shares.run.command import local_devices

    if not simulated:
        raise UsageError(
            "missing --simulated",
            hint="give the machine as for `allot run`: --simulated a100-80gb:2",
        )
    machine, devices = local_devices(StateFolder.at(state), simulated)
    if machine is None:
        raise UsageError("faults work on simulated GPUs only")
    chosen = _indices(devices, gpu)
    values = _counters(counters)
    slow_us = _mig_values("--mig-slow", mig_slow, lambda text: parse_duration_ns(text) // 1000)
    errors = _mig_values("--mig-error", mig_error, _nvml_error)
    if clear:
        clear_faults(machine)
    for index in chosen:
        set_fault(
            machine,
            index,
            xid=xid,
            lost=lost,
            hang_us=None if hang_ns is None else hang_ns // 1000,
            counters=values,
        )
        for call, fault in _mig_faults(machine, index, slow_us=slow_us, errors=errors):
            set_mig_fault(machine, index, call, fault)
        if reset:
            reset_gpu(machine, index)
    set_driver_fault(
        machine,
        nvml_not_loaded=None if nvml is None else not nvml,
        cuda_init_error=cuda_init,
        release_us=None if release_ns is None else release_ns // 1000,
    )
    _print(machine, devices)


def _indices(devices: "Sequence[Device]", gpu: str | None) -> list[int]:
    from allotment.model.quantities import parse_memory
    from allotment.model.requests import Request
    from allotment.placement import is_selected

    request = Request(parse_memory("1Mi"), selectors=(gpu,) if gpu else ())
    chosen = [index for index, device in enumerate(devices) if is_selected(device, request)]
    if not chosen:
        raise NotFoundError(
            f"no GPU of that machine matches {gpu!r}", hint="see `allot devices --simulated ...`"
        )
    return chosen


def _counters(texts: tuple[str, ...]) -> "Mapping[str, int]":
    values = {}
    for text in texts:
        name, _, number = text.partition("=")
        if not (number.isascii() and number.isdecimal() and len(number) < 20):  # noqa: PLR2004 - 64 bits
            raise UsageError(
                f"--counter {text!r} is not NAME=NUMBER",
                hint="for example: --counter ecc_volatile_uncorrected=1",
            )
        values[name] = int(number)
    return values


def _mig_values(
    option: str, texts: tuple[str, ...], parse: "Callable[[str], int]"
) -> "Mapping[MigCall, int]":
    from allotment.devices.faults import MigCall

    values = {}
    for text in texts:
        name, _, value = text.partition("=")
        call = next((member for member in MigCall if _mig_name(member) == name), None)
        if call is None or not value:
            calls = ", ".join(map(_mig_name, MigCall))
            raise UsageError(
                f"{option}: {text!r} is not CALL=VALUE for a MIG call", hint=f"calls: {calls}"
            )
        try:
            values[call] = parse(value)
        except UsageError as error:
            raise UsageError(f"{option}: {error}", hint=error.hint) from error
    return values


def _nvml_error(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and int(text) <= _LAST_NVML_ERROR):
        raise UsageError(f"{text!r} is not an nvmlReturn_t, like 19 (in use); 0 clears the fault")
    return int(text)


def _mig_name(call: "MigCall") -> str:
    return call.name.lower().replace("_", "-")


def _mig_faults(
    machine: Path,
    gpu: int,
    *,
    slow_us: "Mapping[MigCall, int]",
    errors: "Mapping[MigCall, int]",
) -> "Iterator[tuple[MigCall, MigFault]]":
    from allotment.devices.faults import MigFault, read_faults

    current = read_faults(machine)[gpu].mig
    for call in sorted({*slow_us, *errors}):
        fault = current.get(call, MigFault())
        yield (
            call,
            replace(
                fault,
                slow_us=slow_us.get(call, fault.slow_us),
                error=errors.get(call, fault.error),
            ),
        )


def _mig_text(call: "MigCall", fault: "MigFault") -> "Iterator[str]":
    name = _mig_name(call)
    if fault.slow_us:
        yield f"{name} is delayed by {format_duration(fault.slow_us * 1000)}"
    if fault.error:
        yield f"{name} fails with {fault.error}"
    if fault.ends_before or fault.ends_after:
        yield f"{name} ends its process"


def _print(machine: Path, devices: "Sequence[Device]") -> None:
    from allotment.devices.faults import read_driver_faults, read_faults

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
    for device, faults in zip(devices, read_faults(machine), strict=True):
        for call, fault in faults.mig.items():
            for text in _mig_text(call, fault):
                click.echo(f"{device.uuid}: {text}")
    driver = read_driver_faults(machine)
    if driver.nvml_not_loaded:
        click.echo("whole machine: NVML is not loaded")
    if driver.cuda_init_error:
        click.echo(f"whole machine: cuInit fails with {driver.cuda_init_error}")
    if driver.release_us:
        click.echo(
            "whole machine: memory is freed"
            f" {format_duration(driver.release_us * 1000)} after its program's end"
        )
