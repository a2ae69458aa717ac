# SPDX-License-Identifier: Apache-2.0
"""The webhook reviews `allotment.dev/resize`: at the creation, a change, and the removal of it."""

from __future__ import annotations

import pytest
from pod_reviews import container, pod, response

from allotment.dialects.foreign.aliyun import AliyunDialect
from allotment.model.clusters import ClusterPod
from allotment.placement.explain import Reason, Refusal, refuse
from allotment.scheduler.admission.webhook import PodWebhook

DIALECTS = (AliyunDialect(),)


@pytest.mark.parametrize(
    ("reason", "code"), [(Reason.RESIZE, 422), (Reason.QUOTA, 403), (Reason.GPU_MEMORY, None)]
)
def test_a_resize_that_can_never_be_is_refused(reason: Reason, code: int | None) -> None:
    """One that has no room at present is stored, with a warning."""
    asked = []

    def resizes(subject: ClusterPod) -> Refusal:
        asked.append(subject)
        return refuse(reason, "need 9Gi, have 8Gi", hint="ask for less")

    hook = PodWebhook(DIALECTS, resizes=resizes)
    document = pod(container(gpu="1"), annotations={"allotment.dev/resize": "memory:9Gi"})
    document["spec"]["nodeName"] = "n1"
    found = response(hook, document, operation="UPDATE")
    text = "pod team/train: need 9Gi, have 8Gi; hint: ask for less"
    assert found["allowed"] == (code is None)
    if code is None:
        assert found["warnings"] == [f"not resized yet: {text}"]
    else:
        assert (found["status"]["code"], found["status"]["message"]) == (code, text)
    (subject,) = asked
    assert subject.asks is not None
    assert subject.asks.annotations == {"allotment.dev/resize": "memory:9Gi"}
    assert "patch" not in found
    assert response(PodWebhook(DIALECTS), document, operation="UPDATE")["allowed"]
    assert not response(hook, {"spec": 1}, operation="UPDATE")["allowed"]


@pytest.mark.parametrize("operation", ["CREATE", "UPDATE"])
@pytest.mark.parametrize(
    ("text", "node", "problem"),
    [
        ("memory:70Gi", "n1", "memory (need 70Gi, have 1Gi)"),
        ("memory:512Mi", "n1", ""),
        ("memory:70Gi", "", ""),
        ("memory:x", "", "'x' is not an amount"),
    ],
)
def test_a_resize_of_a_pod_without_a_placement_is_checked(
    operation: str, text: str, node: str, problem: str
) -> None:
    """Without a scheduler a pod gets no more than its request, which the quota counted."""
    main = container(gpu="1")
    main["resources"]["limits"]["allotment.dev/gpu-memory"] = "1Gi"
    document = pod(main, annotations={"allotment.dev/resize": text})
    document["spec"]["nodeName"] = node
    found = response(PodWebhook(DIALECTS), document, operation=operation)
    assert found["allowed"] == (not problem)
    if problem:
        assert problem in found["status"]["message"]


def test_a_resize_of_a_pod_without_gpus_is_refused() -> None:
    document = pod(container(), annotations={"allotment.dev/resize": "memory:1Gi"})
    found = response(PodWebhook(DIALECTS), document, operation="UPDATE")
    assert "no container asks for a GPU" in found["status"]["message"]


@pytest.mark.parametrize(("reason", "is_allowed"), [(Reason.RESIZE, True), (Reason.QUOTA, False)])
def test_a_removed_resize_is_refused_if_the_quota_does_not_allow_the_request(
    reason: Reason, *, is_allowed: bool
) -> None:
    hook = PodWebhook(DIALECTS, resizes=lambda _: refuse(reason, "need 9Gi, have 8Gi"))
    document = pod(container(gpu="1"), annotations={})
    document["spec"]["nodeName"] = "n1"
    assert response(hook, document, operation="UPDATE")["allowed"] == is_allowed
