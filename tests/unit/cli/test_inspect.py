# SPDX-License-Identifier: Apache-2.0
"""`allot inspect`: who has what, in tables for a terminal, in JSON, and as gpushare shows it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from explained_twin import GI, asking, node, pod
from served_cluster import ServedHttp, served_http

from allotment.cli import main
from allotment.model.clusters import TakenPart


@pytest.fixture
def served(tmp_path: Path) -> Iterator[ServedHttp]:
    with served_http(tmp_path) as cluster:
        taken = TakenPart(memory=5 * GI, guarantee=1000, shares=1, mode="soft")
        nodes = [node("a"), node("b", devices=1, problem="cordoned"), node("c", taken={1: taken})]
        nodes[0]["status"]["addresses"] = [{"type": "InternalIP", "address": "192.168.0.71"}]
        cluster.lists = {
            "/api/v1/nodes": [*nodes, {"metadata": {"name": "plain"}}],
            "/api/v1/pods": [
                pod("train", asking(), on=("a", 1), phase="Running"),
                pod("infer", asking(), on=("a", 1), phase="Running", namespace="web"),
                pod("other", asking(), on=("c", 0), phase="Running"),
                pod("unplaced", asking(), node="c"),
                pod("waits", asking("60Gi")),
            ],
        }
        yield cluster


def inspect(served: ServedHttp, *words: str) -> Result:
    command = ["inspect", "--kubeconfig", str(served.kubeconfig), *words]
    return CliRunner().invoke(main, command)


def test_a_line_for_each_node_and_the_pods_that_wait(served: ServedHttp) -> None:
    shown = inspect(served)
    assert shown.exit_code == 0, shown.stderr
    assert shown.stdout == (
        "NODE  GPUS  CLOSED  IDLE  SHARES  MEMORY    OF  MOST FREE  COMPUTE  MODEL  SHARES BY\n"
        "a        2       -     1       2    40Gi  80Gi       40Gi     50 %  A100   ml 1, web 1\n"
        "b        1       1     1       0      0B  40Gi         0B      0 %  A100   -\n"
        "c        2       -     0       2    25Gi  80Gi       35Gi     30 %  A100   ml 2\n"
        "\n"
        "3 nodes with 5 GPUs: 65Gi of 200Gi allotted (32 %), 2 idle\n"
        "1 pod waits for GPUs:\n"
        "  ml/waits since 2026-01-01T00:00:00Z: kubectl allot why ml/waits\n"
    )


def test_a_line_for_each_share_of_a_node(served: ServedHttp) -> None:
    shown = inspect(served, "c")
    assert shown.stdout == (
        "Node c: 2 GPUs (A100)\n"
        "25Gi of 80Gi of memory allotted\n"
        "\n"
        "GPU  UUID     MODE  HOLDER                             MEMORY  COMPUTE  STATE\n"
        "  0  GPU-c-0  soft  ml/other/main                        20Gi  50:50    Running\n"
        "  0  GPU-c-0  soft  (free)                               20Gi  50       -\n"
        "  1  GPU-c-1  soft  (1 share known to the node alone)     5Gi  10       -\n"
        "  1  GPU-c-1  soft  (free)                               35Gi  90       -\n"
        "  ?  ?        ?     ml/unplaced                             ?  ?        Pending\n"
    )
    shown = inspect(served, "-d", "-o", "wide")
    assert "b       0  GPU-b-0  -     (closed: cordoned)" in shown.stdout
    assert "web/infer/main" in shown.stdout


def test_json_has_all_of_it(served: ServedHttp) -> None:
    found = json.loads(inspect(served, "a", "-o", "json").stdout)
    [only] = found["nodes"]
    assert [len(each["holders"]) for each in only["devices"]] == [0, 2]
    holder = only["devices"][1]["holders"][0]
    assert (holder["namespace"], holder["name"], holder["memory_bytes"]) == (
        "web",
        "infer",
        20 * GI,
    )
    assert found["waiting"][0]["containers"] == [
        {"name": "main", "asks": "a GPU with 60Gi and 50 % of compute"}
    ]
    assert found["without_devices"] == ["plain"]


def test_gpushares_own_tables(served: ServedHttp) -> None:
    shown = inspect(served, "--gpushare")
    assert shown.stdout == (
        "NAME  IPADDRESS     GPU0(Allocated/Total)  GPU1(Allocated/Total)  PENDING(Allocated)"
        "  GPU Memory(GiB)\n"
        "a     192.168.0.71  0/40                   40/40                                    "
        "  40/80\n"
        "b     unknown       0/40                   0/0                                      "
        "  0/40\n"
        "c     unknown       20/40                  5/40                   20                "
        "  45/80\n"
        "-----------------------------------------------------\n"
        "Allocated/Total GPU Memory In Cluster:\n"
        "85/200 (42%)  \n"
    )
    assert "Allocated :  40 (50%)" in inspect(served, "--gpushare", "-d", "a").stdout
    assert inspect(served, "--gpushare", "-o", "json").exit_code == 2


def test_nodes_that_are_not_there(served: ServedHttp) -> None:
    shown = inspect(served, "plane")
    assert shown.exit_code == 4
    assert "there is no node 'plane' (did you mean 'plain'?)" in shown.stderr
    assert "has no GPUs that an agent reports" in inspect(served, "plain").stderr
    served.lists = {path: [] for path in served.lists}
    assert "no node reports GPUs" in inspect(served).stderr


def test_the_right_that_is_missing_is_named(served: ServedHttp) -> None:
    served.forbidden["/api/v1/pods"] = (
        'pods is forbidden: User "eve" cannot list resource "pods" in API group "" at the'
        " cluster scope"
    )
    shown = inspect(served)
    assert shown.exit_code == 1
    assert (
        "hint: this needs the rights to list nodes, pods and resourceclaims in the whole cluster;"
        ' add this rule to a ClusterRole of this user: {apiGroups: [""], resources: [pods],'
        " verbs: [list]}\n"
    ) in shown.stderr
    served.forbidden["/api/v1/pods"] = "no"
    assert "check: kubectl auth can-i list pods -A" in inspect(served).stderr


def test_an_api_server_that_is_away(tmp_path: Path) -> None:
    with served_http(tmp_path) as gone:
        pass
    shown = inspect(gone)
    assert shown.exit_code == 1
    assert "cannot list nodes: the API server at http://127.0.0.1:" in shown.stderr
    assert "kubectl get nodes" in shown.stderr
