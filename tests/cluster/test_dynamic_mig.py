# SPDX-License-Identifier: Apache-2.0
"""Slices that are cut for pods, on a real kubelet: what they see, and what becomes of them."""

from __future__ import annotations

import json
import signal
import time

from stories import (
    GPU,
    GPU_MEMORY,
    MIB,
    NodeAgent,
    burn_and_stay,
    burnt,
    node_agent,
    undisturbed,
    wait_taken_on,
)
from testbed.api import Json
from testbed.cluster import Cluster
from testbed.pods import Pods, container, pod
from testbed.waiting import wait_until

MACHINE = "h100-80gb:2"
SMALL = "1g.10gb"
SMALL_BYTES = 9984 * MIB
"""Of a 1g.10gb on an H100 with 80 GB."""
DYNAMIC = """\
version: v1
allotment: {devices: [{modes: [mig, soft], mig: {keep: %s}}]}
"""
STATIC = "nvidia.com/mig-1g.10gb"
BESIDE_STATIC = """\
version: v1
flags: {migStrategy: mixed}
allotment: {devices: [{match: {index: [1]}, mode: mig, mig: {keep: 0s}}]}
"""
# What CUDA and NVML have in the container, by the driver's own interfaces.
LOOK = """\
import ctypes, json
cuda, nvml = ctypes.CDLL("libcuda.so.1"), ctypes.CDLL("libnvidia-ml.so.1")
count, total, listed = ctypes.c_int(), ctypes.c_size_t(), ctypes.c_uint()
device, uuid = ctypes.c_void_p(), ctypes.create_string_buffer(96)
assert cuda.cuInit(0) == 0 and cuda.cuDeviceGetCount(ctypes.byref(count)) == 0
assert cuda.cuDeviceTotalMem_v2(ctypes.byref(total), 0) == 0
assert nvml.nvmlInit_v2() == 0 and nvml.nvmlDeviceGetCount_v2(ctypes.byref(listed)) == 0
assert nvml.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(device)) == 0
assert nvml.nvmlDeviceGetUUID(device, uuid, 96) == 0
print(json.dumps([count.value, total.value, listed.value, uuid.value.decode()]), flush=True)
"""


def asking(name: str, command: list[str] | None = None, *, profile: str = SMALL) -> Json:
    return pod(
        name,
        container(command or burn_and_stay("1Gi"), limits={GPU: "1"}),
        annotations={"allotment.dev/mig-profile": profile},
    )


def gpus(node: NodeAgent) -> list[Json]:
    said = json.loads(node.allot("devices", "--simulated", node.simulated, "-o", "json"))
    found: list[Json] = said["devices"]
    return found


def slices(node: NodeAgent) -> list[str]:
    return [each["uuid"] for gpu in gpus(node) for each in gpu["mig_slices"]]


def test_pods_have_slices_of_their_own(cluster: Cluster, pods: Pods) -> None:
    with node_agent(cluster, DYNAMIC % "40s", simulated=MACHINE) as node:
        cluster.wait_allocatable(GPU, 32)
        pods.create(asking("look", ["python3", "-c", LOOK + "import time; time.sleep(1000)"]))
        pods.wait_ready("look")
        count, total, listed, uuid = json.loads(pods.wait_logs("look"))
        assert (count, total, listed) == (1, SMALL_BYTES, 1)
        assert slices(node) == [uuid]
        (device,) = node.share(pods, "look").devices
        assert (device.uuid, device.profile) == (uuid, SMALL)

        with undisturbed(pods, "look"):
            assert node.process is not None
            node.end(signal.SIGKILL)
            node.again()
            pods.create(asking("burn"))
            wait_taken_on(pods, "burn")
            assert burnt(pods, "burn").total_bytes == SMALL_BYTES
        assert len(slices(node)) == 2

        # Warm: whoever is next has what it left, and then it goes.
        pods.delete("look")
        wait_until(lambda: len(node.shares(pods.namespace)) == 1, "its share gone")
        pods.create(asking("next", ["python3", "-c", LOOK]))
        pods.wait_phase("next", "Succeeded")
        assert json.loads(pods.logs("next"))[3] == uuid
        pods.delete()
        wait_until(lambda: slices(node) == [], "slices removed")
        wait_until(lambda: not any(each["mig"] for each in gpus(node)), "MIG off")
        node.wait_exact()


