# SPDX-License-Identifier: Apache-2.0
"""KubeShare's dialects: annotations (1.0), labels (2.0), SharePod objects."""

from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from foreign_pods import (
    GI,
    NODE,
    booking,
    check_take_over,
    check_translation,
    documented,
    outcome,
    taken,
    texts,
)
from hypothesis import given
from hypothesis import strategies as st

from allotment.dialects.foreign.base import DIALECT, ForeignDialect, Translation
from allotment.dialects.foreign.kubeshare import (
    KubeShare2Dialect,
    KubeShareDialect,
    pod_of_sharepod,
)
from allotment.model.clusters import PlacedDevice
from allotment.model.compute import WHOLE, Compute
from allotment.model.errors import UsageError
from allotment.model.pods import ContainerKind, ForeignContainer, ForeignPod
from allotment.model.requests import Constraints, ModelRule, Request
from allotment.model.structs import replace

V1 = KubeShareDialect()
V2 = KubeShare2Dialect()
MAIN = ForeignContainer(name="main")


def pod(
    annotations: dict[str, str] | None = None,
    labels: dict[str, str] | None = None,
    *,
    containers: tuple[ForeignContainer, ...] = (MAIN,),
    node: str = "",
) -> ForeignPod:
    return ForeignPod(
        namespace="team",
        name="sharepod1",
        annotations=annotations or {},
        labels=labels or {},
        containers=containers,
        node=node,
    )


def first(**changes: str) -> ForeignPod:
    annotations = {"gpu_request": "0.5", "gpu_limit": "1.0", "gpu_mem": "1073741824"} | changes
    return pod({f"kubeshare/{key}": text for key, text in annotations.items() if text != "-"})


def second(**labels: str) -> ForeignPod:
    return pod(labels={f"sharedgpu/{key}": text for key, text in labels.items()})


def translated(subject: ForeignPod, dialect: ForeignDialect) -> Translation:
    assert dialect.recognises(subject)
    return dialect.translate(subject)


def request(subject: ForeignPod, dialect: ForeignDialect) -> Request:
    (found,) = translated(subject, dialect).containers
    assert found.container == "main"
    return found.request


# ---- 1.0 -----------------------------------------------------------------------------------------


def test_request_is_guaranteed_and_limit_is_the_ceiling() -> None:
    found = request(first(), V1)
    assert found.memory.size_bytes == GI
    assert found.compute == Compute(5000, WHOLE, is_governed=True)
    assert found.constraints == Constraints()


def test_parts_finer_than_a_hundredth_of_a_percent_are_rounded_up() -> None:
    found = request(first(gpu_request="0.12341", gpu_limit="0.12345"), V1)
    assert found.compute == Compute(1235, 1235, is_governed=True)


def test_tags() -> None:
    tags = {"sched_affinity": "red", "sched_anti-affinity": "green", "sched_exclusion": "blue"}
    expected = Constraints(affinity="red", anti_affinity="green", exclusion="blue")
    assert request(first(**tags), V1).constraints == expected


def test_an_empty_exclusion_is_as_none() -> None:
    assert request(first(sched_exclusion=""), V1).constraints.exclusion is None


def test_a_gpuid_keeps_its_pods_together() -> None:
    one, other = (request(first(GPUID=each), V1).constraints.affinity for each in ("abcde", "b"))
    assert one
    assert one != other
    assert one == request(first(GPUID="abcde", gpu_mem="4294967296"), V1).constraints.affinity


def test_a_gpuid_goes_before_an_affinity_and_that_is_told() -> None:
    found = translated(first(GPUID="abcde", sched_affinity="red"), V1)
    assert "abcde" in found.containers[0].request.constraints.affinity
    assert "sched_affinity" in found.passed_over[0]


def test_a_gpuid_on_a_pod_that_no_scheduler_sees_is_refused() -> None:
    subject = pod(dict(first(GPUID="abcde").annotations), node="node-1")
    with pytest.raises(UsageError, match="GPUID") as caught:
        translated(subject, V1)
    assert "nodeSelector" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"gpu_mem": "-"}, "without kubeshare/gpu_mem"),
        ({"gpu_request": "-", "gpu_limit": "-"}, "kubeshare/gpu_request and kubeshare/gpu_limit"),
        ({"gpu_request": "0.6", "gpu_limit": "0.5"}, "more than"),
        ({"gpu_request": "0", "gpu_limit": "0"}, "gpu_limit is 0"),
        ({"gpu_limit": "2"}, "gpu_limit is '2'"),
        ({"gpu_mem": "1Gi"}, "gpu_mem"),
        ({"gpu_mem": "1000"}, "less than 1Mi"),
        ({"gpu_request": "half"}, "'half'"),
        ({"gpu_request": "-0.5"}, "'-0.5'"),
        ({"gpu_request": "nan"}, "'nan'"),
        ({"gpu_request": ""}, "''"),
    ],
)
def test_refused_with_the_reason(changes: dict[str, str], word: str) -> None:
    with pytest.raises(UsageError, match=word) as caught:
        translated(first(**changes), V1)
    assert caught.value.message.startswith("pod team/sharepod1")
    assert caught.value.hint


