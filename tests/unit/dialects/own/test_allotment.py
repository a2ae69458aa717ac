# SPDX-License-Identifier: Apache-2.0
"""Allotment's own resources: what they mean, and what of them cannot be meant."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from allotment.dialects import asks_of
from allotment.dialects.own import allotment
from allotment.model.compute import WHOLE, Compute, ComputeClass
from allotment.model.errors import UsageError
from allotment.model.pods import Container, ContainerAsk, ContainerKind, Pod, PodUid
from allotment.model.quantities import LEAST_BYTES, MAX_BYTES

GI = 1 << 30
GPU, MEMORY, COMPUTE = allotment.RESOURCES
NVIDIA = ("nvidia.com/gpu",)


def pod(
    *containers: Container, annotations: dict[str, str] | None = None, uid: str = "uid-1"
) -> Pod:
    return Pod(
        uid=PodUid(uid),
        namespace="team",
        name="train-0",
        node="node-1",
        annotations=annotations or {},
        containers=containers,
    )


def container(name: str = "train", /, **resources: int) -> Container:
    names = {"gpu": GPU, "memory": MEMORY, "compute": COMPUTE, "nvidia": NVIDIA[0]}
    return Container(
        name, ContainerKind.REGULAR, {names[each]: value for each, value in resources.items()}
    )


def ask(subject: Pod) -> ContainerAsk:
    (found,) = asks_of(subject, nvidia=NVIDIA)
    return found


def test_one_gpu_with_memory_and_compute() -> None:
    found = ask(pod(container(gpu=1, memory=4 * GI, compute=30)))
    assert (found.container, found.resource, found.count, found.mode) == ("train", GPU, 1, None)
    assert found.request is not None
    assert (found.request.mode, found.request.other_modes) == ("soft", ())
    assert found.request is not None
    assert found.request.memory.size_bytes == 4 * GI
    assert str(found.request.memory) == "4Gi"
    assert found.request.compute == Compute(3000, 3000, is_governed=True)
    assert found.devices == ()


def test_quantities_are_sums_over_the_gpus() -> None:
    found = ask(pod(container(gpu=2, memory=8 * GI, compute=50)))
    assert found.request is not None
    assert found.request.count == 2
    assert found.request.memory.size_bytes == 4 * GI
    assert found.request.compute.guarantee == 2500


def test_without_quantities_all_memory_and_no_turns() -> None:
    found = ask(pod(container(gpu=1)))
    assert found.request is not None
    assert found.request.memory.part == Fraction(1)
    assert found.request.compute == Compute()


@given(
    count=st.integers(1, 16),
    memory=st.integers(LEAST_BYTES * 16, MAX_BYTES),
    percent=st.integers(1, 100),
)
def test_no_more_is_given_than_was_counted(count: int, memory: int, percent: int) -> None:
    found = ask(pod(container(gpu=count, memory=memory, compute=percent * count)))
    assert found.request is not None
    size = found.request.memory.size_bytes
    assert size is not None
    assert 0 <= memory - size * count < count
    assert found.request.compute.guarantee == percent * 100
    assert found.request.compute.guarantee <= WHOLE


@pytest.mark.parametrize(
    ("text", "compute"),
    [
        ("30", Compute(3000, 3000, is_governed=True)),
        ("30:80", Compute(3000, 8000, is_governed=True)),
        (":80", Compute(3000, 8000, is_governed=True)),
        ("train=30:80", Compute(3000, 8000, is_governed=True)),
    ],
)
def test_annotation_of_compute_adds_to_the_quantity(text: str, compute: Compute) -> None:
    annotations = {"allotment.dev/compute": text}
    found = ask(pod(container(gpu=1, compute=30), annotations=annotations))
    assert found.request is not None
    assert found.request.compute == compute


def test_ceiling_without_a_guarantee_needs_no_quantity() -> None:
    found = ask(pod(container(gpu=1), annotations={"allotment.dev/compute": "0:50"}))
    assert found.request is not None
    assert found.request.compute == Compute(0, 5000, is_governed=True)


def test_values_by_container() -> None:
    annotations = {
        "allotment.dev/class": "train=latency, side=besteffort",
        "allotment.dev/weight": "side=300",
        "allotment.dev/oversubscribe": "true",
    }
    subject = pod(container("train", gpu=1), container("side", gpu=1), annotations=annotations)
    train, side = asks_of(subject, nvidia=NVIDIA)
    assert train.request is not None
    assert side.request is not None
    assert train.request.compute == Compute(kind=ComputeClass.LATENCY, is_governed=True)
    assert side.request.compute == Compute(
        weight=300, kind=ComputeClass.BESTEFFORT, is_governed=True
    )
    assert train.request.may_oversubscribe
    assert side.request.may_oversubscribe


@pytest.mark.parametrize(
    ("subject", "said"),
    [
        (pod(container(memory=4 * GI)), "without allotment.dev/gpu"),
        (pod(container(gpu=0, memory=4 * GI)), "without allotment.dev/gpu"),
        (pod(container(compute=4)), "asks for allotment.dev/gpu-compute without"),
        (pod(container(gpu=1, memory=0)), "allotment.dev/gpu-memory is 0"),
        (pod(container(gpu=1, compute=0)), "allotment.dev/gpu-compute is 0"),
        (pod(container(gpu=-1)), "allotment.dev/gpu is -1"),
        (pod(container(gpu=1, memory=MAX_BYTES + 1)), "more than any node can have"),
        (pod(container(gpu=1025)), "more GPUs than any node has"),
        (pod(container(gpu=1, memory=4096)), "4096 bytes, less than 1Mi"),
        (pod(container(gpu=4, memory=2 << 20)), "524288 for each of its 4 GPUs"),
        (pod(container(gpu=1, compute=101)), "101 percent of each of 1 GPU"),
        (pod(container(gpu=1, nvidia=1)), "Allotment's allotment.dev/gpu and NVIDIA's"),
        (pod(container(memory=GI, nvidia=1)), "Allotment's allotment.dev/gpu-memory and"),
    ],
)
def test_refused_with_pod_container_and_next_step(subject: Pod, said: str) -> None:
    with pytest.raises(UsageError) as refused:
        asks_of(subject, nvidia=NVIDIA)
    assert "pod team/train-0, container 'train': " in refused.value.message
    assert said in refused.value.message
    assert refused.value.hint


@pytest.mark.parametrize(
    ("annotations", "said"),
    [
        (
            {"compute": "40"},
            "guarantees 40 percent of each GPU, but allotment.dev/gpu-compute is 30",
        ),
        ({"compute": "0:80"}, "guarantees 0 percent"),
        ({"compute": ":20"}, "has a ceiling below"),
        ({"compute": "80:30"}, "did you mean 30:80?"),
        ({"compute": "much"}, "'much' is not an amount of compute"),
        ({"compute": ""}, "it is empty"),
        ({"compute": "train=30,train=30"}, "names this container twice"),
        ({"compute": "train=30,40"}, "has '40' without a container's name"),
        ({"compute": "trian=30"}, "'trian', which is not in the pod (did you mean 'train'?)"),
        ({"compute": "web=30"}, "names this container, which asks for no GPU"),
        ({"class": "fast"}, "allotment.dev/class is 'fast'"),
        ({"class": "Latency"}, "did you mean 'latency'?"),
        ({"weight": "0"}, "is not a weight"),
        ({"oversubscribe": "yes"}, "allotment.dev/oversubscribe is 'yes'"),
        ({"mode": "sofd"}, "did you mean 'soft'?"),
        ({"compte": "30"}, "'allotment.dev/compte' is unknown (did you mean"),
        ({"share": "1234"}, "'allotment.dev/share' is unknown"),
    ],
)
def test_annotations_that_cannot_be_meant(annotations: dict[str, str], said: str) -> None:
    subject = pod(
        container(gpu=1, compute=30),
        container("web"),
        annotations={f"allotment.dev/{key}": value for key, value in annotations.items()},
    )
    with pytest.raises(UsageError) as refused:
        asks_of(subject, nvidia=NVIDIA)
    assert refused.value.message.startswith("pod team/train-0")
    assert said in refused.value.message
    assert refused.value.hint


def test_a_guarantee_that_nobody_counted_is_refused() -> None:
    with pytest.raises(UsageError, match="no scheduler would count it") as refused:
        asks_of(pod(container(gpu=2), annotations={"allotment.dev/compute": "30:80"}), nvidia=())
    assert "allotment.dev/gpu-compute: 60" in str(refused.value.hint)


@pytest.mark.parametrize(
    ("subject", "least"),
    [
        (container(gpu=1, memory=0), "ask for at least 1Mi"),
        (container(gpu=4, memory=0), "ask for at least 4Mi"),
        (container(gpu=1, compute=0), "ask for at least 1"),
        (container(gpu=-1), "ask for at least 1"),
    ],
)
def test_the_least_that_is_accepted_is_named(subject: Container, least: str) -> None:
    with pytest.raises(UsageError) as refused:
        asks_of(pod(subject), nvidia=NVIDIA)
    assert str(refused.value.hint).endswith(least)


def test_annotations_of_a_pod_without_gpus_are_told_of() -> None:
    annotations = {"allotment.dev/compute": "30", "example.com/x": "y"}
    wrong = allotment.never_asked(pod(container("web"), annotations=annotations))
    assert wrong is not None
    assert "pod team/train-0: it has the annotation allotment.dev/compute, but" in wrong.message
    assert wrong.hint
    for asking in (container(gpu=1), container(nvidia=1)):
        subject = pod(container("web"), asking, annotations=annotations)
        assert allotment.never_asked(subject) is None
    renamed = Container("web", ContainerKind.REGULAR, {"example.com/gpu": 1})
    assert allotment.never_asked(pod(renamed, annotations=annotations)) is not None
    offered = {"example.com/gpu"}
    assert allotment.never_asked(pod(renamed, annotations=annotations), nvidia=offered) is None
    assert allotment.never_asked(pod(container("web"), annotations={"example.com/x": "y"})) is None


def test_pods_without_gpus_may_write_what_they_like() -> None:
    assert asks_of(pod(container("web"), annotations={"allotment.dev/x": "y"}), nvidia=NVIDIA) == ()
    assert asks_of(pod(container(gpu=0)), nvidia=NVIDIA) == ()


TEXTS = st.text(max_size=40) | st.sampled_from(
    [
        *("30:80", "train=30", "train=", "=,=", "side=1,train=2", "true", "soft", "{}"),
        *("mig,soft", "strongest", "train=mig,mps;side=soft", "1g.10gb", "train=1g.10gb+me"),
        '{"version":1}',
        '{"version":1,"containers":{"train":{"devices":["a"],"mode":"mig","slices":[["1g.5gb",0]]}}}',
    ]
)


@given(
    st.dictionaries(
        st.sampled_from(
            [
                *("compute", "class", "weight", "mode", "mig-profile", "oversubscribe"),
                *("memory", "placement", "other"),
            ]
        ),
        TEXTS,
        max_size=4,
    ),
    st.dictionaries(
        st.sampled_from(["gpu", "memory", "compute", "nvidia"]),
        st.integers(-2, 3) | st.integers(0, 2**64),
    ),
)
def test_nothing_but_usage_errors_with_a_next_step(
    annotations: dict[str, str], amounts: dict[str, int]
) -> None:
    subject = pod(
        container(**amounts),
        container("side", gpu=1),
        annotations={f"allotment.dev/{key}": value for key, value in annotations.items()},
    )
    refused: UsageError | None = None
    found: tuple[ContainerAsk, ...] = ()
    try:
        found = asks_of(subject, nvidia=NVIDIA)
    except UsageError as error:
        refused = error
    assert refused is None or (refused.hint and "team/train-0" in refused.message)
    assert {each.container for each in found} <= {"train", "side"}
