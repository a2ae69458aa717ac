# SPDX-License-Identifier: Apache-2.0
"""SharePods that are no good hinder no others; who serves them comes, goes, and fails."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from served_sharepods import ASKS, SPEC, Served

from allotment.kube.clients import Backoff
from allotment.kube.sharepods import SharePods
from allotment.scheduler.supervise import restart_on_failure


@pytest.mark.parametrize("owners", [[], [{"uid": "other", "controller": True}]])
def test_another_pod_of_its_name_is_left_alone_and_told(
    served: Served, owners: list[dict[str, Any]]
) -> None:
    metadata = {"ownerReferences": owners}
    served.twin.put("pods", "team", "sharepod1", metadata=metadata, status={"phase": "Running"})
    served.write()

    async def test() -> None:
        await served.until(served.status)
        told = served.status()["PodStatus"]
        assert told["reason"] == "ErrResourceExists"
        assert "pod team/sharepod1" in told["message"]
        served.twin.delete("pods", "team", "sharepod1")
        await served.until(lambda: served.twin.created)

    served.run(test)


def test_what_is_no_pods_spec_is_refused_and_hinders_no_other(served: Served) -> None:
    served.write("bad", spec={"nodeName": "n1", "affinity": {"nodeAffinity": "b"}})
    served.write("none", spec=None)
    served.write("odd", status={"PodStatus": "text", "PodObjectMeta": [1]})
    served.write("good")

    async def test() -> None:
        await served.until(lambda: served.status("good").get("PodObjectMeta"))
        await served.until(lambda: served.status("odd").get("BoundDeviceID") is not None)
        await served.until(lambda: served.status("bad") and served.status("none"))
        for name in ("bad", "none"):
            assert "hint: " in served.status(name)["PodStatus"]["message"]

    served.run(test)
    assert {each["metadata"]["name"] for each in served.twin.created} == {"good", "odd"}


DEEP_MARK = "nested deeper than any decoder goes"
DEEP = b'{"a":' * 5000 + b"1" + b"}" * 5000
"""Go's decoder lets 10,000 levels pass; so does a definition that keeps unknown fields."""


class Deepening:
    """An API whose answers are nested deep where an object has `DEEP_MARK`."""

    def __init__(self, api: Any) -> None:  # noqa: ANN401 - an Api
        self._api = api

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - whatever it is
        return getattr(self._api, name)

    async def get(self, *args: Any, **more: Any) -> bytes:  # noqa: ANN401 - an Api's
        return deepened(await self._api.get(*args, **more))

    async def lines(self, *args: Any, **more: Any) -> AsyncIterator[bytes]:  # noqa: ANN401 - likewise
        async for line in self._api.lines(*args, **more):
            yield deepened(line)


def deepened(answer: bytes) -> bytes:
    return answer.replace(json.dumps(DEEP_MARK).encode(), DEEP)


@pytest.mark.parametrize("is_watched", [False, True])
def test_what_is_nested_too_deep_is_that_sharepods_trouble_alone(
    served: Served,
    monkeypatch: pytest.MonkeyPatch,
    is_watched: bool,  # noqa: FBT001 - a parameter
) -> None:
    plain = Served.keeper
    monkeypatch.setattr(Served, "keeper", lambda self, api: plain(self, Deepening(api)))

    def write() -> None:
        served.write("spec", spec={**SPEC, "x": DEEP_MARK})
        served.write("fields", metadata={"annotations": ASKS, "managedFields": DEEP_MARK})
        served.write("status", status={"x": DEEP_MARK})
        served.write("good")

    if not is_watched:
        write()

    async def test() -> None:
        if is_watched:
            served.write("first")
            await served.until(lambda: served.status("first"))
            write()
        names = {"good", "fields", "status"}
        await served.until(lambda: all("PodObjectMeta" in served.status(each) for each in names))
        await served.until(lambda: served.status("spec").get("PodStatus"))
        assert "nested more than 100 levels deep" in served.status("spec")["PodStatus"]["message"]
        await served.until(lambda: served.told.events)
        assert {about.name for about, _, _ in served.told.events} == {"spec"}

    served.run(test)
    assert {each["metadata"]["name"] for each in served.twin.created} - {"first"} == {
        "good",
        "fields",
        "status",
    }


