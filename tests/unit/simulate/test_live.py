# SPDX-License-Identifier: Apache-2.0
"""A live cluster: read as it is, and its pods placed anew."""

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest
from api_server_twin import Reply, answered, api_of
from cut_nodes import cut_device, node_of

from allotment.dialects.own.placement import write_booking
from allotment.dialects.own.resource_claims import ResourceClaim
from allotment.kube.clients import HttpRequest
from allotment.kube.errors import DeniedError, KubeError
from allotment.kube.inventories import CORDONS, DEVICES, encode
from allotment.kube.live import LiveCluster, read_cluster
from allotment.model.clusters import (
    NodeDevice,
    NodeInventory,
    PlacedContainer,
    PlacedDevice,
    PodBooking,
)
from allotment.model.errors import UsageError
from allotment.model.mig import MigHold, MigPlace
from allotment.model.pods import PodUid
from allotment.simulate.outcomes import CLAIMS, Refit, ReplayOutcome, document_of, summaries_of
from allotment.simulate.scenes import LiveScene, Replayed

GI = 1 << 30
HALF = {
    "allotment.dev/gpu": "1",
    "allotment.dev/gpu-memory": "20Gi",
    "allotment.dev/gpu-compute": "50",
}


def node(name: str, annotations: Mapping[str, str] | None = None) -> dict[str, Any]:
    inventory = NodeInventory(
        name=name,
        devices=tuple(
            NodeDevice(uuid=f"GPU-{name}-{index}", model="H", memory_bytes=40 * GI, index=index)
            for index in range(2)
        ),
    )
    return {
        "metadata": {
            "name": name,
            "uid": name,
            "annotations": {DEVICES: encode(inventory), **(annotations or {})},
        },
        "status": {"allocatable": {"cpu": "8", "memory": "64Gi"}},
    }


def pod(
    name: str,
    *,
    limits: Mapping[str, str] | None = None,
    on: tuple[str, int] | None = None,
    created: str = "2026-01-01T00:00:00Z",
    **changes: Any,  # noqa: ANN401 - fields of the object
) -> dict[str, Any]:
    """A pod that waits; `on`: that has half of this device."""
    annotations = {}
    spec: dict[str, Any] = {
        "containers": [
            {"name": "main", "resources": {"limits": limits or {}, "requests": {"cpu": "500m"}}}
        ],
        "priority": changes.get("priority", 0),
    }
    if on is not None:
        home, index = on
        spec["nodeName"] = home
        placed = PlacedContainer(
            name="main", devices=(PlacedDevice(f"GPU-{home}-{index}", 20 * GI, 5000),)
        )
        booking = PodBooking(uid=PodUid(f"uid-{name}"), node=home, containers=(placed,))
        annotations["allotment.dev/placement"] = write_booking(booking)
    if "node" in changes:
        spec["nodeName"] = changes["node"]
    metadata = {
        "name": name,
        "namespace": "ml",
        "uid": f"uid-{name}",
        "creationTimestamp": created,
        "annotations": annotations | changes.get("annotations", {}),
    }
    if "deleted" in changes:
        metadata["deletionTimestamp"] = created
    return {
        "metadata": metadata,
        "spec": spec,
        "status": {"phase": changes.get("phase", "Pending")},
    }


class Twin:
    """An API server that lists, two objects a page."""

    def __init__(self, nodes: list[dict[str, Any]], pods: list[dict[str, Any]]) -> None:
        self.items = {"/api/v1/nodes": nodes, "/api/v1/pods": pods}
        self.refusals: list[int] = []
        self.asked: list[str] = []

    def read(self, **options: Any) -> LiveCluster:  # noqa: ANN401 - as it takes them
        async def read() -> LiveCluster:
            async with api_of(self._answer) as api:
                return await read_cluster(api, **options)

        return asyncio.run(read())

    def _answer(self, request: HttpRequest) -> Reply:
        assert request.method == "GET"
        self.asked.append(request.path)
        begin = int(request.params.get("continue", "0"))
        if begin and self.refusals:
            code = self.refusals.pop(0)
            return answered({"kind": "Status", "code": code, "message": "no"}, code)
        items = self.items.get(request.path)
        if items is None:
            return answered({"kind": "Status", "code": 404, "message": "not found"}, 404)
        more = str(begin + 2) if begin + 2 < len(items) else ""
        return answered({"metadata": {"continue": more}, "items": items[begin : begin + 2] or None})


