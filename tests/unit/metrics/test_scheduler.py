# SPDX-License-Identifier: Apache-2.0
"""The scheduler's figures: in the table, there from the start, and worked out when asked for."""

from __future__ import annotations

from pathlib import Path

import pytest
from prometheus_client.exposition import generate_latest

from allotment.metrics.scheduler import AMOUNTS, CLUSTER, FIGURES, SchedulerMetrics
from allotment.scheduler.core.wait_reasons import WAITS


def shown(metrics: SchedulerMetrics) -> str:
    return generate_latest(metrics.registry).decode()


def test_each_verb_is_there_before_it_is_called() -> None:
    text = shown(SchedulerMetrics())
    for verb in ("filter", "prioritize", "bind", "preempt"):
        assert f'allotment_scheduler_request_seconds_count{{verb="{verb}"}} 0.0' in text


def test_figures_are_counted_set_and_observed() -> None:
    metrics = SchedulerMetrics()
    metrics.count("pods_bound")
    metrics.count("node_rejections", "gpu-memory", by=3)
    metrics.set("pods", 7, "bound")
    metrics.observe("request_seconds", 0.003, "filter")
    text = shown(metrics)
    assert "allotment_scheduler_pods_bound_total 1.0" in text
    assert 'allotment_scheduler_node_rejections_total{reason="gpu-memory"} 3.0' in text
    assert 'allotment_scheduler_pods{state="bound"} 7.0' in text
    assert 'allotment_scheduler_request_seconds_bucket{le="0.005",verb="filter"} 1.0' in text


def test_what_is_not_in_the_table_or_misused_is_an_error() -> None:
    metrics = SchedulerMetrics()
    with pytest.raises(KeyError):
        metrics.count("nothing")
    with pytest.raises(ValueError, match="not a counter"):
        metrics.count("leading")
    with pytest.raises(ValueError, match="not a gauge"):
        metrics.set("pods_bound", 1)
    with pytest.raises(ValueError, match="not a histogram"):
        metrics.observe("leading", 1)


def test_names_say_what_they_are() -> None:
    assert len({each.name for each in FIGURES}) == len(FIGURES)
    assert all(each.help.endswith(".") or each.help.endswith("none.") for each in FIGURES)


def test_each_is_in_the_reference_with_its_labels(root: Path) -> None:
    text = (root / "docs" / "reference" / "metrics.md").read_text("utf-8")
    for each in FIGURES:
        name = f"allotment_scheduler_{each.name}{'_total' if each.kind == 'counter' else ''}"
        labels = ", ".join(f"`{label}`" for label in each.labels)
        assert f"| `{name}` | {labels} |" in text
    for name in AMOUNTS:
        assert f"| `{name}` |" in text
    for name, (known, _) in CLUSTER.items():
        if name.removeprefix("device_").removeprefix("node_") not in AMOUNTS:
            labels = ", ".join(f"`{label}`" for label in known)
            assert f"| `allotment_scheduler_{name}` | {labels} |" in text
    for reason in WAITS:
        assert f"`{reason}`" in text, reason
