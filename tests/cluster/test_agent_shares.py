# SPDX-License-Identifier: Apache-2.0
"""What pods get of GPUs, in every mode and kind of container: real pods that burn."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from stories import (
    GIB,
    GPU,
    MIB,
    NVIDIA,
    PLAIN,
    SOFT,
    NodeAgent,
    burn,
    burn_and_stay,
    burnt,
    container_id,
    exit_code,
    node_agent,
    part,
)
from testbed.api import Json
from testbed.cluster import Cluster
from testbed.images import BUSYBOX
from testbed.pods import Pods, container, pod
from testbed.waiting import wait_until

SLEEP = ["sleep", "1000"]


@pytest.fixture(scope="module")
def node(cluster: Cluster) -> Iterator[NodeAgent]:
    """Two GPUs of 80 GiB in mode soft, for all tests of this file that say nothing else."""
    with node_agent(cluster, SOFT) as agent:
        yield agent


# ---- parts of GPUs -------------------------------------------------------------------------------


def test_pod_has_the_memory_that_it_asked_for_and_no_more(node: NodeAgent, pods: Pods) -> None:
    pods.create(pod("greedy", container(burn("5Gi"), limits=part("4Gi"))))
    pods.create(pod("modest", container(burn("3Gi"), limits=part("4Gi"))))
    refused = pods.wait_phase("greedy", "Failed")
    said = burnt(pods, "greedy")
    assert said.total_bytes == 4 * GIB
    assert 3 * GIB < said.got_bytes < 4 * GIB
    assert set(said.errors) == {"CUDA_ERROR_OUT_OF_MEMORY"}
    assert exit_code(refused) == 9
    pods.wait_phase("modest", "Succeeded")
    assert burnt(pods, "modest").got_bytes == 3 * GIB
    event = pods.wait_event("greedy", reason="ShareReady")
    assert "4Gi" in event["message"]
    node.wait_exact()


def test_without_amounts_it_is_all_of_a_gpu(node: NodeAgent, pods: Pods) -> None:
    pods.create(pod("whole", container(burn("1Gi"), limits=part())))
    pods.wait_phase("whole", "Succeeded")
    assert burnt(pods, "whole").total_bytes > 78 * GIB
    node.wait_exact()


def test_several_gpus_share_the_amounts_equally(node: NodeAgent, pods: Pods) -> None:
    command = "allot burn --memory 1Gi --seconds 0 --device 1 -o json; exec sleep 1000"
    limits = part("8Gi", gpus=2, compute=60)
    pods.create(pod("wide", container(["sh", "-c", command], limits=limits)))
    assert burnt(pods, "wide").total_bytes == 4 * GIB
    devices = node.share(pods, "wide").devices
    assert len({device.uuid for device in devices}) == 2
    assert {device.memory_bytes for device in devices} == {4 * GIB}
    assert {device.compute.guarantee for device in devices} == {3000}


def test_compute_by_annotation_is_the_contract(node: NodeAgent, pods: Pods) -> None:
    body = pod(
        "train",
        container(
            ["sh", "-c", f"{' '.join(burn('1Gi', seconds=3))}; exec sleep 1000"],
            limits=part("4Gi", compute=20),
        ),
        annotations={
            "allotment.dev/compute": "20:20",
            "allotment.dev/class": "latency",
            "allotment.dev/weight": "300",
        },
    )
    pods.create(body)
    compute = node.share(pods, "train").devices[0].compute
    assert (compute.guarantee, compute.ceiling, compute.weight) == (2000, 2000, 300)
    assert compute.kind.value == "latency"
    said = burnt(pods, "train")
    # Kernels of 2 ms: a fifth of the time, and what it may save up beforehand.
    assert 0 < said.kernels * 0.002 < said.wall_seconds * 0.2 + 0.3


def test_amounts_by_container(node: NodeAgent, pods: Pods) -> None:
    body = pod(
        "pair",
        container(burn_and_stay("512Mi"), name="big", limits=part("6Gi", compute=50)),
        container(burn_and_stay("512Mi"), name="small", limits=part("1Gi", compute=10)),
        container(SLEEP, name="none", image=BUSYBOX),
        annotations={"allotment.dev/compute": "big=50:100,small=10:30"},
    )
    pods.create(body)
    assert burnt(pods, "pair", "big").total_bytes == 6 * GIB
    assert burnt(pods, "pair", "small").total_bytes == GIB
    big, small = node.share(pods, "pair", "big"), node.share(pods, "pair", "small")
    assert (big.devices[0].compute.ceiling, small.devices[0].compute.ceiling) == (10000, 3000)
    assert big.id != small.id
    node.wait_exact()
    assert len(node.shares(pods.namespace)) == 2


# ---- other kinds of containers -------------------------------------------------------------------


def test_init_container_has_its_own_amount_while_its_pod_lives(node: NodeAgent, pods: Pods) -> None:
    first = container(burn("1Gi"), name="first", limits=part("70Gi"))
    second = container(burn("1Gi"), name="second", limits=part("2Gi", compute=40))
    main = container(burn_and_stay("1Gi"), limits=part("30Gi"))
    pods.create(pod("starts", main, initContainers=[first, second]))
    assert burnt(pods, "starts", "first").total_bytes == 70 * GIB
    assert burnt(pods, "starts", "second").total_bytes == 2 * GIB
    assert burnt(pods, "starts").total_bytes == 30 * GIB
    # Any of them may start again, and Kubernetes counts the greatest for as long as the pod is
    # there: what is more than that goes to the other GPU.
    names = {each.name.rpartition("/")[2] for each in node.shares(pods.namespace)}
    assert names == {"first", "second", "main"}
    device = node.share(pods, "starts").devices[0].uuid
    pods.create(pod("beside", container(burn_and_stay("45Gi"), limits=part("45Gi"))))
    assert burnt(pods, "beside").total_bytes == 45 * GIB
    assert node.share(pods, "beside").devices[0].uuid != device
    node.wait_exact()


def test_sidecar_keeps_its_share_beside_the_main_container(node: NodeAgent, pods: Pods) -> None:
    side = container(
        burn_and_stay("512Mi"), name="side", limits=part("2Gi"), restartPolicy="Always"
    )
    pods.create(pod("helped", container(burn("512Mi"), limits=part("3Gi")), initContainers=[side]))
    assert burnt(pods, "helped", "side").total_bytes == 2 * GIB
    assert burnt(pods, "helped").total_bytes == 3 * GIB
    # The pod is over when its main container is, and all is given back.
    pods.wait_phase("helped", "Succeeded")
    wait_until(lambda: not node.shares(pods.namespace), "end", explain=node.explain)


def test_container_that_starts_again_has_the_same_share(node: NodeAgent, pods: Pods) -> None:
    burning = " ".join(burn("512Mi"))
    # What is written into a container goes with it: the next one stays.
    crash = f"{burning}; until [ -e /crash ]; do sleep 0.1; done; exit 3"
    body = pod("loop", container(["sh", "-c", crash], limits=part("3Gi")), restart="Always")
    pods.create(body)
    before = node.share(pods, "loop")
    first = container_id(pods.wait_ready("loop"))
    pods.exec("loop", ["sh", "-c", ": >/crash"])
    pods.wait_restarted("loop")
    assert burnt(pods, "loop").total_bytes == 3 * GIB
    assert container_id(pods.get("loop")) != first
    assert node.share(pods, "loop").id == before.id
    node.wait_exact()


def test_deleted_pod_leaves_nothing(node: NodeAgent, pods: Pods) -> None:
    pods.create(pod("brief", container(SLEEP, image=BUSYBOX, limits=part("4Gi"))))
    share = node.share(pods, "brief")
    pods.wait_ready("brief")
    assert f"allotment.dev-share-{share.id}.json" in node.specs()
    pods.delete("brief")
    wait_until(lambda: not node.shares(pods.namespace), "end", explain=node.explain)
    node.wait_exact()


def test_completed_job_makes_room_for_the_next_one(node: NodeAgent, pods: Pods) -> None:
    """Three pods that each need all of the node's memory, one after the other."""
    whole = part("150Gi", gpus=2)
    for number in range(3):
        job = container(["true"], image=BUSYBOX, limits=whole)
        pods.cluster.api.post(
            f"/apis/batch/v1/namespaces/{pods.namespace}/jobs", job_of(f"job-{number}", job)
        )
    wait_until(
        lambda: succeeded(pods) == 3,
        "three finished pods",
        timeout_s=150,
        explain=lambda: "\n".join([*map(pods.explain, pods.names()), node.explain()]),
    )
    node.wait_exact()
    pods.cluster.api.delete(
        f"/apis/batch/v1/namespaces/{pods.namespace}/jobs", propagationPolicy="Background"
    )


