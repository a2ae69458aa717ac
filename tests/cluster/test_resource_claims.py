# SPDX-License-Identifier: Apache-2.0
"""ResourceClaims on the stock kube-scheduler and kubelet: parts of GPUs, and whole ones."""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import pytest
from claims import (
    API,
    DRIVER,
    NOT_PREPARED,
    claim,
    claiming,
    install_classes,
    of_claim,
    play,
    published,
    share,
    shares_of,
    using,
    wait_for_pool,
    written,
)
from installing import ROOT
from scheduling import Scheduler, gpu_pod, placements, scheduler_config
from stories import (
    GIB,
    SOFT,
    NodeAgent,
    burn,
    burn_and_stay,
    burnt,
    exit_code,
    node_agent,
    part,
    undisturbed,
)
from testbed.api import Json
from testbed.cluster import Cluster
from testbed.pods import Pods, container, pod
from testbed.waiting import wait_until

from allotment.agent.dra.pods import RETRIED
from allotment.model.placements import MAX_SHARES

LOOK = "nvidia-smi -L; test -e /etc/ld.so.preload || echo no shim"


@pytest.fixture(scope="module")
def node(cluster: Cluster) -> Iterator[NodeAgent]:
    """Two GPUs of 80 GiB, and the classes of devices."""
    install_classes(cluster)
    with node_agent(cluster, SOFT) as agent:
        wait_for_pool(cluster, agent.gpus())
        yield agent


# ---- parts, side by side -------------------------------------------------------------------------


def a_claim_has_the_memory_that_it_asked_for_and_no_more(
    node: NodeAgent, pods: Pods
) -> Iterator[None]:
    claim(pods, "greedy", share(memory="4Gi", compute="10"))
    pods.create(claiming("greedy", burn("5Gi"), "greedy"))
    yield
    refused = pods.wait_phase("greedy", "Failed")
    said = burnt(pods, "greedy")
    assert said.total_bytes == 4 * GIB
    assert 3 * GIB < said.got_bytes < 4 * GIB
    assert set(said.errors) == {"CUDA_ERROR_OUT_OF_MEMORY"}
    assert exit_code(refused) == 9
    wait_until(lambda: not shares_of(node, pods, "greedy"), "end of the share")


def a_claim_of_two_containers_and_another_pod_is_one_share(
    node: NodeAgent, pods: Pods
) -> Iterator[None]:
    claim(pods, "both", share(memory="6Gi"))
    asking = [using(name, burn_and_stay("1Gi")) for name in ("first", "second")]
    pods.create(pod("one", *asking, resourceClaims=of_claim("both")))
    pods.create(claiming("two", burn_and_stay("1Gi"), "both"))
    yield
    for found in (
        burnt(pods, "one", "first"),
        burnt(pods, "one", "second"),
        burnt(pods, "two"),
    ):
        assert (found.total_bytes, found.errors) == (6 * GIB, ())
    (only,) = shares_of(node, pods, "both")
    assert only.owner is not None
    assert only.owner.container == "gpu"
    assert only.devices[0].memory_bytes == 6 * GIB


def parameters_say_the_rest(node: NodeAgent, pods: Pods) -> Iterator[None]:
    config = {
        "apiVersion": "allotment.dev/v1",
        "kind": "ShareConfig",
        "compute": ":80",
        "class": "latency",
        "weight": 200,
    }
    claim(pods, "tuned", share(memory="4Gi", compute="30"), config=[config])
    pods.create(claiming("tuned", burn_and_stay("1Gi"), "tuned"))
    yield
    burnt(pods, "tuned")
    (only,) = shares_of(node, pods, "tuned")
    compute = only.devices[0].compute
    assert (compute.guarantee, compute.ceiling) == (3000, 8000)
    assert (str(compute.kind), compute.weight) == ("latency", 200)
    (status,) = wait_until(lambda: statuses(pods, "tuned"), "a status", explain=node.explain)
    (ready,) = status["conditions"]
    assert (ready["type"], ready["status"]) == ("Ready", "True")
    assert status["data"] == {
        "share": only.id,
        "mode": "soft",
        "enforced": True,
        "memory_limit_bytes": 4 * GIB,
        "compute": {"guarantee_percent": 30, "ceiling_percent": 80},
    }


