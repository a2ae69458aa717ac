# SPDX-License-Identifier: Apache-2.0
"""Nodes that exist in the API server alone: for schedulers, which look at nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

from testbed.api import Api, Json

_THREADS = 8
_CAPACITY = {"cpu": "64", "memory": "512Gi", "pods": "110", "ephemeral-storage": "1Ti"}


def add_nodes(
    api: Api, count: int, *, capacity: Mapping[str, str], labels: Mapping[str, str], prefix: str
) -> list[str]:
    """Makes nodes `PREFIX-0000` and on, Ready; the names. `capacity` is over a large machine's."""
    names = [f"{prefix}-{number:04}" for number in range(count)]

    def add(name: str) -> None:
        api.post("/api/v1/nodes", _node(name, capacity=capacity, labels=labels))

    with ThreadPoolExecutor(_THREADS) as pool:
        for _ in pool.map(add, names):
            pass
    return names


def _node(name: str, *, capacity: Mapping[str, str], labels: Mapping[str, str]) -> Json:
    amounts = {**_CAPACITY, **capacity}
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": name, "labels": {"kubernetes.io/hostname": name, **labels}},
        "status": {
            "capacity": amounts,
            "allocatable": amounts,
            "conditions": [{"type": "Ready", "status": "True", "reason": "Fake"}],
        },
    }
