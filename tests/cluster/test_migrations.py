# SPDX-License-Identifier: Apache-2.0
"""The migration guides, walked: every command of theirs, as it stands there, on a real cluster.

The systems that are left do not run here. What they do to pods and nodes is done by hand, as their
sources do it: their schedulers bind pods and write records, their plugins' labels are there.
"""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import installing
import pytest
import yaml
from others_plugin import OthersPlugin
from scheduling import Scheduler, placements, scheduler_config
from stories import GIB, GPU, GPU_MEMORY, MIB, NodeAgent, burnt, undisturbed
from testbed.api import Json
from testbed.cluster import Cluster
from testbed.pods import Pods, container, pod
from testbed.waiting import TestbedError, wait_until

from allotment.agent.configuring import PLUGIN_FOLDER

GUIDES = installing.ROOT / "docs" / "guides"
PROFILES = ("default-scheduler", "allotment-scheduler")
LABELS = (
    "example.com/gpus",
    "nvidia.com/device-plugin.config",
    "nvidia.com/gpu.deploy.device-plugin",
    "nvidia.com/gpu.deploy.gpu-feature-discovery",
)
"""What the guides write on a node."""
APPLIED = "kubectl apply -f deploy/manifests/agent.yaml -f deploy/manifests/scheduler.yaml"
_BURN = "allot burn --memory 512Mi --seconds 0 -o json; exec sleep 1000"


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """What is left: a pod as its users write it, and what the system does when it binds one."""

    dialect: str
    guide: str
    scheduler: str
    limits: Mapping[str, str | int]
    record: Mapping[str, str]
    labels: Mapping[str, str] = field(default_factory=dict)
    """What its scheduler writes on a pod besides."""
    memory: int
    """Bytes that a container has at last."""
    receipt: str
    keeps_scheduler: bool = False
    """Its pods keep naming its scheduler, which has queues: the guide says what to write."""
    not_here: tuple[str, ...] = ()
    """The beginnings of commands to what is not on this cluster."""
    pod_name: str = "train-0"


SYSTEMS = {
    "hami": System(
        dialect="hami",
        guide="migrate-from-hami.md",
        scheduler="hami-scheduler",
        limits={"nvidia.com/gpu": 1, "nvidia.com/gpumem": 4096, "nvidia.com/gpucores": 30},
        record={
            "hami.io/vgpu-node": "node-1",
            "hami.io/vgpu-devices-allocated": "UUID,NVIDIA,4096,30:;",
        },
        labels={"hami.io/vgpu-node": "node-1"},
        memory=4 * GIB,
        receipt="hami.io/vgpu-devices-allocated",
        not_here=(
            "helm ",
            "kubectl -n kube-system get configmap hami-scheduler-device",
            # The scheduler runs in no pod here: it is started with the option.
            "kubectl -n allotment-system",
        ),
    ),
    "aliyun": System(
        dialect="aliyun",
        guide="migrate-from-aliyun-gpushare.md",
        scheduler="default-scheduler",
        limits={"aliyun.com/gpu-mem": 3},
        record={"ALIYUN_COM_GPU_MEM_IDX": "0", "ALIYUN_COM_GPU_MEM_POD": "3"},
        memory=3 * GIB,
        receipt="ALIYUN_COM_GPU_MEM_IDX",
        not_here=(
            "kubectl inspect gpushare",
            "kubectl -n kube-system get daemonset gpushare-device-plugin-ds",
            "kubectl -n kube-system delete",
        ),
        pod_name="binpack-1-0",
    ),
    "volcano": System(
        dialect="volcano",
        guide="migrate-from-volcano-vgpu.md",
        scheduler="volcano",
        limits={"volcano.sh/vgpu-number": 1, "volcano.sh/vgpu-memory": 2048},
        record={
            "volcano.sh/vgpu-node": "node-1",
            "volcano.sh/vgpu-ids-new": "UUID,NVIDIA,2048,0:",
        },
        memory=2048 * MIB,
        receipt="volcano.sh/vgpu-ids-new",
        keeps_scheduler=True,
        not_here=("kubectl -n volcano-system",),
    ),
}


