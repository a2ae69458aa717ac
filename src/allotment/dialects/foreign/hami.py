# SPDX-License-Identifier: Apache-2.0
"""HAMi's dialect.

    resources: {limits: {nvidia.com/gpu: 1, nvidia.com/gpumem: 4000, nvidia.com/gpucores: 30}}

Parts of distinct GPUs, with amounts for each; annotations select GPUs and policies.
`nvidia.com/gpu` alone is also NVIDIA's: it is read as HAMi's on a pod with other HAMi keys or
HAMi's scheduler, or if the settings ask for it. (HAMi v2.10, `docs/config.md`,
`pkg/device/nvidia/device.go`, `pkg/scheduler/policy`.)
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

from allotment.dialects.foreign.base import GivenSlice, NodeView, Translation
from allotment.dialects.foreign.mig_geometries import AllowedProfiles, KnownGeometries
from allotment.dialects.foreign.parsing import (
    Name,
    amount_of,
    flag_of,
    items_of,
    keys_of,
    number_of,
    regular_containers,
    resources_in,
    word_of,
)
from allotment.dialects.foreign.vgpu import (
    CORE_POLICY,
    DISABLE,
    NOT_TYPE,
    USE_TYPE,
    Names,
    VgpuDialect,
    allocations,
    allocations_of,
)
from allotment.dialects.own.annotations import weights_of
from allotment.dialects.own.protocol import refusal, shown
from allotment.model.clusters import PodBooking
from allotment.model.compute import ComputeClass, revised
from allotment.model.errors import UsageError
from allotment.model.modes import PART_MODES
from allotment.model.pods import ForeignContainer, ForeignPod
from allotment.model.requests import Constraints, DeviceWeights, Preferences, Request
from allotment.model.structs import replace

_Amount = Annotated[int, Meta(ge=0, le=1 << 40)]

IGNORED: Final[Mapping[str, str]] = {
    "overwriteEnv": "pods without a GPU are never changed",
    "preConfiguredDeviceMemory": "the node's agent reads it from the GPU",
    "deviceSplitCount": "a GPU takes as many shares as fit",
    "deviceCoreScaling": "guarantees on a GPU add up to at most 100 percent",
    "enableNumaTopology": "NUMA nodes are always used",
    "libCudaLogLevel": "the shim writes its own log",
    "runtimeClassName": "pods need no runtime class",
}
"""Settings of HAMi's configuration that have no effect, with the reasons."""


