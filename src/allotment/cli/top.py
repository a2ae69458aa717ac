# SPDX-License-Identifier: Apache-2.0
"""`allot top`: the shares, live."""

import os
import re
import sys
import time
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import click

from allotment.cli.documents import print_document, shares_document
from allotment.cli.options import (
    DURATION_NS,
    cluster_option,
    cluster_options,
    is_kubectl,
    output_option,
    simulated_option,
    state_option,
    system_namespace_option,
)
from allotment.model.errors import NoDevicesError
from allotment.model.structs import replace

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from allotment.cli.machines import DeviceRow
    from allotment.cli.top_screens import Frame
    from allotment.shares.folders import StateFolder
    from allotment.shares.status import ShareStatus

_MIN_PACE_S, _MAX_PACE_S = 0.25, 16.0
_PIPE_COLUMNS = 160


@click.command(short_help="Watch the shares, live.")
@click.option("--once", is_flag=True, help="Print one reading and exit. Always so in a pipe.")
@click.option(
    "--interval",
    "interval_ns",
    metavar="TIME",
    type=DURATION_NS,
    default="1s",
    help="Time between two readings, 250ms to 16s.",
)
@click.option(
    "--sort",
    type=click.Choice(["used", "limit", "gpu", "name", "age"]),
    default="used",
    help="Order of the shares.",
)
@simulated_option
@output_option("table", "json", "yaml")
@state_option
@cluster_option("Print what each share of a cluster uses now, by its agents' metrics.")
@cluster_options
@system_namespace_option
def command(
    *,
    once: bool,
    interval_ns: float,
    sort: str,
    simulated: str | None,
    output: str,
    state: Path | None,
    is_cluster: bool,
    kubeconfig: Path | None,
    context: str | None,
    system_namespace: str,
) -> None:
    """Watch GPUs and shares: limits, use, peaks, refusals, and whether limits are in force.

    If shares of a GPU set --compute, a second table shows the use of GPU time since the last
    reading. GPU TIME is measured by the shim, NVML by the driver. BORROWED is time beyond the
    guarantee, LENT is guaranteed time that others used. HELD BACK is how long launches waited, per
    second and summed over threads: 3.5x means that 3.5 threads waited all the time.

    A small terminal shows fewer columns and shares, and only processes that are not enforced. A
    limit like 12Gi+host belongs to an oversubscribed share; HOST is the part of its use that may be
    on the host.

    Keys: q quits, s changes the order, arrows scroll, + and - change the interval. In a pipe, with
    TERM=dumb, or with -o, it prints one reading without colour and bars. If GPU time is measured,
    that takes two readings, one --interval apart.

    With --cluster it prints one reading of all nodes, which the API server fetches from each agent.
    BUSY is the part of the last second in which a kernel of the share ran, by the driver. Nodes
    without an answer are named. This needs the right to get pods/proxy in the agents' namespace.

    \b
    Examples:
      allot top
      allot top --once -o json
      kubectl allot top --sort gpu
    """  # noqa: D301 - click's mark
    if is_cluster or is_kubectl():
        from allotment.cli.cluster_top import show

        show(
            kubeconfig=kubeconfig,
            context=context,
            system_namespace=system_namespace,
            sort=sort,
            output=output,
        )
        return
    from allotment.shares.folders import StateFolder

    pace_s = min(_MAX_PACE_S, max(_MIN_PACE_S, interval_ns / 1e9))
    watcher = _Watcher(StateFolder.at(state), simulated)
    if output != "table":
        print_document(shares_document(watcher.twice(pace_s)), output)
        return
    if once or not _has_screen() or not sys.stdin.isatty():
        watcher.twice(pace_s)
        _print_once(watcher.frame(sort))
        return
    _Screen(watcher, sort, pace_s).watch()


def _has_screen() -> bool:
    """Return whether the output is a terminal that can move its cursor."""
    return sys.stdout.isatty() and os.environ.get("TERM", "") not in {"", "dumb", "unknown"}


class _Watcher:
    """Reads the machine repeatedly, and computes rates since the last reading."""

    def __init__(self, folder: "StateFolder", spec: str | None) -> None:
        self._folder = folder
        self._spec = spec
        self._devices: Sequence[DeviceRow] = ()
        self._why_none = ""
        self._seen: ShareStatus | None = None

    def look(self) -> "ShareStatus":
        """Take a reading; rates are those since the reading before."""
        from allotment.cli.machines import status_of, survey
        from allotment.devices.nvml import readings
        from allotment.shares.status import current

        shares = current(self._folder)
        once = cache(readings)  # one reading for both tables
        try:
            self._devices, _ = survey(self._folder, self._spec, shares, once)
            self._why_none = ""
        except NoDevicesError as error:
            self._devices, self._why_none = (), error.message
        status = status_of(self._folder, shares, once)
        self._seen = status if self._seen is None else status.since(self._seen)
        return self._seen

    def twice(self, pace_s: float) -> "ShareStatus":
        """Take a reading; if GPU time is measured, a second one after `pace_s`, for the rates."""
        status = self.look()
        parts = [device.compute for share in status.shares for device in share.devices]
        if not any(part and part.is_measured for part in parts):
            return status
        time.sleep(pace_s)
        return self.look()

    def frame(self, sort: str) -> "Frame":
        from allotment.cli.top_screens import Frame
        from allotment.shares.run.command import inside_share

        status = self._seen or self.look()
        return Frame(
            self._devices,
            status.shares,
            time.strftime("%H:%M:%S"),
            sort,
            is_inside=bool(inside_share()),
            why_no_devices=self._why_none,
            outside=status.outside,
        )


