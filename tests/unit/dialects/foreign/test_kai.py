# SPDX-License-Identifier: Apache-2.0
"""KAI's dialect: fractions, MiB, NvFractions."""

from fractions import Fraction
from pathlib import Path

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

from allotment.dialects.foreign.base import DIALECT, Translation
from allotment.dialects.foreign.kai import FIELDS, QUEUE, RECEIVED, KaiDialect, KaiSettings
from allotment.dialects.foreign.translate import written
from allotment.model.clusters import PlacedDevice
from allotment.model.compute import WHOLE, Compute
from allotment.model.errors import UsageError
from allotment.model.pods import ContainerKind, ForeignContainer, ForeignPod
from allotment.model.requests import Request
from allotment.model.structs import replace

KAI = KaiDialect()
PREFIX = "nvidia.com/container."
CONTAINERS = (
    ForeignContainer(name="setup", kind=ContainerKind.INIT),
    ForeignContainer(name="trainer"),
    ForeignContainer(name="side"),
)


def pod(
    annotations: dict[str, str],
    *,
    containers: tuple[ForeignContainer, ...] = CONTAINERS,
    labels: dict[str, str] | None = None,
) -> ForeignPod:
    return ForeignPod(
        namespace="team",
        name="gpu-sharing",
        annotations=annotations,
        labels=labels or {},
        containers=containers,
        scheduler="kai-scheduler",
        node="node-1",
    )


def field(name: str, text: str, container: str = "trainer") -> dict[str, str]:
    return {f"{PREFIX}{container}.{name}": text}


def translated(annotations: dict[str, str], settings: KaiSettings | None = None) -> Translation:
    dialect = KaiDialect(settings)
    assert dialect.recognises(pod(annotations))
    return dialect.translate(pod(annotations))


def request(annotations: dict[str, str], settings: KaiSettings | None = None) -> Request:
    (found,) = translated(annotations, settings).containers
    assert found.container == "trainer"
    return found.request


def test_a_fraction_is_of_memory_and_says_nothing_of_compute() -> None:
    found = request({"gpu-fraction": "0.5"})
    assert found.memory.part == Fraction(1, 2)
    assert found.compute == Compute()
    assert found.count == 1


def test_a_fraction_guarantees_compute_where_the_cluster_had_it_so() -> None:
    found = request({"gpu-fraction": "0.25"}, KaiSettings(guarantees_compute=True))
    assert found.compute == Compute(2500, WHOLE, is_governed=True)


def test_memory_is_a_number_of_mib() -> None:
    assert request({"gpu-memory": "2000"}).memory.size_bytes == 2000 * MI


def test_the_number_of_devices_is_with_that_much_of_each() -> None:
    found = request({"gpu-fraction": "0.3", "gpu-fraction-num-devices": "2"})
    assert (found.count, found.memory.part) == (2, Fraction(3, 10))
    assert request({"gpu-memory": "2000", "gpu-fraction-num-devices": "3"}).count == 3


@pytest.mark.parametrize(
    ("annotations", "memory", "told"),
    [
        ({"gpu-fraction": "0.25", "gpu-fraction-limit": "0.8"}, Fraction(4, 5), "80%"),
        ({"gpu-fraction": "0.25", "gpu-fraction-limit": "1"}, Fraction(1), "100%"),
        ({"gpu-memory": "2000", "gpu-memory-limit": "4096"}, 4096 * MI, "4Gi"),
        ({"gpu-fraction": "0.5", "gpu-fraction-limit": "0.50"}, Fraction(1, 2), None),
        ({"gpu-memory": "2000", "gpu-memory-limit": "2000"}, 2000 * MI, None),
    ],
    ids=str,
)
def test_run_ais_limit_above_the_request_is_reserved_and_that_is_told(
    annotations: dict[str, str], memory: Fraction | int, told: str | None
) -> None:
    found = translated(annotations, KaiSettings(guarantees_compute=True))
    (its,) = (each.request for each in found.containers)
    assert memory in {its.memory.part, its.memory.size_bytes}
    guarantees = {"0.25": 2500, "0.5": 5000}
    assert its.compute.guarantee == guarantees.get(annotations.get("gpu-fraction", ""), 0)
    key = next(iter(annotations))
    expected = f"{key}: the limit, {told}, is reserved in full"
    assert [each.startswith(expected) for each in found.passed_over] == ([True] if told else [])


