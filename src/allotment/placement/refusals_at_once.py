# SPDX-License-Identifier: Apache-2.0
"""Why many nodes refuse a pod that is no more than its kind, without asking each of them.

The same words as `refusals.refused` has for one node. A node of which more has to be known, like
who is on its devices, is left to be asked.
"""

from dataclasses import replace

import numpy as np

from allotment.model.clusters import NodeRejection, PodNeed
from allotment.model.requests import MIG, Request
from allotment.placement.arrays import Arrays, BoolArray, IntArray, Kind
from allotment.placement.refusals import (
    Reason,
    lacks_devices,
    lacks_host,
    lacks_room,
    lacks_slices,
)

__all__ = ["refusals_at"]


def refusals_at(
    arrays: Arrays, need: PodNeed, kind: Kind, rows: IntArray
) -> dict[str, NodeRejection]:
    """Return why these rows refuse a pod, by name, as far as the arrays say why."""
    found: dict[str, NodeRejection] = {}
    for row in rows[~_has_host(arrays, kind, rows)].tolist():
        name = arrays.names[row]
        cpu, memory = int(arrays.cpu_free[row]), int(arrays.memory_free[row])
        lacking = lacks_host(need, name, cpu_free=cpu, memory_free=memory)
        if lacking is not None:
            found[name] = lacking
    if not need.containers:
        return found
    rows = rows[_has_host(arrays, kind, rows)]
    request = need.containers[0].request
    if kind.mode == MIG:
        found.update(_too_few_slices(arrays, request, kind, rows))
        return found
    is_small = arrays.gpu_there[rows].sum(axis=1) < kind.count
    found.update(_too_few(arrays, request, rows[is_small]))
    rows = rows[~is_small]
    anything = replace(kind, guarantee=0, device_memory_bytes=0, device_memory_part=None)
    is_open = arrays.serving(anything, rows)
    such = arrays.serving(kind, rows).sum(axis=1).tolist()
    has_memory = arrays.free_memory[rows] >= arrays.memory_need(kind, rows)
    lacks_compute = is_open & has_memory & (arrays.free[rows] < kind.guarantee)
    compute = np.where(lacks_compute, arrays.free[rows], -1).max(axis=1).tolist()
    memory = np.where(is_open & ~has_memory, arrays.free_memory[rows], -1).max(axis=1).tolist()
    matching = arrays.matching(kind, rows).sum(axis=1).tolist()
    known: dict[tuple[Reason, int, int], NodeRejection] = {}
    for place, row in enumerate(rows.tolist()):
        if compute[place] >= 0:
            key = Reason.GPU_COMPUTE, int(compute[place]), such[place]
        elif memory[place] >= 0:
            key = Reason.GPU_MEMORY, int(memory[place]), such[place]
        elif not matching[place]:
            key = Reason.MODEL, 0, 0
        else:
            continue  # who is on its devices is to be asked there
        name = arrays.names[row]
        alike = known.get(key)
        if alike is None:
            reason, have, number = key
            alike = known[key] = lacks_room(name, request, reason, have, such=number)
        found[name] = NodeRejection(name, alike.reason, alike.text, alike.stem, alike.have)
    return found


def _too_few(arrays: Arrays, request: Request, rows: IntArray) -> dict[str, NodeRejection]:
    """Refuse rows that do not have as many devices as are asked for, whatever is on them."""
    found: dict[str, NodeRejection] = {}
    known: dict[int, NodeRejection] = {}
    for row, number in zip(rows.tolist(), arrays.gpu_there[rows].sum(axis=1).tolist(), strict=True):
        name = arrays.names[row]
        if number not in known:
            known[number] = lacks_devices(name, request, number)
        alike = known[number]
        found[name] = NodeRejection(name, alike.reason, alike.text, alike.stem, alike.have)
    return found


def _too_few_slices(
    arrays: Arrays, request: Request, kind: Kind, rows: IntArray
) -> dict[str, NodeRejection]:
    """Refuse rows where there is room for some such slices, and for too few."""
    numbers = arrays.slices(kind, rows).sum(axis=1)
    return {
        arrays.names[row]: lacks_slices(arrays.names[row], request, number)
        for row, number in zip(rows.tolist(), numbers.tolist(), strict=True)
        if 0 < number < kind.count
    }


def _has_host(arrays: Arrays, kind: Kind, rows: IntArray) -> BoolArray:
    has: BoolArray = (arrays.cpu_free[rows] >= kind.cpu_milli) & (
        arrays.memory_free[rows] >= kind.memory_bytes
    )
    return has
