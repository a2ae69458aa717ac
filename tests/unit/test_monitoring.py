# SPDX-License-Identifier: Apache-2.0
"""Dashboards, alerts and scrape configurations: as their source, and right for what they meet."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from alert_cases import CASES, Case

import generate_monitoring
from allotment.cli.groups import COMMANDS
from allotment.metrics import agent, scheduler, use
from monitoring.alerts import ALERTS

Json = dict[str, Any]


@pytest.fixture(scope="module")
def written() -> dict[str, str]:
    return generate_monitoring.render_all()


@pytest.fixture(scope="module")
def boards(written: Mapping[str, str]) -> list[Json]:
    return [json.loads(text) for path, text in written.items() if path.endswith(".json")]


def panels(board: Json) -> Iterator[Json]:
    return (panel for panel in board["panels"] if panel["type"] != "row")


def promtool(*words: str | Path, folder: Path) -> None:
    binary = shutil.which("promtool")
    if binary is None:
        pytest.skip("no promtool here (Debian: apt install prometheus)")
    done = subprocess.run(
        [binary, *map(str, words)], cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_files_are_as_their_source(root: Path, written: Mapping[str, str]) -> None:
    for path, text in written.items():
        assert (root / path).read_text("utf-8") == text, f"{path}: run `make docs`"
    folder = root / "deploy" / "monitoring"
    by_hand = {"deploy/monitoring/prometheus.yaml", "deploy/monitoring/pod-monitors.yaml"}
    there = {str(path.relative_to(root)) for path in folder.rglob("*") if path.is_file()}
    assert there == {path for path in written if path.startswith("deploy/")} | by_hand


def test_dashboards_are_whole(boards: list[Json]) -> None:
    assert len({board["uid"] for board in boards}) == len(boards)
    for board in boards:
        # Of Grafana 10.1. Later ones renew what is older, and 10 refuses what is newer.
        assert board["schemaVersion"] <= 38
        assert "style" not in board
        numbers = [panel["id"] for panel in board["panels"]]
        assert len(set(numbers)) == len(numbers)
        for panel in panels(board):
            assert panel["description"].endswith((".", "`")), panel["title"]
            assert panel["targets"], panel["title"]
            if panel["type"] != "table":
                assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]


def test_no_data_source_is_fixed(boards: list[Json]) -> None:
    def sources(part: object) -> Iterator[object]:
        if isinstance(part, dict):
            yield from ([part["datasource"]] if "datasource" in part else [])
            for each in part.values():
                yield from sources(each)
        elif isinstance(part, list):
            for each in part:
                yield from sources(each)

    for board in boards:
        found = list(sources(board))
        assert found
        assert all(each == {"type": "prometheus", "uid": "${datasource}"} for each in found)


def test_panels_fill_the_screen_and_do_not_overlap(boards: list[Json]) -> None:
    for board in boards:
        cells: set[tuple[int, int]] = set()
        for panel in board["panels"]:
            at = panel["gridPos"]
            own = {
                (x, y)
                for x in range(at["x"], at["x"] + at["w"])
                for y in range(at["y"], at["y"] + at["h"])
            }
            assert not own & cells, (board["uid"], panel["title"])
            assert at["x"] + at["w"] <= 24, (board["uid"], panel["title"])
            cells |= own


def test_rates_suit_any_interval_of_scrapes(boards: list[Json]) -> None:
    for board in boards:
        for panel in panels(board):
            for target in panel["targets"]:
                windows = re.findall(r"(?:rate|increase)\([^][]*\[([^]]+)\]", target["expr"])
                assert set(windows) <= {"$__rate_interval", "$__range"}, panel["title"]


def test_links_between_dashboards_lead_somewhere(boards: list[Json]) -> None:
    uids = {board["uid"] for board in boards}
    links = {
        link
        for board in boards
        for link in re.findall(r'"/d/([a-z-]+)\?', json.dumps(board["panels"]))
    }
    assert links == {"allotment-node", "allotment-gpu", "allotment-share"}
    assert links <= uids


def names() -> set[str]:
    """All metrics of the code's tables, and those of Prometheus and of any process."""
    found = {"up", "ALERTS", "process_resident_memory_bytes", "process_cpu_seconds_total"}
    found |= {"allotment_gpu_info", "allotment_use_read", "allotment_use_shares_damaged"}
    found |= {"allotment_use_read_seconds", "allotment_share_turn_wait_seconds_bucket"}
    tables: list[tuple[str, Any]] = [
        ("allotment_agent_", agent.FIGURES),
        ("allotment_scheduler_", scheduler.FIGURES),
        ("allotment_gpu_", use.GPU_FIGURES),
        ("allotment_share_", use.SHARE_FIGURES),
    ]
    ends = {"counter": "_total", "histogram": "_bucket"}
    for prefix, table in tables:
        found |= {f"{prefix}{each.name}{ends.get(each.kind, '')}" for each in table}
    return found | {f"allotment_scheduler_{name}" for name in scheduler.CLUSTER}


