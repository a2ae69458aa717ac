# SPDX-License-Identifier: Apache-2.0
"""The dashboard of the scheduler: room, fragments, waiting pods, and its own health."""

from __future__ import annotations

from typing import Final

from monitoring.fleet import CLUSTER
from monitoring.panels import FAULTS, Board, Panel, Query, Row

ALL: Final = 'cluster=~"$cluster"'
P: Final = "allotment_scheduler_"
NOT_YET: Final = "Empty until it has happened once."
WITH_FRAGMENTS: Final = "Empty unless the policy `fragmentation` is in use."


def of(expr: str) -> str:
    """Fill in the choice of clusters."""
    return expr.replace("%s", ALL)


def _number(title: str, description: str, expr: str, *, bad: bool = False, width: int = 4) -> Panel:
    return Panel(
        title,
        "stat",
        description,
        (Query(of(expr)),),
        width=width,
        height=4,
        thresholds=FAULTS if bad else (),
    )


def _by(label: str, name: str) -> Query:
    return Query(of(f"max by ({label}) ({P}{name}{{%s}})"), f"{{{{{label}}}}}")


def _grown(label: str, name: str, before: str = "") -> Query:
    return Query(
        of(f"sum by ({label}) (increase({P}{name}_total{{%s}}[$__rate_interval]))"),
        f"{before}{{{{{label}}}}}",
    )


def _times(name: str, label: str = "") -> tuple[Query, ...]:
    by = f"le, {label}" if label else "le"
    rate = of(f"sum by ({by}) (rate({P}{name}_bucket{{%s}}[$__rate_interval]))")
    legend = f" of {{{{{label}}}}}" if label else ""
    return tuple(
        Query(f"histogram_quantile({part:g}, {rate})", f"p{part * 100:g}{legend}")
        for part in (0.5, 0.99)
    )


def _amounts(kind: str) -> tuple[Query, ...]:
    return (
        Query(of(f"sum({P}device_{kind}{{%s}})"), "there"),
        Query(of(f"sum({P}device_{kind.replace('_bytes', '')}_allocated{_end(kind)}{{%s}})"),
              "allocated"),
        Query(of(f"sum({P}device_{kind.replace('_bytes', '')}_fragmented{_end(kind)}{{%s}})"),
              "free on partly used GPUs"),
    )  # fmt: skip


def _end(kind: str) -> str:
    return "_bytes" if kind.endswith("_bytes") else ""


def _models(name: str) -> str:
    return of(f"sum by (model) ({P}device_{name}{{%s}})")


