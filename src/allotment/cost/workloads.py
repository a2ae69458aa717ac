# SPDX-License-Identifier: Apache-2.0
"""What each workload should ask for, by its own peaks. Pure.

A workload is all shares of one container of pods with one name, but for what Kubernetes appends.
Its advice follows from rules with stated constants, and says from how much time it follows.
"""

import math
import re
from collections.abc import Iterable, Sequence
from enum import StrEnum
from typing import Final, TypeVar

import msgspec

from allotment.cost.prices import MICROS
from allotment.cost.splitting import part
from allotment.model.modes import EXCLUSIVE, SOFT, traits_of
from allotment.model.structs import replace

HOURS_A_MONTH: Final = 730

# The letters and digits of names that Kubernetes makes (apimachinery, util/rand): no vowels, and
# none of 0, 1 and 3.
_RANDOM: Final = "[bcdfghjklmnpqrstvwxz2456789]"
_SUFFIXES: Final = re.compile(
    rf"(?:-{_RANDOM}{{7,10}}-{_RANDOM}{{5}}"  # Deployment: hash of the template, pod
    rf"|-\d{{7,10}}-{_RANDOM}{{5}}"  # CronJob: minutes or seconds, pod
    rf"|-\d{{1,5}}-{_RANDOM}{{5}}"  # indexed Job: index, pod
    rf"|-{_RANDOM}{{5}}"  # Job, DaemonSet, ReplicaSet
    r"|-\d{1,5})",  # StatefulSet
    re.ASCII,
)


def workload_name(pod: str) -> str:
    """Return a pod's name without what a controller appends: `web-6d4b75cb6d-x2x7k` is `web`."""
    match = re.fullmatch(rf"(?P<name>.+?){_SUFFIXES.pattern}", pod)
    return match["name"] if match else pod


