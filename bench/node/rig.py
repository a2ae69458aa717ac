# SPDX-License-Identifier: Apache-2.0
"""A real kubelet, with the node agent beside it on simulated GPUs.

What the kubelet believes is read from its checkpoint and its own figures; what the agent did, from
the agent's. Calls of the bench go to the very sockets that the kubelet calls.
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import grpc
from claims import API as CLAIMS_API
from stories import PLAIN, SOFT, NodeAgent, container_id, node_agent, part
from testbed.api import Json
from testbed.cluster import Cluster, NodeSettings
from testbed.images import BUSYBOX
from testbed.pods import Pods, container, pod
from testbed.versions import KUBERNETES
from testbed.waiting import wait_until

from allotment.agent.kubelet.services import CHANNEL_OPTIONS
from bench.harness.machine import cpu_seconds
from bench.harness.options import Options
from bench.harness.quantiles import quantile

__all__ = ["PLAIN", "SOFT", "NodeRig", "Usage", "node_rig", "two", "usage_of", "watching"]

MIB: Final = 1024**2
SLEEP: Final = ("sleep", "10000")
_PLUGINS: Final = "/var/lib/kubelet/device-plugins"
_CHECKPOINT: Final = f"{_PLUGINS}/kubelet_internal_checkpoint"
_AT_ONCE: Final = 8
_LABELS: Final = re.compile(r'(\w+)="([^"]*)"')


def two(values: Sequence[float], unit: str = "ms") -> str:
    """Write median and 99th percentile."""
    return f"{quantile(values, 0.5):.3g} / {quantile(values, 0.99):.3g} {unit}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """What a process has used, and has."""

    cpu_s: float
    rss_bytes: int
    pss_bytes: int
    threads: int


def usage_of(pid: int) -> Usage:
    """Read the kernel's accounts of a process."""
    stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    memory = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="utf-8")
    sizes = dict(re.findall(r"^(\w+):\s+(\d+) kB", memory, re.MULTILINE))
    return Usage(
        cpu_s=cpu_seconds(pid),
        rss_bytes=int(sizes["Rss"]) * 1024,
        pss_bytes=int(sizes["Pss"]) * 1024,
        threads=int(stat[17]),
    )


