# SPDX-License-Identifier: Apache-2.0
"""How this node answers `Allocate`: by CDI devices or by mounts, and what is in these."""

import asyncio
import contextlib
import re
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Final, Protocol

from allotment.agent.config.effective import Config
from allotment.agent.configuring import Configuring
from allotment.agent.device_plugin.answers import DriverNodes, answer
from allotment.agent.offering import Offering
from allotment.agent.protocols import Answer, DeviceNode, Mount, Reports
from allotment.agent.resources import MPS, Resource
from allotment.agent.settings import CdiUse
from allotment.model.shares import Injection, ShareId
from allotment.modes import ledger_mode
from allotment.shares.pods import PodShares

__all__ = ["Answering", "Runtime"]

_NODE_WAIT_S: Final = 10.0
"""How long the API server may take to tell which runtime the node has."""

# Runtimes that have CDI on without being told, by their first such version (major, minor):
# containerd's documentation of `enable_cdi`, CRI-O's of `cdi_spec_dirs`.
_CDI_SINCE: Final[Mapping[str, tuple[int, int]]] = {"containerd": (2, 0), "cri-o": (1, 28)}
_RUNTIME: Final = re.compile(r"(?P<name>[a-z-]+)://v?(?P<major>\d+)\.(?P<minor>\d+)")
_NVIDIA_NODE: Final = re.compile(r"/dev/nvidia(\d+)")
_CAPABILITIES: Final = "/dev/nvidia-caps/"


class Runtime(Protocol):
    """An object of the API server that names the container runtime (`kube.nodes.Node`)."""

    @property
    def container_runtime(self) -> str:
        """Like `containerd://2.3.7`."""
        ...


class RuntimeSource(Protocol):
    """This node (`kube.nodes.OwnNode`)."""

    @property
    def current(self) -> Runtime | None:
        """What it says; None: not heard of."""
        ...

    def changes(self) -> AsyncIterator[None]:
        """Yield at once, and whenever it says something else."""
        ...


