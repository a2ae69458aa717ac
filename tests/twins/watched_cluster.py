# SPDX-License-Identifier: Apache-2.0
"""A scheduler that has answered about pods, and whose metrics are served. Without a cluster."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from aiohttp import ClientSession
from held_ports import held_port
from listing_api_server import ListingApiServer
from preemption_twin import WHOLE
from scheduler_twin import book_of, cluster_pod_of, node, pod_json
from watched_machine import loop_in_a_thread

from allotment.dialects.own.placement import PLACEMENT, write_booking
from allotment.dialects.own.registry import need_of
from allotment.kube.clients import connect
from allotment.kube.inventories import DEVICES, encode
from allotment.model.clusters import PodBooking
from allotment.scheduler.running import Scheduler
from allotment.scheduler.settings import SchedulerSettings

KUBECONFIG: Final = """\
apiVersion: v1
kind: Config
clusters: [{{name: c, cluster: {{server: "http://127.0.0.1:{port}"}}}}]
users: [{{name: u, user: {{token: t}}}}]
contexts: [{{name: c, context: {{cluster: c, user: u}}}}]
current-context: c
"""
NODES: Final = ("a", "b")
_PARTS: Final = 5
Json = dict[str, Any]


def _objects() -> tuple[dict[str, list[Json]], list[Json]]:
    """Return what the API server lists, and the pods that wait."""
    inventories = [node(name, 4) for name in NODES]
    book, bound = book_of(inventories), []
    for number in range(_PARTS):
        pod = pod_json(f"bound-{number}")
        placed = book.cluster.place(need_of(cluster_pod_of(pod)), NODES[number % 2])
        assert isinstance(placed, PodBooking)
        pod["spec"]["nodeName"] = NODES[number % 2]
        pod["metadata"]["annotations"][PLACEMENT] = write_booking(placed)
        bound.append(pod)
    huge = {"allotment.dev/gpu": "1", "allotment.dev/gpu-memory": "200Gi"}
    waiting = [pod_json("fits", limits=WHOLE), pod_json("waits", limits=huge)]
    quota = {
        "metadata": {"name": "gpus", "namespace": "ml", "uid": "q", "resourceVersion": "1"},
        "spec": {"hard": {"requests.allotment.dev/gpu-memory": "400Gi"}},
        "status": {},
    }
    items: dict[str, list[Json]] = {
        "/api/v1/nodes": [
            {
                "metadata": {
                    "name": each.name,
                    "uid": f"uid-{each.name}",
                    "annotations": {DEVICES: encode(each)},
                },
                "status": {"allocatable": {"cpu": "64", "memory": "512Gi"}},
            }
            for each in inventories
        ],
        "/api/v1/pods": [*bound, *waiting],
        "/api/v1/resourcequotas": [quota],
    }
    return items, waiting


async def _ask(port: int, waiting: list[Json]) -> list[Json]:
    """Ask as kube-scheduler does, once it is ready."""
    answers = []
    url = f"http://127.0.0.1:{port}"
    async with ClientSession() as client, asyncio.timeout(60):
        while True:
            try:
                async with client.get(f"{url}/readyz") as answer:
                    if answer.ok:
                        break
            except OSError:
                pass  # it does not listen yet
            await asyncio.sleep(0.05)
        for pod in waiting:
            asked = {"Pod": pod, "NodeNames": list(NODES)}
            async with client.post(f"{url}/filter", json=asked) as answer:
                answers.append(await answer.json())
            async with client.post(f"{url}/prioritize", json=asked) as answer:
                await answer.read()
    return answers


@contextmanager
def scheduler(work: Path) -> Iterator[tuple[int, Callable[[], list[Json]]]]:
    """Run one beside an API server that lists; yield its port, and what asks it about pods."""
    items, waiting = _objects()

    async def run(api_port: int, port: int) -> None:
        path = work / "kubeconfig"
        path.write_text(KUBECONFIG.format(port=api_port), "utf-8")
        async with ListingApiServer(items=items).running(api_port), connect(path) as api:
            made = Scheduler(SchedulerSettings(listen=f"127.0.0.1:{port}"), api, None)
            try:
                await made.run()
            finally:
                await made.end()

    with held_port() as api_port, held_port() as port, loop_in_a_thread() as begin:
        running = begin(run(api_port, port))

        def ask() -> list[Json]:
            return begin(_ask(port, waiting)).result(90)

        try:
            ask()
            yield port, ask
        finally:
            running.cancel()
            begin(asyncio.sleep(0.2)).result(30)