def statuses(pods: Pods, name: str) -> list[Json]:
    """What the status of a claim says about its devices."""
    path = f"{API}/namespaces/{pods.namespace}/resourceclaims/{name}"
    found: list[Json] = pods.cluster.api.get(path).get("status", {}).get("devices", [])
    return found


def wrong_parameters_are_told_with_their_path(node: NodeAgent, pods: Pods) -> Iterator[None]:
    config = {"apiVersion": "allotment.dev/v1", "kind": "ShareConfig", "wieght": 200}
    claim(pods, "wrong", share(memory="4Gi"), config=[config])
    pods.create(claiming("wrong", burn("1Gi"), "wrong"))
    yield
    unknown = "devices.config[0].opaque.parameters.wieght is unknown"
    event = pods.wait_event("wrong", reason=NOT_PREPARED, contains=unknown)
    assert "weight" in event["message"]
    assert not shares_of(node, pods, "wrong")


def requests_of_a_claim_are_shares_of_their_own(node: NodeAgent, pods: Pods) -> Iterator[None]:
    claim(pods, "pair", share("large", memory="20Gi"), share("small", memory="2Gi"))
    asking = [using(name, burn_and_stay("1Gi"), request=name) for name in ("large", "small")]
    pods.create(pod("pair", *asking, resourceClaims=of_claim("pair")))
    yield
    assert burnt(pods, "pair", "large").total_bytes == 20 * GIB
    assert burnt(pods, "pair", "small").total_bytes == 2 * GIB
    assert len(shares_of(node, pods, "pair")) == 2


def one_container_may_use_requests_of_different_gpus(node: NodeAgent, pods: Pods) -> Iterator[None]:
    """Two parts of one GPU are no GPU to its programs: a constraint keeps them apart."""
    path = f"{API}/namespaces/{pods.namespace}/resourceclaims"
    document = written("apart", share("large", memory="20Gi"), share("small", memory="2Gi"))
    document["spec"]["devices"]["constraints"] = [{"distinctAttribute": f"{DRIVER}/uuid"}]
    pods.cluster.api.post(path, document)
    pods.create(claiming("apart", ["sh", "-c", LOOK], "apart"))
    yield
    pods.wait_phase("apart", "Succeeded")
    seen = pods.logs("apart")
    assert all(uuid in seen for uuid in node.gpus())
    assert len(node.gpus()) == 2


def two_parts_of_one_gpu_in_a_container_are_told_in_an_event(
    node: NodeAgent, pods: Pods
) -> Iterator[None]:
    """Of one claim or of two. Its programs would have no CUDA."""
    space = pods.namespace
    claim(pods, "parts", share("large", memory="4Gi"), share("small", memory="2Gi"))
    pods.create(claiming("parts", burn("1Gi"), "parts"))
    for name in ("single", "other"):
        claim(pods, name, share(memory="1Gi"))
    asking = container(burn("1Gi"))
    asking["resources"] = {"claims": [{"name": "single"}, {"name": "other"}]}
    claims = [{"name": name, "resourceClaimName": name} for name in ("single", "other")]
    pods.create(pod("double", asking, resourceClaims=claims))
    yield
    for name, first, second in (
        ("parts", f"request large of {space}/parts", f"request small of {space}/parts"),
        ("double", f"request gpu of {space}/single", f"request gpu of {space}/other"),
    ):
        event = pods.wait_event(name, reason=NOT_PREPARED, contains="would have no CUDA")
        print(event["message"])  # noqa: T201 - for the guide
        for text in (first, second, f"{DRIVER}/uuid"):
            assert text in event["message"]
    assert not any(shares_of(node, pods, name) for name in ("parts", "single", "other"))