def used_names(text: str) -> set[str]:
    """The metrics in an expression."""
    without_texts = re.sub(r'"[^"]*"', "", text)
    return set(re.findall(r"\b(?:allotment_[a-z_]+|process_[a-z_]+|up|ALERTS)\b", without_texts))


def test_each_metric_exists(boards: list[Json]) -> None:
    exprs = [alert.expr for alert in ALERTS]
    for board in boards:
        exprs += [target["expr"] for panel in panels(board) for target in panel["targets"]]
        exprs += [
            each["query"]["query"]
            for each in board["templating"]["list"]
            if each["type"] == "query"
        ]
    assert set().union(*map(used_names, exprs)) <= names()


def test_a_metric_of_no_table_is_seen() -> None:
    text = 'sum(rate(allotment_share_nothing_total{pod="allotment_x"}[5m])) / up'
    assert used_names(text) - names() == {"allotment_share_nothing_total"}


def test_alerts_say_what_to_do(root: Path) -> None:
    page = (root / "docs" / "reference" / "alerts.md").read_text("utf-8")
    for alert in ALERTS:
        assert f"\n### {alert.full_name}\n" in page
        assert alert.summary.endswith((".", "}}.")), alert.name
        assert alert.next, alert.name
        for command in re.findall(r"\b(?<!-)allot ([a-z]+)", alert.next):
            assert command in COMMANDS, alert.name


def test_rules_are_valid(root: Path) -> None:
    folder = root / "deploy" / "monitoring"
    promtool("check", "rules", "alerts.yaml", folder=folder)


def test_scrapes_meet_the_manifests(root: Path) -> None:
    """Both configurations select the pods of the manifests, and the port of their metrics."""
    documents = yaml.safe_load_all((root / "deploy/monitoring/pod-monitors.yaml").read_text())
    monitors = {each["metadata"]["name"]: each["spec"] for each in documents}
    config = yaml.safe_load((root / "deploy" / "monitoring" / "prometheus.yaml").read_text())
    jobs = {each["job_name"]: each for each in config["scrape_configs"]}
    assert set(jobs) == set(monitors) == {"allotment-agent", "allotment-scheduler"}
    for name, spec in monitors.items():
        part = name.removeprefix("allotment-")
        manifest = yaml.safe_load_all((root / f"deploy/manifests/{part}.yaml").read_text())
        (pod,) = (
            each["spec"]["template"]
            for each in manifest
            if each["kind"] in {"DaemonSet", "Deployment"} and each["metadata"]["name"] == name
        )
        labels = pod["metadata"]["labels"]
        assert spec["selector"]["matchLabels"].items() <= labels.items()
        ports = {
            port["name"] for each in pod["spec"]["containers"] for port in each.get("ports", ())
        }
        (endpoint,) = spec["podMetricsEndpoints"]
        assert endpoint["port"] in ports
        kept = jobs[name]["relabel_configs"][0]["regex"].split(";")
        keys = ("app.kubernetes.io/name", "app.kubernetes.io/component")
        assert kept == [*(labels[key] for key in keys), endpoint["port"]]
        assert endpoint["honorLabels"] is jobs[name]["honor_labels"] is True
        assert {"targetLabel": "job", "replacement": name} in endpoint["relabelings"]


