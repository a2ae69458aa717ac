# SPDX-License-Identifier: Apache-2.0
"""What the scheduler counts: each figure once, in one table.

How much is allotted and left over is worked out when it is asked for, and not at each change.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.registry import Collector

from allotment.metrics.figures import Figure, Figures

__all__ = ["FIGURES", "MODEL_FIGURES", "SchedulerMetrics", "Totals"]

PREFIX = "allotment_scheduler_"
VERBS = ("filter", "prioritize", "bind", "preempt")
HANDSHAKES = ("distrusted", "no_certificate", "wrong_certificate", "other")
_FAST_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 30.0)

FIGURES: tuple[Figure, ...] = (
    Figure("request_seconds", "histogram", "Time of an answer, by verb.", ("verb",), VERBS),
    Figure("binding_seconds", "histogram", "Time of the API server's answer to a binding."),
    Figure("requests_failed", "counter", "Calls that were not answered.", ("verb",), VERBS),
    Figure("pods_bound", "counter", "Pods bound with a placement."),
    Figure("pods_unbound", "counter", "Bindings that were refused, here or by the API server."),
    Figure("pods_refused", "counter", "Answers that a pod fits nowhere.", ("why",),
           ("room", "mistake")),
    Figure("node_rejections", "counter", "Nodes that did not do for a pod.", ("reason",)),
    Figure("pods", "gauge", "Pods with GPUs, by what the book knows of them.", ("state",)),
    Figure("nominations", "gauge",
           "Pods that wait for others to end, and whose GPUs are kept for them."),
    Figure("pods_without_placement", "gauge",
           "Pods that ask for GPUs and were bound by somebody else."),
    Figure("pods_taken_over", "gauge",
           "Pods that another system bound, and whose GPUs are counted."),
    Figure("pods_not_taken_over", "gauge",
           "Pods that another system bound, and whose GPUs cannot be read: they are not counted."),
    Figure("objects_left_out", "gauge",
           "Nodes and pods that are not counted as they are: what they say is not understood."),
    Figure("devices_told_twice", "gauge", "GPUs of which more than one node tells."),
    Figure("webhook_seconds", "histogram", "Time of the webhook's answer, by its HTTP status.",
           ("status",), ("200",)),
    Figure("leading", "gauge", "1: this replica answers; 0: another one does, or none."),
    Figure("api_synced", "gauge",
           "1: pods, nodes and quotas are known and heard of; 0: they are not."),
    Figure("webhook_certificate_kept", "gauge",
           "0: the webhook's certificates cannot be kept, as the log says."),
    Figure("extender_handshakes_failed", "counter",
           "TLS handshakes that failed where kube-scheduler comes in, by why.", ("why",),
           HANDSHAKES),
    Figure("webhook_handshakes_failed", "counter",
           "TLS handshakes that failed where the API server comes in, by why.", ("why",),
           HANDSHAKES),
    Figure("parts_begun_anew", "counter",
           "Failures of parts of the scheduler, each of which is begun anew.", ("part",)),
    Figure("events_dropped", "counter", "Kubernetes events left out: too many, or refused."),
)  # fmt: skip

MODEL_FIGURES: Mapping[str, str] = {
    "devices": "Devices, by model.",
    "memory_bytes": "Memory of all devices of a model.",
    "memory_allocated_bytes": "Memory of them that is given to pods.",
    "memory_fragmented_bytes": "Memory left on devices that are not wholly free.",
    "compute": "Compute of all devices of a model: 1 is a device.",
    "compute_allocated": "Compute of them that is guaranteed to pods.",
    "compute_fragmented": "Compute left on devices that are not wholly free.",
}
"""`allotment_scheduler_device_NAME`, with the label `model`."""

Totals = Mapping[str, Mapping[str, float]]
"""By model, each of `MODEL_FIGURES`."""


class SchedulerMetrics(Figures):
    """The figures. May be called from any thread."""

    def __init__(self, figures: Iterable[Figure] = FIGURES) -> None:
        """Make all of them, with what zero can be said."""
        super().__init__(PREFIX, figures, buckets=_FAST_S)
        self._children: dict[tuple[str, str], MetricWrapperBase] = {}

    def count(self, name: str, label: str = "", *, by: float = 1) -> None:
        """Add to a counter. Raises `KeyError` or `ValueError` for what is not in the table."""
        self._add(name, self._child(name, label), by)

    def observe(self, name: str, value: float, label: str = "") -> None:
        """Add a value to a histogram; errors likewise."""
        self._observe(name, self._child(name, label), value)

    def set(self, name: str, value: float, label: str = "") -> None:
        """Set a gauge; errors likewise."""
        self._set(name, self._child(name, label), value)

    def watch_models(self, totals: Callable[[], Totals]) -> None:
        """Ask for the figures by model whenever they are asked for here."""
        self.registry.register(_Models(totals))

    def _child(self, name: str, label: str) -> MetricWrapperBase:
        if not label:
            return self._metrics[name]
        key = (name, label)
        child = self._children.get(key)
        if child is None:
            child = self._children[key] = self._metrics[name].labels(label)
        return child


class _Models(Collector):
    def __init__(self, totals: Callable[[], Totals]) -> None:
        self._totals = totals

    def collect(self) -> Iterator[GaugeMetricFamily]:
        totals = self._totals()
        for name, text in MODEL_FIGURES.items():
            family = GaugeMetricFamily(f"{PREFIX}device_{name}", text, labels=["model"])
            for model, values in sorted(totals.items()):
                family.add_metric([model], values[name])
            yield family
