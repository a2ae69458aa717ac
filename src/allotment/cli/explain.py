# SPDX-License-Identifier: Apache-2.0
"""`allot explain`: why a pod is where it is, or why it waits."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from allotment.cli.kubeconfigs import usual_kubeconfig
from allotment.cli.options import installed, output_option
from allotment.cli.scheduler_options import preferred_modes, systems

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from allotment.scheduler.explaining_answers import Asked, Explanation
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
    *("--namespace", "-n"),
    metavar="NAMESPACE",
    help="The pod's, where it is not written before its name.  [default: the context's]",
)
@click.option(
    "--kubeconfig",
    metavar="FILE",
    type=click.Path(path_type=Path, dir_okay=False),
    help="How to reach the API server.  [default: $KUBECONFIG, or as the pod that this is, or"
    " ~/.kube/config]",
)
@click.option("--context", metavar="NAME", help="That of the kubeconfig.  [default: its current]")
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
@click.option(
    "--modes",
    metavar="M[,M...]",
    default="soft",
    show_default=True,
    help="The scheduler's --modes, for pods that name none.",
)
@click.option(
    "--dialects",
    metavar="FILE",
    type=click.Path(path_type=Path, dir_okay=False, exists=True),
    help="The scheduler's --dialects, by which pods in other systems' words are read.",
)
@click.option(
    "--take-over",
    metavar="D[,D...]",
    default="",
    help="The scheduler's --take-over: whose systems' running pods are counted.",
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
    dialects: Path | None,
    take_over: str,
    output: str,
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
      allot explain pod train -n ml --context staging -o json
      kubectl allot explain pod ml/train
    """  # noqa: D301 - click's mark
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    space, name = _names(pod, namespace)
    way = _Way(kubeconfig or usual_kubeconfig(), context)
    evidence, explanation = _explained(
        way,
        space,
        name,
        policies=_words(policies),
        gpu_policies=_words(gpu_policies),
        modes=preferred_modes(modes),
        dialects=dialects,
        take_over=take_over,
    )
    for line in _left_out(evidence.problems):
        click.echo(line, err=True)
    if output == "json":
        from allotment.cli.documents import print_document

        print_document(document(explanation, evidence.problems), output)
    else:
        from allotment.cli.explanations import print_explanation

        print_explanation(explanation)


@dataclass(frozen=True, slots=True)
class _Way:
    """To the API server."""

    kubeconfig: Path | None
    context: str | None


def _names(text: str, namespace: str | None) -> tuple[str, str]:
    """Return namespace (empty: the context's) and name. Raises `UsageError`."""
    from allotment.model.errors import UsageError

    space, slash, name = text.rpartition("/")
    if namespace is not None:
        if slash and space != namespace:
            raise UsageError(
                f"{text!r} is in namespace {space!r}, and --namespace says {namespace!r}",
                hint="say it once",
            )
        space, slash = namespace, "/"
    if not _NAME.fullmatch(name) or (slash and not _SPACE.fullmatch(space)):
        raise UsageError(
            f"{text!r} names no pod",
            hint="write NAMESPACE/NAME, as in `allot explain pod ml/train`",
        )
    return space, name


def _words(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(part.strip() for part in text.split(",")))


def _left_out(problems: Sequence[str]) -> Iterator[str]:
    """Yield what could not be read and may change the answer.

    That is nothing of how a pod is written: of its own it is told below, and what others have on
    their nodes counts all the same.
    """
    others = [each for each in problems if not each.startswith("pod ")]
    for each in others[:_NAMED]:
        yield f"left out: {each}"
    if len(others) > _NAMED:
        yield f"left out: {len(others) - _NAMED} more; -o json has all"


def _explained(
    way: _Way,
    space: str,
    name: str,
    *,
    policies: Sequence[str],
    gpu_policies: Sequence[str],
    modes: Sequence[str],
    dialects: Path | None,
    take_over: str,
) -> tuple[Evidence, Explanation]:
    import asyncio

    with installed("allot explain", extra="kubernetes"):
        from allotment.kube.clients import connect
        from allotment.kube.errors import DeniedError, ObjectMissingError, UnreachableError
        from allotment.model.errors import NotFoundError
        from allotment.placement.policies import make
        from allotment.scheduler.explaining import explained
        from allotment.scheduler.explaining_evidence import read_evidence
        from allotment.scheduler.settings_file import read_file_settings
    for each in (*policies, *gpu_policies):
        make(each)
    settings = read_file_settings(dialects).dialects
    counted = systems(take_over)

    async def read() -> Evidence:
        async with connect(way.kubeconfig, context=way.context) as api:
            return await read_evidence(
                api, space or api.namespace, name, settings=settings, systems=counted
            )

    try:
        evidence = asyncio.run(read())
    except ObjectMissingError as error:
        raise NotFoundError(error.message, hint=error.hint) from error
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
    explanation = explained(evidence, policies=policies, device_policies=gpu_policies, modes=modes)
    return evidence, explanation


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
            {
                "reason": each.reason,
                "message": each.text,
                "note": each.note or None,
                "nodes": list(each.nodes),
            }
            for each in explanation.refused
        ],
        "beyond": explanation.beyond.text if explanation.beyond is not None else None,
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
                "mig_profile": None if each.slice is None else each.slice.profile,
                "mig_start": None if each.slice is None else each.slice.start,
            }
            for each in asked.parts
        ],
    }
