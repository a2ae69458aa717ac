# SPDX-License-Identifier: Apache-2.0
"""`allot uninstall`: remove what agents left in a cluster, or on this node."""

import asyncio
import contextlib
import errno
import fcntl
import os
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from allotment.cli.options import (
    cdi_dir_option,
    installed,
    kubeconfig_option,
    kubelet_socket_option,
    state_option,
    usual_kubeconfig,
)

if TYPE_CHECKING:
    from allotment.kube.nodes import Wanted
    from allotment.shares.folders import StateFolder

_FEATURES: Final = Path("/etc/kubernetes/node-feature-discovery/features.d/gfd")
_SOCKETS: Final = "allotment-*.sock"


@click.command(short_help="Remove what agents left in a cluster, or on this node.")
@click.option(
    "--node",
    "is_of_node",
    is_flag=True,
    help="Remove the files on this machine, in place of the fields in the API server: shares, CDI"
    " specs, the state folder, sockets. While a program uses a share, nothing is removed.",
)
@kubeconfig_option
@cdi_dir_option
@kubelet_socket_option
@state_option
def command(
    *,
    is_of_node: bool,
    kubeconfig: Path | None,
    cdi_dir: Path,
    kubelet_socket: Path,
    state: Path | None,
) -> None:
    """Remove from all nodes what their agents wrote: labels, annotations, quantities, GpuHealthy.

    Delete the agents first: an agent that still runs writes them again. Programs in shares keep
    their limits to their end. After that, `--node` as root removes what is left on a machine; the
    next boot removes most of it, too.

    \b
    Examples:
      helm uninstall allotment --namespace allotment-system && allot uninstall
      sudo allot uninstall --node
    """  # noqa: D301 - click's mark
    if is_of_node:
        from allotment.model.errors import UsageError
        from allotment.shares.folders import RUN_FOLDER, StateFolder
        from allotment.shares.run.command import refuse_inside

        refuse_inside("allot uninstall --node")
        if os.geteuid() != 0:
            raise UsageError(
                "only root can remove an agent's files", hint="sudo allot uninstall --node"
            )
        folder = StateFolder.at(state or RUN_FOLDER)
        for path in _clear_node(folder, cdi_dir, kubelet_socket.parent):
            click.echo(f"{path}: removed")
    else:
        _clear_cluster(kubeconfig or usual_kubeconfig())


def agent_fields() -> "Wanted":
    """Return the fields that an agent writes into its node, beside its labels."""
    from allotment.agent.health.watching import CONDITION
    from allotment.agent.resources import GPU_COMPUTE, GPU_MEMORY, GPU_SHARE
    from allotment.kube.inventories import DEVICES
    from allotment.kube.nodes import NodeCondition, Wanted

    return Wanted(
        quantities=dict.fromkeys((GPU_SHARE, GPU_MEMORY, GPU_COMPUTE), 0),
        conditions={CONDITION: NodeCondition(status="Unknown")},
        annotations={DEVICES: None},
    )


def _clear_cluster(kubeconfig: Path | None) -> None:
    """Remove the agents' fields from all nodes."""
    with installed("allot uninstall", extra="kubernetes"):
        from allotment.kube.clients import connect
        from allotment.kube.nodes import remove_fields

        unwanted = agent_fields()

    async def run() -> tuple[str, ...]:
        async with connect(kubeconfig) as api:
            return await remove_fields(api, unwanted=unwanted)

    names = asyncio.run(run())
    for name in names:
        click.echo(f"{name}: removed what its agent wrote")
    if not names:
        click.echo("no node has anything that an agent wrote", err=True)


def _clear_node(folder: "StateFolder", cdi: Path, plugins: Path) -> list[Path]:
    """Remove what agents left on this machine; return what was there.

    Raises:
        BusyError: an agent or its front runs, or programs use shares.
        StateError: something cannot be removed.
    """
    from allotment.shares.folders import explained

    with contextlib.ExitStack() as locks:
        _refuse_agents(folder, plugins, locks)
        removed = []
        if folder.exists():
            _end_shares(folder)
            removed.append(folder.root)
        for path in (*removed, *_files_of_agents(cdi, plugins)):
            try:
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path)
                else:
                    path.unlink(missing_ok=True)
            except OSError as error:
                raise explained(error, path, "remove it") from error
            if path != folder.root:
                removed.append(path)
    return removed


def _files_of_agents(cdi: Path, plugins: Path) -> Iterator[Path]:
    """Yield what is outside the state folder. `plugins`: the kubelet's folder of device plugins."""
    from allotment.shares.cdi import KIND

    kubelet = plugins.parent
    yield from plugins.glob("allotment-offer.json")
    yield from plugins.glob(_SOCKETS)
    yield from plugins.glob(".allotment-*")
    yield from (kubelet / "plugins").glob("gpu.allotment.dev")
    yield from (kubelet / "plugins" / "gpu.nvidia.com").glob("dra-????????.sock")
    for driver in ("gpu.allotment.dev", "gpu.nvidia.com"):
        yield from (kubelet / "plugins_registry").glob(f"{driver}-????????-reg.sock")
    yield from cdi.glob(f"{KIND.partition('/')[0]}*.json")
    with contextlib.suppress(OSError):
        if "allotment.dev/" in _FEATURES.read_text("utf-8"):
            yield _FEATURES


def _refuse_agents(folder: "StateFolder", plugins: Path, locks: contextlib.ExitStack) -> None:
    """Keep agents and fronts from starting, until `locks` are closed. Raises `BusyError`."""
    from allotment.model.errors import BusyError

    refusal = BusyError(
        "an agent runs on this node",
        hint="uninstall the chart or delete the DaemonSet first (helm uninstall allotment"
        " --namespace allotment-system), and wait until its pods are gone",
    )
    for path in plugins.glob(_SOCKETS):
        with socket.socket(socket.AF_UNIX) as client:
            client.setblocking(False)  # a full queue answers, too
            if client.connect_ex(str(path)) not in {errno.ECONNREFUSED, errno.ENOENT}:
                raise refusal
    for name in ("agent.lock", "front.lock"):
        with contextlib.suppress(FileNotFoundError):
            file = locks.enter_context((folder.root / name).open("rb"))
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise refusal from None


def _end_shares(folder: "StateFolder") -> None:
    from allotment.model.errors import BusyError
    from allotment.model.formats import format_pids
    from allotment.shares.lifecycle import destroy
    from allotment.shares.mig.allocate import free_orphans
    from allotment.shares.recovery import list_shares, users_of

    shares = list_shares(folder)
    used = [f"{each.name} ({format_pids(pids)})" for each in shares if (pids := users_of(each))]
    if used:
        raise BusyError(
            f"programs use shares on this node: {', '.join(used)}",
            hint="delete their pods or end them, and call it again",
        )
    for share in shares:
        destroy(folder, share, force=False, ends_owned=True)
    for problem in free_orphans(folder, keeps_warm=False):
        raise problem
