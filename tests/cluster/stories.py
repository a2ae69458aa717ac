# SPDX-License-Identifier: Apache-2.0
"""What the stories of the agent have in common: an agent to start and kill, pods that burn.

    node = NodeAgent(cluster)
    node.start(SOFT)
    pods.create(pod("a", container(burn("5Gi"), limits=part("4Gi"))))
    assert burnt(pods, "a").total_bytes == 4 * GIB

What is seen of the agent's doings is read where others read it: share records, CDI specs, the
kubelet's checkpoint, the API server, the agent's own figures.
"""

from __future__ import annotations

import base64
import contextlib
import http.client
import json
import os
import re
import signal
import sys
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from testbed.api import ApiError, Json
from testbed.cluster import Cluster
from testbed.pods import Pods, container, pod
from testbed.sandbox import Process
from testbed.waiting import PATIENCE_S, TestbedError, tail, wait_until

from allotment.agent.kubelet.checkpoint import KubeletCheckpoint
from allotment.agent.kubelet.proto.deviceplugin_pb2 import ContainerAllocateResponse
from allotment.agent.protocols import CheckpointEntry
from allotment.model.errors import StateError
from allotment.model.shares import Share
from allotment.shares.record import read_record

MIB: Final = 1024**2
GIB: Final = 1024**3

GPU: Final = "allotment.dev/gpu"
GPU_MEMORY: Final = "allotment.dev/gpu-memory"
GPU_COMPUTE: Final = "allotment.dev/gpu-compute"
NVIDIA: Final = "nvidia.com/gpu"

TWO_GPUS: Final = "a100-80gb:2"

SOFT: Final = """\
version: v1
allotment:
  devices:
    - mode: soft
"""
"""Every GPU in parts of any size."""

PLAIN: Final = "version: v1\n"
"""As NVIDIA's plugin without a file: each GPU for one container."""

_CHECKPOINT: Final = "/var/lib/kubelet/device-plugins/kubelet_internal_checkpoint"
_METRIC: Final = re.compile(r"^(?P<name>[a-z_]+)(?:\{(?P<labels>[^}]*)\})? (?P<value>\S+)$")


# ---- pods ----------------------------------------------------------------------------------------


def part(memory: str | None = None, *, gpus: int = 1, compute: int | None = None) -> dict[str, str]:
    """The limits of a container that has parts of GPUs."""
    limits = {GPU: str(gpus)}
    if memory is not None:
        limits[GPU_MEMORY] = memory
    if compute is not None:
        limits[GPU_COMPUTE] = str(compute)
    return limits


def on(uuid: str, container_name: str = "main") -> dict[str, str]:
    """What a scheduler writes to have a container on this GPU."""
    placement = {"version": 1, "containers": {container_name: {"devices": [uuid]}}}
    return {"allotment.dev/placement": json.dumps(placement)}


def burn(memory: str, *flags: str, seconds: float = 0) -> list[str]:
    """A program that takes memory, holds it, and says in JSON what it got."""
    return ["allot", "burn", "--memory", memory, "--seconds", f"{seconds:g}", *flags, "-o", "json"]


def burn_and_stay(memory: str) -> list[str]:
    """As `burn`, in a container that stays; `burnt` reads it once it has spoken."""
    return ["sh", "-c", f"{' '.join(burn(memory))}; exec sleep 1000"]


@dataclass(frozen=True, slots=True)
class Burnt:
    """What a burn in a container found."""

    uuid: str
    total_bytes: int
    """Of its device, as the driver told it: a share's limit."""
    got_bytes: int
    errors: tuple[str, ...]
    kernels: int
    wall_seconds: float


