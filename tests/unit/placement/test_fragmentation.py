# SPDX-License-Identifier: Apache-2.0
"""The policy that prices places: slots as counted by hand, prices that do what they are for."""

from collections.abc import Iterable, Sequence
from fractions import Fraction
from math import floor
from random import Random
from typing import Any

import numpy as np
import pytest
from examples import examples
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from allotment.model.modes import EXCLUSIVE, SOFT
from allotment.placement.cluster.arrays import Arrays, PodShape
from allotment.placement.policies import Policy, best, make
from allotment.placement.policies.fragmentation import Fragmentation, Losses, SlotCounts
from allotment.placement.policies.mixes import Mix, shape_of
from allotment.placement.policies.slots import Types
from allotment.placement.views import DeviceRoom

GIB = 2**30
MODES = frozenset({SOFT, EXCLUSIVE})
WHOLE_ONE = PodShape(count=1, guarantee=10_000)

kinds = st.builds(
    PodShape,
    cpu_milli=st.sampled_from([0, 1000, 4000]),
    memory_bytes=st.sampled_from([0, GIB]),
    count=st.sampled_from([1, 1, 1, 2, 3]),
    guarantee=st.sampled_from([0, 1500, 4700, 10_000]),
    device_memory_bytes=st.sampled_from([0, 3 * GIB, 9 * GIB]),
    models=st.sampled_from([None, frozenset({"T4"})]),
    mode=st.sampled_from([SOFT, SOFT, EXCLUSIVE]),
)
devices = st.builds(
    DeviceRoom,
    model=st.sampled_from(["T4", "A10"]),
    memory=st.just(16 * GIB),
    free=st.sampled_from([0, 2500, 5300, 10_000]),
    free_memory=st.sampled_from([0, 4 * GIB, 16 * GIB]),
    modes=st.sampled_from([frozenset({SOFT}), MODES, frozenset()]),
)


def room(free: int = 10_000, *, model: str = "T4", free_memory: int | None = None) -> DeviceRoom:
    memory = 16 * GIB * free // 10_000 if free_memory is None else free_memory
    modes = MODES if free == 10_000 else frozenset({SOFT})
    return DeviceRoom(model=model, memory=16 * GIB, free=free, free_memory=memory, modes=modes)


def built(*nodes: Sequence[DeviceRoom], cpu: int = 64_000) -> Arrays:
    arrays = Arrays()
    for number, rooms in enumerate(nodes):
        arrays.put(f"n{number}", rooms, cpu_free=cpu, memory_free=64 * GIB)
    return arrays


def chosen(
    arrays: Arrays, kind: PodShape, mix: dict[PodShape, float]
) -> tuple[str, tuple[int, ...]]:
    policy = Fragmentation()
    policy.expect(mix)
    choice = best(policy, arrays, kind)
    assert choice is not None
    return arrays.names[choice.row], choice.columns


def taken(device: DeviceRoom, kind: PodShape) -> DeviceRoom:
    """Return the device with one more share, as `Cluster` would write it."""
    if kind.mode == EXCLUSIVE:
        return DeviceRoom(
            model=device.model, memory=device.memory, free=0, free_memory=0, modes=frozenset()
        )
    return DeviceRoom(
        model=device.model,
        memory=device.memory,
        free=device.free - kind.guarantee,
        free_memory=device.free_memory - kind.device_memory_bytes,
        shares=device.shares + 1,
        modes=device.modes & {SOFT},
    )


def part_by_hand(device: DeviceRoom, kind: PodShape) -> float:
    if kind.mode not in device.modes or (kind.models and device.model not in kind.models):
        return 0.0
    ratios = [64.0]
    if kind.guarantee:
        ratios.append(device.free / kind.guarantee)
    if kind.device_memory_bytes:
        ratios.append(device.free_memory / kind.device_memory_bytes)
    ratio = min(ratios)
    if kind.count > 1 or kind.mode == EXCLUSIVE or kind.guarantee == 10_000:
        return float(ratio >= 1)
    return 0.7 * ratio + 0.3 * floor(ratio)


def slots_by_hand(
    rooms: Iterable[DeviceRoom], kind: PodShape, *, cpu: float, memory: float
) -> float:
    parts = sum(part_by_hand(each, kind) for each in rooms)
    slots = floor(parts / kind.count) if kind.count > 1 else parts
    if kind.cpu_milli:
        slots = min(slots, cpu / kind.cpu_milli)
    if kind.memory_bytes:
        slots = min(slots, memory / kind.memory_bytes)
    return slots