class Answering:
    """Answers with what is in force."""

    def __init__(
        self,
        cdi: CdiUse,
        *,
        cdi_folder: Path,
        node: RuntimeSource,
        configuring: Configuring,
        offering: Offering,
        shares: PodShares,
        reports: Reports,
    ) -> None:
        """Take whom to ask."""
        self._cdi = cdi
        self._node = node
        self._configuring = configuring
        self._offering = offering
        self._cdi_folder = cdi_folder
        self._shares = shares
        self._reports = reports
        self.problem: str | None = None
        """Why containers cannot get their shares the way that this node hands them in."""

    async def settle(self) -> None:
        """Wait for the node's word on its runtime, where that decides what is answered."""
        if self._cdi is CdiUse.AUTO:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_NODE_WAIT_S):
                    async for _ in self._node.changes():
                        if self._node.current is not None:
                            break
        if self._has_cdi():
            await self._try_folder()
        elif self._cdi is CdiUse.AUTO:
            self._reports.node(
                "NoCdi",
                f"{self._runtime()} has no CDI on by itself: containers get their shares by mounts,"
                " and see the nodes of all GPUs in mode soft; with CDI on in the runtime, start the"
                " agent with --cdi on",
                is_warning=True,
            )

    async def _try_folder(self) -> None:
        """See whether CDI specs can be written: better before the first container than by it."""
        try:
            await asyncio.to_thread(_touch, self._cdi_folder)
        except OSError as error:
            self.problem = (
                f"no CDI spec can be written into {self._cdi_folder}: {error.strerror or error}"
            )
            self._reports.node(
                "CdiFolderNotWritable",
                f"{self.problem}; mount it writable, name another by --cdi-dir (the runtime has to"
                " read it), or start the agent with --cdi off",
                is_warning=True,
            )

    def respond(self, resource: Resource, ids: Sequence[str], share: ShareId) -> Answer:
        """Answer for one container. Raises `UsageError` for ids that cannot be had together."""
        config = self._configuring.current or Config()
        has_cdi = self._has_cdi()
        mounts: tuple[Mount, ...] = ()
        nodes: tuple[DeviceNode, ...] = ()
        envs: Mapping[str, str] = {}
        if not has_cdi:
            mounts, nodes = self._by_mounts(resource, ids, share)
            envs, more = self._mps_by_mounts(resource, ids)
            mounts += more
            self._reports.count("cdi_fallback", resource=resource.name)
        return answer(
            resource,
            ids,
            share=share,
            config=config,
            devices=self._offering.devices,
            has_cdi=has_cdi,
            mounts=mounts,
            nodes=nodes,
            envs=envs,
            driver=self._driver_nodes(resource, ids) if config.plugin.pass_device_specs else None,
        )

    def injection(self, mode: str) -> Injection:
        """Say how a share of a mode is handed in by the answers of this moment."""
        config = self._configuring.current or Config()
        if ledger_mode(mode) is None and config.plugin.device_list_strategies is not None:
            return Injection.NONE
        return Injection.CDI if self._has_cdi() else Injection.MOUNTS

    def _by_mounts(
        self, resource: Resource, ids: Sequence[str], share: ShareId
    ) -> tuple[tuple[Mount, ...], tuple[DeviceNode, ...]]:
        """Return what a container gets without CDI: files that will be there when it starts."""
        device_of = {slot.id: slot.device for slot in resource.slots}
        meant = {device_of.get(each) for each in ids}
        shared = self._offering.current.shared
        devices = [
            device
            for uuid, device in self._offering.devices.items()
            if (uuid in meant if None not in meant else resource.mode in shared.get(uuid, ()))
        ]
        count = len(ids) if None in meant else len(meant)
        mounts = [
            *self._shares.mounts(share, mode=resource.mode, devices=count),
            *self._shares.driver_mounts(devices),
        ]
        return (
            tuple(Mount(each.host_path, each.container_path, each.is_read_only) for each in mounts),
            tuple(DeviceNode(path, path) for path in self._shares.device_nodes(devices)),
        )

    def _mps_by_mounts(
        self, resource: Resource, ids: Sequence[str]
    ) -> tuple[Mapping[str, str], tuple[Mount, ...]]:
        """Return what a container gets for its daemon, where its ids tell which GPU and how much.

        Of several GPUs it is refused when the share is made.
        """
        meant = {slot.device for slot in resource.slots if slot.id in ids}
        uuid = next(iter(meant), None)
        if resource.mode != MPS or uuid is None:
            return {}, ()
        percent = min(100, 100 // resource.replicas * len(ids))
        envs, mounts = self._shares.mps_by_mounts(uuid, percent=percent)
        return envs, tuple(
            Mount(each.host_path, each.container_path, each.is_read_only) for each in mounts
        )

    def _driver_nodes(self, resource: Resource, ids: Sequence[str]) -> DriverNodes:
        """Return the device nodes that are there, of no GPU and of those that are meant."""
        meant = {slot.device for slot in resource.slots if slot.id in ids}
        minors = {}
        capabilities: dict[str, list[str]] = {}
        for uuid, device in self._offering.devices.items():
            if uuid not in meant:
                continue
            for path in self._shares.device_nodes([device]):
                found = _NVIDIA_NODE.fullmatch(path)
                if found:
                    minors[uuid] = int(found[1])
                if path.startswith(_CAPABILITIES):
                    capabilities.setdefault(uuid, []).append(path)
        present = tuple(path for path in DriverNodes().control if Path(path).exists())
        return DriverNodes(
            control=present,
            minors=minors,
            capabilities={uuid: tuple(paths) for uuid, paths in capabilities.items()},
        )

    def _has_cdi(self) -> bool:
        if self._cdi is not CdiUse.AUTO:
            return self._cdi is CdiUse.ON
        found = _RUNTIME.match(self._runtime())
        if found is None:
            return True  # not heard of: all that are supported today have it
        since = _CDI_SINCE.get(found["name"])
        return since is None or (int(found["major"]), int(found["minor"])) >= since

    def _runtime(self) -> str:
        node = self._node.current
        return node.container_runtime if node is not None else ""


def _touch(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(prefix=".allotment-", dir=folder):
        pass
