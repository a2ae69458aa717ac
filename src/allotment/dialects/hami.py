# SPDX-License-Identifier: Apache-2.0
"""HAMi's dialect.

    resources: {limits: {nvidia.com/gpu: 1, nvidia.com/gpumem: 4000, nvidia.com/gpucores: 30}}

Parts of distinct GPUs, so much of each; annotations say which GPUs, and by what they are chosen.
`nvidia.com/gpu` alone is NVIDIA's as much as HAMi's: it is HAMi's on a pod that has anything else
of HAMi's, or that asks for HAMi's scheduler, or where the settings say so.
(HAMi v2.10, `docs/config.md`, `pkg/device/nvidia/device.go`, `pkg/scheduler/policy`.)
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from allotment.dialects.foreign import (
    ForeignContainer,
    ForeignPod,
    GivenSlice,
    NodeView,
    Translated,
    Translation,
)
from allotment.dialects.foreign_amounts import amount_of, number_of, regular_containers
from allotment.dialects.hami_settings import HamiSettings
from allotment.dialects.mig_geometries import groups_from
from allotment.dialects.protocol import refusal, shown
from allotment.dialects.quantities import flag_of, items_of, keys_of, word_of
from allotment.dialects.values import weights_of
from allotment.dialects.vgpu_records import bound, encode, recorded
from allotment.dialects.vgpu_requests import (
    NOT_TYPE,
    USE_TYPE,
    Asked,
    Names,
    asked,
    in_sharing_modes,
    request_of,
    sharing_modes,
    wanted_devices,
)
from allotment.dialects.vgpu_slices import allocations, allocations_of, name_of, slice_of
from allotment.model.clusters import PodBooking
from allotment.model.compute import ComputeClass, revised
from allotment.model.errors import UsageError
from allotment.model.requests import Constraints, DeviceWeights, Preferences, Request

__all__ = ["ANNOTATIONS", "RECEIPTS", "VARIABLES", "HamiDialect"]

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
"""What an author writes on a pod."""

NO_CONTROL: Final = "CUDA_DISABLE_CONTROL"
CORE_POLICY: Final = "GPU_CORE_UTILIZATION_POLICY"
VARIABLES = (NO_CONTROL, CORE_POLICY)
"""What an author writes into a container's environment."""

DOMAIN: Final = "hami.io"
NODE: Final = f"{DOMAIN}/vgpu-node"
TIME: Final = "hami.io/vgpu-time"
BIND_TIME: Final = "hami.io/bind-time"
PHASE: Final = "hami.io/bind-phase"
ALLOCATED: Final = "hami.io/vgpu-devices-allocated"
MIG_ALLOCATIONS: Final = "hami.io/vgpu-mig-allocations"
RECEIPTS = (NODE, TIME, BIND_TIME, PHASE, ALLOCATED, MIG_ALLOCATIONS)
"""What HAMi writes on a pod."""

_NODE_POLICIES: Final[Mapping[str, str]] = {"binpack": "binpack", "spread": "spread"}
_GPU_POLICIES: Final[Mapping[str, str]] = {
    "binpack": "binpack",
    "spread": "spread",
    "numa": "numa",
    "topology-aware": "topology",
    "mutex": "",
}
_MUTEX: Final = "mutex"
_WEIGHTS: Final[Mapping[str, str]] = {"slot": "shares", "core": "compute", "memory": "memory"}
_CLASSES: Final[Mapping[int, ComputeClass]] = {0: ComputeClass.LATENCY, 1: ComputeClass.BESTEFFORT}
_NO_CEILING: Final = "disable"
_CORE_POLICIES: Final = ("default", "force", _NO_CEILING)


@dataclass(frozen=True, slots=True)
class _Rules:
    """What a pod's annotations say about all of its containers."""

    modes: tuple[str, ...]
    """Empty: left open."""
    constraints: Constraints
    preferences: Preferences
    told: tuple[str, ...] = ()


