# SPDX-License-Identifier: Apache-2.0
"""The formula: what an hour of a GPU costs is split among shares, and what no share has.

    paid = unallocated + unused + held + busy

A share is allocated the larger of its parts of memory and of time: no other share can have the rest
of that part. Of it, `busy` is the time that its kernels ran, `held` is memory in use beyond that,
and `unused` is neither. All amounts are integers, so sums are exact. Pure.
"""

import math
from collections.abc import Iterable, Iterator
from typing import Final

import msgspec

from allotment.model.structs import replace

GPU_HOUR: Final = 10**9
"""Amounts of GPU hours are whole numbers of its billionths."""


class Split(msgspec.Struct, frozen=True, kw_only=True):
    """An amount in parts: of GPU hours, or of money."""

    unallocated: int = 0
    """Of no share."""
    unused: int = 0
    """Allocated: neither memory nor time in use."""
    held: int = 0
    """Allocated: memory in use, and no kernel."""
    busy: int = 0
    """Allocated: kernels ran."""

    @property
    def allocated(self) -> int:
        return self.unused + self.held + self.busy

    @property
    def paid(self) -> int:
        return self.unallocated + self.allocated

    def __add__(self, other: "Split") -> "Split":
        return Split(
            unallocated=self.unallocated + other.unallocated,
            unused=self.unused + other.unused,
            held=self.held + other.held,
            busy=self.busy + other.busy,
        )

    def times(self, factor: int) -> "Split":
        return Split(
            unallocated=self.unallocated * factor,
            unused=self.unused * factor,
            held=self.held * factor,
            busy=self.busy * factor,
        )


class ShareHour(msgspec.Struct, frozen=True, kw_only=True):
    """A share in one hour of a GPU. Parts of the GPU: means over the hour, 0 where it was absent.

    Programs outside any share are one, too, which is allocated what it uses.
    """

    namespace: str = ""
    """Empty: of `allot run`."""
    memory: float = 0.0
    """Its limit."""
    guarantee: float = 0.0
    memory_used: float = 0.0
    time_used: float | None = None
    """None: not measured. All of its use then counts as held."""


class GpuHour(msgspec.Struct, frozen=True, kw_only=True):
    """An hour of a GPU."""

    model: str = ""
    present: float = 1.0
    """Part of the hour in which the GPU was watched."""
    price: int | None = None
    """In millionths; None: unknown."""
    shares: tuple[ShareHour, ...] = ()


class Account(msgspec.Struct, frozen=True, kw_only=True):
    """What one namespace has of all GPUs, or what no share has."""

    hours: Split = Split()
    """GPU hours, in billionths."""
    money: Split = Split()
    """Billionths of millionths."""
    unpriced: int = 0
    """The part of the hours that has no price."""
    unmeasured: int = 0
    """The part of the hours in which the time of kernels was not measured."""

    def __add__(self, other: "Account") -> "Account":
        return Account(
            hours=self.hours + other.hours,
            money=self.money + other.money,
            unpriced=self.unpriced + other.unpriced,
            unmeasured=self.unmeasured + other.unmeasured,
        )


def part(memory: float, guarantee: float) -> float:
    """Return the part of a GPU that a share with these parts takes from others."""
    return max(memory, guarantee)


def split(hour: GpuHour) -> tuple[Split, tuple[Split, ...]]:
    """Return what no share has of the hour, and what each share has; together it is the hour.

    Shares that are allocated more than the GPU (oversubscribed, or time-sliced) are reduced in
    proportion.
    """
    whole = _amount(hour.present)
    allocated = [_amount(part(each.memory, each.guarantee)) for each in hour.shares]
    total = sum(allocated)
    if total > whole:
        allocated = [each * whole // total for each in allocated]
    shares = tuple(
        _of_share(share, amount) for share, amount in zip(hour.shares, allocated, strict=True)
    )
    return Split(unallocated=whole - sum(allocated)), shares


def _of_share(share: ShareHour, allocated: int) -> Split:
    busy = min(allocated, _amount(share.time_used or 0.0))
    used = min(allocated, max(busy, _amount(share.memory_used)))
    return Split(unused=allocated - used, held=used - busy, busy=busy)


def _amount(part_of_gpu: float) -> int:
    """Return a part of a GPU hour; what is no amount is none."""
    if not math.isfinite(part_of_gpu) or part_of_gpu <= 0:
        return 0
    return int(min(part_of_gpu, 1.0) * GPU_HOUR)


OUTSIDE: Final = "(outside any share)"
"""In place of a namespace: of programs outside any share."""
NO_SHARE: Final = None
"""The account of what is unallocated."""


def accounts(hours: Iterable[GpuHour]) -> dict[str | None, Account]:
    """Return the account of each namespace, and that of `NO_SHARE`."""
    found: dict[str | None, Account] = {NO_SHARE: Account()}
    for hour in hours:
        for namespace, account in _entries(hour):
            found[namespace] = found.get(namespace, Account()) + account
    return found


def unpriced_models(hours: Iterable[GpuHour]) -> set[str]:
    return {hour.model for hour in hours if hour.price is None}


def _entries(hour: GpuHour) -> Iterator[tuple[str | None, Account]]:
    rest, shares = split(hour)
    yield NO_SHARE, _priced(rest, hour.price)
    for share, amount in zip(hour.shares, shares, strict=True):
        account = _priced(amount, hour.price)
        if share.time_used is None:
            account = replace(account, unmeasured=amount.held)
        yield share.namespace, account


def _priced(hours: Split, price: int | None) -> Account:
    if price is None:
        return Account(hours=hours, unpriced=hours.paid)
    return Account(hours=hours, money=hours.times(price))
