# SPDX-License-Identifier: Apache-2.0
"""The answers to `Allocate`: CDI devices or mounts, device nodes and variables of a share.

The front gives them: here are their parts, with a place for the share's id (`OfferedResource`).
With a `deviceListStrategy` the answer is that of NVIDIA's plugin (v0.20,
internal/plugin/server.go). Without one, and in modes soft and mps, a container gets one CDI device:
its share, created once its pod is known. Without CDI it gets mounts of files that are created then.
An annotation names the share; the kubelet keeps it.
"""

import asyncio
import contextlib
import re
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from itertools import product
from pathlib import Path, PurePosixPath
from typing import Final

import msgspec

from allotment.agent.config.schema import Config, DeviceListStrategy
from allotment.agent.configuring import CdiUse
from allotment.agent.kubelet.proto import deviceplugin_pb2 as messages
from allotment.agent.node_state import NodeState
from allotment.agent.plugin.serving import FIRST, LAST, SHARE_PLACE, OfferedResource
from allotment.agent.protocols import SHARE_ANNOTATION, AllocateAnswer, DeviceNode, Reports
from allotment.agent.resources import Resource
from allotment.kube.nodes import OwnNode
from allotment.model.devices import Device
from allotment.model.errors import AllotError
from allotment.model.shares import Injection, ShareId
from allotment.model.structs import replace
from allotment.modes import ledger_mode, traits_of
from allotment.shares.cdi import EXTRAS, KIND, HostMount, extra_edits
from allotment.shares.pods import PodShares

CDI_VENDOR: Final = "k8s.device-plugin.nvidia.com"
"""The vendor of the CDI devices in NVIDIA's answers; `maintenance` writes their specs."""

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


class DriverNodes(msgspec.Struct, frozen=True, kw_only=True):
    """The driver's device nodes on this machine."""

    control: tuple[str, ...] = _CONTROL_NODES
    """Present nodes that belong to no GPU."""
    minors: Mapping[str, int] = msgspec.field(default_factory=dict)
    """N of /dev/nvidiaN by UUID, if it is not the device's index."""
    capabilities: Mapping[str, tuple[str, ...]] = msgspec.field(default_factory=dict)
    """The nodes of a MIG device's instances, by UUID, beside its GPU's."""


def describe(
    resource: Resource,
    *,
    config: Config,
    devices: Mapping[str, Device],
    by_mounts: Mapping[str, AllocateAnswer] | None = None,
    driver: DriverNodes | None = None,
    extras: Collection[str] = (),
) -> OfferedResource:
    """Describe a resource for the front, with the parts of its answers.

    `devices` are the node's, by UUID. `by_mounts` are the parts that a container gets without CDI;
    None: the node has CDI. `driver` is for `passDeviceSpecs`. `extras` are the kinds of
    `shares.cdi.EXTRAS` that have a CDI spec.
    """
    enforced = ledger_mode(resource.mode) is not None
    marks = AllocateAnswer(annotations={SHARE_ANNOTATION: SHARE_PLACE})
    named = {slot.device for slot in resource.slots}
    used = {uuid: device for uuid, device in devices.items() if uuid in named}
    parts = [(FIRST, marks)]
    names_devices = False
    if not enforced and config.plugin.device_list_strategies is not None:
        names_devices = True
        parts += _as_nvidia(used, config, driver or DriverNodes(), extras)
    elif by_mounts is None:
        parts += [(FIRST, AllocateAnswer(cdi_devices=(f"{KIND}={SHARE_PLACE}",)))]
    else:
        parts += by_mounts.items()
        if not enforced:
            names_devices = True
            parts += [(LAST, AllocateAnswer(envs=_channels(config)))]
            parts += [
                (uuid, AllocateAnswer(envs={_VISIBLE: _name(device, config)}))
                for uuid, device in used.items()
            ]
    return OfferedResource(
        name=resource.name,
        listing=_listing(resource).SerializeToString(),
        devices={slot.id: slot.device or "" for slot in resource.slots},
        # Ids of no device are all alike. The kubelet reads this once.
        has_preferences=any(slot.device is not None for slot in resource.slots),
        names_devices=names_devices,
        fails_above_one=resource.fails_above_one,
        parts=_joined(parts),
    )


