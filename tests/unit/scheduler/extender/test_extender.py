# SPDX-License-Identifier: Apache-2.0
"""kube-scheduler's questions, as it writes them (kubernetes 1.36, pkg/scheduler/extender.go)."""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scheduler_twin import (
    GIB,
    Bindery,
    Told,
    book_of,
    cluster_pod,
    cluster_pod_of,
    node,
    pod_json,
)

from allotment.dialects.own.registry import need_of
from allotment.dialects.own.resource_claims import AllocatedDevice, ResourceClaim, WantedDevices
from allotment.kube.errors import DeniedError, UnreachableError
from allotment.model.clusters import ClusterPod, PodBooking
from allotment.model.errors import UsageError
from allotment.model.pods import PodUid
from allotment.model.structs import replace
from allotment.scheduler.core.book import BindOrder
from allotment.scheduler.core.cluster_events import KnownClaims
from allotment.scheduler.core.reservations import ReservationState
from allotment.scheduler.extender.binder import Binder
from allotment.scheduler.extender.extender import Extender, NotLeadingError

NAMES = ["a", "b", "c"]
MEMORY = "allotment.dev/gpu-memory"


class Scene:
    def __init__(self, *, candidates: int = 3) -> None:
        self.now = 10.0
        self.leads = True
        self.told = Told()
        self.bindery = Bindery()
        self.book = book_of(
            [node("a", 1), node("b", 2), node("c", 4, model="T4")], candidates=candidates
        )
        self.pods: dict[str, ClusterPod] = {}
        self.tried: list[tuple[str, list[str]]] = []
        self.claims = KnownClaims()
        self.binder = Binder(self.book, self.bindery, clock=lambda: self.now)
        self.extender = Extender(
            self.book,
            self.binder,
            observer=self.told,
            pods=self.pods.get,
            leads=lambda: self.leads,
            tried=lambda pod, names: self.tried.append((pod.name, list(names))),
            claims=self.claims.wanted,
            clock=lambda: self.now,
        )

    def hear(self, pod: dict[str, Any]) -> ClusterPod:
        """The watch tells of a pod, and the API server has it."""
        heard = cluster_pod_of(pod)
        self.pods[heard.uid] = heard
        self.bindery.add(heard)
        return heard

    def filter(
        self, pod: dict[str, Any], names: list[str] | None = None, *, is_heard: bool = True
    ) -> dict[str, Any]:
        if is_heard and pod["metadata"]["uid"] not in self.pods:
            self.hear(pod)
        body = {"Pod": pod, "Nodes": None, "NodeNames": NAMES if names is None else names}
        return dict(json.loads(self.extender.filter(json.dumps(body).encode())))

    def prioritize(self, pod: dict[str, Any], names: list[str]) -> dict[str, int]:
        body = {"Pod": pod, "Nodes": None, "NodeNames": names}
        answer = json.loads(self.extender.prioritize(json.dumps(body).encode()))
        return {each["Host"]: each["Score"] for each in answer}

    def bind(self, name: str, where: str) -> str:
        body = {"PodName": name, "PodNamespace": "ml", "PodUID": f"uid-{name}", "Node": where}
        answer = asyncio.run(self.extender.bind(json.dumps(body).encode()))
        return str(json.loads(answer)["Error"])

    def book_pod(self, name: str, where: str, memory: str = "80Gi", priority: int = 0) -> None:
        """A pod that is bound, and heard of."""
        limits = {"allotment.dev/gpu": "1", "allotment.dev/gpu-memory": memory}
        pod = cluster_pod(name, limits=limits)
        order = self.book.begin_bind(need_of(pod), where, now=self.now, version=pod.version)
        assert isinstance(order, BindOrder), order
        self.book.bound(order.booking, now=self.now)
        bound = replace(pod, node=where, booking=order.booking, priority=priority)
        self.pods[pod.uid] = bound
        self.book.pod_put(bound, now=self.now)


