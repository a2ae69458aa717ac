# SPDX-License-Identifier: Apache-2.0
"""Reviews of pods as the API server sends them, and their answers as it applies them."""

from __future__ import annotations

import base64
import copy
import json
from typing import Any

from allotment.scheduler.admission.webhook import PodWebhook

Json = dict[str, Any]

GPU, MEMORY, COMPUTE = (f"allotment.dev/{each}" for each in ("gpu", "gpu-memory", "gpu-compute"))
ALIYUN = "aliyun.com/gpu-mem"


def container(name: str = "main", /, *, resources: Json | None = None, **limits: object) -> Json:
    given_limits = {NAMES[each]: value for each, value in limits.items()}
    made = {"limits": given_limits, "requests": dict(given_limits)} if given_limits else {}
    return {"name": name, "image": "i", "resources": made if resources is None else resources}


NAMES = {"gpu": GPU, "memory": MEMORY, "compute": COMPUTE, "aliyun": ALIYUN, "cpu": "cpu"}
NAMES["nvidia"] = "nvidia.com/gpu"


def pod(*containers: Json, annotations: Json | None = None, **fields: object) -> Json:
    labels = fields.pop("labels", {})
    meta = {"name": "train", "namespace": "team", "labels": labels}
    if annotations is not None:
        meta["annotations"] = annotations
    spec = {"containers": list(containers), "schedulerName": "default-scheduler", **fields}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": spec}


def review(document: object, **fields: object) -> Json:
    return {
        "apiVersion": "admission.k8s.io/v1",
        "kind": "AdmissionReview",
        "request": {
            "uid": "review-1",
            "kind": {"group": "", "version": "v1", "kind": "Pod"},
            "resource": {"group": "", "version": "v1", "resource": "pods"},
            "namespace": "team",
            "operation": "CREATE",
            "userInfo": {"username": "someone"},
            "object": document,
            "dryRun": False,
            **fields,
        },
    }


def response(hook: PodWebhook, document: object, **fields: object) -> Json:
    reply = hook.mutate(json.dumps(review(document, **fields)).encode())
    assert reply.status == 200, reply.body
    found = json.loads(reply.body)
    assert (found["apiVersion"], found["kind"]) == ("admission.k8s.io/v1", "AdmissionReview")
    assert found["response"]["uid"] == "review-1"
    return dict(found["response"])


def applied(document: Json, steps: list[Json]) -> Json:
    """Apply a JSON patch, as strictly as the API server does."""
    result = copy.deepcopy(document)
    for step in steps:
        *parents, last = (
            part.replace("~1", "/").replace("~0", "~") for part in step["path"].split("/")[1:]
        )
        target: Any = result
        for part in parents:
            target = target[int(part)] if isinstance(target, list) else target[part]
        if step["op"] == "remove":
            del target[last]
        else:
            assert step["op"] == "add"
            target[last] = step["value"]
    return result


def admitted(hook: PodWebhook, document: Json, **fields: object) -> Json:
    found = response(hook, document, **fields)
    assert found["allowed"], found
    if "patch" not in found:
        return document
    assert found["patchType"] == "JSONPatch"
    return applied(document, json.loads(base64.b64decode(found["patch"])))


def refused(hook: PodWebhook, document: Json, **fields: object) -> tuple[str, int]:
    found = response(hook, document, **fields)
    assert not found["allowed"]
    assert "patch" not in found
    return found["status"]["message"], found["status"]["code"]


def limits(document: Json, place: int = 0, part: str = "limits") -> Json:
    return dict(document["spec"]["containers"][place]["resources"][part])
