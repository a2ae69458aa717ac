# SPDX-License-Identifier: Apache-2.0
"""Tencent's dialects: gpu-manager's vcuda, qGPU, and elastic-gpu."""

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

from allotment.dialects.foreign.base import DIALECT, ForeignDialect, Translation
from allotment.dialects.foreign.settings import foreign_dialects, settings_of
from allotment.dialects.foreign.tencent import (
    ASSUMED,
    CONTAINER_PREFIX,
    INDEX_PREFIX,
    RESULTS,
    ElasticGpuDialect,
    QgpuDialect,
    TencentDialect,
    TencentSettings,
)
from allotment.model.clusters import PlacedDevice
from allotment.model.compute import WHOLE, Compute, ComputeClass
from allotment.model.errors import UsageError
from allotment.model.pods import ContainerKind, ForeignContainer, ForeignPod
from allotment.model.requests import Request

NAMES = {
    "core": "tencent.com/vcuda-core",
    "memory": "tencent.com/vcuda-memory",
    "qcore": "tke.cloud.tencent.com/qgpu-core",
    "qmemory": "tke.cloud.tencent.com/qgpu-memory",
    "greedy": "tke.cloud.tencent.com/qgpu-core-greedy",
    "ecore": "elasticgpu.io/gpu-core",
    "ememory": "elasticgpu.io/gpu-memory",
}
LIMIT = "tencent.com/vcuda-core-limit"
CLASS = "tke.cloud.tencent.com/app-class"


def container(
    name: str = "main", *, kind: ContainerKind = ContainerKind.REGULAR, **limits: str | int
) -> ForeignContainer:
    amounts = {NAMES[each]: str(value) for each, value in limits.items()}
    return ForeignContainer(name=name, kind=kind, limits=amounts)


def pod(*containers: ForeignContainer, **annotations: str) -> ForeignPod:
    names = {"limit": LIMIT, "kind": CLASS}
    return ForeignPod(
        namespace="team",
        name="vcuda",
        node="node-1",
        annotations={names.get(each, each): text for each, text in annotations.items()},
        containers=containers,
    )


def translated(subject: ForeignPod, dialect: ForeignDialect | None = None) -> Translation:
    dialect = dialect or TencentDialect()
    assert dialect.recognises(subject)
    return dialect.translate(subject)


def request(subject: ForeignPod, dialect: ForeignDialect | None = None) -> Request:
    (found,) = translated(subject, dialect).containers
    return found.request


# ---- vcuda ---------------------------------------------------------------------------------------


def test_a_part_is_fixed_and_memory_counts_256_mib() -> None:
    found = request(pod(container(core=50, memory=30)))
    assert found.memory.size_bytes == 7680 * MI
    assert found.compute == Compute(5000, 5000, is_governed=True)
    assert found.count == 1


@pytest.mark.parametrize(("limit", "ceiling"), [("50", 5000), ("80", 8000), ("300", WHOLE)])
def test_the_annotation_is_the_ceiling(limit: str, ceiling: int) -> None:
    found = request(pod(container(core=30, memory=30), limit=limit))
    assert found.compute == Compute(3000, ceiling, is_governed=True)


@pytest.mark.parametrize("cards", [1, 2, 8])
def test_multiples_of_100_are_whole_cards(cards: int) -> None:
    found = request(pod(container(core=100 * cards, memory=60)))
    assert found.count == cards
    assert found.memory.part == Fraction(1)
    assert found.compute == Compute(WHOLE, WHOLE, is_governed=True)


def test_a_ceiling_says_nothing_to_whole_cards_and_that_is_told() -> None:
    found = translated(pod(container(core=200), limit="50"))
    assert found.containers[0].request.compute.ceiling == WHOLE
    assert LIMIT in found.passed_over[0]


