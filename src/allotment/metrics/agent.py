# SPDX-License-Identifier: Apache-2.0
"""What the node agent counts: each figure once, in one table, under the name it is known by inside.

A registry of its own: nothing that another library registers in the process's default one gets
in, and two agents in one process (tests) do not meet.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.process_collector import ProcessCollector

__all__ = ["FIGURES", "AgentMetrics", "Figure"]

Kind = Literal["counter", "gauge", "histogram"]

_FAST_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0, 30.0)
"""Around what `Allocate` (5 ms) and `PreStartContainer` (50 ms) may take, up to the kubelet's end
(30 s)."""


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure: its name is `allotment_agent_NAME`, with `_total` for a counter."""

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    values: tuple[str, ...] = field(default=())
    """Of a single label: those that are there with zero from the start, so that rates work."""


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
    Figure("label_failures", "counter", "Rounds in which the node's labels were not written."),
    Figure("api_synced", "gauge", "1: the API server is heard from; 0: it is not.", ("what",)),
)


class AgentMetrics:
    """The figures. May be called from any thread."""

    def __init__(self, figures: Iterable[Figure] = FIGURES) -> None:
        """Make all of them, with what zero can be said."""
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self._metrics: dict[str, MetricWrapperBase] = {}
        for each in figures:
            self._metrics[each.name] = self._made(each)

    def count(self, name: str, *, by: float = 1, labels: Mapping[str, str] | None = None) -> None:
        """Add to a counter. Raises `KeyError` or `ValueError` for what is not in the table."""
        metric = self._labelled(name, labels or {})
        if not isinstance(metric, Counter):
            raise ValueError(f"{name} is no counter")  # noqa: TRY004 - one error for any misuse
        metric.inc(by)

    def observe(self, name: str, value: float, *, labels: Mapping[str, str] | None = None) -> None:
        """Add a value to a histogram; errors likewise."""
        metric = self._labelled(name, labels or {})
        if not isinstance(metric, Histogram):
            raise ValueError(f"{name} is no histogram")  # noqa: TRY004 - likewise
        metric.observe(value)

    def set(self, name: str, value: float, *, labels: Mapping[str, str] | None = None) -> None:
        """Set a gauge; errors likewise."""
        metric = self._labelled(name, labels or {})
        if not isinstance(metric, Gauge):
            raise ValueError(f"{name} is no gauge")  # noqa: TRY004 - likewise
        metric.set(value)

    def forget(self, name: str) -> None:
        """Remove all values of a figure with labels, before it is set anew: what is gone, goes."""
        self._metrics[name].clear()

    def _labelled(self, name: str, labels: Mapping[str, str]) -> MetricWrapperBase:
        metric = self._metrics[name]
        return metric.labels(**labels) if labels else metric

    def _made(self, figure: Figure) -> MetricWrapperBase:
        name = f"allotment_agent_{figure.name}"
        metric: MetricWrapperBase
        if figure.kind == "histogram":
            metric = Histogram(
                name, figure.help, figure.labels, registry=self.registry, buckets=_FAST_S
            )
        elif figure.kind == "gauge":
            metric = Gauge(name, figure.help, figure.labels, registry=self.registry)
        else:
            metric = Counter(name, figure.help, figure.labels, registry=self.registry)
        for value in figure.values:
            metric.labels(value)
        return metric
