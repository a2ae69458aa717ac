# SPDX-License-Identifier: Apache-2.0
"""What decides in a replay, and keeps what was decided.

`ArrayPlacer` asks a policy on arrays, as the scheduler does for pods with one container that has
GPUs. Its own books are plain numbers: they say what may be booked, and so check the arrays and the
policy. `ClusterPlacer` is the scheduler's whole way, for pods of any form.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, Protocol

from allotment.model.compute import WHOLE
from allotment.placement.arrays import Arrays, DeviceRoom, Kind
from allotment.placement.policies import Policy, best, choose_on
from allotment.placement.policies.fgd import fragmentation
from allotment.simulate.needs import inventory_of, kind_of
from allotment.simulate.traces import MILLI, TraceNode, TracePod

__all__ = ["ArrayPlacer", "Placer", "Spot", "mix_of"]

_BASIS_POINTS: Final = WHOLE // MILLI


@dataclass(frozen=True, slots=True)
class Spot:
    """Where a pod is."""

    pod: TracePod
    node: int
    """Its number in the trace."""
    devices: tuple[int, ...]
    """Their numbers on it."""


class Placer(Protocol):
    """Decides for one pod at a time, and keeps the books."""

    def arrived(self, pod: TracePod) -> None:
        """Hear that a pod has come."""
        ...

    def place(self, pod: TracePod, node: int | None = None) -> Spot | None:
        """Say where a pod is to be, on that node alone if one is named; None: it has no room."""
        ...

    def book(self, spot: Spot) -> None:
        """Take what the pod needs there."""
        ...

    def release(self, spot: Spot) -> None:
        """Give it back."""
        ...

    def fits_when_empty(self, pod: TracePod) -> bool:
        """Tell whether any node has what the pod needs when nothing else is there."""
        ...

    def fragmented_milli(self) -> float:
        """Return what of all GPUs is free and cannot be used, as a mean over the pods that come."""
        ...


def mix_of(pods: Sequence[TracePod]) -> Mapping[Kind, float]:
    """Return how often each kind comes, as the literature tells kinds apart: not by host memory."""
    return Counter(replace(kind_of(pod), memory_bytes=0) for pod in pods)


@dataclass(slots=True)
class _Device:
    """What is left of a device: basis points, bytes."""

    memory: int
    free: int
    free_memory: int
    shares: int = 0


@dataclass(slots=True)
class _Node:
    """What is left of a node."""

    name: str
    model: str
    cpu: int
    memory: int
    devices: list[_Device]


class ArrayPlacer:
    """A policy on arrays."""

    def __init__(
        self, nodes: Sequence[TraceNode], policy: Policy, *, pods: Sequence[TracePod]
    ) -> None:
        """Take empty nodes. `pods` are those that may come: what cannot be used goes by them."""
        self._policy = policy
        self._arrays = Arrays()
        self._nodes = [_empty(node) for node in nodes]
        self._different = [_empty(node) for node in {replace(each, name=""): 0 for each in nodes}]
        self._mix = mix_of(pods)
        self._kinds: dict[tuple[object, int], Kind] = {}
        for node in self._nodes:
            rooms = [_room(node, device) for device in node.devices]
            self._arrays.put(node.name, rooms, cpu_free=node.cpu, memory_free=node.memory)

    def arrived(self, pod: TracePod) -> None:
        """Tell the policy."""
        self._policy.arrived(self._kind(pod))

    def place(self, pod: TracePod, node: int | None = None) -> Spot | None:
        """Ask the policy."""
        kind = self._kind(pod)
        if node is None:
            choice = best(self._policy, self._arrays, kind)
            return None if choice is None else Spot(pod, choice.row, choice.columns)
        if not _has_room(self._nodes[node], kind):
            return None
        return Spot(pod, node, choose_on(self._policy, self._arrays, kind, node))

    def book(self, spot: Spot) -> None:
        """Take it; raise `ValueError` if it is not there: whoever chose it was wrong."""
        kind = self._kind(spot.pod)
        if not _has_room(self._nodes[spot.node], kind, spot.devices):
            raise ValueError(spot)
        self._change(spot, kind, sign=-1)

    def release(self, spot: Spot) -> None:
        """Give it back."""
        self._change(spot, self._kind(spot.pod), sign=1)

    def fits_when_empty(self, pod: TracePod) -> bool:
        """Look at the nodes as they were at first."""
        kind = self._kind(pod)
        return any(_has_room(node, kind) for node in self._different)

    def fragmented_milli(self) -> float:
        """Return it by the definition that `fgd` goes by."""
        return float(fragmentation(self._arrays, self._mix).sum()) / _BASIS_POINTS

    def check_invariants(self) -> None:
        """Raise `AssertionError` where something was given that was not there, or arrays differ."""
        for row, node in enumerate(self._nodes):
            left = [node.cpu, node.memory]
            seen = [self._arrays.cpu_free[row], self._arrays.memory_free[row]]
            for column, device in enumerate(node.devices):
                left += [device.free, device.free_memory, device.shares]
                seen += [
                    self._arrays.free[row, column],
                    self._arrays.free_memory[row, column],
                    self._arrays.shares[row, column],
                ]
            if min(left) < 0 or left != seen:
                raise AssertionError((node, seen))

    def _kind(self, pod: TracePod) -> Kind:
        """Return the kind, made once: the policies keep what they know by kind."""
        key = (pod.shape, pod.memory_mib)
        kind = self._kinds.get(key)
        if kind is None:
            kind = self._kinds[key] = kind_of(pod)
        return kind

    def _change(self, spot: Spot, kind: Kind, *, sign: int) -> None:
        node = self._nodes[spot.node]
        for column in spot.devices:
            device = node.devices[column]
            device.free += sign * kind.guarantee
            device.free_memory += sign * _memory(device, kind)
            device.shares -= sign
            self._arrays.set_device(spot.node, column, _room(node, device))
        node.cpu += sign * kind.cpu_milli
        node.memory += sign * kind.memory_bytes
        self._arrays.set_host(spot.node, cpu_free=node.cpu, memory_free=node.memory)


def _empty(node: TraceNode) -> _Node:
    inventory = inventory_of(node)
    devices = [
        _Device(each.memory_bytes, each.guarantee, each.memory_bytes) for each in inventory.devices
    ]
    return _Node(node.name, node.model, inventory.cpu_milli, inventory.memory_bytes, devices)


def _room(node: _Node, device: _Device) -> DeviceRoom:
    return DeviceRoom(
        model=node.model,
        memory=device.memory,
        free=device.free,
        free_memory=device.free_memory,
        shares=device.shares,
    )


def _memory(device: _Device, kind: Kind) -> int:
    part = kind.device_memory_part
    if part is None:
        return kind.device_memory_bytes
    return device.memory * part.numerator // part.denominator


def _has_room(node: _Node, kind: Kind, devices: Sequence[int] | None = None) -> bool:
    """Tell whether the node has what the kind needs, on these devices or on any."""
    if node.cpu < kind.cpu_milli or node.memory < kind.memory_bytes:
        return False
    if not kind.count:
        return not devices
    if kind.models is not None and node.model not in kind.models:
        return False
    some = node.devices if devices is None else [node.devices[each] for each in set(devices)]
    fit = sum(
        each.free >= kind.guarantee and each.free_memory >= _memory(each, kind) for each in some
    )
    return fit >= kind.count if devices is None else fit == kind.count == len(devices)