@pytest.mark.parametrize(
    ("amounts", "annotations", "words"),
    [
        ({"core": 150, "memory": 1}, {}, ("vcuda-core", "150")),
        ({"core": 30}, {}, ("without tencent.com/vcuda-memory",)),
        ({"memory": 30}, {}, ("without tencent.com/vcuda-core",)),
        ({"core": 30, "memory": 30}, {"limit": "20"}, ("30", "20")),
        ({"core": 30, "memory": 30}, {"limit": "0"}, (LIMIT, "0")),
        ({"core": 30, "memory": 30}, {"limit": "half"}, (LIMIT, "'half'")),
        ({"core": 30, "memory": 30}, {"limit": ""}, (LIMIT, "''")),
        ({"core": "0.3", "memory": 30}, {}, ("vcuda-core", "0.3")),
        ({"core": 30, "memory": "30Gi"}, {}, ("vcuda-memory", "more than any GPU")),
        ({"core": "1e9"}, {}, ("vcuda-core", "1000000000")),
    ],
)
def test_refused_with_the_reason(
    amounts: dict[str, str | int], annotations: dict[str, str], words: tuple[str, ...]
) -> None:
    with pytest.raises(UsageError) as caught:
        translated(pod(container(**amounts), **annotations))  # type: ignore[arg-type]
    assert all(each in caught.value.message for each in words), caught.value.message
    assert caught.value.message.startswith("pod team/vcuda")
    assert caught.value.hint


def test_each_container_has_its_own() -> None:
    found = translated(
        pod(
            container("warm", kind=ContainerKind.INIT, core=10, memory=4),
            container("web"),
            container("train", core=200),
        )
    )
    assert [each.container for each in found.containers] == ["warm", "train"]
    assert found.containers[0].removes == ("tencent.com/vcuda-core", "tencent.com/vcuda-memory")


def test_names_and_the_block_are_configurable() -> None:
    settings = TencentSettings(
        core="example.com/core", memory="example.com/memory", memory_block_bytes=MI
    )
    limits = {"example.com/core": "20", "example.com/memory": "2048"}
    subject = pod(ForeignContainer(name="main", limits=limits))
    assert request(subject, TencentDialect(settings)).memory.size_bytes == 2 * GI
    assert TencentDialect().recognises(subject) == ()


def test_what_is_in_requests_alone_is_read_too() -> None:
    limits = {NAMES["core"]: "50", NAMES["memory"]: "30"}
    subject = pod(ForeignContainer(name="main", requests=limits))
    assert request(subject).memory.size_bytes == 7680 * MI


def test_limits_and_requests_that_differ_are_refused() -> None:
    names = (NAMES["core"], NAMES["memory"])
    subject = pod(
        ForeignContainer(
            name="main",
            limits=dict.fromkeys(names, "50"),
            requests=dict.fromkeys(names, "30"),
        )
    )
    with pytest.raises(UsageError, match="limits"):
        translated(subject)


def test_the_result_is_by_the_place_of_a_regular_container() -> None:
    subject = pod(
        container("warm", kind=ContainerKind.INIT, core=10, memory=4),
        container("web"),
        container("train", core=200),
    )
    given = booking(
        warm=[PlacedDevice("GPU-a", GI)],
        train=[PlacedDevice("GPU-c", 15 * GI, WHOLE), PlacedDevice("GPU-a", 15 * GI, WHOLE)],
    )
    assert TencentDialect().result_annotations(subject, given, NODE, now=12.25) == {
        "tencent.com/predicate-gpu-idx-1": "7,0",
        "tencent.com/predicate-node": "node-1",
        "tencent.com/predicate-time": "12250000000",
        "tencent.com/gpu-assigned": "true",
    }


def test_a_result_reads_back_as_what_was_given() -> None:
    subject = pod(container("web", core=30, memory=8), container("train", core=200))
    given = booking(
        web=[PlacedDevice("GPU-b", 2 * GI, 3000)],
        train=[PlacedDevice("GPU-c", 15 * GI, WHOLE), PlacedDevice("GPU-a", 15 * GI, WHOLE)],
    )
    result = TencentDialect().result_annotations(subject, given, NODE, now=0)
    running = pod(*subject.containers, **result)
    assert given_to(taken(TencentDialect(), running)) == given_to(given)
    ours = pod(*subject.containers, **result, **{DIALECT: "tencent"})
    assert taken(TencentDialect(), ours) is None