@given(
    nodes=st.lists(st.lists(devices, max_size=5), min_size=1, max_size=4),
    typical=st.lists(kinds, min_size=1, max_size=5, unique=True),
    cpu=st.sampled_from([0, 2500, 64_000]),
)
def test_slots_are_those_counted_by_hand(
    nodes: list[list[DeviceRoom]], typical: list[PodShape], cpu: int
) -> None:
    arrays = built(*nodes, cpu=cpu)
    ledger = SlotCounts(arrays, Types(typical, arrays))
    ledger.renew()
    expected = [
        [slots_by_hand(rooms, kind, cpu=cpu, memory=64 * GIB) for kind in typical]
        for rooms in nodes
    ]
    np.testing.assert_allclose(ledger.slots, expected, rtol=1e-5)
    np.testing.assert_allclose(ledger.total, np.sum(expected, axis=0), rtol=1e-5)


@given(
    rooms=st.lists(devices, min_size=1, max_size=5),
    typical=st.lists(kinds, min_size=1, max_size=5, unique=True),
    kind=kinds,
)
@settings(max_examples=examples(2))
def test_a_loss_is_what_slots_there_are_less_after_it_was_placed(
    rooms: list[DeviceRoom], typical: list[PodShape], kind: PodShape
) -> None:
    arrays = built(rooms)
    assume(arrays.fitting(kind)[0])
    ledger = SlotCounts(arrays, Types(typical, arrays))
    ledger.renew()
    losses = Losses(kind, ledger)
    losses.renew()
    before = ledger.total.copy()
    for price in np.eye(len(typical)):
        for choice in losses.choices(0, price):
            after = list(rooms)
            for column in choice:
                after[column] = taken(after[column], kind)
            arrays = Arrays()
            arrays.put(
                "n0",
                after,
                cpu_free=64_000 - kind.cpu_milli,
                memory_free=64 * GIB - kind.memory_bytes,
            )
            later = SlotCounts(arrays, Types(typical, arrays))
            later.renew()
            told = losses.lost(np.array([0]), np.array([choice]))[0]
            np.testing.assert_allclose(told, before - later.total, atol=1e-4)
        cheapest = losses.choices(0, price)[0]
        cost = losses.lost(np.array([0]), np.array([cheapest]))[0] @ price
        assert losses.costs(price)[0] == pytest.approx(cost, abs=1e-4)


@given(
    nodes=st.lists(st.lists(devices, max_size=5), min_size=1, max_size=6),
    copies=st.integers(1, 3),
    typical=st.lists(kinds, min_size=1, max_size=5, unique=True),
    kind=kinds,
)
def test_equal_nodes_and_devices_are_judged_as_if_each_were_alone(
    nodes: list[list[DeviceRoom]], copies: int, typical: list[PodShape], kind: PodShape
) -> None:
    prices = np.linspace(0.1, 1, len(typical))

    def judged(arrays: Arrays) -> list[tuple[float, list[tuple[int, ...]]]]:
        ledger = SlotCounts(arrays, Types(typical, arrays))
        ledger.renew()
        losses = Losses(kind, ledger)
        losses.renew()
        costs = losses.costs(prices).tolist()
        return [(cost, losses.choices(row, prices)) for row, cost in enumerate(costs)]

    alone = [judged(built(rooms))[0] for rooms in nodes]
    assert judged(built(*nodes * copies)) == alone * copies


events: st.SearchStrategy[tuple[str, Any, list[DeviceRoom]]] = st.one_of(
    st.tuples(st.just("put"), st.integers(0, 3), st.lists(devices, max_size=4)),
    st.tuples(st.just("drop"), st.integers(0, 3), st.just([])),
    st.tuples(st.just("ask"), kinds, st.just([])),
)


@given(happened=st.lists(events, min_size=1, max_size=25), asked=kinds)
@settings(max_examples=examples(2))
def test_what_is_kept_gives_what_a_new_policy_gives(
    happened: list[tuple[str, Any, list[DeviceRoom]]], asked: PodShape
) -> None:
    mix = {WHOLE_ONE: 2.0, PodShape(count=1, guarantee=2500): 1.0}
    arrays, old, new = Arrays(), Fragmentation(), Fragmentation()
    for policy in (old, new):
        policy.expect(mix)
    for event, what, rooms in happened:
        if event == "put":
            arrays.put(f"n{what}", rooms, cpu_free=64_000, memory_free=64 * GIB)
        elif event == "drop":
            arrays.drop(f"n{what}")
        else:
            old.costs(arrays, what)
        arrays.check_invariants()
    assert old.costs(arrays, asked).tolist() == pytest.approx(new.costs(arrays, asked).tolist())
    for row in arrays.rows.tolist():
        assert set(old.device_order(arrays, asked, row)) == set(
            new.device_order(arrays, asked, row)
        )


