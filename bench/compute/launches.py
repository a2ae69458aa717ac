# SPDX-License-Identifier: Apache-2.0
"""What does a compute limit add to a launch on an idle GPU?"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from bench.compute.rig import Rig, Terms
from bench.compute.sizes import Sizes
from bench.harness.options import Options
from bench.harness.results import Result

_TERMS: Final = (
    (Terms(compute="50:100"), "no ceiling"),
    (Terms(compute="90"), "a ceiling of 90"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Bursts:
    """What is launched: so many kernels at once, each so long."""

    kernel_ns: int
    length: int
    one_in: int
    """Of the bursts asked for: long ones are timed less often."""
    words: str
    target_ns: float

    @property
    def name(self) -> str:
        """Return what is launched, where it differs from the other rows."""
        return "" if self.kernel_ns == 5000 else f", {self.words}"


_SHORT: Final = _Bursts(
    kernel_ns=5000, length=16, one_in=1, words="bursts of 16 of 5us", target_ns=60
)
_LONG: Final = (
    _Bursts(kernel_ns=200_000, length=16, one_in=32, words="bursts of 16 of 200us", target_ns=300),
    _Bursts(kernel_ns=200_000, length=1, one_in=4, words="one at a time of 200us", target_ns=300),
)

_GRAPHS_MS: Final = 5000
_PAIRED: Final = (
    "through the shim and past it in alternating order in one process; p50 / p99; the median of"
    " the differences within pairs, per launch"
)
_BURSTS: Final = (
    "one process alone on a GPU; bursts of 16 launches of 5us kernels on an idle stream, where the"
    f" row names no others, {_PAIRED}, with the shim's event records"
)
_GRAPHS: Final = (
    "one process alone on a GPU; bursts of 16 launches of a graph of one short kernel, each burst"
    f" waited for, {_PAIRED}"
)


def limited_launch(rig: Rig, options: Options) -> Iterator[Result]:
    """Measure launches through the shim and past it, in pairs, alone on a device."""
    sizes = Sizes.of(options)
    for bursts in (_SHORT, *_LONG):
        for terms, name in _TERMS:
            launch, whole, by_hand, calls = _time(rig, sizes, terms, bursts)
            row = f"added to a launch, p50: {name}{bursts.name}"
            yield _added(launch, row, bursts.target_ns, _BURSTS)
            yield _added_by_hand(by_hand, bursts, name)
            if bursts.length == 1:
                yield _added_to_whole(whole, bursts, name)
            if calls["with_system_calls"] >= 0:
                yield _with_calls(calls, bursts, name)
    for terms, name in _TERMS:
        row = f"added to a launch of a graph, p50: {name}"
        yield _added(_time_graphs(rig, sizes, terms), row, 100, _GRAPHS)


def _time(rig: Rig, sizes: Sizes, terms: Terms, bursts: _Bursts) -> list[dict[str, Any]]:
    pairs = sizes.pairs // bursts.one_in
    program = rig.program("launches", bursts.kernel_ns, bursts.length, pairs)
    return _said(rig, terms, program)


def _time_graphs(rig: Rig, sizes: Sizes, terms: Terms) -> dict[str, Any]:
    said = _said(rig, terms, rig.program("calls", sizes.pairs, _GRAPHS_MS, "launch"))
    return next(each for each in said if each["operation"] == "launch a graph")


def _said(rig: Rig, terms: Terms, program: list[str]) -> list[dict[str, Any]]:
    """Return what a program in a share of these terms says, alone on a device."""
    done = subprocess.run(
        [*rig.shared(terms, 0, "launching"), *program],
        env=rig.outside(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    # They also print that they begin.
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def _added(pairs: dict[str, Any], name: str, target_ns: float, method: str) -> Result:
    return Result(
        topic="launches",
        name=name,
        beside=f"{pairs['bare']['p50']:.0f} / {pairs['bare']['p99']:.0f} ns",
        seen=f"{pairs['wrapped']['p50']:.0f} / {pairs['wrapped']['p99']:.0f} ns",
        value=pairs["added"]["p50"],
        unit="ns",
        target=target_ns,
        samples=pairs["samples"],
        method=method,
    )


def _added_by_hand(pairs: dict[str, Any], bursts: _Bursts, name: str) -> Result:
    return Result(
        topic="by hand",
        name=f"the same, of event records by hand: {name}{bursts.name}",
        beside=f"{pairs['bare']['p50']:.0f} / {pairs['bare']['p99']:.0f} ns",
        seen=f"{pairs['wrapped']['p50']:.0f} / {pairs['wrapped']['p99']:.0f} ns",
        value=pairs["added"]["p50"],
        unit="ns",
        target=None,
        samples=pairs["samples"],
        method="the same launches in turn with those, past the shim, with an event recorded before "
        "the burst and one behind each millisecond of its kernels: what the driver takes for "
        "measuring alone, of what the shim adds",
    )


def _added_to_whole(pairs: dict[str, Any], bursts: _Bursts, name: str) -> Result:
    bare, wrapped = (
        f"{pairs[side]['p50'] / 1000:.1f} / {pairs[side]['p99'] / 1000:.1f} us"
        for side in ("bare", "wrapped")
    )
    return Result(
        topic="launch and wait",
        name=f"added to a launch and its wait, p50: {name}{bursts.name}",
        beside=bare,
        seen=wrapped,
        value=pairs["added"]["p50"] / 1000,
        unit="us",
        target=None,
        samples=pairs["samples"],
        method="the same launches one at a time, from before the launch to the kernel's end seen "
        "by an event whose wait sleeps, the kernel's own time included",
    )


def _with_calls(calls: dict[str, Any], bursts: _Bursts, name: str) -> Result:
    return Result(
        topic="system calls",
        name=f"launches with a system call on their way: {name}{bursts.name}",
        seen=f"{calls['with_system_calls']} of {calls['launches']}",
        value=calls["with_system_calls"] / calls["launches"] * 100,
        unit="%",
        target=1.0,
        samples=calls["launches"],
        method="counted by the kernel (PR_SET_SYSCALL_USER_DISPATCH), the same bursts; "
        "the common path has none when only rare launches have one",
    )