def test_idle_cost_is_of_shares_whose_time_is_measured(boards: list[Json], tmp_path: Path) -> None:
    """A share of half a GPU that is busy for 20 %, a GPU alone for 90 %, and a MIG device."""
    gpus = ("soft", "exclusive", "mig")
    values = {
        **{f'allotment_gpu_price_per_hour{{gpu="{gpu}", currency="EUR"}}': "2x40" for gpu in gpus},
        **{f'allotment_gpu_memory_total_bytes{{gpu="{gpu}"}}': "84x40" for gpu in gpus},
        **{f'allotment_gpu_memory_reserved_bytes{{gpu="{gpu}"}}': "4x40" for gpu in gpus},
        'allotment_share_memory_limit_bytes{namespace="ml", gpu="soft"}': "20x40",
        'allotment_share_compute_guaranteed_ratio{namespace="ml", gpu="soft"}': "0.5x40",
        'allotment_share_gpu_seconds_total{namespace="ml", gpu="soft"}': "0+3x40",
        'allotment_share_memory_limit_bytes{namespace="ml", gpu="exclusive"}': "80x40",
        'allotment_share_utilization_ratio{namespace="ml", gpu="exclusive"}': "0.9x40",
        'allotment_share_memory_limit_bytes{namespace="ml", gpu="mig"}': "40x40",
    }
    (board,) = (each for each in boards if each["uid"] == "allotment-namespace")
    exprs = {
        panel["title"]: re.sub(r"\$(cluster|namespace)", ".*", panel["targets"][0]["expr"])
        for panel in panels(board)
        if "idle" in panel["title"].lower()
    }
    assert exprs.keys() == {"Allocated and idle", "Idle cost by namespace"}
    asked = [
        {
            "expr": f"sum({expr.replace('$__rate_interval', '5m')})",
            "eval_time": "9m",
            "exp_samples": [{"labels": "{}", "value": 2 * (0.5 - 0.2) + 2 * (1 - 0.9)}],
        }
        for expr in exprs.values()
    ]
    series = [{"series": each, "values": value} for each, value in values.items()]
    document = {
        "tests": [{"interval": "15s", "input_series": series, "promql_expr_test": asked}],
    }
    path = tmp_path / "idle_test.yaml"
    path.write_text(yaml.safe_dump(document), "utf-8")
    promtool("test", "rules", path, folder=tmp_path)


# ---- when alerts fire ----------------------------------------------------------------------------


def test_each_alert_has_a_case_where_it_fires_and_one_just_below() -> None:
    for fires in (True, False):
        assert {case.alert for case in CASES if bool(case.labels) is fires} == {
            alert.name for alert in ALERTS
        }


def written_labels(labels: Mapping[str, str]) -> str:
    return ", ".join(f'{name}="{value}"' for name, value in labels.items())


def expectation(case: Case, mark: Mapping[str, str]) -> Json:
    """What is asked of Prometheus about a case, and what it has to answer."""
    (alert,) = (each for each in ALERTS if each.name == case.alert)
    firing = {"alertname": alert.full_name, "alertstate": "firing", **mark}
    samples = [{**firing, "severity": alert.severity, **labels} for labels in case.labels]
    return {
        "expr": f"ALERTS{{{written_labels(firing)}}}",
        "eval_time": case.at,
        "exp_samples": [
            {"labels": f"ALERTS{{{written_labels(each)}}}", "value": 1} for each in samples
        ],
    }


def unit_tests() -> Iterator[Json]:
    """All cases at once, told apart by a label and a GPU of their own; some need to be alone."""
    series: list[Json] = []
    asked: list[Json] = []
    for number, case in enumerate(CASES):
        if case.is_alone:
            yield {
                "interval": "1m",
                "input_series": [
                    {"series": each, "values": values} for each, values in case.series.items()
                ],
                "promql_expr_test": [expectation(case, {})],
            }
            continue
        own = {"case": f"{number}"}
        for each, values in case.series.items():
            marked = each.replace("GPU-a", f"GPU-{number}")[:-1] + f", {written_labels(own)}}}"
            series.append({"series": marked, "values": values})
        labels = tuple(
            {name: value.replace("GPU-a", f"GPU-{number}") for name, value in each.items()}
            for each in case.labels
        )
        asked.append(expectation(replace(case, labels=labels), own))
    yield {"interval": "1m", "input_series": series, "promql_expr_test": asked}


def test_alerts_fire_when_they_should_and_not_before(root: Path, tmp_path: Path) -> None:
    document = {
        "rule_files": [str(root / "deploy" / "monitoring" / "alerts.yaml")],
        "evaluation_interval": "1m",
        "tests": list(unit_tests()),
    }
    path = tmp_path / "alerts_test.yaml"
    path.write_text(yaml.safe_dump(document), "utf-8")
    promtool("test", "rules", path, folder=tmp_path)


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert.name)
def test_texts_name_only_labels_that_the_alert_has(alert: Any) -> None:  # noqa: ANN401
    text = f"{alert.summary} {alert.meaning} {alert.next}"
    named = set(re.findall(r"\$labels\.(\w+)", text))
    cases = [labels for case in CASES if case.alert == alert.name for labels in case.labels]
    had = set().union(*cases)
    assert named <= had | ({"claim", "request"} if "share" in had else set())
