# SPDX-License-Identifier: Apache-2.0
"""Modes that a container names or leaves open: what it has of them, and what is refused."""

import json

import pytest

from allotment.dialects.own.allotment import GPU, GPU_COMPUTE, GPU_MEMORY
from allotment.dialects.own.protocol import ANY_MEMORY
from allotment.dialects.own.registry import asks_of, wanted
from allotment.model.errors import UsageError
from allotment.model.mig import MigPlace
from allotment.model.pods import Container, ContainerAsk, ContainerKind, Pod, PodUid
from allotment.model.requests import Request
from allotment.model.structs import replace

GI = 1 << 30
MODES = ("mig", "soft", "mps")


def container(name: str = "train", /, **amounts: int) -> Container:
    names = {"gpu": GPU, "memory": GPU_MEMORY, "compute": GPU_COMPUTE}
    resources = {names.get(key, key): amount for key, amount in {"gpu": 1, **amounts}.items()}
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
        containers=containers or (container(memory=4 * GI),),
    )


def only(subject: Pod, modes: tuple[str, ...] = ("soft",)) -> Request:
    (found,) = wanted(subject, modes=modes)
    return found.request


def modes_of(its: Request) -> tuple[str, ...]:
    return (its.mode, *its.other_modes)


def placed(subject: Pod, **more: object) -> ContainerAsk:
    placement = {"version": 1, "containers": {"train": {"devices": ["GPU-a"], **more}}}
    annotations = {**subject.annotations, "allotment.dev/placement": json.dumps(placement)}
    (found,) = asks_of(replace(subject, node="node-1", annotations=annotations), nvidia=())
    return found


@pytest.mark.parametrize(
    ("text", "modes"),
    [
        ("mig", ("mig",)),
        ("mig, soft", ("mig", "soft")),
        ("soft,mig,mps", ("soft", "mig", "mps")),
        ("strongest", ("mig", "soft", "mps")),
        ("exclusive", ("exclusive",)),
    ],
)
def test_modes_are_a_list_the_best_first(text: str, modes: tuple[str, ...]) -> None:
    assert modes_of(only(pod(mode=text))) == modes
    assert modes_of(only(pod(mode=text), modes=("mps",))) == modes
    (ask,) = asks_of(pod(mode=text, node="node-1"), nvidia=())
    assert ask.mode == modes[0]
    assert ask.request is not None
    assert modes_of(ask.request) == modes


def test_lists_are_by_container_too() -> None:
    subject = pod(
        container(memory=GI), container("side", memory=GI), mode="train=mig,soft;side=mps"
    )
    assert [modes_of(each.request) for each in wanted(subject)] == [("mig", "soft"), ("mps",)]


@pytest.mark.parametrize(
    ("amounts", "annotations", "modes"),
    [
        ({"memory": 4 * GI}, {}, MODES),
        ({}, {}, ("soft", "mps")),  # all of a GPU's memory: of which?
        ({"gpu": 2, "memory": 8 * GI}, {}, ("mig", "soft")),
        ({"memory": 4 * GI}, {"oversubscribe": "true"}, ("soft", "mps")),
        ({"memory": 4 * GI}, {"class": "latency"}, ("soft",)),
        ({"memory": 4 * GI}, {"class": "besteffort"}, ("soft", "mps")),
        ({"memory": 4 * GI}, {"weight": "200"}, ("soft",)),
        ({"memory": 4 * GI}, {"compute": ":0.5"}, ("soft",)),
        ({"memory": 4 * GI}, {"compute": ":50"}, ("soft", "mps")),
        ({"memory": 4 * GI, "compute": 30}, {}, MODES),
        ({"memory": 4 * GI, "compute": 30}, {"compute": ":100"}, MODES),
    ],
)
def test_what_is_left_open_goes_to_the_modes_that_can_give_all_of_it(
    amounts: dict[str, int], annotations: dict[str, str], modes: tuple[str, ...]
) -> None:
    subject = pod(container(**amounts), **annotations)
    assert modes_of(only(subject, modes=MODES)) == modes
    assert modes_of(only(replace(subject), modes=("soft",))) == ("soft",)
    named = {**subject.annotations, "allotment.dev/mode": "strongest"}
    assert modes_of(only(replace(subject, annotations=named))) == modes
    (ask,) = asks_of(replace(subject, node="node-1"), nvidia=())
    assert ask.mode is None


def test_what_no_preferred_mode_can_give_is_refused() -> None:
    with pytest.raises(
        UsageError, match=r"names no mode, and .* does not suit mode mig: its memory"
    ):
        only(pod(container()), modes=("mig",))


def test_a_profile_implies_the_mode_and_says_enough_of_memory() -> None:
    its = only(pod(container(gpu=2), mig_profile="1g.10gb+me"), modes=("soft",))
    assert (its.mode, its.other_modes, its.mig_profile) == ("mig", (), "1g.10gb+me")
    assert (its.memory, its.count) == (ANY_MEMORY, 2)
    its = only(pod(mig_profile="1g.10gb", mode="mig,soft"))
    assert (modes_of(its), its.mig_profile) == (("mig", "soft"), "1g.10gb")
    assert its.memory.size_bytes == 4 * GI


