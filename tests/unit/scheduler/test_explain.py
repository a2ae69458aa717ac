# SPDX-License-Identifier: Apache-2.0
"""Why a pod is where it is, or why it waits: worked out without a running scheduler."""

from collections.abc import Mapping

import pytest
from explained_twin import GI, Json, Twin, asking, node, pod, quota
from foreign_pods import load_settings

from allotment.kube.errors import DeniedError, ObjectMissingError
from allotment.model.clusters import PlacedDevice, TakenPart
from allotment.model.errors import UsageError
from allotment.model.structs import replace
from allotment.scheduler.explain import explained
from allotment.scheduler.explain_evidence import Explanation, Obstacles, Standing


def kinds(explanation: Explanation) -> list[str]:
    return [each.reason for each in explanation.obstacles]


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
        assert obstacle.text == "GPUs of node a are reserved for pod ml/important"


def test_a_pod_for_which_others_are_being_ended_is_told_so() -> None:
    ends = pod("ends", asking(), on=("a", 0), deleted="2026-01-01T00:02:00Z")
    stays = pod("stays", asking(), on=("a", 1))
    it = nominated("it", {"allotment.dev/gpu": "1"}, priority=1000)
    explanation = Twin([node("a")], [ends, stays, it]).explain()
    assert explanation.fitting == ()
    assert kinds(explanation) == [Obstacles.NOMINATED]
    assert "being evicted" in explanation.obstacles[0].text


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
            "need a node with GPUs, have no GPUs published by its agent",
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
    assert [part.placed.uuid for part in found.proposal[0].parts] == ["GPU-a-1"]


@pytest.mark.parametrize(("floor", "fits"), [(0, True), (500, False)])
def test_time_that_is_guaranteed_to_others_is_no_room(floor: int, *, fits: bool) -> None:
    others = [pod(f"runs-{number}", asking(), on=("a", 0)) for number in range(2)]
    memory_alone = {"allotment.dev/gpu": "1", "allotment.dev/gpu-memory": "1Gi"}
    twin = Twin([node("a", devices=1, memory=60 * GI)], [*others, pod("it", memory_alone)])
    found = twin.explain(compute_floor=floor)
    assert found.fitting == (("a",) if fits else ())
    if not fits:
        (group,) = found.refused
        assert "0 % of a GPU's compute that is not guaranteed to others" in group.text


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
    assert part.placed == PlacedDevice("GPU-b-1", 20 * GI, 5000)
    assert part.device is not None
    assert (part.device.index, part.device.model) == (1, "A100")
    assert part.device.memory_bytes == 40 * GI
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
    assert (part.placed.uuid, part.device) == ("GPU-a-1", None)
    [obstacle] = found.obstacles
    assert obstacle.reason == "misplaced"
    assert "node a does not offer GPU GPU-a-1, which was chosen for it" in obstacle.text
    assert "creates it again" in str(obstacle.hint)


def test_a_gpu_that_is_offered_in_another_mode_since_is_named() -> None:
    found = Twin([node("a", modes=("mps",))], [pod("it", asking(), on=("a", 0))]).explain()
    [obstacle] = found.obstacles
    assert obstacle.reason == "misplaced"
    assert "chosen in mode soft, and node a offers it in mode mps" in obstacle.text


def test_a_pod_that_was_bound_without_a_placement() -> None:
    found = Twin([node("a")], [pod("it", asking(), node="a")]).explain()
    assert found.standing is Standing.BOUND
    assert kinds(found) == [Obstacles.UNPLACED]
    assert found.containers[0].parts == ()


def test_a_pod_that_no_node_could_ever_take_is_told_so() -> None:
    busy = [pod(f"p{index}", asking(), on=("a", index % 2)) for index in range(4)]
    nodes = [node("a"), node("b", problem="sick"), {"metadata": {"name": "plain"}}]
    found = Twin(nodes, [*busy, pod("it", asking(memory="200Gi"))]).explain()
    assert found.fitting == ()
    assert found.beyond is not None
    assert found.beyond.reason == "gpu-memory"
    assert found.beyond.text == (
        "need a GPU with 200Gi and 50 % of compute, have at most 40Gi on a GPU"
    )
    # What is only taken, or out of order, may come back.
    assert Twin(nodes, [*busy, pod("it", asking())]).explain().beyond is None
    taken = TakenPart(memory=40 * GI, shares=1, mode="soft")
    full = Twin([node("a", taken={0: taken, 1: taken})], [pod("it", asking())]).explain()
    assert (full.fitting, full.beyond) == ((), None)
    # Where no node tells of any GPU, nothing is known of their size.
    assert Twin(nodes[2:], [pod("it", asking())]).explain().beyond is None


def test_what_a_pod_has_that_cannot_be_read_is_taken() -> None:
    wrong = pod("wrong", asking(), on=("a", 0), annotations={"allotment.dev/comptue": "30"})
    twin = Twin([node("a", devices=1)], [wrong, pod("it", asking(memory="30Gi"))])
    assert twin.explain().fitting == ()
    assert "pod ml/wrong" in twin.read("it").problems[0]


def test_a_pod_that_its_node_refuses() -> None:
    wrong = pod("it", asking(), node="a", annotations={"allotment.dev/comptue": "30"})
    found = Twin([node("a")], [wrong]).explain()
    assert found.standing is Standing.BOUND
    assert Obstacles.REFUSED in kinds(found)
    assert not found.has_started
    wrong["status"]["containerStatuses"] = [{"name": "main", "state": {"running": {}}}]
    assert Twin([node("a")], [wrong]).explain().has_started


