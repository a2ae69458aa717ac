# SPDX-License-Identifier: Apache-2.0
"""All pods and nodes: what is kept of them, what is told, and when everything is known."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import msgspec
import pytest
from api_server_twin import Reply, Server, Watch, answered, api_of, impatient, run, until

from allotment.dialects.own.placement import PLACEMENT, write_booking
from allotment.dialects.own.resource_claims import ResourceClaim
from allotment.kube.clients import HttpRequest
from allotment.kube.cluster_feed import ClusterFeed, to_cluster_pod
from allotment.kube.inventories import DEVICES, encode
from allotment.kube.objects import NOMINATOR, PodObject
from allotment.model.clusters import (
    ClusterPod,
    NodeDevice,
    NodeInventory,
    PlacedContainer,
    PlacedDevice,
    PodBooking,
)
from allotment.model.pods import PodUid

GPU = {"limits": {"allotment.dev/gpu": "1"}, "requests": {"cpu": "2"}}


def pod_json(
    name: str = "train",
    *,
    node: str = "",
    version: str = "5",
    **more: Any,  # noqa: ANN401 - any other part of it
) -> dict[str, Any]:
    return {
        "metadata": {
            "name": name,
            "namespace": "ml",
            "uid": f"uid-{name}",
            "resourceVersion": version,
            "annotations": more.get("annotations"),
        },
        "spec": {
            "nodeName": node,
            "priority": more.get("priority"),
            "containers": [{"name": "main", "resources": more.get("resources", GPU)}],
        },
        "status": {"phase": more.get("phase", "Pending"), **more.get("status", {})},
    }


def read(document: dict[str, Any]) -> ClusterPod:
    return to_cluster_pod(msgspec.json.decode(json.dumps(document), type=PodObject))


def placement(uid: str = "uid-train", node: str = "n1") -> str:
    placed = PlacedContainer(name="main", devices=(PlacedDevice("GPU-1", 4 << 30),))
    return write_booking(PodBooking(uid=PodUid(uid), node=node, containers=(placed,)))


def node_json(
    name: str, devices: int = 2, annotations: Mapping[str, str] | None = None
) -> dict[str, Any]:
    inventory = NodeInventory(
        name=name,
        devices=tuple(
            NodeDevice(uuid=f"GPU-{name}{each}", model="A100", memory_bytes=80 << 30, index=each)
            for each in range(devices)
        ),
    )
    text = {DEVICES: encode(inventory)} if devices else {}
    return {
        "metadata": {
            "name": name,
            "uid": f"uid-{name}",
            "resourceVersion": "1",
            "annotations": {**text, **(annotations or {})},
        },
        "status": {"allocatable": {"cpu": "7500m", "memory": "4Gi", "pods": "110"}},
    }


def test_a_pod_that_waits_says_what_it_asks_for() -> None:
    pod = read(pod_json(annotations={PLACEMENT: "copied", "other": "x"}, priority=7))
    assert (pod.cpu_milli, pod.priority, pod.version, pod.node) == (2000, 7, "5", "")
    assert pod.asks is not None
    assert pod.asks.annotations == {}
    assert pod.booking is None


def test_a_bound_pod_has_what_was_decided_for_it() -> None:
    pod = read(pod_json(node="n1", annotations={PLACEMENT: placement()}))
    assert pod.booking is not None
    assert pod.booking.cpu_milli == 2000
    assert pod.booking.containers[0].devices == (PlacedDevice("GPU-1", 4 << 30),)
    assert (pod.problem, pod.version) == ("", "")
    ended = read(pod_json(node="n1", annotations={PLACEMENT: placement()}, phase="Failed"))
    assert ended.booking is None


def test_a_pod_that_ended_before_it_had_a_node_asks_for_nothing() -> None:
    """It was deleted while it waited, and a finalizer keeps it: no quota counts it any more."""
    assert read(pod_json()).asks is not None
    ended = read(pod_json(phase="Failed"))
    assert (ended.asks, ended.booking, ended.version) == (None, None, "5")


@pytest.mark.parametrize(
    "text", [placement("uid-another"), placement(node="n2"), "{}", "", "[" * 5000]
)
def test_what_was_not_decided_for_it_does_not_count(text: str) -> None:
    pod = read(pod_json(node="n1", annotations={PLACEMENT: text}))
    assert pod.booking == PodBooking(uid=PodUid("uid-train"), node="n1", cpu_milli=2000)
    assert pod.problem


def test_a_pod_without_our_resources_is_cpu_and_memory_alone() -> None:
    pod = read(pod_json(node="n1", resources={"requests": {"cpu": "1", "memory": "1Gi"}}))
    assert pod.asks is None
    assert pod.problem == ""
    assert pod.booking == PodBooking(
        uid=PodUid("uid-train"), node="n1", cpu_milli=1000, memory_bytes=1 << 30
    )


def test_what_changes_while_containers_run_changes_nothing_here() -> None:
    before = read(pod_json(node="n1", annotations={PLACEMENT: placement()}))
    running = {"containerStatuses": [{"name": "main", "state": {"running": {}}}]}
    after = read(
        pod_json(
            node="n1",
            annotations={PLACEMENT: placement()},
            version="9",
            phase="Running",
            status=running,
        )
    )
    assert before == after


class Listener:
    def __init__(self) -> None:
        self.told: list[str] = []
        self.nodes: dict[str, NodeInventory] = {}
        self.fails_for: set[str] = set()

    def pod_put(self, pod: ClusterPod) -> None:
        if pod.name in self.fails_for:
            raise RuntimeError("not expected of a pod")
        self.told.append(f"+{pod.name}@{pod.node}")

    def pod_gone(self, uid: PodUid) -> None:
        self.told.append(f"-{uid}")

    def node_put(self, node: NodeInventory) -> None:
        self.nodes[node.name] = node
        if node.name in self.fails_for:
            raise OverflowError("not expected of a node")

    def node_dropped(self, name: str) -> None:
        self.nodes.pop(name, None)


class Lists:
    """The server's twin answers by kind of request alone: the lists by their paths here."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.pods: list[dict[str, Any]] = []
        self.nodes: list[dict[str, Any]] = []
        self.claims: list[dict[str, Any]] | None = None
        """None: the server has no such API."""
        self.claims_status = self.discovery_status = 200
        self.version = "10"
        self.watches: dict[str, Watch] = {}

    async def answer(self, request: HttpRequest) -> Reply:
        kind = request.path.rpartition("/")[2]
        self.server.requests.append(request)
        if "watch" in request.params:
            return Reply(200, self.watches[kind].stream())
        if "resource.k8s.io" in request.path:
            if self.claims is None:
                return answered({"code": 404, "message": "not found"}, 404)
            if kind == "v1":
                return answered({"kind": "APIResourceList"}, self.discovery_status)
            if self.claims_status != 200:
                return answered({"code": self.claims_status, "message": "no"}, self.claims_status)
        lists = {"pods": self.pods, "nodes": self.nodes, "resourceclaims": self.claims}
        items = lists[kind]
        metadata = {"resourceVersion": self.version}
        return answered({"metadata": metadata, "items": items})


