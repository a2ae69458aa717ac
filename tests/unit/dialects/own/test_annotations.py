# SPDX-License-Identifier: Apache-2.0
"""Annotations that say which GPUs, and by what they are chosen; and who sees to it."""

import json

import pytest

from allotment.dialects.own.allotment import GPU, GPU_COMPUTE, GPU_MEMORY
from allotment.dialects.own.annotations import changed_wish
from allotment.dialects.own.registry import asks_of, wanted
from allotment.model.compute import Compute
from allotment.model.errors import UsageError
from allotment.model.pods import Container, ContainerAsk, ContainerKind, Pod, PodUid
from allotment.model.requests import DeviceWeights, ModelRule, Request
from allotment.model.structs import replace

GI = 1 << 30


def container(name: str, /, **amounts: int) -> Container:
    names = {"gpu": GPU, "memory": GPU_MEMORY, "compute": GPU_COMPUTE}
    resources = {names[key]: amount for key, amount in amounts.items()}
    return Container(name, ContainerKind.REGULAR, resources)


def pod(*containers: Container, node: str = "", **annotations: str) -> Pod:
    return Pod(
        uid=PodUid("uid-1"),
        namespace="team",
        name="train-0",
        node=node,
        annotations={
            f"allotment.dev/{key.replace('_', '-')}": text for key, text in annotations.items()
        },
        containers=containers or (container("train", gpu=1),),
    )


def requests(subject: Pod) -> dict[str, Request]:
    return {each.name: each.request for each in wanted(subject)}


def placed(subject: Pod, devices: list[str], **more: object) -> ContainerAsk:
    placement = {"version": 1, "containers": {"train": {"devices": devices, **more}}}
    annotations = {**subject.annotations, "allotment.dev/placement": json.dumps(placement)}
    (found,) = asks_of(replace(subject, node="node-1", annotations=annotations), nvidia=())
    return found


def test_all_of_them() -> None:
    its = requests(
        pod(
            container("train", gpu=2),
            memory="25%",
            models='A100, "Tesla T4"',
            not_models="V100",
            uuids="GPU-1,GPU-2",
            not_uuids="GPU-3",
            affinity="a",
            anti_affinity="b%2Cc",
            exclusion="d",
            alone="true",
            topology="numa,nvlink",
            node_policy="spread,binpack",
            gpu_policy="fragmentation",
            gpu_weights="shares=1,memory=3",
        )
    )["train"]
    assert its.memory.of(400) == 100
    constraints = its.constraints
    assert constraints.models == (ModelRule("A100"), ModelRule("Tesla T4", is_exact=True))
    assert constraints.not_models == (ModelRule("V100"),)
    assert (constraints.uuids, constraints.not_uuids) == (("GPU-1", "GPU-2"), ("GPU-3",))
    assert (constraints.affinity, constraints.anti_affinity, constraints.exclusion) == (
        "a",
        "b,c",
        "d",
    )
    assert (constraints.is_alone, constraints.same_numa, constraints.needs_nvlink) == (
        True,
        True,
        True,
    )
    assert its.preferences.node_policies == ("spread", "binpack")
    assert its.preferences.device_policies == ("fragmentation",)
    assert its.preferences.weights == DeviceWeights(shares=1, compute=0, memory=3)


def test_lists_by_container() -> None:
    its = requests(
        pod(
            container("train", gpu=1),
            container("side", gpu=1),
            container("web"),
            models="train=A100,V100; side=T4",
            gpu_weights="side=shares=1,compute=2",
            exclusion="train=",
        )
    )
    assert its["train"].constraints.models == (ModelRule("A100"), ModelRule("V100"))
    assert its["side"].constraints.models == (ModelRule("T4"),)
    assert its["train"].preferences.weights is None
    assert its["side"].preferences.weights == DeviceWeights(shares=1, compute=2, memory=0)
    assert (its["train"].constraints.exclusion, its["side"].constraints.exclusion) == ("", None)


def test_places_are_those_among_all_containers() -> None:
    init = replace(container("init", gpu=1), kind=ContainerKind.INIT)
    found = wanted(pod(init, container("web"), container("train", gpu=1)))
    assert [(each.name, each.place, each.kind) for each in found] == [
        ("init", 0, ContainerKind.INIT),
        ("train", 2, ContainerKind.REGULAR),
    ]


