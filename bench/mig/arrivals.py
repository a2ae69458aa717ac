# SPDX-License-Identifier: Apache-2.0
"""Slices that come and go on MIG GPUs in memory, by one rule or another for where they are put."""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Final

from allotment.devices import geometries
from allotment.devices.geometries import Geometry
from allotment.model.mig import MigLayout, MigProfile, MigRequest, MigSlice
from allotment.model.structs import replace
from allotment.placement.mig import MigRefusal, choose

Mix = Mapping[str, float]
Pick = Callable[[Sequence[MigLayout], MigProfile], tuple[int, int] | None]
"""Returns the number of a GPU, and a start."""

GPUS: Final[Mapping[str, tuple[Geometry, int]]] = {
    "A100-40GB": (geometries.A100_40GB, 40_960),
    "H100-80GB": (geometries.H100_80GB, 81_559),
    "H200": (geometries.H200, 143_771),
    "B200": (geometries.B200, 183_359),
    "A30": (geometries.A30, 24_576),
    "RTX PRO 6000": (geometries.RTX_PRO_6000, 97_887),
}
"""With their memory in MiB. The planner does not know the models."""
ISSUE: Final[Mix] = {
    "1g.5gb": 40,
    "1g.10gb": 10,
    "2g.10gb": 20,
    "3g.20gb": 18,
    "4g.20gb": 6,
    "7g.40gb": 6,
}
SMALL: Final[Mix] = {"1g.5gb": 70, "1g.10gb": 10, "2g.10gb": 15, "3g.20gb": 5}
LARGE: Final[Mix] = {
    "1g.5gb": 10,
    "1g.10gb": 5,
    "2g.10gb": 15,
    "3g.20gb": 30,
    "4g.20gb": 20,
    "7g.40gb": 20,
}
QUARTERS: Final[Mix] = {"1g.6gb": 60, "2g.12gb": 30, "4g.24gb": 10}
OURS: Final = "scarcity"


@dataclass(frozen=True, slots=True)
class Case:
    """One row: so many GPUs, and what is asked of them."""

    name: str
    model: str
    mix: Mix
    gpus: int
    load: float
    """Slices asked for in the time that one runs, for each GPU."""


def profiles_of(model: str) -> tuple[MigProfile, ...]:
    """Return what the driver of a model reports."""
    geometry, memory_mib = GPUS[model]
    return tuple(each.profile_on(memory_mib) for each in geometry.shapes)


def legal(layout: MigLayout, profile: MigProfile) -> list[int]:
    """Return where a slice may begin, ascending; without the planner's help."""
    covered = {slot for each in layout.slices for slot in range(each.start, each.start + each.size)}
    return [
        start for start in profile.starts if covered.isdisjoint(range(start, start + profile.size))
    ]


def first(start: Callable[[Sequence[int], MigProfile], int]) -> Pick:
    """Return a rule for starts on the first GPU with a place."""

    def pick(layouts: Sequence[MigLayout], profile: MigProfile) -> tuple[int, int] | None:
        for number, layout in enumerate(layouts):
            starts = legal(layout, profile)
            if starts:
                return number, start(starts, profile)
        return None

    return pick


def as_hami(starts: Sequence[int], profile: MigProfile) -> int:
    """Begin as HAMi v2.10 does: 1g and 3g high; a 1g of twice the memory as all others."""
    is_high = (profile.slices, profile.size) in {(1, 1), (3, 4)}
    return starts[-1] if is_high else starts[0]


def ours(layouts: Sequence[MigLayout], profile: MigProfile) -> tuple[int, int] | None:
    """Ask the planner."""
    answer = choose(layouts, MigRequest(profile=profile.name))
    if isinstance(answer, MigRefusal):
        return None
    return int(answer[0].gpu), answer[0].start


RULES: Final[Mapping[str, Pick]] = {
    OURS: ours,
    "lowest": first(lambda starts, _: starts[0]),
    "highest": first(lambda starts, _: starts[-1]),
    "HAMi": first(as_hami),
}


@dataclass(slots=True)
class Outcome:
    """What one rule made of some arrivals."""

    asked: int = 0
    served: int = 0
    """Slots."""
    by_profile: dict[str, list[int]] = field(default_factory=dict)
    """How many of each were asked for, and served."""
    seconds: list[float] = field(default_factory=list)
    """Of processor time, of each decision."""


def play(case: Case, pick: Pick, *, seed: int, arrivals: int) -> Outcome:
    """Let slices come and go."""
    profiles = profiles_of(case.model)
    asked = [each for each in profiles if each.name in case.mix]
    weights = [case.mix[each.name] for each in asked]
    random, now = Random(seed), 0.0  # noqa: S311 - the same arrivals again
    layouts = [MigLayout(gpu=str(number), profiles=profiles) for number in range(case.gpus)]
    ends: list[tuple[float, int, int, MigSlice]] = []
    outcome = Outcome(by_profile={each.name: [0, 0] for each in asked})
    for number in range(arrivals):
        now += random.expovariate(case.load * case.gpus)
        (profile,) = random.choices(asked, weights)
        lasts = random.expovariate(1)
        while ends and ends[0][0] <= now:
            *_, gpu, gone = heapq.heappop(ends)
            stay = tuple(each for each in layouts[gpu].slices if each is not gone)
            layouts[gpu] = replace(layouts[gpu], slices=stay)
        begin = time.thread_time()
        place = pick(layouts, profile)
        outcome.seconds.append(time.thread_time() - begin)
        outcome.asked += profile.size
        outcome.by_profile[profile.name][0] += 1
        if place is None:
            assert not any(legal(each, profile) for each in layouts)
            continue
        gpu, start = place
        assert start in legal(layouts[gpu], profile)
        made = MigSlice(profile=profile.number, start=start, size=profile.size)
        layouts[gpu] = replace(layouts[gpu], slices=(*layouts[gpu].slices, made))
        heapq.heappush(ends, (now + lasts, number, gpu, made))
        outcome.served += profile.size
        outcome.by_profile[profile.name][1] += 1
    return outcome


def steps(model: str, *, count: int) -> tuple[int, int]:
    """Make and remove slices at random; return how many were refused, and how many wrongly."""
    profiles = profiles_of(model)
    random = Random(model)  # noqa: S311 - the same steps again
    layout = MigLayout(gpu="0", profiles=profiles)
    names = {each.number: each for each in profiles}
    refused = wrongly = 0
    for _ in range(count):
        if layout.slices and random.random() < 0.45:
            gone = random.choice(layout.slices)
            stay = tuple(each for each in layout.slices if each is not gone)
            layout = replace(layout, slices=stay)
            continue
        profile = random.choice(profiles)
        answer = choose([layout], MigRequest(profile=profile.name))
        there = [names[each.profile] for each in layout.slices]
        may_be = there.count(profile) < profile.most and not (
            profile.has_media and any(each.has_media for each in there)
        )
        fits = may_be and bool(legal(layout, profile))
        if isinstance(answer, MigRefusal):
            refused += 1
            wrongly += fits
            continue
        assert fits
        assert answer[0].start in legal(layout, profile)
        made = MigSlice(profile=profile.number, start=answer[0].start, size=profile.size)
        layout = replace(layout, slices=(*layout.slices, made))
    return refused, wrongly
