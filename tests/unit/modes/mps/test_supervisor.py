# SPDX-License-Identifier: Apache-2.0
"""Keeping one GPU's control daemon: what is put back, what is refused, and daemons that misbehave.

The daemons are real processes: the simulated one, and scripts in its place that do what a broken
one would.
"""

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from descriptors import open_files

from allotment.devices.compute_modes import ComputeMode
from allotment.devices.simulated import SimulatedMachine, machine_path
from allotment.libraries import SIMULATED, library_path
from allotment.model.errors import BusyError, PrerequisiteError, StateError
from allotment.model.structs import replace
from allotment.modes.mps.control import Control
from allotment.modes.mps.state import DaemonState, MpsPlace, MpsStatus, process_start
from allotment.modes.mps.supervisor import Supervisor, Timing

BRIEF = Timing(look=0.05, idle=0.3, ready=20.0, retry=0.05)
pytestmark = pytest.mark.timeout(90)


@dataclass
class Gpu:
    """A GPU's driver, as far as a supervisor asks it."""

    mode: ComputeMode = ComputeMode.DEFAULT
    there: tuple[int, ...] = ()
    may_set: bool = True
    set_to: list[ComputeMode] = field(default_factory=list)

    def compute_mode(self) -> ComputeMode:
        return self.mode

    def set_compute_mode(self, mode: ComputeMode) -> None:
        if not self.may_set:
            raise PrerequisiteError("only root may")
        self.set_to.append(mode)
        self.mode = mode

    def computing(self) -> tuple[int, ...]:
        return self.there


@dataclass
class Scene:
    """A place, a GPU and shares, for supervisors that follow each other."""

    place: MpsPlace
    control: Control
    gpu: Gpu = field(default_factory=Gpu)
    shares: list[str] = field(default_factory=lambda: ["train"])
    later_s: float = 0.0
    """By how much a supervisor's clock is fast."""

    def clock(self) -> float:
        return time.monotonic() + self.later_s

    def supervisor(self, *, timing: Timing = BRIEF, program: Path | None = None) -> Supervisor:
        control = self.control if program is None else self.with_program(program)
        return Supervisor(
            self.place,
            control,
            self.gpu,
            shares=lambda: tuple(self.shares),
            timing=timing,
            clock=self.clock,
        )

    def with_program(self, program: Path) -> Control:
        return replace(self.control, program=str(program))


@pytest.fixture
def scene(tmp_path: Path, native_dir: Path) -> Iterator[Scene]:
    assert native_dir.is_dir()
    machine = machine_path(tmp_path, "a100-80gb")
    (device,) = SimulatedMachine(machine).devices()
    place = MpsPlace(tmp_path / "mps" / device.uuid)
    place.prepare(simulated=True)
    control = Control(
        place.pipes,
        place.logs,
        device.uuid,
        str(library_path(SIMULATED) / "nvidia-cuda-mps-control"),
        {"ALLOTMENT_SIMULATED_MACHINE": str(machine)},
    )
    yield Scene(place, control)
    pid = place.status().daemon
    if pid is not None:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def script(folder: Path, body: str) -> Path:
    path = folder / "nvidia-cuda-mps-control"
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


def stepping_until(supervisor: Supervisor, holds: Callable[[MpsStatus], bool]) -> None:
    deadline = time.monotonic() + 30
    while not holds(supervisor.status):
        pause = supervisor.step()
        assert pause is not None
        assert time.monotonic() < deadline, supervisor.status
        supervisor.wait(min(pause, 0.1))


def test_a_gpu_is_kept_and_put_back(scene: Scene) -> None:
    supervisor = scene.supervisor()
    supervisor.begin()
    assert scene.place.status().state is DaemonState.READY
    assert scene.place.status().mode_before == ComputeMode.DEFAULT
    assert scene.gpu.set_to == [ComputeMode.EXCLUSIVE_PROCESS]
    supervisor.close()
    assert scene.gpu.set_to == [ComputeMode.EXCLUSIVE_PROCESS, ComputeMode.DEFAULT]
    status = scene.place.status()
    assert (status.state, status.daemon, status.mode_before) == (DaemonState.STOPPED, None, None)


def test_idle_for_a_while_it_stops_and_a_share_that_came_keeps_it(scene: Scene) -> None:
    supervisor = scene.supervisor(timing=Timing(look=0.05, idle=300.0, ready=20.0))
    supervisor.begin()
    scene.shares.clear()
    assert supervisor.step() is not None
    scene.shares.append("late")
    scene.later_s += 301
    assert supervisor.step() is not None
    scene.shares.clear()
    assert supervisor.step() is not None
    scene.later_s += 301
    assert supervisor.step() is None
    assert scene.gpu.mode is ComputeMode.DEFAULT