@pytest.mark.parametrize("name", ["setup", "side"])
def test_another_container_is_chosen_by_name(name: str) -> None:
    found = translated({"gpu-fraction": "0.5", "gpu-fraction-container-name": name})
    assert [each.container for each in found.containers] == [name]


@pytest.mark.parametrize(
    ("annotations", "word"),
    [
        ({"gpu-fraction": "1"}, "not between 0 and 1"),
        ({"gpu-fraction": "1.0"}, "not between 0 and 1"),
        ({"gpu-fraction": "0"}, "not between 0 and 1"),
        ({"gpu-fraction": "-0.5"}, "'-0.5'"),
        ({"gpu-fraction": "half"}, "'half'"),
        ({"gpu-fraction": "nan"}, "'nan'"),
        ({"gpu-memory": "0"}, "gpu-memory is 0"),
        ({"gpu-memory": "2Gi"}, "'2Gi'"),
        ({"gpu-memory": "99999999999999"}, "than any GPU"),
        ({"gpu-fraction": "0.5", "gpu-memory": "2000"}, "gpu-fraction and gpu-memory"),
        ({"gpu-fraction-num-devices": "2"}, "no amount of GPU memory"),
        ({"gpu-fraction": "0.5", "gpu-fraction-num-devices": "0"}, "num-devices is 0"),
        ({"gpu-fraction": "0.5", "gpu-fraction-num-devices": "two"}, "'two'"),
        ({"gpu-fraction": "0.5", "gpu-fraction-container-name": "sude"}, "did you mean 'side'"),
        ({"gpu-fraction": "0.5", "gpu-fraction-limit": "0.4"}, "is more than gpu-fraction-limit"),
        ({"gpu-fraction": "0.5", "gpu-fraction-limit": "1.5"}, "gpu-fraction-limit is '1.5'"),
        ({"gpu-fraction": "0.5", "gpu-memory-limit": "4000"}, "gpu-fraction and gpu-memory-limit"),
        ({"gpu-memory": "2000", "gpu-memory-limit": "1000"}, "is more than gpu-memory-limit"),
        ({"gpu-memory": "2000", "gpu-memory-limit": "4Gi"}, "'4Gi'"),
        ({"gpu-memory": "2000", "gpu-fraction-limit": "0.5"}, "gpu-memory and gpu-fraction-limit"),
        ({"gpu-fraction-limit": "0.5"}, "gpu-fraction-limit sets no amount of GPU memory"),
        ({"gpu-memory-limit": "2000"}, "gpu-memory-limit sets no amount of GPU memory"),
        ({"mps": "true"}, "mps is 'true', and it asks for no part of a GPU"),
        ({"mps": "True"}, "asks for no part of a GPU"),
        ({"gpu-fraction": "0.5", "mps": "yes"}, "'yes'"),
        (
            {"gpu-fraction": "0.5", "mps": "true", "gpu-fraction-num-devices": "2"},
            "shared by MPS, where a share has one GPU",
        ),
        (
            {
                "gpu-fraction": "0.5",
                "mps": "true",
                "kai.scheduler/gpu-compute-sharing-mode": "time-slicing",
            },
            "contradict each other: parts take turns, and they run at once",
        ),
        (
            {"gpu-fraction": "0.5", "kai.scheduler/gpu-compute-sharing-mode": "sm-shering"},
            "did you mean 'sm-sharing'",
        ),
    ],
)
def test_refused_with_the_reason(annotations: dict[str, str], word: str) -> None:
    with pytest.raises(UsageError, match=word) as caught:
        translated(annotations)
    assert caught.value.message.startswith("pod team/gpu-sharing")
    assert caught.value.hint


