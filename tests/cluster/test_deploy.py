# SPDX-License-Identifier: Apache-2.0
"""The manifest on a real cluster: accepted as it is, and what it forbids is forbidden."""

from __future__ import annotations

import asyncio
import json
import signal
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from reviewing import tried
from stories import GIB, NVIDIA, NodeAgent, burn, burnt, on, part, wait_taken_on
from testbed.api import Api as Admin
from testbed.api import ApiError
from testbed.cluster import Cluster
from testbed.images import BUSYBOX, TOOLS
from testbed.pods import Pods, container, pod
from testbed.waiting import wait_until

from allotment.agent.dra.pods import RETRIED
from allotment.kube.clients import Api, PatchKind, connect
from allotment.kube.errors import ConflictError, DeniedError, KubeError
from allotment.kube.objects import ENDED
from allotment.kube.policies import exists

NAMESPACE = "allotment-system"
DEFAULT_PODS = "/api/v1/namespaces/default/pods"
DAEMON_SETS = f"/apis/apps/v1/namespaces/{NAMESPACE}/daemonsets"
POLICY = (
    "/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicies/allotment-agent-own-node"
)
Document = dict[str, Any]


@pytest.fixture(scope="module")
def manifest(root: Path) -> str:
    return (root / "deploy" / "manifests" / "agent.yaml").read_text("utf-8")


@pytest.fixture(scope="module")
def root() -> Path:
    return Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module", autouse=True)
def unguarded(cluster: Cluster) -> Iterator[None]:
    """Takes the policies away at the end: other tests write placements as no user may."""
    yield
    kinds = "validatingadmissionpolicies,validatingadmissionpolicybindings"
    cluster.kubectl_run("delete", kinds, "--selector", "app.kubernetes.io/name=allotment")
    body = pod("probe", container(["true"]), annotations=on("GPU-1"))
    wait_until(lambda: tried(cluster.api, DEFAULT_PODS, body) == "", "the end of the policies")


def remove(cluster: Cluster) -> None:
    """Takes the DaemonSet and its pods away; roles and policies disturb no test here."""
    api = cluster.api
    api.delete(f"{DAEMON_SETS}/allotment-agent", propagationPolicy="Foreground")
    path = f"/api/v1/namespaces/{NAMESPACE}/pods"
    wait_until(
        lambda: not api.items(path, labelSelector="app.kubernetes.io/component=agent"),
        "end of the agent's pods",
    )
    api.delete(f"/api/v1/namespaces/{NAMESPACE}/configmaps/allotment-config")
    cluster.forget_agent()


@pytest.fixture
def installed(cluster: Cluster, manifest: str, tmp_path: Path) -> Iterator[Callable[..., None]]:
    """Applies the manifest with kubectl, as a user would; `change` may alter the DaemonSet."""

    def install(change: Callable[[Document], None] = lambda _: None) -> None:
        documents = [each for each in yaml.safe_load_all(manifest) if each]
        for each in documents:
            if each["kind"] == "DaemonSet":
                change(each)
        path = tmp_path / "agent.yaml"
        path.write_text(yaml.safe_dump_all(documents), "utf-8")
        said = cluster.kubectl_run("apply", "--server-side", "--validate=strict", "-f", str(path))
        assert "Warning" not in said

    yield install
    remove(cluster)


def the_pod(cluster: Cluster) -> Document:
    """The DaemonSet's pod on the node, as soon as there is one."""
    path = f"/api/v1/namespaces/{NAMESPACE}/pods"

    def found() -> Document | None:
        items = cluster.api.items(path, labelSelector="app.kubernetes.io/component=agent")
        return next((each for each in items if each["spec"].get("nodeName")), None)

    return wait_until(found, "the agent's pod")