def _listing(resource: Resource) -> messages.ListAndWatchResponse:
    response = messages.ListAndWatchResponse()
    for slot in resource.slots:
        device = response.devices.add(
            ID=slot.id, health="Healthy" if slot.is_healthy else "Unhealthy"
        )
        if slot.numa_node is not None:
            device.topology.nodes.add(ID=slot.numa_node)
    return response


def _joined(parts: Sequence[tuple[str, AllocateAnswer]]) -> dict[str, bytes]:
    """Return the parts as messages; those of the same key become one."""
    joined: dict[str, messages.ContainerAllocateResponse] = {}
    for key, part in parts:
        response = joined.setdefault(key, messages.ContainerAllocateResponse())
        response.MergeFrom(_message(part))
    # In the same order each time: equal offers are equal files.
    return {key: each.SerializeToString(deterministic=True) for key, each in joined.items()}


def _message(answer: AllocateAnswer) -> messages.ContainerAllocateResponse:
    response = messages.ContainerAllocateResponse(envs=answer.envs, annotations=answer.annotations)
    for mount in answer.mounts:
        response.mounts.add(
            container_path=mount.container_path,
            host_path=mount.host_path,
            read_only=mount.is_read_only,
        )
    for node in answer.devices:
        response.devices.add(
            container_path=node.container_path,
            host_path=node.host_path,
            permissions=node.permissions,
        )
    for name in answer.cdi_devices:
        response.cdi_devices.add(name=name)
    return response


def uses_nvidia_cdi(config: Config) -> bool:
    """Return whether answers name CDI devices of NVIDIA's kind."""
    return not _CDI.isdisjoint(config.plugin.device_list_strategies or ())


def device_names(devices: Sequence[Device], config: Config) -> list[str]:
    """Return the devices' names in answers, by `deviceIDStrategy`."""
    return [_name(device, config) for device in devices]


def _name(device: Device, config: Config) -> str:
    return device.index_text if config.plugin.device_id_strategy == "index" else device.uuid


# ---- as NVIDIA's plugin answers ------------------------------------------------------------------


def _as_nvidia(
    devices: Mapping[str, Device], config: Config, driver: DriverNodes, extras: Collection[str]
) -> Iterator[tuple[str, AllocateAnswer]]:
    """Yield the parts of an answer, by their keys in `OfferedResource.parts`."""
    strategies = config.plugin.device_list_strategies or ()
    by_list = not _CDI.issuperset(strategies)
    lists_volumes = DeviceListStrategy.VOLUME_MOUNTS in strategies
    passes_nodes = by_list and config.plugin.pass_device_specs
    channels = config.imex_channel_ids
    envs = {f"NVIDIA_{kind.upper()}": "enabled" for kind in enabled_extras(config)}
    if lists_volumes:
        envs[_VISIBLE] = _VOLUMES
    nodes = driver.control if passes_nodes else ()
    yield FIRST, AllocateAnswer(envs=envs, devices=_nodes(nodes, config))
    for uuid, device in devices.items():
        name = _name(device, config)
        is_named = DeviceListStrategy.ENVVAR in strategies and not lists_volumes
        paths = (
            f"/dev/nvidia{driver.minors.get(uuid, device.index)}",
            *driver.capabilities.get(uuid, ()),
        )
        yield (
            uuid,
            replace(
                _qualified((f"gpu={name}",), config),
                envs={_VISIBLE: name} if is_named else {},
                mounts=_volumes((name,)) if lists_volumes else (),
                devices=_nodes(paths if passes_nodes else (), config),
            ),
        )
    names = [f"imex-channel={channel}" for channel in channels]
    # NVIDIA's plugin names no empty spec.
    names += [f"{kind}=all" for kind in enabled_extras(config) if kind in extras]
    paths = tuple(f"/dev/nvidia-caps-imex-channels/channel{channel}" for channel in channels)
    yield (
        LAST,
        replace(
            _qualified(names, config),
            envs=_channels(config) if DeviceListStrategy.ENVVAR in strategies else {},
            mounts=_volumes([f"imex/{channel}" for channel in channels]) if lists_volumes else (),
            devices=_nodes(paths if passes_nodes else (), config),
        ),
    )


