# SPDX-License-Identifier: Apache-2.0
"""Volcano's two dialects: vGPUs, and the older GPU sharing.

    resources: {limits: {volcano.sh/vgpu-number: 1, volcano.sh/vgpu-memory: 4000}}
    resources: {limits: {volcano.sh/gpu-memory: 4000}}

The first equals HAMi's resources. The second is MiB of one GPU, or a number of GPUs without other
shares. Volcano ignores both in init containers; Allotment counts them. (Volcano v1.13
`docs/user-guide/how_to_use_vgpu.md`, `how_to_use_gpu_sharing.md`,
`pkg/scheduler/api/devices/nvidia`.)
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from allotment.dialects.foreign.base import (
    ForeignDialect,
    GivenSlice,
    NodeView,
    Translation,
    index_list,
    uuids_by_index,
)
from allotment.dialects.foreign.mig_geometries import KnownGeometries
from allotment.dialects.foreign.parsing import (
    MIB,
    Name,
    amount_of,
    bytes_of,
    check_count,
    keys_of,
    regular_containers,
    resources_in,
    whole_cards,
)
from allotment.dialects.foreign.vgpu import CORE_POLICY, NOT_TYPE, USE_TYPE, Names, VgpuDialect
from allotment.dialects.own.protocol import refusal
from allotment.model.clusters import PodBooking
from allotment.model.modes import PART_MODES
from allotment.model.pods import ContainerKind, ForeignContainer, ForeignPod
from allotment.model.requests import Request
from allotment.model.structs import replace

NUMBER: Final = "volcano.sh/vgpu-number"
MEMORY: Final = "volcano.sh/vgpu-memory"
PERCENTAGE: Final = "volcano.sh/vgpu-memory-percentage"
CORES: Final = "volcano.sh/vgpu-cores"
RESOURCES = (NUMBER, MEMORY, PERCENTAGE, CORES)

VGPU_MODE: Final = "volcano.sh/vgpu-mode"
USE_UUID: Final = "volcano.sh/vgpu-use-gpuuuid"
NOT_UUID: Final = "volcano.sh/vgpu-nouse-gpuuuid"
GROUP_POLICY: Final = "volcano.sh/vgpu-podgroup-policy"
ANNOTATIONS = (VGPU_MODE, USE_UUID, NOT_UUID, USE_TYPE, NOT_TYPE, GROUP_POLICY)
"""Annotations by a pod's author."""
VARIABLES = (CORE_POLICY,)
"""Environment variables by a pod's author."""

IDS: Final = "volcano.sh/vgpu-ids-new"
DOMAIN: Final = "volcano.sh"
NODE: Final = f"{DOMAIN}/vgpu-node"
TIME: Final = "volcano.sh/vgpu-time"
BIND_TIME: Final = "volcano.sh/bind-time"
PHASE: Final = "volcano.sh/bind-phase"
RESULTS = (IDS, NODE, TIME, BIND_TIME, PHASE)
"""Annotations by Volcano."""

GPU_MEMORY: Final = "volcano.sh/gpu-memory"
GPU_NUMBER: Final = "volcano.sh/gpu-number"
GPUSHARE_RESOURCES = (GPU_MEMORY, GPU_NUMBER)
GPU_INDEX: Final = "volcano.sh/gpu-index"
PREDICATE_TIME: Final = "volcano.sh/predicate-time"
GPUSHARE_RESULTS = (GPU_INDEX, PREDICATE_TIME)


class VolcanoSettings(
    msgspec.Struct, frozen=True, kw_only=True, rename="camel", forbid_unknown_fields=True
):
    """Cluster settings."""

    resource_count_name: Name = NUMBER
    resource_memory_name: Name = MEMORY
    resource_memory_percentage_name: Name = PERCENTAGE
    resource_core_name: Name = CORES
    gpu_memory_factor: Annotated[int, Meta(ge=1, le=1 << 20)] = 1
    """MiB in one of `resource_memory_name`."""
    known_mig_geometries: tuple[KnownGeometries, ...] = ()
    """Allowed slices for pods of mode `mig`; empty: all profiles of the driver."""
    modes: frozenset[str] = frozenset(PART_MODES)
    """Modes that nodes offer: the values for `volcano.sh/vgpu-mode`."""


