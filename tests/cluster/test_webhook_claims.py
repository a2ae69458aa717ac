# SPDX-License-Identifier: Apache-2.0
"""Claims, their templates and classes with wrong parameters, on a real API server."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from claims import API, share, written
from reviewing import control_plane_of, refused, tried, webhook
from testbed.api import ApiError, Json
from testbed.cluster import Cluster

NAMESPACE = f"{API}/namespaces/default"
WRONG = {"apiVersion": "allotment.dev/v1", "kind": "ShareConfig", "wieght": 200, "class": "fast"}
GOOD = {"apiVersion": "allotment.dev/v1", "kind": "ShareConfig", "weight": 200}


def objects(parameters: Json) -> dict[str, tuple[str, str, Json]]:
    """By kind: where it is made, where its configurations are, and the object."""
    claim = written("claim", share(memory="20Gi"), config=[GOOD, parameters])
    of_template = {
        **claim,
        "kind": "ResourceClaimTemplate",
        "spec": {"metadata": {}, "spec": claim["spec"]},
    }
    of_class = {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "DeviceClass",
        "metadata": {"name": "tuned.example.com"},
        "spec": {"config": claim["spec"]["devices"]["config"]},
    }
    return {
        "ResourceClaim": (f"{NAMESPACE}/resourceclaims", "spec.devices", claim),
        "ResourceClaimTemplate": (
            f"{NAMESPACE}/resourceclaimtemplates",
            "spec.spec.devices",
            of_template,
        ),
        "DeviceClass": (f"{API}/deviceclasses", "spec", of_class),
    }


@pytest.fixture(scope="module")
def control_plane(
    testbed_machine: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    del testbed_machine
    with control_plane_of(tmp_path_factory.mktemp("claims")) as made:
        yield made


def test_wrong_parameters_are_refused_when_they_are_written(control_plane: Cluster) -> None:
    api = control_plane.api
    with webhook(control_plane):
        for kind, (path, where, wrong) in objects(WRONG).items():
            said = refused(api, path, wrong)
            print(said)  # noqa: T201 - for the guide
            assert 'webhook "claims.allotment.dev" denied the request' in said, kind
            for problem in ("wieght is unknown (did you mean 'weight'?)", "class: 'fast'"):
                assert f"{where}.config[1].opaque.parameters.{problem}" in said, kind
            good = objects(GOOD)[kind][2]
            api.post(path, good)
        # Pods that ask for these are placed by Allotment's scheduler, and counted once.
        path, _, good = objects(GOOD)["DeviceClass"]
        for_plugin = {**good, "spec": {"extendedResourceName": "allotment.dev/gpu"}}
        assert "is counted by the device plugin" in refused(api, path, for_plugin)
        # A class may change later, and is read again.
        path, _, wrong = objects(WRONG)["DeviceClass"]
        with pytest.raises(ApiError, match="wieght is unknown"):
            api.patch(f"{path}/tuned.example.com", {"spec": wrong["spec"]})
        api.patch(f"{path}/tuned.example.com", {"metadata": {"labels": {"a": "b"}}})
    # It fails open: the agent reads the same again, when a pod starts.
    for path, _, wrong in objects(WRONG).values():
        wrong["metadata"]["name"] = "unchecked"
        assert tried(api, path, wrong) == ""
    api.post(path, wrong)
    with webhook(control_plane):
        label = {"metadata": {"labels": {"a": "b"}}}
        assert api.patch(f"{path}/unchecked", label)["metadata"]["labels"] == {"a": "b"}
