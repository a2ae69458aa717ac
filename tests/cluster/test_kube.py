# SPDX-License-Identifier: Apache-2.0
"""The API server's side against the real one, with the rights that the manifest grants."""

from __future__ import annotations

import asyncio
import json
import signal
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
from testbed.api import Api as Admin
from testbed.cluster import Cluster
from testbed.pods import Pods, container, pod

from allotment.kube.clients import Api, connect
from allotment.kube.errors import DeniedError, KubeError
from allotment.kube.events import Events, Reference
from allotment.kube.nodes import LABELS_ANNOTATION, NodePods, OwnNode
from allotment.kube.quotas import FollowedConfigMap
from allotment.model.pods import PodUid

MEMORY = "allotment.dev/gpu-memory"
COMPUTE = "allotment.dev/gpu-compute"
OWNED = frozenset({MEMORY, COMPUTE})
SLEEP = ["sleep", "1000"]


def following(
    cluster: Cluster, test: Callable[[Api], tuple[list[Coroutine[Any, Any, Any]], Awaitable[None]]]
) -> None:
    """Runs a test beside what it follows, as the user `agent`."""

    async def main() -> None:
        async with connect(cluster.credentials.kubeconfig("agent")) as api:
            endless, body = test(api)
            beside = [asyncio.create_task(each) for each in endless]
            try:
                async with asyncio.timeout(120):
                    await body
            finally:
                for task in beside:
                    task.cancel()
                await asyncio.gather(*beside, return_exceptions=True)

    cluster.allow_agent()
    asyncio.run(main())


async def until(condition: Callable[[], object], *, timeout_s: float = 60) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 - what is waited for has no event
            await asyncio.sleep(0.01)


def create_anew(pods: Pods, body: dict[str, Any]) -> None:
    """Creates a pod over a connection of its own: the kept ones went with the API server."""
    cluster = pods.cluster
    cluster.api.close()
    pods.create(body)


async def settled(node: OwnNode, *, timeout_s: float) -> bool:
    """Wait until the node says all that is wanted; tell whether it does."""
    try:
        async with asyncio.timeout(timeout_s):
            async for _ in node.changes():
                if node.is_settled:
                    return True
    except TimeoutError:
        pass
    return False


def names(pods: NodePods, namespace: str) -> set[str]:
    return {each.name for each in pods.all() if each.namespace == namespace}


def test_a_nodes_pods_are_known_as_they_come_and_go(cluster: Cluster, pods: Pods) -> None:
    def test(api: Api) -> tuple[list[Coroutine[Any, Any, Any]], Awaitable[None]]:
        node = NodePods(api, node=cluster.node_name)
        elsewhere = NodePods(api, node="another")

        async def body() -> None:
            await until(lambda: node.is_synced and elsewhere.is_synced)
            made = await asyncio.to_thread(
                pods.create,
                pod("a", container(SLEEP), annotations={"allotment.dev/class": "latency"}),
            )
            uid = PodUid(made["metadata"]["uid"])
            found = await node.wait_for(uid, timeout_s=60)
            assert found is not None
            assert str(found) == f"{pods.namespace}/a"
            assert found.annotations["allotment.dev/class"] == "latency"
            await until(lambda: node.get(uid).container("main").is_started)  # type: ignore[union-attr]
            await asyncio.to_thread(pods.delete)
            await until(lambda: node.get(uid) is None)
            assert elsewhere.all() == ()

        return [node.run(), elsewhere.run()], body()

    following(cluster, test)


def test_containers_that_have_finished_are_known(cluster: Cluster, pods: Pods) -> None:
    def test(api: Api) -> tuple[list[Coroutine[Any, Any, Any]], Awaitable[None]]:
        node = NodePods(api, node=cluster.node_name)

        async def body() -> None:
            made = await asyncio.to_thread(
                pods.create,
                pod(
                    "a",
                    container(["true"], name="short"),
                    container(SLEEP, name="long"),
                    initContainers=[
                        container(["true"], name="first"),
                        container(SLEEP, name="beside", restartPolicy="Always"),
                    ],
                ),
            )
            uid = PodUid(made["metadata"]["uid"])

            def is_known() -> bool:
                found = node.get(uid)
                if found is None:
                    return False
                assert not found.has_ended
                finished = {each.name for each in found.containers if each.has_finished}
                return finished == {"first", "short"} and all(
                    each.is_started for each in found.containers
                )

            await until(is_known)

        return [node.run()], body()

    following(cluster, test)


