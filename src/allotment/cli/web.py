# SPDX-License-Identifier: Apache-2.0
"""`allot web`: the page, of this machine or of a cluster."""

import ipaddress
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from allotment.cli.cost_options import (
    present_of,
    price_options,
    prometheus_option,
    read_prices,
)
from allotment.cli.options import installed, simulated_option, state_option, usual_kubeconfig

if TYPE_CHECKING:
    import ssl
    from collections.abc import Sequence

    from allotment.cli.cost_options import Present
    from allotment.cli.machines import DeviceRow
    from allotment.cost.bills import Bill
    from allotment.cost.prices import Prices
    from allotment.shares.folders import StateFolder
    from allotment.shares.status import DeviceView, ShareStatus, ShareView
    from allotment.web.application import Pages
    from allotment.web.archive import Archive
    from allotment.web.fleet import Fleet, FleetGpu, FleetShare, Happened
    from allotment.web.guarding import Guard

_PACE_S: Final = 2.0
_MOST_EVENTS: Final = 500


@click.command(short_help="Show GPUs and shares in the browser.")
@click.option(
    "--listen",
    metavar="HOST:PORT",
    default="127.0.0.1:9470",
    help="Address of the page, on this machine alone. Port 0 selects a free port.",
)
@click.option("--cluster", is_flag=True, help="Show a cluster, by your kubeconfig.")
@click.option(
    "--kubeconfig",
    type=click.Path(path_type=Path, dir_okay=False),
    help="With --cluster: kubeconfig for the API server.  [default: $KUBECONFIG, or the pod's"
    " service account, or ~/.kube/config]",
)
@click.option(
    "--context",
    metavar="NAME",
    help="With --cluster: context of the kubeconfig.  [default: the current one]",
)
@click.option(
    "--login",
    is_flag=True,
    help="With --cluster: for many viewers. Each logs in with a token of Kubernetes, and sees what"
    " Kubernetes lets them list.",
)
@click.option(
    "--tls-cert",
    type=click.Path(path_type=Path, dir_okay=False, exists=True),
    help="With --login: certificate chain in PEM. Only with it the page listens at an address that"
    " other machines reach.",
)
@click.option(
    "--tls-key",
    type=click.Path(path_type=Path, dir_okay=False, exists=True),
    help="Key of --tls-cert, in PEM.",
)
@prometheus_option("charts have the last hour, and the cost page an hour of this machine as it is.")
@price_options
@simulated_option
@state_option
def command(
    *,
    listen: str,
    cluster: bool,
    kubeconfig: Path | None,
    context: str | None,
    login: bool,
    tls_cert: Path | None,
    tls_key: Path | None,
    prometheus: str | None,
    price: tuple[str, ...],
    currency: str,
    simulated: str | None,
    state: Path | None,
) -> None:
    """Serve a page with the GPUs and shares of this machine, until Ctrl-C.

    The page shows what each share has and uses of each GPU, the last hour as charts, and the events
    of shares. Each table can be saved as CSV or JSON. Nothing can be changed in it.

    With --cluster it shows all nodes. It also explains why a pod waits, where a pod would go, and
    which pods would have to leave for it. It reads with the rights of your kubeconfig: it needs to
    list nodes and pods, and for the use also `get` on `pods/proxy` in namespace allotment-system.
    In a cluster, run it with --login (deploy/manifests/web.yaml).

    With --prometheus, charts have up to 30 days, and the page Cost shows what `allot cost` does.

    It prints an address with a key. A browser that opens the address once gets a cookie. Other
    users of the machine have no key, so they see nothing. To see the page from another machine,
    forward the port: ssh -L 9470:127.0.0.1:9470 HOST.

    \b
    Examples:
      allot web
      allot web --cluster --context staging --prometheus http://127.0.0.1:9090
    """  # noqa: D301 - click's mark
    import asyncio

    if not cluster and (kubeconfig or context or login):
        raise click.UsageError("--kubeconfig, --context and --login need --cluster")
    if (tls_cert is None) != (tls_key is None) or (tls_cert and not login):
        raise click.UsageError("--tls-cert and --tls-key belong together, and need --login")
    address = _address(listen, is_open=tls_cert is not None)
    tls = _tls(tls_cert, tls_key) if tls_cert and tls_key else None
    prices = read_prices(price, currency)
    archive = _archive(prometheus, prices) if prometheus else None
    if cluster:
        asyncio.run(_serve_cluster(kubeconfig, context, address, archive, has_login=login, tls=tls))
        return
    with installed("allot web", extra="web"):
        from allotment.devices.simulated import parse_spec
        from allotment.shares.folders import StateFolder
        from allotment.web.application import Pages
        from allotment.web.watching import Watch
    if simulated:
        parse_spec(simulated)  # refused before the page is offered
    source = MachineSource(StateFolder.at(state), simulated, prices)
    pages = Pages(Watch(source), title=source.name, archive=archive, costs=source)
    asyncio.run(_serve(pages, address))


