# SPDX-License-Identifier: Apache-2.0
"""The metrics of use of pods that compute, share and have a GPU alone, and of a GPU that hangs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample
from stories import GIB, NVIDIA, NodeAgent, burn, node_agent, part
from testbed.cluster import Cluster
from testbed.pods import Pods, container, pod
from testbed.waiting import wait_until

CONFIG = """\
version: v1
allotment:
  metrics:
    aliases: [dcgm, hami]
  devices:
    - mode: soft
      match: {index: [0]}
"""


@pytest.fixture(scope="module")
def node(cluster: Cluster) -> Iterator[NodeAgent]:
    """One GPU in parts, and one for one container."""
    with node_agent(cluster, CONFIG) as agent:
        yield agent


def scrape(node: NodeAgent) -> list[Sample]:
    text = node.http("/metrics")
    assert text is not None, "no answer within the 10 s after which Prometheus gives up"
    return [sample for family in text_string_to_metric_families(text) for sample in family.samples]


def values(found: list[Sample], name: str, **labels: str) -> list[float]:
    return [
        each.value for each in found if each.name == name and labels.items() <= each.labels.items()
    ]


def test_each_pod_has_what_it_uses(node: NodeAgent, pods: Pods) -> None:
    computes = burn("3Gi", seconds=1000)
    holds = burn("5Gi", "--kernel", "0", seconds=1000)
    pods.create(pod("computes", container(computes, limits=part("4Gi", compute=30))))
    pods.create(pod("holds", container(holds, limits=part("6Gi"))))
    pods.create(pod("alone", container(holds, limits={NVIDIA: 1})))
    for name in ("computes", "holds", "alone"):
        pods.wait_ready(name)
    mine = {"namespace": pods.namespace, "container": "main"}
    used, seconds = "allotment_share_memory_used_bytes", "allotment_share_gpu_seconds_total"
    least = {"computes": 3 * GIB, "holds": 5 * GIB, "alone": 5 * GIB}

    def settled() -> list[Sample]:
        found = scrape(node)
        has_memory = all(
            sum(values(found, used, pod=name, **mine)) >= amount for name, amount in least.items()
        )
        has_computed = sum(values(found, seconds, pod="computes", **mine)) > 0
        return found if has_memory and has_computed else []

    found = wait_until(settled, "use of all pods", explain=lambda: node.http("/metrics") or "")
    assert values(found, "allotment_use_read") == [1, 1, 1]
    held = {
        each.labels["pod"]: each.labels
        for each in found
        if each.name == "allotment_gpu_pod_info" and each.labels["namespace"] == pods.namespace
    }
    assert {name: each["mode"] for name, each in held.items()} == {
        "computes": "soft", "holds": "soft", "alone": "exclusive",
    }  # fmt: skip
    assert values(found, "allotment_use_shares_damaged") == [0]
    for name, limit in (("computes", 4 * GIB), ("holds", 6 * GIB)):
        labels = {"pod": name, "mode": "soft", **mine}
        assert values(found, "allotment_share_memory_limit_bytes", **labels) == [limit]
        assert values(found, "allotment_share_enforced", **labels) == [1]
        assert values(found, "allotment_share_processes", **labels) == [1]
        assert values(found, "hami_vgpu_memory_limit_bytes", pod=name, **mine) == [limit]
    assert values(found, "allotment_share_compute_guaranteed_ratio", pod="computes") == [0.3]
    gpus = {each.labels["gpu"] for each in found if each.name == "allotment_gpu_info"}
    assert len(gpus) == 2
    for gpu in gpus:
        (whole,) = values(found, "allotment_gpu_memory_used_bytes", gpu=gpu)
        assert 0 < sum(values(found, used, gpu=gpu)) <= whole
    (shared,) = {each.labels["gpu"] for each in found if each.labels.get("pod") == "holds"
                 and each.name == used}  # fmt: skip
    assert values(found, "allotment_gpu_memory_allocated_bytes", gpu=shared) == [10 * GIB]
    (temperature,) = (each for each in found if each.name == "DCGM_FI_DEV_GPU_TEMP"
                      and "pod" in each.labels)  # fmt: skip
    assert (temperature.labels["pod"], temperature.labels["gpu"]) == ("alone", "1")
    before = sum(values(found, seconds, pod="computes", **mine))
    wait_until(
        lambda: sum(values(scrape(node), seconds, pod="computes", **mine)) > before,
        "more GPU time",
    )

    (alone,) = gpus - {shared}
    node.fault("--gpu", alone, "--hang", "600s")
    try:
        found = wait_until(
            lambda: (
                found
                if values(found := scrape(node), "allotment_use_read", what="gpus") == [0]
                else []
            ),
            "a scrape without the GPU that hangs",
        )
    finally:
        node.fault("--clear")
    assert sorted(values(found, "allotment_gpu_answers")) == [0, 1]
    assert values(found, "allotment_gpu_answers", gpu=shared) == [1]
    assert values(found, "allotment_use_read", what="shares") == [1]
    assert len(values(found, used, pod="holds", **mine)) == 1
    wait_until(
        lambda: values(scrape(node), "allotment_use_read", what="gpus") == [1],
        "a scrape with all GPUs",
    )
