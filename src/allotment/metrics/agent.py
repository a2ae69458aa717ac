# SPDX-License-Identifier: Apache-2.0
"""What the node agent counts."""

from collections.abc import Iterable, Mapping

from prometheus_client.metrics import MetricWrapperBase

from allotment.metrics.figures import Figure, Figures

__all__ = ["FIGURES", "AgentMetrics"]

_FAST_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0, 30.0)
"""Around what `Allocate` (5 ms) and `PreStartContainer` (50 ms) may take, up to the kubelet's end
(30 s)."""

FIGURES: tuple[Figure, ...] = (
    Figure("allocate_seconds", "histogram", "Time of Allocate.", ("resource",)),
    Figure("prepare_seconds", "histogram", "Time of PreStartContainer.", ("resource",)),
    Figure("preferred_seconds", "histogram", "Time of GetPreferredAllocation.", ("resource",)),
    Figure("registrations", "counter", "Registrations with the kubelet.", ("resource", "result")),
    Figure("refusals", "counter", "Containers that did not get their share.", ("reason",)),
    Figure("shares", "gauge", "Shares of containers on this node.", ("mode",)),
    Figure("shares_made", "counter", "Shares made.", ("mode",)),
    Figure("shares_ended", "counter", "Shares removed.", ("reason",)),
    Figure(
        "config_loads",
        "counter",
        "Configurations read: applied, or invalid and the last good one kept.",
        ("result",),
        ("applied", "invalid"),
    ),
    Figure("config_valid", "gauge", "1: the newest configuration is in force; 0: it is invalid."),
    Figure("events_dropped", "counter", "Kubernetes events left out: too many, or refused."),
    Figure(
        "cdi_fallback", "counter", "Containers answered without CDI, by resource.", ("resource",)
    ),
    Figure("device_healthy", "gauge", "1: healthy; 0: not.", ("device",)),
    Figure("device_xids", "counter", "XID events of a device.", ("device", "xid")),
    Figure("device_recoveries", "counter", "Times a device became healthy again.", ("device",)),
    Figure("mps_daemon_up", "gauge", "1: a GPU's MPS daemon takes clients.", ("device",)),
    Figure("mps_restarts", "counter", "Times an MPS daemon was started again.", ("device",)),
    Figure("mps_losses", "counter", "Times MPS clients of a GPU lost all they had.", ("device",)),
    Figure(
        "mig_slices",
        "gauge",
        "MIG slices of GPUs that are cut for who asks; lost: of containers, removed by others.",
        ("device", "hold"),
    ),
    Figure("mig_losses", "counter", "Slices of shares that others removed.", ("device",)),
    Figure("mig_switched_off", "counter", "Times others switched MIG off under us.", ("device",)),
    Figure("mig_paused", "gauge", "1: MIG is not switched on again for now.", ("device",)),
    Figure(
        "mig_failures",
        "counter",
        "Times a driver did not tell of slices, or did not remove one.",
        ("device", "reason"),
    ),
    Figure("label_failures", "counter", "Rounds in which the node's labels were not written."),
    Figure("api_synced", "gauge", "1: the API server is heard from; 0: it is not.", ("what",)),
)


class AgentMetrics(Figures):
    """The figures: `allotment_agent_NAME`. May be called from any thread."""

    def __init__(self, figures: Iterable[Figure] = FIGURES) -> None:
        """Make all of them, with what zero can be said."""
        super().__init__("allotment_agent_", figures, buckets=_FAST_S)

    def count(self, name: str, *, by: float = 1, labels: Mapping[str, str] | None = None) -> None:
        """Add to a counter. Raises `KeyError` or `ValueError` for what is not in the table."""
        self._add(name, self._labelled(name, labels or {}), by)

    def observe(self, name: str, value: float, *, labels: Mapping[str, str] | None = None) -> None:
        """Add a value to a histogram; errors likewise."""
        self._observe(name, self._labelled(name, labels or {}), value)

    def set(self, name: str, value: float, *, labels: Mapping[str, str] | None = None) -> None:
        """Set a gauge; errors likewise."""
        self._set(name, self._labelled(name, labels or {}), value)

    def forget(self, name: str) -> None:
        """Remove all values of a figure with labels, before it is set anew: what is gone, goes."""
        self._metrics[name].clear()

    def _labelled(self, name: str, labels: Mapping[str, str]) -> MetricWrapperBase:
        metric = self._metrics[name]
        return metric.labels(**labels) if labels else metric
