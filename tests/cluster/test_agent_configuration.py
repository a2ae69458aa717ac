# SPDX-License-Identifier: Apache-2.0
"""Configurations on a real node: NVIDIA's published examples as they are, chosen, edited, wrong.

The examples are those of the documentation of NVIDIA's device plugin (v0.20, README, "Shared Access
to GPUs") and of its GPU Operator ("Time-Slicing GPUs in Kubernetes"), with the figures from there.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import pytest
from stories import GPU, NVIDIA, SOFT, NodeAgent, node_agent, part, undisturbed
from testbed.api import Json
from testbed.cluster import Cluster
from testbed.images import BUSYBOX
from testbed.pods import Pods, container, pod
from testbed.waiting import wait_until

SLEEP = ["sleep", "1000"]
LABEL = "nvidia.com/device-plugin.config"
SHARED = "nvidia.com/gpu.shared"

# ---- as they are published -----------------------------------------------------------------------

REPLICAS_10 = """\
version: v1
sharing:
  timeSlicing:
    resources:
    - name: nvidia.com/gpu
      replicas: 10
"""

RENAMED_10 = """\
version: v1
sharing:
  timeSlicing:
    renameByDefault: true
    resources:
    - name: nvidia.com/gpu
      replicas: 10
"""

FAILS_ABOVE_ONE_10 = """\
version: v1
sharing:
  timeSlicing:
    failRequestsGreaterThanOne: true
    resources:
    - name: nvidia.com/gpu
      replicas: 10
"""

# Of the ConfigMap time-slicing-config-fine.
FINE_A100 = """\
version: v1
flags:
  migStrategy: mixed
sharing:
  timeSlicing:
    resources:
    - name: nvidia.com/gpu
      replicas: 8
    - name: nvidia.com/mig-1g.5gb
      replicas: 2
    - name: nvidia.com/mig-2g.10gb
      replicas: 2
    - name: nvidia.com/mig-3g.20gb
      replicas: 3
    - name: nvidia.com/mig-7g.40gb
      replicas: 7
"""
FINE_T4 = """\
version: v1
flags:
  migStrategy: none
sharing:
  timeSlicing:
    resources:
    - name: nvidia.com/gpu
      replicas: 4
"""

_DATA = {
    "replicas": REPLICAS_10,
    "renamed": RENAMED_10,
    "fails": FAILS_ABOVE_ONE_10,
    "a100-40gb": FINE_A100,
    "tesla-t4": FINE_T4,
    "soft": SOFT,
    "plain": "version: v1\n",
}


class Named:
    """The ConfigMap with configurations by name, and the node's label that chooses."""

    def __init__(self, node: NodeAgent) -> None:
        self.node = node
        self._api = node.cluster.api

    def put(self, data: Mapping[str, str]) -> None:
        """Makes or replaces it, with all of its data."""
        config_map(self.node.cluster, data)

    @contextmanager
    def put_for_now(self, **changed: str) -> Iterator[None]:
        """Replaces some of its data for the length of a `with`."""
        self.put({**_DATA, **changed})
        try:
            yield
        finally:
            self.put(_DATA)

    def choose(self, name: str | None) -> None:
        """Labels the node; None: takes the label away."""
        patch = {"metadata": {"labels": {LABEL: name}}}
        self._api.patch(self.node.cluster.node_path, patch)

    def wait_labels(self, **wanted: str | None) -> None:
        """Waits for labels below nvidia.com/gpu; None: it is not there."""
        self.wait_labels_of(
            {f"nvidia.com/gpu.{key.replace('_', '-')}": value for key, value in wanted.items()}
        )

    def wait_labels_of(self, wanted: Mapping[str, str | None]) -> None:
        """Waits for labels by their whole names."""

        def differing() -> dict[str, object]:
            labels = self._api.get(self.node.cluster.node_path)["metadata"]["labels"]
            return {key: labels.get(key) for key in wanted if labels.get(key) != wanted[key]}

        wait_until(
            lambda: not differing(),
            f"labels {wanted}",
            explain=lambda: f"{differing()}\n{self.node.log_tail()}",
        )


def config_map(cluster: Cluster, data: Mapping[str, str]) -> None:
    collection = "/api/v1/namespaces/allotment-system/configmaps"
    body: Json = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": "allotment-config", "namespace": "allotment-system"},
        "data": dict(data),
    }
    if cluster.api.find(f"{collection}/allotment-config"):
        cluster.api.put(f"{collection}/allotment-config", body)
    else:
        cluster.api.post(collection, body)


@pytest.fixture(scope="module")
def configs(cluster: Cluster) -> Iterator[Named]:
    """An agent with a ConfigMap; eight GPUs, as in NVIDIA's examples."""
    cluster.allow_agent()
    config_map(cluster, _DATA)
    flags = ("--config-map", "allotment-system/allotment-config", "--default-config", "plain")
    with node_agent(cluster, None, *flags, simulated="a100-40gb:8") as node:
        made = Named(node)
        yield made
        made.choose(None)


