# SPDX-License-Identifier: Apache-2.0
"""Aliyun's dialect: the open-source gpushare, and ACK's shared GPU scheduling based on it.

    metadata: {labels: {aliyun.com/gpu-count: "2"}}
    resources: {limits: {aliyun.com/gpu-mem: 8}}

Memory is in GiB (or MiB, with the old plugin's `--memory-unit`), compute in percent of a GPU. Both
are sums over the number of GPUs in the label, and must be divisible by it.
(gpushare-scheduler-extender `docs/userguide.md`; ACK "GPU sharing", 2026-03; annotations from
Koordinator's `pkg/scheduler/plugins/ack`.)
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Final, Literal

import msgspec

from allotment.dialects.foreign.base import (
    ForeignDialect,
    NodeView,
    Translation,
    uuid_at,
    uuids_by_index,
)
from allotment.dialects.foreign.parsing import (
    GIB,
    MIB,
    PERCENT,
    PLACE_ANEW,
    Name,
    amount_of,
    bytes_of,
    check_count,
    compute_of,
    in_mode,
    number_of,
    of_earlier_placement,
    regular_containers,
    units_of,
)
from allotment.dialects.own.protocol import refusal, shown
from allotment.model.clusters import PodBooking
from allotment.model.compute import DEFAULT_WEIGHT, MAX_WEIGHT, WHOLE, Compute
from allotment.model.formats import format_count, meant
from allotment.model.modes import MPS
from allotment.model.pods import ForeignContainer, ForeignPod
from allotment.model.requests import Constraints, ModelRule, Preferences, Request
from allotment.model.structs import prepared, replace

IDX: Final = "ALIYUN_COM_GPU_MEM_IDX"
POD: Final = "ALIYUN_COM_GPU_MEM_POD"
DEV: Final = "ALIYUN_COM_GPU_MEM_DEV"
ASSIGNED: Final = "ALIYUN_COM_GPU_MEM_ASSIGNED"
ASSUME_TIME: Final = "ALIYUN_COM_GPU_MEM_ASSUME_TIME"
ALLOCATION: Final = "scheduler.framework.gpushare.allocation"
ALLOCATION_ASSIGNED: Final = "scheduler.framework.gpushare.assigned"
ALLOCATION_TIME: Final = "scheduler.framework.gpushare.assume-time"
CORE_ALLOCATION: Final = "gpushare.alibabacloud.com/core-percentage"
RESULTS: Final = (
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
"""Annotations that Aliyun writes on a pod, and Allotment writes at binding."""

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
"""Node labels; a pod's selectors for them are read."""
VARIABLES: Final = (_NO_ISOLATION_VARIABLE, _WEIGHT_VARIABLE)

_MPS = "mps"
_SHARING = ("cgpu", "core_mem", "share", _MPS)
_POLICIES = ("binpack", "spread")
_UNITS: Mapping[str, int] = {"GiB": GIB, "MiB": MIB}
_ALL_PERCENT = WHOLE // PERCENT
_NOTHING = -1
"""The index if Aliyun found no GPU for the pod."""

_Allocation = dict[str, dict[str, int]]


class AliyunSettings(
    msgspec.Struct, frozen=True, kw_only=True, rename="camel", forbid_unknown_fields=True
):
    """Cluster settings."""

    memory: Name = "aliyun.com/gpu-mem"
    compute: Name = "aliyun.com/gpu-core.percentage"
    count: Name = "aliyun.com/gpu-count"
    """The pod label with the number of GPUs."""
    memory_unit: Literal["GiB", "MiB"] = "GiB"
    """Unit of `memory`."""
    placement: Literal["", "binpack", "spread"] = ""
    """Over a node's GPUs, for pods without a choice; empty: Allotment's default."""


