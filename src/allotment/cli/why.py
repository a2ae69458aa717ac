# SPDX-License-Identifier: Apache-2.0
"""`allot why`: why a pod waits, and what would help, in a few lines."""

from __future__ import annotations

import os
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from allotment.cli.explain import headline
from allotment.cli.options import installed, of_cluster, pod_names, read_of_cluster
from allotment.cli.tables import named_nodes, print_lines
from allotment.model.formats import shortened

if TYPE_CHECKING:
    from collections.abc import Iterator

    from allotment.kube.clients import Api
    from allotment.scheduler.explain_evidence import Evidence, Explanation
    from allotment.scheduler.explain_start import PodStart

_MOST_GROUPS: Final = 2
_MOST_CHARACTERS: Final = 300


@click.command(short_help="Say why a pod waits, what would help, or where its start went.")
@click.argument("pod", metavar="[NAMESPACE/]NAME")
@of_cluster
def command(
    *, pod: str, namespace: str | None, kubeconfig: Path | None, context: str | None
) -> None:
    """Say in a few lines why a pod waits, and what would help.

    Of a pod that has a node it shows where the time of its start went, by the API server's times.

    It is `allot explain pod` in its shortest form, with the scheduler's default settings.

    \b
    Example:
      kubectl allot why ml/train
    """  # noqa: D301 - click's mark
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    space, name = pod_names(pod, namespace)
    with installed("allot why", extra="kubernetes"):
        from allotment.scheduler.explain import explained
        from allotment.scheduler.explain_evidence import read_evidence
        from allotment.scheduler.explain_start import read_start

    async def read(api: Api) -> tuple[Evidence, PodStart]:
        evidence = await read_evidence(api, space or api.namespace, name)
        return evidence, await read_start(api, evidence.item)

    evidence, start = read_of_cluster(
        kubeconfig,
        context,
        read,
        rights="get and list pods and to list nodes in the whole cluster",
        check="list pods -A",
    )
    print_lines(chain(reasons(explained(evidence)), start_lines(start)))


def reasons(found: Explanation) -> Iterator[str]:
    """Yield the answer, the most important first."""
    yield headline(found)
    for obstacle in found.obstacles:
        yield f"  {obstacle.text}"
        if obstacle.hint:
            yield f"  help: {obstacle.hint}"
    if found.standing != "pending":
        for container in found.containers:
            uuids = ", ".join(part.placed.uuid for part in container.parts)
            if uuids:
                yield f"  container {container.name} has {container.text}: {uuids}"
        return
    if found.containers:
        yield from _room(found)
    elif not found.obstacles and found.claims:
        where = f"{found.namespace}/{found.claims[0]}"
        yield f"  its GPUs come from a ResourceClaim: kubectl allot explain claim {where}"
    condition = found.condition
    if condition is not None and condition.message and (found.fitting or not found.containers):
        message = shortened(" ".join(condition.message.split()), _MOST_CHARACTERS)
        yield f"  its scheduler: {message}"


def _room(found: Explanation) -> Iterator[str]:
    if found.fitting:
        if not found.obstacles:
            yield (
                f"  help: node {found.fitting[0]} has room for its GPUs, so another check keeps it"
                " waiting, or its scheduler has not retried yet"
            )
        return
    for group in found.refused[:_MOST_GROUPS]:
        yield f"  {named_nodes(group.nodes)}: {group.text}"
    if len(found.refused) > _MOST_GROUPS:
        yield f"  and other reasons: kubectl allot explain pod {found.namespace}/{found.name}"
    if found.beyond is not None:
        yield f"  even if all were empty and healthy: {found.beyond.text}"
        yield "  help: ask for less, or add a node with other GPUs"
    elif found.refused:
        yield (
            "  help: ask for what a node has, or end pods that hold GPUs"
            " (`kubectl allot inspect -d` lists them)"
        )


def start_lines(start: PodStart) -> Iterator[str]:
    """Yield where the start of a pod went."""
    if start.steps:
        yield f"  its start took {start.seconds:.0f} s, in whole seconds:"
        for step in start.steps:
            yield f"    {step.seconds:4.0f} s  until {step.text}"
        for note in start.notes:
            yield f"    {note}"