# README: "If this configuration were applied to a node with 8 GPUs on it, the plugin would now
# advertise 80 nvidia.com/gpu resources to Kubernetes instead of 8." And of the labels: the product
# has the suffix -SHARED where the resource is not renamed.
@pytest.mark.parametrize(
    ("name", "allocatable", "replicas", "suffix"),
    [
        ("replicas", {NVIDIA: 80, SHARED: 0}, "10", "-SHARED"),
        ("renamed", {NVIDIA: 0, SHARED: 80}, "10", ""),
        ("a100-40gb", {NVIDIA: 64, SHARED: 0}, "8", "-SHARED"),
        ("tesla-t4", {NVIDIA: 32, SHARED: 0}, "4", "-SHARED"),
        ("plain", {NVIDIA: 8, SHARED: 0}, "1", ""),
    ],
)
def test_nvidias_examples(
    configs: Named, name: str, allocatable: Mapping[str, int], replicas: str, suffix: str
) -> None:
    configs.choose(name)
    for resource, amount in allocatable.items():
        if amount or wait_known(configs.node.cluster, resource):
            configs.node.cluster.wait_allocatable(resource, amount)
    strategy = "none" if replicas == "1" else "time-slicing"
    configs.wait_labels(
        count="8",
        replicas=replicas,
        product=f"NVIDIA-A100-SXM4-40GB{suffix}",
        sharing_strategy=strategy,
        memory="40960",
        family="ampere",
    )


def wait_known(cluster: Cluster, resource: str) -> bool:
    """Whether the node's status names a resource at all: what was never offered is not there."""
    return resource in cluster.api.get(cluster.node_path)["status"]["allocatable"]


def test_requests_above_one_fail_where_the_example_says_so(configs: Named, pods: Pods) -> None:
    configs.choose("fails")
    configs.node.cluster.wait_allocatable(NVIDIA, 80)
    for name, count in (("one", 1), ("two", 2)):
        pods.create(pod(name, container(SLEEP, image=BUSYBOX, limits={NVIDIA: count})))
    pods.wait_event(
        "two",
        reason="UnexpectedAdmissionError",
        contains="maximum request size for shared resources is 1; found 2",
    )
    pods.wait_ready("one")


# ---- changes -------------------------------------------------------------------------------------


def test_label_and_edit_are_applied_at_once_and_disturb_nobody(configs: Named, pods: Pods) -> None:
    node, cluster = configs.node, configs.node.cluster
    configs.choose("plain")
    cluster.wait_allocatable(NVIDIA, 8)
    pods.create(pod("whole", container(SLEEP, image=BUSYBOX, limits={NVIDIA: 2})))
    with undisturbed(pods, "whole"):
        share = node.share(pods, "whole")
        configs.choose("soft")
        cluster.wait_allocatable(GPU, 128)
        pods.create(pod("part", container(SLEEP, image=BUSYBOX, limits=part("4Gi"))))
        pods.wait_ready("part")
        # Not on a GPU that somebody has as a whole.
        assert not {each.uuid for each in node.share(pods, "part").devices} & {
            each.uuid for each in share.devices
        }
        edited = SOFT + "  sharesPerDevice: 4\n"
        # A figure for how soon is in bench/.
        with undisturbed(pods, "part"), configs.put_for_now(soft=edited):
            cluster.wait_allocatable(GPU, 32)
            configs.choose("plain")
            cluster.wait_allocatable(NVIDIA, 8)
        assert node.share(pods, "whole") == share
    node.wait_exact()


WRONG = """\
version: v1
sharing:
  timeSlicing:
    resources:
    - name: nvidia.com/gpu
      replicas: 1
"""


def test_wrong_one_is_refused_and_the_last_good_one_stays(configs: Named, pods: Pods) -> None:
    node, cluster = configs.node, configs.node.cluster
    configs.choose("replicas")
    cluster.wait_allocatable(NVIDIA, 80)
    node.wait_figure("config_valid", 1)
    with configs.put_for_now(replicas=WRONG):
        told = node.wait_node_event(
            "ConfigInvalid", "sharing.timeSlicing.resources[0]", "number of replicas must be >= 2"
        )
        assert "allotment-system/allotment-config, replicas" in told
        assert "the previous configuration stays in force" in told
        wait_until(lambda: node.figure("config_valid") == 0, "word of it in the figures")
        node.wait_figure("config_loads", 1, result="invalid")
        cluster.wait_allocatable(NVIDIA, 80)
        # It works as before, and a new agent keeps to it as well.
        pods.create(pod("a", container(SLEEP, image=BUSYBOX, limits={NVIDIA: 1})))
        pods.wait_ready("a")
    node.wait_figure("config_valid", 1)
    configs.choose("no-such")
    told = node.wait_node_event("ConfigInvalid", "specified config no-such does not exist")
    assert "tesla-t4" in told
    cluster.wait_allocatable(NVIDIA, 80)
    configs.choose("plain")
    cluster.wait_allocatable(NVIDIA, 8)
    node.wait_figure("config_valid", 1)


def test_mode_for_each_gpu_by_rules(configs: Named, pods: Pods) -> None:
    node, cluster = configs.node, configs.node.cluster
    gpus = node.gpus()
    rules = {
        "version": "v1",
        "sharing": {"timeSlicing": {"resources": [{"name": NVIDIA, "replicas": 2}]}},
        "allotment": {
            "devices": [
                {"match": {"index": [0]}, "mode": "exclusive"},
                {"match": {"uuid": gpus[1:3]}, "mode": "timeslice"},
                {"match": {"index": [3]}, "mode": "soft"},
            ]
        },
    }
    configs.put({**_DATA, "rules": json.dumps(rules)})
    configs.choose("rules")
    # One as a whole, six twice, and one in parts: replicas of another kind it cannot have.
    cluster.wait_allocatable(NVIDIA, 1 + 2 * 6)
    cluster.wait_allocatable(GPU, 16)
    pods.create(pod("part", container(SLEEP, image=BUSYBOX, limits=part("4Gi"))))
    pods.wait_ready("part")
    assert [each.uuid for each in node.share(pods, "part").devices] == [gpus[3]]
    modes = {"exclusive": "1", "soft": "1", "timeslice": "6"}
    configs.wait_labels_of(
        {f"allotment.dev/gpu.mode.{mode}": count for mode, count in modes.items()}
    )
    node.wait_exact()
