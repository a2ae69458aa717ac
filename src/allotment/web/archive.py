# SPDX-License-Identifier: Apache-2.0
"""What Prometheus has for the page: figures of more than an hour, and bills of days.

By the client and the bill of `allot cost`. A page waits some seconds for an answer; a bill that
takes longer is computed to its end, for the next page that wants it.
"""

import asyncio
import json
import re
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, Protocol

import msgspec

from allotment.cost.bills import Bill
from allotment.cost.history import GPU_LABELS, STEP_S, Span, now, past_bill
from allotment.cost.history import share_key as device_key
from allotment.cost.prices import Prices
from allotment.cost.prometheus import Prometheus, TimeSeries, connect
from allotment.model.errors import BusyError
from allotment.web.fleet import FleetGpu, FleetShare
from allotment.web.watching import HistoryLines, SeriesKey, gpu_key, share_key

RANGES: Final[Mapping[str, int]] = {
    "6h": 6 * 3600,
    "1d": 86400,
    "7d": 7 * 86400,
    "30d": 30 * 86400,
}
"""Seconds of the ranges that a chart can have."""
DAYS: Final = (1, 7, 14, 30)
"""Ranges of a bill."""
_POINTS: Final = 240
"""Of a line."""
_LEAST_WINDOW_S: Final = 300
"""A rate needs two scrapes, and a step without a scrape would be a gap."""
_PATIENCE_S: Final = 15.0
_MOST_KEPT: Final = 32
"""Answers."""

_GPU_FIGURES: Final = {
    "memory": "max_over_time(allotment_gpu_memory_used_bytes{%s}[%ds])",
    "time": "avg_over_time(allotment_gpu_utilization_ratio{%s}[%ds])",
}
_SHARE_FIGURES: Final = {
    "memory": ("max_over_time(allotment_share_memory_used_bytes{%s}[%ds])",),
    # The second where kernels are not measured.
    "time": (
        "rate(allotment_share_gpu_seconds_total{%s}[%ds])",
        "avg_over_time(allotment_share_utilization_ratio{%s}[%ds])",
    ),
}


class Costs(Protocol):
    """Where bills come from."""

    @property
    def days(self) -> Sequence[int]:
        """The ranges to choose from; none: there is no past."""
        ...

    async def bill(self, days: int) -> Bill:
        """Raises `AllotError`."""
        ...


class ChartLine(msgspec.Struct, frozen=True):
    """A line of a chart: a GPU, or a share's part of it."""

    name: str
    gpu: FleetGpu
    share: FleetShare | None = None

    def key(self, figure: str) -> SeriesKey:
        """Return the series in the memory of the page."""
        if self.share is None:
            return gpu_key(self.gpu.uuid, figure)
        return share_key(self.share.id, self.share.device, figure)

    def is_of(self, series: TimeSeries) -> bool:
        """Tell whether a series is of this line. Pods of a name follow each other."""
        share = self.share
        if series.label("gpu") != self.gpu.uuid:
            return False
        if share is None:
            return True
        if share.device not in {self.gpu.uuid, device_key(series)[1]}:
            return False
        if not share.namespace:
            return series.label("share") == share.id
        names = {"namespace": share.namespace, "pod": share.pod, "container": share.container}
        if not share.pod:
            claim = share.name.removesuffix(f"/{share.container}")
            names = {"namespace": share.namespace, "claim": claim, "request": share.container}
        return all(series.label(name) == text for name, text in names.items())


class Archive:
    """Prometheus, for all viewers."""

    days: Sequence[int] = DAYS

    def __init__(
        self,
        url: str,
        prices: Prices,
        *,
        clock: Callable[[], float] = time.time,
        patience_s: float = _PATIENCE_S,
    ) -> None:
        self._url = url
        self._prices = prices
        self._clock = clock
        self._patience_s = patience_s
        self._bills: dict[tuple[int, int], asyncio.Task[Bill]] = {}
        self._answers: OrderedDict[tuple[str, int, int], list[TimeSeries]] = OrderedDict()
        """By query, range and end: a page asks, and then its chart."""

    async def bill(self, days: int) -> Bill:
        """Return the bill of the last days, some minutes old at most. Raises `AllotError`."""
        moment = int(self._clock()) // STEP_S
        key = (days, moment)
        task = self._bills.get(key)
        if task is None or (task.done() and (task.cancelled() or task.exception() is not None)):
            self._bills = {old: each for old, each in self._bills.items() if old[1] == moment}
            task = self._bills[key] = asyncio.create_task(self._bill(Span(self._clock(), days)))
        done, _ = await asyncio.wait({task}, timeout=self._patience_s)
        if not done:
            raise self._late(f"the cost of {days} days")
        return task.result()

    async def close(self) -> None:
        """End what is being computed."""
        tasks = set(self._bills.values())
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    async def _bill(self, span: Span) -> Bill:
        async with connect(self._url) as prometheus:
            return await past_bill(prometheus, span, self._prices)

    async def lines(self, lines: Iterable[ChartLine], figure: str, range_s: int) -> HistoryLines:
        """Return the values of each line; memory as the most of a step. Raises `AllotError`."""
        wanted = list(lines)
        step = range_s // _POINTS
        end = int(self._clock()) // step * step
        window = max(step, _LEAST_WINDOW_S)
        uuids = "|".join(sorted({re.escape(line.gpu.uuid) for line in wanted}))
        where = f"gpu=~{json.dumps(uuids)}"
        queries = [now(_GPU_FIGURES[figure] % (where, window), by=GPU_LABELS)]
        queries += [now(text % (where, window)) for text in _SHARE_FIGURES[figure]]
        if not wanted:
            return HistoryLines([], [])
        try:
            async with asyncio.timeout(self._patience_s), connect(self._url) as prometheus:
                answers = [await self._ask(prometheus, each, range_s, end) for each in queries]
        except TimeoutError as error:
            raise self._late("these figures") from error
        of_gpus, *of_shares = answers
        times = [float(at) for at in range(end - range_s, end + 1, step)]
        values = []
        for line in wanted:
            found: dict[float, float] = {}
            for each in reversed(of_shares) if line.share else (of_gpus,):
                for series in each:
                    if line.is_of(series):
                        found.update(series.points)
            values.append([found.get(at) for at in times])
        return HistoryLines(times, values)

    async def _ask(
        self, prometheus: Prometheus, query: str, range_s: int, end: int
    ) -> list[TimeSeries]:
        key, step = (query, range_s, end), range_s // _POINTS
        if key not in self._answers:
            found = await prometheus.over(query, start=end - range_s, end=end, step_s=step)
            self._answers[key] = found
            while len(self._answers) > _MOST_KEPT:
                self._answers.popitem(last=False)
        return self._answers[key]

    def _late(self, what: str) -> BusyError:
        return BusyError(
            f"Prometheus has not answered for {what} within {self._patience_s:.0f} s",
            hint="it may be slow: load the page again, or choose a shorter range",
        )
