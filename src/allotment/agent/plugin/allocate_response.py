# SPDX-License-Identifier: Apache-2.0
"""The answer to `Allocate`: CDI devices or mounts, device nodes and variables of a share.

With a `deviceListStrategy` the answer is that of NVIDIA's plugin (v0.20,
internal/plugin/server.go). Without one, and in modes soft and mps, a container gets one CDI device:
its share, created once its pod is known. Without CDI it gets mounts of files that are created then.
An annotation names the share; the kubelet keeps it.
"""

import asyncio
import contextlib
import re
import tempfile
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Final

from allotment.agent.config.schema import Config, DeviceListStrategy
from allotment.agent.configuring import CdiUse
from allotment.agent.node_state import NodeState
from allotment.agent.protocols import SHARE_ANNOTATION, AllocateAnswer, DeviceNode, Reports
from allotment.agent.resources import Resource
from allotment.kube.nodes import OwnNode
from allotment.model.devices import Device
from allotment.model.errors import UsageError
from allotment.model.shares import Injection, ShareId
from allotment.modes import ledger_mode, traits_of
from allotment.shares.cdi import EXTRAS, KIND, HostMount, extra_edits
from allotment.shares.placing import fresh_id
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


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverNodes:
    """The driver's device nodes on this machine."""

    control: tuple[str, ...] = _CONTROL_NODES
    """Present nodes that belong to no GPU."""
    minors: Mapping[str, int] = field(default_factory=dict)
    """N of /dev/nvidiaN by UUID, if it is not the device's index."""
    capabilities: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """The nodes of a MIG device's instances, by UUID, beside its GPU's."""


def answer(
    resource: Resource,
    ids: Sequence[str],
    *,
    share: ShareId,
    config: Config,
    devices: Mapping[str, Device],
    by_mounts: AllocateAnswer | None = None,
    driver: DriverNodes | None = None,
    extras: Collection[str] = (),
) -> AllocateAnswer:
    """Answer for one container that was given these ids.

    `devices` are the node's, by UUID. `by_mounts` is what the container gets without CDI; None: the
    node has CDI. `driver` is for `passDeviceSpecs`. `extras` are the kinds of `shares.cdi.EXTRAS`
    that have a CDI spec. Raises `UsageError`, in NVIDIA's words, for unknown ids and for ids that
    cannot be given together.
    """
    _check(resource, ids)
    enforced = ledger_mode(resource.mode) is not None
    if not enforced and config.plugin.device_list_strategies is not None:
        chosen = _devices(resource, ids, devices)
        return _as_nvidia(chosen, config, share, driver or DriverNodes(), extras)
    marks = {SHARE_ANNOTATION: str(share)}
    if by_mounts is None:
        return AllocateAnswer(annotations=marks, cdi_devices=(f"{KIND}={share}",))
    envs = dict(by_mounts.envs)
    if not enforced:
        chosen = _devices(resource, ids, devices)
        envs |= {_VISIBLE: ",".join(device_names(chosen, config)), **_channels(config)}
    return replace(by_mounts, envs=envs, annotations=marks)


