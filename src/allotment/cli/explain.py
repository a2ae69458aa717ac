# SPDX-License-Identifier: Apache-2.0
"""`allot explain`: why a pod is on its node, or why it waits; the same of a ResourceClaim."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from allotment.cli.documents import print_document
from allotment.cli.explain_claim import claim
from allotment.cli.options import installed, of_cluster, output_option, pod_names, read_of_cluster
from allotment.cli.scheduler_options import preferred_modes, systems
from allotment.cli.tables import Column, named_nodes, print_lines, print_table, short_uuid
from allotment.model.compute import DEFAULT_FLOOR, WHOLE
from allotment.model.formats import format_bytes, format_count, format_percent
from allotment.model.modes import SOFT

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from allotment.model.mig import MigPlace
    from allotment.scheduler.explain_evidence import ContainerSummary, Explanation

_NAMED: Final = 3


@click.group(short_help="Explain why a pod or a claim has its GPUs, or why it waits.")
def command() -> None:
    """Explain decisions of the scheduler.

    \b
    Examples:
      allot explain pod ml/train
      allot explain claim ml/quarter
    """  # noqa: D301 - click's mark


command.add_command(claim)


@command.command(short_help="Explain why a pod is on its node, or why it waits.")
@click.argument("pod", metavar="[NAMESPACE/]NAME")
@of_cluster
@click.option(
    "--policy",
    "policies",
    metavar="P[,P...]",
    default="fragmentation",
    help="The scheduler's --policy, which ranks nodes.",
)
@click.option(
    "--gpu-policy",
    "gpu_policies",
    metavar="P[,P...]",
    default="fragmentation",
    help="The scheduler's --gpu-policy.",
)
@click.option(
    "--modes",
    metavar="M[,M...]",
    default=SOFT,
    help="The scheduler's --modes, for pods that name none.",
)
@click.option(
    "--compute-floor",
    metavar="PERCENT",
    type=click.IntRange(0, 100),
    default=100 * DEFAULT_FLOOR // WHOLE,
    help="The scheduler's --compute-floor.",
)
@click.option(
    "--dialects",
    type=click.Path(path_type=Path, dir_okay=False, exists=True),
    help="The scheduler's --dialects, to read pods of other systems.",
)
@click.option(
    "--take-over",
    metavar="D[,D...]",
    default="",
    show_default=False,
    help="The scheduler's --take-over: systems whose running pods are counted.",
)
@output_option("text", "json")
def pod(
    *,
    pod: str,
    namespace: str | None,
    kubeconfig: Path | None,
    context: str | None,
    policies: str,
    gpu_policies: str,
    modes: str,
    compute_floor: int,
    dialects: Path | None,
    take_over: str,
    output: str,
) -> None:
    """Show a pod's GPUs and how many nodes have room for it, or explain why it waits.

    For a pending pod it shows obstacles on the pod itself: its annotations, its scheduler, the
    quota of its namespace. Then it shows the nodes that do not fit, grouped by reason, with the
    need and what they have. Other checks of kube-scheduler (selectors, taints, ports) are quoted
    from the pod's status.

    Allotment's scheduler need not run: nodes and pods are read from the API server and ranked in
    their current state. This requires the rights to get and list pods, to list nodes, and for
    quotas to list resourcequotas. The nodes at the time of binding are unknown: a node that ranks
    second now may have been the best then. Nothing is changed.

    \b
    Examples:
      allot explain pod ml/train
      allot explain pod train -n ml --context staging -o json
      kubectl allot explain pod ml/train
    """  # noqa: D301 - click's mark
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    space, name = pod_names(pod, namespace)
    with installed("allot explain", extra="kubernetes"):
        from allotment.placement.policies import make
        from allotment.scheduler.explain import explained
        from allotment.scheduler.explain_evidence import read_evidence
        from allotment.scheduler.settings import read_file_settings
    node_policies, device_policies = _policies(policies), _policies(gpu_policies)
    for policy in (*node_policies, *device_policies):
        make(policy)
    default_modes = preferred_modes(modes)
    dialect_settings, adopted = read_file_settings(dialects).dialects, systems(take_over)
    evidence = read_of_cluster(
        kubeconfig,
        context,
        lambda api: read_evidence(
            api, space or api.namespace, name, settings=dialect_settings, systems=adopted
        ),
        rights="get and list pods and to list nodes in the whole cluster",
        check="list pods -A",
    )
    explanation = explained(
        evidence,
        policies=node_policies,
        device_policies=device_policies,
        modes=default_modes,
        compute_floor=compute_floor * WHOLE // 100,
    )
    for line in _left_out(evidence.problems):
        click.echo(line, err=True)
    if output == "json":
        print_document(document(explanation, evidence.problems), output)
    else:
        print_explanation(explanation)


def _policies(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(part.strip() for part in text.split(",")))


def _left_out(problems: Sequence[str]) -> Iterator[str]:
    """Yield what could not be read and may change the answer.

    Problems of pods are left out: those of this pod are obstacles, and other pods count in any
    case.
    """
    others = [problem for problem in problems if not problem.startswith("pod ")]
    for problem in others[:_NAMED]:
        yield f"left out: {problem}"
    if len(others) > _NAMED:
        yield f"left out: {len(others) - _NAMED} more; -o json lists all"


def document(explanation: Explanation, problems: Sequence[str] = ()) -> dict[str, Any]:
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
        "containers": [_container(item) for item in explanation.containers],
        "other_resources": list(explanation.others),
        "claims": list(explanation.claims),
        "obstacles": [
            {"kind": str(item.reason), "message": item.text, "hint": item.hint or None}
            for item in explanation.obstacles
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
        "proposal": [_container(item) for item in explanation.proposal],
        "refused": [
            {
                "reason": item.reason,
                "message": item.text,
                "note": item.note or None,
                "nodes": list(item.nodes),
            }
            for item in explanation.refused
        ],
        "beyond": explanation.beyond.text if explanation.beyond is not None else None,
        "left_out": list(problems),
    }


def _container(asked: ContainerSummary) -> dict[str, Any]:
    return {
        "name": asked.name,
        "kind": asked.kind,
        "asks": asked.text,
        "mode": asked.mode,
        "devices": [
            {
                "uuid": placed.uuid,
                "index": None if device is None else device.index,
                "model": None if device is None else device.model,
                "memory_bytes": placed.memory,
                "memory_total_bytes": None if device is None else device.memory_bytes,
                "guarantee_percent": placed.guarantee / 100,
                "mig_profile": None if placed.slice is None else placed.slice.profile,
                "mig_start": None if placed.slice is None else placed.slice.start,
            }
            for placed, device in ((part.placed, part.device) for part in asked.parts)
        ],
    }


# ---- the text: the most important first ----------------------------------------------------------


def print_explanation(explanation: Explanation) -> None:
    is_waiting = explanation.standing == "pending"
    print_lines(_lines(explanation))
    if not is_waiting:
        _print_parts("Its GPUs:", explanation.containers)
    print_lines(_obstacles(explanation))
    print_lines(_nodes(explanation))
    if is_waiting:
        title = "Otherwise it would get:" if explanation.obstacles else "It would get:"
        _print_parts(title, explanation.proposal)
    print_lines(_scheduler_message(explanation))


def headline(explanation: Explanation) -> str:
    """Return where the pod is, or the shortest reason why it waits."""
    where = f" on node {explanation.node}" if explanation.node else ""
    words = {"placed": "is placed", "bound": "is bound", "pending": "waits", "ended": "has ended"}
    name = f"{explanation.namespace}/{explanation.name}"
    return f"Pod {name} {words[explanation.standing]}{where}{_why(explanation)}"


def _lines(explanation: Explanation) -> Iterator[str]:
    yield headline(explanation)
    for container in explanation.containers:
        yield f"  container {container.name} requests {container.text}"
    if explanation.title:
        yield f"  written in {explanation.title} syntax"
    yield f"  scheduler: {explanation.scheduler or '-'}"
    if explanation.policies:
        whose = " (the pod's own)" if explanation.is_own_policy else ""
        yield f"  policy: {', '.join(explanation.policies)}{whose}"
    if not (explanation.containers or explanation.obstacles) and explanation.standing != "ended":
        others = (
            f"; Allotment does not place {', '.join(explanation.others)}"
            if explanation.others
            else ""
        )
        yield f"It requests no part of a GPU from Allotment{others}."
    for name in explanation.claims:
        where = f"{explanation.namespace}/{name}"
        yield f"  uses the ResourceClaim {name}: see `allot explain claim {where}`"


def _why(explanation: Explanation) -> str:
    if _is_kept_out(explanation):
        return ", and does not start: the node refuses it"
    if explanation.standing != "pending" or explanation.obstacles or not explanation.containers:
        return ""
    if explanation.fitting:
        return "; a node has room for it"
    if explanation.beyond is None:
        return ": no node has room for it"
    if explanation.beyond.reason == "gpu-memory":
        return ": no GPU of the cluster is large enough, even when empty"
    return ": no node of the cluster fits, even when empty"


def _is_kept_out(explanation: Explanation) -> bool:
    """Return whether its node cannot read the pod, so that its containers never start."""
    is_refused = any(obstacle.reason == "refused" for obstacle in explanation.obstacles)
    return explanation.standing == "bound" and is_refused and not explanation.has_started


def _print_parts(title: str, asked: Sequence[ContainerSummary]) -> None:
    if not any(container.parts for container in asked):
        return
    # Columns MODE and SLICE appear only if they differ from the default.
    modes = {container.mode for container in asked if container.parts}
    has_modes = modes != {"soft"}
    has_slices = any(
        part.placed.slice is not None for container in asked for part in container.parts
    )
    columns = (
        Column("CONTAINER"),
        Column("GPU"),
        Column("INDEX", is_number=True),
        Column("MODEL"),
        Column("MEMORY", is_number=True),
        Column("OF", is_number=True),
        Column("COMPUTE", is_number=True),
        *((Column("MODE"),) if has_modes else ()),
        *((Column("SLICE"),) if has_slices else ()),
    )
    rows = [
        (
            container.name,
            short_uuid(part.placed.uuid),
            "-" if part.device is None else str(part.device.index),
            "not offered" if part.device is None else part.device.model,
            format_bytes(part.placed.memory),
            "-" if part.device is None else format_bytes(part.device.memory_bytes),
            f"{format_percent(part.placed.guarantee)} %" if part.placed.guarantee else "-",
            *((container.mode,) if has_modes else ()),
            *((_slice(part.placed.slice),) if has_slices else ()),
        )
        for container in asked
        for part in container.parts
    ]
    click.echo(f"\n{title}")
    print_table(columns, rows)


def _slice(place: MigPlace | None) -> str:
    return "-" if place is None else f"{place.profile} at {place.start}"


def _obstacles(explanation: Explanation) -> Iterator[str]:
    if not explanation.obstacles:
        return
    yield ""
    if explanation.standing == "pending":
        yield "Obstacles other than GPUs:"
    else:
        yield "Why:" if _is_kept_out(explanation) else "Notes:"
    for obstacle in explanation.obstacles:
        yield f"  {obstacle.text}"
        if obstacle.hint:
            yield f"    hint: {obstacle.hint}"


def _nodes(explanation: Explanation) -> Iterator[str]:
    if not explanation.containers or explanation.standing == "ended":
        return
    yield ""
    yield _room(explanation)
    for group in explanation.refused:
        yield f"  {named_nodes(group.nodes)}: {group.text}"
        if group.note:
            yield f"    {group.note}"
    if explanation.beyond is not None:
        yield f"  Even if all were empty and healthy: {explanation.beyond.text}"


def _scheduler_message(explanation: Explanation) -> Iterator[str]:
    condition = explanation.condition
    if condition is not None and (condition.message or condition.reason):
        since = f" since {condition.last_transition_time}" if condition.last_transition_time else ""
        yield ""
        yield f"Message of its scheduler ({condition.reason or condition.type}{since}):"
        yield f"  {' '.join(condition.message.split())}"


def _room(explanation: Explanation) -> str:
    number, of = len(explanation.fitting), format_count(explanation.nodes, "node")
    by = ", ".join(explanation.policies)
    if explanation.standing == "pending":
        if not number:
            return f"It fits on none of {of}:" if explanation.nodes else "No node can be read."
        return f"It fits on {number} of {of} now; the best by {by} is {explanation.fitting[0]}."
    if explanation.rank is None:
        return (
            f"Not counting its own use, it fits on {number} of {of} now, but not on its own node:"
        )
    return (
        f"Not counting its own use, it fits on {number} of {of} now; by {by} its own node ranks"
        f" number {explanation.rank}."
    )
