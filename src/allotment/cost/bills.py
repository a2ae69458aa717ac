# SPDX-License-Identifier: Apache-2.0
"""A bill: what GPUs cost in a range, by namespace, and what is known of these figures.

`allot cost` and the page show the same bill: of a past that Prometheus has (`history`), or of one
hour of a machine as it is (`present`). Pure.
"""

from collections.abc import Collection, Mapping
from typing import Final

import msgspec

from allotment.cost.prices import MICROS, unpriced_text
from allotment.cost.splitting import GPU_HOUR, NO_SHARE, Account, Split
from allotment.model.formats import format_count, format_part, utc

NO_NAMESPACE: Final = "(allot run)"
UNALLOCATED: Final = "(unallocated)"
TOTAL: Final = "total"


class BillRow(msgspec.Struct, frozen=True):
    """The account of one namespace, of what is not allocated, or of all."""

    name: str
    account: Account


class Bill(msgspec.Struct, frozen=True, kw_only=True):
    """The accounts of a range."""

    accounts: Mapping[str | None, Account]
    models: Mapping[str, int]
    """GPUs by model."""
    currency: str
    is_present: bool
    """An hour of this machine as it is, and no past."""
    begin: float
    """Seconds after the epoch."""
    end: float
    unwatched: float = 0.0
    """GPU hours without a figure."""
    unpriced_models: Collection[str] = ()

    @property
    def namespaces(self) -> list[str]:
        """Their names; empty: of `allot run`."""
        return sorted(name for name in self.accounts if name is not None)

    @property
    def total(self) -> Account:
        return sum(self.accounts.values(), Account())

    @property
    def has_money(self) -> bool:
        return self.total.money.paid > 0

    @property
    def title(self) -> str:
        """Say what it is of, and the unit of its amounts."""
        count = format_count(sum(self.models.values()), "GPU")
        return f"{count}{' of this machine: ' if self.is_present else ', '}{self.range}"

    @property
    def range(self) -> str:
        """Say from when to when, and the unit of the amounts."""
        unit = (self.currency or "the prices' currency") if self.has_money else "GPU hours"
        if self.is_present:
            return f"an hour as it is now, in {unit}"
        return f"{utc(self.begin)} to {utc(self.end)}, in {unit}"

    def amount(self, account: Account) -> Split:
        """Return money, or GPU hours where nothing has a price."""
        return account.money if self.has_money else account.hours

    @property
    def scale(self) -> int:
        """What one unit of an amount is."""
        return GPU_HOUR * MICROS if self.has_money else GPU_HOUR

    def rows(self, namespaces: Collection[str] | None = None) -> list[BillRow]:
        """Return all accounts and their sum, or those of some namespaces."""
        if namespaces is not None:
            return [
                BillRow(name or NO_NAMESPACE, self.accounts[name])
                for name in self.namespaces
                if name in namespaces
            ]
        named = [BillRow(name or NO_NAMESPACE, self.accounts[name]) for name in self.namespaces]
        return [*named, BillRow(UNALLOCATED, self.accounts[NO_SHARE]), BillRow(TOTAL, self.total)]

    def idle(self) -> str:
        """Say which part is paid for and not used; empty: nothing is paid for."""
        total = self.amount(self.total)
        if not total.paid:
            return ""
        idle = total.unallocated + total.unused
        return (
            f"Idle: {format_part(idle / total.paid)} is paid for and not used"
            f" ({format_part(total.unallocated / total.paid)} unallocated,"
            f" {format_part(total.unused / total.paid)} allocated and unused)."
        )

    def notes(self) -> list[str]:
        """Say what the figures leave out."""
        total = self.total
        notes = []
        if self.is_present:
            notes.append(
                "without --prometheus there is no past: memory is that of now, and the time of"
                " kernels is the mean since each share began"
            )
        if self.unpriced_models:
            notes.append(unpriced_text(self.models, self.unpriced_models))
        if 0 < total.unpriced < total.hours.paid:
            hours = total.unpriced / GPU_HOUR
            notes.append(f"{hours:,.1f} GPU hours without a price are in no sum of money")
        if self.unwatched >= 1:
            notes.append(f"{self.unwatched:,.0f} GPU hours have no figures, and are not in PAID")
        if total.unmeasured:
            hours = total.unmeasured / GPU_HOUR
            notes.append(f"{hours:,.1f} GPU hours of HELD are without a measure of kernels' time")
        return notes