def job_of(name: str, only: Json) -> Json:
    spec = pod(name, only)["spec"]
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": name},
        "spec": {"template": {"spec": spec}, "backoffLimit": 0},
    }


def succeeded(pods: Pods) -> int:
    found = pods.cluster.api.items(f"/api/v1/namespaces/{pods.namespace}/pods")
    return sum(each["status"].get("phase") == "Succeeded" for each in found)


# ---- modes without limits ------------------------------------------------------------------------


@contextmanager
def for_now(node: NodeAgent, config: str) -> Iterator[None]:
    """Another configuration for the length of a `with`; then all is as the module has it."""
    with node.configured(config, back_to=SOFT):
        yield
    node.cluster.wait_allocatable(GPU, 32)
    node.cluster.wait_allocatable(NVIDIA, 0)


@pytest.fixture
def plain(node: NodeAgent) -> Iterator[NodeAgent]:
    """The node as NVIDIA's plugin would have it, for one test."""
    with for_now(node, PLAIN):
        node.cluster.wait_allocatable(NVIDIA, 2)
        node.cluster.wait_allocatable(GPU, 0)
        yield node


INSIDE = "ls /etc/ld.so.preload 2>/dev/null; env | grep -c ^LD_PRELOAD=; true"


def test_exclusive_gpu_is_whole_and_without_a_shim(plain: NodeAgent, pods: Pods) -> None:
    both = burn_and_stay("75Gi")
    pods.create(pod("one", container(both, limits={NVIDIA: 1})))
    pods.create(pod("two", container(both, limits={NVIDIA: 1})))
    one, two = burnt(pods, "one"), burnt(pods, "two")
    pods.create(pod("late", container(["sh", "-c", INSIDE], limits={NVIDIA: 1})))
    assert one.uuid != two.uuid
    assert one.errors == two.errors == ()
    assert one.got_bytes == 75 * GIB
    pods.wait_event("late", reason="FailedScheduling", contains=f"Insufficient {NVIDIA}")
    pods.delete("one")
    pods.wait_phase("late", "Succeeded")
    assert pods.logs("late").split() == ["0"]
    share = plain.share(pods, "two")
    assert share.mode == "exclusive"
    assert [device.uuid for device in share.devices] == [two.uuid]
    plain.wait_exact()


