# SPDX-License-Identifier: Apache-2.0
"""The dashboards of one GPU, and of shares."""

from __future__ import annotations

from typing import Final

from monitoring.fleet import CLUSTER
from monitoring.nodes import shares_table
from monitoring.panels import FAULTS, FULL, HOT, Board, Panel, Query, Row, Variable

NODE: Final = Variable(
    "node", "Node", 'label_values(allotment_gpu_info{cluster=~"$cluster"}, node)'
)
GPU: Final = Variable(
    "gpu",
    "GPU",
    'label_values(allotment_gpu_info{cluster=~"$cluster", node=~"$node"}, gpu)',
    has_all=False,
)
OF_GPU: Final = 'gpu="$gpu"'
NAME: Final = "{{namespace}} {{pod}}{{claim}} {{container}}{{request}}"
IDENTITY: Final = "namespace, pod, container, claim, request, share"

NOT_ON_ALL: Final = "Empty where the model or the driver does not report it."
NOT_MEASURED: Final = "Measured in mode soft, while a share of the GPU asks for compute."


def one(expr: str) -> str:
    """Fill in the choice of the GPU."""
    return expr.replace("%s", OF_GPU)


def _rate(name: str, by: str, choice: str) -> str:
    return f"sum by ({by}) (rate({name}{{{choice}}}[$__rate_interval]))"


def _number(
    title: str, description: str, expr: str, unit: str, *, empty: str = "", width: int = 4
) -> Panel:
    return Panel(
        title,
        "stat",
        description,
        (Query(one(expr)),),
        unit,
        width=width,
        height=4,
        empty=empty,
    )


