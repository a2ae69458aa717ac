# SPDX-License-Identifier: Apache-2.0
"""Volcano's two dialects: vGPUs, and the GPU sharing that was there before them.

    resources: {limits: {volcano.sh/vgpu-number: 1, volcano.sh/vgpu-memory: 4000}}
    resources: {limits: {volcano.sh/gpu-memory: 4000}}

The first means what HAMi's resources mean. The second is MiB of one GPU, or a number of GPUs that
nobody else is on. Volcano counts neither in init containers; here they are counted as any other.
(Volcano v1.13 `docs/user-guide/how_to_use_vgpu.md`, `how_to_use_gpu_sharing.md`,
`pkg/scheduler/api/devices/nvidia`.)
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from allotment.dialects.foreign import (
    ForeignContainer,
    ForeignPod,
    GivenSlice,
    NodeView,
    Translated,
    Translation,
)
from allotment.dialects.foreign_amounts import (
    MAX_DEVICES,
    MIB,
    Name,
    amount_of,
    bytes_of,
    index_list,
    regular_containers,
    uuids_by_index,
    whole_cards,
)
from allotment.dialects.mig_geometries import KnownGeometries, groups_from
from allotment.dialects.protocol import refusal
from allotment.dialects.quantities import keys_of
from allotment.dialects.vgpu_records import bound, encode, recorded
from allotment.dialects.vgpu_requests import (
    NOT_TYPE,
    USE_TYPE,
    Names,
    asked,
    in_sharing_modes,
    request_of,
    sharing_modes,
    wanted_devices,
)
from allotment.dialects.vgpu_slices import name_of, slice_of
from allotment.model.clusters import PodBooking
from allotment.model.pods import ContainerKind
from allotment.model.requests import MIG, MPS, SOFT, Request

__all__ = [
    "ANNOTATIONS",
    "GPUSHARE_RECEIPTS",
    "GPUSHARE_RESOURCES",
    "RECEIPTS",
    "RESOURCES",
    "VolcanoDialect",
    "VolcanoGpuShareDialect",
    "VolcanoSettings",
]

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
"""What an author writes on a pod."""

IDS: Final = "volcano.sh/vgpu-ids-new"
DOMAIN: Final = "volcano.sh"
NODE: Final = f"{DOMAIN}/vgpu-node"
TIME: Final = "volcano.sh/vgpu-time"
BIND_TIME: Final = "volcano.sh/bind-time"
PHASE: Final = "volcano.sh/bind-phase"
RECEIPTS = (IDS, NODE, TIME, BIND_TIME, PHASE)
"""What Volcano writes on a pod."""

GPU_MEMORY: Final = "volcano.sh/gpu-memory"
GPU_NUMBER: Final = "volcano.sh/gpu-number"
GPUSHARE_RESOURCES = (GPU_MEMORY, GPU_NUMBER)
GPU_INDEX: Final = "volcano.sh/gpu-index"
PREDICATE_TIME: Final = "volcano.sh/predicate-time"
GPUSHARE_RECEIPTS = (GPU_INDEX, PREDICATE_TIME)


class VolcanoSettings(
    msgspec.Struct, frozen=True, kw_only=True, rename="camel", forbid_unknown_fields=True
):
    """What a cluster may have set otherwise."""

    resource_count_name: Name = NUMBER
    resource_memory_name: Name = MEMORY
    resource_memory_percentage_name: Name = PERCENTAGE
    resource_core_name: Name = CORES
    gpu_memory_factor: Annotated[int, Meta(ge=1, le=1 << 20)] = 1
    """MiB in one of `resource_memory_name`."""
    known_mig_geometries: tuple[KnownGeometries, ...] = ()
    """Which slices GPUs are cut into for pods of mode `mig`; none: whatever their driver has."""
    modes: frozenset[str] = frozenset({SOFT, MIG, MPS})
    """Those in which nodes have GPUs for shares: what `volcano.sh/vgpu-mode` may ask for."""


class VolcanoDialect:
    """`volcano.sh/vgpu-number`, `vgpu-memory`, `vgpu-memory-percentage`, `vgpu-cores`."""

    name: Final = "volcano"
    title: Final = "Volcano's"
    annotations: Final = ANNOTATIONS
    records: Final = (IDS, NODE)

    def __init__(self, settings: VolcanoSettings | None = None) -> None:
        """Take the settings of the device plugin that the pods were written for."""
        self._settings = its = settings or VolcanoSettings()
        self._groups = groups_from(its.known_mig_geometries)
        self._names = Names(
            count=its.resource_count_name,
            memory=its.resource_memory_name,
            percentage=its.resource_memory_percentage_name,
            cores=its.resource_core_name,
            factor=its.gpu_memory_factor,
        )
        self.resources = (self._names.count, *self._names.amounts)

    def recognises(self, pod: ForeignPod) -> tuple[str, ...]:
        """Return its resources and annotations, where a container has one of the resources."""
        there = {key for each in pod.containers for key in keys_of(each, self.resources)}
        if not there:
            return ()
        written = (each for each in ANNOTATIONS if each in pod.annotations)
        return (*(each for each in self.resources if each in there), *written)

    def translate(self, pod: ForeignPod) -> Translation:
        """Say what the pod means. Raises `UsageError`."""
        constraints = wanted_devices(pod, uuids=USE_UUID, not_uuids=NOT_UUID)
        modes, words = sharing_modes(pod, VGPU_MODE, self._settings.modes)
        told: list[str] = [*words]
        if GROUP_POLICY in pod.annotations:
            told.append(
                f"{GROUP_POLICY}: pods of a group may share a GPU; give them the same"
                " allotment.dev/anti-affinity to keep them apart"
            )
        found = []
        for container in pod.containers:
            its = asked(pod, container, self._names)
            if its is not None:
                told += its.passed_over
                request = request_of(its, constraints=constraints)
                request, more = in_sharing_modes(pod, container.name, request, modes, key=VGPU_MODE)
                told += more
                found.append(
                    Translated(
                        container=container.name,
                        request=request,
                        # Its plugin offers three of them to the kubelet as devices; none has a
                        # meaning now.
                        removes=keys_of(container, self.resources),
                        names_mode=bool(modes),
                    )
                )
        return Translation(dialect=self.name, containers=tuple(found), passed_over=tuple(told))

    def receipt(
        self,
        pod: ForeignPod,  # noqa: ARG002 - of the protocol
        booking: PodBooking,
        node: NodeView,
        *,
        now: float,
    ) -> Mapping[str, str]:
        """Return what Volcano and its device plugin would have written by now."""
        regular = sorted(
            (each for each in booking.containers if each.kind is ContainerKind.REGULAR),
            key=lambda each: each.place,
        )
        record = encode(
            (each.devices for each in regular),
            ends=False,
            named=lambda device: name_of(device, self._groups, node),
        )
        return {IDS: record, **bound(DOMAIN, booking, now=now)}

    def given(self, pod: ForeignPod, node: NodeView) -> Mapping[str, Sequence[str | GivenSlice]]:
        """Read what Volcano gave a pod that it bound."""
        if IDS not in pod.annotations or pod.annotations.get(NODE) != pod.node:
            return {}  # of another node: it was copied from another pod
        # Volcano looks at these two alone.
        told_by = (self._names.count, self._names.memory)
        names = [each.name for each in regular_containers(pod) if keys_of(each, told_by)]
        return recorded(
            pod,
            IDS,
            names,
            ends=False,
            slice_of=lambda slot: slice_of(slot, self._groups, node),
        )


class VolcanoGpuShareDialect:
    """`volcano.sh/gpu-memory` and `volcano.sh/gpu-number`."""

    name: Final = "volcano-gpushare"
    title: Final = "Volcano's (GPU sharing)"
    resources: Final = GPUSHARE_RESOURCES
    records: Final = (GPU_INDEX,)

    def recognises(self, pod: ForeignPod) -> tuple[str, ...]:
        """Return its resources."""
        there = {key for each in pod.containers for key in keys_of(each, GPUSHARE_RESOURCES)}
        return tuple(each for each in GPUSHARE_RESOURCES if each in there)

    def translate(self, pod: ForeignPod) -> Translation:
        """Say what the pod means. Raises `UsageError`."""
        found = []
        for container in pod.containers:
            request = self._request(pod, container)
            if request is not None:
                removes = keys_of(container, GPUSHARE_RESOURCES)
                found.append(Translated(container=container.name, request=request, removes=removes))
        return Translation(dialect=self.name, containers=tuple(found))

    def receipt(
        self,
        pod: ForeignPod,  # noqa: ARG002 - of the protocol
        booking: PodBooking,
        node: NodeView,
        *,
        now: float,
    ) -> Mapping[str, str]:
        """Return what Volcano would have written: which GPUs, by index, and when."""
        devices = {each.uuid: each for its in booking.containers for each in its.devices}
        indexes = index_list(tuple(devices.values()), node)
        moment = str(int(now * 1_000_000_000))
        return {GPU_INDEX: indexes, PREDICATE_TIME: moment} if indexes else {}

    def given(self, pod: ForeignPod, node: NodeView) -> Mapping[str, Sequence[str]]:
        """Read what Volcano gave a pod: one GPU for memory, or as many as were asked for."""
        if GPU_INDEX not in pod.annotations:
            return {}
        left = uuids_by_index(pod, GPU_INDEX, pod.annotations[GPU_INDEX], node=node)
        first = left[:1]
        found: dict[str, Sequence[str]] = {}
        for container in pod.containers:
            if amount_of(pod, container, GPU_MEMORY):
                found[container.name] = first
            elif number := amount_of(pod, container, GPU_NUMBER):
                found[container.name], left = left[:number], left[number:]
        return found

    def _request(self, pod: ForeignPod, container: ForeignContainer) -> Request | None:
        memory = amount_of(pod, container, GPU_MEMORY)
        number = amount_of(pod, container, GPU_NUMBER)
        if memory and number:
            problem = f"it asks for {GPU_MEMORY} and {GPU_NUMBER}: a part of a GPU, and whole GPUs"
            raise refusal(pod, container.name, problem, hint="keep one of them")
        if number > MAX_DEVICES:
            problem = f"{GPU_NUMBER} is {number}, more GPUs than any node has"
            raise refusal(pod, container.name, problem, hint="ask for as many as a node has")
        if memory:
            return Request(bytes_of(pod, container.name, GPU_MEMORY, memory, unit=MIB))
        return whole_cards(number) if number else None