def _check(resource: Resource, ids: Sequence[str]) -> None:
    """Refuse what NVIDIA's plugin refuses, in its words."""
    unknown = [slot for slot in ids if slot not in resource.devices_by_slot]
    if unknown:
        raise _refusal(
            resource,
            f"unknown device: {unknown[0]}",
            "the node's GPUs or its configuration changed: delete the pod, so that its controller"
            " creates it again",
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
    uuids = dict.fromkeys(resource.devices_by_slot[slot] or "" for slot in ids)
    for uuid in uuids:
        if uuid not in devices:
            raise _refusal(
                resource,
                f"unknown device: {uuid}",
                "the GPU does not answer at the moment: see the node's events",
            )
    return tuple(devices[uuid] for uuid in uuids)


def uses_nvidia_cdi(config: Config) -> bool:
    """Return whether answers name CDI devices of NVIDIA's kind."""
    return not _CDI.isdisjoint(config.plugin.device_list_strategies or ())


def device_names(devices: Sequence[Device], config: Config) -> list[str]:
    """Return the devices' names in answers, by `deviceIDStrategy`."""
    by_index = config.plugin.device_id_strategy == "index"
    return [device.index_text if by_index else device.uuid for device in devices]


# ---- as NVIDIA's plugin answers ------------------------------------------------------------------


def _as_nvidia(
    devices: Sequence[Device],
    config: Config,
    share: ShareId,
    driver: DriverNodes,
    extras: Collection[str],
) -> AllocateAnswer:
    strategies = config.plugin.device_list_strategies or ()
    names = device_names(devices, config)
    qualified = _qualified(names, config, extras) if uses_nvidia_cdi(config) else []
    annotations = {SHARE_ANNOTATION: str(share)}
    if qualified and DeviceListStrategy.CDI_ANNOTATIONS in strategies:
        # NVIDIA's plugin uses a fresh UUID here; the share's id is as unique.
        key = f"{config.plugin.cdi_annotation_prefix or _CDI_PREFIX}nvidia-device-plugin_{share}"
        annotations[key] = ",".join(qualified)
    cdi_devices = tuple(qualified) if DeviceListStrategy.CDI_CRI in strategies else ()
    envs = {f"NVIDIA_{kind.upper()}": "enabled" for kind in enabled_extras(config)}
    if _CDI.issuperset(strategies):
        return AllocateAnswer(envs=envs, annotations=annotations, cdi_devices=cdi_devices)
    mounts: tuple[HostMount, ...] = ()
    if DeviceListStrategy.ENVVAR in strategies:
        envs |= {_VISIBLE: ",".join(names), **_channels(config)}
    if DeviceListStrategy.VOLUME_MOUNTS in strategies:
        envs[_VISIBLE] = _VOLUMES
        wanted = [*names, *(f"imex/{channel}" for channel in config.imex_channel_ids)]
        mounts = tuple(
            HostMount("/dev/null", f"{_VOLUMES}/{name}", is_read_only=False) for name in wanted
        )
    return AllocateAnswer(
        envs=envs,
        mounts=mounts,
        devices=_nodes(devices, config, driver) if config.plugin.pass_device_specs else (),
        annotations=annotations,
        cdi_devices=cdi_devices,
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


def _qualified(names: Sequence[str], config: Config, extras: Collection[str]) -> list[str]:
    """Return the CDI names in the order of NVIDIA's plugin, which names no empty spec."""
    return [
        *(f"{CDI_VENDOR}/gpu={name}" for name in names),
        *(f"{CDI_VENDOR}/imex-channel={channel}" for channel in config.imex_channel_ids),
        *(f"{CDI_VENDOR}/{kind}=all" for kind in enabled_extras(config) if kind in extras),
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

    def allocate(self, resource: Resource, ids: Sequence[str]) -> AllocateAnswer:
        """Answer for one container, with a share's name that is used once.

        Raises `UsageError` for ids that cannot be given together.
        """
        share = fresh_id()
        config = self._state.config or Config()
        uuids = {slot.device for slot in resource.slots if slot.id in ids}
        by_mounts = None
        if not self._has_cdi():
            by_mounts = self._by_mounts(resource, len(ids), uuids, share)
            self._reports.count("cdi_fallback", resource=resource.name)
        return answer(
            resource,
            ids,
            share=share,
            config=config,
            devices=self._state.devices,
            by_mounts=by_mounts,
            driver=self._driver_nodes(uuids) if config.plugin.pass_device_specs else None,
            extras=()
            if self._is_simulated
            else [kind for kind in enabled_extras(config) if extra_edits(kind)],
        )

    def injection(self, mode: str) -> Injection:
        """Return how the answers of this moment hand a share of a mode to its container."""
        config = self._state.config or Config()
        if ledger_mode(mode) is None and config.plugin.device_list_strategies is not None:
            return Injection.NONE
        return Injection.CDI if self._has_cdi() else Injection.MOUNTS

    def _by_mounts(
        self, resource: Resource, count: int, uuids: Collection[str | None], share: ShareId
    ) -> AllocateAnswer:
        """Return what a container gets without CDI: files that are created before it starts."""
        is_any = None in uuids
        shared = self._state.offer.shared
        devices = [
            device
            for uuid, device in self._state.devices.items()
            if (resource.mode in shared.get(uuid, ()) if is_any else uuid in uuids)
        ]
        mounts = [
            *self._shares.mounts(
                share, mode=resource.mode, devices=count if is_any else len(uuids)
            ),
            *self._shares.driver_mounts(devices),
        ]
        envs: Mapping[str, str] = {}
        first = next(iter(uuids), None)
        # A share of several GPUs in mode mps is refused when it is made.
        if traits_of(resource.mode).needs_daemon and first is not None:
            percent = min(100, 100 // resource.replicas * count)
            envs, pipes = self._shares.mps_by_mounts(first, percent=percent)
            mounts += pipes
        nodes = self._shares.device_nodes(devices)
        return AllocateAnswer(
            envs=envs,
            mounts=tuple(mounts),
            devices=tuple(DeviceNode(path, path) for path in nodes),
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