def test_the_best_nodes_are_answered_best_first() -> None:
    answer = Scene().filter(pod_json())
    assert answer == {"NodeNames": ["a", "b", "c"]}


def test_pods_that_the_watch_reported_are_known_as_tried() -> None:
    scene = Scene()
    scene.filter(pod_json(), ["a", "c"])
    scene.filter(pod_json("unknown"), is_heard=False)
    scene.filter(pod_json("plain", limits={"cpu": "1"}))
    assert scene.tried == [("train", ["a", "c"])]


def test_no_more_than_the_candidates_are_answered_and_the_others_are_not_called_failed() -> None:
    assert Scene(candidates=1).filter(pod_json()) == {"NodeNames": ["a"]}


def test_scores_are_unique_and_far_apart() -> None:
    scene = Scene()
    scene.filter(pod_json())
    scores = scene.prioritize(pod_json(), ["c", "a", "b"])
    assert sorted(scores, key=lambda name: -scores[name]) == ["a", "b", "c"]
    assert (
        min(abs(scores[one] - scores[other]) for one in scores for other in scores if one != other)
        >= 1000
    )


def test_whole_nodes_are_echoed_as_they_came() -> None:
    scene = Scene(candidates=2)
    items = [{"metadata": {"name": each}, "extra": {"kept": each * 3}} for each in NAMES]
    body = {"Pod": pod_json(), "Nodes": {"metadata": {}, "items": items}, "NodeNames": None}
    answer = json.loads(scene.extender.filter(json.dumps(body).encode()))
    assert answer == {"Nodes": {"items": items[:2]}}


def test_a_pod_without_our_resources_passes_through() -> None:
    scene = Scene(candidates=1)
    plain = pod_json(limits={"cpu": "1"})
    assert scene.filter(plain, ["x", "y"]) == {"NodeNames": ["x", "y"]}
    assert len(set(scene.prioritize(plain, ["x", "y"]).values())) == 1
    assert not any(scene.book.counts().values())


def test_a_pod_without_gpus_is_led_to_where_it_is_in_nobodys_way() -> None:
    scene = Scene(candidates=1)
    scene.book.node_put(replace(node("d", 1), cpu_milli=2_000))
    plain = pod_json(limits={"cpu": "1"})
    scores = scene.prioritize(plain, ["a", "b", "x", "c", "d", "y"])
    # They have no GPUs. kube-scheduler, which adds 0 to the others, chooses among them.
    assert scores == {"x": 1000, "y": 1000}
    assert scene.prioritize(plain, list("abcd")) == {"d": 1000}  # binpack: it has the least CPU
    larger = pod_json(limits={"cpu": "3"})
    larger["spec"]["containers"][0]["resources"]["requests"] = {"cpu": "3"}
    assert scene.prioritize(larger, ["d", "b"]) == {"b": 1000}  # d has no room
    assert not any(scene.book.counts().values())


def test_the_best_nodes_for_a_pod_without_gpus_are_ranked() -> None:
    scene = Scene(candidates=2)
    scores = scene.prioritize(pod_json(limits={"cpu": "1"}), NAMES)
    assert sorted(scores.values()) == [1000, 2000]


def test_where_nothing_fits_need_and_have_are_told_alike() -> None:
    scene = Scene()
    limits = {"allotment.dev/gpu": "2", "allotment.dev/gpu-memory": "180Gi"}
    answer = scene.filter(pod_json(limits=limits), [*NAMES, "nowhere"])
    assert answer["NodeNames"] == []
    assert set(answer["FailedNodes"]) == {"b", "c"}
    assert len(set(answer["FailedNodes"].values())) == 1
    assert "90Gi" in answer["FailedNodes"]["b"]
    assert "80Gi" in answer["FailedNodes"]["b"]
    # No preemption makes GPUs of a node, or a node of a name.
    assert set(answer["FailedAndUnresolvableNodes"]) == {"a", "nowhere"}
    assert scene.told.reasons == {"gpu-memory": 2, "too-few-gpus": 1, "unknown-node": 1}
    assert "2 nodes" in scene.told.refusals[0]


