# SPDX-License-Identifier: Apache-2.0
"""Aliyun's dialect: the open-source gpushare, and ACK's shared GPU scheduling that grew out of it.

    metadata: {labels: {aliyun.com/gpu-count: "2"}}
    resources: {limits: {aliyun.com/gpu-mem: 8}}

Memory is a number of GiB (or of MiB, as the old plugin's `--memory-unit` has it), compute a percent
of a GPU; both are sums over as many GPUs as a label of the pod says, which have to divide them.
(gpushare-scheduler-extender `docs/userguide.md`; ACK "GPU sharing", 2026-03; annotations as in
Koordinator's `pkg/scheduler/plugins/ack`.)
"""

from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Final

import msgspec

from allotment.dialects.foreign import (
    ForeignContainer,
    ForeignPod,
    NodeView,
    Translated,
    Translation,
)
from allotment.dialects.foreign_amounts import (
    GIB,
    MAX_DEVICES,
    MIB,
    PERCENT,
    PLACE_ANEW,
    Name,
    amount_of,
    bytes_of,
    compute_of,
    is_asked,
    number_of,
    of_earlier_placement,
    regular_containers,
    units_of,
    uuid_at,
    uuids_by_index,
)
from allotment.dialects.protocol import meant, refusal, shown
from allotment.dialects.quantities import keys_of
from allotment.model.clusters import PodBooking
from allotment.model.compute import DEFAULT_WEIGHT, MAX_WEIGHT, WHOLE, Compute
from allotment.model.errors import UsageError
from allotment.model.formats import format_count
from allotment.model.requests import Constraints, ModelRule, Preferences, Request

__all__ = ["RECEIPTS", "SELECTORS", "VARIABLES", "AliyunDialect", "AliyunSettings"]

IDX: Final = "ALIYUN_COM_GPU_MEM_IDX"
POD: Final = "ALIYUN_COM_GPU_MEM_POD"
DEV: Final = "ALIYUN_COM_GPU_MEM_DEV"
ASSIGNED: Final = "ALIYUN_COM_GPU_MEM_ASSIGNED"
ASSUME_TIME: Final = "ALIYUN_COM_GPU_MEM_ASSUME_TIME"
ALLOCATION: Final = "scheduler.framework.gpushare.allocation"
ALLOCATION_ASSIGNED: Final = "scheduler.framework.gpushare.assigned"
ALLOCATION_TIME: Final = "scheduler.framework.gpushare.assume-time"
CORE_ALLOCATION: Final = "gpushare.alibabacloud.com/core-percentage"
RECEIPTS: Final = (
    IDX,
    POD,
    DEV,
    ASSIGNED,
    ASSUME_TIME,
    ALLOCATION,
    ALLOCATION_ASSIGNED,
    ALLOCATION_TIME,
    CORE_ALLOCATION,
)
"""What that system writes on a pod, and this one at binding."""

_SCHEDULE: Final = "ack.node.gpu.schedule"
_PLACEMENT: Final = "ack.node.gpu.placement"
_MODEL: Final = "aliyun.accelerator/nvidia_name"
_NO_ISOLATION: Final = "cgpu.disable.isolation"
_NO_ISOLATION_VARIABLE: Final = "CGPU_DISABLE"
_WEIGHT_VARIABLE: Final = "ALIYUN_COM_GPU_SCHD_WEIGHT"
_IDLE_LABEL: Final = "ack.gpushare.placement"
_IDLE: Final = "require-whole-device"
_TFLOPS: Final = "aliyun.com/gpu-core.tflops"
SELECTORS: Final = (_SCHEDULE, _PLACEMENT, _MODEL, _NO_ISOLATION)
"""Labels of nodes: what a pod selects by them is read."""
VARIABLES: Final = (_NO_ISOLATION_VARIABLE, _WEIGHT_VARIABLE)