@pytest.mark.parametrize(
    ("said", "mode", "annotation"),
    [
        ({}, "soft", None),
        ({"mps": "true"}, "mps", "mps"),
        ({"mps": "False"}, "soft", "soft"),
        ({"kai.scheduler/gpu-compute-sharing-mode": "time-slicing"}, "soft", "soft"),
        ({"kai.scheduler/gpu-compute-sharing-mode": "sm-sharing"}, "mps", "mps"),
        ({"kai.scheduler/gpu-compute-sharing-mode": "sm-sharing", "mps": "true"}, "mps", "mps"),
        (
            {"kai.scheduler/gpu-compute-sharing-mode": "time-slicing", "mps": "false"},
            "soft",
            "soft",
        ),
    ],
)
def test_how_a_part_is_shared_is_its_mode(
    said: dict[str, str], mode: str, annotation: str | None
) -> None:
    subject = pod({"gpu-fraction": "0.5", **said})
    found = KAI.translate(subject)
    assert [each.request.mode for each in found.containers] == [mode]
    assert written(subject, found).annotations.get("allotment.dev/mode") == annotation


def test_a_container_s_own_word_wins_over_the_pod_s() -> None:
    subject = pod(
        field("gpu-memory.limit", "4Gi")
        | field("gpu-compute.mode", "sm-sharing")
        | {"kai.scheduler/gpu-compute-sharing-mode": "time-slicing"}
    )
    assert [each.request.mode for each in KAI.translate(subject).containers] == ["mps"]


@pytest.mark.parametrize(
    "name", ["nvidia.com/gpu", "nvidia.com/gpu.shared", "nvidia.com/mig-1g.5gb"]
)
def test_a_whole_gpu_beside_a_part_is_refused(name: str) -> None:
    containers = (
        ForeignContainer(name="trainer"),
        ForeignContainer(name="side", limits={name: "1"}),
    )
    subject = pod({"gpu-fraction": "0.5"}, containers=containers)
    with pytest.raises(UsageError, match="'side'"):
        KAI.translate(subject)
    none = pod(
        {"gpu-fraction": "0.5"},
        containers=(ForeignContainer(name="trainer", limits={name: "0"}),),
    )
    assert KAI.translate(none).containers


def test_mps_without_a_part_is_refused_beside_a_whole_gpu_too() -> None:
    whole = (ForeignContainer(name="trainer", limits={"nvidia.com/gpu": "1"}),)
    subject = pod({"mps": "true"}, containers=whole)
    with pytest.raises(UsageError, match="asks for no part of a GPU"):
        KAI.translate(subject)
    assert KAI.recognises(replace(subject, scheduler="default-scheduler")) == ()


def test_a_queue_stays_and_orders_nothing() -> None:
    subject = pod({"gpu-fraction": "0.5"}, labels={"kai.scheduler/queue": "default-queue"})
    (said,) = KAI.translate(subject).passed_over
    assert "kai.scheduler/queue" in said


@pytest.mark.parametrize(
    "annotations", [{}, {"mps": "false"}, {"gpu-fraction-container-name": "side"}]
)
def test_what_asks_for_no_memory_is_not_its(annotations: dict[str, str]) -> None:
    subject = pod(annotations, labels={"kai.scheduler/queue": "default-queue"})
    assert KAI.recognises(subject) == ()


# ---- NvFractions ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "size"),
    [("7680Mi", 7680 * MI), ("1.5Gi", 1536 * MI), ("4096M", 3907 * MI), ("1048577", 2 * MI)],
)
def test_a_request_alone_is_the_limit_in_whole_mib(text: str, size: int) -> None:
    assert request(field("gpu-memory.request", text)).memory.size_bytes == size
    assert request(field("gpu-memory.limit", text)).memory.size_bytes == size


def test_a_limit_above_the_request_is_reserved_and_that_is_told() -> None:
    annotations = field("gpu-memory.request", "4Gi") | field("gpu-memory.limit", "8Gi")
    found = translated(annotations)
    assert found.containers[0].request.memory.size_bytes == 8 * GI
    assert "8Gi" in found.passed_over[0]
    same = field("gpu-memory.request", "4Gi") | field("gpu-memory.limit", "4096Mi")
    assert translated(same).passed_over == ()