def test_whatever_ends_the_serving_it_begins_anew(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = SharePods.follow_pods
    times = iter([ValueError("a defect")])

    def follow_pods(*args: Any) -> Any:  # noqa: ANN401 - theirs
        for error in times:
            raise error
        return plain(*args)

    monkeypatch.setattr(SharePods, "follow_pods", follow_pods)
    served.write()
    failed: list[str] = []

    async def test() -> None:
        async with served.twin.api() as api, asyncio.timeout(40):
            run, none = served.keeper(api).run, Backoff(first_s=0.0)
            task = asyncio.create_task(
                restart_on_failure(run, "s", on_failure=failed.append, backoff=none)
            )
            await served.until(lambda: served.status().get("PodObjectMeta"))
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    asyncio.run(test())
    assert failed == ["s"]


def test_a_pod_that_cannot_be_understood_is_that_sharepods_trouble_alone(served: Served) -> None:
    served.write("bad")
    owners = [{"uid": served.twin.sharepod("bad")["metadata"]["uid"], "controller": True}]
    served.twin.put("pods", "team", "bad", metadata={"ownerReferences": owners}, status="text")
    served.write("good")

    async def test() -> None:
        await served.until(lambda: served.status("good"))
        await served.settled()

    served.run(test)


def test_one_that_is_being_deleted_gets_no_pod(served: Served) -> None:
    gone = {"annotations": ASKS, "deletionTimestamp": "2026-01-01T00:00:00Z"}
    served.write(metadata=gone)

    async def test() -> None:
        await served.settled()

    served.run(test)
    assert served.twin.created == []


def test_a_new_one_of_the_same_name_gets_a_pod_of_its_own(served: Served) -> None:
    served.write()

    async def test() -> None:
        await served.until(served.status)
        served.twin.delete("sharepods", "team", "sharepod1")
        assert served.twin.pod() is None
        served.write()
        await served.until(lambda: len(served.twin.created) == 2)
        await served.until(served.status)

    served.run(test)
    owners = [each["metadata"]["ownerReferences"][0]["uid"] for each in served.twin.created]
    assert len(set(owners)) == 2


@contextmanager
def ignoring(served: Served, how: str) -> Iterator[None]:
    namespace, labels = "team", {}
    if how == "kube-system":
        namespace = "kube-system"
    elif how == "namespace":
        served.twin.namespaces["team"] = {"allotment.dev/webhook": "ignore"}
    else:
        labels = {how: "ignore"}
    served.write(namespace=namespace, metadata={"annotations": ASKS, "labels": labels})
    served.write("other", "elsewhere")
    yield
    assert [each["metadata"]["name"] for each in served.twin.created] == ["other"]
    assert "status" not in served.twin.sharepod("sharepod1", namespace)


@pytest.mark.parametrize(
    "how", ["kube-system", "namespace", "allotment.dev/webhook", "hami.io/webhook"]
)
def test_what_is_another_systems_is_left_alone(served: Served, how: str) -> None:
    async def test() -> None:
        await served.until(lambda: served.twin.created)
        await served.settled()

    with ignoring(served, how):
        served.run(test)


def test_who_does_not_lead_does_nothing_and_who_begins_to_does_all(served: Served) -> None:
    served.leads = False
    served.write()

    async def test() -> None:
        await served.settled(rounds=2)
        assert served.twin.requests == []
        served.leads = True
        await served.until(served.status)
        served.leads = False
        await served.quiet()
        served.write("second")
        asked = len(served.twin.requests)
        await served.settled()
        assert len(served.twin.requests) == asked
        assert len(served.twin.created) == 1
        served.leads = True
        await served.until(lambda: served.status("second"))

    served.run(test)


def test_a_definition_is_noticed_when_it_comes_and_when_it_goes(served: Served) -> None:
    served.twin.is_defined = False
    served.write()

    async def test() -> None:
        await served.settled(rounds=2)
        assert served.twin.created == []
        assert {path for _, path in served.twin.requests} == {"/apis/kubeshare.nthu/v1"}
        served.twin.define(is_defined=True)
        await served.until(served.status)
        asked = len(served.twin.requests)
        served.twin.define(is_defined=False)
        definition = ("GET", "/apis/kubeshare.nthu/v1")
        # Twice: whatever was asked for before it was noticed is over then.
        await served.until(lambda: served.twin.requests[asked:].count(definition) > 1)
        asked = len(served.twin.requests)
        await served.settled()
        since = {path for _, path in served.twin.requests[asked:]}
        assert since <= {"/apis/kubeshare.nthu/v1"}
        served.twin.define(is_defined=True)
        served.write("second")
        await served.until(lambda: served.status("second"))

    served.run(test)


def test_without_the_rights_it_waits_for_them(served: Served) -> None:
    served.twin.may_list = False
    served.write()

    async def test() -> None:
        await served.settled(rounds=2)
        assert served.twin.created == []
        served.twin.may_list = True
        await served.until(served.status)

    served.run(test)
