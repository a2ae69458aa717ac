# SPDX-License-Identifier: Apache-2.0
"""The pods of a trace as the scheduler sees pods."""

from fractions import Fraction

from allotment.model.clusters import PodNeed, WantedContainer
from allotment.model.compute import WHOLE, Compute
from allotment.model.pods import PodUid
from allotment.model.quantities import MemoryAmount
from allotment.model.requests import Constraints, ModelRule, Request
from allotment.simulate.csv_files import MILLI, TracePod, TraceShape
from allotment.simulate.placers import MIB

_BASIS_POINTS = WHOLE // MILLI


def need_of(pod: TracePod, *, uid: str) -> PodNeed:
    shape = pod.shape
    return PodNeed(
        uid=PodUid(uid),
        name=pod.name,
        cpu_milli=shape.cpu_milli,
        memory_bytes=pod.memory_mib * MIB,
        containers=_wanted(shape),
    )


def _wanted(shape: TraceShape) -> tuple[WantedContainer, ...]:
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
