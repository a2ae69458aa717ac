# SPDX-License-Identifier: Apache-2.0
"""KubeShare's dialects: annotations of a SharePod (1.0), labels of a pod (2.0).

    annotations: {kubeshare/gpu_request: "0.5", kubeshare/gpu_limit: "1.0",
                  kubeshare/gpu_mem: "1073741824"}
    labels: {sharedgpu/gpu_request: "0.5", sharedgpu/gpu_limit: "1.0"}

The request is a guarantee and the limit a ceiling, in GPUs; memory is in bytes. They apply to the
pod as a whole; here the share belongs to the first regular container. (KubeShare `README.md` of
both; `pkg/scheduler/pod.go` of 2.0.)
"""

import copy
import re
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any, ClassVar, Final

import msgspec

from allotment.dialects.foreign.base import ForeignDialect, NodeView, Translation, unproven
from allotment.dialects.foreign.parsing import (
    bytes_of,
    check_count,
    compute_of,
    decimal_of,
    number_of,
    refuse_whole,
    regular_containers,
    whole_cards,
)
from allotment.dialects.own.annotations import part_amount
from allotment.dialects.own.placement import PLACEMENT, placement_of, read_booking
from allotment.dialects.own.protocol import refusal, shown
from allotment.model.clusters import PodBooking
from allotment.model.errors import UsageError
from allotment.model.formats import shortened
from allotment.model.pods import ForeignPod, PodUid
from allotment.model.requests import Constraints, ModelRule, Preferences, Request
from allotment.model.structs import replace

GROUP: Final = "kubeshare.nthu"
KIND: Final = "SharePod"

_KEPT: Final = ("name", "namespace", "labels", "annotations")
_LEFT_OUT: Final = frozenset({PLACEMENT, "kubectl.kubernetes.io/last-applied-configuration"})
"""Annotations of the SharePod that its pod does not inherit. A placement belongs to an existing
pod."""
_ENDED: Final = frozenset({"Succeeded", "Failed"})
_MOST_MESSAGE: Final = 1024
_DEVICE: Final = "BoundDeviceID"


def pod_of_sharepod(document: Mapping[str, Any]) -> dict[str, Any]:
    """The pod of a SharePod, both as JSON. Raises `UsageError`.

    It has the same name, labels and annotations, and the SharePod as its owner, so both are deleted
    together. A node name becomes a node affinity, because Kubernetes skips the scheduler for pods
    with a node name.
    """
    metadata = _object(document, "metadata")
    name = str(metadata.get("name", ""))
    where = f"SharePod {metadata.get('namespace', 'default')}/{name or '?'}"
    version = document.get("apiVersion")
    if document.get("kind") != KIND or str(version).partition("/")[0] != GROUP:
        problem = f"{where}: it is {shown(str(document.get('kind')))} of {shown(str(version))}"
        raise UsageError(problem, hint=f"give an object of kind {KIND} and group {GROUP}")
    spec = _object(document, "spec")
    if not name or not spec:
        problem = f"{where}: it lacks a {'spec' if name else 'name'}"
        raise UsageError(problem, hint="give the whole object, as the API server returns it")
    kept = {each: copy.deepcopy(metadata[each]) for each in _KEPT if each in metadata}
    if isinstance(annotations := kept.get("annotations"), dict):
        kept["annotations"] = {
            key: text for key, text in annotations.items() if key not in _LEFT_OUT
        }
    if metadata.get("uid"):
        kept["ownerReferences"] = [
            {
                "apiVersion": version,
                "kind": KIND,
                "name": name,
                "uid": metadata["uid"],
                "controller": True,
                "blockOwnerDeletion": True,
            }
        ]
    pod_spec = copy.deepcopy(dict(spec))
    node = pod_spec.pop("nodeName", None)
    if node:
        pod_spec["affinity"] = _on_node(pod_spec.get("affinity"), str(node), where)
    return {"apiVersion": "v1", "kind": "Pod", "metadata": kept, "spec": pod_spec}


def is_to_be_made(spec: object, status: Mapping[str, Any]) -> bool:
    """False if the SharePod's pod has already run to its end.

    Decided by the last seen phase of its pod, as in KubeShare.
    """
    pod = status.get("PodStatus")
    phase = pod.get("phase") if isinstance(pod, Mapping) else None
    policy = spec.get("restartPolicy") if isinstance(spec, Mapping) else None
    if policy == "Never":
        return phase not in _ENDED
    return not (policy == "OnFailure" and phase == "Succeeded")


