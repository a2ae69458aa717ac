# SPDX-License-Identifier: Apache-2.0
"""The formula: the parts add up to what is paid, exactly, whatever the figures say."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from allotment.cost.splitting import (
    GPU_HOUR,
    NO_SHARE,
    Account,
    GpuHour,
    ShareHour,
    Split,
    accounts,
    split,
)

ANY = st.floats(allow_nan=True, allow_infinity=True)
PARTS = st.floats(0, 1) | st.floats(0, 3) | ANY
SHARES = st.builds(
    ShareHour,
    namespace=st.sampled_from(["", "ml", "web"]),
    memory=PARTS,
    guarantee=PARTS,
    memory_used=PARTS,
    time_used=st.none() | PARTS,
)
HOURS = st.builds(
    GpuHour,
    present=PARTS,
    price=st.none() | st.integers(0, 10**12),
    shares=st.lists(SHARES, max_size=5).map(tuple),
)


@given(st.lists(HOURS, max_size=5))
def test_the_parts_add_up_to_what_is_paid(hours: list[GpuHour]) -> None:
    found = accounts(hours)
    total = sum(found.values(), Account())
    paid = money = unpriced = 0
    for hour in hours:
        (whole, _) = split(GpuHour(present=hour.present))  # all of the hour, if nobody has it
        paid += whole.paid
        money += whole.paid * (hour.price or 0)
        unpriced += whole.paid if hour.price is None else 0
    assert (total.hours.paid, total.money.paid, total.unpriced) == (paid, money, unpriced)
    assert total.unmeasured <= total.hours.held
    for namespace, account in found.items():
        for amount in (account.hours, account.money):
            assert min(amount.unallocated, amount.unused, amount.held, amount.busy) >= 0
            assert (amount.allocated if namespace is NO_SHARE else amount.unallocated) == 0


@given(HOURS)
def test_no_share_uses_more_than_it_is_allocated(hour: GpuHour) -> None:
    rest, shares = split(hour)
    assert rest.allocated == 0
    for share, has in zip(hour.shares, shares, strict=True):
        assert has.allocated <= GPU_HOUR
        if share.time_used is None:
            assert has.busy == 0


def test_an_hour_of_two_shares() -> None:
    hour = GpuHour(
        price=2_000_000,
        shares=(
            # a quarter of the memory, half of the time; 10 % busy, 20 % of the memory in use
            ShareHour(namespace="ml", memory=0.25, guarantee=0.5, memory_used=0.2, time_used=0.1),
            # borrows time: no more is paid for it than it is allocated
            ShareHour(namespace="web", memory=0.25, memory_used=0.1, time_used=0.75),
        ),
    )
    found = accounts([hour])
    assert found[NO_SHARE].hours == Split(unallocated=GPU_HOUR // 4)
    assert found["ml"].hours == Split(
        busy=GPU_HOUR // 10, held=GPU_HOUR // 10, unused=GPU_HOUR * 3 // 10
    )
    assert found["web"].hours == Split(busy=GPU_HOUR // 4)
    assert found["ml"].money == found["ml"].hours.times(2_000_000)


def test_sharers_of_more_than_the_gpu_divide_it_in_proportion() -> None:
    whole = ShareHour(memory=1.0, time_used=0.1)
    rest, (first, second) = split(GpuHour(present=0.5, shares=(whole, whole)))
    assert rest.unallocated == 0
    assert first == second == Split(busy=GPU_HOUR // 10, unused=GPU_HOUR * 3 // 20)