def _archive(url: str, prices: "Prices") -> "Archive":
    """Raises `UsageError` if it is no address."""
    with installed("allot web --prometheus", extra="web"):
        from allotment.cost.prometheus import parsed
        from allotment.web.archive import Archive
    return Archive(parsed(url), prices)


async def _serve_cluster(
    kubeconfig: Path | None,
    context: str | None,
    address: tuple[str, int],
    archive: "Archive | None",
    *,
    has_login: bool,
    tls: "ssl.SSLContext | None",
) -> None:
    import asyncio
    import os

    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    with installed("allot web --cluster", extra="kubernetes"):
        from allotment.kube.clients import connect
        from allotment.scheduler.supervise import freeze_periodically
        from allotment.web.cluster import ClusterSource
        from allotment.web.cluster_pages import ClusterPages
        from allotment.web.watching import Watch
    async with connect(kubeconfig or usual_kubeconfig(), context=context) as api:
        source = ClusterSource(api)
        watch = Watch(source)
        pages = ClusterPages(
            watch,
            source,
            title=api.server,
            archive=archive,
            has_login=has_login,
            is_encrypted=tls is not None,
        )
        # A reading has 100,000 objects and no garbage: a search in it holds up all pages.
        frozen = asyncio.create_task(freeze_periodically(watch.first_reading, lambda: True))
        try:
            await _serve(pages, address, guard=pages.guard, tls=tls)
        finally:
            frozen.cancel()


def _address(text: str, *, is_open: bool) -> tuple[str, int]:
    """Return an address, of this machine alone unless `is_open`. Raises `UsageError`."""
    from allotment.model.addresses import parse_address
    from allotment.model.errors import UsageError

    host, port = parse_address(text)
    try:
        is_local = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        is_local = False
    if not (is_local or is_open):
        raise UsageError(
            f"{text} can be reached from other machines, and the page has no TLS",
            hint="listen at 127.0.0.1, and forward the port: ssh -L 9470:127.0.0.1:9470 HOST",
        )
    return host, port


def _tls(certificate: Path, key: Path) -> "ssl.SSLContext":
    import ssl

    from allotment.model.errors import UsageError

    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(certificate, key)
    except (OSError, ssl.SSLError) as error:
        raise UsageError(f"cannot use the certificate {certificate}: {error}") from error
    return context


async def _serve(
    pages: "Pages",
    address: tuple[str, int],
    *,
    guard: "Guard | None" = None,
    tls: "ssl.SSLContext | None" = None,
) -> None:
    """Serve until cancelled. `guard` None: a key in the printed address.

    Raises `PrerequisiteError` if it cannot listen.
    """
    import asyncio

    from aiohttp import web

    from allotment.model.errors import PrerequisiteError
    from allotment.web.guarding import LinkGuard

    link = LinkGuard(pages.refusal)
    app = pages.application(guard or link)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    try:
        try:
            await web.TCPSite(runner, address[0] or None, address[1], ssl_context=tls).start()
        except OSError as error:
            raise PrerequisiteError(
                f"cannot listen at {address[0]}:{address[1]}: {error.strerror or error}",
                hint="another program uses it; choose one with --listen",
            ) from error
        port = int(runner.addresses[0][1])
        host = f"[{address[0]}]" if ":" in address[0] else address[0] or "0.0.0.0"  # noqa: S104
        link.cookie = f"allotment-{port}"
        key = "" if guard else f"?key={link.key}"
        click.echo(f"{'https' if tls else 'http'}://{host}:{port}/{key}")
        await asyncio.Event().wait()
    finally:
        await runner.cleanup()