def test_what_is_there_is_read() -> None:
    cluster = Twin(
        [node("b"), node("a"), {"metadata": {"name": "plain"}}],
        [
            pod("runs", limits=HALF, on=("a", 1), phase="Running"),
            pod("late", limits=HALF, created="2026-01-02T00:00:00Z"),
            pod("soon", limits=HALF, created="2026-01-01T12:00:00Z"),
            pod("first", limits=HALF, created="2026-01-03T00:00:00Z", priority=5),
            pod("plain", node="a"),
            pod("ended", limits=HALF, on=("a", 0), phase="Succeeded"),
            pod("leaving", limits=HALF, deleted=True),
        ],
    ).read()
    assert [(each.name, len(each.devices), each.cpu_milli) for each in cluster.nodes] == [
        ("a", 2, 8000),
        ("b", 2, 8000),
    ]
    assert [each.need.name for each in cluster.pods] == ["first", "plain", "runs", "soon", "late"]
    by_name = {each.need.name: each for each in cluster.pods}
    runs = by_name["runs"].booking
    assert runs is not None
    assert runs.containers[0].devices == (PlacedDevice("GPU-a-1", 20 * GI, 5000),)
    assert runs.cpu_milli == 500
    assert by_name["soon"].booking is None
    assert by_name["soon"].need.containers[0].request.memory.size_bytes == 20 * GI
    assert [each.can_move for each in cluster.pods] == [True, False, True, True, True]
    assert cluster.problems == ()


def test_pods_that_leave_their_mode_open_have_the_schedulers() -> None:
    asked = {"allotment.dev/gpu": "1", "allotment.dev/gpu-memory": "4Gi"}
    twin = Twin([], [pod("p", limits=asked)])
    (usual,) = twin.read().pods[0].need.containers
    assert (usual.request.mode, usual.request.other_modes) == ("soft", ())
    (preferred,) = twin.read(modes=("mps", "soft")).pods[0].need.containers
    assert (preferred.request.mode, preferred.request.other_modes) == ("mps", ("soft",))


def test_what_is_cordoned_takes_nothing() -> None:
    cluster = Twin([node("a", {CORDONS[0]: "GPU-a-1, GPU-x"})], []).read()
    assert [each.problem for each in cluster.nodes[0].devices] == ["", "cordoned"]


def test_what_cannot_be_read_is_left_out_and_said() -> None:
    bad = {"allotment.dev/gpu-memory": "20Gi"}
    cluster = Twin([node("a"), node("b", {DEVICES: "{"})], [pod("x", limits=bad)]).read()
    assert [each.name for each in cluster.nodes] == ["a"]
    assert cluster.pods == ()
    one, other = cluster.problems
    assert one.startswith("node b: ")
    assert "ml/x" in other


def test_a_pod_that_its_node_has_placed_stays() -> None:
    """The node's inventory counts what it has: placed again, it would count twice."""
    cluster = Twin([node("a")], [pod("x", limits=HALF, node="a", phase="Running")]).read()
    assert [each.can_move for each in cluster.pods] == [False]


def test_a_list_that_goes_stale_is_read_anew() -> None:
    twin = Twin([node("a"), node("b"), node("c")], [])
    twin.refusals = [410, 410]
    assert [each.name for each in twin.read().nodes] == ["a", "b", "c"]
    twin.refusals = [410, 410, 410]
    with pytest.raises(KubeError):
        twin.read()
    twin.refusals = [403]
    with pytest.raises(DeniedError, match="list nodes"):
        twin.read()


def nobody(part: float) -> None:
    """Hear nothing."""
    del part


def played(
    cluster: LiveCluster, replayed: Replayed, policy: str = "binpack"
) -> tuple[ReplayOutcome, Refit]:
    outcome = LiveScene(cluster=cluster, replayed=replayed).run(policy, 1, nobody)
    assert isinstance(outcome.story, Refit)
    return outcome, outcome.story


SPREAD_OUT = Twin(
    [node("a"), node("b")],
    [
        *(
            pod(f"{home}{index}", limits=HALF, on=(home, index), phase="Running")
            for home in "ab"
            for index in (0, 1)
        ),
        pod(
            "whole",
            limits={**HALF, "allotment.dev/gpu-memory": "40Gi", "allotment.dev/gpu-compute": "100"},
        ),
        pod("half", limits=HALF),
        pod("many", limits={"allotment.dev/gpu": "3", "allotment.dev/gpu-memory": "3Gi"}),
    ],
)


def test_what_waits_is_placed_beside_what_runs() -> None:
    outcome, story = played(SPREAD_OUT.read(), Replayed.PENDING)
    assert (outcome.pods, outcome.placed, outcome.impossible) == (3, 1, 1)
    assert [each.pod for each in story.unplaced] == ["ml/many", "ml/whole"]
    assert all(sum(each.reasons.values()) == 2 for each in story.unplaced)
    assert story.unplaced[0].example.startswith(("a: ", "b: "))
    assert (story.before.allocated_pct, story.after.allocated_pct) == (50, 62.5)
    assert (story.before.allocated_memory_pct, story.before.idle_gpus) == (50, 0)


def test_all_are_placed_anew() -> None:
    """Four halves on four GPUs are on two of them then, and a whole one is free."""
    outcome, story = played(SPREAD_OUT.read(), Replayed.ALL)
    assert (outcome.pods, outcome.placed, outcome.impossible) == (7, 6, 1)
    assert [each.pod for each in story.unplaced] == ["ml/many"]
    assert story.after.allocated_pct == 87.5
    assert story.before.fragmented_pct >= story.after.fragmented_pct


