# SPDX-License-Identifier: Apache-2.0
"""What tests of the scheduler need of a cluster: nodes with devices, and `allot scheduler` itself.

The nodes have no kubelet: what is bound stays Pending, which is all that a scheduler can see.
"""

from __future__ import annotations

import http.client
import json
import sys
import urllib.error
import urllib.request
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, Self

from testbed.api import Json
from testbed.cluster import Cluster
from testbed.pods import Pods, container, pod
from testbed.sandbox import Process
from testbed.waiting import tail, wait_until

from allotment.kube.inventories import DEVICES, encode
from allotment.model.clusters import NodeDevice, NodeInventory

GIB = 1 << 30
PORT = 9447
PLACEMENT = "allotment.dev/placement"

EVERY_NAME = ("default-scheduler", "allotment-scheduler", "kai-scheduler", "volcano")
"""Profiles for pods that name another system's scheduler: nothing in them has to change."""

SCHEDULER_CONFIG = """\
apiVersion: kubescheduler.config.k8s.io/v1
kind: KubeSchedulerConfiguration
clientConnection: {{kubeconfig: "{{kubeconfig}}", qps: 2000, burst: 4000}}
leaderElection: {{leaderElect: false}}
percentageOfNodesToScore: 100
{profiles}extenders:
  - urlPrefix: http://127.0.0.1:{port}
    filterVerb: filter
    prioritizeVerb: prioritize
    bindVerb: bind
    preemptVerb: preempt
    weight: 1
    nodeCacheCapable: {by_name}
    httpTimeout: 30s
    managedResources:
      - name: allotment.dev/gpu
        ignoredByScheduler: false
"""


def scheduler_config(
    *, port: int = PORT, by_name: bool = True, profiles: Sequence[str] = ()
) -> str:
    """A KubeSchedulerConfiguration that asks the extender at this port, for these schedulers."""
    named = "".join(f"  - schedulerName: {each}\n" for each in profiles)
    return SCHEDULER_CONFIG.format(
        port=port, by_name=str(by_name).lower(), profiles=f"profiles:\n{named}" if named else ""
    )


def inventory(
    name: str, *, devices: int, memory: int = 80 * GIB, model: str = "A100", shares: int = 63
) -> NodeInventory:
    """A node with so many equal devices."""
    return NodeInventory(
        name=name,
        devices=tuple(
            NodeDevice(
                uuid=f"GPU-{name}-{number}",
                model=model,
                memory_bytes=memory,
                index=number,
                max_shares=shares,
            )
            for number in range(devices)
        ),
    )


def capacity(node: NodeInventory) -> dict[str, str]:
    """What the node's status offers, as the agent writes it."""
    number = len(node.devices)
    return {
        "allotment.dev/gpu": str(sum(each.max_shares for each in node.devices)),
        "allotment.dev/gpu-memory": str(sum(each.memory_bytes for each in node.devices)),
        "allotment.dev/gpu-compute": str(100 * number),
    }


def add_gpu_nodes(
    cluster: Cluster, nodes: Sequence[NodeInventory], *, cpu: str = "64", memory: str = "512Gi"
) -> None:
    """Makes nodes that exist in the API server alone, with their inventories."""

    def add(node: NodeInventory) -> None:
        amounts = {
            "cpu": cpu,
            "memory": memory,
            "pods": "500",
            "ephemeral-storage": "1Ti",
            **capacity(node),
        }
        metadata = {
            "name": node.name,
            "labels": {"kubernetes.io/hostname": node.name},
            "annotations": {DEVICES: encode(node)},
        }
        status = {
            "capacity": amounts,
            "allocatable": amounts,
            "conditions": [{"type": "Ready", "status": "True", "reason": "Fake"}],
        }
        body = {"apiVersion": "v1", "kind": "Node", "metadata": metadata, "status": status}
        cluster.api.post("/api/v1/nodes", body)

    with ThreadPoolExecutor(8) as pool:
        for _ in pool.map(add, nodes):
            pass