_SHARING = ("cgpu", "core_mem", "share")
_POLICIES = ("binpack", "spread")
_UNITS: Mapping[str, int] = {"GiB": GIB, "MiB": MIB}
_ALL_PERCENT = WHOLE // PERCENT
_NOTHING = -1
"""The index of a pod for which that system found no GPU."""

_Allocation = dict[str, dict[str, int]]


class AliyunSettings(
    msgspec.Struct, frozen=True, kw_only=True, rename="camel", forbid_unknown_fields=True
):
    """What a cluster may have set otherwise."""

    memory: Name = "aliyun.com/gpu-mem"
    compute: Name = "aliyun.com/gpu-core.percentage"
    count: Name = "aliyun.com/gpu-count"
    """The label of a pod that says of how many GPUs."""
    memory_unit: str = "GiB"
    """Of one `memory`: `GiB` or `MiB`."""
    placement: str = ""
    """`binpack` or `spread` over the GPUs of a node, for pods that do not say; empty: ours."""

    def __post_init__(self) -> None:
        """Raise `UsageError` for a word that is not known."""
        if self.memory_unit not in _UNITS:
            message = f"aliyun.memoryUnit is {shown(self.memory_unit)}"
            raise UsageError(message, hint=f"write one of: {', '.join(_UNITS)}")
        if self.placement and self.placement not in _POLICIES:
            message = f"aliyun.placement is {shown(self.placement)}"
            raise UsageError(message, hint=f"write one of: {', '.join(_POLICIES)}")


