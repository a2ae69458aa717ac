# SPDX-License-Identifier: Apache-2.0
"""A pod of every dialect, as that system's documentation writes it, on a cluster with everything.

The whole way with nothing in between that is not real: API server, webhook, kube-scheduler with the
extender, binding, kubelet, agent, container. What counts is what the program in the container
finds. The scheduler has the rights of its manifest, and its admission policies are in force.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from xml.etree import ElementTree as ET

import installing
import pytest
import yaml
from scheduling import EVERY_NAME, PLACEMENT, Scheduler, placements, scheduler_config
from stories import GIB, MIB, SOFT, NodeAgent, burn, burnt, node_agent, part
from testbed.api import Json
from testbed.cluster import Cluster
from testbed.pods import Pods, container, pod
from testbed.waiting import wait_until

from allotment.dialects.foreign.kubeshare import KIND, pod_of_sharepod

EXAMPLES = installing.ROOT / "examples" / "dialects"
_NAMES = itertools.count(1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """What an example's container has of each of its GPUs."""

    container: str
    memory: int | None
    """Bytes; None: a part of the GPU."""
    part: float = 0.0
    gpus: int = 1
    guarantee: int = 0
    """Percent."""
    receipt: str = ""
    """An annotation in which that system says what a pod was given."""


EXPECTED = {
    "allotment": Expected(container="train", memory=4 * GIB, guarantee=30),
    "hami": Expected(
        container="ubuntu-container", memory=3000 * MIB, gpus=2, guarantee=30,
        receipt="hami.io/vgpu-devices-allocated",
    ),
    "volcano": Expected(
        container="cuda-container", memory=3000 * MIB, gpus=2, guarantee=50,
        receipt="volcano.sh/vgpu-ids-new",
    ),
    "volcano-gpushare": Expected(container="cuda-container", memory=1024 * MIB),
    "aliyun": Expected(
        container="binpack-1", memory=3 * GIB, receipt="ALIYUN_COM_GPU_MEM_IDX"
    ),
    "ack": Expected(container="tensorflow-mnist-multigpu", memory=4 * GIB, gpus=2),
    "ack-core": Expected(container="cuda-sample", memory=2 * GIB, guarantee=30),
    "tencent": Expected(
        container="nvidia", memory=7680 * MIB, guarantee=50,
        receipt="tencent.com/predicate-gpu-idx-0",
    ),
    "qgpu": Expected(container="qgpu", memory=5 * GIB, guarantee=30),
    "elastic-gpu": Expected(container="cuda", memory=2048 * MIB),
    "kubeshare": Expected(container="cuda", memory=GIB, guarantee=50),
    "kubeshare-sharepod": Expected(container="cuda", memory=GIB, guarantee=50),
    "kubeshare-2": Expected(container="pytorch", memory=None, part=0.5, guarantee=50),
    "kai": Expected(container="gpu-workload", memory=None, part=0.5),
    "kai-memory": Expected(container="gpu-workload", memory=2000 * MIB),
    "kai-container": Expected(container="gpu-workload", memory=None, part=0.5),
    "nvfractions": Expected(container="gpu-workload", memory=8192 * MIB),
}  # fmt: skip


