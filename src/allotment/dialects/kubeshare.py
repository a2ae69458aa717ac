# SPDX-License-Identifier: Apache-2.0
"""KubeShare's dialects: annotations of a SharePod (1.0), labels of a pod (2.0).

    annotations: {kubeshare/gpu_request: "0.5", kubeshare/gpu_limit: "1.0",
                  kubeshare/gpu_mem: "1073741824"}
    labels: {sharedgpu/gpu_request: "0.5", sharedgpu/gpu_limit: "1.0"}

A request is guaranteed, a limit is the ceiling, both in GPUs; memory is in bytes. All are of the
pod, and each container of it is inside that one share; here a share belongs to one container,
which is the first that is no init container. (KubeShare `README.md` of both; `pkg/scheduler/pod.go`
of 2.0.)
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Final

from allotment.dialects.foreign import (
    ForeignPod,
    NodeView,
    Translated,
    Translation,
    WithoutReceipt,
)
from allotment.dialects.foreign_amounts import (
    MAX_DEVICES,
    bytes_of,
    compute_of,
    decimal_of,
    number_of,
    refuse_whole,
    regular_containers,
    whole_cards,
)
from allotment.dialects.protocol import refusal, shown
from allotment.dialects.values import part_amount
from allotment.model.clusters import PodBooking
from allotment.model.quantities import MemoryAmount
from allotment.model.requests import Constraints, ModelRule, Preferences, Request

__all__ = ["SCHEDULER", "KubeShare2Dialect", "KubeShareDialect"]

_ZERO = re.compile(r"\s*0+(?:\.0*)?\s*|\s*\.0+\s*", re.ASCII)
_VISIBLE: Final = "NVIDIA_VISIBLE_DEVICES"
SCHEDULER: Final = "kubeshare-scheduler"
"""By this name KubeShare 2.0's pods ask for it."""


@dataclass(frozen=True, slots=True)
class _Asked:
    """What both versions say, in GPUs."""

    request: Fraction
    limit: Fraction
    memory: int | None
    """Bytes; None: it does not say."""


class KubeShareDialect(WithoutReceipt):
    """KubeShare 1.0: annotations, as of a SharePod."""

    name: Final = "kubeshare"
    title: Final = "KubeShare's"
    REQUEST: Final = "kubeshare/gpu_request"
    LIMIT: Final = "kubeshare/gpu_limit"
    MEMORY: Final = "kubeshare/gpu_mem"
    GPU_ID: Final = "kubeshare/GPUID"
    AFFINITY: Final = "kubeshare/sched_affinity"
    ANTI_AFFINITY: Final = "kubeshare/sched_anti-affinity"
    EXCLUSION: Final = "kubeshare/sched_exclusion"

    ASKING: Final = (REQUEST, LIMIT, MEMORY)
    """Those by which it is recognised."""
    annotations: Final = (*ASKING, GPU_ID, AFFINITY, ANTI_AFFINITY, EXCLUSION)
    """All that it reads."""

    def recognises(self, pod: ForeignPod) -> tuple[str, ...]:
        """Take a pod with nothing but zeros for one without a GPU, as KubeShare does."""
        return _recognised(pod.annotations, self.ASKING)

    def translate(self, pod: ForeignPod) -> Translation:
        """Make the pod's share that of its first container. Raises `UsageError`."""
        missing = [each for each in self.ASKING if each not in pod.annotations]
        if missing:
            problem = f"it has {', '.join(self.recognises(pod))} without {' and '.join(missing)}"
            raise refusal(pod, None, problem, hint="write all three, or none of them")
        asked = self._asked(pod)
        constraints, passed_over = self._constraints(pod)
        container = _taker(pod, self.REQUEST)
        if asked.limit > 1:
            problem = f"the annotation {self.LIMIT} is {shown(pod.annotations[self.LIMIT])}"
            hint = "write at most 1.0: parts of one GPU are all that this version knows"
            raise refusal(pod, None, problem, hint=hint)
        memory = bytes_of(pod, container, f"the annotation {self.MEMORY}", asked.memory or 0)
        compute = compute_of(asked.request, asked.limit)
        request = Request(memory, compute=compute, constraints=constraints)
        return Translation(
            dialect=self.name,
            containers=(Translated(container=container, request=request),),
            passed_over=(*passed_over, *_beside(pod, container)),
        )

    def _asked(self, pod: ForeignPod) -> _Asked:
        request, limit, memory = (f"the annotation {each}" for each in self.ASKING)
        return _checked(
            pod,
            _Asked(
                decimal_of(pod, None, request, pod.annotations.get(self.REQUEST, "")),
                decimal_of(pod, None, limit, pod.annotations.get(self.LIMIT, "")),
                number_of(pod, None, memory, pod.annotations.get(self.MEMORY, "")),
            ),
            names=(request, limit),
        )

    def _constraints(self, pod: ForeignPod) -> tuple[Constraints, list[str]]:
        """Read the tags. A GPUID is one more: pods of one GPUID are together, on a GPU of theirs.

        KubeShare does not ask its scheduler about a pod that has one, so that it goes before
        `sched_affinity`.
        """
        tags = {
            each: pod.annotations.get(each, "").strip()
            for each in (self.GPU_ID, self.AFFINITY, self.ANTI_AFFINITY, self.EXCLUSION)
        }
        passed_over: list[str] = []
        affinity = tags[self.AFFINITY]
        if tags[self.GPU_ID]:
            if pod.node:
                problem = f"it has {self.GPU_ID} and a node's name, so that no scheduler is asked"
                problem += " which GPU that is"
                hint = "select the node by `nodeSelector: {kubernetes.io/hostname: ...}` instead"
                raise refusal(pod, None, problem, hint=hint)
            if affinity:
                text = f"{self.AFFINITY}: {self.GPU_ID} says already which GPU, as with KubeShare"
                passed_over.append(text)
            affinity = f"GPUID {tags[self.GPU_ID]}"
        constraints = Constraints(
            affinity=affinity,
            anti_affinity=tags[self.ANTI_AFFINITY],
            exclusion=tags[self.EXCLUSION] or None,
        )
        return constraints, passed_over

    def given(self, pod: ForeignPod, node: NodeView) -> Mapping[str, Sequence[str]]:
        """Refuse a pod that runs by KubeShare 1.0: its GPU is in a variable, and in nothing else.

        Whoever makes a pod writes its variables, and no scheduler's name tells these apart.
        """
        del node
        problem = f"it runs by KubeShare 1.0, which writes the GPU into the variable {_VISIBLE},"
        problem += " as anybody may"
        hint = "end it before the node is taken over, or let it end there"
        raise refusal(pod, None, problem, hint=hint)


