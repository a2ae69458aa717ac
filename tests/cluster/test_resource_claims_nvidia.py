# SPDX-License-Identifier: Apache-2.0
"""The claims of NVIDIA's documentation, served in the place of NVIDIA's DRA driver."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from claims import (
    API,
    DRIVER,
    NOT_PREPARED,
    NVIDIAS,
    claim,
    claiming,
    install_classes,
    of_claim,
    play,
    published,
    shares_of,
    using,
    wait_for_pool,
)
from stories import (
    GIB,
    NVIDIA,
    SOFT,
    NodeAgent,
    burn_and_stay,
    burnt,
    node_agent,
)
from test_dynamic_mig import MACHINE, SMALL, SMALL_BYTES
from testbed.api import Json
from testbed.cluster import Cluster
from testbed.pods import Pods, container, pod
from testbed.waiting import tail, wait_until

NAMED = "  dra:\n    driverName: gpu.nvidia.com\n"
IN_PLACE = SOFT + NAMED
WITH_SLICES = f"""\
version: v1
allotment:
  devices:
    - modes: [soft, mig]
      mig:
        keep: 0s
{NAMED}"""
LARGE = 70 * GIB
TIME_SLICES = """\
import json, struct, sys
from pathlib import Path
from allotment.devices import layout
from allotment.devices.packing import read_machine
from allotment.devices.simulated import machine_path
path = machine_path(Path("/run/allotment"), sys.argv[1])
data = path.read_bytes()
at, own = layout.MACHINE_FIELDS["gpus"][0], layout.GPU_FIELDS["timeslice_us"][0]
facts = read_machine(path)
print(json.dumps({
    device.uuid: struct.unpack_from("<I", data, at + number * layout.GPU_SIZE + own)[0]
    or facts.timeslice_us
    for number, device in enumerate(facts.devices)
}))
"""


def gpu(name: str = "gpu", **exactly: Any) -> Json:  # noqa: ANN401
    return {"name": name, "exactly": {"deviceClassName": NVIDIAS, **exactly}}


def gpu_config(strategy: str, **fields: Any) -> Json:  # noqa: ANN401
    return {
        "apiVersion": "resource.nvidia.com/v1beta1",
        "kind": "GpuConfig",
        "sharing": {"strategy": strategy, **fields},
    }


def time_slices(node: NodeAgent) -> dict[str, int]:
    """The length of each GPU's turns, in microseconds."""
    said = node.cluster.node.run([sys.executable, "-c", TIME_SLICES, node.simulated]).stdout
    found: dict[str, int] = json.loads(said)
    return found


def ask(pods: Pods, name: str, *requests: Json, config: Json | None = None) -> None:
    claim(pods, name, *requests, config=() if config is None else [config], driver=NVIDIAS)


def test_slices_have_nvidias_class_and_profiles(cluster: Cluster, pods: Pods) -> None:
    with node_agent(cluster, WITH_SLICES, simulated=MACHINE) as agent:
        wait_until(
            lambda: any("-mig-" in each["name"] for each in published(cluster, NVIDIAS)),
            "places for slices",
            explain=lambda: tail(cluster.log("agent")),
        )
        profile = f"device.attributes['{NVIDIAS}'].profile == '{SMALL}'"
        requests = [
            {
                "name": name,
                "exactly": {
                    "deviceClassName": "mig.nvidia.com",
                    "selectors": [{"cel": {"expression": profile}}],
                },
            }
            for name in ("mig-0", "mig-1")
        ]
        same = [{"requests": [], "matchAttribute": f"{NVIDIAS}/parentUUID"}]
        cluster.api.post(
            f"{API}/namespaces/{pods.namespace}/resourceclaims",
            {
                "apiVersion": "resource.k8s.io/v1",
                "kind": "ResourceClaim",
                "metadata": {"name": "slices"},
                "spec": {"devices": {"requests": requests, "constraints": same}},
            },
        )
        sizes = {"mig-0": "1Gi", "mig-1": "12Gi"}
        asking = [using(name, burn_and_stay(size), name) for name, size in sizes.items()]
        pods.create(pod("slices", *asking, resourceClaims=of_claim("slices")))
        modest, greedy = (burnt(pods, "slices", name) for name in sizes)
        assert (modest.total_bytes, modest.errors) == (SMALL_BYTES, ())
        assert greedy.total_bytes == SMALL_BYTES > greedy.got_bytes
        assert {*greedy.errors} == {"CUDA_ERROR_OUT_OF_MEMORY"}
        assert {each.devices[0].profile for each in agent.shares()} == {SMALL}
        # The API server takes no capacity of nothing: a GPU in MIG mode keeps its size.
        cluster.api.delete(f"{API}/resourceslices")
        wait_until(lambda: published(cluster, NVIDIAS), "the slices again", explain=agent.explain)
        pods.delete()
        wait_until(lambda: not agent.shares(), "end of the shares")