def test_a_profile_by_container() -> None:
    subject = pod(container(), container("side", memory=GI), mig_profile="train=1g.10gb")
    found = {each.name: each.request for each in wanted(subject)}
    assert (found["train"].mig_profile, found["train"].mode) == ("1g.10gb", "mig")
    assert (found["side"].mig_profile, found["side"].mode) == ("", "soft")


@pytest.mark.parametrize(
    ("amounts", "annotations", "said"),
    [
        ({}, {"mode": "mig"}, "in mode mig its memory is 100% of a GPU"),
        ({}, {"mode": "mig", "memory": "50%"}, "in mode mig its memory is 50% of a GPU"),
        ({}, {"mig_profile": "1g.10gb", "memory": "50%"}, "its memory is 50% of a GPU"),
        ({}, {"mig_profile": "1g.10gb", "mode": "mig,soft"}, "its memory is 100% of a GPU"),
        ({}, {"mig_profile": "1g.10gb", "mode": "soft"}, "allotment.dev/mode does not list mig"),
        (
            {},
            {"mig_profile": "1g.10gb", "mode": "strongest"},
            "its request does not suit a slice: its memory",
        ),
        ({"memory": GI}, {"mode": "mig", "oversubscribe": "true"}, "cannot be promised twice"),
        ({"memory": GI}, {"mode": "mig", "class": "latency"}, "the class latency has no effect"),
        (
            {"memory": GI},
            {"mode": "mig", "weight": "50"},
            "the weight 50 has no effect in mode mig",
        ),
        ({"memory": GI}, {"mode": "mig,mps", "weight": "50"}, "no effect in mode mig or mps"),
        ({"memory": GI}, {"mode": "mig", "compute": ":80"}, "the ceiling of 80 percent has no"),
        ({"gpu": 2, "memory": GI}, {"mode": "mps"}, "in mode mps a share has one GPU"),
        ({"gpu": 2, "memory": GI}, {"mode": "soft,mps"}, "in mode mps a share has one GPU"),
        ({"memory": GI}, {"mode": "mps", "compute": ":0.5"}, "less than mode mps can enforce"),
        ({"memory": GI}, {"mode": "mps", "class": "latency"}, "latency has no effect in mode mps"),
        ({"memory": GI}, {"mode": "strongest,soft"}, "strongest means a list"),
        ({"memory": GI}, {"mode": "mig,mig"}, "it has mig twice"),
        ({"memory": GI}, {"mode": "mgi"}, "did you mean 'mig'?"),
        ({"memory": GI}, {"mode": ""}, "allotment.dev/mode: it is empty"),
        ({"memory": GI}, {"mig_profile": "10gb"}, "'10gb' is not a MIG profile"),
        ({"memory": GI}, {"mig_profile": "1g.10gb,2g.20gb"}, "is not a MIG profile"),
    ],
)
def test_nonsense_is_refused(
    amounts: dict[str, int], annotations: dict[str, str], said: str
) -> None:
    with pytest.raises(UsageError) as refused:
        only(pod(container(**amounts), **annotations))
    assert refused.value.message.startswith("pod team/train-0, container 'train'")
    assert said in refused.value.message
    assert refused.value.hint


def test_what_only_one_of_several_modes_sees_to_is_not_refused() -> None:
    its = only(pod(mode="mig,soft", weight="50", **{"class": "latency"}))
    assert modes_of(its) == ("mig", "soft")


def test_a_placement_says_which_mode_it_became() -> None:
    found = placed(pod(mode="soft,mig"), mode="mig", slices=[["1g.10gb", 3]], memory=10 * GI)
    assert (found.mode, found.slices) == ("mig", (MigPlace("1g.10gb", 3),))
    assert found.request is not None
    assert modes_of(found.request) == ("mig",)
    assert found.request.memory.size_bytes == 4 * GI  # what is asked for is the floor
    found = placed(pod(mode="mps,soft"), memory=4 * GI)
    assert found.request is not None
    assert (found.mode, modes_of(found.request)) == ("soft", ("soft",))
    found = placed(pod(), mode="mps", memory=4 * GI)
    assert (found.mode, found.slices) == ("mps", ())


@pytest.mark.parametrize(
    ("annotations", "more", "said"),
    [
        ({"mode": "mig"}, {}, "has mode soft, but the container asks for mig"),
        ({"mode": "soft"}, {"mode": "mps"}, "has mode mps, but the container asks for soft"),
        (
            {"mig_profile": "2g.20gb"},
            {"mode": "mig", "slices": [["1g.10gb", 3]]},
            "has a slice 1g.10gb, but allotment.dev/mig-profile is 2g.20gb",
        ),
    ],
)
def test_a_placement_of_what_was_not_asked_for_is_refused(
    annotations: dict[str, str], more: dict[str, object], said: str
) -> None:
    with pytest.raises(UsageError) as refused:
        placed(pod(**annotations), **more)
    assert said in refused.value.message


def test_nvidias_resources_are_of_one_mode() -> None:
    subject = pod(
        Container("train", ContainerKind.REGULAR, {"nvidia.com/gpu": 1}), mode="mig,exclusive"
    )
    with pytest.raises(UsageError, match="several modes, but the kubelet chooses the devices"):
        asks_of(subject, nvidia=["nvidia.com/gpu"])