def test_no_percent_sign_is_told_to_kube_scheduler() -> None:
    """It takes one for a format's when it writes the event."""
    scene = Scene()
    limits = {"allotment.dev/gpu": "1", "allotment.dev/gpu-memory": "180Gi"}
    limits["allotment.dev/gpu-compute"] = "30"
    said = " ".join(scene.filter(pod_json(limits=limits), NAMES)["FailedNodes"].values())
    assert "30 percent" in said
    assert "%" not in said
    assert "30 %" in scene.told.refusals[0]


def test_a_pod_that_cannot_be_meant_is_refused_everywhere_with_the_next_step() -> None:
    scene = Scene()
    answer = scene.filter(pod_json(limits={"allotment.dev/gpu-memory": "4Gi"}))
    assert answer["NodeNames"] == []
    assert set(answer["FailedAndUnresolvableNodes"]) == set(NAMES)
    assert "allotment.dev/gpu: 1" in answer["FailedAndUnresolvableNodes"]["a"]
    assert scene.told.refusals[0].startswith("train True:")


def test_a_copied_placement_is_not_in_the_way() -> None:
    forged = {
        "version": 1,
        "pod": "another",
        "node": "c",
        "containers": {"main": {"devices": ["x"]}},
    }
    annotations = {"allotment.dev/placement": json.dumps(forged)}
    assert Scene().filter(pod_json(annotations=annotations))["NodeNames"] == NAMES


def test_a_pod_is_bound_where_it_was_shown() -> None:
    scene = Scene()
    scene.bindery.add(cluster_pod())
    scene.filter(pod_json())
    assert scene.bind("train", "a") == ""
    assert scene.told.bound_pods == ["train"]
    # kube-scheduler repeats what it got no answer to.
    assert scene.filter(pod_json()) == {"NodeNames": ["a"]}
    assert scene.bind("train", "a") == ""
    assert "to node a" in scene.bind("train", "b")
    assert len(scene.bindery.asked) == 1


def test_a_pod_that_another_replica_was_asked_about_is_known_from_the_watch() -> None:
    scene = Scene()
    assert "the pod does not exist" in scene.bind("train", "a")
    scene.hear(pod_json())
    assert scene.bind("train", "a") == ""
    assert scene.bindery.asked[0].version == "7"


def test_a_pod_that_the_watch_has_not_told_of_yet_is_read() -> None:
    scene = Scene()
    scene.bindery.add(cluster_pod(version="9"))
    assert scene.bind("train", "a") == ""
    assert scene.bindery.asked[0].version == "9"


def test_a_pod_that_has_changed_since_it_was_filtered_is_not_bound() -> None:
    """What the watch has told of meanwhile is another request, at a version that would do."""
    scene = Scene()
    small = {"allotment.dev/memory": "10%"}
    gpu = {"allotment.dev/gpu": "1"}
    scene.filter(pod_json(limits=gpu, annotations=small, version="77"))
    scene.hear(pod_json(limits=gpu, annotations={"allotment.dev/memory": "90%"}, version="78"))
    assert "has changed" in scene.bind("train", "a")
    assert not scene.bindery.asked
    scene.filter(pod_json(limits=gpu, annotations=small, version="77"))  # late
    assert scene.bind("train", "a") == ""
    [asked] = scene.bindery.asked
    booking = scene.bindery.pods[asked.uid].booking
    assert booking is not None
    assert booking.containers[0].devices[0].memory == 72 * GIB


def test_a_pod_that_has_changed_in_other_ways_is_bound_at_its_present_version() -> None:
    scene = Scene()
    scene.filter(pod_json(version="77"))
    scene.hear(pod_json(version="78", annotations={"team": "vision"}))
    assert scene.bind("train", "a") == ""
    assert [each.version for each in scene.bindery.asked] == ["78"]


