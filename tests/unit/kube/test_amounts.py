# SPDX-License-Identifier: Apache-2.0
"""CPU and memory as kube-scheduler counts them (component-helpers resource/helpers.go)."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from allotment.kube.objects import PodObject, amounts, requests_of


def pod(spec: dict[str, Any], status: dict[str, Any] | None = None) -> PodObject:
    document = {"metadata": {}, "spec": spec, "status": status or {}}
    return msgspec.json.decode(json.dumps(document), type=PodObject)


def container(name: str = "main", cpu: str = "", memory: str = "", **more: Any) -> dict[str, Any]:  # noqa: ANN401
    asked = {key: value for key, value in (("cpu", cpu), ("memory", memory)) if value}
    return {"name": name, "resources": {"requests": asked}, **more}


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ({"cpu": "500m"}, (500, 0)),
        ({"cpu": "1.5", "memory": "1Gi"}, (1500, 1 << 30)),
        ({"cpu": "100u"}, (1, 0)),  # MilliValue rounds up
        ({"memory": "100m"}, (0, 1)),  # so does Value
        ({"memory": "1e3"}, (0, 1000)),
        ({"cpu": "-1", "memory": "much"}, (0, 0)),
        (None, (0, 0)),
    ],
)
def test_quantities_are_rounded_up(written: dict[str, str], expected: tuple[int, int]) -> None:
    assert amounts(written) == expected


def test_containers_are_added_and_init_containers_are_not() -> None:
    spec = {
        "initContainers": [container("i1", "3", "1Gi"), container("i2", "1", "9Gi")],
        "containers": [container("a", "1", "2Gi"), container("b", "1", "2Gi")],
    }
    assert requests_of(pod(spec)) == (3000, 9 << 30)


def test_sidecars_run_beside_all_that_follow() -> None:
    spec = {
        "initContainers": [
            container("i1", "5"),
            container("s1", "2", restartPolicy="Always"),
            container("i2", "4"),
            container("s2", "1", restartPolicy="Always"),
        ],
        "containers": [container("a", "2")],
    }
    assert requests_of(pod(spec))[0] == 6000  # i2 beside s1; regular: 2 + 2 + 1
    spec["containers"] = [container("a", "4")]
    assert requests_of(pod(spec))[0] == 7000


def test_what_is_given_for_the_pod_as_a_whole_goes_before_its_containers() -> None:
    spec = {
        "resources": {"requests": {"cpu": "9"}},
        "overhead": {"cpu": "250m", "memory": "64Mi"},
        "containers": [container("a", "1", "1Gi")],
    }
    assert requests_of(pod(spec)) == (9250, (1 << 30) + (64 << 20))


def test_a_container_that_is_being_resized_counts_with_the_most() -> None:
    in_force = {
        "name": "a",
        "resources": {"requests": {"cpu": "3"}},
        "allocatedResources": {"cpu": "2"},
    }
    spec = {"containers": [container("a", "1")]}
    assert requests_of(pod(spec, {"containerStatuses": [in_force]}))[0] == 3000


@given(
    st.lists(st.tuples(st.integers(0, 9), st.booleans()), max_size=5),
    st.lists(st.integers(0, 9), max_size=4),
)
def test_it_is_the_most_that_runs_at_once(init: list[tuple[int, bool]], regular: list[int]) -> None:
    spec = {
        "initContainers": [
            container(f"i{place}", str(cpu), **({"restartPolicy": "Always"} if stays else {}))
            for place, (cpu, stays) in enumerate(init)
        ],
        "containers": [container(f"c{place}", str(cpu)) for place, cpu in enumerate(regular)],
    }
    most = beside = 0
    for cpu, stays in init:
        most = max(most, beside + cpu)
        beside += cpu if stays else 0
    most = max(most, beside + sum(regular))
    assert requests_of(pod(spec))[0] == 1000 * most