def test_claims_of_parts_side_by_side(node: NodeAgent, pods: Pods) -> None:
    play(
        node,
        pods,
        a_claim_has_the_memory_that_it_asked_for_and_no_more,
        a_claim_of_two_containers_and_another_pod_is_one_share,
        parameters_say_the_rest,
        wrong_parameters_are_told_with_their_path,
        requests_of_a_claim_are_shares_of_their_own,
        one_container_may_use_requests_of_different_gpus,
        two_parts_of_one_gpu_in_a_container_are_told_in_an_event,
    )


# ---- whole GPUs, side by side --------------------------------------------------------------------


def the_fullest_gpu_is_taken_first_and_a_whole_one_is_an_empty_one(
    node: NodeAgent, pods: Pods
) -> Iterator[None]:
    """By an extended resource, for which kube-scheduler makes a claim; then for two containers."""
    for name in ("a", "b"):
        claim(pods, name, share(memory="10Gi"))
        pods.create(claiming(name, burn_and_stay("1Gi"), name))
    limits = {f"deviceclass.resource.kubernetes.io/{DRIVER}": "1"}
    pods.create(pod("whole", container(burn_and_stay("1Gi"), limits=limits)))
    yield
    assert burnt(pods, "whole").total_bytes > 78 * GIB
    empty = burnt(pods, "whole").uuid
    assert burnt(pods, "a").uuid == burnt(pods, "b").uuid != empty
    (whole,) = (each for each in node.shares() if each.owner and each.owner.pod not in {"a", "b"})
    assert whole.owner is not None
    assert (whole.owner.is_claim, whole.mode) == (True, "exclusive")
    pods.delete("whole")
    claim(pods, "turns", {"name": "gpu", "exactly": {"deviceClassName": DRIVER}})
    asking = [using(name, burn_and_stay("1Gi")) for name in ("first", "second")]
    pods.create(pod("turns", *asking, resourceClaims=of_claim("turns")))
    for each in (burnt(pods, "turns", name) for name in ("first", "second")):
        assert (each.uuid, each.errors) == (empty, ())
        assert each.total_bytes > 78 * GIB
    assert [each.mode for each in shares_of(node, pods, "turns")] == ["exclusive"]


def a_monitor_sees_all_gpus_beside_a_whole_one(node: NodeAgent, pods: Pods) -> Iterator[None]:
    """`adminAccess`: it books nothing, and has no limit."""
    pods.cluster.api.patch(
        f"/api/v1/namespaces/{pods.namespace}",
        {"metadata": {"labels": {"resource.kubernetes.io/admin-access": "true"}}},
    )
    everything = {
        "deviceClassName": "monitor.allotment.dev",
        "adminAccess": True,
        "allocationMode": "All",
        "tolerations": [{"operator": "Exists"}],
    }
    claim(pods, "watch", {"name": "all", "exactly": everything})
    pods.create(claiming("watch", ["sh", "-c", LOOK], "watch"))
    yield
    pods.wait_phase("watch", "Succeeded")
    seen = pods.logs("watch")
    assert all(uuid in seen for uuid in node.gpus())
    assert "no shim" in seen
    assert not shares_of(node, pods, "watch")
    pods.delete()
    wait_until(lambda: not node.shares(), "end of the shares", explain=node.explain)
    specs = node.cluster.node.path("/run/cdi")
    wait_until(lambda: not list(specs.glob("*-monitor-*")), "no monitor", explain=node.explain)


def test_whole_gpus_and_monitors_side_by_side(node: NodeAgent, pods: Pods) -> None:
    play(
        node,
        pods,
        the_fullest_gpu_is_taken_first_and_a_whole_one_is_an_empty_one,
        a_monitor_sees_all_gpus_beside_a_whole_one,
    )


# ---- one after the other -------------------------------------------------------------------------


