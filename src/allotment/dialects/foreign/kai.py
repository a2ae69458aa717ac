# SPDX-License-Identifier: Apache-2.0
"""The dialect of Run:ai and KAI-Scheduler: `gpu-fraction`, `gpu-memory`, and NvFractions.

    annotations: {gpu-fraction: "0.5"}
    annotations: {gpu-memory: "2000", gpu-memory-limit: "4000", gpu-fraction-num-devices: "2"}
    annotations: {nvidia.com/container.trainer.gpu-memory.request: 4Gi}

The first two apply to one container: a part of each GPU's memory, or MiB. NvFractions name the
container. Limits above the request (Run:ai's, NvFractions') are reserved in full. Generic keys like
`gpu-memory` are KAI's only with its scheduler or queue label. (KAI-Scheduler `docs/gpu-sharing` and
`gpu_request_validator.go`; Run:ai "Dynamic GPU fractions"; kai-scheduler/gpu-fractioning.)
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import msgspec

from allotment.dialects.foreign.base import (
    ForeignDialect,
    Marks,
    NodeView,
    Translation,
    unproven,
)
from allotment.dialects.foreign.parsing import (
    MIB,
    Name,
    SchedulerName,
    bytes_of,
    check_count,
    compute_of,
    decimal_of,
    in_mode,
    number_of,
    refuse_whole,
    regular_containers,
    units_of,
    word_of,
)
from allotment.dialects.own.annotations import part_amount
from allotment.dialects.own.protocol import refusal, shown
from allotment.model.clusters import PodBooking
from allotment.model.compute import Compute
from allotment.model.errors import QuantityError
from allotment.model.formats import format_bytes, meant
from allotment.model.modes import MPS as MPS_MODE
from allotment.model.modes import SOFT
from allotment.model.pods import ForeignPod
from allotment.model.quantities import MemoryAmount, parse_whole
from allotment.model.requests import Request

FRACTION: Final = "gpu-fraction"
FRACTION_LIMIT: Final = "gpu-fraction-limit"
MEMORY: Final = "gpu-memory"
MEMORY_LIMIT: Final = "gpu-memory-limit"
DEVICES: Final = "gpu-fraction-num-devices"
CONTAINER: Final = "gpu-fraction-container-name"
MPS: Final = "mps"
SHARING_MODE: Final = "kai.scheduler/gpu-compute-sharing-mode"
QUEUE: Final = "kai.scheduler/queue"
RECEIVED: Final = "received-resource-type"

_LIMITS: Final[Mapping[str, str]] = {FRACTION: FRACTION_LIMIT, MEMORY: MEMORY_LIMIT}
"""Run:ai's."""
_AMOUNTS: Final = (FRACTION, MEMORY, FRACTION_LIMIT, MEMORY_LIMIT)
_PLAIN: Final = (*_AMOUNTS, DEVICES)
"""Annotations for memory without a container's name."""
_GROUP_LABEL: Final = "runai-gpu-group"
_MEMORY_REQUEST: Final = "gpu-memory.request"
_MEMORY_LIMIT: Final = "gpu-memory.limit"
_MODE: Final = "gpu-compute.mode"
_GIVEN: Final = "gpus.devices"
FIELDS = (_MEMORY_REQUEST, _MEMORY_LIMIT, _MODE, _GIVEN)
_TURNS: Final = "time-slicing"
_SHARING: Final[Mapping[str, str]] = {_TURNS: SOFT, "sm-sharing": MPS_MODE}
_MPS: Final[Mapping[str, str]] = {"true": MPS_MODE, "false": SOFT}
_MORE_THAN_LIMIT: Final = "raise the limit, or lower the request"


class KaiSettings(
    msgspec.Struct, frozen=True, kw_only=True, rename="camel", forbid_unknown_fields=True
):
    """Cluster settings."""

    prefix: Name = "nvidia.com/container."
    """Prefix of NvFractions' annotations; a container's name follows."""
    guarantees_compute: bool = False
    """Whether `gpu-fraction` also guarantees that part of GPU time, as in Run:ai before 3.0."""
    scheduler_names: frozenset[SchedulerName] = frozenset({"kai-scheduler", "runai-scheduler"})
    """A pod with one of these schedulers is KAI's."""
    queue_labels: frozenset[Name] = frozenset({QUEUE, "runai/queue"})
    """A pod with one of these labels is KAI's, with any scheduler."""


