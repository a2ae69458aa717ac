# SPDX-License-Identifier: Apache-2.0
"""What the API server's objects mean: the table of who has finished, who started, who is who."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from api_server_twin import pod
from hypothesis import given
from hypothesis import strategies as st

from allotment.dialects.own.annotations import KEYS, annotations_of
from allotment.kube.objects import PodObject, to_pod
from allotment.model.errors import UsageError
from allotment.model.pods import ContainerKind, Pod, UsedClaim

RUNNING = {"running": {"startedAt": "2026-01-01T00:00:00Z"}}
WAITING = {"waiting": {"reason": "CrashLoopBackOff"}}


def ended(code: int) -> dict[str, Any]:
    return {"terminated": {"exitCode": code}}


def read(item: object) -> Pod:
    return to_pod(msgspec.convert(item, PodObject))


def one_container(state: object, *, policy: str, **rest: object) -> Pod:
    return read(
        pod(
            spec={"restartPolicy": policy, "containers": [{"name": "main", **rest}]},
            status={"phase": "Running", "containerStatuses": [{"name": "main", "state": state}]},
        )
    )


@pytest.mark.parametrize(
    ("policy", "state", "has_finished"),
    [
        ("Always", ended(0), False),
        ("Always", ended(1), False),
        ("OnFailure", ended(0), True),
        ("OnFailure", ended(1), False),
        ("OnFailure", WAITING, False),
        ("Never", ended(0), True),
        ("Never", ended(1), True),
        ("Never", RUNNING, False),
        ("Never", {}, False),
    ],
)
def test_a_container_has_finished_when_its_policy_starts_it_no_more(
    policy: str, state: object, *, has_finished: bool
) -> None:
    assert one_container(state, policy=policy).containers[0].has_finished is has_finished


def test_its_own_policy_goes_before_the_pods_and_rules_leave_it_open() -> None:
    own = one_container(ended(1), policy="Always", restartPolicy="Never")
    assert own.containers[0].has_finished
    ruled = one_container(
        ended(1),
        policy="Never",
        restartPolicy="Never",
        restartPolicyRules=[{"action": "Restart", "exitCodes": {"operator": "In", "values": [1]}}],
    )
    assert not ruled.containers[0].has_finished


def test_in_a_pod_that_is_being_deleted_nothing_is_started_again() -> None:
    item = pod(
        metadata={"deletionTimestamp": "2026-01-01T00:00:00Z"},
        status={"containerStatuses": [{"name": "main", "state": ended(1)}]},
    )
    assert read(item).containers[0].has_finished
    item["status"]["containerStatuses"][0]["state"] = RUNNING
    assert not read(item).containers[0].has_finished


@pytest.mark.parametrize(
    ("phase", "has_ended"),
    [("Pending", False), ("Running", False), ("Succeeded", True), ("Failed", True), ("", False)],
)
def test_a_pod_that_has_ended_has_ended_with_all_its_containers(
    phase: str, *, has_ended: bool
) -> None:
    found = read(pod(status={"phase": phase}))
    assert found.has_ended is has_ended
    assert found.containers[0].has_finished is has_ended


def test_init_containers_come_first_and_those_that_stay_are_sidecars() -> None:
    item = pod(
        spec={
            "initContainers": [{"name": "load"}, {"name": "watch", "restartPolicy": "Always"}],
            "containers": [{"name": "train"}],
        },
        status={
            "initContainerStatuses": [
                {"name": "load", "state": ended(0)},
                {"name": "watch", "state": ended(0)},
            ]
        },
    )
    found = read(item).containers
    assert [(each.name, each.kind) for each in found] == [
        ("load", ContainerKind.INIT),
        ("watch", ContainerKind.SIDECAR),
        ("train", ContainerKind.REGULAR),
    ]
    assert [each.has_finished for each in found] == [True, False, False]
    assert [each.is_started for each in found] == [True, True, False]
    item["status"]["initContainerStatuses"][0]["state"] = ended(1)
    assert not read(item).containers[0].has_finished  # tried again


@pytest.mark.parametrize(
    ("status", "is_started"),
    [
        ({"state": WAITING}, False),
        ({"state": WAITING, "restartCount": 1}, True),
        ({"state": WAITING, "lastState": ended(1)}, True),
        ({"state": RUNNING}, True),
        ({"state": ended(0)}, True),
        ({"state": None, "lastState": None}, False),
    ],
)
def test_a_container_is_started_when_it_runs_or_has_run(
    status: dict[str, Any], *, is_started: bool
) -> None:
    found = read(pod(status={"containerStatuses": [{"name": "main", **status}]}))
    assert found.containers[0].is_started is is_started


def test_resources_are_whole_numbers_and_those_of_extensions_alone() -> None:
    limits = {
        "cpu": "500m",
        "memory": "4Gi",
        "hugepages-2Mi": "4Mi",
        "attachable.kubernetes.io/x": "1",
        "kubernetes.io/y": "1",
        "nvidia.com/gpu": "2",
        "allotment.dev/gpu-memory": "4Gi",
        "allotment.dev/gpu-compute": "1e2",
        "odd.example/part": "500m",
    }
    item = pod(spec={"containers": [{"name": "main", "resources": {"limits": limits}}]})
    assert read(item).containers[0].resources == {
        "nvidia.com/gpu": 2,
        "allotment.dev/gpu-memory": 4 << 30,
        "allotment.dev/gpu-compute": 100,
    }


@pytest.mark.parametrize(
    ("annotations", "uid"),
    [
        (None, "uid-train"),
        ({"kubernetes.io/config.hash": "abc"}, "uid-train"),
        ({"kubernetes.io/config.hash": "abc", "kubernetes.io/config.mirror": "abc"}, "abc"),
        ({"kubernetes.io/config.mirror": "abc"}, "abc"),
        ({"kubernetes.io/config.mirror": "a" * 65}, "uid-train"),
        ({"kubernetes.io/config.mirror": ""}, "uid-train"),
    ],
)
def test_a_static_pod_is_who_the_kubelet_takes_it_for(
    annotations: dict[str, str] | None, uid: str
) -> None:
    assert read(pod(metadata={"annotations": annotations})).uid == uid


def test_only_a_controllers_pod_comes_again() -> None:
    def has_controller(**metadata: object) -> bool:
        item = pod()
        item["metadata"] |= metadata
        return read(item).has_controller

    owner = {"kind": "ReplicaSet", "name": "a"}
    assert not has_controller()
    assert not has_controller(ownerReferences=[owner])
    assert has_controller(ownerReferences=[owner, owner | {"controller": True}])
    # Its node owns a mirror.
    mirror = {"kubernetes.io/config.mirror": "abc"}
    owners = [{"kind": "Node", "name": "n1", "controller": True}]
    assert not has_controller(ownerReferences=owners, annotations=mirror)


def test_of_annotations_ours_alone_are_kept() -> None:
    written = {"allotment.dev/class": "latency", "team/notes": "x" * 200_000, "allotment.dev": "1"}
    found = read(pod(metadata={"annotations": written, "labels": {"a": "b"}}))
    assert found.annotations == {"allotment.dev/class": "latency"}


LONG = 200 << 10  # of the 256 KiB that the API server lets a pod have


@pytest.mark.parametrize("key", sorted(KEYS))
def test_what_is_too_long_is_not_kept_and_means_nothing(key: str) -> None:
    limits = {"allotment.dev/gpu": "1"}
    found = read(
        pod(
            metadata={"annotations": {key: "5" * LONG}},
            spec={"containers": [{"name": "main", "resources": {"limits": limits}}]},
        )
    )
    assert len(found.annotations[key]) < 100
    with pytest.raises(UsageError) as caught:
        annotations_of(found, {"main": KEYS})
    assert f"the annotation {key} is too long" in caught.value.message


@given(
    st.dictionaries(
        st.sampled_from(sorted(KEYS)) | st.integers(0, 99).map("allotment.dev/{}".format),
        st.sampled_from([0, 1, 100, 40_000, 70_000]).map("x".__mul__),
        max_size=60,
    )
)
def test_no_pod_takes_more_of_the_agents_memory_than_another(written: dict[str, str]) -> None:
    item = {
        "metadata": {"name": "a", "uid": "u", "annotations": written},
        "spec": {},
    }
    found = read(item).annotations
    assert sum(map(len, found.values())) < 70_000
    assert len(found) == min(len(written), 32)
    assert found.keys() <= written.keys()
    if sum(map(len, written.values())) <= 65536 and len(written) <= 32:
        assert found == written
    if not written.keys() <= KEYS:
        assert len(written) <= 32 or not found.keys() <= KEYS  # so that it is refused all the same


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)


@given(extra=st.dictionaries(st.text(max_size=8), JSON, max_size=4))
def test_what_we_do_not_know_does_not_disturb(extra: dict[str, Any]) -> None:
    known = {"metadata", "spec", "status"}
    item = {
        "metadata": {"name": "a", "uid": "u", "managedFields": extra},
        "spec": {"containers": None, "volumes": extra},
        "status": {"qosClass": extra},
        **{key: value for key, value in extra.items() if key not in known},
    }
    decoded = msgspec.json.decode(json.dumps(item), type=PodObject)
    assert to_pod(decoded).name == "a"


def test_a_pods_claims_are_known_by_their_names() -> None:
    """Those of templates have a name of their own, and are this pod's alone."""
    pod = to_pod(
        msgspec.json.decode(
            json.dumps(
                {
                    "metadata": {"uid": "u", "namespace": "ml", "name": "a"},
                    "spec": {
                        "resourceClaims": [
                            {"name": "one", "resourceClaimName": "common"},
                            {"name": "two", "resourceClaimTemplateName": "small"},
                            {"name": "three", "resourceClaimTemplateName": "small"},
                        ],
                        "containers": [
                            {
                                "name": "main",
                                "resources": {
                                    "claims": [
                                        {"name": "two", "request": "gpu"},
                                        {"name": "three"},
                                        {"name": "one"},
                                    ]
                                },
                            }
                        ],
                    },
                    "status": {
                        "resourceClaimStatuses": [
                            {"name": "two", "resourceClaimName": "a-two-x7k2p"},
                            {"name": "three"},
                        ],
                        "extendedResourceClaimStatus": {"resourceClaimName": "a-extended-q"},
                    },
                }
            ),
            type=PodObject,
        )
    )
    assert pod.claims == {"common": False, "a-two-x7k2p": True, "a-extended-q": True}
    (main,) = pod.containers
    assert main.claims == (UsedClaim("a-two-x7k2p", "gpu"), UsedClaim("common"))
