# SPDX-License-Identifier: Apache-2.0
"""Bad days: bindings that take long, a restart, a leader that is killed. Nothing given twice."""

from __future__ import annotations

import json
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from scheduling import PORT, Scheduler, placements, taken
from testbed.api import Json
from testbed.sandbox import Process
from testbed.waiting import wait_until

from bench.harness.options import Options
from bench.harness.results import Result
from bench.harness.runner import NoRig
from bench.scheduler.cluster_shape import GIB, Scale, Spec, nodes
from bench.scheduler.control_plane import (
    ControlPlane,
    control_plane,
    gpu_body,
    scheduler_flags,
    scheduling,
)

_DELAY_S = 2.0
_ROUNDS = 20
_LEASE = "default/allotment-scheduler"


def slow_bindings(_rig: NoRig, options: Options) -> Iterator[Result]:
    """600 pods that 50 nodes can just take, while a proxy holds each binding for 2 s."""
    scale = Scale.chosen(options)
    number = scale.of(600)
    inventories = nodes(7 if scale.is_quick else 50)
    with control_plane(inventories) as plane:
        proxy = _proxy(plane)
        scheduler = Scheduler(
            plane.cluster, *scheduler_flags(scale), kubeconfig=str(_through(plane, proxy[1]))
        )
        try:
            scheduler.wait_ready()
            bodies = [gpu_body(f"d-{each}", Spec(1, 30, 40, 100)) for each in range(number)]
            rate = plane.pods_per_second(bodies)
            yield Result(name=f"{number} pods, each binding takes 2 s", value=rate, unit="pods/s")
            yield from _judged(plane.items(), f"{number} pods, each binding takes 2 s")
        finally:
            scheduler.stop()
            proxy[0].stop()


def restart(_rig: NoRig, options: Options) -> Iterator[Result]:
    """100 pods wait while the scheduler is killed and started anew."""
    scale = Scale.chosen(options)
    number = scale.of(100)
    with control_plane(nodes(50)) as plane, scheduling(plane, scale) as scheduler:
        first = [gpu_body(f"a-{each}", Spec(1, 30, 40, 100)) for each in range(number)]
        plane.pods_per_second(first)
        namespace = plane.namespace()
        scheduler.process.stop(number=signal.SIGKILL)
        bodies = [gpu_body(f"b-{each}", Spec(1, 30, 40, 100)) for each in range(number)]
        plane.create(namespace, bodies)
        began = time.monotonic()
        scheduler.restart(signal.SIGKILL)
        scheduler.wait_ready()
        yield Result(name="from start to ready", value=time.monotonic() - began, unit="s")
        plane.bound_at(namespace, number, timeout_s=120)
        bound = time.monotonic() - began
        yield Result(name=f"{number} pods bound after a restart", value=bound, unit="s")
        yield from _judged(plane.items(), f"{number} pods right after a restart")


