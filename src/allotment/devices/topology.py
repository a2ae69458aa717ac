# SPDX-License-Identifier: Apache-2.0
"""How well the GPUs of a machine are linked with one another, in the points NVIDIA's plugin gives.

A pair has points for where in the PCIe tree it meets (10 across processors to 60 on one board), and
100 for every NVLink between the two (go-gpuallocator's besteffort_policy.go). It is read once: the
links of a machine do not change while it runs.

Every GPU is asked in a thread of its own. What one does not answer in time is left out, and counts
nothing; the others' links are known all the same.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from allotment.devices import loading
from allotment.model.devices import Device

__all__ = ["PairScores", "nvlink_peers", "read_pair_scores"]

PairScores = Mapping[frozenset[str], int]
"""Points by the pair of UUIDs; more is nearer. A pair that nobody could tell about is absent."""

# NVML_TOPOLOGY_INTERNAL, SINGLE, MULTIPLE, HOSTBRIDGE, NODE, SYSTEM.
_LEVELS: Final[Mapping[int, int]] = {0: 60, 10: 50, 20: 40, 30: 30, 40: 20, 50: 10}
_PER_NVLINK: Final = 100

_PATIENCE_S: Final = 1.0


def read_pair_scores(
    devices: Sequence[Device], *, machine: Path | None = None, patience_s: float = _PATIENCE_S
) -> PairScores:
    """Ask NVML about all pairs of `devices`; blocks for `patience_s` at most twice.

    `machine` is the simulated machine that they are on. Only these devices are asked: leave out
    those that do not answer. To be called while an `Nvml` is entered. Raises `NoDevicesError` where
    there is no NVML.
    """
    with loading.nvml_of(machine) as nvml:
        reader = _Reader(nvml, patience_s)
        reader.ask(devices, reader.handle)
        answering = [device for device in devices if device.uuid in reader.handles]
        reader.ask(answering, reader.links)
    return reader.scores(answering)


def nvlink_peers(scores: PairScores) -> Mapping[str, frozenset[str]]:
    """Return the GPUs that NVLink joins to each that has any, by UUID: they are reset together."""
    joined: dict[str, set[str]] = {}
    for pair, points in scores.items():
        if points >= _PER_NVLINK:
            for uuid in pair:
                joined.setdefault(uuid, set()).update(pair - {uuid})
    return {uuid: frozenset(peers) for uuid, peers in joined.items()}


class _Reader:
    """The answers of all GPUs; filled by their threads, some of which may never come back."""

    def __init__(self, nvml: ModuleType, patience_s: float) -> None:
        self.handles: dict[str, Any] = {}
        self._nvml = nvml
        self._patience_s = patience_s
        self._bus_ids: dict[str, str] = {}
        self._levels: dict[frozenset[str], int] = {}
        self._nvlinks: dict[str, list[str]] = {}
        self._closed = threading.Event()

    def ask(self, devices: Sequence[Device], question: Callable[[Device], None]) -> None:
        """Ask all devices at once, for as long as patience lasts."""
        self._closed = closed = threading.Event()

        def asked(device: Device) -> None:
            # One that is lost has no points.
            with contextlib.suppress(self._nvml.NVMLError):
                question(device)

        threads = [
            threading.Thread(
                target=asked, args=(device,), daemon=True, name=f"links-{device.index}"
            )
            for device in devices
        ]
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + self._patience_s
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        closed.set()

    def handle(self, device: Device) -> None:
        """Look a device up, and see that it answers."""
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
        """Ask where in the tree a device meets the others, and for its NVLinks."""
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
                continue  # the other one's trouble; this one goes on
            self._levels[frozenset((device.uuid, uuid))] = _LEVELS.get(level, 0)
        remotes: list[str] = []
        for link in range(nvml.NVML_NVLINK_MAX_LINKS):
            if closed.is_set():
                return
            try:
                if nvml.nvmlDeviceGetNvLinkState(handle, link) != nvml.NVML_FEATURE_ENABLED:
                    continue
                remotes.append(_bus_id(nvml.nvmlDeviceGetNvLinkRemotePciInfo(handle, link)))
            except nvml.NVMLError:
                continue  # no such link on this model, or one that is down
        self._nvlinks[device.uuid] = remotes

    def scores(self, devices: Sequence[Device]) -> PairScores:
        """Sum up. An NVLink counts where either end tells of it."""
        found = dict(self._levels)
        for index, one in enumerate(devices):
            for other in devices[index + 1 :]:
                links = max(self._count(one, other), self._count(other, one))
                if links:
                    pair = frozenset((one.uuid, other.uuid))
                    found[pair] = found.get(pair, 0) + _PER_NVLINK * links
        return found

    def _count(self, one: Device, other: Device) -> int:
        # Links to a switch are to none in particular: as in NVIDIA's plugin they do not count.
        return self._nvlinks.get(one.uuid, []).count(self._bus_ids[other.uuid])


def _bus_id(pci: Any) -> str:  # noqa: ANN401 - nvidia-ml-py has no types
    """Return a bus id in one form: NVML writes the domain with 4 or 8 digits."""
    return f"{pci.domain:04x}:{pci.bus:02x}:{pci.device:02x}"