SLICED = """\
version: v1
sharing:
  timeSlicing:
    resources:
      - name: nvidia.com/gpu
        replicas: 3
"""


@pytest.fixture
def sliced(node: NodeAgent) -> Iterator[NodeAgent]:
    """Each GPU three times, for one test."""
    with for_now(node, SLICED):
        node.cluster.wait_allocatable(NVIDIA, 6)
        yield node


def test_replicas_of_a_time_sliced_gpu_are_without_limits(sliced: NodeAgent, pods: Pods) -> None:
    node = sliced
    for number in range(6):
        pods.create(pod(f"p{number}", container(SLEEP, image=BUSYBOX, limits={NVIDIA: 1})))
    used: list[str] = []
    for number in range(6):
        pods.wait_ready(f"p{number}")
        share = node.share(pods, f"p{number}")
        assert share.mode == "timeslice"
        used += [device.uuid for device in share.devices]
    assert sorted(used.count(uuid) for uuid in set(used)) == [3, 3]
    pods.delete("p0")
    pods.create(pod("burns", container(burn("70Gi"), limits={NVIDIA: 1})))
    pods.wait_phase("burns", "Succeeded")
    assert burnt(pods, "burns").total_bytes > 78 * GIB
    node.wait_exact()


REPLICAS_WITH_LIMITS = f"""\
{SLICED}
allotment:
  devices:
    - mode: soft
"""


@pytest.fixture
def sliced_with_limits(node: NodeAgent) -> Iterator[NodeAgent]:
    """Likewise, each of the three limited to its part."""
    with for_now(node, REPLICAS_WITH_LIMITS):
        node.cluster.wait_allocatable(NVIDIA, 6)
        yield node


def test_replicas_of_a_soft_gpu_are_limited_to_their_part(
    sliced_with_limits: NodeAgent, pods: Pods
) -> None:
    node = sliced_with_limits
    pods.create(pod("third", container(burn("40Gi"), limits={NVIDIA: 1})))
    pods.wait_phase("third", "Failed")
    said = burnt(pods, "third")
    assert abs(said.total_bytes - 80 * GIB // 3) < 300 * MIB
    assert "CUDA_ERROR_OUT_OF_MEMORY" in said.errors
    node.wait_exact()
