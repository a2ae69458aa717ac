# SPDX-License-Identifier: Apache-2.0
"""Clusters of small nodes, and pods that want devices of them: bytes are single ones."""

from collections.abc import Sequence
from fractions import Fraction

from needs import request
from placing import cluster_of

from allotment.model.clusters import (
    NodeDevice,
    NodeInventory,
    PodBooking,
    PodNeed,
    TakenPart,
    WantedContainer,
)
from allotment.model.modes import EXCLUSIVE, SOFT, TIMESLICE
from allotment.model.pods import PodUid
from allotment.model.requests import Constraints, Preferences
from allotment.placement.cluster.cluster import Cluster
from allotment.placement.explain import Refusal

GI = 1 << 30
MODES = (SOFT, EXCLUSIVE, TIMESLICE)


def inventory(
    name: str,
    *sizes: int,
    model: str = "T4",
    taken: Sequence[TakenPart] = (),
    budget: int = 0,
    problems: Sequence[str] = (),
    cpu: int = 8000,
) -> NodeInventory:
    return NodeInventory(
        name=name,
        cpu_milli=cpu,
        memory_bytes=64,
        devices=tuple(
            NodeDevice(
                uuid=f"{name}-{index}",
                model=model,
                memory_bytes=memory,
                index=index,
                numa_node=index // 2,
                modes=MODES,
                taken=taken[index] if index < len(taken) else TakenPart(),
                problem=problems[index] if index < len(problems) else "",
            )
            for index, memory in enumerate(sizes)
        ),
        host_budget_bytes=budget,
    )


def need(
    uid: str,
    memory: int | Fraction = 4,
    *,
    count: int = 1,
    guarantee: int = 0,
    cpu: int = 100,
    host_memory: int = 1,
    mode: str = SOFT,
    host: bool = False,
    constraints: Constraints | None = None,
    preferences: Preferences | None = None,
) -> PodNeed:
    asked = request(
        memory,
        count=count,
        guarantee=guarantee,
        mode=mode,
        host=host,
        constraints=constraints,
        preferences=preferences,
    )
    return PodNeed(
        uid=PodUid(uid),
        cpu_milli=cpu,
        memory_bytes=host_memory,
        containers=(WantedContainer(name="main", request=asked),),
    )


def binpack(*nodes: NodeInventory, devices: Sequence[str] = ("binpack",)) -> Cluster:
    return cluster_of(*nodes, policy="binpack", devices=devices)


def uuids(booking: PodBooking | Refusal) -> list[str]:
    assert isinstance(booking, PodBooking), booking
    return [each.uuid for one in booking.containers for each in one.devices]