class HamiDialect:
    """`nvidia.com/gpu` with `gpumem`, `gpumem-percentage`, `gpucores` and `priority`."""

    name: Final = "hami"
    title: Final = "HAMi's"
    annotations: Final = ANNOTATIONS
    records: Final = (ALLOCATED, NODE, MIG_ALLOCATIONS)

    def __init__(self, settings: HamiSettings | None = None) -> None:
        """Take the settings of the HAMi that the pods were written for."""
        self._settings = its = settings or HamiSettings()
        self._groups = groups_from(its.known_mig_geometries)
        self._names = Names(
            count=its.resource_count_name,
            memory=its.resource_memory_name,
            percentage=its.resource_memory_percentage_name,
            cores=its.resource_core_name,
            factor=its.memory_factor,
            default_memory=its.default_memory,
            default_cores=its.default_cores,
            default_count=its.default_gpu_num,
            is_whole_by_default=True,
        )
        self.resources = (self._names.count, *self._names.amounts, its.resource_priority_name)

    def recognises(self, pod: ForeignPod) -> tuple[str, ...]:
        """Return its resources and annotations, where a container asks for a GPU in this way."""
        there = {key for each in pod.containers for key in keys_of(each, self.resources)}
        written = [each for each in ANNOTATIONS if each in pod.annotations]
        has_count = self._names.count in there
        is_ours = bool(there - {self._names.count}) or (
            has_count
            and (
                bool(written)
                or self._settings.owns_plain_count
                or pod.scheduler == self._settings.scheduler_name
            )
        )
        if not is_ours:
            return ()
        return (*(each for each in self.resources if each in there), *written)

    def translate(self, pod: ForeignPod) -> Translation:
        """Say what the pod means. Raises `UsageError`."""
        rules = self._rules(pod)
        told: list[str] = []
        found = []
        for container in pod.containers:
            its = asked(pod, container, self._names)
            if its is None:
                self._check_priority(pod, container)
                continue
            request, more = self._request(pod, container, its, rules)
            told += (*its.passed_over, *more)
            # A plugin may offer any of them to the kubelet; none has a meaning after this.
            removes = keys_of(container, self.resources)
            found.append(
                Translated(
                    container=container.name,
                    request=request,
                    removes=removes,
                    names_mode=bool(rules.modes),
                )
            )
        told = [*(rules.told if found else ()), *told]
        return Translation(
            dialect=self.name, containers=tuple(found), passed_over=tuple(dict.fromkeys(told))
        )

    def receipt(
        self,
        pod: ForeignPod,
        booking: PodBooking,
        node: NodeView,
        *,
        now: float,
    ) -> Mapping[str, str]:
        """Return what HAMi's scheduler and device plugin would have written by now."""
        had = {each.name: each.devices for each in booking.containers}
        record = encode(
            (had.get(each.name, ()) for each in pod.containers),
            ends=True,
            named=lambda device: name_of(device, self._groups, node),
        )
        slices = allocations(pod, booking, node)
        return {
            **bound(DOMAIN, booking, now=now),
            ALLOCATED: record,
            **({MIG_ALLOCATIONS: slices} if slices else {}),
        }

    def given(self, pod: ForeignPod, node: NodeView) -> Mapping[str, Sequence[str | GivenSlice]]:
        """Read what HAMi gave a pod that it bound."""
        if ALLOCATED not in pod.annotations or pod.annotations.get(NODE) != pod.node:
            return {}  # of another node: it was copied from another pod
        # Before v2.10 init containers were left out.
        regular = [each.name for each in regular_containers(pod)]
        everyone = [each.name for each in pod.containers]
        found = recorded(
            pod,
            ALLOCATED,
            regular,
            everyone,
            ends=True,
            slice_of=lambda slot: slice_of(slot, self._groups, node),
        )
        return allocations_of(pod, MIG_ALLOCATIONS, found)

    def _request(
        self, pod: ForeignPod, container: ForeignContainer, its: Asked, rules: _Rules
    ) -> tuple[Request, tuple[str, ...]]:
        policy, told = self._core_policy(container)
        request = request_of(its, has_ceiling=policy != _NO_CEILING, constraints=rules.constraints)
        request = replace(
            request,
            compute=revised(request.compute, kind=self._class(pod, container)),
            may_oversubscribe=self._settings.device_memory_scaling > 1,
            preferences=rules.preferences,
        )
        request, more = in_sharing_modes(pod, container.name, request, rules.modes, key=VGPU_MODE)
        return request, (*told, *more)

    def _class(self, pod: ForeignPod, container: ForeignContainer) -> ComputeClass | None:
        name = self._settings.resource_priority_name
        if not keys_of(container, (name,)):
            return None
        priority = amount_of(pod, container, name)
        if priority not in _CLASSES:
            problem = f"{name} is {priority}"
            raise refusal(pod, container.name, problem, hint="write 0 (high) or 1 (low)")
        return _CLASSES[priority]

    def _check_priority(self, pod: ForeignPod, container: ForeignContainer) -> None:
        name = self._settings.resource_priority_name
        if keys_of(container, (name,)):
            problem = f"it has {name}, and asks for no GPU"
            hint = f"add `{self._names.count}: 1` to its limits, or remove {name}"
            raise refusal(pod, container.name, problem, hint=hint)

    def _core_policy(self, container: ForeignContainer) -> tuple[str, tuple[str, ...]]:
        """Return the policy of the ceiling, and what is not honoured of the environment."""
        where = f"container {container.name!r}"
        told: list[str] = []
        if flag_of(container.environment.get(NO_CONTROL, "")):
            told.append(f"{where}: {NO_CONTROL}: limits are in force in every share")
        settings = self._settings
        usual = _NO_CEILING if settings.disable_core_limit else settings.gpu_core_policy
        policy = container.environment.get(CORE_POLICY, usual).lower()
        if policy and policy not in _CORE_POLICIES:
            words = ", ".join(_CORE_POLICIES)
            told.append(f"{where}: {CORE_POLICY} is {shown(policy)}, which is none of: {words}")
        return policy, tuple(told)

    def _rules(self, pod: ForeignPod) -> _Rules:
        written = pod.annotations
        chain = self._chain(pod)
        node = written.get(NODE_POLICY, self._settings.node_scheduler_policy)
        policies = (
            (_NODE_POLICIES[word_of(pod, NODE_POLICY, node, _NODE_POLICIES)],) if node else ()
        )
        modes, told = sharing_modes(pod, VGPU_MODE, self._settings.modes)
        return _Rules(
            modes=modes,
            told=told,
            constraints=replace(
                wanted_devices(pod, uuids=USE_UUID, not_uuids=NOT_UUID),
                is_alone=_MUTEX in chain,
                # HAMi takes what Go does not read as a flag for no.
                same_numa=flag_of(written.get(NUMA_BIND, "")) or False,
            ),
            preferences=Preferences(
                node_policies=policies,
                device_policies=tuple(_GPU_POLICIES[each] for each in chain if each != _MUTEX),
                weights=_weights(pod),
            ),
        )

    def _chain(self, pod: ForeignPod) -> tuple[str, ...]:
        text = pod.annotations.get(GPU_POLICY, self._settings.gpu_scheduler_policy)
        words = (word_of(pod, GPU_POLICY, each, _GPU_POLICIES) for each in items_of(text))
        return tuple(dict.fromkeys(words))


def _weights(pod: ForeignPod) -> DeviceWeights | None:
    text = pod.annotations.get(WEIGHTS)
    if text is None:
        return None
    hint = "write all three, whole numbers, at least one above 0: slot=1,core=1,memory=3"
    problem = f"the annotation {WEIGHTS} is {shown(text)}"
    found: dict[str, int] = {}
    for item in text.split(","):
        name, _, number = (each.strip() for each in item.partition("="))
        if name not in _WEIGHTS or _WEIGHTS[name] in found:
            raise refusal(pod, None, problem, hint=hint)
        found[_WEIGHTS[name]] = number_of(pod, None, f"the annotation {WEIGHTS}", number)
    if len(found) != len(_WEIGHTS):
        raise refusal(pod, None, problem, hint=hint)
    try:
        return weights_of(found, shown(text), hint=hint)
    except UsageError as error:
        raise refusal(pod, None, f"{problem}: {error.message}", hint=hint) from error