def kubeconfig_of_its_token(cluster: Cluster, pod: Document, path: Path) -> Path:
    """Credentials as the agent in this pod has them: a token that names pod and node."""
    account = f"/api/v1/namespaces/{NAMESPACE}/serviceaccounts/allotment-agent"
    bound = {
        "apiVersion": "v1",
        "kind": "Pod",
        "name": pod["metadata"]["name"],
        "uid": pod["metadata"]["uid"],
    }
    made = cluster.api.post(f"{account}/token", {"spec": {"boundObjectRef": bound}})
    config = json.loads(cluster.kubeconfig.read_text("utf-8"))
    config["users"][0]["user"] = {"token": made["status"]["token"]}
    path.write_text(json.dumps(config), "utf-8")
    return path


def phase_of(cluster: Cluster, name: str) -> str:
    found: str = cluster.api.get(f"{DEFAULT_PODS}/{name}")["status"]["phase"]
    return found


def test_an_agent_changes_its_own_node_alone_and_there_its_own_business_alone(
    cluster: Cluster, installed: Callable[..., None], tmp_path: Path
) -> None:
    installed()
    config = kubeconfig_of_its_token(cluster, the_pod(cluster), tmp_path / "config")
    wait_until(
        lambda: cluster.api.get(POLICY).get("status", {}).get("observedGeneration"),
        "the policy's type check",
    )
    assert not cluster.api.get(POLICY)["status"]["typeChecking"].get("expressionWarnings")
    own = cluster.node_path
    other = "/api/v1/nodes/another"
    cluster.api.post(
        "/api/v1/nodes", {"apiVersion": "v1", "kind": "Node", "metadata": {"name": "another"}}
    )
    label = {"metadata": {"labels": {"nvidia.com/gpu.count": "2"}}}
    gone = {"metadata": {"labels": {"nvidia.com/gpu.count": None}}}
    notes = {"allotment.dev/labels": "nvidia.com/gpu.count", "allotment.dev/devices": "{}"}
    note = {"metadata": {"annotations": notes}}
    cordon = {"metadata": {"annotations": {"allotment.dev/device-cordon": ""}}}
    compute = {"allotment.dev/gpu-compute": "100"}
    amount = {"capacity": compute, "allocatable": compute}
    none = dict.fromkeys(compute)
    retried = {"metadata": {"annotations": {RETRIED: "now"}}}
    resized = {"metadata": {"annotations": {"allotment.dev/resize": "memory:1Gi"}}}
    healthy = {"type": "GpuHealthy", "status": "True", "reason": "AllHealthy", "message": ""}
    unready = {"type": "Ready", "status": "False", "reason": "x", "message": ""}
    owner = {"apiVersion": "v1", "kind": "Node", "name": "another", "uid": "1"}
    allowed = [
        (own, label),
        (own, note),
        (f"{own}/status", {"status": amount}),
        (f"{own}/status", {"status": {"conditions": [healthy]}}),
        (f"{own}/status", {"status": {"capacity": none, "allocatable": none}}),
        (own, {"metadata": {"annotations": dict.fromkeys(notes)}}),
        (own, gone),
        (f"{DEFAULT_PODS}/waiting/status", retried),
    ]
    forbidden = [
        (f"{DEFAULT_PODS}/waiting", retried, 'cannot patch resource "pods"'),
        (f"{DEFAULT_PODS}/others/status", retried, "annotate pods of its own node alone"),
        (f"{DEFAULT_PODS}/plain/status", retried, "of a pod that waits alone"),
        (f"{DEFAULT_PODS}/waiting/status", {"status": {"reason": "x"}}, "that waits alone"),
        (f"{DEFAULT_PODS}/waiting/status", {"metadata": {"labels": {"a": "b"}}}, "waits alone"),
        (f"{DEFAULT_PODS}/waiting/status", resized, "of a pod that waits alone"),
        (other, label, "the agent of node node-1 may not change node another"),
        (f"{other}/status", {"status": amount}, "may not change node another"),
        (own, {"spec": {"unschedulable": True}}, "may not change a node's spec"),
        (own, {"metadata": {"labels": {"zone": "x"}}}, "labels of nvidia.com/"),
        (own, {"metadata": {"labels": {"kubernetes.io/hostname": None}}}, "labels of nvidia.com/"),
        (own, {"metadata": {"annotations": {"x": "y"}}}, "allotment.dev/labels alone"),
        (own, cordon, "allotment.dev/labels alone"),
        (f"{own}/status", {"status": {"capacity": {"cpu": "1"}}}, "capacity of allotment.dev/"),
        (f"{own}/status", {"status": {"capacity": {"cpu": None}}}, "capacity of allotment.dev/"),
        (f"{own}/status", {"status": {"allocatable": {"cpu": "1"}}}, "allocatable of allotment."),
        (f"{own}/status", {"status": {"allocatable": {"cpu": None}}}, "allocatable of allotment."),
        (f"{own}/status", {"status": {"conditions": [unready]}}, "condition GpuHealthy alone"),
        (
            f"{own}/status",
            {"status": {"conditions": [{"$patch": "delete", "type": "Ready"}]}},
            "condition GpuHealthy alone",
        ),
        (
            f"{own}/status",
            {"status": {"addresses": [{"type": "InternalIP", "address": "198.51.100.1"}]}},
            "capacity and the condition GpuHealthy alone",
        ),
        (
            f"{own}/status",
            {"status": {"daemonEndpoints": {"kubeletEndpoint": {"Port": 1}}}},
            "capacity and the condition GpuHealthy alone",
        ),
        (
            f"{own}/status",
            {"status": {"nodeInfo": {"kernelVersion": "1"}}},
            "capacity and the condition GpuHealthy alone",
        ),
        (f"{own}/status", {"status": {"images": None}}, "capacity and the condition"),
        (own, {"metadata": {"finalizers": ["a.example/b"]}}, "finalizers and owners"),
        (own, {"metadata": {"ownerReferences": [owner]}}, "finalizers and owners"),
        (f"{own}/status", label | {"metadata": {"labels": {"a": "b"}}}, "labels of nvidia.com/"),
    ]

    others, plain, mine = (
        cluster.api.post(
            DEFAULT_PODS, pod(name, container(["true"], limits=limits), nodeName=node)
        )["metadata"]
        for name, node, limits in (
            ("others", "another", {NVIDIA: "1"}),
            ("plain", cluster.node_name, {"cpu": "1m"}),
            ("mine", cluster.node_name, {NVIDIA: "1"}),
        )
    )

    unclaimed = [{"name": "gpu", "resourceClaimName": "none"}]
    waiting = cluster.api.post(
        DEFAULT_PODS,
        pod(
            "waiting",
            container(["true"]),
            nodeName=cluster.node_name,
            resourceClaims=unclaimed,
        ),
    )["metadata"]

    agents = Admin(config)

    def deletion(of: Document) -> str:
        """Why the agent may not delete a pod; empty: it may.

        A dry run: an API server admits each further deletion of a pod that ends already.
        """
        try:
            agents.delete(f"{DEFAULT_PODS}/{of['name']}", dryRun="All")
        except ApiError as error:
            return str(error)
        return ""

    async def try_all() -> None:
        async with connect(config) as api:
            for path, change, says in forbidden:
                await refused(api, path, change, says)
            for path, change in allowed:
                await api.patch(path, change, asked="patch", kind=PatchKind.STRATEGIC)
            # For `allot doctor` in its container: there is no scheduler.
            account = f"system:serviceaccount:{NAMESPACE}:allotment-scheduler"
            assert [await exists(api, each) for each in (account, f"{account}-2")] == [False, None]

    try:
        # The policy takes effect some time after it is there.
        wait_until(lambda: asyncio.run(is_enforced(config, other)), "the policy")
        why = wait_until(lambda: deletion(others), "the policy for pods")
        assert "pods of its own node alone" in why
        assert "pods with extended resources alone" in deletion(plain)
        assert not deletion(mine)
        wait_until(lambda: phase_of(cluster, "plain") in ENDED, "end of a pod")
        asyncio.run(try_all())
    finally:
        agents.close()
        for each in (others, plain, mine, waiting):
            cluster.api.delete(f"{DEFAULT_PODS}/{each['name']}", gracePeriodSeconds="0")
        cluster.api.delete(other)


