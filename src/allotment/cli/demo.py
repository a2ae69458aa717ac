# SPDX-License-Identifier: Apache-2.0
"""`allot demo`: two programs share a GPU, before the user's eyes."""

from pathlib import Path

import click

from allotment.cli.options import state_option


@click.command(short_help="Two programs share a GPU, before your eyes.")
@click.option("--real", is_flag=True, help="Use a GPU of this machine instead of a simulated one.")
@click.option(
    "--simulated",
    metavar="SPEC",
    default="a100-80gb",
    show_default=True,
    help="The simulated GPU.",
)
@click.option(
    "--seconds",
    metavar="S",
    type=click.FloatRange(1, 3600),
    default=4.0,
    show_default=True,
    help="How long the programs run.",
)
@state_option
def command(*, real: bool, simulated: str, seconds: float, state: Path | None) -> int:
    """Let two programs share one GPU: `steady` keeps to its part, `greedy` wants more than its own.

    Both are `allot burn`, plain CUDA programs, in an `allot run` each. It ends with what was seen,
    and with 1 when anything was not as it should be.

    \b
    Examples:
      allot demo
      allot demo --real
    """  # noqa: D301 - click's mark
    from allotment.cli.stories import Story

    if real:
        from allotment.shares.folders import StateFolder
        from allotment.shares.sessions import local_devices, refuse_nesting

        refuse_nesting()
        local_devices(StateFolder.at(state), None)  # fails at once without a GPU
    return Story(spec=None if real else simulated, seconds=seconds, state=state).tell()
