# SPDX-License-Identifier: Apache-2.0
"""`allot run`: a share for one command, from its start to its end."""

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from allotment.cli.options import (
    MEMORY,
    compute_options,
    oversubscribe_options,
    requested_compute,
    simulated_option,
    state_option,
)

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

    from allotment.model.compute import Compute
    from allotment.model.quantities import MemoryAmount

_MODES: Final = ("soft", "mps", "mig")


class _ModesType(click.ParamType[Any]):
    """Modes on the command line, the one liked best first."""

    name = "modes"

    def convert(
        self,
        value: Any,  # noqa: ANN401 - click's signature
        param: click.Parameter | None,
        ctx: click.Context | None,
    ) -> tuple[str, ...]:
        """Split a text; what is split already passes through."""
        if isinstance(value, tuple):
            return value
        modes = tuple(each.strip() for each in str(value).split(","))
        if unknown := [each for each in modes if each not in _MODES]:
            self.fail(f"{unknown[0]!r} is not one of {', '.join(_MODES)}", param, ctx)
        if len(set(modes)) < len(modes):
            self.fail(f"{value!r} names a mode twice", param, ctx)
        return modes

    def shell_complete(
        self,
        ctx: click.Context,  # noqa: ARG002 - click's signature
        param: click.Parameter,  # noqa: ARG002
        incomplete: str,
    ) -> "list[CompletionItem]":
        """Complete the last mode of the list."""
        from click.shell_completion import CompletionItem

        before, comma, last = incomplete.rpartition(",")
        return [
            CompletionItem(f"{before}{comma}{mode}")
            for mode in _MODES
            if mode.startswith(last) and mode not in before.split(",")
        ]