CLAIMS = "/apis/resource.k8s.io/v1/namespaces/default/resourceclaims"
SLICES = "/apis/resource.k8s.io/v1/resourceslices"
OURS, NVIDIAS = "gpu.allotment.dev", "gpu.nvidia.com"


def slice_of(node: str, driver: str, pool: str, name: str) -> Document:
    """The slice of one device, whose pods a taint would evict."""
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceSlice",
        "metadata": {"name": name},
        "spec": {
            "driver": driver,
            "nodeName": node,
            "pool": {"name": pool, "generation": 9, "resourceSliceCount": 1},
            "devices": [{"name": "gpu-0"}],
        },
    }


def allocated(api: Admin, name: str, node: str, driver: str) -> Document:
    """A claim that has a device of a node."""
    exactly = {"deviceClassName": driver}
    document = {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaim",
        "metadata": {"name": name},
        "spec": {"devices": {"requests": [{"name": "gpu", "exactly": exactly}]}},
    }
    made = api.post(CLAIMS, document)
    device = {"request": "gpu", "driver": driver, "pool": node, "device": "gpu-0"}
    where = {"key": "metadata.name", "operator": "In", "values": [node]}
    allocation = {
        "devices": {"results": [device]},
        "nodeSelector": {"nodeSelectorTerms": [{"matchFields": [where]}]},
    }
    api.patch(f"{CLAIMS}/{name}/status", {"status": {"allocation": allocation}})
    return made