def test_each_container_has_its_own() -> None:
    annotations = field("gpu-memory.limit", "4Gi") | field("gpu-memory.limit", "2Gi", "setup")
    found = translated(annotations)
    assert [(each.container, each.request.memory.size_bytes) for each in found.containers] == [
        ("setup", 2 * GI),
        ("trainer", 4 * GI),
    ]


def test_devices_are_counted_for_it_too() -> None:
    found = request(field("gpu-memory.limit", "4Gi") | {"gpu-fraction-num-devices": "2"})
    assert (found.count, found.memory.size_bytes) == (2, 4 * GI)


@pytest.mark.parametrize(
    ("annotations", "word"),
    [
        (field("gpu-memory.request", "8Gi") | field("gpu-memory.limit", "4Gi"), "more than"),
        (field("gpu-memory.limit", "512Ki"), "less than 1Mi"),
        (field("gpu-memory.limit", "0"), "less than 1Mi"),
        (field("gpu-memory.limit", "4GB"), "4GB"),
        (field("gpu-memory.limit", "-4Gi"), "negative"),
        (field("gpu-memory.limit", "9Ei"), "2\\*\\*63"),
        (field("gpu-memory.limit", "4Gi", "trainr"), "did you mean 'trainer'"),
        (field("gpu-memory.lim", "4Gi"), "did you mean 'gpu-memory.limit'"),
        (field("gpu-compute.portion", "0.5") | field("gpu-memory.limit", "4Gi"), "is unknown"),
        (field("gpu-compute.mode", "time-slicing"), "no amount of GPU memory"),
        (field("gpu-compute.mode", "mps") | field("gpu-memory.limit", "4Gi"), "'mps'"),
        (field("gpu-compute.mode", "") | field("gpu-memory.limit", "4Gi"), "''"),
        (
            field("gpus.devices", "GPU-a") | field("gpu-memory.limit", "4Gi"),
            "records an allocation",
        ),
        (field("gpu-memory.limit", "4Gi") | {"gpu-fraction": "0.5"}, "gpu-fraction"),
        (field("gpu-memory.limit", "4Gi") | {"gpu-memory": "2000"}, "gpu-memory"),
        (field("gpu-memory.limit", "4Gi") | {"gpu-memory-limit": "2000"}, "gpu-memory-limit"),
        (
            field("gpu-memory.limit", "4Gi") | {"gpu-fraction-container-name": "side"},
            "gpu-fraction-container-name",
        ),
        (
            field("gpu-memory.limit", "4Gi")
            | field("gpu-memory.limit", "4Gi", "side")
            | {"gpu-fraction-num-devices": "2"},
            "several containers ask for GPUs",
        ),
    ],
)
def test_fractions_are_refused_with_the_reason(annotations: dict[str, str], word: str) -> None:
    with pytest.raises(UsageError, match=word) as caught:
        KAI.translate(replace(pod(annotations), node=""))
    assert caught.value.message.startswith("pod team/gpu-sharing")
    assert caught.value.hint


def test_the_prefix_is_configurable() -> None:
    dialect = KaiDialect(KaiSettings(prefix="example.com/container."))
    subject = pod({"example.com/container.trainer.gpu-memory.limit": "4Gi"})
    (found,) = dialect.translate(subject).containers
    assert found.request.memory.size_bytes == 4 * GI
    assert dialect.recognises(pod(field("gpu-memory.limit", "4Gi"))) == ()


# ---- result annotations and take-over ------------------------------------------------------------