def test_slices_that_are_deleted_come_back(node: NodeAgent) -> None:
    def offered() -> dict[str, Json]:
        # The fullest GPU comes first: the order may still follow the claims that were here.
        return {str(device["name"]): device for device in published(node.cluster)}

    before = offered()
    node.cluster.api.delete(f"{API}/resourceslices")
    wait_until(lambda: offered() == before, "the same slices", explain=node.explain)


def tainted(node: NodeAgent) -> dict[str, str]:
    """The effect of each unusable GPU's taint."""
    return {
        str(device["attributes"]["uuid"]["string"]): str(each["effect"])
        for device in published(node.cluster)
        for each in device.get("taints", ())
        if each["key"] == "allotment.dev/unusable"
    }


def test_a_sick_gpu_has_a_taint_until_it_is_well_and_a_lost_one_evicts_its_pods(
    node: NodeAgent, pods: Pods
) -> None:
    """Kubernetes evicts, by the taint's effect, after `evictAfter`."""
    claim(pods, "here", share(memory="4Gi"))
    pods.create(claiming("here", burn_and_stay("1Gi"), "here"))
    sick = burnt(pods, "here").uuid
    (well,) = set(node.gpus()) - {sick}
    with undisturbed(pods, "here"):
        node.fault("--gpu", sick, "--xid", "79")
        wait_until(lambda: tainted(node), "a taint", explain=node.explain)
        assert tainted(node) == {sick: "NoSchedule"}
        claim(pods, "there", share(memory="4Gi"))
        pods.create(claiming("there", burn_and_stay("1Gi"), "there"))
        assert burnt(pods, "there").uuid == well
    soon = SOFT + "  health:\n    evictAfter: 1s\n"
    with node.configured(soon, back_to=SOFT), undisturbed(pods, "there"):
        node.fault("--gpu", sick, "--lost")
        try:
            wait_until(lambda: "here" not in pods.names(), "end of the pod", explain=node.explain)
            assert tainted(node) == {sick: "NoExecute"}
        finally:
            node.fault("--gpu", sick, "--found")
    wait_until(lambda: not shares_of(node, pods, "here"), "end of the share", explain=node.explain)
    node.fault("--gpu", sick, "--reset")
    wait_until(lambda: not tainted(node), "no taint", explain=node.explain)


def test_the_64th_share_of_a_gpu_is_not_allocated(node: NodeAgent, pods: Pods) -> None:
    """Seats are a capacity: kube-scheduler counts them."""
    uuid = node.gpus()[0]
    on_it = f"device.attributes['{DRIVER}'].uuid == '{uuid}'"

    def parts(count: int) -> list[Json]:
        made = [share(f"r{number}", memory="1Gi", compute="1") for number in range(count)]
        for each in made:
            each["exactly"]["selectors"] = [{"cel": {"expression": on_it}}]
        return made

    for name, count in (("most", 32), ("more", MAX_SHARES - 32), ("last", 1)):
        claim(pods, name, *parts(count))
    claims = [{"name": name, "resourceClaimName": name} for name in ("most", "more")]
    pods.create(pod("full", container(["sleep", "1000"]), resourceClaims=claims))
    pods.wait_ready("full")
    assert len(node.shares()) == MAX_SHARES
    pods.create(claiming("late", ["true"], "last"))
    event = pods.wait_event("late", reason="FailedScheduling")
    assert "cannot allocate all claims" in event["message"]


def test_the_first_available_alternative_is_taken(node: NodeAgent, pods: Pods) -> None:
    alternatives = [
        {"name": "huge", **share(memory="70Gi")["exactly"]},
        {"name": "small", **share(memory="8Gi")["exactly"]},
    ]
    for name in ("a", "b", "c"):  # kube-scheduler takes them in this order
        claim(pods, name, {"name": "gpu", "firstAvailable": alternatives})
        pods.create(claiming(name, burn_and_stay("1Gi"), name))
    found = {name: burnt(pods, name).total_bytes for name in ("a", "b", "c")}
    assert found == {"a": 70 * GIB, "b": 70 * GIB, "c": 8 * GIB}
    names = {each.owner.container for each in node.shares() if each.owner}
    assert names == {"gpu/huge", "gpu/small"}