@pytest.mark.parametrize(
    ("annotations", "said"),
    [
        ({"models": ""}, "allotment.dev/models: it is empty"),
        ({"models": "train=A100,side=T4"}, "contains '='"),
        ({"models": "train=A100;T4"}, "has 'T4' without a container's name"),
        ({"memory": "4Gi"}, "allotment.dev/memory: '4Gi' is not a part of each GPU"),
        ({"affinity": " "}, "allotment.dev/affinity: it is empty"),
        ({"alone": "yes"}, "allotment.dev/alone is 'yes'"),
        ({"topology": "nvlnk"}, "did you mean 'nvlink'?"),
        ({"node_policy": "pack"}, "'pack' is not an allowed word"),
        ({"gpu_weights": "shares=0"}, "allotment.dev/gpu-weights: "),
        ({"model": "A100"}, "did you mean 'allotment.dev/models'?"),
    ],
)
def test_refused(annotations: dict[str, str], said: str) -> None:
    with pytest.raises(UsageError) as refused:
        wanted(pod(**annotations))
    assert refused.value.message.startswith("pod team/train-0")
    assert said in refused.value.message
    assert refused.value.hint


def test_a_part_beside_an_amount_is_refused() -> None:
    with pytest.raises(UsageError, match="sets a part of each"):
        wanted(pod(container("train", gpu=1, memory=GI), memory="50%"))


def test_a_list_by_container_with_the_wrong_separator_is_told_the_right_one() -> None:
    with pytest.raises(UsageError) as refused:
        wanted(pod(models="train=A100,side=T4"))
    assert "train=A100,V100;side=T4" in str(refused.value.hint)


@pytest.mark.parametrize(
    ("compute", "total", "count", "expected"),
    [
        ("33.33:50", 34, 1, Compute(3333, 5000, is_governed=True)),
        ("33.33", 100, 3, Compute(3333, 3333, is_governed=True)),
        ("25.5:100", 51, 2, Compute(2550, 10_000, is_governed=True)),
    ],
)
def test_a_guarantee_in_hundredths(compute: str, total: int, count: int, expected: Compute) -> None:
    subject = pod(container("train", gpu=count, compute=total), compute=compute)
    assert requests(subject)["train"].compute == expected


@pytest.mark.parametrize(("compute", "total"), [("33.33", 33), ("33.33", 35), ("34.01", 34)])
def test_a_guarantee_that_was_not_counted_is_refused(compute: str, total: int) -> None:
    with pytest.raises(UsageError, match=r"but allotment\.dev/gpu-compute is"):
        wanted(pod(container("train", gpu=1, compute=total), compute=compute))


# ---- who sees to it ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("annotations", "key"),
    [
        ({"affinity": "a"}, "affinity"),
        ({"anti_affinity": "a"}, "anti-affinity"),
        ({"exclusion": "a"}, "exclusion"),
        ({"topology": "nvlink"}, "topology (nvlink)"),
    ],
)
def test_a_node_refuses_what_a_scheduler_has_to_see_to(
    annotations: dict[str, str], key: str
) -> None:
    subject = pod(container("train", gpu=2), **annotations)
    with pytest.raises(UsageError) as refused:
        asks_of(replace(subject, node="node-1"), nvidia=())
    assert f"allotment.dev/{key} needs Allotment's scheduler" in refused.value.message
    assert refused.value.hint
    assert asks_of(subject, nvidia=())  # nobody has bound it yet
    assert placed(subject, ["GPU-1", "GPU-2"]).devices == ("GPU-1", "GPU-2")


def test_a_node_sees_to_the_rest_by_itself() -> None:
    subject = pod(
        container("train", gpu=2),
        node="node-1",
        models="A100",
        not_uuids="GPU-3",
        alone="true",
        topology="numa",
        exclusion="",
        gpu_policy="spread",
    )
    (found,) = asks_of(subject, nvidia=())
    assert found.request == requests(subject)["train"]
    # Any single GPU is joined to itself.
    assert asks_of(pod(node="node-1", topology="nvlink"), nvidia=())


def test_a_placement_says_how_much_a_part_is() -> None:
    for subject in (pod(), pod(memory="50%")):
        found = placed(subject, ["GPU-1"], memory=5 * GI)
        assert found.request is not None
        assert found.request.memory.size_bytes == 5 * GI
        without = placed(subject, ["GPU-1"])
        assert without.request == requests(subject)["train"]
    with pytest.raises(UsageError, match=r"allotment\.dev/gpu-memory amounts to"):
        placed(pod(container("train", gpu=1, memory=GI)), ["GPU-1"], memory=5 * GI)


