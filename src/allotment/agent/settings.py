# SPDX-License-Identifier: Apache-2.0
"""How the agent was started: what does not change while it runs, unlike its configuration."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

__all__ = [
    "CHECKPOINT",
    "KUBELET_SOCKET",
    "PLUGIN_FOLDER",
    "POD_RESOURCES_SOCKET",
    "AgentSettings",
    "CdiUse",
    "ConfigMapName",
]

PLUGIN_FOLDER = Path("/var/lib/kubelet/device-plugins")
"""Compiled into the kubelet (pkg/kubelet/apis/deviceplugin/v1beta1/constants.go)."""
KUBELET_SOCKET = PLUGIN_FOLDER / "kubelet.sock"
CHECKPOINT = "kubelet_internal_checkpoint"
"""In the plugin folder (pkg/kubelet/cm/devicemanager/types.go)."""
POD_RESOURCES_SOCKET = Path("/var/lib/kubelet/pod-resources/kubelet.sock")


class CdiUse(StrEnum):
    """Whether containers get their shares by CDI devices."""

    AUTO = "auto"
    """Where the runtime that the node reports has CDI on without being told."""
    ON = "on"
    OFF = "off"


@dataclass(frozen=True, slots=True)
class ConfigMapName:
    """A ConfigMap with configurations by name."""

    namespace: str
    name: str

    def __str__(self) -> str:
        """Write it as people do."""
        return f"{self.namespace}/{self.name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentSettings:
    """`allot agent`'s own options, and where NVIDIA's come from."""

    node: str
    kubeconfig: Path | None = None
    """None: a pod's service account."""
    state: Path | None = None
    simulated: str | None = None
    cdi: CdiUse = CdiUse.AUTO
    cdi_folder: Path = Path("/var/run/cdi")
    kubelet_socket: Path = KUBELET_SOCKET
    config_file: Path | None = None
    config_map: ConfigMapName | None = None
    default_config: str | None = None
    """The configuration of the ConfigMap that a node without the label has."""
    metrics_address: str | None = "127.0.0.1:9446"
    """None: no HTTP server."""
    options: Mapping[str, object] = field(default_factory=dict)
    """NVIDIA's flags as they were given, by name; what was not given is absent."""
    environment: Mapping[str, str] = field(default_factory=dict)
    log_format: str = "text"
    verbose: bool = False

    @property
    def plugin_folder(self) -> Path:
        """The folder of the kubelet's socket: plugins' sockets go there too."""
        return self.kubelet_socket.parent

    @property
    def checkpoint(self) -> Path:
        """The kubelet's own record of who has which ids."""
        return self.plugin_folder / CHECKPOINT