def ready(node: str, driver: str) -> Document:
    return {"devices": [{"driver": driver, "pool": node, "device": "gpu-0"}]}


def refusal(config: Path, change: Callable[[Api], Awaitable[object]]) -> str:
    """Why the agent may not change something; empty: it may."""

    async def tried_once() -> str:
        async with connect(config) as api:
            try:
                await change(api)
            except ConflictError:
                return ""  # it is there already
            except KubeError as error:
                return error.message
            return ""

    return asyncio.run(tried_once())


def test_an_agent_writes_its_own_pool_and_the_devices_of_its_claims_alone(
    cluster: Cluster, installed: Callable[..., None], tmp_path: Path
) -> None:
    installed()
    config = kubeconfig_of_its_token(cluster, the_pod(cluster), tmp_path / "config")
    own, nic = cluster.node_name, "nic.example.com"

    def slice_refused(*of: str) -> str:
        document = slice_of(*of)
        return refusal(config, lambda api: api.create(SLICES, document, asked="create"))

    def status_refused(claim: str, status: Document) -> str:
        path = f"{CLAIMS}/{claim}/status"
        return refusal(config, lambda api: api.patch(path, {"status": status}, asked="patch"))

    claims = [(node, driver) for node in (own, "another") for driver in (OURS, NVIDIAS)]
    foreign = f"another-{OURS}-00"
    try:
        wait_until(lambda: slice_refused("another", OURS, "another", foreign), "the policy")
        assert "own node alone" in slice_refused("another", OURS, "another", foreign)
        assert "gpu.nvidia.com alone" in slice_refused(own, nic, own, f"{own}-{nic}-00")
        assert "pool of its own node" in slice_refused(own, OURS, "another", f"{own}-{OURS}-00")
        assert "pool of its own node" in slice_refused(own, OURS, own, foreign)
        assert slice_refused(own, NVIDIAS, own, f"{own}-{NVIDIAS}-00") == ""
        for node, driver in claims:
            allocated(cluster.api, f"{node}-{driver}", node, driver)
            assert bool(status_refused(f"{node}-{driver}", ready(node, driver))) == (node != own)
            why = status_refused(f"{node}-{driver}", {"allocation": None})
            assert "resourceclaims/binding" in why or "status alone" in why
    finally:
        for name in (foreign, f"{own}-{NVIDIAS}-00"):
            cluster.api.delete(f"{SLICES}/{name}")
        for node, driver in claims:
            cluster.api.delete(f"{CLAIMS}/{node}-{driver}")


async def is_enforced(config: Path, path: str) -> bool:
    change = {"metadata": {"labels": {"nvidia.com/tried": "1"}}}
    async with connect(config) as api:
        try:
            await api.patch(path, change, asked="patch")
        except DeniedError:
            return True
        return False