class VolcanoDialect(VgpuDialect):
    """`volcano.sh/vgpu-number`, `vgpu-memory`, `vgpu-memory-percentage`, `vgpu-cores`."""

    name = "volcano"
    title = "Volcano's"
    settings_type = VolcanoSettings
    annotations = ANNOTATIONS
    records = (IDS, NODE)
    result_keys = RESULTS
    domain = DOMAIN
    # There a percentage wins over MiB.
    counts_recorded_amounts = True
    mode_key = VGPU_MODE
    uuid_keys = (USE_UUID, NOT_UUID)

    def __init__(self, settings: VolcanoSettings | None = None) -> None:
        settings = settings or VolcanoSettings()
        names = Names(
            count=settings.resource_count_name,
            memory=settings.resource_memory_name,
            percentage=settings.resource_memory_percentage_name,
            cores=settings.resource_core_name,
            factor=settings.gpu_memory_factor,
        )
        super().__init__(
            names,
            settings.known_mig_geometries,
            settings.modes,
            record_mib=settings.gpu_memory_factor,
        )

    def recognises(self, pod: ForeignPod) -> tuple[str, ...]:
        resources = resources_in(pod, self.resources)
        return (*resources, *(key for key in ANNOTATIONS if key in pod.annotations and resources))

    def translate(self, pod: ForeignPod) -> Translation:
        translation = super().translate(pod)
        if GROUP_POLICY not in pod.annotations:
            return translation
        note = (
            f"{GROUP_POLICY} has no effect: pods of a group may share a GPU. Give them the same "
            "allotment.dev/anti-affinity to keep them apart"
        )
        return replace(translation, passed_over=(note, *translation.passed_over))

    def result_annotations(
        self, pod: ForeignPod, booking: PodBooking, node: NodeView, *, now: float
    ) -> Mapping[str, str]:
        del pod
        regular = sorted(
            (each for each in booking.containers if each.kind is ContainerKind.REGULAR),
            key=lambda container: container.place,
        )
        record = self.encode((container.devices for container in regular), node, ends=False)
        return {IDS: record, **self.bound(booking, now=now)}

    def given(self, pod: ForeignPod, node: NodeView) -> Mapping[str, Sequence[str | GivenSlice]]:
        names = [each.name for each in regular_containers(pod) if not self.ignores(each)]
        return self.recorded(pod, node, IDS, names, ends=False)

    def ignores(self, container: ForeignContainer) -> bool:
        """Volcano reads only these two: cores alone ask for nothing."""
        keys = (self._names.count, self._names.memory)
        return super().ignores(container) or not keys_of(container, keys)


class VolcanoGpuShareDialect(ForeignDialect):
    """`volcano.sh/gpu-memory` and `volcano.sh/gpu-number`."""

    name = "volcano-gpushare"
    title = "Volcano's (GPU sharing)"
    resources = GPUSHARE_RESOURCES
    records = (GPU_INDEX,)
    result_keys = GPUSHARE_RESULTS

    def recognises(self, pod: ForeignPod) -> tuple[str, ...]:
        return resources_in(pod, self.resources)

    def translate(self, pod: ForeignPod) -> Translation:
        requests: dict[str, Request] = {}
        for container in pod.containers:
            memory, number = (amount_of(pod, container, name) for name in self.resources)
            if memory and number:
                problem = f"it asks for {GPU_MEMORY} and {GPU_NUMBER}: a part of a GPU, and for"
                raise refusal(pod, container.name, f"{problem} whole GPUs", hint="keep one of them")
            check_count(pod, container.name, GPU_NUMBER, number)
            if memory:
                size = bytes_of(pod, container.name, GPU_MEMORY, memory, unit=MIB)
                requests[container.name] = Request(size)
            elif number:
                requests[container.name] = whole_cards(number)
        return self.translation(pod, requests)

    def result_annotations(
        self, pod: ForeignPod, booking: PodBooking, node: NodeView, *, now: float
    ) -> Mapping[str, str]:
        del pod
        devices = {part.uuid: part for each in booking.containers for part in each.devices}
        indexes = index_list(tuple(devices.values()), node)
        moment = str(int(now * 1_000_000_000))
        return {GPU_INDEX: indexes, PREDICATE_TIME: moment} if indexes else {}

    def given(self, pod: ForeignPod, node: NodeView) -> Mapping[str, Sequence[str]]:
        """Read Volcano's assignment: one GPU for memory, or the requested number of GPUs."""
        if GPU_INDEX not in pod.annotations:
            return {}
        left = uuids_by_index(pod, GPU_INDEX, pod.annotations[GPU_INDEX], node=node)
        first = left[:1]
        given: dict[str, Sequence[str]] = {}
        for container in pod.containers:
            if amount_of(pod, container, GPU_MEMORY):
                given[container.name] = first
            elif number := amount_of(pod, container, GPU_NUMBER):
                given[container.name], left = left[:number], left[number:]
        return given
