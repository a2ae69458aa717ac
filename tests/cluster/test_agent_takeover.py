# SPDX-License-Identifier: Apache-2.0
"""The agent takes the place of NVIDIA's device plugin: what runs goes on, and keeps its GPUs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from others_plugin import OthersPlugin
from stories import NVIDIA, PLAIN, NodeAgent, undisturbed
from testbed.cluster import Cluster
from testbed.images import BUSYBOX
from testbed.pods import Pods, container, pod
from testbed.waiting import wait_until

from allotment.agent.configuring import PLUGIN_FOLDER

SHOW = ["sh", "-c", "echo $NVIDIA_VISIBLE_DEVICES; sleep 1000"]


@pytest.fixture
def node(cluster: Cluster) -> Iterator[NodeAgent]:
    made = NodeAgent(cluster)
    yield made
    made.close()


@pytest.fixture
def before(cluster: Cluster, node: NodeAgent) -> Iterator[OthersPlugin]:
    """Another plugin, which offers this node's two GPUs by their UUIDs."""
    made = OthersPlugin(cluster.node.path(PLUGIN_FOLDER), node.gpus())
    made.start()
    cluster.wait_allocatable(NVIDIA, 2)
    yield made
    made.stop()


def test_pods_of_another_plugin_go_on_and_keep_their_gpu(
    cluster: Cluster, node: NodeAgent, before: OthersPlugin, pods: Pods
) -> None:
    pods.create(pod("old", container(SHOW, image=BUSYBOX, limits={NVIDIA: 1}), restart="Always"))
    pods.wait_ready("old")
    theirs = pods.wait_logs("old").strip()
    assert theirs in node.gpus()
    with undisturbed(pods, "old"):
        before.stop()
        cluster.wait_allocatable(NVIDIA, 0)
        node.start(PLAIN)
        cluster.wait_allocatable(NVIDIA, 2)
        share = node.share(pods, "old")
        assert [each.uuid for each in share.devices] == [theirs]
        assert share.mode == "exclusive"
        told = pods.wait_event("old", reason="ShareTakenOver")
        assert theirs in told["message"]
        # The GPU that is left goes to the next one, and no more than that.
        for name in ("new", "late"):
            pods.create(pod(name, container(SHOW, image=BUSYBOX, limits={NVIDIA: 1})))
        wait_until(
            lambda: (
                [each.name.split("/")[1] for each in node.shares()]
                in (["new", "old"], ["late", "old"])
            ),
            "share of one more",
            explain=node.explain,
        )
        (mine,) = (each for each in node.shares() if "/old/" not in each.name)
        assert [each.uuid for each in mine.devices] != [theirs]
    # A container of theirs that starts again does so as before: its answer is the kubelet's.
    node.kill_container(pods, "old")
    pods.wait_restarted("old")
    assert pods.wait_logs("old").strip() == theirs
    pods.delete("old")
    wait_until(
        lambda: len(node.shares()) == 2 and not any("/old/" in each.name for each in node.shares()),
        "both GPUs with new pods",
        explain=node.explain,
    )
    assert not node.figure("refusals")
