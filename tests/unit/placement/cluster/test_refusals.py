# SPDX-License-Identifier: Apache-2.0
"""Why a pod is not on a node: need and have, one line, one of a fixed list of reasons."""

from fractions import Fraction

import pytest

from allotment.model.clusters import (
    NodeDevice,
    NodeInventory,
    PodNeed,
    TakenPart,
    WantedContainer,
)
from allotment.model.compute import Compute
from allotment.model.modes import EXCLUSIVE, SOFT, TIMESLICE
from allotment.model.pods import PodUid
from allotment.model.quantities import MemoryAmount, parse_memory
from allotment.model.requests import Constraints, ModelRule, Request, whole_devices
from allotment.placement.cluster.cluster import Cluster
from allotment.placement.explain import Reason, Refusal, grouped

GI = 1 << 30
HALF = MemoryAmount("50%", part=Fraction(1, 2))


def inventory(name: str = "a", *takens: TakenPart, problem: str = "") -> NodeInventory:
    return NodeInventory(
        name=name,
        cpu_milli=4000,
        memory_bytes=32 * GI,
        devices=tuple(
            NodeDevice(
                uuid=f"{name}-{index}",
                model="Tesla T4",
                memory_bytes=16 * GI,
                index=index,
                taken=taken,
                problem=problem,
                numa_node=index,
            )
            for index, taken in enumerate(takens)
        ),
    )


def pod(request: Request, *, cpu: int = 0, memory: int = 0) -> PodNeed:
    return PodNeed(
        uid=PodUid("x"),
        cpu_milli=cpu,
        memory_bytes=memory,
        containers=(WantedContainer(name="main", request=request),),
    )


def some(
    memory: str = "1Gi", *, count: int = 1, compute: int = 0, **constraints: object
) -> Request:
    return Request(
        parse_memory(memory),
        count=count,
        compute=Compute(compute),
        constraints=Constraints(**constraints),  # type: ignore[arg-type]
    )


IDLE = TakenPart()
USED = TakenPart(memory=10 * GI, guarantee=7000, shares=1, mode=SOFT)


@pytest.mark.parametrize(
    ("takens", "request_", "reason", "text"),
    [
        ([], some(), Reason.NO_GPU, "need a GPU with 1Gi, have no GPU"),
        (
            [IDLE],
            some(count=3),
            Reason.TOO_FEW_GPUS,
            "need 3 GPUs with 1Gi each, have 1 GPU",
        ),
        (
            [USED, IDLE],
            some("17Gi"),
            Reason.GPU_MEMORY,
            "need a GPU with 17Gi, have at most 16Gi on a GPU",
        ),
        (
            [USED, IDLE],
            some("7Gi", count=2),
            Reason.GPU_MEMORY,
            "need 2 GPUs with 7Gi each, have 1 such and else at most 6Gi on a GPU",
        ),
        (
            [USED],
            some("6Gi", compute=5000),
            Reason.GPU_COMPUTE,
            "need a GPU with 6Gi and 50 % of compute, have at most 30 % of compute on a GPU",
        ),
        (
            [USED],
            Request(HALF),
            Reason.GPU_MEMORY,
            "need a GPU with 50 % of its memory, have at most 6Gi on a GPU",
        ),
        (
            [IDLE],
            some(models=(ModelRule("A100"), ModelRule("H100"))),
            Reason.MODEL,
            "need a GPU (A100 or H100) with 1Gi, have GPUs of other models",
        ),
        (
            [IDLE],
            some(uuids=("GPU-9",)),
            Reason.UUID,
            "need a GPU with 1Gi, have none of the GPUs asked for",
        ),
        (
            [USED],
            some(is_alone=True),
            Reason.COMPANY,
            "need a GPU with 1Gi, alone, have GPUs with other shares on them",
        ),
        (
            [USED],
            some(exclusion="a"),
            Reason.TAGS,
            "need a GPU with 1Gi, have GPUs with another exclusion tag",
        ),
        (
            [IDLE, IDLE],
            some(count=2, same_numa=True),
            Reason.TOPOLOGY,
            "need 2 GPUs with 1Gi each on one NUMA node, have at most 1 of them on one NUMA node",
        ),
        (
            [IDLE, IDLE],
            some(count=2, needs_nvlink=True),
            Reason.TOPOLOGY,
            "need 2 GPUs with 1Gi each joined by NVLink, have 2 such that are not all joined",
        ),
        (
            [IDLE],
            whole_devices(1, mode=EXCLUSIVE),
            Reason.MODE,
            "need a whole GPU, have GPUs of another mode",
        ),
        (
            [IDLE, IDLE],
            whole_devices(2, mode=TIMESLICE),
            Reason.MODE,
            "need 2 time-sliced GPUs, have GPUs of another mode",
        ),
        (
            [TakenPart(shares=63, mode=SOFT)],
            some(),
            Reason.SHARES,
            "need a GPU with 1Gi, have GPUs with the most shares they can take",
        ),
    ],
)
def test_need_and_have(takens: list[TakenPart], request_: Request, reason: str, text: str) -> None:
    refusal = refused(inventory("a", *takens), pod(request_))
    assert (refusal.reason, refusal.text) == (reason, text)


def refused(node: NodeInventory, need: PodNeed) -> Refusal:
    cluster = Cluster(node_policies=["binpack"], device_policies=["binpack"])
    cluster.put(node)
    decision = cluster.place(need, node.name)
    assert isinstance(decision, Refusal)
    ranking = cluster.rank(need)
    assert dict(ranking.refused) == {node.name: decision}
    assert ranking.refused.reasons() == {decision.reason: 1}
    return decision


def test_what_rounding_would_hide_is_told_in_bytes() -> None:
    there = inventory("a", TakenPart(memory=1, shares=1, mode=SOFT))
    assert refused(there, pod(some("16Gi"))).text == (
        f"need a GPU with 16Gi, have at most {16 * GI - 1}B on a GPU"
    )


def test_a_problem_is_told_as_it_is() -> None:
    there = inventory("a", IDLE, problem="Xid 79: fallen off the bus")
    assert refused(there, pod(some())).text == (
        "need a GPU with 1Gi, have only GPUs with a problem (Xid 79: fallen off the bus)"
    )


def test_cpu_and_memory_of_the_node() -> None:
    there = inventory("a", IDLE)
    assert refused(there, pod(some(), cpu=4001)).text == "need 4001m of CPU, have 4000m"
    assert refused(there, pod(some(), memory=33 * GI)).text == "need 33Gi of memory, have 32Gi"


def test_nodes_that_fail_alike_are_one_line_with_the_most_that_any_has() -> None:
    cluster = Cluster(node_policies=["binpack"], device_policies=["binpack"])
    for number in range(312):
        cluster.put(
            inventory(f"node-{number}", TakenPart(memory=number % 9 * GI, shares=1, mode=SOFT))
        )
    cluster.put(inventory("small"))
    groups = grouped(cluster.rank(pod(some("20Gi"))).refused)
    assert [(len(group.nodes), group.text) for group in groups] == [
        (312, "need a GPU with 20Gi, have at most 16Gi on a GPU"),
        (1, "need a GPU with 20Gi, have no GPU"),
    ]


def test_every_reason_is_short_and_once() -> None:
    assert len({*Reason}) == len(Reason)
    assert all(len(each) <= 16 and each == each.lower() for each in Reason)
