# SPDX-License-Identifier: Apache-2.0
"""`allot agent`: the node's daemon on Kubernetes."""

import os
from pathlib import Path
from typing import Any

import click

from allotment.agent.config.options import nvidia_options
from allotment.cli.options import (
    installed,
    kubeconfig_option,
    log_options,
    simulated_option,
    state_option,
)

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
    metavar="FILE",
    type=click.Path(path_type=Path, dir_okay=False),
    envvar="CONFIG_FILE",
    help="Configuration, in the format of NVIDIA's device plugin; its content is watched."
    "  [env: CONFIG_FILE]",
)
@click.option(
    "--config-map",
    metavar="[NAMESPACE/]NAME",
    envvar="CONFIG_MAP",
    help="Named configurations; the node's label nvidia.com/device-plugin.config chooses. Both are"
    " watched. Without NAMESPACE: the pod's own (POD_NAMESPACE), else kube-system.  [env:"
    " CONFIG_MAP]",
)
@click.option(
    "--default-config",
    metavar="NAME",
    envvar="DEFAULT_CONFIG",
    help="The configuration of a node without the label.  [env: DEFAULT_CONFIG]",
)
@click.option(
    "--cdi",
    type=click.Choice(["auto", "on", "off"]),
    default="auto",
    show_default=True,
    envvar="ALLOTMENT_CDI",
    help="Whether containers get their shares by CDI devices; auto: where the runtime has CDI on by"
    " itself (containerd 2.0, CRI-O 1.28).  [env: ALLOTMENT_CDI]",
)
@click.option(
    "--cdi-dir",
    metavar="DIR",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("/var/run/cdi"),
    show_default=True,
    help="The folder that the container runtime reads CDI specs from.",
)
@click.option(
    "--kubelet-socket",
    metavar="PATH",
    type=click.Path(path_type=Path),
    default=Path("/var/lib/kubelet/device-plugins/kubelet.sock"),
    show_default=True,
    envvar="KUBELET_SOCKET",
    help="Where the kubelet takes registrations; the plugins' sockets go beside it."
    "  [env: KUBELET_SOCKET]",
)
@click.option(
    "--metrics-address",
    metavar="HOST:PORT",
    default=_METRICS,
    show_default=True,
    envvar="METRICS_ADDRESS",
    help="Serve /metrics, /healthz and /readyz there; `off`: not at all.  [env: METRICS_ADDRESS]",
)
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
    metrics_address: str,
    log_format: str,
    verbose: bool,
    simulated: str | None,
    state: Path | None,
    **options: Any,  # noqa: ANN401 - NVIDIA's, of the table's types
) -> None:
    """Offer this node's GPUs to pods, and give each container exactly its share.

    Speaks the kubelet's device plugin API. Takes NVIDIA's configuration file, options, environment
    names and resources as they are (nvidia.com/gpu, time-slicing), and offers shares of GPUs of
    mode soft: allotment.dev/gpu with allotment.dev/gpu-memory (bytes) and allotment.dev/gpu-compute
    (percent). Keeps the node's labels as NVIDIA's GPU feature discovery does. All that it knows is
    in the state folder: it can be ended, upgraded and started at any time.

    \b
    Examples:
      allot agent --node-name n1 --kubeconfig ~/.kube/config --simulated a100-80gb:2
      allot agent --config-map kube-system/allotment --default-config default
    """  # noqa: D301 - click's mark
    from allotment.agent.settings import AgentSettings, CdiUse

    settings = AgentSettings(
        node=node_name or os.uname().nodename.lower(),  # as the kubelet names it
        kubeconfig=kubeconfig,
        state=state,
        simulated=simulated,
        cdi=CdiUse(cdi),
        cdi_folder=cdi_dir.absolute(),
        kubelet_socket=kubelet_socket.absolute(),
        config_file=config_file,
        config_map=_config_map(config_map),
        default_config=default_config,
        metrics_address=None if metrics_address == "off" else metrics_address,
        options={name: value for name, value in options.items() if value is not None},
        environment=dict(os.environ),
        log_format=log_format,
        verbose=verbose,
    )
    _start(settings)


def _config_map(text: str | None) -> Any:  # noqa: ANN401 - imported late
    """Parse `namespace/name`; without a namespace it is the pod's own, else kube-system."""
    from allotment.agent.settings import ConfigMapName
    from allotment.model.errors import UsageError

    if text is None:
        return None
    namespace, slash, name = text.rpartition("/")
    if not name or (slash and not namespace) or "/" in namespace:
        raise UsageError(
            f"{text!r} does not name a ConfigMap",
            hint="write NAMESPACE/NAME, as in kube-system/allotment",
        )
    return ConfigMapName(namespace or os.environ.get("POD_NAMESPACE") or "kube-system", name)


def _start(settings: Any) -> None:  # noqa: ANN401 - imported late
    with installed("allot agent", extra="kubernetes"):
        from allotment.agent.running import run
    run(settings)