def status_of(pod: Mapping[str, Any], before: Mapping[str, Any]) -> dict[str, Any]:
    """The status of a SharePod with this pod, as JSON.

    The GPU is from the pod's placement. Without one, the GPU in `before` is kept: KubeShare may
    have bound the pod.
    """
    metadata = _object(pod, "metadata")
    known = before.get("PodObjectMeta")
    is_same = isinstance(known, Mapping) and known.get("uid") == metadata.get("uid")
    status = {
        "PodStatus": copy.deepcopy(dict(_object(pod, "status"))),
        "PodObjectMeta": {
            key: copy.deepcopy(value) for key, value in metadata.items() if key != "managedFields"
        },
        _DEVICE: _device(pod) or (before.get(_DEVICE, "") if is_same else ""),
    }
    if is_same and "PodManagerPort" in before:
        status["PodManagerPort"] = before["PodManagerPort"]
    return status


def refused_status(reason: str, message: str) -> dict[str, Any]:
    status = {"phase": "Pending", "reason": reason, "message": shortened(message, _MOST_MESSAGE)}
    return {"PodStatus": status, _DEVICE: ""}


def _device(pod: Mapping[str, Any]) -> str:
    """The UUIDs of a pod's GPUs, comma-separated; empty: none yet."""
    metadata, spec = _object(pod, "metadata"), _object(pod, "spec")
    text = placement_of(metadata.get("annotations"))
    if not text:
        return ""
    uid, node = PodUid(str(metadata.get("uid", ""))), str(spec.get("nodeName", ""))
    try:
        booking = read_booking(text, uid=uid, node=node)
    except UsageError:
        return ""  # not this pod's placement: the agent ignores it too
    return ",".join(
        dict.fromkeys(part.uuid for container in booking.containers for part in container.devices)
    )


def _object(document: Mapping[str, Any], field: str) -> Mapping[str, Any]:
    found = document.get(field)
    if found is None:
        return {}
    if not isinstance(found, Mapping):
        message = f"its {field} is {shown(str(found))}, which is not an object"
        raise UsageError(message, hint="give the whole object, as the API server returns it")
    return found


def _on_node(affinity: object, node: str, where: str) -> dict[str, Any]:
    """Add the node to each alternative: alternatives are joined by OR."""
    result = copy.deepcopy(dict(affinity)) if isinstance(affinity, Mapping) else {}
    required = "requiredDuringSchedulingIgnoredDuringExecution"
    try:
        selector = result.setdefault("nodeAffinity", {}).setdefault(required, {})
        terms = selector.setdefault("nodeSelectorTerms", []) or [{}]
        selector["nodeSelectorTerms"] = [
            {
                **term,
                "matchFields": [
                    *term.get("matchFields", ()),
                    {"key": "metadata.name", "operator": "In", "values": [node]},
                ],
            }
            for term in terms
        ]
    except (AttributeError, TypeError) as error:
        problem = f"{where}: its node affinity is not valid for Kubernetes"
        raise UsageError(problem, hint="correct spec.affinity.nodeAffinity") from error
    return result


_ZERO = re.compile(r"\s*0+(?:\.0*)?\s*|\s*\.0+\s*", re.ASCII)
_VISIBLE: Final = "NVIDIA_VISIBLE_DEVICES"
SCHEDULER: Final = "kubeshare-scheduler"
"""Resource of KubeShare 2.0's pods."""


class _Amounts(msgspec.Struct, frozen=True):
    """The amounts of both versions, in GPUs."""

    request: Fraction
    limit: Fraction
    memory: int | None
    """Bytes; None: not set."""


