# SPDX-License-Identifier: Apache-2.0
"""Shares of mode mps on a real GPU: limits, work done together, and a daemon that is killed.

The two programs that run together launch kernels which fill a quarter of the GPU. Without shares
the driver slices time between them, in mode soft the shares take turns, and in mode mps each runs
on its half of the multiprocessors.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from allotment.devices.compute_modes import ComputeMode
from allotment.model.errors import AllotError, PrerequisiteError
from allotment.modes.mps.state import MpsPlace
from bench.compute.rig import Rig, Terms
from bench.compute.scene import Part, kill_below, play
from bench.gpu.checks import LIMIT
from bench.gpu.daemons import PATIENCE_S, await_that, daemon, settings_of
from bench.gpu.rig import GpuRig
from bench.gpu.turns import rate_of
from bench.harness.options import Options
from bench.harness.results import Result, check

HERE: Final = Path(__file__).resolve().parent
HALF: Final = Terms(compute="50", memory="4Gi", others=("--mode", "mps"))
THROUGHPUT_TARGET: Final = 1.5
BACK_TARGET_S: Final = 2.0
_KERNEL_NS: Final = 200_000
_ENDLESS_S: Final = 600
_LOADED: Final = ("mps-0", "mps-1")
"""Shares that compute while their daemon is killed."""
_UNIT: Final = 2
"""Multiprocessors that the driver assigns together (a TPC)."""
_MULTIPROCESSORS: Final = """
import ctypes
cuda, device, count = ctypes.CDLL("libcuda.so.1"), ctypes.c_int(), ctypes.c_int()
context = ctypes.c_void_p()
assert not cuda.cuInit(0)
assert not cuda.cuDeviceGet(ctypes.byref(device), 0)
assert not cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
assert not cuda.cuDeviceGetAttribute(ctypes.byref(count), 16, device)
print(count.value)
"""


def gpu_mps(gpu: GpuRig, options: Options) -> Iterator[Result]:
    """Check and measure shares of mode mps."""
    with gpu.machine() as rig:
        yield from _mps(rig, options, with_torch=gpu.torch is not None)


def _mps(rig: Rig, options: Options, *, with_torch: bool) -> Iterator[Result]:
    """Check and measure shares of mode mps on the rig's GPU 0; without a daemon report why.

    RuntimeError or `subprocess.SubprocessError` where a program fails that should not.
    """
    quick, change_settings = options.is_quick, options.change_settings
    before = settings_of(rig).compute_mode()
    asked = [sys.executable, "-c", _MULTIPROCESSORS]
    bare = subprocess.run(
        asked, env=rig.bare(0), capture_output=True, text=True, check=True, timeout=_ENDLESS_S
    )
    try:
        with daemon(rig, change_settings=change_settings):
            first = _run(rig, HALF, asked)
            if first.returncode != 0:
                raise PrerequisiteError(first.stderr.strip())
            yield _half(int(first.stdout), int(bare.stdout))
            yield from _limits(rig)
            yield _kept(rig, before, change_settings=change_settings)
    except AllotError as error:
        yield check(name="shares of mode mps", is_right=None, seen=error.message)
        return
    yield _throughput(rig, quick=quick, change_settings=change_settings)
    if with_torch and not quick:
        yield _ceiling(rig, change_settings=change_settings, python=options.python)
    with daemon(rig, change_settings=change_settings) as place:
        killed = _kill(rig, place, rounds=1 if quick else 3)
        again = _run(rig, HALF, [sys.executable, "-c", _MULTIPROCESSORS])
    yield _back(killed)
    yield from judge_kills(killed, again.returncode)
    after = settings_of(rig).compute_mode()
    yield check(
        name="the GPU's compute mode is what it was",
        is_right=after is before,
        seen=f"{before.name} before, {after.name} after",
    )


def _run(rig: Rig, terms: Terms, command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run to the end in a share."""
    return subprocess.run(
        [*rig.shared(terms, 0, "mps-0"), *command],
        env=rig.outside(),
        capture_output=True,
        text=True,
        timeout=_ENDLESS_S,
        check=False,
    )


