# SPDX-License-Identifier: Apache-2.0
"""What a trace's nodes and pods are to `placement`."""

from collections.abc import Mapping
from dataclasses import replace
from fractions import Fraction
from random import Random
from typing import Final

from allotment.model.clusters import NodeDevice, NodeInventory, PodNeed, WantedContainer
from allotment.model.compute import WHOLE, Compute
from allotment.model.pods import PodUid
from allotment.model.quantities import MemoryAmount
from allotment.model.requests import Constraints, ModelRule, Request
from allotment.placement.arrays import Kind
from allotment.simulate.traces import MILLI, PodShape, Trace, TraceNode, TracePod

__all__ = ["inventory_of", "kind_of", "need_of", "with_gpu_memory", "without_gpu_memory"]

MIB: Final = 1 << 20
_GIB: Final = 1024  # MiB
_BASIS_POINTS: Final = WHOLE // MILLI
_ANY_MEMORY: Final = 16 * _GIB  # MiB: where memory does not count, any amount will do
_MOST_SHARES: Final = 1000
"""A trace knows no limit: its smallest parts are a hundredth of a GPU."""

_MODEL_MEMORY: Final[Mapping[str, int]] = {
    "A10": 24 * _GIB,
    "P100": 16 * _GIB,
    "T4": 16 * _GIB,
    "V100M16": 16 * _GIB,
    "V100M32": 32 * _GIB,
}
_OTHER_MEMORY: Final = 32 * _GIB
_MOST_OF_MEMORY: Final = 16 * _GIB
"""A pod whose memory is made up has room on the smallest model."""


def with_gpu_memory(trace: Trace) -> Trace:
    """Return the trace with memory of GPUs: as it says, made up where it does not.

    What is made up depends on the model, and on what a pod asks for else, alone: pods of one shape
    need the same. Of a GPU with 16 GiB it is the part that they ask for of its time, more or less
    by up to half.
    """
    nodes = [
        replace(node, gpu_memory_mib=_MODEL_MEMORY.get(node.model, _OTHER_MEMORY))
        if node.gpu_memory_mib is None
        else node
        for node in trace.nodes
    ]
    shapes = {pod.shape for pod in trace.pods}
    known = {shape: _with_memory(shape) for shape in shapes}
    return Trace(nodes, [replace(pod, shape=known[pod.shape]) for pod in trace.pods])


def without_gpu_memory(trace: Trace) -> Trace:
    """Return the trace as if it did not speak of memory of GPUs."""
    return Trace(
        [replace(node, gpu_memory_mib=None) for node in trace.nodes],
        [replace(pod, shape=replace(pod.shape, gpu_memory_mib=None)) for pod in trace.pods],
    )


def _with_memory(shape: PodShape) -> PodShape:
    if not shape.gpus or shape.gpu_memory_mib is not None:
        return shape
    # Seeded by a text: the same in each process, unlike a hash.
    dice = Random(repr(shape))  # noqa: S311 - a sample, no secret
    part = min(1.0, shape.gpu_milli / MILLI * dice.uniform(0.5, 1.5))
    return replace(shape, gpu_memory_mib=max(1, round(part * _MOST_OF_MEMORY)))


def inventory_of(node: TraceNode) -> NodeInventory:
    """Return the node as its agent would publish it."""
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


def kind_of(pod: TracePod) -> Kind:
    """Return the kind of pods that it is one of."""
    shape = pod.shape
    if not shape.gpus:
        return Kind(cpu_milli=shape.cpu_milli, memory_bytes=pod.memory_mib * MIB)
    memory = shape.gpu_memory_mib
    return Kind(
        cpu_milli=shape.cpu_milli,
        memory_bytes=pod.memory_mib * MIB,
        count=shape.gpus,
        guarantee=shape.gpu_milli * _BASIS_POINTS,
        device_memory_bytes=(memory or 0) * MIB,
        device_memory_part=Fraction(shape.gpu_milli, MILLI) if memory is None else None,
        models=frozenset(shape.models) or None,
    )


def need_of(pod: TracePod, *, uid: str) -> PodNeed:
    """Return the same as what the scheduler would be asked for."""
    shape = pod.shape
    return PodNeed(
        uid=PodUid(uid),
        name=pod.name,
        cpu_milli=shape.cpu_milli,
        memory_bytes=pod.memory_mib * MIB,
        containers=_wanted(shape),
    )


def _wanted(shape: PodShape) -> tuple[WantedContainer, ...]:
    if not shape.gpus:
        return ()
    if shape.gpu_memory_mib is None:
        memory = MemoryAmount(f"{shape.gpu_milli}/1000", part=Fraction(shape.gpu_milli, MILLI))
    else:
        memory = MemoryAmount(f"{shape.gpu_memory_mib}Mi", size_bytes=shape.gpu_memory_mib * MIB)
    guarantee = shape.gpu_milli * _BASIS_POINTS
    rules = tuple(ModelRule(model, is_exact=True) for model in shape.models)
    request = Request(
        memory,
        count=shape.gpus,
        compute=Compute(guarantee=guarantee, is_governed=True),
        constraints=Constraints(models=rules),
    )
    return (WantedContainer(name="main", request=request),)