def test_a_share_goes_beside_another_where_whole_gpus_are_wanted() -> None:
    mix = {WHOLE_ONE: 1.0, PodShape(count=1, guarantee=4000): 1.0}
    arrays = built([room()] * 2, [room(), room(4000)])
    assert chosen(arrays, PodShape(count=1, guarantee=4000), mix) == ("n1", (1,))


def test_a_single_gpu_is_not_taken_from_a_node_that_a_large_pod_wants() -> None:
    mix = {WHOLE_ONE: 100.0, PodShape(count=4, guarantee=10_000): 1.0}
    arrays = built([room()] * 4, [room()] * 3)
    assert chosen(arrays, WHOLE_ONE, mix) == ("n1", (0,))


def test_a_model_that_others_must_have_is_left_to_them() -> None:
    bound = PodShape(count=1, guarantee=10_000, models=frozenset({"A10"}))
    arrays = built([room(model="A10")], [room(model="T4")], [room(model="T4")])
    assert chosen(arrays, WHOLE_ONE, {WHOLE_ONE: 5.0, bound: 1.0})[0] == "n1"
    # Where those without a choice never come, the name decides.
    assert chosen(arrays, WHOLE_ONE, {WHOLE_ONE: 5.0})[0] == "n0"


def test_memory_counts_where_shares_are_bound_by_it() -> None:
    kind = PodShape(count=1, guarantee=1000, device_memory_bytes=4 * GIB)
    mix = {PodShape(count=1, guarantee=1000, device_memory_bytes=6 * GIB): 1.0}
    # 9 GiB less 4 take the only 6 GiB there are; of 5 GiB nobody could have used anything.
    arrays = built([room(9000, free_memory=9 * GIB)], [room(9000, free_memory=5 * GIB)])
    assert chosen(arrays, kind, mix)[0] == "n1"


def test_a_part_of_memory_counts_like_bytes() -> None:
    quarter = PodShape(count=1, device_memory_part=Fraction(1, 4))
    whole = PodShape(count=1, device_memory_part=Fraction(1))
    arrays = built([room(free_memory=16 * GIB), room(free_memory=6 * GIB)])
    assert chosen(arrays, quarter, {quarter: 1.0, whole: 1.0})[1] == (1,)


def test_before_any_arrival_it_keeps_whole_devices_and_whole_nodes() -> None:
    arrays = built([room()] * 8, [room()] * 3, [room()] * 2, [room(5000)])
    assert best(Fragmentation(), arrays, PodShape(count=1, guarantee=3000)) == (3, (0,))
    # Of three, two are left: who wants two, four or eight loses nothing.
    assert best(Fragmentation(), arrays, WHOLE_ONE) == (1, (0,))
    assert best(Fragmentation(), arrays, PodShape(count=2, guarantee=10_000)) == (1, (0, 1))


def test_where_there_is_no_device_it_packs() -> None:
    arrays = Arrays()
    arrays.put("a", [], cpu_free=8000, memory_free=GIB)
    arrays.put("b", [], cpu_free=4000, memory_free=GIB)
    assert best(Fragmentation(), arrays, PodShape(cpu_milli=1000)) == (1, ())


def test_what_comes_is_learnt() -> None:
    bound = PodShape(count=1, guarantee=10_000, models=frozenset({"A10"}))
    arrays = built([room(model="A10")], [room(model="T4")])
    policy = Fragmentation()
    for _ in range(3):
        policy.arrived(WHOLE_ONE)
    first = best(policy, arrays, WHOLE_ONE)
    for _ in range(3):
        policy.arrived(bound)
    second = best(policy, arrays, WHOLE_ONE)
    assert first is not None
    assert second is not None
    assert (first.row, second.row) == (0, 1)


