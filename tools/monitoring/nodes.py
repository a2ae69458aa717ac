# SPDX-License-Identifier: Apache-2.0
"""The dashboard of one node: its GPUs, its shares, and its agent."""

from __future__ import annotations

from typing import Final

from monitoring.fleet import CLUSTER, USABLE
from monitoring.panels import FAULTS, FULL, HOT, Board, Panel, Query, Row, Variable

NODE: Final = Variable(
    "node", "Node", 'label_values(allotment_gpu_info{cluster=~"$cluster"}, node)', has_all=False
)
HERE: Final = 'cluster=~"$cluster", node=~"$node"'
INDEX: Final = "on (gpu) group_left (index) max by (gpu, index) (allotment_gpu_info{%s})"


def here(expr: str) -> str:
    """Fill in the choice of the node."""
    return expr.replace("%s", HERE)


_GPUS: Final = Panel(
    "GPUs",
    "table",
    "One line for each GPU of the node. Click its UUID to see who shares it.",
    (
        Query(here("max by (gpu, index, model, mode) (allotment_gpu_info{%s})")),
        Query(here("max by (gpu) (allotment_gpu_healthy{%s})"), "Healthy", "bool_yes_no"),
        Query(here("max by (gpu) (allotment_gpu_shares{%s})"), "Shares"),
        Query(here("max by (gpu) (allotment_gpu_memory_total_bytes{%s})"), "Memory", "bytes"),
        Query(
            here("max by (gpu) (allotment_gpu_memory_allocated_bytes{%s})"),
            "Memory promised",
            "bytes",
        ),
        Query(here("max by (gpu) (allotment_gpu_memory_used_bytes{%s})"), "Memory in use", "bytes"),
        Query(here("max by (gpu) (allotment_gpu_utilization_ratio{%s})"), "Busy", "percentunit"),
        Query(
            here('max by (gpu) (allotment_gpu_temperature_celsius{sensor="gpu", %s})'),
            "Temperature",
            "celsius",
            HOT,
        ),
        Query(here("max by (gpu) (allotment_gpu_power_watts{%s})"), "Power", "watt"),
    ),
    width=24,
    height=9,
    labels={"gpu": "GPU", "index": "Index", "model": "Model", "mode": "Mode"},
    link=("gpu", "gpu"),
)


def _of_gpus(
    title: str, description: str, name: str, unit: str, most: float | None = None
) -> Panel:
    """A line for each GPU of the node, by its index."""
    expr = here(f"sum by (index) (allotment_gpu_{name} * {INDEX})")
    return Panel(title, "lines", description, (Query(expr, "GPU {{index}}"),), unit, most=most)


SHARES: Final = "namespace, pod, container, claim, request, share, gpu, mode"
SHARE_TITLES: Final = {
    "namespace": "Namespace",
    "pod": "Pod",
    "container": "Container",
    "claim": "Claim",
    "request": "Request",
    "share": "Share",
    "gpu": "GPU",
    "mode": "Mode",
}


def shares_table(choice: str, description: str) -> Panel:
    """A line for each share that labels choose."""

    def each(name: str) -> str:
        return f"max by ({SHARES}) (allotment_share_{name}{{{choice}}})"

    return Panel(
        "Shares",
        "table",
        description,
        (
            Query(each("memory_limit_bytes"), "Memory limit", "bytes"),
            Query(each("memory_used_bytes"), "Memory in use", "bytes"),
            Query(each("memory_peak_bytes"), "Memory peak", "bytes"),
            Query(each("memory_refusals_total"), "Refused", "short", ((1, "orange"),)),
            Query(each("compute_guaranteed_ratio"), "Guaranteed", "percentunit"),
            Query(each("utilization_ratio"), "Busy", "percentunit"),
            Query(each("processes"), "Processes"),
        ),
        width=24,
        height=10,
        labels=dict(SHARE_TITLES),
        link=("pod", "share"),
    )


def _quantiles(name: str, choice: str) -> tuple[Query, ...]:
    rate = f"sum by (le) (rate({name}_bucket{{{choice}}}[$__rate_interval]))"
    return tuple(
        Query(f"histogram_quantile({part:g}, {rate})", f"p{part * 100:g}") for part in (0.5, 0.99)
    )


ONLY_STARTS: Final = "Empty while no container with a share starts."

