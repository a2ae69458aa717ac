# SPDX-License-Identifier: Apache-2.0
"""`allot cost`: what is paid for GPUs, and how much of it is not used, by namespace."""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click
import msgspec

from allotment.cli.cost_options import (
    check_days,
    check_models,
    check_namespace,
    from_prometheus,
    note,
    note_prices,
    read_present,
    read_prices,
    source_options,
)
from allotment.cli.documents import print_document, utc
from allotment.cli.options import output_option
from allotment.cli.tables import Column, cells_of, print_table
from allotment.model.formats import format_count

if TYPE_CHECKING:
    from allotment.cost.history import Past, Span
    from allotment.cost.prices import Prices
    from allotment.cost.prometheus import Prometheus
    from allotment.cost.splitting import Account, GpuHour, Split

_UNALLOCATED: Final = "(unallocated)"
_NO_NAMESPACE: Final = "(allot run)"
_TOTAL: Final = "total"


class Bill(msgspec.Struct, frozen=True, kw_only=True):
    """The accounts of a range, and what is known of it."""

    accounts: "Mapping[str | None, Account]"
    models: Mapping[str, int]
    currency: str
    is_present: bool
    """An hour of this machine as it is, and no past."""
    begin: float = 0.0
    """Seconds after the epoch."""
    end: float
    unwatched: float = 0.0
    """GPU hours without a figure."""
    unpriced_models: Collection[str] = ()


@click.command(short_help="Show what GPUs cost, and how much of it is not used.")
@source_options
@output_option("table", "json")
@click.pass_context
def command(
    context: click.Context,
    *,
    prometheus: str | None,
    namespace: str | None,
    days: int,
    price: tuple[str, ...],
    currency: str,
    simulated: str | None,
    state: Path | None,
    output: str,
) -> None:
    """Show what is paid for GPUs, and how much of it each namespace has and does not use.

    A GPU is paid for while its node agent reports it. A share is allocated the larger of its parts
    of memory and of compute. PAID is what is allocated, at the price of its GPU. Of it, BUSY is the
    time that kernels ran, HELD is memory in use beyond that, and UNUSED is neither. The row
    `(unallocated)` is what no share has. PAID is always the sum: UNUSED, HELD, BUSY and what is
    unallocated. What a share borrows beyond its part costs it nothing.

    Without a price, amounts are GPU hours. Without --prometheus, they are those of one hour if this
    machine's shares go on as they are: memory in use now, and the mean time of kernels since each
    share began.

    \b
    Examples:
      allot cost --prometheus http://127.0.0.1:9090
      allot cost --prometheus http://127.0.0.1:9090 -n ml --days 30 -o json
      allot cost --price a100-80gb=2.5 --currency EUR
    """  # noqa: D301 - click's mark
    check_days(context, prometheus)
    prices = read_prices(price, currency)
    if prometheus is None:
        bill = _present(prices, state, simulated)
    else:
        bill = _past(prices, prometheus, days)
    check_models(prices, bill.models)
    check_namespace(namespace, [each for each in bill.accounts if each is not None])
    if output == "json":
        print_document(cost_document(bill, namespace), output)
    else:
        _print(bill, namespace)
    _notes(bill)


def _past(prices: "Prices", url: str, days: int) -> Bill:
    async def read(prometheus: "Prometheus", span: "Span") -> "Past":
        from allotment.cost.history import past_accounts

        return await past_accounts(prometheus, span, prices)

    past, span = from_prometheus("allot cost", url, days, read)
    return Bill(
        accounts=past.accounts,
        models=past.models,
        currency=past.currency,
        is_present=False,
        begin=span.begin,
        end=span.ends()[-1],
        unwatched=past.unwatched,
        unpriced_models=past.unpriced_models,
    )


def _present(prices: "Prices", state: Path | None, simulated: str | None) -> Bill:
    from allotment.cost.present import gpu_hours
    from allotment.cost.splitting import accounts, unpriced_models

    found = read_present(state, simulated)
    hours: list[GpuHour] = gpu_hours(
        found.status, found.gpus, found.readings, prices, now=found.now
    )
    return Bill(
        accounts=accounts(hours),
        models=found.models,
        currency=prices.currency,
        is_present=True,
        begin=found.now,
        end=found.now,
        unpriced_models=unpriced_models(hours),
    )


def _total(bill: Bill) -> "Account":
    from allotment.cost.splitting import Account

    return sum(bill.accounts.values(), Account())


def _rows(bill: Bill, namespace: str | None) -> "list[tuple[str, Account]]":
    """Return the accounts with their names: of all, or of one namespace."""
    named = sorted((name, each) for name, each in bill.accounts.items() if name is not None)
    if namespace is not None:
        return [(name, each) for name, each in named if name == namespace]
    rows = [(name or _NO_NAMESPACE, each) for name, each in named]
    return [*rows, (_UNALLOCATED, bill.accounts[None]), (_TOTAL, _total(bill))]