@pytest.fixture(scope="module")
def cluster(testbed_machine: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """One that has had no device plugin of `nvidia.com/gpu`.

    For five minutes after its end the kubelet holds its resource, and starts no container with a
    claim in its place.
    """
    del testbed_machine
    with Cluster(state=tmp_path_factory.mktemp("nvidias")) as made:
        install_classes(made, NVIDIAS)
        yield made


@pytest.fixture(scope="module")
def node(cluster: Cluster) -> Iterator[NodeAgent]:
    """Eight GPUs of 80 GiB."""
    with node_agent(cluster, IN_PLACE, simulated="a100-80gb:8") as agent:
        wait_for_pool(cluster, agent.gpus(), NVIDIAS)
        yield agent


def two_pods_have_a_gpu_each(node: NodeAgent, pods: Pods) -> Iterator[None]:
    model = f"device.attributes['{NVIDIAS}'].productName.lowerAscii().matches('^.*a100.*$')"
    for name in ("one", "two"):
        ask(pods, name, gpu(selectors=[{"cel": {"expression": model}}]))
        pods.create(claiming(name, burn_and_stay("1Gi"), name))
    yield
    found = [burnt(pods, name) for name in ("one", "two")]
    assert found[0].uuid != found[1].uuid
    assert all(each.total_bytes > LARGE for each in found)
    for name in ("one", "two"):
        assert {each.mode for each in shares_of(node, pods, name)} == {"exclusive"}


def two_containers_and_two_pods_share_the_gpu_of_a_claim(
    node: NodeAgent, pods: Pods
) -> Iterator[None]:
    ask(pods, "shared", gpu())
    asking = [using(name, burn_and_stay("1Gi")) for name in ("ctr0", "ctr1")]
    pods.create(pod("pair", *asking, resourceClaims=of_claim("shared")))
    pods.create(claiming("other", burn_and_stay("1Gi"), "shared"))
    yield
    found = [
        burnt(pods, "pair", "ctr0"),
        burnt(pods, "pair", "ctr1"),
        burnt(pods, "other"),
    ]
    assert len({each.uuid for each in found}) == 1
    (only,) = shares_of(node, pods, "shared")
    assert only.owner is not None
    assert only.owner.container == "gpu"


def a_time_slice_lasts_as_long_as_its_claim(node: NodeAgent, pods: Pods) -> Iterator[None]:
    ask(
        pods,
        "slow",
        gpu(),
        config=gpu_config("TimeSlicing", timeSlicingConfig={"interval": "Long"}),
    )
    pods.create(claiming("slow", burn_and_stay("1Gi"), "slow"))
    yield
    assert burnt(pods, "slow").total_bytes > LARGE
    (only,) = shares_of(node, pods, "slow")
    assert only.mode == "timeslice"
    lengths = time_slices(node)
    assert lengths[only.devices[0].uuid] == max(lengths.values()) > min(lengths.values())
    pods.delete("slow")
    wait_until(lambda: not shares_of(node, pods, "slow"), "end of the share")
    assert len({*time_slices(node).values()}) == 1


def mps_has_the_limits_of_its_parameters(node: NodeAgent, pods: Pods) -> Iterator[None]:
    limits = {"defaultActiveThreadPercentage": 50, "defaultPinnedDeviceMemoryLimit": "10Gi"}
    ask(pods, "mps", gpu(), config=gpu_config("MPS", mpsConfig=limits))
    asking = [using("ctr0", burn_and_stay("1Gi")), using("ctr1", burn_and_stay("12Gi"))]
    pods.create(pod("mps", *asking, resourceClaims=of_claim("mps")))
    yield
    modest, greedy = (burnt(pods, "mps", name) for name in ("ctr0", "ctr1"))
    assert (modest.total_bytes, modest.errors) == (10 * GIB, ())
    assert (greedy.total_bytes, {*greedy.errors}) == (10 * GIB, {"CUDA_ERROR_OUT_OF_MEMORY"})
    assert greedy.got_bytes < 10 * GIB
    (only,) = shares_of(node, pods, "mps")
    assert (only.mode, only.devices[0].compute.ceiling) == ("mps", 5000)


def wrong_parameters_are_told_with_their_path(node: NodeAgent, pods: Pods) -> Iterator[None]:
    wrong = gpu_config("TimeSlicing", timeSlicingConfig={"interval": "Longest"})
    ask(pods, "wrong", gpu(), config=wrong)
    pods.create(claiming("wrong", burn_and_stay("1Gi"), "wrong"))
    yield
    unknown = "parameters.sharing.timeSlicingConfig.interval: unknown"
    pods.wait_event("wrong", reason=NOT_PREPARED, contains=unknown)
    assert not shares_of(node, pods, "wrong")


def parts_of_memory_share_a_gpu_and_are_enforced(node: NodeAgent, pods: Pods) -> Iterator[None]:
    for name, memory in (("a", "1Gi"), ("b", "5Gi")):
        ask(pods, name, gpu(capacity={"requests": {"memory": "4Gi"}}))
        pods.create(claiming(name, burn_and_stay(memory), name))
    yield
    modest, greedy = (burnt(pods, name) for name in ("a", "b"))
    assert (modest.total_bytes, modest.errors) == (4 * GIB, ())
    assert (greedy.total_bytes, {*greedy.errors}) == (4 * GIB, {"CUDA_ERROR_OUT_OF_MEMORY"})
    assert greedy.got_bytes < 4 * GIB
    assert modest.uuid == greedy.uuid
    for name in ("a", "b"):
        assert {each.mode for each in shares_of(node, pods, name)} == {"soft"}


def an_extended_resource_needs_no_plugin(node: NodeAgent, pods: Pods) -> Iterator[None]:
    """The kube-scheduler makes the claim for `nvidia.com/gpu: 1` (DRAExtendedResource)."""
    pods.create(pod("plain", container(burn_and_stay("1Gi"), limits={NVIDIA: "1"})))
    yield
    found = burnt(pods, "plain")
    assert found.total_bytes > LARGE
    (only,) = (each for each in node.shares(pods.namespace) if each.devices[0].uuid == found.uuid)
    assert only.owner is not None
    assert (only.owner.is_claim, only.owner.resource, only.mode) == (True, NVIDIAS, "exclusive")


def admin_access_sees_every_gpu_and_takes_nothing(node: NodeAgent, pods: Pods) -> Iterator[None]:
    """Beside the whole GPUs of others, which they keep."""
    pods.cluster.api.patch(
        f"/api/v1/namespaces/{pods.namespace}",
        {"metadata": {"labels": {"resource.kubernetes.io/admin-access": "true"}}},
    )
    ask(pods, "watch", gpu(adminAccess=True, allocationMode="All"))
    look = "nvidia-smi -L; test -e /etc/ld.so.preload || echo no shim; exec sleep 1000"
    pods.create(claiming("watch", ["sh", "-c", look], "watch"))
    yield
    seen = pods.wait_logs("watch", lines=len(node.gpus()) + 1)
    assert all(uuid in seen for uuid in node.gpus())
    assert "no shim" in seen
    assert not shares_of(node, pods, "watch")


def test_nvidias_example_claims_side_by_side(node: NodeAgent, pods: Pods) -> None:
    play(
        node,
        pods,
        admin_access_sees_every_gpu_and_takes_nothing,
        two_pods_have_a_gpu_each,
        two_containers_and_two_pods_share_the_gpu_of_a_claim,
        a_time_slice_lasts_as_long_as_its_claim,
        mps_has_the_limits_of_its_parameters,
        wrong_parameters_are_told_with_their_path,
        parts_of_memory_share_a_gpu_and_are_enforced,
        an_extended_resource_needs_no_plugin,
    )


def test_devices_have_nvidias_types_and_attributes(node: NodeAgent) -> None:
    devices = published(node.cluster, NVIDIAS)
    assert {each["attributes"]["type"]["string"] for each in devices} == {"gpu"}
    for each in devices:
        found = {key: next(iter(value.values())) for key, value in each["attributes"].items()}
        assert found["uuid"] in node.gpus()
        assert found["productName"] == "NVIDIA A100-SXM4-80GB"
        assert (found["brand"], found["architecture"]) == ("Nvidia", "Ampere")
        assert found["cudaComputeCapability"] == "8.0.0"
        assert {"driverVersion", "cudaDriverVersion"} <= found.keys()


def test_another_name_takes_no_claim_from_its_pod(node: NodeAgent, pods: Pods) -> None:
    """The former driver serves its claims until they end."""
    ask(pods, "old", gpu(capacity={"requests": {"memory": "4Gi"}}))
    pods.create(claiming("old", burn_and_stay("1Gi"), "old"))
    burnt(pods, "old")
    node.configure(SOFT)
    wait_until(lambda: published(node.cluster), "slices of the other name", explain=node.explain)
    wait_until(lambda: not published(node.cluster, NVIDIAS), "no slices", explain=node.explain)
    assert len(node.shares()) == 1
    pods.delete()
    wait_until(lambda: not node.shares(), "end of the share", explain=node.explain)
    node.configure(IN_PLACE)
    wait_until(lambda: published(node.cluster, NVIDIAS), "slices again", explain=node.explain)
    wait_until(lambda: not published(node.cluster, DRIVER), "no slices", explain=node.explain)