def burnt(
    pods: Pods, name: str, container_name: str = "main", *, timeout_s: float = PATIENCE_S
) -> Burnt:
    """Waits until a burn in a container has ended and returns what it said."""

    def said() -> Json | None:
        with contextlib.suppress(ApiError, ValueError):  # not started, or in the middle of it
            document: Json = json.loads(pods.logs(name, container_name))
            return document
        return None

    document = wait_until(
        said,
        f"report of a burn in {name}/{container_name}",
        timeout_s=timeout_s,
        every_s=0.2,
        explain=lambda: f"{pods.explain(name)}\n{tail(pods.cluster.log('agent'))}",
    )
    process = document["processes"][0]
    return Burnt(
        uuid=process["device"]["uuid"],
        total_bytes=process["device"]["total_bytes"],
        got_bytes=document["got_bytes"],
        errors=tuple(each["name"] for each in process["errors"]),
        kernels=document["kernels"],
        wall_seconds=document["wall_seconds"],
    )


def exit_code(found: Json, container_name: str = "main") -> int:
    """What a container ended with."""
    for status in found["status"]["containerStatuses"]:
        if status["name"] == container_name:
            return int(status["state"]["terminated"]["exitCode"])
    raise TestbedError(f"no container {container_name}: {json.dumps(found['status'])}")


def container_id(found: Json, container_name: str = "main") -> str:
    """The runtime's id: it changes when the container is started again."""
    for status in found["status"]["containerStatuses"]:
        if status["name"] == container_name:
            return str(status["containerID"])
    raise TestbedError(f"no container {container_name}: {json.dumps(found['status'])}")


def deployment(
    name: str, command: Sequence[str], limits: Mapping[str, str], *, replicas: int = 1
) -> Json:
    """A Deployment of pods with one container each; they have the label `app`."""
    labels = {"app": name}
    template = pod("x", container(command, limits=limits), labels=labels, restart="Always")
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": name},
        "spec": {
            "replicas": replicas,
            "selector": {"matchLabels": labels},
            "template": {"metadata": {"labels": labels}, "spec": template["spec"]},
        },
    }


def wait_taken_on(pods: Pods, *names: str, timeout_s: float = 120) -> None:
    """Waits until pods run or have run.

    Raises:
        TestbedError: one is Failed; the kubelet may have refused it.
    """
    for name in names:
        found = pods.wait(name, _is_taken_on, "taking on", timeout_s=timeout_s)
        if found["status"]["phase"] == "Failed":
            raise TestbedError(f"pod {name} is Failed\n{pods.explain(name)}")


def _is_taken_on(found: Json) -> bool:
    status = found["status"]
    conditions = status.get("conditions", ())
    is_ready = any(each["type"] == "Ready" and each["status"] == "True" for each in conditions)
    return is_ready or status["phase"] in {"Succeeded", "Failed"}


@contextmanager
def undisturbed(pods: Pods, *names: str) -> Iterator[None]:
    """Pods that run go on running, whatever is done in between: the same containers."""
    before = {name: container_id(pods.wait_ready(name)) for name in names}
    yield
    after = {name: container_id(pods.get(name)) for name in names}
    assert after == before
    assert {name: pods.restarts(name) for name in names} == dict.fromkeys(names, 0)


# ---- the agent -----------------------------------------------------------------------------------


