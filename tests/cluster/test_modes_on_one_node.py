# SPDX-License-Identifier: Apache-2.0
"""One node whose GPUs are in all modes at the same time, and pods that ask in everybody's words.

API server, webhook, kube-scheduler with the extender, kubelet, agent, container: nothing but the
GPUs is simulated. What counts is what the program in the container finds.
"""

from __future__ import annotations

import itertools
import json
import signal
from collections.abc import Iterator

import installing
import pytest
import yaml
from click.testing import CliRunner
from scheduling import EVERY_NAME, PLACEMENT, Scheduler, scheduler_config
from stories import GIB, GPU, GPU_COMPUTE, GPU_MEMORY, MIB, NodeAgent, burn, burnt, node_agent
from testbed.api import ApiError, Json
from testbed.cluster import Cluster
from testbed.pods import Pods, container, pod
from testbed.waiting import tail, wait_until

from allotment.cli.groups import main_group
from allotment.model.quantities import parse_whole

MACHINE = "h100-80gb:5"
MODES = """\
version: v1
allotment:
  devices:
    - {match: {index: [0]}, mode: soft}
    - {match: {index: [1]}, mode: mps}
    - {match: {index: [2]}, mode: exclusive}
    - {match: {index: [3]}, mode: mig, mig: {keep: 2s}}
    - {match: {index: [4]}, modes: [soft, mps, mig], mig: {keep: 2s}}
"""
DIALECTS = """\
nvidia: {mig: slices}
hami: {modes: [soft, mig, mps]}
volcano: {modes: [soft, mig, mps]}
"""
EXAMPLES = installing.ROOT / "examples" / "mig"
SMALL = 9984 * MIB
"""Of a 1g.10gb on an H100 with 80 GB."""
_NAMES = itertools.count(1)


