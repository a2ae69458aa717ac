# SPDX-License-Identifier: Apache-2.0
"""What is written into a translated pod reads natively as what was meant."""

from fractions import Fraction

import pytest
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from allotment.dialects.foreign.base import DIALECT, Translated, Translation
from allotment.dialects.foreign.translate import (
    Changes,
    applied,
    is_native,
    native_pod,
    wanted_of,
    written,
)
from allotment.dialects.own.allotment import GPU, GPU_COMPUTE, GPU_MEMORY, RESOURCES
from allotment.dialects.own.annotations import DEVICE_POLICIES, NODE_POLICIES, part_amount
from allotment.dialects.own.protocol import ANY_MEMORY, suiting
from allotment.dialects.own.registry import asks_of, wanted
from allotment.model.compute import WHOLE, Compute, ComputeClass
from allotment.model.errors import UsageError
from allotment.model.pods import ContainerKind, ForeignContainer, ForeignPod
from allotment.model.quantities import LEAST_BYTES, MemoryAmount
from allotment.model.requests import (
    Constraints,
    DeviceWeights,
    ModelRule,
    Preferences,
    Request,
)
from allotment.model.structs import replace
from allotment.placement.policies import make

GI = 1 << 30
FOREIGN = "example.com/gpu"


def pod(*names: str, **annotations: str) -> ForeignPod:
    return ForeignPod(
        namespace="team",
        name="train-0",
        annotations={f"allotment.dev/{key}": value for key, value in annotations.items()},
        containers=tuple(
            ForeignContainer(name=each, limits={FOREIGN: "1", "cpu": "500m"}, requests={})
            for each in names
        ),
    )


def translation(**requests: Request) -> Translation:
    return Translation(
        dialect="example",
        containers=tuple(
            Translated(container=name, request=request, removes=(FOREIGN,))
            for name, request in requests.items()
        ),
    )


def request(size: int = 4 * GI, **changes: object) -> Request:
    return replace(Request(MemoryAmount("", size_bytes=size)), **changes)  # type: ignore[arg-type]


def test_amounts_are_sums_and_what_goes_goes() -> None:
    compute = Compute(2500, 2500, is_governed=True)
    changes = written(pod("train"), translation(train=request(count=2, compute=compute)))
    assert changes.limits == {
        "train": {FOREIGN: None, GPU: "2", GPU_MEMORY: str(8 * GI), GPU_COMPUTE: "50"}
    }
    assert changes.annotations == {DIALECT: "example"}


def test_what_goes_goes_from_requests_too() -> None:
    container = ForeignContainer(name="train", limits={FOREIGN: "1"}, requests={FOREIGN: "1"})
    subject = replace(pod(), containers=(container,))
    after = applied(subject, written(subject, translation(train=request())))
    assert after.containers[0].limits == {GPU: "1", GPU_MEMORY: str(4 * GI)}
    assert after.containers[0].requests == {}
    assert is_native(after)
    assert not is_native(subject)


def test_a_guarantee_in_hundredths_is_counted_in_whole_percent_and_kept_exactly() -> None:
    changes = written(
        pod("train"), translation(train=request(compute=Compute(3333, 5050, is_governed=True)))
    )
    assert changes.limits["train"][GPU_COMPUTE] == "34"
    assert changes.annotations["allotment.dev/compute"] == "33.33:50.5"


def test_values_that_differ_are_by_container() -> None:
    changes = written(
        pod("train", "side", "third"),
        translation(
            train=request(
                may_oversubscribe=True,
                constraints=Constraints(
                    models=(ModelRule("A100"), ModelRule("V100")), exclusion=""
                ),
            ),
            side=request(constraints=Constraints(models=(ModelRule("Tesla T4", is_exact=True),))),
            third=request(),
        ),
    )
    assert changes.annotations == {
        DIALECT: "example",
        "allotment.dev/oversubscribe": "train=true",
        "allotment.dev/models": 'train=A100,V100;side="Tesla T4"',
        "allotment.dev/exclusion": "train=",
    }


def test_what_the_author_adds_natively_counts() -> None:
    compute = Compute(3000, 3000, is_governed=True)
    subject = pod("train", compute=":80", weight="300")
    after = applied(subject, written(subject, translation(train=request(compute=compute))))
    (found,) = wanted_of(after)
    assert found.request.compute == Compute(3000, 8000, weight=300, is_governed=True)


@pytest.mark.parametrize(
    ("annotations", "said"),
    [
        ({"oversubscribe": "false"}, "allotment.dev/oversubscribe, but example asks for 'true'"),
        ({"memory": "50%"}, "asks for allotment.dev/gpu-memory, and allotment.dev/memory (50%)"),
        ({"compte": "1"}, "is unknown (did you mean 'allotment.dev/compute'?)"),
    ],
)
def test_what_the_author_adds_must_not_contradict(annotations: dict[str, str], said: str) -> None:
    with pytest.raises(UsageError) as refused:
        written(pod("train", **annotations), translation(train=request(may_oversubscribe=True)))
    assert refused.value.message.startswith("pod team/train-0")
    assert said in refused.value.message
    assert refused.value.hint


def test_more_than_any_node_has_is_refused() -> None:
    with pytest.raises(UsageError, match="more than any node can have") as refused:
        written(pod("train"), translation(train=request(2**62, count=4)))
    assert "container 'train'" in refused.value.message


