# SPDX-License-Identifier: Apache-2.0
"""Nodes of a few small devices, and pods that want some: bytes are single ones."""

from allotment.model.clusters import (
    NodeDevice,
    NodeInventory,
    PodBooking,
    PodNeed,
    TakenPart,
    WantedContainer,
)
from allotment.model.modes import EXCLUSIVE, SOFT, TIMESLICE
from allotment.model.pods import ContainerKind, PodUid
from allotment.model.requests import Request

INIT, SIDECAR, REGULAR = ContainerKind.INIT, ContainerKind.SIDECAR, ContainerKind.REGULAR
MODES = (SOFT, EXCLUSIVE, TIMESLICE)


def device(
    index: int, memory: int, *, numa: int | None = None, taken: TakenPart | None = None
) -> NodeDevice:
    return NodeDevice(
        uuid=f"GPU-{index}",
        model="T4",
        memory_bytes=memory,
        index=index,
        numa_node=numa,
        modes=MODES,
        max_shares=4,
        taken=taken or TakenPart(),
    )


def node(
    *devices: NodeDevice, budget: int = 0, links: dict[tuple[str, str], int] | None = None
) -> NodeInventory:
    return NodeInventory(
        name="n",
        devices=devices,
        cpu_milli=8000,
        memory_bytes=1 << 30,
        host_budget_bytes=budget,
        links=links or {},
    )


def pod(
    *containers: tuple[ContainerKind, Request], uid: str = "pod", cpu: int = 100, memory: int = 0
) -> PodNeed:
    ordered = sorted(containers, key=lambda each: each[0] is REGULAR)
    return PodNeed(
        uid=PodUid(uid),
        namespace="lab",
        name=uid,
        cpu_milli=cpu,
        memory_bytes=memory,
        containers=tuple(
            WantedContainer(name=f"c{place}", request=asked, kind=kind, place=place)
            for place, (kind, asked) in enumerate(ordered)
        ),
    )


def uuids(booking: PodBooking) -> list[list[str]]:
    return [[each.uuid for each in one.devices] for one in booking.containers]


def linked(*pairs: tuple[int, int], score: int = 100) -> dict[tuple[str, str], int]:
    return {(f"GPU-{one}", f"GPU-{other}"): score for one, other in pairs}
