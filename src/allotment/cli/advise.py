# SPDX-License-Identifier: Apache-2.0
"""`allot advise`: what each workload should ask for."""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import click

from allotment.cli.cost_options import CostSource, note, note_prices, source_options
from allotment.cli.documents import print_document
from allotment.cli.options import DURATION_NS, output_option
from allotment.cli.tables import Column, cells_of, print_table
from allotment.model.errors import UsageError
from allotment.model.formats import format_bytes, format_count, format_part

if TYPE_CHECKING:
    from allotment.cost.history import Span
    from allotment.cost.peaks import Histories
    from allotment.cost.prometheus import Prometheus
    from allotment.cost.workloads import Advice, ShareHistory, Workload

_MI: Final = 1 << 20
_GI: Final = 1 << 30
_ORDER: Final = ("more", "remove", "less", "keep", "wait")


@click.command(short_help="Advise what each workload should ask for, by its own peaks.")
@source_options
@click.option(
    "--margin",
    metavar="PERCENT",
    type=click.FloatRange(0, 1000),
    default=20.0,
    help="Added to peaks.",
)
@click.option(
    "--least",
    "least_ns",
    metavar="DURATION",
    type=DURATION_NS,
    default="24h",
    help="A workload that was watched for less time gets no advice.",
)
@output_option("table", "json")
def command(*, source: CostSource, margin: float, least_ns: int, output: str) -> None:
    """Compare what each workload asks for with its own peaks, and advise better amounts.

    A workload is all shares of one container of pods with the same name, without what Kubernetes
    appends to it. ASKS, PEAK and P99 are memory on each device, P99 is that of the day with the
    highest. TIME is the part of the GPU's time that kernels ran in 15 minutes, the 99th percentile
    of the day with the highest.

    MEMORY is the advice: the peak and --margin, rounded up to 256Mi. A share that was refused
    memory gets at least a quarter more than it has. COMPUTE is the advised guarantee (or ceiling),
    from TIME and --margin, rounded up to 5. A guarantee is never lowered where launches were held
    back.

    SAVES is the price of what becomes free in a month. It is saved once others use that part, or a
    GPU is given back. WATCHED is the time in which the workload was seen.

    Without --prometheus the advice is for this machine's shares: their peaks since they began. The
    peaks of compute are not known then, so no lower guarantee is advised. Nothing is changed;
    `allot resize` and `allot simulate --from-cluster` show what a change does.

    \b
    Examples:
      allot advise --prometheus http://127.0.0.1:9090
      allot advise --prometheus http://127.0.0.1:9090 -n ml --days 30 --margin 30
      allot advise --least 1h -o json
    """  # noqa: D301 - click's mark
    from allotment.cost.workloads import AdviceRules, advise, workloads

    has_past = source.prometheus is not None
    if has_past:
        histories, models, unit = _past(source)
        if least_ns / 1e9 > source.days * 86400:
            raise UsageError("--least is more than --days", hint="ask for more days")
    else:
        histories, models = _present(source)
        unit = source.prices.currency
    source.check(models, {each.namespace for each in histories})
    rules = AdviceRules(margin=margin / 100, least_s=least_ns / 1e9)
    advices = sorted(
        (
            advise(each, rules)
            for each in workloads(histories)
            if source.namespace is None or each.namespace == source.namespace
        ),
        key=_order,
    )
    if output == "json":
        print_document(advice_document(advices, unit), output)
    else:
        _print(advices, unit, days=source.days if has_past else None)
    if not has_past:
        note(
            "without --prometheus: peaks are since each share began, and peaks of compute are not"
            " known"
        )
    if all(each.workload.price is None for each in advices):
        note_prices(models)


def _past(source: CostSource) -> "tuple[Sequence[ShareHistory], Mapping[str, int], str]":
    async def read(prometheus: "Prometheus", span: "Span") -> "Histories":
        from allotment.cost.peaks import share_histories

        return await share_histories(prometheus, span, source.prices)

    found = source.past(read)
    return found.shares, found.models, found.currency


def _present(source: CostSource) -> "tuple[Sequence[ShareHistory], Mapping[str, int]]":
    from allotment.cost.present import share_histories

    found = source.present()
    shares = share_histories(found.status, found.gpus, source.prices, now=found.now)
    return shares, Counter(gpu.name for gpu in found.gpus)


def _order(advice: "Advice") -> tuple[int, float, float, str, str]:
    """What needs more first, then what frees most."""
    workload = advice.workload
    rank = _ORDER.index(str(advice.verdict))
    return rank, -(advice.saved or 0), -advice.freed_bytes, workload.namespace, workload.name


def _print(advices: "Sequence[Advice]", currency: str, *, days: int | None) -> None:
    if not advices:
        click.echo("No shares.", err=True)
        return
    columns: tuple[Column, ...] = (
        Column("WORKLOAD", least=16),
        Column("DEVICES", rank=5, is_number=True),
        Column("ASKS", is_number=True),
        Column("PEAK", is_number=True),
        Column("P99", rank=6, is_number=True),
        Column("MEMORY", is_number=True),
        Column("COMPUTE", rank=3, is_number=True),
        Column("TIME", rank=4, is_number=True),
        Column("FREES", rank=2, is_number=True),
        Column("SAVES", rank=1, is_number=True),
        Column("WATCHED", rank=7, is_number=True),
        Column("ADVICE", is_note=True),
    )
    columns = tuple(
        column
        for column in columns
        if (column.heading != "SAVES" or _is_any(each.saved for each in advices))
        and (column.heading != "P99" or _is_any(each.workload.used_p99 for each in advices))
    )
    print_table(columns, cells_of(columns, [_row(each) for each in advices]))
    for line in _sum(advices, currency, days):
        click.echo(line)