def _limits(rig: Rig) -> Iterator[Result]:
    burn = [sys.executable, "-m", "allotment", "burn", "--chunk", "2Mi", "-o", "json"]
    for name, words in (
        ("a program of mode mps gets its share's memory and no more", ["--memory", "6Gi"]),
        (
            "two programs of one share have its memory together",
            ["--memory", "3Gi", "--processes", "2"],
        ),
    ):
        done = _run(rig, HALF, [*burn, *words])
        report = _document(done)
        yield check(
            name=name,
            is_right=done.returncode == 9 and 0 < report["got_bytes"] <= LIMIT,
            seen=f"got {report['got_bytes']} of {LIMIT}, exit status {done.returncode}",
        )


def _half(part: int, whole: int) -> Result:
    return check(
        name="a share of 50 % has half of the multiprocessors",
        is_right=abs(part - whole / 2) <= _UNIT,
        seen=f"{part} of {whole}",
    )


def _document(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    try:
        document: dict[str, Any] = json.loads(done.stdout)
    except json.JSONDecodeError:
        message = f"{done.args} answered nothing: {done.stderr.strip()[-2000:]}"
        raise RuntimeError(message) from None
    return document


def _kept(rig: Rig, before: ComputeMode, *, change_settings: bool) -> Result:
    """Look at the compute mode while there is a daemon."""
    now = settings_of(rig).compute_mode()
    wanted = ComputeMode.EXCLUSIVE_PROCESS if change_settings else before
    return check(
        name="the GPU is kept for the clients of MPS"
        if change_settings
        else "a daemon runs without any change of the GPU's settings",
        is_right=now is wanted,
        seen=f"compute mode {now.name} meanwhile",
    )


def _throughput(rig: Rig, *, quick: bool, change_settings: bool) -> Result:
    seconds, rounds = (1.7, 1) if quick else (5.0, 3)
    had: dict[str, list[float]] = {"bare": [], "soft": [], "mps": []}
    for _ in range(rounds):
        had["bare"].append(_together(rig, None, seconds))
        had["soft"].append(_together(rig, replace(HALF, others=()), seconds))
        with daemon(rig, change_settings=change_settings):
            had["mps"].append(_together(rig, HALF, seconds))
    rate = {way: statistics.median(figures) for way, figures in had.items()}
    ratios = [mps / bare for mps, bare in zip(had["mps"], had["bare"], strict=True)]
    return Result(
        topic="side by side",
        name="two programs whose kernels fill a quarter of the GPU, mode mps",
        beside=f"{rate['bare']:.0f} kernels/s",
        seen=f"{rate['mps']:.0f} kernels/s (mode soft: {rate['soft']:.0f})",
        value=statistics.median(ratios),
        unit="x",
        target=THROUGHPUT_TARGET,
        at_least=True,
        samples=rounds,
        method=f"kernels of {_KERNEL_NS // 1000} µs in one stream each: what both finish in a"
        f" second in two shares of 50 %, over {seconds - 1:.1f} s, against the driver's time"
        f" slicing; the least of {rounds} rounds {min(ratios):.2f}",
    )


def _together(rig: Rig, terms: Terms | None, seconds: float) -> float:
    """Return how many kernels two programs finish in a second."""
    command = _load(rig, seconds, is_in_half=terms is HALF)
    parts = [Part(command=command, terms=terms, name=f"mps-{number}") for number in range(2)]
    recording = play(rig, parts, is_sampled=False)
    work_ns = [float(rate_of(recording, part)) for part in range(2)]
    return sum(work_ns) / _KERNEL_NS


def _load(rig: Rig, seconds: float, *, is_in_half: bool) -> list[str]:
    """Return a load whose grids are a quarter of the whole GPU's, also where it sees half of it."""
    words = ("--progress", "--kernels", _KERNEL_NS, "--seconds", seconds)
    return rig.program("load", *words, "--fills-one-in", 2 if is_in_half else 4)


def _ceiling(rig: Rig, *, change_settings: bool, python: str) -> Result:
    """Hold a program that wants all of the GPU to half of it, alone on the GPU."""
    seconds = 5.0
    command = [python, str(HERE / "torch_load.py"), "--size", "8192", "--seconds", str(seconds)]
    alone = float(rate_of(play(rig, [Part(command=command)], is_sampled=False), 0))
    with daemon(rig, change_settings=change_settings):
        part = Part(command=command, terms=HALF, name="mps-0")
        held = float(rate_of(play(rig, [part], is_sampled=False), 0))
    percent = held / alone * 100
    return Result(
        topic="a part of the multiprocessors",
        name="products of 8192 in a share of 50 %, mode mps",
        beside="100 %",
        seen=f"{percent:.1f} %",
        value=percent,
        unit="%",
        target=60.0,
        samples=1,
        method="what it finishes in a second against the same program alone; clocks may be higher"
        " with half of the GPU at rest",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Killed:
    """What became of two shares whose daemon was killed."""

    back_s: float
    """Until a server was active again."""
    named: frozenset[str]
    """Shares that the loss names."""
    statuses: tuple[int, ...]
    """With which the programs ended."""


def _kill(rig: Rig, place: MpsPlace, *, rounds: int) -> list[Killed]:
    """Kill the daemon under load, and see when another takes clients."""
    seen = []
    for _ in range(rounds):
        with _two_loads(rig) as loads:
            before = place.status()
            if before.daemon is None:
                message = "there is no daemon to kill"
                raise RuntimeError(message)
            os.kill(before.daemon, signal.SIGKILL)
            restarts = before.restarts
            back_s = await_that(
                lambda: place.status().restarts > restarts,  # noqa: B023 - waited for here
                "the daemon does not come back",
            )
            losses = place.status().losses
            seen.append(
                Killed(
                    back_s=back_s,
                    named=frozenset(losses[-1].shares if losses else ()),
                    statuses=tuple(each.wait(timeout=_ENDLESS_S) for each in loads),
                )
            )
    return seen


def _back(killed: Sequence[Killed]) -> Result:
    waits = [each.back_s for each in killed]
    return Result(
        topic="kills",
        name="daemon killed under load: ready for clients again",
        seen=f"p50 {statistics.median(waits):.2f} s",
        value=max(waits),
        unit="s",
        target=BACK_TARGET_S,
        samples=len(waits),
        method="SIGKILL with two shares computing; until the status says that a server is active",
    )


def judge_kills(killed: Sequence[Killed], status_after: int) -> Iterator[Result]:
    """Check what has to hold beside the time; `status_after` is of a share that came later."""
    named = [each.named == frozenset(_LOADED) for each in killed]
    yield check(
        name="a daemon's end names the shares that were on it",
        is_right=all(named),
        seen=f"both in {sum(named)} of {len(killed)}; last:"
        f" {', '.join(sorted(killed[-1].named)) or 'none'}",
    )
    ended = [all(each.statuses) for each in killed]
    yield check(
        name="programs whose daemon was killed end with an error",
        is_right=all(ended),
        seen=f"both in {sum(ended)} of {len(killed)}; last: exit status"
        f" {' and '.join(map(str, killed[-1].statuses))}",
    )
    yield check(
        name="a new share runs after its daemon was killed",
        is_right=status_after == 0,
        seen=f"exit status {status_after}",
    )


@contextmanager
def _two_loads(rig: Rig) -> Iterator[list[subprocess.Popen[str]]]:
    """Two shares that compute; what is left of them is killed at the end."""
    command = _load(rig, _ENDLESS_S, is_in_half=True)
    programs = [
        subprocess.Popen(
            [*rig.shared(HALF, 0, name), *command],
            env=rig.outside(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for name in _LOADED
    ]
    try:
        for each in programs:
            _begin(each)
        yield programs
    finally:
        for each in programs:
            if each.poll() is None:
                kill_below(each.pid)
            each.communicate(timeout=PATIENCE_S)


def _begin(program: subprocess.Popen[str]) -> None:
    """Wait until it is ready, and let it begin."""
    if program.stdout is None or program.stdout.readline().strip() != "ready":
        message = f"{program.args!r} did not start"
        raise RuntimeError(message)
    if program.stdin is not None:
        program.stdin.close()
        program.stdin = None
