# SPDX-License-Identifier: Apache-2.0
"""Reads the fleet at a pace, keeps an hour of figures, and wakes the open pages.

All viewers share one reading. A failed one leaves the last fleet with its time, and the problem.
"""

import asyncio
import logging
import math
import time
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final, NoReturn

import msgspec

from allotment.model.errors import AllotError
from allotment.web.fleet import Fleet, FleetSource

KEPT_S: Final = 3600.0
_MOST_SERIES: Final = 60_000
"""Of an hour at 15 s each takes 1 KiB."""
_MOST_POINTS: Final = 3600
_PATIENCE_S: Final = 60.0
"""For one reading."""

_log = logging.getLogger(__name__)

SeriesKey = tuple[str, str, str]
"""A series: `gpu` or `share`, its id (with `@` and the device for a share), and the figure."""


class HistoryLines(msgspec.Struct, frozen=True):
    """Times (seconds after the epoch) and the values of each wanted key; None: no value."""

    times: list[float]
    values: list[list[float | None]]


class History:
    """The figures of the last hour. Bounded in series and in points."""

    def __init__(self, *, kept_s: float = KEPT_S) -> None:
        self._kept_s = kept_s
        self._times: list[float] = []
        self._first = 0
        """Number of the reading at `_times[0]`."""
        self._series: dict[SeriesKey, tuple[int, array[float]]] = {}
        """With the number of its first reading."""
        self.left_out = 0
        """Series of the last reading that are not kept: there are too many."""

    def add(self, fleet: Fleet) -> None:
        """Append a reading; series without a value for the whole time are dropped."""
        self._times.append(fleet.read_at)
        number = self._first + len(self._times) - 1
        self.left_out = 0
        for key, value in _figures(fleet):
            kept = self._series.get(key)
            if kept is None:
                if len(self._series) >= _MOST_SERIES:
                    self.left_out += 1
                    continue
                kept = self._series[key] = (number, array("f"))
            begin, values = kept
            values.extend([math.nan] * (number - begin - len(values)))
            values.append(value)
        oldest = max(fleet.read_at - self._kept_s, 0.0)
        old = next((place for place, moment in enumerate(self._times) if moment > oldest), 0)
        self._forget(max(old, len(self._times) - _MOST_POINTS))

    def _forget(self, count: int) -> None:
        if count <= 0:
            return
        del self._times[:count]
        self._first += count
        for key, (begin, values) in list(self._series.items()):
            excess = self._first - begin
            if excess >= len(values):
                del self._series[key]
            elif excess > 0:
                del values[:excess]
                self._series[key] = (self._first, values)

    def read(self, keys: list[SeriesKey], *, since: float = 0.0) -> HistoryLines:
        """Return the values after a time, those of unknown keys as None."""
        start = next(
            (place for place, moment in enumerate(self._times) if moment > since), len(self._times)
        )
        return HistoryLines(
            self._times[start:],
            [self._values(key, self._first + start) for key in keys],
        )

    def _values(self, key: SeriesKey, start: int) -> list[float | None]:
        count = self._first + len(self._times) - start
        begin, values = self._series.get(key, (start, array("f")))
        found: list[float | None] = [None] * count
        for place in range(count):
            position = start + place - begin
            if 0 <= position < len(values) and not math.isnan(values[position]):
                found[place] = values[position]
        return found


def share_key(share: str, gpu: str, figure: str) -> SeriesKey:
    return ("share", f"{share}@{gpu}", figure)


def gpu_key(gpu: str, figure: str) -> SeriesKey:
    return ("gpu", gpu, figure)


def _figures(fleet: Fleet) -> Iterator[tuple[SeriesKey, float]]:
    for _, gpu in fleet.gpus():
        if gpu.memory_used is not None:
            yield gpu_key(gpu.uuid, "memory"), gpu.memory_used
        if gpu.utilization is not None:
            yield gpu_key(gpu.uuid, "time"), gpu.utilization
        for share in gpu.shares:
            if share.memory_used is not None:
                yield share_key(share.id, share.device, "memory"), share.memory_used
            if share.gpu_time is not None:
                yield share_key(share.id, share.device, "time"), share.gpu_time


class Watch:
    """The latest fleet and the history, from `run` on."""

    def __init__(self, source: FleetSource, *, clock: Callable[[], float] = time.time) -> None:
        self._source = source
        self._clock = clock
        self.fleet = Fleet()
        self.number = 0
        """Of the reading; 0: none yet."""
        self.problem = ""
        """Why the last reading failed."""
        self.history = History()
        self.is_closed = False
        self._waiting: set[asyncio.Event] = set()

    @property
    def pace_s(self) -> float:
        return self._source.pace_s

    async def run(self) -> NoReturn:
        """Read until cancelled."""
        while True:
            began = time.monotonic()
            await self.step()
            await asyncio.sleep(max(0.05, self.pace_s - (time.monotonic() - began)))

    async def first_reading(self) -> None:
        """Wait until a reading has succeeded."""
        with self.subscribed() as news:
            while not self.fleet.read_at:
                await news.wait()
                news.clear()

    async def step(self) -> None:
        """Read once, and wake those who wait."""
        try:
            async with asyncio.timeout(_PATIENCE_S):
                fleet = await self._source.read()
        except AllotError as error:
            self.problem = error.message
        except TimeoutError:
            self.problem = f"no answer within {_PATIENCE_S:.0f} s"
        except Exception:  # noqa: BLE001 - a defect in one reading must not stop the next
            _log.exception("a reading failed")
            self.problem = "this is a defect of `allot web`: see its log"
        else:
            self.problem = ""
            self.fleet = msgspec.structs.replace(fleet, read_at=self._clock())
            self.history.add(self.fleet)
        self.number += 1
        self._wake()

    def close(self) -> None:
        """Wake those who wait, for the last time."""
        self.is_closed = True
        self._wake()

    def _wake(self) -> None:
        for event in self._waiting:
            event.set()

    @contextmanager
    def subscribed(self) -> Iterator[asyncio.Event]:
        """Yield an event that each reading sets; the subscriber clears it."""
        event = asyncio.Event()
        self._waiting.add(event)
        try:
            yield event
        finally:
            self._waiting.discard(event)

    @property
    def subscribers(self) -> int:
        return len(self._waiting)