GPUS: Final = Board(
    "gpu",
    "Allotment / GPU",
    "Who shares a GPU, who uses how much of it, and how it is.",
    (CLUSTER, NODE, GPU),
    (
        Row(
            "Now",
            (
                Panel(
                    "GPU",
                    "table",
                    "The GPU's place, model, and the mode in which it is shared.",
                    (
                        Query(
                            one(
                                "max by (node, index, model, pci_bus_id, mode)"
                                " (allotment_gpu_info{%s})"
                            )
                        ),
                    ),
                    width=24,
                    height=4,
                    labels={
                        "node": "Node",
                        "index": "Index",
                        "model": "Model",
                        "pci_bus_id": "PCI bus id",
                        "mode": "Mode",
                    },
                    link=("node", "node"),
                ),
                _number("Shares", "Shares on it.", "max(allotment_gpu_shares{%s})", "short"),
                _number("Memory", "Its memory.", "max(allotment_gpu_memory_total_bytes{%s})",
                        "bytes"),
                _number("Promised", "Limits of its shares together.",
                        "max(allotment_gpu_memory_allocated_bytes{%s})", "bytes"),
                _number("Guaranteed", "Part of its time that is guaranteed to shares.",
                        "max(allotment_gpu_compute_guaranteed_ratio{%s})", "percentunit"),
                Panel(
                    "Temperature",
                    "stat",
                    "Temperature of the chip.",
                    (Query(one('max(allotment_gpu_temperature_celsius{sensor="gpu", %s})')),),
                    "celsius",
                    width=4,
                    height=4,
                    thresholds=HOT,
                ),
                Panel(
                    "Last XID",
                    "stat",
                    "The last error that the driver reported since the agent's start; 0: none.",
                    (Query(one("max(allotment_gpu_last_xid{%s})")),),
                    width=4,
                    height=4,
                    thresholds=FAULTS,
                ),
            ),
        ),
        Row(
            "Who uses it",
            (
                Panel(
                    "Memory by share",
                    "stacked",
                    "Memory of each share, and of processes outside any share. Together it is at"
                    " most the memory of the GPU.",
                    (
                        Query(
                            one(f"sum by ({IDENTITY}) (allotment_share_memory_used_bytes{{%s}})"),
                            NAME,
                        ),
                        Query(one("max(allotment_gpu_memory_outside_bytes{%s})"), "outside shares"),
                        Query(
                            one("max(allotment_gpu_memory_reserved_bytes{%s})"), "the driver's own"
                        ),
                        Query(
                            one("max(allotment_gpu_memory_allocated_bytes{%s})"),
                            "promised to shares",
                        ),
                    ),
                    "bytes",
                    width=12,
                    height=10,
                ),
                Panel(
                    "GPU time by share",
                    "stacked",
                    "Measured GPU time of each share per second; 100 % is the whole GPU.",
                    (
                        Query(
                            _rate("allotment_share_gpu_seconds_total", IDENTITY, OF_GPU), NAME
                        ),
                    ),
                    "percentunit",
                    width=12,
                    height=10,
                    empty=NOT_MEASURED,
                ),
                Panel(
                    "Busy by share",
                    "lines",
                    "Part of the last second or so in which kernels of each share ran, by the"
                    " driver, and of the GPU.",
                    (
                        Query(
                            one(f"sum by ({IDENTITY}) (allotment_share_utilization_ratio{{%s}})"),
                            NAME,
                        ),
                        Query(one("max(allotment_gpu_utilization_ratio{%s})"), "the GPU"),
                    ),
                    "percentunit",
                    width=12,
                    most=1,
                    empty="Empty for MIG devices, and for GPUs that are cut into them.",
                ),
                Panel(
                    "Waits for a turn",
                    "lines",
                    "How long the programs of a share wait for the GPU: 99 % of the waits are"
                    " shorter than this.",
                    (
                        Query(
                            "histogram_quantile(0.99, "
                            + _rate(
                                "allotment_share_turn_wait_seconds_bucket",
                                f"le, {IDENTITY}",
                                OF_GPU,
                            )
                            + ")",
                            NAME,
                        ),
                    ),
                    "s",
                    width=12,
                    empty=NOT_MEASURED,
                ),
                shares_table(OF_GPU, "One line for each share of the GPU. Click a pod for more."),
            ),
        ),
        Row(
            "How it is",
            (
                Panel(
                    "Temperature",
                    "lines",
                    "Temperature by sensor.",
                    (
                        Query(
                            one("max by (sensor) (allotment_gpu_temperature_celsius{%s})"),
                            "{{sensor}}",
                        ),
                    ),
                    "celsius",
                ),
                Panel(
                    "Power",
                    "lines",
                    "Power draw.",
                    (Query(one("max(allotment_gpu_power_watts{%s})"), "power"),),
                    "watt",
                ),
                Panel(
                    "Clocks",
                    "lines",
                    "The clocks now. They fall when the GPU is too hot or draws too much power.",
                    (
                        Query(
                            one("max by (clock) (allotment_gpu_clock_hertz{%s})"), "{{clock}}"
                        ),
                    ),
                    "hertz",
                ),
                Panel(
                    "Memory traffic",
                    "lines",
                    "Part of the time in which the GPU's memory was read or written.",
                    (
                        Query(
                            one("max(allotment_gpu_memory_utilization_ratio{%s})"), "memory busy"
                        ),
                    ),
                    "percentunit",
                    most=1,
                ),
                Panel(
                    "NVLink",
                    "lines",
                    "Payload over all NVLinks.",
                    (
                        Query(
                            _rate("allotment_gpu_nvlink_bytes_total", "direction", OF_GPU),
                            "{{direction}}",
                        ),
                    ),
                    "binBps",
                    empty=NOT_ON_ALL,
                ),
                Panel(
                    "Errors",
                    "lines",
                    "ECC errors, repeated PCIe packets, and errors that the driver reported (XID).",
                    (
                        Query(
                            one("sum by (kind) (allotment_gpu_ecc_errors_total{%s})"),
                            "ECC {{kind}}",
                        ),
                        Query(one("sum(allotment_gpu_pcie_replays_total{%s})"), "PCIe replays"),
                        Query(
                            'sum by (xid) (allotment_agent_device_xids_total{device="$gpu"})',
                            "XID {{xid}}",
                        ),
                    ),
                    empty="An XID is there after the first one.",
                ),
                Panel(
                    "Health",
                    "states",
                    "Whether new shares are placed on it, and whether its driver answers.",
                    (
                        Query(one("min(allotment_gpu_healthy{%s})"), "healthy"),
                        Query(one("min(allotment_gpu_answers{%s})"), "driver answers"),
                    ),
                    width=12,
                ),
                Panel(
                    "MIG devices",
                    "lines",
                    "How many MIG devices of each profile the GPU is cut into.",
                    (
                        Query(
                            one("sum by (profile) (allotment_gpu_mig_slices{%s})"), "{{profile}}"
                        ),
                    ),
                    width=12,
                    empty="Empty for a GPU that is not cut.",
                ),
            ),
        ),
    ),
)  # fmt: skip

