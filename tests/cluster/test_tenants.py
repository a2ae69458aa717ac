# SPDX-License-Identifier: Apache-2.0
"""What a pod's author can do to a node's shares, and what the node does about its own troubles.

SECURITY.md names these tests: what a pod with the host's files, with privilege or without an API
server can do, and where that is seen.
"""

from __future__ import annotations

import signal
import struct
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from stories import GIB, GPU, GPU_MEMORY, SOFT, NodeAgent, container_id, node_agent, part
from testbed.api import ApiError, Json
from testbed.cluster import Cluster
from testbed.images import BUSYBOX
from testbed.pods import Pods, container, pod
from testbed.waiting import wait_until

from allotment.kube.inventories import DEVICES

SLEEP = ["sleep", "1000"]
EVICTING = f"{SOFT}  health: {{evictAfter: 2s}}\n"
CHECKPOINT = "/var/lib/kubelet/device-plugins/kubelet_internal_checkpoint"
HASTY_FRONT = """\
from pathlib import Path
from allotment.agent.plugin.front import Front, run
kubelet = Path("/var/lib/kubelet/device-plugins/kubelet.sock")
run(Front(kubelet=kubelet, state=Path("/run/allotment"), bridge_s=2))
"""
ADMISSION = "/apis/admissionregistration.k8s.io/v1"
STATE_FOLDER = Path(__file__).resolve().parents[2] / "deploy" / "manifests" / "state-folder.yaml"


@pytest.fixture(scope="module")
def node(cluster: Cluster) -> Iterator[NodeAgent]:
    """Two soft GPUs, whose pods are evicted soon after a loss."""
    with node_agent(cluster, EVICTING) as agent:
        yield agent
        agent.fault("--clear")


def asking(name: str) -> Json:
    return pod(name, container(SLEEP, image=BUSYBOX, limits=part("4Gi")), restart="Always")


def with_path(name: str, path: str, *command: str) -> Json:
    """A pod of the host's files, without a GPU."""
    mount = {"name": "host", "mountPath": "/host"}
    body = container(command or SLEEP, image=BUSYBOX, volumeMounts=[mount])
    return pod(name, body, volumes=[{"name": "host", "hostPath": {"path": path}}])


def test_a_limit_that_a_pod_with_the_hosts_files_changes_is_seen(
    node: NodeAgent, pods: Pods
) -> None:
    pods.create(asking("victim"))
    pods.wait_ready("victim")
    share = node.share(pods, "victim")
    policy = f"/run/allotment/shares/{share.id}/policy"
    place = node.cluster.node.path(policy).read_bytes().index(struct.pack("<Q", 4 * GIB))
    script = (
        f"printf '\\0\\0\\0\\0\\017\\0\\0\\0' |"  # 60 GiB
        f" dd of=/host/shares/{share.id}/policy bs=1 seek={place} conv=notrunc"
    )
    pods.create(with_path("hostile", "/run/allotment", "sh", "-c", script))
    pods.wait_phase("hostile", "Succeeded")
    node.end()
    node.again()  # it looks at its start, and once a minute
    told = pods.wait_event("victim", reason="LimitExceeded", timeout_s=90)
    assert "is 60Gi, not 4Gi as recorded" in told["message"]


def test_no_pod_gets_the_state_folder_where_the_policy_is(
    node: NodeAgent, pods: Pods, tmp_path: Path
) -> None:
    assert "no policy allotment-state-folder" in doctor(node)
    documents = list(yaml.safe_load_all(STATE_FOLDER.read_text("utf-8")))
    path = tmp_path / "state-folder.yaml"
    path.write_text(yaml.safe_dump_all(documents), "utf-8")
    node.cluster.kubectl_run("apply", "--server-side", "--validate=strict", "-f", str(path))
    api = node.cluster.api
    labels = {"allotment.dev/host-paths": "allowed"}
    reaching = (
        *("/", "/run", "/run/allotment/shares", "//run/./allotment/", "/etc/cdi"),
        *("/var", "/var/run", "/var//run/allotment", "/var/lib/kubelet/pods"),
        *("/run/containerd/containerd.sock", "/var/lib/containerd", "/run/crio/crio.sock"),
        *("/run/k3s/containerd/containerd.sock", "/var/run/docker.sock", "/var/lib/k0s/kubelet"),
        *("/proc", "/proc/1/root/run/allotment", "/proc/self/cwd", "/dev", "/dev/fd/3"),
    )
    others = ("/run/allot", "/srv", "/var/log", "/var/runner", "/dev/kvm", "/sys", "/procs")

    def is_refused(host_path: str) -> bool:
        body = with_path("tried", host_path)
        try:
            api.post(f"/api/v1/namespaces/{pods.namespace}/pods", body, dryRun="All")
        except ApiError as error:
            return "reaches the files by which Allotment" in str(error)
        return False

    try:
        wait_until(lambda: is_refused("/run"), "the policy")
        assert [each for each in reaching if not is_refused(each)] == []
        assert [each for each in others if is_refused(each)] == []
        assert "guarded by allotment-state-folder, as in this version" in doctor(node)
        warns = {"spec": {"validationActions": ["Warn"]}}
        api.patch(f"{ADMISSION}/validatingadmissionpolicybindings/allotment-state-folder", warns)
        told = doctor(node)
        assert "the binding of allotment-state-folder differs" in told
        assert "in validationActions" in told
        api.patch(f"/api/v1/namespaces/{pods.namespace}", {"metadata": {"labels": labels}})
        wait_until(lambda: not is_refused("/run"), "the exemption")
    finally:
        node.cluster.kubectl_run("delete", "-f", str(path))