@pytest.mark.parametrize("version", ["", "5", "99"])
def test_what_a_body_says_of_a_pod_that_is_known_is_not_believed(version: str) -> None:
    scene = Scene()
    scene.hear(pod_json(version="77"))
    scene.filter(pod_json(version="77"))
    little = {"allotment.dev/gpu": "1", "allotment.dev/gpu-memory": "1Mi"}
    assert scene.filter(pod_json(limits=little, version=version))["NodeNames"]
    scene.prioritize(pod_json(limits=little, version=version), ["a", "b"])
    assert scene.bind("train", "a") == ""
    [asked] = scene.bindery.asked
    assert asked.version == "77"
    booking = scene.bindery.pods[asked.uid].booking
    assert booking is not None
    assert booking.containers[0].devices[0].memory == 20 * GIB


def test_a_pod_that_nobody_has_told_of_is_ranked_and_leaves_nothing() -> None:
    scene = Scene(candidates=1)
    whole = {"allotment.dev/gpu": "1"}
    for number in range(5):
        made_up = pod_json(f"made-up-{number}", limits=whole)
        assert scene.filter(made_up, is_heard=False) == {"NodeNames": ["a"]}
        assert scene.prioritize(made_up, ["b", "a"]) == {"a": 2000, "b": 1000}
    unfit = pod_json("huge", limits={"allotment.dev/gpu": "7"})
    assert scene.filter(unfit, is_heard=False)["NodeNames"] == []
    mistaken = pod_json("mistaken", limits={"allotment.dev/gpu-memory": "4Gi"})
    assert scene.filter(mistaken, is_heard=False)["NodeNames"] == []
    assert not any(scene.book.counts().values())
    assert not scene.told.refusals
    assert not scene.told.reasons


def test_a_pod_that_asks_for_nothing_of_ours_is_bound_as_it_is() -> None:
    """kube-scheduler hands pods with any resource that it was told is ours to the binder."""
    scene = Scene()
    scene.hear(pod_json("foreign", limits={"aliyun.com/gpu-mem": "3"}))
    assert scene.bind("foreign", "no-agent-there") == ""
    [asked] = scene.bindery.asked
    assert (asked.node, asked.version, dict(asked.annotations)) == ("no-agent-there", "", {})
    assert not any(scene.book.counts().values())
    scene.bindery.answers.append(DeniedError("the API server refused: no", status=403))
    scene.hear(pod_json("other", limits={"cpu": "1"}))
    assert "refused" in scene.bind("other", "b")


def test_prioritize_without_a_filter_before_it_knows_the_version() -> None:
    """The leader has changed between both questions, say."""
    scene = Scene()
    scene.hear(pod_json(version="77"))
    assert set(scene.prioritize(pod_json(version="77"), ["a", "b"])) == {"a", "b"}
    assert scene.bind("train", "a") == ""
    assert [each.version for each in scene.bindery.asked] == ["77"]


def test_an_api_server_that_cannot_be_asked_about_a_pod_is_named() -> None:
    scene = Scene()
    scene.bindery.read_error = UnreachableError("cannot get pod: the API server is away")
    assert "is away" in scene.bind("train", "a")


def test_a_pod_of_another_name_is_not_bound() -> None:
    scene = Scene()
    heard = scene.hear(pod_json())
    body = {"PodName": "x", "PodNamespace": "ml", "PodUID": heard.uid, "Node": "a"}
    answer = asyncio.run(scene.extender.bind(json.dumps(body).encode()))
    assert "the pod does not exist" in json.loads(answer)["Error"]


def test_two_pods_are_not_shown_the_same_place() -> None:
    scene = Scene(candidates=1)
    whole = {"allotment.dev/gpu": "1"}
    assert scene.filter(pod_json("one", limits=whole))["NodeNames"] == ["a"]
    assert scene.filter(pod_json("two", limits=whole))["NodeNames"] == ["b"]


