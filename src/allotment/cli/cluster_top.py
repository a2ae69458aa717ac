# SPDX-License-Identifier: Apache-2.0
"""`kubectl allot top`: what each share of a cluster uses now, by the agents' metrics."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from allotment.cli.documents import print_document, seconds
from allotment.cli.options import installed, read_of_cluster
from allotment.cli.tables import Column, cells_of, print_lines, print_table
from allotment.model.formats import format_bytes, format_count, format_part

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from allotment.kube.clients import Api
    from allotment.metrics.use import GpuUse, ShareUse
    from allotment.scheduler.cluster_use import NodeUse

_NAMED: Final = 5
_COLUMNS: Final = (
    Column("NODE", least=8),
    Column("GPU", is_number=True),
    Column("SHARE OF", least=20),
    Column("MODE", rank=2),
    Column("USED", is_number=True),
    Column("LIMIT", is_number=True),
    Column("PEAK", rank=3, is_number=True),
    Column("BUSY", is_number=True),
    Column("COMPUTE", rank=1, is_number=True),
    Column("REFUSED", rank=4, is_number=True),
    Column("ENFORCED", rank=1),
)
_SORTS: Final[Mapping[str, Callable[[Any], Any]]] = {
    "used": lambda row: -(row[1].memory_used or 0),
    "limit": lambda row: -row[1].memory_limit,
    "gpu": lambda row: -(row[1].utilization or 0),
    "name": lambda row: (row[1].namespace, row[1].pod, row[1].claim, row[1].container),
    "age": lambda row: row[0],  # unknown: by node
}


def show(
    *,
    kubeconfig: Path | None,
    context: str | None,
    system_namespace: str,
    sort: str,
    output: str,
) -> None:
    with installed("kubectl allot top", extra="kubernetes"):
        from allotment.scheduler.cluster_use import read_cluster_use

    async def read(api: Api) -> tuple[NodeUse, ...]:
        nodes = await _nodes(api)
        return await read_cluster_use(api, nodes=nodes, namespace=system_namespace)

    found = read_of_cluster(
        kubeconfig,
        context,
        read,
        rights=f"list pods and get pods/proxy in namespace {system_namespace}",
        check=f"get pods/proxy -n {system_namespace}",
    )
    if output != "table":
        print_document(document(found), output)
        return
    rows = [(each.node, share) for each in found if each.use for share in each.use.shares]
    rows.sort(key=_SORTS[sort])
    if rows:
        print_table(_COLUMNS, cells_of(_COLUMNS, (_row(*row) for row in rows)))
    print_lines(_sums(found))


async def _nodes(api: Api) -> frozenset[str]:
    """Return the nodes that report GPUs; none if this reader may not list nodes."""
    from allotment.kube.errors import DeniedError
    from allotment.kube.inventories import DEVICES
    from allotment.kube.live import listed
    from allotment.kube.objects import NodeObject

    try:
        items = await listed(api, "/api/v1/nodes", NodeObject, asked="list nodes")
    except DeniedError:
        return frozenset()
    return frozenset(
        item.metadata.name for item in items if DEVICES in (item.metadata.annotations or {})
    )


def _row(node: str, share: ShareUse) -> dict[str, str]:
    return {
        "NODE": node,
        "GPU": str(share.gpu_index),
        "SHARE OF": holder_of(share),
        "MODE": share.mode or "-",
        "USED": format_bytes(share.memory_used),
        "LIMIT": format_bytes(share.memory_limit) if share.memory_limit else "-",
        "PEAK": format_bytes(share.memory_peak),
        "BUSY": format_part(share.utilization),
        "COMPUTE": _promised(share),
        "REFUSED": "-" if share.refusals is None else str(share.refusals),
        "ENFORCED": "suspended" if share.is_suspended else "yes" if share.is_enforced else "no",
    }


def holder_of(share: ShareUse) -> str:
    """Return the name of a share's pod and container, or of its claim, or its own."""
    if share.pod:
        return f"{share.namespace}/{share.pod}/{share.container or share.request}"
    if share.claim:
        return f"{share.namespace}/{share.claim}/{share.request} (claim)"
    return f"{share.share} (no pod)"


