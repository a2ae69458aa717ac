# SPDX-License-Identifier: Apache-2.0
"""Aliyun's dialect: gpushare's and ACK's pods in, our requests out."""

import json
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from foreign_pods import (
    GI,
    MI,
    NODE,
    booking,
    check_take_over,
    check_translation,
    documented,
    given_to,
    taken,
    texts,
)
from hypothesis import given
from hypothesis import strategies as st

from allotment.dialects.foreign.aliyun import (
    RESULTS,
    SELECTORS,
    VARIABLES,
    AliyunDialect,
    AliyunSettings,
)
from allotment.dialects.foreign.base import DIALECT, Translation
from allotment.dialects.foreign.settings import settings_of
from allotment.dialects.foreign.translate import applied, wanted_of, written
from allotment.model.clusters import PlacedDevice
from allotment.model.compute import WHOLE, Compute
from allotment.model.errors import UsageError
from allotment.model.pods import ContainerKind, ForeignContainer, ForeignPod
from allotment.model.requests import ModelRule, Request

MEMORY = "aliyun.com/gpu-mem"
COMPUTE = "aliyun.com/gpu-core.percentage"
COUNT = "aliyun.com/gpu-count"
IDX = "ALIYUN_COM_GPU_MEM_IDX"
ALLOCATION = "scheduler.framework.gpushare.allocation"


def container(
    name: str = "main",
    *,
    kind: ContainerKind = ContainerKind.REGULAR,
    environment: dict[str, str] | None = None,
    **limits: str | int,
) -> ForeignContainer:
    names = {"memory": MEMORY, "compute": COMPUTE}
    return ForeignContainer(
        name=name,
        kind=kind,
        limits={names[each]: str(value) for each, value in limits.items()},
        environment=environment or {},
    )


def pod(
    *containers: ForeignContainer,
    labels: dict[str, str] | None = None,
    annotations: dict[str, str] | None = None,
    selector: dict[str, str] | None = None,
) -> ForeignPod:
    return ForeignPod(
        namespace="team",
        name="binpack-1-",
        labels=labels or {},
        annotations=annotations or {},
        containers=containers,
        node="node-1",
        node_selector=selector or {},
    )


def translated(subject: ForeignPod, **settings: Any) -> Translation:  # noqa: ANN401 - its fields
    dialect = AliyunDialect(AliyunSettings(**settings))
    assert dialect.recognises(subject)
    return dialect.translate(subject)


def request(subject: ForeignPod, **settings: str) -> Request:
    (found,) = translated(subject, **settings).containers
    return found.request


def test_memory_is_a_number_of_gib() -> None:
    found = request(pod(container(memory=3)))
    assert found.memory.size_bytes == 3 * GI
    assert found.count == 1
    assert found.compute == Compute()


def test_memory_is_a_number_of_mib_where_the_cluster_counts_so() -> None:
    assert request(pod(container(memory=3000)), memory_unit="MiB").memory.size_bytes == 3000 * MI


def test_compute_is_guaranteed_and_a_ceiling() -> None:
    found = request(pod(container(memory=2, compute=30)))
    assert found.compute == Compute(3000, 3000, is_governed=True)


def test_the_label_divides_memory_and_compute_over_gpus() -> None:
    found = request(pod(container(memory=8, compute=60), labels={COUNT: "2"}))
    assert found.count == 2
    assert found.memory.size_bytes == 4 * GI
    assert found.compute.guarantee == found.compute.ceiling == 3000


def test_a_label_of_zero_is_no_label() -> None:
    assert request(pod(container(memory=3), labels={COUNT: "0"})).count == 1


