# SPDX-License-Identifier: Apache-2.0
"""MPS on a node whose driver has protocol 3: what a container sees of its daemon, and can undo."""

from __future__ import annotations

import contextlib
import json
import signal
from collections.abc import Iterator
from typing import Any

import pytest
from mps_daemons import CLIENT, HALF_OF_AN_A100, HALVES, RPC_FAILURE, Gpus
from stories import NVIDIA, NodeAgent, node_agent
from testbed.api import ApiError
from testbed.cluster import Cluster
from testbed.pods import Pods, container, pod
from testbed.waiting import wait_until

UNDONE = 'env CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=100 python3 -c "$0"'


@pytest.fixture(scope="module")
def node(cluster: Cluster) -> Iterator[NodeAgent]:
    description = cluster.state / "machine.yaml"
    description.write_text("driver: 615.71.09\ngpus: [a100-80gb]\n", "utf-8")
    with node_agent(cluster, HALVES, simulated=str(description)) as agent:
        cluster.wait_allocatable(NVIDIA, 2)
        yield agent
        Gpus(agent).wait_stopped()


def test_a_container_is_held_by_its_namespace_also_by_the_next_daemon(
    node: NodeAgent, pods: Pods
) -> None:
    script = f"ls $CUDA_MPS_PIPE_DIRECTORY; {UNDONE} hold; {UNDONE} spin 100 1 1"
    command = ["sh", "-c", script, CLIENT]
    pods.create(pod("kept", container(command, limits={NVIDIA: 1})))

    def said(lines: int) -> list[str]:
        def read() -> list[str] | None:
            with contextlib.suppress(ApiError):  # not started
                found = pods.logs("kept").splitlines()
                return found if len(found) >= lines else None
            return None

        return wait_until(read, f"{lines} lines", explain=lambda: pods.explain("kept"))

    held: dict[str, Any] = {"multiprocessors": HALF_OF_AN_A100, "is_client": True}
    files, first = said(2)
    assert files == "control"
    assert json.loads(first) == held
    (uuid,) = node.gpus()
    status = Gpus(node).status(uuid)
    assert (status.protocol, len(status.parts)) == (3, 1)
    assert status.daemon is not None
    node.cluster.node.run(["kill", f"-{int(signal.SIGKILL)}", str(status.daemon)])
    assert json.loads(said(3)[2])["code"] == RPC_FAILURE
    pods.wait_phase("kept", "Succeeded")
    *_, again, last = said(5)
    assert json.loads(again) == held
    assert json.loads(last)["seconds"] > 0