def test_who_waits_for_the_gpu_has_it_before_the_idle_time_is_over(scene: Scene) -> None:
    supervisor = scene.supervisor(timing=Timing(look=0.05, idle=60.0, ready=20.0))
    supervisor.begin()
    scene.place.ask_for_way()
    assert supervisor.step() is not None, "a share needs it"
    scene.shares.clear()
    assert supervisor.step() is not None, "that wish was of an earlier time"
    scene.place.ask_for_way()
    assert supervisor.step() is None
    assert scene.gpu.mode is ComputeMode.DEFAULT
    assert not scene.place.is_wanted()


def test_a_share_that_comes_while_it_stops_keeps_it(scene: Scene) -> None:
    supervisor = scene.supervisor()
    looks: list[DaemonState] = []

    def shares() -> tuple[str, ...]:
        looks.append(scene.place.status().state)
        return ("late",) if looks[-1] is DaemonState.STOPPING else ()

    # It comes between two looks.
    supervisor._shares = supervisor._served = shares  # noqa: SLF001
    supervisor.begin()
    time.sleep(0.4)
    assert supervisor.step() == BRIEF.look
    assert looks[-1] is DaemonState.STOPPING
    assert scene.place.status().state is DaemonState.READY
    supervisor.close()


def test_a_killed_daemon_is_back_with_the_loss_written_down(scene: Scene) -> None:
    supervisor = scene.supervisor()
    supervisor.begin()
    before = supervisor.status.daemon
    assert before is not None
    os.kill(before, signal.SIGKILL)
    stepping_until(supervisor, lambda status: status.restarts == 1)
    (loss,) = scene.place.status().losses
    assert loss.shares == ("train",)
    assert loss.reason == "the control daemon ended"
    assert scene.place.status().daemon not in {None, before}
    assert "affected: train" in (scene.place.root / "events.log").read_text()
    supervisor.close()


def test_another_supervisor_goes_on_where_one_was_killed(scene: Scene) -> None:
    first = scene.supervisor()
    first.begin()
    follower = scene.supervisor()
    scene.gpu.there = (1, 2)  # the share's own programs are there by now
    follower.begin()
    assert follower.status.daemon == first.status.daemon
    assert follower.step() == BRIEF.look
    follower.close()
    assert scene.gpu.set_to == [ComputeMode.EXCLUSIVE_PROCESS, ComputeMode.DEFAULT]
    first.close()  # its child, which a killed one would leave to init


def test_what_the_mode_was_outlives_a_supervisor_that_died_before_it_had_a_daemon(
    scene: Scene,
) -> None:
    scene.place.write(MpsStatus(state=DaemonState.STARTING, mode_before=0))
    scene.gpu.mode = ComputeMode.EXCLUSIVE_PROCESS
    supervisor = scene.supervisor()
    supervisor.begin()
    supervisor.close()
    assert scene.gpu.mode is ComputeMode.DEFAULT


@pytest.mark.parametrize("answers", [True, False], ids=["answers", "is silent"])
@pytest.mark.parametrize("needed", [True, False], ids=["needed", "not needed"])
def test_a_daemon_that_nobody_wrote_down_is_ended_by_the_next_supervisor(
    scene: Scene, *, answers: bool, needed: bool
) -> None:
    scene.place.write(MpsStatus(state=DaemonState.STARTING, mode_before=0))
    scene.gpu.mode = ComputeMode.EXCLUSIVE_PROCESS
    unknown = scene.control.start()
    deadline = time.monotonic() + 30
    while not scene.control.answers():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert scene.control.daemons() == (unknown.pid,)
    if not answers:
        unknown.send_signal(signal.SIGSTOP)
        scene.control = replace(scene.control, patience_s=0.5)
    supervisor = scene.supervisor()
    if needed:
        supervisor.begin()
        assert supervisor.status.state is DaemonState.READY
        assert scene.control.daemons() == (supervisor.status.daemon,)
        supervisor.close()
    else:
        supervisor.clear()
    assert unknown.wait(30) is not None
    assert scene.control.daemons() == ()
    assert scene.gpu.mode is ComputeMode.DEFAULT


