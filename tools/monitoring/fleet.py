# SPDX-License-Identifier: Apache-2.0
"""The dashboard of all GPUs of all nodes."""

from __future__ import annotations

from typing import Final

from monitoring.panels import FAULTS, FULL, Board, Panel, Query, Row, Variable

CLUSTER: Final = Variable("cluster", "Cluster", "label_values(allotment_gpu_info, cluster)")
ALL: Final = 'cluster=~"$cluster"'
USABLE: Final = (
    "(sum(allotment_gpu_memory_total_bytes{%s}) - sum(allotment_gpu_memory_reserved_bytes{%s}))"
)
MODEL: Final = "on (gpu) group_left (model) max by (gpu, model) (allotment_gpu_info{%s})"

IDLE: Final = 0.02
"""A GPU that is busy less than this is idle."""
NO_MIG: Final = "GPUs that are cut into MIG devices are left out: their drivers do not report it."


def of_all(expr: str) -> str:
    """Fill in the choice of clusters wherever an expression has `%s`."""
    return expr.replace("%s", ALL)


def _between(least: float, most: float) -> str:
    util = "allotment_gpu_utilization_ratio{%s}"
    lower = f"{util} >= {least:g}"
    upper = f" < {most:g}" if most <= 1 else ""
    return of_all(f"count({lower}{upper}) or vector(0)")


_NODES: Final = Panel(
    "Nodes",
    "table",
    "One line for each node. Click a node to see its GPUs and shares.",
    (
        Query(of_all("count by (node) (allotment_gpu_info{%s})"), "GPUs"),
        Query(
            of_all("sum by (node) (1 - allotment_gpu_healthy{%s})"), "Not healthy", "short", FAULTS
        ),
        Query(of_all("sum by (node) (allotment_gpu_shares{%s})"), "Shares"),
        Query(of_all("sum by (node) (allotment_gpu_memory_total_bytes{%s})"), "Memory", "bytes"),
        Query(
            of_all(
                "sum by (node) (allotment_gpu_memory_allocated_bytes{%s})"
                " / sum by (node) (allotment_gpu_memory_total_bytes{%s})"
            ),
            "Memory promised",
            "percentunit",
        ),
        Query(
            of_all(
                "sum by (node) (allotment_gpu_memory_used_bytes{%s})"
                " / sum by (node) (allotment_gpu_memory_total_bytes{%s})"
            ),
            "Memory in use",
            "percentunit",
            FULL,
        ),
        Query(
            of_all("avg by (node) (allotment_gpu_compute_guaranteed_ratio{%s})"),
            "Compute guaranteed",
            "percentunit",
        ),
        Query(
            of_all("avg by (node) (allotment_gpu_utilization_ratio{%s})"),
            "Busy",
            "percentunit",
        ),
        Query(of_all("sum by (node) (allotment_gpu_power_watts{%s})"), "Power", "watt"),
    ),
    width=24,
    height=10,
    labels={"node": "Node"},
    link=("node", "node"),
)

