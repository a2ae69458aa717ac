# SPDX-License-Identifier: Apache-2.0
"""Every policy keeps to the protocol; and each likes what it says that it likes."""

from collections.abc import Iterable
from fractions import Fraction

import numpy as np
import pytest
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from allotment.model.errors import UsageError
from allotment.model.modes import EXCLUSIVE, SOFT
from allotment.placement.cluster.arrays import Arrays, LinkArray, PodShape
from allotment.placement.policies import POLICIES, Policy, best, choose_on, make
from allotment.placement.policies.fgd import Fgd, fragmentation
from allotment.placement.policies.mixes import Mix
from allotment.placement.views import DeviceRoom

GIB = 2**30
DETERMINED = sorted(set(POLICIES) - {"random"})

kinds = st.builds(
    PodShape,
    cpu_milli=st.sampled_from([0, 1000, 4000]),
    count=st.sampled_from([0, 1, 1, 1, 2, 4]),
    guarantee=st.sampled_from([0, 1500, 4700, 10_000]),
    device_memory_bytes=st.sampled_from([0, 3 * GIB, 9 * GIB]),
    models=st.sampled_from([None, frozenset({"T4"}), frozenset({"A10", "T4"})]),
    mode=st.sampled_from([SOFT, SOFT, EXCLUSIVE]),
)
parts = st.builds(PodShape, count=st.just(1), device_memory_part=st.just(Fraction(1, 4)))
devices = st.builds(
    DeviceRoom,
    model=st.sampled_from(["T4", "A10"]),
    memory=st.just(16 * GIB),
    free=st.sampled_from([0, 2500, 5300, 10_000]),
    free_memory=st.sampled_from([0, 4 * GIB, 16 * GIB]),
    modes=st.sampled_from([frozenset({SOFT}), frozenset({SOFT, EXCLUSIVE}), frozenset()]),
    numa_node=st.sampled_from([None, 0, 1]),
)
nodes = st.lists(
    st.tuples(st.sampled_from([0, 3000, 9000]), st.lists(devices, max_size=4)), max_size=6
)


def built(nodes: Iterable[tuple[int, list[DeviceRoom]]]) -> Arrays:
    arrays = Arrays()
    for number, (cpu, rooms) in enumerate(nodes):
        arrays.put(f"n{number}", rooms, cpu_free=cpu, memory_free=GIB)
    return arrays


def room(free: int = 10_000, *, model: str = "T4", numa: int | None = None) -> DeviceRoom:
    memory = 16 * GIB * free // 10_000
    return DeviceRoom(model=model, memory=16 * GIB, free=free, free_memory=memory, numa_node=numa)


def share(guarantee: int = 2000, *, count: int = 1) -> PodShape:
    return PodShape(count=count, guarantee=guarantee)


def chosen(
    policy: Policy, kind: PodShape, *nodes: list[DeviceRoom], links: LinkArray | None = None
) -> tuple[str, tuple[int, ...]] | None:
    arrays = Arrays()
    for number, rooms in enumerate(nodes):
        arrays.put(f"n{number}", rooms, cpu_free=64_000, memory_free=GIB, links=links)
    choice = best(policy, arrays, kind)
    return choice and (arrays.names[choice.row], choice.columns)


@pytest.mark.parametrize("name", sorted(POLICIES))
@given(nodes=nodes, came=st.lists(kinds, max_size=8), kind=kinds | parts)
def test_a_policy_chooses_what_fits_and_only_that(
    name: str, nodes: list[tuple[int, list[DeviceRoom]]], came: list[PodShape], kind: PodShape
) -> None:
    policy, arrays = make(name), built(nodes)
    for each in came:
        policy.arrived(each)
    fits = arrays.fitting(kind)
    costs = policy.costs(arrays, kind)
    assert np.isfinite(costs).tolist() == fits.tolist()
    assert not np.isnan(costs).any()
    for row in fits.nonzero()[0].tolist():
        order = policy.device_order(arrays, kind, row)
        assert sorted(order) == arrays.serving(kind, np.array([row]))[0].nonzero()[0].tolist()
        assert len(choose_on(policy, arrays, kind, row)) == kind.count
    choice = best(policy, arrays, kind)
    assert (choice is not None) == bool(fits.any())


