# SPDX-License-Identifier: Apache-2.0
"""NVIDIA's resources: counted, and left to the kubelet."""

import pytest

from allotment.dialects import asks_of
from allotment.model.errors import UsageError
from allotment.model.pods import Container, ContainerKind, Pod, PodUid

PLACEMENT = '{"version": 1, "containers": {"train": {"devices": ["GPU-1"]}}}'
NAMES = ("nvidia.com/gpu", "nvidia.com/gpu.shared", "nvidia.com/a100")


def pod(annotations: dict[str, str] | None = None, /, **resources: dict[str, int]) -> Pod:
    return Pod(
        uid=PodUid("1"),
        namespace="team",
        name="train",
        annotations=annotations or {},
        containers=tuple(
            Container(name, ContainerKind.REGULAR, limits) for name, limits in resources.items()
        ),
    )


def test_the_kubelet_chooses() -> None:
    (found,) = asks_of(pod(train={"nvidia.com/gpu": 2}, web={"example.com/nic": 1}), nvidia=NAMES)
    assert (found.container, found.resource, found.count) == ("train", "nvidia.com/gpu", 2)
    assert found.request is None
    assert found.mode is None


def test_each_resource_is_asked_for_by_itself() -> None:
    found = asks_of(pod(train={"nvidia.com/gpu": 1, "nvidia.com/a100": 1}), nvidia=NAMES)
    assert [each.resource for each in found] == ["nvidia.com/a100", "nvidia.com/gpu"]


def test_only_what_the_node_offers_is_ours() -> None:
    assert asks_of(pod(train={"nvidia.com/gpu": 1}), nvidia=()) == ()
    assert asks_of(pod(train={"nvidia.com/gpu": 0}), nvidia=NAMES) == ()


def test_mode_is_passed_on() -> None:
    subject = pod({"allotment.dev/mode": "exclusive"}, train={"nvidia.com/gpu": 1})
    (found,) = asks_of(subject, nvidia=NAMES)
    assert found.mode == "exclusive"


@pytest.mark.parametrize(
    ("annotations", "said"),
    [
        ({"allotment.dev/compute": "30"}, "allotment.dev/compute has no effect"),
        ({"allotment.dev/weight": "train=30"}, "has no effect on this container"),
        (
            {"allotment.dev/placement": PLACEMENT},
            "the kubelet chooses its devices",
        ),
    ],
)
def test_what_would_have_no_effect_is_refused(annotations: dict[str, str], said: str) -> None:
    with pytest.raises(UsageError) as refused:
        asks_of(pod(annotations, train={"nvidia.com/gpu": 1}), nvidia=NAMES)
    assert said in refused.value.message
    assert refused.value.hint


def test_a_value_for_all_is_for_those_that_it_can_mean_something_to() -> None:
    subject = pod(
        {"allotment.dev/class": "latency"},
        whole={"nvidia.com/gpu": 1},
        part={"allotment.dev/gpu": 1},
    )
    whole, part = asks_of(subject, nvidia=NAMES)
    assert whole.request is None
    assert part.request is not None
    assert part.request.compute.kind == "latency"
