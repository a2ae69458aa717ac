# SPDX-License-Identifier: Apache-2.0
"""Metrics of the scheduler, declared in tables.

Those of the cluster are read from the book on a scrape, and only from the leader's.
`docs/designs/watch.md` has the reasons.
"""

import time
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Final, NamedTuple

from allotment.metrics.figures import Figure, Figures
from allotment.metrics.use import label_text

PREFIX = "allotment_scheduler_"
VERBS = ("filter", "prioritize", "bind", "preempt")
HANDSHAKES = ("distrusted", "no_certificate", "wrong_certificate", "other")
_FAST_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 30.0)

FIGURES: tuple[Figure, ...] = (
    Figure("request_seconds", "histogram", "Time to answer kube-scheduler, by verb.", ("verb",),
           VERBS),
    Figure("binding_seconds", "histogram", "Time of a binding at the API server."),
    Figure("requests_failed", "counter", "Failed calls.", ("verb",), VERBS),
    Figure("pods_bound", "counter", "Pods bound with a placement."),
    Figure("pods_unbound", "counter", "Bindings refused, here or by the API server."),
    Figure("pods_refused", "counter", "Answers that a pod fits on no node.", ("why",),
           ("room", "mistake")),
    Figure("node_rejections", "counter", "Nodes rejected for a pod.", ("reason",)),
    Figure("pods", "gauge", "Pods with GPUs, by their state in the book.", ("state",)),
    Figure("nominations", "gauge",
           "Pods that wait for preempted pods to end; their GPUs are reserved."),
    Figure("pods_without_placement", "gauge",
           "Pods that request GPUs and were bound by another scheduler."),
    Figure("pods_taken_over", "gauge",
           "Pods bound by another system whose GPUs are counted."),
    Figure("pods_not_taken_over", "gauge",
           "Pods bound by another system whose GPUs cannot be read and are not counted."),
    Figure("objects_left_out", "gauge",
           "Nodes and pods not fully counted: invalid annotations or requests."),
    Figure("devices_told_twice", "gauge", "GPUs reported by more than one node."),
    Figure("webhook_seconds", "histogram", "Time of a webhook answer, by HTTP status.",
           ("status",), ("200",)),
    Figure("leading", "gauge", "1: this replica is the leader; 0: it is not."),
    Figure("api_synced", "gauge",
           "1: the watches of pods, nodes and quotas are in sync; 0: they are not."),
    Figure("webhook_certificate_kept", "gauge",
           "0: the certificates of the webhook cannot be renewed; see the log."),
    Figure("extender_handshakes_failed", "counter",
           "Failed TLS handshakes with kube-scheduler, by reason.", ("why",),
           HANDSHAKES),
    Figure("webhook_handshakes_failed", "counter",
           "Failed TLS handshakes with the API server, by reason.", ("why",),
           HANDSHAKES),
    Figure("parts_begun_anew", "counter",
           "Restarts of tasks of the scheduler after a failure.", ("part",)),
    Figure("events_dropped", "counter", "Kubernetes events dropped: too many, or refused."),
)  # fmt: skip

AMOUNTS: Final[Mapping[str, str]] = {
    "devices": "GPUs",
    "devices_idle": "Healthy GPUs without a share",
    "devices_whole": "GPUs that one container has alone",
    "shares": "Shares of GPUs, MIG slices among them",
    "slices": "MIG slices of pods",
    "memory_bytes": "Memory of all GPUs",
    "memory_allocated_bytes": "Memory of GPUs that is allocated",
    "memory_fragmented_bytes": "Free memory on GPUs that are partly used",
    "compute": "Compute of all GPUs; a GPU is 1",
    "compute_allocated": "Compute of GPUs that is guaranteed",
    "compute_fragmented": "Free compute on GPUs that are partly used",
}
"""`allotment_scheduler_device_NAME` by model, and `allotment_scheduler_node_NAME` by node."""

CLUSTER: Final[Mapping[str, tuple[tuple[str, ...], str]]] = {
    "cluster_read": ((), "1: read in time for this scrape; 0: not, or another replica leads."),
    **{f"device_{name}": (("model",), f"{text}, by model.") for name, text in AMOUNTS.items()},
    **{f"node_{name}": (("node",), f"{text}, by node.") for name, text in AMOUNTS.items()},
    "node_claims": (("node",), "Allocated ResourceClaims, by node."),
    "node_packing_value": (("node",), "Packing cost of all that is free on a node."),
    "kind_frequency_ratio": (("kind",), "Part of the pods that are of a typical kind."),
    "kind_slots": (("kind",), "Room for a typical kind, in its pods; parts count in part."),
    "kind_slot_price": (("kind",), "Packing cost of one of these places."),
    "pods_waiting": (("reason",), "Pods that wait for GPUs, by the last reason."),
    "claims": (("state",), "ResourceClaims for GPUs."),
    "quota_used": (("namespace", "quota", "resource", "unit"), "Use of a quota by bound pods."),
    "quota_limit": (("namespace", "quota", "resource", "unit"), "What a quota allows."),
    "namespace_devices": (("namespace",), "GPUs and parts of GPUs of a namespace's bound pods."),
    "namespace_memory_bytes": (("namespace",), "GPU memory of a namespace's bound pods."),
    "namespace_compute": (("namespace",),
                          "Compute that is guaranteed to a namespace's bound pods."),
}  # fmt: skip
"""`allotment_scheduler_NAME`: labels and help of each gauge."""

MOST_KINDS: Final = 16
"""The most frequent typical kinds of pods that have series."""
_PAUSE_S: Final = 0.0002
"""After each metric, for the event loop: Python would let it wait for 5 ms."""


class Series(NamedTuple):
    """The series of one of `CLUSTER`: a value for each text of labels (`labelled`)."""

    name: str
    labels: Sequence[str]
    values: Sequence[float]


@lru_cache(maxsize=1 << 14)  # nodes and namespaces stay
def labelled(name: str, *values: str) -> str:
    """Return the labels of a series of one of `CLUSTER`, as they are written."""
    return label_text(dict(zip(CLUSTER[name][0], values, strict=True)))


class SchedulerMetrics(Figures):
    """The metrics of the scheduler. Thread-safe."""

    def __init__(self, figures: Iterable[Figure] = FIGURES) -> None:
        super().__init__(PREFIX, figures, buckets=_FAST_S)


def write_cluster(found: Iterable[Series], *, is_open: bool) -> bytes:
    """Write the series of a cluster, in Prometheus' format or in that of OpenMetrics.

    For a thread beside the event loop: it gives way after each metric.
    """
    texts = []
    for each in found:
        texts.append("".join(_lines(each)))
        time.sleep(_PAUSE_S)
    if is_open:
        texts.append("# EOF\n")
    return "".join(texts).encode()


def _lines(series: Series) -> list[str]:
    name = PREFIX + series.name
    head = f"# HELP {name} {CLUSTER[series.name][1]}\n# TYPE {name} gauge\n"
    pairs = zip(series.labels, series.values, strict=True)
    return [head, *[f"{name}{labels} {value}\n" for labels, value in pairs]]
