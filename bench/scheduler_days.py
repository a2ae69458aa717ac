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

from scheduler_figures import GIB, Figure, Scale, Spec, nodes
from scheduler_ground import Ground, gpu_body, ground, scheduler_flags, scheduling
from scheduling import PORT, Scheduler, placements, taken
from testbed.api import Json
from testbed.sandbox import Process
from testbed.waiting import wait_until

_DELAY_S = 2.0
_ROUNDS = 20
_LEASE = "default/allotment-scheduler"


def delays(scale: Scale) -> Iterator[Figure]:
    """600 pods that 50 nodes can just take, while a proxy holds each binding for 2 s."""
    number = scale.of(600)
    inventories = nodes(7 if scale.is_quick else 50)
    with ground(inventories) as made:
        proxy = _proxy(made)
        scheduler = Scheduler(
            made.cluster, *scheduler_flags(scale), kubeconfig=str(_through(made, proxy[1]))
        )
        try:
            scheduler.wait_ready()
            bodies = [gpu_body(f"d-{each}", Spec(1, 30, 40, 100)) for each in range(number)]
            rate = made.pods_per_second(bodies)
            yield Figure(name=f"{number} pods, each binding takes 2 s", value=rate, unit="pods/s")
            yield from _judged(made.items(), f"{number} pods, each binding takes 2 s")
        finally:
            scheduler.stop()
            proxy[0].stop()


def restarts(scale: Scale) -> Iterator[Figure]:
    """100 pods wait while the scheduler is killed and started anew."""
    number = scale.of(100)
    with ground(nodes(50)) as made, scheduling(made, scale) as scheduler:
        first = [gpu_body(f"a-{each}", Spec(1, 30, 40, 100)) for each in range(number)]
        made.pods_per_second(first)
        namespace = made.namespace()
        scheduler.process.stop(number=signal.SIGKILL)
        bodies = [gpu_body(f"b-{each}", Spec(1, 30, 40, 100)) for each in range(number)]
        made.create(namespace, bodies)
        began = time.monotonic()
        scheduler.restart(signal.SIGKILL)
        scheduler.wait_ready()
        yield Figure(name="from start to ready", value=time.monotonic() - began, unit="s")
        made.bound_at(namespace, number, timeout_s=120)
        bound = time.monotonic() - began
        yield Figure(name=f"{number} pods bound after a restart", value=bound, unit="s")
        yield from _judged(made.items(), f"{number} pods right after a restart")


def failovers(scale: Scale) -> Iterator[Figure]:
    """Two replicas; the leader is killed under load, and the time until the other one answers."""
    flags = ("--lease", _LEASE)
    front = 9440
    with ground(nodes(200), port=front) as made:
        pair = [
            Scheduler(
                made.cluster,
                *scheduler_flags(scale),
                *flags,
                port=PORT + each,
                name=f"replica-{each}",
            )
            for each in range(2)
        ]
        router = Router(made, [each.port for each in pair], port=front)
        try:
            took: list[float] = []
            leader = _leader(pair)
            namespace = made.namespace()
            created = 0
            for _ in range(max(3, _ROUNDS // 10) if scale.is_quick else _ROUNDS):
                bodies = [
                    gpu_body(f"f-{created + each}", Spec(1, 16, 20, 100)) for each in range(60)
                ]
                feeder = threading.Thread(target=made.create, args=(namespace, bodies))
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
                made.bound_at(namespace, created, timeout_s=120)
                wait_until(
                    lambda each=leader_before: each.get("/leading")[0] == 503,  # type: ignore[misc]
                    "the follower",
                    timeout_s=60,
                )
                time.sleep(1.5)
            yield Figure(
                name=f"leader killed {len(took)} times: worst until another one answers",
                value=max(took),
                unit="s",
                target="5 s",
            )
            yield Figure(name="the same: median", value=sorted(took)[len(took) // 2], unit="s")
            yield from _judged(made.items(), f"leader killed {len(took)} times, {created} pods")
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


def _judged(items: list[Json], what: str) -> Iterator[Figure]:
    """How many devices are given twice, and how many pods are bound without a placement."""
    bound = [each for each in items if each["spec"].get("nodeName")]
    without = len(bound) - len(placements(items))
    over = sum(memory > 80 * GIB or compute > 10_000 for memory, compute in taken(items).values())
    yield Figure(
        name=f"{what}: GPUs over-committed", value=over, unit="", target="0", is_wrong=over > 0
    )
    yield Figure(
        name=f"{what}: bound without a placement",
        value=without,
        unit="",
        target="0",
        is_wrong=without > 0,
    )
    lost = len(items) - len(bound)
    yield Figure(name=f"{what}: not bound", value=lost, unit="", target="0", is_wrong=lost > 0)


class Router:
    """In the place of a Service: connections to whoever is ready, in the cluster's sandbox."""

    def __init__(self, made: Ground, ports: list[int], *, port: int) -> None:
        code = Path(__file__).with_name("scheduler_router.py")
        with made.cluster.log("router").open("a", encoding="utf-8") as file:
            self._process = made.cluster.node.popen(
                [sys.executable, code, str(port), *map(str, ports)], stdout=file, stderr=file
            )

    def close(self) -> None:
        """Ends it."""
        self._process.stop()


def _proxy(made: Ground) -> tuple[Process, int]:
    """A proxy to the API server that holds every binding; its process and port."""
    port = 9439
    code = Path(__file__).with_name("scheduler_proxy.py")
    config = json.loads(made.cluster.kubeconfig.read_text())
    server = config["clusters"][0]["cluster"]["server"]
    folder = made.cluster.credentials.folder
    with made.cluster.log("proxy").open("a", encoding="utf-8") as file:
        process = made.cluster.node.popen(
            [sys.executable, code, server, folder, str(port), str(_DELAY_S)],
            stdout=file,
            stderr=file,
        )

    def listens() -> bool:
        with socket.socket() as probe:
            return probe.connect_ex((made.cluster.address, port)) == 0

    wait_until(listens, "proxy", timeout_s=20)
    return process, port


def _through(made: Ground, port: int) -> Path:
    """The administrator's kubeconfig, by way of the proxy."""
    config = json.loads(made.cluster.kubeconfig.read_text())
    cluster = config["clusters"][0]["cluster"]
    cluster["server"] = f"http://127.0.0.1:{port}"
    path = made.cluster.state / "proxy.kubeconfig"
    path.write_text(json.dumps(config), encoding="utf-8")
    return path
