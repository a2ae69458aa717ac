# SPDX-License-Identifier: Apache-2.0
"""The configuration file: NVIDIA's version v1, field for field, and our section `allotment`.

Names and defaults are those of NVIDIA's k8s-device-plugin v0.20 (api/config/v1). `ConfigFile` is
the file alone, where None means not given. `Config` is file, environment, flags and defaults
together.
"""

import re
from enum import StrEnum
from typing import Final, Literal

import msgspec

from allotment.cost.prices import Prices
from allotment.model.errors import UsageError
from allotment.model.modes import EXCLUSIVE, PART_MODES, ModeName, PodMode
from allotment.model.shares import Excess

TimeSliceName = Literal["default", "short", "medium", "long"]


class _Section(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"
):
    """A mapping of the file: a key that is not known is refused with its path."""


class PluginFlags(_Section, frozen=True, kw_only=True):
    """What the device plugin does."""

    pass_device_specs: bool | None = None
    device_list_strategy: str | list[str] | None = None
    """envvar, volume-mounts, cdi-annotations, cdi-cri."""
    device_id_strategy: str | None = msgspec.field(default=None, name="deviceIDStrategy")
    cdi_annotation_prefix: str | None = None
    nvidia_ctk_path: str | None = msgspec.field(default=None, name="nvidiaCTKPath")
    container_driver_root: str | None = None
    shared_devices_allocation_policy: str | None = None
    """distributed, packed."""


class GfdFlags(_Section, frozen=True, kw_only=True):
    """What GPU feature discovery does."""

    oneshot: bool | None = None
    no_timestamp: bool | None = None
    sleep_interval: str | None = None
    """A Go duration, or `infinite`."""
    output_file: str | None = None
    machine_type_file: str | None = None


class Flags(_Section, frozen=True, kw_only=True):
    """What the command line can say as well."""

    mig_strategy: str | None = None
    fail_on_init_error: bool | None = None
    mps_root: str | None = None
    nvidia_driver_root: str | None = None
    nvidia_dev_root: str | None = None
    gdrcopy_enabled: bool | None = None
    gds_enabled: bool | None = None
    mofed_enabled: bool | None = None
    use_node_feature_api: bool | None = msgspec.field(default=None, name="useNodeFeatureAPI")
    device_discovery_strategy: str | None = None
    plugin: PluginFlags | None = None
    gfd: GfdFlags | None = None


class ResourcePattern(_Section, frozen=True, kw_only=True):
    """Devices whose model (or MIG profile) matches `pattern` are of the resource `name`."""

    pattern: str
    name: str


class Resources(_Section, frozen=True, kw_only=True):
    """Which resources the node's devices are of; the first pattern that matches counts."""

    gpus: list[ResourcePattern] | None = None
    mig: list[ResourcePattern] | None = None


class ReplicatedResource(_Section, frozen=True, kw_only=True):
    """A resource whose devices are shared, and how many ways."""

    name: str
    replicas: int
    devices: str | int | list[str | int] | None = None
    """`all`, how many, or which: index, `index:mig index`, UUID."""
    rename: str | None = None


class ReplicatedResources(_Section, frozen=True, kw_only=True):
    """The resources that are shared in one way."""

    resources: list[ReplicatedResource]
    rename_by_default: bool | None = None
    fail_requests_greater_than_one: bool | None = None


class Sharing(_Section, frozen=True, kw_only=True):
    """How devices are shared."""

    time_slicing: ReplicatedResources | msgspec.UnsetType | None = msgspec.UNSET
    """None: the key has no value, which NVIDIA's plugin refuses; `mps` may be empty there."""
    mps: ReplicatedResources | None = None

    @property
    def sliced(self) -> ReplicatedResources | None:
        """`timeSlicing`, if it is there."""
        written = self.time_slicing
        return written if isinstance(written, ReplicatedResources) else None


class Imex(_Section, frozen=True, kw_only=True):
    """IMEX channels that containers get."""

    channel_ids: list[int] | None = msgspec.field(default=None, name="channelIDs")
    required: bool | None = None


class DeviceMatch(_Section, frozen=True, kw_only=True):
    """All that is named has to hold; each holds when one of its values does."""

    index: list[int] | None = None
    uuid: list[str] | None = None
    """Whole UUIDs or their beginnings."""
    pci: list[str] | None = None
    """Bus ids, `0000:3b:00.0`; digits of the domain may be fewer or more."""
    model: list[str] | None = None
    """As `allot run --gpu` takes it: `a100-80gb`."""


class MigSection(_Section, frozen=True, kw_only=True):
    """What becomes of the slices that are cut for who asks."""

    keep: str | None = None
    """How long a slice stays, warm, after its container: a Go duration; 30s where not said."""
    reset: bool | None = None
    """A GPU that takes MIG mode with a reset only (A100, A30) may be reset for it while idle."""