def test_while_the_server_is_away_what_is_known_stays_and_then_it_goes_on_or_begins_anew(
    cluster: Cluster, pods: Pods
) -> None:
    def test(api: Api) -> tuple[list[Coroutine[Any, Any, Any]], Awaitable[None]]:
        node = NodePods(api, node=cluster.node_name)

        async def body() -> None:
            await asyncio.to_thread(pods.create, pod("before", container(SLEEP)))
            await until(lambda: names(node, pods.namespace) == {"before"})
            # At SIGTERM it would keep the open watches for 60 s.
            await asyncio.to_thread(cluster.stop, "kube-apiserver", signal.SIGKILL)
            try:
                await until(lambda: node.problem is not None)
                assert names(node, pods.namespace) == {"before"}
                assert node.is_synced
            finally:
                await asyncio.to_thread(cluster.start, "kube-apiserver")
            await asyncio.to_thread(create_anew, pods, pod("after", container(SLEEP)))
            await until(lambda: names(node, pods.namespace) == {"before", "after"})
            await until(lambda: node.problem is None)
            # A server that has just started knows nothing of the past: "too old resource version".
            late = NodePods(api, node=cluster.node_name)
            late._following._version = "1"  # noqa: SLF001 - as after days without the server
            beside = asyncio.create_task(late.run())
            await until(lambda: names(late, pods.namespace) == {"before", "after"})
            await until(lambda: late.is_synced and late.problem is None)
            beside.cancel()

        return [node.run()], body()

    following(cluster, test)


def heartbeat(status: dict[str, Any]) -> str:
    """When the kubelet last wrote all of the node's status."""
    return str(
        next(each for each in status["conditions"] if each["type"] == "Ready")["lastHeartbeatTime"]
    )


def amounts(status: dict[str, Any], resource: str) -> set[str | None]:
    """What is there of a resource, by capacity and by what pods may have."""
    return {status[part].get(resource) for part in ("capacity", "allocatable")}


async def wait_status(condition: Callable[[], bool]) -> None:
    """Waits for what is read from the API server."""
    async with asyncio.timeout(60):
        while not await asyncio.to_thread(condition):  # noqa: ASYNC110 - nobody tells of it
            await asyncio.sleep(0.05)


def test_quantities_and_conditions_outlive_the_kubelets_writes(cluster: Cluster) -> None:
    def test(api: Api) -> tuple[list[Coroutine[Any, Any, Any]], Awaitable[None]]:
        node = OwnNode(api, name=cluster.node_name, owned=OWNED)

        def status() -> dict[str, Any]:
            found: dict[str, Any] = cluster.api.get(cluster.node_path)["status"]
            return found

        async def body() -> None:
            await node.set_capacity({MEMORY: 158 << 30, COMPUTE: 200})
            await node.set_condition("GpuHealthy", "True", reason="AllHealthy", message="2 GPUs")
            assert await settled(node, timeout_s=60)
            assert status()["capacity"][MEMORY] == status()["allocatable"][MEMORY] == "158Gi"
            # A kubelet that starts registers the node, and writes all of its status.
            before = heartbeat(status())
            await asyncio.to_thread(cluster.restart, "kubelet")
            await wait_status(lambda: heartbeat(status()) != before)
            await wait_status(lambda: amounts(status(), COMPUTE) == {"200"})
            now = await asyncio.to_thread(status)
            (condition,) = (each for each in now["conditions"] if each["type"] == "GpuHealthy")
            assert (condition["status"], condition["reason"]) == ("True", "AllHealthy")
            # Someone takes it away by hand.
            gone = {"status": {"capacity": {MEMORY: None}, "allocatable": {MEMORY: None}}}
            began = time.monotonic()
            await asyncio.to_thread(cluster.api.patch, f"{cluster.node_path}/status", gone)
            await wait_status(lambda: amounts(status(), MEMORY) == {"158Gi"})
            assert await settled(node, timeout_s=60)
            print(f"capacity is back after {time.monotonic() - began:.3f} s")  # noqa: T201
            await node.set_capacity({COMPUTE: 100})
            assert await settled(node, timeout_s=60)
            now = await asyncio.to_thread(status)
            assert MEMORY not in now["capacity"]
            assert MEMORY not in now["allocatable"]
            assert now["capacity"][COMPUTE] == "100"
            await node.set_capacity({})
            assert await settled(node, timeout_s=60)
            assert not OWNED & status()["capacity"].keys()

        return [node.run()], body()

    following(cluster, test)


