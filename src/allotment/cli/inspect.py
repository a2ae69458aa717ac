# SPDX-License-Identifier: Apache-2.0
"""`allot inspect`: who has what on which GPU of which node."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from allotment.cli.documents import print_document
from allotment.cli.options import (
    TABLES,
    cluster_options,
    installed,
    output_option,
    read_of_cluster,
)
from allotment.cli.tables import Column, cells_of, described, print_lines, print_table, short_uuid
from allotment.model.formats import format_bytes, format_count, format_percent

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from allotment.kube.clients import Api
    from allotment.scheduler.holdings import (
        ClusterHoldings,
        DeviceHoldings,
        Holder,
        NodeHoldings,
        Tenant,
    )

_NAMED: Final = 3
_MOST_WAITING: Final = 5
_NODE_CELLS: Final = 16
_WHO_CELLS: Final = 12
_HOLDER_CELLS: Final = 24


@click.command(short_help="Show who has what on the GPUs of a cluster.")
@click.argument("nodes", metavar="[NODE]...", nargs=-1)
@click.option("--details", "-d", is_flag=True, help="Show each GPU with its shares.")
@click.option(
    "--gpushare",
    is_flag=True,
    help="Print the table of Aliyun's `kubectl inspect gpushare`, also with -d.",
)
@cluster_options
@output_option(*TABLES, "json", "yaml")
def command(
    *,
    nodes: tuple[str, ...],
    details: bool,
    gpushare: bool,
    kubeconfig: Path | None,
    context: str | None,
    output: str,
) -> None:
    """Show how much of each node's GPUs pods and ResourceClaims have, and which pods wait.

    MOST FREE is the most memory that one more share can have on one GPU. SHARES BY lists namespaces
    with their numbers of shares. With a NODE, or with -d, it shows each GPU, its shares and what is
    left of it.

    The amounts are those that the scheduler counts: promised memory and guaranteed compute, not the
    use; `kubectl allot top` shows that. This requires the rights to list nodes, pods and
    resourceclaims. Nothing is changed.

    \b
    Examples:
      kubectl allot inspect
      kubectl allot inspect gpu-node-7
      kubectl allot inspect -d -o wide
      kubectl allot inspect --gpushare -d
    """  # noqa: D301 - click's mark
    if gpushare and output != "table":
        raise click.UsageError(f"--gpushare prints its own table, and -o {output} another")
    found = read_holdings("allot inspect", kubeconfig, context)
    shown = chosen(found, nodes)
    if gpushare:
        from allotment.scheduler.gpushare import details as gpushare_details
        from allotment.scheduler.gpushare import fitting_unit, summary

        unit = fitting_unit(found.nodes)
        text = (gpushare_details if details else summary)(shown, unit=unit)
        click.echo(text, nl=False)
        return
    print_left_out(found.problems)
    if output not in TABLES:
        print_document(document(found, shown), output)
        return
    is_wide = output == "wide"
    if details or nodes:
        _print_details(shown, is_wide=is_wide)
        return
    _print_glance(shown, is_wide=is_wide)
    print_lines(_sums(found))


def read_holdings(command: str, kubeconfig: Path | None, context: str | None) -> ClusterHoldings:
    """Read who has what in a cluster, with hints for a command."""
    import os

    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    with installed(command, extra="kubernetes"):
        from allotment.kube.live import read_cluster
        from allotment.scheduler.holdings import cluster_holdings

    async def read(api: Api) -> ClusterHoldings:
        return cluster_holdings(await read_cluster(api))

    return read_of_cluster(
        kubeconfig,
        context,
        read,
        rights="list nodes, pods and resourceclaims in the whole cluster",
        check="list pods -A",
    )


def chosen(found: ClusterHoldings, names: Sequence[str]) -> tuple[NodeHoldings, ...]:
    """Return the named nodes; without names, all. Raises `NotFoundError`."""
    from allotment.model.errors import NotFoundError
    from allotment.model.formats import meant

    if not names:
        return found.nodes
    nodes = {node.name: node for node in found.nodes}
    for name in names:
        if name in found.without_devices:
            raise NotFoundError(
                f"node {name} has no GPUs that an agent reports",
                hint="see `kubectl allot doctor`: does an agent run there?",
            )
        if name not in nodes:
            raise NotFoundError(
                f"there is no node {name!r}{meant(name, (*nodes, *found.without_devices))}",
                hint="`kubectl allot inspect` lists the nodes with GPUs",
            )
    return tuple(nodes[name] for name in dict.fromkeys(names))


def print_left_out(problems: Sequence[str]) -> None:
    """Name the objects that could not be read, on standard error."""
    for problem in problems[:_NAMED]:
        click.echo(f"left out: {problem}", err=True)
    if len(problems) > _NAMED:
        click.echo(f"left out: {len(problems) - _NAMED} more; -o json lists all", err=True)


# ---- at a glance ---------------------------------------------------------------------------------

_GLANCE: Final = (
    Column("NODE", least=_NODE_CELLS),
    Column("GPUS", is_number=True),
    Column("CLOSED", is_number=True),
    Column("IDLE", rank=2, is_number=True),
    Column("SHARES", rank=1, is_number=True),
    Column("MEMORY", is_number=True),
    Column("OF", is_number=True),
    Column("MOST FREE", is_number=True),
    Column("COMPUTE", is_number=True),
    Column("MODEL", rank=3, least=8),
    Column("SHARES BY", least=_WHO_CELLS),
)


def _print_glance(nodes: Sequence[NodeHoldings], *, is_wide: bool) -> None:
    if not nodes:
        click.echo("no node reports GPUs: see `kubectl allot doctor`", err=True)
        return
    rows = [_glance(node) for node in nodes]
    has_closed = any(row["CLOSED"] != "-" for row in rows)
    columns = [column for column in _GLANCE if has_closed or column.heading != "CLOSED"]
    print_table(columns, cells_of(columns, rows), is_wide=is_wide)


def _glance(node: NodeHoldings) -> dict[str, str]:
    devices = node.devices
    guaranteed = node.guaranteed // len(devices) if devices else 0
    closed = sum(bool(each.device.problem) for each in devices)
    return {
        "NODE": node.name,
        "GPUS": str(len(devices)),
        "CLOSED": str(closed) if closed else "-",
        "IDLE": str(sum(not each.shares for each in devices)),
        "SHARES": str(sum(each.shares for each in devices)),
        "MEMORY": format_bytes(node.allotted_bytes),
        "OF": format_bytes(node.memory_bytes),
        "MOST FREE": format_bytes(max((each.free_bytes for each in devices), default=0)),
        "COMPUTE": f"{format_percent(guaranteed // 100 * 100)} %",
        "MODEL": ", ".join(dict.fromkeys(each.device.model for each in devices)),
        "SHARES BY": _by_namespace(node),
    }


def _by_namespace(node: NodeHoldings) -> str:
    counts = Counter(holder.namespace for each in node.devices for holder in each.holders)
    counts.update(each.namespace for each in node.unlocated)
    others = sum(each.others.shares for each in node.devices) - len(node.unlocated)
    ordered = sorted(counts.items(), key=lambda each: (-each[1], each[0]))
    words = [f"{name} {number}" for name, number in ordered]
    if others > 0:
        words.append(f"others {others}")
    return ", ".join(words) or "-"


def _sums(found: ClusterHoldings) -> Iterator[str]:
    devices = [each for node in found.nodes for each in node.devices]
    total = sum(each.device.memory_bytes for each in devices)
    allotted = sum(each.allotted_bytes for each in devices)
    idle = sum(not each.shares for each in devices)
    yield ""
    yield (
        f"{format_count(len(found.nodes), 'node')} with {format_count(len(devices), 'GPU')}:"
        f" {format_bytes(allotted)} of {format_bytes(total)} allotted"
        f" ({allotted * 100 // total if total else 0} %), {idle} idle"
    )
    if not found.waiting:
        return
    word = "waits" if len(found.waiting) == 1 else "wait"
    yield f"{format_count(len(found.waiting), 'pod')} {word} for GPUs:"
    for pod in found.waiting[:_MOST_WAITING]:
        name = f"{pod.need.namespace}/{pod.need.name}"
        yield f"  {name} since {pod.created or 'an unknown time'}: kubectl allot why {name}"
    if len(found.waiting) > _MOST_WAITING:
        yield f"  and {len(found.waiting) - _MOST_WAITING} more; -o json lists all"


# ---- in detail -----------------------------------------------------------------------------------

_DETAILS: Final = (
    Column("NODE", rank=1, least=8),
    Column("GPU", is_number=True),
    Column("UUID", rank=4),
    Column("MODE"),
    Column("HOLDER", least=_HOLDER_CELLS),
    Column("MEMORY", is_number=True),
    Column("COMPUTE"),
    Column("SLICE", rank=3),
    Column("STATE", rank=2),
)


def _print_details(nodes: Sequence[NodeHoldings], *, is_wide: bool) -> None:
    rows = [row for node in nodes for row in _rows(node, is_wide=is_wide)]
    has_slices = any(row["SLICE"] != "-" for row in rows)
    left_out = set() if has_slices else {"SLICE"}
    if len(nodes) == 1:
        left_out.add("NODE")
    columns = [column for column in _DETAILS if column.heading not in left_out]
    if len(nodes) == 1:
        print_lines(_heading(nodes[0]))
    print_table(columns, cells_of(columns, rows), is_wide=is_wide)


def _heading(node: NodeHoldings) -> Iterator[str]:
    models = ", ".join(dict.fromkeys(each.device.model for each in node.devices))
    yield f"Node {node.name}: {format_count(len(node.devices), 'GPU')} ({models or 'none'})"
    yield (
        f"{format_bytes(node.allotted_bytes)} of {format_bytes(node.memory_bytes)} of memory"
        " allotted"
    )
    yield ""


def _rows(node: NodeHoldings, *, is_wide: bool) -> Iterator[dict[str, str]]:
    for each in node.devices:
        uuid = each.device.uuid
        on = {
            "NODE": node.name,
            "GPU": str(each.device.index),
            "UUID": uuid if is_wide else short_uuid(uuid),
            "SLICE": "-",
            "STATE": "-",
        }
        for holder in each.holders:
            yield {**on, **_holder(holder, is_wide=is_wide)}
        if each.others.shares:
            yield {**on, **_others(each)}
        yield {**on, **_free(each)}
    for tenant in node.unlocated:
        yield _stranger(node, tenant)


def _holder(holder: Holder, *, is_wide: bool) -> dict[str, str]:
    name = str(holder)
    if holder.is_claim:
        users = f" of {', '.join(holder.pods)}" if is_wide and holder.pods else ""
        name += f" (claim{users})"
    return {
        "MODE": holder.mode,
        "HOLDER": name,
        "MEMORY": _memory(holder),
        "COMPUTE": described(holder.compute),
        "SLICE": f"{holder.slice.profile} at {holder.slice.start}" if holder.slice else "-",
        "STATE": holder.phase or "-",
    }


def _memory(holder: Holder) -> str:
    if not holder.memory_bytes:
        return "-"
    return format_bytes(holder.memory_bytes) + ("+host" if holder.is_oversubscribed else "")


def _others(device: DeviceHoldings) -> dict[str, str]:
    others = device.others
    return {
        "MODE": others.mode or "-",
        "HOLDER": f"({format_count(others.shares, 'share')} known to the node alone)",
        "MEMORY": format_bytes(others.memory) if others.memory else "-",
        "COMPUTE": format_percent(others.guarantee) if others.guarantee else "-",
    }


def _free(device: DeviceHoldings) -> dict[str, str]:
    problem = device.device.problem
    why = f"closed: {problem}" if problem else "full" if not device.is_open else "free"
    return {
        "MODE": device.mode or "-",
        "HOLDER": f"({why})",
        "MEMORY": format_bytes(device.free_bytes) if device.is_open else "-",
        "COMPUTE": format_percent(device.free_guarantee) if device.is_open else "-",
    }


def _stranger(node: NodeHoldings, tenant: Tenant) -> dict[str, str]:
    return {
        "NODE": node.name,
        "GPU": "?",
        "UUID": "?",
        "MODE": "?",
        "HOLDER": str(tenant),
        "MEMORY": "?",
        "COMPUTE": "?",
        "SLICE": "-",
        "STATE": tenant.phase or "-",
    }


# ---- JSON ----------------------------------------------------------------------------------------


def document(found: ClusterHoldings, nodes: Sequence[NodeHoldings]) -> dict[str, Any]:
    from allotment.placement.explain import in_words

    return {
        "nodes": [
            {
                "name": node.name,
                "devices": [_device_document(each) for each in node.devices],
                "unknown_devices": [
                    {
                        "namespace": tenant.namespace,
                        "name": tenant.name,
                        "claim": tenant.is_claim,
                        "state": tenant.phase or None,
                    }
                    for tenant in node.unlocated
                ],
            }
            for node in nodes
        ],
        "waiting": [
            {
                "namespace": pod.need.namespace,
                "name": pod.need.name,
                "created": pod.created or None,
                "priority": pod.priority,
                "nominated_node": pod.nominated_node or None,
                "containers": [
                    {"name": each.name, "asks": in_words(each.request)}
                    for each in pod.need.containers
                ],
            }
            for pod in found.waiting
        ],
        "without_devices": list(found.without_devices),
        "left_out": list(found.problems),
    }


def _device_document(each: DeviceHoldings) -> Mapping[str, Any]:
    device, others = each.device, each.others
    return {
        "uuid": device.uuid,
        "index": device.index,
        "model": device.model,
        "mode": each.mode or None,
        "problem": device.problem or None,
        "open": each.is_open,
        "shares": each.shares,
        "memory_total_bytes": device.memory_bytes,
        "memory_allotted_bytes": each.allotted_bytes,
        "memory_oversubscribed_bytes": each.oversubscribed_bytes,
        "memory_free_bytes": each.free_bytes,
        "guaranteed_percent": each.guaranteed / 100,
        "guarantee_free_percent": each.free_guarantee / 100,
        "holders": [_holder_document(holder) for holder in each.holders],
        "others": {
            "shares": others.shares,
            "mode": others.mode or None,
            "memory_bytes": others.memory,
            "guarantee_percent": others.guarantee / 100,
        },
    }


def _holder_document(holder: Holder) -> Mapping[str, Any]:
    compute = holder.compute
    return {
        "namespace": holder.namespace,
        "name": holder.name,
        "uid": holder.uid,
        "container": holder.container,
        "kind": str(holder.kind),
        "claim": holder.is_claim,
        "pods": list(holder.pods),
        "state": holder.phase or None,
        "mode": holder.mode,
        "memory_bytes": holder.memory_bytes,
        "oversubscribed": holder.is_oversubscribed,
        "guarantee_percent": holder.guarantee / 100,
        "ceiling_percent": None if compute is None else compute.ceiling / 100,
        "weight": None if compute is None else compute.weight,
        "class": None if compute is None else str(compute.kind),
        "mig_profile": None if holder.slice is None else holder.slice.profile,
        "mig_start": None if holder.slice is None else holder.slice.start,
    }
