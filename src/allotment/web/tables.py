# SPDX-License-Identifier: Apache-2.0
"""The tables of the pages: one value for HTML, CSV and JSON.

A cell has its raw value (bytes, parts, seconds after the epoch), so that an export can be computed
with; the page formats it by the column's kind.
"""

import csv
import io
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from enum import StrEnum
from typing import Any, Final

import msgspec

from allotment.cost.bills import UNALLOCATED, Bill
from allotment.cost.splitting import GPU_HOUR
from allotment.web.fleet import Fleet

ROWS_OF_A_PAGE: Final = 200
KIND: Final = "cell_kind"
"""Key of a row's kind of cells, for columns without one of their own."""

Value = str | int | float | None


class CellKind(StrEnum):
    """How the page formats a column's values."""

    TEXT = "text"
    BYTES = "bytes"
    PART = "part"
    NUMBER = "number"
    TIME = "time"
    AMOUNT = "amount"
    """Of money, or of GPU hours."""
    ROW = "row"
    """As the row's `KIND`."""


class PageColumn(msgspec.Struct, frozen=True):
    """A column: its name in exports and addresses, its heading, its kind."""

    key: str
    title: str
    kind: CellKind = CellKind.TEXT
    link: str = ""
    """Key of the cell with the address that its text links to."""

    @property
    def is_number(self) -> bool:
        return self.kind not in {CellKind.TEXT, CellKind.TIME}


