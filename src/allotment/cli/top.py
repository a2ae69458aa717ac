# SPDX-License-Identifier: Apache-2.0
"""`allot top`: the shares, live."""

import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from allotment.cli.options import output_option, simulated_option, state_option

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from allotment.cli.machines import DeviceRow
    from allotment.cli.screens import Frame
    from allotment.shares.folders import StateFolder
    from allotment.shares.views import Overview

_MIN_PACE_S, _MAX_PACE_S = 0.25, 16.0
_PIPE_COLUMNS = 160


@click.command(short_help="Watch the shares, live.")
@click.option("--once", is_flag=True, help="Show one moment and end; so it does into a pipe.")
@click.option(
    "--interval",
    metavar="TIME",
    default="1s",
    show_default=True,
    help="Time between two looks, 250ms to 16s.",
)
@click.option(
    "--sort",
    type=click.Choice(["used", "limit", "gpu", "name", "age"]),
    default="used",
    show_default=True,
    help="Order of the shares.",
)
@simulated_option
@output_option("table", "json", "yaml")
@state_option
def command(
    *,
    once: bool,
    interval: str,
    sort: str,
    simulated: str | None,
    output: str,
    state: Path | None,
) -> None:
    """Watch GPUs and shares: limits, use, peaks, refusals, and whether limits are in force.

    Where shares of a GPU asked for compute, a second table has what each has had of the GPU's time
    since the last look, beside its guarantee and its ceiling: GPU TIME as the shim measures it,
    NVML as the driver tells it, what of it was BORROWED beyond the guarantee, what of the guarantee
    was LENT to others, and for how long its launches were HELD BACK (seconds of waiting in each
    second, all threads together: 3.5x is as if three threads and a half never got on).

    A small terminal gets fewer columns, no processes but those that are not enforced, and fewer
    shares at once. A limit like 12Gi+host is that of an oversubscribed share, and HOST is how much
    of what it uses may lie on the host.

    Keys: q ends, s changes the order, arrows scroll, + and - change the pace. Into a pipe, on a
    terminal that cannot move its cursor (TERM=dumb), or with -o, it shows one moment, without
    colour and bars; where GPU time is measured it looks twice for that, one --interval apart.

    \b
    Examples:
      allot top
      allot top --once -o json
    """  # noqa: D301 - click's mark
    from allotment.model.quantities import parse_duration_ns
    from allotment.shares.folders import StateFolder

    pace_s = min(_MAX_PACE_S, max(_MIN_PACE_S, parse_duration_ns(interval) / 1e9))
    watcher = _Watcher(StateFolder.at(state), simulated)
    if output != "table":
        from allotment.cli.documents import print_document, shares_document

        print_document(shares_document(watcher.twice(pace_s)), output)
        return
    if once or not _has_screen() or not sys.stdin.isatty():
        watcher.twice(pace_s)
        _print_once(watcher.frame(sort))
        return
    _Screen(watcher, sort, pace_s).watch()


def _has_screen() -> bool:
    """Tell whether the output is a terminal that can do more than print line after line."""
    import os

    return sys.stdout.isatty() and os.environ.get("TERM", "") not in {"", "dumb", "unknown"}


class _Watcher:
    """Looks at the machine again and again, and knows what it saw last."""

    def __init__(self, folder: "StateFolder", spec: str | None) -> None:
        self._folder = folder
        self._spec = spec
        self._devices: Sequence[DeviceRow] = ()
        self._seen: Overview | None = None

    def look(self) -> "Overview":
        """Look once more; the rates are those since the look before."""
        from functools import cache

        from allotment.cli.machines import known_machines, readings, survey
        from allotment.model.errors import NoDevicesError
        from allotment.shares.mps_daemons import losses, servers
        from allotment.shares.views import current, overview

        shares = current(self._folder)
        once = cache(readings)  # both tables are of the same moment
        try:
            self._devices, _ = survey(self._folder, self._spec, shares, once)
        except NoDevicesError:
            self._devices = ()  # a machine without a GPU has no shares on one either
        seen = overview(
            shares,
            once,
            machines=known_machines(self._folder),
            serving=servers(self._folder),
            losses=losses(self._folder),
        )
        self._seen = seen if self._seen is None else seen.since(self._seen)
        return self._seen

    def twice(self, pace_s: float) -> "Overview":
        """Look, and where GPU time is measured look again after a while, for the rates."""
        import time

        seen = self.look()
        parts = [device.compute for share in seen.shares for device in share.devices]
        if not any(part and part.is_measured for part in parts):
            return seen
        time.sleep(pace_s)
        return self.look()

    def frame(self, sort: str) -> "Frame":
        """Return what was seen last, to be drawn."""
        import time

        from allotment.cli.screens import Frame
        from allotment.shares.sessions import inside_share

        seen = self._seen or self.look()
        return Frame(
            self._devices,
            seen.shares,
            time.strftime("%H:%M:%S"),
            sort,
            is_inside=bool(inside_share()),
            outside=seen.outside,
        )


def _print_once(frame: "Frame") -> None:
    from dataclasses import replace

    from rich.console import Console

    from allotment.cli.screens import draw

    if _has_screen():
        console = Console(highlight=False)
        console.print(draw(frame, console.width))
        return
    console = Console(width=_PIPE_COLUMNS, highlight=False, no_color=True)
    with console.capture() as text:
        console.print(draw(replace(frame, has_bars=False), _PIPE_COLUMNS))
    click.echo("\n".join(line.rstrip() for line in text.get().splitlines()))


class _Screen:
    """The live screen: one thread that waits for keys, signals and the next look."""

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
        """Show the screen until the user has seen enough."""
        import os
        import signal

        while True:
            with _keys() as ready:
                stopped = self._show(ready)
            if not stopped:
                return
            os.kill(os.getpid(), signal.SIGSTOP)  # the terminal is as it was; back by `fg`
            self._frame = self._look()

    def _show(self, ready: "Callable[[float], list[str]]") -> bool:
        """Draw until the end (False) or Ctrl-Z (True)."""
        import time
        from dataclasses import replace

        from rich.console import Console
        from rich.live import Live

        from allotment.cli.screens import draw

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
        from allotment.cli.screens import SORTS

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
    """Take single keys from the terminal; yield what waits for some, a new size, or a time.

    Signals that end the program put the terminal back first: they are turned into the key `q`.
    """
    import os
    import re
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
        found, _, _ = select.select([terminal, read_end], [], [], timeout_s)
        if read_end in found and set(os.read(read_end, 64)) & {int(number) for number in ends}:
            return ["q"]
        if terminal in found:
            data = os.read(terminal, 64)
            return re.findall(r"\x1b\[[0-9;]*[A-Za-z~]|.", data.decode(errors="replace")) or ["q"]
        return []

    try:
        ours = termios.tcgetattr(terminal)
        ours[3] &= ~(termios.ICANON | termios.ECHO | termios.ISIG)  # Ctrl-C and Ctrl-Z are keys
        termios.tcsetattr(terminal, termios.TCSADRAIN, ours)
        yield ready
    finally:
        termios.tcsetattr(terminal, termios.TCSADRAIN, before)
        signal.set_wakeup_fd(old_descriptor)
        for number, handler in old.items():
            signal.signal(number, handler)
        os.close(read_end)
        os.close(write_end)