@pytest.mark.parametrize(("node", "is_taken"), [("node-1", True), ("node-2", False), (None, True)])
def test_a_record_of_another_node_was_copied_and_counts_for_nothing(
    node: str | None,
    is_taken: bool,  # noqa: FBT001 - a parameter of the test
) -> None:
    record = {"tencent.com/predicate-gpu-idx-0": "0"}
    if node is not None:
        record["tencent.com/predicate-node"] = node
    running = pod(container("main", core=30, memory=8), **record)
    assert (taken(TencentDialect(), running) is not None) == is_taken


@pytest.mark.parametrize("text", ["9", "", "0,0", "GPU-a", "-1"])
def test_what_cannot_be_read_is_an_error_and_no_guess(text: str) -> None:
    running = pod(container(core=30, memory=8), **{"tencent.com/predicate-gpu-idx-0": text})
    with pytest.raises(UsageError, match="predicate-gpu-idx-0"):
        taken(TencentDialect(), running)


# ---- qGPU ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "compute"),
    [
        ("fixed-share", Compute(3000, 3000, is_governed=True)),
        ("burst-share", Compute(3000, WHOLE, is_governed=True)),
        ("best-effort", Compute(is_governed=True)),
    ],
)
def test_what_cores_mean_is_the_clusters_policy(policy: str, compute: Compute) -> None:
    dialects = foreign_dialects(settings_of({"qgpu": {"policy": policy}}))
    (qgpu,) = (each for each in dialects if isinstance(each, QgpuDialect))
    found = request(pod(container(qcore=30, qmemory=5)), qgpu)
    assert found.memory.size_bytes == 5 * GI
    assert found.compute == compute


def test_whole_cards_of_qgpu() -> None:
    found = translated(pod(container(qcore=200, qmemory=5)), QgpuDialect())
    assert (found.containers[0].request.count, len(found.passed_over)) == (2, 1)


def test_offline_pods_have_what_is_left_in_the_proportion_they_ask_for() -> None:
    found = request(pod(container(greedy=40, qmemory=5), kind="offline"), QgpuDialect())
    kind = ComputeClass.BESTEFFORT
    assert found.compute == Compute(weight=40, kind=kind, is_governed=True)


def test_online_pods_go_first() -> None:
    found = request(pod(container(qmemory=5), kind="online"), QgpuDialect())
    assert found.compute == Compute(kind=ComputeClass.LATENCY, is_governed=True)


@pytest.mark.parametrize(
    ("amounts", "annotations", "word"),
    [
        ({"qcore": 30}, {}, "qgpu-memory"),
        ({"qcore": 130, "qmemory": 5}, {}, "130"),
        ({"greedy": 200, "qmemory": 5}, {"kind": "offline"}, "200"),
        ({"greedy": 20, "qmemory": 5}, {"kind": "online"}, "online"),
        ({"greedy": 20, "qcore": 20, "qmemory": 5}, {}, "qgpu-core"),
        ({"qcore": 20, "qmemory": 5}, {"kind": "offline"}, "offline"),
        ({"qmemory": 5}, {"kind": "ofline"}, "did you mean 'offline'"),
        ({"qmemory": "5Gi"}, {}, "qgpu-memory"),
    ],
)
def test_qgpu_refuses_with_the_reason(
    amounts: dict[str, str | int], annotations: dict[str, str], word: str
) -> None:
    with pytest.raises(UsageError, match=word) as caught:
        translated(pod(container(**amounts), **annotations), QgpuDialect())  # type: ignore[arg-type]
    assert caught.value.hint


def test_a_policy_that_is_no_word_is_refused() -> None:
    with pytest.raises(UsageError, match=r"'fixed'.*policy"):
        settings_of({"qgpu": {"policy": "fixed"}})


