# SPDX-License-Identifier: Apache-2.0
"""Programs that take turns on a simulated GPU: what is measured, held back, and never stuck.

What each case checks is said in its C function; a case ends with 0 and without a word.
"""

from __future__ import annotations

import os
import re
import select
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import build_native
from shim_hosts import Share, ShimHosts

if TYPE_CHECKING:
    from typing import IO

    from allotment.ledger.leases import Seat, Terms

GIB = 1 << 30
MS = 1_000_000
SOURCES = build_native.NATIVE / "tests" / "shim"
PROGRAMS = ("host_compute", "host_launch", "host_streams")
BUILDS = ("plain", "address,undefined", "thread")
#: Compares times that sanitizers, ten times slower, change.
PLAIN_ONLY = {"gaps_are_not_charged", "the_programs_own_events_are_right"}
#: Compares memory with what was made: the more kernels wait at once, the more events there are.
MEASURED = PLAIN_ONLY | {"streams_leave_nothing_behind"}
#: gcc 12's ThreadSanitizer ends forked children of programs with threads; its AddressSanitizer
#: takes the stack of a cancelled thread for poisoned, and ends in its own clean-up of that thread.
NOT_UNDER = {"thread": {"forks_while_launching"}, "address,undefined": {"cancelled_threads"}}
#: What each case's share is promised, if not the whole device.
COMPUTE = {"without_turns_there_is_no_thread": None, "cancelled_threads": "0:20"}


@dataclass(frozen=True, slots=True)
class Turns:
    """Shares that take turns on GPU 0 of one machine."""

    folder: Path
    machine: Path
    uuid: str

    @property
    def device(self) -> Path:
        """The folder with the device's contract and leases."""
        return self.folder / "device"

    def share(self, name: str, compute: str | None, *, kind: str = "normal") -> tuple[Share, Seat]:
        """Make a share with a seat: `share("one", "30:80")`."""
        # Late: what needs the native libraries.
        from allotment import ledger
        from allotment.ledger import leases

        if not self.device.exists():
            self.device.mkdir()
            leases.create_device(self.device, self.uuid)
        directory = self.folder / name
        directory.mkdir()
        seat = leases.take(self.device, name, self.terms(compute, kind=kind))
        policy = ledger.DevicePolicy(uuid=self.uuid, memory_limit=4 * GIB, seat=seat)
        ledger.create(directory, ledger.Policy(name, name, (policy,)))
        for file in ("contract", "leases"):
            os.link(self.device / file, directory / f"{file}-0")
        return Share(directory, self.machine, (self.uuid,)), seat

    def terms(self, compute: str | None, *, kind: str = "normal") -> Terms:
        """Return terms as a seat has them; None: nobody asked for compute."""
        from allotment.ledger import leases
        from allotment.model.compute import Compute, ComputeClass, parse_compute

        if compute is None:
            return leases.Terms(Compute())
        return leases.Terms(
            replace(parse_compute(compute), kind=ComputeClass(kind), is_governed=True)
        )


@pytest.fixture
def turns(tmp_path: Path, machine: Callable[[str], Path]) -> Turns:
    """A machine with one GPU, whose shares take turns."""
    from allotment.devices import simulated

    path = machine("a100-80gb:1")
    folder = tmp_path / "turns"
    folder.mkdir()
    return Turns(folder, path, simulated.read_machine(path).devices[0].uuid)


def cases() -> list[object]:
    """Every case of every program, in every build that can run it."""
    found: list[object] = []
    for program in PROGRAMS:
        text = (SOURCES / f"{program}.c").read_text()
        table = text[text.index("static const test_case cases[]") :]
        for case in re.findall(r'\{"(\w+)",', table):
            for build in BUILDS:
                if build != "plain" and case in PLAIN_ONLY:
                    continue
                if case in NOT_UNDER.get(build, ()):
                    continue
                marks = [pytest.mark.measured] if case in MEASURED else []
                name = f"{program}-{case}-{build}"
                found.append(pytest.param(program, case, build, id=name, marks=marks))
    return found