SCHEDULER: Final = Board(
    "scheduler",
    "Allotment / Scheduler",
    "Where there is room for pods, why pods wait, and whether the scheduler works.",
    (CLUSTER,),
    (
        Row(
            "Now",
            (
                _number("Leaders", "Replicas that answer kube-scheduler: one.",
                        f"sum({P}leading{{%s}})"),
                _number("Waiting pods", "Pods that ask for GPUs and are not bound.",
                        f"sum({P}pods_waiting{{%s}}) or vector(0)"),
                _number("Idle GPUs", "Healthy GPUs without a share.",
                        f"sum({P}device_devices_idle{{%s}})"),
                _number("Not in sync", "Replicas whose updates from the API server do not arrive.",
                        f"count({P}api_synced{{%s}} == 0) or vector(0)", bad=True),
                _number("Pods not counted",
                        "Pods that use GPUs which are not known: these may be given twice.",
                        f"max({P}pods_not_taken_over{{%s}}) + max({P}pods_without_placement{{%s}})",
                        bad=True),
                _number("Objects left out",
                        "Nodes and pods that are not fully counted, because their annotations or"
                        " requests are invalid.",
                        f"max({P}objects_left_out{{%s}})", bad=True),
            ),
        ),
        Row(
            "Room",
            (
                Panel(
                    "Memory",
                    "lines",
                    "Memory of all GPUs, what of it is allocated, and what is free but on GPUs that"
                    " are partly used: a pod that asks for a whole GPU cannot have it.",
                    _amounts("memory_bytes"),
                    "bytes",
                ),
                Panel(
                    "Compute",
                    "lines",
                    "Compute of all GPUs, in GPUs: what is guaranteed, and what is free but on GPUs"
                    " that are partly used.",
                    _amounts("compute"),
                ),
                Panel(
                    "GPUs",
                    "lines",
                    "GPUs by how they are used.",
                    (
                        Query(of(f"sum({P}device_devices{{%s}})"), "all"),
                        Query(of(f"sum({P}device_devices_idle{{%s}})"), "idle"),
                        Query(of(f"sum({P}device_devices_whole{{%s}})"), "for one container alone"),
                    ),
                ),
                Panel(
                    "Models",
                    "table",
                    "One line for each model of GPU.",
                    (
                        Query(_models("devices"), "GPUs"),
                        Query(_models("devices_idle"), "Idle"),
                        Query(_models("shares"), "Shares"),
                        Query(_models("memory_bytes"), "Memory", "bytes"),
                        Query(_models("memory_allocated_bytes"), "Allocated", "bytes"),
                        Query(_models("memory_fragmented_bytes"), "Fragmented", "bytes"),
                        Query(_models("compute_allocated"), "Compute guaranteed"),
                    ),
                    width=24,
                    height=6,
                    labels={"model": "Model"},
                ),
                Panel(
                    "Room for typical pods",
                    "table",
                    "The most frequent kinds of pods: how frequent they are, and the room for more"
                    " of them in pods. Parts of a pod's room count in part, so room below a few"
                    " pods may hold none: ask `allot explain`.",
                    (
                        Query(of(f"max by (kind) ({P}kind_frequency_ratio{{%s}})"), "Frequency",
                              "percentunit"),
                        Query(of(f"max by (kind) ({P}kind_slots{{%s}})"), "Room"),
                        Query(of(f"max by (kind) ({P}kind_slot_price{{%s}})"), "Packing cost"),
                    ),
                    width=12,
                    labels={"kind": "Kind"},
                    empty=WITH_FRAGMENTS,
                ),
                Panel(
                    "Nodes by allocated memory",
                    "ranking",
                    "The 20 nodes with the largest allocated part of memory.",
                    (
                        Query(
                            of(
                                f"topk(20, sum by (node) ({P}node_memory_allocated_bytes{{%s}})"
                                f" / sum by (node) ({P}node_memory_bytes{{%s}}))"
                            ),
                            "{{node}}",
                        ),
                    ),
                    "percentunit",
                    width=12,
                    most=1,
                ),
            ),
        ),
        Row(
            "Pods",
            (
                Panel(
                    "Waiting pods by reason",
                    "stacked",
                    "Pods that ask for GPUs and are not bound, by the last answer about them. For"
                    " one pod: `kubectl allot explain pod NAME`.",
                    (_by("reason", "pods_waiting"),),
                    empty="Empty while no pod waits.",
                ),
                Panel(
                    "Pods by state",
                    "lines",
                    "Pods with GPUs, by their state in the scheduler's books.",
                    (_by("state", "pods"),),
                    empty="Empty until a pod asks for a GPU.",
                ),
                Panel(
                    "Bound and refused",
                    "lines",
                    "Pods that got a node, bindings that failed, and answers that a pod fits"
                    " nowhere.",
                    (
                        Query(of(f"sum(increase({P}pods_bound_total{{%s}}[$__rate_interval]))"),
                              "bound"),
                        Query(of(f"sum(increase({P}pods_unbound_total{{%s}}[$__rate_interval]))"),
                              "bindings failed"),
                        _grown("why", "pods_refused", "fits nowhere: "),
                    ),
                ),
                Panel(
                    "Nodes rejected",
                    "stacked",
                    "Why nodes were rejected for pods.",
                    (_grown("reason", "node_rejections"),),
                    width=12,
                    empty=NOT_YET,
                ),
                Panel(
                    "ResourceClaims",
                    "lines",
                    "ResourceClaims for GPUs, by state.",
                    (_by("state", "claims"),),
                    width=12,
                    empty="Empty without ResourceClaims.",
                ),
            ),
        ),
        Row(
            "Speed",
            (
                Panel("Answers to kube-scheduler", "lines",
                      "Time to answer kube-scheduler, by verb.",
                      _times("request_seconds", "verb"), "s",
                      empty="Empty while kube-scheduler asks nothing."),
                Panel("Bindings", "lines", "Time of a binding at the API server.",
                      _times("binding_seconds"), "s", empty="Empty while no pod is bound."),
                Panel("Webhook", "lines", "Time of an answer of the webhook.",
                      _times("webhook_seconds"), "s", empty="Empty while no pod is created."),
            ),
        ),
        Row(
            "Health",
            (
                Panel("State of the replicas", "states",
                      "Whether a replica leads, is in sync, can renew its certificates, and shows"
                      " the cluster's figures (the leader alone).",
                      (
                          Query(of(f"max by (instance) ({P}leading{{%s}})"), "{{instance}} leads"),
                          Query(of(f"max by (instance) ({P}api_synced{{%s}})"),
                                "{{instance}} in sync"),
                          Query(of(f"max by (instance) ({P}webhook_certificate_kept{{%s}})"),
                                "{{instance}} certificates"),
                          Query(of(f"max by (instance) ({P}cluster_read{{%s}})"),
                                "{{instance}} figures"),
                      ), width=12),
                Panel("Faults", "lines",
                      "Failed calls, TLS handshakes that failed, tasks that were started again, and"
                      " events that were dropped.",
                      (
                          _grown("verb", "requests_failed", "failed "),
                          _grown("why", "extender_handshakes_failed", "kube-scheduler: "),
                          _grown("why", "webhook_handshakes_failed", "API server: "),
                          _grown("part", "parts_begun_anew", "started again: "),
                          Query(of(f"sum(increase({P}events_dropped_total{{%s}}"
                                   "[$__rate_interval]))"), "events dropped"),
                      ), width=12),
            ),
        ),
    ),
)  # fmt: skip