def _promised(share: ShareUse) -> str:
    if share.guarantee is None or share.ceiling is None:
        return "-"
    return f"{share.guarantee * 100:g}:{share.ceiling * 100:g}"


def _sums(found: Sequence[NodeUse]) -> Iterator[str]:
    uses = [each.use for each in found if each.use is not None]
    gpus = [gpu for use in uses for gpu in use.gpus]
    shares = sum(len(use.shares) for use in uses)
    used = sum(gpu.memory_used or 0 for gpu in gpus)
    total = sum(gpu.memory_total for gpu in gpus)
    busy = [gpu.utilization for gpu in gpus if gpu.utilization is not None]
    if shares:
        yield ""
    yield (
        f"{format_count(shares, 'share')} on {format_count(len(gpus), 'GPU')} of"
        f" {format_count(len(uses), 'node')}: {format_bytes(used)} of {format_bytes(total)} used"
        + (f", GPUs {format_part(sum(busy) / len(busy))} busy" if busy else "")
    )
    unread = [each.node for each in found if each.use and not each.use.are_shares_read]
    silent = [each for each in found if each.use is None]
    for node in unread[:_NAMED]:
        yield f"node {node}: its agent could not read the shares in time"
    for each in silent[:_NAMED]:
        yield f"node {each.node}: {each.problem}"
    if len(silent) > _NAMED:
        yield f"and {len(silent) - _NAMED} more nodes without figures; -o json lists all"
    if any(each.is_denied for each in silent):
        yield (
            "hint: add this rule to a Role in the agents' namespace:"
            ' {apiGroups: [""], resources: [pods/proxy], verbs: [get]}'
        )


def document(found: Sequence[NodeUse]) -> dict[str, Any]:
    return {
        "nodes": [
            {
                "name": each.node,
                "agent": None if each.agent is None else str(each.agent),
                "problem": each.problem or None,
                "devices": [_device(gpu) for gpu in each.use.gpus] if each.use else [],
                "shares": [_share(share) for share in each.use.shares] if each.use else [],
            }
            for each in found
        ]
    }


def _device(gpu: GpuUse) -> Mapping[str, Any]:
    return {
        "uuid": gpu.uuid,
        "index": gpu.index,
        "model": gpu.model,
        "mode": gpu.mode or None,
        "answers": gpu.answers,
        "healthy": gpu.is_healthy,
        "memory_total_bytes": gpu.memory_total,
        "memory_used_bytes": gpu.memory_used,
        "memory_outside_bytes": gpu.memory_outside,
        "memory_allocated_bytes": gpu.memory_allocated,
        "busy_percent": _of_hundred(gpu.utilization),
        "temperature_c": gpu.temperature_c,
        "power_mw": gpu.power_mw,
        "last_xid": gpu.last_xid or None,
    }


def _share(share: ShareUse) -> Mapping[str, Any]:
    return {
        "id": share.share,
        "namespace": share.namespace or None,
        "pod": share.pod or None,
        "container": share.container or None,
        "claim": share.claim or None,
        "request": share.request or None,
        "gpu": share.gpu,
        "device": share.device,
        "mode": share.mode or None,
        "class": share.kind or None,
        "memory_used_bytes": share.memory_used,
        "memory_limit_bytes": share.memory_limit,
        "memory_peak_bytes": share.memory_peak,
        "memory_host_bytes": share.host_bytes,
        "refusals": share.refusals,
        "guarantee_percent": _of_hundred(share.guarantee),
        "ceiling_percent": _of_hundred(share.ceiling),
        "busy_percent": _of_hundred(share.utilization),
        "gpu_seconds": seconds(share.gpu_ns),
        "held_seconds": seconds(share.held_ns),
        "processes": share.processes,
        "enforced": share.is_enforced,
        "suspended": share.is_suspended,
    }


def _of_hundred(part: float | None) -> float | None:
    return None if part is None else round(part * 100, 2)
