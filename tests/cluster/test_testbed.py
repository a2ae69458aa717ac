# SPDX-License-Identifier: Apache-2.0
"""The test cluster itself: it is a real Kubernetes, and it leaves the machine as it was."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from testbed import versions
from testbed.api import Api, ApiError, Json
from testbed.certificates import SERVICE_ADDRESS
from testbed.cluster import Cluster
from testbed.images import BUSYBOX, TOOLS
from testbed.layers import make_image, make_layer
from testbed.pods import Pods, container, pod
from testbed.sandbox import Link, children_of, processes_of
from testbed.waiting import TestbedError, wait_until

SLEEPER = container(["sleep", "1000"], image=BUSYBOX)


# ---- a real cluster ------------------------------------------------------------------------------


def test_node_is_a_real_kubelets(cluster: Cluster) -> None:
    info = cluster.wait_node_ready()["status"]["nodeInfo"]
    assert info["kubeletVersion"] == f"v{versions.KUBERNETES}"
    assert info["containerRuntimeVersion"] == f"containerd://{versions.CONTAINERD}"


def test_pod_runs_and_is_read(pods: Pods) -> None:
    pods.create(pod("talker", container(["sh", "-c", "echo hello; sleep 1000"], image=BUSYBOX)))
    pods.wait_ready("talker")
    wait_until(lambda: pods.logs("talker") == "hello\n", "log")
    assert pods.exec("talker", ["echo", "inside"]) == "inside\n"
    assert pods.wait_event("talker", reason="Scheduled")
    pods.delete("talker")
    assert pods.names() == []


def test_tools_run_the_tree(pods: Pods) -> None:
    check = "import aiohttp, grpc, prometheus_client, structlog"
    pods.create(
        pod(
            "tools",
            container(["allot", "burn", "--help"], name="burn"),
            container(["python3", "-c", check], name="agent-imports"),
        )
    )
    pods.wait_phase("tools", "Succeeded")
    assert pods.logs("tools", "burn").startswith("Usage: allot burn")


def test_what_fails_is_explained(pods: Pods) -> None:
    pods.create(pod("loser", container(["sh", "-c", "echo my last words; exit 3"], image=BUSYBOX)))
    with pytest.raises(TestbedError, match=r"(?s)loser is Failed.*exitCode.*my last words"):
        pods.wait_phase("loser", "Succeeded")


def test_pod_reaches_the_api_server_as_in_any_cluster(pods: Pods) -> None:
    program = f"""if True:
        import os, ssl, urllib.request, urllib.error
        folder = "/var/run/secrets/kubernetes.io/serviceaccount"
        assert os.environ["KUBERNETES_SERVICE_HOST"] == "{SERVICE_ADDRESS}"
        request = urllib.request.Request(
            "https://{SERVICE_ADDRESS}/api/v1/nodes",
            headers={{"Authorization": "Bearer " + open(folder + "/token").read()}},
        )
        context = ssl.create_default_context(cafile=folder + "/ca.crt")
        try:
            urllib.request.urlopen(request, context=context, timeout=10)
        except urllib.error.HTTPError as error:
            print(error.code, error.read().decode())
    """
    body = pod("client", container(["python3", "-c", program]), automountServiceAccountToken=True)
    pods.create(body)
    pods.wait_phase("client", "Succeeded")
    said = pods.logs("client")
    assert said.startswith("403 ")
    assert f"system:serviceaccount:{pods.namespace}:default" in said


def test_rights_are_enforced(cluster: Cluster) -> None:
    with pytest.raises(ApiError) as refused:
        cluster.api_as("agent").items("/api/v1/secrets")
    assert refused.value.status == 403


# ---- parts that fail -----------------------------------------------------------------------------


@pytest.fixture
def sleeper(pods: Pods) -> Iterator[tuple[Pods, str]]:
    """A pod that runs; afterwards it must run as before: the same container, never restarted."""
    pods.create(pod("sleeper", SLEEPER, restart="Always"))
    before = pods.wait_ready("sleeper")["status"]["containerStatuses"][0]["containerID"]
    yield pods, before
    after = pods.wait_ready("sleeper")["status"]["containerStatuses"][0]
    assert after["containerID"] == before
    assert after["restartCount"] == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=["term", "kill"])
def test_kubelet_restart_keeps_pods(
    cluster: Cluster, sleeper: tuple[Pods, str], number: signal.Signals
) -> None:
    cluster.restart("kubelet", number)
    pods, _ = sleeper
    pods.create(pod("next", SLEEPER))
    pods.wait_ready("next")


@pytest.mark.usefixtures("sleeper")
def test_containerd_restart_keeps_pods(cluster: Cluster) -> None:
    cluster.restart("containerd", signal.SIGKILL)


@pytest.mark.usefixtures("sleeper")
def test_api_server_away(cluster: Cluster, api: Api) -> None:
    with cluster.without("kube-apiserver", signal.SIGKILL), pytest.raises(OSError, match="refused"):
        api.get("/api/v1/nodes")
    assert cluster.wait_node_ready()


def test_reboot_starts_pods_again(cluster: Cluster, pods: Pods) -> None:
    pods.create(pod("comes-back", SLEEPER, restart="Always"))
    pods.wait_ready("comes-back")
    cluster.node.run(["sh", "-c", "mkdir -p /run/allotment && touch /run/allotment/of-this-boot"])
    cluster.reboot_node()
    assert not cluster.node.path("/run/allotment").exists()
    pods.wait_restarted("comes-back", timeout_s=150)


def test_what_dies_is_named_with_its_log(own_cluster: Callable[..., Cluster]) -> None:
    own = own_cluster(settings=None)
    own.stop("kube-scheduler", signal.SIGKILL)
    with pytest.raises(
        TestbedError, match=r"(?s)kube-scheduler is not running.*kube-scheduler.log"
    ):
        own.components["kube-scheduler"].wait_ready()


# ---- nothing is left -----------------------------------------------------------------------------


def traces_of(link: Link, state: Path) -> list[str]:
    """What of a cluster there is on the machine, as this process sees it."""
    found = [f"mount {line}" for line in _read("/proc/self/mounts") if str(state) in line]
    found += [str(path) for path in Path("/sys/fs/cgroup").glob(f"**/{link.name}")]
    found += [f"interface {link.name}"] if Path("/sys/class/net", link.name).exists() else []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and folder.name != str(os.getpid()):
            with contextlib.suppress(OSError):
                command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                if str(state) in command and "pytest" not in command:
                    found.append(f"process {folder.name} {command}")
    return found


def of_clusters(state: dict[str, object]) -> dict[str, object]:
    """Of what `machine_state` tells, what may come of a cluster: others write logs meanwhile."""
    words = ("allotment", "cdi", "cni", "container", "etcd", "kube", "nvidia", "pods")
    return {
        name: [each for each in found if any(word in each.name for word in words)]
        if isinstance(found, list)
        else found
        for name, found in state.items()
    }


def _read(path: str) -> list[str]:
    return Path(path).read_text(encoding="utf-8", errors="replace").splitlines()


def test_cluster_leaves_nothing_behind(
    tmp_path: Path,
    cluster: Cluster,
    machine_before: dict[str, object],
    machine_state: Callable[[], dict[str, object]],
) -> None:
    del cluster  # the second one runs beside the first
    state = tmp_path / "own"
    with Cluster(state=state) as own:
        pods = Pods(own, "default")
        pods.create(pod("left-running", SLEEPER))
        pods.wait_ready("left-running")
        link, inside = own.node.link, processes_of(own.node.pid)
        assert len(inside) >= 10  # first, six servers, a shim, its two containers
        assert any("interface" in trace for trace in traces_of(link, state))
        assert any("/sys/fs/cgroup" in trace for trace in traces_of(link, state))
        assert of_clusters(machine_state()) == of_clusters(machine_before)
    assert [pid for pid in inside if Path(f"/proc/{pid}").exists()] == []
    assert traces_of(link, state) == []
    assert of_clusters(machine_state()) == of_clusters(machine_before)
    assert (
        sorted(path.name for path in state.iterdir() if path.name in {"etcd", "containerd"}) == []
    )


def test_command_line_brings_one_up_and_killing_it_leaves_nothing(
    tmp_path: Path, testbed_machine: None
) -> None:
    del testbed_machine
    state = tmp_path / "held"
    command = [sys.executable, "-m", "testbed"]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    holder = subprocess.Popen(
        [*command, "up", "--no-agent", "--state", str(state)],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert holder.stdout is not None
        said = []
        for line in holder.stdout:
            said.append(line)
            if line.startswith("to end it"):
                break
        assert any(line.startswith("export KUBECONFIG=") for line in said), said
        description = json.loads((state / "cluster.json").read_text())
        with contextlib.closing(Api(Path(description["kubeconfig"]))) as api:
            node = api.get("/api/v1/nodes/node-1")
        assert node["status"]["nodeInfo"]["kubeletVersion"] == f"v{versions.KUBERNETES}"
        inside = processes_of(description["first_process"])
        assert len(inside) >= 7
    finally:
        holder.kill()
        holder.wait()
        holder.stdout.close()  # type: ignore[union-attr]
    wait_until(
        lambda: not any(Path(f"/proc/{pid}").exists() for pid in inside),
        "end of the sandbox's processes",
    )
    subprocess.run([*command, "down", "--state", str(state)], env=environment, check=True)
    assert not (state / "etcd").exists()


# ---- without a kubelet ---------------------------------------------------------------------------


def test_two_hundred_fake_nodes(own_cluster: Callable[..., Cluster]) -> None:
    own = own_cluster(settings=None)
    names = own.add_fake_nodes(200, capacity={"allotment.dev/gpu": "16"}, labels={"zone": "a"})
    assert len(names) == len(own.api.items("/api/v1/nodes")) == 200
    pods = Pods(own, "default")
    for number in range(40):
        taker = container(["true"], limits={"allotment.dev/gpu": 16})
        pods.create(pod(f"p-{number}", taker, nodeSelector={"zone": "a"}))
    placed = [
        pods.wait(f"p-{number}", lambda found: "nodeName" in found["spec"], "node")
        for number in range(40)
    ]
    # Each takes all of a node, so that no two share one.
    assert len({found["spec"]["nodeName"] for found in placed}) == 40


def test_fake_nodes_want_no_kubelet(cluster: Cluster) -> None:
    with pytest.raises(TestbedError, match="without a kubelet"):
        cluster.add_fake_nodes(1)


# ---- its parts -----------------------------------------------------------------------------------


def test_processes_of_the_node_are_signalled_and_waited_for(cluster: Cluster) -> None:
    process = cluster.node.popen(["sleep", "100"])
    assert Path(f"/proc/{process.pid}/ns/pid").readlink() == (
        Path(f"/proc/{cluster.node.pid}/ns/pid").readlink()
    )
    process.send_signal(signal.SIGSTOP)
    process.send_signal(signal.SIGCONT)
    assert process.stop() == -signal.SIGTERM


def test_what_runs_too_long_on_the_node_is_ended(cluster: Cluster) -> None:
    with pytest.raises(TestbedError, match=r"longer than 0\.2 s"):
        cluster.node.run(["sleep", "987654"], timeout_s=0.2)
    assert [pid for pid in children_of(os.getpid()) if b"987654" in _command(pid)] == []
    assert [pid for pid in processes_of(cluster.node.pid) if b"987654" in _command(pid)] == []


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def test_node_paths_are_seen_from_outside(cluster: Cluster) -> None:
    cluster.node.run(["sh", "-c", "echo hi > /run/seen"])
    assert cluster.node.path("/run/seen").read_text() == "hi\n"
    assert not Path("/run/seen").exists()


def test_layers_and_images_depend_on_content_alone(tmp_path: Path) -> None:
    def fill(root: Path) -> None:
        (root / "b").write_text("2")
        (root / "a").mkdir(mode=0o700)

    made = []
    for name in ("one", "two"):
        layer = make_layer(tmp_path / name, "key", fill)
        image = make_image(tmp_path / name, "localhost/x:test", [layer], entrypoint=["/b"])
        made.append((layer.digest, image.name, image.read_bytes()))
        time.sleep(0.01)  # another mtime
    assert made[0] == made[1]


def test_cached_layer_is_not_filled_again(tmp_path: Path) -> None:
    def fill(root: Path) -> None:
        (root / "a").write_text("1")

    def fail(root: Path) -> None:
        raise AssertionError(root)

    assert make_layer(tmp_path, "key", fill) == make_layer(tmp_path, "key", fail)


def test_subnets_do_not_overlap() -> None:
    addresses = [end for index in range(1, 300) for end in (Link(index).outer, Link(index).inner)]
    assert len(set(addresses)) == len(addresses)
    assert Link(1).outer == "198.18.0.5"
    assert Link(2**15 - 1).inner == "198.19.255.254"


def test_waiting_ends_with_what_explains_it() -> None:
    def explain() -> str:
        return "the reason"

    with pytest.raises(TestbedError, match=r"(?s)no miracle after 0.01 s.*the reason"):
        wait_until(lambda: None, "miracle", timeout_s=0.01, explain=explain)


def test_images_are_named_for_the_node(cluster: Cluster) -> None:
    def names() -> set[str]:
        known: list[Json] = cluster.api.get(cluster.node_path)["status"].get("images", [])
        return {name for image in known for name in image["names"]}

    wait_until(lambda: {TOOLS, BUSYBOX} <= names(), "images", explain=lambda: str(names()))
