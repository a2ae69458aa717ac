# SPDX-License-Identifier: Apache-2.0
"""Places the pods of a trace in a replay, and keeps its books.

A policy decides on arrays, as in the scheduler for a pod with one GPU container. The books are
plain numbers, which check the arrays and the policy.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from fractions import Fraction
from random import Random
from typing import Final

import msgspec

from allotment.model.clusters import NodeDevice, NodeInventory
from allotment.model.compute import WHOLE
from allotment.model.structs import replace
from allotment.placement.cluster.arrays import Arrays, PodShape
from allotment.placement.policies import Policy, best, choose_on
from allotment.placement.policies.fgd import fragmentation
from allotment.placement.views import DeviceRoom
from allotment.simulate.csv_files import MILLI, Trace, TraceNode, TracePod, TraceShape

_BASIS_POINTS: Final = WHOLE // MILLI


class Spot(msgspec.Struct, frozen=True):
    """The place of a pod."""

    pod: TracePod
    node: int
    """Number of the node in the trace."""
    devices: tuple[int, ...]
    """Numbers of the devices on the node."""


def mix_of(pods: Sequence[TracePod]) -> Mapping[PodShape, float]:
    """Return the frequency of each kind of pod; like the literature, ignore host memory."""
    examples = {pod.shape: pod for pod in pods}
    mix: Counter[PodShape] = Counter()
    for shape, number in Counter(pod.shape for pod in pods).items():
        mix[replace(kind_of(examples[shape]), memory_bytes=0)] += number
    return mix


class _Device(msgspec.Struct):
    """Free capacity of a device: basis points, bytes."""

    memory: int
    free: int
    free_memory: int
    shares: int = 0


class _Node(msgspec.Struct):
    """Free capacity of a node."""

    name: str
    model: str
    cpu: int
    memory: int
    devices: list[_Device]


class ArrayPlacer:
    """Places by a policy on arrays."""

    def __init__(
        self, nodes: Sequence[TraceNode], policy: Policy, *, pods: Sequence[TracePod]
    ) -> None:
        """All nodes start empty. `pods` define the mix by which fragmentation is measured."""
        self._policy = policy
        self._arrays = Arrays()
        self._nodes = [_empty(node) for node in nodes]
        self._different = [
            _empty(node) for node in {replace(original, name=""): 0 for original in nodes}
        ]
        self._mix = mix_of(pods)
        self._kinds: dict[tuple[object, int], PodShape] = {}
        for node in self._nodes:
            rooms = [_room(node, device) for device in node.devices]
            self._arrays.put(node.name, rooms, cpu_free=node.cpu, memory_free=node.memory)

    def arrived(self, pod: TracePod) -> None:
        """Let the policy learn that a pod has arrived."""
        self._policy.arrived(self._kind(pod))

    def place(self, pod: TracePod, node: int | None = None) -> Spot | None:
        """Choose a spot, on `node` if given; None: no room."""
        kind = self._kind(pod)
        if node is None:
            choice = best(self._policy, self._arrays, kind)
            return None if choice is None else Spot(pod, choice.row, choice.columns)
        if not _has_room(self._nodes[node], kind):
            return None
        return Spot(pod, node, choose_on(self._policy, self._arrays, kind, node))

    def book(self, spot: Spot) -> None:
        """Subtract the request; raise `ValueError` if it does not fit: the policy is wrong."""
        kind = self._kind(spot.pod)
        if not _has_room(self._nodes[spot.node], kind, spot.devices):
            raise ValueError(spot)
        self._change(spot, kind, sign=-1)

    def release(self, spot: Spot) -> None:
        self._change(spot, self._kind(spot.pod), sign=1)

    def fits_when_empty(self, pod: TracePod) -> bool:
        """Return whether the pod fits on any empty node."""
        kind = self._kind(pod)
        return any(_has_room(node, kind) for node in self._different)

    def fragmented_milli(self) -> float:
        """Return the free but unusable part of all GPUs, as a mean over the mix of pods."""
        return float(fragmentation(self._arrays, self._mix).sum()) / _BASIS_POINTS

    def check_invariants(self) -> None:
        """Raise `AssertionError` if a node is overbooked or the arrays differ from the books."""
        self._arrays.check_invariants()
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

    def _kind(self, pod: TracePod) -> PodShape:
        """Return one object per kind: policies store what they learn by kind."""
        key = (pod.shape, pod.memory_mib)
        kind = self._kinds.get(key)
        if kind is None:
            kind = self._kinds[key] = kind_of(pod)
        return kind

    def _change(self, spot: Spot, kind: PodShape, *, sign: int) -> None:
        node = self._nodes[spot.node]
        rooms = {}
        for column in spot.devices:
            device = node.devices[column]
            device.free += sign * kind.guarantee
            device.free_memory += sign * _memory(device, kind)
            device.shares -= sign
            rooms[column] = _room(node, device)
        node.cpu += sign * kind.cpu_milli
        node.memory += sign * kind.memory_bytes
        self._arrays.update(spot.node, rooms, cpu_free=node.cpu, memory_free=node.memory)


def _empty(node: TraceNode) -> _Node:
    inventory = inventory_of(node)
    devices = [
        _Device(device.memory_bytes, device.guarantee, device.memory_bytes)
        for device in inventory.devices
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


def _memory(device: _Device, kind: PodShape) -> int:
    part = kind.device_memory_part
    if part is None:
        return kind.device_memory_bytes
    return device.memory * part.numerator // part.denominator


def _has_room(node: _Node, kind: PodShape, devices: Sequence[int] | None = None) -> bool:
    """Return whether the node fits the kind, on these devices or on any."""
    if node.cpu < kind.cpu_milli or node.memory < kind.memory_bytes:
        return False
    if not kind.count:
        return not devices
    if kind.models is not None and node.model not in kind.models:
        return False
    some = node.devices if devices is None else [node.devices[index] for index in set(devices)]
    fit = sum(
        device.free >= kind.guarantee and device.free_memory >= _memory(device, kind)
        for device in some
    )
    return fit >= kind.count if devices is None else fit == kind.count == len(devices)


MIB: Final = 1 << 20
_GIB: Final = 1024  # MiB
_ANY_MEMORY: Final = 16 * _GIB  # MiB: used where memory does not count
_MOST_SHARES: Final = 1000
"""Traces set no limit; their smallest part is a hundredth of a GPU."""

_MODEL_MEMORY: Final[Mapping[str, int]] = {
    "A10": 24 * _GIB,
    "P100": 16 * _GIB,
    "T4": 16 * _GIB,
    "V100M16": 16 * _GIB,
    "V100M32": 32 * _GIB,
}
_OTHER_MEMORY: Final = 32 * _GIB
_MOST_OF_MEMORY: Final = 16 * _GIB
"""Generated memory fits on the smallest model."""


def with_gpu_memory(trace: Trace) -> Trace:
    """Return the trace with GPU memory, generated where it is missing.

    Generated memory depends only on the model of a node and the shape of a pod. For a pod it is its
    part of the time, of 16 GiB, more or less by up to half.
    """
    nodes = [
        replace(node, gpu_memory_mib=_MODEL_MEMORY.get(node.model, _OTHER_MEMORY))
        if node.gpu_memory_mib is None
        else node
        for node in trace.nodes
    ]
    shapes = {pod.shape for pod in trace.pods}
    with_memory = {shape: _with_memory(shape) for shape in shapes}
    return Trace(nodes, [replace(pod, shape=with_memory[pod.shape]) for pod in trace.pods])


def without_gpu_memory(trace: Trace) -> Trace:
    return Trace(
        [replace(node, gpu_memory_mib=None) for node in trace.nodes],
        [replace(pod, shape=replace(pod.shape, gpu_memory_mib=None)) for pod in trace.pods],
    )


def _with_memory(shape: TraceShape) -> TraceShape:
    if not shape.gpus or shape.gpu_memory_mib is not None:
        return shape
    # A text as seed gives the same numbers in every process, unlike a hash.
    dice = Random(repr(shape))  # noqa: S311 - a sample, no secret
    part = min(1.0, shape.gpu_milli / MILLI * dice.uniform(0.5, 1.5))
    return replace(shape, gpu_memory_mib=max(1, round(part * _MOST_OF_MEMORY)))


def inventory_of(node: TraceNode) -> NodeInventory:
    """Return the inventory that an agent of the node would publish."""
    memory = _ANY_MEMORY if node.gpu_memory_mib is None else node.gpu_memory_mib
    return NodeInventory(
        name=node.name,
        devices=tuple(
            NodeDevice(
                uuid=f"{node.name}/{index}",
                model=node.model,
                memory_bytes=memory * MIB,
                index=index,
                max_shares=_MOST_SHARES,
            )
            for index in range(node.gpus)
        ),
        cpu_milli=node.cpu_milli,
        memory_bytes=node.memory_mib * MIB,
    )


def kind_of(pod: TracePod) -> PodShape:
    shape = pod.shape
    if not shape.gpus:
        return PodShape(cpu_milli=shape.cpu_milli, memory_bytes=pod.memory_mib * MIB)
    memory = shape.gpu_memory_mib
    return PodShape(
        cpu_milli=shape.cpu_milli,
        memory_bytes=pod.memory_mib * MIB,
        count=shape.gpus,
        guarantee=shape.gpu_milli * _BASIS_POINTS,
        device_memory_bytes=(memory or 0) * MIB,
        device_memory_part=Fraction(shape.gpu_milli, MILLI) if memory is None else None,
        models=frozenset(shape.models) or None,
    )
