# SPDX-License-Identifier: Apache-2.0
"""`allot front`: the process of a Kubernetes node that the kubelet always finds."""

from pathlib import Path

import click

from allotment.cli.options import installed, kubelet_socket_option, log_options, state_option


@click.command(short_help="Keep this node's GPUs offered while the agent is away.")
@kubelet_socket_option
@click.option(
    "--ready-file",
    metavar="PATH",
    type=click.Path(path_type=Path),
    envvar="READY_FILE",
    help="File that exists while the kubelet has all resources, for a probe.  [env: READY_FILE]",
)
@click.option("--spawned", is_flag=True, hidden=True, help="End when no agent needs it.")
@log_options
@state_option
def command(
    *,
    kubelet_socket: Path,
    ready_file: Path | None,
    spawned: bool,
    log_format: str,
    verbose: bool,
    state: Path | None,
) -> None:
    """Hold this node's registration at the kubelet, and answer for the agent while it is away.

    `allot agent` starts one by itself, except with --front off: in the DaemonSet, each has a
    container. Pods that arrive without an agent are admitted, and wait for it.
    After five minutes the devices count as unhealthy, until an agent is back.

    \b
    Examples:
      allot front --ready-file /tmp/front-ready
    """  # noqa: D301 - click's mark
    if ready_file is not None:
        # A killed front left it. Before the imports, during which a probe may look.
        ready_file.unlink(missing_ok=True)
    with installed("allot front", extra="kubernetes"):
        from allotment.agent.plugin.front import Front, run
        from allotment.metrics import start_log
        from allotment.shares.folders import StateFolder
    start_log(as_json=log_format == "json", is_verbose=verbose)
    run(
        Front(
            kubelet=kubelet_socket.absolute(),
            state=StateFolder.at(state).root,
            ready_file=ready_file,
            is_spawned=spawned,
        )
    )
