# SPDX-License-Identifier: Apache-2.0
"""The dashboard of namespaces: what each uses, what it was promised, and what that costs."""

from __future__ import annotations

from typing import Final

from monitoring.devices import HAS_TURNS, NAMESPACE
from monitoring.fleet import CLUSTER
from monitoring.panels import FULL, Board, Panel, Query, Row

CHOSEN: Final = 'cluster=~"$cluster", namespace=~"$namespace"'
EVERYWHERE: Final = 'cluster=~"$cluster"'
WITHOUT_MIG: Final = "MIG devices are left out: nothing says how long their kernels run."
NO_PRICE: Final = "Empty until `allotment.metrics.prices` is set in the configuration."
NO_QUOTA: Final = "Empty until a ResourceQuota limits GPUs, and without Allotment's scheduler."
NOT_PODS: Final = "Without Allotment's scheduler it is empty."


def chosen(expr: str) -> str:
    """Fill in the choice of namespaces."""
    return expr.replace("%s", CHOSEN)


def _by_namespace(metric: str) -> str:
    return chosen(f"sum by (namespace) ({metric}{{%s}})")


def _rate(metric: str) -> str:
    return chosen(f"sum by (namespace) (rate({metric}{{%s}}[$__rate_interval]))")


# What a share keeps from others: the larger of its parts of a GPU's memory and of its time.
_MEMORY_PART: Final = (
    "(allotment_share_memory_limit_bytes{%s}"
    " / on (gpu) group_left () max by (gpu)"
    " (allotment_gpu_memory_total_bytes - allotment_gpu_memory_reserved_bytes))"
)
_TIME_PART: Final = "(allotment_share_compute_guaranteed_ratio{%s} + 0)"
KEPT: Final = f"clamp_max(({_MEMORY_PART} > {_TIME_PART}) or {_TIME_PART} or {_MEMORY_PART}, 1)"
_RUNS: Final = (
    "(rate(allotment_share_gpu_seconds_total{%s}[$__rate_interval])"
    " or (allotment_share_utilization_ratio{%s} + 0))"
)
# Time beyond what it keeps is borrowed from what others do not use. Of a share whose time is not
# measured, as that of a MIG device, nothing: it may be busy.
IDLE: Final = f"clamp_min({KEPT} - {_RUNS}, 0)"
_PRICED: Final = (
    " * on (gpu) group_left (currency) max by (gpu, currency) (allotment_gpu_price_per_hour)"
)


def _cost(part: str, choice: str, by: str = "currency") -> str:
    return f"sum by ({by}) ({part}{_PRICED})".replace("%s", choice)


_PAID: Final = f"sum by (currency) (allotment_gpu_price_per_hour{{{EVERYWHERE}}})"
_SHARE: Final = "namespace, pod, container, claim, request, share"


def _of_shares(expr: str) -> str:
    return chosen(f"max by ({_SHARE}) ({expr})")