NODES: Final = Board(
    "node",
    "Allotment / Node",
    "What the GPUs of a node do, which shares are on them, and whether its agent works.",
    (CLUSTER, NODE),
    (
        Row(
            "Now",
            (
                Panel(
                    "GPUs",
                    "stat",
                    "GPUs of the node.",
                    (Query(here("count(count by (gpu) (allotment_gpu_info{%s}))")),),
                    width=4,
                    height=4,
                ),
                Panel(
                    "Shares",
                    "stat",
                    "Shares on the node's GPUs and MIG devices.",
                    (Query(here("sum(allotment_gpu_shares{%s})")),),
                    width=4,
                    height=4,
                ),
                Panel(
                    "Memory in use",
                    "stat",
                    "Memory in use, as a part of the memory that shares can have.",
                    (Query(here(f"sum(allotment_gpu_memory_used_bytes{{%s}}) / {USABLE}")),),
                    "percentunit",
                    width=4,
                    height=4,
                    decimals=0,
                    thresholds=FULL,
                ),
                Panel(
                    "Not healthy",
                    "stat",
                    "GPUs on which no new share is placed, because of an error.",
                    (Query(here("count(allotment_gpu_healthy{%s} == 0) or vector(0)")),),
                    width=4,
                    height=4,
                    thresholds=FAULTS,
                ),
                Panel(
                    "Beyond their limit",
                    "stat",
                    "Shares that have more memory than their limit, by the driver, or whose files"
                    " allow more than they were promised.",
                    (Query(here("sum(allotment_agent_shares_exceeding{%s})")),),
                    width=4,
                    height=4,
                    thresholds=FAULTS,
                ),
                Panel(
                    "Not read",
                    "stat",
                    "Parts of the last scrape that did not answer in time: the GPUs, or the"
                    " files of the shares.",
                    (Query(here("count(allotment_use_read{%s} == 0) or vector(0)")),),
                    width=4,
                    height=4,
                    thresholds=FAULTS,
                ),
            ),
        ),
        Row("GPUs", (_GPUS,)),
        Row(
            "Over time",
            (
                _of_gpus(
                    "Memory in use",
                    "Memory in use by processes, by GPU.",
                    "memory_used_bytes{%s}",
                    "bytes",
                ),
                _of_gpus(
                    "Memory promised",
                    "Limits of the shares, by GPU.",
                    "memory_allocated_bytes{%s}",
                    "bytes",
                ),
                _of_gpus(
                    "Busy",
                    "Part of the time in which kernels run, by GPU.",
                    "utilization_ratio{%s}",
                    "percentunit",
                    1,
                ),
                _of_gpus(
                    "Temperature",
                    "Temperature of the GPUs.",
                    'temperature_celsius{sensor="gpu", %s}',
                    "celsius",
                ),
                _of_gpus("Power", "Power draw of the GPUs.", "power_watts{%s}", "watt"),
                Panel(
                    "Health",
                    "states",
                    "Whether new shares are placed on a GPU.",
                    (
                        Query(
                            here(f"max by (index) (allotment_gpu_healthy{{%s}} * {INDEX})"),
                            "GPU {{index}}",
                        ),
                    ),
                    states=("not healthy", "healthy"),
                ),
            ),
        ),
        Row("Shares", (shares_table(HERE, "One line for each share. Click a pod to see more."),)),
        Row(
            "Agent",
            (
                Panel(
                    "Start of a container",
                    "lines",
                    "Time that the agent takes to make the share of a container that starts.",
                    _quantiles("allotment_agent_prepare_seconds", HERE),
                    "s",
                    empty=ONLY_STARTS,
                ),
                Panel(
                    "Containers refused",
                    "stacked",
                    "Attempts to start a container that got no share, by the error's name.",
                    (
                        Query(
                            here(
                                "sum by (reason)"
                                " (increase(allotment_agent_refusals_total{%s}[$__rate_interval]))"
                            ),
                            "{{reason}}",
                        ),
                    ),
                    empty="Empty until a container was refused.",
                ),
                Panel(
                    "Shares made and ended",
                    "lines",
                    "Shares that the agent made and removed.",
                    (
                        Query(
                            here(
                                "sum(increase(allotment_agent_shares_made_total{%s}"
                                "[$__rate_interval]))"
                            ),
                            "made",
                        ),
                        Query(
                            here(
                                "sum(increase(allotment_agent_shares_ended_total{%s}"
                                "[$__rate_interval]))"
                            ),
                            "ended",
                        ),
                    ),
                    empty="Empty until the agent has made or ended a share.",
                ),
                Panel(
                    "Agent's state",
                    "states",
                    "Whether the newest configuration is in force, updates arrive from the API"
                    " server, and scrapes read everything.",
                    (
                        Query(here("min(allotment_agent_config_valid{%s})"), "configuration"),
                        Query(
                            here("min by (what) (allotment_agent_api_synced{%s})"),
                            "updates of {{what}}",
                        ),
                        Query(here("min by (what) (allotment_use_read{%s})"), "scrape of {{what}}"),
                    ),
                    states=("no", "yes"),
                ),
                Panel(
                    "Cost of a scrape",
                    "lines",
                    "Time that the agent takes to read all shares and GPUs for a scrape.",
                    (Query(here("max(allotment_use_read_seconds{%s})"), "reading"),),
                    "s",
                ),
                Panel(
                    "Agent's memory and processor",
                    "lines",
                    "Memory of the agent's process on the host, and its processor time.",
                    (
                        Query(
                            here(
                                'max(process_resident_memory_bytes{job="allotment-agent", %s})'
                                " / 2^30"
                            ),
                            "memory in GiB",
                        ),
                        Query(
                            here(
                                "max(rate(process_cpu_seconds_total"
                                '{job="allotment-agent", %s}[$__rate_interval]))'
                            ),
                            "cores",
                        ),
                    ),
                ),
            ),
        ),
    ),
)
