# SPDX-License-Identifier: Apache-2.0
"""What `Allocate` answers: how a container is to get the devices of its ids. Pure.

Who named a `deviceListStrategy` gets what NVIDIA's plugin answers (v0.20,
internal/plugin/server.go), to the letter: environment, mounts, annotations, CDI devices of NVIDIA's
kind. Else, and in modes soft and mps, a container gets one CDI device, which is its share's own,
and has no content yet: that comes when it is known whose container it is. Without CDI it gets
mounts of files that are likewise filled later.

Every answer names the share that will be made, in an annotation which the kubelet keeps.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Final

from allotment.agent.config.effective import Config, DeviceListStrategy
from allotment.agent.protocols import SHARE_ANNOTATION, Answer, DeviceNode, Mount
from allotment.agent.resources import ENFORCED, Resource
from allotment.model.devices import Device
from allotment.model.errors import UsageError
from allotment.model.shares import ShareId
from allotment.shares.cdi import KIND

__all__ = ["CDI_VENDOR", "DriverNodes", "answer", "device_names", "uses_nvidia_cdi"]

CDI_VENDOR: Final = "k8s.device-plugin.nvidia.com"
"""Of the CDI devices that NVIDIA's plugin answers with, and describes itself (`nvidia_specs`)."""

_VISIBLE: Final = "NVIDIA_VISIBLE_DEVICES"
_VOLUMES: Final = "/var/run/nvidia-container-devices"
_CDI: Final = frozenset({DeviceListStrategy.CDI_ANNOTATIONS, DeviceListStrategy.CDI_CRI})
_CDI_PREFIX: Final = "cdi.k8s.io/"
_CONTROL_NODES: Final = (
    "/dev/nvidiactl",
    "/dev/nvidia-uvm",
    "/dev/nvidia-uvm-tools",
    "/dev/nvidia-modeset",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverNodes:
    """The driver's device nodes on this machine."""

    control: tuple[str, ...] = _CONTROL_NODES
    """Those of no GPU, as far as they are there."""
    minors: Mapping[str, int] = field(default_factory=dict)
    """N of /dev/nvidiaN by UUID, where that is not the device's index."""
    capabilities: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Of a MIG device, by UUID: the nodes of its instances, beside its GPU's."""


def answer(
    resource: Resource,
    ids: Sequence[str],
    *,
    share: ShareId,
    config: Config,
    devices: Mapping[str, Device],
    has_cdi: bool,
    mounts: Sequence[Mount] = (),
    nodes: Sequence[DeviceNode] = (),
    envs: Mapping[str, str] | None = None,
    driver: DriverNodes | None = None,
) -> Answer:
    """Answer for one container that was given these ids.

    `devices` are the node's, by UUID. `mounts`, `nodes` and `envs` are what it gets where there is
    no CDI. `driver` is what `passDeviceSpecs` goes by. Raises `UsageError`, in NVIDIA's words, for
    ids that cannot be had, or not together.
    """
    _check(resource, ids)
    plugin = config.plugin
    if resource.mode not in ENFORCED and plugin.device_list_strategies is not None:
        chosen = _devices(resource, ids, devices)
        return _as_nvidia(chosen, config, share, driver or DriverNodes())
    marks = {SHARE_ANNOTATION: str(share)}
    if has_cdi:
        return Answer(annotations=marks, cdi_devices=(f"{KIND}={share}",))
    told = dict(envs or {})
    if resource.mode not in ENFORCED:
        chosen = _devices(resource, ids, devices)
        told |= {_VISIBLE: ",".join(device_names(chosen, config)), **_channels(config)}
    return Answer(envs=told, mounts=tuple(mounts), devices=tuple(nodes), annotations=marks)


def _check(resource: Resource, ids: Sequence[str]) -> None:
    """Raise what NVIDIA's plugin says of a request that it refuses."""
    known = {slot.id for slot in resource.slots}
    for each in ids:
        if each not in known:
            raise _refusal(
                resource,
                f"unknown device: {each}",
                "the node's GPUs or its configuration changed meanwhile: delete the pod, so that"
                " it is made and placed anew",
            )
    if resource.fails_above_one and len(ids) > 1:
        raise _refusal(
            resource,
            f"maximum request size for shared resources is 1; found {len(ids)}",
            "ask for 1, or set failRequestsGreaterThanOne: false in the configuration's sharing",
        )


def _refusal(resource: Resource, reason: str, hint: str) -> UsageError:
    return UsageError(
        f'invalid allocation request for "{resource.name}": invalid request: {reason}', hint=hint
    )


def _devices(
    resource: Resource, ids: Sequence[str], devices: Mapping[str, Device]
) -> tuple[Device, ...]:
    """Return the devices of these ids, each once."""
    device_of = {slot.id: slot.device for slot in resource.slots}
    uuids = dict.fromkeys(device_of[each] or "" for each in ids)
    for uuid in uuids:
        if uuid not in devices:
            raise _refusal(
                resource,
                f"unknown device: {uuid}",
                "the GPU does not answer at the moment: see the node's events",
            )
    return tuple(devices[uuid] for uuid in uuids)


def uses_nvidia_cdi(config: Config) -> bool:
    """Say whether some answers name CDI devices of NVIDIA's kind."""
    return not _CDI.isdisjoint(config.plugin.device_list_strategies or ())


def device_names(devices: Sequence[Device], config: Config) -> list[str]:
    """Return what devices are called in answers: by `deviceIDStrategy`."""
    by_index = config.plugin.device_id_strategy == "index"
    return [device.index_text if by_index else device.uuid for device in devices]


# ---- as NVIDIA's plugin answers ------------------------------------------------------------------


def _as_nvidia(
    devices: Sequence[Device],
    config: Config,
    share: ShareId,
    driver: DriverNodes,
) -> Answer:
    strategies = config.plugin.device_list_strategies or ()
    names = device_names(devices, config)
    qualified = _qualified(names, config) if uses_nvidia_cdi(config) else []
    annotations = {SHARE_ANNOTATION: str(share)}
    if qualified and DeviceListStrategy.CDI_ANNOTATIONS in strategies:
        # NVIDIA's plugin makes up a UUID for each answer; the share's id is as good.
        key = f"{config.plugin.cdi_annotation_prefix or _CDI_PREFIX}nvidia-device-plugin_{share}"
        annotations[key] = ",".join(qualified)
    cdi_devices = tuple(qualified) if DeviceListStrategy.CDI_CRI in strategies else ()
    if _CDI.issuperset(strategies):
        return Answer(annotations=annotations, cdi_devices=cdi_devices)
    envs: dict[str, str] = {}
    mounts: tuple[Mount, ...] = ()
    if DeviceListStrategy.ENVVAR in strategies:
        envs |= {_VISIBLE: ",".join(names), **_channels(config)}
    if DeviceListStrategy.VOLUME_MOUNTS in strategies:
        envs[_VISIBLE] = _VOLUMES
        wanted = [*names, *(f"imex/{channel}" for channel in config.imex_channel_ids)]
        mounts = tuple(
            Mount("/dev/null", f"{_VOLUMES}/{name}", is_read_only=False) for name in wanted
        )
    if config.gdrcopy_enabled:
        envs["NVIDIA_GDRCOPY"] = "enabled"
    if config.gds_enabled:
        envs["NVIDIA_GDS"] = "enabled"
    if config.mofed_enabled:
        envs["NVIDIA_MOFED"] = "enabled"
    return Answer(
        envs=envs,
        mounts=mounts,
        devices=_nodes(devices, config, driver) if config.plugin.pass_device_specs else (),
        annotations=annotations,
        cdi_devices=cdi_devices,
    )


def _channels(config: Config) -> dict[str, str]:
    channels = ",".join(map(str, config.imex_channel_ids))
    return {"NVIDIA_IMEX_CHANNELS": channels} if channels else {}


def _qualified(names: Sequence[str], config: Config) -> list[str]:
    """Return the CDI names, in the order in which NVIDIA's plugin has them."""
    extras = {
        "gdrcopy": config.gdrcopy_enabled,
        "gds": config.gds_enabled,
        "mofed": config.mofed_enabled,
    }
    return [
        *(f"{CDI_VENDOR}/gpu={name}" for name in names),
        *(f"{CDI_VENDOR}/imex-channel={channel}" for channel in config.imex_channel_ids),
        *(f"{CDI_VENDOR}/{name}=all" for name, is_on in extras.items() if is_on),
    ]


def _nodes(
    devices: Sequence[Device], config: Config, driver: DriverNodes
) -> tuple[DeviceNode, ...]:
    root = PurePosixPath(config.nvidia_dev_root or "/")
    paths = [
        *driver.control,
        *(
            path
            for device in devices
            for path in (
                f"/dev/nvidia{driver.minors.get(device.uuid, device.index)}",
                *driver.capabilities.get(device.uuid, ()),
            )
        ),
        *(
            f"/dev/nvidia-caps-imex-channels/channel{channel}"
            for channel in config.imex_channel_ids
        ),
    ]
    return tuple(DeviceNode(str(root / path[1:]), path) for path in dict.fromkeys(paths))
