# SPDX-License-Identifier: Apache-2.0
"""Options that several commands have, so that each is spelled and explained once."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from allotment.model.quantities import MemoryAmount

__all__ = ["MEMORY", "complete_share", "output_option", "simulated_option", "state_option"]

_F = TypeVar("_F", bound=Callable[..., Any])


class MemoryType(click.ParamType[Any]):
    """An amount of memory on the command line."""

    name = "memory"

    def convert(
        self,
        value: Any,  # noqa: ANN401 - click's signature
        param: click.Parameter | None,  # noqa: ARG002
        ctx: click.Context | None,  # noqa: ARG002
    ) -> "MemoryAmount":
        """Parse a text; what is parsed already passes through."""
        from allotment.model.quantities import MemoryAmount, parse_memory

        return value if isinstance(value, MemoryAmount) else parse_memory(str(value))


MEMORY = MemoryType()


def complete_share(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:  # noqa: ARG001
    """Complete the name of a share; a folder that cannot be read completes nothing."""
    from allotment.model.errors import AllotError
    from allotment.shares.folders import StateFolder
    from allotment.shares.lives import look

    try:
        shares = look(StateFolder.at(ctx.params.get("state")))
    except AllotError:
        return []
    return [share.name for share in shares if share.name.startswith(incomplete)]


def state_option(function: _F) -> _F:
    """Add `--state`."""
    return click.option(
        "--state",
        metavar="DIR",
        type=click.Path(path_type=Path),
        envvar="ALLOTMENT_STATE",
        help="State folder [env: ALLOTMENT_STATE; default: /run/allotment, or the user's own].",
    )(function)


def simulated_option(function: _F) -> _F:
    """Add `--simulated`."""
    return click.option(
        "--simulated",
        metavar="SPEC",
        envvar="ALLOTMENT_SIMULATED",
        help="Simulated GPUs, like a100-80gb:2,t4, or a YAML file [env: ALLOTMENT_SIMULATED].",
    )(function)


def output_option(*kinds: str) -> Callable[[_F], _F]:
    """Add `-o/--output` with these kinds, the first of them the default."""
    return click.option(
        "-o",
        "--output",
        type=click.Choice(kinds),
        default=kinds[0],
        show_default=True,
        help="Format; JSON and YAML are stable (docs/reference/json.md)."
        if "yaml" in kinds
        else "Format; JSON is stable.",
    )