FLEET: Final = Board(
    "fleet",
    "Allotment / Fleet",
    "How many GPUs there are, what of them is promised, what is used, and what is wrong.",
    (CLUSTER,),
    (
        Row(
            "Now",
            (
                Panel(
                    "GPUs",
                    "stat",
                    "GPUs that the node agents report, shared or not.",
                    (Query(of_all("count(count by (gpu) (allotment_gpu_info{%s}))")),),
                    width=3,
                    height=4,
                ),
                Panel(
                    "Not healthy",
                    "stat",
                    "GPUs on which no new share is placed, because of an error.",
                    (Query(of_all("count(allotment_gpu_healthy{%s} == 0) or vector(0)")),),
                    width=3,
                    height=4,
                    thresholds=FAULTS,
                ),
                Panel(
                    "Shares",
                    "stat",
                    "Shares on all GPUs and their MIG devices.",
                    (Query(of_all("sum(allotment_gpu_shares{%s})")),),
                    width=3,
                    height=4,
                ),
                Panel(
                    "Memory promised",
                    "stat",
                    "Limits of all shares, as a part of the memory that shares can have. Above"
                    " 100 %, some of it is promised on the host.",
                    (Query(of_all(f"sum(allotment_gpu_memory_allocated_bytes{{%s}}) / {USABLE}")),),
                    "percentunit",
                    width=3,
                    height=4,
                    decimals=0,
                ),
                Panel(
                    "Memory in use",
                    "stat",
                    "Memory in use by all processes, as a part of the memory that shares can have.",
                    (Query(of_all(f"sum(allotment_gpu_memory_used_bytes{{%s}}) / {USABLE}")),),
                    "percentunit",
                    width=3,
                    height=4,
                    decimals=0,
                ),
                Panel(
                    "Busy",
                    "stat",
                    f"Part of the time in which kernels run, mean of all GPUs. {NO_MIG}",
                    (Query(of_all("avg(allotment_gpu_utilization_ratio{%s})")),),
                    "percentunit",
                    width=3,
                    height=4,
                    decimals=0,
                ),
                Panel(
                    "Promised and idle",
                    "stat",
                    "GPUs that shares hold, and that were busy less than 2 % of the last 30"
                    f" minutes. {NO_MIG}",
                    (
                        Query(
                            of_all(
                                "count(avg_over_time(allotment_gpu_utilization_ratio{%s}[30m])"
                                f" < {IDLE} and on (gpu)"
                                " allotment_gpu_memory_allocated_bytes{%s} > 0) or vector(0)"
                            )
                        ),
                    ),
                    width=3,
                    height=4,
                    thresholds=((1, "orange"),),
                ),
                Panel(
                    "Agents down",
                    "stat",
                    "Node agents that Prometheus knows and that do not answer.",
                    (
                        Query(
                            of_all('count(up{job="allotment-agent", %s} == 0) or vector(0)'),
                        ),
                    ),
                    width=3,
                    height=4,
                    thresholds=FAULTS,
                ),
            ),
        ),
        Row(
            "Over time",
            (
                Panel(
                    "Memory",
                    "lines",
                    "Memory of all GPUs: what there is, what is promised to shares, and what"
                    " processes use.",
                    (
                        Query(of_all("sum(allotment_gpu_memory_total_bytes{%s})"), "there"),
                        Query(of_all("sum(allotment_gpu_memory_allocated_bytes{%s})"), "promised"),
                        Query(of_all("sum(allotment_gpu_memory_used_bytes{%s})"), "in use"),
                        Query(
                            of_all("sum(allotment_gpu_memory_outside_bytes{%s})"),
                            "in use outside any share",
                        ),
                    ),
                    "bytes",
                ),
                Panel(
                    "GPU time",
                    "lines",
                    "Mean of all GPUs: the part of their time that is guaranteed to shares, and"
                    f" the part in which kernels run. Of the latter, {NO_MIG}",
                    (
                        Query(
                            of_all("avg(allotment_gpu_compute_guaranteed_ratio{%s})"), "guarantee"
                        ),
                        Query(of_all("avg(allotment_gpu_utilization_ratio{%s})"), "busy"),
                    ),
                    "percentunit",
                    most=1,
                ),
                Panel(
                    "GPUs by how busy they are",
                    "stacked",
                    "How many GPUs are idle, and how many are busy for which part of the time."
                    f" {NO_MIG}",
                    (
                        Query(_between(0, IDLE), "idle"),
                        Query(_between(IDLE, 0.25), "up to 25 %"),
                        Query(_between(0.25, 0.5), "up to 50 %"),
                        Query(_between(0.5, 0.75), "up to 75 %"),
                        Query(_between(0.75, 2), "more"),
                    ),
                ),
                Panel(
                    "Namespaces by memory",
                    "ranking",
                    "The ten namespaces whose shares use the most memory.",
                    (
                        Query(
                            of_all(
                                "topk(10, sum by (namespace)"
                                " (allotment_share_memory_used_bytes{%s}))"
                            ),
                            "{{namespace}}",
                        ),
                    ),
                    "bytes",
                ),
                Panel(
                    "Namespaces by GPU time",
                    "ranking",
                    "The ten namespaces whose shares use the most GPU time; 1 is a whole GPU."
                    " Measured in mode soft, on GPUs of which a share asks for compute.",
                    (
                        Query(
                            of_all(
                                "topk(10, sum by (namespace)"
                                " (rate(allotment_share_gpu_seconds_total{%s}[$__rate_interval])))"
                            ),
                            "{{namespace}}",
                        ),
                    ),
                ),
                Panel(
                    "Power",
                    "lines",
                    "Power draw of all GPUs, by model.",
                    (
                        Query(
                            of_all(f"sum by (model) (allotment_gpu_power_watts{{%s}} * {MODEL})"),
                            "{{model}}",
                        ),
                    ),
                    "watt",
                ),
            ),
        ),
        Row(
            "Models",
            (
                Panel(
                    "Models",
                    "table",
                    "One line for each model of GPU.",
                    (
                        Query(of_all("count by (model) (allotment_gpu_info{%s})"), "GPUs"),
                        Query(
                            of_all(
                                f"sum by (model) (allotment_gpu_memory_total_bytes{{%s}} * {MODEL})"
                            ),
                            "Memory",
                            "bytes",
                        ),
                        Query(
                            of_all(
                                "sum by (model) (allotment_gpu_memory_allocated_bytes{%s}"
                                f" * {MODEL})"
                            ),
                            "Memory promised",
                            "bytes",
                        ),
                        Query(
                            of_all(
                                f"sum by (model) (allotment_gpu_memory_used_bytes{{%s}} * {MODEL})"
                            ),
                            "Memory in use",
                            "bytes",
                        ),
                        Query(
                            of_all(
                                f"avg by (model) (allotment_gpu_utilization_ratio{{%s}} * {MODEL})"
                            ),
                            "Busy",
                            "percentunit",
                        ),
                    ),
                    width=24,
                    height=6,
                    labels={"model": "Model"},
                ),
            ),
        ),
        Row("Nodes", (_NODES,)),
    ),
)