def test_who_places_does_not_look_at_an_earlier_placement() -> None:
    assert requests(pod(placement="copied from elsewhere")) == requests(pod())


def resized(subject: Pod, text: str) -> dict[str, Request]:
    return {each.name: each.request for each in wanted(subject, resize=text)}


def test_a_resize_replaces_what_it_names() -> None:
    subject = pod(container("train", gpu=2, memory=8 * GI, compute=60), **{"class": "latency"})
    before = requests(subject)["train"]
    after = resized(subject, "memory: 6Gi, compute:40:80,weight:200")["train"]
    assert (after.memory.size_bytes, after.count) == (6 * GI, 2)
    asked = after.compute
    assert (asked.guarantee, asked.ceiling, asked.weight) == (4000, 8000, 200)
    assert asked.kind == before.compute.kind
    ceiling = resized(subject, "compute::90")["train"].compute
    assert (ceiling.guarantee, ceiling.ceiling) == (3000, 9000)
    part = resized(subject, "memory:25%,class:besteffort")["train"]
    assert part.memory.of(80 * GI) == 20 * GI


def test_without_a_placement_a_resize_cannot_exceed_the_request() -> None:
    one = container("train", gpu=1, memory=2 * GI, compute=30)

    def got(text: str) -> Request | None:
        (ask,) = asks_of(pod(one, node="n1", resize=text), nvidia=())
        return ask.request

    smaller = got("memory:1Gi,compute:20:30")
    assert smaller is not None
    assert smaller.memory.size_bytes == GI
    assert got("memory:2Gi") == got("compute:30:30")
    with pytest.raises(UsageError, match=r"memory \(need 70Gi, have 2Gi\)"):
        got("memory:70Gi")
    with pytest.raises(UsageError, match=r"memory \(need 90%, have 2Gi\)"):
        got("memory:90%")
    with pytest.raises(
        UsageError, match=r"guarantee \(need 40 percent, have 30\); ceiling \(need 80"
    ):
        got("compute:40:80")


def test_a_resize_is_for_all_containers_or_by_name() -> None:
    subject = pod(container("train", gpu=1, memory=GI), container("side", gpu=1, memory=GI))
    sizes = {name: each.memory.size_bytes for name, each in resized(subject, "memory:2Gi").items()}
    assert sizes == {"train": 2 * GI, "side": 2 * GI}
    by_name = resized(subject, "train=memory:2Gi,compute:10; side=compute:20")
    assert [each.memory.size_bytes for each in by_name.values()] == [2 * GI, GI]
    assert [each.compute.guarantee for each in by_name.values()] == [1000, 2000]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("6Gi", "is '6Gi'"),
        ("memory:6Gi,memory:7Gi", "it has memory twice"),
        ("memory:", "'' is not an amount"),
        ("compute::20", "a ceiling below the guarantee of 30 percent"),
        ("class:best", "is 'best'"),
        ("other=memory:6Gi", "names container 'other', which is not in the pod"),
    ],
)
def test_a_resize_that_says_nothing_valid(text: str, why: str) -> None:
    subject = pod(container("train", gpu=1, memory=GI, compute=30))
    with pytest.raises(UsageError) as caught:
        resized(subject, text)
    assert why in caught.value.message
    assert requests(replace(subject, annotations={"allotment.dev/resize": text}))  # until then


def test_words_of_a_wish_are_changed_one_by_one() -> None:
    words = {"memory": "6Gi"}
    assert changed_wish("", container=None, words=words) == "memory:6Gi"
    before = "compute:30:80,memory:4Gi"
    assert changed_wish(before, container=None, words=words) == "memory:6Gi,compute:30:80"
    one = changed_wish("", container="train", words=words)
    assert one == "train=memory:6Gi"
    both = changed_wish(one, container="side", words={"compute": "0:10"})
    assert both == "train=memory:6Gi;side=compute:0:10"
    assert changed_wish(both, container="side", words=words).endswith(
        "side=memory:6Gi,compute:0:10"
    )
    for text, name in ((both, None), (before, "train")):
        with pytest.raises(UsageError, match=r"which (names containers|is for all)") as caught:
            changed_wish(text, container=name, words=words)
        assert "remove the annotation first" in str(caught.value.hint)
