# SPDX-License-Identifier: Apache-2.0
"""What cannot be meant, or does not fit, is refused: what, where and the next step, in an event."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import pytest
from claims import (
    NOT_PREPARED,
    claim,
    claiming,
    install_classes,
    share,
    shares_of,
    wait_for_pool,
)
from stories import (
    GPU,
    GPU_COMPUTE,
    GPU_MEMORY,
    NVIDIA,
    SOFT,
    TWO_GPUS,
    NodeAgent,
    node_agent,
    part,
)
from testbed.api import ApiError
from testbed.cluster import Cluster
from testbed.images import BUSYBOX
from testbed.pods import Pods, container, pod
from testbed.waiting import TestbedError, wait_until

SLEEP = ["sleep", "1000"]

MIXED = """\
version: v1
allotment:
  devices:
    - match: {index: [0]}
      mode: soft
    - match: {index: [1]}
      mode: exclusive
"""


@pytest.fixture(scope="module")
def node(cluster: Cluster) -> Iterator[NodeAgent]:
    """A soft GPU and an exclusive one."""
    with node_agent(cluster, MIXED, simulated=TWO_GPUS) as agent:
        wait_mixed(cluster)
        yield agent


def wait_mixed(cluster: Cluster) -> None:
    cluster.wait_allocatable(GPU, 16)
    cluster.wait_allocatable(NVIDIA, 1)


@dataclass(frozen=True, slots=True)
class Wrong:
    """A pod that is wrong, and the words of its refusal."""

    limits: Mapping[str, str]
    words: tuple[str, ...]
    annotations: Mapping[str, str] = field(default_factory=dict)


def placed(**containers: object) -> dict[str, str]:
    document = {"version": 1, "containers": containers}
    return {"allotment.dev/placement": json.dumps(document)}


WRONG = {
    "both-families": Wrong(
        {**part("4Gi"), NVIDIA: "1"},
        ("'main'", f"Allotment's {GPU}", f"NVIDIA's {NVIDIA}", "keep one of them"),
    ),
    "compute-differs": Wrong(
        part("4Gi", compute=20),
        ("'main'", "allotment.dev/compute (30:80) guarantees 30 percent", f"{GPU_COMPUTE} is 20"),
        {"allotment.dev/compute": "30:80"},
    ),
    "guarantee-that-nobody-counts": Wrong(
        part("4Gi"),
        ("guarantees 30 percent", f"add `{GPU_COMPUTE}: 30` to its limits", "0:80"),
        {"allotment.dev/compute": "30:80"},
    ),
    "annotation-of-no-container": Wrong(
        part("4Gi"),
        ("allotment.dev/compute names container 'train', which is not in the pod", "main"),
        {"allotment.dev/compute": "train=0:80"},
    ),
    "unknown-annotation": Wrong(
        part("4Gi"),
        ("the annotation 'allotment.dev/clas' is unknown", "did you mean", "class"),
        {"allotment.dev/clas": "latency"},
    ),
    "unknown-word": Wrong(
        part("4Gi"),
        ("allotment.dev/class is 'Latency'", "did you mean 'latency'", "write one of"),
        {"allotment.dev/class": "Latency"},
    ),
    "other-mode": Wrong(
        part("4Gi"),
        ("wants mode 'exclusive'", f"{GPU} of this node is 'soft'"),
        {"allotment.dev/mode": "exclusive"},
    ),
    "placement-of-others": Wrong(
        part("4Gi"),
        ("allotment.dev/placement names container 'worker', which is not in the pod",),
        placed(worker={"devices": ["GPU-1"]}),
    ),
    "placement-on-another-node": Wrong(
        part("4Gi"),
        ("names GPU-00000000-0000-0000-0000-000000000000, not on this node", "it has: GPU-"),
        placed(main={"devices": ["GPU-00000000-0000-0000-0000-000000000000"]}),
    ),
    "placement-of-another-pod": Wrong(
        part("4Gi"),
        ("was decided for another pod", "again without the annotation"),
        {
            "allotment.dev/placement": json.dumps(
                {"version": 1, "pod": "someone", "containers": {"main": {"devices": ["GPU-1"]}}}
            )
        },
    ),
    "placement-with-another-amount": Wrong(
        part("4Gi"),
        ("allotment.dev/placement has 1000 bytes of each device", str(4 * 1024**3)),
        placed(main={"devices": ["GPU-1"], "memory": 1000}),
    ),
    "less-than-a-mebibyte": Wrong(
        part("4096"),
        ("gpu-memory is 4096 bytes", "a number without a unit is bytes: 4096Mi?"),
    ),
    "more-compute-than-a-gpu": Wrong(
        part("4Gi"),
        ("ceiling",),
        {"allotment.dev/compute": "0:130"},
    ),
}


def test_contradictions_are_refused_in_the_pods_events(node: NodeAgent, pods: Pods) -> None:
    for name, wrong in WRONG.items():
        asking = container(SLEEP, image=BUSYBOX, limits=wrong.limits)
        # Several are to be judged at once; the exclusive GPU is there once.
        pods.create(pod(name, asking, annotations=wrong.annotations, nodeName="node-1"))
    missing = {}
    for name, wrong in WRONG.items():
        try:
            event = pods.wait_event(name, reason="ShareRefused")
        except TestbedError as error:
            missing[name] = str(error)
            continue
        told = event["message"]
        if event["type"] != "Warning" or not all(word in told for word in wrong.words):
            missing[name] = told
    assert missing == {}
    # Nothing of them is kept, and nothing of them stands in the way of others.
    pods.delete()
    node.wait_empty()


def test_refusal_is_told_once_and_by_kubectl(node: NodeAgent, pods: Pods) -> None:
    wrong = WRONG["both-families"]
    pods.create(pod("both", container(SLEEP, image=BUSYBOX, limits=wrong.limits)))
    pods.wait_event("both", reason="ShareRefused")
    why = pods.wait_waiting("both", "CreateContainerConfigError")
    assert "keep one of them" in why
    shown = node.cluster.kubectl_run("describe", "pod", "both", "--namespace", pods.namespace)
    assert len([line for line in shown.splitlines() if "ShareRefused" in line]) == 1
    assert "allotment-agent" in shown


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        ({NVIDIA: "0.5"}, "must be an integer"),
        ({GPU: "500m"}, "must be an integer"),
        ({GPU: "1", GPU_MEMORY: "0.5"}, "must be an integer"),
    ],
    ids=["nvidia", "allotment", "memory"],
)
def test_fractions_are_refused_by_the_api_server(
    pods: Pods, limits: Mapping[str, str], words: str
) -> None:
    with pytest.raises(ApiError, match=words):
        pods.create(pod("fraction", container(SLEEP, image=BUSYBOX, limits=limits)))


@pytest.mark.usefixtures("node")
def test_more_than_the_node_has_is_not_scheduled(pods: Pods) -> None:
    pods.create(pod("memory", container(SLEEP, image=BUSYBOX, limits=part("81Gi"))))
    pods.create(pod("count", container(SLEEP, image=BUSYBOX, limits=part("4Gi", gpus=17))))
    pods.create(pod("compute", container(SLEEP, image=BUSYBOX, limits=part("4Gi", compute=101))))
    for name, resource in (("memory", GPU_MEMORY), ("count", GPU), ("compute", GPU_COMPUTE)):
        pods.wait_event(name, reason="FailedScheduling", contains=f"Insufficient {resource}")


@pytest.fixture
def both_soft(node: NodeAgent, cluster: Cluster) -> Iterator[NodeAgent]:
    """Both GPUs in parts, for one test."""
    with node.configured(SOFT, back_to=MIXED):
        cluster.wait_allocatable(GPU, 32)
        yield node
    wait_mixed(cluster)


def test_what_fits_the_node_but_no_gpu_is_refused_with_need_and_have(
    both_soft: NodeAgent, pods: Pods
) -> None:
    node = both_soft
    for name in ("a", "b"):
        pods.create(pod(name, container(SLEEP, image=BUSYBOX, limits=part("50Gi"))))
        pods.wait_ready(name)
    # 60 GiB are left on the node, 30 on each GPU.
    pods.create(pod("c", container(SLEEP, image=BUSYBOX, limits=part("40Gi"))))
    event = pods.wait_event("c", reason="ShareRefused")
    assert "need 40Gi" in event["message"]
    assert "have 29" in event["message"]
    # Two GPUs of which there is only one that has room.
    pods.delete("a")
    pods.create(pod("d", container(SLEEP, image=BUSYBOX, limits=part("60Gi", gpus=2))))
    event = pods.wait_event("d", reason="ShareRefused")
    assert "need 30Gi" in event["message"]
    # It waits: as soon as there is room, it starts.
    pods.delete("b", "c")
    pods.wait_ready("d")
    node.wait_exact()
    pods.delete()


@pytest.mark.usefixtures("node")
def test_quantities_without_a_gpu_are_told_of(pods: Pods) -> None:
    """The kubelet asks no plugin for them: such a container starts, and has no GPU."""
    only = {GPU_MEMORY: "4Gi"}
    pods.create(pod("memory", container(SLEEP, image=BUSYBOX, limits=only)))
    event = pods.wait_event("memory", reason="ShareRefused", contains=f"{GPU_MEMORY} without {GPU}")
    assert f"add `{GPU}: 1`" in event["message"]


def test_cdi_folder_that_cannot_be_written_holds_pods_back(node: NodeAgent, pods: Pods) -> None:
    """Those with claims, too: the agent tries them again when the node's shares have changed."""
    machine = node.cluster.node
    install_classes(node.cluster)
    wait_for_pool(node.cluster, node.gpus())
    claim(pods, "mine", share(memory="4Gi"))
    machine.run(["mkdir", "-p", "/run/cdi"])
    machine.run(["mount", "-t", "tmpfs", "-o", "ro", "tmpfs", "/run/cdi"])
    try:
        pods.create(pod("waits", container(SLEEP, image=BUSYBOX, limits=part("4Gi"))))
        event = pods.wait_event("waits", reason="ShareRefused")
        assert "/var/run/cdi" in event["message"]
        assert "cannot write the CDI spec: Read-only file system" in event["message"]
        assert "let the node agent write into /var/run/cdi" in event["message"]
        pods.create(claiming("claims", SLEEP, "mine"))
        unwritten = "cannot write the CDI spec: Read-only file system"
        pods.wait_event("claims", reason=NOT_PREPARED, contains=unwritten)
        assert not shares_of(node, pods, "mine")
    finally:
        # Whoever looks at it at this moment does not hold it up.
        machine.run(["umount", "--lazy", "/run/cdi"])
    for name in ("waits", "claims"):
        pods.wait_ready(name)
    pods.delete("claims")
    wait_until(lambda: not shares_of(node, pods, "mine"), "end of the claim's share")
    node.wait_exact()