class _KubeShare(ForeignDialect):
    """The common part of both versions: three keys, and a share for the pod's first container."""

    asking: ClassVar[tuple[str, str, str]]
    """Request, limit and memory: the keys by which a pod is recognised."""
    kind: ClassVar[str]
    """What its keys are: `annotation` or `label`."""

    def keys(self, pod: ForeignPod) -> Mapping[str, str]:
        """The pod's keys of that kind, with their texts."""
        return pod.annotations if self.kind == "annotation" else pod.labels

    def recognises(self, pod: ForeignPod) -> tuple[str, ...]:
        """A pod with only zeros has no GPU, as in KubeShare."""
        keys = self.keys(pod)
        names = tuple(name for name in self.asking if name in keys)
        return () if all(_ZERO.fullmatch(keys[name]) for name in names) else names

    def amounts(self, pod: ForeignPod) -> _Amounts:
        """Raises `UsageError`."""
        keys = self.keys(pod)
        request, limit, memory = (f"the {self.kind} {name}" for name in self.asking)
        texts = [keys.get(name) for name in self.asking]
        low = decimal_of(pod, None, request, "0" if texts[0] is None else texts[0])
        high = decimal_of(pod, None, limit, texts[1] or "")
        size = None if texts[2] is None else number_of(pod, None, memory, texts[2])
        if not high:
            problem = f"{limit} is 0: the pod could never run"
            hint = "write at least as much as the request, like 1.0"
            raise refusal(pod, None, problem, hint=hint)
        if low > high:
            problem = f"{request} is more than {limit}"
            raise refusal(pod, None, problem, hint="raise the limit, or lower the request")
        return _Amounts(low, high, size)

    def for_first(
        self, pod: ForeignPod, container: str, request: Request, notes: list[str]
    ) -> Translation:
        """The translation with the pod's share for one container."""
        others = [repr(each.name) for each in pod.containers if each.name != container]
        if others:
            none = f"container {container!r} gets it, {', '.join(others)} none"
            notes = [*notes, f"one GPU for all containers: {none}"]
        return self.translation(pod, {container: request}, notes=notes)


class KubeShareDialect(_KubeShare):
    """KubeShare 1.0: annotations, as of a SharePod."""

    name = "kubeshare"
    title = "KubeShare's"
    REQUEST: Final = "kubeshare/gpu_request"
    LIMIT: Final = "kubeshare/gpu_limit"
    MEMORY: Final = "kubeshare/gpu_mem"
    GPU_ID: Final = "kubeshare/GPUID"
    AFFINITY: Final = "kubeshare/sched_affinity"
    ANTI_AFFINITY: Final = "kubeshare/sched_anti-affinity"
    EXCLUSION: Final = "kubeshare/sched_exclusion"

    kind = "annotation"
    asking = (REQUEST, LIMIT, MEMORY)
    annotations = (*asking, GPU_ID, AFFINITY, ANTI_AFFINITY, EXCLUSION)

    def translate(self, pod: ForeignPod) -> Translation:
        missing = [key for key in self.asking if key not in pod.annotations]
        if missing:
            problem = f"it has {', '.join(self.recognises(pod))} without {' and '.join(missing)}"
            raise refusal(pod, None, problem, hint="write all three, or none of them")
        amounts = self.amounts(pod)
        constraints, notes = self._constraints(pod)
        container = _taker(pod, self.REQUEST)
        if amounts.limit > 1:
            problem = f"the annotation {self.LIMIT} is {shown(pod.annotations[self.LIMIT])}"
            hint = "write at most 1.0: this version supports parts of one GPU only"
            raise refusal(pod, None, problem, hint=hint)
        memory = bytes_of(pod, container, f"the annotation {self.MEMORY}", amounts.memory or 0)
        compute = compute_of(amounts.request, amounts.limit)
        request = Request(memory, compute=compute, constraints=constraints)
        return self.for_first(pod, container, request, notes)

    def _constraints(self, pod: ForeignPod) -> tuple[Constraints, list[str]]:
        """Read the tags. Pods with one GPUID share one GPU of their own.

        As in KubeShare, a GPUID takes precedence over `sched_affinity`.
        """
        tags = {key: pod.annotations.get(key, "").strip() for key in self.annotations}
        notes: list[str] = []
        affinity = tags[self.AFFINITY]
        if tags[self.GPU_ID]:
            if pod.node:
                problem = f"it has {self.GPU_ID} and a node's name, so no scheduler can choose"
                problem += " the GPU"
                hint = "select the node by `nodeSelector: {kubernetes.io/hostname: ...}` instead"
                raise refusal(pod, None, problem, hint=hint)
            if affinity:
                text = f"{self.AFFINITY}: {self.GPU_ID} already names the GPU, as with KubeShare"
                notes.append(text)
            affinity = f"GPUID {tags[self.GPU_ID]}"
        constraints = Constraints(
            affinity=affinity,
            anti_affinity=tags[self.ANTI_AFFINITY],
            exclusion=tags[self.EXCLUSION] or None,
        )
        return constraints, notes

    def given(self, pod: ForeignPod, node: NodeView) -> Mapping[str, Sequence[str]]:
        """Refuse a pod that runs by KubeShare 1.0: only a variable names its GPU.

        The pod's author controls variables, and the scheduler's name does not prove the origin.
        """
        del node
        problem = f"KubeShare 1.0 runs it and records the GPU in the variable {_VISIBLE},"
        raise unproven(pod, f"{problem} which any user can forge")