@pytest.fixture
def fake_node(api: Admin) -> Iterator[str]:
    """A node that no kubelet keeps."""
    body = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": "made-up"}}
    api.post("/api/v1/nodes", body)
    yield "made-up"
    api.delete("/api/v1/nodes/made-up")


def test_labels_are_ours_alone_and_go_also_after_a_restart_and_come_with_a_new_node(
    cluster: Cluster, api: Admin, fake_node: str
) -> None:
    path = f"/api/v1/nodes/{fake_node}"

    def test(client: Api) -> tuple[list[Coroutine[Any, Any, Any]], Awaitable[None]]:
        first = OwnNode(client, name=fake_node, owned=OWNED)
        second = OwnNode(client, name=fake_node, owned=OWNED)

        async def body() -> None:
            running = asyncio.create_task(first.run())
            labels = {"nvidia.com/gpu.count": "2", "nvidia.com/gpu.product": "A100"}
            await first.set_labels(labels, owned_prefixes=("nvidia.com/",))
            await asyncio.to_thread(api.patch, path, {"metadata": {"labels": {"team": "ml"}}})
            await first.set_capacity({COMPUTE: 200})
            assert await settled(first, timeout_s=60)
            await asyncio.to_thread(api.delete, path)
            await until(lambda: first.current is None)
            again = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": fake_node}}
            await asyncio.to_thread(api.post, "/api/v1/nodes", again)
            await until(lambda: first.is_settled)
            metadata = (await asyncio.to_thread(api.get, path))["metadata"]
            assert labels.items() <= metadata["labels"].items()
            # Another agent takes over, and knows by the annotation what is ours.
            running.cancel()
            following = asyncio.create_task(second.run())
            await second.set_labels({"nvidia.com/gpu.count": "1"})
            metadata = (await asyncio.to_thread(api.get, path))["metadata"]
            assert metadata["labels"]["nvidia.com/gpu.count"] == "1"
            assert "nvidia.com/gpu.product" not in metadata["labels"]
            assert metadata["annotations"][LABELS_ANNOTATION] == "nvidia.com/gpu.count"
            following.cancel()

        return [], body()

    following(cluster, test)


def test_the_config_map_that_the_role_names_is_followed_and_no_other(
    cluster: Cluster, api: Admin
) -> None:
    path = "/api/v1/namespaces/allotment-system/configmaps"
    item = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "allotment-config"}}

    def test(client: Api) -> tuple[list[Coroutine[Any, Any, Any]], Awaitable[None]]:
        ours = FollowedConfigMap(client, namespace="allotment-system", name="allotment-config")
        other = FollowedConfigMap(client, namespace="allotment-system", name="another")

        async def body() -> None:
            await until(lambda: ours.is_synced)
            assert ours.data is None
            data = {"default": "version: v1"}
            await asyncio.to_thread(api.post, path, {**item, "data": data})
            await until(lambda: ours.data == data)
            change = {"data": {"default": None, "soft": "version: v1"}}
            began = time.monotonic()
            await asyncio.to_thread(api.patch, f"{path}/allotment-config", change)
            await until(lambda: ours.data == {"soft": "version: v1"})
            print(f"change of the config map heard after {time.monotonic() - began:.3f} s")  # noqa: T201
            await asyncio.to_thread(api.delete, f"{path}/allotment-config")
            await until(lambda: ours.data is None)
            await until(lambda: other.problem is not None)
            assert isinstance(other.problem, DeniedError)

        return [ours.run(), other.run()], body()

    api.delete(f"{path}/allotment-config")
    following(cluster, test)