def _print_once(frame: "Frame") -> None:
    from rich.console import Console

    from allotment.cli.top_screens import draw

    if _has_screen():
        console = Console(highlight=False)
        console.print(draw(frame, console.width))
        return
    console = Console(width=_PIPE_COLUMNS, highlight=False, no_color=True)
    with console.capture() as text:
        console.print(draw(replace(frame, has_bars=False), _PIPE_COLUMNS))
    click.echo("\n".join(line.rstrip() for line in text.get().splitlines()))


class _Screen:
    """The live screen: one thread waits for keys, signals and the next reading."""

    def __init__(self, watcher: _Watcher, sort: str, pace_s: float) -> None:
        self._watcher = watcher
        self._sort = sort
        self._pace_s = pace_s
        self._first = 0
        self._frame = self._look()

    def _look(self) -> "Frame":
        self._watcher.look()
        return self._watcher.frame(self._sort)

    def watch(self) -> None:
        import gc
        import signal

        gc.freeze()  # what lives until the end need not be looked through for each screen
        while True:
            with _keys() as ready:
                stopped = self._show(ready)
            if not stopped:
                return
            os.kill(os.getpid(), signal.SIGSTOP)  # the terminal is restored; `fg` resumes
            self._frame = self._look()

    def _show(self, ready: "Callable[[float], list[str]]") -> bool:
        """Draw until the user quits (False) or presses Ctrl-Z (True)."""
        from rich.console import Console
        from rich.live import Live

        from allotment.cli.top_screens import draw

        console = Console()
        with Live(console=console, screen=True, auto_refresh=False) as live:
            looked = time.monotonic()
            while True:
                self._first = max(0, min(self._first, len(self._frame.shares) - 1))
                frame = replace(
                    self._frame,
                    sort=self._sort,
                    is_live=True,
                    first=self._first,
                    pace_s=self._pace_s,
                )
                live.update(draw(frame, console.width, console.height), refresh=True)
                for key in ready(max(0.0, looked + self._pace_s - time.monotonic())):
                    if key in {"q", "Q", "\x03", "\x04"}:
                        return False
                    if key == "\x1a":
                        return True
                    self._obey(key)
                if time.monotonic() >= looked + self._pace_s:
                    self._frame = self._look()
                    looked = time.monotonic()

    def _obey(self, key: str) -> None:
        from allotment.cli.top_screens import SORTS

        if key == "s":
            orders = list(SORTS)
            self._sort = orders[(orders.index(self._sort) + 1) % len(orders)]
        elif key in {"j", "\x1b[B"}:
            self._first += 1
        elif key in {"k", "\x1b[A"}:
            self._first -= 1
        elif key in {"+", "="}:
            self._pace_s = max(_MIN_PACE_S, self._pace_s / 2)
        elif key == "-":
            self._pace_s = min(_MAX_PACE_S, self._pace_s * 2)


@contextmanager
def _keys() -> "Iterator[Callable[[float], list[str]]]":
    """Read single keys; yield a function that waits for keys, a new size, or a time-out.

    Signals that end the program become the key `q`, so that the terminal is restored first.
    """
    import select
    import signal
    import termios

    terminal = sys.stdin.fileno()
    before = termios.tcgetattr(terminal)
    read_end, write_end = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    ends = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
    old = {number: signal.signal(number, lambda *_: None) for number in (*ends, signal.SIGWINCH)}
    old_descriptor = signal.set_wakeup_fd(write_end)

    def ready(timeout_s: float) -> list[str]:
        readable, _, _ = select.select([terminal, read_end], [], [], timeout_s)
        if read_end in readable and set(os.read(read_end, 64)) & {int(number) for number in ends}:
            return ["q"]
        if terminal in readable:
            data = os.read(terminal, 64)
            return re.findall(r"\x1b\[[0-9;]*[A-Za-z~]|.", data.decode(errors="replace")) or ["q"]
        return []

    try:
        raw = termios.tcgetattr(terminal)
        raw[3] &= ~(termios.ICANON | termios.ECHO | termios.ISIG)  # Ctrl-C and Ctrl-Z are keys
        termios.tcsetattr(terminal, termios.TCSADRAIN, raw)
        yield ready
    finally:
        termios.tcsetattr(terminal, termios.TCSADRAIN, before)
        signal.set_wakeup_fd(old_descriptor)
        for number, handler in old.items():
            signal.signal(number, handler)
        os.close(read_end)
        os.close(write_end)
