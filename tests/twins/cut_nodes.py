# SPDX-License-Identifier: Apache-2.0
"""Nodes whose GPUs can be cut, and pods that ask for slices of them."""

from __future__ import annotations

from functools import cache

from mig_profiles import MODELS, piece, profiles

from allotment.model.clusters import (
    NodeDevice,
    NodeInventory,
    NodeMig,
    PodNeed,
    TakenPart,
    WantedContainer,
)
from allotment.model.compute import Compute
from allotment.model.mig import MigHold, MigProfile
from allotment.model.modes import MIG, SOFT
from allotment.model.pods import ContainerKind, PodUid
from allotment.model.quantities import MemoryAmount
from allotment.model.requests import Constraints, Request
from allotment.model.structs import replace

GIB = 1 << 30
NOTHING_SAID = MemoryAmount("0", size_bytes=0)
Piece = tuple[str, int, MigHold]


@cache
def shared_profiles(model: str) -> tuple[MigProfile, ...]:
    """Return the one object for all GPUs of a model, as reading inventories makes it."""
    return profiles(model)


def cut_device(
    uuid: str,
    *pieces: Piece,
    model: str = "A30",
    index: int = 0,
    is_on: bool = True,
    modes: tuple[str, ...] = (SOFT, MIG),
    numa: int | None = None,
    taken: TakenPart | None = None,
) -> NodeDevice:
    """Return a GPU that can be cut, with slices for which no placement stands."""
    return NodeDevice(
        uuid=uuid,
        model=model,
        memory_bytes=MODELS[model][1] << 20,
        index=index,
        numa_node=numa,
        modes=modes,
        taken=taken or TakenPart(),
        mig=NodeMig(
            profiles=shared_profiles(model),
            slices=tuple(piece(model, name, start, hold=hold) for name, start, hold in pieces),
            is_enabled=is_on,
        ),
    )


def node_of(*devices: NodeDevice, name: str = "n") -> NodeInventory:
    """Return a node with these, in this order."""
    return NodeInventory(
        name=name,
        devices=tuple(replace(each, index=index) for index, each in enumerate(devices)),
        cpu_milli=64_000,
        memory_bytes=64 * GIB,
    )


def slices(
    profile: str = "",
    *,
    count: int = 1,
    modes: tuple[str, ...] = (MIG,),
    gib: float = 0,
    guarantee: int = 0,
    constraints: Constraints | None = None,
) -> Request:
    """Return a request for slices, or for whatever else these modes make of it."""
    memory = int(gib * GIB)
    return Request(
        MemoryAmount(f"{gib:g}Gi", size_bytes=memory) if memory else NOTHING_SAID,
        count=count,
        compute=Compute(guarantee),
        mode=modes[0],
        other_modes=modes[1:],
        mig_profile=profile,
        constraints=constraints or Constraints(),
    )


def pod_of(
    *requests: Request | tuple[ContainerKind, Request], uid: str = "pod", cpu: int = 0
) -> PodNeed:
    """Return a pod with a container for each, init containers and sidecars first."""
    regular = ContainerKind.REGULAR
    containers = [each if isinstance(each, tuple) else (regular, each) for each in requests]
    return PodNeed(
        uid=PodUid(uid),
        name=uid,
        cpu_milli=cpu,
        containers=tuple(
            WantedContainer(name=f"c{place}", request=asked, kind=kind, place=place)
            for place, (kind, asked) in enumerate(
                sorted(containers, key=lambda each: each[0] is regular)
            )
        ),
    )
