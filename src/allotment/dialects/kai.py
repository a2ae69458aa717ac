# SPDX-License-Identifier: Apache-2.0
"""The dialect of Run:ai and KAI-Scheduler: `gpu-fraction`, `gpu-memory`, and NvFractions.

    annotations: {gpu-fraction: "0.5"}
    annotations: {gpu-memory: "2000", gpu-fraction-num-devices: "2"}
    annotations: {nvidia.com/container.trainer.gpu-memory.request: 4Gi}

The first two are of one container of the pod, the first or a named one: a part of each GPU's
memory, or MiB of it. NvFractions name the container in the key, and have a limit above the request.
None of them says anything of compute. A limit is reserved whole here: what nobody else counts on
cannot be taken away again. Words like `gpu-memory` are anybody's: they are KAI's on a pod that
names its scheduler or one of its queues. (KAI-Scheduler `docs/gpu-sharing`;
kai-scheduler/gpu-fractioning.)
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Final

import msgspec

from allotment.dialects.foreign import ForeignPod, Marks, NodeView, Translated, Translation
from allotment.dialects.foreign_amounts import (
    MAX_DEVICES,
    MIB,
    Name,
    SchedulerName,
    bytes_of,
    compute_of,
    decimal_of,
    number_of,
    refuse_whole,
    regular_containers,
    units_of,
)
from allotment.dialects.modes import in_modes, unsuited
from allotment.dialects.protocol import meant, refusal, shown
from allotment.dialects.values import part_amount
from allotment.model.clusters import PodBooking
from allotment.model.compute import Compute
from allotment.model.errors import QuantityError
from allotment.model.formats import format_bytes
from allotment.model.quantities import MemoryAmount, parse_whole
from allotment.model.requests import MPS as MPS_MODE
from allotment.model.requests import SOFT, Request

__all__ = ["FIELDS", "QUEUE", "RECEIVED", "KaiDialect", "KaiSettings"]

FRACTION: Final = "gpu-fraction"
MEMORY: Final = "gpu-memory"
DEVICES: Final = "gpu-fraction-num-devices"
CONTAINER: Final = "gpu-fraction-container-name"
MPS: Final = "mps"
SHARING_MODE: Final = "kai.scheduler/gpu-compute-sharing-mode"
QUEUE: Final = "kai.scheduler/queue"
RECEIVED: Final = "received-resource-type"

_PLAIN: Final = (FRACTION, MEMORY, DEVICES)
"""Those that ask for memory without a container's name in the key."""
_GROUP_LABEL: Final = "runai-gpu-group"
_MEMORY_REQUEST: Final = "gpu-memory.request"
_MEMORY_LIMIT: Final = "gpu-memory.limit"
_MODE: Final = "gpu-compute.mode"
_GIVEN: Final = "gpus.devices"
FIELDS = (_MEMORY_REQUEST, _MEMORY_LIMIT, _MODE, _GIVEN)
_TURNS: Final = "time-slicing"
_SHARING: Final[Mapping[str, str]] = {_TURNS: SOFT, "sm-sharing": MPS_MODE}
_MPS: Final[Mapping[str, str]] = {"true": MPS_MODE, "false": SOFT}


class KaiSettings(
    msgspec.Struct, frozen=True, kw_only=True, rename="camel", forbid_unknown_fields=True
):
    """What a cluster may have set otherwise."""

    prefix: Name = "nvidia.com/container."
    """Of NvFractions' annotations: a container's name follows."""
    guarantees_compute: bool = False
    """Does `gpu-fraction` guarantee that part of the GPU's time, too? Run:ai's did, before 3.0."""
    scheduler_names: frozenset[SchedulerName] = frozenset({"kai-scheduler", "runai-scheduler"})
    """A pod that asks for one of these schedulers is KAI's."""
    queue_labels: frozenset[Name] = frozenset({QUEUE, "runai/queue"})
    """So is one with one of these labels, whoever schedules it."""


@dataclass(frozen=True, slots=True)
class _Field:
    """One annotation of NvFractions."""

    key: str
    container: str
    field: str
    text: str