def test_the_first_container_has_the_share_and_that_is_told() -> None:
    containers = (
        ForeignContainer(name="setup", kind=ContainerKind.INIT),
        ForeignContainer(name="train"),
        ForeignContainer(name="log"),
    )
    found = translated(pod(dict(first().annotations), containers=containers), V1)
    assert [each.container for each in found.containers] == ["train"]
    (said,) = found.passed_over
    assert "'setup', 'log'" in said


def test_a_whole_gpu_in_the_same_container_is_refused() -> None:
    whole = ForeignContainer(name="main", limits={"nvidia.com/gpu": "1"})
    side = ForeignContainer(name="side", limits={"nvidia.com/gpu": "1"})
    for subject, dialect in ((first(), V1), (second(gpu_request="1", gpu_limit="1"), V2)):
        with pytest.raises(UsageError, match=r"nvidia\.com/gpu"):
            dialect.translate(replace(subject, containers=(whole,)))
        assert dialect.translate(replace(subject, containers=(MAIN, side))).containers


def test_a_pod_without_a_container_is_refused() -> None:
    with pytest.raises(UsageError, match="no container"):
        translated(pod(dict(first().annotations), containers=()), V1)


@pytest.mark.parametrize("text", ["0", "0.0", ".0", " 0. "])
def test_nothing_but_zeros_is_a_pod_without_a_gpu(text: str) -> None:
    assert V1.recognises(first(gpu_request=text, gpu_limit=text, gpu_mem="0")) == ()
    assert V2.recognises(second(gpu_request=text, gpu_limit=text)) == ()
    assert V1.recognises(pod()) == ()


def test_nothing_is_written_that_would_be_a_wish_in_a_copy() -> None:
    given = booking(main=[PlacedDevice("GPU-a", GI)])
    assert V1.result_annotations(first(), given, NODE, now=0) == {}


def test_a_running_pod_is_told_and_its_variable_is_not_believed() -> None:
    environment = {"NVIDIA_VISIBLE_DEVICES": "GPU-b"}
    containers = (ForeignContainer(name="main", environment=environment),)
    running = pod(dict(first().annotations), containers=containers, node="node-1")
    with pytest.raises(UsageError, match="NVIDIA_VISIBLE_DEVICES, which any user can forge"):
        taken(V1, running)
    ours = {**running.annotations, DIALECT: "kubeshare"}
    assert taken(V1, pod(ours, containers=containers, node="node-1")) is None


# ---- 2.0 -----------------------------------------------------------------------------------------


def test_labels_say_the_same() -> None:
    found = request(second(gpu_request="0.5", gpu_limit="1.0", gpu_mem="1073741824"), V2)
    assert found.memory.size_bytes == GI
    assert found.compute == Compute(5000, WHOLE, is_governed=True)


def test_memory_is_the_part_that_is_requested_where_nothing_is_said() -> None:
    found = request(second(gpu_request="0.25", gpu_limit="1"), V2)
    assert found.memory.part == Fraction(1, 4)
    assert request(second(gpu_request=".5", gpu_limit="1", gpu_mem="0"), V2).memory.part


def test_the_model_is_named_in_full() -> None:
    found = request(second(gpu_request="1", gpu_limit="1", gpu_model="NVIDIA-GeForce-GTX-1080"), V2)
    assert found.constraints.models == (ModelRule("NVIDIA-GeForce-GTX-1080", is_exact=True),)


@pytest.mark.parametrize("text", ["2", "2.0"])
def test_more_than_one_are_whole_gpus(text: str) -> None:
    found = request(second(gpu_request=text, gpu_limit=text), V2)
    assert found.count == 2
    assert found.memory.part == Fraction(1)
    assert found.compute.guarantee == WHOLE
    assert found.preferences.device_policies == ()