def running(limits: Mapping[str, str] | None = None) -> Json:
    """A pod that runs on node a, where its agent has chosen the GPU."""
    found = pod("it", limits or asking(), node="a", phase="Running")
    found["status"]["containerStatuses"] = [{"name": "main", "state": {"running": {}}}]
    return found


FULL = TakenPart(memory=35 * GI, guarantee=8000, shares=2, mode="soft")
"""Of a pod that asks for 20 GiB and half of the time, and of another."""


def test_what_a_node_gave_a_pod_by_itself_is_not_in_its_way() -> None:
    found = Twin([node("a", devices=1, taken={0: FULL})], [running()]).explain()
    assert found.standing is Standing.BOUND
    assert found.fitting == ("a",)
    assert found.rank == 1
    [part] = found.containers[0].parts
    assert part.placed == PlacedDevice("GPU-a-0", 20 * GI, 5000)
    assert part.device is not None
    assert part.device.index == 0
    # Nor is anything of others taken for its own.
    late = pod("late", asking())
    twin = Twin([node("a", devices=1, taken={0: FULL})], [running(), late])
    assert twin.explain("late").fitting == ()


def test_on_which_gpu_it_is_follows_from_what_is_taken_of_each() -> None:
    small = TakenPart(memory=GI, guarantee=100, shares=1, mode="soft")
    found = Twin([node("a", taken={0: small, 1: FULL})], [running()]).explain()
    assert [part.placed.uuid for part in found.containers[0].parts] == ["GPU-a-1"]
    assert found.fitting == ("a",)
    both = asking(memory="40Gi", compute=100, gpus=2)
    found = Twin([node("a", taken={0: FULL, 1: FULL})], [running(limits=both)]).explain()
    assert [part.placed.uuid for part in found.containers[0].parts] == ["GPU-a-0", "GPU-a-1"]
    other = replace(FULL, mode="timeslice")
    found = Twin([node("a", taken={0: other, 1: FULL})], [running()]).explain()
    assert [part.placed.uuid for part in found.containers[0].parts] == ["GPU-a-1"]


def test_where_it_may_be_on_several_gpus_none_is_claimed() -> None:
    found = Twin([node("a", taken={0: FULL, 1: FULL})], [running()]).explain()
    assert found.containers[0].parts == ()
    assert found.fitting == ("a",)
    assert "of GPU-a-0, GPU-a-1" in found.obstacles[0].text
    # By what it asks for, it is not on the other.
    picky = running()
    picky["metadata"]["annotations"]["allotment.dev/uuids"] = "GPU-a-1"
    found = Twin([node("a", taken={0: FULL, 1: FULL})], [picky]).explain()
    assert [part.placed.uuid for part in found.containers[0].parts] == ["GPU-a-1"]


@pytest.mark.parametrize("state", [{"waiting": {}}, {"terminated": {"exitCode": 0}}])
def test_a_container_that_does_not_run_has_nothing_that_could_be_taken_off(state: Json) -> None:
    it = running()
    it["status"]["containerStatuses"] = [{"name": "main", "state": state}]
    it["spec"]["restartPolicy"] = "Never"
    found = Twin([node("a", devices=1, taken={0: FULL})], [it]).explain()
    assert found.containers[0].parts == ()
    assert found.fitting == ()


def test_what_is_not_taken_is_not_taken_off() -> None:
    """A share of this size cannot be on that GPU, so that it is not known where it is."""
    small = TakenPart(memory=GI, guarantee=100, shares=1, mode="soft")
    found = Twin([node("a", devices=1, taken={0: small})], [running()]).explain()
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
    # To a scheduler that was not told to take over it is: as allot scheduler, so explain.
    assert twin.explain().fitting == ("a",)
    [problem] = twin.read("it").problems
    assert "such pods are not counted" in problem
    found = twin.explain(systems=["hami"])
    assert found.fitting == ()
    assert "have at most 10Gi" in found.refused[0].text
    # Whom HAMi's pods name says nothing about who places ours.
    assert found.obstacles == ()
    other = twin.explain("runs", systems=["hami"])
    assert other.standing is Standing.PLACED
    assert kinds(other) == [Obstacles.FOREIGN]
    assert other.dialect == "hami"
    [part] = other.containers[0].parts
    assert part.placed == PlacedDevice("GPU-a-0", 30 * GI)


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
    assert "has no pods" in str(caught.value.hint)
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


def test_a_resize_that_is_not_in_force_is_explained() -> None:
    """By the decision of the scheduler's own book, with need and have."""
    wish = {"allotment.dev/resize": "memory:30Gi"}
    one = pod("one", asking(), on=("a", 0), annotations=wish)
    found = Twin([node("a")], [one, pod("two", asking(compute=10), on=("a", 0))]).explain("one")
    assert kinds(found) == [Obstacles.RESIZE]
    assert "not resized: GPU-a-0 (A100): need 30Gi, have 20Gi beside" in found.obstacles[0].text
    found = Twin([node("a")], [one]).explain("one")
    assert kinds(found) == [Obstacles.RESIZE]
    assert "its resize is not in force on node a yet" in found.obstacles[0].text
    limit = quota("q", **{"requests.allotment.dev/gpu-memory": "25Gi"})
    (over,) = Twin([node("a")], [one], [limit]).explain("one").obstacles
    assert "not resized: quota of its namespace exceeded: need 30Gi of GPU memory" in over.text
    plain = pod("one", asking(), on=("a", 0))
    assert kinds(Twin([node("a")], [plain]).explain("one")) == []