def test_choices_that_a_node_had_are_forgotten_when_it_changes() -> None:
    share = PodShape(count=1, guarantee=3000)
    mix = {WHOLE_ONE: 1.0, share: 1.0}
    arrays = built([room(), room(3000)], [room(4000), room(9000)])
    old, new = Fragmentation(), Fragmentation()
    for policy in (old, new):
        policy.expect(mix)
    old.costs(arrays, share)
    arrays.update(0, {1: room(0)}, cpu_free=64_000, memory_free=GIB)
    arrays.update(1, {0: room(0), 1: room(1000)}, cpu_free=64_000, memory_free=GIB)
    assert old.costs(arrays, share).tolist() == pytest.approx(new.costs(arrays, share).tolist())
    assert old.device_order(arrays, share, 0) == [0]


def test_a_node_that_is_again_as_it_was_is_looked_at_again() -> None:
    arrays, policy = built([room(3000)], [room()]), Fragmentation()
    policy.expect({WHOLE_ONE: 1.0})
    arrays.update(0, {0: room(0)}, cpu_free=64_000, memory_free=64 * GIB)
    assert best(policy, arrays, PodShape(count=1, guarantee=3000)) == (1, (0,))
    arrays.update(0, {0: room(3000)}, cpu_free=64_000, memory_free=64 * GIB)
    assert best(policy, arrays, PodShape(count=1, guarantee=3000)) == (0, (0,))


def test_another_cluster_is_looked_at_anew() -> None:
    policy = Fragmentation()
    policy.expect({WHOLE_ONE: 1.0})
    assert best(policy, built([room()]), WHOLE_ONE) == (0, (0,))
    assert best(policy, built([], [room()]), WHOLE_ONE) == (1, (0,))


def test_what_is_kept_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("allotment.placement.policies.fragmentation._MOST_BYTES", 20_000)
    policy, arrays = Fragmentation(), built(*([room(free)] * 2 for free in range(100, 5100, 100)))
    policy.expect({WHOLE_ONE: 1.0, PodShape(count=1, guarantee=2500): 1.0})
    for cpu in range(100):
        policy.costs(arrays, PodShape(count=1, guarantee=1000, cpu_milli=cpu))
    kept = policy._kept  # noqa: SLF001 - what is kept shows nowhere but in how fast it is
    assert 1 < len(kept) < 50
    assert sum(each.size for each in kept.values()) <= 20_000


def test_a_mix_forgets_by_half_lives() -> None:
    mix = Mix(half_life=10)
    early, late = PodShape(count=1, guarantee=1), PodShape(count=1, guarantee=5000)
    for kind in (early, late):
        for _ in range(10):
            mix.arrived(kind)
    counts = dict(mix.shapes(9))
    assert counts[late] == pytest.approx(2 * counts[early])


def test_a_mix_goes_on_when_its_step_has_grown_too_large() -> None:
    mix = Mix(half_life=2)
    one, two = WHOLE_ONE, PodShape(count=2, guarantee=10_000)
    for number in range(2000):
        mix.arrived(two if number % 2 else one)
    counts = dict(mix.shapes(9))
    assert counts[two] / counts[one] == pytest.approx(2**0.5)
    assert mix.step < 1e13


def test_a_known_mix_learns_nothing() -> None:
    mix = Mix()
    mix.expect({WHOLE_ONE: 3.0})
    epoch = mix.epoch
    for _ in range(100):
        mix.arrived(PodShape(count=1))
    assert (mix.typical(1.0), mix.epoch) == ([(WHOLE_ONE, 1.0)], epoch)


def test_a_mix_remembers_the_most_frequent_of_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("allotment.placement.policies.mixes._MOST_KINDS", 10)
    mix = Mix()
    for number in range(200):
        mix.arrived(WHOLE_ONE)
        mix.arrived(PodShape(count=1, guarantee=1, cpu_milli=number))
    (first, part), *others = mix.typical(1.0)
    assert first == WHOLE_ONE
    assert 0.4 < part < 1
    assert len(others) < 100


def test_shapes_bring_together_what_is_alike() -> None:
    mix = Mix()
    mix.expect(
        {
            PodShape(count=1, guarantee=5000, cpu_milli=4100): 2.0,
            PodShape(count=1, guarantee=5100, cpu_milli=5000): 3.0,
            PodShape(count=2, guarantee=5000, cpu_milli=5000): 1.0,
            PodShape(cpu_milli=5000): 9.0,
        }
    )
    assert mix.shapes(9) == [
        (PodShape(count=1, guarantee=5100, cpu_milli=5000), 5.0),
        (PodShape(count=2, guarantee=5000, cpu_milli=5000), 1.0),
    ]
    assert len(mix.shapes(1)) == 1