def test_all_are_placed_anew_as_claims() -> None:
    """Halves go to the emptier node in turn, and there to the fullest GPU."""
    outcome, story = played(SPREAD_OUT.read(), Replayed.ALL, CLAIMS)
    assert (outcome.pods, outcome.placed, outcome.impossible) == (7, 6, 1)
    assert [each.pod for each in story.unplaced] == ["ml/many"]
    assert story.unplaced[0].reasons == {"no devices of its pool serve the claims": 2}
    assert (story.before.allocated_pct, story.after.allocated_pct) == (50, 87.5)


def test_claims_take_what_pods_leave() -> None:
    outcome, story = played(SPREAD_OUT.read(), Replayed.PENDING, CLAIMS)
    assert (outcome.pods, outcome.placed, outcome.impossible) == (3, 1, 1)
    assert story.after.allocated_pct == 62.5


def test_as_json_and_means() -> None:
    outcome, _ = played(SPREAD_OUT.read(), Replayed.ALL)
    document = document_of(outcome)
    assert document["allocated_pct"] == {"before": 50, "after": 87.5}
    assert document["unplaced"][0]["pod"] == "ml/many"
    (summary,) = summaries_of([outcome, outcome])
    assert summary["idle_gpus"]["before"] == 0
    assert summary["placed"] == 6


def test_the_cluster_has_to_have_gpus() -> None:
    with pytest.raises(UsageError, match="no node of the cluster") as raised:
        LiveScene(cluster=Twin([], []).read())
    assert "allot agent" in (raised.value.hint or "")


@pytest.mark.parametrize("policy", ["fragmentation", "fgd", "binpack", CLAIMS])
def test_pods_that_ask_for_slices_are_placed_anew_too(policy: str) -> None:
    """A GPU of seven slices, and another that is of no mode yet; of eight slices one goes there."""
    home = node("a")
    devices = (
        cut_device("GPU-a-0", ("1g.5gb", 0, MigHold.IDLE), model="A100-40GB"),
        cut_device("GPU-a-1", model="A100-40GB", is_on=False),
    )
    home["metadata"]["annotations"] = {DEVICES: encode(node_of(*devices, name="a"))}
    asking = {"allotment.dev/mode": "mig", "allotment.dev/mig-profile": "1g.5gb"}
    one = {"allotment.dev/gpu": "1"}
    waiting = [pod(f"s{number}", limits=one, annotations=asking) for number in range(8)]
    placed = PlacedContainer(
        name="main",
        mode="mig",
        devices=(PlacedDevice("GPU-a-0", 5 * GI, 1428, MigPlace("1g.5gb", 6)),),
    )
    booking = PodBooking(uid=PodUid("uid-runs"), node="a", containers=(placed,))
    there = {**asking, "allotment.dev/placement": write_booking(booking)}
    runs = pod("runs", limits=one, annotations=there, node="a", phase="Running")
    large = {**asking, "allotment.dev/mig-profile": "7g.40gb"}
    last = pod("large", limits=one, annotations=large, created="2026-01-02T00:00:00Z")
    cluster = Twin([home], [runs, *waiting, last]).read()
    outcome, story = played(cluster, Replayed.PENDING, policy)
    assert (outcome.pods, outcome.placed, outcome.impossible) == (9, 8, 0)
    assert [each.reasons for each in story.unplaced] == [
        {"no devices of its pool serve the claims" if policy == CLAIMS else "mig-room": 1}
    ]
    assert story.before.allocated_pct == pytest.approx(7.14)
    everyone, _ = played(cluster, Replayed.ALL, policy)
    assert everyone.placed >= 8
    assert everyone.impossible == 0


def test_claims_that_nodes_do_not_count_are_read() -> None:
    uuid = "GPU-4a0ae330-00aa"
    device = NodeDevice(uuid=uuid, model="A100", memory_bytes=80 << 30)
    counted = ResourceClaim(uid="uid-counted", namespace="ml", name="c").share_id("gpu")
    inventory = NodeInventory(name="a", devices=(device,), claims=frozenset((counted,)))
    home = {"metadata": {"name": "a", "annotations": {DEVICES: encode(inventory)}}}
    result = {"request": "gpu", "driver": "gpu.allotment.dev", "device": "gpu-4a0ae330"}
    consumed = {"memory": "4Gi", "compute": "5"}

    def claim(name: str, pool: str = "a", **status: Any) -> dict[str, Any]:  # noqa: ANN401
        results = [{**result, "pool": pool, "consumedCapacity": consumed}]
        status = status or {"allocation": {"devices": {"results": results}}}
        return {
            "metadata": {"namespace": "ml", "name": name, "uid": f"uid-{name}"},
            "spec": {"devices": {"requests": [{"name": "gpu", "exactly": {}}]}},
            "status": status,
        }

    twin = Twin([home], [])
    claims = [claim("new"), claim("counted"), claim("b", pool="b"), claim("free", reservedFor=[])]
    twin.items["/apis/resource.k8s.io/v1/resourceclaims"] = claims
    found = twin.read()
    assert found.problems == ()
    (booking,) = found.claims
    assert booking.uid == "uid-new"
    assert booking.containers[0].devices == (PlacedDevice(uuid, 4 << 30),)