class DeviceRule(_Section, frozen=True, kw_only=True):
    """What GPUs that match are used for: the first rule that matches a GPU counts."""

    mode: ModeName | None = None
    """The one mode; None: `modes` says."""
    modes: list[PodMode] | None = None
    """Modes by turns; the first is for who does not say."""
    mig: MigSection | None = None
    match: DeviceMatch | None = None
    """None: every GPU."""
    time_slice: TimeSliceName | None = None
    """How long a program runs before the driver gives the GPU to the next one."""

    @property
    def first(self) -> str:
        """The mode, or the first of those by turns."""
        return self.mode or (self.modes or [EXCLUSIVE])[0]

    @property
    def shared(self) -> tuple[str, ...]:
        """Those in which `allotment.dev/gpu` serves; none: it is one of NVIDIA's resources."""
        if self.modes:
            return tuple(self.modes)
        return (self.mode,) if self.mode in PART_MODES else ()


EvictPolicy = Literal["never", "lost", "unhealthy"]
"""Which sick GPUs lose their pods."""


class HealthSection(_Section, frozen=True, kw_only=True):
    """What happens when a GPU is sick."""

    xid: dict[str, str] | None = None
    """XID number → ignore, restart-app, reset-gpu, restart-node, ... (see `health.actions`)."""
    auto_recover: bool | None = None
    evict: EvictPolicy | None = None
    evict_after: str | None = None
    """A duration: `60s`."""


DriverName = Literal["gpu.allotment.dev", "gpu.nvidia.com"]
"""Of Dynamic Resource Allocation. The policy of the agent's manifest has the same names."""


class DraSection(_Section, frozen=True, kw_only=True):
    """How claims are served."""

    driver_name: DriverName | None = None
    """With `gpu.nvidia.com` in the place of NVIDIA's DRA driver; else `gpu.allotment.dev`."""


AliasName = Literal["dcgm", "hami"]
"""Whose names the metrics of use have, too (`metrics.aliases`)."""


class MetricsSection(_Section, frozen=True, kw_only=True):
    """What `/metrics` shows."""

    aliases: list[AliasName] | None = None
    """The metrics of use also under the names of dcgm-exporter and of HAMi."""
    per_process: bool | None = None
    """Metrics of each process, with its PID."""
    prices: dict[str, float] | None = None
    """What an hour of a GPU costs, by words of its model's name."""
    currency: str | None = None
    """Of the prices."""


class AllotmentSection(_Section, frozen=True, kw_only=True):
    """What NVIDIA's plugin does not have. NVIDIA's ignores the key `allotment` if it meets it."""

    devices: list[DeviceRule] | None = None
    shares_per_device: int | None = None
    """How many `allotment.dev/gpu` each GPU in mode soft offers; 16 where nothing is said."""
    honour_resources: bool | None = None
    """Honour `resources`, `rename` and `devices` of the file, which NVIDIA's plugin drops."""
    health: HealthSection | None = None
    dra: DraSection | None = None
    metrics: MetricsSection | None = None
    on_excess: Excess | None = None
    """What happens to a share that has more memory by the driver than its limit: `warn` (default)
    or `stop`."""


class ConfigFile(_Section, frozen=True, kw_only=True):
    """The whole file."""

    version: str | None = None
    flags: Flags | None = None
    resources: Resources | None = None
    sharing: Sharing | None = None
    imex: Imex | None = None
    allotment: AllotmentSection | None = None


GPU: Final = "nvidia.com/gpu"
SHARED_SUFFIX: Final = ".shared"

_PREFIX: Final = "nvidia.com/"
_OWN_DOMAIN: Final = "allotment.dev"
_LONGEST: Final = 63
# A DNS subdomain (RFC 1123), as Kubernetes checks it.
_LABEL: Final = r"[a-z0-9](?:[-a-z0-9]*[a-z0-9])?"
_SUBDOMAIN: Final = re.compile(rf"{_LABEL}(?:\.{_LABEL})*", re.ASCII)


def whole_name(name: str) -> str:
    """Return the resource's name with NVIDIA's prefix; raise `UsageError` with NVIDIA's words."""
    whole = name if name.startswith(_PREFIX) else _PREFIX + name
    if len(whole) > _LONGEST:
        raise UsageError(
            f"fully-qualified resource name must be {_LONGEST} characters or less: {whole}"
        )
    if not _SUBDOMAIN.fullmatch(whole.removeprefix(_PREFIX)):
        raise UsageError(
            f"incorrect format for resource name '{whole}'",
            hint="write small letters, digits, `-` and `.`, like nvidia.com/gpu-small",
        )
    return whole