def test_an_amount_that_is_none_is_refused_with_its_name() -> None:
    container = ForeignContainer(name="train", limits={GPU: "1", GPU_MEMORY: "500m"})
    with pytest.raises(UsageError, match=r"container .train.: allotment\.dev/gpu-memory: .500m."):
        wanted_of(replace(pod(), containers=(container,)))


# ---- the round trip ------------------------------------------------------------------------------

TAGS = st.text(min_size=1, max_size=12)
PARTS = st.fractions(Fraction(1, 10**6), 1, max_denominator=10**9)
MEMORY = st.one_of(
    st.integers(LEAST_BYTES, 2**55).map(lambda size: MemoryAmount("", size_bytes=size)),
    PARTS.map(part_amount),
)
POINTS = st.tuples(st.integers(0, WHOLE), st.integers(1, WHOLE)).map(sorted)
COMPUTE = st.just(Compute()) | st.builds(
    lambda points, weight, kind: Compute(points[0], points[1], weight, kind, is_governed=True),
    POINTS,
    st.integers(1, 10_000),
    st.sampled_from(ComputeClass),
)
RULES = st.lists(
    st.builds(ModelRule, TAGS.filter(str.strip), is_exact=st.booleans()), max_size=3
).map(tuple)
ITEMS = st.lists(TAGS, max_size=3).map(tuple)
CONSTRAINTS = st.builds(
    Constraints,
    models=RULES,
    not_models=RULES,
    uuids=ITEMS,
    not_uuids=ITEMS,
    affinity=TAGS | st.just(""),
    anti_affinity=TAGS | st.just(""),
    exclusion=st.none() | st.just("") | TAGS,
    is_alone=st.booleans(),
    same_numa=st.booleans(),
    needs_nvlink=st.booleans(),
)
PREFERENCES = st.builds(
    Preferences,
    node_policies=st.lists(st.sampled_from(NODE_POLICIES), max_size=3, unique=True).map(tuple),
    device_policies=st.lists(st.sampled_from(DEVICE_POLICIES), max_size=3, unique=True).map(tuple),
    weights=st.none()
    | st.builds(
        DeviceWeights,
        shares=st.integers(0, 9),
        compute=st.integers(1, 9),
        memory=st.integers(0, 9),
    ),
)
REQUESTS = st.builds(
    Request,
    MEMORY,
    count=st.integers(1, 16),
    compute=COMPUTE,
    may_oversubscribe=st.booleans(),
    mode=st.sampled_from(["soft", "exclusive", "mig", "mps"]),
    other_modes=st.lists(st.sampled_from(["timeslice", "passthrough"]), unique=True).map(tuple),
    constraints=CONSTRAINTS,
    preferences=PREFERENCES,
).filter(lambda its: bool(suiting(its, [its.mode])))
SLICES = st.builds(
    Request,
    st.just(ANY_MEMORY),
    count=st.integers(1, 7),
    mode=st.just("mig"),
    mig_profile=st.sampled_from(["1g.10gb", "1g.10gb+me", "7g.80gb", "1g.24gb+me.all"]),
    constraints=CONSTRAINTS,
)


def without_text(found: Request) -> Request:
    return replace(found, memory=replace(found.memory, text=""))


@given(st.lists(REQUESTS | SLICES, min_size=1, max_size=3))
def test_what_is_written_reads_as_what_was_meant(requests: list[Request]) -> None:
    named = {f"c{place}": each for place, each in enumerate(requests)}
    subject = pod(*named)
    after = applied(subject, written(subject, translation(**named)))
    found = wanted_of(after)
    assert {each.name: without_text(each.request) for each in found} == {
        name: without_text(each) for name, each in named.items()
    }
    assert [each.place for each in found] == list(range(len(requests)))
    assert all(each.kind is ContainerKind.REGULAR for each in found)


@settings(max_examples=examples(1 / 2))
@given(REQUESTS.map(lambda its: replace(its, count=1)))
def test_a_node_reads_the_same_as_the_scheduler(its: Request) -> None:
    its = replace(
        its,
        constraints=replace(
            its.constraints, affinity="", anti_affinity="", exclusion=None, is_alone=False
        ),
    )
    subject = pod("train")
    after = native_pod(applied(subject, written(subject, translation(train=its))))
    (found,) = asks_of(after, nvidia=())
    (seen,) = wanted(after)
    assert found.request == seen.request
    assert without_text(seen.request) == without_text(its)


def test_changes_say_nothing_by_default() -> None:
    subject = pod("train")
    assert applied(subject, Changes()) == subject
    assert set(RESOURCES) == {GPU, GPU_MEMORY, GPU_COMPUTE}


def test_the_words_for_policies_are_policies() -> None:
    for name in {*NODE_POLICIES, *DEVICE_POLICIES} - {"fragmentation"}:
        assert make(name).name == name


def test_amounts_of_ours_are_read_or_refused_and_others_are_left_to_them() -> None:
    limits = {
        GPU: "2",
        "nvidia.com/gpu": "1",
        "example.com/x": "many",
        "cpu": "1",
        "a.kubernetes.io/b": "1",
    }
    container = ForeignContainer(name="train", limits=limits)
    subject = replace(pod(), containers=(container,), node="node-1")
    found = native_pod(subject)
    assert found.node == "node-1"
    assert found.containers[0].resources == {GPU: 2, "nvidia.com/gpu": 1}
    wrong = replace(container, limits={GPU_MEMORY: "much"})
    with pytest.raises(UsageError, match=GPU_MEMORY):
        native_pod(replace(subject, containers=(wrong,)))