def test_the_result_names_the_gpus_where_fractions_were_asked_for() -> None:
    given = booking(trainer=[PlacedDevice("GPU-c", 4 * GI), PlacedDevice("GPU-a", 4 * GI)])
    subject = pod(field("gpu-memory.limit", "4Gi") | {"gpu-fraction-num-devices": "2"})
    result = KAI.result_annotations(subject, given, NODE, now=0)
    assert result == {
        "received-resource-type": "Fraction",
        f"{PREFIX}trainer.gpus.devices": "GPU-c,GPU-a",
    }
    running = pod({**subject.annotations, **result})
    assert given_to(taken(KAI, running)) == given_to(given)
    assert taken(KAI, pod({**running.annotations, DIALECT: "kai"})) is None
    plain = KAI.result_annotations(pod({"gpu-fraction": "0.5"}), given, NODE, now=0)
    assert plain == {"received-resource-type": "Fraction"}


def test_indexes_are_understood_on_pods_of_its_scheduler() -> None:
    asked = field("gpu-memory.request", "1Gi") | {"gpu-fraction-num-devices": "2"}
    running = pod(field("gpus.devices", "7, 0") | asked)
    parts = (PlacedDevice("GPU-c", GI), PlacedDevice("GPU-a", GI))
    assert given_to(taken(KAI, running)) == {"trainer": parts}
    # Anybody may put a label on a pod that another scheduler has bound.
    queued = replace(running, scheduler="default-scheduler", labels={QUEUE: "team"})
    assert KAI.recognises(queued)
    assert taken(KAI, queued) is None


def test_which_gpu_a_plain_fraction_has_cannot_be_read() -> None:
    running = pod({"gpu-fraction": "0.5"}, labels={"runai-gpu-group": "6f0d"})
    with pytest.raises(UsageError, match="reservation pod"):
        taken(KAI, running)
    assert taken(KAI, pod({"gpu-fraction": "0.5"})) is None


@pytest.mark.parametrize("text", ["GPU-x", "all", "5", "GPU-a,,GPU-b"])
def test_what_cannot_be_read_is_an_error_and_no_guess(text: str) -> None:
    asked = field("gpu-memory.request", "1Gi") | {
        "gpu-fraction-num-devices": str(len(text.split(",")))
    }
    with pytest.raises(UsageError, match="not a GPU of the node"):
        taken(KAI, pod(field("gpus.devices", text) | asked))


# ---- any text ------------------------------------------------------------------------------------

keys = st.sampled_from(
    [
        "gpu-fraction",
        "gpu-memory",
        "gpu-fraction-limit",
        "gpu-memory-limit",
        "gpu-fraction-num-devices",
        "gpu-fraction-container-name",
        "mps",
        "kai.scheduler/gpu-compute-sharing-mode",
        "received-resource-type",
        *(
            f"{PREFIX}{name}.{each}"
            for name in ("trainer", "setup", "nobody")
            for each in ("gpu-memory.request", "gpu-memory.limit", "gpu-compute.mode")
        ),
        f"{PREFIX}trainer.gpus.devices",
        f"{PREFIX}.",
        PREFIX,
    ]
)


@given(
    annotations=st.dictionaries(keys, st.one_of(texts, st.sampled_from(["trainer", "side"]))),
    limits=st.dictionaries(st.sampled_from(["nvidia.com/gpu", "cpu"]), texts, max_size=1),
)
def test_any_text_is_translated_or_refused(
    annotations: dict[str, str], limits: dict[str, str]
) -> None:
    containers = (*CONTAINERS[:2], ForeignContainer(name="side", limits=limits))
    subject = pod(annotations, containers=containers)
    check_translation(KAI, subject)
    check_take_over(KAI, subject)


@given(percent=st.integers(min_value=1, max_value=9999))
def test_a_fraction_is_exact(percent: int) -> None:
    found = request({"gpu-fraction": f"0.{percent:04d}"})
    assert found.memory.part == Fraction(percent, 10000)


def test_every_key_is_documented_and_no_other(root: Path) -> None:
    plain = [each for each in KAI.annotations if not each.endswith("*")]
    fields = [f"{PREFIX}NAME.{each}" for each in FIELDS]
    assert documented(root, "KAI") == sorted((*plain, *fields, QUEUE, RECEIVED, fields[-1]))