def test_a_node_on_which_a_pod_was_never_bound_is_its_last_choice() -> None:
    scene = Scene(candidates=1)
    assert scene.filter(pod_json())["NodeNames"] == ["a"]
    assert scene.filter(pod_json())["NodeNames"] == ["a"]  # the same call again
    scene.now += 1.5  # some plugin did not want it there
    assert scene.filter(pod_json())["NodeNames"] == ["b"]
    assert scene.filter(pod_json(), ["a"])["NodeNames"] == ["a"]


def test_where_only_expected_pods_are_in_the_way_the_node_is_shown_all_the_same() -> None:
    scene = Scene(candidates=1)
    whole = {"allotment.dev/gpu": "1"}
    scene.filter(pod_json("one", limits=whole), ["a"])
    assert scene.filter(pod_json("two", limits=whole), ["a"])["NodeNames"] == ["a"]
    for name in ("one", "two"):
        scene.bindery.add(cluster_pod(name, limits=whole))
    assert scene.bind("two", "a") == ""  # the first to come is served
    assert "have at most" in scene.bind("one", "a") or "whole" in scene.told.unbound_pods[0]
    assert scene.book.state(cluster_pod("one").uid) is ReservationState.SEEN


def test_cpu_that_kube_scheduler_has_found_is_not_doubted() -> None:
    scene = Scene(candidates=1)
    busy = PodBooking(uid=cluster_pod("plain").uid, node="a", cpu_milli=64_000)
    scene.book.cluster.book(busy)
    pod = pod_json()
    pod["spec"]["containers"][0]["resources"]["requests"] = {"cpu": "500m"}
    assert scene.filter(pod, ["a"])["NodeNames"] == ["a"]
    assert scene.filter(pod, NAMES)["NodeNames"] == ["b"]


def test_who_does_not_lead_answers_nothing() -> None:
    scene = Scene()
    scene.leads = False
    with pytest.raises(NotLeadingError):
        scene.filter(pod_json())
    with pytest.raises(NotLeadingError):
        scene.bind("train", "a")


@given(
    st.binary(max_size=300)
    | st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(["Pod", "NodeNames", "metadata", "spec", "uid", "x"]), inner
            )
        ),
    ).map(lambda value: json.dumps(value).encode())
)
def test_any_body_is_answered_or_refused(body: bytes) -> None:
    scene = Scene()
    for question in (scene.extender.filter, scene.extender.prioritize):
        with contextlib.suppress(UsageError):
            json.loads(question(body))
    with contextlib.suppress(UsageError):
        asyncio.run(scene.extender.bind(body))


def test_memory_is_of_each_gpu() -> None:
    scene = Scene()
    limits = {"allotment.dev/gpu": "2", "allotment.dev/gpu-memory": "40Gi"}
    scene.bindery.add(cluster_pod(limits=limits))
    scene.filter(pod_json(limits=limits))
    assert scene.bind("train", "b") == ""
    booking = scene.book.booking(cluster_pod().uid)
    assert booking is not None
    assert [each.memory for each in booking.containers[0].devices] == [20 * GIB, 20 * GIB]


def test_a_device_that_fails_between_filter_and_bind_is_not_given() -> None:
    scene = Scene(candidates=1)
    assert scene.filter(pod_json(), ["b"]) == {"NodeNames": ["b"]}
    uid = PodUid(pod_json()["metadata"]["uid"])
    known, expected = scene.book.need(uid), scene.book.booking(uid)
    assert known is not None
    assert expected is not None
    [chosen] = expected.containers[0].devices
    there = node("b", 2)
    devices = tuple(
        replace(each, problem="sick") if each.uuid == chosen.uuid else each
        for each in there.devices
    )
    scene.book.node_put(replace(there, devices=devices))
    order = scene.book.begin_bind(known, "b", now=scene.now, version="7")
    assert isinstance(order, BindOrder)
    assert order.booking.containers[0].devices[0].uuid != chosen.uuid


