# SPDX-License-Identifier: Apache-2.0
"""Figures by a table: what each daemon counts, once, under the name it is known by inside.

A registry of its own: nothing that another library registers in the process's default one gets
in, and two daemons in one process (tests) do not meet.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.process_collector import ProcessCollector

__all__ = ["Figure", "Figures"]

Kind = Literal["counter", "gauge", "histogram"]


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure: its name is the daemon's and this one, with `_total` for a counter."""

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    values: tuple[str, ...] = field(default=())
    """Of a single label: those that are there with zero from the start, so that rates work."""


class Figures:
    """The figures of a table. May be called from any thread.

    Which one of a figure's labels is meant each daemon says in its own way. What is not in the
    table is a `KeyError` or `ValueError`.
    """

    def __init__(self, prefix: str, figures: Iterable[Figure], *, buckets: Sequence[float]) -> None:
        """Make all of them, with what zero can be said; `buckets` of histograms, in seconds."""
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self._prefix, self._buckets = prefix, buckets
        self._metrics = {each.name: self._made(each) for each in figures}

    def _add(self, name: str, metric: MetricWrapperBase, by: float) -> None:
        if not isinstance(metric, Counter):
            raise ValueError(f"{name} is no counter")  # noqa: TRY004 - one error for any misuse
        metric.inc(by)

    def _observe(self, name: str, metric: MetricWrapperBase, value: float) -> None:
        if not isinstance(metric, Histogram):
            raise ValueError(f"{name} is no histogram")  # noqa: TRY004 - likewise
        metric.observe(value)

    def _set(self, name: str, metric: MetricWrapperBase, value: float) -> None:
        if not isinstance(metric, Gauge):
            raise ValueError(f"{name} is no gauge")  # noqa: TRY004 - likewise
        metric.set(value)

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
