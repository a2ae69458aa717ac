# SPDX-License-Identifier: Apache-2.0
"""`allot resize`: changes the limits of a running share, or asks for other amounts of a pod."""

import asyncio
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from allotment.cli.options import (
    BYTES,
    MEMORY,
    allowance_of_user,
    changed_compute_options,
    complete_share,
    installed,
    is_kubectl,
    pod_names,
    state_option,
    usual_kubeconfig,
)
from allotment.cli.tables import described, short_uuid
from allotment.model.errors import UsageError
from allotment.model.formats import format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from allotment.model.compute import Compute
    from allotment.model.quantities import MemoryAmount
    from allotment.shares.record import LoadedShare


@click.command(short_help="Change a share's limits while its programs run.")
@click.argument("share", metavar="SHARE", shell_complete=complete_share)
@click.option(
    "--memory",
    type=MEMORY,
    help="New memory on each of its GPUs: 6Gi, or a part of the GPU like 25%.",
)
@changed_compute_options
@click.option(
    "--host-memory",
    type=BYTES,
    envvar="ALLOTMENT_HOST_MEMORY",
    help="As for `allot run`.",
)
@click.option(
    "--force",
    is_flag=True,
    help="Allow a limit below the used memory: new allocations then fail until the use fits.",
)
@state_option
@click.option(
    "--pod",
    "is_pod",
    is_flag=True,
    help="SHARE is a pod: [NAMESPACE/]NAME. `kubectl allot resize` always means a pod.",
)
@click.option("--namespace", "-n", metavar="NAMESPACE", help="Namespace of the pod.")
@click.option(
    "--container", "-c", metavar="NAME", help="Container of the pod.  [default: each with a share]"
)
@click.option(
    "--kubeconfig",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Kubeconfig for the API server, as for `allot explain pod`.",
)
@click.option("--context", metavar="NAME", help="Context of the kubeconfig.")
@click.pass_context
def command(
    ctx: click.Context,
    *,
    share: str,
    memory: "MemoryAmount | None",
    compute: "Compute | None",
    kind: str | None,
    weight: int | None,
    host_memory: int | None,
    force: bool,
    state: Path | None,
    is_pod: bool,
    namespace: str | None,
    container: str | None,
    kubeconfig: Path | None,
    context: str | None,
) -> None:
    """Change the limits of SHARE (name or id) on each of its GPUs, while it runs.

    Its programs see a new memory limit at their next call. A new --compute, --class or --weight is
    in force when this command ends. Omitted options keep their value. A limit that does not fit
    beside the other shares is refused. So is a memory limit below the used memory, unless --force
    is given. A refusal changes nothing.

    In mode mps, memory can shrink, and grow again up to the initial limit; compute cannot change.
    In mode mig nothing can change: the hardware fixes the size of a slice.

    With --pod it writes the annotation allotment.dev/resize of a running pod. The scheduler and the
    pod's node carry it out, and events of the pod report the result.

    \b
    Examples:
      allot resize train --memory 6Gi
      allot resize train --compute 30:80
      allot resize train --memory 2Gi --force
      kubectl allot resize ml/train --memory 6Gi --compute 30:80
    """  # noqa: D301 - click's mark
    from allotment.cli.machines import devices_of
    from allotment.model.compute import ComputeClass
    from allotment.shares.folders import StateFolder
    from allotment.shares.lifecycle import find
    from allotment.shares.resize import LimitChange, resize
    from allotment.shares.run.command import refuse_inside

    if is_pod or is_kubectl():
        _refuse_ignored({"--force": force, "--host-memory": _is_typed(ctx, "host_memory")}, "a pod")
        words = {
            "memory": memory and memory.text,
            "compute": compute and str(compute),
            "class": kind,
            "weight": weight and str(weight),
        }
        _resize_pod(
            share,
            namespace,
            container,
            {word: text for word, text in words.items() if text},
            kubeconfig=kubeconfig,
            context=context,
        )
        return
    pods_only = {
        "--container": container,
        "--namespace": namespace,
        "--kubeconfig": kubeconfig,
        "--context": context,
    }
    _refuse_ignored(pods_only, "a share without --pod")
    # Before devices are read: inside a share they are a part.
    refuse_inside(f"allot resize {share}")
    change = LimitChange(memory, compute, weight, ComputeClass(kind) if kind else None, host_memory)
    if change.memory is None and not change.is_of_compute:
        raise UsageError(
            "nothing to change",
            hint="give --memory, --compute, --class or --weight",
        )
    if _is_typed(ctx, "host_memory") and change.memory is None:
        raise UsageError(
            "--host-memory limits a new --memory, which is missing",
            hint="add --memory, or remove --host-memory",
        )
    folder = StateFolder.at(state)
    loaded = find(folder, share)
    resized = resize(
        folder,
        loaded.id,
        change,
        devices_of(loaded),
        force=force,
        allowance=allowance_of_user(),
    )
    click.echo(f"{resized.name}: {', '.join(_parts(resized))}")


def _is_typed(ctx: click.Context, name: str) -> bool:
    return ctx.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE


def _refuse_ignored(options: "Mapping[str, object]", what: str) -> None:
    for option, value in options.items():
        if value:
            raise UsageError(f"{option} has no effect on {what}", hint=f"remove {option}")


def _resize_pod(
    pod: str,
    namespace: str | None,
    container: str | None,
    words: "Mapping[str, str]",
    *,
    kubeconfig: Path | None,
    context: str | None,
) -> None:
    """Ask for other amounts of a pod. Raises `AllotError`."""
    with installed("allot resize --pod", extra="kubernetes"):
        from allotment.dialects.own.annotations import changed_wish
        from allotment.kube.bindings import write_wish
        from allotment.kube.clients import connect
    if not words:
        raise UsageError("nothing to change", hint="give --memory, --compute, --class or --weight")
    space, name = pod_names(pod, namespace)

    async def ask() -> str:
        async with connect(kubeconfig or usual_kubeconfig(), context=context) as api:
            change = partial(changed_wish, container=container, words=words)
            return await write_wish(api, space or api.namespace, name, change)

    click.echo(f"{pod}: asks for {asyncio.run(ask())}; its events report the result")


def _parts(share: "LoadedShare") -> "Iterator[str]":
    for uuid, size in share.limits().items():
        terms = share.terms.get(uuid)
        compute = ""
        if terms is not None and terms.compute.is_governed:
            compute = f" {described(terms.compute)}"
        yield f"{short_uuid(uuid)} {format_bytes(size)}{compute}"