class ShareHistory(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a share on one of its devices. Bytes, parts of the device's time, seconds.

    None: not measured. Counts are of the time that was watched.
    """

    namespace: str = ""
    workload: str
    container: str = ""
    share: str
    mode: str = ""
    gpu_memory: int
    """Of the GPU, what shares can have; 0: unknown."""
    price: int | None = None
    """Of an hour of the GPU, in millionths."""
    limit: int
    guarantee: float = 0.0
    ceiling: float = 1.0
    peak: int | None = None
    used_p99: int | None = None
    time_p99: float | None = None
    gpu_seconds: float | None = None
    refusals: int = 0
    held_seconds: float = 0.0
    watched_s: tuple[float, ...] = ()
    """Of each part of the range, the time in which the share was seen."""
    is_present: bool = True
    """It was there at the end."""
    is_sampled: bool = False
    """Its peak is the highest sample: there may have been a higher one between two."""


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    """The shares of one container of a workload."""

    namespace: str
    name: str
    container: str
    devices: int
    """Devices on which it had a share at the end; 0: it has ended."""
    mode: str
    gpu_memory: int
    price: int | None
    limit: int
    """What it asks for: the newest, or the most of several sizes that are there together."""
    guarantee: float
    ceiling: float
    peak: int | None
    used_p99: int | None
    time_p99: float | None
    gpu_seconds: float | None
    refusals: int
    held: float
    """Threads that were held back at a time, on average."""
    watched_s: float
    """Time in which at least one share was seen; rather too little than too much."""
    is_sampled: bool


def workloads(histories: Iterable[ShareHistory]) -> list[Workload]:
    """Group shares by their workload, sorted by name."""
    groups: dict[tuple[str, str, str], list[ShareHistory]] = {}
    for each in histories:
        groups.setdefault((each.namespace, each.workload, each.container), []).append(each)
    return [_workload(groups[key]) for key in sorted(groups)]


def _workload(shares: Sequence[ShareHistory]) -> Workload:
    newest = [each for each in shares if each.is_present] or _last_seen(shares)
    limit = max(each.limit for each in newest)
    asks = next(each for each in newest if each.limit == limit)
    # A refusal under an earlier, smaller limit says nothing of this one.
    of_size = [each for each in shares if each.limit >= limit]
    watched = sum(sum(each.watched_s) for each in of_size)
    parts = max(len(each.watched_s) for each in shares)
    seconds = [each.gpu_seconds for each in shares if each.gpu_seconds is not None]
    return Workload(
        namespace=asks.namespace,
        name=asks.workload,
        container=asks.container,
        devices=sum(each.is_present for each in shares),
        mode=asks.mode,
        gpu_memory=min(each.gpu_memory for each in newest),
        price=asks.price,
        limit=limit,
        guarantee=max(each.guarantee for each in newest),
        ceiling=min(each.ceiling for each in newest),
        peak=_most(each.peak for each in shares),
        used_p99=_most(each.used_p99 for each in shares),
        time_p99=_most(each.time_p99 for each in shares),
        gpu_seconds=sum(seconds) if seconds else None,
        refusals=sum(each.refusals for each in of_size),
        held=sum(each.held_seconds for each in of_size) / watched if watched else 0.0,
        watched_s=sum(
            max((each.watched_s[index : index + 1] or (0.0,))[0] for each in shares)
            for index in range(parts)
        ),
        is_sampled=any(each.is_sampled for each in shares),
    )


def _last_seen(shares: Sequence[ShareHistory]) -> list[ShareHistory]:
    def last(share: ShareHistory) -> int:
        return max((index for index, seen in enumerate(share.watched_s) if seen), default=-1)

    latest = max(map(last, shares))
    return [each for each in shares if last(each) == latest]


_Number = TypeVar("_Number", int, float)


def _most(values: Iterable[_Number | None]) -> _Number | None:
    return max((each for each in values if each is not None), default=None)


class AdviceRules(msgspec.Struct, frozen=True, kw_only=True):
    """The constants of the advice."""

    margin: float = 0.2
    """Added to peaks."""
    step: int = 256 << 20
    """Bytes: suggestions are multiples."""
    compute_step: float = 0.05
    """Likewise of compute."""
    least_s: float = 86400.0
    """With less time there is no advice."""
    held: float = 0.1
    """A workload starves if so many threads are held back on average."""
    at_ceiling: float = 0.9
    """It needs more than its ceiling if it uses this part of it."""
    least_change: float = 0.05
    """A limit is not lowered by less than this part of it."""
    refused: float = 0.25
    """Added to a limit that refused memory: how much was missing is not known."""


class AdviceVerdict(StrEnum):
    """What an advice comes to."""

    LESS = "less"
    MORE = "more"
    """Of memory or compute, even where it could do with less of the other."""
    KEEP = "keep"
    REMOVE = "remove"
    """It never used its GPU."""
    WAIT = "wait"
    """It was watched for too short a time."""


class Advice(msgspec.Struct, frozen=True, kw_only=True):
    """What a workload should ask for, on each device."""

    workload: Workload
    verdict: AdviceVerdict
    memory: int | None = None
    """None: nothing is advised; like the compute."""
    guarantee: float | None = None
    ceiling: float | None = None
    mode: str = ""
    """A better mode; empty: none is known."""
    freed_bytes: int = 0
    """On all its devices; negative: it needs more. For one that has ended, on one device."""
    freed_compute: float = 0.0
    """GPUs."""
    saved: int | None = None
    """Millionths of a unit of currency a month, once others use what is free; None: no price."""
    reasons: tuple[str, ...] = ()


def advise(workload: Workload, rules: AdviceRules) -> Advice:
    """Return the advice for a workload, with its reasons."""
    if workload.watched_s < rules.least_s:
        return Advice(
            workload=workload, verdict=AdviceVerdict.WAIT, reasons=tuple(_facts(workload, rules))
        )
    if _is_unused(workload):
        gone = Advice(
            workload=workload,
            verdict=AdviceVerdict.REMOVE,
            memory=0,
            guarantee=0.0,
            reasons=("it never used its GPU", *_facts(workload, rules)),
        )
        return _with_gain(gone)
    memory = _memory(workload, rules)
    guarantee, ceiling = _compute(workload, rules)
    changes = [
        (memory or workload.limit) - workload.limit,
        (workload.guarantee if guarantee is None else guarantee) - workload.guarantee,
        (ceiling or workload.ceiling) - workload.ceiling,
    ]
    verdict = AdviceVerdict.KEEP
    if any(change > 0 for change in changes):
        verdict = AdviceVerdict.MORE
    elif any(change < 0 for change in changes):
        verdict = AdviceVerdict.LESS
    advice = Advice(
        workload=workload,
        verdict=verdict,
        memory=memory,
        guarantee=guarantee,
        ceiling=ceiling,
        reasons=tuple(_facts(workload, rules)),
    )
    return _with_gain(replace(advice, mode=_mode(advice)))


def _is_unused(workload: Workload) -> bool:
    # A program that is refused its first allocation has no peak, and needs more.
    is_idle = not workload.gpu_seconds and not workload.time_p99
    return workload.peak == 0 and is_idle and not workload.refusals


def _is_starving(workload: Workload, rules: AdviceRules) -> bool:
    return workload.held > rules.held


def _facts(workload: Workload, rules: AdviceRules) -> Iterable[str]:
    """Yield what decides besides the peaks."""
    if workload.refusals:
        times = "once" if workload.refusals == 1 else f"{workload.refusals} times"
        yield f"refused memory {times}"
        if workload.limit >= workload.gpu_memory > 0:
            yield "its GPU has no more: it needs a larger one, or oversubscription"
    if _is_starving(workload, rules):
        yield f"launches held back: {workload.held:.1f} threads on average"
    if workload.peak and workload.gpu_seconds == 0 and not workload.time_p99:
        yield "holds memory and never computed"
    if workload.is_sampled and workload.peak is not None:
        yield "peak by samples: a short one may be missing"
    if workload.devices == 0:
        yield "ended"


def _memory(workload: Workload, rules: AdviceRules) -> int | None:
    """None: its peak is not known, or it is promised no memory."""
    if traits_of(workload.mode).is_time_sliced or workload.peak is None:
        return None
    need = workload.peak * (1 + rules.margin)
    if workload.refusals:
        need = max(need, workload.limit * (1 + rules.refused))
    needed = _rounded_up(need, rules.step)
    if workload.gpu_memory:  # 0: it is not known
        needed = min(needed, max(workload.gpu_memory, workload.limit))
    if workload.refusals:
        return max(needed, workload.limit)
    # A peak close to the limit was never refused: it fits, and the margin is no reason for more.
    is_less = needed <= workload.limit * (1 - rules.least_change)
    return needed if is_less else workload.limit


def _compute(workload: Workload, rules: AdviceRules) -> tuple[float | None, float | None]:
    """Return guarantee and ceiling; None: they stay."""
    time = workload.time_p99
    if _is_starving(workload, rules):
        is_limited = workload.ceiling < 1 and (time or 0.0) >= workload.ceiling * rules.at_ceiling
        if is_limited:
            return None, min(1.0, _part(workload.ceiling * (1 + rules.refused), rules))
        need = max((time or 0.0) * (1 + rules.margin), workload.guarantee + rules.compute_step)
        return max(workload.guarantee, min(workload.ceiling, _part(need, rules))), None
    if time is None or not workload.guarantee:
        return None, None
    need = _part(time * (1 + rules.margin), rules)
    return min(workload.guarantee, max(need, rules.compute_step)), None


def _part(amount: float, rules: AdviceRules) -> float:
    steps = math.ceil(round(amount / rules.compute_step, 6))
    return round(steps * rules.compute_step, 4)


def _rounded_up(amount: float, step: int) -> int:
    return max(1, math.ceil(round(amount / step, 9))) * step


_HALF: Final = 0.5


def _mode(advice: Advice) -> str:
    """Name a mode that suits better, if the figures say so."""
    workload = advice.workload
    traits = traits_of(workload.mode)
    time = workload.time_p99
    if traits.is_time_sliced:
        return SOFT  # enforces what timeslice does not; the same programs run
    memory = advice.memory or workload.limit
    if traits.is_exclusive and workload.peak is not None and time is not None:
        is_small = memory <= _HALF * workload.gpu_memory and time <= _HALF
        return SOFT if is_small else ""
    is_whole = memory >= workload.gpu_memory > 0 and time is not None and time >= 1 - _HALF
    return EXCLUSIVE if traits.takes_turns and is_whole else ""


def _with_gain(advice: Advice) -> Advice:
    workload = advice.workload
    if traits_of(workload.mode).is_exclusive and not advice.mode and advice.memory != 0:
        # It has the whole GPU whatever it asks for.
        return replace(advice, memory=None, verdict=AdviceVerdict.KEEP)
    count = max(1, workload.devices)
    memory = workload.limit if advice.memory is None else advice.memory
    guarantee = workload.guarantee if advice.guarantee is None else advice.guarantee
    saved = None
    if workload.price is not None:
        gained = _part_of_gpu(workload, workload.limit, workload.guarantee) - _part_of_gpu(
            workload, memory, guarantee
        )
        saved = round(gained * workload.price * HOURS_A_MONTH * count)
    return replace(
        advice,
        freed_bytes=(workload.limit - memory) * count,
        freed_compute=(workload.guarantee - guarantee) * count,
        saved=saved,
    )


def _part_of_gpu(workload: Workload, memory: int, guarantee: float) -> float:
    return min(1.0, part(memory / workload.gpu_memory if workload.gpu_memory else 0.0, guarantee))


def money_text(amount: float, currency: str) -> str:
    """Format millionths: `12.50 EUR`."""
    return f"{amount / MICROS:,.2f} {currency}".rstrip()
