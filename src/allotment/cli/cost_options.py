# SPDX-License-Identifier: Apache-2.0
"""What `allot cost` and `allot advise` share: where the figures come from, prices, and notes."""

import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click
import msgspec

from allotment.cli.options import installed, options, simulated_option, state_option
from allotment.model.errors import NotFoundError, UsageError
from allotment.model.formats import printable

if TYPE_CHECKING:
    from allotment.cli.machines import DeviceRow
    from allotment.cost.bills import Bill
    from allotment.cost.history import Span
    from allotment.cost.prices import Prices
    from allotment.cost.prometheus import Prometheus
    from allotment.devices.sources import Reading
    from allotment.model.devices import Device
    from allotment.shares.status import ShareStatus

_F = TypeVar("_F", bound=Callable[..., Any])
_T = TypeVar("_T")

_MOST_DAYS: Final = 366


def prometheus_option(without: str) -> Callable[[_F], _F]:
    """Return `--prometheus`; `without`: what is shown without it."""
    return click.option(
        "--prometheus",
        metavar="URL",
        envvar="ALLOTMENT_PROMETHEUS",
        help="Prometheus that scrapes the node agents [env: ALLOTMENT_PROMETHEUS]. Without it:"
        f" {without}",
    )


price_options: Callable[[_F], _F] = options(
    click.option(
        "--price",
        "price",
        metavar="MODEL=PRICE",
        multiple=True,
        help="Price of an hour of a GPU, by words of its model's name: a100-80gb=2.5; may be"
        " repeated.  [default: allotment.metrics.prices of the agents]",
    ),
    click.option(
        "--currency",
        metavar="WORD",
        default="",
        show_default=False,
        help="Currency of the prices, as it is shown. Nothing is converted.  [default: that of the"
        " agents]",
    ),
)
_source_options: Callable[[_F], _F] = options(
    prometheus_option("this machine's shares, as far as their ledgers know."),
    click.option(
        "--namespace", "-n", metavar="NAMESPACE", help="Only this namespace.  [default: all]"
    ),
    click.option(
        "--days",
        metavar="N",
        type=click.IntRange(1, _MOST_DAYS),
        default=14,
        help="With --prometheus: days until now.",
    ),
    price_options,
    simulated_option,
    state_option,
)


def read_prices(texts: tuple[str, ...], currency: str) -> "Prices":
    from allotment.cost.prices import price_of_text, prices_of

    amounts: dict[str, float] = {}
    for text in texts:
        model, price = price_of_text(text)
        if model in amounts:
            raise UsageError(f"--price: {model} is given twice", hint="give each model once")
        amounts[model] = price
    return prices_of(amounts, currency)


def note_prices(models: Mapping[str, int]) -> None:
    """Say that no model has a price."""
    from allotment.cost.prices import unpriced_text

    if models:
        note(unpriced_text(models, models))


def note(text: str) -> None:
    click.echo(f"note: {printable(text)}", err=True)


class Present(msgspec.Struct, frozen=True, kw_only=True):
    """This machine's shares and whole GPUs."""

    now: float
    """Seconds after the epoch."""
    status: "ShareStatus"
    gpus: "tuple[Device, ...]"
    readings: "Mapping[str, Reading]"

    def bill(self, prices: "Prices") -> "Bill":
        """Return what an hour of it costs."""
        from allotment.cost.present import present_bill

        return present_bill(self.status, self.gpus, self.readings, prices, now=self.now)


def present_of(rows: "Sequence[DeviceRow]", status: "ShareStatus") -> Present:
    """Return what a survey has of whole GPUs, as it is now."""
    whole = [row for row in rows if row.device.slice_of is None]
    return Present(
        now=time.time(),
        status=status,
        gpus=tuple(row.device for row in whole),
        readings={row.device.uuid: row.reading for row in whole if row.reading},
    )


def _read_present(state: Path | None, simulated: str | None) -> Present:
    """Raises `NoDevicesError`."""
    from functools import cache

    from allotment.cli.machines import survey
    from allotment.devices.nvml import readings
    from allotment.shares.folders import StateFolder
    from allotment.shares.mps_daemons import servers
    from allotment.shares.status import current, share_status

    folder = StateFolder.at(state)
    shares = current(folder)
    once = cache(readings)
    rows, _ = survey(folder, simulated, shares, once)
    machines = {row.machine for row in rows}
    serving = servers(folder) if folder.mps.is_dir() else ()
    return present_of(rows, share_status(shares, once, machines=machines, serving=serving))


class CostSource(msgspec.Struct, frozen=True, kw_only=True):
    """Which figures are wanted, and from where, as `source_options` have it."""

    prometheus: str | None
    namespace: str | None
    """None: all."""
    days: int
    prices: "Prices"
    simulated: str | None
    state: Path | None

    def past(self, read: "Callable[[Prometheus, Span], Awaitable[_T]]") -> _T:
        """Read the days from Prometheus, and note what it says of its answers."""
        import asyncio

        command = click.get_current_context().info_name
        with installed(f"allot {command} --prometheus", extra="kubernetes"):
            from allotment.cost.history import Span
            from allotment.cost.prometheus import connect
        span = Span(time.time(), self.days)

        async def connected() -> _T:
            async with connect(self.prometheus or "") as prometheus:
                found = await read(prometheus, span)
                for warning in prometheus.warnings:
                    note(f"Prometheus: {warning}")
                return found

        return asyncio.run(connected())

    def present(self) -> Present:
        """Read this machine. Raises `NoDevicesError`."""
        return _read_present(self.state, self.simulated)

    def check(self, models: Mapping[str, int], namespaces: Collection[str]) -> None:
        """Raise an error for a price or a namespace that nothing of these has."""
        from allotment.cost.prices import listed

        unused = self.prices.unused(models)
        if unused:
            raise UsageError(
                f"--price {unused[0]}: no GPU of this model",
                hint=f"the models are: {listed(models)}",
            )
        if self.namespace is not None and self.namespace not in namespaces:
            shown = ", ".join(sorted(filter(None, namespaces))) or "none"
            raise NotFoundError(
                f"no shares in namespace {self.namespace!r}", hint=f"there are: {shown}"
            )


def source_options(function: Callable[..., None]) -> Callable[..., None]:
    """Add the options that become the argument `source`, a `CostSource`."""

    @wraps(function)
    def with_source(
        *,
        prometheus: str | None,
        namespace: str | None,
        days: int,
        price: tuple[str, ...],
        currency: str,
        simulated: str | None,
        state: Path | None,
        **others: object,
    ) -> None:
        given = click.get_current_context().get_parameter_source("days")
        if prometheus is None and given is click.core.ParameterSource.COMMANDLINE:
            raise UsageError(
                "--days needs --prometheus",
                hint="ledgers have no past but peaks; give the address of Prometheus, or no --days",
            )
        source = CostSource(
            prometheus=prometheus,
            namespace=namespace,
            days=days,
            prices=read_prices(price, currency),
            simulated=simulated,
            state=state,
        )
        function(source=source, **others)

    return _source_options(with_source)