def doctor(node: NodeAgent) -> str:
    environment = f"KUBECONFIG={node.cluster.kubeconfig}"
    return node.cluster.node.run(
        ["env", environment, sys.executable, "-m", "allotment", "doctor"]
    ).stdout


def test_a_privileged_pod_is_told_of(node: NodeAgent, pods: Pods) -> None:
    body = asking("all")
    body["spec"]["hostPID"] = True
    body["spec"]["containers"][0]["securityContext"] = {"privileged": True}
    pods.create(body)
    pods.wait_ready("all")
    pods.wait_event("all", reason="ShareUnguarded", contains="is privileged")
    pods.wait_event("all", reason="ShareUnguarded", contains="hostPID")
    # It opens what is another share's.
    pods.create(asking("victim"))
    pods.wait_ready("victim")
    share = node.share(pods, "victim")
    said = pods.exec("all", ["ls", f"/proc/1/root/run/allotment/shares/{share.id}"])
    assert "policy" in said


def test_a_static_pod_is_told_of(node: NodeAgent, pods: Pods) -> None:
    """It comes from a file of the node: no webhook, quota or scheduler looks at it."""
    body = asking("static")
    body["metadata"]["namespace"] = pods.namespace
    file = node.cluster.node.path("/etc/kubernetes/manifests/static.yaml")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(yaml.safe_dump(body), "utf-8")
    name = f"static-{node.cluster.node_name}"
    try:
        wait_until(lambda: name in pods.names(), "the static pod's mirror")
        pods.wait_ready(name)
        pods.wait_event(name, reason="ShareUnguarded", contains="is static")
    finally:
        file.unlink()
    wait_until(lambda: name not in pods.names(), "the end of the static pod")


def test_a_removed_checkpoint_is_written_again(node: NodeAgent, pods: Pods) -> None:
    pods.create(asking("one"))
    first = container_id(pods.wait_ready("one"))
    share = node.share(pods, "one")
    checkpoint = node.cluster.node.path(CHECKPOINT)
    checkpoint.unlink()
    node.kill_container(pods, "one")
    wait_until(lambda: container_id(pods.get("one")) != first, "another container", timeout_s=60)
    pods.wait_ready("one")
    assert node.share(pods, "one") == share
    assert checkpoint.exists()
    node.wait_exact()


def test_the_pods_of_a_lost_gpu_are_placed_again(node: NodeAgent, pods: Pods) -> None:
    cluster = node.cluster
    sets = f"/apis/apps/v1/namespaces/{pods.namespace}/replicasets"
    labels = {"app": "one"}
    spec = {
        "replicas": 1,
        "selector": {"matchLabels": labels},
        "template": {"metadata": {"labels": labels}, "spec": asking("one")["spec"]},
    }
    body = {"apiVersion": "apps/v1", "kind": "ReplicaSet", "metadata": {"name": "one"}}
    cluster.api.post(sets, body | {"spec": spec})
    try:
        first = wait_until(lambda: next(iter(pods.names()), None), "a pod")
        pods.wait_ready(first)
        lost = node.share(pods, first).devices[0].uuid
        # No controller makes this one again.
        pods.create(asking("bare"))
        pods.wait_ready("bare")
        # The next agent has not seen that GPU, and evicts its pods all the same.
        node.end(signal.SIGKILL)
        node.fault("--gpu", lost, "--lost")
        node.again()
        told = pods.wait_event(first, reason="PodEvicted", contains=lost)
        assert "its controller creates it again" in told["message"]
        second = wait_until(
            lambda: next((each for each in pods.names() if each not in {first, "bare"}), None),
            "another pod",
        )
        pods.wait_ready(second)
        assert node.share(pods, second).devices[0].uuid != lost
        if node.share(pods, "bare").devices[0].uuid == lost:
            pods.wait_event("bare", reason="PodNotEvicted", contains="no controller")
        assert pods.restarts("bare") == 0
    finally:
        cluster.api.delete(f"{sets}/one", propagationPolicy="Background")
        node.fault("--clear")
    pods.delete()
    cluster.wait_allocatable(GPU, 32)


def test_a_node_without_an_agent_gets_no_pod_and_nothing_is_left_after_a_removal(
    node: NodeAgent, pods: Pods
) -> None:
    """The last. Its front bridges two seconds in place of five minutes."""
    cluster = node.cluster

    def left() -> list[str]:
        found = cluster.api.get(cluster.node_path)
        fields = [*found["metadata"]["labels"], *found["metadata"].get("annotations", {})]
        status = found["status"]
        fields += [*status["capacity"], *status["allocatable"]]
        fields += [each["type"] for each in status["conditions"]]
        ours = ("nvidia.com/gpu.", "nvidia.com/cuda", GPU_MEMORY, DEVICES, "GpuHealthy")
        return [each for each in fields if each.startswith(ours)]

    assert len(left()) > 10
    former = cluster.front_pid
    cluster.node.popen([sys.executable, "-c", HASTY_FRONT])
    wait_until(lambda: cluster.front_pid not in {None, former}, "another front")
    node.end()
    cluster.wait_allocatable(GPU, 0)
    pods.create(asking("late"))
    pods.wait_event("late", reason="FailedScheduling", contains=f"Insufficient {GPU}")
    said = node.allot("uninstall", "--kubeconfig", str(cluster.kubeconfig))
    assert said == f"{cluster.node_name}: removed what its agent wrote\n"
    assert left() == []
    node.again()
    pods.wait_ready("late")