NAMESPACES: Final = Board(
    "namespace",
    "Allotment / Namespaces and cost",
    "What each namespace uses and was promised, who asks for too much, and what is paid for and"
    " idle.",
    (CLUSTER, NAMESPACE),
    (
        Row(
            "Who uses what",
            (
                Panel(
                    "Namespaces",
                    "table",
                    "One line for each namespace. Click one to see its shares. GPU time is"
                    " measured in mode soft, on GPUs of which a share asks for compute.",
                    (
                        Query(
                            chosen(
                                "count by (namespace)"
                                " (count by (namespace, share) (allotment_share_processes{%s}))"
                            ),
                            "Shares",
                        ),
                        Query(
                            _by_namespace("allotment_share_memory_limit_bytes"),
                            "Memory limits",
                            "bytes",
                        ),
                        Query(
                            _by_namespace("allotment_share_memory_used_bytes"),
                            "Memory in use",
                            "bytes",
                        ),
                        Query(
                            _by_namespace("allotment_share_compute_guaranteed_ratio"),
                            "GPUs guaranteed",
                        ),
                        Query(_rate("allotment_share_gpu_seconds_total"), "GPU time"),
                        Query(
                            _by_namespace("allotment_share_memory_refusals_total"),
                            "Refused allocations",
                            "short",
                            ((1, "orange"),),
                        ),
                    ),
                    width=24,
                    labels={"namespace": "Namespace"},
                    link=("namespace", "share"),
                ),
                Panel(
                    "Memory in use",
                    "stacked",
                    "Memory of the shares of each namespace.",
                    (Query(_by_namespace("allotment_share_memory_used_bytes"), "{{namespace}}"),),
                    "bytes",
                ),
                Panel(
                    "Memory limits",
                    "stacked",
                    "Limits of the shares of each namespace.",
                    (Query(_by_namespace("allotment_share_memory_limit_bytes"), "{{namespace}}"),),
                    "bytes",
                ),
                Panel(
                    "GPU time",
                    "stacked",
                    "GPU time of each namespace per second; 1 is a whole GPU.",
                    (Query(_rate("allotment_share_gpu_seconds_total"), "{{namespace}}"),),
                    empty=HAS_TURNS,
                ),
            ),
        ),
        Row(
            "Who asks for too much",
            (
                Panel(
                    "Limits and peaks",
                    "table",
                    "The most memory that each share had at once since its creation, beside its"
                    " limit. `allot advise` has advice for each workload from its past.",
                    (
                        Query(
                            _of_shares("allotment_share_memory_limit_bytes{%s}"), "Limit", "bytes"
                        ),
                        Query(_of_shares("allotment_share_memory_peak_bytes{%s}"), "Peak", "bytes"),
                        Query(
                            _of_shares(
                                "allotment_share_memory_limit_bytes{%s}"
                                " - allotment_share_memory_peak_bytes{%s}"
                            ),
                            "Never used",
                            "bytes",
                        ),
                        Query(
                            _of_shares(
                                "allotment_share_memory_peak_bytes{%s}"
                                " / allotment_share_memory_limit_bytes{%s}"
                            ),
                            "Peak of limit",
                            "percentunit",
                        ),
                    ),
                    width=24,
                    labels={
                        "namespace": "Namespace",
                        "pod": "Pod",
                        "container": "Container",
                        "claim": "Claim",
                        "request": "Request",
                        "share": "Share",
                    },
                    link=("pod", "share"),
                ),
            ),
        ),
        Row(
            "Quotas",
            (
                Panel(
                    "Quotas",
                    "table",
                    "What bound pods use of each ResourceQuota. Pods beyond it wait.",
                    (
                        Query(
                            chosen(
                                "max by (namespace, quota, resource, unit)"
                                " (allotment_scheduler_quota_used{%s})"
                            ),
                            "Used",
                        ),
                        Query(
                            chosen(
                                "max by (namespace, quota, resource, unit)"
                                " (allotment_scheduler_quota_limit{%s})"
                            ),
                            "Limit",
                        ),
                        Query(
                            chosen(
                                "max by (namespace, quota, resource, unit)"
                                " (allotment_scheduler_quota_used{%s}"
                                " / allotment_scheduler_quota_limit{%s})"
                            ),
                            "Used part",
                            "percentunit",
                            FULL,
                        ),
                    ),
                    width=12,
                    labels={
                        "namespace": "Namespace",
                        "quota": "Quota",
                        "resource": "Resource",
                        "unit": "Unit",
                    },
                    empty=NO_QUOTA,
                ),
                Panel(
                    "Memory of bound pods",
                    "lines",
                    "GPU memory that the scheduler gave to the pods of each namespace.",
                    (
                        Query(
                            chosen(
                                "max by (namespace)"
                                " (allotment_scheduler_namespace_memory_bytes{%s})"
                            ),
                            "{{namespace}}",
                        ),
                    ),
                    "bytes",
                    width=12,
                    empty=NOT_PODS,
                ),
            ),
        ),
        Row(
            "Cost",
            (
                Panel(
                    "Paid per hour",
                    "stat",
                    "Price of all GPUs for an hour.",
                    (Query(_PAID, "{{currency}}"),),
                    width=6,
                    height=4,
                    decimals=2,
                    empty=NO_PRICE,
                ),
                Panel(
                    "Not allocated",
                    "stat",
                    "What of it is paid for parts of GPUs that no share has.",
                    (
                        Query(
                            f"{_PAID} - ({_cost(KEPT, EVERYWHERE)} or {_PAID} * 0)",
                            "{{currency}}",
                        ),
                    ),
                    width=6,
                    height=4,
                    decimals=2,
                    empty=NO_PRICE,
                ),
                Panel(
                    "Allocated and idle",
                    "stat",
                    "What of it is paid for parts of GPUs that shares have, while no kernel of"
                    f" theirs runs. {WITHOUT_MIG}",
                    (
                        Query(
                            _cost(IDLE, EVERYWHERE),
                            "{{currency}}",
                        ),
                    ),
                    width=6,
                    height=4,
                    decimals=2,
                    empty=NO_PRICE,
                ),
                Panel(
                    "Paid in the chosen time",
                    "stat",
                    "Price of all GPUs for the time that the dashboard shows.",
                    (
                        Query(
                            "sum by (currency) (avg_over_time("
                            f"allotment_gpu_price_per_hour{{{EVERYWHERE}}}[$__range]))"
                            " * $__range_s / 3600",
                            "{{currency}}",
                        ),
                    ),
                    width=6,
                    height=4,
                    decimals=2,
                    empty=NO_PRICE,
                ),
                Panel(
                    "Cost by namespace",
                    "stacked",
                    "Price of what the shares of each namespace keep from others, per hour: the"
                    " larger of their parts of memory and of time.",
                    (
                        Query(
                            _cost(KEPT, CHOSEN, "namespace, currency"), "{{namespace}} {{currency}}"
                        ),
                    ),
                    width=12,
                    empty=NO_PRICE,
                ),
                Panel(
                    "Idle cost by namespace",
                    "stacked",
                    "What of it is paid while no kernel of the share runs, per hour."
                    f" {WITHOUT_MIG}",
                    (
                        Query(
                            _cost(IDLE, CHOSEN, "namespace, currency"),
                            "{{namespace}} {{currency}}",
                        ),
                    ),
                    width=12,
                    empty=NO_PRICE,
                ),
            ),
        ),
    ),
)
