# SPDX-License-Identifier: Apache-2.0
"""Writes deploy/monitoring and docs/reference/alerts.md from tools/monitoring (`make docs`).

Dashboards for Grafana, the alerts as a file of rules for Prometheus, and the same rules as a
PrometheusRule for its operator. A test compares the files with the source.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import yaml

from monitoring.alerts import GROUPS, Alert, Group
from monitoring.devices import GPUS, SHARES
from monitoring.fleet import FLEET
from monitoring.nodes import NODES
from monitoring.panels import Board, render
from monitoring.scheduling import SCHEDULER
from monitoring.tenants import NAMESPACES

ROOT: Final = Path(__file__).resolve().parent.parent
BOARDS: Final[tuple[Board, ...]] = (FLEET, NODES, GPUS, SHARES, NAMESPACES, SCHEDULER)
_HEAD: Final = "# SPDX-License-Identifier: Apache-2.0\n# Written by tools/generate_monitoring.py.\n"
_PAGE: Final = """\
# Alerts

<!-- Written by tools/generate_monitoring.py. -->

The alerts of [`alerts.yaml`](../../deploy/monitoring/alerts.yaml), for Prometheus, and of
[`prometheus-rule.yaml`](../../deploy/monitoring/prometheus-rule.yaml), for its operator.
[Monitoring](../guides/monitoring.md) says how to load them. Each annotation `runbook_url` leads
here.

| severity | meaning |
|---|---|
| `critical` | pods do not start, a limit does not hold, or a GPU is lost: look now |
| `warning` | look today |
| `info` | good to know |
"""


def documentation() -> str:
    """Return the address of the documentation site."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    return str(project["urls"]["Documentation"])


def rule(alert: Alert) -> dict[str, Any]:
    """Return one alert as Prometheus reads it."""
    return {
        "alert": alert.full_name,
        "expr": alert.expr,
        "for": alert.wait,
        "labels": {"severity": alert.severity},
        "annotations": {
            "summary": alert.summary,
            "description": f"{alert.meaning} Next: {alert.next}",
            "runbook_url": f"{documentation()}/reference/alerts.html#{alert.full_name.lower()}",
        },
    }


def rules() -> dict[str, Any]:
    """Return all groups."""
    return {
        "groups": [
            {"name": group.name, "rules": [rule(each) for each in group.alerts]} for group in GROUPS
        ]
    }


def operator_rules() -> dict[str, Any]:
    """Return the same, for Prometheus' operator."""
    return {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {
            "name": "allotment",
            "namespace": "allotment-system",
            "labels": {"app.kubernetes.io/name": "allotment"},
        },
        "spec": rules(),
    }


def _yaml(document: Mapping[str, Any]) -> str:
    return _HEAD + str(yaml.safe_dump(document, sort_keys=False, width=100, allow_unicode=True))


def _section(group: Group) -> str:
    lines = [f"\n## {group.title}\n"]
    for alert in group.alerts:
        wait = "" if alert.wait == "0s" else f", after {alert.wait}"
        lines += [
            f"### {alert.full_name}\n",
            f"`{alert.severity}`{wait}. {alert.meaning}\n",
            f"```promql\n{alert.expr}\n```\n",
            f"Next: `{_plain(alert.next)}`\n",
        ]
    return "\n".join(lines)


def _plain(text: str) -> str:
    """Write a template's labels as words: `{{ $labels.node }}` as NODE."""
    parts = text.split("{{ $labels.")
    rest = (part.split(" }}", 1) for part in parts[1:])
    return parts[0] + "".join(label.upper() + after for label, after in rest)


def render_all() -> dict[str, str]:
    """Return the files, by their path."""
    made = {f"deploy/monitoring/dashboards/{board.uid}.json": render(board) for board in BOARDS}
    made["deploy/monitoring/alerts.yaml"] = _yaml(rules())
    made["deploy/monitoring/prometheus-rule.yaml"] = _yaml(operator_rules())
    made["docs/reference/alerts.md"] = _PAGE + "".join(_section(group) for group in GROUPS)
    return made


if __name__ == "__main__":
    for path, text in render_all().items():
        target = ROOT / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, "utf-8")