class KubeShare2Dialect:
    """KubeShare 2.0: labels."""

    name: Final = "kubeshare-2"
    title: Final = "KubeShare 2.0's"
    REQUEST: Final = "sharedgpu/gpu_request"
    LIMIT: Final = "sharedgpu/gpu_limit"
    MEMORY: Final = "sharedgpu/gpu_mem"
    MODEL: Final = "sharedgpu/gpu_model"
    PRIORITY: Final = "sharedgpu/priority"
    GROUP: Final = (
        "sharedgpu/group_name",
        "sharedgpu/pod_group_name",
        "sharedgpu/group_headcount",
        "sharedgpu/group_threshold",
    )
    UUID: Final = "sharedgpu/gpu_uuid"
    """An annotation, as the model and the memory are at the same time; these are what was given."""

    ASKING: Final = (REQUEST, LIMIT, MEMORY)
    """Those by which it is recognised."""
    labels: Final = (*ASKING, MODEL, PRIORITY, *GROUP)
    """All that it reads."""

    def recognises(self, pod: ForeignPod) -> tuple[str, ...]:
        """Take a pod with nothing but zeros for one without a GPU, as KubeShare does."""
        return _recognised(pod.labels, self.ASKING)

    def translate(self, pod: ForeignPod) -> Translation:
        """Make the pod's share, or its whole GPUs, those of its first container.

        Raises `UsageError`.
        """
        asked = self._asked(pod)
        container = _taker(pod, self.LIMIT)
        request = self._request(pod, container, asked)
        model = pod.labels.get(self.MODEL, "").strip()
        constraints = Constraints(models=(ModelRule(model, is_exact=True),) if model else ())
        priority = self._priority(pod)
        is_near = priority > 0 and request.count > 1
        preferences = Preferences(device_policies=("topology",) if is_near else ())
        request = Request(
            request.memory,
            count=request.count,
            compute=request.compute,
            constraints=constraints,
            preferences=preferences,
        )
        passed_over: list[str] = []
        if self.PRIORITY in pod.labels:
            text = f"{self.PRIORITY}: the pod's own priorityClassName says who goes first"
            passed_over.append(text)
        group = [each for each in self.GROUP if each in pod.labels]
        if group:
            text = f"{', '.join(group)}: pods of a group are placed one by one, not all or none"
            passed_over.append(text)
        return Translation(
            dialect=self.name,
            containers=(Translated(container=container, request=request),),
            passed_over=(*passed_over, *_beside(pod, container)),
        )

    def _asked(self, pod: ForeignPod) -> _Asked:
        if self.LIMIT not in pod.labels:
            problem = f"it has {', '.join(self.recognises(pod))} without {self.LIMIT}"
            hint = f"add the label {self.LIMIT}, at least as much as {self.REQUEST}"
            raise refusal(pod, None, problem, hint=hint)
        request, limit, memory = (f"the label {each}" for each in self.ASKING)
        size = pod.labels.get(self.MEMORY)
        return _checked(
            pod,
            _Asked(
                decimal_of(pod, None, request, pod.labels.get(self.REQUEST, "0")),
                decimal_of(pod, None, limit, pod.labels[self.LIMIT]),
                number_of(pod, None, memory, size) or None if size is not None else None,
            ),
            names=(request, limit),
        )

    def _request(self, pod: ForeignPod, container: str, asked: _Asked) -> Request:
        if asked.limit > 1:
            count = int(asked.limit)
            if asked.limit != asked.request or asked.limit.denominator != 1:
                problem = f"{self.LIMIT} is {shown(pod.labels[self.LIMIT])}, and {self.REQUEST} is "
                problem += shown(pod.labels.get(self.REQUEST, "0"))
                hint = "above one GPU both are the same whole number"
                raise refusal(pod, None, problem, hint=hint)
            if count > MAX_DEVICES:
                problem = f"the label {self.LIMIT} is {count} GPUs of one node"
                raise refusal(pod, None, problem, hint="ask for as many as a node has")
            return whole_cards(count)
        memory: MemoryAmount
        if asked.memory is not None:
            memory = bytes_of(pod, container, f"the label {self.MEMORY}", asked.memory)
        elif asked.request:
            memory = part_amount(asked.request)
        else:
            problem = f"it has neither {self.MEMORY} nor a {self.REQUEST} above 0"
            hint = f"add the label {self.MEMORY}, in bytes: a part has a limit of memory"
            raise refusal(pod, None, problem, hint=hint)
        return Request(memory, compute=compute_of(asked.request, asked.limit))

    def _priority(self, pod: ForeignPod) -> int:
        text = pod.labels.get(self.PRIORITY, "").strip() or "0"
        if text == "-1":
            return 0
        priority = number_of(pod, None, f"the label {self.PRIORITY}", text)
        if priority > 100:  # noqa: PLR2004 - KubeShare's own bound
            problem = f"the label {self.PRIORITY} is {priority}"
            raise refusal(pod, None, problem, hint="write 0 to 100")
        return priority

    def receipt(
        self, pod: ForeignPod, booking: PodBooking, node: NodeView, *, now: float
    ) -> Mapping[str, str]:
        """Write GPU, model and memory. There are no cells and no ports."""
        del pod, now
        devices = [part for each in booking.containers for part in each.devices]
        if not devices:
            return {}
        models = {node.models.get(part.uuid, "") for part in devices} - {""}
        written = {
            self.UUID: ",".join(part.uuid for part in devices),
            self.MEMORY: str(sum(part.memory for part in devices)),
        }
        if len(models) == 1:
            written[self.MODEL] = models.pop().replace(" ", "-")
        return written

    def given(self, pod: ForeignPod, node: NodeView) -> Mapping[str, Sequence[str]]:
        """Refuse a pod that runs by KubeShare 2.0.

        Its scheduler ends the pod that it was asked about and creates another, with the record: so
        records cannot be kept from those who create pods, or have a controller do so.
        """
        del node
        if self.UUID not in pod.annotations or pod.scheduler != SCHEDULER:
            return {}
        problem = f"it runs by KubeShare 2.0, which creates pods with the annotation {self.UUID},"
        problem += " as anybody may"
        hint = "end it before the node is taken over, or let it end there"
        raise refusal(pod, None, problem, hint=hint)