async def refused(api: Api, path: str, change: object, says: str) -> None:
    with pytest.raises(DeniedError) as caught:
        await api.patch(path, change, asked="patch", kind=PatchKind.STRATEGIC)
    assert says in caught.value.message


def of_this_tree(daemon_set: Document, *flags: str) -> None:
    """Runs this tree's agent with these flags more; all else is as it ships."""
    agent, front = daemon_set["spec"]["template"]["spec"]["containers"]
    for each in (agent, front):
        each |= {"image": TOOLS, "imagePullPolicy": "Never", "command": ["allot"]}
    agent["args"] += flags


def simulated(daemon_set: Document) -> None:
    of_this_tree(daemon_set, "--simulated", "a100-80gb:2")


def test_on_a_node_without_gpus_it_is_ready_and_offers_nothing(
    cluster: Cluster, installed: Callable[..., None]
) -> None:
    installed(of_this_tree)
    name = the_pod(cluster)["metadata"]["name"]
    agents = Pods(cluster, NAMESPACE)
    agents.wait_ready(name)
    assert agents.restarts(name, "agent") == 0


def test_a_gpu_whose_pod_is_gone_by_force_is_given_on_when_its_program_has_ended(
    cluster: Cluster, pods: Pods, installed: Callable[..., None]
) -> None:
    """The API server forgets such a pod at once; what the kubelet does about it comes later."""
    installed(simulated)
    name = the_pod(cluster)["metadata"]["name"]
    agents = Pods(cluster, NAMESPACE)
    agents.wait_ready(name)
    cluster.wait_allocatable(NVIDIA, 2)
    say = "from allotment.shares.process_tree import unseen_processes as f; print(f())"
    assert agents.exec(name, ["python3", "-c", say], container_name="agent").strip() == "None"
    # It does not end when it is asked to.
    stay = ["sh", "-c", "trap '' TERM; while true; do sleep 1; done"]
    pods.create(pod("whole", container(stay, limits={NVIDIA: "1"})))
    pods.wait_ready("whole")
    node = NodeAgent(cluster)
    share = node.share(pods, "whole")
    kubelet = cluster.components["kubelet"].process
    kubelet.send_signal(signal.SIGSTOP)
    try:
        path = f"/api/v1/namespaces/{pods.namespace}/pods/whole"
        cluster.api.delete(path, gracePeriodSeconds="0", propagationPolicy="Background")
        wait_until(lambda: cluster.api.find(path) is None, "end of the pod's object")
        # The agent hears of it and looks for the program. It tries again after 5 s and later.
        for _ in range(20):
            assert [each.id for each in node.shares(pods.namespace)] == [share.id]
            time.sleep(0.5)
    finally:
        kubelet.send_signal(signal.SIGCONT)
    wait_until(lambda: not node.shares(pods.namespace), "end of the share", every_s=0.5)
    assert agents.restarts(name, "agent") == 0


def test_the_agent_becomes_ready_and_gives_shares_with_the_rights_that_it_has(
    cluster: Cluster, api: Admin, pods: Pods, installed: Callable[..., None]
) -> None:
    installed(simulated)
    name = the_pod(cluster)["metadata"]["name"]
    agents = Pods(cluster, NAMESPACE)
    agents.wait_ready(name)
    cluster.wait_allocatable("nvidia.com/gpu", 2)
    label = {"nvidia.com/device-plugin.config": "soft"}
    try:
        api.patch(cluster.node_path, {"metadata": {"labels": label}})
        cluster.wait_allocatable("allotment.dev/gpu-compute", 200)
        cluster.wait_allocatable("allotment.dev/gpu", 32)
        wait_until(
            lambda: (
                api.get(cluster.node_path)["metadata"]["labels"].get("nvidia.com/gpu.count") == "2"
            ),
            "label of how many GPUs",
        )
        limits = part("4Gi", compute=25)
        pods.create(pod("quarter", container(burn("5Gi"), limits=limits)))
        assert burnt(pods, "quarter").total_bytes == 4 * GIB
        no_annotation_gets_it_more(api, pods, "quarter")
        figures = f"/api/v1/namespaces/{NAMESPACE}/pods/{name}:9446/proxy/metrics"
        wait_until(
            lambda: 'allotment_agent_shares_made_total{mode="soft"} 1.0' in api.text(figures),
            "the share in the figures",
            explain=lambda: api.text(figures),
        )
        pods.delete()
    finally:
        api.patch(cluster.node_path, {"metadata": {"labels": dict.fromkeys(label)}})
    assert agents.restarts(name, "agent") == 0