class NodeAgent:
    """The agent of a cluster's node: one at a time, with a configuration file of its own."""

    def __init__(self, cluster: Cluster, *, simulated: str = TWO_GPUS) -> None:
        self.cluster = cluster
        self.simulated = simulated
        self.config = cluster.state / "agent.yaml"
        self.process: Process | None = None
        self._flags: tuple[str, ...] = ()

    def start(
        self,
        config: str | None = None,
        *flags: str,
        wait: bool = True,
        environment: Mapping[str, str] | None = None,
    ) -> Process:
        """Starts it, with a configuration file if one is given, and waits for its resources."""
        if config is not None:
            self.configure(config)
            flags = ("--config-file", str(self.config), *flags)
        self._flags = flags
        self.cluster.allow_agent()
        return self.again(wait=wait, environment=environment)

    def again(self, *, wait: bool = True, environment: Mapping[str, str] | None = None) -> Process:
        """Starts it as it was started before, after its end."""
        self.process = self.cluster.start_agent(
            *("--metrics-address", "0.0.0.0:9446"),
            *self._flags,
            simulated=self.simulated,
            environment=environment,
        )
        if wait:
            self.wait_registered(self.process)
        return self.process

    @property
    def is_running(self) -> bool:
        """Whether it was started and has not ended."""
        return self.process is not None and self.process.is_running

    @contextmanager
    def configured(self, text: str, *, back_to: str) -> Iterator[None]:
        """Another configuration for the length of a `with`, whatever comes of what is inside."""
        self.configure(text)
        try:
            yield
        finally:
            self.configure(back_to)

    def configure(self, text: str) -> None:
        """Replaces its configuration file, as whoever edits it."""
        draft = self.config.with_suffix(".new")
        draft.write_text(text, encoding="utf-8")
        draft.replace(self.config)

    def end(self, number: int = signal.SIGTERM) -> int | None:
        """Ends it by a signal and leaves all its state; its status."""
        assert self.process is not None
        return self.process.stop(number=number)

    def close(self) -> None:
        """Ends it, and leaves a fresh node to the next one."""
        if self.process is not None:
            self.cluster.stop_agent(self.process)
        self.process = None

    def wait_registered(self, process: Process, *, timeout_s: float = PATIENCE_S) -> None:
        """Waits until this very process serves the kubelet (what its predecessor had stays)."""

        def is_ready() -> bool:
            if not process.is_running:
                raise TestbedError(f"the agent ended with {process.wait(1)}\n{self.log_tail()}")
            return self.is_served()

        wait_until(is_ready, "ready agent", timeout_s=timeout_s, explain=self.log_tail)
        self.cluster.wait_agent(process, timeout_s=timeout_s)

    def is_served(self) -> bool:
        """Whether this process is ready and the kubelet has taken on a resource from it."""
        is_ready = self.http("/readyz") is not None
        return is_ready and self.figure("registrations", result="registered") >= 1

    # -- what it says

    @property
    def log(self) -> str:
        """All that it wrote, of all its runs."""
        return self.cluster.log("agent").read_text(encoding="utf-8", errors="replace")

    def log_tail(self) -> str:
        """The last of it, for errors."""
        return tail(self.cluster.log("agent"), lines=15)

    def http(self, path: str) -> str | None:
        """What it answers over HTTP; None: not, or with an error."""
        # No proxy of the machine's stands between us and the node.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(f"http://{self.cluster.address}:9446{path}", timeout=10) as answer:
                return str(answer.read().decode())
        except (OSError, http.client.HTTPException):  # it may end in the middle of an answer
            return None

    def figure(self, name: str, **labels: str) -> float:
        """One of its figures, summed over the labels that are not named: `shares_made`.

        Raises:
            TestbedError: it runs, and does not answer.
        """
        text = wait_until(
            lambda: self.http("/metrics") or (None if self.is_running else "ended"),
            "answer of the agent's",
            explain=self.log_tail,
        )
        total = 0.0
        for line in text.splitlines():
            found = _METRIC.match(line)
            if found is None or found["name"].removesuffix("_total") != f"allotment_agent_{name}":
                continue
            there = dict(re.findall(r'(\w+)="([^"]*)"', found["labels"] or ""))
            if labels.items() <= there.items():
                total += float(found["value"])
        return total

    def wait_figure(
        self, name: str, least: float, *, timeout_s: float = PATIENCE_S, **labels: str
    ) -> None:
        """Waits until one of its figures has reached this much."""
        wait_until(
            lambda: self.figure(name, **labels) >= least,
            f"{name}{labels} of {least:g}",
            timeout_s=timeout_s,
            explain=self.log_tail,
        )

    # -- what it leaves on the node

    def shares(self, namespace: str | None = None) -> list[Share]:
        """Every share of a container, of all namespaces or one, by name."""
        found = []
        for folder in self.cluster.node.path("/run/allotment/shares").glob("[0-9a-f]*"):
            with contextlib.suppress(FileNotFoundError, StateError):  # it is going
                share = read_record(folder)
                if share.owner is not None and namespace in {None, share.owner.namespace}:
                    found.append(share)
        return sorted(found, key=lambda share: share.name)

    def share(self, pods: Pods, name: str, container_name: str = "main") -> Share:
        """The share of a pod's container, as soon as there is one."""
        wanted = f"{pods.namespace}/{name}/{container_name}"

        def find() -> Share | None:
            return next((each for each in self.shares() if each.name == wanted), None)

        return wait_until(find, f"share {wanted}", explain=self.explain)

    def specs(self) -> set[str]:
        """The CDI specs of shares."""
        folder = self.cluster.node.path("/run/cdi")
        return {path.name for path in folder.glob("allotment.dev-*")}

    def entries(self) -> tuple[CheckpointEntry, ...]:
        """The kubelet's checkpoint."""
        return KubeletCheckpoint(self.cluster.node.path(_CHECKPOINT)).entries()

    def response(self, pods: Pods, name: str, container_name: str = "main") -> Json:
        """What `Allocate` answered for a container, as the kubelet keeps it."""
        uid = pods.get(name)["metadata"]["uid"]
        document = json.loads(self.cluster.node.path(_CHECKPOINT).read_bytes())
        for entry in document["Data"]["PodDeviceEntries"]:
            if (entry["PodUID"], entry["ContainerName"]) == (uid, container_name):
                answer = ContainerAllocateResponse.FromString(base64.b64decode(entry["AllocResp"]))
                return {
                    "envs": dict(answer.envs),
                    "mounts": [
                        (each.host_path, each.container_path, each.read_only)
                        for each in answer.mounts
                    ],
                    "devices": [each.host_path for each in answer.devices],
                    "annotations": dict(answer.annotations),
                    "cdi_devices": [each.name for each in answer.cdi_devices],
                    "ids": sorted(each for ids in entry["DeviceIDs"].values() for each in ids),
                }
        raise TestbedError(f"the kubelet's checkpoint has nothing of {name}/{container_name}")

    def wait_exact(self, *, timeout_s: float = PATIENCE_S) -> None:
        """Waits until every container has exactly its share, and no share is without owner.

        Raises:
            TestbedError: in time it does not come to that; with what is too much or missing.
        """
        wait_until(
            lambda: not self._differences(),
            "exact set of shares",
            timeout_s=timeout_s,
            explain=lambda: "\n".join([*self._differences(), self.explain()]),
        )

    def wait_empty(self, *, timeout_s: float = PATIENCE_S) -> None:
        """Waits until there is no share, no CDI spec and no seat on a device."""
        # With what is being removed: a share is hidden before its folder is cleared away.
        folder = self.cluster.node.path("/run/allotment/shares")

        def left() -> list[str]:
            there = [*folder.iterdir(), *self.specs()]
            return [*map(str, there), *self._differences()]

        wait_until(
            lambda: not left(),
            "node without shares",
            timeout_s=timeout_s,
            explain=lambda: "\n".join([*left(), self.explain()]),
        )

    def _differences(self) -> list[str]:
        """What of shares, specs and containers does not go together."""
        shares = self.shares()
        having: dict[tuple[str, str], Share] = {}
        for each in shares:
            assert each.owner is not None
            having[each.owner.uid, each.owner.container] = each
        found = [f"twice: {each.name}" for each in shares if each not in having.values()]
        pods = self.cluster.api.items(
            "/api/v1/pods", fieldSelector=f"spec.nodeName={self.cluster.node_name}"
        )
        named = {(str(each.pod), each.container): each.share for each in self.entries()}
        running = set(_running(pods))
        for key in running:
            share = having.get(key)
            if share is None:
                found.append(f"runs without a share: {key}")
            elif share.id != named.get(key):
                found.append(f"{share.name} has {share.id}, answered was {named.get(key)}")
        known = {str(each["metadata"]["uid"]) for each in pods if not _has_ended(each)}
        found += [
            f"without a pod: {each.name}" for (uid, _), each in having.items() if uid not in known
        ]
        by_cdi = {each.id for each in shares if each.cdi_spec is not None}
        specs = {
            name.removeprefix("allotment.dev-share-").removesuffix(".json") for name in self.specs()
        }
        found += [f"spec without a share: {each}" for each in specs - by_cdi]
        found += [f"share without its spec: {each}" for each in by_cdi - specs]
        return found

    def explain(self) -> str:
        """What there is, for errors."""
        lines = [f"share {each.id} of {each.name}" for each in self.shares()]
        lines += [f"kubelet: {each}" for each in self.entries()]
        return "\n".join([*lines, *sorted(self.specs()), self.log_tail()])

    # -- what is done to the node

    def allot(self, *words: str) -> str:
        """Runs `allot` on the node, with what its agent has; its output."""
        command = [sys.executable, "-m", "allotment", *words]
        return self.cluster.node.run(command).stdout

    def fault(self, *words: str) -> None:
        """Breaks or mends GPUs of the node: `fault("--gpu", uuid, "--xid", "79")`."""
        self.allot("fault", "--simulated", self.simulated, *words)

    def gpus(self) -> list[str]:
        """The UUIDs of the node's GPUs, by index."""
        said = self.allot("devices", "--simulated", self.simulated, "-o", "json")
        return [str(each["uuid"]) for each in json.loads(said)["devices"]]

    def kill_container(self, pods: Pods, name: str, container_name: str = "main") -> None:
        """Kills a container's processes, as a crash."""
        self.kill(container_id(pods.get(name), container_name))

    @staticmethod
    def kill(container: str) -> None:
        """Likewise, by the runtime's id: for when there is no API server to ask."""
        found = _processes(container.rpartition("/")[2])
        if not found:
            raise TestbedError(f"no process of container {container}")
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    @staticmethod
    def processes(share: str) -> list[int]:
        """The processes that have a share mounted, whichever container they are of."""
        found = []
        for folder in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                mounts = folder / "mountinfo"
                if folder.name.isdigit() and f"/shares/{share}/id " in mounts.read_text("utf-8"):
                    found.append(int(folder.name))
        return found

    def node_events(self, reason: str) -> list[str]:
        """What was said about the node for this reason."""
        events = self.cluster.api.items(
            "/api/v1/events",
            fieldSelector=f"involvedObject.kind=Node,reason={reason}",
        )
        return [str(each.get("message", "")) for each in events]

    def wait_node_event(self, reason: str, *contains: str, timeout_s: float = PATIENCE_S) -> str:
        """Waits for an event on the node that has all these words, and returns its message."""

        def find() -> str | None:
            told = self.node_events(reason)
            return next((each for each in told if all(word in each for word in contains)), None)

        return wait_until(
            find,
            f"event {reason} {contains} on the node",
            timeout_s=timeout_s,
            explain=lambda: "\n".join([*self.node_events(reason), self.log_tail()]),
        )


