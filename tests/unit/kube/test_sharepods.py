# SPDX-License-Identifier: Apache-2.0
"""SharePods at the API server: whether there are any, and how a status is written."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sharepods_twin import ClusterTwin, merged

from allotment.kube.errors import ConflictError, DeniedError, KubeError, ObjectMissingError
from allotment.kube.sharepods import MADE_FOR, MANIFEST, PodSeen, SharePod, SharePods, changed


def asked(twin: ClusterTwin, ask: Callable[[SharePods], Awaitable[Any]]) -> Any:  # noqa: ANN401
    async def main() -> Any:  # noqa: ANN401 - whatever is asked
        async with twin.api() as api:
            return await ask(SharePods(api))

    return asyncio.run(main())


def test_where_nobody_has_defined_them_there_are_none() -> None:
    twin = ClusterTwin()
    assert asked(twin, SharePods.are_defined) is True
    twin.is_defined = False
    assert asked(twin, SharePods.are_defined) is False


def test_a_definition_without_a_status_is_told_with_what_to_apply() -> None:
    twin = ClusterTwin()
    twin.has_status = False
    with pytest.raises(KubeError, match="without a status") as caught:
        asked(twin, SharePods.are_defined)
    assert MANIFEST in str(caught.value.hint)


def test_without_the_right_to_list_them_they_are_not_served() -> None:
    twin = ClusterTwin()
    twin.may_list = False
    with pytest.raises(DeniedError):
        asked(twin, SharePods.are_defined)


def test_a_status_is_written_only_over_the_one_that_was_read() -> None:
    twin = ClusterTwin()
    item = twin.put("sharepods", "team", "a", status={"PodStatus": {"phase": "Pending", "x": 1}})
    sharepod = SharePod(
        uid=item["metadata"]["uid"],
        namespace="team",
        name="a",
        version=item["metadata"]["resourceVersion"],
        status=item["status"],
    )
    status = {"PodStatus": {"phase": "Running"}, "BoundDeviceID": "GPU-a"}
    asked(twin, lambda api: api.write_status(sharepod, status))
    assert twin.sharepod("a")["status"] == status
    with pytest.raises(ConflictError):
        asked(twin, lambda api: api.write_status(sharepod, status))
    twin.delete("sharepods", "team", "a")
    with pytest.raises(ObjectMissingError):
        asked(twin, lambda api: api.write_status(sharepod, status))


def test_what_is_followed_is_as_its_author_wrote_it() -> None:
    twin = ClusterTwin()
    annotations = {"kubeshare/gpu_mem": "1"}
    twin.put("sharepods", "team", "a", metadata={"annotations": annotations}, spec={"x": [1]})
    twin.put("sharepods", "team", "odd", spec="text", status=[1])
    twin.put("pods", "team", "a", metadata={"labels": {MADE_FOR: "SharePod"}})
    twin.put("pods", "team", "other", metadata={"labels": {"app": "x"}})
    heard: dict[str, SharePod | None] = {}
    pods: dict[str, PodSeen | None] = {}

    async def main() -> None:
        async with twin.api() as api, asyncio.timeout(40), asyncio.TaskGroup() as group:
            followed = SharePods(api)
            tasks = [
                group.create_task(followed.follow(heard.__setitem__).run()),
                group.create_task(followed.follow_pods(pods.__setitem__).run()),
            ]
            while len(heard) < 2 or not pods:  # noqa: ASYNC110 - it has no event
                await asyncio.sleep(0.001)
            for each in tasks:
                each.cancel()

    asyncio.run(main())
    found = {each.name: each for each in heard.values() if each is not None}
    assert found["a"].document["spec"] == {"x": [1]}
    assert found["a"].document["metadata"]["annotations"] == annotations
    assert found["odd"].document["spec"] == "text"
    assert found["odd"].status == {}
    assert [each.name for each in pods.values() if each is not None] == ["a"]


trees = st.recursive(
    st.integers() | st.text(max_size=2) | st.lists(st.integers(), max_size=2),
    lambda inner: st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
    max_leaves=8,
)
objects = st.dictionaries(st.sampled_from("abc"), trees, max_size=3)


@given(objects, objects)
def test_a_patch_makes_one_status_the_other_and_of_the_same_nothing(
    before: dict[str, Any], after: dict[str, Any]
) -> None:
    assert merged(before, changed(before, after)) == after
    assert changed(after, after) == {}