def _is_any(values: Iterable[object]) -> bool:
    return any(value is not None for value in values)


def _row(advice: "Advice") -> dict[str, str]:
    from allotment.cost.prices import MICROS

    workload = advice.workload
    return {
        "WORKLOAD": workload_text(workload),
        "DEVICES": str(workload.devices),
        "ASKS": format_bytes(workload.limit),
        "PEAK": format_bytes(workload.peak),
        "P99": format_bytes(workload.used_p99),
        "MEMORY": "-" if advice.memory is None else _exact(advice.memory),
        "COMPUTE": _compute(advice),
        "TIME": format_part(workload.time_p99),
        "FREES": format_bytes(advice.freed_bytes) if advice.freed_bytes else "-",
        "SAVES": f"{advice.saved / MICROS:,.2f}" if advice.saved else "-",
        "WATCHED": _time(workload.watched_s),
        "ADVICE": "; ".join(_words(advice)),
    }


def workload_text(workload: "Workload") -> str:
    """Return its namespace, name and container: `ml/train/main`."""
    return "/".join(
        part for part in (workload.namespace, workload.name, workload.container) if part
    )


def _exact(size: int) -> str:
    """Return an amount as a pod can ask for it: a multiple of Mi."""
    return format_bytes(size) if size % _GI == 0 else f"{size // _MI}Mi"


def _percent(part: float) -> str:
    return f"{100 * part:.4g}"


def _compute(advice: "Advice") -> str:
    """Return the guarantee, or the ceiling, before and after: `30>20`."""
    workload = advice.workload
    if advice.ceiling is not None:
        return f":{_percent(workload.ceiling)}>:{_percent(advice.ceiling)}"
    if advice.guarantee is not None and advice.guarantee != workload.guarantee:
        return f"{_percent(workload.guarantee)}>{_percent(advice.guarantee)}"
    return _percent(workload.guarantee) if workload.guarantee else "-"


def _time(seconds: float) -> str:
    for unit, length in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= length:
            return f"{seconds / length:.1f}".removesuffix(".0") + unit
    return f"{seconds:.0f}s"


def _words(advice: "Advice") -> Iterator[str]:
    first = {
        "more": "ask for more",
        "less": "ask for less",
        "keep": "keep",
        "remove": "ask for no GPU",
        "wait": "watched for too short a time",
    }
    yield first[str(advice.verdict)]
    yield from advice.reasons
    if advice.mode:
        yield f"mode {advice.mode} suits better than {advice.workload.mode}"


def _sum(advices: "Collection[Advice]", currency: str, days: int | None) -> Iterator[str]:
    from allotment.cost.workloads import money_text

    since = "since the shares began" if days is None else f"in {format_count(days, 'day')}"
    freed = sum(each.freed_bytes for each in advices)
    compute = sum(each.freed_compute for each in advices)
    saved = [each.saved for each in advices if each.saved is not None]
    words = []
    if freed > 0:
        words.append(f"frees {format_bytes(freed)}")
    elif freed < 0:
        words.append(f"needs {format_bytes(-freed)} more")
    if abs(compute) >= 0.005:  # noqa: PLR2004 - what two digits show
        words.append(f"{'frees' if compute > 0 else 'needs'} the time of {abs(compute):.2f} GPUs")
    if saved and sum(saved):
        kind = "saves" if sum(saved) > 0 else "costs"
        words.append(f"{kind} {money_text(abs(sum(saved)), currency)} a month")
    if words:
        yield f"By the peaks {since}, all advice together {', '.join(words)}."


def advice_document(advices: "Iterable[Advice]", currency: str) -> dict[str, Any]:
    """Return the document of `-o json`."""
    return {
        "currency": currency or None,
        "workloads": [_document(each) for each in advices],
    }


def _document(advice: "Advice") -> dict[str, Any]:
    from allotment.cost.prices import MICROS

    workload = advice.workload
    return {
        "namespace": workload.namespace or None,
        "workload": workload.name,
        "container": workload.container or None,
        "devices": workload.devices,
        "mode": workload.mode,
        "watched_seconds": round(workload.watched_s),
        "memory_limit_bytes": workload.limit,
        "memory_peak_bytes": workload.peak,
        "memory_p99_bytes": workload.used_p99,
        "memory_peak_sampled": workload.is_sampled,
        "refusals": workload.refusals,
        "guarantee_percent": _of(workload.guarantee),
        "ceiling_percent": _of(workload.ceiling),
        "time_p99_percent": _of(workload.time_p99),
        "gpu_seconds": workload.gpu_seconds,
        "held_threads": round(workload.held, 3),
        "verdict": str(advice.verdict),
        "advised_memory_bytes": advice.memory,
        "advised_guarantee_percent": _of(advice.guarantee),
        "advised_ceiling_percent": _of(advice.ceiling),
        "advised_mode": advice.mode or None,
        "freed_bytes": advice.freed_bytes,
        "freed_compute_percent": _of(advice.freed_compute),
        "saved_a_month": None if advice.saved is None else advice.saved / MICROS,
        "reasons": list(advice.reasons),
    }


def _of(part: float | None) -> float | None:
    return None if part is None else round(100 * part, 4)
