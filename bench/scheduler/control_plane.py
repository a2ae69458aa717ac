# SPDX-License-Identifier: Apache-2.0
"""A control plane with nodes without a kubelet, and pods created beforehand."""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import signal
import ssl
import threading
import time
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import msgspec
from scheduling import PORT, Scheduler, add_gpu_nodes, gpu_pod
from testbed.api import Json
from testbed.cluster import Cluster
from testbed.pods import container, pod
from testbed.sandbox import Process
from testbed.waiting import wait_until

from allotment.model.clusters import NodeInventory
from allotment.scheduler.admission.manifests import kube_configuration
from bench.scheduler.cluster_shape import Scale, Spec

_NAMES = itertools.count(1)
SHARES = "allotment-scheduler"
"""The profile for pods with shares."""
ALONE = """\
clientConnection: {kubeconfig: "{kubeconfig}", qps: 2000, burst: 4000}
leaderElection: {leaderElect: false}
"""
"""Of kube-scheduler's configuration: how it runs outside of a pod, without a second one."""


class _Metadata(msgspec.Struct):
    name: str = ""
    uid: str = ""
    namespace: str = ""
    resource_version: str = msgspec.field(default="", name="resourceVersion")


class _Spec(msgspec.Struct, rename="camel"):
    node_name: str = ""


class _Condition(msgspec.Struct):
    type: str
    status: str


class _Status(msgspec.Struct):
    conditions: list[_Condition] | None = None


class _Pod(msgspec.Struct):
    metadata: _Metadata
    spec: _Spec
    status: _Status

    @property
    def is_refused(self) -> bool:
        """Return whether kube-scheduler has reported that no node fits."""
        conditions = self.status.conditions or ()
        return any(each.type == "PodScheduled" and each.status == "False" for each in conditions)


class _Event(msgspec.Struct):
    type: str
    object: _Pod


class Watcher:
    """Notes when each pod was first seen bound. A thread with a connection of its own.

    Of pods that are not bound it hears where it is to say how many have been tried: it takes time.
    """

    def __init__(self, cluster: Cluster, *, hears_all: bool = False) -> None:
        self.seen: dict[str, float] = {}
        self.nodes: dict[str, str] = {}
        """Of the same pods."""
        self._tried: dict[str, set[str]] = defaultdict(set)
        self._refused: deque[tuple[str, str]] = deque()
        config = json.loads(cluster.kubeconfig.read_text())
        cluster_config = config["clusters"][0]["cluster"]
        context = ssl.create_default_context(cafile=cluster_config["certificate-authority"])
        address = cluster_config["server"].removeprefix("https://")
        self._connection = http.client.HTTPSConnection(address, context=context, timeout=600)
        token = config["users"][0]["user"]["token"]
        self._path = "/api/v1/pods?watch=true"
        if not hears_all:
            self._path += "&fieldSelector=spec.nodeName!="
        self._headers = {"Authorization": f"Bearer {token}"}
        self._is_closed = False
        self._answer = self._watch(self._path)
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _watch(self, path: str) -> http.client.HTTPResponse:
        self._connection.request("GET", path, headers=self._headers)
        return self._connection.getresponse()

    def _read(self) -> None:
        """Until closed. Where the API server ends the watch of a slow client, go on from there."""
        decoder = msgspec.json.Decoder(_Event)
        version = ""
        try:
            while not self._is_closed:
                while line := self._answer.readline():
                    now = time.monotonic()
                    pod = decoder.decode(line).object
                    version = pod.metadata.resource_version
                    self._note(pod, now)
                self._connection.close()
                self._answer = self._watch(f"{self._path}&resourceVersion={version}")
        except (OSError, ValueError, http.client.HTTPException, AttributeError):
            if not self._is_closed:
                raise

    def _note(self, pod: _Pod, now: float) -> None:
        name = f"{pod.metadata.namespace}/{pod.metadata.name}"
        if pod.spec.node_name:
            self.nodes[name] = pod.spec.node_name
            self.seen.setdefault(name, now)
        if not (pod.spec.node_name or pod.is_refused):
            return
        tried = self._tried[pod.metadata.namespace]
        if name not in tried and not pod.spec.node_name:
            self._refused.append((pod.metadata.namespace, pod.metadata.name))
        tried.add(name)

    def of(self, namespace: str) -> list[float]:
        """When pods of a namespace were bound, in order."""
        start = f"{namespace}/"
        return sorted(at for name, at in list(self.seen.items()) if name.startswith(start))

    def tried(self, namespace: str) -> int:
        """How many pods of a namespace are bound, or were refused at least once."""
        return len(self._tried[namespace])

    def refused(self) -> Iterator[tuple[str, str]]:
        """Namespaces and names of pods that were refused when they were tried first, each once."""
        with contextlib.suppress(IndexError):
            while True:
                yield self._refused.popleft()

    def close(self) -> None:
        """End it."""
        self._is_closed = True
        if self._connection.sock is not None:
            self._connection.sock.close()