@pytest.fixture(scope="module")
def whole(testbed_machine: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A cluster of one node, with the manifest of the scheduler."""
    del testbed_machine
    config = scheduler_config(profiles=EVERY_NAME)
    with Cluster(state=tmp_path_factory.mktemp("dialects"), scheduler_config=config) as made:
        made.allow_agent()
        installing.install(made)
        yield made


@pytest.fixture(scope="module")
def node(whole: Cluster) -> Iterator[NodeAgent]:
    with node_agent(whole, SOFT) as agent:
        yield agent


@pytest.fixture(scope="module")
def scheduler(whole: Cluster, node: NodeAgent) -> Iterator[Scheduler]:
    del node
    # KubeShare's scheduler does nothing but place GPUs: its pods become this one's.
    with installing.serving(whole) as made:
        installing.wait_translates(whole)
        yield made


def example(name: str) -> Json:
    body: Json = yaml.safe_load((EXAMPLES / f"{name}.yaml").read_text("utf-8"))
    if body["kind"] == KIND:
        body = pod_of_sharepod(body)
    # Nothing here speaks to the API server, and each token is another mount.
    body["spec"].setdefault("automountServiceAccountToken", False)
    return body


@pytest.fixture
def pods(whole: Cluster, scheduler: Scheduler) -> Iterator[Pods]:
    del scheduler
    made = Pods(whole, whole.make_namespace(f"dialects-{next(_NAMES)}"))
    yield made
    made.delete()


@pytest.mark.parametrize("name", EXPECTED)
def test_a_pod_of_each_dialect_has_the_share_that_it_asks_for(
    node: NodeAgent, pods: Pods, name: str
) -> None:
    expected = EXPECTED[name]
    body = example(name)
    made = pods.create(body)
    pod_name = made["metadata"]["name"]
    pods.wait_phase(pod_name, "Succeeded", timeout_s=120)
    found = pods.wait(
        pod_name,
        lambda each: not expected.receipt or expected.receipt in each["metadata"]["annotations"],
        f"receipt {expected.receipt}",
    )
    annotations = found["metadata"]["annotations"]
    placement = json.loads(annotations[PLACEMENT])
    assert placement["pod"] == found["metadata"]["uid"]
    (placed,) = placement["containers"].items()
    assert placed[0] == expected.container
    assert len(set(placed[1]["devices"])) == expected.gpus
    assert placed[1].get("guarantee", 0) == expected.guarantee * 100
    said = burnt(pods, pod_name, expected.container)
    assert said.errors == ()
    assert said.uuid in placed[1]["devices"]
    assert said.total_bytes == placed[1]["memory"]
    if expected.memory is not None:
        assert said.total_bytes == expected.memory
    else:
        whole_device = 79.26 * GIB  # what an A100 of 80 GB has to give
        assert said.total_bytes == pytest.approx(whole_device * expected.part, rel=0.01)
    assert not expected.receipt or annotations[expected.receipt]
    node.wait_exact()


def test_every_example_is_tried() -> None:
    # Whole GPUs and slots by a device plugin's resource are the kubelet's: test_device_plugin.py.
    assert {each.stem for each in EXAMPLES.glob("*.yaml")} == {*EXPECTED, "deepomatic", "nvidia"}


def test_pods_of_several_systems_share_one_gpu(node: NodeAgent, pods: Pods) -> None:
    names = ("hami", "aliyun", "kai-memory", "qgpu")
    for name in names:
        body = example(name)
        command = " ".join(body["spec"]["containers"][-1]["command"])
        going_on = "exec allot burn --memory 256Mi --seconds 1000 >/dev/null"
        body["spec"]["containers"][-1]["command"] = ["sh", "-c", f"{command}; {going_on}"]
        body["spec"]["terminationGracePeriodSeconds"] = 1
        if name == "hami":
            body["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] = 1
        pods.create({**body, "metadata": {**body["metadata"], "name": name}})
    seen = {name: burnt(pods, name, EXPECTED[name].container) for name in names}
    (uuid,) = {each.uuid for each in seen.values()}
    assert {name: each.total_bytes for name, each in seen.items()} == {
        name: EXPECTED[name].memory for name in seen
    }
    node.wait_exact()
    # While all programs run, nvidia-smi shows each container its own share and its own program.
    for name in names:
        wait_until(partial(listed_mib, pods, name), f"program of {name} with its memory")
    for name in names:
        look = ["sh", "-c", "nvidia-smi -L; nvidia-smi -q -x"]
        text = pods.exec(name, look, EXPECTED[name].container)
        gpus, _, report = text.partition("<?xml")
        assert gpus.count("UUID:") == 1
        assert f"(UUID: {uuid})" in gpus
        (gpu,) = ET.fromstring(f"<?xml{report}").findall("gpu")  # noqa: S314 - our own
        assert gpu.findtext("fb_memory_usage/total") == f"{seen[name].total_bytes // MIB} MiB"
        (program,) = gpu.findall("processes/process_info")
        assert program.findtext("pid") == "1"
        assert program.findtext("used_memory") == f"{listed_mib(pods, name)} MiB"


def listed_mib(pods: Pods, name: str) -> int:
    """The memory of a container's one program as nvidia-smi lists it; 0 until it has all."""
    query = "--query-compute-apps=pid,used_memory"
    command = ["nvidia-smi", query, "--format=csv,noheader,nounits"]
    text = pods.exec(name, command, EXPECTED[name].container)
    amounts = [int(line.split(", ")[1]) for line in text.splitlines()]
    assert len(amounts) <= 1, text
    return sum(amounts) if sum(amounts) >= 256 else 0


def test_two_pods_that_fit_on_no_gpu_together_have_one_each(
    scheduler: Scheduler, node: NodeAgent, pods: Pods
) -> None:
    for name in ("a", "b"):
        pods.create(pod(name, container(burn("59Gi"), limits=part("60Gi"))))
    for name in ("a", "b"):
        pods.wait_phase(name, "Succeeded", timeout_s=120)
        assert burnt(pods, name).got_bytes == 59 * GIB
    placed = placements([pods.get(name) for name in ("a", "b")])
    parts = [placed[name]["containers"]["main"] for name in ("a", "b")]
    assert [each["memory"] for each in parts] == [60 * GIB, 60 * GIB]
    assert parts[0]["devices"] != parts[1]["devices"]
    figure = 'allotment_scheduler_device_devices{model="NVIDIA A100-SXM4-80GB"}'
    wait_until(lambda: scheduler.figure(figure) == 2, "both GPUs counted")
    node.wait_exact()