@click.command(
    short_help="Run a command in a share of a GPU.",
    context_settings={"ignore_unknown_options": False, "allow_interspersed_args": False},
)
@click.option(
    "--memory",
    metavar="SIZE",
    type=MEMORY,
    help="Memory on each GPU: 4Gi, 500M, or a part of the GPU like 25%; in mode mig, what the slice"
    " has to have at least.",
)
@compute_options
@oversubscribe_options
@click.option(
    "--count",
    metavar="N",
    type=click.IntRange(1, 16),
    default=1,
    show_default=True,
    help="How many GPUs, each a different one.",
)
@click.option(
    "--gpu",
    "gpus",
    metavar="UUID|MODEL",
    multiple=True,
    help="Only this GPU or model (GPU-4f6e..., a100, a100-80gb), or this MIG device that others"
    " have cut (MIG-1c7e...); several times: any of them.",
)
@click.option(
    "--mode",
    "modes",
    metavar="MODE[,MODE...]",
    type=_ModesType(),
    help="How compute is shared: soft, by turns; mps, at the same time, each on its part of the"
    " multiprocessors; mig, not at all: a slice is cut from a GPU, with its own. Several, the one"
    " liked best first: mig,soft is a slice, or turns where none is to be had.  [default: soft]",
)
@click.option(
    "--mig",
    "profile",
    metavar="PROFILE",
    help="A MIG slice of this profile, like 1g.10gb; it implies --mode mig.",
)
@click.option(
    "--mig-keep",
    "keep",
    metavar="DURATION",
    help="Keep the slice for so long after the command, for whoever asks for its like; longer than"
    " that it stays until the next `allot` looks.  [default: 0s]",
)
@click.option(
    "--mig-reuse",
    "reuses",
    is_flag=True,
    help="Take an idle MIG device of the very profile, if others have cut one; it stays as it is"
    " after the command. Without it only what is cut for the command is had.",
)
@click.option("--name", metavar="NAME", help="Name of the share; default: its id.")
@simulated_option
@click.option(
    "--inject",
    type=click.Choice(["auto", "namespace", "environment"]),
    default="auto",
    show_default=True,
    help="How the limit gets into the programs: a private mount namespace (needs CAP_SYS_ADMIN;"
    " holds for scrubbed environments too) or environment variables.",
)
@state_option
@click.argument("command", metavar="-- COMMAND...", nargs=-1, type=click.UNPROCESSED)
def command(
    *,
    memory: "MemoryAmount | None",
    compute: "Compute | None",
    kind: str | None,
    weight: int | None,
    oversubscribe: bool,
    host_memory: int | None,
    count: int,
    gpus: tuple[str, ...],
    modes: tuple[str, ...] | None,
    profile: str | None,
    keep: str | None,
    reuses: bool,
    name: str | None,
    simulated: str | None,
    inject: str,
    state: Path | None,
    command: tuple[str, ...],
) -> None:
    """Run COMMAND with a part of one or more GPUs, and no more than that.

    The GPU that the request leaves least of is taken, so that others stay whole. COMMAND and all of
    its children see their part as if it were the GPU; beyond it they get CUDA's own
    CUDA_ERROR_OUT_OF_MEMORY. Without --compute it has no guarantee: it takes its turns beside the
    shares that have one, and where no share of a GPU asks for compute nobody takes turns. The
    terminal and signals are COMMAND's, its exit status is passed on (128 + n when signal n ended
    it), and the share ends with it. When the share is suspended a line on standard error says so.

    \b
    Examples:
      allot run --memory 4Gi -- python train.py
      allot run --memory 25% --gpu a100 --count 2 --name train -- torchrun train.py
      allot run --memory 8Gi --compute 30:80 -- python train.py
      allot run --memory 8Gi --compute 20 --class latency -- python serve.py
      allot run --mig 1g.10gb -- python train.py
      allot run --mode mig --memory 16Gi -- python train.py
      allot run --mode mig,soft --memory 16Gi -- python train.py
      allot run --gpu MIG-1c7e --mode mps --memory 4Gi -- python train.py
      allot run --simulated a100-80gb:2 --memory 4Gi -- bash
    """  # noqa: D301 - click's mark
    from allotment.model.compute import WHOLE
    from allotment.model.errors import UsageError
    from allotment.model.quantities import parse_duration_ns
    from allotment.model.requests import MIG, MPS, SOFT, Request
    from allotment.shares.sessions import Session, run

    if not command:
        raise UsageError(
            "there is no command to run",
            hint="write it after `--`, as in: allot run --memory 4Gi -- python train.py",
        )
    of_modes = f"mode {' and '.join(modes)} cuts none" if modes else "none is asked for"
    modes = modes or (MIG if profile else SOFT,)
    if profile:
        from allotment.dialects.annotations import parse_profile

        parse_profile(profile)
    if MIG not in modes and (profile or keep or reuses):
        raise UsageError(
            f"--mig, --mig-keep and --mig-reuse are for slices, and {of_modes}",
            hint="leave --mode out: --mig implies it" if profile else "ask for one by --mode mig",
        )
    if modes == (MIG,) and compute and compute.ceiling not in {WHOLE, compute.guarantee}:
        raise UsageError(
            "--compute has a ceiling, and nobody takes turns in a MIG slice: all of it is had",
            hint="leave what follows the `:` out; --compute 30 asks for a slice with 30 % of a GPU",
        )
    if modes == (MIG,) and (kind or weight):
        raise UsageError(
            "--class and --weight are of turns, and nobody takes turns in a MIG slice",
            hint="leave them out; --compute 30 asks for a slice with 30 % of a GPU",
        )
    if MPS in modes and SOFT not in modes and (weight is not None or kind == "latency"):
        raise UsageError(
            "--weight and --class latency are of turns, and nobody takes turns in mode mps",
            hint="leave them out: --compute 50 is a part of the multiprocessors, and with --class"
            " besteffort a share's kernels go after the others'",
        )
    if memory is None:
        is_named = any(each.lower().startswith("mig-") for each in gpus)
        memory = _any_memory(modes, profile, is_named=is_named)
    request = Request(
        memory=memory,
        count=count,
        selectors=gpus,
        compute=requested_compute(compute, kind, weight),
        may_oversubscribe=oversubscribe,
        mode=modes[0],
        other_modes=modes[1:],
        mig_profile=profile or "",
    )
    run(
        Session(
            request,
            command,
            name=name,
            spec=simulated,
            inject=inject,
            state=state,
            host_budget=host_memory,
            keep_s=parse_duration_ns(keep) / 1e9 if keep else 0.0,
            reuses=reuses,
        )
    )


def _any_memory(modes: tuple[str, ...], profile: str | None, *, is_named: bool) -> "MemoryAmount":
    """Return the floor of who asks for a slice by its profile or name; refuse everybody else."""
    from allotment.model.errors import UsageError
    from allotment.model.quantities import LEAST_BYTES, MemoryAmount

    is_slice = modes == ("mig",)
    if not (is_slice and (profile or is_named)):
        raise UsageError(
            "how much memory is the share to have?",
            hint="say so, as in: allot run --memory 4Gi -- python train.py; --memory 100% is all of"
            " a GPU that is empty" + (" (or name a profile: --mig 1g.10gb)" if is_slice else ""),
        )
    return MemoryAmount("any", size_bytes=LEAST_BYTES)
