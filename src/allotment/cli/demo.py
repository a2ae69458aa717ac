# SPDX-License-Identifier: Apache-2.0
"""`allot demo`: two programs share a GPU."""

from pathlib import Path

import click

from allotment.cli.options import state_option


@click.command(short_help="Watch two programs share a GPU.")
@click.option("--real", is_flag=True, help="Use a GPU of this machine instead of a simulated one.")
@click.option(
    "--simulated",
    metavar="SPEC",
    default="a100-80gb",
    help="The simulated GPU.",
)
@click.option(
    "--seconds",
    metavar="S",
    type=click.FloatRange(1, 3600),
    default=4.0,
    help="How long the programs run.",
)
@state_option
def command(*, real: bool, simulated: str, seconds: float, state: Path | None) -> int:
    """Run two programs on one GPU: `steady` stays within its limit, `greedy` tries to exceed it.

    Both run `allot burn`, a plain CUDA program, by `allot run`. Ends with a summary, and exits with
    1 if a check failed.

    \b
    Examples:
      allot demo
      allot demo --real
    """  # noqa: D301 - click's mark
    from allotment.cli.demo_story import Story

    if real:
        from allotment.shares.folders import StateFolder
        from allotment.shares.run.command import local_devices, refuse_nesting

        refuse_nesting()
        local_devices(StateFolder.at(state), None)  # fails early without a GPU
    return Story(spec=None if real else simulated, seconds=seconds, state=state).play()