def gpu_pod(
    name: str,
    *,
    gpus: int = 1,
    memory: str | None = "8Gi",
    compute: int | None = 10,
    cpu: str = "100m",
    annotations: Mapping[str, str] | None = None,
    **fields: Any,  # noqa: ANN401 - any other field of a pod's spec, as the API spells it
) -> Json:
    """A pod that asks for a part of each of some GPUs; sums, as the resources are."""
    limits: dict[str, str | int] = {"cpu": cpu, "allotment.dev/gpu": gpus}
    if memory is not None:
        limits["allotment.dev/gpu-memory"] = memory
    if compute is not None:
        limits["allotment.dev/gpu-compute"] = compute
    return pod(name, container(["sleep"], limits=limits), annotations=annotations, **fields)


@contextmanager
def pods_without_kubelet(cluster: Cluster, namespace: str) -> Iterator[Pods]:
    """The pods of a namespace that is made, on nodes where no kubelet ends them."""
    made = Pods(cluster, cluster.make_namespace(namespace))
    yield made
    cluster.api.delete(f"/api/v1/namespaces/{namespace}/pods", gracePeriodSeconds="0")
    wait_until(lambda: not made.names(), "end of the pods")


class Scheduler:
    """`allot scheduler`, in the cluster's sandbox."""

    def __init__(
        self,
        cluster: Cluster,
        *flags: str,
        port: int = PORT,
        name: str = "allotment-scheduler",
        kubeconfig: str | None = None,
    ) -> None:
        self.cluster = cluster
        self.port = port
        self.name = name
        self.flags = flags
        self.kubeconfig = kubeconfig or str(cluster.kubeconfig)
        self.process: Process = self.start()

    def __enter__(self) -> Self:
        """Waits until it is ready."""
        self.wait_ready()
        return self

    def __exit__(self, *raised: object) -> None:
        """Ends it."""
        self.stop()

    def start(self) -> Process:
        """Starts it once more, when it has ended."""
        command = [
            *(sys.executable, "-m", "allotment", "scheduler"),
            *("--kubeconfig", self.kubeconfig),
            *("--listen", f"0.0.0.0:{self.port}"),
            *("--identity", self.name),
            *self.flags,
        ]
        with self.cluster.log(self.name).open("a", encoding="utf-8") as file:
            self.process = self.cluster.node.popen(command, stdout=file, stderr=file)
        return self.process

    def get(self, path: str) -> tuple[int, str]:
        """Ask it something; status and text, (0, why) where it does not answer."""
        url = f"http://{self.cluster.address}:{self.port}{path}"
        try:
            with urllib.request.urlopen(url, timeout=5) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()
        except (OSError, http.client.HTTPException) as error:
            return 0, str(error)

    def wait_ready(self, *, timeout_s: float = 60) -> None:
        """Waits until it answers kube-scheduler."""
        wait_until(
            lambda: self.get("/leading")[0] == self.get("/readyz")[0] == 200,
            f"readiness of {self.name}",
            timeout_s=timeout_s,
            explain=lambda: (
                f"{self.get('/readyz')} {self.get('/leading')}\n{tail(self.cluster.log(self.name))}"
            ),
        )

    def restart(self, number: int) -> None:
        """Ends it by a signal, and starts it anew."""
        self.process.stop(number=number)
        self.start()

    def stop(self, number: int = 15) -> None:
        """Ends it."""
        self.process.stop(number=number)

    def figure(self, name: str) -> float:
        """One line of its figures, as it is written there."""
        for line in self.get("/metrics")[1].splitlines():
            if line.startswith(f"{name} "):
                return float(line.split()[-1])
        return 0.0


def placements(items: Sequence[Json]) -> dict[str, Json]:
    """The placements of pods that are bound, by their names."""
    return {
        item["metadata"]["name"]: json.loads(item["metadata"]["annotations"][PLACEMENT])
        for item in items
        if item["spec"].get("nodeName") and PLACEMENT in (item["metadata"].get("annotations") or {})
    }


def taken(items: Sequence[Json]) -> dict[str, tuple[int, int]]:
    """Memory (bytes) and compute (basis points) that is given of each device, by its UUID."""
    sums: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for placement in placements(items).values():
        for part in placement["containers"].values():
            for uuid in part["devices"]:
                sums[uuid][0] += part["memory"]
                sums[uuid][1] += part.get("guarantee", 0)
    return {uuid: (memory, compute) for uuid, (memory, compute) in sums.items()}
