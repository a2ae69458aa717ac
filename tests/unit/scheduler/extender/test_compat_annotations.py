# SPDX-License-Identifier: Apache-2.0
"""What is written on a pod at binding does not keep its copy, or its backup, from being created."""

from __future__ import annotations

import base64
import copy
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from foreign_pods import NODE, booking

from allotment.dialects.foreign.base import DIALECT
from allotment.dialects.foreign.settings import NAMES, foreign_dialects
from allotment.dialects.foreign.translate import wanted_of
from allotment.dialects.own.placement import PLACEMENT
from allotment.model.clusters import PlacedDevice
from allotment.scheduler.admission.pod_patch import read_pod
from allotment.scheduler.admission.rules import all_keys, matcher
from allotment.scheduler.admission.webhook import PodWebhook

Json = dict[str, Any]
DIALECTS = {each.name: each for each in foreign_dialects()}
IS_RECORD = matcher(all_keys(DIALECTS.values()).records)
DEVICES = [PlacedDevice(each, 1 << 30, 1000) for each in NODE.indexes]


def reviewed(document: Json) -> Json:
    request = {
        "uid": "r",
        "operation": "CREATE",
        "namespace": "team",
        "kind": {"group": "", "version": "v1", "kind": "Pod"},
        "resource": {"group": "", "version": "v1", "resource": "pods"},
        "object": document,
    }
    body = {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": request}
    hook = PodWebhook(tuple(DIALECTS.values()))
    return dict(json.loads(hook.mutate(json.dumps(body).encode()).body)["response"])


def created(document: Json) -> Json:
    """What the API server keeps of it."""
    found = reviewed(document)
    assert found["allowed"], found["status"]["message"]
    result = copy.deepcopy(document)
    for step in json.loads(base64.b64decode(found["patch"])) if "patch" in found else ():
        parts = [each.replace("~1", "/").replace("~0", "~") for each in step["path"].split("/")[1:]]
        target: Any = result
        for part in parts[:-1]:
            target = target[int(part)] if isinstance(target, list) else target[part]
        if step["op"] == "remove":
            del target[parts[-1]]
        else:
            target[parts[-1]] = step["value"]
    return result


def bound(document: Json) -> Json:
    """The same after it was bound: with a placement and its system's result."""
    subject = read_pod(json.dumps(document).encode(), namespace="team").pod
    given = booking(**{
        each.name: DEVICES[: each.request.count] for each in wanted_of(subject)
    })  # fmt: skip
    dialect = DIALECTS[document["metadata"]["annotations"][DIALECT]]
    result = dialect.result_annotations(subject, given, NODE, now=0)
    found = copy.deepcopy(document)
    found["metadata"]["annotations"] |= {**result, PLACEMENT: "{}"}
    found["spec"]["nodeName"] = "node-1"
    return found


def translated(folder: Path) -> dict[str, Json]:
    """The examples of all dialects, as they were created, by file and name."""
    found = {}
    for path in sorted(folder.glob("*.yaml")):
        for document in yaml.safe_load_all(path.read_text("utf-8")):
            if document["kind"] == "Pod" and reviewed(document)["allowed"]:
                pod = created(document)
                if DIALECT in pod["metadata"].get("annotations", {}):
                    found[f"{path.stem}/{pod['metadata']['name']}"] = pod
    return found


def test_a_copy_of_a_pod_that_was_bound_is_created_in_every_dialect(root: Path) -> None:
    pods = translated(root / "examples" / "dialects")
    spoken = {each["metadata"]["annotations"][DIALECT] for each in pods.values()}
    # NVIDIA's and Deepomatic's stay as they are, where nobody has set it otherwise.
    assert spoken == {*NAMES} - {"nvidia", "deepomatic"}
    for name, pod in pods.items():
        running = bound(pod)
        again = created(running)
        left = [each for each in again["metadata"]["annotations"] if IS_RECORD(each)]
        assert not left, name
        assert PLACEMENT not in again["metadata"]["annotations"], name
        assert again["spec"]["containers"] == pod["spec"]["containers"], name
        said = reviewed(running)["warnings"]
        records = [each for each in running["metadata"]["annotations"] if IS_RECORD(each)]
        for key in (PLACEMENT, *records):
            assert any(f"dropped the annotation {key}" in each for each in said), (name, key)
        assert created(again) == again, name


def test_what_is_to_be_removed_from_a_changed_copy_is_all_that_has_to_go(root: Path) -> None:
    pods = translated(root / "examples" / "dialects")
    changed = bound(next(each for name, each in pods.items() if name.startswith("nvfractions/")))
    key = next(each for each in changed["metadata"]["annotations"] if each.endswith(".limit"))
    changed["metadata"]["annotations"][key] = "9Gi"
    found = reviewed(changed)
    assert not found["allowed"]
    _, _, hint = found["status"]["message"].partition("hint: remove ")
    removed = [each.strip() for each in hint.partition(", so that")[0].split(",")]
    for name in removed:
        changed["metadata"]["annotations"].pop(name, None)
        for container in changed["spec"]["containers"]:
            for part in container.get("resources", {}).values():
                part.pop(name, None)
    del changed["spec"]["nodeName"]
    assert created(changed)["metadata"]["annotations"][DIALECT] == "kai"


@pytest.mark.parametrize("name", NAMES)
def test_no_record_is_left_out_of_a_pod_that_was_not_translated(name: str) -> None:
    """The API server refuses that one: it says who may write it."""
    for record in all_keys([DIALECTS[name]]).records:
        document = {
            "metadata": {"name": "p", "annotations": {record.replace("*", "x"): "GPU-a"}},
            "spec": {"containers": [{"name": "c"}]},
        }
        assert created(document) == document
