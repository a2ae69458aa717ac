# SPDX-License-Identifier: Apache-2.0
"""Programs that take turns on a simulated GPU: what is measured, held back, and never stuck.

What each case checks is said in its C function; a case ends with 0 and without a word.
"""

from __future__ import annotations

import fcntl
import os
import select
import signal
import struct
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from allotment.devices.packing import read_machine
from allotment.model.structs import replace
from shim_hosts import Share, ShimHosts, case_names

if TYPE_CHECKING:
    from typing import IO

    from allotment.ledger.leases import Seat, Terms

GIB = 1 << 30
MS = 1_000_000
PROGRAMS = ("host_compute", "host_launch", "host_streams")
BUILDS = ("plain", "address,undefined", "thread")
#: Compares times that sanitizers, ten times slower, change.
PLAIN_ONLY = {"gaps_are_not_charged", "the_programs_own_events_are_right"}
#: Takes libc's place, where a sanitizer stands already.
NOT_SANITIZED = {
    "without_memory_nothing_is_launched",
    "without_memory_nothing_stays_allocated",
}
#: Compares what was charged with what the GPU did, or memory with what was made. A program that was
#: kept from launching is charged for the gap, and more events exist while more kernels wait: one of
#: several rounds must be right.
MEASURED = PLAIN_ONLY | {
    "a_callback_waits_for_a_launch",
    "a_callback_waits_for_another_stream",
    "a_context_that_begins_with_a_wait",
    "captures_are_left_alone",
    "contexts_go_with_work_queued",
    "contexts_leave_nothing_behind",
    "copies_have_their_own_account",
    "eight_threads",
    "every_form_is_measured",
    "forks_while_launching",
    "graphs_count_by_what_they_took",
    "kernels_get_longer_after_a_wait",
    "kernels_of_every_length",
    "launches_that_block_are_charged",
    "long_kernels_of_many_streams_queue_little",
    "others_hold_the_context_too",
    "refused_launches_leave_nothing",
    "short_kernels_hide_no_long_one",
    "streams_go_while_others_look",
    "streams_leave_nothing_behind",
    "streams_overlap",
    "two_contexts_at_once",
    "waiting_streams_are_not_charged",
    "waits_behind_a_kernel_of_the_legacy_stream_are_not_charged",
    "waits_for_the_legacy_stream_are_not_charged",
    "waits_of_a_whole_context_are_not_charged",
}
#: gcc 12's ThreadSanitizer ends forked children of programs with threads; its AddressSanitizer
#: takes the stack of a cancelled thread for poisoned, and ends in its own clean-up of that thread.
CANCELLED = {
    "cancelled_threads",
    "cancelled_at_each_place",
    "a_cancelled_thread_launches_first",
}
NOT_UNDER = {"thread": {"forks_while_launching"}, "address,undefined": CANCELLED}
# native/lease.h
PLACES = 128
PLACE_LOCK_BASE = 0x50000000
#: How often a figure is measured at most.
WINDOWS = 10
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
        from allotment.modes.turns import link_files

        if not self.device.exists():
            self.device.mkdir()
            leases.create_device(self.device, self.uuid)
        directory = self.folder / name
        directory.mkdir()
        seat = leases.take(self.device, name, self.terms(compute, kind=kind))
        policy = ledger.DevicePolicy(uuid=self.uuid, memory_limit=4 * GIB, seat=seat)
        ledger.create(directory, ledger.LedgerPolicy(name, name, (policy,)))
        link_files(self.device.parent, self.device.name, directory, 0, seat)
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


def make_turns(folder: Path, path: Path) -> Turns:
    """Shares that take turns on the one GPU of the machine at `path`."""

    folder.mkdir()
    return Turns(folder, path, read_machine(path).devices[0].uuid)


@pytest.fixture
def turns(tmp_path: Path, machine: Callable[[str], Path]) -> Turns:
    """A machine with one GPU, whose shares take turns."""
    return make_turns(tmp_path / "turns", machine("a100-80gb:1"))


def builds() -> list[object]:
    """Every program in every build, and its measured cases by themselves."""
    found: list[object] = []
    for program in PROGRAMS:
        for build in BUILDS:
            names = [
                name
                for name in case_names(program)
                if (build == "plain" or name not in PLAIN_ONLY | NOT_SANITIZED)
                and name not in NOT_UNDER.get(build, ())
            ]
            for measured in (False, True):
                chosen = [name for name in names if (name in MEASURED) is measured]
                marks = [pytest.mark.measured] if measured else []
                if build != "plain":
                    marks.append(pytest.mark.thorough)
                if chosen:
                    name = f"{program}-{build}{'-measured' if measured else ''}"
                    found.append(pytest.param(program, chosen, build, id=name, marks=marks))
    return found


