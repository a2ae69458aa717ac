# SPDX-License-Identifier: Apache-2.0
"""The configuration in force: file, environment, flags and defaults laid over one another."""

from dataclasses import dataclass, field
from enum import StrEnum

from allotment.agent.config.schema import DeviceRule, ReplicatedResource, ResourcePattern

__all__ = [
    "AllotmentConfig",
    "Config",
    "DeviceListStrategy",
    "GfdConfig",
    "HealthConfig",
    "PluginConfig",
    "Replication",
]


class DeviceListStrategy(StrEnum):
    """How a container gets the devices that the kubelet chose for it."""

    ENVVAR = "envvar"
    VOLUME_MOUNTS = "volume-mounts"
    CDI_ANNOTATIONS = "cdi-annotations"
    CDI_CRI = "cdi-cri"


@dataclass(frozen=True, slots=True, kw_only=True)
class PluginConfig:
    """`flags.plugin`."""

    pass_device_specs: bool = False
    device_list_strategies: tuple[DeviceListStrategy, ...] | None = None
    """None: nobody said; a CDI device of the share's own where the runtime has CDI."""
    device_id_strategy: str = "uuid"
    cdi_annotation_prefix: str = "cdi.k8s.io/"
    nvidia_ctk_path: str = "/usr/bin/nvidia-ctk"
    container_driver_root: str = "/driver-root"
    shared_devices_allocation_policy: str = "distributed"


@dataclass(frozen=True, slots=True, kw_only=True)
class GfdConfig:
    """`flags.gfd`. `sleep_interval_s` None: label once, and again only when something changes."""

    oneshot: bool = False
    no_timestamp: bool = False
    sleep_interval_s: float | None = 60.0
    output_file: str = "/etc/kubernetes/node-feature-discovery/features.d/gfd"
    machine_type_file: str = "/sys/class/dmi/id/product_name"


@dataclass(frozen=True, slots=True, kw_only=True)
class Replication:
    """`sharing.timeSlicing` or `sharing.mps`."""

    resources: tuple[ReplicatedResource, ...] = ()
    """Names are whole: `nvidia.com/gpu`."""
    rename_by_default: bool = False
    fail_requests_greater_than_one: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthConfig:
    """`allotment.health`."""

    xid_actions: tuple[tuple[int, str], ...] = ()
    """Overrides of the table, by XID."""
    auto_recover: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class AllotmentConfig:
    """`allotment`."""

    devices: tuple[DeviceRule, ...] = ()
    """A GPU that no rule matches is `exclusive`, or `timeslice` where `sharing` has replicas."""
    shares_per_device: int = 16
    honour_resources: bool = False
    health: HealthConfig = field(default=HealthConfig())


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """All of it. `source` says where it came from: a path, or `ConfigMap namespace/name, key`."""

    source: str = "defaults"
    mig_strategy: str = "none"
    fail_on_init_error: bool = True
    mps_root: str = ""
    nvidia_driver_root: str = "/"
    nvidia_dev_root: str = "/"
    gdrcopy_enabled: bool = False
    gds_enabled: bool = False
    mofed_enabled: bool = False
    use_node_feature_api: bool = True
    device_discovery_strategy: str = "auto"
    plugin: PluginConfig = field(default=PluginConfig())
    gfd: GfdConfig = field(default=GfdConfig())
    gpu_patterns: tuple[ResourcePattern, ...] = (
        ResourcePattern(pattern="*", name="nvidia.com/gpu"),
    )
    """Names are whole."""
    mig_patterns: tuple[ResourcePattern, ...] = ()
    """Of MIG profiles, `+me` written as it is; what none matches has the name of its strategy."""
    time_slicing: Replication | None = None
    mps: Replication | None = None
    """Where both are set, this one counts, as in NVIDIA's plugin."""
    imex_channel_ids: tuple[int, ...] = ()
    imex_required: bool = False
    allotment: AllotmentConfig = field(default=AllotmentConfig())
    notes: tuple[str, ...] = ()
    """What of the file has no effect, and why: shown once when it comes into force."""

    @property
    def sharing(self) -> Replication | None:
        """By what resources are replicated: `sharing.mps`, else `sharing.timeSlicing`."""
        return self.time_slicing if self.mps is None else self.mps

    @property
    def sharing_key(self) -> str:
        """Where `sharing` is in the file."""
        return "sharing.timeSlicing" if self.mps is None else "sharing.mps"
