# SPDX-License-Identifier: Apache-2.0
"""SharePod objects of KubeShare 1.0: the pod that one of them stands for.

`sharepods.kubeshare.nthu` is a custom resource whose `spec` is that of a pod. KubeShare's device
manager makes the pod. Who serves these objects instead (a controller that watches them, or a
command that reads a file of them) makes the pod that this function returns; all that follows, from
the webhook on, is as for any pod that has KubeShare's annotations.
"""

import copy
from collections.abc import Mapping
from typing import Any, Final

from allotment.dialects.protocol import shown
from allotment.model.errors import UsageError

__all__ = ["GROUP", "KIND", "pod_of_sharepod"]

GROUP: Final = "kubeshare.nthu"
KIND: Final = "SharePod"

_KEPT = ("name", "namespace", "labels", "annotations", "generateName")


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


def _object(document: Mapping[str, Any], field: str) -> Mapping[str, Any]:
    found = document.get(field)
    if found is None:
        return {}
    if not isinstance(found, Mapping):
        message = f"a SharePod's {field} is {shown(str(found))}, which is no object"
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