def test_qgpu_writes_no_result_and_a_running_pod_of_its_is_no_guess() -> None:
    subject = pod(container(qcore=30, qmemory=5))
    given = booking(main=[PlacedDevice("GPU-a", 5 * GI, 3000)])
    assert QgpuDialect().result_annotations(subject, given, NODE, now=0) == {}
    with pytest.raises(UsageError, match="qGPU"):
        taken(QgpuDialect(), subject)
    assert taken(QgpuDialect(), pod(container())) is None


# ---- elastic-gpu ---------------------------------------------------------------------------------


def test_elastic_gpu_counts_mib_and_whole_cards() -> None:
    assert request(pod(container(ememory=2048)), ElasticGpuDialect()).memory.size_bytes == 2 * GI
    assert request(pod(container(ecore=300)), ElasticGpuDialect()).count == 3
    both = request(pod(container(ecore=20, ememory=2048)), ElasticGpuDialect())
    assert both.compute == Compute(2000, 2000, is_governed=True)


def test_elastic_gpu_refuses_a_part_without_memory() -> None:
    with pytest.raises(UsageError, match="gpu-core is 20"):
        translated(pod(container(ecore=20)), ElasticGpuDialect())


def test_elastic_gpus_result_reads_back() -> None:
    subject = pod(container("train", ecore=20, ememory=2048), container("web"))
    given = booking(train=[PlacedDevice("GPU-c", 2 * GI, 2000)])
    result = ElasticGpuDialect().result_annotations(subject, given, NODE, now=0)
    assert result == {"elasticgpu.io/container-train": "7", "elasticgpu.io/assumed": "true"}
    running = pod(*subject.containers, **result)
    assert given_to(taken(ElasticGpuDialect(), running)) == given_to(given)


def test_a_key_that_kubernetes_would_refuse_is_not_written() -> None:
    long = "a" * 54
    given = booking(**{long: [PlacedDevice("GPU-c", GI)]})
    assert ElasticGpuDialect().result_annotations(pod(container(long)), given, NODE, now=0) == {}


# ---- any text ------------------------------------------------------------------------------------

DIALECTS: list[ForeignDialect] = [TencentDialect(), QgpuDialect(), ElasticGpuDialect()]
pods = st.builds(
    lambda limits, requests, annotations: pod(
        ForeignContainer(name="main", limits=limits, requests=requests),
        **annotations,
    ),
    st.dictionaries(st.sampled_from(sorted(NAMES.values())), texts, max_size=3),
    st.dictionaries(st.sampled_from(sorted(NAMES.values())), texts, max_size=1),
    st.dictionaries(
        st.sampled_from(
            [LIMIT, CLASS, "tencent.com/predicate-gpu-idx-0", "elasticgpu.io/container-main"]
        ),
        st.one_of(texts, st.sampled_from(["online", "offline"])),
    ),
)


@pytest.mark.parametrize("dialect", DIALECTS, ids=[each.name for each in DIALECTS])
@given(subject=pods)
def test_any_text_is_translated_or_refused(subject: ForeignPod, dialect: ForeignDialect) -> None:
    check_translation(dialect, subject)


@pytest.mark.parametrize("dialect", DIALECTS, ids=[each.name for each in DIALECTS])
@given(subject=pods)
def test_any_text_is_taken_over_or_refused(subject: ForeignPod, dialect: ForeignDialect) -> None:
    check_take_over(dialect, subject)


def test_every_key_is_documented_and_no_other(root: Path) -> None:
    tencent, qgpu, elastic = TencentDialect(), QgpuDialect(), ElasticGpuDialect()
    read = (*tencent.resources, *tencent.annotations)
    assert documented(root, "Tencent") == sorted((*read, *RESULTS, f"{INDEX_PREFIX}N"))
    assert documented(root, "qGPU") == sorted((*qgpu.resources, *qgpu.annotations))
    written = (ASSUMED, f"{CONTAINER_PREFIX}NAME")
    assert documented(root, "elastic-gpu") == sorted((*elastic.resources, *written))
