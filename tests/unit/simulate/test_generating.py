# SPDX-License-Identifier: Apache-2.0
"""A made-up trace has the statistics that are published of the real one."""

from collections import Counter

import pytest

from allotment.model.structs import replace
from allotment.simulate.csv_files import Trace, capacity_milli
from allotment.simulate.workloads import generate


@pytest.fixture(scope="module")
def trace() -> Trace:
    return generate(seed=1)


def near(value: float, *, part: float = 0.03) -> object:
    return pytest.approx(value, rel=part)


def test_its_nodes(trace: Trace) -> None:
    nodes = trace.nodes
    assert len({node.name for node in nodes}) == 1213
    assert capacity_milli(nodes) == 6_212_000
    gpus: Counter[str] = Counter()
    for node in nodes:
        gpus[node.model] += node.gpus
    assert gpus == {
        "G2": 4392,
        "T4": 842,
        "G3": 312,
        "P100": 265,
        "V100M32": 204,
        "V100M16": 195,
        "A10": 2,
    }
    sizes = Counter(node.gpus for node in nodes)
    assert sizes == {8: 617, 4: 54, 2: 518, 1: 24}
    assert sum(node.cpu_milli for node in nodes) == near(107_018_000)
    assert sum(node.memory_mib for node in nodes) == near(503_828_480)


def test_its_pods(trace: Trace) -> None:
    pods = [pod.shape for pod in trace.pods]
    assert len({pod.name for pod in trace.pods}) == 8152
    sorts = Counter((pod.gpus, 0 < pod.gpu_milli < 1000) for pod in pods)
    assert sorts == {
        (0, False): 1088,
        (1, True): 3078,
        (1, False): 3911,
        (2, False): 16,
        (4, False): 15,
        (8, False): 44,
    }
    assert sum(pod.size_milli for pod in pods) == near(6_086_800)
    assert sum(pod.cpu_milli for pod in pods) == near(85_436_000)
    assert sum(bool(pod.models) for pod in pods) == near(0.1 * 7064, part=0.15)


def test_few_kinds_are_most_of_its_pods(trace: Trace) -> None:
    kinds = Counter(replace(pod.shape, models=(), gpu_memory_mib=None) for pod in trace.pods)
    assert 70 <= len(kinds) <= 100
    most = sum(count for _, count in kinds.most_common(50))
    assert most >= 0.95 * len(trace.pods)


@pytest.mark.parametrize("seed", range(4))
def test_every_pod_fits_on_some_empty_node(seed: int) -> None:
    made = generate(seed=seed, scale=0.05)
    for pod in {(each.shape, each.memory_mib) for each in made.pods}:
        shape, memory = pod
        assert any(
            node.cpu_milli >= shape.cpu_milli
            and node.memory_mib >= memory
            and node.gpus >= shape.gpus
            and (not shape.models or node.model in shape.models)
            and (node.gpu_memory_mib or 0) >= (shape.gpu_memory_mib or 0)
            for node in made.nodes
        ), pod


def test_the_same_seed_makes_the_same(trace: Trace) -> None:
    assert generate(seed=1) == trace
    assert generate(seed=2) != trace


def test_scale_and_constraints() -> None:
    small = generate(seed=1, scale=0.01, constrained=0)
    assert 10 <= len(small.nodes) <= 20
    assert 75 <= len(small.pods) <= 90
    assert not any(pod.shape.models for pod in small.pods)
    assert all(
        pod.shape.models
        for pod in generate(seed=1, scale=0.01, constrained=1).pods
        if pod.shape.gpus
    )