@pytest.fixture
def lists(server: Server) -> Lists:
    made = Lists(server)
    made.watches = {kind: server.new_watch() for kind in ("pods", "nodes", "resourceclaims")}
    return made


def feed_of(lists: Lists, listener: Listener) -> ClusterFeed:
    return ClusterFeed(api_of(lists.answer), listener, backoff=impatient())


def test_each_change_is_told_once(lists: Lists) -> None:
    listener = Listener()
    feed = feed_of(lists, listener)
    lists.pods = [pod_json("a"), pod_json("b", node="n1", resources={})]
    lists.nodes = [node_json("n1"), node_json("n2", 0)]

    async def test() -> None:
        await until(lambda: feed.is_synced)
        assert sorted(listener.told) == ["+a@", "+b@n1"]
        assert listener.nodes["n1"].cpu_milli == 7500
        assert "n2" not in listener.nodes
        listener.told.clear()
        watch = lists.watches["pods"]
        watch.send(
            {
                "type": "MODIFIED",
                "object": pod_json("b", node="n1", version="11", resources={}, phase="Running"),
            }
        )
        watch.send({"type": "MODIFIED", "object": pod_json("a", node="n1", version="12")})
        watch.send({"type": "DELETED", "object": pod_json("b", node="n1", version="13")})
        await until(lambda: listener.told == ["+a@n1", "-uid-b"])
        cordoned = node_json("n1", annotations={"hami.io/device-cordon": "GPU-n10, GPU-other"})
        lists.watches["nodes"].send({"type": "MODIFIED", "object": cordoned})
        await until(lambda: listener.nodes["n1"].devices[0].problem == "cordoned")
        assert listener.nodes["n1"].devices[1].problem == ""
        broken = node_json("n1", 0, {DEVICES: "nothing"})
        lists.watches["nodes"].send({"type": "MODIFIED", "object": broken})
        await until(lambda: not listener.nodes)

    run(feed.run(), test())


