# SPDX-License-Identifier: Apache-2.0
"""Metrics from a table: each daemon declares its metrics once.

Uses its own registry: metrics of other libraries stay out, and two daemons in one process (tests)
do not collide.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, TypeVar

import msgspec
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.process_collector import ProcessCollector

Kind = Literal["counter", "gauge", "histogram"]
Labels = Mapping[str, str] | None
MetricT = TypeVar("MetricT", Counter, Gauge, Histogram)


class Figure(msgspec.Struct, frozen=True):
    """One metric. Its full name has the prefix of the daemon, and `_total` for a counter."""

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    values: tuple[str, ...] = msgspec.field(default=())
    """Values of a single label that start at zero, so that rates work."""


class Figures:
    """The metrics of a table. Thread-safe.

    `label` is the value of a single label, `labels` has several by name. An unknown metric or label
    raises `KeyError` or `ValueError`.
    """

    def __init__(self, prefix: str, figures: Iterable[Figure], *, buckets: Sequence[float]) -> None:
        """`buckets` of the histograms are in seconds."""
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self._prefix, self._buckets = prefix, buckets
        self._metrics = {figure.name: self._made(figure) for figure in figures}

    def count(self, name: str, label: str = "", *, by: float = 1, labels: Labels = None) -> None:
        self._child(name, Counter, label, labels).inc(by)

    def observe(self, name: str, value: float, label: str = "", *, labels: Labels = None) -> None:
        self._child(name, Histogram, label, labels).observe(value)

    def set(self, name: str, value: float, label: str = "", *, labels: Labels = None) -> None:
        self._child(name, Gauge, label, labels).set(value)

    def forget(self, name: str) -> None:
        """Remove all labelled values of a metric, before it is set again."""
        self._metrics[name].clear()

    def _child(self, name: str, kind: type[MetricT], label: str, labels: Labels) -> MetricT:
        metric = self._metrics[name]
        if not isinstance(metric, kind):
            problem = f"{name} is not a {kind.__name__.lower()}"
            raise ValueError(problem)  # noqa: TRY004 - one error for any misuse
        if labels:
            return metric.labels(**labels)
        return metric.labels(label) if label else metric

    def _made(self, figure: Figure) -> MetricWrapperBase:
        name = self._prefix + figure.name
        metric: MetricWrapperBase
        if figure.kind == "histogram":
            metric = Histogram(
                name, figure.help, figure.labels, registry=self.registry, buckets=self._buckets
            )
        elif figure.kind == "gauge":
            metric = Gauge(name, figure.help, figure.labels, registry=self.registry)
        else:
            metric = Counter(name, figure.help, figure.labels, registry=self.registry)
        for value in figure.values:
            metric.labels(value)
        return metric