@pytest.mark.parametrize(("program", "cases", "build"), builds())
@pytest.mark.timeout(600)  # the first of a build compiles libraries and programs
def test_host_program(
    program: str,
    cases: list[str],
    build: str,
    *,
    machine: Callable[[str], Path],
    hosts_of: Callable[[str], ShimHosts],
    tmp_path: Path,
) -> None:
    def make_share(case: str) -> Share:
        path = machine("a100-80gb:1")
        turns = make_turns(path.parent / f"turns-{case}", path)
        return turns.share("share", COMPUTE.get(case, "100"))[0]

    rounds = WINDOWS if MEASURED.issuperset(cases) else 1
    hosts_of(build).expect_each(
        program, cases, make_share, folder=tmp_path / "cases", rounds=rounds
    )


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


def reach(measure: Callable[[], float], low: float, high: float) -> None:
    """Measures until a figure lies between the bounds: what else the machine does spoils some."""
    figures: list[float] = []
    while len(figures) < WINDOWS:
        figures.append(measure())
        if low < figures[-1] < high:
            return
    pytest.fail(f"never between {low} and {high}: {figures}")


@pytest.mark.measured
@pytest.mark.parametrize("kernel_ns", [20_000, 200_000, 5 * MS])
def test_a_ceiling_holds(kernel_ns: int, *, turns: Turns, load: Callable[..., Load]) -> None:
    share, _ = turns.share("one", "30")
    one = load(share, kernel_ns)
    one.had_ns(0.5)

    def window() -> float:
        had = one.had_ns(2)
        assert had < 0.33, "above its ceiling, whatever else the machine does"
        return had

    reach(window, 0.2, 0.33)


@pytest.mark.measured
def test_guarantees_divide_the_device(turns: Turns, load: Callable[..., Load]) -> None:
    small = load(turns.share("small", "30:100")[0], 200_000)
    large = load(turns.share("large", "70:100")[0], 200_000)
    small.had_ns(0.5)
    large.had_ns(0.5)

    def part_of_small() -> float:
        of_small, of_large = small.had_ns(1), large.had_ns(1)
        return of_small / (of_small + of_large)

    reach(part_of_small, 0.24, 0.36)


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
    reach(lambda: second.had_ns(1), 0.7, 1.1)
    if how == signal.SIGSTOP:
        first.process.send_signal(signal.SIGCONT)
        second.had_ns(0.5)
        reach(lambda: second.had_ns(1), 0.3, 0.7)


@pytest.mark.measured
def test_terms_change_while_it_runs(turns: Turns, load: Callable[..., Load]) -> None:
    from allotment.ledger import leases

    share, seat = turns.share("one", "20")
    one = load(share, 200_000)
    one.had_ns(0.5)
    assert one.had_ns(1) < 0.24
    leases.change(turns.device, seat, turns.terms("80"))
    reach(lambda: one.had_ns(1), 0.6, 0.84)
    # Nobody asks for compute any more: no turns. And again.
    leases.change(turns.device, seat, turns.terms(None))
    reach(lambda: one.had_ns(1), 0.85, 1.1)
    leases.change(turns.device, seat, turns.terms("20"))
    reach(lambda: one.had_ns(1), 0.0, 0.24)


@pytest.mark.measured
def test_an_idle_part_is_lent_and_taken_back(turns: Turns, load: Callable[..., Load]) -> None:
    small = load(turns.share("small", "30:100")[0], 200_000)
    reach(lambda: small.had_ns(1), 0.85, 1.1)
    load(turns.share("large", "70:100")[0], 200_000)
    reach(lambda: small.had_ns(1), 0.2, 0.4)


def test_turns_that_cannot_be_opened_mean_no_launch(turns: Turns, shim_hosts: ShimHosts) -> None:
    share, _ = turns.share("one", "50")
    (share.directory / "seat-0").unlink()
    done = shim_hosts.run(
        [shim_hosts.program("host_launch"), "run", "1", "1000"], shim_hosts.environment(share)
    )
    assert done.returncode != 0
    assert "802" in done.stderr


