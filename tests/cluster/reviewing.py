# SPDX-License-Identifier: Apache-2.0
"""The webhook beside a real API server: a control plane with the manifest, and who answers there.

    with control_plane_of(folder) as cluster, webhook(cluster):
        made = cluster.api.post("/api/v1/namespaces/default/pods", foreign("a"))
        assert made["metadata"]["annotations"]["allotment.dev/dialect"] == "aliyun"

The webhook runs in a thread of the test's own process, with the manifest's rights.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import installing
import pytest
import yaml
from testbed import roles
from testbed.api import Api, ApiError
from testbed.cluster import Cluster
from testbed.pods import container, pod
from testbed.waiting import wait_until

from allotment.dialects.foreign.settings import foreign_dialects
from allotment.kube.clients import connect
from allotment.kube.quotas import FollowedQuotas
from allotment.model.structs import replace
from allotment.scheduler.admission.webhook import WebhookSettings
from allotment.scheduler.core.quota import QuotaBook
from allotment.scheduler.feed import QuotaFeed
from allotment.scheduler.serving import ListenSettings, WebhookService
from allotment.scheduler.settings import FileSettings

Document = dict[str, Any]

GPU: Final = "allotment.dev/gpu"
MEMORY: Final = "allotment.dev/gpu-memory"
COMPUTE: Final = "allotment.dev/gpu-compute"
GI: Final = 1 << 30


# ---- a cluster with the manifest -----------------------------------------------------------------


@contextmanager
def control_plane_of(state: Path) -> Iterator[Cluster]:
    """A control plane without nodes, and all of the manifest: pods are created, and run nowhere.

    Its kube-scheduler has the manifest's configuration: it would not start if that were wrong.
    """
    with Cluster(state=state, settings=None, scheduler_config=scheduler_configuration()) as made:
        made.allow_agent()
        roles.bind_agent(made.api, installing.MANIFEST)
        installing.apply(made, without=())
        yield made


def scheduler_configuration() -> str:
    """The manifest's, for a kube-scheduler that runs alone and outside of a pod."""
    (text,) = (
        each["data"]["config.yaml"]
        for each in installing.documents()
        if each["kind"] == "ConfigMap"
    )
    alone: Document = {
        "clientConnection": {"kubeconfig": "{kubeconfig}"},
        "leaderElection": {"leaderElect": False},
    }
    found = yaml.safe_load(text) | alone
    # Its files are mounted into its pod; here nobody is asked.
    for each in found["extenders"]:
        del each["tlsConfig"]
    return json.dumps(found)


@dataclass
class Running:
    """A webhook that is served by a thread of this process, with the manifest's rights."""

    service: WebhookService
    quotas: FollowedQuotas
    loop: asyncio.AbstractEventLoop

    @property
    def certificate(self) -> bytes:
        return self.service.keeper.bundle


def wait_closed(port: int) -> None:
    """Waits until no connection at a port of this process is open."""

    def is_closed() -> bool:
        _, *lines = Path("/proc/self/net/tcp").read_text("ascii").splitlines()
        fields = [line.split() for line in lines]
        # Those that have ended and only wait have no inode.
        held = [int(each[1].rpartition(":")[2], 16) for each in fields if each[9] != "0"]
        return port not in held

    wait_until(is_closed, f"end of the connections at port {port}")


@contextmanager
def webhook(
    cluster: Cluster,
    *,
    file: FileSettings | None = None,
    probe: Document | None = None,
    **changes: Any,  # noqa: ANN401 - any setting
) -> Iterator[Running]:
    """Serve one until the end of the `with`, at a port that the API server is told of.

    `probe` is a pod that it translates, by which it is known to be asked.
    """
    link = cluster.node.link
    said = file or FileSettings()
    settings = said.listening(
        ListenSettings(
            listen=f"{link.outer}:0",
            look_s=0.2,
            webhook=WebhookSettings(scheduler_name="allotment-scheduler"),
        )
    )
    settings = replace(settings, names=(link.outer,), **changes)
    dialects = foreign_dialects(said.dialects)
    found: list[Running] = []
    started, ended = threading.Event(), asyncio.Event()
    failures: list[BaseException] = []

    async def main() -> None:
        async with connect(cluster.credentials.kubeconfig("agent")) as api:
            book, quotas = QuotaBook(), FollowedQuotas(api)
            service = WebhookService(api, settings, dialects=dialects, quotas=book)
            running = Running(service, quotas, asyncio.get_running_loop())
            tasks = [
                asyncio.create_task(each)
                for each in (service.run(), quotas.run(), QuotaFeed(quotas, book).run())
            ]
            async with asyncio.timeout(50):
                while not (service.port and service.keeper.is_ready and quotas.is_synced):
                    for task in tasks:
                        if task.done():
                            task.result()
                    await asyncio.sleep(0.01)
            port = service.port
            found.append(running)
            started.set()
            await ended.wait()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await service.close()
        # Of TLS, a connection's end is an exchange: both sides have to say so.
        await asyncio.to_thread(wait_closed, port)

    def run() -> None:
        try:
            asyncio.run(main())
        except BaseException as error:  # noqa: BLE001 - told by the test's own thread
            failures.append(error)
        finally:
            started.set()

    thread = threading.Thread(target=run)
    thread.start()
    assert started.wait(60)
    if failures:
        raise failures[0]
    running = found[0]
    try:
        point_at(cluster, running, probe or foreign("probe", "default"))
        yield running
    finally:
        running.loop.call_soon_threadsafe(ended.set)
        thread.join(120)


