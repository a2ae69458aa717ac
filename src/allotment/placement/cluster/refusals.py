# SPDX-License-Identifier: Apache-2.0
"""Refusals that the arrays alone can explain: for many nodes at once, without a search."""

import numpy as np

from allotment.model.clusters import PodNeed
from allotment.model.modes import traits_of
from allotment.model.structs import replace
from allotment.placement.cluster.arrays import Arrays, IntArray, PodShape
from allotment.placement.constraints import OF_OTHER_MODEL
from allotment.placement.explain import (
    Refusal,
    lacks_devices,
    lacks_host,
    lacks_room,
    lacks_slices,
)
from allotment.placement.judge import ALL_GUARANTEED, TOO_LITTLE_COMPUTE, TOO_LITTLE_MEMORY


def refusals_at(
    arrays: Arrays, need: PodNeed, shape: PodShape, rows: IntArray
) -> dict[str, Refusal]:
    """Refusals of a pod by these rows, by name, if the arrays show the reason."""
    refusals: dict[str, Refusal] = {}
    has_host = (arrays.cpu_free[rows] >= shape.cpu_milli) & (
        arrays.memory_free[rows] >= shape.memory_bytes
    )
    for row in rows[~has_host].tolist():
        cpu, memory = int(arrays.cpu_free[row]), int(arrays.memory_free[row])
        refusal = lacks_host(need, cpu_free=cpu, memory_free=memory)
        if refusal is not None:
            refusals[arrays.names[row]] = refusal
    if need.containers:
        by_devices = _by_slices if traits_of(shape.mode).is_slice else _by_devices
        refusals |= by_devices(arrays, need, shape, rows[has_host])
    return refusals


def _by_slices(
    arrays: Arrays, need: PodNeed, shape: PodShape, rows: IntArray
) -> dict[str, Refusal]:
    numbers = arrays.slices(shape, rows).sum(axis=1)
    return {
        arrays.names[row]: lacks_slices(need.containers[0].request, number)
        for row, number in zip(rows.tolist(), numbers.tolist(), strict=True)
        if 0 < number < shape.count
    }


def _by_devices(
    arrays: Arrays, need: PodNeed, shape: PodShape, rows: IntArray
) -> dict[str, Refusal]:
    request = need.containers[0].request
    free, free_memory = arrays.free[rows], arrays.free_memory[rows]
    anything = replace(shape, guarantee=0, floor=0, device_memory_bytes=0, device_memory_part=None)
    is_open = arrays.serving(anything, rows)
    has_memory = free_memory >= arrays.memory_need(shape, rows)
    time, lacking = free, TOO_LITTLE_COMPUTE
    if shape.floor:
        time, lacking = arrays.unguaranteed[rows], ALL_GUARANTEED
    lacks_compute = is_open & has_memory & (time < max(shape.guarantee, shape.floor))
    figures = zip(
        rows.tolist(),
        arrays.gpu_there[rows].sum(axis=1).tolist(),
        arrays.serving(shape, rows).sum(axis=1).tolist(),
        np.where(lacks_compute, time, -1).max(axis=1, initial=-1).tolist(),
        np.where(is_open & ~has_memory, free_memory, -1).max(axis=1, initial=-1).tolist(),
        arrays.matching(shape, rows).sum(axis=1).tolist(),
        strict=True,
    )
    refusals: dict[str, Refusal] = {}
    for row, devices, such, compute, memory, is_of_model in figures:
        name = arrays.names[row]
        if devices < shape.count:
            refusals[name] = lacks_devices(request, devices)
        elif compute >= 0:
            refusals[name] = lacks_room(request, lacking, int(compute), such=such)
        elif memory >= 0:
            refusals[name] = lacks_room(request, TOO_LITTLE_MEMORY, int(memory), such=such)
        elif not is_of_model:
            refusals[name] = lacks_room(request, OF_OTHER_MODEL, 0, such=0)
        # Else the devices' shares decide: ask the node.
    return refusals
