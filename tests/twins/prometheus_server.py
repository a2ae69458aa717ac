# SPDX-License-Identifier: Apache-2.0
"""A real Prometheus that scrapes what a test serves, and dashboards as Grafana asks it for them."""

from __future__ import annotations

import http.client
import json
import re
import shutil
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest
import yaml
from held_ports import held_port
from patience import wait_until

SCRAPE_S: Final = 1
"""Fifteen times as often as in life, so that a rate is there after seconds."""
MONITORING: Final = Path(__file__).resolve().parent.parent.parent / "deploy" / "monitoring"

Labels = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Value:
    """A series and its value."""

    labels: Labels
    value: float


@dataclass(frozen=True, slots=True)
class Target:
    """What is scraped, and the labels by which Kubernetes' discovery would know it."""

    job: str
    address: str
    node: str = ""


class Prometheus:
    """The server's HTTP API."""

    def __init__(self, url: str) -> None:
        self.url = url
        # No proxy of the machine's stands between us and the server.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def newest(self) -> float:
        """The time of the newest whole scrape: what is asked at it has the same samples each time.

        A scrape under way has a later time.
        """
        return min(each.value for each in self.query("timestamp(up)"))

    def query(self, expr: str, at: float | None = None) -> list[Value]:
        """Evaluate an expression at a time, or now."""
        data = self._get("query", query=expr, **({} if at is None else {"time": f"{at:.3f}"}))
        if data["resultType"] == "scalar":
            return [Value({}, float(data["result"][1]))]
        return [Value(each["metric"], float(each["value"][1])) for each in data["result"]]

    def samples(self, selector: str, window: str, at: float) -> list[tuple[float, float]]:
        """Return the times and values of one series up to a time."""
        data = self._get("query", query=f"{selector}[{window}]", time=f"{at:.3f}")
        (series,) = data["result"]
        return [(moment, float(value)) for moment, value in series["values"]]

    def label_values(self, label: str, match: str) -> list[str]:
        return list(self._get(f"label/{label}/values", **{"match[]": match}))

    def rules(self) -> list[Mapping[str, Any]]:
        """Return the alerts, each with its health and state."""
        return [each for group in self._get("rules")["groups"] for each in group["rules"]]

    def is_ready(self) -> bool:
        try:
            with self._opener.open(f"{self.url}/-/ready", timeout=10) as answer:
                return bool(answer.status == http.client.OK)
        except OSError:
            return False

    def _get(self, path: str, **query: str) -> Any:  # noqa: ANN401 - JSON
        url = f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(query)}"
        try:
            with self._opener.open(url, timeout=30) as answer:
                return json.loads(answer.read())["data"]
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{query}: {error.read().decode()}") from error


def program(name: str = "prometheus") -> str:
    """Return where a program of Debian's package `prometheus` is; skip the test without it."""
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"no {name} here (Debian: apt install prometheus)")
    return found


@contextmanager
def prometheus(folder: Path, targets: Sequence[Target]) -> Iterator[Prometheus]:
    """Run one with the jobs of `deploy/monitoring`, which find these targets."""
    config = yaml.safe_load((MONITORING / "prometheus.yaml").read_text("utf-8"))
    config["global"] = {"scrape_interval": f"{SCRAPE_S}s", "evaluation_interval": f"{SCRAPE_S}s"}
    config["rule_files"] = [str(MONITORING / "alerts.yaml")]
    for job in config["scrape_configs"]:
        del job["kubernetes_sd_configs"]
        job["static_configs"] = [
            {"targets": [each.address], "labels": _discovered(each)}
            for each in targets
            if each.job == job["job_name"]
        ]
    folder.mkdir(exist_ok=True)
    (folder / "prometheus.yaml").write_text(yaml.safe_dump(config), "utf-8")
    with running(folder) as made:
        yield made


@contextmanager
def running(folder: Path, *more: str) -> Iterator[Prometheus]:
    """Run one with a folder's `prometheus.yaml`, and the past in its `data`."""
    binary = program()
    with held_port() as port, (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [
                binary,
                f"--config.file={folder}/prometheus.yaml",
                f"--storage.tsdb.path={folder}/data",
                f"--web.listen-address=127.0.0.1:{port}",
                "--log.level=warn",
                *more,
            ],
            stdout=log,
            stderr=log,
        )
        try:
            made = Prometheus(f"http://127.0.0.1:{port}")
            wait_until(lambda: process.poll() is not None or made.is_ready(), "Prometheus")
            assert process.poll() is None, (folder / "log").read_text("utf-8")
            yield made
        finally:
            process.terminate()
            process.wait(30)


def _discovered(target: Target) -> dict[str, str]:
    meta = "__meta_kubernetes_pod_"
    labels = {
        f"{meta}label_app_kubernetes_io_name": "allotment",
        f"{meta}label_app_kubernetes_io_component": target.job.removeprefix("allotment-"),
        f"{meta}container_port_name": "metrics",
    }
    return labels | ({f"{meta}node_name": target.node} if target.node else {})


class Dashboard:
    """A dashboard's file, and its expressions with the choices of a reader filled in."""

    def __init__(self, path: Path, prometheus: Prometheus, choices: Labels | None = None) -> None:
        self.document: Mapping[str, Any] = json.loads(path.read_text("utf-8"))
        self._prometheus = prometheus
        self.values: dict[str, str] = {
            # Since the start: a test lasts less long.
            "__rate_interval": "5m",
            "__range": "5m",
            "__range_s": "300",
        }
        for variable in self.document["templating"]["list"]:
            if variable["type"] == "query":
                self.values[variable["name"]] = self._choice(variable, choices or {})

    def _choice(self, variable: Mapping[str, Any], choices: Labels) -> str:
        """What Grafana takes: what is chosen, else all, else the first."""
        if variable["name"] in choices:
            return choices[variable["name"]]
        if variable["includeAll"]:
            return str(variable["allValue"])
        return self.options(variable)[0]

    def options(self, variable: Mapping[str, Any]) -> list[str]:
        """The values of a variable that a reader can choose from."""
        query = self.filled(variable["query"]["query"])
        found = re.fullmatch(r"label_values\((?P<match>.+), (?P<label>\w+)\)", query)
        assert found is not None, query
        return sorted(self._prometheus.label_values(found["label"], found["match"]))

    def filled(self, expr: str) -> str:
        """Fill in the variables, as Grafana does before it asks."""

        def value(found: re.Match[str]) -> str:
            return self.values[found[1]]

        return re.sub(r"\$(\w+)", value, expr)

    def panels(self) -> Iterator[Mapping[str, Any]]:
        """Every panel that asks for something."""
        yield from (each for each in self.document["panels"] if each["type"] != "row")

    def ask(
        self, panel: Mapping[str, Any], ref: str = "A", *, at: float | None = None
    ) -> list[Value]:
        """What one query of a panel gives, now or at a time."""
        (expr,) = (each["expr"] for each in panel["targets"] if each["refId"] == ref)
        return self._prometheus.query(self.filled(expr), time.time() if at is None else at)

    def titled(self, title: str, kind: str = "") -> Mapping[str, Any]:
        """The panel of this title, and kind if several have it."""
        (found,) = (
            each for each in self.panels() if each["title"] == title and kind in {"", each["type"]}
        )
        return found