def test_no_place_left_means_no_launch(turns: Turns, shim_hosts: ShimHosts) -> None:
    share, _ = turns.share("one", "50")
    command: list[str | Path] = [shim_hosts.program("host_launch"), "run", "0.1", "1000"]
    with (share.directory / "usage").open("r+b") as usage:
        # As so many processes that compute: struct flock {type, whence, start, length, pid}.
        places = struct.pack(
            "hhxxxxqqixxxx", fcntl.F_WRLCK, os.SEEK_SET, PLACE_LOCK_BASE, PLACES, 0
        )
        fcntl.fcntl(usage, fcntl.F_OFD_SETLK, places)
        done = shim_hosts.run(command, shim_hosts.environment(share))
        assert done.returncode != 0
        assert "802" in done.stderr
        assert "has no room for another process; end some" in done.stderr
    done = shim_hosts.run(command, shim_hosts.environment(share))
    assert (done.returncode, done.stderr) == (0, "")


def test_figures_are_counted(turns: Turns, load: Callable[..., Load]) -> None:
    from allotment import ledger

    share, _ = turns.share("one", "20")
    one = load(share, 200_000)

    def is_counted() -> bool:
        (use,) = ledger.read(share.directory).devices
        times = min(use.gpu_ns, use.held_ns)
        return times > 100 * MS and use.throttled > 10 and sum(use.lease_waits) > 3

    while not is_counted():  # the test's time-out ends it
        one.had_ns(0.2)


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
    # The last one's debt is not waited for. Of one that ends by _exit only what its keeper saw is
    # charged, so that one waits for that.
    assert 5 * 0.1 / (time.monotonic() - begun) < 0.24


@pytest.mark.measured
def test_a_wait_for_the_host_is_not_charged_to_the_share_of_a_killed_process(
    turns: Turns, shim_hosts: ShimHosts
) -> None:
    """Two seconds at a ceiling of ten percent would hold the next program up for twenty."""
    environment = shim_hosts.environment(turns.share("one", "10")[0])
    brief = str(shim_hosts.program("host_brief"))
    waits = subprocess.Popen(
        [brief, "behind", "60", str(MS), str(60_000 * MS)],
        env=environment,
        stdout=subprocess.PIPE,
    )
    assert waits.stdout is not None
    assert waits.stdout.readline() == b"ready\n"
    time.sleep(2)
    waits.kill()
    waits.communicate()
    begun = time.monotonic()
    assert shim_hosts.run([brief, "exit", str(MS)], environment).returncode == 0
    assert time.monotonic() - begun < 10


@pytest.mark.measured
def test_a_ceiling_holds_for_launches_that_block(turns: Turns, shim_hosts: ShimHosts) -> None:
    """Each returns when its kernel has ended: that is no time of the driver's."""
    environment = shim_hosts.environment(turns.share("one", "10")[0])
    command = [str(shim_hosts.program("host_brief")), "gaps", "4", str(5 * MS), "0"]
    done = shim_hosts.run(command, environment | {"CUDA_LAUNCH_BLOCKING": "1"})
    had, took = map(int, done.stdout.split())
    assert 0.02 < had / took < 0.13


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
    shares = [turns.share(name, "50:100")[0] for name in ("one", "other")]

    def parts() -> list[float]:
        both = [
            subprocess.Popen(
                command, env=shim_hosts.environment(share), stdout=subprocess.PIPE, text=True
            )
            for share in shares
        ]
        reports = [each.communicate()[0].split() for each in both]
        return [int(had) / int(took) for had, took in reports]

    def sum_if_both_had_theirs() -> float:
        had = parts()
        return sum(had) if min(had) > 0.3 else 0

    # One after the other, gaps and all, they would have two thirds together; each by itself too.
    reach(sum_if_both_had_theirs, 0.72, 1.1)


@pytest.mark.measured
def test_long_kernels_are_paid_back(turns: Turns, load: Callable[..., Load]) -> None:
    long = load(turns.share("long", "80:100")[0], 400 * MS)
    short = load(turns.share("short", "20:100")[0], 2 * MS)
    short.had_ns(1)
    reach(lambda: short.had_ns(4), 0.12, 0.3)
    long.process.kill()


@pytest.mark.measured
@pytest.mark.parametrize("how", ["behind", "ahead"])
def test_a_queue_that_waits_for_the_host_keeps_no_turn(
    how: str, *, turns: Turns, load: Callable[..., Load], shim_hosts: ShimHosts
) -> None:
    """What the other gets of the device depends on the load of the machine; its waits do not."""
    from allotment import ledger

    share, _ = turns.share("other", "50:100")
    other = load(share, 200_000)

    def part_without_waits() -> float:
        before, begun = ledger.read(share.directory).devices[0], time.monotonic_ns()
        other.had_ns(1)
        after, ended = ledger.read(share.directory).devices[0], time.monotonic_ns()
        return 1 - (after.lease_wait_ns - before.lease_wait_ns) / (ended - begun)

    waits = subprocess.Popen(
        [str(shim_hosts.program("host_brief")), how, "60", str(MS), str(300 * MS)],
        env=shim_hosts.environment(turns.share("waits", "50:100")[0]),
        stdout=subprocess.PIPE,
    )
    try:
        assert waits.stdout is not None
        assert waits.stdout.readline() == b"ready\n"
        # Later it would go on without the one that waits, as beside a thief of turns.
        assert max(part_without_waits() for _ in range(2)) > 0.8
    finally:
        waits.kill()
        waits.communicate()


