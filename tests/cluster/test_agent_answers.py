# SPDX-License-Identifier: Apache-2.0
"""What `Allocate` answers, as the kubelet has written it down: NVIDIA's ways, and without CDI."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from stories import (
    GIB,
    NVIDIA,
    SOFT,
    NodeAgent,
    burn_and_stay,
    burnt,
    container_id,
    node_agent,
    part,
)
from testbed.cluster import Cluster, NodeSettings
from testbed.images import BUSYBOX
from testbed.pods import Pods, container, pod

from allotment.agent.protocols import SHARE_ANNOTATION

VISIBLE = "NVIDIA_VISIBLE_DEVICES"
VOLUMES = "/var/run/nvidia-container-devices"
KIND = "k8s.device-plugin.nvidia.com/gpu"


@pytest.fixture(scope="module")
def node(cluster: Cluster) -> Iterator[NodeAgent]:
    """Two GPUs for one container each."""
    with node_agent(cluster, "version: v1\n") as agent:
        yield agent


def strategy(*names: str, **flags: str) -> str:
    plugin = {"deviceListStrategy": f"[{', '.join(names)}]", **flags}
    lines = "\n".join(f"    {key}: {value}" for key, value in plugin.items())
    return f"version: v1\nflags:\n  plugin:\n{lines}\n"


def configured(node: NodeAgent, text: str) -> None:
    """Brings a configuration into force that changes nothing of what the node offers."""
    before = node.figure("config_loads", result="applied")
    node.configure(text)
    node.wait_figure("config_loads", before + 1, result="applied")


def test_nobody_said_how(node: NodeAgent, pods: Pods) -> None:
    pods.create(pod("a", container(["sleep", "1000"], image=BUSYBOX, limits={NVIDIA: 1})))
    pods.wait_ready("a")
    answer = node.response(pods, "a")
    share = node.share(pods, "a")
    assert answer["annotations"] == {SHARE_ANNOTATION: share.id}
    assert answer["cdi_devices"] == [f"allotment.dev/share={share.id}"]
    assert (answer["envs"], answer["mounts"], answer["devices"]) == ({}, [], [])


def test_envvar(node: NodeAgent, pods: Pods) -> None:
    configured(node, strategy("envvar"))
    show = ["sh", "-c", f"echo ${VISIBLE}; sleep 1000"]
    pods.create(pod("a", container(show, image=BUSYBOX, limits={NVIDIA: 1})))
    pods.wait_ready("a")
    answer = node.response(pods, "a")
    share = node.share(pods, "a")
    assert answer["envs"] == {VISIBLE: share.devices[0].uuid}
    assert answer["ids"] == [share.devices[0].uuid]
    assert (answer["mounts"], answer["cdi_devices"]) == ([], [])
    assert answer["annotations"] == {SHARE_ANNOTATION: share.id}
    assert pods.wait_logs("a").strip() == share.devices[0].uuid
    node.wait_exact()


def test_volume_mounts_by_index(node: NodeAgent, pods: Pods) -> None:
    configured(node, strategy("volume-mounts", deviceIDStrategy="index"))
    show = ["sh", "-c", f"ls {VOLUMES}; sleep 1000"]
    pods.create(pod("a", container(show, image=BUSYBOX, limits={NVIDIA: 2})))
    pods.wait_ready("a")
    answer = node.response(pods, "a")
    assert answer["envs"] == {VISIBLE: VOLUMES}
    assert sorted(answer["mounts"]) == [
        ("/dev/null", f"{VOLUMES}/0", False),
        ("/dev/null", f"{VOLUMES}/1", False),
    ]
    assert pods.wait_logs("a", lines=2).split() == ["0", "1"]


def test_cdi_ways(node: NodeAgent, pods: Pods) -> None:
    configured(node, strategy("cdi-annotations", "cdi-cri", cdiAnnotationPrefix="example.com/"))
    # NVIDIA's own CDI specs are not on this node: the container waits, the answer is there.
    pods.create(pod("a", container(["sleep", "1000"], image=BUSYBOX, limits={NVIDIA: 1})))
    share = node.share(pods, "a")
    answer = node.response(pods, "a")
    name = f"{KIND}={share.devices[0].uuid}"
    assert answer["cdi_devices"] == [name]
    assert answer["envs"] == {}
    annotations = dict(answer["annotations"])
    assert annotations.pop(SHARE_ANNOTATION) == share.id
    ((key, value),) = annotations.items()
    assert key.startswith("example.com/nvidia-device-plugin_")
    assert value == name


# ---- a runtime without CDI -----------------------------------------------------------------------


def test_without_cdi_containers_get_their_share_by_mounts(
    own_cluster: Callable[..., Cluster],
) -> None:
    own = own_cluster(settings=NodeSettings(has_cdi=False))
    pods = Pods(own, "default")
    with node_agent(own, SOFT, "--cdi", "off") as node:
        # Mounts that the kubelet makes are as the file system below them.
        own.node.run(["mount", "-o", "remount,noexec", "/run"])
        pods.create(pod("early", container(["true"], image=BUSYBOX, limits=part("1Gi"))))
        why = pods.wait_waiting("early", "CreateContainerConfigError")
        assert "/run/allotment is mounted noexec" in why
        own.node.run(["mount", "-o", "remount,exec", "/run"])
        limits = {"one": "1Gi", "two": "2Gi", "three": "3Gi"}
        for name, memory in limits.items():
            init = container(["true"], image=BUSYBOX, name="init", limits=part("9Gi"))
            body = pod(
                name,
                container(burn_and_stay("512Mi"), limits=part(memory)),
                initContainers=[init],
                restart="Always",
            )
            pods.create(body)
        pods.wait_phase("early", "Succeeded")
        for number, name in enumerate(limits, start=1):
            assert burnt(pods, name).total_bytes == number * GIB
            answer = node.response(pods, name)
            assert answer["cdi_devices"] == []
            assert answer["annotations"][SHARE_ANNOTATION] in answer["mounts"][0][0]
        assert node.figure("cdi_fallback") >= len(limits)
        assert node.specs() == set()
        node.wait_exact()
        # A container that starts again finds its share in the same place.
        before = container_id(pods.wait_ready("two"))
        share = node.share(pods, "two").id
        node.kill_container(pods, "two")
        pods.wait_restarted("two")
        assert container_id(pods.get("two")) != before
        assert burnt(pods, "two").total_bytes == 2 * GIB
        assert node.share(pods, "two").id == share
        pods.delete()
        node.wait_empty()
