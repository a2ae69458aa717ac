# SPDX-License-Identifier: Apache-2.0
"""`allot cost`: what is paid for GPUs, and how much of it is not used, by namespace."""

from typing import TYPE_CHECKING, Any

import click

from allotment.cli.cost_options import CostSource, note, source_options
from allotment.cli.documents import print_document
from allotment.cli.options import output_option
from allotment.cli.tables import Column, cells_of, print_table
from allotment.model.formats import utc

if TYPE_CHECKING:
    from allotment.cost.bills import Bill, BillRow
    from allotment.cost.history import Span
    from allotment.cost.prometheus import Prometheus
    from allotment.cost.splitting import Account, Split


@click.command(short_help="Show what GPUs cost, and how much of it is not used.")
@source_options
@output_option("table", "json")
def command(*, source: CostSource, output: str) -> None:
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
    bill = source.present().bill(source.prices) if source.prometheus is None else _past(source)
    source.check(bill.models, bill.namespaces)
    if output == "json":
        print_document(cost_document(bill, source.namespace), output)
    else:
        _print(bill, source.namespace)
    for text in bill.notes():
        note(text)


def _past(source: CostSource) -> "Bill":
    async def read(prometheus: "Prometheus", span: "Span") -> "Bill":
        from allotment.cost.history import past_bill

        return await past_bill(prometheus, span, source.prices)

    return source.past(read)


def _print(bill: "Bill", namespace: str | None) -> None:
    columns = (
        Column("NAMESPACE", least=12),
        *((Column("GPU HOURS", is_number=True),) if bill.has_money else ()),
        *(Column(name, is_number=True) for name in ("PAID", "UNUSED", "HELD", "BUSY")),
    )
    rows = [_cells(bill, row) for row in bill.rows(None if namespace is None else [namespace])]
    click.echo(bill.title)
    print_table(columns, cells_of(columns, rows))
    if namespace is None and (idle := bill.idle()):
        click.echo(idle)


def _cells(bill: "Bill", row: "BillRow") -> dict[str, str]:
    from allotment.cost.bills import UNALLOCATED
    from allotment.cost.splitting import GPU_HOUR

    amount = bill.amount(row.account)
    cells = {"NAMESPACE": row.name, "GPU HOURS": f"{row.account.hours.paid / GPU_HOUR:,.1f}"}
    figures = {"PAID": amount.paid, "UNUSED": amount.unused}
    figures |= {"HELD": amount.held, "BUSY": amount.busy}
    cells |= {heading: f"{value / bill.scale:,.2f}" for heading, value in figures.items()}
    if row.name == UNALLOCATED:
        cells |= dict.fromkeys(("UNUSED", "HELD", "BUSY"), "-")
    return cells


def cost_document(bill: "Bill", namespace: str | None = None) -> dict[str, Any]:
    """Return the document of `-o json`: of all, or of one namespace."""
    return {
        "begin": None if bill.is_present else utc(bill.begin),
        "end": utc(bill.end),
        "currency": bill.currency or None,
        "models": [{"model": model, "gpus": count} for model, count in sorted(bill.models.items())],
        "gpu_hours_unwatched": round(bill.unwatched, 3),
        "namespaces": [
            {"namespace": name or None, **_account(bill.accounts[name])}
            for name in bill.namespaces
            if namespace is None or name == namespace
        ],
        "unallocated": None if namespace is not None else _account(bill.accounts[None]),
        "total": None if namespace is not None else _account(bill.total),
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
