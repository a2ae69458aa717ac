# SPDX-License-Identifier: Apache-2.0
"""What is replayed: how a trace's pods come, and what policies know of them."""

from collections import Counter

import pytest

from allotment.model.errors import UsageError
from allotment.simulate.csv_files import Trace, TraceNode, TracePod, TraceShape, capacity_milli
from allotment.simulate.placers import kind_of, with_gpu_memory, without_gpu_memory
from allotment.simulate.scenes import TraceScene, check_policies
from allotment.simulate.workloads import generate

TRACE = generate(seed=2, scale=0.01)


def test_nodes_without_gpus_are_refused() -> None:
    nodes = [TraceNode(name="n", cpu_milli=1, memory_mib=1, gpus=0)]
    with pytest.raises(UsageError, match="the nodes have no GPU"):
        TraceScene(trace=Trace(nodes, TRACE.pods))


def test_as_it_is_every_pod_comes_once() -> None:
    scene = TraceScene(trace=TRACE, tune=None)
    assert Counter(scene.pods(1)) == Counter(TRACE.pods)
    timed = TraceScene(trace=TRACE, tune=None, has_departures=True)
    assert [each.at_s for each in timed.visits(1)] == [each.created_s for each in TRACE.pods]


def test_tuned_they_ask_for_so_much() -> None:
    asked = sum(each.shape.size_milli for each in TraceScene(trace=TRACE, tune=0.5).pods(1))
    assert 0.5 <= asked / capacity_milli(TRACE.nodes) < 0.6


def test_a_policy_that_is_not_there() -> None:
    check_policies(["fgd", "random"])
    with pytest.raises(UsageError, match="unknown policy 'best'") as raised:
        check_policies(["fgd", "best"])
    assert "binpack" in (raised.value.hint or "")


def test_the_mix_is_learnt_or_known() -> None:
    """By default `fgd` knows it, as published: then it comes out as if that had been said."""
    stories = {
        known: TraceScene(trace=TRACE, is_mix_known=known).run("fgd", 1, lambda _: None).story
        for known in (None, True, False)
    }
    assert stories[None] == stories[True]
    assert stories[None] != stories[False]


def test_memory_of_gpus_as_it_is_or_made_up() -> None:
    shape = TraceShape(cpu_milli=1, gpus=1, gpu_milli=500)
    said = TraceShape(cpu_milli=1, gpus=1, gpu_milli=500, gpu_memory_mib=5000)
    pods = [
        TracePod(name="made up", shape=shape, memory_mib=1),
        TracePod(name="again", shape=shape, memory_mib=2),
        TracePod(name="said", shape=said, memory_mib=1),
    ]
    nodes = [TraceNode(name="n", cpu_milli=1, memory_mib=1, gpus=1, model="T4")]
    trace = with_gpu_memory(Trace(nodes, pods))
    assert trace.nodes[0].gpu_memory_mib == 16 << 10
    made_up, again, as_said = (kind_of(pod).device_memory_bytes >> 20 for pod in trace.pods)
    assert (16 << 10) / 4 <= made_up <= (16 << 10) * 3 / 4
    assert (again, as_said) == (made_up, 5000)
    without = [kind_of(pod) for pod in without_gpu_memory(trace).pods]
    assert [each.device_memory_bytes for each in without] == [0, 0, 0]
    assert [float(each.device_memory_part or 0) for each in without] == [0.5, 0.5, 0.5]
