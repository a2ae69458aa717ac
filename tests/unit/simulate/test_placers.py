# SPDX-License-Identifier: Apache-2.0
"""What decides in a replay gives nothing that is not there, and what the scheduler would give."""

from collections.abc import Sequence

import pytest
from bench.scheduler.trace_needs import need_of
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from allotment.placement.cluster.cluster import Cluster
from allotment.placement.explain import Refusal
from allotment.placement.policies import POLICIES, make
from allotment.simulate.csv_files import Trace, TraceNode, TracePod, TraceShape, capacity_milli
from allotment.simulate.placers import (
    ArrayPlacer,
    Spot,
    inventory_of,
    with_gpu_memory,
    without_gpu_memory,
)
from allotment.simulate.workloads import drawn, generate

LEARNT = sorted(POLICIES)
STEADY = [name for name in LEARNT if name != "random"]
"""Policies whose answers do not depend on how often they are asked."""


def placer(trace: Trace, policy: str, *, seed: int = 1) -> ArrayPlacer:
    return ArrayPlacer(trace.nodes, make(policy, seed=seed), pods=trace.pods)


def small(*, seed: int, has_memory: bool) -> Trace:
    trace = generate(seed=seed, scale=0.01, constrained=0.3)
    return with_gpu_memory(trace) if has_memory else without_gpu_memory(trace)


def workload(trace: Trace, *, tune: float = 1.3, seed: int = 1) -> Sequence[TracePod]:
    capacity = capacity_milli(trace.nodes)
    return drawn(trace.pods, capacity_milli=capacity, tune=tune, seed=seed)


@pytest.mark.parametrize("policy", LEARNT)
@pytest.mark.parametrize("has_memory", [False, True], ids=["time", "time and memory"])
def test_nothing_is_given_that_is_not_there(policy: str, *, has_memory: bool) -> None:
    trace = small(seed=3, has_memory=has_memory)
    tried = placer(trace, policy)
    given_milli = refused = 0
    for pod in workload(trace):
        tried.arrived(pod)
        spot = tried.place(pod)
        if spot is None:
            refused += 1
            continue
        tried.book(spot)  # raises if it is not there
        given_milli += pod.shape.size_milli
        assert trace.nodes[spot.node].model in (pod.shape.models or {trace.nodes[spot.node].model})
        assert len(set(spot.devices)) == pod.shape.gpus
    tried.check_invariants()
    assert 0.7 * capacity_milli(trace.nodes) < given_milli <= capacity_milli(trace.nodes)
    assert refused


@pytest.mark.parametrize("policy", STEADY)
@pytest.mark.parametrize("has_memory", [False, True], ids=["time", "time and memory"])
def test_the_schedulers_whole_way_gives_the_same(policy: str, *, has_memory: bool) -> None:
    trace = small(seed=5, has_memory=has_memory)
    tried = placer(trace, policy)
    cluster = Cluster(node_policies=(policy,), device_policies=(policy,))
    for node in trace.nodes:
        cluster.put(inventory_of(node))
    for number, pod in enumerate(workload(trace)):
        need = need_of(pod, uid=str(number))
        tried.arrived(pod)
        cluster.arrived(need)
        spot = tried.place(pod)
        names = cluster.rank(need, most=1).best
        assert names == ([] if spot is None else [trace.nodes[spot.node].name])
        if spot is None:
            continue
        booking = cluster.place(need, names[0])
        assert not isinstance(booking, Refusal)
        devices = [each.uuid for container in booking.containers for each in container.devices]
        assert devices == [f"{names[0]}/{column}" for column in spot.devices]
        tried.book(spot)
        cluster.book(booking)
    tried.check_invariants()
    cluster.check_invariants()


@settings(max_examples=examples(1 / 2))
@given(data=st.data(), policy=st.sampled_from(LEARNT), has_memory=st.booleans())
def test_what_is_given_back_is_there_again(
    data: st.DataObject, *, policy: str, has_memory: bool
) -> None:
    trace = small(seed=7, has_memory=has_memory)
    tried = placer(trace, policy)
    pods = list(workload(trace, tune=0.3))
    at_first = tried.fragmented_milli()
    there: list[Spot] = []
    for pod in pods:
        spot = tried.place(pod)
        if spot is not None:
            tried.book(spot)
            there.append(spot)
        leaves = data.draw(st.booleans())
        if there and leaves:
            tried.release(there.pop(data.draw(st.integers(0, len(there) - 1))))
    tried.check_invariants()
    for spot in there:
        tried.release(spot)
    tried.check_invariants()
    assert tried.fragmented_milli() == pytest.approx(at_first)


def node(*, gpus: int = 2, cpu_milli: int = 8000, model: str = "T4") -> TraceNode:
    return TraceNode(name="n", cpu_milli=cpu_milli, memory_mib=100, gpus=gpus, model=model)


def pod(*, gpus: int = 1, milli: int = 500, **more: int) -> TracePod:
    cpu_milli, memory_mib = more.get("cpu_milli", 1000), more.get("memory_mib", 10)
    shape = TraceShape(cpu_milli=cpu_milli, gpus=gpus, gpu_milli=milli if gpus else 0)
    return TracePod(name="p", shape=shape, memory_mib=memory_mib)


@pytest.mark.parametrize(
    ("asked", "devices"),
    [
        (pod(), (0, 0)),
        (pod(gpus=2), (0,)),
        (pod(gpus=0), (0,)),
        (pod(milli=600), (0,)),
        (pod(cpu_milli=9000), (0,)),
        (pod(memory_mib=200), (0,)),
    ],
    ids=["twice", "too few", "without GPUs", "too much of one", "CPU", "memory"],
)
def test_a_choice_that_is_wrong_is_not_booked(asked: TracePod, devices: tuple[int, ...]) -> None:
    tried = ArrayPlacer([node()], make("first-fit"), pods=[asked])
    tried.book(Spot(pod(), 0, (0,)))
    with pytest.raises(ValueError, match="Spot"):
        tried.book(Spot(asked, 0, devices))
    tried.check_invariants()


def test_what_a_node_could_take_when_it_is_empty() -> None:
    tried = ArrayPlacer([node()], make("first-fit"), pods=[pod()])
    tried.book(Spot(pod(gpus=2, milli=1000), 0, (0, 1)))
    assert tried.place(pod()) is None
    assert tried.fits_when_empty(pod())
    assert not tried.fits_when_empty(pod(gpus=3))
    assert not tried.fits_when_empty(pod(cpu_milli=8001))


def test_fragments_are_what_the_mix_cannot_use() -> None:
    """Of two free GPUs: all for a pod without GPUs, half of one that is half given, ..."""
    mix = [pod(gpus=0), pod(milli=1000), pod(milli=500), pod(gpus=2, milli=1000)]
    tried = ArrayPlacer([node()], make("first-fit"), pods=mix)
    assert tried.fragmented_milli() == 2000 / 4
    tried.book(Spot(pod(), 0, (0,)))
    # None: 1500, whole: 500, half: 0, two whole ones: 1500.
    assert tried.fragmented_milli() == (1500 + 500 + 0 + 1500) / 4