class HamiSettings(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """The settings of HAMi's configuration that affect a pod's meaning."""

    resource_count_name: Name = "nvidia.com/gpu"
    resource_memory_name: Name = "nvidia.com/gpumem"
    resource_memory_percentage_name: Name = "nvidia.com/gpumem-percentage"
    resource_core_name: Name = "nvidia.com/gpucores"
    resource_priority_name: Name = "nvidia.com/priority"
    memory_factor: Annotated[int, Meta(ge=1, le=1 << 20)] = 1
    """MiB in one of `resource_memory_name`."""
    default_memory: _Amount = 0
    """Default memory, in the same units; 0: all of it."""
    default_cores: Annotated[int, Meta(ge=0, le=100)] = 0
    default_gpu_num: Annotated[int, Meta(ge=0, le=1024)] = msgspec.field(
        default=1, name="defaultGPUNum"
    )
    """Default number of GPUs for a container with amounts only; 0: none."""
    device_memory_scaling: Annotated[float, Meta(ge=0)] = 1.0
    """Above 1, memory is overcommitted: it may live on the host."""
    gpu_core_policy: Literal["", "default", "force", "disable"] = "default"
    """`force`: cores are a ceiling too."""
    disable_core_limit: bool = False
    """`gpu_core_policy: disable`, by its older name."""
    node_scheduler_policy: Literal["", "binpack", "spread"] = ""
    """For pods without a policy; empty: Allotment's own default. HAMi's chart has `binpack`."""
    gpu_scheduler_policy: str = ""
    """Likewise, a chain; HAMi's chart has `spread`."""
    scheduler_name: str = "hami-scheduler"
    """A pod with this scheduler is always HAMi's."""
    owns_plain_count: bool = False
    """Translate `nvidia.com/gpu` alone too, instead of leaving it to the kubelet."""
    known_mig_geometries: tuple[KnownGeometries, ...] = ()
    """Allowed slices for pods of mode `mig`; empty: all profiles of the driver."""
    mig_profile_allowlist: tuple[AllowedProfiles, ...] = ()
    """Allow-list of profiles by model; other models get none. Empty: all profiles of the driver."""
    modes: frozenset[str] = frozenset(PART_MODES)
    """Modes that nodes offer: the values for `nvidia.com/vgpu-mode`."""


USE_UUID: Final = "nvidia.com/use-gpuuuid"
NOT_UUID: Final = "nvidia.com/nouse-gpuuuid"
NUMA_BIND: Final = "nvidia.com/numa-bind"
VGPU_MODE: Final = "nvidia.com/vgpu-mode"
NODE_POLICY: Final = "hami.io/node-scheduler-policy"
GPU_POLICY: Final = "hami.io/gpu-scheduler-policy"
WEIGHTS: Final = "hami.io/device-scoring-weights"
ANNOTATIONS = (
    USE_TYPE,
    NOT_TYPE,
    USE_UUID,
    NOT_UUID,
    NUMA_BIND,
    VGPU_MODE,
    NODE_POLICY,
    GPU_POLICY,
    WEIGHTS,
)
"""Annotations by a pod's author."""

NO_CONTROL: Final = "CUDA_DISABLE_CONTROL"
VARIABLES = (NO_CONTROL, CORE_POLICY)
"""Environment variables by a pod's author."""

DOMAIN: Final = "hami.io"
NODE: Final = f"{DOMAIN}/vgpu-node"
TIME: Final = "hami.io/vgpu-time"
BIND_TIME: Final = "hami.io/bind-time"
PHASE: Final = "hami.io/bind-phase"
ALLOCATED: Final = "hami.io/vgpu-devices-allocated"
MIG_ALLOCATIONS: Final = "hami.io/vgpu-mig-allocations"
RESULTS = (NODE, TIME, BIND_TIME, PHASE, ALLOCATED, MIG_ALLOCATIONS)
"""Annotations by HAMi."""

_NODE_POLICIES: Final = ("binpack", "spread")
_GPU_POLICIES: Final[Mapping[str, str]] = {
    "binpack": "binpack",
    "spread": "spread",
    "numa": "numa",
    "topology-aware": "topology",
    "mutex": "",
}
_MUTEX: Final = "mutex"
_WEIGHTS: Final[Mapping[str, str]] = {"slot": "shares", "core": "compute", "memory": "memory"}
_CLASSES: Final[Mapping[int, ComputeClass | None]] = {0: ComputeClass.LATENCY, 1: None}
"""1 is HAMi's default: a container without the resource has it too."""


class HamiDialect(VgpuDialect):
    """`nvidia.com/gpu` with `gpumem`, `gpumem-percentage`, `gpucores` and `priority`."""

    name = "hami"
    title = "HAMi's"
    settings_type = HamiSettings
    annotations = ANNOTATIONS
    records = (ALLOCATED, NODE, MIG_ALLOCATIONS)
    result_keys = RESULTS
    domain = DOMAIN
    mode_key = VGPU_MODE
    uuid_keys = (USE_UUID, NOT_UUID)

    def __init__(self, settings: HamiSettings | None = None) -> None:
        self._settings = settings = settings or HamiSettings()
        names = Names(
            count=settings.resource_count_name,
            memory=settings.resource_memory_name,
            percentage=settings.resource_memory_percentage_name,
            cores=settings.resource_core_name,
            factor=settings.memory_factor,
            default_memory=settings.default_memory,
            default_cores=settings.default_cores,
            default_count=settings.default_gpu_num,
            is_whole_by_default=True,
        )
        policy = DISABLE if settings.disable_core_limit else settings.gpu_core_policy
        super().__init__(names, settings.known_mig_geometries, settings.modes, core_policy=policy)
        self.resources = (*self.resources, settings.resource_priority_name)

    def recognises(self, pod: ForeignPod) -> tuple[str, ...]:
        """Its resources and annotations, if a container asks for a GPU with them."""
        resources = resources_in(pod, self.resources)
        annotations = tuple(key for key in ANNOTATIONS if key in pod.annotations)
        is_plain = resources == (self._names.count,)
        is_marked = annotations or pod.scheduler == self._settings.scheduler_name
        if not resources or (is_plain and not is_marked and not self._settings.owns_plain_count):
            return ()
        return (*resources, *annotations)

    def translate(self, pod: ForeignPod) -> Translation:
        translation = super().translate(pod)
        asking = {container.container for container in translation.containers}
        name = self._settings.resource_priority_name
        for container in pod.containers:
            if container.name not in asking and keys_of(container, (name,)):
                problem = f"it has {name} but asks for no GPU"
                hint = f"add `{self._names.count}: 1` to its limits, or remove {name}"
                raise refusal(pod, container.name, problem, hint=hint)
        return translation

    def result_annotations(
        self, pod: ForeignPod, booking: PodBooking, node: NodeView, *, now: float
    ) -> Mapping[str, str]:
        devices = {container.name: container.devices for container in booking.containers}
        ordered = (devices.get(container.name, ()) for container in pod.containers)
        slices = allocations(pod, booking, node)
        return {
            **self.bound(booking, now=now),
            ALLOCATED: self.encode(ordered, node, ends=True),
            **({MIG_ALLOCATIONS: slices} if slices else {}),
        }

    def given(self, pod: ForeignPod, node: NodeView) -> Mapping[str, Sequence[str | GivenSlice]]:
        # Before v2.10 init containers were omitted.
        regular = [container.name for container in regular_containers(pod)]
        every = [container.name for container in pod.containers]
        given = self.recorded(pod, node, ALLOCATED, regular, every, ends=True)
        return allocations_of(pod, MIG_ALLOCATIONS, given) if given else {}

    def rules_of(self, pod: ForeignPod) -> tuple[Constraints, Preferences]:
        constraints, _ = super().rules_of(pod)
        chain = self._chain(pod)
        node = pod.annotations.get(NODE_POLICY, self._settings.node_scheduler_policy)
        return (
            replace(
                constraints,
                is_alone=_MUTEX in chain,
                # HAMi reads a flag that Go cannot parse as false.
                same_numa=flag_of(pod.annotations.get(NUMA_BIND, "")) or False,
            ),
            Preferences(
                node_policies=(word_of(pod, NODE_POLICY, node, _NODE_POLICIES),) if node else (),
                device_policies=tuple(_GPU_POLICIES[word] for word in chain if word != _MUTEX),
                weights=_weights(pod),
            ),
        )

    def adjusted(
        self, pod: ForeignPod, container: ForeignContainer, request: Request, notes: list[str]
    ) -> Request:
        if flag_of(container.environment.get(NO_CONTROL, "")):
            problem = f"{NO_CONTROL} has no effect: limits are always enforced"
            notes.append(f"container {container.name!r}: {problem}")
        compute = revised(request.compute, kind=self._class(pod, container))
        is_scaled = self._settings.device_memory_scaling > 1
        return replace(request, compute=compute, may_oversubscribe=is_scaled)

    def _class(self, pod: ForeignPod, container: ForeignContainer) -> ComputeClass | None:
        name = self._settings.resource_priority_name
        if not keys_of(container, (name,)):
            return None
        priority = amount_of(pod, container, name)
        if priority not in _CLASSES:
            problem = f"{name} is {priority}"
            raise refusal(
                pod, container.name, problem, hint="write 0 (high) or 1 (low, the default)"
            )
        return _CLASSES[priority]

    def _chain(self, pod: ForeignPod) -> tuple[str, ...]:
        text = pod.annotations.get(GPU_POLICY, self._settings.gpu_scheduler_policy)
        words = (word_of(pod, GPU_POLICY, word, _GPU_POLICIES) for word in items_of(text))
        return tuple(dict.fromkeys(words))


def _weights(pod: ForeignPod) -> DeviceWeights | None:
    text = pod.annotations.get(WEIGHTS)
    if text is None:
        return None
    hint = "write all three, whole numbers, at least one above 0: slot=1,core=1,memory=3"
    problem = f"the annotation {WEIGHTS} is {shown(text)}"
    weights: dict[str, int] = {}
    for item in text.split(","):
        name, _, number = (part.strip() for part in item.partition("="))
        if name not in _WEIGHTS or _WEIGHTS[name] in weights:
            raise refusal(pod, None, problem, hint=hint)
        weights[_WEIGHTS[name]] = number_of(pod, None, f"the annotation {WEIGHTS}", number)
    if len(weights) != len(_WEIGHTS):
        raise refusal(pod, None, problem, hint=hint)
    try:
        return weights_of(weights, shown(text), hint=hint)
    except UsageError as error:
        raise refusal(pod, None, f"{problem}: {error.message}", hint=hint) from error
