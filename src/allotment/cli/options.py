# SPDX-License-Identifier: Apache-2.0
"""Options that several commands have, so that each is spelled and explained once."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from allotment.model.compute import Compute
    from allotment.model.quantities import MemoryAmount

__all__ = [
    "BYTES",
    "COMPUTE",
    "MEMORY",
    "changed_compute_options",
    "complete_share",
    "compute_options",
    "installed",
    "kubeconfig_option",
    "log_options",
    "output_option",
    "oversubscribe_options",
    "requested_compute",
    "simulated_option",
    "state_option",
]

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


class BytesType(click.ParamType[Any]):
    """So many bytes on the command line."""

    name = "bytes"

    def convert(
        self,
        value: Any,  # noqa: ANN401 - click's signature
        param: click.Parameter | None,  # noqa: ARG002
        ctx: click.Context | None,  # noqa: ARG002
    ) -> int:
        """Parse a text; what is parsed already passes through."""
        from allotment.model.quantities import parse_bytes

        return value if isinstance(value, int) else parse_bytes(str(value))


class ComputeType(click.ParamType[Any]):
    """A guarantee and a ceiling of compute on the command line."""

    name = "compute"

    def convert(
        self,
        value: Any,  # noqa: ANN401 - click's signature
        param: click.Parameter | None,  # noqa: ARG002
        ctx: click.Context | None,  # noqa: ARG002
    ) -> "Compute":
        """Parse a text; what is parsed already passes through."""
        from allotment.model.compute import Compute, parse_compute

        return value if isinstance(value, Compute) else parse_compute(str(value))


class WeightType(click.ParamType[Any]):
    """A weight on the command line."""

    name = "weight"

    def convert(
        self,
        value: Any,  # noqa: ANN401 - click's signature
        param: click.Parameter | None,  # noqa: ARG002
        ctx: click.Context | None,  # noqa: ARG002
    ) -> int:
        """Parse a text; what is parsed already passes through."""
        from allotment.model.compute import parse_weight

        return value if isinstance(value, int) else parse_weight(str(value))


BYTES = BytesType()
COMPUTE = ComputeType()
MEMORY = MemoryType()
WEIGHT = WeightType()


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


def compute_options(function: _F) -> _F:
    """Add `--compute`, `--class` and `--weight` of a share that is to be made."""
    return _compute_options(function, kind="  [default: normal]", weight="  [default: 100]")


def changed_compute_options(function: _F) -> _F:
    """Add the same to change them: what is not named stays, and there is no default."""
    return _compute_options(function, kind="", weight="")


def _only_one(
    ctx: click.Context,
    param: click.Parameter,
    value: "tuple[Compute, ...]",
) -> "Compute | None":
    """Return the only value; refuse several: the last would silently be taken."""
    if len(value) > 1:
        raise click.UsageError(
            f"{param.opts[0]} is given {len(value)} times: it is the same on each GPU", ctx
        )
    return value[0] if value else None


def _compute_options(function: _F, *, kind: str, weight: str) -> _F:
    """Add the options; their helps end with what is so by default."""
    options = (
        click.option(
            "--compute",
            metavar="PERCENT[:PERCENT]",
            type=COMPUTE,
            multiple=True,  # so that two can be told from one
            callback=_only_one,
            help="Compute of each GPU: 30 (a guarantee and a ceiling), 30:80 (30, and up to 80"
            " while others leave it), 0:100 (what others leave), :80 (the same, up to 80).",
        ),
        click.option(
            "--class",
            "kind",
            type=click.Choice(["latency", "normal", "besteffort"]),
            help="Who goes first: latency starts as soon as another's kernel ends, besteffort has"
            " what all others leave" + kind,
        ),
        click.option(
            "--weight",
            metavar="N",
            type=WEIGHT,
            help="Its part of what is above the guarantees, beside the others': 1 to 10000"
            + weight,
        ),
    )
    for option in reversed(options):
        function = option(function)
    return function


def requested_compute(compute: "Compute | None", kind: str | None, weight: int | None) -> "Compute":
    """Return what a new share is to have, from the three options as they were given."""
    from allotment.model.compute import Compute, ComputeClass, revised

    asked = ComputeClass(kind) if kind else None
    return revised(Compute(), compute=compute, kind=asked, weight=weight)


def oversubscribe_options(function: _F) -> _F:
    """Add `--oversubscribe` and `--host-memory`."""
    options = (
        click.option(
            "--oversubscribe",
            is_flag=True,
            help="Its memory may live on the host, and move to the GPU while it computes: so the"
            " limits of a GPU's shares may be more than it holds.",
        ),
        click.option(
            "--host-memory",
            metavar="SIZE",
            type=BYTES,
            envvar="ALLOTMENT_HOST_MEMORY",
            help="Host memory that may stand for GPU memory, all shares together [env:"
            " ALLOTMENT_HOST_MEMORY; default: half of the machine's].",
        ),
    )
    for option in reversed(options):
        function = option(function)
    return function


def kubeconfig_option(function: _F) -> _F:
    """Add `--kubeconfig` of a daemon."""
    return click.option(
        "--kubeconfig",
        metavar="FILE",
        type=click.Path(path_type=Path, dir_okay=False),
        envvar="KUBECONFIG",
        help="How to reach the API server; default: a pod's service account.  [env: KUBECONFIG]",
    )(function)


def log_options(function: _F) -> _F:
    """Add `--log-format` and `--verbose`."""
    options = (
        click.option(
            "--log-format",
            type=click.Choice(["text", "json"]),
            default="text",
            show_default=True,
            help="How the log is written, on standard error.",
        ),
        click.option("--verbose", "-v", is_flag=True, help="Log every step."),
    )
    for option in reversed(options):
        function = option(function)
    return function


@contextmanager
def installed(command: str, *, extra: str) -> Iterator[None]:
    """Import what not everybody has installed; say how, where it is missing.

    Raises `PrerequisiteError`; what is missing of Allotment itself stays the error that it is.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        from allotment.model.errors import PrerequisiteError

        if (error.name or "").startswith("allotment"):
            raise
        raise PrerequisiteError(
            f"`{command}` needs {error.name}, which is not installed",
            hint=f"install what it needs besides: pip install 'allotment[{extra}]'",
        ) from error


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