class _Field(msgspec.Struct, frozen=True):
    """One annotation of NvFractions."""

    key: str
    container: str
    field: str
    text: str


class KaiDialect(ForeignDialect):
    """`gpu-fraction` and related annotations."""

    name = "kai"
    title = "KAI's"
    settings_type = KaiSettings
    records = (f"*.{_GIVEN}",)
    result_keys = (RECEIVED, f"*.{_GIVEN}")

    def __init__(self, settings: KaiSettings | None = None) -> None:
        self._settings = settings = settings or KaiSettings()
        self._marks = Marks(schedulers=settings.scheduler_names, labels=settings.queue_labels)
        self.marks = self._marks
        self.annotations = (*_PLAIN, CONTAINER, MPS, SHARING_MODE, f"{settings.prefix}*")

    def recognises(self, pod: ForeignPod) -> tuple[str, ...]:
        """Only keys that ask for GPUs count; a queue label alone does not.

        `mps: "true"` alone counts, to be refused.
        """
        if not self._marks.are_on(pod):
            return ()
        plain = [key for key in _PLAIN if key in pod.annotations]
        fields = [field.key for field in self._fields(pod) if field.field != _GIVEN]
        is_mps = pod.annotations.get(MPS, "").strip().lower() == "true"
        return (*plain, *fields) or ((MPS,) if is_mps else ())

    def translate(self, pod: ForeignPod) -> Translation:
        if self.recognises(pod) == (MPS,):
            problem = f"the annotation {MPS} is 'true', and it asks for no part of a GPU"
            hint = f"add the annotation {FRACTION} or {MEMORY}, or remove {MPS}"
            raise refusal(pod, None, problem, hint=hint)
        fields = self._fields(pod)
        self._check(pod, fields)
        count = self._count(pod)
        amounts = [field for field in fields if field.field in {_MEMORY_REQUEST, _MEMORY_LIMIT}]
        notes: list[str] = []
        requests: dict[str, Request] = {}
        for name in dict.fromkeys(field.container for field in amounts):
            requests[name] = Request(self._limit(pod, name, amounts, notes), count=count)
        if not amounts:
            requests[self._container(pod)] = self._plain(pod, count, notes)
        modes = {name: mode for name in requests if (mode := self._mode(pod, fields, name))}
        for name, mode in modes.items():
            hint = f"ask for one GPU, or for {_TURNS}"
            requests[name] = in_mode(pod, name, requests[name], mode, hint=hint)
        notes += (
            f"the label {label} has no effect: Allotment has no queues"
            for label in sorted(self._settings.queue_labels & pod.labels.keys())
        )
        return self.translation(pod, requests, notes=notes, named_modes=modes)

    def _fields(self, pod: ForeignPod) -> list[_Field]:
        """Split the prefixed annotations, in order; container names contain no dots."""
        found = []
        for key in sorted(pod.annotations):
            if key.startswith(self._settings.prefix):
                name, _, field = key.removeprefix(self._settings.prefix).partition(".")
                found.append(_Field(key, name, field, pod.annotations[key]))
        return found

    def _check(self, pod: ForeignPod, fields: list[_Field]) -> None:
        """Refuse what KAI refuses, and what Allotment cannot do."""
        for each in fields:
            if each.field not in FIELDS:
                problem = f"the annotation {shown(each.key)} is unknown{meant(each.field, FIELDS)}"
                hint = f"remove it, or write one of: {', '.join(FIELDS[:3])}"
                raise refusal(pod, None, problem, hint=hint)
            _check_name(pod, f"{shown(each.key)} names container", each.container)
            if each.field == _GIVEN and not pod.node:
                problem = (
                    f"the annotation {shown(each.key)} records an allocation, but the pod has none"
                )
                hint = "remove it: only the scheduler may write it"
                raise refusal(pod, each.container, problem, hint=hint)
            if each.field == _MODE:
                word_of(pod, shown(each.key), each.text, _SHARING, container=each.container)
        if SHARING_MODE in pod.annotations:
            word_of(pod, shown(SHARING_MODE), pod.annotations[SHARING_MODE], _SHARING)
        # As in KAI, for all containers: its scheduler gives a pod GPUs of one kind.
        refuse_whole(pod, pod.containers, self.recognises(pod))

    def _mode(self, pod: ForeignPod, fields: Iterable[_Field], container: str) -> str:
        named = {
            field.key: _SHARING[field.text.strip()]
            for field in fields
            if field.field == _MODE and field.container == container
        }
        if SHARING_MODE in pod.annotations and not named:
            named[SHARING_MODE] = _SHARING[pod.annotations[SHARING_MODE].strip()]
        text = pod.annotations.get(MPS)
        if text is not None:
            named[MPS] = _MPS[word_of(pod, MPS, text.lower(), _MPS)]
        modes = sorted(set(named.values()))
        if len(modes) > 1:
            problem = f"the annotations {' and '.join(named)} contradict each other: parts take"
            hint = f"keep one of them: remove {MPS}"
            raise refusal(pod, container, f"{problem} turns, and they run at once", hint=hint)
        return modes[0] if modes else ""

    def _count(self, pod: ForeignPod) -> int:
        text = pod.annotations.get(DEVICES)
        if text is None:
            return 1
        count = number_of(pod, None, f"the annotation {DEVICES}", text)
        check_count(pod, None, f"the annotation {DEVICES}", count)
        if count == 0:
            problem = f"the annotation {DEVICES} is 0"
            raise refusal(pod, None, problem, hint="write the number of GPUs, at least 1")
        return count

    def _container(self, pod: ForeignPod) -> str:
        """The container of a plain annotation: the named one, or the first regular one."""
        name = pod.annotations.get(CONTAINER)
        if name is None:
            first = regular_containers(pod)
            if not first:
                problem = "it asks for a part of a GPU but has no container"
                raise refusal(pod, None, problem, hint="add a container")
            return first[0].name
        _check_name(pod, f"{CONTAINER} is", name)
        return name

    def _plain(self, pod: ForeignPod, count: int, notes: list[str]) -> Request:
        """The request of the annotations without a container's name; `notes` as in `_limit`."""
        keys = [key for key in (FRACTION, MEMORY) if key in pod.annotations]
        if len(keys) > 1:
            problem = f"it has the annotations {FRACTION} and {MEMORY}"
            raise refusal(pod, None, problem, hint="keep one of them: both set the memory")
        if not keys:
            problem = f"{', '.join(self.recognises(pod))} sets no amount of GPU memory"
            raise refusal(pod, None, problem, hint=f"add the annotation {FRACTION} or {MEMORY}")
        (key,) = keys
        (other,) = {MEMORY_LIMIT, FRACTION_LIMIT} - {_LIMITS[key]}
        if other in pod.annotations:
            problem = f"it has the annotations {key} and {other}"
            raise refusal(pod, None, problem, hint=f"write {_LIMITS[key]}, or remove {other}")
        request = limit = self._amount(pod, key)
        if _LIMITS[key] in pod.annotations:
            limit = self._amount(pod, _LIMITS[key])
        if (limit.part or 0, limit.size_bytes or 0) < (request.part or 0, request.size_bytes or 0):
            problem = f"{key} ({request}) is more than {_LIMITS[key]} ({limit})"
            raise refusal(pod, None, problem, hint=_MORE_THAN_LIMIT)
        if limit != request:
            notes.append(_in_full(key, limit))
        is_guaranteed = self._settings.guarantees_compute and request.part is not None
        compute = compute_of(request.part or 0, 1) if is_guaranteed else Compute()
        return Request(limit, count=count, compute=compute)

    def _amount(self, pod: ForeignPod, key: str) -> MemoryAmount:
        """One of the plain annotations: a part of a GPU, or MiB."""
        name, text = f"the annotation {key}", pod.annotations[key]
        if key in {MEMORY, MEMORY_LIMIT}:
            number = number_of(pod, None, name, text)
            if number == 0:
                hint = "write at least 1: it is a number of MiB"
                raise refusal(pod, None, f"{name} is 0", hint=hint)
            return bytes_of(pod, self._container(pod), name, number, unit=MIB)
        part = decimal_of(pod, None, name, text)
        if 0 < part < 1 or (part == 1 and key == FRACTION_LIMIT):
            return part_amount(part)
        problem = f"{name} is {shown(text)}, not between 0 and 1"
        hint = "for a whole GPU ask for `nvidia.com/gpu: 1` in the limits" if part >= 1 else ""
        raise refusal(pod, None, problem, hint=hint or "write a part of a GPU, like 0.5")

    def _limit(
        self, pod: ForeignPod, name: str, fields: list[_Field], notes: list[str]
    ) -> MemoryAmount:
        """A container's memory limit, rounded up to MiB; `notes` gets what differs from KAI.

        A missing request or limit equals the other one.
        """
        mine = {each.field: each for each in fields if each.container == name}
        sizes = {field: _quantity(pod, each) for field, each in mine.items()}
        request, limit = sizes.get(_MEMORY_REQUEST), sizes.get(_MEMORY_LIMIT)
        size = limit if limit is not None else request or 0
        chosen = pod.annotations.get(CONTAINER, name)
        others = [each for each in _AMOUNTS if each in pod.annotations]
        if chosen != name or others:
            other = next(iter(others), CONTAINER)
            key = next(iter(mine.values())).key
            problem = f"it has the annotations {shown(key)} and {other}"
            raise refusal(pod, name, problem, hint=f"keep the first: remove {other}")
        if DEVICES in pod.annotations and len({each.container for each in fields}) > 1:
            problem = f"the annotation {DEVICES} is ambiguous: several containers ask for GPUs"
            raise refusal(pod, None, problem, hint="let only one container of the pod ask for GPUs")
        if request is not None and limit is not None and request > limit:
            problem = f"{_MEMORY_REQUEST} ({format_bytes(request)}) is more than {_MEMORY_LIMIT}"
            problem += f" ({format_bytes(limit)})"
            raise refusal(pod, name, problem, hint=_MORE_THAN_LIMIT)
        memory = MemoryAmount(format_bytes(size), size_bytes=size)
        if request is not None and request != size:
            notes.append(_in_full(mine[_MEMORY_REQUEST].key, memory))
        return memory

    def result_annotations(
        self, pod: ForeignPod, booking: PodBooking, node: NodeView, *, now: float
    ) -> Mapping[str, str]:
        del node, now
        if not booking.containers:
            return {}
        named = {field.container for field in self._fields(pod)}
        return {RECEIVED: "Fraction"} | {
            f"{self._settings.prefix}{each.name}.{_GIVEN}": ",".join(
                part.uuid for part in each.devices
            )
            for each in booking.containers
            if each.name in named
        }

    def given(self, pod: ForeignPod, node: NodeView) -> Mapping[str, Sequence[str]]:
        """Read NvFractions' GPUs; for plain annotations only another pod has the GPU.

        Only the scheduler's name counts: any user may write a label at any time.
        """
        if pod.scheduler not in self._settings.scheduler_names:
            return {}
        fields = [
            field for field in self._fields(pod) if field.field == _GIVEN and field.text.strip()
        ]
        if fields:
            return {field.container: _uuids(field, node) for field in fields}
        groups = [label for label in pod.labels if label.partition("/")[0] == _GROUP_LABEL]
        if not groups and pod.annotations.get(RECEIVED) != "Fraction":
            return {}
        problem = "it holds a part of a GPU through a reservation pod, and only that pod"
        raise unproven(pod, f"{problem} names the GPU")