@dataclass(kw_only=True)
class NodeRig:
    """A cluster with one node, and its pods."""

    cluster: Cluster
    pods: Pods
    is_quick: bool
    is_verbose: bool
    _crowd: dict[str, int] = field(default_factory=dict)

    @property
    def facts(self) -> dict[str, str]:
        """Return what is under test."""
        cluster = f"Kubernetes {KUBERNETES}, one node, tests/cluster/testbed"
        return {"driver": "simulated", "cluster": cluster}

    # ---- the agent

    @contextmanager
    def agent(self, config: str | None, *flags: str, simulated: str) -> Iterator[NodeAgent]:
        """Run the agent for the length of a `with`, with a fresh state folder and no slices."""
        self.cluster.api.delete(f"{CLAIMS_API}/resourceslices")
        with node_agent(self.cluster, config, *flags, simulated=simulated) as node:
            try:
                yield node
            finally:
                self.empty(node)

    @contextmanager
    def call(self, resource: str) -> Iterator[grpc.Channel]:
        """Open a channel to the agent's socket of a resource."""
        address = f"unix:{self.socket(resource)}"
        with grpc.insecure_channel(address, options=CHANNEL_OPTIONS) as channel:
            yield channel

    def socket(self, resource: str) -> Path:
        """Return where the agent's socket of a resource is."""
        return self.cluster.node.path(f"{_PLUGINS}/allotment-{resource.replace('/', '_')}.sock")

    # ---- pods

    def body(self, name: str, limits: Mapping[str, str] | None = None) -> Json:
        """Describe a pod that sleeps."""
        return pod(name, container(SLEEP, image=BUSYBOX, limits=limits))

    def create(self, bodies: Sequence[Json]) -> None:
        """Create pods at once."""
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            list(pool.map(self.pods.create, bodies))

    def wait_ready(self, names: Sequence[str], *, timeout_s: float = 300) -> dict[str, Json]:
        """Wait until all of these are Ready; what they are then."""
        wanted = set(names)
        path = f"/api/v1/namespaces/{self.pods.namespace}/pods"

        def ready() -> dict[str, Json] | None:
            # From the API server's cache: the bench must not be what keeps it busy.
            found = self.cluster.api.items(path, resourceVersion="0")
            there = {each["metadata"]["name"]: each for each in found if _is_ready(each)}
            return there if wanted <= there.keys() else None

        return wait_until(
            ready,
            f"{len(wanted)} Ready pods",
            timeout_s=timeout_s,
            every_s=0.15,
            explain=lambda: "\n".join(map(self.pods.explain, sorted(wanted)[:3])),
        )

    def crowd(self, node: NodeAgent, count: int) -> dict[str, int]:
        """Have so many pods on the node, each with its own share; their limits, in bytes."""
        while len(self._crowd) < count:
            first = len(self._crowd)
            some = {f"s{first + each:03}": (512 + first + each) * MIB for each in range(15)}
            some = dict(list(some.items())[: count - first])
            self.create([self.body(name, part(f"{size}")) for name, size in some.items()])
            self._crowd |= some
            self.wait_ready(list(self._crowd))
        node.wait_exact()
        return dict(self._crowd)

    def empty(self, node: NodeAgent | None = None) -> None:
        """Remove all pods, and wait until nothing of them is left."""
        self._crowd.clear()
        self.pods.delete(timeout_s=180)
        if node is not None and node.process is not None and node.process.is_running:
            wait_until(lambda: not node.shares(), "end of all shares", timeout_s=60)

    def seen_inside(self, found: Mapping[str, Json]) -> dict[str, bytes]:
        """Read the policy that each pod's container has at its place, by the pod's name."""
        process_of: dict[str, int] = {}
        for folder in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if folder.name.isdigit() and SLEEP[0].encode() in (folder / "cmdline").read_bytes():
                    group = (folder / "cgroup").read_text("ascii").partition("\n")[0]
                    process_of[group.rpartition("/")[2]] = int(folder.name)
        inside = {}
        for name, each in found.items():
            pid = process_of[container_id(each).rpartition("/")[2]]
            (policy,) = Path(f"/proc/{pid}/root/run/allotment/share").glob("*/policy")
            inside[name] = policy.read_bytes()
        return inside

    # ---- what the kubelet knows

    def registered(self, resource: str) -> int:
        """Count a resource's healthy devices in the kubelet's checkpoint."""
        try:
            document = json.loads(self.cluster.node.path(_CHECKPOINT).read_bytes())
        except (OSError, ValueError):  # it is being written
            return -1
        return len(document["Data"]["RegisteredDevices"].get(resource) or ())

    def allocatable(self, resource: str) -> int:
        """Read how many of a resource the node's object offers."""
        status = self.cluster.api.get(self.cluster.node_path)["status"]
        return int(status.get("allocatable", {}).get(resource, "0"))

    def kubelet_figure(self, name: str, resource: str) -> float:
        """Read one of the kubelet's figures."""
        text = self.cluster.api.text(f"{self.cluster.node_path}/proxy/metrics")
        for line in text.splitlines():
            if line.startswith(f"{name}{{"):
                labels, _, value = line.partition("{")[2].rpartition(" ")
                if dict(_LABELS.findall(labels)).get("resource_name") == resource:
                    return float(value)
        return 0.0

    def processors(self, agent: NodeAgent | None = None) -> dict[str, float]:
        """Read what the parts of the cluster have used so far, in seconds."""
        pids = {name: each.process.pid for name, each in self.cluster.components.items()}
        if agent is not None and agent.process is not None:
            pids["agent"] = agent.process.pid
        return {name: usage_of(pid).cpu_s for name, pid in pids.items()}

    def log(self, text: str) -> None:
        """Return what happened, with --verbose."""
        if self.is_verbose:
            print(f"    {text}", file=sys.stderr, flush=True)


def _is_ready(found: Json) -> bool:
    conditions = found.get("status", {}).get("conditions", ())
    return any(each["type"] == "Ready" and each["status"] == "True" for each in conditions)


@contextmanager
def node_rig(options: Options) -> Iterator[NodeRig]:
    """Start a cluster of its own, gone at the end."""
    state = Path(tempfile.mkdtemp(prefix="allotment-bench-"))
    started = time.monotonic()
    try:
        with Cluster(state=state, settings=NodeSettings(max_pods=250)) as cluster:
            pods = Pods(cluster, cluster.make_namespace("bench"))
            rig = NodeRig(
                cluster=cluster, pods=pods, is_quick=options.is_quick, is_verbose=options.is_verbose
            )
            rig.log(f"cluster up in {time.monotonic() - started:.1f} s")
            yield rig
    finally:
        shutil.rmtree(state, ignore_errors=True)


@contextmanager
def watching(look: Callable[[], int]) -> Iterator[dict[int, float]]:
    """Look all the time; when each value was seen first, in monotonic seconds."""
    seen: dict[int, float] = {}
    is_over = threading.Event()

    def watch() -> None:
        while not is_over.wait(0.02):
            seen.setdefault(look(), time.monotonic())

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield seen
    finally:
        is_over.set()
        thread.join()
