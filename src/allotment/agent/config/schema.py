# SPDX-License-Identifier: Apache-2.0
"""The configuration file's shape: NVIDIA's version v1, field for field, and our `allotment`.

Names and defaults are those of NVIDIA's k8s-device-plugin v0.20 (api/config/v1). None: the file
does not say, so that flags, environment, file and defaults can be laid over one another. What a
field means once all are is `effective.Config`'s.
"""

from typing import Literal

import msgspec

__all__ = [
    "AllotmentSection",
    "ConfigFile",
    "DeviceMatch",
    "DeviceRule",
    "Flags",
    "GfdFlags",
    "HealthSection",
    "Imex",
    "MigSection",
    "PluginFlags",
    "ReplicatedResource",
    "ReplicatedResources",
    "ResourcePattern",
    "Resources",
    "Sharing",
]

ModeName = Literal["exclusive", "timeslice", "soft", "mps", "mig"]
SharedMode = Literal["soft", "mps", "mig", "exclusive"]
"""A mode that a GPU may be in by turns, as `allotment.dev/gpu` is asked for."""
TimeSlice = Literal["default", "short", "medium", "long"]


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

    time_slicing: ReplicatedResources | None = None
    mps: ReplicatedResources | None = None


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
    modes: list[SharedMode] | None = None
    """Modes by turns; the first is for who does not say."""
    mig: MigSection | None = None
    match: DeviceMatch | None = None
    """None: every GPU."""
    time_slice: TimeSlice | None = None
    """How long a program runs before the driver gives the GPU to the next one."""

    @property
    def first(self) -> str:
        """The mode, or the first of those by turns."""
        return self.mode or (self.modes or ["exclusive"])[0]

    @property
    def shared(self) -> tuple[str, ...]:
        """Those in which `allotment.dev/gpu` serves; none: it is one of NVIDIA's resources."""
        if self.modes:
            return tuple(self.modes)
        return (self.mode,) if self.mode in {"soft", "mps", "mig"} else ()


class HealthSection(_Section, frozen=True, kw_only=True):
    """What happens when a GPU is sick."""

    xid: dict[str, str] | None = None
    """XID number → ignore, restart-app, reset-gpu, restart-node, ... (see `health.actions`)."""
    auto_recover: bool | None = None


class AllotmentSection(_Section, frozen=True, kw_only=True):
    """What NVIDIA's plugin does not have. NVIDIA's ignores the key `allotment` if it meets it."""

    devices: list[DeviceRule] | None = None
    shares_per_device: int | None = None
    """How many `allotment.dev/gpu` each GPU in mode soft offers; 16 where nothing is said."""
    honour_resources: bool | None = None
    """Honour `resources`, `rename` and `devices` of the file, which NVIDIA's plugin drops."""
    health: HealthSection | None = None


class ConfigFile(_Section, frozen=True, kw_only=True):
    """The whole file."""

    version: str | None = None
    flags: Flags | None = None
    resources: Resources | None = None
    sharing: Sharing | None = None
    imex: Imex | None = None
    allotment: AllotmentSection | None = None
