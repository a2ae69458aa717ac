# SPDX-License-Identifier: Apache-2.0
"""`allot migrate`: move nodes from another GPU system to Allotment, and back."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from allotment.cli.documents import print_document
from allotment.cli.options import (
    DURATION_NS,
    cluster_options,
    installed,
    options,
    output_option,
    read_of_cluster,
    system_namespace_option,
)
from allotment.cli.tables import Column, cells_of, print_table
from allotment.model.errors import BusyError, NotFoundError
from allotment.model.formats import format_count

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from allotment.cli.migrate_plans import MigrationPlan, PlannedNode
    from allotment.kube.clients import Api
    from allotment.kube.moving import Mover

_RIGHTS: Final = (
    "list nodes, pods, daemonsets, configmaps and resourceclaims, get nodes, daemonsets and"
    " deployments, and patch nodes, their status and daemonsets"
)
_CHECK: Final = "patch nodes"
_NAMED: Final = 5


@click.group(short_help="Move nodes from another GPU system to Allotment, and back.")
def command() -> None:
    """Move nodes from another GPU system to Allotment one by one, and back.

    Known systems: NVIDIA's device plugin (nvidia), HAMi (hami), Volcano's vGPU device plugin
    (volcano), Aliyun's gpushare (aliyun), Tencent's GPU manager (tencent) and NVIDIA's DRA driver
    (nvidia-dra). Running pods run on; a node whose pods would end is refused.

    \b
    Examples:
      kubectl allot migrate plan
      kubectl allot migrate plan -o values >values.yaml
      kubectl allot migrate apply gpu-node-1
      kubectl allot migrate back gpu-node-1
    """  # noqa: D301 - click's mark


_from_option = click.option(
    "--from",
    "system",
    metavar="SYSTEM",
    help="System to leave, if the cluster has several: nvidia, hami, volcano, aliyun, tencent,"
    " nvidia-dra.",
)
_enforce_option = click.option(
    "--enforce",
    is_flag=True,
    help="Replicas by time slicing, which have no limits, become enforced parts (mode soft).",
)
_move_options = options(
    click.option("--yes", "-y", is_flag=True, help="Do not ask for confirmation."),
    click.option(
        "--dry-run", is_flag=True, help="Do the checks, print the nodes, and change nothing."
    ),
    click.option(
        "--timeout",
        "timeout_ns",
        metavar="DURATION",
        type=DURATION_NS,
        default="5m",
        help="Longest wait for one step of a node.",
    ),
    system_namespace_option,
    cluster_options,
)


@command.command()
@_from_option
@_enforce_option
@cluster_options
@output_option("table", "json", "yaml", "values")
def plan(
    *,
    system: str | None,
    enforce: bool,
    kubeconfig: Path | None,
    context: str | None,
    output: str,
) -> None:
    """Show what is installed, what each setting becomes, and the steps. Nothing is changed.

    With -o values it prints the values of the Helm chart: install Allotment with them before
    `apply`. They restrict the agent to nodes with the label allotment.dev/agent=true.

    \b
    Examples:
      kubectl allot migrate plan
      kubectl allot migrate plan --from hami -o json
    """  # noqa: D301 - click's mark
    found = _read_plan(kubeconfig, context, system, is_enforced=enforce)
    if output == "values":
        import yaml

        click.echo(yaml.safe_dump(found.values, sort_keys=False), nl=False)
    elif output == "table":
        _print_plan(found)
    else:
        print_document(document(found), output)


@command.command()
@click.argument("nodes", metavar="[NODE]...", nargs=-1)
@_from_option
@_move_options
def apply(
    *,
    nodes: tuple[str, ...],
    system: str | None,
    yes: bool,
    dry_run: bool,
    timeout_ns: int,
    system_namespace: str,
    kubeconfig: Path | None,
    context: str | None,
) -> None:
    """Move nodes to Allotment's agent, one by one; without NODE, all nodes of the old system.

    For each node: no new pods (cordon); wait for pods that are starting; the old plugin leaves; the
    agent starts; new pods again. The first failure stops it, and names the node and its state.
    After a failure or Ctrl-C, repeat the command: it goes on.

    A DaemonSet without a label of its own gets a rule to avoid moved nodes. This replaces its pods
    on all nodes: a pod that is admitted on another node meanwhile can fail.

    \b
    Examples:
      kubectl allot migrate apply gpu-node-1 --dry-run
      kubectl allot migrate apply --yes
    """  # noqa: D301 - click's mark
    found = _read_plan(kubeconfig, context, system)
    chosen = _chosen(found, nodes)
    if any(node.obstacle for node in chosen):
        node = next(each for each in chosen if each.obstacle)
        raise BusyError(
            f"node {node.name}: {node.obstacle}",
            hint="drain it, or name other nodes: allot migrate apply NODE...",
        )
    _print_steps(found, chosen)
    if not chosen or not (dry_run or _is_confirmed(chosen, yes=yes, to="Allotment")):
        return

    async def check(mover: Mover) -> None:
        await mover.check_agent()
        if found.take_over and any(node.pods and node.state != "moved" for node in chosen):
            await mover.check_counted(found.take_over)

    async def move(mover: Mover) -> None:
        await check(mover)
        again = await mover.take_agents_off(found.shut)
        await mover.shut_out(found.shut)
        for node in found.nodes:
            if (node in chosen or node.name in again) and not await mover.take_over(node.departure):
                click.echo(f"node {node.name}: already moved")

    run = _Run(kubeconfig, context, timeout_ns=timeout_ns, namespace=system_namespace)
    if dry_run:
        run.look(check)
        return
    run.move(move)
    click.echo(f"{format_count(len(chosen), 'node')} moved from {found.title}")


@command.command()
@click.argument("nodes", metavar="[NODE]...", nargs=-1)
@click.option(
    "--keep-pods",
    is_flag=True,
    help="Also nodes where pods with allotment.dev/ resources or ResourceClaims run. The old system"
    " does not count them.",
)
@click.option(
    "--remove-rules",
    is_flag=True,
    help="When no moved node is left, also remove the rule in the old DaemonSets. It replaces their"
    " pods on all nodes, and a pod that starts meanwhile can fail.",
)
@_move_options
def back(
    *,
    nodes: tuple[str, ...],
    keep_pods: bool,
    remove_rules: bool,
    yes: bool,
    dry_run: bool,
    timeout_ns: int,
    system_namespace: str,
    kubeconfig: Path | None,
    context: str | None,
) -> None:
    """Return nodes to their old system, one by one; without NODE, all nodes that moved.

    Labels get the values that they had before. The old DaemonSets keep the rule to avoid moved
    nodes, which concerns no node then. Running pods run on, and keep their limits.

    \b
    Examples:
      kubectl allot migrate back gpu-node-1
      kubectl allot migrate back --dry-run
      kubectl allot migrate back --remove-rules
    """  # noqa: D301 - click's mark
    moved = _read_moved(kubeconfig, context)
    chosen = _chosen_moved(moved, nodes)
    for name in chosen:
        click.echo(f"node {name}: to {moved[name]}")
    if not chosen:
        click.echo("no node was moved by `allot migrate apply`")

    async def check(mover: Mover) -> None:
        for name in chosen:
            await mover.check_back(name, keeps_pods=keep_pods)

    async def move(mover: Mover) -> None:
        for name in chosen:
            await mover.give_back(name, keeps_pods=keep_pods)
        # Also without a node: a move that stopped early, or of nodes deleted since, left the rule.
        if remove_rules:
            await mover.let_in()
        click.echo(f"{format_count(len(chosen), 'node')} returned")

    run = _Run(kubeconfig, context, timeout_ns=timeout_ns, namespace=system_namespace)
    if dry_run:
        run.look(check)
    elif not chosen or _is_confirmed(chosen, yes=yes, to="the old system"):
        run.move(move)


# ---- parts ---------------------------------------------------------------------------------------


def _read_plan(
    kubeconfig: Path | None, context: str | None, system: str | None, *, is_enforced: bool = False
) -> MigrationPlan:
    with installed("kubectl allot migrate", extra="kubernetes"):
        from allotment.cli.migrate_plans import chosen_system, make_plan
        from allotment.kube.migrations import read_evidence
    evidence = read_of_cluster(
        kubeconfig, context, read_evidence, rights=_RIGHTS, check="list daemonsets -A"
    )
    found = chosen_system(evidence, system)
    return make_plan(evidence, system=found, is_enforced=is_enforced)


def _read_moved(kubeconfig: Path | None, context: str | None) -> dict[str, str]:
    """Return the system of each node that moved."""
    with installed("kubectl allot migrate", extra="kubernetes"):
        from allotment.kube.migrations import read_evidence
    evidence = read_of_cluster(
        kubeconfig, context, read_evidence, rights=_RIGHTS, check="list daemonsets -A"
    )
    return {node.metadata.name: node.record.system for node in evidence.nodes if node.record}


class _Run:
    """Runs steps of a `Mover`."""

    def __init__(
        self, kubeconfig: Path | None, context: str | None, *, timeout_ns: int, namespace: str
    ) -> None:
        self._kubeconfig, self._context = kubeconfig, context
        self._timeout_s, self._namespace = timeout_ns / 1e9, namespace

    def look(self, check: Callable[[Mover], Awaitable[None]]) -> None:
        """Do what writes nothing."""
        from allotment.cli.uninstall import agent_fields
        from allotment.kube.moving import Mover

        async def with_mover(api: Api) -> None:
            mover = Mover(
                api,
                report=click.echo,
                timeout_s=self._timeout_s,
                namespace=self._namespace,
                agent_fields=agent_fields(),
            )
            await check(mover)

        read_of_cluster(self._kubeconfig, self._context, with_mover, rights=_RIGHTS, check=_CHECK)

    def move(self, move: Callable[[Mover], Awaitable[None]]) -> None:
        """Say after a failure in the middle that a node may be cordoned."""
        from allotment.kube.errors import KubeError

        try:
            self.look(move)
        except (KeyboardInterrupt, KubeError):
            click.echo(
                "stopped: the last node above may be cordoned. Repeat the command to go on,"
                " or run `allot migrate back`",
                err=True,
            )
            raise


def _chosen(found: MigrationPlan, names: Sequence[str]) -> list[PlannedNode]:
    known = {node.name for node in found.nodes}
    missing = [name for name in names if name not in known]
    if missing:
        raise NotFoundError(
            f"node {missing[0]} has no plugin of {found.title}",
            hint=f"its nodes: {', '.join(sorted(known)[:_NAMED]) or 'none'}",
        )
    return [node for node in found.nodes if not names or node.name in names]


def _chosen_moved(moved: dict[str, str], names: Sequence[str]) -> list[str]:
    missing = [name for name in names if name not in moved]
    if missing:
        raise NotFoundError(
            f"node {missing[0]} was not moved by `allot migrate apply`",
            hint=f"nodes that were: {', '.join(list(moved)[:_NAMED]) or 'none'}",
        )
    return [name for name in moved if not names or name in names]


def _is_confirmed(nodes: Sequence[object], *, yes: bool, to: str) -> bool:
    return yes or click.confirm(f"Move {format_count(len(nodes), 'node')} to {to}?")


# ---- tables --------------------------------------------------------------------------------------

_FOUND: Final = (Column("KIND"), Column("NAME", least=16), Column("WHAT IT IS", is_note=True))
_SETTINGS: Final = (
    Column("SETTING", least=16),
    Column("VALUE", most=40, least=8),
    Column("BECOMES", is_note=True),
)
_NODES: Final = (
    Column("NODE", least=8),
    Column("STATE"),
    Column("OFFERS", least=12),
    Column("CONFIG"),
    Column("PODS", is_number=True),
    Column("REMARK", is_note=True),
)


def _print_plan(found: MigrationPlan) -> None:
    click.echo(f"From {found.title} ({found.system}). Nothing was changed.\n")
    print_table(_FOUND, [(each.kind, each.name, each.role) for each in found.found])
    if found.settings:
        click.echo()
        rows = [
            {
                "SETTING": each.name,
                "VALUE": each.value,
                "BECOMES": each.becomes or f"(not carried over) {each.reason}",
            }
            for each in found.settings
        ]
        print_table(_SETTINGS, cells_of(_SETTINGS, rows))
    click.echo()
    print_table(_NODES, cells_of(_NODES, [_row(node) for node in found.nodes]))
    for note in found.notes:
        click.echo(f"\nnote: {note}")
    for number, step in enumerate(_all_steps(found), 1):
        click.echo(f"\n{number}. {step}" if number == 1 else f"{number}. {step}")


def _row(node: PlannedNode) -> dict[str, str]:
    return {
        "NODE": node.name,
        "STATE": node.state,
        "OFFERS": ", ".join(f"{name}: {text}" for name, text in node.capacity.items()) or "-",
        "CONFIG": node.config,
        "PODS": str(len(node.pods)),
        "REMARK": node.obstacle,
    }


def _all_steps(found: MigrationPlan) -> list[str]:
    steps = [f"You: {each}" for each in found.before]
    steps += [
        f"apply: DaemonSet {each} gets a rule to avoid moved nodes. Its pods on other nodes are"
        " replaced once"
        for each in found.shut
    ]
    labels = sorted({key for node in found.nodes for key in node.departure.labels})
    changed = f" (labels: {', '.join(labels)})" if labels else ""
    steps.append(
        "apply, node by node: no new pods, the old plugin leaves"
        f"{changed}, the agent starts, new pods again"
    )
    return [*steps, *(f"You: {each}" for each in found.after)]


def _print_steps(found: MigrationPlan, nodes: Sequence[PlannedNode]) -> None:
    for each in found.shut:
        click.echo(f"DaemonSet {each}: a rule to avoid moved nodes")
    for node in nodes:
        labels = ", ".join(
            f"{key}-" if value is None else f"{key}={value}"
            for key, value in node.departure.labels.items()
        )
        what = f"running pods of {found.title}: {len(node.pods)}"
        click.echo(f"node {node.name}: {what}{f'; labels: {labels}' if labels else ''}")


# ---- JSON ----------------------------------------------------------------------------------------


def document(found: MigrationPlan) -> dict[str, Any]:
    """Return the document of `allot migrate plan -o json`."""
    import yaml

    return {
        "system": found.system,
        "title": found.title,
        "found": [
            {"kind": each.kind, "name": each.name, "role": each.role} for each in found.found
        ],
        "settings": [
            {
                "where": each.where,
                "name": each.name,
                "value": each.value,
                "becomes": each.becomes or None,
                "reason": each.reason or None,
            }
            for each in found.settings
        ],
        "values": yaml.safe_dump(found.values, sort_keys=False),
        "dialects": yaml.safe_dump(found.dialects, sort_keys=False) if found.dialects else None,
        "daemon_sets_with_rule": list(found.shut),
        "nodes": [
            {
                "name": node.name,
                "state": node.state,
                "offers": [
                    {"resource": name, "amount": text} for name, text in node.capacity.items()
                ],
                "config": node.config,
                "pods": list(node.pods),
                "obstacle": node.obstacle or None,
                "labels": [
                    {"key": key, "value": value} for key, value in node.departure.labels.items()
                ],
                "annotations_removed": list(node.departure.annotations),
                "daemon_sets": list(node.departure.daemon_sets),
            }
            for node in found.nodes
        ],
        "before": list(found.before),
        "after": list(found.after),
        "notes": list(found.notes),
    }
