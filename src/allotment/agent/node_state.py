# SPDX-License-Identifier: Apache-2.0
"""What the agent's parts share: the node's state as they last observed it.

Each value has one writer. Any thread may read it. `cut_gpus` and `without_mig` change in place: a
thread looks an entry up once, and does not iterate. The other values are replaced as a whole.
"""

import asyncio
from collections.abc import AsyncIterator, Collection, Mapping
from pathlib import Path
from typing import Protocol

import msgspec

from allotment.agent.config.schema import Config
from allotment.agent.mig.state import CutGpu
from allotment.agent.resources import Offer
from allotment.devices.topology import DeviceLinks
from allotment.kube.nodes import NodeFields
from allotment.kube.watching import Signal
from allotment.model.devices import Device
from allotment.model.modes import traits_of
from allotment.model.pods import PodUid
from allotment.shares.mode_policy import ModePolicy


class NodeState(msgspec.Struct, kw_only=True):
    """The node at the moment. Mappings are by UUID."""

    config: Config | None = None
    """The configuration in force, by `Configuring`; None: none yet."""
    offer: Offer = msgspec.field(default_factory=Offer)
    """By `Offering`, like `devices` and `unusable`."""
    has_offer: bool = False
    devices: Mapping[str, Device] = msgspec.field(default_factory=dict)
    """Every GPU that has answered and its MIG devices; unhealthy ones are included."""
    unusable: Mapping[str, str] = msgspec.field(default_factory=dict)
    """Why a device takes no new share. It is still offered after one missed answer."""
    unhealthy: Mapping[str, str] = msgspec.field(default_factory=dict)
    """Why a device is not offered, by `Offering`."""
    evicted: Collection[str] = frozenset()
    """GPUs whose pods have to go, by `Evictions`."""
    links: DeviceLinks = msgspec.field(default_factory=DeviceLinks)
    """How well GPUs are linked, by the agent's own loop."""
    cordoned: Collection[str] = frozenset()
    """Devices that take no new share, by `InventoryPublisher`."""
    mode_policies: Mapping[str, ModePolicy] = msgspec.field(default_factory=dict)
    """By `DeviceModes`."""
    reserved: Mapping[str, str] = msgspec.field(default_factory=dict)
    """Why a GPU is reserved outside Allotment, by `ComputeModes`."""
    cut_gpus: dict[str, CutGpu] = msgspec.field(default_factory=dict)
    """The slices of each GPU in mode mig, by `NodeSlices`; not of GPUs without MIG."""
    without_mig: set[str] = msgspec.field(default_factory=set)
    """GPUs that do not support MIG, by `NodeSlices`."""
    mig_paused: Mapping[str, str] = msgspec.field(default_factory=dict)
    """Why MIG is not switched on for now, by `MigConflicts`."""
    resized: Mapping[PodUid, int] = msgspec.field(default_factory=dict)
    """The generation of each pod's resize in force, by `Tenants`."""
    released: Mapping[str, int] = msgspec.field(default_factory=dict)
    """By resource: by how much resized pods have less than Kubernetes counts, by `Tenants`."""
    changed: Signal = msgspec.field(default_factory=Signal)
    """Notified at each change of links, mode policies, reservations, slices, resizes or
    evictions."""
    _offered: Signal = msgspec.field(default_factory=Signal)

    def renew_offer(self, offer: Offer) -> None:
        self.offer = offer
        self.has_offer = True
        self._offered.notify()

    def renew_evicted(self, uuids: Collection[str]) -> None:
        if uuids != self.evicted:
            self.evicted = uuids
            self.changed.notify()

    def renew_resizes(self, resized: Mapping[PodUid, int], released: Mapping[str, int]) -> None:
        if (resized, released) != (self.resized, self.released):
            self.resized, self.released = resized, released
            self.changed.notify()

    async def offers(self) -> AsyncIterator[Offer]:
        """Yield the offer as soon as it is known, and at each renewal."""
        async for _ in self._offered.changes():
            if self.has_offer:
                yield self.offer

    def reserved_whole(self) -> Mapping[str, str]:
        """Return `reserved` without GPUs in MIG mode: there each slice has its own compute mode."""
        return {
            uuid: why
            for uuid, why in self.reserved.items()
            if (gpu := self.cut_gpus.get(uuid)) is None or not gpu.is_enabled
        }

    def served_modes(self) -> Mapping[str, tuple[str, ...]]:
        """Return the modes in which each device is offered; mig only if the GPU supports it."""
        return {
            uuid: tuple(
                each
                for each in self.offer.shared.get(uuid, (mode,))
                if uuid not in self.without_mig or not traits_of(each).is_slice
            )
            for uuid, mode in self.offer.modes.items()
        }


class AnnotatedNode(Protocol):
    """This node's object at the API server (`kube.nodes.OwnNode`)."""

    @property
    def current(self) -> NodeFields | None: ...

    def changes(self) -> AsyncIterator[None]: ...

    def set_annotation(self, key: str, text: str | None) -> None: ...


async def poll_folders(*folders: Path, period_s: float) -> AsyncIterator[None]:
    """Yield at once, and whenever a folder gets or loses an entry; it need not exist yet."""
    last = None
    while True:
        times = [_modified_ns(folder) for folder in folders]
        if times != last:
            last = times
            yield
        await asyncio.sleep(period_s)


def _modified_ns(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0