def point_at(cluster: Cluster, running: Running, probe: Document) -> None:
    """Tell the API server the address: there is no kube-proxy that would lead to the Service."""
    url = f"https://{cluster.node.link.outer}:{running.service.port}/webhook/pods"
    installing.lead(cluster, url)
    said: list[str] = []

    def is_asked() -> bool:
        try:
            made = cluster.api.post("/api/v1/namespaces/default/pods", probe, dryRun="All")
        except ApiError as error:
            said[:] = [str(error)]
            return False
        said[:] = [str(made["metadata"])]
        return "allotment.dev/dialect" in made["metadata"].get("annotations", {})

    wait_until(is_asked, "answer of the webhook", explain=lambda: str(said))


# ---- pods ----------------------------------------------------------------------------------------


def foreign(name: str, namespace: str | None = None) -> Document:
    """A pod in another system's words."""
    made = pod(name, container(["sleep", "1"], limits={"aliyun.com/gpu-mem": "4"}))
    if namespace:
        made["metadata"]["namespace"] = namespace
    return made


def plain(name: str, **limits: str) -> Document:
    """A pod with these limits, as they stand here."""
    return pod(name, container(["sleep", "1"], limits=limits))


def refused(api: Api, path: str, body: Document) -> str:
    """What is said of a pod that must not be created."""
    with pytest.raises(ApiError) as caught:
        api.post(path, body)
    return str(caught.value)


def tried(api: Api, path: str, body: Document) -> str:
    """What is said of a pod that might be created; empty: it would be."""
    try:
        api.post(path, body, dryRun="All")
    except ApiError as error:
        return str(error)
    return ""


WRITTEN: Final[dict[str, tuple[Document, dict[str, str]]]] = {
    "hami": (
        pod(
            "hami",
            container(
                ["true"],
                limits={"nvidia.com/gpu": 2, "nvidia.com/gpumem": 3000, "nvidia.com/gpucores": 30},
            ),
        ),
        {GPU: "2", MEMORY: str(2 * 3000 << 20), COMPUTE: "60"},
    ),
    "volcano": (
        pod(
            "volcano",
            container(
                ["true"], limits={"volcano.sh/vgpu-number": 1, "volcano.sh/vgpu-memory": 1024}
            ),
        ),
        {GPU: "1", MEMORY: str(GI)},
    ),
    "aliyun": (foreign("aliyun"), {GPU: "1", MEMORY: str(4 * GI)}),
    "tencent": (
        pod(
            "tencent",
            container(
                ["true"], limits={"tencent.com/vcuda-core": 50, "tencent.com/vcuda-memory": 8}
            ),
        ),
        {GPU: "1", MEMORY: str(2 * GI), COMPUTE: "50"},
    ),
    "qgpu": (
        pod(
            "qgpu",
            container(
                ["true"],
                limits={
                    "tke.cloud.tencent.com/qgpu-core": 30,
                    "tke.cloud.tencent.com/qgpu-memory": 5,
                },
            ),
        ),
        {GPU: "1", MEMORY: str(5 * GI), COMPUTE: "30"},
    ),
    "kubeshare": (
        pod(
            "kubeshare",
            container(["true"]),
            annotations={
                "kubeshare/gpu_request": "0.5",
                "kubeshare/gpu_limit": "1.0",
                "kubeshare/gpu_mem": str(2 * GI),
            },
        ),
        {GPU: "1", MEMORY: str(2 * GI), COMPUTE: "50"},
    ),
    "kubeshare-2": (
        pod(
            "kubeshare-2",
            container(["true"]),
            labels={
                "sharedgpu/gpu_request": "0.5",
                "sharedgpu/gpu_limit": "1.0",
                "sharedgpu/gpu_mem": str(2 * GI),
            },
        ),
        {GPU: "1", MEMORY: str(2 * GI), COMPUTE: "50"},
    ),
    "kai": (
        pod(
            "kai",
            container(["true"]),
            annotations={"gpu-memory": "2000"},
            labels={"kai.scheduler/queue": "team"},
        ),
        {GPU: "1", MEMORY: str(2000 << 20)},
    ),
}
"""A pod of each dialect, and the limits that it is stored with."""