class MachineSource:
    """This machine as a fleet of one node. It takes no lock, and changes nothing."""

    pace_s = _PACE_S

    days: "Sequence[int]" = ()
    """A machine has no past."""

    def __init__(self, folder: "StateFolder", spec: str | None, prices: "Prices") -> None:
        import os

        from allotment.devices.watching import Asker

        self._folder = folder
        self._spec = spec
        self.name = os.uname().nodename
        self._asker = Asker("web")
        self._seen: ShareStatus | None = None
        self._prices = prices
        self._present: Present | None = None

    async def bill(self, days: int) -> "Bill":
        """Return an hour of this machine as it was last read."""
        from allotment.model.errors import BusyError

        del days
        if self._present is None:
            raise BusyError("this machine has not been read", hint="it has no GPU, or try again")
        return self._present.bill(self._prices)

    async def read(self) -> "Fleet":
        """Read in a thread: a GPU may hang."""
        import asyncio

        from allotment.model.errors import BusyError

        asked = self._asker.ask(self._read)
        if asked is None:
            raise BusyError("the last reading has not ended: a GPU or a file does not answer")
        return await asyncio.wrap_future(asked)

    def _read(self) -> "Fleet":
        from functools import cache

        from allotment.cli.machines import status_of, survey
        from allotment.devices.nvml import readings
        from allotment.model.errors import NoDevicesError
        from allotment.shares.recovery import list_shares
        from allotment.web.fleet import Fleet, FleetNode

        loaded = list_shares(self._folder) if self._folder.exists() else []
        once = cache(readings)  # one reading for both
        problems: list[str] = []
        rows: Sequence[DeviceRow] = ()
        try:
            rows, unreadable = survey(self._folder, self._spec, loaded, once)
            problems += [each.message for each in unreadable]
        except NoDevicesError as error:
            problems.append(error.message)
        status = status_of(self._folder, loaded, once)
        self._present = present_of(rows, status) if rows else None
        self._seen = status if self._seen is None else status.since(self._seen)
        problems += [
            f"share {view.name}: {view.problem.message}"
            for view in self._seen.shares
            if view.problem is not None
        ]
        gpus = tuple(_gpu(row, self._seen.shares) for row in rows if row.device.slice_of is None)
        nodes = (FleetNode(name=self.name, gpus=gpus),) if gpus else ()
        return Fleet(
            nodes=nodes, problems=tuple(problems), events=_events(self._folder), read_at=time.time()
        )


def _gpu(row: "DeviceRow", views: "Sequence[ShareView]") -> "FleetGpu":
    from allotment.web.fleet import FleetGpu

    device, reading = row.device, row.reading
    shares = tuple(
        _share(view, part, row)
        for view in views
        for part in view.devices
        if device.uuid in {part.uuid, _gpu_of(view, part)}
    )
    percent = reading.gpu_percent if reading else None
    return FleetGpu(
        uuid=device.uuid,
        index=device.index,
        model=device.name + (" (simulated)" if device.simulated else ""),
        mode=row.mode,
        memory_total=device.memory_bytes - device.reserved_bytes,
        memory_used=reading.used_bytes if reading else None,
        memory_allocated=row.allotted if not device.mig else sum(s.memory_limit for s in shares),
        guaranteed=row.guaranteed / 10_000,
        utilization=None if percent is None else percent / 100,
        temperature_c=reading.temperature_c if reading else None,
        power_mw=reading.power_mw if reading else None,
        problem=row.problem or "",
        shares=shares,
    )


def _gpu_of(view: "ShareView", part: "DeviceView") -> str:
    """Return the UUID of the GPU of a share's MIG device; empty: it is none."""
    devices = view.share.devices if view.share else ()
    return next((each.gpu for each in devices if each.uuid == part.uuid), "")


def _share(view: "ShareView", part: "DeviceView", row: "DeviceRow") -> "FleetShare":
    from allotment.cli.tables import command_of
    from allotment.shares.compute_view import utilization
    from allotment.web.fleet import FleetShare

    compute = part.compute
    percent = utilization(row.reading, view.pids) if part.uuid == row.device.uuid else None
    rates = compute.rates if compute else None
    owner = view.share.owner if view.share else None
    is_governed = compute is not None and compute.promised.is_governed
    return FleetShare(
        id=view.id,
        name=view.name,
        namespace=owner.namespace if owner else "",
        pod=owner.pod if owner else "",
        container=owner.container if owner else "",
        mode=view.share.mode if view.share else "",
        state=str(view.state),
        command=command_of(view),
        device=part.uuid,
        memory_limit=part.limit,
        memory_used=part.used if view.problem is None else None,
        memory_peak=part.peak if view.problem is None else None,
        refusals=part.refusals if view.problem is None else None,
        guarantee=compute.promised.guarantee / 10_000 if compute and is_governed else None,
        ceiling=compute.promised.ceiling / 10_000 if compute and is_governed else None,
        gpu_time=rates.gpu if rates else None if percent is None else percent / 100,
        is_enforced=view.is_enforced,
    )


def _events(folder: "StateFolder") -> "tuple[Happened, ...]":
    from allotment.shares.record import read_events
    from allotment.web.fleet import Happened

    events = read_events(folder) if folder.exists() else []
    return tuple(
        Happened(
            time=event.time,
            kind=event.kind,
            subject=event.share,
            text=event.text,
            share=event.id,
        )
        for event in reversed(events[-_MOST_EVENTS:])
    )
