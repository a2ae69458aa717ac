# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from typing import Any

import msgspec
import pytest

from allotment.burn.reports import BurnPlan
from allotment.model.errors import UsageError


def test_a_plan_survives_its_way_to_another_process() -> None:
    plan = BurnPlan(memory_bytes=3 << 30, api="vmm", graph_nodes=7, seconds=0.25)
    assert msgspec.json.decode(msgspec.json.encode(plan), type=BurnPlan) == plan


def test_arrays_cannot_be_touched() -> None:
    with pytest.raises(UsageError, match="no address"):
        BurnPlan(api="array", touch=True)


def test_a_graph_needs_kernels() -> None:
    with pytest.raises(UsageError, match="needs kernels"):
        BurnPlan(graph_nodes=4, kernel_ns=0)


@pytest.mark.parametrize("amount", [{"launches": 3}, {"rate": 20.0}])
def test_launches_need_kernels(amount: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="need kernels"):
        BurnPlan(kernel_ns=0, **amount)


def test_requests_come_one_after_the_other() -> None:
    with pytest.raises(UsageError, match="one after the other"):
        BurnPlan(rate=20, streams=2)


@pytest.mark.parametrize(("nodes", "kernels"), [(0, 1), (1, 1), (20, 20)])
def test_kernels_per_launch(nodes: int, kernels: int) -> None:
    assert BurnPlan(graph_nodes=nodes).kernels_per_launch == kernels
