# SPDX-License-Identifier: Apache-2.0
"""The agent's figures: each as the table has it, and never a failure where they are counted."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client import generate_latest

from allotment.agent.reports import AgentReports
from allotment.kube.clients import Api
from allotment.kube.events import Events
from allotment.metrics.agent import FIGURES, AgentMetrics
from allotment.model.pods import ContainerKind, Owner, Pod, PodUid


def shown(metrics: AgentMetrics) -> str:
    return generate_latest(metrics.registry).decode()


def test_every_figure_is_there_from_the_start_with_our_prefix() -> None:
    text = shown(AgentMetrics())
    for figure in FIGURES:
        name = f"allotment_agent_{figure.name}" + ("_total" if figure.kind == "counter" else "")
        assert f"# TYPE {name} {figure.kind}" in text
    assert 'allotment_agent_config_loads_total{result="invalid"} 0.0' in text
    assert "process_resident_memory_bytes" in text


def test_what_is_counted_is_shown() -> None:
    metrics = AgentMetrics()
    metrics.count("refusals", labels={"reason": "does-not-fit"})
    metrics.count("events_dropped", by=3)
    metrics.set("shares", 60, labels={"mode": "soft"})
    metrics.observe("prepare_seconds", 0.0015, labels={"resource": "nvidia.com/gpu"})
    text = shown(metrics)
    assert 'allotment_agent_refusals_total{reason="does-not-fit"} 1.0' in text
    assert "allotment_agent_events_dropped_total 3.0" in text
    assert 'allotment_agent_shares{mode="soft"} 60.0' in text
    bucket = 'allotment_agent_prepare_seconds_bucket{le="%s",resource="nvidia.com/gpu"} %s'
    assert bucket % ("0.001", "0.0") in text
    assert bucket % ("0.002", "1.0") in text
    metrics.forget("shares")
    assert 'mode="soft"' not in shown(metrics)


@pytest.mark.parametrize(
    ("name", "labels"),
    [("nothing", {}), ("refusals", {}), ("refusals", {"cause": "x"}), ("shares", {"mode": "soft"})],
)
def test_a_figure_that_is_not_in_the_table_is_an_error(name: str, labels: dict[str, str]) -> None:
    with pytest.raises((KeyError, ValueError)):
        AgentMetrics().count(name, labels=labels)


def test_reports_never_fail() -> None:
    reports = AgentReports(node="n1", metrics=AgentMetrics())
    reports.count("nothing")
    reports.count("refusals", cause="x")
    reports.observe("nothing", 1.0)
    reports.observe("prepare_seconds", 1.0)
    reports.gauge("refusals", 1.0, reason="x")
    reports.node("Labels", "2 models", is_warning=True)


def test_reports_make_events_on_whom_they_are_about() -> None:
    told: list[tuple[object, ...]] = []

    class Told(Events):
        def tell(self, about: object, **what: object) -> None:
            told.append((about, *what.values()))

    metrics = AgentMetrics()
    reports = AgentReports(
        node="n1",
        metrics=metrics,
        events=Told(Api.__new__(Api), component="allotment-agent", node="n1"),
    )
    uid = PodUid("u")
    owner = Owner(
        uid=uid,
        namespace="ml",
        pod="train",
        container="main",
        kind=ContainerKind.REGULAR,
        resource="nvidia.com/gpu",
    )
    reports.pod(Pod(uid=uid, namespace="ml", name="train"), "A", "a", is_warning=True)
    reports.pod(owner, "A", "a", is_warning=True)
    assert told[0] == told[1]
    reports.node("B", "b", is_warning=False)
    assert [str(each[0]) for each in told[1:]] == [
        "Reference(kind='Pod', name='train', uid='u', namespace='ml', api_version='v1')",
        "Reference(kind='Node', name='n1', uid='n1', namespace='', api_version='v1')",
    ]


def calls(path: Path) -> Iterator[tuple[str, str, set[str]]]:
    """Every figure that a module of the agent gives: how, which, and by which labels."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        match node:
            case ast.Call(
                func=ast.Attribute(attr="count" | "observe" | "gauge" as verb),
                args=[ast.Constant(value=str(name)), *_],
                keywords=keywords,
            ) if name.isidentifier():
                yield verb, name, {str(each.arg) for each in keywords}


def test_all_that_the_agent_counts_is_in_the_table(root: Path) -> None:
    figures = {each.name: each for each in FIGURES}
    kinds = {"count": "counter", "observe": "histogram", "gauge": "gauge"}
    counted = set()
    for path in (root / "src" / "allotment" / "agent").rglob("*.py"):
        for verb, name, labels in calls(path):
            if (path.name, name) == ("running.py", "events_dropped"):
                continue  # AgentMetrics itself, before there are reports
            assert name in figures, f"{path.name}: {name}"
            assert figures[name].kind == kinds[verb], f"{path.name}: {name}"
            assert set(figures[name].labels) == labels, f"{path.name}: {name}"
            counted.add(name)
    unused = figures.keys() - counted - {"events_dropped"}
    # The device plugin has the names of its times in a variable.
    assert not {each for each in unused if not each.endswith("_seconds")}


def test_the_reference_has_every_figure(root: Path) -> None:
    text = (root / "docs" / "reference" / "metrics.md").read_text("utf-8")
    rows = dict(re.findall(r"^\| `allotment_agent_(\w+)` \|([^|]*)\|", text, re.MULTILINE))
    names = {each.name + ("_total" if each.kind == "counter" else ""): each for each in FIGURES}
    assert rows.keys() == names.keys()
    for name, figure in names.items():
        assert re.findall(r"`(\w+)`", rows[name]) == list(figure.labels), name
