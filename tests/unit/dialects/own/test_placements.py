# SPDX-License-Identifier: Apache-2.0
"""`allotment.dev/placement`: followed where it agrees with what was asked for, else refused."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from allotment.dialects import asks_of
from allotment.model.errors import UsageError
from allotment.model.pods import Container, ContainerAsk, ContainerKind, Pod, PodUid

GI = 1 << 30


def asks(placement: object, *, gpus: int = 2) -> tuple[ContainerAsk, ...]:
    text = placement if isinstance(placement, str) else json.dumps(placement)
    limits = {"allotment.dev/gpu": gpus, "allotment.dev/gpu-memory": gpus * GI}
    return asks_of(
        Pod(
            uid=PodUid("uid-1"),
            namespace="team",
            name="train",
            node="node-1",
            annotations={"allotment.dev/placement": text},
            containers=(
                Container("train", ContainerKind.REGULAR, limits),
                Container("web", ContainerKind.REGULAR, {}),
            ),
        ),
        nvidia=(),
    )


def whole(**changes: object) -> dict[str, object]:
    placed = {"devices": ["GPU-1", "GPU-2"], "memory": GI}
    return {"version": 1, "containers": {"train": placed}, **changes}


def test_devices_are_followed() -> None:
    (found,) = asks(whole(pod="uid-1", node="node-1", score=3))
    assert found.devices == ("GPU-1", "GPU-2")
    assert found.request is not None
    assert found.request.memory.size_bytes == GI


def test_memory_may_be_left_out() -> None:
    (found,) = asks({"version": 1, "containers": {"train": {"devices": ["GPU-1", "GPU-2"]}}})
    assert found.devices == ("GPU-1", "GPU-2")


@pytest.mark.parametrize(
    ("placement", "said"),
    [
        ("", "is not a placement"),
        ("[" * 5000, "is not a placement"),
        ("[]", "is not a placement"),
        (whole(version="1"), "$.version"),
        (whole(version=2), "version 2, this node reads 1"),
        (whole(pod="uid-2"), "was decided for another pod (uid 'uid-2')"),
        (whole(node="node-2"), "was decided for node 'node-2', the pod is on 'node-1'"),
        (whole(containers={"trian": {"devices": ["GPU-1"]}}), "did you mean 'train'?"),
        (whole(containers={"web": {"devices": ["GPU-1"]}}), "asks for no GPU"),
        (whole(containers={"train": {"devices": []}}), "$.containers[...].devices"),
        (
            whole(containers={"train": {"devices": ["GPU-1"]}}),
            "has 1 devices, but allotment.dev/gpu is",
        ),
        (whole(containers={"train": {"devices": ["GPU-1", "GPU-1"]}}), "names a device twice"),
        (
            whole(containers={"train": {"devices": ["GPU-1", "GPU-2"], "memory": 2 * GI}}),
            f"has {2 * GI} bytes of each device, but allotment.dev/gpu-memory amounts to {GI}",
        ),
        (
            whole(containers={"train": {"devices": ["GPU-1", "GPU-2"], "memory": 2**63}}),
            "is not a placement",
        ),
    ],
)
def test_refused(placement: object, said: str) -> None:
    with pytest.raises(UsageError) as refused:
        asks(placement)
    assert refused.value.message.startswith("pod team/train")
    assert said in refused.value.message
    assert "without the annotation allotment.dev/placement" in str(refused.value.hint)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"slices": [["1g.10gb", 0], ["1g.10gb", 1]]}, "slices in mode (none)"),
        ({"mode": "soft", "slices": [["1g.10gb", 0], ["1g.10gb", 1]]}, "slices in mode soft"),
        ({"mode": "mig"}, "0 slices of 2 devices"),
        ({"mode": "mig", "slices": [["1g.10gb", 0]]}, "1 slices of 2 devices"),
        (
            {"devices": ["GPU-1", "GPU-1"], "mode": "mig", "slices": [["1g.10gb", 0]] * 2},
            "has a slice twice",
        ),
        ({"mode": "mig", "slices": [["", 0], ["1g.10gb", 1]]}, "is not a placement"),
        ({"mode": "mig", "slices": [["1g.10gb", -1], ["1g.10gb", 1]]}, "is not a placement"),
        ({"mode": 3}, "is not a placement"),
    ],
)
def test_slices_that_cannot_be_meant_are_refused(changes: dict[str, object], said: str) -> None:
    placed = {"devices": ["GPU-1", "GPU-2"], "memory": GI, **changes}
    with pytest.raises(UsageError) as refused:
        asks(whole(containers={"train": placed}))
    assert said in refused.value.message
    assert "without the annotation allotment.dev/placement" in str(refused.value.hint)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["version", "containers", "train", "devices", "memory", "pod", "mode", "slices"]
            ),
            inner,
        )
    ),
)


@given(VALUES | st.text())
def test_no_text_is_anything_but_refused(placement: object) -> None:
    refused: UsageError | None = None
    try:
        asks(placement)
    except UsageError as error:
        refused = error
    assert refused is None or refused.hint
