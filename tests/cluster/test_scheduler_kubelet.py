# SPDX-License-Identifier: Apache-2.0
"""From the agent that tells of its GPUs to the pod that has just the share chosen for it."""

from __future__ import annotations

from collections.abc import Callable

from scheduling import GIB, Scheduler, placements, scheduler_config
from stories import burn, burnt
from testbed.cluster import Cluster
from testbed.pods import Pods, container, pod
from testbed.waiting import wait_until


def test_a_pod_runs_on_the_gpu_that_was_chosen_for_it(own_cluster: Callable[..., Cluster]) -> None:
    cluster = own_cluster(scheduler_config=scheduler_config())
    cluster.allow_agent()
    config = cluster.apply_config()
    agent = cluster.start_agent("--config-map", config, "--default-config", "soft")
    cluster.wait_agent(agent)
    scheduler = Scheduler(cluster)
    scheduler.wait_ready()
    pods = Pods(cluster, "default")
    limits: dict[str, str | int] = {"allotment.dev/gpu": 1, "allotment.dev/gpu-memory": "60Gi"}
    for name in ("a", "b"):
        pods.create(pod(name, container(burn("59Gi"), limits=limits)))
    for name in ("a", "b"):
        pods.wait_phase(name, "Succeeded", timeout_s=120)
        assert burnt(pods, name).got_bytes == 59 * GIB
    placed = placements([pods.get(name) for name in ("a", "b")])
    parts = [placed[name]["containers"]["main"] for name in ("a", "b")]
    assert [each["memory"] for each in parts] == [60 * GIB, 60 * GIB]
    assert parts[0]["devices"] != parts[1]["devices"]
    figure = 'allotment_scheduler_device_devices{model="NVIDIA A100-SXM4-80GB"}'
    wait_until(lambda: scheduler.figure(figure) == 2, "both GPUs counted")
    scheduler.stop()
    agent.stop()
