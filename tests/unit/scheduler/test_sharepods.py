# SPDX-License-Identifier: Apache-2.0
"""SharePods get their pods, and show what becomes of them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from sharepods_twin import ClusterTwin

from allotment.dialects.placements import PLACEMENT
from allotment.kube.backoff import Backoff
from allotment.kube.events import Reference
from allotment.kube.sharepods import MADE_FOR, SharePods
from allotment.scheduler.lasting import lasting
from allotment.scheduler.sharepods import SharePodKeeper, SharePodTimes

ASKS = {
    "kubeshare/gpu_request": "0.5",
    "kubeshare/gpu_limit": "1.0",
    "kubeshare/gpu_mem": "1073741824",
}
SPEC = {"restartPolicy": "Never", "containers": [{"name": "cuda", "image": "x"}]}
TIMES = SharePodTimes(look_s=0.02, again_s=0.04, tick_s=0.002)
PATIENT = SharePodTimes(look_s=1000, again_s=1000, first_s=1000, tick_s=0.002)
Test = Callable[[], Awaitable[None]]


@dataclass(slots=True)
class Told:
    """The events."""

    events: list[tuple[Reference, str, str]] = field(default_factory=list)

    def tell(self, about: Reference, *, reason: str, message: str, is_warning: bool) -> None:
        assert is_warning
        self.events.append((about, reason, message))


@dataclass(slots=True)
class Served:
    """A cluster, and who serves its SharePods while `leads`."""

    twin: ClusterTwin = field(default_factory=ClusterTwin)
    told: Told = field(default_factory=Told)
    leads: bool = True
    ignored: frozenset[str] = frozenset({"kube-system"})
    times: SharePodTimes = TIMES

    def keeper(self, api: Any) -> SharePodKeeper:  # noqa: ANN401 - an Api
        return SharePodKeeper(
            SharePods(api),
            leads=lambda: self.leads,
            events=self.told,
            ignored_namespaces=self.ignored,
            times=self.times,
        )

    def run(self, test: Test, *, keepers: int = 1) -> None:
        async def main() -> None:
            async with self.twin.api() as api:
                beside = [asyncio.create_task(self.keeper(api).run()) for _ in range(keepers)]
                try:
                    async with asyncio.timeout(20):
                        await test()
                finally:
                    for each in beside:
                        each.cancel()
                    ends = await asyncio.gather(*beside, return_exceptions=True)
                assert all(isinstance(each, asyncio.CancelledError) for each in ends), ends

        asyncio.run(main())

    async def until(self, condition: Callable[[], object]) -> None:
        while not condition():  # noqa: ASYNC110 - what is waited for has no event
            await asyncio.sleep(0.001)

    async def settled(self, *, rounds: int = 5) -> None:
        """Wait for as long as it takes to look at everything some times over."""
        await asyncio.sleep(rounds * TIMES.again_s)

    async def quiet(self) -> None:
        """Wait until what was begun is over: nothing is asked for, for some time."""
        asked = -1
        while asked != len(self.twin.requests):
            asked = len(self.twin.requests)
            await self.settled()

    def write(self, name: str = "sharepod1", namespace: str = "team", **changes: Any) -> None:  # noqa: ANN401 - JSON
        fields = {"metadata": {"annotations": ASKS}, "spec": SPEC} | changes
        self.twin.put("sharepods", namespace, name, **fields)

    def status(self, name: str = "sharepod1") -> dict[str, Any]:
        found: dict[str, Any] = self.twin.sharepod(name).get("status", {})
        return found


@pytest.fixture
def served() -> Served:
    return Served()


def placed(uid: str, *devices: str) -> str:
    part = {"devices": devices, "memory": 1 << 30, "mode": "soft"}
    return json.dumps({"version": 1, "pod": uid, "node": "n1", "containers": {"cuda": part}})


def test_a_sharepod_gets_its_pod_and_shows_what_becomes_of_it(served: Served) -> None:
    labels = {"app": "x"}
    metadata = {"annotations": ASKS, "labels": labels}
    served.write(metadata=metadata)

    async def test() -> None:
        await served.until(lambda: served.status().get("PodStatus") == {"phase": "Pending"})
        (made,) = served.twin.created
        assert made["metadata"]["name"] == "sharepod1"
        assert made["metadata"]["annotations"] == ASKS
        assert made["metadata"]["labels"] == {**labels, MADE_FOR: "SharePod"}
        (owner,) = made["metadata"]["ownerReferences"]
        assert owner["uid"] == served.twin.sharepod()["metadata"]["uid"]
        assert owner["controller"] is True
        assert made["spec"] == SPEC
        pod = served.twin.pod()
        assert pod is not None
        uid = pod["metadata"]["uid"]
        annotations = {**ASKS, PLACEMENT: placed(uid, "GPU-b")}
        metadata = {**pod["metadata"], "annotations": annotations, "managedFields": [{"a": 1}]}
        status = {"phase": "Running", "hostIP": "198.18.0.2"}
        spec = {**SPEC, "nodeName": "n1"}
        served.twin.put("pods", "team", "sharepod1", metadata=metadata, spec=spec, status=status)
        await served.until(lambda: served.status().get("PodStatus") == status)
        assert served.status()["BoundDeviceID"] == "GPU-b"
        assert served.status()["PodObjectMeta"]["uid"] == uid
        assert "managedFields" not in served.status()["PodObjectMeta"]

    served.run(test)


def test_nothing_is_written_while_nothing_changes(served: Served) -> None:
    served.write()

    async def test() -> None:
        await served.until(served.status)
        written = len(served.twin.written)
        await served.settled()
        assert len(served.twin.written) == written
        assert len(served.twin.created) == 1

    served.run(test)


def test_a_placement_of_another_pod_is_neither_copied_nor_shown(served: Served) -> None:
    forged = {**ASKS, PLACEMENT: placed("another", "GPU-b")}
    served.write(metadata={"annotations": forged})

    async def test() -> None:
        await served.until(served.status)
        (made,) = served.twin.created
        assert PLACEMENT not in made["metadata"]["annotations"]
        pod = served.twin.pod()
        assert pod is not None
        metadata = {**pod["metadata"], "annotations": forged}
        served.twin.put("pods", "team", "sharepod1", metadata=metadata, status={"phase": "Running"})
        await served.until(lambda: served.status()["PodStatus"]["phase"] == "Running")
        assert served.status()["BoundDeviceID"] == ""

    served.run(test)


def test_two_that_believe_to_lead_make_one_pod(served: Served) -> None:
    for number in range(20):
        served.write(f"s{number}")

    async def test() -> None:
        await served.until(lambda: all(served.status(f"s{each}") for each in range(20)))
        await served.settled()
        assert len(served.twin.created) == 20
        pods = [key for key in served.twin.objects if key[0] == "pods"]
        assert len(pods) == 20
        assert served.told.events == []

    served.run(test, keepers=2)


def test_another_start_finds_the_pod_that_is_there(served: Served) -> None:
    served.write()

    async def first() -> None:
        await served.until(served.status)

    async def second() -> None:
        status = {"phase": "Succeeded"}
        served.twin.put("pods", "team", "sharepod1", status=status)
        await served.until(lambda: served.status()["PodStatus"] == status)

    served.run(first)
    served.run(second)
    assert len(served.twin.created) == 1


def test_a_pod_that_kubeshare_has_made_is_shown_and_not_made_again(served: Served) -> None:
    served.write(status={"BoundDeviceID": "GPU-k", "PodManagerPort": 50051})
    uid = served.twin.sharepod()["metadata"]["uid"]
    owners = [{"kind": "SharePod", "uid": uid, "controller": True}]
    made = served.twin.put(
        "pods",
        "team",
        "sharepod1",
        metadata={"ownerReferences": owners},
        status={"phase": "Pending"},
    )
    known = {"PodObjectMeta": {"uid": made["metadata"]["uid"]}}
    served.twin.put("sharepods", "team", "sharepod1", status={**served.status(), **known})

    async def test() -> None:
        await served.until(lambda: served.status().get("PodStatus") == {"phase": "Pending"})
        await served.settled()
        served.twin.put("pods", "team", "sharepod1", status={"phase": "Running"})
        await served.until(lambda: served.status()["PodStatus"] == {"phase": "Running"})
        assert served.status()["BoundDeviceID"] == "GPU-k"
        assert served.status()["PodManagerPort"] == 50051

    served.run(test)
    assert served.twin.created == []


@pytest.mark.parametrize(
    ("policy", "phase", "made"),
    [
        ("Never", "Succeeded", 1),
        ("Never", "Failed", 1),
        ("Never", "Running", 2),
        ("OnFailure", "Succeeded", 1),
        ("OnFailure", "Failed", 2),
        ("Always", "Succeeded", 2),
        (None, "Failed", 2),
    ],
)
def test_a_pod_that_went_is_made_anew_unless_it_had_ended(
    served: Served, policy: str | None, phase: str, made: int
) -> None:
    spec = {"containers": SPEC["containers"], **({"restartPolicy": policy} if policy else {})}
    served.write(spec=spec)

    async def test() -> None:
        await served.until(served.status)
        served.twin.put("pods", "team", "sharepod1", status={"phase": phase})
        await served.until(lambda: served.status()["PodStatus"]["phase"] == phase)
        served.twin.delete("pods", "team", "sharepod1")
        await served.until(lambda: len(served.twin.created) == made)
        await served.settled()
        assert len(served.twin.created) == made
        if made == 1:
            assert served.status()["PodStatus"]["phase"] == phase
            asked = len(served.twin.requests)
            await served.settled()
            pod = "/api/v1/namespaces/team/pods/sharepod1"
            assert pod not in [path for _, path in served.twin.requests[asked:]]

    served.run(test)


def test_what_has_ended_is_not_made_anew_before_its_end_has_been_heard(served: Served) -> None:
    served.write()

    async def test() -> None:
        await served.until(served.status)
        await served.settled(rounds=1)
        served.twin.unheard = {"sharepods"}
        served.twin.put("pods", "team", "sharepod1", status={"phase": "Succeeded"})
        await served.until(lambda: served.status()["PodStatus"]["phase"] == "Succeeded")
        served.twin.delete("pods", "team", "sharepod1")
        await served.settled()
        assert len(served.twin.created) == 1

    served.run(test)


def test_what_the_webhook_refuses_is_told_and_made_when_it_is_corrected(served: Served) -> None:
    served.twin.refusal = (422, "kubeshare/gpu_limit is '2.0'")
    served.write()

    async def test() -> None:
        await served.until(served.status)
        told = served.status()["PodStatus"]
        assert (told["phase"], told["reason"]) == ("Pending", "ErrValueError")
        assert "kubeshare/gpu_limit is '2.0'" in told["message"]
        about, reason, message = served.told.events[0]
        assert (about.kind, about.name, about.namespace) == ("SharePod", "sharepod1", "team")
        assert about.uid == served.twin.sharepod()["metadata"]["uid"]
        assert about.api_version == "kubeshare.nthu/v1"
        assert (reason, message) == ("ErrValueError", told["message"])
        written = len(served.twin.written)
        await served.settled()  # tried again by itself, and refused again
        assert len(served.told.events) > 1
        assert len(served.twin.written) == written
        served.twin.refusal = None
        await served.until(lambda: served.twin.created)
        await served.until(lambda: served.status()["PodStatus"] == {"phase": "Pending"})

    served.run(test)


def test_a_correction_is_tried_at_once(served: Served) -> None:
    served.times = PATIENT
    served.twin.refusal = (403, "quota")
    served.write()

    async def test() -> None:
        await served.until(served.status)
        served.twin.refusal = None
        served.write(metadata={"annotations": {**ASKS, "kubeshare/gpu_limit": "0.5"}})
        await served.until(lambda: served.twin.created)

    served.run(test)
    (made,) = served.twin.created
    assert made["metadata"]["annotations"]["kubeshare/gpu_limit"] == "0.5"


def test_a_refusal_in_ever_other_words_is_no_reason_to_hurry(served: Served) -> None:
    served.times = PATIENT
    served.write()

    async def test() -> None:
        for number in range(50):
            served.twin.refusal = (403, f"refused, request {number}")
            await asyncio.sleep(0.01)

    served.run(test)
    assert len(served.told.events) == 1


def test_the_pod_of_one_of_before_is_waited_for_and_no_longer(served: Served) -> None:
    served.times = PATIENT
    served.write()

    async def test() -> None:
        await served.until(served.status)
        served.twin.delete("sharepods", "team", "sharepod1", cascades=False)
        served.write()
        await served.until(lambda: served.told.events)
        served.twin.delete("pods", "team", "sharepod1")
        await served.until(lambda: len(served.twin.created) == 2)

    served.run(test)


def test_an_owner_that_does_not_control_a_pod_has_not_made_it(served: Served) -> None:
    served.write()
    owners = [{"uid": served.twin.sharepod()["metadata"]["uid"]}]
    metadata = {"ownerReferences": owners}
    served.twin.put("pods", "team", "sharepod1", metadata=metadata, status={"phase": "Running"})

    async def test() -> None:
        await served.until(served.status)
        assert served.status()["PodStatus"]["reason"] == "ErrResourceExists"

    served.run(test)


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
        async with served.twin.api() as api, asyncio.timeout(20):
            run, none = served.keeper(api).run, Backoff(first_s=0.0)
            task = asyncio.create_task(lasting(run, "s", on_failure=failed.append, backoff=none))
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
        served.twin.define(is_defined=False)
        await served.settled()
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
