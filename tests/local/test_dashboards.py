# SPDX-License-Identifier: Apache-2.0
"""Every expression of the dashboards, asked of a real Prometheus that scrapes the real metrics.

Sixty shares on 16 simulated GPUs, and a scheduler with waiting pods. Without a cluster.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Final

import pytest
import watched_cluster
import watched_machine
from patience import wait_until
from prometheus_server import MONITORING, Dashboard, Prometheus, Target, Value, prometheus

from monitoring.alerts import ALERTS

pytestmark = pytest.mark.usefixtures("native_dir")

BOARDS: Final = sorted((MONITORING / "dashboards").glob("*.json"))

SILENT: Final[dict[str, dict[str, str]]] = {
    "allotment-gpu": {
        "MIG devices A": "the GPU is not cut",
        "Errors C": "no XID was reported",
    },
    "allotment-node": {
        "Containers refused A": "none was refused",
        "Shares made and ended B": "none has ended",
    },
    "allotment-scheduler": {
        "Bindings A": "none was bound",
        "Bindings B": "none was bound",
        "Webhook A": "none was created",
        "Webhook B": "none was created",
        "Faults D": "no task failed",
    },
}
"""What gives nothing here, by dashboard: a panel and its query, and the reason."""
GI: Final = 1 << 30


WAITED_FOR = "sum by (gpu) (rate(allotment_share_turn_wait_seconds_count[5m])) > 0"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    work = tmp_path_factory.mktemp("dashboards")
    with ExitStack() as stack:
        machine = watched_machine.Machine(work / "state")
        stack.enter_context(watched_machine.crowd(machine))
        agent, metrics = stack.enter_context(watched_machine.agent(machine))
        scheduler, ask = stack.enter_context(watched_cluster.scheduler(work))
        found = stack.enter_context(
            prometheus(
                work / "prometheus",
                [
                    Target("allotment-agent", f"127.0.0.1:{agent}", watched_machine.NODE),
                    Target("allotment-scheduler", f"127.0.0.1:{scheduler}"),
                ],
            )
        )
        # All programs are at work, and some scrapes have seen it.
        for expr in (
            "count(allotment_share_memory_used_bytes > 2^29) >= 2",
            "count(rate(allotment_share_gpu_seconds_total[5m]) > 0) >= 2",
            f"count({WAITED_FOR}) > 0",
            "max(allotment_share_memory_refusals_total) > 0",
            "max(allotment_scheduler_leading) > 0",
        ):
            wait_until(partial(found.query, expr), expr, patience_s=120)
        # What happens while it looks: a quantile is of what is new.
        ask()
        metrics.observe("prepare_seconds", 0.01, "allotment.dev/gpu")
        for expr in (
            "max(increase(allotment_agent_prepare_seconds_count[5m])) > 0",
            "max(increase(allotment_scheduler_request_seconds_count[5m])) > 0",
        ):
            wait_until(partial(found.query, expr), expr, patience_s=120)
        yield found


def is_there(values: list[Value]) -> bool:
    return any(not math.isnan(each.value) for each in values)


def busiest_gpu(server: Prometheus) -> str:
    """Of those with a quantile of waits: a share that is alone waits for no turn."""
    used = "sum by (gpu) (rate(allotment_share_gpu_seconds_total[5m]))"
    (most,) = server.query(f"topk(1, {used} and on (gpu) {WAITED_FOR})")
    return most.labels["gpu"]


@pytest.mark.parametrize("path", BOARDS, ids=lambda path: path.stem)
def test_each_query_of_a_dashboard_gives_values(server: Prometheus, path: Path) -> None:
    board = Dashboard(path, server, {"gpu": busiest_gpu(server)})
    silent = {
        f"{panel['title']} {target['refId']}"
        for panel in board.panels()
        for target in panel["targets"]
        if not is_there(board.ask(panel, target["refId"]))
    }
    assert silent == set(SILENT.get(path.stem, {}))


@pytest.mark.parametrize("path", BOARDS, ids=lambda path: path.stem)
def test_each_variable_of_a_dashboard_has_values(server: Prometheus, path: Path) -> None:
    board = Dashboard(path, server)
    variables = [each for each in board.document["templating"]["list"] if each["type"] == "query"]
    options = {each["name"]: board.options(each) for each in variables}
    # One cluster alone needs no label, and then has all.
    assert options.pop("cluster") == []
    assert all(options.values())


def test_the_figures_are_right(server: Prometheus) -> None:
    fleet = Dashboard(MONITORING / "dashboards" / "allotment-fleet.json", server)

    def number(title: str) -> float:
        (found,) = fleet.ask(fleet.titled(title, "stat"))
        return found.value

    assert number("GPUs") == 16
    assert number("Shares") == watched_machine.SHARES
    assert number("Not healthy") == number("Agents down") == 0
    board = Dashboard(
        MONITORING / "dashboards" / "allotment-gpu.json", server, {"gpu": busiest_gpu(server)}
    )
    panel = board.titled("Memory by share")
    shares = sum(each.value for each in board.ask(panel))
    others = sum(each.value for ref in "BC" for each in board.ask(panel, ref))
    assert GI < shares + others <= 80 * GI
    assert 0 < sum(each.value for each in board.ask(board.titled("GPU time by share"))) <= 1
    cost = Dashboard(MONITORING / "dashboards" / "allotment-namespace.json", server)
    now = server.newest()
    paid, free, idle = (
        cost.ask(cost.titled(title), at=now)[0].value
        for title in ("Paid per hour", "Not allocated", "Allocated and idle")
    )
    kept = sum(each.value for each in cost.ask(cost.titled("Cost by namespace"), at=now))
    assert paid == 16 * 2.5
    assert free + kept == pytest.approx(paid)
    assert 0 < idle < kept


def test_panels_of_one_figure_agree_in_all_dashboards(server: Prometheus) -> None:
    """At one moment. The test on the cluster compares one of each with what the pods report."""
    now = server.newest()

    def total(name: str, title: str, ref: str = "A", **choices: str) -> float:
        board = Dashboard(MONITORING / "dashboards" / f"allotment-{name}.json", server, choices)
        kind = "bargauge" if title.startswith("Namespaces by") else "timeseries"
        return sum(each.value for each in board.ask(board.titled(title, kind), ref, at=now))

    def of_gpus(title: str) -> float:
        gpus = [each.labels["gpu"] for each in server.query("allotment_gpu_info", now)]
        return sum(total("gpu", title, gpu=gpu) for gpu in gpus)

    panels = {
        "memory of GPUs": [total("fleet", "Memory", "C"), total("node", "Memory in use")],
        "promised memory": [total("fleet", "Memory", "B"), total("node", "Memory promised")],
        "memory of shares": [
            total("share", "Memory in use"),
            total("namespace", "Memory in use"),
            total("fleet", "Namespaces by memory"),
            of_gpus("Memory by share"),
        ],
        "limits": [total("share", "Memory in use", "B"), total("namespace", "Memory limits")],
        "GPU time": [
            total("share", "GPU time"),
            total("namespace", "GPU time"),
            total("fleet", "Namespaces by GPU time"),
            of_gpus("GPU time by share"),
        ],
    }
    for figure, values in panels.items():
        assert values[0] > 0, figure
        assert values == pytest.approx([values[0]] * len(values)), figure
    chosen = {"namespace": "team-1", "pod": "train-1"}
    assert total("share", "Memory in use", "B", **chosen) == 60 * GI
    assert total("share", "GPU time", "B", **chosen) == 0.2


def test_each_alert_is_evaluated_and_none_fires_that_should_not(server: Prometheus) -> None:
    def unknown() -> list[str]:
        return [each["name"] for each in server.rules() if each["health"] == "unknown"]

    wait_until(lambda: not unknown(), "evaluation of all alerts")
    found = server.rules()
    assert {each["name"] for each in found} == {each.full_name for each in ALERTS}
    assert {each["name"]: each["lastError"] for each in found if each["health"] != "ok"} == {}
    # A share of the crowd asks for more than its limit.
    firing = {each["name"] for each in found if each["state"] == "firing"}
    assert firing == {"AllotmentMemoryRefused"}


# Of dashboard 12239 and its later copy, dcgm-exporter's `grafana/dcgm-exporter-dashboard.json`.
# Not of tensor cores and engines (`DCGM_FI_PROF_...`): NVML has no such figures.
DCGM: Final = """\
DCGM_FI_DEV_GPU_TEMP{instance=~"$instance", gpu=~"$gpu"}
avg(DCGM_FI_DEV_GPU_TEMP{instance=~"$instance", gpu=~"$gpu"})
DCGM_FI_DEV_POWER_USAGE{instance=~"$instance", gpu=~"$gpu"}
sum(DCGM_FI_DEV_POWER_USAGE{instance=~"$instance", gpu=~"$gpu"})
DCGM_FI_DEV_SM_CLOCK{instance=~"$instance", gpu=~"$gpu"} * 1000000
DCGM_FI_DEV_GPU_UTIL{instance=~"$instance", gpu=~"$gpu"}
DCGM_FI_DEV_FB_USED{instance=~"$instance", gpu=~"$gpu"}
max(DCGM_FI_DEV_GPU_TEMP{Hostname=~"$Hostname", gpu=~"$gpu"}) by (Hostname, gpu)
avg(DCGM_FI_DEV_GPU_TEMP{Hostname=~"$Hostname", gpu=~"$gpu"})
sum(DCGM_FI_DEV_POWER_USAGE{Hostname=~"$Hostname", gpu=~"$gpu"})
max(DCGM_FI_DEV_SM_CLOCK{Hostname=~"$Hostname", gpu=~"$gpu"}) by (Hostname, gpu)
max(DCGM_FI_DEV_FB_USED{Hostname=~"$Hostname", gpu=~"$gpu"}) by (Hostname, gpu)
"""
# Of `dashboards/hami-vgpu-dashboard.json` of HAMi.
HAMI: Final = """\
count(hami_gpu_memory_limit_bytes{node=~"$node"})
sum(hami_gpu_memory_limit_bytes{node=~"$node"})
sum(hami_gpu_memory_allocated_bytes{node=~"$node"})
sum(hami_gpu_shared_count{node=~"$node"})
hami_host_gpu_memory_used_bytes and on (device_uuid) hami_gpu_memory_limit_bytes{node=~"$node"}
hami_host_gpu_utilization_ratio and on (device_uuid) hami_gpu_memory_limit_bytes{node=~"$node"}
sum by (node) (hami_gpu_memory_allocated_bytes{node=~"$node"})
sum by (node) (hami_gpu_memory_limit_bytes{node=~"$node"})
hami_node_gpu_memory_allocated_ratio{node=~"$node"}
hami_gpu_core_allocated_ratio{node=~"$node"}
hami_gpu_shared_count{node=~"$node"}
hami_vgpu_memory_used_bytes{namespace=~"$namespace"}
hami_vgpu_memory_limit_bytes{namespace=~"$namespace"}
hami_container_device_utilization_ratio{namespace=~"$namespace"}
100 * hami_vgpu_memory_used_bytes{namespace=~"$namespace"} \
/ hami_vgpu_memory_limit_bytes{namespace=~"$namespace"}
topk(10, hami_vgpu_memory_used_bytes{namespace=~"$namespace"})
""".replace("\\\n", "")
CHOICES: Final = {
    "instance": ".+",
    "Hostname": ".+",
    "gpu": "[0-9]+",
    "node": "node-1",
    "namespace": "team-.+",
}


@pytest.mark.parametrize("expr", [*DCGM.splitlines(), *HAMI.splitlines()])
def test_dashboards_of_others_have_values_with_the_aliases(server: Prometheus, expr: str) -> None:
    assert is_there(server.query(re.sub(r"\$(\w+)", lambda found: CHOICES[found[1]], expr)))
