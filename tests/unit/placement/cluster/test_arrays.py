# SPDX-License-Identifier: Apache-2.0
"""The cluster as arrays: what is written is what is read, whatever came before."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from allotment.model.clusters import PodNeed, WantedContainer
from allotment.model.modes import EXCLUSIVE, SOFT
from allotment.model.pods import PodUid
from allotment.model.quantities import MemoryAmount
from allotment.model.requests import Constraints, ModelRule, Request
from allotment.placement.cluster.arrays import Arrays, PodShape
from allotment.placement.cluster.filters import PodShapes
from allotment.placement.views import DeviceRoom

GIB = 2**30


def room(
    *,
    free: int = 10_000,
    memory: int = 16 * GIB,
    free_memory: int | None = None,
    model: str = "T4",
    modes: frozenset[str] = frozenset({SOFT, EXCLUSIVE}),
    shares: int = 0,
) -> DeviceRoom:
    left = memory if free_memory is None else free_memory
    return DeviceRoom(
        model=model, memory=memory, free=free, free_memory=left, modes=modes, shares=shares
    )


def put(arrays: Arrays, name: str, *devices: DeviceRoom, cpu: int = 64_000) -> int:
    return arrays.put(name, devices, cpu_free=cpu, memory_free=256 * GIB)


def test_nothing_fits_where_there_is_nothing() -> None:
    arrays = Arrays()
    assert len(arrays) == 0
    assert arrays.fitting(PodShape(count=1)).tolist() == []
    assert arrays.order.tolist() == []


def test_a_node_is_a_row_and_its_devices_are_columns() -> None:
    arrays = Arrays()
    row = put(arrays, "a", room(free=2500, free_memory=GIB, shares=3), room(model="A10"))
    assert arrays.names == ["a"]
    assert arrays.free[row].tolist() == [2500, 10_000]
    assert arrays.free_memory[row].tolist() == [GIB, 16 * GIB]
    assert arrays.idle[row].tolist() == [False, True]
    assert [arrays.model_names[code] for code in arrays.model[row]] == ["T4", "A10"]


def test_a_larger_node_makes_more_columns_and_changes_no_other() -> None:
    arrays = Arrays()
    small = put(arrays, "small", room(free=100))
    large = put(arrays, "large", *[room()] * 16)
    assert arrays.columns == 16
    assert arrays.free[small].tolist() == [100] + [0] * 15
    assert arrays.gpu_there.sum(axis=1).tolist() == [1, 16]
    assert arrays.fitting(PodShape(count=16, guarantee=10_000))[large]


def test_a_node_that_comes_back_smaller_has_nothing_of_before() -> None:
    arrays = Arrays()
    put(arrays, "a", *[room()] * 4)
    row = put(arrays, "a", room(model="A10"))
    assert arrays.gpu_there[row].tolist() == [True, False, False, False]
    assert arrays.model[row].tolist()[1:] == [-1, -1, -1]


def test_a_dropped_node_takes_nothing_and_its_row_is_used_again() -> None:
    arrays = Arrays()
    row = put(arrays, "a", room())
    arrays.drop("a")
    arrays.drop("a")
    assert not arrays.fitting(PodShape()).any()
    assert put(arrays, "b", room()) == row
    assert arrays.names == ["b"]


def test_each_change_raises_the_version_of_its_row_alone() -> None:
    arrays = Arrays()
    one, two = put(arrays, "a", room()), put(arrays, "b", room())
    before = arrays.version.copy()
    arrays.update(one, {0: room(free=1)}, cpu_free=1, memory_free=1)
    assert arrays.version[one] > before.max()
    assert arrays.version[two] == before[two]
    assert arrays.changes == arrays.version.max()
    arrays.update(two, {}, cpu_free=-5, memory_free=7)
    assert arrays.version[two] == arrays.changes
    assert (arrays.cpu_free[two], arrays.memory_free[two]) == (0, 7)


def test_order_is_by_name_whatever_came_first() -> None:
    arrays = Arrays()
    for name in ("c", "a", "b"):
        put(arrays, name, room())
    assert arrays.order.tolist() == [2, 0, 1]
    arrays.drop("a")
    put(arrays, "d", room())
    assert [arrays.names[row] for row in np.argsort(arrays.order)] == ["b", "c", "d"]


@pytest.mark.parametrize(
    ("kind", "fits"),
    [
        (PodShape(count=1, guarantee=5000), True),
        (PodShape(count=1, guarantee=5001), False),
        (PodShape(count=2, guarantee=4000), True),
        (PodShape(count=3, guarantee=1), False),
        (PodShape(count=1, device_memory_bytes=8 * GIB), True),
        (PodShape(count=1, device_memory_bytes=8 * GIB + 1), False),
        (PodShape(count=1, guarantee=4500, device_memory_bytes=8 * GIB), False),
        (PodShape(count=1, device_memory_part=Fraction(1, 2)), True),
        (PodShape(count=1, device_memory_part=Fraction(51, 100)), False),
        (PodShape(count=1, models=frozenset({"A10"})), True),
        (PodShape(count=1, guarantee=4500, models=frozenset({"A10"})), False),
        (PodShape(count=1, models=frozenset({"H100"})), False),
        (PodShape(count=1, models=frozenset()), False),
        (PodShape(count=1, mode=EXCLUSIVE), False),
        (PodShape(count=1, mode="timeslice"), False),
        (PodShape(cpu_milli=4000), True),
        (PodShape(cpu_milli=4001), False),
        (PodShape(memory_bytes=256 * GIB + 1), False),
    ],
)
def test_what_fits(kind: PodShape, *, fits: bool) -> None:
    arrays = Arrays()
    soft = frozenset({SOFT})
    one = room(free=5000, free_memory=4 * GIB, modes=soft, shares=1)
    two = room(free=4000, free_memory=8 * GIB, modes=soft, model="A10", shares=1)
    put(arrays, "a", one, two, cpu=4000)
    assert arrays.fitting(kind).tolist() == [fits]


def test_a_device_with_a_problem_serves_nobody() -> None:
    arrays = Arrays()
    put(arrays, "a", room(modes=frozenset()))
    assert not arrays.usable.any()
    assert arrays.gpu_there.any()
    assert not arrays.fitting(PodShape(count=1)).any()
    assert arrays.fitting(PodShape()).all()


def test_a_model_that_comes_later_is_known_to_a_kind_that_was_asked_for_before() -> None:
    arrays = Arrays()
    put(arrays, "a", room())
    kind = PodShape(count=1, models=frozenset({"A10"}))
    assert arrays.fitting(kind).tolist() == [False]
    put(arrays, "b", room(model="A10"))
    assert arrays.fitting(kind).tolist() == [False, True]


@given(
    whole=st.integers(0, 2**40),
    numerator=st.integers(1, 10_000) | st.integers(1, 10**18) | st.integers(1, 10**40),
    denominator=st.integers(1, 10_000) | st.integers(1, 10**18) | st.integers(1, 10**40),
)
@example(whole=80 << 30, numerator=3333333333, denominator=10**10)
@example(whole=80 << 30, numerator=10**24 // 3, denominator=10**24)
def test_a_part_of_memory_is_as_many_bytes_as_everywhere(
    whole: int, numerator: int, denominator: int
) -> None:
    part = min(Fraction(numerator, denominator), Fraction(1))
    arrays = Arrays()
    put(arrays, "a", room(memory=whole))
    need = arrays.memory_need(PodShape(count=1, device_memory_part=part))
    assert int(need[0, 0]) == MemoryAmount("", part=part).of(whole)


@given(st.lists(st.tuples(st.sampled_from("abcde"), st.integers(0, 3)), max_size=25))
def test_what_is_there_at_the_end_does_not_depend_on_what_was(
    steps: list[tuple[str, int]],
) -> None:
    arrays = Arrays()
    there: dict[str, int] = {}
    for name, devices in steps:
        if devices:
            put(arrays, name, *[room(free=devices)] * devices)
            there[name] = devices
        else:
            arrays.drop(name)
            there.pop(name, None)
    assert {name: int(arrays.gpu_there[row].sum()) for name, row in arrays.row.items()} == there
    assert sorted(filter(None, arrays.names)) == sorted(there)
    assert arrays.fitting(PodShape(count=1)).sum() == len(there)


def test_models_that_are_gone_make_room_for_others() -> None:
    # There are places for 32,767: whoever writes a node's devices must not be able to fill them.
    arrays = Arrays()
    put(arrays, "a", room(model="A100"))
    wanted = PodShape(count=1, models=frozenset({"A100"}))
    for number in range(40_000):
        put(arrays, "b", room(model=f"forged {number}"), room(model="T4"))
    assert len(arrays.model_names) <= 4
    assert arrays.matching(wanted).tolist() == [[True, False], [False, False]]
    arrays.drop("b")
    put(arrays, "c", room(model="H100"))
    assert [arrays.model_names[arrays.model[arrays.row[name], 0]] for name in "ac"] == [
        "A100",
        "H100",
    ]


def test_a_place_that_is_another_models_now_is_not_taken_for_the_first() -> None:
    arrays = Arrays()
    kinds = PodShapes(arrays)
    need = PodNeed(
        uid=PodUid("p"),
        containers=(
            WantedContainer(
                name="main",
                request=Request(
                    MemoryAmount("0", size_bytes=0),
                    constraints=Constraints(models=(ModelRule("T4"),)),
                ),
            ),
        ),
    )
    row = put(arrays, "a", room(model="T4"))
    assert arrays.matching(kinds.of(need)).tolist() == [[True]]
    arrays.update(row, {0: room(model="A10")}, cpu_free=1, memory_free=1)
    assert arrays.matching(kinds.of(need)).tolist() == [[False]]
    arrays.update(row, {0: room(model="T4 16 GB")}, cpu_free=1, memory_free=1)
    assert arrays.matching(kinds.of(need)).tolist() == [[True]]
