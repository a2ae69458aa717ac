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

from checks import LIMIT, Check
from daemons import PATIENCE_S, await_that, daemon, settings_of
from findings import Finding
from grounds import Ground, Terms
from scenes import Part, kill_below, play
from turns import rate_of

from allotment.devices.compute_modes import ComputeMode
from allotment.model.errors import AllotError, PrerequisiteError
from allotment.modes.mps import MpsPlace

HERE: Final = Path(__file__).resolve().parent
HALF: Final = Terms(compute="50", memory="4Gi", others=("--mode", "mps"))
THROUGHPUT_TARGET: Final = 1.5
BACK_TARGET_S: Final = 2.0
_KERNEL_NS: Final = 200_000
_ENDLESS_S: Final = 600
_LOADED: Final = ("mps-0", "mps-1")
"""Shares that compute while their daemon is killed."""
_UNIT: Final = 2
"""Multiprocessors that the driver gives out together (a TPC)."""
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


def measure_mps(
    ground: Ground, *, quick: bool, change_settings: bool, python: str, with_torch: bool
) -> Iterator[Check | Finding]:
    """Check and measure shares of mode mps on the ground's GPU 0; without a daemon say why not.

    RuntimeError or `subprocess.SubprocessError` where a program fails that should not.
    """
    print("measuring: shares of mode mps", file=sys.stderr)
    before = settings_of(ground).compute_mode()
    asked = [sys.executable, "-c", _MULTIPROCESSORS]
    bare = subprocess.run(
        asked, env=ground.bare(0), capture_output=True, text=True, check=True, timeout=_ENDLESS_S
    )
    try:
        with daemon(ground, change_settings=change_settings):
            first = _run(ground, HALF, asked)
            if first.returncode != 0:
                raise PrerequisiteError(first.stderr.strip())
            yield _half(int(first.stdout), int(bare.stdout))
            yield from _limits(ground)
            yield _kept(ground, before, change_settings=change_settings)
    except AllotError as error:
        yield Check(name="shares of mode mps", is_right=None, seen=error.message)
        return
    yield _throughput(ground, quick=quick, change_settings=change_settings)
    if with_torch and not quick:
        yield _ceiling(ground, change_settings=change_settings, python=python)
    with daemon(ground, change_settings=change_settings) as place:
        killed = _kill(ground, place, rounds=1 if quick else 3)
        again = _run(ground, HALF, [sys.executable, "-c", _MULTIPROCESSORS])
    yield _back(killed)
    yield from judge_kills(killed, again.returncode)
    after = settings_of(ground).compute_mode()
    yield Check(
        name="the GPU's compute mode is what it was",
        is_right=after is before,
        seen=f"{before.name} before, {after.name} after",
    )


