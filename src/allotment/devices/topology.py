# SPDX-License-Identifier: Apache-2.0
"""Proximity of a machine's GPUs, in the points of NVIDIA's plugin.

A pair has points for its meeting place in the PCIe tree (10 across processors to 60 on one board),
and 100 for every NVLink (go-gpuallocator's besteffort_policy.go). Links to NVSwitches count too:
each two GPUs of a board have the smaller number of theirs. All is read once. Each GPU has its own
thread; late answers count as no links.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import combinations
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import msgspec

from allotment.devices import loading
from allotment.devices.nvml import ask_each
from allotment.model.devices import Device

PairScores = Mapping[frozenset[str], int]
"""Points by pair of UUIDs; more is nearer. Unknown pairs are absent."""


class DeviceLinks(msgspec.Struct, frozen=True):
    """How a machine's GPUs are linked."""

    scores: PairScores = msgspec.field(default_factory=dict)
    peers: Mapping[str, frozenset[str]] = msgspec.field(default_factory=dict)
    """The GPUs that NVLink joins to each one without a switch, by UUID: they reset together.
    Behind NVSwitches a GPU with MIG resets alone (nvidia-smi's manual, `--gpu-reset`)."""


# NVML_TOPOLOGY_INTERNAL, SINGLE, MULTIPLE, HOSTBRIDGE, NODE, SYSTEM.
_LEVELS: Final[Mapping[int, int]] = {0: 60, 10: 50, 20: 40, 30: 30, 40: 20, 50: 10}
_PER_NVLINK: Final = 100

_PATIENCE_S: Final = 1.0


def read_links(
    devices: Sequence[Device], *, machine: Path | None = None, patience_s: float = _PATIENCE_S
) -> DeviceLinks:
    """Query NVML about all pairs of `devices`; blocks for `patience_s` at most twice.

    `machine` is their simulated machine. Leave out devices that do not answer. Call it while an
    `Nvml` is entered. Raises `NoDevicesError` without NVML.
    """
    with loading.nvml_of(machine) as nvml:
        reader = _Reader(nvml, patience_s)
        reader.ask(devices, reader.handle)
        answering = [device for device in devices if device.uuid in reader.handles]
        reader.ask(answering, reader.links)
    return reader.answer(answering)


class _Reader:
    """The answers of all GPUs; filled by their threads, some of which may never return."""

    def __init__(self, nvml: ModuleType, patience_s: float) -> None:
        self.handles: dict[str, Any] = {}
        self._nvml = nvml
        self._patience_s = patience_s
        self._bus_ids: dict[str, str] = {}
        self._levels: dict[frozenset[str], int] = {}
        self._nvlinks: dict[str, list[str]] = {}
        self._switched: dict[str, int] = {}
        """Number of links to switches, by UUID."""
        self._closed = threading.Event()

    def ask(self, devices: Sequence[Device], question: Callable[[Device], None]) -> None:
        self._closed = threading.Event()
        questions = {device.index: partial(question, device) for device in devices}
        # A lost GPU has no points: its error is ignored.
        ask_each(questions, name="links", patience_s=self._patience_s)
        self._closed.set()

    def handle(self, device: Device) -> None:
        closed, nvml = self._closed, self._nvml
        handle = nvml.nvmlDeviceGetHandleByIndex(device.index)
        if closed.is_set():
            return
        if nvml.nvmlDeviceGetUUID(handle) != device.uuid or closed.is_set():
            return  # the devices were renumbered since they were listed
        bus_id = _bus_id(nvml.nvmlDeviceGetPciInfo(handle))
        if not closed.is_set():
            self._bus_ids[device.uuid] = bus_id
            self.handles[device.uuid] = handle

    def links(self, device: Device) -> None:
        """Query a device's place in the tree relative to others, and its NVLinks."""
        closed, nvml = self._closed, self._nvml
        handle = self.handles[device.uuid]
        for uuid, other in list(self.handles.items()):
            if uuid <= device.uuid:  # each pair once
                continue
            if closed.is_set():
                return
            try:
                level = int(nvml.nvmlDeviceGetTopologyCommonAncestor(handle, other))
            except nvml.NVMLError:
                continue  # the other device failed; this one continues
            self._levels[frozenset((device.uuid, uuid))] = _LEVELS.get(level, 0)
        remotes: list[str] = []
        switched = 0
        for link in range(nvml.NVML_NVLINK_MAX_LINKS):
            if closed.is_set():
                return
            try:
                if nvml.nvmlDeviceGetNvLinkState(handle, link) != nvml.NVML_FEATURE_ENABLED:
                    continue
                if _leads_to_switch(nvml, handle, link):
                    switched += 1
                else:
                    remotes.append(_bus_id(nvml.nvmlDeviceGetNvLinkRemotePciInfo(handle, link)))
            except nvml.NVMLError:
                continue  # no such link on this model, or one that is down
        self._nvlinks[device.uuid] = remotes
        self._switched[device.uuid] = switched

    def answer(self, devices: Sequence[Device]) -> DeviceLinks:
        """The sums. An NVLink counts if either end reports it."""
        scores = dict(self._levels)
        peers: dict[str, frozenset[str]] = {}
        for one, other in combinations(devices, 2):
            direct = max(self._count(one, other), self._count(other, one))
            if direct:
                for uuid, peer in ((one.uuid, other.uuid), (other.uuid, one.uuid)):
                    peers[uuid] = peers.get(uuid, frozenset()) | {peer}
            if links := direct + self._through_switches(one, other):
                pair = frozenset((one.uuid, other.uuid))
                scores[pair] = scores.get(pair, 0) + _PER_NVLINK * links
        return DeviceLinks(scores, peers)

    def _count(self, one: Device, other: Device) -> int:
        return self._nvlinks.get(one.uuid, []).count(self._bus_ids[other.uuid])

    def _through_switches(self, one: Device, other: Device) -> int:
        """The links by which both reach each other, at the same time as no other pair."""
        if one.name != other.name:
            return 0  # not of one board
        return min(self._switched.get(each.uuid, 0) for each in (one, other))


def _leads_to_switch(nvml: ModuleType, handle: Any, link: int) -> bool:  # noqa: ANN401 - no types
    try:
        kind = nvml.nvmlDeviceGetNvLinkRemoteDeviceType(handle, link)
    except nvml.NVMLError:
        return False  # drivers before 470 do not report it
    return bool(kind == nvml.NVML_NVLINK_DEVICE_TYPE_SWITCH)


def _bus_id(pci: Any) -> str:  # noqa: ANN401 - nvidia-ml-py has no types
    """A bus id in one form: NVML writes the domain with 4 or 8 digits."""
    return f"{pci.domain:04x}:{pci.bus:02x}:{pci.device:02x}"