def _channels(config: Config) -> dict[str, str]:
    channels = ",".join(map(str, config.imex_channel_ids))
    return {"NVIDIA_IMEX_CHANNELS": channels} if channels else {}


def enabled_extras(config: Config) -> list[str]:
    """Return the kinds of `shares.cdi.EXTRAS` that the configuration asks for."""
    enabled = {
        "gdrcopy": config.gdrcopy_enabled,
        "gds": config.gds_enabled,
        "mofed": config.mofed_enabled,
    }
    return [kind for kind in EXTRAS if enabled[kind]]


def _qualified(names: Sequence[str], config: Config) -> AllocateAnswer:
    """Return a part with CDI devices of NVIDIA's kind, where the strategies name them."""
    strategies = config.plugin.device_list_strategies or ()
    qualified = tuple(f"{CDI_VENDOR}/{name}" for name in names)
    annotations = {}
    if qualified and DeviceListStrategy.CDI_ANNOTATIONS in strategies:
        # NVIDIA's plugin uses a fresh UUID here; the share's id is as unique.
        prefix = config.plugin.cdi_annotation_prefix or _CDI_PREFIX
        annotations[f"{prefix}nvidia-device-plugin_{SHARE_PLACE}"] = ",".join(qualified)
    by_cri = DeviceListStrategy.CDI_CRI in strategies
    return AllocateAnswer(annotations=annotations, cdi_devices=qualified if by_cri else ())


def _volumes(names: Sequence[str]) -> tuple[HostMount, ...]:
    return tuple(HostMount("/dev/null", f"{_VOLUMES}/{name}", is_read_only=False) for name in names)


def _nodes(paths: Sequence[str], config: Config) -> tuple[DeviceNode, ...]:
    root = PurePosixPath(config.nvidia_dev_root or "/")
    return tuple(DeviceNode(str(root / path[1:]), path) for path in paths)


_NODE_WAIT_S: Final = 10.0
"""How long the API server may take to report the node's container runtime."""

# The first version (major, minor) that has CDI on by default: containerd's documentation of
# `enable_cdi`, CRI-O's of `cdi_spec_dirs`.
_CDI_SINCE: Final[Mapping[str, tuple[int, int]]] = {"containerd": (2, 0), "cri-o": (1, 28)}
_RUNTIME: Final = re.compile(r"(?P<name>[a-z-]+)://v?(?P<major>\d+)\.(?P<minor>\d+)")
_NVIDIA_NODE: Final = re.compile(r"/dev/nvidia(\d+)")
_CAPABILITIES: Final = "/dev/nvidia-caps/"