@pytest.mark.parametrize("name", DETERMINED)
@given(nodes=nodes, came=st.lists(kinds, min_size=1, max_size=8), kind=kinds)
@settings(max_examples=examples(1 / 2))
def test_some_rows_cost_what_they_cost_among_all(
    name: str, nodes: list[tuple[int, list[DeviceRoom]]], came: list[PodShape], kind: PodShape
) -> None:
    policy, arrays = make(name), built(nodes)
    for each in came:
        policy.arrived(each)
    rows = np.arange(len(arrays))[::2]
    some, all_costs = policy.costs(arrays, kind, rows), policy.costs(arrays, kind)
    assert some.tolist() == all_costs[rows].tolist()


@pytest.mark.parametrize("name", DETERMINED)
@given(nodes=nodes, came=st.lists(kinds, min_size=1, max_size=8), kind=kinds, more=kinds)
@settings(max_examples=examples(1 / 2))
def test_what_is_kept_is_what_would_be_worked_out_anew(
    name: str,
    nodes: list[tuple[int, list[DeviceRoom]]],
    came: list[PodShape],
    kind: PodShape,
    more: PodShape,
) -> None:
    old, arrays = make(name), built(nodes)
    mix = dict.fromkeys(came, 1.0)
    old.expect(mix)
    old.costs(arrays, kind)
    old.costs(arrays, more)
    for number, (cpu, rooms) in enumerate(nodes[:3]):
        # Others than before, in the same place.
        arrays.put(f"n{number}", rooms[::-1], cpu_free=max(0, cpu - 1500), memory_free=GIB)
    arrays.put("one-more", [room()] * 2, cpu_free=5000, memory_free=GIB)
    arrays.drop("n1")
    new = make(name)
    new.expect(mix)
    np.testing.assert_allclose(old.costs(arrays, kind), new.costs(arrays, kind), rtol=1e-5)
    for row in arrays.fitting(kind).nonzero()[0].tolist():
        assert old.device_order(arrays, kind, row) == new.device_order(arrays, kind, row)


@pytest.mark.parametrize("name", DETERMINED)
def test_equals_go_to_the_first_name_whatever_came_first(name: str) -> None:
    for names in (("a", "b", "c"), ("c", "a", "b"), ("b", "c", "a")):
        arrays = Arrays()
        for each in names:
            arrays.put(each, [room()] * 4, cpu_free=8000, memory_free=GIB)
        policy = make(name)
        for kind in (share(), share(10_000), share(count=2)):
            policy.arrived(kind)
        choice = best(policy, arrays, share())
        assert choice is not None
        assert arrays.names[choice.row] == "a"


def test_nothing_is_chosen_of_nothing() -> None:
    assert best(make("binpack"), Arrays(), share()) is None


def test_an_unknown_policy_is_refused_with_those_there_are() -> None:
    with pytest.raises(UsageError, match="unknown policy 'bestest'") as caught:
        make("bestest")
    assert "fragmentation" in str(caught.value.hint)


def test_names_are_those_of_the_policies() -> None:
    assert {name: make(name).name for name in POLICIES} == {name: name for name in POLICIES}


def test_binpack_takes_the_fullest_node_and_the_fullest_device_that_fit() -> None:
    part, full = [room(), room(3000), room(2500)], [room(1000)]
    assert chosen(make("binpack"), share(), [room()], full, part) == ("n0", (0,))
    assert chosen(make("binpack"), share(), [room()] * 2, full, part) == ("n2", (2,))


def test_spread_takes_the_emptiest() -> None:
    assert chosen(make("spread"), share(), [room(3000)], [room(4000), room(5000)]) == ("n1", (1,))


def test_first_fit_takes_the_first() -> None:
    assert chosen(make("first-fit"), share(), [room(1000)], [room(), room(2500)]) == ("n1", (0,))