def test_a_pid_that_is_another_process_by_now_is_not_adopted(scene: Scene) -> None:
    scene.place.write(MpsStatus(state=DaemonState.READY, daemon=os.getpid(), daemon_start=1))
    supervisor = scene.supervisor()
    supervisor.begin()
    assert supervisor.status.daemon != os.getpid()
    supervisor.close()


@pytest.mark.parametrize("mode", [ComputeMode.EXCLUSIVE_PROCESS, ComputeMode.PROHIBITED])
def test_a_gpu_that_is_kept_for_something_is_left_alone(scene: Scene, mode: ComputeMode) -> None:
    scene.gpu.mode = mode
    with pytest.raises(BusyError, match=f"compute mode {mode.name}, set outside Allotment"):
        scene.supervisor().begin()
    assert scene.gpu.set_to == []
    assert scene.place.status().state is DaemonState.FAILED


def test_a_mode_that_somebody_set_while_the_daemon_ran_stays(scene: Scene) -> None:
    supervisor = scene.supervisor()
    supervisor.begin()
    scene.gpu.mode = ComputeMode.PROHIBITED
    supervisor.close()
    assert scene.gpu.mode is ComputeMode.PROHIBITED
    # And it is not ours any more: the next one leaves it alone too.
    assert scene.place.status().mode_before is None
    with pytest.raises(BusyError, match="compute mode PROHIBITED, set outside Allotment"):
        scene.supervisor().begin()


def test_a_mode_that_somebody_set_while_nobody_kept_the_daemon_stays(scene: Scene) -> None:
    supervisor = scene.supervisor()
    supervisor.begin()
    supervisor.leave()
    assert supervisor.status.daemon is not None
    os.kill(supervisor.status.daemon, signal.SIGKILL)
    scene.gpu.mode = ComputeMode.PROHIBITED
    with pytest.raises(BusyError, match="compute mode PROHIBITED, set outside Allotment"):
        scene.supervisor().begin()
    assert scene.gpu.mode is ComputeMode.PROHIBITED
    assert scene.place.status().mode_before is None


def test_who_computes_is_asked_for_again_when_a_supervisor_died_before_it_kept_the_gpu(
    scene: Scene,
) -> None:
    scene.place.write(MpsStatus(mode_before=int(ComputeMode.DEFAULT)))
    scene.gpu.there = (4711,)
    with pytest.raises(BusyError, match=r"in use by other programs \(4711\)"):
        scene.supervisor().begin()
    assert scene.gpu.set_to == []
    assert scene.place.status().mode_before is None


def test_a_gpu_that_somebody_computes_on_is_left_alone(scene: Scene) -> None:
    scene.gpu.there = (4711,)
    with pytest.raises(BusyError, match=r"in use by other programs \(4711\)"):
        scene.supervisor().begin()
    assert scene.gpu.set_to == []


def test_without_permission_it_serves_and_says_that_the_gpu_is_not_kept(scene: Scene) -> None:
    scene.gpu.may_set = False
    supervisor = scene.supervisor()
    supervisor.begin()
    assert supervisor.status.state is DaemonState.READY
    assert not supervisor.status.is_exclusive
    assert supervisor.status.mode_before is None
    supervisor.close()


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("exit 1", "ended at once"),
        ('[ "$1" = -f ] && exec sleep 60\nexit 0', "no MPS server became active"),
    ],
    ids=["ends", "is silent"],
)
def test_a_daemon_that_is_of_no_use_is_told_of_and_the_gpu_is_put_back(
    scene: Scene, tmp_path: Path, body: str, message: str
) -> None:
    timing = Timing(look=0.05, idle=0.3, ready=0.5, retry=0.05)
    with pytest.raises(PrerequisiteError, match=message):
        scene.supervisor(timing=timing, program=script(tmp_path, body)).begin()
    assert scene.gpu.mode is ComputeMode.DEFAULT
    status = scene.place.status()
    assert (status.state, status.daemon) == (DaemonState.FAILED, None)
    assert message in status.problem


def test_a_missing_program_is_named(scene: Scene, tmp_path: Path) -> None:
    with pytest.raises(PrerequisiteError, match="cannot be started: No such file") as caught:
        scene.supervisor(program=tmp_path / "none").begin()
    assert "--mode soft" in (caught.value.hint or "")
    assert scene.gpu.mode is ComputeMode.DEFAULT


