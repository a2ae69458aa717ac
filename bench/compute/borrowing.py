# SPDX-License-Identifier: Apache-2.0
"""Is what a share leaves idle used by others, and given back at once? Is a change in force soon?"""

from __future__ import annotations

import time
from collections.abc import Iterator

from bench.compute.diagnostics import show
from bench.compute.rig import Rig, Terms
from bench.compute.scene import SECOND, Part, Recording, Stage, play
from bench.compute.sizes import Sizes, kernel_words
from bench.harness.options import Options
from bench.harness.results import Result

_SLEEP_SECONDS = 2.0
_WORK_SECONDS = 2.5
_WINDOW_NS = SECOND
# A wake is looked at more closely. One lease of 10 ms more or less is ten points of such a window.
_SHORT_NS = SECOND // 10
_SHORT_WITHIN = 10.0
_PERIOD_MS = 5


def borrowing(rig: Rig, options: Options) -> Iterator[Result]:
    """Measure 30:100 beside a 70 that sleeps and wakes."""
    sizes = Sizes.of(options)
    recording = _play(rig, sizes)
    show(rig, recording, recording.begun_ns + SECOND, recording.ended_ns)
    wakes = recording.answers[1][0]["wakes_ns"]
    work, sleep = int(_WORK_SECONDS * SECOND), int(_SLEEP_SECONDS * SECOND)
    # The first second of all is left out; after it all of the time that the neighbour sleeps,
    # less what it takes to finish its queue.
    alone = [recording.percent(0, from_ns=wake - sleep + SECOND // 2, to_ns=wake) for wake in wakes]
    bare = [recording.percent(2, from_ns=wake - sleep + SECOND // 2, to_ns=wake) for wake in wakes]
    yield Result(
        topic="lending",
        name="30:100 beside an idle 70: part of the device",
        beside=f"{min(bare):.1f} %",
        seen=f"{' '.join(f'{each:.1f}' for each in alone)} %",
        value=min(alone),
        unit="%",
        target=98.0,
        at_least=True,
        samples=len(alone),
        method=f"kernels of 200us; the other share sleeps {_SLEEP_SECONDS} s, works "
        f"{_WORK_SECONDS} s, and so on; while it sleeps, less the first half second",
    )
    back = [
        returns_after(recording, 0, from_ns=wake, to_ns=wake + work, due=30.0, within=2.0)
        for wake in wakes
    ]
    at_once = [
        recording.windows(0, length_ns=_SHORT_NS, from_ns=wake, to_ns=wake + work)[0][1]
        for wake in wakes
    ]
    after = [recording.percent(0, from_ns=wake + SECOND // 5, to_ns=wake + work) for wake in wakes]
    unlimited = [
        recording.percent(2, from_ns=wake + SECOND // 5, to_ns=wake + work) for wake in wakes
    ]
    yield Result(
        topic="taking back",
        name="the 70 wakes: back to 30 ± 2",
        beside=f"{' '.join(f'{each:.1f}' for each in unlimited)} %",
        seen=f"{' '.join(f'{each:.1f}' for each in after)} % (the first 100 ms "
        f"{' '.join(f'{each:.0f}' for each in at_once)} %)",
        value=max(back),
        unit="ms",
        target=200.0,
        samples=len(back),
        method="from the wake until 30 ± 2 % hold until the next sleep, and "
        f"30 ± {_SHORT_WITHIN:.0f} % for every window of 100 ms that begins in the next half "
        "second: one lease of 10 ms more or less; the worst of the wakes (the mean from "
        "200 ms on is shown)",
    )
    yield _resizing(rig)
    yield from rig.ledger_error()


def _play(rig: Rig, sizes: Sizes) -> Recording:
    phases, at = [], _SLEEP_SECONDS
    for _ in range(sizes.wakes):
        phases.append(f"{at}-{at + _WORK_SECONDS}")
        at += _WORK_SECONDS + _SLEEP_SECONDS
    seconds = at - _SLEEP_SECONDS
    steady = rig.program("load", *kernel_words("200us"), "--seconds", seconds)
    waking = [*steady, "--phases", ",".join(phases)]
    return play(
        rig,
        [
            Part(command=steady, gpu=0, terms=Terms(compute="30:100"), name="borrower"),
            Part(command=waking, gpu=0, terms=Terms(compute="70"), name="lender"),
            Part(command=steady, gpu=1, name="bare-steady"),
            Part(command=waking, gpu=1, name="bare-waking"),
        ],
        period_ms=_PERIOD_MS,
    )


def settles_after(
    recording: Recording, part: int, *, from_ns: int, to_ns: int, due: float, within: float
) -> float:
    """Return from when on, in milliseconds, the part has what it is due, within so many points.

    Both over the second that begins then, and over all that is left.
    """
    for start, percent in recording.windows(
        part, length_ns=_WINDOW_NS, from_ns=from_ns, to_ns=to_ns
    ):
        rest = recording.percent(part, from_ns=start, to_ns=to_ns)
        if abs(percent - due) <= within and abs(rest - due) <= within:
            return max(0.0, (start - from_ns) / 1e6)
    return (to_ns - from_ns) / 1e6


def returns_after(
    recording: Recording, part: int, *, from_ns: int, to_ns: int, due: float, within: float
) -> float:
    """Return from when on, in milliseconds, every short window has what the part is due.

    Those of half a second; and all that is left then has it within so many points.
    """
    short = recording.windows(part, length_ns=_SHORT_NS, from_ns=from_ns, to_ns=to_ns)
    for start, _ in short:
        near = [percent for at, percent in short if start <= at < start + SECOND // 2]
        rest = recording.percent(part, from_ns=start, to_ns=to_ns)
        if abs(rest - due) <= within and all(abs(each - due) <= _SHORT_WITHIN for each in near):
            return max(0.0, (start - from_ns) / 1e6)
    return (to_ns - from_ns) / 1e6


def _resizing(rig: Rig) -> Result:
    returned: list[int] = []

    def change(stage: Stage) -> None:
        time.sleep(1.5)
        stage.allot("resize", "changing", "--compute", "60")
        returned.append(time.monotonic_ns())

    command = rig.program("load", *kernel_words("200us"), "--seconds", 4.5)
    recording = play(
        rig,
        [
            Part(command=command, gpu=0, terms=Terms(compute="30"), name="changing"),
            Part(command=command, gpu=1, name="bare"),
        ],
        period_ms=_PERIOD_MS,
        meanwhile=change,
    )
    (at,) = returned
    end = recording.ended_ns - SECOND // 10
    show(rig, recording, at, end)
    return Result(
        topic="changing",
        name="`allot resize --compute 60` of a 30: in force",
        seen=f"{recording.percent(0, from_ns=recording.begun_ns + SECOND // 2, to_ns=at):.1f} % "
        f"then {recording.percent(0, from_ns=at + SECOND // 10, to_ns=end):.1f} %",
        value=settles_after(recording, 0, from_ns=at, to_ns=end, due=60.0, within=2.0),
        unit="ms",
        target=100.0,
        samples=1,
        method="from the command's return to the first moment from which both the next second and "
        "all of the time after it have 60 ± 2 %",
    )
