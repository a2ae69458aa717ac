# SPDX-License-Identifier: Apache-2.0
"""SharePod objects of KubeShare 1.0: the pod that one of them stands for, and its status.

`sharepods.kubeshare.nthu` is a custom resource whose `spec` is that of a pod. KubeShare's device
manager makes the pod, under the same name, and copies the pod's status and metadata into the
SharePod's (`newPod`, `updateSharePodStatus` of `pkg/devicemanager/controller.go`, 1.0). Here these
are functions; `scheduler/sharepods.py` does it. All that follows, from the webhook on, is as for
any pod that has KubeShare's annotations.
"""

import copy
from collections.abc import Mapping
from typing import Any, Final

from allotment.dialects.decisions import placement_of, read_booking
from allotment.dialects.placements import PLACEMENT
from allotment.dialects.protocol import shown
from allotment.model.errors import UsageError
from allotment.model.pods import PodUid

__all__ = ["GROUP", "KIND", "is_to_be_made", "pod_of_sharepod", "refused_status", "status_of"]

GROUP: Final = "kubeshare.nthu"
KIND: Final = "SharePod"

_KEPT: Final = ("name", "namespace", "labels", "annotations")
_LEFT_OUT: Final = frozenset({PLACEMENT, "kubectl.kubernetes.io/last-applied-configuration"})
"""Annotations that are about the SharePod and not about its pod. A placement is what was decided
for a pod that is there already."""
_ENDED: Final = frozenset({"Succeeded", "Failed"})
_MOST_MESSAGE: Final = 1024
_DEVICE: Final = "BoundDeviceID"


def pod_of_sharepod(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return the pod of a SharePod, as JSON has both. Raises `UsageError`.

    It has the same name, labels and annotations, and belongs to the SharePod, so that it is deleted
    with it. A node's name becomes an affinity to the node: a pod that has the name itself is never
    shown to a scheduler, who has to choose the GPU.
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
        problem = f"{where}: it has no {'spec' if name else 'name'}"
        raise UsageError(problem, hint="give the whole object, as the API server has it")
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
    """Tell whether a SharePod that has no pod is to have one: not if it has run to its end.

    By the phase that its pod was seen in last, as KubeShare does.
    """
    told = status.get("PodStatus")
    phase = told.get("phase") if isinstance(told, Mapping) else None
    policy = spec.get("restartPolicy") if isinstance(spec, Mapping) else None
    if policy == "Never":
        return phase not in _ENDED
    return not (policy == "OnFailure" and phase == "Succeeded")


def status_of(pod: Mapping[str, Any], before: Mapping[str, Any]) -> dict[str, Any]:
    """Return the status of a SharePod whose pod is this one, as the API server has it.

    The GPU is that of the pod's placement. Of a pod that has none it is what was known `before` of
    the same pod: KubeShare may have bound it.
    """
    metadata = _object(pod, "metadata")
    told = before.get("PodObjectMeta")
    is_same = isinstance(told, Mapping) and told.get("uid") == metadata.get("uid")
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
    """Return the status of a SharePod whose pod could not be made; `reason` is one word."""
    told = message if len(message) <= _MOST_MESSAGE else f"{message[: _MOST_MESSAGE - 3]}..."
    return {"PodStatus": {"phase": "Pending", "reason": reason, "message": told}, _DEVICE: ""}


def _device(pod: Mapping[str, Any]) -> str:
    """Return the UUIDs of a pod's GPUs, comma between them; empty: it has none yet."""
    metadata, spec = _object(pod, "metadata"), _object(pod, "spec")
    text = placement_of(metadata.get("annotations"))
    if not text:
        return ""
    uid, node = PodUid(str(metadata.get("uid", ""))), str(spec.get("nodeName", ""))
    try:
        booking = read_booking(text, uid=uid, node=node)
    except UsageError:
        return ""  # it is none of this pod's: the agent does not obey it either
    return ",".join(
        dict.fromkeys(part.uuid for each in booking.containers for part in each.devices)
    )


def _object(document: Mapping[str, Any], field: str) -> Mapping[str, Any]:
    found = document.get(field)
    if found is None:
        return {}
    if not isinstance(found, Mapping):
        message = f"its {field} is {shown(str(found))}, which is no object"
        raise UsageError(message, hint="give the whole object, as the API server has it")
    return found


def _on_node(affinity: object, node: str, where: str) -> dict[str, Any]:
    """Add the node to each alternative that there is: they are joined by or."""
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
        problem = f"{where}: its node affinity is not of the form that Kubernetes gives it"
        raise UsageError(problem, hint="correct spec.affinity.nodeAffinity") from error
    return result
