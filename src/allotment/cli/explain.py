# SPDX-License-Identifier: Apache-2.0
"""`allot explain`: why a pod is where it is, or why it waits."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from allotment.cli.options import output_option

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from allotment.scheduler.explaining import Asked, Explanation, Group
    from allotment.scheduler.explaining_evidence import Evidence

_NAME: Final = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")
_SPACE: Final = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_NAMED: Final = 3


@click.group(short_help="Say why a pod is where it is, or why it waits.")
def command() -> None:
    """Say why something is as it is.

    \b
    Example:
      allot explain pod ml/train
    """  # noqa: D301 - click's mark


@command.command(short_help="Say why a pod is where it is, or why it waits.")
@click.argument("pod", metavar="[NAMESPACE/]NAME")
@click.option(
    "--kubeconfig",
    metavar="FILE",
    type=click.Path(path_type=Path, dir_okay=False),
    envvar="KUBECONFIG",
    help="How to reach the API server; default: a pod's service account.  [env: KUBECONFIG]",
)
@click.option(
    "--policy",
    "policies",
    metavar="P[,P...]",
    default="fragmentation",
    show_default=True,
    help="The scheduler's --policy, by which nodes are compared.",
)
@click.option(
    "--gpu-policy",
    "gpu_policies",
    metavar="P[,P...]",
    default="fragmentation",
    show_default=True,
    help="The scheduler's --gpu-policy.",
)
@output_option("text", "json")
def pod(
    *, pod: str, kubeconfig: Path | None, policies: str, gpu_policies: str, output: str
) -> None:
    """Say which GPUs a pod has and how many nodes have room for it; or why it waits.

    Of a pod that waits: what keeps it before any GPU is looked at (how it is written, its
    scheduler, the quota of its namespace), and of nodes that do not do, those alike together: what
    it needs, and what they have. What kube-scheduler checks besides (selectors, taints, ports) is
    quoted from what it wrote on the pod.

    No scheduler of Allotment's has to run: nodes and pods are read from the API server, and placed
    on as they are now. That takes the rights to get and list pods and to list nodes, and, for
    quotas, resourcequotas. Which nodes there were when a pod was placed is not known any more: that
    its node is now the second best does not say that it was then. Nothing is changed.

    \b
    Examples:
      allot explain pod ml/train
      allot explain pod train --kubeconfig ~/.kube/config -o json
    """  # noqa: D301 - click's mark
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    space, name = _names(pod)
    evidence, explanation = _explained(
        kubeconfig, space, name, policies=_words(policies), gpu_policies=_words(gpu_policies)
    )
    for problem in evidence.problems:
        click.echo(f"left out: {problem}", err=True)
    if output == "json":
        from allotment.cli.documents import print_document

        print_document(document(explanation, evidence.problems), output)
    else:
        _print(explanation)


def _names(text: str) -> tuple[str, str]:
    """Return namespace (empty: the kubeconfig's) and name. Raises `UsageError`."""
    from allotment.model.errors import UsageError

    space, slash, name = text.rpartition("/")
    if not _NAME.fullmatch(name) or (slash and not _SPACE.fullmatch(space)):
        raise UsageError(
            f"{text!r} names no pod",
            hint="write NAMESPACE/NAME, as in `allot explain pod ml/train`",
        )
    return space, name


def _words(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(part.strip() for part in text.split(",")))


def _explained(
    kubeconfig: Path | None,
    space: str,
    name: str,
    *,
    policies: Sequence[str],
    gpu_policies: Sequence[str],
) -> tuple[Evidence, Explanation]:
    import asyncio

    try:
        from allotment.kube.clients import connect
        from allotment.kube.errors import DeniedError, UnreachableError
        from allotment.placement.policies import make
        from allotment.scheduler.explaining import explained
        from allotment.scheduler.explaining_evidence import read_evidence
    except ModuleNotFoundError as error:
        raise _missing(error) from error
    for each in (*policies, *gpu_policies):
        make(each)

    async def read() -> Evidence:
        async with connect(kubeconfig) as api:
            return await read_evidence(api, space or api.namespace, name)

    try:
        evidence = asyncio.run(read())
    except UnreachableError as error:
        # What the hint says is for those who ask again.
        raise UnreachableError(
            error.message, hint="see whether `kubectl get nodes` reaches it by this kubeconfig"
        ) from error
    except DeniedError as error:
        raise DeniedError(
            error.message,
            hint="this takes the rights to get and list pods, and to list nodes, of the whole"
            " cluster: `kubectl auth can-i list pods -A`",
            status=error.status,
        ) from error
    return evidence, explained(evidence, policies=policies, device_policies=gpu_policies)


def _missing(error: ModuleNotFoundError) -> Exception:
    from allotment.model.errors import PrerequisiteError

    if (error.name or "").startswith("allotment"):
        raise error
    return PrerequisiteError(
        f"`allot explain` needs {error.name}, which is not installed",
        hint="install what it needs besides: pip install 'allotment[kubernetes]'",
    )


def document(explanation: Explanation, problems: Sequence[str] = ()) -> dict[str, Any]:
    """Describe it: what `-o json` prints."""
    condition = explanation.condition
    return {
        "namespace": explanation.namespace,
        "name": explanation.name,
        "uid": explanation.uid,
        "state": str(explanation.standing),
        "node": explanation.node or None,
        "scheduler": explanation.scheduler,
        "dialect": explanation.dialect or None,
        "policies": list(explanation.policies),
        "policies_of_pod": explanation.is_own_policy,
        "containers": [_container(each) for each in explanation.containers],
        "other_resources": list(explanation.others),
        "obstacles": [
            {"kind": str(each.kind), "message": each.text, "hint": each.hint or None}
            for each in explanation.obstacles
        ],
        "condition": {
            "status": condition.status,
            "reason": condition.reason or None,
            "message": condition.message or None,
            "since": condition.last_transition_time,
        }
        if condition is not None
        else None,
        "nodes": explanation.nodes,
        "fitting": list(explanation.fitting),
        "rank": explanation.rank,
        "proposal": [_container(each) for each in explanation.proposal],
        "refused": [
            {"reason": each.reason, "message": each.text, "nodes": list(each.nodes)}
            for each in explanation.refused
        ],
        "left_out": list(problems),
    }


def _container(asked: Asked) -> dict[str, Any]:
    return {
        "name": asked.name,
        "kind": asked.kind,
        "asks": asked.text,
        "mode": asked.mode,
        "devices": [
            {
                "uuid": each.uuid,
                "index": each.index,
                "model": each.model,
                "memory_bytes": each.memory,
                "memory_total_bytes": each.memory_total,
                "guarantee_percent": each.guarantee / 100,
            }
            for each in asked.parts
        ],
    }


# ---- text ----------------------------------------------------------------------------------------


def _print(explanation: Explanation) -> None:
    for line in _lines(explanation):
        click.echo(line)
    for title, asked in (("has", explanation.containers), ("would get", explanation.proposal)):
        if any(each.parts for each in asked):
            click.echo(f"\nIt {title}:")
            _print_parts(asked)
    for line in _rest(explanation):
        click.echo(line)


def _lines(explanation: Explanation) -> Iterator[str]:
    where = f" on node {explanation.node}" if explanation.node else ""
    words = {"placed": "is placed", "bound": "is bound", "pending": "waits", "ended": "has ended"}
    yield f"Pod {explanation.namespace}/{explanation.name} {words[explanation.standing]}{where}"
    for each in explanation.containers:
        yield f"  container {each.name} asks for {each.text}"
    if explanation.dialect:
        yield f"  written for: {explanation.dialect}"
    yield f"  scheduler: {explanation.scheduler or '-'}"
    if explanation.policies:
        whose = " (the pod's own)" if explanation.is_own_policy else ""
        yield f"  policy: {', '.join(explanation.policies)}{whose}"
    if not (explanation.containers or explanation.obstacles) and explanation.standing != "ended":
        what = (
            f"; {', '.join(explanation.others)} is not placed by it" if explanation.others else ""
        )
        yield f"It asks for no part of a GPU by Allotment{what}."


def _print_parts(asked: Sequence[Asked]) -> None:
    from allotment.cli.tables import Column, print_table, short_uuid
    from allotment.model.formats import format_bytes, format_percent

    columns = (
        Column("CONTAINER"),
        Column("GPU"),
        Column("INDEX", is_number=True),
        Column("MODEL"),
        Column("MEMORY", is_number=True),
        Column("OF", is_number=True),
        Column("COMPUTE", is_number=True),
    )
    rows = [
        (
            each.name,
            short_uuid(part.uuid),
            "?" if part.index is None else str(part.index),
            part.model or "?",
            format_bytes(part.memory),
            "?" if part.memory_total is None else format_bytes(part.memory_total),
            f"{format_percent(part.guarantee)} %" if part.guarantee else "-",
        )
        for each in asked
        for part in each.parts
    ]
    print_table(columns, rows)


def _rest(explanation: Explanation) -> Iterator[str]:
    """Yield what keeps it, what of nodes does and does not do, and what kube-scheduler says."""
    if explanation.obstacles:
        is_waiting = explanation.standing == "pending"
        yield "\nBefore any GPU is looked at:" if is_waiting else "\nTo be told of it:"
        for each in explanation.obstacles:
            yield f"  {each.text}"
            if each.hint:
                yield f"    hint: {each.hint}"
    if explanation.containers and explanation.standing != "ended":
        yield ""
        yield _room(explanation)
        for group in explanation.refused:
            yield f"  {_whose(group)}: {group.text}"
    condition = explanation.condition
    if condition is not None and (condition.message or condition.reason):
        since = f" since {condition.last_transition_time}" if condition.last_transition_time else ""
        yield f"\nIts scheduler says ({condition.reason or condition.type}{since}):"
        yield f"  {' '.join(condition.message.split())}"


def _room(explanation: Explanation) -> str:
    from allotment.model.formats import format_count

    number, of = len(explanation.fitting), format_count(explanation.nodes, "node")
    by = ", ".join(explanation.policies)
    if explanation.standing == "pending":
        if not number:
            return f"It has room on none of {of}:"
        return f"It has room on {number} of {of} now; by {by} the best is {explanation.fitting[0]}."
    if explanation.rank is None:
        return f"Without it there would be room on {number} of {of} now, and its own is not one:"
    place = "the best" if explanation.rank == 1 else f"number {explanation.rank}"
    return (
        f"Without it there would be room on {number} of {of} now; by {by} its own is {place}"
        " of them."
    )


def _whose(group: Group) -> str:
    from allotment.model.formats import format_count

    names = ", ".join(group.nodes[:_NAMED])
    if len(group.nodes) == 1:
        return names
    more = ", ..." if len(group.nodes) > _NAMED else ""
    return f"{format_count(len(group.nodes), 'node')} ({names}{more})"
