# SPDX-License-Identifier: Apache-2.0
"""Which pods a PodDisruptionBudget protects, and how many of some go against one."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from api_server_twin import Server, impatient, listed, run, until
from hypothesis import given
from hypothesis import strategies as st

from allotment.kube.quotas import Budget, BudgetObject, FollowedBudgets, against, budget_of
from allotment.model.clusters import Protected

LABELS = {"app": "web", "tier": "front"}


def protected(name: str = "p", namespace: str = "ml", **labels: str) -> Protected:
    return Protected(namespace=namespace, name=name, labels=labels or LABELS)


def written(selector: object, **status: object) -> dict[str, Any]:
    return {
        "metadata": {"name": "b", "namespace": "ml", "uid": "uid-b", "resourceVersion": "1"},
        "spec": {"selector": selector},
        "status": status,
    }


def budget(selector: object, **status: object) -> Budget:
    return budget_of(
        msgspec.json.decode(json.dumps(written(selector, **status)), type=BudgetObject)
    )


def expression(key: str, operator: str, *values: str) -> dict[str, Any]:
    return {"matchExpressions": [{"key": key, "operator": operator, "values": values or None}]}


@pytest.mark.parametrize(
    ("selector", "counts"),
    [
        ({"matchLabels": {"app": "web"}}, True),
        ({"matchLabels": {"app": "web", "tier": "back"}}, False),
        ({"matchLabels": {"app": "web"}, **expression("tier", "In", "back")}, False),
        (expression("app", "In", "api", "web"), True),
        (expression("app", "In", "api"), False),
        (expression("app", "NotIn", "api"), True),
        (expression("app", "NotIn", "web"), False),
        (expression("other", "NotIn", "web"), True),
        (expression("other", "In", "web"), False),
        (expression("app", "Exists"), True),
        (expression("other", "Exists"), False),
        (expression("other", "DoesNotExist"), True),
        (expression("app", "DoesNotExist"), False),
        (expression("app", "Unknown", "web"), False),
        ({}, False),
        (None, False),
    ],
    ids=json.dumps,
)
def test_a_selector_is_read_as_kube_scheduler_reads_it(selector: object, counts: bool) -> None:  # noqa: FBT001
    assert budget(selector).counts(protected()) == counts


def test_others_are_not_protected_by_it() -> None:
    every = budget({"matchLabels": {"app": "web"}}, disruptedPods={"gone": None})
    assert every.counts(protected())
    assert not every.counts(protected(namespace="other"))
    assert not every.counts(protected("gone"))
    assert not budget(expression("app", "DoesNotExist")).counts(
        Protected(namespace="ml", name="bare", labels={})
    )


@given(allowed=st.integers(-1, 5), number=st.integers(0, 8), others=st.integers(0, 3))
def test_so_many_go_against_it_as_are_more_than_it_allows(
    allowed: int, number: int, others: int
) -> None:
    pods = [protected(f"p{each}") for each in range(number)]
    pods += [protected(f"o{each}", app="api") for each in range(others)]
    one = budget({"matchLabels": {"app": "web"}}, disruptionsAllowed=allowed)
    assert sum(against(pods, [one])) == max(0, number - max(0, allowed))
    # One pod is one, however many budgets protect it.
    assert against(pods, [one, one]) == against(pods, [one])


def test_budgets_are_followed_and_nothing_is_said_before() -> None:
    server = Server()
    followed = FollowedBudgets(server.client(), backoff=impatient())
    server.lists.append(listed(written({"matchLabels": LABELS}, disruptionsAllowed=0)))
    server.new_watch()
    assert followed.against([protected()]) is None

    async def test() -> None:
        await until(lambda: followed.is_synced)
        assert followed.against([protected(), protected("q", app="x")]) == (True, False)

    run(followed.run(), test())
    assert server.requests[0].path == "/apis/policy/v1/poddisruptionbudgets"
