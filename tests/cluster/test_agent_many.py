# SPDX-License-Identifier: Apache-2.0
"""Many pods: every identity right, and nothing left of them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from stories import MIB, SOFT, NodeAgent, burn_and_stay, burnt, node_agent, part
from testbed.cluster import Cluster
from testbed.images import BUSYBOX
from testbed.pods import Pods, container, pod

from allotment.ledger.leases import read_contract

SLEEP = ["sleep", "1000"]
Held = tuple[int, int]
"""Open files, threads."""
FIFTY = 50


@pytest.fixture(scope="module")
def node(cluster: Cluster) -> Iterator[NodeAgent]:
    """Four soft GPUs: 64 slots."""
    with node_agent(cluster, SOFT, simulated="a100-80gb:4") as agent:
        yield agent


def seats(node: NodeAgent) -> list[str]:
    """The shares that have a seat on some GPU."""
    folder = node.cluster.node.path("/run/allotment/devices")
    contracts = [read_contract(each) for each in folder.glob("*/contract")]
    return [seat.share_id for contract in contracts for seat in contract.seats]


def create_all(pods: Pods, bodies: list[dict[str, object]]) -> None:
    with ThreadPoolExecutor(8) as pool:
        for _ in pool.map(pods.create, bodies):
            pass


@pytest.mark.timeout(420)
def test_fifty_at_once_have_each_their_own(node: NodeAgent, pods: Pods) -> None:
    """Each has an amount that no other has, so that a mix-up shows inside."""
    memory = {f"p{number:02}": (512 + number) * MIB for number in range(FIFTY)}
    command = burn_and_stay("64Mi")
    bodies = [
        pod(name, container(command, limits=part(f"{size}"))) for name, size in memory.items()
    ]
    create_all(pods, bodies)
    seen = {name: burnt(pods, name, timeout_s=240).total_bytes for name in memory}
    assert seen == memory
    node.wait_exact()
    shares = {share.name.split("/")[1]: share for share in node.shares(pods.namespace)}
    assert {name: share.devices[0].memory_bytes for name, share in shares.items()} == memory
    assert sorted(seats(node)) == sorted(share.id for share in shares.values())
    assert node.figure("refusals") == 0
    pods.delete(timeout_s=120)
    node.wait_empty()
    assert seats(node) == []


def test_nothing_grows_with_pods_that_come_and_go(node: NodeAgent, pods: Pods) -> None:
    def cycle(count: int) -> None:
        names = [f"c{number}" for number in range(count)]
        body = container(SLEEP, image=BUSYBOX, limits=part("1Gi"))
        create_all(pods, [pod(name, body) for name in names])
        for name in names:
            pods.wait_ready(name)
        pods.delete()
        node.wait_empty()

    cycle(10)
    counted = [least_held(node)]
    # A pool that is not full yet may take another thread; what is lost is lost with each twenty.
    while len(counted) < 3 or has_grown(*counted[-3:]):
        assert len(counted) < 7, f"files and threads after ten pods each: {counted}"
        cycle(10)
        counted.append(least_held(node))
    assert seats(node) == []


def has_grown(first: Held, second: Held, third: Held) -> bool:
    return any(last > min(before) for *before, last in zip(first, second, third, strict=True))


def least_held(node: NodeAgent) -> Held:
    """What it holds at rest: a thread that is let go, or a connection, ends a moment later."""
    looks = []
    for _ in range(20):
        looks.append(held(node))
        time.sleep(0.1)
    return min(each[0] for each in looks), min(each[1] for each in looks)


def held(node: NodeAgent) -> Held:
    """The agent's open files and its threads."""
    assert node.process is not None
    folder = Path("/proc", str(node.process.pid))
    return len(list((folder / "fd").iterdir())), len(list((folder / "task").iterdir()))