@pytest.mark.parametrize(
    ("amounts", "labels", "words"),
    [
        ({"memory": 7}, {COUNT: "2"}, (MEMORY, "7", "2 GPUs")),
        ({"memory": 8, "compute": 25}, {COUNT: "2"}, (COMPUTE, "25")),
        ({"memory": 8}, {COUNT: "two"}, (COUNT, "'two'")),
        ({"memory": 8}, {COUNT: "-1"}, (COUNT, "'-1'")),
        ({"memory": 8}, {COUNT: "5000"}, (COUNT, "5000")),
        ({"memory": 8, "compute": 101}, {}, (COMPUTE, "101", "1 GPU")),
        ({"compute": 30}, {}, (COMPUTE, "without " + MEMORY)),
        ({"memory": "3Gi"}, {}, (MEMORY, "more than any GPU")),
        ({"memory": "5.5"}, {}, (MEMORY, "5.5")),
        ({"memory": -1}, {}, (MEMORY, "negative")),
        ({"memory": 3}, {"ack.gpushare.placement": "alone"}, ("ack.gpushare.placement", "alone")),
    ],
)
def test_refused_with_the_reason(
    amounts: dict[str, str | int], labels: dict[str, str], words: tuple[str, ...]
) -> None:
    with pytest.raises(UsageError) as caught:
        translated(pod(container(**amounts), labels=labels))  # type: ignore[arg-type]
    assert all(each in caught.value.message for each in words), caught.value.message
    assert caught.value.message.startswith("pod team/binpack-1-")
    assert caught.value.hint


def test_tflops_are_refused() -> None:
    tflops = ForeignContainer(name="main", limits={"aliyun.com/gpu-core.tflops": "5", MEMORY: "3"})
    with pytest.raises(UsageError, match=r"gpu-core\.tflops"):
        translated(pod(tflops))


def test_selectors_of_nodes_become_constraints_and_policies() -> None:
    selector = {
        "ack.node.gpu.schedule": "core_mem",
        "ack.node.gpu.placement": "spread",
        "aliyun.accelerator/nvidia_name": "Tesla-V100-SXM2-16GB",
    }
    found = request(pod(container(memory=3), selector=selector))
    assert found.preferences.device_policies == ("spread",)
    assert found.constraints.models == (ModelRule("Tesla-V100-SXM2-16GB"),)


def test_the_clusters_placement_is_for_pods_that_do_not_say() -> None:
    subject = pod(container(memory=3))
    assert request(subject, placement="binpack").preferences.device_policies == ("binpack",)
    assert request(subject).preferences.device_policies == ()


def test_nodes_of_schedule_mps_are_mode_mps() -> None:
    selector = {"ack.node.gpu.schedule": "mps"}
    subject = pod(container(memory=3, compute=30), selector=selector)
    its = request(subject)
    assert (its.mode, its.other_modes) == ("mps", ())
    assert its.compute == Compute(3000, 3000, is_governed=True)
    changes = written(subject, AliyunDialect().translate(subject))
    assert changes.annotations["allotment.dev/mode"] == "mps"


def test_what_mps_cannot_do_is_refused_or_told() -> None:
    selector = {"ack.node.gpu.schedule": "mps"}
    two = pod(container(memory=8), labels={COUNT: "2"}, selector=selector)
    with pytest.raises(UsageError, match="shared by MPS, where a share has one GPU") as caught:
        translated(two)
    assert "ack.node.gpu.schedule: cgpu" in (caught.value.hint or "")
    heavy = container(memory=3, environment={"ALIYUN_COM_GPU_SCHD_WEIGHT": "3"})
    found = translated(pod(heavy, selector=selector))
    assert found.containers[0].request.compute == Compute()
    assert "ALIYUN_COM_GPU_SCHD_WEIGHT" in found.passed_over[0]


@pytest.mark.parametrize("schedule", ["default", "topology", "mig", "cgp"])
def test_nodes_without_parts_are_refused(schedule: str) -> None:
    subject = pod(container(memory=3), selector={"ack.node.gpu.schedule": schedule})
    with pytest.raises(UsageError, match=schedule):
        translated(subject)


def test_a_whole_idle_device_is_required_by_label() -> None:
    labels = {"ack.gpushare.placement": "require-whole-device"}
    assert request(pod(container(memory=3), labels=labels)).constraints.is_alone


def test_the_weight_of_cgpu_is_ours_times_a_hundred() -> None:
    weighted = container(memory=3, environment={"ALIYUN_COM_GPU_SCHD_WEIGHT": "3"})
    assert request(pod(weighted)).compute == Compute(weight=300, is_governed=True)
    heavy = container(memory=3, environment={"ALIYUN_COM_GPU_SCHD_WEIGHT": "0"})
    with pytest.raises(UsageError, match="ALIYUN_COM_GPU_SCHD_WEIGHT"):
        translated(pod(heavy))


