# SPDX-License-Identifier: Apache-2.0
"""What a share adds to single calls.

Bare and wrapped calls alternate in one process, so that caches, clocks and neighbours are the same
for both; what a share adds is the median of the differences within pairs. pyperf does not fit: its
values are of one side, each from another process.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from bench.harness.options import Options
from bench.harness.programs import begin, expect, running
from bench.harness.quantiles import Summary
from bench.harness.results import Result
from bench.overhead.rig import ShareRig
from bench.overhead.sizes import Sizes

_CROWD: Final = 8
_PAIRED: Final = "bare and wrapped calls alternate in one process; median of the differences"
_TARGETS_NS: Final = {
    "allocate 64 MiB": 2000.0,
    "free 64 MiB": 1000.0,
    "allocate 4 KiB": 2000.0,
    "free 4 KiB": 1000.0,
    "launch": 60.0,
    "launch a graph": 60.0,
    "cuMemGetInfo": 1000.0,
}


def allocate(rig: ShareRig, options: Options) -> Iterator[Result]:
    """Allocate and free, in a process that is alone."""
    for answer in _answers(rig, options, "allocate"):
        yield _result(answer)


def launch(rig: ShareRig, options: Options) -> Iterator[Result]:
    """Launch kernels and graphs of them."""
    for answer in _answers(rig, options, "launch"):
        yield _result(answer)


def query(rig: ShareRig, options: Options) -> Iterator[Result]:
    """Call what a share answers itself, and what it does not wrap."""
    for answer in _answers(rig, options, "query"):
        if answer["operation"].startswith("unwrapped call"):
            yield _unwrapped(answer)
        else:
            yield _result(answer)


def crowd(rig: ShareRig, options: Options) -> Iterator[Result]:
    """Allocate and free in eight processes of one share at once."""
    sizes = Sizes(quick=options.is_quick)
    share = rig.make_share("crowd", rig.device.allottable_bytes)
    command = rig.program("calls", sizes.crowd_pairs, sizes.crowd_ms, "allocate")
    with running([command] * _CROWD, rig.inside(share)) as programs:
        answers = begin(programs)
    for index, name in enumerate(
        ("allocate 64 MiB", "free 64 MiB", "allocate 4 KiB", "free 4 KiB")
    ):
        expect(answers[0][index]["operation"], name)
        yield pair_result(
            [answer[index] for answer in answers],
            name=f"{name}, {_CROWD} processes at once",
            target=_TARGETS_NS[name],
            method=f"{_PAIRED}; in {_CROWD} processes of one share at once; median process",
        )


def _answers(rig: ShareRig, options: Options, operation: str) -> list[dict[str, Any]]:
    sizes = Sizes(quick=options.is_quick)
    share = rig.make_share(operation, rig.device.allottable_bytes)
    command = rig.program("calls", sizes.pairs, sizes.pairs_ms, operation)
    with running([command], rig.inside(share)) as programs:
        (answers,) = begin(programs)
    return answers


def _result(answer: Mapping[str, Any]) -> Result:
    operation = answer["operation"]
    return pair_result([answer], name=operation, target=_TARGETS_NS[operation])


def _unwrapped(answer: Mapping[str, Any]) -> Result:
    result = pair_result([answer], name="a call that is not wrapped", target=0.0)
    if answer["operation"] != "unwrapped call, same address":
        return result
    method = (
        "dlsym and cuGetProcAddress give the driver's own address, so nothing can be added;"
        " times as of the other calls"
    )
    return replace(result, value=0.0, method=method)


def _median_process(answers: Sequence[Mapping[str, float]]) -> Summary:
    """Combine what several processes measured at the same time: the median one of each figure."""
    return Summary(
        p50=statistics.median(answer["p50"] for answer in answers),
        p99=statistics.median(answer["p99"] for answer in answers),
    )


def pair_result(
    answers: Sequence[Mapping[str, Any]],
    *,
    name: str,
    target: float | None,
    unit: str = "ns",
    factor: float = 1.0,
    method: str = _PAIRED,
) -> Result:
    """Return the result of pairs that one or several processes measured."""
    added = _median_process([answer["added"] for answer in answers]).scaled(factor)
    return Result(
        name=name,
        unit=unit,
        value=added.p50,
        target=target,
        samples=sum(answer["samples"] for answer in answers),
        method=method,
        base=_median_process([answer["bare"] for answer in answers]).scaled(factor),
        summary=_median_process([answer["wrapped"] for answer in answers]).scaled(factor),
    )