def test_a_name_is_asked_about_as_a_whole() -> None:
    answer = Scene().filter(pod_json(), ["aa", "b.a", "c-a"])
    assert not answer.get("NodeNames")
    assert set(answer["FailedAndUnresolvableNodes"]) == {"aa", "b.a", "c-a"}


@pytest.mark.parametrize("names", ['"a"', "[1]", '{"a": 1}', "[[]]"])
def test_names_that_are_no_list_of_names_are_refused(names: str) -> None:
    body = f'{{"Pod": {json.dumps(pod_json())}, "NodeNames": {names}}}'
    with pytest.raises(UsageError, match="ExtenderArgs"):
        Scene().extender.prioritize(body.encode())


def test_time_is_asked_about_pods_until_they_are_bound_for_certain() -> None:
    scene = Scene()
    scene.book_pod("p", "a", memory="8Gi")
    scene.filter(pod_json())
    for _ in range(2):
        assert scene.book.tick(scene.now) == []
        counts = scene.book.counts()
        assert (counts[ReservationState.BOUND], counts[ReservationState.EXPECTED]) == (1, 1)
    scene.book.tick(scene.now + 10)
    assert scene.book.counts()[ReservationState.EXPECTED] == 0


# ---- claims --------------------------------------------------------------------------------------


def claiming(template: str | None = None) -> dict[str, Any]:
    """A pod without GPU resources, with a claim of a name or from a template."""
    made = pod_json("claiming", limits={}, resourceClaims=[{"name": "gpu"}])
    if template is None:
        made["spec"]["resourceClaims"][0]["resourceClaimName"] = "mine"
    else:
        made["spec"]["resourceClaims"][0]["resourceClaimTemplateName"] = template
        statuses = [{"name": "gpu", "resourceClaimName": "mine"}]
        made["status"]["resourceClaimStatuses"] = statuses
    return made


def waiting(kind: str = "share.allotment.dev", **amounts: str) -> ResourceClaim:
    wanted = (WantedDevices(request="gpu", device_class=kind, amounts=amounts),)
    return ResourceClaim(uid="c", namespace="ml", name="mine", wanted=wanted)


@pytest.mark.parametrize("template", [None, "made"])
def test_a_pod_with_a_claim_goes_where_a_pod_that_asks_for_the_same_goes(
    template: str | None,
) -> None:
    scene = Scene(candidates=1)
    scene.filter(pod_json("other", limits={"allotment.dev/gpu": "1", MEMORY: "60Gi"}), ["a"])
    pod = claiming(template)
    for claim, size in (
        (waiting(memory="20Gi"), "20Gi"),
        (waiting(memory="30Gi"), "30Gi"),
        (waiting("gpu.allotment.dev"), "80Gi"),
    ):
        scene.claims.put(PodUid("c"), claim)
        limits = {"allotment.dev/gpu": "1", MEMORY: size}
        need = need_of(cluster_pod("same", limits=limits))
        (best,) = scene.book.rank(need, ["a", "b"]).best
        assert scene.prioritize(pod, ["a", "b"]) == {best: 1000}
    scene.claims.put(PodUid("c"), waiting(memory="30Gi"))
    assert scene.prioritize(pod, ["a", "b"]) == {"b": 1000}


def test_claims_that_are_unknown_or_decided_leave_a_pod_as_one_without_gpus() -> None:
    scene = Scene(candidates=1)
    plain = scene.prioritize(pod_json("plain", limits={}), [*NAMES, "none"])
    assert plain == {"none": 1000}
    device = AllocatedDevice(request="gpu", pool="a", device="gpu-4a0ae330")
    for claim in (
        waiting("other.example.com"),
        waiting(memory="much"),
        replace(waiting(memory="20Gi"), devices=(device,)),
        replace(waiting(memory="20Gi"), name="another"),
    ):
        scene.claims.put(PodUid("c"), claim)
        assert scene.prioritize(claiming(), [*NAMES, "none"]) == plain