def new_name(name: str) -> str:
    """Return what `rename` makes of a resource: `whole_name`, or a name of another domain.

    Another system's name, like `deepomatic.com/shared-gpu`, keeps its pods as they are. NVIDIA's
    plugin refuses it.
    """
    domain, slash, rest = name.partition("/")
    if not slash or name.startswith(_PREFIX):
        return whole_name(name)
    is_taken = domain == _OWN_DOMAIN or f".{domain}".endswith(".kubernetes.io")
    if len(name) > _LONGEST or is_taken or "." not in domain:
        return whole_name(name)
    if not _SUBDOMAIN.fullmatch(domain) or not _SUBDOMAIN.fullmatch(rest):
        return whole_name(name)
    return name


def shared_name(name: str) -> str:
    """Return what `renameByDefault` makes of a whole name; raise `UsageError`."""
    return whole_name(name + SHARED_SUFFIX)


def matches_pattern(pattern: str, model: str) -> bool:
    """Does a pattern of `resources` match a model? `*` is any text, all else is itself."""
    literals = (re.escape(literal) for literal in pattern.split("*"))
    return re.fullmatch(".*".join(literals), model, re.DOTALL) is not None


class DeviceListStrategy(StrEnum):
    """How a container gets the devices that the kubelet chose for it."""

    ENVVAR = "envvar"
    VOLUME_MOUNTS = "volume-mounts"
    CDI_ANNOTATIONS = "cdi-annotations"
    CDI_CRI = "cdi-cri"


class PluginConfig(msgspec.Struct, frozen=True, kw_only=True):
    """`flags.plugin`."""

    pass_device_specs: bool = False
    device_list_strategies: tuple[DeviceListStrategy, ...] | None = None
    """None: not set. Then a share has its own CDI device if the runtime supports CDI."""
    device_id_strategy: str = "uuid"
    cdi_annotation_prefix: str = "cdi.k8s.io/"
    shared_devices_allocation_policy: str = "distributed"


class GfdConfig(msgspec.Struct, frozen=True, kw_only=True):
    """`flags.gfd`. `sleep_interval_s` None: label once, and again only when something changes."""

    oneshot: bool = False
    no_timestamp: bool = False
    sleep_interval_s: float | None = 60.0
    output_file: str = "/etc/kubernetes/node-feature-discovery/features.d/gfd"
    machine_type_file: str = "/sys/class/dmi/id/product_name"


class Replication(msgspec.Struct, frozen=True, kw_only=True):
    """`sharing.timeSlicing` or `sharing.mps`."""

    resources: tuple[ReplicatedResource, ...] = ()
    """Names are whole: `nvidia.com/gpu`."""
    rename_by_default: bool = False
    fail_requests_greater_than_one: bool = False


class HealthConfig(msgspec.Struct, frozen=True, kw_only=True):
    """`allotment.health`."""

    xid_actions: tuple[tuple[int, str], ...] = ()
    """Overrides of the table, by XID."""
    auto_recover: bool = True
    evict: EvictPolicy = "lost"
    evict_after_s: float = 60.0


class AllotmentConfig(msgspec.Struct, frozen=True, kw_only=True):
    """`allotment`."""

    devices: tuple[DeviceRule, ...] = ()
    """A GPU that no rule matches is `exclusive`, or `timeslice` where `sharing` has replicas."""
    shares_per_device: int = 16
    honour_resources: bool = False
    health: HealthConfig = msgspec.field(default=HealthConfig())
    driver_name: DriverName = "gpu.allotment.dev"
    """`dra.driverName`"""
    on_excess: Excess = Excess.WARN
    metric_aliases: tuple[AliasName, ...] = ()
    """`metrics.aliases`"""
    has_process_metrics: bool = False
    """`metrics.perProcess`"""
    prices: Prices = msgspec.field(default=Prices())
    """`metrics.prices` and `metrics.currency`"""


class Config(msgspec.Struct, frozen=True, kw_only=True):
    """All of it. `source` says where it came from: a path, or `ConfigMap namespace/name, key`."""

    source: str = "defaults"
    mig_strategy: str = "none"
    fail_on_init_error: bool = True
    nvidia_driver_root: str = "/"
    nvidia_dev_root: str = "/"
    gdrcopy_enabled: bool = False
    gds_enabled: bool = False
    mofed_enabled: bool = False
    use_node_feature_api: bool = True
    plugin: PluginConfig = msgspec.field(default=PluginConfig())
    gfd: GfdConfig = msgspec.field(default=GfdConfig())
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
    allotment: AllotmentConfig = msgspec.field(default=AllotmentConfig())
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
