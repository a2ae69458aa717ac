# SPDX-License-Identifier: Apache-2.0
"""`allot agent`: the daemon of a Kubernetes node."""

import asyncio
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from allotment.agent.config.options import nvidia_options
from allotment.cli.options import (
    installed,
    kubeconfig_option,
    kubelet_socket_option,
    log_options,
    otlp_option,
    simulated_option,
    state_option,
    usual_kubeconfig,
)

if TYPE_CHECKING:
    from allotment.kube.nodes import Wanted

_METRICS = "127.0.0.1:9446"


@click.command(short_help="Share this node's GPUs among pods: the Kubernetes device plugin.")
@click.option(
    "--node-name",
    metavar="NAME",
    envvar="NODE_NAME",
    help="This node's name in Kubernetes.  [env: NODE_NAME; default: the host's name]",
)
@kubeconfig_option
@click.option(
    "--config-file",
    type=click.Path(path_type=Path, dir_okay=False),
    envvar="CONFIG_FILE",
    help="Configuration in the format of NVIDIA's device plugin; reloaded when it changes."
    "  [env: CONFIG_FILE]",
)
@click.option(
    "--config-map",
    metavar="[NAMESPACE/]NAME",
    envvar="CONFIG_MAP",
    help="ConfigMap of named configurations; the node's label nvidia.com/device-plugin.config"
    " selects one. Both are watched. NAMESPACE defaults to the pod's own (POD_NAMESPACE), else"
    " kube-system.  [env: CONFIG_MAP]",
)
@click.option(
    "--default-config",
    metavar="NAME",
    envvar="DEFAULT_CONFIG",
    help="Configuration of a node without the label.  [env: DEFAULT_CONFIG]",
)
@click.option(
    "--cdi",
    type=click.Choice(["auto", "on", "off"]),
    default="auto",
    envvar="ALLOTMENT_CDI",
    help="Whether containers get their shares as CDI devices; auto: if the runtime enables CDI by"
    " default (containerd 2.0, CRI-O 1.28).  [env: ALLOTMENT_CDI]",
)
@click.option(
    "--cdi-dir",
    metavar="DIR",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("/var/run/cdi"),
    help="Folder of CDI specs that the container runtime reads.",
)
@kubelet_socket_option
@click.option(
    "--front",
    type=click.Choice(["auto", "off"]),
    default="auto",
    envvar="ALLOTMENT_FRONT",
    help="The process that serves the kubelet while the agent is away; auto: start one if none"
    " runs; off: `allot front` is started elsewhere.  [env: ALLOTMENT_FRONT]",
)
@click.option(
    "--metrics-address",
    metavar="HOST:PORT",
    default=_METRICS,
    envvar="METRICS_ADDRESS",
    help="Address of /metrics, /healthz and /readyz, or `off`.  [env: METRICS_ADDRESS]",
)
@click.option(
    "--remove",
    is_flag=True,
    help="Remove what agents wrote into the nodes of the cluster, and exit: labels, annotations,"
    " quantities and the condition GpuHealthy. Delete the agents first.",
)
@otlp_option
@log_options
@simulated_option
@state_option
@nvidia_options
def command(
    *,
    node_name: str | None,
    kubeconfig: Path | None,
    config_file: Path | None,
    config_map: str | None,
    default_config: str | None,
    cdi: str,
    cdi_dir: Path,
    kubelet_socket: Path,
    front: str,
    metrics_address: str,
    remove: bool,
    otlp_endpoint: str | None,
    log_format: str,
    verbose: bool,
    simulated: str | None,
    state: Path | None,
    **options: Any,  # noqa: ANN401 - NVIDIA's, of the table's types
) -> None:
    """Offer this node's GPUs to pods, and give each container exactly its share.

    Implements the kubelet's device plugin API. Accepts NVIDIA's configuration file, options,
    environment names and resources (nvidia.com/gpu, time-slicing). Also offers shares of GPUs in
    mode soft: allotment.dev/gpu with allotment.dev/gpu-memory (bytes) and allotment.dev/gpu-compute
    (percent). Sets the node's labels like NVIDIA's GPU feature discovery. All state is in the state
    folder: the agent can be stopped, upgraded and started at any time.

    \b
    Examples:
      allot agent --node-name n1 --kubeconfig ~/.kube/config --simulated t4:2
      allot agent --config-map kube-system/allotment --default-config default
      allot agent --remove
    """  # noqa: D301 - click's mark
    with installed("allot agent", extra="kubernetes"):
        from allotment.agent.configuring import AgentSettings, CdiUse

    if remove:
        _remove(kubeconfig or usual_kubeconfig())
        return
    settings = AgentSettings(
        node=node_name or os.uname().nodename.lower(),  # the kubelet's default name
        kubeconfig=kubeconfig,
        state=state,
        simulated=simulated,
        cdi=CdiUse(cdi),
        cdi_folder=cdi_dir.absolute(),
        kubelet_socket=kubelet_socket.absolute(),
        starts_front=front == "auto",
        config_file=config_file,
        config_map=_config_map(config_map),
        default_config=default_config,
        metrics_address=None if metrics_address == "off" else metrics_address,
        options={name: value for name, value in options.items() if value is not None},
        environment=dict(os.environ),
        otlp_endpoint=otlp_endpoint,
        log_format=log_format,
        verbose=verbose,
    )
    with installed("allot agent", extra="kubernetes"):
        from allotment.agent.running import run
    run(settings)


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


def _remove(kubeconfig: Path | None) -> None:
    """Remove the agents' fields from all nodes. An agent that still runs writes them again."""
    with installed("allot agent", extra="kubernetes"):
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


def _config_map(text: str | None) -> Any:  # noqa: ANN401 - imported late
    """Parse `[namespace/]name`; the default namespace is the pod's own, else kube-system."""
    from allotment.agent.configuring import ConfigMapName
    from allotment.model.errors import UsageError

    if text is None:
        return None
    namespace, slash, name = text.rpartition("/")
    if not name or (slash and not namespace) or "/" in namespace:
        raise UsageError(
            f"{text!r} does not name a ConfigMap",
            hint="for example: --config-map kube-system/allotment",
        )
    return ConfigMapName(namespace or os.environ.get("POD_NAMESPACE") or "kube-system", name)
