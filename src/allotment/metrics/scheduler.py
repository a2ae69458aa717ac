# SPDX-License-Identifier: Apache-2.0
"""Metrics of the scheduler, declared in one table.

Allotted and fragmented amounts are computed on each scrape, not at each change.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from allotment.metrics.figures import Figure, Figures

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

MODEL_FIGURES: Mapping[str, str] = {
    "devices": "Devices, by model.",
    "memory_bytes": "Memory of all devices of a model.",
    "memory_allocated_bytes": "Memory of these devices that is allocated to pods.",
    "memory_fragmented_bytes": "Free memory on devices that are partly used.",
    "compute": "Compute of all devices of a model; a device is 1.",
    "compute_allocated": "Compute of these devices that is guaranteed to pods.",
    "compute_fragmented": "Free compute on devices that are partly used.",
}
"""`allotment_scheduler_device_NAME`, with the label `model`."""

TotalsByModel = Mapping[str, Mapping[str, float]]
"""By model, a value for each of `MODEL_FIGURES`."""


class SchedulerMetrics(Figures):
    """The metrics of the scheduler. Thread-safe."""

    def __init__(self, figures: Iterable[Figure] = FIGURES) -> None:
        super().__init__(PREFIX, figures, buckets=_FAST_S)

    def watch_models(self, totals: Callable[[], TotalsByModel]) -> None:
        """Compute the metrics by model on every scrape."""
        self.registry.register(_Models(totals))


class _Models(Collector):
    def __init__(self, totals: Callable[[], TotalsByModel]) -> None:
        self._totals = totals

    def collect(self) -> Iterator[GaugeMetricFamily]:
        totals = self._totals()
        for name, text in MODEL_FIGURES.items():
            family = GaugeMetricFamily(f"{PREFIX}device_{name}", text, labels=["model"])
            for model, values in sorted(totals.items()):
                family.add_metric([model], values[name])
            yield family