class AliyunDialect:
    """`aliyun.com/gpu-mem` and what goes with it."""

    name: Final = "aliyun"
    title: Final = "Aliyun's"
    records: Final = (ALLOCATION, IDX)

    def __init__(self, settings: AliyunSettings | None = None) -> None:
        """Take what is configurable."""
        self.settings = settings or AliyunSettings()
        self._unit = _UNITS[self.settings.memory_unit]

    @property
    def resources(self) -> tuple[str, ...]:
        """Return the resources by which it is recognised."""
        return (self.settings.memory, self.settings.compute, _TFLOPS)

    @property
    def labels(self) -> tuple[str, ...]:
        """Return the labels that it reads."""
        return (self.settings.count, _IDLE_LABEL)

    def recognises(self, pod: ForeignPod) -> tuple[str, ...]:
        """Go by the resources: without them the label and the selectors ask for nothing."""
        return tuple(name for name in self.resources if is_asked(pod, name))

    def translate(self, pod: ForeignPod) -> Translation:
        """Divide what each container asks for over the pod's GPUs. Raises `UsageError`."""
        count = self._count(pod)
        constraints, preferences = self._wishes(pod)
        containers: list[Translated] = []
        for container in pod.containers:
            memory = amount_of(pod, container, self.settings.memory)
            compute = amount_of(pod, container, self.settings.compute)
            self._check(pod, container, memory, compute=compute, count=count)
            if not memory:
                continue
            request = Request(
                bytes_of(
                    pod,
                    container.name,
                    self.settings.memory,
                    memory // count,
                    unit=self._unit,
                ),
                count=count,
                compute=_compute(pod, container, compute, count=count),
                constraints=constraints,
                preferences=preferences,
            )
            removes = keys_of(container, self.resources)
            containers.append(
                Translated(container=container.name, request=request, removes=removes)
            )
        names = [each.container for each in containers]
        return Translation(
            dialect=self.name, containers=tuple(containers), passed_over=_passed_over(pod, names)
        )

    def _count(self, pod: ForeignPod) -> int:
        """Return of how many GPUs the pod is. 0 is as if there were no label."""
        text = pod.labels.get(self.settings.count)
        if text is None:
            return 1
        count = number_of(pod, None, f"the label {self.settings.count}", text)
        if count > MAX_DEVICES:
            problem = f"the label {self.settings.count} is {count}"
            raise refusal(pod, None, problem, hint="write the number of GPUs, of one node")
        return count or 1

    def _check(
        self, pod: ForeignPod, container: ForeignContainer, memory: int, *, compute: int, count: int
    ) -> None:
        names = self.settings
        if amount_of(pod, container, _TFLOPS):
            problem = f"{_TFLOPS} is asked for, and how many a GPU has is not known here"
            hint = f"ask by percent of a GPU: {names.compute}"
            raise refusal(pod, container.name, problem, hint=hint)
        if compute and not memory:
            problem = f"it asks for {names.compute} without {names.memory}"
            hint = f"add {names.memory}, in {names.memory_unit}: compute is of a part of a GPU"
            raise refusal(pod, container.name, problem, hint=hint)
        if compute > _ALL_PERCENT * count:
            problem = f"{names.compute} is {compute}, of {format_count(count, 'GPU')}"
            hint = f"100 is all of one GPU: ask for at most {_ALL_PERCENT * count}"
            raise refusal(pod, container.name, problem, hint=hint)
        for name, amount in ((names.memory, memory), (names.compute, compute)):
            if amount % count:
                problem = f"{name} is {amount}, which cannot be divided over the {count} GPUs"
                hint = f"make {name} a multiple of the label {names.count}: each GPU gives the same"
                raise refusal(pod, container.name, f"{problem} of the pod", hint=hint)

    def _wishes(self, pod: ForeignPod) -> tuple[Constraints, Preferences]:
        """Read what labels and selectors of nodes say about devices."""
        schedule = pod.node_selector.get(_SCHEDULE)
        if schedule is not None and schedule not in _SHARING:
            problem = (
                f"it selects nodes of {_SCHEDULE}: {shown(schedule)}{meant(schedule, _SHARING)}"
            )
            problem += ", which have no parts of GPUs"
            if schedule == "mps":
                problem = f"it selects nodes of {_SCHEDULE}: mps, and parts run in turns here"
            hint = f"remove the selector, or write one of: {', '.join(_SHARING)}"
            raise refusal(pod, None, problem, hint=hint)
        policy = pod.node_selector.get(_PLACEMENT, self.settings.placement)
        if policy and policy not in _POLICIES:
            problem = f"it selects nodes of {_PLACEMENT}: {shown(policy)}{meant(policy, _POLICIES)}"
            hint = f"write one of: {', '.join(_POLICIES)}"
            raise refusal(pod, None, problem, hint=hint)
        idle = pod.labels.get(_IDLE_LABEL)
        if idle not in {None, _IDLE}:
            problem = f"the label {_IDLE_LABEL} is {shown(str(idle))}"
            raise refusal(pod, None, problem, hint=f"write {_IDLE}, or remove the label")
        model = pod.node_selector.get(_MODEL, "").strip()
        constraints = Constraints(
            models=(ModelRule(model),) if model else (), is_alone=idle is not None
        )
        return constraints, Preferences(device_policies=(policy,) if policy else ())

    def receipt(
        self, pod: ForeignPod, booking: PodBooking, node: NodeView, *, now: float
    ) -> Mapping[str, str]:
        """Write both forms: that of the framework, and the old one where it can say it.

        The old one knows one GPU for a pod. `assigned` is true at once: no plugin of that system
        has to find the pod.
        """
        places = {each.name: place for place, each in enumerate(regular_containers(pod))}
        memory: _Allocation = {}
        compute: _Allocation = {}
        uuids: set[str] = set()
        for container in booking.containers:
            place = places.get(container.name)
            if place is None:
                continue
            for part in container.devices:
                if part.uuid not in node.indexes:
                    continue
                uuids.add(part.uuid)
                index = str(node.indexes[part.uuid])
                units = units_of(part.memory, self._unit)
                memory.setdefault(str(place), {})[index] = units
                if part.guarantee:
                    percent = units_of(part.guarantee, PERCENT)
                    compute.setdefault(str(place), {})[index] = percent
        if not memory:
            return {}
        time = str(int(now * 1e9))
        written = {ALLOCATION: _encode(memory), ALLOCATION_ASSIGNED: "true", ALLOCATION_TIME: time}
        if compute:
            written[CORE_ALLOCATION] = _encode(compute)
        if len(uuids) == 1:
            (uuid,) = uuids
            total = sum(units for parts in memory.values() for units in parts.values())
            written |= {
                IDX: str(node.indexes[uuid]),
                POD: str(total),
                DEV: str(node.memory_bytes.get(uuid, 0) // self._unit),
                ASSIGNED: "true",
                ASSUME_TIME: time,
            }
        return written

    def given(self, pod: ForeignPod, node: NodeView) -> Mapping[str, Sequence[str]]:
        """Read either form. Raises `UsageError`."""
        if ALLOCATION in pod.annotations:
            return self._allocated(pod, node)
        text = pod.annotations.get(IDX)
        if text is None or text.strip() == str(_NOTHING):
            return {}
        uuids = uuids_by_index(pod, IDX, text, node=node)
        return {
            each.name: uuids
            for each in regular_containers(pod)
            if amount_of(pod, each, self.settings.memory)
        }

    def _allocated(self, pod: ForeignPod, node: NodeView) -> dict[str, Sequence[str]]:
        containers = regular_containers(pod)
        found: dict[str, Sequence[str]] = {}
        for place, devices in _decode(pod, ALLOCATION).items():
            number = number_of(pod, None, f"a container in the annotation {ALLOCATION}", place)
            if number >= len(containers):
                problem = f"the annotation {ALLOCATION} has container {number}, of"
                problem += f" {format_count(len(containers), 'container')}"
                raise refusal(pod, None, problem, hint=PLACE_ANEW)
            uuids = [uuid_at(pod, ALLOCATION, index, node=node) for index in devices]
            found[containers[number].name] = uuids
        return found


def _compute(pod: ForeignPod, container: ForeignContainer, percent: int, *, count: int) -> Compute:
    """Fix the percentage, as cGPU's policy 3 does; weight the rest, as its policy 2 does."""
    weight = DEFAULT_WEIGHT
    text = container.environment.get(_WEIGHT_VARIABLE)
    if text is not None:
        most = MAX_WEIGHT // DEFAULT_WEIGHT
        number = number_of(pod, container.name, f"the variable {_WEIGHT_VARIABLE}", text)
        if not 1 <= number <= most:
            problem = f"the variable {_WEIGHT_VARIABLE} is {number}"
            raise refusal(pod, container.name, problem, hint=f"write a weight from 1 to {most}")
        weight *= number
    if percent:
        part = Fraction(percent, _ALL_PERCENT * count)
        return compute_of(part, part, weight=weight)
    return Compute(weight=weight, is_governed=text is not None)


def _passed_over(pod: ForeignPod, names: list[str]) -> tuple[str, ...]:
    """Say what is not as that system would have it; nobody is isolated less for it."""
    said: list[str] = []
    limited = "memory is limited all the same: without a limit the others' parts would not be safe"
    if pod.node_selector.get(_NO_ISOLATION) == "true":
        said.append(f"the node selector {_NO_ISOLATION}: {limited}")
    if pod.node_selector.get(_SCHEDULE) == "share":
        said.append(f"the node selector {_SCHEDULE}: share: {limited}")
    said += [
        f"the variable {_NO_ISOLATION_VARIABLE} of container {each.name!r}: {limited}"
        for each in pod.containers
        if each.name in names and each.environment.get(_NO_ISOLATION_VARIABLE) == "true"
    ]
    if len(names) > 1:
        said.append("one GPU for all containers: each is placed by itself, as its part fits")
    said += of_earlier_placement(each for each in RECEIPTS if each in pod.annotations)
    return tuple(said)


def _encode(allocation: _Allocation) -> str:
    return msgspec.json.encode(allocation, order="sorted").decode()


def _decode(pod: ForeignPod, name: str) -> _Allocation:
    try:
        return msgspec.json.decode(pod.annotations[name], type=_Allocation)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        problem = f"the annotation {name} is no allocation: {error}"
        raise refusal(pod, None, problem, hint='it is like {"0":{"1":3}}') from error