class Guide:
    """A guide's commands, by section, run as they stand there."""

    def __init__(self, cluster: Cluster, name: str, *, not_here: tuple[str, ...] = ()) -> None:
        self.cluster = cluster
        self.text = text = (GUIDES / name).read_text("utf-8")
        self._sections = dict(
            re.findall(r"^## (.*?)$\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
        )
        self._left = set(self._sections)
        self._not_here = not_here
        self.names: dict[str, str] = {"gpu-node-1": "node-1"}
        """What stands for what in the guide."""
        self.said: dict[str, str] = {}
        """What each command wrote."""

    def commands(self, section: str) -> list[str]:
        self._left.discard(section)
        found = []
        for block in re.findall(r"```console\n(.*?)```", self._sections[section], re.DOTALL):
            joined = re.sub(r"\\\n\s*", " ", block)
            lines = [line.strip() for line in joined.splitlines()]
            found += [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
        assert found, section
        return found

    def walk(self, section: str, *, until: str = "", since: str = "") -> None:
        """Runs a section's commands, or those before one and from another on."""
        commands = self.commands(section)
        begin = commands.index(since) if since else 0
        end = commands.index(until) if until else len(commands)
        for command in commands[begin:end]:
            if not command.startswith(self._not_here):
                self.said[command] = self.run(command)

    def run(self, command: str) -> str:
        expects_nothing = command.endswith("# none")
        for name, real in self.names.items():
            command = command.replace(name, real)
        path = f"{self.cluster.kubectl.parent}:{os.environ['PATH']}"
        environment = {**os.environ, "KUBECONFIG": str(self.cluster.kubeconfig), "PATH": path}
        done = subprocess.run(
            ["bash", "-c", command],
            env=environment,
            cwd=self.cluster.state,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        if bool(done.returncode) != expects_nothing:
            raise TestbedError(f"$ {command}\n{done.stdout}{done.stderr}")
        print(f"$ {command}\n{done.stdout}{done.stderr}")  # noqa: T201 - for the guide
        return done.stdout + done.stderr

    def check_all_were_read(self, *without: str) -> None:
        left = {each for each in self._left if "```console" in self._sections[each]}
        assert left == {*without}


@pytest.fixture(scope="module")
def whole(testbed_machine: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A cluster of one node, on which nobody has been yet."""
    del testbed_machine
    config = scheduler_config(profiles=PROFILES)
    with Cluster(state=tmp_path_factory.mktemp("migrations"), scheduler_config=config) as made:
        made.allow_agent()
        yield made


def workload(system: System) -> Json:
    """A Deployment of one pod, as its users have it."""
    main = container(["sh", "-c", _BURN], limits=system.limits)
    template = pod("unnamed", main, restart="Always")
    del template["metadata"]["name"]
    template["metadata"]["labels"] = {"app": "train"}
    template["spec"]["schedulerName"] = system.scheduler
    spec = {
        "replicas": 1,
        "selector": {"matchLabels": {"app": "train"}},
        "template": {key: template[key] for key in ("metadata", "spec")},
    }
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": "train"},
        "spec": spec,
    }


def bound_by(cluster: Cluster, system: System, uuid: str) -> Json:
    """Does what the system does with a pod that waits: writes its record, and binds it."""

    def waiting() -> Json | None:
        found = cluster.api.items("/api/v1/namespaces/team/pods")
        return next((each for each in found if is_waiting(each)), None)

    found = wait_until(waiting, "a pod that waits")
    path = f"/api/v1/namespaces/team/pods/{found['metadata']['name']}"
    record = {key: text.replace("UUID", uuid) for key, text in system.record.items()}
    metadata = {"annotations": record, "labels": dict(system.labels)}
    cluster.api.patch(path, {"metadata": metadata})
    binding = {"metadata": {"name": found["metadata"]["name"]}, "target": {"name": "node-1"}}
    cluster.api.post(f"{path}/binding", binding)
    return found


def is_waiting(found: Json) -> bool:
    is_going = found["metadata"].get("deletionTimestamp")
    return not is_going and not found["spec"].get("nodeName")


def is_ready(found: Json) -> bool:
    conditions = found["status"].get("conditions", ())
    return any(each["type"] == "Ready" and each["status"] == "True" for each in conditions)


@dataclass(frozen=True, slots=True)
class Walk:
    """A guide that is being walked, and who is there."""

    guide: Guide
    system: System
    cluster: Cluster
    node: NodeAgent
    pods: Pods

    def pod_of(self, dialect: str) -> Json:
        """The workload's pod that was translated, or was not, as soon as it runs."""

        def found() -> Json | None:
            for each in self.cluster.api.items("/api/v1/namespaces/team/pods"):
                meta = each["metadata"]
                written = meta.get("annotations", {}).get("allotment.dev/dialect", "")
                # While it is rolled out there may be one that another one takes the place of.
                if written == dialect and is_ready(each) and not meta.get("deletionTimestamp"):
                    return each
            return None

        def explain() -> str:
            return "\n".join(f"{each}: {self.pods.explain(each)}" for each in self.pods.names())

        what = f"a pod of {dialect or 'nobody'} that runs"
        return wait_until(found, what, timeout_s=150, explain=explain)

    def move_node(self) -> None:
        section, labelled = "Move a node", "example.com/gpus=allotment"
        commands = self.guide.commands(section)
        label = next(each for each in commands if labelled in each)
        self.guide.walk(section, until=label)
        self.guide.run(label)
        self.node.start(None, "--config-map", self.cluster.apply_config())
        offered = next(each for each in commands if "allocatable" in each)
        wait_until(lambda: '"allotment.dev/gpu"' in self.guide.run(offered), "offers")
        self.guide.walk(section, since=commands[commands.index(label) + 1])

    def move_namespace(self) -> Json:
        section = "Move a namespace"
        commands = self.guide.commands(section)
        looks = [each for each in commands if self.system.pod_name in each]
        self.guide.walk(section, until=looks[0] if looks else "")
        if self.system.keeps_scheduler:
            template = {"spec": {"schedulerName": "allotment-scheduler"}}
            path = "/apis/apps/v1/namespaces/team/deployments/train"
            self.cluster.api.patch(path, {"spec": {"template": template}})
        found = self.pod_of(self.system.dialect)
        self.guide.names[self.system.pod_name] = found["metadata"]["name"]
        if looks:
            self.guide.walk(section, since=looks[0])
        return found


@pytest.fixture
def walk(whole: Cluster, request: pytest.FixtureRequest) -> Iterator[Walk]:
    given: str | System = request.param
    system = given if isinstance(given, System) else SYSTEMS[given]
    node = NodeAgent(whole)
    namespace = whole.make_namespace("team")
    yield Walk(
        Guide(whole, system.guide, not_here=system.not_here), system, whole, node,
        Pods(whole, namespace),
    )  # fmt: skip
    whole.api.delete("/apis/apps/v1/namespaces/team/deployments/train")
    whole.api.delete("/api/v1/namespaces/team")
    whole.api.delete("/api/v1/namespaces/try")
    node.close()
    # The guides' own: the next one begins with a node on which nobody has been.
    labels = dict.fromkeys(LABELS)
    fresh = {"metadata": {"labels": labels}, "spec": {"unschedulable": None}}
    whole.api.patch(f"/api/v1/nodes/{whole.node_name}", fresh)
    gone = ("team", "try")
    wait_until(
        lambda: not any(whole.api.find(f"/api/v1/namespaces/{each}") for each in gone),
        "the end of the namespaces",
        timeout_s=120,
    )


@contextmanager
def scheduled(cluster: Cluster, *flags: str) -> Iterator[Scheduler]:
    """The scheduler and what its manifest holds, which are gone afterwards."""
    installing.install(cluster)
    try:
        with installing.serving(cluster, *flags) as made:
            yield made
    finally:
        # Without them pods are what their authors wrote, and are made though nobody answers.
        chosen = "app.kubernetes.io/name=allotment,app.kubernetes.io/component=scheduler"
        for kind in ("mutatingwebhookconfiguration", *installing.POLICIES):
            cluster.kubectl_run("delete", kind, "--selector", chosen)


def is_translated(walk: Walk) -> bool:
    try:
        return "allotment.dev/gpu:" in walk.guide.run(
            "kubectl -n try apply --dry-run=server -o yaml -f my-pod.yaml"
        )
    except TestbedError:
        return False


@pytest.mark.parametrize("walk", SYSTEMS, indirect=True)
def test_the_guide_leads_from_one_to_the_other_and_back(walk: Walk) -> None:
    guide, system, cluster = walk.guide, walk.system, walk.cluster
    cluster.api.post("/apis/apps/v1/namespaces/team/deployments", workload(system))
    old = bound_by(cluster, system, "GPU-old")["metadata"]["name"]
    walk.pods.wait_ready(old)
    # Volcano's device plugin has its settings there.
    metadata = {"name": "volcano-vgpu-device-config"}
    config = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata}
    cluster.api.apply(
        "/api/v1/namespaces/kube-system/configmaps/volcano-vgpu-device-config", config
    )
    guide.walk("Before")
    if system.labels:
        assert old in "".join(guide.said.values())

    guide.walk("Install without touching any pod", until=APPLIED)
    mine = pod("mine", container(["true"], limits=system.limits))
    mine["spec"]["schedulerName"] = system.scheduler
    (cluster.state / "my-pod.yaml").write_text(yaml.safe_dump(mine), "utf-8")
    with scheduled(cluster):
        # Nothing has changed for what runs, and for what is made there.
        assert "allotment.dev/dialect" not in walk.pods.get(old)["metadata"]["annotations"]
        guide.walk(
            "See what would be refused", until=guide.commands("See what would be refused")[1]
        )
        wait_until(lambda: is_translated(walk), "the webhook")
        walk.move_node()
        found = walk.move_namespace()
        said = burnt(walk.pods, found["metadata"]["name"])
        assert said.errors == ()
        assert said.total_bytes == system.memory
        annotations = found["metadata"]["annotations"]
        assert annotations[system.receipt] in {
            text.replace("UUID", said.uuid) for text in (*system.record.values(), "1")
        }

        guide.run("kubectl label namespace team allotment.dev/webhook=ignore")
        time.sleep(1.1)  # kubectl refuses to restart twice within a second
        guide.run("kubectl -n team rollout restart deployment")
        guide.walk("Go back")
        guide.run("kubectl uncordon gpu-node-1")
        bound_by(cluster, system, "GPU-old")
        again = walk.pod_of("")
        assert "allotment.dev/gpu" not in again["spec"]["containers"][0]["resources"]["limits"]


@pytest.fixture
def plugin(walk: Walk) -> Iterator[OthersPlugin]:
    """Stands for HAMi's device plugin; stopped afterwards, where the guide has not come to it."""
    ids = [f"{uuid}-{number}" for uuid in walk.node.gpus() for number in range(10)]
    made = OthersPlugin(walk.cluster.node.path(PLUGIN_FOLDER), ids)
    made.start()
    try:
        walk.cluster.wait_allocatable("nvidia.com/gpu", len(ids))
        yield made
    finally:
        made.stop()


@pytest.mark.parametrize("walk", ["hami"], indirect=True)
def test_pods_of_hami_s_may_stay_and_nothing_is_placed_over_them(
    walk: Walk, plugin: OthersPlugin
) -> None:
    """The kubelet has given their devices: the agent knows none of these, their records do."""
    guide, system, cluster = walk.guide, walk.system, walk.cluster
    first, second = walk.node.gpus()
    cluster.api.post("/apis/apps/v1/namespaces/team/deployments", workload(system))
    old = bound_by(cluster, system, first)["metadata"]["name"]
    walk.pods.wait_ready(old)
    guide.run("kubectl label namespaces --all allotment.dev/webhook=ignore")

    section = "A node that cannot be drained"
    commands = guide.commands(section)
    leaves = next(each for each in commands if " gpu-  " in each)
    label = next(each for each in commands if "example.com/gpus=allotment" in each)
    guide.walk(section, until=leaves)
    with scheduled(cluster, "--take-over", "hami") as scheduler:
        guide.walk(section, since=leaves, until=commands[commands.index(label) + 1])
        plugin.stop()
        walk.node.start(None, "--config-map", cluster.apply_config())
        wait_until(
            lambda: scheduler.figure("allotment_scheduler_pods_taken_over") == 1,
            "the pod is counted",
        )
        guide.walk(section, since=commands[commands.index(label) + 1])
        mine = Pods(cluster, cluster.make_namespace("mine"))
        for name, memory in {"large": "76Gi", "larger": "77Gi", "beside": "30Gi"}.items():
            limits: dict[str, str | int] = {GPU: 1, GPU_MEMORY: memory}
            body = pod(name, container(["sleep", "1000"], limits=limits))
            mine.create({**body, "spec": {**body["spec"], "schedulerName": "allotment-scheduler"}})
            if name == "large":
                mine.wait_ready(name)
        mine.wait_ready("beside")
        placed = placements([mine.get("large"), mine.get("beside")])
        assert placed["large"]["containers"]["main"]["devices"] == [second]
        assert placed["beside"]["containers"]["main"]["devices"] == [first]
        mine.wait_event("larger", reason="FailedScheduling")
        assert not mine.get("larger")["spec"].get("nodeName")
        mine.delete()
    cluster.api.delete("/api/v1/namespaces/mine")


# ---- time slicing --------------------------------------------------------------------------------

SLICED = """\
version: v1
sharing:
  timeSlicing:
    resources:
      - name: nvidia.com/gpu
        replicas: 4
"""
NVIDIAS = "nvidia-device-plugin"


@pytest.fixture
def sliced(whole: Cluster) -> Iterator[OthersPlugin]:
    """NVIDIA's plugin as its chart leaves it, but for its programs: one of ours stands for it."""
    node = NodeAgent(whole)
    ids = [f"{uuid}::{number}" for uuid in node.gpus() for number in range(4)]
    plugin = OthersPlugin(whole.node.path(PLUGIN_FOLDER), ids)
    plugin.start()
    whole.wait_allocatable("nvidia.com/gpu", len(ids))
    whole.make_namespace(NVIDIAS)
    for name in (NVIDIAS, f"{NVIDIAS}-gpu-feature-discovery"):
        labels = {"app": name}
        template = pod(
            "unnamed", container(["true"]), restart="Always", nodeSelector={"no": "node"}
        )
        template["metadata"] = {"labels": labels}
        body = {
            "metadata": {"name": name},
            "spec": {
                "selector": {"matchLabels": labels},
                "template": {key: template[key] for key in ("metadata", "spec")},
            },
        }
        whole.api.post(f"/apis/apps/v1/namespaces/{NVIDIAS}/daemonsets", body)
    config = {"metadata": {"name": "nvidia-plugin-configs"}, "data": {"default": SLICED}}
    whole.api.post(f"/api/v1/namespaces/{NVIDIAS}/configmaps", config)
    yield plugin
    plugin.stop()
    whole.api.delete(f"/api/v1/namespaces/{NVIDIAS}")


SLICE = System(
    dialect="",
    guide="migrate-from-nvidia-time-slicing.md",
    scheduler="default-scheduler",
    limits={"nvidia.com/gpu": 1},
    record={},
    memory=0,
    receipt="",
    not_here=(
        "kubectl apply -f deploy/manifests/agent.yaml",
        "kubectl delete -f deploy/manifests/agent.yaml",
        # The agent runs in no pod here.
        "kubectl -n allotment-system exec ds/allotment-agent",
    ),
    pod_name="old-pod",
)


@pytest.mark.parametrize("walk", [SLICE], indirect=True, ids=["nvidia"])
def test_replicas_go_on_and_become_parts_that_are_enforced(
    walk: Walk, sliced: OthersPlugin
) -> None:
    guide, cluster = walk.guide, walk.cluster
    cluster.api.post("/apis/apps/v1/namespaces/team/deployments", workload(walk.system))
    old = walk.pod_of("")["metadata"]["name"]
    guide.names["old-pod"] = old
    guide.walk("Before")
    assert "replicas: 4" in "".join(guide.said.values())

    config = cluster.apply_config()
    path = f"/api/v1/namespaces/{config.split('/')[0]}/configmaps/{config.split('/')[1]}"
    cluster.api.patch(path, {"data": {"default": SLICED}})
    looks = next(each for each in guide.commands("Change hands") if "allocatable" in each)
    with undisturbed(walk.pods, old):
        guide.walk("Change hands", until=looks)
        sliced.stop()
        cluster.wait_allocatable("nvidia.com/gpu", 0)
        walk.node.start(None, "--config-map", config, environment={"DEFAULT_CONFIG": "default"})
        cluster.wait_allocatable("nvidia.com/gpu", 8)
        walk.pods.wait_event(old, reason="ShareTakenOver")
        guide.walk("Change hands", since=looks)

    rule = re.findall(r"```yaml\n(.*?)```", guide.text, re.DOTALL)[-1]
    assert rule.startswith(SLICED)
    told, times = "configuration in force", walk.node.log.count("configuration in force")
    cluster.api.patch(path, {"data": {"default": rule}})
    wait_until(lambda: walk.node.log.count(told) > times, "the rule is in force")
    guide.walk("Enforce it")
    wait_until(lambda: not cluster.api.find(f"/api/v1/namespaces/team/pods/{old}"), "its end")
    said = burnt(walk.pods, walk.pod_of("")["metadata"]["name"])
    assert said.total_bytes == pytest.approx(79.26 * GIB / 4, rel=0.01)