def test_a_pod_has_the_slice_that_was_chosen_for_it(cluster: Cluster, pods: Pods) -> None:
    with node_agent(cluster, DYNAMIC % "1h", simulated=MACHINE) as node:
        cluster.wait_allocatable(GPU, 32)
        _, second = node.gpus()
        chosen = {"mode": "mig", "devices": [second], "slices": [[SMALL, 5]], "memory": SMALL_BYTES}
        body = asking("placed")
        body["metadata"]["annotations"]["allotment.dev/placement"] = json.dumps(
            {"version": 1, "containers": {"main": chosen}}
        )
        pods.create(body)
        assert burnt(pods, "placed").total_bytes == SMALL_BYTES
        places = [
            (gpu["uuid"], each["profile"], each["start"])
            for gpu in gpus(node)
            for each in gpu["mig_slices"]
        ]
        assert places == [(second, SMALL, 5)]
        # No scheduler counts what is written by hand, so the node tells of it; then it is warm.
        wait_until(
            lambda: (
                [each.get("on", True) for each in told(cluster)] == [False, True]
                and [each.get("slices") for each in told(cluster)] == [None, [[SMALL, 5, "used"]]]
            ),
            "its GPU's mode told, and its slice",
            explain=lambda: str(told(cluster)),
        )
        pods.delete()
        wait_until(
            lambda: [each.get("slices") for each in told(cluster)][1:] == [[[SMALL, 5, "idle"]]],
            "the warm slice told",
            explain=lambda: str(told(cluster)),
        )
        node.wait_exact()


def test_a_warm_slice_makes_way_for_a_share_that_was_sent_there(
    cluster: Cluster, pods: Pods
) -> None:
    with node_agent(cluster, DYNAMIC % "1h", simulated="h100-80gb") as node:
        cluster.wait_allocatable(GPU, 16)
        (uuid,) = node.gpus()
        pods.create(asking("cut"))
        assert burnt(pods, "cut").total_bytes == SMALL_BYTES
        pods.delete()
        wait_until(
            lambda: any(each.get("slices") and not each.get("on", True) for each in told(cluster)),
            "the warm slice told, on a GPU that others may have",
            explain=lambda: str(told(cluster)),
        )
        assert len(slices(node)) == 1
        body = pod("soft", container(burn_and_stay("1Gi"), limits={GPU: "1", GPU_MEMORY: "4Gi"}))
        chosen = {"mode": "soft", "devices": [uuid], "memory": 4 << 30}
        body["metadata"]["annotations"] = {
            "allotment.dev/mode": "soft",
            "allotment.dev/placement": json.dumps({"version": 1, "containers": {"main": chosen}}),
        }
        pods.create(body)
        assert burnt(pods, "soft").total_bytes == 4 << 30
        assert slices(node) == []
        assert [each["mig"] for each in gpus(node)] == [False]
        assert pods.restarts("soft") == 0
        pods.delete()
        node.wait_exact()


def told(cluster: Cluster) -> list[Json]:
    """What the node's annotation says of its GPUs' slices, by index; nothing before it is told."""
    annotations = cluster.api.get(cluster.node_path)["metadata"].get("annotations", {})
    text = annotations.get("allotment.dev/devices", '{"devices": []}')
    return [each.get("mig", {"on": None}) for each in json.loads(text).get("devices", ())]


def test_of_eight_at_once_seven_run(cluster: Cluster, pods: Pods) -> None:
    with node_agent(cluster, DYNAMIC % "0s", simulated="h100-80gb") as node:
        cluster.wait_allocatable(GPU, 16)
        names = [f"p{number}" for number in range(8)]
        for name in names:
            pods.create(asking(name))
        wait_until(
            lambda: sum(_is_running(pods, name) for name in names) == 7,
            "seven of eight running",
            timeout_s=120,
            explain=node.log_tail,
        )
        (waiting,) = (name for name in names if not _is_running(pods, name))
        told = pods.wait_event(waiting, reason="ShareRefused")["message"]
        assert "has the most 1g.10gb or profiles with its engines that fit" in told
        assert len(set(slices(node))) == 7
        others = [name for name in names if name != waiting]
        with undisturbed(pods, *others[1:]):
            pods.delete(others[0])
            assert burnt(pods, waiting, timeout_s=120).total_bytes == SMALL_BYTES
        pods.delete()
        wait_until(lambda: slices(node) == [], "slices removed")
        node.wait_exact()


def _is_running(pods: Pods, name: str) -> bool:
    statuses = pods.get(name)["status"].get("containerStatuses", ())
    return any("running" in each["state"] for each in statuses)


def test_no_slice_is_offered_twice(cluster: Cluster, pods: Pods) -> None:
    machine = "h100-80gb[mig=1g.10gb*3],h100-80gb"
    with node_agent(cluster, BESIDE_STATIC, simulated=machine) as node:
        cluster.wait_allocatable(STATIC, 3)
        cluster.wait_allocatable(GPU, 16)
        theirs = slices(node)
        for number in range(3):
            pods.create(asking(f"cut{number}"))
            pods.create(pod(f"given{number}", container(burn_and_stay("1Gi"), limits={STATIC: 1})))
        names = [f"{kind}{number}" for kind in ("cut", "given") for number in range(3)]
        uuids = set()
        for name in names:
            assert burnt(pods, name).total_bytes == SMALL_BYTES
            (device,) = node.share(pods, name).devices
            assert (device.uuid in theirs) == name.startswith("given")
            uuids.add(device.uuid)
        assert len(uuids) == 6
        # Longer than the agent takes to look at its GPUs: what it cut itself is nobody else's.
        time.sleep(8)
        cluster.wait_allocatable(STATIC, 3)
        pods.delete()
        wait_until(lambda: sorted(slices(node)) == sorted(theirs), "theirs alone")
        node.wait_exact()