def test_looking_waits_for_the_watch_to_have_told_everything(lists: Lists) -> None:
    listener = Listener()
    feed = feed_of(lists, listener)

    async def test() -> None:
        await until(lambda: feed.is_synced)
        lists.version = "20"
        lists.watches["pods"].send({"type": "ADDED", "object": pod_json("late", version="21")})
        await feed.look()
        assert "uid-late" in feed.pods

    run(feed.run(), test())


def test_looking_lists_anew_where_the_watch_is_silent(lists: Lists) -> None:
    listener = Listener()
    feed = feed_of(lists, listener)

    async def test() -> None:
        await until(lambda: feed.is_synced)
        lists.version = "30"
        lists.pods = [pod_json("missed", version="25")]  # its event is lost with its connection
        await feed.look()
        assert "uid-missed" in feed.pods
        assert "+missed@" in listener.told

    run(feed.run(), test())


def test_what_fails_for_one_object_is_that_ones_trouble(lists: Lists) -> None:
    listener = Listener()
    listener.fails_for = {"n1", "bad"}
    feed = feed_of(lists, listener)
    lists.pods = [pod_json("bad"), pod_json("good")]
    lists.nodes = [node_json("n1"), node_json("n2"), node_json("n3", 0, {DEVICES: "nothing"})]

    async def test() -> None:
        await until(lambda: feed.is_synced)
        assert listener.told == ["+good@"]
        assert listener.nodes.keys() == {"n2"}
        assert feed.left_out["uid-bad"] == "RuntimeError: not expected of a pod"
        assert feed.left_out["uid-n1"] == "OverflowError: not expected of a node"
        assert "is not an inventory" in feed.left_out["uid-n3"]
        assert len(feed.left_out) == 3
        listener.fails_for.clear()
        watch = lists.watches["pods"]
        watch.send({"type": "MODIFIED", "object": pod_json("bad", version="11")})
        nodes = lists.watches["nodes"]
        nodes.send({"type": "MODIFIED", "object": node_json("n1", 3)})
        nodes.send({"type": "DELETED", "object": node_json("n3")})
        await until(lambda: not feed.left_out)
        assert listener.told == ["+good@", "+bad@"]
        assert listener.nodes.keys() == {"n1", "n2"}

    run(feed.run(), test())


@pytest.mark.parametrize(
    "field",
    [
        {"nodeSelector": {"zone": "a"}},
        {"affinity": {"nodeAffinity": {}}},
        {"tolerations": [{"key": "gpu"}]},
        {"schedulerName": "other"},
    ],
    ids=lambda field: next(iter(field)),
)
def test_pods_for_the_same_nodes_have_the_same_constraints(field: dict[str, Any]) -> None:
    one, same, other = pod_json("a"), pod_json("b"), pod_json("c")
    other["spec"] |= field
    assert read(one).constraints == read(same).constraints
    assert read(one).constraints != read(other).constraints


def test_a_gated_or_bound_pod_has_no_constraints() -> None:
    gated = pod_json()
    gated["spec"]["schedulingGates"] = [{"name": "wait"}]
    assert read(pod_json()).constraints
    assert not read(gated).constraints
    assert not read(pod_json(node="n1")).constraints


@pytest.mark.parametrize(
    ("managers", "is_ours"),
    [(None, False), ([], False), (["kube-scheduler"], False), (["kubectl", NOMINATOR], True)],
    ids=str,
)
def test_a_nomination_of_ours_is_no_preemption(
    *, managers: list[str] | None, is_ours: bool
) -> None:
    item = pod_json()
    item["status"] = {"nominatedNodeName": "n1"}
    if managers is not None:
        item["metadata"]["managedFields"] = [
            {"manager": manager, "fieldsV1": {"f:status": {"f:nominatedNodeName": {}}}}
            for manager in managers
        ]
    pod = read(item)
    assert (pod.tried_first, pod.nominated_node) == (("n1", "") if is_ours else ("", "n1"))
    item["status"] = {}
    assert not read(item).tried_first