NAMESPACE: Final = Variable(
    "namespace",
    "Namespace",
    'label_values(allotment_share_memory_limit_bytes{cluster=~"$cluster"}, namespace)',
)
POD: Final = Variable(
    "pod",
    "Pod",
    'label_values(allotment_share_memory_limit_bytes{cluster=~"$cluster",'
    ' namespace=~"$namespace"}, pod)',
)
OF_PODS: Final = 'cluster=~"$cluster", namespace=~"$namespace", pod=~"$pod"'
HAS_TURNS: Final = "Measured in mode soft, on GPUs of which a share asks for compute."
OVERSUBSCRIBED: Final = "Empty unless a share may have memory on the host."


def some(expr: str) -> str:
    """Fill in the choice of pods."""
    return expr.replace("%s", OF_PODS)


def _each(name: str) -> str:
    return some(f"sum by ({IDENTITY}) (allotment_share_{name}{{%s}})")


def _each_rate(name: str) -> str:
    return _rate(f"allotment_share_{name}", IDENTITY, OF_PODS)


SHARES: Final = Board(
    "share",
    "Allotment / Shares",
    "What the shares of pods use, beside what they were promised, and what holds them back.",
    (CLUSTER, NAMESPACE, POD),
    (
        Row(
            "Now",
            (
                Panel(
                    "Memory in use",
                    "stat",
                    "Memory of the chosen shares, as a part of their limits.",
                    (
                        Query(
                            some(
                                "sum(allotment_share_memory_used_bytes{%s})"
                                " / sum(allotment_share_memory_limit_bytes{%s})"
                            )
                        ),
                    ),
                    "percentunit",
                    width=4,
                    height=4,
                    thresholds=FULL,
                ),
                Panel(
                    "Memory limit",
                    "stat",
                    "Limits of the chosen shares together.",
                    (Query(some("sum(allotment_share_memory_limit_bytes{%s})")),),
                    "bytes",
                    width=4,
                    height=4,
                ),
                Panel(
                    "Refused allocations",
                    "stat",
                    "Allocations beyond the limit, which the programs were refused, in the chosen"
                    " time.",
                    (
                        Query(
                            some(
                                "sum(increase(allotment_share_memory_refusals_total{%s}[$__range]))"
                            )
                        ),
                    ),
                    width=4,
                    height=4,
                    decimals=0,
                    thresholds=((1, "orange"),),
                ),
                Panel(
                    "GPU time",
                    "stat",
                    "GPU time of the chosen shares per second, in GPUs.",
                    (
                        Query(
                            some(
                                "sum(rate(allotment_share_gpu_seconds_total{%s}[$__rate_interval]))"
                            )
                        ),
                    ),
                    width=4,
                    height=4,
                    decimals=2,
                    empty=HAS_TURNS,
                ),
                Panel(
                    "Processes",
                    "stat",
                    "Processes of the chosen shares that use a GPU.",
                    (Query(some("sum(allotment_share_processes{%s})")),),
                    width=4,
                    height=4,
                ),
                Panel(
                    "Not enforced",
                    "stat",
                    "Shares whose limits are not in force for all their processes. Modes exclusive"
                    " and timeslice enforce nothing, and do not count.",
                    (
                        Query(
                            some(
                                'count(allotment_share_enforced{mode!~"exclusive|timeslice", %s}'
                                " == 0) or vector(0)"
                            )
                        ),
                    ),
                    width=4,
                    height=4,
                    thresholds=FAULTS,
                ),
            ),
        ),
        Row(
            "Memory",
            (
                Panel(
                    "Memory in use",
                    "lines",
                    "Memory of each share, and its limit. Beyond it the program is refused.",
                    (
                        Query(_each("memory_used_bytes"), NAME),
                        Query(_each("memory_limit_bytes"), f"limit of {NAME}"),
                    ),
                    "bytes",
                    width=12,
                ),
                Panel(
                    "Peak as a part of the limit",
                    "lines",
                    "The most that a share had at once, since its creation. A low one asks for too"
                    " much.",
                    (Query(f"{_each('memory_peak_bytes')} / {_each('memory_limit_bytes')}", NAME),),
                    "percentunit",
                    width=12,
                ),
                Panel(
                    "Refused allocations",
                    "lines",
                    "Allocations beyond the limit.",
                    (
                        Query(
                            some(
                                f"sum by ({IDENTITY})"
                                " (increase(allotment_share_memory_refusals_total{%s}"
                                "[$__rate_interval]))"
                            ),
                            NAME,
                        ),
                    ),
                ),
                Panel(
                    "Memory on the host",
                    "lines",
                    "Memory that may be on the host, because the share is oversubscribed or"
                    " suspended.",
                    (Query(_each("memory_host_bytes"), NAME),),
                    "bytes",
                    empty=OVERSUBSCRIBED,
                ),
                Panel(
                    "Memory moved to the GPU",
                    "lines",
                    "Memory of oversubscribed shares that is moved to the GPU. Much of it for long"
                    " is thrashing: the program waits for moves.",
                    (Query(_each_rate("memory_moved_bytes_total"), NAME),),
                    "binBps",
                    empty=OVERSUBSCRIBED,
                ),
            ),
        ),
        Row(
            "Compute",
            (
                Panel(
                    "GPU time",
                    "lines",
                    "GPU time of each share per second, its guarantee and its ceiling.",
                    (
                        Query(_each_rate("gpu_seconds_total"), NAME),
                        Query(_each("compute_guaranteed_ratio"), f"guarantee of {NAME}"),
                        Query(_each("compute_ceiling_ratio"), f"ceiling of {NAME}"),
                    ),
                    "percentunit",
                    width=12,
                    empty=HAS_TURNS,
                ),
                Panel(
                    "Busy",
                    "lines",
                    "Part of the last second or so in which kernels of a share ran, by the driver."
                    " Not there for MIG devices.",
                    (Query(_each("utilization_ratio"), NAME),),
                    "percentunit",
                    width=12,
                ),
                Panel(
                    "Held back",
                    "lines",
                    "Time for which launches were held back, per second, summed over threads.",
                    (Query(_each_rate("held_seconds_total"), NAME),),
                    "s",
                    empty=HAS_TURNS,
                ),
                Panel(
                    "Borrowed and lent",
                    "lines",
                    "GPU time that a share used beyond its guarantee, and guaranteed time that"
                    " others used.",
                    (
                        Query(_each_rate("borrowed_seconds_total"), f"borrowed by {NAME}"),
                        Query(_each_rate("lent_seconds_total"), f"lent by {NAME}"),
                    ),
                    "percentunit",
                    empty=HAS_TURNS,
                ),
                Panel(
                    "Turns",
                    "lines",
                    "Turns that a share was given, per second, and turns taken from it because it"
                    " did not give way.",
                    (
                        Query(_each_rate("turns_total"), f"given to {NAME}"),
                        Query(_each_rate("turns_taken_total"), f"taken from {NAME}"),
                    ),
                    "ops",
                    empty=HAS_TURNS,
                ),
                Panel(
                    "Waits for a turn",
                    "heatmap",
                    "How many waits were how long.",
                    (
                        Query(
                            _rate("allotment_share_turn_wait_seconds_bucket", "le", OF_PODS),
                            "{{le}}",
                        ),
                    ),
                    "s",
                    width=12,
                    empty=HAS_TURNS,
                ),
                Panel(
                    "Launches held back",
                    "lines",
                    "Launches of kernels that had to wait, per second.",
                    (Query(_each_rate("delayed_launches_total"), NAME),),
                    "ops",
                    width=12,
                    empty=HAS_TURNS,
                ),
            ),
        ),
        Row(
            "State",
            (
                Panel(
                    "Enforced",
                    "states",
                    "Whether the limits are in force for all processes of a share. Always no in"
                    " modes exclusive and timeslice.",
                    (Query(some(f"min by ({IDENTITY}) (allotment_share_enforced{{%s}})"), NAME),),
                    width=12,
                    states=("no", "yes"),
                ),
                Panel(
                    "Running",
                    "states",
                    "Whether a share runs, or is suspended.",
                    (
                        Query(
                            some(f"1 - max by ({IDENTITY}) (allotment_share_suspended{{%s}})"),
                            NAME,
                        ),
                    ),
                    width=12,
                    states=("suspended", "running"),
                ),
                shares_table(OF_PODS, "One line for each of the chosen shares."),
            ),
        ),
    ),
)