@pytest.mark.parametrize(
    "other",
    [
        PodShape(count=1, guarantee=5600),
        PodShape(count=1, guarantee=5000, models=frozenset({"T4"})),
        PodShape(count=1, guarantee=5000, mode=EXCLUSIVE),
        PodShape(count=1, guarantee=5000, device_memory_bytes=GIB),
        PodShape(count=1, guarantee=5000, device_memory_part=Fraction(1, 2)),
        PodShape(count=1, guarantee=5000, memory_bytes=GIB),
    ],
)
def test_shapes_tell_apart_what_matters(other: PodShape) -> None:
    assert shape_of(other) != shape_of(PodShape(count=1, guarantee=5000))


WANTED = {
    PodShape(cpu_milli=12_000): 10,
    PodShape(count=1, guarantee=8100, cpu_milli=3000): 14,
    PodShape(count=1, guarantee=4700, cpu_milli=10_000): 10,
    PodShape(count=1, guarantee=3200, cpu_milli=4000): 8,
    PodShape(count=1, guarantee=1600, cpu_milli=2000): 6,
    PodShape(count=1, guarantee=10_000, cpu_milli=12_000): 40,
    PodShape(count=1, guarantee=10_000, cpu_milli=8000, models=frozenset({"A10"})): 6,
    PodShape(count=8, guarantee=10_000, cpu_milli=32_000): 2,
}


def allocated(policy: Policy, seed: int) -> float:
    """Return which part of a small mixed cluster is given away when as much as it has was asked."""
    dice = Random(seed)  # noqa: S311 - no secret, only repeatable
    arrays = Arrays()
    for number in range(12):
        arrays.put(f"a{number:02}", [room()] * 8, cpu_free=96_000, memory_free=GIB)
    for number in range(24):
        arrays.put(f"b{number:02}", [room(model="A10")] * 2, cpu_free=48_000, memory_free=GIB)
    whole = int(arrays.free.sum())
    arrived = given_away = 0
    while arrived < whole:
        kind = dice.choices(list(WANTED), list(WANTED.values()))[0]
        arrived += kind.size
        policy.arrived(kind)
        choice = best(policy, arrays, kind)
        if choice is None:
            continue
        row = choice.row
        given_away += kind.size
        rooms = {}
        for column in choice.columns:
            model = arrays.model_names[arrays.model[row, column]]
            left = int(arrays.free[row, column]) - kind.guarantee
            rooms[column] = room(left, model=model)
        cpu = int(arrays.cpu_free[row]) - kind.cpu_milli
        arrays.update(row, rooms, cpu_free=cpu, memory_free=GIB)
    return given_away / whole


def test_it_gives_away_more_than_any_other_although_nobody_told_it_what_comes() -> None:
    names = ["fragmentation", "fgd", "binpack", "first-fit", "spread", "random"]
    means = {name: sum(allocated(make(name), seed) for seed in range(5)) / 5 for name in names}
    others = [means[name] for name in names[1:]]
    assert means["fragmentation"] > max(others) + 0.005, means


@settings(max_examples=examples(1 / 2))
@given(st.lists(st.lists(devices, min_size=1, max_size=3), min_size=1, max_size=3), kinds)
def test_a_place_costs_what_the_value_of_its_node_falls_by(
    nodes: list[list[DeviceRoom]], kind: PodShape
) -> None:
    """The figures of fragmentation are those that the policy decides by."""
    assume(kind.mode == SOFT and kind.count == 1 and kind.guarantee)
    arrays, policy = built(*nodes), Fragmentation()
    policy.expect({kind: 1.0})
    before = policy.standing(arrays)
    choice = best(policy, arrays, kind)
    assume(choice is not None)
    assert before is not None
    assert choice is not None
    assert before.kinds == (kind,)
    assert before.values.sum() == pytest.approx(float(before.slots[0] * before.prices[0]))
    cost = policy.costs(arrays, kind)[choice.row]
    (column,) = choice.columns
    changed = {column: taken(nodes[choice.row][column], kind)}
    left = int(arrays.cpu_free[choice.row]) - kind.cpu_milli
    memory = int(arrays.memory_free[choice.row]) - kind.memory_bytes
    arrays.update(choice.row, changed, cpu_free=left, memory_free=memory)
    after = policy.standing(arrays)
    assert after is not None
    at_same_price = after.values[choice.row] * before.prices[0] / after.prices[0]
    fallen = before.values[choice.row] - at_same_price
    assert fallen == pytest.approx(cost, rel=1e-4, abs=1e-6)