class KubeShare2Dialect(_KubeShare):
    """KubeShare 2.0: labels."""

    name = "kubeshare-2"
    title = "KubeShare 2.0's"
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
        "sharedgpu/min_available",
    )
    UUID: Final = "sharedgpu/gpu_uuid"
    """An annotation, like model and memory: these record an assignment."""

    kind = "label"
    asking = (REQUEST, LIMIT, MEMORY)
    labels = (*asking, MODEL, PRIORITY, *GROUP)
    result_keys = (UUID, MEMORY, MODEL)

    def translate(self, pod: ForeignPod) -> Translation:
        if self.LIMIT not in pod.labels:
            problem = f"it has {', '.join(self.recognises(pod))} without {self.LIMIT}"
            hint = f"add the label {self.LIMIT}, at least as much as {self.REQUEST}"
            raise refusal(pod, None, problem, hint=hint)
        amounts = self.amounts(pod)
        container = _taker(pod, self.LIMIT)
        request = self._request(pod, container, amounts)
        model = pod.labels.get(self.MODEL, "").strip()
        is_near = self._priority(pod) > 0 and request.count > 1
        request = replace(
            request,
            constraints=Constraints(models=(ModelRule(model, is_exact=True),) if model else ()),
            preferences=Preferences(device_policies=("topology",) if is_near else ()),
        )
        notes: list[str] = []
        if self.PRIORITY in pod.labels:
            notes.append(f"{self.PRIORITY}: the pod's own priorityClassName sets its priority")
        group = [key for key in self.GROUP if key in pod.labels]
        if group:
            text = f"{', '.join(group)}: pods of a group are placed one by one, not all or none"
            notes.append(text)
        return self.for_first(pod, container, request, notes)

    def _request(self, pod: ForeignPod, container: str, amounts: _Amounts) -> Request:
        if amounts.limit > 1:
            if amounts.limit != amounts.request or amounts.limit.denominator != 1:
                problem = f"{self.LIMIT} is {shown(pod.labels[self.LIMIT])}, and {self.REQUEST} is "
                problem += shown(pod.labels.get(self.REQUEST, "0"))
                hint = "above one GPU both are the same whole number"
                raise refusal(pod, None, problem, hint=hint)
            count = int(amounts.limit)
            check_count(pod, None, f"the label {self.LIMIT}", count)
            return whole_cards(count)
        if amounts.memory:
            memory = bytes_of(pod, container, f"the label {self.MEMORY}", amounts.memory)
        elif amounts.request:
            memory = part_amount(amounts.request)
        else:
            problem = f"it has neither {self.MEMORY} nor a {self.REQUEST} above 0"
            hint = f"add the label {self.MEMORY}, in bytes: a share needs a memory limit"
            raise refusal(pod, None, problem, hint=hint)
        return Request(memory, compute=compute_of(amounts.request, amounts.limit))

    def _priority(self, pod: ForeignPod) -> int:
        text = pod.labels.get(self.PRIORITY, "").strip() or "0"
        if text == "-1":
            return 0
        priority = number_of(pod, None, f"the label {self.PRIORITY}", text)
        if priority > 100:  # noqa: PLR2004 - KubeShare's own bound
            problem = f"the label {self.PRIORITY} is {priority}"
            raise refusal(pod, None, problem, hint="write 0 to 100")
        return priority

    def result_annotations(
        self, pod: ForeignPod, booking: PodBooking, node: NodeView, *, now: float
    ) -> Mapping[str, str]:
        del pod, now
        devices = [part for container in booking.containers for part in container.devices]
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

        Its scheduler replaces the pod by a new one with the record, so any creator of pods could
        forge it.
        """
        del node
        if self.UUID not in pod.annotations or pod.scheduler != SCHEDULER:
            return {}
        problem = f"KubeShare 2.0 runs it and creates pods with the annotation {self.UUID},"
        raise unproven(pod, f"{problem} which any user can forge")


def _taker(pod: ForeignPod, name: str) -> str:
    """The container that gets the pod's share. Raises `UsageError`."""
    containers = regular_containers(pod)
    if not containers:
        problem = f"it has {name} but no container"
        raise refusal(pod, None, problem, hint="add a container")
    refuse_whole(pod, containers[:1], (name,))
    return containers[0].name