def _recognised(there: Mapping[str, str], names: tuple[str, ...]) -> tuple[str, ...]:
    found = tuple(each for each in names if each in there)
    return () if all(_ZERO.fullmatch(there[each]) for each in found) else found


def _checked(pod: ForeignPod, asked: _Asked, *, names: tuple[str, str]) -> _Asked:
    request, limit = names
    if not asked.limit:
        problem = f"{limit} is 0: nothing would ever run"
        raise refusal(pod, None, problem, hint="write at least as much as the request, like 1.0")
    if asked.request > asked.limit:
        problem = f"{request} is more than {limit}"
        raise refusal(pod, None, problem, hint="raise the limit, or lower the request")
    return asked


def _taker(pod: ForeignPod, name: str) -> str:
    """Return the container that has the pod's share. Raises `UsageError`."""
    containers = regular_containers(pod)
    if not containers:
        problem = f"it has {name} and no container"
        raise refusal(pod, None, problem, hint="add a container")
    refuse_whole(pod, containers[:1], (name,))
    return containers[0].name


def _beside(pod: ForeignPod, name: str) -> tuple[str, ...]:
    others = [repr(each.name) for each in pod.containers if each.name != name]
    if not others:
        return ()
    text = f"one GPU for all containers: container {name!r} has it, {', '.join(others)} none"
    return (text,)