class PageTable(msgspec.Struct, frozen=True, kw_only=True):
    """A table's rows, filtered and sorted; `page` selects those that are shown."""

    name: str
    title: str
    columns: tuple[PageColumn, ...]
    rows: Sequence[Mapping[str, Value]]
    sort: str = ""
    is_descending: bool = False
    page: int = 1
    query: str = ""

    @property
    def pages(self) -> int:
        return max(1, -(-len(self.rows) // ROWS_OF_A_PAGE))

    @property
    def shown(self) -> Sequence[Mapping[str, Value]]:
        begin = (min(self.page, self.pages) - 1) * ROWS_OF_A_PAGE
        return self.rows[begin : begin + ROWS_OF_A_PAGE]


def arranged(table: PageTable, *, query: str, sort: str, page: int) -> PageTable:
    """Return the rows that contain all words, in order: `sort` is a key, `-key` for descending."""
    keys = [column.key for column in table.columns]
    words = query.casefold().split()
    rows = [
        row
        for row in table.rows
        if all(any(word in str(row.get(key) or "").casefold() for key in keys) for word in words)
    ]
    key = sort.removeprefix("-")
    is_descending = sort.startswith("-")
    if key in keys:
        rows.sort(key=_order(key), reverse=is_descending)
    else:
        key = ""
    return msgspec.structs.replace(
        table, rows=rows, sort=key, is_descending=is_descending, page=max(1, page), query=query
    )


def _order(key: str) -> Callable[[Mapping[str, Value]], tuple[int, float, str]]:
    """Unknown values first, then numbers, then texts."""

    def order(row: Mapping[str, Value]) -> tuple[int, float, str]:
        value = row.get(key)
        if value is None:
            return (0, 0.0, "")
        if isinstance(value, str):
            return (2, 0.0, value.casefold())
        return (1, float(value), "")

    return order


def csv_of(table: PageTable) -> str:
    """All rows. A text that a spreadsheet would compute begins with an apostrophe."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    keys = [column.key for column in table.columns]
    writer.writerow(keys)
    writer.writerows([_csv_cell(row.get(key)) for key in keys] for row in table.rows)
    return text.getvalue()


def _csv_cell(value: Value) -> Value:
    if isinstance(value, str) and value.startswith(("=", "+", "-", "@", "\t", "\r")):
        return f"'{value}"
    return value


def json_of(table: PageTable) -> str:
    keys = [column.key for column in table.columns]
    rows: list[dict[str, Any]] = [{key: row.get(key) for key in keys} for row in table.rows]
    return json.dumps({table.name: rows}, indent=1)


# ---- the tables ----------------------------------------------------------------------------------

_B, _P, _N, _T = CellKind.BYTES, CellKind.PART, CellKind.NUMBER, CellKind.TIME


def gpus_table(fleet: Fleet) -> PageTable:
    return PageTable(
        name="gpus",
        title="GPUs",
        columns=(
            PageColumn("node", "Node", link="node_href"),
            PageColumn("index", "GPU", _N),
            PageColumn("uuid", "UUID", link="href"),
            PageColumn("model", "Model"),
            PageColumn("mode", "Mode"),
            PageColumn("shares", "Shares", _N),
            PageColumn("memory_total_bytes", "Memory", _B),
            PageColumn("memory_allocated_bytes", "Allocated", _B),
            PageColumn("memory_used_bytes", "Used", _B),
            PageColumn("guaranteed", "Time guaranteed", _P),
            PageColumn("utilization", "Time used", _P),
            PageColumn("temperature_c", "°C", _N),
            PageColumn("problem", "Problem"),
        ),
        rows=[
            {
                "node": node.name,
                "node_href": f"/nodes/{node.name}",
                "index": gpu.index,
                "uuid": gpu.uuid,
                "href": f"/gpus/{gpu.uuid}",
                "model": gpu.model,
                "mode": gpu.mode,
                "shares": len(gpu.shares),
                "memory_total_bytes": gpu.memory_total,
                "memory_allocated_bytes": gpu.memory_allocated,
                "memory_used_bytes": gpu.memory_used,
                "guaranteed": gpu.guaranteed,
                "utilization": gpu.utilization,
                "temperature_c": gpu.temperature_c,
                "problem": gpu.problem,
            }
            for node, gpu in fleet.gpus()
        ],
    )


def shares_table(fleet: Fleet) -> PageTable:
    """Namespaces are those of pods, commands those of `allot run`."""
    shares = [share for _, _, share in fleet.shares()]
    namespace = (PageColumn("namespace", "Namespace"),) if any(s.namespace for s in shares) else ()
    command = (PageColumn("command", "Command"),) if any(s.command for s in shares) else ()
    return PageTable(
        name="shares",
        title="Shares",
        columns=(
            *namespace,
            PageColumn("name", "Share", link="href"),
            PageColumn("state", "State"),
            PageColumn("mode", "Mode"),
            PageColumn("node", "Node", link="node_href"),
            PageColumn("gpu", "GPU", link="gpu_href"),
            PageColumn("memory_limit_bytes", "Limit", _B),
            PageColumn("memory_used_bytes", "Used", _B),
            PageColumn("memory_peak_bytes", "Peak", _B),
            PageColumn("guarantee", "Time guaranteed", _P),
            PageColumn("gpu_time", "Time used", _P),
            PageColumn("refusals", "Refused", _N),
            PageColumn("enforced", "Enforced"),
            *command,
        ),
        rows=[
            {
                "namespace": share.namespace,
                "name": share.name,
                "href": f"/shares/{share.id}",
                "state": share.state,
                "mode": share.mode,
                "node": node.name,
                "node_href": f"/nodes/{node.name}",
                "gpu": gpu.uuid,
                "gpu_href": f"/gpus/{gpu.uuid}",
                "memory_limit_bytes": share.memory_limit,
                "memory_used_bytes": share.memory_used,
                "memory_peak_bytes": share.memory_peak,
                "guarantee": share.guarantee,
                "gpu_time": share.gpu_time,
                "refusals": share.refusals,
                "enforced": {True: "yes", False: "no", None: None}[share.is_enforced],
                "command": share.command,
            }
            for node, gpu, share in fleet.shares()
        ],
    )


def events_table(fleet: Fleet) -> PageTable:
    return PageTable(
        name="events",
        title="Events",
        columns=(
            PageColumn("time", "Time", _T),
            PageColumn("kind", "Event"),
            PageColumn("subject", "Of", link="href"),
            PageColumn("text", "Text"),
        ),
        rows=[
            {
                "time": event.time,
                "kind": event.kind,
                "subject": event.subject,
                "href": f"/shares/{event.share}" if event.share else None,
                "text": event.text,
            }
            for event in fleet.events
        ],
    )


def waiting_table(fleet: Fleet) -> PageTable:
    return PageTable(
        name="waiting",
        title="Waiting pods",
        columns=(
            PageColumn("namespace", "Namespace"),
            PageColumn("name", "Pod", link="href"),
            PageColumn("request", "Requests"),
            PageColumn("priority", "Priority", _N),
            PageColumn("created", "Since"),
            PageColumn("nominated", "Makes room on"),
        ),
        rows=[
            {
                "namespace": pod.namespace,
                "name": pod.name,
                "href": f"/pods/{pod.namespace}/{pod.name}",
                "request": pod.request,
                "priority": pod.priority,
                "created": pod.created,
                "nominated": pod.nominated,
            }
            for pod in fleet.waiting
        ],
    )


def quotas_table(fleet: Fleet) -> PageTable:
    """Amounts are bytes, parts of GPUs, or GPUs, by the resource."""
    return PageTable(
        name="quotas",
        title="Quotas",
        columns=(
            PageColumn("namespace", "Namespace"),
            PageColumn("limit", "Quota and resource"),
            PageColumn("used", "Used", CellKind.ROW),
            PageColumn("hard", "Limit", CellKind.ROW),
            PageColumn("part", "Part", _P),
        ),
        rows=[
            {
                "namespace": each.namespace,
                "limit": each.limit,
                "used": each.used,
                "hard": each.hard,
                "part": each.used / each.hard if each.hard else None,
                KIND: each.kind,
            }
            for each in fleet.quotas
        ],
    )


def cost_table(bill: Bill | None, namespaces: Collection[str] | None) -> PageTable:
    """What all have, or only some namespaces; amounts in the bill's unit."""
    amount = CellKind.AMOUNT
    has_money = bill is not None and bill.has_money
    hours = (PageColumn("gpu_hours", "GPU hours", amount),) if has_money else ()
    return PageTable(
        name="cost",
        title="Cost",
        columns=(
            PageColumn("namespace", "Namespace"),
            *hours,
            PageColumn("paid", "Paid", amount),
            PageColumn("unused", "Unused", amount),
            PageColumn("held", "Held", amount),
            PageColumn("busy", "Busy", amount),
        ),
        rows=_cost_rows(bill, namespaces) if bill else [],
    )


def _cost_rows(bill: Bill, namespaces: Collection[str] | None) -> list[Mapping[str, Value]]:
    rows: list[Mapping[str, Value]] = []
    for row in bill.rows(namespaces):
        amount = bill.amount(row.account)
        parts = {"unused": amount.unused, "held": amount.held, "busy": amount.busy}
        is_rest = row.name == UNALLOCATED
        rows.append(
            {
                "namespace": row.name,
                "gpu_hours": row.account.hours.paid / GPU_HOUR,
                "paid": amount.paid / bill.scale,
                **{key: None if is_rest else part / bill.scale for key, part in parts.items()},
            }
        )
    return rows
