# SPDX-License-Identifier: Apache-2.0
"""`allot explain pod`, of pods that the real kube-scheduler has placed, and that it has not."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
from scheduling import GIB, Scheduler, add_gpu_nodes, gpu_pod, inventory, scheduler_config
from testbed.cluster import Cluster
from testbed.pods import Pods, container, pod
from testbed.waiting import wait_until


@pytest.fixture(scope="module")
def pods(testbed_machine: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pods]:
    """Pods that are placed or wait; both schedulers have ended."""
    del testbed_machine
    state = tmp_path_factory.mktemp("explain")
    with Cluster(state=state, settings=None, scheduler_config=scheduler_config()) as made:
        add_gpu_nodes(made, [inventory(f"n{number}", devices=2) for number in range(3)])
        add_gpu_nodes(made, [inventory("small", devices=2, memory=16 * GIB)])
        found = Pods(made, made.make_namespace("explain"))
        with Scheduler(made) as scheduler:
            found.create(gpu_pod("placed", memory="40Gi", compute=50))
            found.create(gpu_pod("large", memory="90Gi", compute=10))
            found.create(gpu_pod("elsewhere", nodeSelector={"disk": "tape"}))
            limits = {"nvidia.com/gpu": 1, "nvidia.com/gpumem": 1024}
            found.create(pod("foreign", container(["sleep"], limits=limits)))
            found.wait("placed", lambda each: "nodeName" in each["spec"], "placed")
            for name in ("large", "elsewhere", "foreign"):
                found.wait(name, lambda each: each["status"].get("conditions"), "condition")
            # First: it retries, and would replace the reason with "connection refused".
            made.stop("kube-scheduler")
        wait_until(lambda: not scheduler.process.is_running, "the end of the scheduler")
        yield found


def run(pods: Pods, name: str, *flags: str) -> subprocess.CompletedProcess[str]:
    """The command itself, in the cluster's sandbox."""
    command = [
        *(sys.executable, "-m", "allotment", "explain", "pod", f"{pods.namespace}/{name}"),
        *("--kubeconfig", str(pods.cluster.kubeconfig), *flags),
    ]
    return pods.cluster.node.run(command, check=False)


def explained(pods: Pods, name: str) -> Any:  # noqa: ANN401 - JSON
    done = run(pods, name, "-o", "json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_pod_that_was_placed(pods: Pods) -> None:
    found = explained(pods, "placed")
    item = pods.get("placed")
    placement = json.loads(item["metadata"]["annotations"]["allotment.dev/placement"])
    assert found["state"] == "placed"
    assert found["node"] == item["spec"]["nodeName"] == placement["node"]
    [device] = found["containers"][0]["devices"]
    assert device["uuid"] == placement["containers"]["main"]["devices"][0]
    assert device["memory_bytes"] == 40 * GIB
    assert device["guarantee_percent"] == 50
    assert sorted(found["fitting"]) == ["n0", "n1", "n2"]
    # Nothing else is there: what was the best is the best.
    assert found["rank"] == 1
    assert [each["nodes"] for each in found["refused"]] == [["small"]]
    shown = run(pods, "placed").stdout
    assert f"is placed on node {found['node']}" in shown
    assert "by fragmentation its own node ranks number 1" in shown


def test_a_pod_that_fits_nowhere(pods: Pods) -> None:
    found = explained(pods, "large")
    assert found["state"] == "pending"
    assert found["fitting"] == []
    [group] = found["refused"]
    assert group["nodes"] == ["n0", "n1", "n2", "small"]
    assert group["reason"] == "gpu-memory"
    assert "need a GPU with 90Gi" in group["message"]
    assert "have at most 80Gi on a GPU" in group["message"]
    # The scheduler has found the same.
    assert "have at most 80Gi" in found["condition"]["message"]
    assert found["obstacles"] == []


def test_a_pod_that_is_kept_by_what_kube_scheduler_checks(pods: Pods) -> None:
    found = explained(pods, "elsewhere")
    assert sorted(found["fitting"]) == ["n0", "n1", "n2", "small"]
    assert "node affinity/selector" in found["condition"]["message"]
    assert "node affinity/selector" in run(pods, "elsewhere").stdout


def test_a_pod_that_nobody_has_translated(pods: Pods) -> None:
    found = explained(pods, "foreign")
    assert [each["kind"] for each in found["obstacles"]] == ["untranslated"]
    assert found["dialect"] == "hami"


def test_a_pod_that_is_not_there(pods: Pods) -> None:
    done = run(pods, "larg")
    assert done.returncode == 4
    assert f"did you mean {pods.namespace}/large?" in done.stderr


def test_the_page_shows_each_user_what_they_may_list(pods: Pods) -> None:
    """`allot web --cluster --login`, with the API server's own reviews of tokens and rights."""
    api, namespace = pods.cluster.api, pods.namespace
    other = pods.cluster.make_namespace("others")
    tokens = {}
    for name, space in (("here", namespace), ("there", other)):
        account = f"/api/v1/namespaces/{other}/serviceaccounts"
        api.post(account, {"metadata": {"name": name}})
        binding = {
            "metadata": {"name": name},
            "roleRef": {
                "apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "view"
            },
            "subjects": [{"kind": "ServiceAccount", "name": name, "namespace": other}],
        }  # fmt: skip
        api.post(f"/apis/rbac.authorization.k8s.io/v1/namespaces/{space}/rolebindings", binding)
        tokens[name] = api.post(f"{account}/{name}/token", {"spec": {}})["status"]["token"]
    command = [
        *(sys.executable, "-m", "allotment", "web", "--cluster", "--login"),
        *("--listen", "127.0.0.1:0", "--kubeconfig", str(pods.cluster.kubeconfig)),
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as serving:
        assert serving.stdout is not None
        address = serving.stdout.readline().strip()

        def page(path: str, token: str) -> str:
            headers = {"Authorization": f"Bearer {token}"}
            asked = urllib.request.Request(address.rstrip("/") + path, headers=headers)  # noqa: S310 - http
            with urllib.request.urlopen(asked, timeout=60) as answer:  # noqa: S310 - http
                return str(answer.read(), "utf-8")

        try:
            wait_until(lambda: "large" in page("/waiting", tokens["here"]), "the first reading")
            shares = json.loads(page("/shares?format=json", tokens["here"]))["shares"]
            assert [(each["namespace"], each["name"]) for each in shares] == [
                (namespace, "placed/main")
            ]
            why = page(f"/pods/{namespace}/large", tokens["here"])
            assert "It fits on 0 of" in why
            for path in ("/", "/shares", "/gpus", "/waiting", "/events"):
                text = page(path, tokens["there"]) + page(path, "no token")
                assert not [word for word in (namespace, "large", "GPU-") if word in text]
            refused = urllib.request.Request(  # noqa: S310 - http
                f"{address}shares", headers={"Authorization": "Bearer wrong"}
            )
            with urllib.request.urlopen(refused, timeout=60) as answer:  # noqa: S310 - http
                assert answer.url == f"{address}login?next=%2Fshares"
        finally:
            serving.terminate()
