# SPDX-License-Identifier: Apache-2.0
"""The scheduler with the real kube-scheduler and API server; nodes that only say what they have."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from scheduling import (
    GIB,
    Scheduler,
    add_gpu_nodes,
    gpu_pod,
    inventory,
    placements,
    scheduler_config,
    taken,
)
from testbed.api import Json
from testbed.cluster import Cluster
from testbed.pods import Pods
from testbed.waiting import wait_until


@pytest.fixture(scope="module")
def control_plane(
    testbed_machine: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    del testbed_machine
    state = tmp_path_factory.mktemp("scheduler")
    with Cluster(state=state, settings=None, scheduler_config=scheduler_config()) as made:
        add_gpu_nodes(made, [inventory(f"n{number}", devices=4) for number in range(6)])
        yield made


@pytest.fixture(scope="module")
def scheduler(control_plane: Cluster) -> Iterator[Scheduler]:
    made = Scheduler(control_plane)
    made.wait_ready()
    yield made
    made.stop()


@pytest.fixture
def pods(
    control_plane: Cluster, scheduler: Scheduler, request: pytest.FixtureRequest
) -> Iterator[Pods]:
    del scheduler
    name = control_plane.make_namespace(request.node.name.replace("_", "-")[:50].strip("-"))
    made = Pods(control_plane, name)
    yield made
    path = f"/api/v1/namespaces/{name}/pods"
    # No kubelet ends them.
    control_plane.api.delete(path, gracePeriodSeconds="0")
    wait_until(lambda: not made.names(), "end of the pods", timeout_s=30)


def wait_bound(pods: Pods, number: int, *, timeout_s: float = 60) -> list[Json]:
    path = f"/api/v1/namespaces/{pods.namespace}/pods"

    def bound() -> list[Json] | None:
        found = pods.cluster.api.items(path)
        return (
            found if sum(bool(each["spec"].get("nodeName")) for each in found) >= number else None
        )

    return wait_until(bound, f"{number} bound pods", timeout_s=timeout_s)


def test_pods_are_bound_with_their_placement(pods: Pods) -> None:
    for number in range(12):
        pods.create(gpu_pod(f"p{number}", memory="20Gi", compute=25))
    items = wait_bound(pods, 12)
    placed = placements(items)
    assert len(placed) == 12
    for item in items:
        placement = placed[item["metadata"]["name"]]
        assert placement["node"] == item["spec"]["nodeName"]
        assert placement["pod"] == item["metadata"]["uid"]
        part = placement["containers"]["main"]
        assert part["memory"] == 20 * GIB
        assert part["guarantee"] == 2500
        assert part["devices"][0].startswith(f"GPU-{placement['node']}-")
    # Four fit on a device, in memory and in compute: packed, they need three.
    assert taken(items) == dict.fromkeys(taken(items), (80 * GIB, 10_000))
    assert len(taken(items)) == 3