class KaiDialect:
    """`gpu-fraction` and its kin."""

    name: Final = "kai"
    title: Final = "KAI's"
    records: Final = (f"*.{_GIVEN}",)

    def __init__(self, settings: KaiSettings | None = None) -> None:
        """Take what is configurable."""
        self.settings = settings or KaiSettings()

    @property
    def marks(self) -> Marks:
        """Return by what a pod is known to be KAI's."""
        return Marks(schedulers=self.settings.scheduler_names, labels=self.settings.queue_labels)

    @property
    def annotations(self) -> tuple[str, ...]:
        """Return the annotations that it reads; one that ends with `*` is the beginning of some."""
        return (*_PLAIN, CONTAINER, MPS, SHARING_MODE, f"{self.settings.prefix}*")

    def recognises(self, pod: ForeignPod) -> tuple[str, ...]:
        """Go by what asks for something: a label for a queue, or `mps`, does not by itself."""
        if not self.marks.are_on(pod):
            return ()
        plain = [each for each in _PLAIN if each in pod.annotations]
        return (*plain, *(each.key for each in self._fields(pod) if each.field != _GIVEN))

    def translate(self, pod: ForeignPod) -> Translation:
        """Read either style. Raises `UsageError`."""
        fields = self._fields(pod)
        self._check(pod, fields)
        count = self._count(pod)
        wanted = [each for each in fields if each.field in {_MEMORY_REQUEST, _MEMORY_LIMIT}]
        passed_over: list[str] = []
        requests: dict[str, Request] = {}
        if wanted:
            for name in dict.fromkeys(each.container for each in wanted):
                memory, said = self._limit(pod, name, wanted)
                passed_over += said
                requests[name] = Request(memory, count=count)
        else:
            request = self._plain(pod, count)
            requests[self._container(pod)] = request
        passed_over += (
            f"the label {each}: it stays on the pod, and no queue orders or limits pods"
            for each in sorted(self.settings.queue_labels & pod.labels.keys())
        )
        modes = {name: self._mode(pod, fields, name) for name in requests}
        return Translation(
            dialect=self.name,
            containers=tuple(
                Translated(
                    container=each.name,
                    request=_in_mode(pod, each.name, requests[each.name], modes[each.name]),
                    names_mode=bool(modes[each.name]),
                )
                for each in pod.containers
                if each.name in requests
            ),
            passed_over=tuple(passed_over),
        )

    def _fields(self, pod: ForeignPod) -> list[_Field]:
        """Take the annotations with the prefix apart, in order; names have no dots in them."""
        found = []
        for key in sorted(pod.annotations):
            if key.startswith(self.settings.prefix):
                name, _, field = key.removeprefix(self.settings.prefix).partition(".")
                found.append(_Field(key, name, field, pod.annotations[key]))
        return found

    def _check(self, pod: ForeignPod, fields: list[_Field]) -> None:
        """Refuse what KAI refuses too, and what cannot be done here."""
        names = [each.name for each in pod.containers]
        for each in fields:
            if each.field not in FIELDS:
                problem = (
                    f"the annotation {shown(each.key)} is not known{meant(each.field, FIELDS)}"
                )
                hint = f"remove it, or write one of: {', '.join(FIELDS[:3])}"
                raise refusal(pod, None, problem, hint=hint)
            if each.container not in names:
                problem = f"the annotation {shown(each.key)} names a container that the pod has not"
                hint = f"its containers are: {', '.join(names) or 'none'}"
                raise refusal(pod, None, problem + meant(each.container, names), hint=hint)
            if each.field == _GIVEN and not pod.node:
                problem = f"the annotation {shown(each.key)} says what was given, and nothing was"
                hint = "remove it: the scheduler writes it"
                raise refusal(pod, each.container, problem, hint=hint)
            if each.field == _MODE:
                _check_mode(pod, each.container, each.key, each.text)
        if SHARING_MODE in pod.annotations:
            _check_mode(pod, None, SHARING_MODE, pod.annotations[SHARING_MODE])
        # KAI wants it so of all containers: its scheduler gives a pod one kind of GPUs.
        refuse_whole(pod, pod.containers, self.recognises(pod))

    def _mode(self, pod: ForeignPod, fields: Iterable[_Field], container: str) -> str:
        """Return how a container's part is to be shared; empty: that is left open."""
        said = {
            each.key: _SHARING[each.text.strip()]
            for each in fields
            if each.field == _MODE and each.container == container
        }
        if SHARING_MODE in pod.annotations and not said:
            said[SHARING_MODE] = _SHARING[pod.annotations[SHARING_MODE].strip()]
        text = pod.annotations.get(MPS)
        if text is not None:
            if text.strip().lower() not in _MPS:
                problem = f"the annotation {MPS} is {shown(text)}"
                raise refusal(pod, None, problem, hint="write true or false, or remove it")
            said[MPS] = _MPS[text.strip().lower()]
        modes = sorted(set(said.values()))
        if len(modes) > 1:
            problem = f"the annotations {' and '.join(said)} say that parts take turns, and that"
            raise refusal(
                pod, container, f"{problem} they do not", hint=f"keep one of them: remove {MPS}"
            )
        return modes[0] if modes else ""

    def _count(self, pod: ForeignPod) -> int:
        text = pod.annotations.get(DEVICES)
        if text is None:
            return 1
        count = number_of(pod, None, f"the annotation {DEVICES}", text)
        if not 1 <= count <= MAX_DEVICES:
            problem = f"the annotation {DEVICES} is {count}"
            raise refusal(pod, None, problem, hint="write the number of GPUs, at least 1")
        return count

    def _container(self, pod: ForeignPod) -> str:
        """Return the container that a plain annotation is of: the named, or the first regular."""
        name = pod.annotations.get(CONTAINER)
        if name is None:
            first = regular_containers(pod)
            if not first:
                problem = "it asks for a part of a GPU and has no container"
                raise refusal(pod, None, problem, hint="add a container")
            return first[0].name
        names = [each.name for each in pod.containers]
        if name not in names:
            problem = f"the annotation {CONTAINER} is {shown(name)}, which the pod has not"
            hint = f"its containers are: {', '.join(names) or 'none'}"
            raise refusal(pod, None, problem + meant(name, names), hint=hint)
        return name

    def _plain(self, pod: ForeignPod, count: int) -> Request:
        fraction, memory = pod.annotations.get(FRACTION), pod.annotations.get(MEMORY)
        if fraction is not None and memory is not None:
            problem = f"it has the annotations {FRACTION} and {MEMORY}"
            raise refusal(pod, None, problem, hint="keep one of them: both say how much memory")
        if fraction is not None:
            part = self._fraction(pod, fraction)
            compute = compute_of(part, 1) if self.settings.guarantees_compute else Compute()
            return Request(part_amount(part), count=count, compute=compute)
        if memory is None:
            problem = f"{', '.join(self.recognises(pod))} does not say how much of a GPU's memory"
            raise refusal(pod, None, problem, hint=f"add the annotation {FRACTION} or {MEMORY}")
        return Request(self._mebibytes(pod, memory), count=count)

    def _fraction(self, pod: ForeignPod, text: str) -> Fraction:
        part = decimal_of(pod, None, f"the annotation {FRACTION}", text)
        if 0 < part < 1:
            return part
        problem = f"the annotation {FRACTION} is {shown(text)}, not between 0 and 1"
        hint = "for a whole GPU ask for `nvidia.com/gpu: 1` in the limits" if part >= 1 else ""
        raise refusal(pod, None, problem, hint=hint or "write a part of a GPU, like 0.5")

    def _mebibytes(self, pod: ForeignPod, text: str) -> MemoryAmount:
        name = f"the annotation {MEMORY}"
        number = number_of(pod, None, name, text)
        if number == 0:
            raise refusal(pod, None, f"{name} is 0", hint="write at least 1: it is a number of MiB")
        return bytes_of(pod, self._container(pod), name, number, unit=MIB)

    def _limit(
        self, pod: ForeignPod, name: str, fields: list[_Field]
    ) -> tuple[MemoryAmount, list[str]]:
        """Return what a container may have at most, rounded up to MiB, and what that passes over.

        Where one of request and limit is missing it is as the other.
        """
        mine = {each.field: each for each in fields if each.container == name}
        sizes = {field: _quantity(pod, each) for field, each in mine.items()}
        request, limit = sizes.get(_MEMORY_REQUEST), sizes.get(_MEMORY_LIMIT)
        size = limit if limit is not None else request or 0
        chosen = pod.annotations.get(CONTAINER, name)
        if chosen != name or FRACTION in pod.annotations or MEMORY in pod.annotations:
            other = next(each for each in (FRACTION, MEMORY, CONTAINER) if each in pod.annotations)
            key = next(iter(mine.values())).key
            problem = f"it has the annotations {shown(key)} and {other}"
            raise refusal(pod, name, problem, hint=f"keep the first: remove {other}")
        if DEVICES in pod.annotations and len({each.container for each in fields}) > 1:
            problem = f"the annotation {DEVICES} does not say of which container"
            raise refusal(pod, None, problem, hint="let one container of the pod have GPUs")
        if request is not None and limit is not None and request > limit:
            problem = f"{_MEMORY_REQUEST} ({format_bytes(request)}) is more than {_MEMORY_LIMIT}"
            hint = "raise the limit, or lower the request"
            raise refusal(pod, name, f"{problem} ({format_bytes(limit)})", hint=hint)
        said = []
        if request is not None and request != size:
            text = f"{mine[_MEMORY_REQUEST].key}: the limit, {format_bytes(size)}, is reserved"
            said.append(f"{text} whole, so that it can always be had")
        return MemoryAmount(format_bytes(size), size_bytes=size), said

    def receipt(
        self, pod: ForeignPod, booking: PodBooking, node: NodeView, *, now: float
    ) -> Mapping[str, str]:
        """Write what kind it was, and by container which GPUs, where NvFractions asked."""
        del node, now
        if not booking.containers:
            return {}
        named = {each.container for each in self._fields(pod)}
        return {RECEIVED: "Fraction"} | {
            f"{self.settings.prefix}{each.name}.{_GIVEN}": ",".join(
                part.uuid for part in each.devices
            )
            for each in booking.containers
            if each.name in named
        }

    def given(self, pod: ForeignPod, node: NodeView) -> Mapping[str, Sequence[str]]:
        """Read what NvFractions were given; of the plain ones another pod knows which GPU it is.

        A label is anybody's to write at any time, a scheduler's name is not: that alone counts.
        """
        if pod.scheduler not in self.settings.scheduler_names:
            return {}
        fields = [each for each in self._fields(pod) if each.field == _GIVEN and each.text.strip()]
        if fields:
            return {each.container: _uuids(each, node) for each in fields}
        groups = [each for each in pod.labels if each.partition("/")[0] == _GROUP_LABEL]
        if not groups and pod.annotations.get(RECEIVED) != "Fraction":
            return {}
        problem = "it has a part of a GPU by a reservation pod, which alone knows of which"
        hint = "end it before the node is taken over, or let it end there"
        raise refusal(pod, None, problem, hint=hint)