def test_a_claim_waits_for_an_agent_that_is_away_and_keeps_its_share(
    node: NodeAgent, pods: Pods
) -> None:
    """So it is with a runtime, and with a kubelet, which deletes the slices at its start."""
    claim(pods, "first", share(memory="4Gi"))
    pods.create(claiming("first", burn_and_stay("1Gi"), "first"))
    burnt(pods, "first")
    (before,) = node.shares()
    node.end(signal.SIGKILL)
    claim(pods, "second", share(memory="5Gi"))
    pods.create(claiming("second", burn_and_stay("1Gi"), "second"))
    pods.wait_event("second", reason=NOT_PREPARED)
    began = time.monotonic()
    node.again()
    assert burnt(pods, "second").total_bytes == 5 * GIB
    print(f"{time.monotonic() - began:.1f} s from the agent's start")  # noqa: T201 - for the docs
    assert RETRIED in pods.get("second")["metadata"]["annotations"]
    assert before in node.shares()
    with undisturbed(pods, "first", "second"):
        shares = node.shares()
        for component in ("containerd", "kubelet"):
            node.cluster.restart(component, signal.SIGKILL)
        claim(pods, "third", share(memory="6Gi"))
        pods.create(claiming("third", burn_and_stay("1Gi"), "third"))
        assert burnt(pods, "third").total_bytes == 6 * GIB
        assert [each for each in shares if each not in node.shares()] == []
    pods.delete()
    wait_until(lambda: not node.shares(), "end of the shares")


def test_a_claim_that_was_refused_is_prepared_when_its_gpu_has_room(
    node: NodeAgent, pods: Pods
) -> None:
    """A GPU's shares have one mode: soft waits for the end of mps."""
    config = {"apiVersion": "allotment.dev/v1", "kind": "ShareConfig", "mode": "mps"}
    claim(pods, "mps", share(memory="10Gi", compute="50"), config=[config])
    pods.create(claiming("mps", burn_and_stay("1Gi"), "mps"))
    said = burnt(pods, "mps")
    assert (said.total_bytes, said.errors) == (10 * GIB, ())
    (only,) = node.shares()
    assert (only.mode, only.devices[0].compute.ceiling) == ("mps", 5000)
    claim(pods, "soft", share(memory="10Gi"))
    pods.create(claiming("soft", burn_and_stay("1Gi"), "soft"))
    print(pods.wait_event("soft", reason=NOT_PREPARED)["message"])  # noqa: T201 - for the docs
    pods.delete("mps")
    began = time.monotonic()
    assert burnt(pods, "soft").total_bytes == 10 * GIB
    print(f"{time.monotonic() - began:.1f} s from the pod's end")  # noqa: T201 - for the docs
    assert RETRIED in pods.get("soft")["metadata"]["annotations"]
    assert [each.mode for each in node.shares()] == ["soft"]


def test_programs_outside_of_claims_take_from_them(node: NodeAgent, pods: Pods) -> None:
    """The device plugin's pods and claims share one book."""
    pods.create(pod("plain", container(burn_and_stay("1Gi"), limits=part("60Gi"))))
    burnt(pods, "plain")
    (taken,) = {each.uuid for share_ in node.shares() for each in share_.devices}

    def left() -> dict[str, str]:
        return {
            str(each["attributes"]["uuid"]["string"]): each["capacity"]["memory"]["value"]
            for each in published(node.cluster)
            if each["attributes"]["type"]["string"] == "share"
        }

    wait_until(lambda: left()[taken] < "20Gi", "less on that GPU", explain=node.explain)
    claim(pods, "rest", share(memory="30Gi"))
    pods.create(claiming("rest", burn_and_stay("1Gi"), "rest"))
    assert burnt(pods, "rest").uuid != taken


