# SPDX-License-Identifier: Apache-2.0
"""`allot env`: what lets any program of a shell use simulated GPUs."""

from pathlib import Path

import click

from allotment.cli.options import simulated_option, state_option

_VARIABLES = ("ALLOTMENT_SIMULATED", "ALLOTMENT_SIMULATED_MACHINE", "LD_LIBRARY_PATH")


@click.command(short_help="Print what lets a shell's programs use simulated GPUs.")
@simulated_option
@click.option("--unset", is_flag=True, help="Print what takes it back.")
@state_option
def command(*, simulated: str | None, unset: bool, state: Path | None) -> None:
    """Print the lines that let any program of a shell use simulated GPUs, whole, without a share.

    `allot run` of that shell uses the same simulated GPUs, and its commands get a share of them.
    What runs outside of any share has no limit of memory and takes no turns: it takes from what was
    promised to shares.

    \b
    Examples:
      eval "$(allot env --simulated a100-80gb:2)"
      eval "$(allot env --unset)"
    """  # noqa: D301 - click's mark
    import os
    import shlex

    from allotment.model.errors import UsageError

    before = os.environ.get("LD_LIBRARY_PATH", "")
    if unset:
        for line in _unset_lines(before):
            click.echo(line)
        return
    if not simulated:
        raise UsageError(
            "which GPUs to simulate is not said",
            hint='say it, as in: eval "$(allot env --simulated a100-80gb:2)"',
        )
    from allotment.shares.copies import simulated_copy
    from allotment.shares.folders import StateFolder
    from allotment.shares.sessions import check_listable, local_devices

    folder = StateFolder.at(state)
    check_listable(folder, blanks=False)
    machine, _ = local_devices(folder, simulated)
    libraries = str(simulated_copy(folder))
    spec = str(Path(simulated).absolute()) if Path(simulated).is_file() else simulated
    values = {
        "ALLOTMENT_SIMULATED": spec,
        "ALLOTMENT_SIMULATED_MACHINE": str(machine),
        "LD_LIBRARY_PATH": ":".join([libraries, *_without_ours(before)]),
    }
    if state:
        values["ALLOTMENT_STATE"] = str(folder.root)
    for name, value in values.items():
        click.echo(f"export {name}={shlex.quote(value)}")


def _without_ours(path: str) -> list[str]:
    """Return a search path's folders without simulated libraries that an earlier call put there."""
    return [part for part in path.split(":") if part and "/simulated/lib/" not in part]


def _unset_lines(library_path: str) -> list[str]:
    import shlex

    rest = _without_ours(library_path)
    lines = [f"unset {name}" for name in _VARIABLES[:2]]
    if rest:
        lines.append(f"export LD_LIBRARY_PATH={shlex.quote(':'.join(rest))}")
    else:
        lines.append("unset LD_LIBRARY_PATH")
    return lines