def _check_mode(pod: ForeignPod, container: str | None, key: str, text: str) -> None:
    mode = text.strip()
    if mode not in _SHARING:
        problem = f"the annotation {shown(key)} is {shown(mode)}{meant(mode, _SHARING)}"
        hint = f"write {' or '.join(_SHARING)}, or remove the annotation"
        raise refusal(pod, container, problem, hint=hint)


def _in_mode(pod: ForeignPod, container: str, request: Request, mode: str) -> Request:
    if not mode:
        return request
    if why := unsuited(request, mode):
        problem = f"its part is to be shared by MPS, and there {why}"
        hint = f"ask for one GPU, or for {_TURNS}"
        raise refusal(pod, container, problem, hint=hint)
    return in_modes(request, (mode,))


def _quantity(pod: ForeignPod, field: _Field) -> int:
    """Parse a Kubernetes quantity of at least 1Mi, rounded up to MiB."""
    name = f"the annotation {shown(field.key)}"
    try:
        size = parse_whole(field.text.strip())
    except QuantityError as error:
        problem = f"{name}: {error.message}"
        raise refusal(pod, field.container, problem, hint="write an amount like 4Gi") from error
    amount = bytes_of(pod, field.container, name, size)
    return units_of(amount.size_bytes or 0, MIB) * MIB


def _uuids(field: _Field, node: NodeView) -> list[str]:
    """Read UUIDs, or indexes: the container toolkit takes both."""
    indexes = {str(index): uuid for uuid, index in node.indexes.items()}
    return [indexes.get(each.strip(), each.strip()) for each in field.text.split(",")]