@pytest.fixture(scope="module")
def whole(testbed_machine: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A cluster of one node, with the manifest of the scheduler."""
    del testbed_machine
    config = scheduler_config(profiles=EVERY_NAME)
    with Cluster(state=tmp_path_factory.mktemp("modes"), scheduler_config=config) as made:
        made.allow_agent()
        installing.install(made)
        yield made


@pytest.fixture(scope="module")
def node(whole: Cluster) -> Iterator[NodeAgent]:
    with node_agent(whole, MODES, simulated=MACHINE) as agent:
        whole.wait_allocatable(GPU, 64)
        yield agent


@pytest.fixture(scope="module")
def scheduler(whole: Cluster, node: NodeAgent) -> Iterator[Scheduler]:
    del node
    path = whole.state / "dialects.yaml"
    path.write_text(DIALECTS, "utf-8")
    with installing.serving(whole, "--dialects", str(path)) as made:
        installing.wait_translates(whole)
        yield made


@pytest.fixture
def pods(whole: Cluster, scheduler: Scheduler) -> Iterator[Pods]:
    del scheduler
    made = Pods(whole, whole.make_namespace(f"modes-{next(_NAMES)}"))
    yield made
    made.delete()


def stays(
    name: str, memory: str, limits: dict[str, str], annotations: dict[str, str] | None = None
) -> Json:
    """A pod that takes memory, says what it got, and goes on holding it."""
    program = ["sh", "-c", f"{' '.join(burn(memory))}; exec sleep 1000"]
    body = pod(name, container(program, limits=dict(limits)), annotations=annotations)
    body["spec"]["schedulerName"] = "allotment-scheduler"
    body["spec"]["terminationGracePeriodSeconds"] = 0
    return body


def placed(pods: Pods, name: str) -> Json:
    """What was decided for a pod's only container."""
    found = pods.get(name)["metadata"]["annotations"]
    (part,) = json.loads(found[PLACEMENT])["containers"].values()
    return dict(part)


MIG = {"allotment.dev/mode": "mig"}
BODIES = {
    "soft": stays("soft", "1Gi", {GPU: "1", GPU_MEMORY: "4Gi", GPU_COMPUTE: "30"}),
    "mps": stays(
        "mps",
        "1Gi",
        {GPU: "1", GPU_MEMORY: "8Gi", GPU_COMPUTE: "50"},
        {"allotment.dev/mode": "mps"},
    ),
    "exclusive": stays("exclusive", "70Gi", {"nvidia.com/gpu": "1"}),
    "by-profile": stays("by-profile", "9Gi", {GPU: "1"}, {"allotment.dev/mig-profile": "1g.10gb"}),
    "by-memory": stays("by-memory", "15Gi", {GPU: "1", GPU_MEMORY: "15Gi"}, MIG),
    "nvidia": stays("nvidia", "9Gi", {"nvidia.com/mig-1g.10gb": "1"}),
    "hami": stays(
        "hami",
        "7Gi",
        {"nvidia.com/gpu": "1", "nvidia.com/gpumem": "8000"},
        {"nvidia.com/vgpu-mode": "mig"},
    ),
    "volcano": stays(
        "volcano",
        "7Gi",
        {"volcano.sh/vgpu-number": "1", "volcano.sh/vgpu-memory": "8000"},
        {"volcano.sh/vgpu-mode": "mig"},
    ),
}
SLICES = {
    "by-profile": ("1g.10gb", SMALL),
    "by-memory": ("1g.20gb", 20096 * MIB),
    "nvidia": ("1g.10gb", SMALL),
    "hami": ("1g.10gb", SMALL),
    "volcano": ("1g.10gb", SMALL),
}


def test_pods_of_every_mode_and_syntax_run_at_once(node: NodeAgent, pods: Pods) -> None:
    for body in BODIES.values():
        pods.create(json.loads(json.dumps(body)))
    for name in BODIES:
        pods.wait_ready(name, timeout_s=180)
    said = {name: burnt(pods, name) for name in BODIES}
    assert {name: each.errors for name, each in said.items()} == dict.fromkeys(BODIES, ())
    assert said["soft"].total_bytes == 4 * GIB
    assert said["mps"].total_bytes == 8 * GIB
    assert said["exclusive"].total_bytes > 79 * GIB
    found = {name: placed(pods, name) for name in BODIES if name != "exclusive"}
    assert {name: each.get("mode", "soft") for name, each in found.items()} == {
        "soft": "soft",
        "mps": "mps",
        **dict.fromkeys(SLICES, "mig"),
    }
    assert {
        name: (found[name]["slices"][0][0], said[name].total_bytes) for name in SLICES
    } == SLICES
    slices = {name: node.share(pods, name).devices[0].uuid for name in SLICES}
    assert all(each.startswith("MIG-") for each in slices.values())
    assert len(set(slices.values())) == len(SLICES)
    on_gpus: dict[str, set[str]] = {}
    for each in found.values():
        on_gpus.setdefault(each["devices"][0], set()).add(each.get("mode", "soft"))
    assert all(len(modes) == 1 for modes in on_gpus.values())
    pods.delete()
    node.wait_exact()


def test_eight_pods_on_a_gpu_of_seven_slices(node: NodeAgent, pods: Pods) -> None:
    """Seven run, and the eighth says what it waits for; as soon as one goes, it runs, too."""
    uuids = node.gpus()
    only = {
        "allotment.dev/mig-profile": "1g.10gb",
        "allotment.dev/uuids": uuids[3],
    }
    names = [f"slice-{number}" for number in range(8)]
    for name in names:
        pods.create(stays(name, "1Gi", {GPU: "1"}, only))

    def ready() -> list[str]:
        return [name for name in names if is_ready(pods.get(name))]

    wait_until(lambda: len(ready()) == 7, "seven pods with a slice", timeout_s=120)
    (waits,) = set(names) - set(ready())
    told = wait_until(
        lambda: [
            each["message"]
            for each in pods.events(waits)
            if each["reason"] == "FailedScheduling" and "1g.10gb" in each["message"]
        ],
        "why the eighth waits",
        explain=lambda: pods.explain(waits),
    )
    assert told
    starts = {placed(pods, name)["slices"][0][1] for name in ready()}
    assert starts == set(range(7))
    pods.delete(next(iter(ready())))
    pods.wait_ready(waits)
    pods.delete()
    node.wait_exact()


def test_every_example_has_its_slices(node: NodeAgent, pods: Pods) -> None:
    names = []
    for path in sorted(EXAMPLES.glob("*.yaml")):
        body = yaml.safe_load(path.read_text("utf-8"))
        body["spec"].setdefault("automountServiceAccountToken", False)
        names.append(pods.create(body)["metadata"]["name"])
    assert len(names) >= 5
    for name in names:
        pods.wait_phase(name, "Succeeded", timeout_s=120)
        assert placed(pods, name)["mode"] == "mig"
    pods.delete()
    node.wait_exact()


def is_ready(found: Json) -> bool:
    conditions = found.get("status", {}).get("conditions", [])
    return any(each["type"] == "Ready" and each["status"] == "True" for each in conditions)


def test_a_gpu_of_several_modes_has_the_one_that_is_asked_for(node: NodeAgent, pods: Pods) -> None:
    """Soft while a soft share is there, MIG after the last one has gone."""
    last = {"allotment.dev/uuids": node.gpus()[4]}
    pods.create(stays("first", "1Gi", {GPU: "1", GPU_MEMORY: "4Gi"}, last))
    pods.wait_ready("first")
    pods.create(
        stays("second", "1Gi", {GPU: "1"}, {**last, "allotment.dev/mig-profile": "2g.20gb"})
    )
    wait_until(
        lambda: any(each["reason"] == "FailedScheduling" for each in pods.events("second")),
        "the second one to wait",
    )
    pods.delete("first")
    pods.wait_ready("second")
    assert burnt(pods, "second").total_bytes == 20096 * MIB
    assert node.share(pods, "second").devices[0].uuid.startswith("MIG-")
    pods.delete()
    node.wait_exact()


SEES = """
import ctypes, time
cuda = ctypes.CDLL("libcuda.so.1")
device, context, held = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_uint64()
free, total = ctypes.c_size_t(), ctypes.c_size_t()
cuda.cuInit(0)
cuda.cuDeviceGet(ctypes.byref(device), 0)
cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
cuda.cuCtxSetCurrent(context)
cuda.cuMemAlloc_v2(ctypes.byref(held), ctypes.c_size_t(3 << 30))
last = 0
while True:
    cuda.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total))
    if total.value != last:
        last = total.value
        print(last >> 20, flush=True)
    time.sleep(0.05)
"""
"""Holds 3 GiB, and prints the memory of its GPU whenever it changes."""


def check_refusals(whole: Cluster, path: str) -> None:
    """What the webhook, the policy and Kubernetes do not let through."""
    for wish, why in {
        "memory:much": "'much' is not an amount",
        "gpus:2": "gpus",
        "other=memory:4Gi": "not in the pod",
    }.items():
        change = {"metadata": {"annotations": {"allotment.dev/resize": wish}}}
        with pytest.raises(ApiError, match=why):
            whole.api.patch(path, change)
    with pytest.raises(ApiError, match=r"except allotment\.dev/resize"):
        whole.api.patch(path, {"metadata": {"annotations": {"allotment.dev/class": "latency"}}})
    larger = {"limits": {GPU_MEMORY: "9Gi"}, "requests": {GPU_MEMORY: "9Gi"}}
    spec = {"containers": [{"name": "main", "resources": larger}]}
    with pytest.raises(ApiError, match="only cpu and memory resources are mutable"):
        whole.api.patch(f"{path}/resize", {"spec": spec}, kind="strategic")


def kill_node(whole: Cluster, node: NodeAgent) -> None:
    whole.restart("kubelet", signal.SIGKILL)
    node.end(signal.SIGKILL)
    node.again()


def shown_limits(node: NodeAgent, pods: Pods, name: str) -> list[int]:
    """Of a pod's devices, by `allot ps`."""
    own = node.share(pods, name).id
    shares = json.loads(node.allot("ps", "-o", "json"))["shares"]
    (shown,) = [each["devices"] for each in shares if each["id"] == own]
    return [each["memory_limit_bytes"] for each in shown]


def test_a_pod_is_resized_while_its_program_runs(
    whole: Cluster, node: NodeAgent, pods: Pods
) -> None:
    limits: dict[str, str | int] = {GPU: "1", GPU_MEMORY: "8Gi", GPU_COMPUTE: "30"}
    body = pod("seer", container(["python3", "-c", SEES], limits=limits))
    body["metadata"]["annotations"] = {"allotment.dev/mode": "soft"}
    body["spec"]["schedulerName"] = "allotment-scheduler"
    body["spec"]["terminationGracePeriodSeconds"] = 0
    pods.create(body)
    path = f"/api/v1/namespaces/{pods.namespace}/pods/seer"
    assert pods.wait_logs("seer") == "8192\n"
    before = parse_whole(whole.api.get("/api/v1/nodes/node-1")["status"]["allocatable"][GPU_MEMORY])

    def resize(*words: str) -> None:
        command = ["resize", "--pod", f"{pods.namespace}/seer", *words]
        result = CliRunner().invoke(
            main_group, [*command, "--kubeconfig", str(whole.kubeconfig)], standalone_mode=False
        )
        assert result.exit_code == 0, result

    def part() -> tuple[int, int]:
        found = placed(pods, "seer")
        return found["memory"] // GIB, found["guarantee"]

    resize("--memory", "20Gi", "--compute", "50:90")
    assert pods.wait_logs("seer", lines=2) == "8192\n20480\n"
    pods.wait_event("seer", reason="Resized")
    assert part() == (20, 5000)
    resize("--memory", "2Gi")
    refusal = pods.wait_event("seer", reason="ResizeRefused")["message"]
    assert "container main: not resized to memory:2Gi,compute:50:90" in refusal
    assert "need 3Gi" in refusal or "in use" in refusal, refusal
    assert part() == (20, 5000)
    resize("--memory", "4Gi")
    assert pods.wait_logs("seer", lines=3) == "8192\n20480\n4096\n"
    wait_until(lambda: part() == (4, 5000), "release of what shrank")

    def sums() -> int:
        found = whole.api.get("/api/v1/nodes/node-1")
        return parse_whole(found["status"]["allocatable"][GPU_MEMORY]) - before

    def is_in_force() -> bool:
        """The node reports the generation of the placement, and its sums are without the rest."""
        found = whole.api.get("/api/v1/nodes/node-1")["metadata"]["annotations"]
        own = pods.get("seer")["metadata"]
        generation = json.loads(own["annotations"][PLACEMENT])["resize"]["generation"]
        reported = json.loads(found["allotment.dev/devices"]).get("resized", {})
        return reported.get(own["uid"]) == generation and sums() == 4 * GIB

    wait_until(is_in_force, "Kubernetes counts what the pod has")
    kill_node(whole, node)
    wait_until(is_in_force, "the same after the end of kubelet and agent")
    assert part() == (4, 5000)
    assert shown_limits(node, pods, "seer") == [4 * GIB]
    assert pods.wait_logs("seer", lines=3) == "8192\n20480\n4096\n"
    check_refusals(whole, path)
    whole.api.patch(path, {"metadata": {"annotations": {"allotment.dev/resize": None}}})
    assert pods.wait_logs("seer", lines=4) == "8192\n20480\n4096\n8192\n"

    def explain() -> str:
        found = whole.api.get("/api/v1/nodes/node-1")["metadata"]["annotations"]
        log = tail(whole.log("allotment-scheduler"))
        return f"{pods.get('seer')['metadata']}\n{found['allotment.dev/devices']}\n{sums()}\n{log}"

    wait_until(lambda: part() == (8, 3000), "release of what it had more", explain=explain)
    wait_until(lambda: sums() == 0, "the sums as they were", explain=explain)
    assert pods.restarts("seer") == 0


def test_a_pod_placed_just_before_a_change_of_its_gpu_is_placed_again(
    whole: Cluster, node: NodeAgent, pods: Pods
) -> None:
    """Its placement cannot change, so that it would wait for ever."""
    body = stays("one", "1Gi", {GPU: "1", GPU_MEMORY: "4Gi"})
    template = {
        "metadata": {"labels": {"app": "one"}},
        "spec": body["spec"] | {"restartPolicy": "Always"},
    }
    sets = f"/apis/apps/v1/namespaces/{pods.namespace}/replicasets"
    replicas = {
        "apiVersion": "apps/v1",
        "kind": "ReplicaSet",
        "metadata": {"name": "one"},
        "spec": {
            "replicas": 1,
            "selector": {"matchLabels": {"app": "one"}},
            "template": template,
        },
    }
    kubelet = whole.components["kubelet"].process

    def bound() -> str | None:
        return next((each for each in pods.names() if pods.get(each)["spec"].get("nodeName")), None)

    kubelet.send_signal(signal.SIGSTOP)
    try:
        whole.api.post(sets, replicas)
        first = wait_until(bound, "the first pod's placement", explain=lambda: str(pods.names()))
        gpu = placed(pods, first)["devices"][0]
        rule = f"  devices:\n    - {{match: {{uuid: [{gpu}]}}, mode: exclusive}}\n"
        node.configure(MODES.replace("  devices:\n", rule))
        # Written by the agent: the kubelet writes nothing.
        whole.wait_allocatable(GPU_COMPUTE, 300)
    finally:
        kubelet.send_signal(signal.SIGCONT)
    try:
        second = wait_until(
            lambda: next((each for each in pods.names() if each != first), None),
            "another pod",
            timeout_s=90,
            explain=lambda: pods.explain(first),
        )
        pods.wait_ready(second, timeout_s=90)
        assert placed(pods, second)["devices"][0] != gpu
        reasons = [each["reason"] for each in pods.events(first)]
        assert {"ShareRefused", "PodEvicted"} <= set(reasons)
    finally:
        whole.api.delete(f"{sets}/one", propagationPolicy="Background")
        node.configure(MODES)
    pods.delete()
    node.wait_exact()