EXAMPLES = ROOT / "examples" / "claims"
EXPECTED = {
    "quarter": {"quarter": 20 * GIB},
    "shared": {"first": 8 * GIB, "second": 8 * GIB},
    "parameters": {"service": 8 * GIB},
    "first-available": {"slice-or-part": 10 * GIB},
}
"""By example: the memory that each of its pods sees."""


def test_the_examples_run_as_they_are(node: NodeAgent, pods: Pods) -> None:
    def kubectl(*arguments: str) -> str:
        return node.cluster.kubectl_run("--namespace", pods.namespace, *arguments)

    files = [("-f", str(EXAMPLES / f"{example}.yaml")) for example in (*EXPECTED, "whole")]
    kubectl("apply", *chain(*files))
    for example, expected in EXPECTED.items():
        for name, memory in expected.items():
            assert burnt(pods, name, "train").total_bytes == memory, example
            pods.wait_phase(name, "Succeeded")
    assert burnt(pods, "whole", "train").total_bytes > 78 * GIB
    for command in (
        "get deviceclasses",
        "get resourceslices",
        "get resourceclaims",
        "describe pod quarter",
        "delete -f " + str(EXAMPLES / "quarter.yaml"),
    ):
        print(f"$ kubectl {command}\n{kubectl(*command.split())}")  # noqa: T201 - for the guide
    wait_until(lambda: not node.shares(), "end of the shares", explain=node.explain)


def explained(pods: Pods, name: str) -> Json:
    """What `allot explain claim` says."""
    command = [*(sys.executable, "-m", "allotment", "explain", "claim", "-o", "json")]
    command += [f"{pods.namespace}/{name}", "--kubeconfig", str(pods.cluster.kubeconfig)]
    found: Json = json.loads(pods.cluster.node.run(command).stdout)
    return found


def test_the_extender_gives_nothing_that_a_claim_has_before_it_is_prepared(
    testbed_machine: None, tmp_path: Path
) -> None:
    """On a cluster of its own: kube-scheduler asks the extender, and the node's agent is away."""
    del testbed_machine
    with (
        Cluster(state=tmp_path, scheduler_config=scheduler_config()) as own,
        node_agent(own, SOFT) as agent,
        Scheduler(own),
    ):
        install_classes(own)
        wait_until(lambda: published(own), "slices", explain=agent.explain)
        made = Pods(own, own.make_namespace("before-prepare"))
        agent.end(signal.SIGKILL)
        for name in ("first", "second"):
            claim(made, name, share(memory="60Gi"))
            made.create(claiming(name, burn_and_stay("1Gi"), name))
        for name in ("first", "second"):
            made.wait_event(name, reason=NOT_PREPARED)
        pods_path = f"/api/v1/namespaces/{made.namespace}/pods"

        def placed() -> set[str]:
            return {*placements(own.api.items(pods_path))}

        assert explained(made, "first")["state"] == "allocated"
        claim(made, "third", share(memory="60Gi"))
        waits = explained(made, "third")
        assert (waits["state"], waits["fitting"]) == ("pending", [])
        assert "need 60Gi of memory on a device" in waits["requests"][0]["refused"][0]["message"]
        made.create(gpu_pod("large", memory="30Gi", compute=None))
        made.wait_event("large", reason="FailedScheduling")
        made.create(gpu_pod("small", memory="10Gi", compute=None))
        wait_until(lambda: "small" in placed(), "placement", explain=agent.explain)
        assert placed() == {"small"}
        agent.again()
        for name in ("first", "second"):
            assert burnt(made, name).total_bytes == 60 * GIB
        wait_until(lambda: explained(made, "first")["state"] == "prepared", "a status")
        (device,) = explained(made, "first")["devices"]
        assert (device["mode"], device["memory_limit_bytes"]) == ("soft", 60 * GIB)
        assert placed() == {"small"}
        own.api.delete(f"{pods_path}/first", gracePeriodSeconds="0")
        own.api.delete(f"{API}/namespaces/{made.namespace}/resourceclaims/first")
        wait_until(lambda: "large" in placed(), "placement", explain=agent.explain)
        made.delete()