def _processes(container: str) -> list[int]:
    """The processes of a container, by the name of its control group."""
    found = []
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if folder.name.isdigit() and container in (folder / "cgroup").read_text("ascii"):
                found.append(int(folder.name))
    return found


def gpu_containers(found: Json) -> Iterator[str]:
    """The containers of a pod that ask for GPUs."""
    spec = found["spec"]
    for each in (*spec.get("initContainers", ()), *spec["containers"]):
        limits = each.get("resources", {}).get("limits", {})
        if any(key.startswith(("nvidia.com/", GPU)) for key in limits):
            yield each["name"]


def _running(pods: Sequence[Json]) -> Iterator[tuple[str, str]]:
    for found in pods:
        asking = set(gpu_containers(found))
        status = found["status"]
        kinds = ("initContainerStatuses", "containerStatuses")
        for each in (each for kind in kinds for each in status.get(kind, ())):
            if each["name"] in asking and "running" in each.get("state", {}):
                yield found["metadata"]["uid"], each["name"]


def _has_ended(found: Json) -> bool:
    return found["status"].get("phase") in {"Succeeded", "Failed"}


@contextmanager
def node_agent(
    cluster: Cluster, config: str | None, *flags: str, simulated: str = TWO_GPUS
) -> Iterator[NodeAgent]:
    """An agent for the length of a `with`."""
    node = NodeAgent(cluster, simulated=simulated)
    try:
        node.start(config, *flags)
        yield node
    finally:
        node.close()