@pytest.mark.measured
def test_a_ceiling_holds_in_exit_handlers(turns: Turns, shim_hosts: ShimHosts) -> None:
    environment = shim_hosts.environment(turns.share("one", "10")[0])
    command = [str(shim_hosts.program("host_brief")), "late", "4", str(5 * MS), "0"]
    done = shim_hosts.run(command, environment)
    assert (done.returncode, done.stderr) == (0, "")
    had, took = map(int, done.stdout.splitlines()[-1].split())
    assert 0.02 < had / took < 0.13


@pytest.mark.measured
def test_exit_handlers_take_turns(
    turns: Turns, load: Callable[..., Load], shim_hosts: ShimHosts
) -> None:
    other = load(turns.share("other", "80:100")[0], 2 * MS)
    late = subprocess.Popen(
        [str(shim_hosts.program("host_brief")), "late", "6", str(20 * MS), "0"],
        env=shim_hosts.environment(turns.share("late", "20:100")[0]),
        stdout=subprocess.PIPE,
    )
    try:
        assert late.stdout is not None
        while late.stdout.readline() != b"late\n":
            continue
        other.had_ns(0.5)
        assert max(other.had_ns(1) for _ in range(3)) > 0.7
        assert late.wait() == 0
    finally:
        late.kill()
        late.communicate()


@pytest.mark.measured
@pytest.mark.parametrize("beside", [True, False], ids=["beside", "alone"])
def test_little_is_piled_up_behind_a_wait(
    turns: Turns, load: Callable[..., Load], shim_hosts: ShimHosts, *, beside: bool
) -> None:
    """All of it runs in others' turns when the wait is over, also of those that come back then."""
    if beside:
        load(turns.share("other", "90:100")[0], 2 * MS)
    environment = shim_hosts.environment(turns.share("waits", "10:100")[0])
    command = [str(shim_hosts.program("host_brief")), "pile", "0", str(20 * MS), str(4000 * MS)]
    done = shim_hosts.run(command, environment)
    assert int(done.stdout.split()[0]) < 800 * MS


@pytest.mark.measured
def test_a_launch_that_stays_inside_the_driver_keeps_no_turn(
    turns: Turns, load: Callable[..., Load], shim_hosts: ShimHosts
) -> None:
    """As with a full queue, or a module that is loaded when its first kernel is launched."""
    other = load(turns.share("other", "50:100")[0], 200_000)
    waits = subprocess.Popen(
        [str(shim_hosts.program("host_brief")), "inside", "60", str(MS), str(900 * MS)],
        env=shim_hosts.environment(turns.share("waits", "50:100")[0]),
        stdout=subprocess.PIPE,
    )
    try:
        assert waits.stdout is not None
        assert waits.stdout.readline() == b"ready\n"
        # Later it would go on without the one that waits, as beside a thief of turns.
        assert max(other.had_ns(1) for _ in range(3)) > 0.8
    finally:
        waits.kill()
        waits.communicate()


@pytest.mark.measured
def test_launches_that_fail_are_charged_while_others_wait(
    turns: Turns, load: Callable[..., Load], shim_hosts: ShimHosts
) -> None:
    """A share that is charged nothing stays furthest behind, and keeps the device idle."""
    from allotment import ledger

    load(turns.share("other", "90:100")[0], 2 * MS)
    share, _ = turns.share("fails", "10:100")
    fails = subprocess.Popen(
        [str(shim_hosts.program("host_brief")), "refused", "20", str(MS), "0"],
        env=shim_hosts.environment(share),
    )
    try:
        while ledger.read(share.directory).devices[0].gpu_ns < 20 * MS:
            assert fails.poll() is None, "it was charged for its only kernel alone"
            time.sleep(0.05)
    finally:
        fails.kill()
        fails.communicate()


@pytest.mark.measured
def test_idle_time_is_not_saved_for_a_burst(turns: Turns, shim_hosts: ShimHosts) -> None:
    share, _ = turns.share("one", "10")
    command = [str(shim_hosts.program("host_brief")), "burst", "64", str(20 * MS), str(4000 * MS)]
    done = shim_hosts.run(command, shim_hosts.environment(share))
    assert int(done.stdout.split()[0]) / 2e9 < 0.15