class AllocateAnswers:
    """Answers `Allocate` by the configuration, the offer and the runtime of the moment."""

    def __init__(
        self,
        cdi: CdiUse,
        *,
        cdi_folder: Path,
        node: OwnNode,
        state: NodeState,
        shares: PodShares,
        reports: Reports,
        is_simulated: bool = False,
    ) -> None:
        """Connect the parts. `is_simulated`: there is no NVIDIA driver to describe by CDI."""
        self._cdi = cdi
        self._is_simulated = is_simulated
        self._node = node
        self._state = state
        self._cdi_folder = cdi_folder
        self._shares = shares
        self._reports = reports
        self.problem: str | None = None
        """Why containers cannot get their shares by CDI on this node."""

    async def wait_for_runtime(self) -> None:
        """Wait until the node's runtime is known, if the answers depend on it."""
        if self._cdi is CdiUse.AUTO:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_NODE_WAIT_S):
                    async for _ in self._node.changes():
                        if self._node.current is not None:
                            break
        if self._has_cdi():
            # An unusable folder is reported now, and not by the first container that fails.
            try:
                await asyncio.to_thread(_touch, self._cdi_folder)
            except OSError as error:
                self.problem = (
                    f"cannot write CDI specs into {self._cdi_folder}: {error.strerror or error}"
                )
                self._reports.node(
                    "CdiFolderNotWritable",
                    f"{self.problem}; mount it writable, name another by --cdi-dir (the runtime has"
                    " to read it), or start the agent with --cdi off",
                    is_warning=True,
                )
        elif self._cdi is CdiUse.AUTO:
            self._reports.node(
                "NoCdi",
                f"{self._runtime()} does not enable CDI by default: containers get their shares by"
                " mounts, and see the nodes of all GPUs in mode soft; if CDI is on in the runtime,"
                " start the agent with --cdi on",
                is_warning=True,
            )

    def offered(self, resource: Resource) -> OfferedResource:
        """Describe a resource for the front; called in threads."""
        config = self._state.config or Config()
        uuids = {slot.device for slot in resource.slots}
        described = partial(describe, config=config, devices=self._state.devices)
        try:
            return described(
                resource,
                by_mounts=None if self._has_cdi() else self._by_mounts(resource),
                driver=self._driver_nodes(uuids) if config.plugin.pass_device_specs else None,
                extras=()
                if self._is_simulated
                else [kind for kind in enabled_extras(config) if extra_edits(kind)],
            )
        except AllotError as error:
            # Pods wait for healthy devices. `Allocate` would fail them.
            slots = tuple(replace(slot, is_healthy=False) for slot in resource.slots)
            withheld = described(replace(resource, slots=slots))
            return msgspec.structs.replace(withheld, problem=error.one_line())

    def injection(self, mode: str) -> Injection:
        """Return how the answers of this moment hand a share of a mode to its container."""
        config = self._state.config or Config()
        if ledger_mode(mode) is None and config.plugin.device_list_strategies is not None:
            return Injection.NONE
        return Injection.CDI if self._has_cdi() else Injection.MOUNTS

    def _by_mounts(self, resource: Resource) -> Mapping[str, AllocateAnswer]:
        """Return what a container gets without CDI: files that are created before it starts."""
        shared = self._state.offer.shared
        is_any = any(slot.device is None for slot in resource.slots)
        named = {slot.device for slot in resource.slots}
        devices = [
            device
            for uuid, device in self._state.devices.items()
            if (resource.mode in shared.get(uuid, ()) if is_any else uuid in named)
        ]
        share = ShareId(SHARE_PLACE)
        parts = {
            f"#{count}": AllocateAnswer(
                mounts=self._shares.mounts(share, mode=resource.mode, devices=count)
            )
            for count in range(1, len(devices) + 1)
        }
        if is_any:
            return {**parts, LAST: self._driver_part(devices)}
        parts |= {device.uuid: self._driver_part([device]) for device in devices}
        # A share of several GPUs in mode mps is refused when it is made.
        if traits_of(resource.mode).needs_daemon:
            for uuid, count in product(named, range(1, resource.replicas + 1)):
                percent = min(100, 100 // resource.replicas * count)
                envs, pipes = self._shares.mps_by_mounts(str(uuid), percent=percent)
                parts[f"{uuid}*{count}"] = AllocateAnswer(envs=envs, mounts=pipes)
        return parts

    def _driver_part(self, devices: Sequence[Device]) -> AllocateAnswer:
        return AllocateAnswer(
            mounts=self._shares.driver_mounts(devices),
            devices=tuple(DeviceNode(path, path) for path in self._shares.device_nodes(devices)),
        )

    def _driver_nodes(self, uuids: Collection[str | None]) -> DriverNodes:
        """Return the present device nodes: those of no GPU, and those of these devices."""
        minors = {}
        capabilities = {}
        for uuid, device in self._state.devices.items():
            if uuid not in uuids:
                continue
            paths = self._shares.device_nodes([device])
            numbers = [int(node[1]) for node in map(_NVIDIA_NODE.fullmatch, paths) if node]
            if numbers:
                minors[uuid] = numbers[-1]
            capabilities[uuid] = tuple(path for path in paths if path.startswith(_CAPABILITIES))
        return DriverNodes(
            control=tuple(path for path in _CONTROL_NODES if Path(path).exists()),
            minors=minors,
            capabilities=capabilities,
        )

    def _has_cdi(self) -> bool:
        if self._cdi is not CdiUse.AUTO:
            return self._cdi is CdiUse.ON
        runtime = _RUNTIME.match(self._runtime())
        if runtime is None:
            return True  # not known yet: all runtimes that are supported today have CDI
        since = _CDI_SINCE.get(runtime["name"])
        return since is None or (int(runtime["major"]), int(runtime["minor"])) >= since

    def _runtime(self) -> str:
        node = self._node.current
        return node.container_runtime if node is not None else ""


def _touch(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(prefix=".allotment-", dir=folder):
        pass