def test_a_daemon_that_falls_silent_is_ended_and_started_again(scene: Scene) -> None:
    supervisor = scene.supervisor()
    supervisor.begin()
    before = supervisor.status.daemon
    assert before is not None
    # Nobody listens any more, and the process is there.
    (scene.place.pipes / "control_privileged").unlink()
    stepping_until(supervisor, lambda status: status.restarts == 1)
    assert supervisor.status.losses[-1].reason == "the control daemon did not answer"
    with pytest.raises(ProcessLookupError):
        os.kill(before, 0)
    supervisor.close()


def test_a_share_that_ends_as_soon_as_its_daemon_is_named_all_the_same(scene: Scene) -> None:
    scene.shares.append("brief")
    supervisor = scene.supervisor()
    supervisor.begin()
    supervisor.step()
    daemon = supervisor.status.daemon
    assert daemon is not None
    os.kill(daemon, signal.SIGKILL)
    scene.shares.remove("brief")
    stepping_until(supervisor, lambda status: status.restarts == 1)
    assert [*supervisor.status.losses[-1].shares] == ["brief", "train"]
    # One that has ended before the last look has lost nothing.
    supervisor.step()
    daemon = supervisor.status.daemon
    assert daemon is not None
    os.kill(daemon, signal.SIGKILL)
    stepping_until(supervisor, lambda status: status.restarts == 2)
    assert [*supervisor.status.losses[-1].shares] == ["train"]
    supervisor.close()


def test_a_daemon_that_cannot_be_had_again_is_given_up_with_the_last_share(
    scene: Scene, tmp_path: Path
) -> None:
    supervisor = scene.supervisor()
    supervisor.begin()
    daemon = supervisor.status.daemon
    assert daemon is not None
    supervisor._daemon._older = scene.with_program(script(tmp_path, "exit 1"))  # noqa: SLF001
    os.kill(daemon, signal.SIGKILL)
    stepping_until(supervisor, lambda status: status.state is DaemonState.FAILED)
    for _ in range(8):
        pause = supervisor.step()
        assert pause is not None
        assert pause <= BRIEF.look  # however long it is until the next start
        supervisor.wait(pause)
    assert scene.gpu.set_to == [ComputeMode.EXCLUSIVE_PROCESS]
    scene.shares.clear()
    assert supervisor.step() is None
    assert scene.gpu.mode is ComputeMode.DEFAULT
    status = scene.place.status()
    assert (status.state, status.holds_gpu) == (DaemonState.STOPPED, False)


@pytest.mark.parametrize("ends", [True, False], ids=["ended", "silent"])
def test_a_daemon_that_is_lost_while_no_share_needs_it_is_not_started_again(
    scene: Scene, *, ends: bool
) -> None:
    supervisor = scene.supervisor(timing=Timing(look=0.05, idle=60.0, ready=20.0))
    supervisor.begin()
    daemon = supervisor.status.daemon
    assert daemon is not None
    scene.shares.clear()
    if ends:
        os.kill(daemon, signal.SIGKILL)
    else:
        (scene.place.pipes / "control_privileged").unlink()
    deadline = time.monotonic() + 30
    while supervisor.step() is not None:
        assert time.monotonic() < deadline, supervisor.status
        supervisor.wait(0.05)
    assert scene.gpu.mode is ComputeMode.DEFAULT
    assert (scene.place.status().restarts, scene.place.status().losses) == (0, ())
    with pytest.raises(ProcessLookupError):
        os.kill(daemon, 0)


@pytest.mark.parametrize("needed", [True, False], ids=["needed", "not needed"])
@pytest.mark.parametrize("made_again", [True, False], ids=["made again", "gone"])
def test_a_daemon_whose_files_were_removed_is_ended_and_the_gpu_put_back(
    scene: Scene, *, needed: bool, made_again: bool
) -> None:
    supervisor = scene.supervisor()
    supervisor.begin()
    daemon = supervisor.status.daemon
    assert daemon is not None
    if not needed:
        scene.shares.clear()
    shutil.rmtree(scene.place.root.parent)
    if made_again:
        scene.place.prepare(simulated=True)
    assert supervisor.step() is None
    assert scene.gpu.mode is ComputeMode.DEFAULT
    with pytest.raises(ProcessLookupError):
        os.kill(daemon, 0)
    assert not scene.place.status().holds_gpu


