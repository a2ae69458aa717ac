# SPDX-License-Identifier: Apache-2.0
"""Reviews of claims, their templates and classes: wrong parameters are refused by their paths."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pod_reviews import review

from allotment.scheduler.admission import claims

Json = dict[str, Any]

DRIVER = "gpu.allotment.dev"
WHERE = {
    "resourceclaims": "spec.devices.config",
    "resourceclaimtemplates": "spec.spec.devices.config",
    "deviceclasses": "spec.config",
}


def parameters(driver: str = DRIVER, **fields: object) -> Json:
    content = {"apiVersion": "allotment.dev/v1", "kind": "ShareConfig", **fields}
    return {"opaque": {"driver": driver, "parameters": content}}


def written(resource: str, *config: Json) -> Json:
    """An object of a kind that has configurations, by its resource."""
    inner: Json = {"config": list(config)}
    spec = {
        "resourceclaims": {"devices": inner},
        "resourceclaimtemplates": {"spec": {"devices": inner}},
        "deviceclasses": inner,
    }[resource]
    return {"metadata": {"name": "quarter"}, "spec": spec}


def answer(resource: str, document: object, /, **fields: object) -> Json:
    asked = {
        "resource": {"group": "resource.k8s.io", "version": "v1", "resource": resource},
        "namespace": "" if resource == "deviceclasses" else "team",
        **fields,
    }
    reply = claims.review(json.dumps(review(document, **asked)).encode())
    assert reply.status == 200
    found: Json = json.loads(reply.body)["response"]
    assert "patch" not in found
    return found


def refusal(resource: str, document: object, /, **fields: object) -> str:
    found = answer(resource, document, **fields)
    assert (found["allowed"], found["status"]["code"]) == (False, 422)
    return str(found["status"]["message"])


@pytest.mark.parametrize("resource", WHERE)
def test_good_parameters_are_allowed(resource: str) -> None:
    good = parameters(mode=["soft", "mps"], compute=":80", weight=200, oversubscribe=True)
    assert answer(resource, written(resource, good, parameters()))["allowed"]
    assert answer(resource, written(resource))["allowed"]
    assert answer(resource, {"metadata": {"name": "a"}, "spec": {}})["allowed"]


@pytest.mark.parametrize("resource", WHERE)
def test_a_wrong_field_is_refused_with_its_path(resource: str) -> None:
    said = refusal(resource, written(resource, parameters(), parameters(wieght=200)))
    assert f": {WHERE[resource]}[1].opaque.parameters.wieght is unknown" in said
    assert "did you mean 'weight'?" in said
    shown = "quarter" if resource == "deviceclasses" else "team/quarter"
    assert said.startswith(f"{claims.KINDS[resource]} {shown}: ")


def test_all_errors_are_in_one_answer() -> None:
    wrong = written(
        "resourceclaims",
        parameters(weight="heavy", mode="sfot"),
        parameters(wieght=1, clas="latency"),
        {"opaque": {"driver": DRIVER, "parameters": {"apiVersion": "v2"}}},
    )
    said = refusal("resourceclaims", wrong)
    paths = [".weight: ", ".mode: ", ".wieght is unknown", ".clas is unknown", " has apiVersion"]
    places = [0, 0, 1, 1, 2]
    for place, path in zip(places, paths, strict=True):
        assert f"spec.devices.config[{place}].opaque.parameters{path}" in said
    assert said.count("the fields are: ") == 1


@pytest.mark.parametrize("operation", ["CREATE", "UPDATE"])
def test_a_name_that_the_server_will_make_is_shown(operation: str) -> None:
    document = written("resourceclaims", parameters(wieght=1))
    document["metadata"] = {"generateName": "pod-gpu-"}
    said = refusal("resourceclaims", document, operation=operation)
    assert said.startswith("ResourceClaim team/pod-gpu-: ")


def test_parameters_of_other_drivers_are_not_read() -> None:
    others = parameters("gpu.nvidia.com", wieght=1)
    assert answer("resourceclaims", written("resourceclaims", others))["allowed"]
    mixed = written("resourceclaims", others, parameters(wieght=1))
    assert "config[1]" in refusal("resourceclaims", mixed)


@pytest.mark.parametrize("resource", ["allotment.dev/gpu", "allotment.dev/gpu-memory"])
def test_a_class_for_resources_of_the_device_plugin_is_refused(resource: str) -> None:
    """Its claims would be counted beside the pods that Allotment's scheduler places."""
    found = written("deviceclasses", parameters(wieght=1))
    found["spec"]["extendedResourceName"] = resource
    said = refusal("deviceclasses", found)
    assert said.startswith(f"DeviceClass quarter: spec.extendedResourceName: {resource} is counted")
    assert "wieght is unknown" in said
    assert "deviceclass.resource.kubernetes.io/quarter: 1" in said
    found["spec"] = {"extendedResourceName": "nvidia.com/gpu"}
    assert answer("deviceclasses", found)["allowed"]


@pytest.mark.parametrize("content", [None, 3, "soft", [], {"spec": 3}, {"spec": {"config": {}}}])
def test_what_is_no_claim_is_refused_and_no_defect(content: object) -> None:
    found = answer("resourceclaims", content)
    assert found["allowed"] or "no readable configuration" in found["status"]["message"]


@pytest.mark.parametrize(
    "fields",
    [
        {"resource": {"group": "", "version": "v1", "resource": "pods"}},
        {"resource": {"group": "other.io", "version": "v1", "resource": "resourceclaims"}},
        {"subResource": "status"},
    ],
)
def test_nothing_else_is_reviewed(fields: Json) -> None:
    wrong = written("resourceclaims", parameters(wieght=1))
    assert answer("resourceclaims", wrong, **fields)["allowed"]


def test_what_is_no_review_has_its_reason() -> None:
    reply = claims.review(b"{")
    assert (reply.status, b"AdmissionReview" in reply.body) == (400, True)