def _print(bill: Bill, namespace: str | None) -> None:
    has_money = _total(bill).money.paid > 0
    columns = (
        Column("NAMESPACE", least=12),
        *((Column("GPU HOURS", is_number=True),) if has_money else ()),
        *(Column(name, is_number=True) for name in ("PAID", "UNUSED", "HELD", "BUSY")),
    )
    rows = [_cells(name, each, has_money=has_money) for name, each in _rows(bill, namespace)]
    unit = (bill.currency or "the prices' currency") if has_money else "GPU hours"
    count = format_count(sum(bill.models.values()), "GPU")
    if bill.is_present:
        click.echo(f"{count} of this machine: an hour as it is now, in {unit}")
    else:
        click.echo(f"{count}, {utc(bill.begin)} to {utc(bill.end)}, in {unit}")
    print_table(columns, cells_of(columns, rows))
    total = _total(bill).money if has_money else _total(bill).hours
    if namespace is None and total.paid:
        idle = total.unallocated + total.unused
        click.echo(
            f"Idle: {100 * idle / total.paid:.0f} % is paid for and not used"
            f" ({100 * total.unallocated / total.paid:.0f} % unallocated,"
            f" {100 * total.unused / total.paid:.0f} % allocated and unused)."
        )


def _cells(name: str, account: "Account", *, has_money: bool) -> dict[str, str]:
    from allotment.cost.prices import MICROS
    from allotment.cost.splitting import GPU_HOUR

    amount = account.money if has_money else account.hours
    unit = GPU_HOUR * MICROS if has_money else GPU_HOUR
    cells = {"NAMESPACE": name, "GPU HOURS": f"{account.hours.paid / GPU_HOUR:,.1f}"}
    figures = {"PAID": amount.paid, "UNUSED": amount.unused}
    figures |= {"HELD": amount.held, "BUSY": amount.busy}
    cells |= {heading: f"{value / unit:,.2f}" for heading, value in figures.items()}
    if name == _UNALLOCATED:
        cells |= dict.fromkeys(("UNUSED", "HELD", "BUSY"), "-")
    return cells


def _notes(bill: Bill) -> None:
    from allotment.cost.splitting import GPU_HOUR

    total = _total(bill)
    if bill.is_present:
        note(
            "without --prometheus there is no past: memory is that of now, and the time of kernels"
            " is the mean since each share began"
        )
    note_prices(bill.models, bill.unpriced_models)
    if 0 < total.unpriced < total.hours.paid:
        note(f"{total.unpriced / GPU_HOUR:,.1f} GPU hours without a price are in no sum of money")
    if bill.unwatched >= 1:
        note(f"{bill.unwatched:,.0f} GPU hours have no figures, and are not in PAID")
    if total.unmeasured:
        hours = total.unmeasured / GPU_HOUR
        note(f"{hours:,.1f} GPU hours of HELD are without a measure of the time of kernels")


def cost_document(bill: Bill, namespace: str | None = None) -> dict[str, Any]:
    """Return the document of `-o json`: of all, or of one namespace."""
    named = sorted((name, each) for name, each in bill.accounts.items() if name is not None)
    return {
        "begin": None if bill.is_present else utc(bill.begin),
        "end": utc(bill.end),
        "currency": bill.currency or None,
        "models": [{"model": model, "gpus": count} for model, count in sorted(bill.models.items())],
        "gpu_hours_unwatched": round(bill.unwatched, 3),
        "namespaces": [
            {"namespace": name or None, **_account(each)}
            for name, each in named
            if namespace is None or name == namespace
        ],
        "unallocated": None if namespace is not None else _account(bill.accounts[None]),
        "total": None if namespace is not None else _account(_total(bill)),
    }


def _account(account: "Account") -> dict[str, Any]:
    from allotment.cost.prices import MICROS
    from allotment.cost.splitting import GPU_HOUR

    has_price = account.unpriced < account.hours.paid or not account.hours.paid
    money = _split(account.money, GPU_HOUR * MICROS)
    return {
        "gpu_hours": _split(account.hours, GPU_HOUR),
        "money": money if has_price else None,
        "gpu_hours_unpriced": account.unpriced / GPU_HOUR,
        "gpu_hours_unmeasured": account.unmeasured / GPU_HOUR,
    }


def _split(amount: "Split", unit: int) -> dict[str, float]:
    return {
        "paid": amount.paid / unit,
        "unallocated": amount.unallocated / unit,
        "unused": amount.unused / unit,
        "held": amount.held / unit,
        "busy": amount.busy / unit,
    }