class AliyunDialect(ForeignDialect):
    """`aliyun.com/gpu-mem` and related keys."""

    name = "aliyun"
    title = "Aliyun's"
    settings_type = AliyunSettings
    records = (ALLOCATION, IDX)
    result_keys = RESULTS

    def __init__(self, settings: AliyunSettings | None = None) -> None:
        self._settings = settings or AliyunSettings()
        self._unit = _UNITS[self._settings.memory_unit]
        self.resources = (self._settings.memory, self._settings.compute, _TFLOPS)
        self.labels = (self._settings.count, _IDLE_LABEL)

    def translate(self, pod: ForeignPod) -> Translation:
        """Divide each container's request among the pod's GPUs. Raises `UsageError`."""
        count = self._count(pod)
        constraints, preferences = self._rules_of(pod)
        names = self._settings
        is_mps = pod.node_selector.get(_SCHEDULE) == _MPS
        notes: list[str] = []
        requests: dict[str, Request] = {}
        for container in pod.containers:
            memory = amount_of(pod, container, names.memory)
            compute = amount_of(pod, container, names.compute)
            self._check(pod, container, memory, compute=compute, count=count)
            if memory:
                part = memory // count
                requests[container.name] = Request(
                    bytes_of(pod, container.name, names.memory, part, unit=self._unit),
                    count=count,
                    compute=_compute(pod, container, compute, count=count),
                    constraints=constraints,
                    preferences=preferences,
                )
                if is_mps:
                    by_mps = _by_mps(pod, container.name, requests[container.name], notes)
                    requests[container.name] = by_mps
        notes += _ignored(pod, requests)
        named = requests if is_mps else ()
        return self.translation(pod, requests, notes=notes, named_modes=named)

    def _count(self, pod: ForeignPod) -> int:
        text = pod.labels.get(self._settings.count)
        if text is None:
            return 1
        count = number_of(pod, None, f"the label {self._settings.count}", text)
        check_count(pod, None, f"the label {self._settings.count}", count)
        return count or 1

    def _check(
        self, pod: ForeignPod, container: ForeignContainer, memory: int, *, compute: int, count: int
    ) -> None:
        names = self._settings
        if amount_of(pod, container, _TFLOPS):
            problem = f"{_TFLOPS} is not supported: the TFLOPS of a GPU are unknown"
            hint = f"ask for percent of a GPU: {names.compute}"
            raise refusal(pod, container.name, problem, hint=hint)
        if compute and not memory:
            problem = f"it asks for {names.compute} without {names.memory}"
            hint = f"add {names.memory}, in {names.memory_unit}: a share needs memory and compute"
            raise refusal(pod, container.name, problem, hint=hint)
        if compute > _ALL_PERCENT * count:
            problem = f"{names.compute} is {compute}, of {format_count(count, 'GPU')}"
            hint = f"100 is one whole GPU: ask for at most {_ALL_PERCENT * count}"
            raise refusal(pod, container.name, problem, hint=hint)
        for name, amount in ((names.memory, memory), (names.compute, compute)):
            if amount % count:
                problem = f"{name} is {amount}, which cannot be divided among the {count} GPUs"
                hint = (
                    f"make {name} a multiple of the label {names.count}: each GPU provides an "
                    "equal part"
                )
                raise refusal(pod, container.name, f"{problem} of the pod", hint=hint)

    def _rules_of(self, pod: ForeignPod) -> tuple[Constraints, Preferences]:
        schedule = pod.node_selector.get(_SCHEDULE)
        if schedule is not None and schedule not in _SHARING:
            problem = (
                f"it selects nodes of {_SCHEDULE}: {shown(schedule)}{meant(schedule, _SHARING)}"
            )
            problem += ", which do not share GPUs"
            hint = f"remove the selector, or write one of: {', '.join(_SHARING)}"
            raise refusal(pod, None, problem, hint=hint)
        policy = pod.node_selector.get(_PLACEMENT, self._settings.placement)
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

    def result_annotations(
        self, pod: ForeignPod, booking: PodBooking, node: NodeView, *, now: float
    ) -> Mapping[str, str]:
        """Write both formats: the framework's, and the old one if it can express the booking.

        The old format has one GPU for a pod. `assigned` is true at once, because no Aliyun plugin
        has to find the pod.
        """
        parts = {container.name: container.devices for container in booking.containers}
        memory: _Allocation = {}
        compute: _Allocation = {}
        uuids: set[str] = set()
        for place, container in enumerate(regular_containers(pod)):
            for part in parts.get(container.name, ()):
                if part.uuid in node.indexes:
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
            total = sum(units for devices in memory.values() for units in devices.values())
            written |= {
                IDX: str(node.indexes[uuid]),
                POD: str(total),
                DEV: str(node.memory_bytes.get(uuid, 0) // self._unit),
                ASSIGNED: "true",
                ASSUME_TIME: time,
            }
        return written

    def given(self, pod: ForeignPod, node: NodeView) -> Mapping[str, Sequence[str]]:
        if ALLOCATION in pod.annotations:
            return self._allocated(pod, node)
        text = pod.annotations.get(IDX)
        if text is None or text.strip() == str(_NOTHING):
            return {}
        uuids = uuids_by_index(pod, IDX, text, node=node)
        return {
            container.name: uuids
            for container in regular_containers(pod)
            if amount_of(pod, container, self._settings.memory)
        }

    def _allocated(self, pod: ForeignPod, node: NodeView) -> dict[str, Sequence[str]]:
        containers = regular_containers(pod)
        given: dict[str, Sequence[str]] = {}
        for place, devices in _decode(pod, ALLOCATION).items():
            number = number_of(pod, None, f"a container in the annotation {ALLOCATION}", place)
            if number >= len(containers):
                problem = f"the annotation {ALLOCATION} has container {number}, of"
                problem += f" {format_count(len(containers), 'container')}"
                raise refusal(pod, None, problem, hint=PLACE_ANEW)
            uuids = [uuid_at(pod, ALLOCATION, index, node=node) for index in devices]
            given[containers[number].name] = uuids
        return given


def _compute(pod: ForeignPod, container: ForeignContainer, percent: int, *, count: int) -> Compute:
    """A fixed percentage, as in cGPU's policy 3; the rest by weight, as in its policy 2."""
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


def _by_mps(pod: ForeignPod, container: str, request: Request, notes: list[str]) -> Request:
    """The request in mode `mps`, which has no weights; `notes` gets a weight."""
    if request.compute.weight != DEFAULT_WEIGHT:
        where = f"the variable {_WEIGHT_VARIABLE} of container {container!r}"
        notes.append(f"{where}: shares do not take turns in mode mps")
        is_governed = request.compute.guarantee > 0
        compute = replace(request.compute, weight=DEFAULT_WEIGHT, is_governed=is_governed)
        request = replace(request, compute=compute)
    hint = f"ask for one GPU, or select nodes of {_SCHEDULE}: cgpu"
    return in_mode(pod, container, request, MPS, hint=hint)


def _ignored(pod: ForeignPod, names: Collection[str]) -> Iterator[str]:
    """Differences from Aliyun's behaviour; none of them weakens isolation."""
    limited = "memory is still limited, to protect the other shares"
    if pod.node_selector.get(_NO_ISOLATION) == "true":
        yield f"the node selector {_NO_ISOLATION}: {limited}"
    if pod.node_selector.get(_SCHEDULE) == "share":
        yield f"the node selector {_SCHEDULE}: share: {limited}"
    for container in pod.containers:
        variable = container.environment.get(_NO_ISOLATION_VARIABLE)
        if variable == "true" and container.name in names:
            where = f"the variable {_NO_ISOLATION_VARIABLE} of container {container.name!r}"
            yield f"{where}: {limited}"
    if len(names) > 1:
        yield "one GPU for all containers: not supported, each container is placed separately"
    yield from of_earlier_placement(key for key in RESULTS if key in pod.annotations)


def _encode(allocation: _Allocation) -> str:
    return msgspec.json.encode(allocation, order="sorted").decode()


def _decode(pod: ForeignPod, name: str) -> _Allocation:
    try:
        return msgspec.json.decode(pod.annotations[name], type=prepared(_Allocation))
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        problem = f"the annotation {name} is not an allocation: {error}"
        raise refusal(pod, None, problem, hint='write it like {"0":{"1":3}}') from error