def test_a_guarantee_pods_gpus_are_near_each_other() -> None:
    found = request(second(gpu_request="2", gpu_limit="2", priority="50"), V2)
    assert found.preferences.device_policies == ("topology",)


def test_priority_and_groups_are_told() -> None:
    subject = second(
        gpu_request="0.5",
        gpu_limit="1",
        priority="-1",
        group_name="a",
        group_headcount="5",
        group_threshold="0.2",
    )
    said = translated(subject, V2).passed_over
    assert len(said) == 2
    assert "sharedgpu/priority" in said[0]
    assert "sharedgpu/group_name, sharedgpu/group_headcount, sharedgpu/group_threshold" in said[1]


def test_the_least_number_of_pods_of_a_group_is_told() -> None:
    subject = second(gpu_request="0.5", gpu_limit="1", group_name="a", min_available="2")
    (said,) = translated(subject, V2).passed_over
    assert said.startswith("sharedgpu/group_name, sharedgpu/min_available: pods of a group")


@pytest.mark.parametrize(
    ("labels", "word"),
    [
        ({"gpu_request": "0.5"}, "without sharedgpu/gpu_limit"),
        ({"gpu_mem": "1073741824"}, "without sharedgpu/gpu_limit"),
        ({"gpu_request": "0.6", "gpu_limit": "0.5"}, "more than"),
        ({"gpu_request": "1.5", "gpu_limit": "1.5"}, "gpu_limit is '1.5'"),
        ({"gpu_request": "1", "gpu_limit": "2"}, "gpu_limit is '2'"),
        ({"gpu_limit": "2"}, "gpu_request is '0'"),
        ({"gpu_limit": "99999", "gpu_request": "99999"}, "99999"),
        ({"gpu_limit": "0.5"}, "neither sharedgpu/gpu_mem"),
        ({"gpu_limit": "1", "gpu_request": "0.5", "priority": "101"}, "101"),
        ({"gpu_limit": "1", "gpu_request": "0.5", "priority": "-2"}, "-2"),
        ({"gpu_limit": "1", "gpu_request": "0.5", "gpu_mem": "4Gi"}, "4Gi"),
        ({"gpu_limit": "1", "gpu_request": "0.5", "gpu_mem": "99999999999999999"}, "than any GPU"),
    ],
)
def test_labels_are_refused_with_the_reason(labels: dict[str, str], word: str) -> None:
    with pytest.raises(UsageError, match=word) as caught:
        translated(second(**labels), V2)
    assert caught.value.message.startswith("pod team/sharepod1")
    assert caught.value.hint


def served(annotations: dict[str, str], labels: dict[str, str]) -> ForeignPod:
    """A pod that KubeShare's scheduler has bound."""
    return replace(pod(annotations, labels, node="node-1"), scheduler="kubeshare-scheduler")


def test_the_result_of_labels_says_what_was_given() -> None:
    subject = second(gpu_request="0.5", gpu_limit="1.0", gpu_mem="1073741824")
    given = booking(main=[PlacedDevice("GPU-c", GI, 5000)])
    result = V2.result_annotations(subject, given, NODE, now=0)
    assert result == {
        "sharedgpu/gpu_uuid": "GPU-c",
        "sharedgpu/gpu_mem": "1073741824",
        "sharedgpu/gpu_model": "Tesla-T4",
    }


def test_a_pod_of_its_scheduler_is_not_believed() -> None:
    """That scheduler creates the pod with the record: any controller may do so for a tenant."""
    asked = dict(second(gpu_request="0.5", gpu_limit="1.0").labels)
    running = served({"sharedgpu/gpu_uuid": "GPU-a"}, asked)
    with pytest.raises(UsageError, match="which any user can forge") as told:
        taken(V2, running)
    assert "end it" in str(told.value.hint)
    assert taken(V2, replace(running, scheduler="default-scheduler")) is None
    assert taken(V2, replace(running, annotations={})) is None


# ---- SharePod objects ----------------------------------------------------------------------------


def sharepod(**spec: object) -> dict[str, Any]:
    return {
        "apiVersion": "kubeshare.nthu/v1",
        "kind": "SharePod",
        "metadata": {
            "name": "sharepod1",
            "namespace": "team",
            "uid": "u-1",
            "resourceVersion": "7",
            "annotations": dict(first().annotations),
        },
        "spec": {"containers": [{"name": "cuda"}], **spec},
        "status": {"BoundDeviceID": "x"},
    }