def test_files_that_are_removed_while_it_looks_are_found_missing_too(scene: Scene) -> None:
    supervisor = scene.supervisor()
    supervisor.begin()
    daemon = supervisor.status.daemon
    assert daemon is not None
    os.kill(daemon, signal.SIGKILL)

    class Removing(list[str]):
        """Shares that are asked for: the first thing that a step does with a daemon that ended."""

        def __iter__(self) -> Iterator[str]:
            shutil.rmtree(scene.place.root.parent, ignore_errors=True)
            return super().__iter__()

    scene.shares = Removing(scene.shares)
    assert supervisor.step() is None
    assert scene.gpu.mode is ComputeMode.DEFAULT


def full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    def write(_: MpsPlace, status: MpsStatus) -> None:
        raise StateError(f"{status.state}: cannot be written: No space left on device")

    monkeypatch.setattr(MpsPlace, "write", write)


def test_what_cannot_be_written_down_is_put_back_all_the_same(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    supervisor = scene.supervisor()
    supervisor.begin()
    scene.shares.clear()
    time.sleep(BRIEF.idle)
    full_disk(monkeypatch)
    with pytest.raises(StateError, match="No space left"):
        supervisor.step()
    assert scene.gpu.mode is ComputeMode.DEFAULT
    assert scene.control.daemons() == ()


def test_a_daemon_whose_pid_cannot_be_written_down_is_ended_before_it_serves(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(control: Control) -> subprocess.Popen[bytes]:
        full_disk(monkeypatch)
        return begin(control)

    begin = Control.start
    monkeypatch.setattr(Control, "start", start)
    with pytest.raises(StateError, match="No space left"):
        scene.supervisor().begin()
    assert scene.gpu.set_to == [ComputeMode.EXCLUSIVE_PROCESS, ComputeMode.DEFAULT]
    assert scene.control.daemons() == ()


@pytest.mark.parametrize("needed", [True, False], ids=["needed", "not needed"])
def test_what_cannot_be_written_down_leaves_no_descriptors_behind(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, *, needed: bool
) -> None:
    first = scene.supervisor()
    first.begin()
    full_disk(monkeypatch)
    before = open_files()
    for _ in range(5):
        follower = scene.supervisor()
        with pytest.raises(StateError, match="No space left"):
            follower.begin() if needed else follower.clear()
    assert open_files() <= before
    assert first.status.daemon is not None
    assert process_start(first.status.daemon) is not None, "its programs lost what they had"
    monkeypatch.undo()
    first.close()


def test_who_finds_it_ready_finds_that_told(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    write = MpsPlace.write

    def note(place: MpsPlace, status: MpsStatus) -> None:
        if status.state is DaemonState.READY:
            told.append((place.root / "events.log").read_text())
        write(place, status)

    monkeypatch.setattr(MpsPlace, "write", note)
    supervisor = scene.supervisor()
    supervisor.begin()
    assert "is ready, by protocol 2" in told[0]
    supervisor.close()


def test_one_supervises_at_a_time(scene: Scene) -> None:
    assert not scene.place.is_owned()
    with scene.place.owned() as mine:
        assert mine
        assert scene.place.is_owned()
        with scene.place.owned() as other:
            assert not other
    assert not scene.place.is_owned()


@pytest.mark.parametrize("text", [b"", b"{", b'{"state": "odd"}', b"[]", b"\xff"])
def test_a_status_that_cannot_be_read_is_none(scene: Scene, text: bytes) -> None:
    (scene.place.root / "status.json").write_bytes(text)
    assert scene.place.status() == MpsStatus()


@pytest.mark.parametrize(("driver", "offers"), [("580.95.05", False), ("615.71.09", True)])
def test_what_the_driver_offers_is_asked_at_each_start(
    tmp_path: Path, native_dir: Path, driver: str, *, offers: bool
) -> None:
    assert native_dir.is_dir()
    description = tmp_path / "machine.yaml"
    description.write_text(f"driver: {driver}\ngpus: [a100-80gb]\n")
    machine = machine_path(tmp_path, str(description))
    (device,) = SimulatedMachine(machine).devices()
    place = MpsPlace(tmp_path / "mps" / device.uuid)
    place.prepare(simulated=True)
    control = Control(
        place.pipes,
        place.logs,
        device.uuid,
        str(library_path(SIMULATED) / "nvidia-cuda-mps-control"),
        {"ALLOTMENT_SIMULATED_MACHINE": str(machine)},
    )
    assert control.offers_namespaces() is offers
    supervisor = Supervisor(place, control, Gpu(), shares=lambda: ("one",), timing=BRIEF)
    supervisor.begin()
    assert place.status().state is DaemonState.READY
    assert place.status().has_namespaces is offers
    supervisor.close()
