# SPDX-License-Identifier: Apache-2.0
"""ResourceClaims of MIG slices, which are cut when a pod needs them."""

from __future__ import annotations

from claims import DRIVER, claim, claiming, install_classes, published
from stories import burn_and_stay, burnt, node_agent
from test_dynamic_mig import DYNAMIC, MACHINE, SMALL, SMALL_BYTES
from testbed.cluster import Cluster
from testbed.pods import Pods
from testbed.waiting import tail, wait_until


def test_slices_are_cut_for_claims(cluster: Cluster, pods: Pods) -> None:
    install_classes(cluster)
    with node_agent(cluster, DYNAMIC % "0s", simulated=MACHINE) as agent:
        wait_until(
            lambda: any("-mig-" in each["name"] for each in published(cluster)),
            "places for slices",
            explain=lambda: tail(cluster.log("agent")),
        )
        profile = f"device.attributes['{DRIVER}'].profile == '{SMALL}'"
        exactly = {
            "deviceClassName": "mig.allotment.dev",
            "selectors": [{"cel": {"expression": profile}}],
        }
        for name, memory in (("modest", "1Gi"), ("greedy", "12Gi")):
            claim(pods, name, {"name": "slice", "exactly": exactly})
            pods.create(claiming(name, burn_and_stay(memory), name))
        modest, greedy = (burnt(pods, name) for name in ("modest", "greedy"))
        assert (modest.total_bytes, modest.errors) == (SMALL_BYTES, ())
        assert greedy.total_bytes == SMALL_BYTES > greedy.got_bytes
        assert {*greedy.errors} == {"CUDA_ERROR_OUT_OF_MEMORY"}
        assert {each.devices[0].profile for each in agent.shares()} == {SMALL}
        pods.delete()
        wait_until(lambda: not agent.shares(), "end of the shares")