@pytest.mark.parametrize(("program", "case", "build"), cases())
@pytest.mark.timeout(300)  # the first of a build compiles libraries and programs
def test_host_program(
    program: str,
    case: str,
    build: str,
    *,
    turns: Turns,
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    if build == "plain":
        hosts = request.getfixturevalue("shim_hosts")
    else:
        hosts = request.getfixturevalue("sanitized_hosts")(build)
    share, _ = turns.share("share", COMPUTE.get(case, "100"))
    hosts.expect(program, case, share, cwd=tmp_path)


# ---- several processes ----


@dataclass(slots=True)
class Load:
    """A program that keeps the device as busy as it may."""

    process: subprocess.Popen[bytes]
    output: IO[bytes]

    def had_ns(self, seconds: float) -> float:
        """Return which part of the device it has in the next `seconds`, between 0 and 1."""
        first = self._report()
        last = first
        while last[0] - first[0] < seconds * 1e9:
            last = self._report()
        return (last[1] - first[1]) / (last[0] - first[0])

    def gets_on(self) -> bool:
        """Tell whether it has anything new to report within a second."""
        while select.select([self.output], [], [], 0)[0]:
            self._report()
        return bool(select.select([self.output], [], [], 1)[0])

    def _report(self) -> tuple[int, int]:
        line = self.output.readline().decode()
        assert line, self.process.wait()
        when, busy = line.split()
        return int(when), int(busy)


@pytest.fixture
def load(shim_hosts: ShimHosts) -> Iterator[Callable[..., Load]]:
    """Starts a load in a share; each is killed at the end."""
    started: list[subprocess.Popen[bytes]] = []

    def start(share: Share, kernel_ns: int) -> Load:
        process = subprocess.Popen(
            [shim_hosts.program("host_launch"), "run", "60", str(kernel_ns)],
            env=shim_hosts.environment(share),
            stdout=subprocess.PIPE,
            bufsize=0,  # so that select tells of every line
        )
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        return Load(process, process.stdout)

    yield start
    for process in started:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


@pytest.mark.measured
@pytest.mark.parametrize("kernel_ns", [20_000, 200_000, 5 * MS])
def test_a_ceiling_holds(kernel_ns: int, *, turns: Turns, load: Callable[..., Load]) -> None:
    share, _ = turns.share("one", "30")
    one = load(share, kernel_ns)
    one.had_ns(0.5)
    had = one.had_ns(2)
    # Never above; below only where the machine under the test has other things to do.
    assert 0.2 < had < 0.33


@pytest.mark.measured
def test_guarantees_divide_the_device(turns: Turns, load: Callable[..., Load]) -> None:
    small = load(turns.share("small", "30:100")[0], 200_000)
    large = load(turns.share("large", "70:100")[0], 200_000)
    small.had_ns(0.5)
    large.had_ns(0.5)
    of_small, of_large = small.had_ns(2), large.had_ns(2)
    assert 0.24 < of_small / (of_small + of_large) < 0.36


@pytest.mark.measured
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_holder_that_is_gone_keeps_nobody(
    how: signal.Signals, *, turns: Turns, load: Callable[..., Load]
) -> None:
    first = load(turns.share("first", "50:100")[0], 200_000)
    second = load(turns.share("second", "50:100")[0], 200_000)
    first.had_ns(0.3)
    first.process.send_signal(how)
    while not second.gets_on():
        # It was stopped while it simulated the GPU, by a lock that no GPU has: at another moment.
        first.process.send_signal(signal.SIGCONT)
        time.sleep(0.05)
        first.process.send_signal(how)
    second.had_ns(0.5)
    assert second.had_ns(1) > 0.7
    if how == signal.SIGSTOP:
        first.process.send_signal(signal.SIGCONT)
        second.had_ns(0.5)
        assert 0.3 < second.had_ns(1) < 0.7


@pytest.mark.measured
def test_terms_change_while_it_runs(turns: Turns, load: Callable[..., Load]) -> None:
    from allotment.ledger import leases

    share, seat = turns.share("one", "20")
    one = load(share, 200_000)
    one.had_ns(0.5)
    assert one.had_ns(1) < 0.24
    leases.change(turns.device, seat, turns.terms("80"))
    one.had_ns(0.2)
    assert one.had_ns(1) > 0.6
    # Nobody asks for compute any more: no turns. And again.
    leases.change(turns.device, seat, turns.terms(None))
    one.had_ns(0.2)
    assert one.had_ns(1) > 0.85
    leases.change(turns.device, seat, turns.terms("20"))
    one.had_ns(0.3)
    assert one.had_ns(1) < 0.26


@pytest.mark.measured
def test_an_idle_part_is_lent_and_taken_back(turns: Turns, load: Callable[..., Load]) -> None:
    small = load(turns.share("small", "30:100")[0], 200_000)
    small.had_ns(0.3)
    assert small.had_ns(1) > 0.85
    load(turns.share("large", "70:100")[0], 200_000)
    small.had_ns(0.5)
    assert 0.2 < small.had_ns(1) < 0.4


def test_turns_that_cannot_be_opened_mean_no_launch(turns: Turns, shim_hosts: ShimHosts) -> None:
    share, _ = turns.share("one", "50")
    (share.directory / "leases-0").unlink()
    done = shim_hosts.run(
        [shim_hosts.program("host_launch"), "run", "1", "1000"], shim_hosts.environment(share)
    )
    assert done.returncode != 0
    assert "802" in done.stderr


@pytest.mark.measured
def test_figures_are_counted(turns: Turns, load: Callable[..., Load]) -> None:
    from allotment import ledger

    share, _ = turns.share("one", "20")
    one = load(share, 200_000)
    one.had_ns(1)
    time.sleep(0.1)
    (use,) = ledger.read(share.directory).devices
    assert use.gpu_ns > 100 * MS
    assert use.held_ns > 100 * MS
    assert use.throttled > 10
    assert sum(use.lease_waits) > 3


# ---- programs that do not run for long ----


@pytest.mark.measured
@pytest.mark.parametrize("how", ["exit", "_exit"])
def test_a_ceiling_holds_over_short_processes(
    how: str, *, turns: Turns, shim_hosts: ShimHosts
) -> None:
    """What a process has not charged when it ends, its share is charged all the same."""
    share, _ = turns.share("one", "20")
    begun = time.monotonic()
    for _ in range(6):
        command = [str(shim_hosts.program("host_brief")), how, str(100 * MS)]
        assert shim_hosts.run(command, shim_hosts.environment(share)).returncode == 0
    # The last one's debt is not waited for.
    assert 5 * 0.1 / (time.monotonic() - begun) < 0.24


@pytest.mark.measured
def test_a_ceiling_holds_over_short_contexts(turns: Turns, shim_hosts: ShimHosts) -> None:
    share, _ = turns.share("one", "20")
    command = [str(shim_hosts.program("host_brief")), "contexts", "6", str(100 * MS)]
    done = shim_hosts.run(command, shim_hosts.environment(share))
    had, took = map(int, done.stdout.split())
    assert (had - 100 * MS) / took < 0.24


@pytest.mark.measured
def test_gaps_of_one_are_work_of_the_other(turns: Turns, shim_hosts: ShimHosts) -> None:
    """Two that wait for each result: the device is busy in the gaps of each."""
    command = [str(shim_hosts.program("host_brief")), "gaps", "3", str(2 * MS), str(MS)]
    both = [
        subprocess.Popen(
            command,
            env=shim_hosts.environment(turns.share(name, "50:100")[0]),
            stdout=subprocess.PIPE,
            text=True,
        )
        for name in ("one", "other")
    ]
    parts = [int(had) / int(took) for had, took in (each.communicate()[0].split() for each in both)]
    # One after the other, gaps and all, they would have two thirds together; each by itself too.
    assert sum(parts) > 0.72
    assert min(parts) > 0.3


@pytest.mark.measured
def test_long_kernels_are_paid_back(turns: Turns, load: Callable[..., Load]) -> None:
    long = load(turns.share("long", "80:100")[0], 400 * MS)
    short = load(turns.share("short", "20:100")[0], 2 * MS)
    short.had_ns(1)
    assert 0.12 < short.had_ns(4) < 0.3
    long.process.kill()
