# SPDX-License-Identifier: Apache-2.0
"""`allot env`: prints the variables for simulated GPUs in a shell."""

import os
import shlex
import signal
from pathlib import Path
from typing import NoReturn

import click

from allotment.cli.options import simulated_option, state_option
from allotment.model.errors import PrerequisiteError, UsageError

_VARIABLES = ("ALLOTMENT_SIMULATED", "ALLOTMENT_SIMULATED_MACHINE")
_LISTS = ("LD_LIBRARY_PATH", "PATH")
"""Variables with the folder of the simulated libraries and programs before other folders."""


@click.command(
    short_help="Print the variables that let a shell's programs use simulated GPUs.",
    context_settings={"allow_interspersed_args": False},
)
@simulated_option
@click.option(
    "--driver-root",
    metavar="DIR",
    type=click.Path(path_type=Path, file_okay=False),
    help="Make a driver's files in this folder, for NVIDIA's own programs: versioned libraries,"
    " /proc/driver/nvidia, /sys/bus/pci, device nodes. Needs root.",
)
@click.option("--unset", is_flag=True, help="Print the lines that undo it.")
@state_option
@click.argument("program", metavar="[-- COMMAND...]", nargs=-1, type=click.UNPROCESSED)
def command(
    *,
    simulated: str | None,
    driver_root: Path | None,
    unset: bool,
    state: Path | None,
    program: tuple[str, ...],
) -> None:
    """Print the variables that let programs of a shell use whole simulated GPUs, without a share.

    PATH gets the nvidia-smi of simulated GPUs.

    `allot run` in that shell uses the same simulated GPUs, and its commands get a share of them.
    Programs outside any share have no limits: they use memory and time that shares were promised.

    With COMMAND: run it with these variables. With --driver-root it sees the files of DIR in place
    of the machine's, in a mount namespace of its own.

    \b
    Examples:
      eval "$(allot env --simulated a100-80gb:2)"
      eval "$(allot env --unset)"
      allot env --simulated t4 --driver-root /var/lib/gpu -- nvidia-device-plugin
    """  # noqa: D301 - click's mark
    if unset:
        for name in _VARIABLES:
            click.echo(f"unset {name}")
        for name in _LISTS:
            rest = ":".join(_without_ours(name))
            click.echo(f"export {name}={shlex.quote(rest)}" if rest else f"unset {name}")
        return
    if not simulated:
        raise UsageError(
            "missing --simulated",
            hint='for example: eval "$(allot env --simulated a100-80gb:2)"',
        )
    from allotment.shares.folders import StateFolder, simulated_copy
    from allotment.shares.run.command import check_loadable, local_devices

    folder = StateFolder.at(state)
    check_loadable(folder, blanks=False)
    machine, _ = local_devices(folder, simulated)
    programs = simulated_copy(folder)
    libraries = tools = str(programs)
    if driver_root is not None and machine is not None:
        from allotment.devices.driver_root import library_folder, make_driver_root

        driver_root = driver_root.absolute()
        make_driver_root(driver_root, machine, programs)
        libraries, tools = str(library_folder(driver_root)), str(driver_root / "usr/bin")
    spec = str(Path(simulated).absolute()) if Path(simulated).is_file() else simulated
    values = {
        "ALLOTMENT_SIMULATED": spec,
        "ALLOTMENT_SIMULATED_MACHINE": str(machine),
        "LD_LIBRARY_PATH": ":".join([libraries, *_without_ours("LD_LIBRARY_PATH")]),
        "PATH": ":".join([tools, *_without_ours("PATH")]),
    }
    if state:
        values["ALLOTMENT_STATE"] = str(folder.root)
    if program:
        _run(program, values, driver_root)
    for name, value in values.items():
        click.echo(f"export {name}={shlex.quote(value)}")


def _without_ours(name: str) -> list[str]:
    """Return a list of folders without those that an earlier `allot env` added."""
    parts = os.environ.get(name, "").split(":")
    return [part for part in parts if part and "/simulated/lib/" not in part]


def _run(program: tuple[str, ...], values: dict[str, str], driver_root: Path | None) -> NoReturn:
    from allotment.shares.run.child_process import find_program

    found = find_program(program, values["PATH"])
    if driver_root is not None:
        from allotment.devices.driver_root import ADDS, COVERS, library_folder
        from allotment.shares.run.namespace import enter_driver_root

        try:
            enter_driver_root(driver_root, library_folder(driver_root), COVERS, ADDS)
        except OSError as error:
            raise PrerequisiteError(
                f"cannot show the files of {driver_root} to a program: {error}",
                hint="it needs CAP_SYS_ADMIN for a mount namespace: run it as root",
            ) from error
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # Python ignores it, and a program inherits that
    os.execve(found.path, found.arguments, {**os.environ, **values})