def test_a_sharepod_becomes_the_pod_that_belongs_to_it() -> None:
    found = pod_of_sharepod(sharepod())
    assert found == {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": "sharepod1",
            "namespace": "team",
            "annotations": dict(first().annotations),
            "ownerReferences": [
                {
                    "apiVersion": "kubeshare.nthu/v1",
                    "kind": "SharePod",
                    "name": "sharepod1",
                    "uid": "u-1",
                    "controller": True,
                    "blockOwnerDeletion": True,
                }
            ],
        },
        "spec": {"containers": [{"name": "cuda"}]},
    }


def test_a_nodes_name_becomes_an_affinity_of_each_alternative() -> None:
    terms = [{"matchExpressions": [{"key": "a", "operator": "Exists"}], "matchFields": [1]}, {}]
    affinity = {
        "nodeAffinity": {
            "requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}
        },
        "podAffinity": {},
    }
    before = sharepod(nodeName="node01", affinity=affinity)
    found = pod_of_sharepod(before)["spec"]
    assert "nodeName" not in found
    (one, other) = found["affinity"]["nodeAffinity"][
        "requiredDuringSchedulingIgnoredDuringExecution"
    ]["nodeSelectorTerms"]
    field = {"key": "metadata.name", "operator": "In", "values": ["node01"]}
    assert one == {"matchExpressions": terms[0]["matchExpressions"], "matchFields": [1, field]}
    assert other == {"matchFields": [field]}
    assert found["affinity"]["podAffinity"] == {}
    assert before["spec"]["affinity"]["nodeAffinity"] == affinity["nodeAffinity"]
    plain = pod_of_sharepod(sharepod(nodeName="node01"))["spec"]["affinity"]["nodeAffinity"]
    (only,) = plain["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    assert only == {"matchFields": [field]}


@pytest.mark.parametrize(
    "document",
    [
        {},
        {"kind": "Pod", "apiVersion": "v1", "metadata": {"name": "a"}, "spec": {"x": 1}},
        sharepod() | {"kind": "Sharepod"},
        sharepod() | {"apiVersion": "example.com/v1"},
        sharepod() | {"metadata": {}},
        sharepod() | {"metadata": "a"},
        sharepod() | {"spec": {}},
        sharepod() | {"spec": ["a"]},
        sharepod(nodeName="a", affinity={"nodeAffinity": "b"}),
        sharepod(
            nodeName="a",
            affinity={
                "nodeAffinity": {
                    "requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [1]}
                }
            },
        ),
    ],
)
def test_what_is_no_sharepod_is_refused(document: dict[str, Any]) -> None:
    with pytest.raises(UsageError) as caught:
        pod_of_sharepod(document)
    assert caught.value.hint


# ---- any text ------------------------------------------------------------------------------------

annotated = st.builds(
    lambda annotations, visible, node: pod(
        annotations,
        containers=(
            ForeignContainer(name="main", environment={"NVIDIA_VISIBLE_DEVICES": visible}),
        ),
        node=node,
    ),
    st.dictionaries(
        st.sampled_from(V1.annotations),
        texts,
    ),
    texts,
    st.sampled_from(["", "node-1"]),
)
labelled = st.builds(
    pod,
    st.dictionaries(st.sampled_from([V2.UUID, V2.MEMORY]), texts),
    st.dictionaries(st.sampled_from(V2.labels), texts, min_size=1),
)


@given(subject=annotated)
def test_any_annotations_are_translated_or_refused(subject: ForeignPod) -> None:
    check_translation(V1, subject)
    check_take_over(V1, subject)


@given(subject=labelled)
def test_any_labels_are_translated_or_refused(subject: ForeignPod) -> None:
    check_translation(V2, subject)
    check_take_over(V2, subject)


json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)


@given(
    changes=st.dictionaries(st.sampled_from(["metadata", "spec", "kind", "apiVersion"]), json),
    affinity=json,
)
def test_any_document_is_a_pod_or_refused(changes: dict[str, object], affinity: object) -> None:
    document = sharepod(nodeName="a", affinity={"nodeAffinity": affinity}) | changes
    found = outcome(lambda: pod_of_sharepod(document))
    assert isinstance(found, UsageError) or found["kind"] == "Pod"


def test_every_key_is_documented_and_no_other(root: Path) -> None:
    keys = documented(root, "KubeShare 1.0")
    of_pods = [each for each in keys if each.startswith("kubeshare/")]
    assert of_pods == sorted(V1.annotations)
    written = (V2.UUID, V2.MEMORY, V2.MODEL)
    assert documented(root, "KubeShare 2.0") == sorted((*V2.labels, *written))