def _run(ground: Ground, terms: Terms, command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run to the end in a share."""
    return subprocess.run(
        [*ground.shared(terms, 0, "mps-0"), *command],
        env=ground.outside(),
        capture_output=True,
        text=True,
        timeout=_ENDLESS_S,
        check=False,
    )


def _limits(ground: Ground) -> Iterator[Check]:
    burn = [sys.executable, "-m", "allotment", "burn", "--chunk", "2Mi", "-o", "json"]
    for name, words in (
        ("a program of mode mps gets its share's memory and no more", ["--memory", "6Gi"]),
        (
            "two programs of one share have its memory together",
            ["--memory", "3Gi", "--processes", "2"],
        ),
    ):
        done = _run(ground, HALF, [*burn, *words])
        report = _document(done)
        yield Check(
            name=name,
            is_right=done.returncode == 9 and 0 < report["got_bytes"] <= LIMIT,
            seen=f"got {report['got_bytes']} of {LIMIT}, exit status {done.returncode}",
        )


def _half(part: int, whole: int) -> Check:
    return Check(
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


def _kept(ground: Ground, before: ComputeMode, *, change_settings: bool) -> Check:
    """Look at the compute mode while there is a daemon."""
    now = settings_of(ground).compute_mode()
    wanted = ComputeMode.EXCLUSIVE_PROCESS if change_settings else before
    return Check(
        name="the GPU is kept for the clients of MPS"
        if change_settings
        else "a daemon runs without any change of the GPU's settings",
        is_right=now is wanted,
        seen=f"compute mode {now.name} meanwhile",
    )


def _throughput(ground: Ground, *, quick: bool, change_settings: bool) -> Finding:
    seconds, rounds = (1.7, 1) if quick else (5.0, 3)
    had: dict[str, list[float]] = {"bare": [], "soft": [], "mps": []}
    for _ in range(rounds):
        had["bare"].append(_together(ground, None, seconds))
        had["soft"].append(_together(ground, replace(HALF, others=()), seconds))
        with daemon(ground, change_settings=change_settings):
            had["mps"].append(_together(ground, HALF, seconds))
    rate = {way: statistics.median(figures) for way, figures in had.items()}
    ratios = [mps / bare for mps, bare in zip(had["mps"], had["bare"], strict=True)]
    return Finding(
        question="side by side",
        name="two programs whose kernels fill a quarter of the GPU, mode mps",
        without=f"{rate['bare']:.0f} kernels/s",
        seen=f"{rate['mps']:.0f} kernels/s (mode soft: {rate['soft']:.0f})",
        reached=statistics.median(ratios),
        unit="x",
        target=THROUGHPUT_TARGET,
        at_least=True,
        samples=rounds,
        method=f"kernels of {_KERNEL_NS // 1000} µs in one stream each: what both finish in a"
        f" second in two shares of 50 %, over {seconds - 1:.1f} s, against the driver's time"
        f" slicing; the least of {rounds} rounds {min(ratios):.2f}",
    )


def _together(ground: Ground, terms: Terms | None, seconds: float) -> float:
    """Return how many kernels two programs finish in a second."""
    command = _load(ground, seconds, is_in_half=terms is HALF)
    parts = [Part(command=command, terms=terms, name=f"mps-{number}") for number in range(2)]
    recording = play(ground, parts, is_sampled=False)
    work_ns = [float(rate_of(recording, part)) for part in range(2)]
    return sum(work_ns) / _KERNEL_NS


def _load(ground: Ground, seconds: float, *, is_in_half: bool) -> list[str]:
    """Give a load whose grids are a quarter of the whole GPU's, also where it sees half of it."""
    words = ("--progress", "--kernels", _KERNEL_NS, "--seconds", seconds)
    return ground.program("load", *words, "--fills-one-in", 2 if is_in_half else 4)


def _ceiling(ground: Ground, *, change_settings: bool, python: str) -> Finding:
    """Hold a program that wants all of the GPU to half of it, with nobody beside it."""
    seconds = 5.0
    command = [python, str(HERE / "torch_load.py"), "--size", "8192", "--seconds", str(seconds)]
    alone = float(rate_of(play(ground, [Part(command=command)], is_sampled=False), 0))
    with daemon(ground, change_settings=change_settings):
        part = Part(command=command, terms=HALF, name="mps-0")
        held = float(rate_of(play(ground, [part], is_sampled=False), 0))
    percent = held / alone * 100
    return Finding(
        question="a part of the multiprocessors",
        name="products of 8192 in a share of 50 %, mode mps",
        without="100 %",
        seen=f"{percent:.1f} %",
        reached=percent,
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


def _kill(ground: Ground, place: MpsPlace, *, rounds: int) -> list[Killed]:
    """Kill the daemon under load, and see when another takes clients."""
    seen = []
    for _ in range(rounds):
        with _two_loads(ground) as loads:
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


def _back(killed: Sequence[Killed]) -> Finding:
    waits = [each.back_s for each in killed]
    return Finding(
        question="kills",
        name="daemon killed under load: ready for clients again",
        without="",
        seen=f"p50 {statistics.median(waits):.2f} s",
        reached=max(waits),
        unit="s",
        target=BACK_TARGET_S,
        samples=len(waits),
        method="SIGKILL with two shares computing; until the status says that a server is active",
    )


def judge_kills(killed: Sequence[Killed], status_after: int) -> Iterator[Check]:
    """Check what has to hold beside the time; `status_after` is of a share that came later."""
    named = [each.named == frozenset(_LOADED) for each in killed]
    yield Check(
        name="a daemon's end names the shares that were on it",
        is_right=all(named),
        seen=f"both in {sum(named)} of {len(killed)}; last:"
        f" {', '.join(sorted(killed[-1].named)) or 'none'}",
    )
    ended = [all(each.statuses) for each in killed]
    yield Check(
        name="programs whose daemon was killed end with an error",
        is_right=all(ended),
        seen=f"both in {sum(ended)} of {len(killed)}; last: exit status"
        f" {' and '.join(map(str, killed[-1].statuses))}",
    )
    yield Check(
        name="a new share runs after its daemon was killed",
        is_right=status_after == 0,
        seen=f"exit status {status_after}",
    )


@contextmanager
def _two_loads(ground: Ground) -> Iterator[list[subprocess.Popen[str]]]:
    """Two shares that compute; what is left of them is killed at the end."""
    command = _load(ground, _ENDLESS_S, is_in_half=True)
    programs = [
        subprocess.Popen(
            [*ground.shared(HALF, 0, name), *command],
            env=ground.outside(),
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
