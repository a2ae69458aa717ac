# SPDX-License-Identifier: Apache-2.0
"""`allot run`: creates a share for one command and removes it when the command ends."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from allotment.cli.options import (
    DURATION_NS,
    MEMORY,
    allowance_in,
    compute_options,
    count_option,
    oversubscribe_options,
    requested_compute,
    simulated_option,
    state_option,
)
from allotment.model.modes import MIG, PART_MODES, SOFT, has_only_slices, traits_of

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

    from allotment.model.compute import Compute
    from allotment.model.quantities import MemoryAmount
    from allotment.model.shares import Share
    from allotment.shares.folders import StateFolder
    from allotment.shares.status import Readings


class _ModesType(click.ParamType[Any]):
    """A list of modes in order of preference."""

    name = "modes"

    def convert(
        self,
        value: Any,  # noqa: ANN401 - click's signature
        param: click.Parameter | None,
        ctx: click.Context | None,
    ) -> tuple[str, ...]:
        if isinstance(value, tuple):
            return value
        modes = tuple(mode.strip() for mode in str(value).split(","))
        if unknown := [mode for mode in modes if mode not in PART_MODES]:
            from allotment.model.formats import meant

            known = ", ".join(PART_MODES)
            close = meant(unknown[0], PART_MODES)
            self.fail(f"{unknown[0]!r} is not one of {known}{close}", param, ctx)
        if len(set(modes)) < len(modes):
            self.fail(f"{value!r} names a mode twice", param, ctx)
        return modes

    def shell_complete(
        self,
        ctx: click.Context,  # noqa: ARG002 - click's signature
        param: click.Parameter,  # noqa: ARG002
        incomplete: str,
    ) -> "list[CompletionItem]":
        from click.shell_completion import CompletionItem

        before, comma, last = incomplete.rpartition(",")
        return [
            CompletionItem(f"{before}{comma}{mode}")
            for mode in PART_MODES
            if mode.startswith(last) and mode not in before.split(",")
        ]


@click.command(
    short_help="Run a command in a share of a GPU.",
    context_settings={"ignore_unknown_options": False, "allow_interspersed_args": False},
)
@click.option(
    "--memory",
    type=MEMORY,
    help="Memory on each GPU: 4Gi, 500M, or a part of the GPU like 25%. In mode mig: the least that"
    " the slice must have.",
)
@compute_options
@oversubscribe_options
@count_option
@click.option(
    "--gpu",
    "gpus",
    metavar="UUID|MODEL",
    multiple=True,
    help="Use only this GPU or model (GPU-4f6e..., a100, a100-80gb), or this foreign MIG device"
    " (MIG-1c7e...). May be repeated: any of them.",
)
@click.option(
    "--mode",
    "modes",
    metavar="MODE[,MODE...]",
    type=_ModesType(),
    help="How compute is shared. soft: programs take turns. mps: programs run at the same time,"
    " each on its part of the multiprocessors. mig: a dedicated hardware slice. Give several in"
    " order of preference: mig,soft falls back to soft.  [default: soft]",
)
@click.option(
    "--mig",
    "profile",
    metavar="PROFILE",
    help="Use a MIG slice of this profile, like 1g.10gb. Implies --mode mig.",
)
@click.option(
    "--mig-keep",
    "keep_ns",
    metavar="DURATION",
    type=DURATION_NS,
    default="0s",
    show_default=False,
    help="Keep the idle slice this long for reuse. It is removed by the next `allot` command after"
    " that.  [default: 0s]",
)
@click.option(
    "--mig-reuse",
    "reuses",
    is_flag=True,
    help="Reuse an idle foreign MIG device with exactly this profile instead of creating one. It is"
    " not removed after the command.",
)
@click.option(
    "--wait",
    "wait_ns",
    metavar="[=DURATION]",
    type=DURATION_NS,
    is_flag=False,
    flag_value=float("inf"),
    help="Wait until there is room, in order of arrival; with a duration (--wait=10m), for at most"
    " that time. Ctrl-C ends it. Write COMMAND after `--`: else its first word is the duration.",
)
@click.option("--name", metavar="NAME", help="Name of the share.  [default: its id]")
@simulated_option
@click.option(
    "--inject",
    type=click.Choice(["auto", "namespace", "environment"]),
    default="auto",
    help="How programs load the limit: by a private mount namespace (needs CAP_SYS_ADMIN; also"
    " works with scrubbed environments) or by environment variables.",
)
@click.option(
    "--user",
    metavar="NAME",
    help="Run COMMAND as this user (a name or a number), without root's capabilities. Needs root"
    " and a private mount namespace.",
)
@click.option(
    "--on-excess",
    type=click.Choice(["warn", "stop"]),
    default="warn",
    help="What happens if its programs have more memory than the limit by the driver's figures."
    " warn: `allot ps` shows it. stop: they are killed, too.",
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
    keep_ns: float,
    reuses: bool,
    wait_ns: float | None,
    name: str | None,
    simulated: str | None,
    inject: str,
    user: str | None,
    on_excess: str,
    state: Path | None,
    command: tuple[str, ...],
) -> None:
    """Run COMMAND with a part of one or more GPUs, and no more than that.

    Picks the fullest GPU that still fits (best fit). COMMAND and all its children see their part as
    if it were the whole GPU. Allocations beyond it fail with CUDA_ERROR_OUT_OF_MEMORY.

    On a machine with /etc/allotment/config.yaml, that file has what its users get without --memory
    and --compute, and the most that each may have.

    Without --compute the share has no compute guarantee: it uses the time that guaranteed shares
    leave. If no share of a GPU sets --compute, programs do not take turns.

    COMMAND owns the terminal and receives signals. Its exit status is passed on (128 + n if signal
    n ended it), and the share is removed when it ends. When the share is suspended, a line on
    standard error reports it.

    \b
    Examples:
      allot run --memory 4Gi -- python train.py
      allot run --memory 25% --gpu a100 --count 2 -- torchrun train.py
      allot run --memory 8Gi --compute 30:80 -- python train.py
      allot run --memory 8Gi --compute 20 --class latency -- python serve.py
      allot run --mig 1g.10gb -- python train.py
      allot run --mode mig --memory 16Gi -- python train.py
      allot run --mode mig,soft --memory 16Gi -- python train.py
      allot run --gpu MIG-1c7e --mode mps --memory 4Gi -- python train.py
      allot run --simulated a100-80gb:2 --memory 4Gi -- bash
    """  # noqa: D301 - click's mark
    from allotment.model.compute import ComputeClass
    from allotment.model.errors import UsageError
    from allotment.model.requests import Request
    from allotment.model.shares import Excess
    from allotment.shares.run.command import RunSession, run

    if not command:
        raise UsageError(
            "missing command",
            hint="write it after `--`, for example: allot run --memory 4Gi -- python train.py",
        )
    conflict = f"mode {' and '.join(modes)} creates none" if modes else "this command requests none"
    modes = modes or (MIG if profile else SOFT,)
    if profile:
        from allotment.dialects.own.annotations import parse_profile

        parse_profile(profile)
    traits = [traits_of(mode) for mode in modes]
    if not any(trait.is_slice for trait in traits) and (profile or keep_ns or reuses):
        raise UsageError(
            f"--mig, --mig-keep and --mig-reuse need a MIG slice, and {conflict}",
            hint="remove --mode: --mig implies it" if profile else "add --mode mig",
        )
    _refuse_without_effect(modes, compute, kind, weight)
    is_slice = has_only_slices(modes)
    allowance = allowance_in(state, simulated, user)
    if memory is None and allowance is not None and not is_slice:
        memory = allowance.memory
    asked = requested_compute(compute, kind, weight)
    if allowance is not None and all(trait.takes_turns for trait in traits):
        asked = allowance.filled(compute, ComputeClass(kind) if kind else None, weight)
    if memory is None:
        is_named = any(gpu.lower().startswith("mig-") for gpu in gpus)
        memory = _least_memory(profile, is_slice=is_slice, is_named=is_named)
    request = Request(
        memory=memory,
        count=count,
        selectors=gpus,
        compute=asked,
        may_oversubscribe=oversubscribe,
        mode=modes[0],
        other_modes=modes[1:],
        mig_profile=profile or "",
    )
    look = None
    if Excess(on_excess) is Excess.STOP:
        from allotment.devices.nvml import readings

        look = partial(stop_excess, readings)
    run(
        RunSession(
            request,
            command,
            name=name,
            spec=simulated,
            inject=inject,
            user=user,
            state=state,
            host_budget=host_memory,
            keep_s=keep_ns / 1e9,
            reuses=reuses,
            wait_s=None if wait_ns is None else wait_ns / 1e9,
            look=look,
            allowance=allowance,
        )
    )


def _refuse_without_effect(
    modes: tuple[str, ...], compute: "Compute | None", kind: str | None, weight: int | None
) -> None:
    """Raise `UsageError` for options of compute that none of the modes obeys."""
    from allotment.model.compute import WHOLE
    from allotment.model.errors import UsageError

    traits = [traits_of(mode) for mode in modes]
    ignored = frozenset.intersection(*(trait.ignores for trait in traits))
    takes_turns = any(trait.takes_turns for trait in traits)
    has_ceiling = compute is not None and compute.ceiling not in {WHOLE, compute.guarantee}
    given = {
        "--compute": bool(compute) and not any(trait.enforces_compute for trait in traits),
        "the ceiling of --compute": has_ceiling and "ceiling" in ignored,
        "--class": bool(kind) and ("class" in ignored or kind in ignored),
        "--weight": weight is not None and "weight" in ignored,
    }
    without_effect = [option for option, is_it in given.items() if is_it]
    if not without_effect:
        return
    where = " or ".join(modes)
    text = f"without effect in mode {where}: {' and '.join(without_effect)}"
    hint = "remove them"
    if not takes_turns and not has_only_slices(modes):
        text += f"; programs in mode {where} take no turns"
    if has_only_slices(modes):
        text += "; a MIG slice has no ceiling, and its programs take no turns"
        hint += "; --compute 30 requests a slice with 30 % of a GPU, always used in full"
    elif any(trait.needs_daemon for trait in traits):
        hint += (
            ": --compute 50 is a part of the multiprocessors, and --class besteffort runs a share's"
            " kernels after those of other shares"
        )
    raise UsageError(text, hint=hint)


def stop_excess(ask: "Readings", folder: "StateFolder", share: "Share") -> None:
    """Kill a share's programs if they have more memory than its limit by the driver.

    `ask` queries the driver. It may hang, so the folder's lock is not held meanwhile.
    """
    from contextlib import suppress

    from allotment.model.errors import AllotError
    from allotment.shares.lifecycle import find
    from allotment.shares.process_tree import kill
    from allotment.shares.status import view

    with suppress(AllotError):  # the next look may succeed
        (seen,) = view([find(folder, share.id)], ask)
        if not seen.overuse:
            return
        with folder.locked():  # so that no resize is between the record and the ledger
            before = find(folder, share.id)
        (seen,) = view([before], ask)
        if seen.overuse and find(folder, share.id).has_limits_of(before):
            text = f"share {share.name}: {seen.overuse}; its programs are killed"
            click.echo(f"allot: {text} (--on-excess stop)", err=True)
            kill(seen.pids)


def _least_memory(profile: str | None, *, is_slice: bool, is_named: bool) -> "MemoryAmount":
    """Only a request for a slice by profile or name may omit --memory. Raises `UsageError`."""
    from allotment.model.errors import UsageError
    from allotment.model.quantities import LEAST_BYTES, MemoryAmount

    if not (is_slice and (profile or is_named)):
        raise UsageError(
            "missing --memory",
            hint="for example: allot run --memory 4Gi -- python train.py; --memory 100% is all of"
            " an empty GPU" + (" (or name a profile: --mig 1g.10gb)" if is_slice else ""),
        )
    return MemoryAmount("any", size_bytes=LEAST_BYTES)