@pytest.mark.parametrize(
    ("selector", "environment", "word"),
    [
        ({"cgpu.disable.isolation": "true"}, {}, "cgpu.disable.isolation"),
        ({"ack.node.gpu.schedule": "share"}, {}, "share"),
        ({}, {"CGPU_DISABLE": "true"}, "CGPU_DISABLE"),
    ],
)
def test_isolation_is_not_turned_off_and_that_is_told(
    selector: dict[str, str], environment: dict[str, str], word: str
) -> None:
    found = translated(pod(container(memory=3, environment=environment), selector=selector))
    (said,) = found.passed_over
    assert word in said


def test_several_containers_and_init_containers_have_parts_of_their_own() -> None:
    subject = pod(
        container("warm", kind=ContainerKind.INIT, memory=1),
        container("web"),
        container("train", memory=4),
    )
    found = translated(subject)
    assert [each.container for each in found.containers] == ["warm", "train"]
    assert len(found.passed_over) == 1


def test_the_resources_of_the_old_plugin_have_to_go() -> None:
    (found,) = translated(pod(container(memory=3, compute=5))).containers
    assert found.removes == (MEMORY, COMPUTE)


@pytest.mark.parametrize("limits", [{}, {"memory": "0"}, {"memory": "0.0"}, {"memory": "0e3"}])
def test_a_pod_that_asks_for_nothing_is_not_its(limits: dict[str, str]) -> None:
    subject = pod(container(**limits), labels={COUNT: "2"})  # type: ignore[arg-type]
    assert AliyunDialect().recognises(subject) == ()


def test_names_are_configurable() -> None:
    settings = AliyunSettings(memory="example.com/mem", count="example.com/count")
    subject = pod(
        ForeignContainer(name="main", limits={"example.com/mem": "8"}),
        labels={"example.com/count": "4"},
    )
    (found,) = AliyunDialect(settings).translate(subject).containers
    assert found.request.count == 4
    assert found.request.memory.size_bytes == 2 * GI
    assert AliyunDialect().recognises(subject) == ()


@pytest.mark.parametrize("wrong", [{"memoryUnit": "GB"}, {"placement": "binpak"}])
def test_settings_that_are_no_words_are_refused(wrong: dict[str, str]) -> None:
    with pytest.raises(UsageError, match=next(iter(wrong.values()))):
        settings_of({"aliyun": wrong})


# ---- result annotations and take-over ------------------------------------------------------------


def test_the_result_has_both_forms() -> None:
    subject = pod(container("web"), container("train", memory=3, compute=20))
    given = booking(train=[PlacedDevice("GPU-c", 3 * GI, 2000)])
    found = AliyunDialect().result_annotations(subject, given, NODE, now=1700000000.5)
    assert found == {
        IDX: "7",
        "ALIYUN_COM_GPU_MEM_POD": "3",
        "ALIYUN_COM_GPU_MEM_DEV": "15",
        "ALIYUN_COM_GPU_MEM_ASSIGNED": "true",
        "ALIYUN_COM_GPU_MEM_ASSUME_TIME": "1700000000500000000",
        ALLOCATION: '{"1":{"7":3}}',
        "scheduler.framework.gpushare.assigned": "true",
        "scheduler.framework.gpushare.assume-time": "1700000000500000000",
        "gpushare.alibabacloud.com/core-percentage": '{"1":{"7":20}}',
    }


def test_the_old_form_is_left_out_where_it_cannot_say_it() -> None:
    given = booking(main=[PlacedDevice("GPU-a", 4 * GI), PlacedDevice("GPU-b", 4 * GI)])
    found = AliyunDialect().result_annotations(pod(container(memory=8)), given, NODE, now=0)
    assert json.loads(found[ALLOCATION]) == {"0": {"0": 4, "1": 4}}
    assert IDX not in found


def test_an_init_container_alone_has_no_result() -> None:
    subject = pod(container("warm", kind=ContainerKind.INIT, memory=1), container("web"))
    given = booking(warm=[PlacedDevice("GPU-a", GI)])
    assert AliyunDialect().result_annotations(subject, given, NODE, now=0) == {}