class ControlPlane:
    """The cluster and what is asked of it."""

    def __init__(
        self, cluster: Cluster, inventories: Sequence[NodeInventory], *, hears_all: bool = False
    ) -> None:
        self.cluster = cluster
        self.inventories = inventories
        self.watcher = Watcher(cluster, hears_all=hears_all)

    def namespace(self) -> str:
        """Create a namespace."""
        return self.cluster.make_namespace(f"bench-{next(_NAMES)}")

    def create(self, namespace: str, bodies: Sequence[Json]) -> None:
        """Make pods, as fast as the API server takes them."""
        path = f"/api/v1/namespaces/{namespace}/pods"
        with ThreadPoolExecutor(8) as pool:
            for _ in pool.map(lambda body: self.cluster.api.post(path, body), bodies):
                pass

    def bound_at(self, namespace: str, number: int, *, timeout_s: float) -> list[float]:
        """When so many pods of a namespace were bound."""

        def all_of_them() -> list[float] | None:
            found = self.watcher.of(namespace)
            return found if len(found) >= number else None

        return wait_until(
            all_of_them,
            f"{number} bound pods",
            timeout_s=timeout_s,
            every_s=0.2,
            explain=lambda: f"{len(self.watcher.of(namespace))} are",
        )

    def configure(self, config: str | None) -> None:
        """Restart kube-scheduler with another configuration; None: stock. It knows all nodes."""
        self.cluster.configure_scheduler(config)
        namespace = self.namespace()
        self.create(namespace, [plain_body("first")])
        self.bound_at(namespace, 1, timeout_s=60)
        self.clear(namespace)

    @contextlib.contextmanager
    def held(self, placer: Process | None = None) -> Iterator[None]:
        """Stop kube-scheduler or another one. It takes pods in order, if it is not restarted."""
        process = placer or self.cluster.components["kube-scheduler"].process
        process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            process.send_signal(signal.SIGCONT)

    def pods_per_second(self, bodies: Sequence[Json], *, timeout_s: float = 300) -> float:
        """Create pods while kube-scheduler is stopped; return how many it then binds a second."""
        namespace = self.namespace()
        with self.held():
            self.create(namespace, bodies)
        times = self.bound_at(namespace, len(bodies), timeout_s=timeout_s)
        return (len(times) - 1) / (times[-1] - times[0])

    def items(self, namespace: str | None = None) -> list[Json]:
        """Pods as the API server has them."""
        where = f"/namespaces/{namespace}" if namespace else ""
        return self.cluster.api.items(f"/api/v1{where}/pods")

    def delete(self, namespace: str) -> None:
        """Remove all pods of a namespace at once."""
        path = f"/api/v1/namespaces/{namespace}/pods"
        self.cluster.api.delete(path, gracePeriodSeconds="0")

    def clear(self, namespace: str) -> None:
        """Remove all pods of a namespace, and wait for it."""
        self.delete(namespace)
        wait_until(lambda: not self.items(namespace), "empty namespace", timeout_s=60)


def gpu_body(name: str, spec: Spec) -> Json:
    """A pod that asks for GPUs."""
    return gpu_pod(
        name,
        gpus=spec.gpus,
        memory=f"{spec.memory * spec.gpus}Gi",
        compute=spec.compute * spec.gpus,
        cpu=f"{spec.cpu}m",
        schedulerName=SHARES,
    )


def plain_body(name: str) -> Json:
    """A pod that asks for CPU alone."""
    return pod(name, container(["sleep"], limits={"cpu": "100m"}))


def configuration(*, port: int = PORT, ranks_all: bool = False) -> str:
    """What `--print-config` prints, for a kube-scheduler that runs alone and outside of a pod."""
    printed = kube_configuration(
        host="127.0.0.1", port=port, tls={}, scheduler=SHARES, has_plain_pods=ranks_all
    )
    return printed + ALONE


@contextlib.contextmanager
def control_plane(
    inventories: Sequence[NodeInventory],
    *,
    port: int = PORT,
    hears_all: bool = False,
    ranks_all: bool = False,
) -> Iterator[ControlPlane]:
    """A running control plane with these nodes; no scheduler of ours yet.

    `hears_all`: of the watcher. `ranks_all`: ours is asked about pods without GPUs as well.
    """
    config = configuration(port=port, ranks_all=ranks_all)
    alike: dict[tuple[int, int], list[NodeInventory]] = defaultdict(list)
    for each in inventories:
        alike[each.cpu_milli, each.memory_bytes].append(each)
    with Cluster(settings=None, scheduler_config=config) as cluster:
        for (cpu, memory), some in alike.items():
            add_gpu_nodes(cluster, some, cpu=f"{cpu}m", memory=str(memory))
        plane = ControlPlane(cluster, inventories, hears_all=hears_all)
        try:
            yield plane
        finally:
            plane.watcher.close()


def scheduler_flags(scale: Scale) -> tuple[str, ...]:
    """How the scheduler is started."""
    return (
        *("--policy", scale.policy, "--gpu-policy", scale.policy),
        *("--candidates", str(scale.candidates)),
    )


@contextlib.contextmanager
def scheduling(plane: ControlPlane, scale: Scale, *flags: str) -> Iterator[Scheduler]:
    """`allot scheduler`, ready."""
    scheduler = Scheduler(plane.cluster, *scheduler_flags(scale), *flags)
    try:
        scheduler.wait_ready()
        yield scheduler
    finally:
        scheduler.stop()
