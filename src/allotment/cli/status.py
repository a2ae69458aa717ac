# SPDX-License-Identifier: Apache-2.0
"""`allot status`: the health of an installation in a few lines."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from allotment.cli.documents import print_document
from allotment.cli.findings import CheckResult, Finding
from allotment.cli.options import (
    cluster_options,
    installed,
    output_option,
    read_of_cluster,
    system_namespace_option,
)
from allotment.cli.tables import print_lines
from allotment.model.errors import PrerequisiteError
from allotment.model.formats import format_bytes, format_count

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from allotment.kube.clients import Api
    from allotment.kube.installation import InstalledParts
    from allotment.scheduler.holdings import ClusterHoldings

_NAMED: Final = 3
_WORDS: Final = {
    CheckResult.OK: "works",
    CheckResult.NOTE: "works, with problems",
    CheckResult.MISSING: "does not work",
}


@click.command(short_help="Show whether Allotment works in a cluster.")
@cluster_options
@system_namespace_option
@output_option("table", "json", "yaml")
def command(
    *, kubeconfig: Path | None, context: str | None, system_namespace: str, output: str
) -> int:
    """Show in a few lines whether Allotment works in a cluster, and how full its GPUs are.

    Exits with 8 if an essential part is missing. `kubectl allot doctor` has all checks with fixes.

    \b
    Example:
      kubectl allot status
    """  # noqa: D301 - click's mark
    with installed("allot status", extra="kubernetes"):
        from allotment.cli.cluster_checks import check
        from allotment.kube.errors import DeniedError
        from allotment.kube.installation import read_installation
        from allotment.kube.live import read_cluster
        from allotment.scheduler.holdings import cluster_holdings

    async def read(api: Api) -> tuple[InstalledParts, ClusterHoldings | DeniedError]:
        found = await read_installation(api, namespace=system_namespace)
        try:
            return found, cluster_holdings(await read_cluster(api))
        except DeniedError as error:
            return found, error

    found, holdings = read_of_cluster(
        kubeconfig, context, read, rights="read the cluster", check="list pods -A"
    )
    findings = list(check(found, now=datetime.now(UTC)))
    worst = max((each.outcome for each in findings), key=list(CheckResult).index)
    is_denied = isinstance(holdings, DeniedError)
    sums = {} if isinstance(holdings, DeniedError) else sums_of(holdings)
    if output == "table":
        print_lines(_lines(found.server, worst, findings, sums))
        if is_denied:
            click.echo(f"left out: {holdings}", err=True)
    else:
        print_document(document(found.server, worst, findings, sums), output)
    return PrerequisiteError.exit_code if worst is CheckResult.MISSING else 0


def sums_of(holdings: ClusterHoldings) -> dict[str, int]:
    devices = [each for node in holdings.nodes for each in node.devices]
    return {
        "nodes": sum(bool(node.devices) for node in holdings.nodes),
        "devices": len(devices),
        "closed": sum(bool(each.device.problem) for each in devices),
        "idle": sum(not each.shares for each in devices),
        "memory_total_bytes": sum(each.device.memory_bytes for each in devices),
        "memory_allotted_bytes": sum(each.allotted_bytes for each in devices),
        "waiting": len(holdings.waiting),
    }


def _lines(
    server: str, worst: CheckResult, findings: Sequence[Finding], sums: dict[str, int]
) -> Iterator[str]:
    yield f"Allotment {_WORDS[worst]} in the cluster {server}"
    details = {each.name: each.detail for each in findings if each.outcome is CheckResult.OK}
    for name in ("agents", "scheduler"):
        if name in details:
            yield f"  {name + ':':<11}{details[name]}"
    if sums:
        total, allotted = sums["memory_total_bytes"], sums["memory_allotted_bytes"]
        percent = allotted * 100 // total if total else 0
        closed = f", {sums['closed']} closed" if sums["closed"] else ""
        yield (
            f"  {'GPUs:':<11}{sums['devices']} on {format_count(sums['nodes'], 'node')},"
            f" {sums['idle']} idle{closed}; {format_bytes(allotted)} of {format_bytes(total)}"
            f" allotted ({percent} %)"
        )
        word = "waits" if sums["waiting"] == 1 else "wait"
        yield f"  {'pods:':<11}{sums['waiting']} {word} for GPUs"
    problems = [each for each in findings if each.outcome is not CheckResult.OK]
    problems.sort(key=lambda each: each.outcome is not CheckResult.MISSING)
    for each in problems[:_NAMED]:
        yield f"  {each.outcome}: {each.name}: {each.detail}"
    if problems:
        more = f"{len(problems) - _NAMED} more; " if len(problems) > _NAMED else ""
        yield f"  {more}fixes: kubectl allot doctor"


def document(
    server: str, worst: CheckResult, findings: Sequence[Finding], sums: dict[str, int]
) -> dict[str, Any]:
    return {
        "server": server,
        "state": str(worst),
        "problems": [
            {"name": each.name, "outcome": str(each.outcome), "detail": each.detail}
            for each in findings
            if each.outcome is not CheckResult.OK
        ],
        "sums": sums or None,
    }