def test_a_result_reads_back_as_what_was_given() -> None:
    labels = {COUNT: "2"}
    subject = pod(
        container("web", memory=2), container("train", memory=8, compute=100), labels=labels
    )
    given = booking(
        web=[PlacedDevice("GPU-b", GI), PlacedDevice("GPU-a", GI)],
        train=[PlacedDevice("GPU-a", 4 * GI, 5000), PlacedDevice("GPU-b", 4 * GI, 5000)],
    )
    result = AliyunDialect().result_annotations(subject, given, NODE, now=0)
    running = pod(*subject.containers, labels=labels, annotations=dict(result))
    found = taken(AliyunDialect(), running)
    assert {name: {*had} for name, had in given_to(found).items()} == {
        name: {*had} for name, had in given_to(given).items()
    }
    assert found is not None
    assert [each.place for each in found.containers] == [0, 1]


def test_a_running_pod_of_the_old_form_is_taken_over() -> None:
    running = pod(container(memory=3), annotations={IDX: "1", "ALIYUN_COM_GPU_MEM_POD": "3"})
    found = taken(AliyunDialect(), running)
    assert given_to(found) == {"main": (PlacedDevice("GPU-b", 3 * GI),)}


@pytest.mark.parametrize(
    "annotations",
    [{}, {IDX: "-1"}, {IDX: "1", DIALECT: "aliyun"}, {ALLOCATION: "{}"}],
    ids=["nothing", "no-gpu-was-found", "ours", "empty"],
)
def test_nothing_is_taken_over_where_nothing_was_given(annotations: dict[str, str]) -> None:
    assert taken(AliyunDialect(), pod(container(memory=3), annotations=annotations)) is None


@pytest.mark.parametrize(
    "annotations",
    [
        {IDX: "5"},
        {IDX: "0,1"},
        {IDX: "first"},
        {ALLOCATION: "[]"},
        {ALLOCATION: '{"9":{"0":3}}'},
        {ALLOCATION: '{"0":{"5":3}}'},
        {ALLOCATION: '{"0":{"0":1e99}}'},
        {ALLOCATION: '{"0":{"0":1,"1":2}}'},
    ],
)
def test_what_cannot_be_read_is_an_error_and_no_guess(annotations: dict[str, str]) -> None:
    with pytest.raises(UsageError, match="team/binpack-1-"):
        taken(AliyunDialect(), pod(container(memory=3), annotations=annotations))


# ---- any text ------------------------------------------------------------------------------------

pods = st.builds(
    lambda memory, compute, weight, count, placement, model, extra: pod(
        ForeignContainer(
            name="main",
            limits={
                MEMORY: memory,
                **({COMPUTE: compute} if compute is not None else {}),
            },
            environment={} if weight is None else {"ALIYUN_COM_GPU_SCHD_WEIGHT": weight},
        ),
        labels={} if count is None else {COUNT: count},
        selector={
            key: text
            for key, text in (
                ("ack.node.gpu.placement", placement),
                ("aliyun.accelerator/nvidia_name", model),
            )
            if text is not None
        },
        annotations=extra,
    ),
    texts,
    st.none() | texts,
    st.none() | texts,
    st.none() | texts,
    st.none() | texts,
    st.none() | texts,
    st.dictionaries(st.sampled_from([IDX, ALLOCATION, "ALIYUN_COM_GPU_MEM_POD"]), texts),
)


@given(subject=pods)
def test_any_text_is_translated_or_refused(subject: ForeignPod) -> None:
    check_translation(AliyunDialect(), subject)


@given(subject=pods)
def test_any_text_is_taken_over_or_refused(subject: ForeignPod) -> None:
    check_take_over(AliyunDialect(), subject)


@given(
    count=st.integers(min_value=1, max_value=8),
    each=st.integers(min_value=1, max_value=1000),
    percent=st.integers(min_value=0, max_value=100),
)
def test_what_is_written_natively_is_what_was_asked(count: int, each: int, percent: int) -> None:
    subject = pod(
        container(memory=each * count, compute=percent * count), labels={COUNT: str(count)}
    )
    found = AliyunDialect().translate(subject)
    (wanted,) = wanted_of(applied(subject, written(subject, found)))
    assert wanted.request.memory.size_bytes == each * GI
    assert wanted.request.count == count
    assert Fraction(wanted.request.compute.guarantee, WHOLE) == Fraction(percent, 100)


def test_every_key_is_documented_and_no_other(root: Path) -> None:
    dialect = AliyunDialect()
    read = (*dialect.resources, *dialect.labels, *SELECTORS, *VARIABLES)
    assert documented(root, "Aliyun") == sorted((*read, *RESULTS))