def failover(_rig: NoRig, options: Options) -> Iterator[Result]:
    """Two replicas; the leader is killed under load, and the time until the other one answers."""
    scale = Scale.chosen(options)
    flags = ("--lease", _LEASE)
    front = 9440
    with control_plane(nodes(200), port=front) as plane:
        pair = [
            Scheduler(
                plane.cluster,
                *scheduler_flags(scale),
                *flags,
                port=PORT + each,
                name=f"replica-{each}",
            )
            for each in range(2)
        ]
        router = Router(plane, [each.port for each in pair], port=front)
        try:
            took: list[float] = []
            leader = _leader(pair)
            namespace = plane.namespace()
            created = 0
            for _ in range(max(3, _ROUNDS // 10) if scale.is_quick else _ROUNDS):
                bodies = [
                    gpu_body(f"f-{created + each}", Spec(1, 16, 20, 100)) for each in range(60)
                ]
                feeder = threading.Thread(target=plane.create, args=(namespace, bodies))
                feeder.start()
                created += len(bodies)
                time.sleep(0.7)
                leader.process.stop(number=signal.SIGKILL)
                killed = time.monotonic()
                others = [each for each in pair if each is not leader]
                leader_before, leader = leader, _leader(others, every_s=0.02)
                took.append(time.monotonic() - killed)
                feeder.join()
                leader_before.restart(signal.SIGKILL)
                plane.bound_at(namespace, created, timeout_s=120)
                wait_until(
                    lambda each=leader_before: each.get("/leading")[0] == 503,  # type: ignore[misc]
                    "the follower",
                    timeout_s=60,
                )
                time.sleep(1.5)
            yield Result(
                name=f"leader killed {len(took)} times: worst until another one answers",
                value=max(took),
                unit="s",
                target=5.0,
            )
            yield Result(name="the same: median", value=sorted(took)[len(took) // 2], unit="s")
            yield from _judged(plane.items(), f"leader killed {len(took)} times, {created} pods")
        finally:
            router.close()
            for each in pair:
                each.stop()


def _leader(replicas: list[Scheduler], *, every_s: float = 0.05) -> Scheduler:
    return wait_until(
        lambda: next((each for each in replicas if each.get("/leading")[0] == 200), None),
        "a leader",
        timeout_s=60,
        every_s=every_s,
        explain=lambda: str([each.get("/leading") for each in replicas]),
    )


def _judged(items: list[Json], what: str) -> Iterator[Result]:
    """How many devices are given twice, and how many pods are bound without a placement."""
    bound = [each for each in items if each["spec"].get("nodeName")]
    without = len(bound) - len(placements(items))
    over = sum(memory > 80 * GIB or compute > 10_000 for memory, compute in taken(items).values())
    yield Result(
        name=f"{what}: GPUs over-committed", value=over, unit="", target=0.0, is_required=True
    )
    yield Result(
        name=f"{what}: bound without a placement",
        value=without,
        unit="",
        target=0.0,
        is_required=True,
    )
    lost = len(items) - len(bound)
    yield Result(name=f"{what}: not bound", value=lost, unit="", target=0.0, is_required=True)


class Router:
    """In place of a Service: routes to the replica that is ready, in the cluster's sandbox."""

    def __init__(self, plane: ControlPlane, ports: list[int], *, port: int) -> None:
        code = Path(__file__).with_name("router.py")
        with plane.cluster.log("router").open("a", encoding="utf-8") as file:
            self._process = plane.cluster.node.popen(
                [sys.executable, code, str(port), *map(str, ports)], stdout=file, stderr=file
            )

    def close(self) -> None:
        """End it."""
        self._process.stop()


def _proxy(plane: ControlPlane) -> tuple[Process, int]:
    """A proxy to the API server that holds every binding; its process and port."""
    port = 9439
    code = Path(__file__).with_name("slow_proxy.py")
    config = json.loads(plane.cluster.kubeconfig.read_text())
    server = config["clusters"][0]["cluster"]["server"]
    folder = plane.cluster.credentials.folder
    with plane.cluster.log("proxy").open("a", encoding="utf-8") as file:
        process = plane.cluster.node.popen(
            [sys.executable, code, server, folder, str(port), str(_DELAY_S)],
            stdout=file,
            stderr=file,
        )

    def listens() -> bool:
        with socket.socket() as probe:
            return probe.connect_ex((plane.cluster.address, port)) == 0

    wait_until(listens, "proxy", timeout_s=20)
    return process, port


def _through(plane: ControlPlane, port: int) -> Path:
    """The administrator's kubeconfig, by way of the proxy."""
    config = json.loads(plane.cluster.kubeconfig.read_text())
    cluster = config["clusters"][0]["cluster"]
    cluster["server"] = f"http://127.0.0.1:{port}"
    path = plane.cluster.state / "proxy.kubeconfig"
    path.write_text(json.dumps(config), encoding="utf-8")
    return path
