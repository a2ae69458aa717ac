# SPDX-License-Identifier: Apache-2.0
"""Many claims at once: each has its own limit, and nothing is left of them."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from claims import API, claim, claiming, install_classes, share, wait_for_pool
from stories import MIB, SOFT, NodeAgent, burn_and_stay, burnt, node_agent
from testbed.cluster import Cluster
from testbed.pods import Pods
from testbed.waiting import wait_until

AT_ONCE = 8


@pytest.fixture(scope="module")
def node(cluster: Cluster) -> Iterator[NodeAgent]:
    """Eight GPUs of 80 GiB."""
    install_classes(cluster)
    with node_agent(cluster, SOFT, simulated="a100-80gb:8") as agent:
        wait_for_pool(cluster, agent.gpus())
        yield agent


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("count", "rounds"), [(20, 1), pytest.param(60, 3, marks=pytest.mark.thorough)]
)
def test_claims_at_once_have_each_their_own(
    node: NodeAgent, pods: Pods, count: int, rounds: int
) -> None:
    """Each has an amount that no other has, so that a mix-up shows inside."""
    claims = f"{API}/namespaces/{pods.namespace}/resourceclaims"
    for number in range(rounds):
        memory = {f"c{number}-{each:02}": (512 + number + each) * MIB for each in range(count)}

        def start(item: tuple[str, int]) -> None:
            name, size = item
            claim(pods, name, share(memory=f"{size // MIB}Mi"))
            pods.create(claiming(name, burn_and_stay("64Mi"), name))

        with ThreadPoolExecutor(AT_ONCE) as pool:
            list(pool.map(start, memory.items()))
        seen = {name: burnt(pods, name, timeout_s=300).total_bytes for name in memory}
        assert seen == memory
        shares = {each.owner.pod: each for each in node.shares(pods.namespace) if each.owner}
        assert {name: each.devices[0].memory_bytes for name, each in shares.items()} == memory
        assert node.figure("refusals") == 0
        pods.delete(timeout_s=300)
        wait_until(lambda: not node.shares(), "end of the shares", explain=node.explain)
        node.cluster.api.delete(claims)
        wait_until(lambda: not node.cluster.api.items(claims), "end of the claims")
