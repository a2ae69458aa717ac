# SPDX-License-Identifier: Apache-2.0
"""`allot explain claim`: why a ResourceClaim waits, or what it has."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import click

from allotment.cli.documents import print_document
from allotment.cli.options import installed, of_cluster, output_option, pod_names, read_of_cluster
from allotment.cli.tables import Column, named_nodes, print_lines, print_table, short_uuid
from allotment.model.formats import format_bytes, format_count

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from allotment.scheduler.explain_claim import ClaimedDevice, ClaimExplanation, ExplainedRequest

_NAMED: Final = 3
_COLUMNS: Final = (
    Column("REQUEST"),
    Column("DEVICE"),
    Column("NODE"),
    Column("GPU"),
    Column("CLAIMED"),
    Column("SHARE"),
    Column("MODE"),
    Column("LIMIT", is_number=True),
    Column("COMPUTE"),
    Column("ENFORCED"),
)


@click.command(short_help="Explain what a ResourceClaim has, or why it waits.")
@click.argument("claim", metavar="[NAMESPACE/]NAME")
@of_cluster
@output_option("text", "json")
def claim(
    *,
    claim: str,
    namespace: str | None,
    kubeconfig: Path | None,
    context: str | None,
    output: str,
) -> None:
    """Show a ResourceClaim's devices and its share, or explain why it waits.

    For a claim without devices it shows the nodes with a device that fits each request. The other
    nodes are grouped by reason, with the need and what they have. kube-scheduler allocates claims.
    Its rules for amounts, taints, counters and other claims are repeated here, for each request by
    itself. Of selectors, comparisons with fixed values are evaluated. Others, and constraints
    between devices, are named as not evaluated.

    Requires the rights to get resourceclaims and deviceclasses and to list resourceclaims and
    resourceslices. Nothing is changed.

    \b
    Examples:
      allot explain claim ml/quarter
      allot explain claim quarter -n ml -o json
    """  # noqa: D301 - click's mark
    space, name = pod_names(claim, namespace, kind="claim")
    with installed("allot explain", extra="kubernetes"):
        from allotment.scheduler.explain_claim import explained_claim, read_claim_evidence
    evidence = read_of_cluster(
        kubeconfig,
        context,
        lambda api: read_claim_evidence(api, space or api.namespace, name),
        rights="get deviceclasses and to list resourceclaims and resourceslices",
        check="list resourceclaims -A",
    )
    explanation = explained_claim(evidence)
    if output == "json":
        print_document(claim_document(explanation), output)
        return
    print_lines(_heading(explanation))
    if explanation.devices:
        click.echo("\nIts devices:")
        print_table(_COLUMNS, [*map(_row, explanation.devices)])
    print_lines(_room(explanation))


def claim_document(explanation: ClaimExplanation) -> dict[str, Any]:
    return {
        "namespace": explanation.namespace,
        "name": explanation.name,
        "uid": explanation.uid,
        "state": str(explanation.state),
        "pods": list(explanation.pods),
        "devices": [
            {
                "request": each.request,
                "driver": each.driver,
                "node": each.node,
                "device": each.device,
                "uuid": each.uuid or None,
                "consumed": _amounts(each.consumed),
                "admin_access": each.is_admin,
                "share": each.data.get("share"),
                "mode": each.data.get("mode"),
                "enforced": each.data.get("enforced"),
                "memory_limit_bytes": each.data.get("memory_limit_bytes"),
                "guarantee_percent": _compute(each).get("guarantee_percent"),
                "ceiling_percent": _compute(each).get("ceiling_percent"),
            }
            for each in explanation.devices
        ],
        "requests": [
            {
                "name": each.name,
                "class": each.device_class,
                "count": each.count,
                "amounts": _amounts(each.amounts),
                "selectors": list(each.selectors),
                "problem": each.problem or None,
                "fitting": list(each.fitting),
                "refused": [
                    {"reason": one.reason, "message": one.text, "nodes": list(one.nodes)}
                    for one in each.refused
                ],
                "not_evaluated": list(each.not_evaluated),
            }
            for each in explanation.requests
        ],
        "nodes": explanation.nodes,
        "fitting": list(explanation.fitting),
        "constraints_not_evaluated": explanation.has_constraints,
    }


def _amounts(amounts: Mapping[str, str]) -> list[dict[str, str]]:
    return [{"capacity": name, "amount": amount} for name, amount in sorted(amounts.items())]


def _compute(device: ClaimedDevice) -> dict[str, Any]:
    return dict(device.data.get("compute") or {})


def _heading(explanation: ClaimExplanation) -> Iterator[str]:
    nodes = ", ".join(dict.fromkeys(each.node for each in explanation.devices))
    states = {
        "pending": "waits: it is not allocated",
        "allocated": f"is allocated on node {nodes}, and not prepared",
        "prepared": f"is prepared on node {nodes}",
    }
    yield f"Claim {explanation.namespace}/{explanation.name} {states[explanation.state]}"
    for each in explanation.requests:
        yield f"  request {each.name}: {_asked(each)}"
    if explanation.pods:
        yield f"  reserved for {', '.join(explanation.pods)}"
    if explanation.state == "pending":
        yield "  kube-scheduler allocates it when it places a pod that uses it"
    elif explanation.state == "allocated":
        yield "  its node prepares it when such a pod starts; see the pod's events if it does not"


def _asked(request: ExplainedRequest) -> str:
    count = "all devices" if request.count is None else format_count(request.count, "device")
    amounts = _named(request.amounts)
    return f"{count} of class {request.device_class}" + (f" with {amounts}" if amounts else "")


def _named(amounts: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {amount}" for name, amount in amounts.items())


def _row(device: ClaimedDevice) -> tuple[str, ...]:
    data, compute = device.data, _compute(device)
    limit = data.get("memory_limit_bytes")
    enforced = {True: "yes", False: "no", None: "-"}[data.get("enforced")]
    return (
        device.request,
        device.device,
        device.node,
        short_uuid(device.uuid) if device.uuid else "-",
        "sees it" if device.is_admin else _named(_shown(device.consumed)) or "all of it",
        str(data.get("share") or "-"),
        str(data.get("mode") or "-"),
        "-" if limit is None else format_bytes(int(limit)),
        f"{compute['guarantee_percent']:g}:{compute['ceiling_percent']:g} %" if compute else "-",
        enforced,
    )


def _shown(consumed: Mapping[str, str]) -> dict[str, str]:
    return {name: consumed[name] for name in ("memory", "compute") if name in consumed}


def _room(explanation: ClaimExplanation) -> Iterator[str]:
    if explanation.state != "pending":
        return
    yield ""
    total = format_count(explanation.nodes, "node")
    if not explanation.nodes:
        yield "No node publishes devices of Allotment: check that `allot agent` runs."
        return
    fitting = explanation.fitting
    names = f" ({', '.join(fitting[:_NAMED])}{', ...' if len(fitting) > _NAMED else ''})"
    yield f"It fits on {len(fitting) or 'none'} of {total} now{names if fitting else ''}"
    for each in explanation.requests:
        if each.refused or each.problem:
            yield f"  request {each.name}:"
        if each.problem:
            yield f"    {each.problem}"
        for group in each.refused:
            yield f"    {named_nodes(group.nodes)}: {group.text}"
    for text in dict.fromkeys(one for each in explanation.requests for one in each.not_evaluated):
        yield f"Not evaluated, as only kube-scheduler can: {text}"
    if explanation.has_constraints:
        yield "Not evaluated: its constraints between devices"