def test_random_choice_is_the_same_for_a_seed_and_not_for_all() -> None:
    def of(seed: int) -> list[tuple[str, tuple[int, ...]] | None]:
        policy = make("random", seed=seed)
        return [chosen(policy, share(), *[[room()] * 4] * 4) for _ in range(8)]

    assert of(1) == of(1)
    assert len({tuple(of(seed)) for seed in range(8)}) > 1


def test_numa_takes_devices_of_one_numa_node() -> None:
    apart = [room(numa=0), room(numa=1)]
    mixed = [room(numa=0), room(numa=1), room(3000, numa=1)]
    assert chosen(make("numa"), share(count=2), apart, mixed) == ("n1", (1, 2))


def test_numa_counts_devices_without_a_known_numa_node_as_far() -> None:
    assert chosen(make("numa"), share(count=2), [room(), room(), room(numa=1), room(numa=1)]) == (
        "n0",
        (2, 3),
    )


def test_topology_takes_the_devices_with_the_best_links() -> None:
    links = np.full((4, 4), 10, dtype=np.float32)
    links[1, 3] = links[3, 1] = 200
    assert chosen(make("topology"), share(count=2), [room()] * 4, links=links) == ("n0", (1, 3))


def test_topology_gives_a_single_pod_the_device_with_the_worst_links() -> None:
    links = np.full((3, 3), 100, dtype=np.float32)
    links[2, :] = links[:, 2] = 10
    assert chosen(make("topology"), share(), [room()] * 3, links=links) == ("n0", (2,))


def test_topology_finds_near_devices_among_too_many_to_try_all_sets() -> None:
    links = np.full((16, 16), 10, dtype=np.float32)
    near = [1, 2, 4, 7, 8, 11, 13, 14]
    links[np.ix_(near, near)] = 100
    assert chosen(make("topology"), share(count=8), [room()] * 16, links=links) == (
        "n0",
        tuple(near),
    )


def test_fragmentation_of_a_node_by_hand() -> None:
    arrays = Arrays()
    arrays.put("a", [room(3000), room(8000)], cpu_free=4000, memory_free=GIB)
    half, large = (
        PodShape(count=1, guarantee=5000),
        PodShape(count=1, guarantee=5000, cpu_milli=5000),
    )
    # The first device is too small for a half; where there is no CPU, all is lost.
    assert fragmentation(arrays, {half: 1.0}).tolist() == [3000]
    assert fragmentation(arrays, {large: 1.0}).tolist() == [11_000]
    assert fragmentation(arrays, {half: 1.0, large: 1.0}).tolist() == [7000]
    assert fragmentation(arrays, {share(5000, count=2): 1.0}).tolist() == [11_000]


def test_fgd_does_not_break_a_device_that_whole_ones_want() -> None:
    policy = Fgd()
    policy.expect({share(10_000): 9.0, share(4000): 1.0})
    assert chosen(policy, share(4000), [room(), room(5000)]) == ("n0", (1,))


def test_fgd_goes_in_whole_steps_so_that_small_gains_are_equal() -> None:
    policy, arrays = Fgd(), Arrays()
    policy.expect({share(10_000): 1.0})
    for number, free in enumerate((5000, 4990)):
        arrays.put(f"n{number}", [room(free)], cpu_free=1000, memory_free=GIB)
    costs = policy.costs(arrays, share(100))
    assert costs.tolist() == [-50, -50]


def test_fgd_without_arrivals_is_first_fit() -> None:
    assert chosen(Fgd(), share(), [room(1000)], [room(), room(2500)]) == ("n1", (0,))


def test_typical_kinds_are_cut_where_they_make_up_enough_and_sum_to_one() -> None:
    mix = Mix()
    rare, small, large = (PodShape(count=1, guarantee=each) for each in (1000, 2000, 3000))
    same = PodShape(count=1, guarantee=3000, memory_bytes=GIB, device_memory_bytes=GIB)
    mix.expect({rare: 10.0, small: 45.0, large: 25.0, same: 20.0})
    assert [kind for kind, _ in mix.typical(0.95)] == [large, small, rare]
    assert mix.typical(0.9) == [(large, 0.5), (small, 0.5)]
