# SPDX-License-Identifier: Apache-2.0
"""Which bound pods are kept as their authors wrote them, and how much of each."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from allotment.dialects.foreign.base import DIALECT
from allotment.dialects.own.placement import PLACEMENT
from allotment.kube.cluster_feed import foreign_pod, to_cluster_pod
from allotment.kube.objects import PodObject
from allotment.model.pods import ContainerKind, ForeignPod

HAMI = {"limits": {"nvidia.com/gpu": "1", "nvidia.com/gpumem": "3000"}}


def item(
    *,
    annotations: dict[str, str] | None = None,
    labels: dict[str, str] | None = None,
    resources: object = HAMI,
    **more: Any,  # noqa: ANN401 - any other part of it
) -> PodObject:
    main = {"name": "main", "resources": resources, "env": more.get("env")}
    document = {
        "metadata": {
            "name": "old",
            "namespace": "ml",
            "uid": "u",
            "annotations": annotations,
            "labels": labels,
        },
        "spec": {
            "nodeName": more.get("node", "n1"),
            "containers": [main],
            "initContainers": more.get("init"),
        },
        "status": {"phase": more.get("phase", "Running")},
    }
    return msgspec.json.decode(json.dumps(document), type=PodObject)


def test_a_pod_is_as_its_author_wrote_it() -> None:
    env = [{"name": "A", "value": "1"}, {"name": "B", "valueFrom": {}}]
    init = [{"name": "first"}, {"name": "side", "restartPolicy": "Always"}]
    found = foreign_pod(item(annotations={"a": "b"}, labels={"c": "d"}, env=env, init=init))
    assert found is not None
    first, side, main = found.containers
    assert (first.kind, side.kind) == (ContainerKind.INIT, ContainerKind.SIDECAR)
    assert (main.kind, main.limits) == (ContainerKind.REGULAR, HAMI["limits"])
    assert main.environment == {"A": "1"}
    assert (found.annotations, found.labels, found.node) == ({"a": "b"}, {"c": "d"}, "n1")


@pytest.mark.parametrize(
    ("annotations", "labels", "resources", "is_kept"),
    [
        ({}, {}, HAMI, True),
        ({"kubeshare/gpu_request": "0.5"}, {}, None, True),
        ({}, {"sharedgpu/gpu_request": "0.5"}, None, True),
        ({"received-resource-type": "Fraction"}, {}, None, True),
        ({"nvidia.com/container.c.gpus.devices": "GPU-a"}, {}, None, True),
        ({"gpu-fraction": "0.5", "gpu-memory": "16Gi"}, {}, None, False),
        ({}, {"runai-gpu-group/x": "y"}, None, True),
        ({}, {}, None, False),
        ({"hami.io/vgpu-devices-allocated": "x"}, {"app": "x"}, None, False),
        ({}, {}, {"limits": {"cpu": "1", "memory": "1Gi", "pods.kubernetes.io/x": "1"}}, False),
        ({}, {}, {"limits": {"allotment.dev/gpu": "1"}}, False),
        ({DIALECT: "hami"}, {}, HAMI, False),
        ({PLACEMENT: "{}"}, {}, HAMI, False),
    ],
)
def test_those_are_kept_that_somebody_else_may_have_given_gpus(
    annotations: dict[str, str],
    labels: dict[str, str],
    resources: object,
    is_kept: bool,  # noqa: FBT001 - a parameter
) -> None:
    found = foreign_pod(item(annotations=annotations, labels=labels, resources=resources))
    assert isinstance(found, ForeignPod) is is_kept


def test_it_is_kept_while_it_runs() -> None:
    assert to_cluster_pod(item()).foreign is not None
    assert to_cluster_pod(item(phase="Succeeded")).foreign is None
    assert to_cluster_pod(item(node="")).foreign is None


def test_no_pod_takes_more_memory_than_another() -> None:
    annotations = {f"a{each}": "x" * 20_000 for each in range(10)} | {"hami.io/vgpu-node": "n1"}
    env = [{"name": f"V{each}", "value": "x" * 20_000} for each in range(50)]
    found = foreign_pod(item(annotations=annotations, env=env))
    assert found is not None
    kept = [*found.annotations.items(), *found.containers[0].environment.items()]
    assert sum(len(key) + len(text) for key, text in kept) <= 64 << 10
    assert found.annotations["hami.io/vgpu-node"] == "n1"
