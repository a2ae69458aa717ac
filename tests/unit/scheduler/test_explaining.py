# SPDX-License-Identifier: Apache-2.0
"""Why a pod is where it is, or why it waits: worked out without a running scheduler."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import httpx2
import pytest

from allotment.dialects.decisions import write_booking
from allotment.dialects.systems import load_settings
from allotment.kube.clients import Api
from allotment.kube.errors import DeniedError, ObjectMissingError
from allotment.kube.inventories import DEVICES, encode
from allotment.model.clusters import (
    NodeDevice,
    NodeInventory,
    PlacedContainer,
    PlacedDevice,
    PodBooking,
)
from allotment.model.errors import UsageError
from allotment.model.pods import PodUid
from allotment.scheduler.explaining import Explanation, Obstacles, Standing, explained
from allotment.scheduler.explaining_evidence import Evidence, read_evidence

GI = 1 << 30
Json = dict[str, Any]


def asking(memory: str = "20Gi", compute: int = 50, gpus: int = 1) -> dict[str, str]:
    return {
        "allotment.dev/gpu": str(gpus),
        "allotment.dev/gpu-memory": memory,
        "allotment.dev/gpu-compute": str(compute),
    }


def node(name: str, *, devices: int = 2, memory: int = 40 * GI, problem: str = "") -> Json:
    inventory = NodeInventory(
        name=name,
        devices=tuple(
            NodeDevice(
                uuid=f"GPU-{name}-{index}",
                model="A100",
                memory_bytes=memory,
                index=index,
                problem=problem,
            )
            for index in range(devices)
        ),
    )
    return {
        "metadata": {"name": name, "uid": name, "annotations": {DEVICES: encode(inventory)}},
        "status": {"allocatable": {"cpu": "8", "memory": "64Gi"}},
    }


def pod(
    name: str,
    limits: Mapping[str, str] | None = None,
    *,
    on: tuple[str, int] | None = None,
    annotations: Mapping[str, str] | None = None,
    labels: Mapping[str, str] | None = None,
    said: str | None = "0/2 nodes are available",
    **changes: str,
) -> Json:
    """A pod that waits; `on`: that has half of this device."""
    written = dict(annotations or {})
    spec: Json = {
        "containers": [{"name": "main", "resources": {"limits": dict(limits or {})}}],
        "schedulerName": changes.get("scheduler", "allotment-scheduler"),
    }
    if on is not None:
        home, index = on
        spec["nodeName"] = home
        placed = PlacedContainer(
            name="main", devices=(PlacedDevice(f"GPU-{home}-{index}", 20 * GI, 5000),)
        )
        booking = PodBooking(uid=PodUid(f"uid-{name}"), node=home, containers=(placed,))
        written["allotment.dev/placement"] = write_booking(booking)
    if "node" in changes:
        spec["nodeName"] = changes["node"]
    metadata = {
        "name": name,
        "namespace": changes.get("namespace", "ml"),
        "uid": f"uid-{name}",
        "creationTimestamp": "2026-01-01T00:00:00Z",
        "annotations": written,
        "labels": dict(labels or {}),
    }
    if "deleted" in changes:
        metadata["deletionTimestamp"] = changes["deleted"]
    status: Json = {"phase": changes.get("phase", "Pending")}
    if said is not None and "nodeName" not in spec:
        status["conditions"] = [
            {"type": "Ready", "status": "False"},
            {
                "type": "PodScheduled",
                "status": "False",
                "reason": "Unschedulable",
                "message": said,
                "lastTransitionTime": "2026-01-01T00:01:00Z",
            },
        ]
    return {"metadata": metadata, "spec": spec, "status": status}


def quota(name: str, **hard: str) -> Json:
    return {"metadata": {"name": name, "namespace": "ml"}, "spec": {"hard": hard}}


class Twin:
    """An API server with these objects; of what is `forbidden`, it tells nothing."""

    def __init__(
        self,
        nodes: Sequence[Json] = (),
        pods: Sequence[Json] = (),
        quotas: Sequence[Json] = (),
        *,
        forbidden: str = "-",
    ) -> None:
        self.nodes, self.pods, self.quotas = list(nodes), list(pods), list(quotas)
        self.forbidden = forbidden

    def read(self, name: str) -> Evidence:
        async def read() -> Evidence:
            http = httpx2.AsyncClient(
                transport=httpx2.MockTransport(self._answer), base_url="https://server"
            )
            async with Api(http, server="https://server") as api:
                return await read_evidence(api, "ml", name)

        return asyncio.run(read())

    def explain(self, name: str = "it", **options: Any) -> Explanation:  # noqa: ANN401
        return explained(self.read(name), **options)

    def _answer(self, request: httpx2.Request) -> httpx2.Response:
        assert request.method == "GET"
        path = request.url.path
        if path.endswith(self.forbidden):
            return httpx2.Response(403, json={"kind": "Status", "code": 403, "message": "no"})
        chosen = request.url.params.get("fieldSelector", "").removeprefix("metadata.name=")
        mine = [each for each in self.pods if each["metadata"]["namespace"] == "ml"]
        lists = {
            "/api/v1/nodes": self.nodes,
            "/api/v1/pods": [
                each for each in self.pods if chosen in {"", each["metadata"]["name"]}
            ],
            "/api/v1/namespaces/ml/pods": mine,
            "/api/v1/namespaces/ml/resourcequotas": self.quotas,
        }
        if path in lists:
            return httpx2.Response(200, json={"metadata": {}, "items": lists[path] or None})
        for each in mine:
            if path == f"/api/v1/namespaces/ml/pods/{each['metadata']['name']}":
                return httpx2.Response(200, json=each)
        return httpx2.Response(404, json={"kind": "Status", "code": 404, "message": "not there"})


def kinds(explanation: Explanation) -> list[Obstacles]:
    return [each.kind for each in explanation.obstacles]


# ---- pods that wait ------------------------------------------------------------------------------


def nominated(name: str, limits: Mapping[str, str], *, priority: int) -> Json:
    found = pod(name, limits)
    found["spec"]["priority"] = priority
    found["status"]["nominatedNodeName"] = "a"
    return found


@pytest.mark.parametrize(("priority", "fits"), [(0, False), (1000, False), (1001, True)])
def test_what_pods_leave_for_another_one_is_not_free(priority: int, *, fits: bool) -> None:
    ends = pod("ends", asking(), on=("a", 0), deleted="2026-01-01T00:02:00Z")
    stays = [pod(f"stays-{number}", asking(), on=("a", 1)) for number in range(2)]
    waits = nominated("important", {"allotment.dev/gpu": "1"}, priority=1000)
    it = pod("it", asking("10Gi", 10))
    it["spec"]["priority"] = priority
    explanation = Twin([node("a")], [ends, *stays, waits, it]).explain()
    assert explanation.fitting == (("a",) if fits else ())
    assert kinds(explanation) == ([] if fits else [Obstacles.KEPT])
    if not fits:
        [obstacle] = explanation.obstacles
        assert obstacle.text == "GPUs of node a are kept for pod ml/important"


def test_a_pod_for_which_others_are_being_ended_is_told_so() -> None:
    ends = pod("ends", asking(), on=("a", 0), deleted="2026-01-01T00:02:00Z")
    stays = pod("stays", asking(), on=("a", 1))
    it = nominated("it", {"allotment.dev/gpu": "1"}, priority=1000)
    explanation = Twin([node("a")], [ends, stays, it]).explain()
    assert explanation.fitting == ()
    assert kinds(explanation) == [Obstacles.NOMINATED]
    assert "being ended" in explanation.obstacles[0].text


def test_nodes_that_fail_alike_are_one_group_with_the_most_they_have() -> None:
    plain = {"metadata": {"name": "plain"}}
    nodes = [node("a"), node("b"), node("c", memory=30 * GI), node("d", problem="sick"), plain]
    runs = pod("runs", asking(), on=("a", 0))
    found = Twin(nodes, [pod("it", asking(memory="50Gi")), runs]).explain()
    assert found.standing is Standing.PENDING
    assert found.nodes == 5
    assert found.fitting == ()
    assert found.proposal == ()
    assert found.containers[0].text == "a GPU with 50Gi and 50 % of compute"
    assert [(each.reason, each.text, each.nodes) for each in found.refused] == [
        (
            "gpu-memory",
            "need a GPU with 50Gi and 50 % of compute, have at most 40Gi on a GPU",
            ("a", "b", "c"),
        ),
        (
            "problem",
            "need a GPU with 50Gi and 50 % of compute, have only GPUs with a problem (sick)",
            ("d",),
        ),
        (
            "unknown-node",
            "need a node with GPUs, have none that its agent has published",
            ("plain",),
        ),
    ]
    assert found.obstacles == ()
    assert found.condition is not None
    assert found.condition.message == "0/2 nodes are available"


def test_what_others_have_is_not_free() -> None:
    others = [pod(f"p{index}", asking(), on=("a", index % 2)) for index in range(4)]
    found = Twin([node("a")], [*others, pod("it", asking())]).explain()
    assert found.fitting == ()
    assert found.refused[0].reason == "gpu-memory"
    found = Twin([node("a")], [*others[:3], pod("it", asking())]).explain()
    assert found.fitting == ("a",)
    # The other one is full.
    assert [part.uuid for part in found.proposal[0].parts] == ["GPU-a-1"]


def test_the_best_node_is_by_the_policy_that_is_asked_about() -> None:
    twin = Twin([node("a"), node("b")], [pod("runs", asking(), on=("b", 0)), pod("it", asking())])
    assert twin.explain(policies=("binpack",)).fitting == ("b", "a")
    assert twin.explain(policies=("spread",)).fitting == ("a", "b")
    own = pod("it", asking(), annotations={"allotment.dev/node-policy": "spread"})
    found = Twin([node("a"), node("b")], [twin.pods[0], own]).explain(policies=("binpack",))
    assert (found.policies, found.is_own_policy) == (("spread",), True)
    assert found.fitting == ("a", "b")
    with pytest.raises(UsageError, match="binpakc"):
        twin.explain(policies=("binpakc",))


def test_a_pod_that_cannot_be_meant_is_told_what_is_wrong() -> None:
    wrong = pod("it", asking(), annotations={"allotment.dev/compute": "300"})
    found = Twin([node("a")], [wrong]).explain()
    assert kinds(found) == [Obstacles.REFUSED]
    assert "allotment.dev/compute" in found.obstacles[0].text
    assert found.obstacles[0].hint
    assert found.containers == ()
    assert found.refused == ()


def test_amounts_without_a_gpu_are_refused() -> None:
    found = Twin([node("a")], [pod("it", {"allotment.dev/gpu-memory": "1Gi"})]).explain()
    assert kinds(found) == [Obstacles.REFUSED]
    assert "allotment.dev/gpu" in found.obstacles[0].text


def test_a_pod_of_another_system_is_read_as_it_would_have_been_translated() -> None:
    limits = {"nvidia.com/gpu": "1", "nvidia.com/gpumem": "20480", "nvidia.com/gpucores": "50"}
    found = Twin([node("a")], [pod("it", limits)]).explain()
    assert kinds(found) == [Obstacles.UNTRANSLATED]
    assert "HAMi" in found.obstacles[0].text
    assert found.dialect == "hami"
    assert found.containers[0].text == "a GPU with 20Gi and 50 % of compute"
    assert found.fitting == ("a",)
    ignored = pod("it", limits, labels={"hami.io/webhook": "ignore"})
    found = Twin([node("a")], [ignored]).explain()
    assert "hami.io/webhook=ignore" in found.obstacles[0].text


def test_a_pod_is_read_by_the_scheduler_s_own_settings() -> None:
    limits = {"nvidia.com/gpu": "1", "nvidia.com/gpumem": "20480"}
    hard = {"limits.nvidia.com/gpumem": "3"}
    evidence = Twin([node("a")], [pod("it", limits)], [quota("gpus", **hard)]).read("it")
    usual = explained(evidence)
    assert "need 20Gi of GPU memory, have 3Mi of 3Mi" in usual.obstacles[-1].text
    tens = explained(replace(evidence, settings=load_settings("hami: {memoryFactor: 1024}")))
    assert "need 20Ti of GPU memory, have 3Gi of 3Gi" in tens.obstacles[-1].text
    none = explained(replace(evidence, settings=load_settings("disabled: [hami]")))
    assert (none.dialect, none.containers) == ("", ())


def test_two_syntaxes_in_one_pod_are_refused() -> None:
    limits = {**asking(), "aliyun.com/gpu-mem": "3"}
    found = Twin([node("a")], [pod("it", limits)]).explain()
    assert kinds(found) == [Obstacles.REFUSED]


def test_another_scheduler_than_that_of_placed_pods_is_told() -> None:
    runs = pod("runs", asking(), on=("a", 0))
    other = pod("it", asking(), scheduler="default-scheduler")
    found = Twin([node("a")], [runs, other]).explain()
    assert kinds(found) == [Obstacles.SCHEDULER]
    assert "'default-scheduler'" in found.obstacles[0].text
    assert "'allotment-scheduler'" in found.obstacles[0].text
    assert kinds(Twin([node("a")], [runs, pod("it", asking())]).explain()) == []
    # Nothing is known of which one it should be where nothing was placed yet.
    assert kinds(Twin([node("a")], [other]).explain()) == []


def test_a_pod_that_no_scheduler_has_looked_at() -> None:
    found = Twin([node("a")], [pod("it", asking(), said=None, scheduler="nobody")]).explain()
    assert kinds(found) == [Obstacles.SCHEDULER]
    assert "'nobody'" in found.obstacles[0].text
    assert found.condition is None


def test_the_quota_of_its_namespace() -> None:
    limit = quota("gpus", **{"limits.allotment.dev/gpu-memory": "30Gi"})
    runs = pod("runs", asking(), on=("a", 0))
    found = Twin([node("a")], [runs, pod("it", asking())], [limit]).explain()
    assert kinds(found) == [Obstacles.QUOTA]
    assert "need 20Gi" in found.obstacles[0].text
    assert "have 10Gi" in found.obstacles[0].text
    # It is that of pods that are bound: one that waits takes nothing of it.
    waits = pod("waits", asking())
    assert kinds(Twin([node("a")], [waits, pod("it", asking())], [limit]).explain()) == []


def test_quotas_that_may_not_be_read_are_said_to_be_left_out() -> None:
    evidence = Twin([node("a")], [pod("it", asking())], forbidden="/resourcequotas").read("it")
    assert len(evidence.problems) == 1
    assert evidence.problems[0].startswith("quotas: ")
    assert explained(evidence).fitting == ("a",)


def test_no_node_has_published_anything() -> None:
    found = Twin([{"metadata": {"name": "plain"}}], [pod("it", asking())]).explain()
    assert kinds(found) == [Obstacles.NO_INVENTORY]
    assert [each.nodes for each in found.refused] == [("plain",)]


def test_a_pod_that_is_being_deleted() -> None:
    deleted = pod("it", asking(), deleted="2026-01-01T00:00:00Z")
    assert kinds(Twin([node("a")], [deleted]).explain()) == [Obstacles.DELETED]


def test_a_pod_that_asks_for_no_part_of_a_gpu() -> None:
    for limits in ({}, {"nvidia.com/gpu": "1"}):
        found = Twin([node("a")], [pod("it", limits)]).explain()
        assert found.containers == ()
        assert found.refused == ()
        assert found.obstacles == ()
        assert found.others == tuple(limits)


# ---- pods that are somewhere ---------------------------------------------------------------------


def test_what_a_placed_pod_has_and_how_many_nodes_have_room() -> None:
    runs = pod("it", asking(), on=("b", 1), annotations={"allotment.dev/dialect": "volcano"})
    full = [pod(f"p{index}", asking(), on=("c", index % 2)) for index in range(4)]
    found = Twin([node("a"), node("b"), node("c")], [runs, *full]).explain(policies=("first-fit",))
    assert found.standing is Standing.PLACED
    assert found.node == "b"
    assert found.dialect == "volcano"
    [part] = found.containers[0].parts
    assert (part.uuid, part.index, part.model) == ("GPU-b-1", 1, "A100")
    assert (part.memory, part.memory_total, part.guarantee) == (20 * GI, 40 * GI, 5000)
    assert found.fitting == ("a", "b")
    assert found.rank == 2
    assert [each.nodes for each in found.refused] == [("c",)]
    assert found.proposal == ()


def test_what_a_pod_has_itself_is_not_in_its_way() -> None:
    both = [pod("other", asking(), on=("a", 0)), pod("it", asking(), on=("a", 0))]
    found = Twin([node("a", devices=1)], both).explain()
    assert found.rank == 1
    assert found.fitting == ("a",)
    # Nor does it count for its node: among nodes without anything on them, the first by name.
    alone = Twin([node("a"), node("b")], [pod("it", asking(), on=("b", 0))])
    assert alone.explain(policies=("binpack",)).fitting == ("a", "b")


def test_a_node_that_has_no_room_any_more_is_none_of_those() -> None:
    found = Twin([node("a", problem="sick")], [pod("it", asking(), on=("a", 0))]).explain()
    assert found.rank is None
    assert found.refused[0].reason == "problem"


def test_a_device_that_is_gone_is_named_all_the_same() -> None:
    found = Twin([node("a", devices=1)], [pod("it", asking(), on=("a", 1))]).explain()
    [part] = found.containers[0].parts
    assert (part.uuid, part.index, part.model, part.memory_total) == ("GPU-a-1", None, None, None)


def test_a_pod_that_was_bound_without_a_placement() -> None:
    found = Twin([node("a")], [pod("it", asking(), node="a")]).explain()
    assert found.standing is Standing.BOUND
    assert kinds(found) == [Obstacles.UNPLACED]
    assert found.containers[0].parts == ()


def test_a_forged_placement_does_not_count() -> None:
    forged = pod("it", asking(), on=("a", 0))
    forged["metadata"]["uid"] = "another"
    found = Twin([node("a")], [forged]).explain()
    assert found.standing is Standing.BOUND
    assert kinds(found) == [Obstacles.UNPLACED]


HAMI = {"nvidia.com/gpu": "1", "nvidia.com/gpumem": "30720"}
RECORD = {
    "hami.io/vgpu-node": "a",
    "hami.io/vgpu-devices-allocated": "GPU-a-0,NVIDIA,30720,50:;",
}


def test_what_another_system_gave_a_pod_that_runs_is_not_free() -> None:
    runs = pod("runs", HAMI, node="a", annotations=RECORD, scheduler="hami-scheduler")
    twin = Twin([node("a", devices=1)], [runs, pod("it", asking())])
    found = twin.explain()
    assert found.fitting == ()
    assert "have at most 10Gi" in found.refused[0].text
    # Whom HAMi's pods name says nothing about who places ours.
    assert found.obstacles == ()
    other = twin.explain("runs")
    assert other.standing is Standing.PLACED
    assert kinds(other) == [Obstacles.FOREIGN]
    assert other.dialect == "hami"
    [part] = other.containers[0].parts
    assert (part.uuid, part.memory, part.guarantee) == ("GPU-a-0", 30 * GI, 0)


def test_a_record_that_cannot_be_read_is_told() -> None:
    record = RECORD | {"hami.io/vgpu-devices-allocated": "GPU-z,NVIDIA,30720,50:;"}
    runs = pod("runs", HAMI, node="a", annotations=record)
    twin = Twin([node("a", devices=1)], [runs, pod("it", asking())])
    assert any("GPUs of another system" in each for each in twin.read("it").problems)
    assert twin.explain().fitting == ("a",)
    assert twin.explain("runs").standing is Standing.BOUND


def test_a_pod_that_has_ended_has_nothing() -> None:
    found = Twin([node("a")], [pod("it", asking(), on=("a", 0), phase="Succeeded")]).explain()
    assert found.standing is Standing.ENDED
    assert found.containers == ()
    assert found.refused == ()
    assert found.fitting == ()


# ---- reading -------------------------------------------------------------------------------------


def test_of_a_pod_that_is_not_there_near_names_are_told() -> None:
    twin = Twin(pods=[pod("train-0"), pod("serve"), pod("away", namespace="prod")])
    for name, hint in (
        ("train", "ml/train-0"),
        ("sevre", "ml/serve"),
        ("away", "prod/away"),
        ("zzz", "kubectl get pods"),
    ):
        with pytest.raises(ObjectMissingError, match=f"no pod ml/{name}") as caught:
            twin.read(name)
        assert caught.value.hint is not None
        assert hint in caught.value.hint
    with pytest.raises(ObjectMissingError) as caught:
        Twin().read("it")
    assert "no pod at all" in str(caught.value.hint)
    with pytest.raises(ObjectMissingError):
        Twin(forbidden="/pods").read("it")


def test_without_the_rights_nothing_is_guessed() -> None:
    for path in ("/api/v1/pods", "/nodes", "/pods/it"):
        with pytest.raises(DeniedError):
            Twin([node("a")], [pod("it", asking())], forbidden=path).read("it")


def test_the_pod_is_as_it_was_read_and_not_as_the_list_has_it() -> None:
    evidence = Twin([node("a")], [pod("it", asking(), on=("a", 0))]).read("it")
    later = Twin([node("a")], [pod("it", asking())]).read("it")
    found = explained(replace(later, cluster=evidence.cluster))
    assert found.standing is Standing.PENDING
    assert found.fitting == ("a",)