def no_annotation_gets_it_more(api: Admin, pods: Pods, name: str) -> None:
    """Of a pod that no scheduler has placed, on a node with an agent alone."""
    place = f"/api/v1/namespaces/{pods.namespace}/pods"
    forged = pod("forged", container(["true"]), annotations=on("GPU-1"))
    for path, body in ((place, forged), (f"{place}/{name}/binding", binding(name))):
        wait_until(
            lambda: "only Allotment's scheduler writes" in tried(api, path, body),  # noqa: B023
            "the policy",
        )
    for change, why in (
        (on("GPU-1"), "of a pod cannot change"),
        ({"allotment.dev/class": "latency"}, "except allotment.dev/resize"),
        ({"allotment.dev/compute": "25:100"}, "except allotment.dev/resize"),
    ):
        for path in (f"{place}/{name}", f"{place}/{name}/status"):
            with pytest.raises(ApiError, match=why):
                api.patch(path, {"metadata": {"annotations": change}})
    smaller = {"allotment.dev/resize": "memory:2Gi", "example.com/note": "x"}
    api.patch(f"{place}/{name}", {"metadata": {"annotations": smaller}})


def binding(name: str) -> Document:
    """Of a user who may bind pods, with a placement."""
    target = {"apiVersion": "v1", "kind": "Node", "name": "node-1"}
    metadata = {"name": name, "annotations": on("GPU-1")}
    return {"apiVersion": "v1", "kind": "Binding", "metadata": metadata, "target": target}


def test_an_upgrade_while_pods_arrive_fails_none(
    cluster: Cluster, pods: Pods, installed: Callable[..., None]
) -> None:
    """Also of the pods that the kubelet admits while the old front ends."""
    installed(simulated)
    first = the_pod(cluster)["metadata"]["name"]
    agents = Pods(cluster, NAMESPACE)
    agents.wait_ready(first)
    cluster.wait_allocatable(NVIDIA, 2)
    label = {"nvidia.com/device-plugin.config": "soft"}
    names: list[str] = []
    try:
        cluster.api.patch(cluster.node_path, {"metadata": {"labels": label}})
        cluster.wait_allocatable("allotment.dev/gpu", 32)
        template = {"metadata": {"annotations": {"tests/upgrade": "1"}}}
        cluster.api.patch(f"{DAEMON_SETS}/allotment-agent", {"spec": {"template": template}})

        def is_upgraded() -> bool:
            if len(names) < 32:  # the node has no more
                names.append(f"p{len(names)}")
                limits = part("1Gi")
                body = container(["sleep", "1000"], image=BUSYBOX, limits=limits)
                pods.create(pod(names[-1], body))
            path = f"/api/v1/namespaces/{NAMESPACE}/pods"
            (*_, last) = cluster.api.items(path, labelSelector="app.kubernetes.io/component=agent")
            status = cluster.api.get(f"{DAEMON_SETS}/allotment-agent")["status"]
            return (
                last["metadata"]["name"] != first
                and cluster.api.find(f"{path}/{first}") is None
                and status.get("numberReady") == 1
            )

        wait_until(
            is_upgraded,
            "upgrade",
            every_s=0.5,
            timeout_s=120,
            explain=lambda: "\n".join(agents.logs(each, "front") for each in agents.names()),
        )
        wait_taken_on(pods, *names)
        assert len(pods.names()) == len(names)
    finally:
        cluster.api.patch(cluster.node_path, {"metadata": {"labels": dict.fromkeys(label)}})
        pods.delete()