def _in_full(key: str, limit: MemoryAmount) -> str:
    return f"{key}: the limit, {limit}, is reserved in full, so that the limit is always available"


def _check_name(pod: ForeignPod, source: str, name: str) -> None:
    names = [container.name for container in pod.containers]
    if name not in names:
        problem = f"the annotation {source} {shown(name)}, which is not in the pod"
        hint = f"its containers are: {', '.join(names) or 'none'}"
        raise refusal(pod, None, problem + meant(name, names), hint=hint)


def _quantity(pod: ForeignPod, field: _Field) -> int:
    """A Kubernetes quantity of at least 1Mi, rounded up to MiB."""
    name = f"the annotation {shown(field.key)}"
    try:
        size = parse_whole(field.text.strip())
    except QuantityError as error:
        problem = f"{name}: {error.message}"
        raise refusal(pod, field.container, problem, hint="write an amount like 4Gi") from error
    amount = bytes_of(pod, field.container, name, size)
    return units_of(amount.size_bytes or 0, MIB) * MIB


def _uuids(field: _Field, node: NodeView) -> list[str]:
    """UUIDs or indexes: the container toolkit accepts both."""
    indexes = {str(index): uuid for uuid, index in node.indexes.items()}
    return [indexes.get(each.strip(), each.strip()) for each in field.text.split(",")]