def test_events_are_what_kubectl_describe_shows(cluster: Cluster, pods: Pods) -> None:
    made = pods.create(pod("a", container(SLEEP)))
    of_pod = Reference("Pod", "a", made["metadata"]["uid"], pods.namespace)
    of_node = Reference("Node", cluster.node_name, cluster.node_name)

    def test(api: Api) -> tuple[list[Coroutine[Any, Any, Any]], Awaitable[None]]:
        events = Events(api, component="allotment-agent", node=cluster.node_name)

        async def body() -> None:
            for _ in range(3):
                events.tell(
                    of_pod, reason="ShareRefused", message="need 8Gi, have 4Gi", is_warning=True
                )
                await events.flush(timeout_s=60)
            events.tell(of_node, reason="GpuUnhealthy", message="XID 79", is_warning=True)
            gone = Reference("Pod", "x", "u", "no-such-namespace")
            events.tell(gone, reason="ShareReady", message="x", is_warning=False)
            await events.flush(timeout_s=60)

        return [], body()

    following(cluster, test)
    shown = cluster.kubectl_run("describe", "pod", "a", "--namespace", pods.namespace)
    (line,) = (each for each in shown.splitlines() if "ShareRefused" in each)
    assert line.split()[0] == "Warning"
    assert "(x3 over" in line
    assert "allotment-agent" in line
    assert "need 8Gi, have 4Gi" in line
    shown = cluster.kubectl_run("describe", "node", cluster.node_name)
    assert "XID 79" in shown


def test_the_agent_is_refused_what_is_not_its_business(cluster: Cluster) -> None:
    def test(api: Api) -> tuple[list[Coroutine[Any, Any, Any]], Awaitable[None]]:
        async def body() -> None:
            for path in (
                "/api/v1/secrets",
                "/api/v1/namespaces/allotment-system/configmaps",
                "/api/v1/namespaces/kube-system/configmaps/extension-apiserver-authentication",
                "/api/v1/events",
            ):
                with pytest.raises(DeniedError) as caught:
                    await api.get(path, asked=f"get {path}")
                assert "forbidden" in caught.value.message

        return [], body()

    following(cluster, test)


@pytest.mark.parametrize(
    ("part", "change", "says"),
    [
        ("user", {"token": "wrong"}, "does not accept these credentials"),
        ("cluster", {"certificate-authority": None}, "certificate authority of this cluster"),
        ("cluster", {"server": "https://127.0.0.1:9"}, "retrying until it answers"),
    ],
    ids=["token", "certificate", "address"],
)
def test_a_way_that_leads_nowhere_is_told_with_what_to_do(
    cluster: Cluster, tmp_path: Path, part: str, change: dict[str, Any], says: str
) -> None:
    config = json.loads(cluster.credentials.kubeconfig("agent").read_text("utf-8"))
    whole = {**config[f"{part}s"][0][part], **change}
    config[f"{part}s"][0][part] = {key: value for key, value in whole.items() if value is not None}
    path = tmp_path / "config"
    path.write_text(json.dumps(config), "utf-8")

    async def ask() -> None:
        async with connect(path) as api:
            await api.get("/api/v1/nodes", asked="list nodes")

    with pytest.raises(KubeError) as caught:
        asyncio.run(ask())
    assert says in (caught.value.hint or ""), caught.value.message
    print(f"{caught.value.message}\nhint: {caught.value.hint}")  # noqa: T201