# ---- claims --------------------------------------------------------------------------------------


def claim_json(name: str, driver: str = "gpu.allotment.dev", version: str = "5") -> dict[str, Any]:
    result = {"request": "gpu", "driver": driver, "pool": "n1", "device": "gpu-4a0ae330"}
    consumed = {"memory": "4Gi", "compute": "5"}
    capacity = {"requests": {"memory": "4Gi"}}
    return {
        "metadata": {
            "name": name,
            "namespace": "ml",
            "uid": f"uid-{name}",
            "resourceVersion": version,
        },
        "spec": {"devices": {"requests": [{"name": "gpu", "exactly": {"capacity": capacity}}]}},
        "status": {
            "allocation": {"devices": {"results": [{**result, "consumedCapacity": consumed}]}}
        },
    }


def claim_feed(lists: Lists, told: dict[str, ResourceClaim | None]) -> ClusterFeed:
    return ClusterFeed(
        api_of(lists.answer), Listener(), claims=told.__setitem__, backoff=impatient()
    )


def _devices(claim: ResourceClaim | None) -> int:
    assert claim is not None
    return len(claim.devices)


def test_claims_that_wait_or_are_of_our_drivers_are_told(lists: Lists) -> None:
    told: dict[str, ResourceClaim | None] = {}
    feed = claim_feed(lists, told)
    waiting = {**claim_json("waiting"), "status": {}}
    lists.claims = [
        claim_json("a"),
        claim_json("b", "gpu.nvidia.com"),
        claim_json("other", "nic.example.com"),
        waiting,
    ]

    async def test() -> None:
        await until(lambda: feed.is_synced)
        assert sorted(each.name for each in told.values() if each) == ["a", "b", "waiting"]
        waits = told["uid-waiting"]
        assert waits is not None
        assert waits.devices == ()
        assert [(each.request, each.amounts) for each in waits.wanted] == [
            ("gpu", {"memory": "4Gi"})
        ]
        (first, second) = (told["uid-a"], told["uid-b"])
        assert first is not None
        assert second is not None
        assert (first.driver, second.driver) == ("gpu.allotment.dev", "gpu.nvidia.com")
        assert first.devices[0].consumed == {"memory": "4Gi", "compute": "5"}
        assert first.capacities == {"gpu": frozenset(("memory",))}
        watch = lists.watches["resourceclaims"]
        watch.send({"type": "MODIFIED", "object": claim_json("waiting", version="11")})
        await until(lambda: _devices(told["uid-waiting"]) == 1)
        free = {**claim_json("a", version="12"), "status": {}}
        watch.send({"type": "MODIFIED", "object": free})
        await until(lambda: _devices(told["uid-a"]) == 0)
        watch.send({"type": "DELETED", "object": claim_json("b", "gpu.nvidia.com", "13")})
        await until(lambda: told["uid-b"] is None)

    run(feed.run(), test())


def test_a_server_without_claims_is_followed_as_it_is(lists: Lists) -> None:
    feed = claim_feed(lists, {})
    lists.nodes = [node_json("n1")]

    async def test() -> None:
        await until(lambda: feed.is_synced)
        await feed.wait_synced()
        assert not feed.problems

    run(feed.run(), test())


def test_a_server_that_does_not_say_what_it_has_is_followed_without_claims(lists: Lists) -> None:
    feed = claim_feed(lists, {})
    lists.claims, lists.discovery_status = [], 403

    async def test() -> None:
        await until(lambda: feed.is_synced)

    run(feed.run(), test())


def test_without_the_right_to_list_claims_the_rest_is_followed(lists: Lists) -> None:
    feed = claim_feed(lists, {})
    lists.claims, lists.claims_status = [], 403

    async def test() -> None:
        await until(lambda: feed.is_synced)
        await feed.wait_synced()
        (problem,) = feed.problems
        assert "resourceclaims" in problem.message
        lists.claims_status = 503  # the server is away: what was known is still good enough
        await until(lambda: [each.status for each in feed.problems] == [503])
        assert feed.is_synced

    run(feed.run(), test())
