# SPDX-License-Identifier: Apache-2.0
"""`allot env`: prints the variables for simulated GPUs in a shell."""

import os
import shlex
from pathlib import Path

import click

from allotment.cli.options import simulated_option, state_option
from allotment.model.errors import UsageError

_VARIABLES = ("ALLOTMENT_SIMULATED", "ALLOTMENT_SIMULATED_MACHINE")
_LISTS = ("LD_LIBRARY_PATH", "PATH")
"""Variables with the folder of the simulated libraries and programs before other folders."""


@click.command(short_help="Print the variables that let a shell's programs use simulated GPUs.")
@simulated_option
@click.option("--unset", is_flag=True, help="Print the lines that undo it.")
@state_option
def command(*, simulated: str | None, unset: bool, state: Path | None) -> None:
    """Print the variables that let programs of a shell use whole simulated GPUs, without a share.

    PATH gets the nvidia-smi of simulated GPUs.

    `allot run` in that shell uses the same simulated GPUs, and its commands get a share of them.
    Programs outside any share have no limits: they use memory and time that shares were promised.

    \b
    Examples:
      eval "$(allot env --simulated a100-80gb:2)"
      eval "$(allot env --unset)"
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
    from allotment.shares.run.command import check_listable, local_devices

    folder = StateFolder.at(state)
    check_listable(folder, blanks=False)
    machine, _ = local_devices(folder, simulated)
    libraries = str(simulated_copy(folder))
    spec = str(Path(simulated).absolute()) if Path(simulated).is_file() else simulated
    values = {
        "ALLOTMENT_SIMULATED": spec,
        "ALLOTMENT_SIMULATED_MACHINE": str(machine),
        **{name: ":".join([libraries, *_without_ours(name)]) for name in _LISTS},
    }
    if state:
        values["ALLOTMENT_STATE"] = str(folder.root)
    for name, value in values.items():
        click.echo(f"export {name}={shlex.quote(value)}")


def _without_ours(name: str) -> list[str]:
    """Return a list of folders without those that an earlier `allot env` added."""
    parts = os.environ.get(name, "").split(":")
    return [part for part in parts if part and "/simulated/lib/" not in part]
