# SPDX-License-Identifier: Apache-2.0
"""The webhook's port, held by schemathesis to what the API server's reviews and answers are."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis.specs.openapi.checks import negative_data_rejection
from served_twin import Thread, in_a_thread

from allotment.dialects.foreign.settings import foreign_dialects
from allotment.dialects.own.allotment import GPU, GPU_MEMORY
from allotment.scheduler.admission.rules import Keys, keys_of
from allotment.scheduler.admission.webhook import PATH, PodWebhook, WebhookSettings
from allotment.scheduler.serving import webhook_application


def described() -> dict[str, Any]:
    """The webhook's port, as OpenAPI: AdmissionReview of admission.k8s.io/v1.

    Most reviews are of pods in one system's words, so that there is work to do.
    """
    text = {"type": "string"}
    amounts = {"type": "string", "enum": ["1", "2", "30", "0", "1024", "4Gi", "x"]}

    def named(names: Iterable[str], values: object, **more: object) -> dict[str, Any]:
        properties = dict.fromkeys(sorted(each for each in names if "*" not in each), values)
        found = {"type": "object", "properties": properties, "additionalProperties": False}
        return {**found, **more}

    def pod(keys: Keys) -> dict[str, Any]:
        limits = named(keys.resources, amounts, maxProperties=3)
        resources = {"type": "object", "required": ["limits"], "properties": {"limits": limits}}
        context = {"type": "object", "properties": {"privileged": {"type": "boolean"}}}

        def containers(name: str) -> dict[str, Any]:
            container = {
                "type": "object",
                "required": ["name", "resources"],
                "properties": {
                    "name": {"type": "string", "enum": [name]},
                    "resources": resources,
                    "securityContext": context,
                },
            }
            return {"type": "array", "minItems": 1, "maxItems": 1, "items": container}

        annotations = named(keys.annotations, {"anyOf": [amounts, text]}, maxProperties=1)
        return {
            "type": "object",
            "required": ["metadata", "spec"],
            "properties": {
                "metadata": {
                    "type": "object",
                    "properties": {
                        "name": text,
                        "annotations": annotations,
                        "labels": named(keys.labels, amounts, maxProperties=1),
                    },
                    "additionalProperties": False,
                },
                "spec": {
                    "type": "object",
                    "required": ["containers"],
                    "properties": {
                        "containers": containers("a"),
                        "initContainers": containers("b"),
                        "schedulerName": {"type": "string", "enum": ["", "kai-scheduler", "x"]},
                    },
                    "additionalProperties": False,
                },
            },
        }

    own = Keys(other_resources=frozenset({GPU, GPU_MEMORY}))
    pods = [pod(each) for each in (own, *map(keys_of, foreign_dialects()))]
    resource = {"group": "", "version": "v1", "resource": "pods"}
    request = {
        "type": "object",
        "required": ["uid", "operation", "resource", "object"],
        "properties": {
            "uid": {"type": "string", "minLength": 1},
            "operation": {"type": "string", "enum": ["CREATE", "UPDATE"]},
            "resource": {
                "type": "object",
                "required": list(resource),
                "properties": {
                    key: {"type": "string", "enum": [it]} for key, it in resource.items()
                },
            },
            "namespace": text,
            "object": {"anyOf": [*pods, {}]},
        },
    }
    response = {
        "type": "object",
        "required": ["uid", "allowed"],
        "properties": {
            "uid": text,
            "allowed": {"type": "boolean"},
            "patchType": {"type": "string", "enum": ["JSONPatch"]},
            "patch": text,
            "warnings": {"type": "array", "items": text},
            "status": {"type": "object"},
            "auditAnnotations": {"type": "object"},
        },
        "additionalProperties": False,
    }

    def review(key: str, inner: object) -> dict[str, Any]:
        of = {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview"}
        types = {name: {"type": "string", "enum": [it]} for name, it in of.items()}
        required = [*of, key]
        return {"type": "object", "required": required, "properties": {**types, key: inner}}

    def content(schema: object, kind: str = "application/json") -> dict[str, Any]:
        return {"description": "", "content": {kind: {"schema": schema}}}

    said = content(text, "text/plain")
    return {
        "openapi": "3.1.0",
        "info": {"title": "webhook", "version": "1"},
        "paths": {
            PATH: {
                "post": {
                    "requestBody": {"required": True, **content(review("request", request))},
                    "responses": {"200": content(review("response", response)), "400": said},
                }
            },
            "/healthz": {"get": {"responses": {"200": said}}},
        },
    }


schema = schemathesis.openapi.from_dict(described())


@pytest.fixture(scope="module")
def port() -> Iterator[Thread]:
    hook = PodWebhook(foreign_dialects(), settings=WebhookSettings(scheduler_name="ours"))
    with in_a_thread(lambda: webhook_application(hook)) as thread:
        yield thread


@schema.parametrize()
@settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
def test_whatever_is_reviewed_has_an_answer(case: schemathesis.Case[Any], port: Thread) -> None:
    answer = case.call_and_validate(
        base_url=port.url,
        # What is not looked at is passed over, as everywhere where Go's JSON is spoken.
        excluded_checks=[negative_data_rejection],
    )
    if answer.status_code != 200 or case.path != PATH:
        return
    review: Any = case.body
    told = answer.json()["response"]
    assert told["uid"] == review["request"]["uid"]
    if "patch" in told:
        assert told["allowed"]
        changes = json.loads(base64.b64decode(told["patch"]))
        assert {each["op"] for each in changes} <= {"add", "remove", "replace"}
    elif not told["allowed"]:
        assert told["status"]["message"]
