# SPDX-License-Identifier: Apache-2.0
"""`allot devices set-mode`: what GPUs are for, said while shares are on them, by real processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import pytest

from allotment.devices.mig_machine import MigDevice, MigMachine
from allotment.devices.simulated import SimulatedMachine, machine_path
from allotment.model.errors import (
    BusyError,
    DoesNotFitError,
    NotFoundError,
    PrerequisiteError,
    UsageError,
)
from allotment.model.pods import ContainerKind, Owner, PodUid
from allotment.model.quantities import parse_memory
from allotment.model.requests import Request
from allotment.model.shares import Injection
from allotment.modes.mig.journal import Journal
from allotment.modes.mig.slices import Slices
from allotment.shares import changing_modes, lives, slicing
from allotment.shares.changing_modes import ModeChange
from allotment.shares.folders import StateFolder
from allotment.shares.modes_of_gpus import Allowed, allowed_on, modes_on, write_allowed

Allot = Any  # tests/conftest.py: CommandLine
T = TypeVar("T")
SPEC = "h100-80gb:2"
INTERRUPTED = 130

pytestmark = pytest.mark.timeout(180)


class Machine:
    """Simulated GPUs, and the programs that were started beside each other."""

    def __init__(self, allot: Allot, spec: str = SPEC) -> None:
        self.allot = allot
        self.spec = spec
        self.file = machine_path(allot.state, spec)
        self.uuids = [each.uuid for each in SimulatedMachine(self.file).devices()]
        self.folder = StateFolder(allot.state)
        self._programs: list[subprocess.Popen[str]] = []

    # ---- programs --------------------------------------------------------------------------------

    def start(self, *words: str) -> subprocess.Popen[str]:
        program = subprocess.Popen(
            self.allot.command(*words),
            env=self.allot.environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self._programs.append(program)
        return program

    def share(self, *options: str, gpu: int = 0) -> subprocess.Popen[str]:
        """A share whose program waits for the end of its input; it is there when this returns."""
        words = ("run", "--simulated", self.spec, "--gpu", self.uuids[gpu], *options)
        program = self.start(*words, "--", "sh", "-c", "echo here; cat")
        assert program.stdout is not None
        assert program.stdout.readline() == "here\n", program.communicate()[1]
        return program

    def run(self, *options: str, gpu: int = 0) -> subprocess.CompletedProcess[str]:
        words = ("run", "--simulated", self.spec, "--gpu", self.uuids[gpu], *options)
        done: subprocess.CompletedProcess[str] = self.allot(*words, "--", "true")
        return done

    def words(self, modes: str, *options: str, gpu: int = 0) -> list[str]:
        where = ["--simulated", self.spec]
        return ["devices", "set-mode", *where, self.uuids[gpu], modes, *options]

    def set(self, modes: str, *options: str, gpu: int = 0) -> subprocess.CompletedProcess[str]:
        done: subprocess.CompletedProcess[str] = self.allot(*self.words(modes, *options, gpu=gpu))
        return done

    def drain(self, modes: str, *options: str) -> subprocess.Popen[str]:
        """A `set-mode --drain` that waits: it has said for whom when this returns."""
        program = self.start(*self.words(modes, "--drain", *options))
        assert program.stderr is not None
        assert program.stderr.readline().startswith("waiting for share ")
        return program

    def close(self) -> None:
        for program in self._programs:
            if program.poll() is None:
                program.kill()
            program.communicate(timeout=30)

    # ---- what there is ---------------------------------------------------------------------------

    def device(self, gpu: int = 0) -> dict[str, Any]:
        done = self.allot("devices", "--simulated", self.spec, "-o", "json")
        found: dict[str, Any] = json.loads(done.stdout)["devices"][gpu]
        return found

    def said(self, gpu: int = 0) -> tuple[str | None, list[str] | None, bool]:
        """The mode that the GPU is in, those that it is for, whether it drains."""
        found = self.device(gpu)
        return found["mode"], found["allowed_modes"], found["draining"]

    def on(self, question: Callable[[MigDevice], T], gpu: int = 0) -> T:
        with MigMachine(self.file) as gpus:
            return gpus.ask_one(gpu, question, patience_s=30)

    def mig(self, gpu: int = 0) -> tuple[bool, int]:
        """Whether MIG is on, and how many instances there are."""
        seen = self.on(lambda device: device.driver.look(), gpu)
        return seen.is_enabled, len(seen.instances)


@pytest.fixture
def machine(allot: Allot) -> Iterator[Machine]:
    made = Machine(allot)
    yield made
    made.close()


def end(program: subprocess.Popen[str]) -> None:
    _, errors = program.communicate("", timeout=60)
    assert (program.returncode, errors) == (0, "")


def finished(program: subprocess.Popen[str]) -> tuple[int, str, str]:
    output, errors = program.communicate(timeout=60)
    return program.returncode, output, errors


# ---- refused, or drained -------------------------------------------------------------------------


def test_an_idle_gpu_is_kept_for_what_was_said_and_others_are_not(machine: Machine) -> None:
    done = machine.set("mps,soft")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"GPU 0 {machine.uuids[0]} is for soft, mps\n"
    assert machine.said() == (None, ["soft", "mps"], False)
    assert machine.set("mps").returncode == 0
    refused = machine.run("--memory", "1Gi")
    assert refused.returncode == DoesNotFitError.exit_code
    assert "kept for mode mps by `allot devices set-mode`" in refused.stderr
    assert "hint: `allot devices` shows what GPUs are for" in refused.stderr
    device = ("cdi", "create", "--memory", "1Gi", "--cdi-dir", str(machine.folder.root / "cdi"))
    assert machine.set("exclusive", gpu=1).returncode == 0
    refused = machine.allot(*device, "--simulated", SPEC)
    assert refused.returncode == DoesNotFitError.exit_code
    assert machine.set("default", gpu=1).returncode == 0
    assert machine.run("--memory", "1Gi", gpu=1).returncode == 0
    assert machine.set("default").stdout == f"GPU 0 {machine.uuids[0]} is for every mode\n"
    assert machine.said() == (None, None, False)
    assert machine.run("--memory", "1Gi").returncode == 0


def test_who_is_there_is_named_and_nothing_is_changed(machine: Machine) -> None:
    share = machine.share("--memory", "1Gi", "--name", "train")
    for modes in ("mps", "mig", "exclusive,timeslice"):
        refused = machine.set(modes)
        assert (refused.returncode, refused.stdout) == (BusyError.exit_code, "")
        assert "is in use by share train of mode soft" in refused.stderr
        assert "--drain" in refused.stderr
    assert machine.said() == ("soft", None, False)
    assert machine.set("soft").returncode == 0, "it is of that mode"
    assert machine.said() == ("soft", ["soft"], False)
    end(share)


def test_a_drained_gpu_takes_nothing_of_its_old_mode_and_then_the_new(machine: Machine) -> None:
    share = machine.share("--memory", "1Gi", "--name", "train")
    draining = machine.drain("mps")
    assert machine.said() == ("soft", ["mps"], True)
    table = machine.allot("devices", "--simulated", SPEC).stdout
    assert "soft, drains for mps" in table
    old = machine.run("--memory", "1Gi")
    assert (old.returncode, "kept for mode mps" in old.stderr) == (3, True)
    new = machine.run("--memory", "1Gi", "--mode", "mps")
    assert (new.returncode, "have shares of mode soft there" in new.stderr) == (3, True)
    assert draining.poll() is None
    end(share)
    code, output, errors = finished(draining)
    assert (code, output, errors) == (0, f"GPU 0 {machine.uuids[0]} is for mps\n", "")
    assert machine.said() == (None, ["mps"], False)
    assert machine.run("--memory", "1Gi", "--mode", "mps").returncode == 0


def test_time_that_is_over_says_who_is_left_and_the_gpu_goes_on_draining(machine: Machine) -> None:
    share = machine.share("--memory", "1Gi", "--name", "train")
    done = machine.set("mps", "--drain", "--timeout", "300ms")
    assert done.returncode == BusyError.exit_code
    assert "is still in use by share train of mode soft" in done.stderr
    assert f"allot devices set-mode {machine.uuids[0]} default" in done.stderr
    assert machine.said() == ("soft", ["mps"], True)
    assert machine.set("default").returncode == 0
    assert machine.said() == ("soft", None, False)
    assert machine.run("--memory", "1Gi").returncode == 0
    end(share)


def test_interrupting_the_wait_leaves_the_gpu_draining_and_says_so(machine: Machine) -> None:
    share = machine.share("--memory", "1Gi")
    draining = machine.drain("mps")
    draining.send_signal(signal.SIGINT)
    code, output, errors = finished(draining)
    assert (code, output) == (INTERRUPTED, "")
    assert "goes on draining for mps" in errors
    assert machine.said() == ("soft", ["mps"], True)
    end(share)
    assert machine.said() == (None, ["mps"], False), "it is over by itself"


@pytest.mark.parametrize("step", ["modes.written", "modes.drained"])
def test_a_killed_one_is_gone_on_with_by_the_next(machine: Machine, step: str) -> None:
    done = machine.allot(*machine.words("mig"), ALLOTMENT_KILL_AT=step)
    assert done.returncode == -signal.SIGKILL
    assert machine.said() == (None, ["mig"], False)
    assert machine.mig() == (False, 0)
    assert machine.run("--memory", "1Gi").returncode == DoesNotFitError.exit_code
    again = machine.set("mig")
    assert again.returncode == 0, again.stderr
    assert machine.mig() == (True, 0)


def test_kill_in_the_middle_of_a_drain_ends_no_share_and_the_drain_goes_on(
    machine: Machine,
) -> None:
    share = machine.share("--memory", "1Gi")
    draining = machine.drain("mig")
    draining.kill()
    draining.wait(timeout=30)
    assert machine.said() == ("soft", ["mig"], True)
    assert share.poll() is None
    end(share)
    assert machine.run("--mig", "1g.10gb").returncode == 0
    assert machine.run("--memory", "1Gi").returncode == DoesNotFitError.exit_code


def test_of_two_at_once_the_later_holds_and_the_earlier_says_so(machine: Machine) -> None:
    share = machine.share("--memory", "1Gi")
    first = machine.drain("mps")
    second = machine.drain("exclusive")
    code, _, errors = finished(first)
    assert code == BusyError.exit_code
    assert "somebody else said meanwhile" in errors
    assert "is for exclusive" in errors
    end(share)
    assert finished(second)[0] == 0
    assert machine.said() == (None, ["exclusive"], False)


def test_a_share_that_was_killed_keeps_no_drain_waiting(machine: Machine) -> None:
    share = machine.share("--memory", "1Gi")
    draining = machine.drain("mps")
    os.killpg(share.pid, signal.SIGKILL)
    share.wait(timeout=30)
    assert finished(draining)[0] == 0


def test_a_suspended_share_is_there(machine: Machine) -> None:
    share = machine.share("--memory", "1Gi", "--name", "train")
    assert machine.allot("suspend", "train").returncode == 0
    refused = machine.set("mps")
    assert refused.returncode == BusyError.exit_code
    assert "share train of mode soft (suspended)" in refused.stderr
    assert machine.allot("resume", "train").returncode == 0
    share.communicate("", timeout=60)
    assert machine.set("mps").returncode == 0


def test_a_daemon_that_no_share_needs_is_waited_for(machine: Machine) -> None:
    assert machine.run("--memory", "1Gi", "--mode", "mps").returncode == 0
    done = machine.set("soft")
    assert done.returncode == 0, done.stderr
    assert "waiting for the MPS control daemon" in done.stderr
    assert machine.run("--memory", "1Gi").returncode == 0


# ---- MIG -----------------------------------------------------------------------------------------


def test_for_mig_alone_the_mode_is_on_and_stays_on(machine: Machine) -> None:
    done = machine.set("mig")
    assert done.stdout.endswith("is for mig; MIG is switched on\n")
    assert machine.mig() == (True, 0)
    assert machine.run("--mig", "1g.10gb").returncode == 0
    assert machine.mig() == (True, 0), "also when the last slice has gone"
    assert machine.set("default").stdout.endswith("is for every mode; MIG is switched off\n")
    assert machine.mig() == (False, 0)
    assert machine.run("--memory", "1Gi").returncode == 0


def test_mig_among_others_comes_and_goes(machine: Machine) -> None:
    assert machine.set("soft,mig").returncode == 0
    slice_ = machine.share("--mig", "1g.10gb", "--name", "cut")
    assert machine.said() == ("mig", ["soft", "mig"], False)
    assert machine.run("--memory", "1Gi").returncode == DoesNotFitError.exit_code
    end(slice_)
    assert machine.mig() == (False, 0)
    assert machine.run("--memory", "1Gi").returncode == 0


def test_slices_in_use_are_waited_for_and_warm_ones_go(machine: Machine) -> None:
    slice_ = machine.share("--mig", "1g.10gb", "--name", "cut")
    assert machine.run("--mig", "2g.20gb", "--mig-keep", "1h").returncode == 0
    refused = machine.set("soft")
    assert refused.returncode == BusyError.exit_code
    assert "share cut of mode mig" in refused.stderr
    draining = machine.drain("soft")
    assert machine.said() == ("mig", ["soft"], True)
    late = machine.run("--mig", "1g.10gb")
    assert late.returncode == DoesNotFitError.exit_code
    assert "kept for mode soft" in late.stderr
    end(slice_)
    code, output, errors = finished(draining)
    assert code == 0, errors
    assert "MIG is switched off" in output
    assert machine.mig() == (False, 0)
    assert Journal(machine.folder.mig / machine.uuids[0]).read().records == ()
    assert machine.run("--memory", "1Gi").returncode == 0


def test_a_drain_from_mig_that_was_killed_is_gone_on_with_by_whoever_looks(
    machine: Machine,
) -> None:
    slice_ = machine.share("--mig", "1g.10gb")
    assert machine.run("--mig", "2g.20gb", "--mig-keep", "1h").returncode == 0
    draining = machine.drain("soft")
    draining.kill()
    draining.wait(timeout=30)
    assert machine.allot("ps").returncode == 0
    assert machine.mig() == (True, 1), "the warm one has gone"
    end(slice_)
    assert machine.mig() == (False, 0)
    assert machine.run("--memory", "1Gi").returncode == 0


def test_what_others_cut_is_refused_and_left(machine: Machine) -> None:
    def make(device: MigDevice) -> None:
        device.driver.set_mode(is_on=True)
        profile = next(each for each in device.driver.look().profiles if each.name == "1g.10gb")
        device.driver.create_gpu_instance(profile, 6)

    machine.on(make)
    refused = machine.set("soft", "--drain")
    assert refused.returncode == BusyError.exit_code
    assert "1g.10gb at slot 6" in refused.stderr
    assert machine.mig() == (True, 1)
    assert machine.said() == ("mig", None, False)


@pytest.mark.parametrize("spec", ["a100-80gb"])
def test_a_gpu_that_needs_a_reset_gets_one_if_it_may(allot: Allot, spec: str) -> None:
    machine = Machine(allot, spec)
    refused = machine.set("mig")
    assert refused.returncode == PrerequisiteError.exit_code
    assert "with a reset only" in refused.stderr
    assert "--reset" in refused.stderr
    assert machine.said() == (None, None, False)
    done = machine.set("mig", "--reset")
    assert done.returncode == 0, done.stderr
    assert machine.mig() == (True, 0)
    assert machine.run("--mig", "1g.10gb").returncode == 0
    stays = machine.set("default")
    assert "is for every mode; MIG stays on: it is switched off by a reset only" in stays.stdout
    assert machine.run("--mig", "1g.10gb").returncode == 0
    assert machine.mig() == (True, 0)
    assert machine.set("soft").returncode == PrerequisiteError.exit_code
    assert machine.set("soft", "--reset").returncode == 0
    assert machine.mig() == (False, 0)
    machine.close()


def joined(allot: Allot) -> Machine:
    """Two GPUs that a bridge joins; the second is for MIG alone, by a reset."""
    machine = Machine(allot, "a30:2")
    assert machine.set("mig", "--reset", gpu=1).returncode == 0
    return machine


def pending(machine: Machine) -> tuple[bool, bool]:
    """Whether MIG is on on the second GPU, and will be with its next reset."""
    seen = machine.on(lambda device: device.driver.look(), gpu=1)
    return seen.is_enabled, seen.is_pending


def test_who_has_a_gpu_that_is_reset_with_it_is_waited_for(allot: Allot) -> None:
    machine = joined(allot)
    other = machine.share("--memory", "1Gi", "--name", "other")
    refused = machine.set("soft", "--reset", gpu=1)
    assert refused.returncode == BusyError.exit_code
    assert "would stop share other on GPU 0 (NVLink) as well" in refused.stderr
    assert (machine.said(1)[1], pending(machine)) == (["mig"], (True, True))
    late = machine.set("soft", "--reset", "--drain", "--timeout", "1s", gpu=1)
    assert late.returncode == BusyError.exit_code
    assert "it goes on draining" in late.stderr
    assert (machine.said(1)[1], pending(machine)) == (["soft"], (True, True))
    drain = machine.start(*machine.words("soft", "--reset", "--drain", gpu=1))
    assert drain.stderr is not None
    assert drain.stderr.readline() == "waiting for share other on GPU 0 (NVLink)\n"
    end(other)
    assert finished(drain)[0] == 0
    assert (machine.said(1)[1], pending(machine)) == (["soft"], (False, False))
    machine.close()


def test_a_program_on_a_gpu_that_is_reset_with_it_is_named(allot: Allot) -> None:
    machine = joined(allot)
    lines = allot("env", "--simulated", machine.spec).stdout
    script = f'{lines}\nexec "$0" -m allotment burn --memory 64Mi --seconds 600'
    burn = subprocess.Popen(
        ["bash", "-c", script, sys.executable],
        env=allot.environment(CUDA_VISIBLE_DEVICES=machine.uuids[0]),
        stdout=subprocess.PIPE,
    )
    try:
        deadline = time.monotonic() + 60
        while burn.pid not in machine.on(lambda device: device.driver.processes()):
            assert burn.poll() is None, "it ended"
            assert time.monotonic() < deadline, "it did not begin"
        refused = machine.set("soft", "--reset", gpu=1)
        assert refused.returncode == BusyError.exit_code
        assert f"process {burn.pid} on GPU 0 (NVLink)" in refused.stderr
    finally:
        burn.kill()
        burn.communicate(timeout=30)


def test_a_reset_that_fails_takes_the_mode_back(
    allot: Allot, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = joined(allot)

    def fails(*_: object) -> None:
        raise PrerequisiteError("nvidia-smi does not reset it")

    monkeypatch.setattr(changing_modes, "reset", fails)
    device = SimulatedMachine(machine.file).devices()[1]
    change = ModeChange(
        folder=machine.folder, device=device, machine=machine.file, modes=("soft",), may_reset=True
    )
    with pytest.raises(PrerequisiteError, match="does not reset"):
        change.carry_out(patience_s=None)
    assert (machine.said(1)[1], pending(machine)) == (["mig"], (True, True))


def test_a_mode_that_was_to_go_with_the_next_reset_stays_where_that_is_said(allot: Allot) -> None:
    machine = joined(allot)
    machine.on(lambda device: device.driver.set_mode(is_on=False), gpu=1)
    assert pending(machine) == (True, False)
    assert machine.set("mig", "--reset", gpu=1).returncode == 0
    assert pending(machine) == (True, True)


def test_default_with_a_reset_switches_off_whoever_had_switched_on(allot: Allot) -> None:
    machine = Machine(allot, "a100-80gb")
    assert machine.set("mig", "--reset").returncode == 0
    assert machine.set("default").returncode == 0  # from here on the mode is the administrator's
    assert machine.run("--mig", "1g.10gb", "--mig-keep", "1h").returncode == 0
    has_one = machine.set("default", "--reset")
    assert has_one.stdout.endswith("is for every mode; MIG stays on: it has 1 instance\n")
    assert machine.mig() == (True, 1)
    [kept] = Journal(machine.folder.mig / machine.uuids[0]).read().records
    machine.on(
        lambda device: Slices(device.driver, Journal(machine.folder.mig / device.uuid)).remove(
            kept.id
        )
    )
    done = machine.set("default", "--reset")
    assert done.stdout.endswith("is for every mode; MIG is switched off\n"), done.stderr
    assert machine.mig() == (False, 0)
    again = machine.set("default", "--reset")
    assert again.stdout.endswith("is for every mode\n")
    machine.close()


@pytest.mark.parametrize("modes", ["exclusive", "exclusive,timeslice"])
def test_a_gpu_that_no_share_of_this_machine_comes_to_is_told(machine: Machine, modes: str) -> None:
    told = machine.set(modes)
    assert (told.returncode, "`allot run` and `allot cdi` make no shares" in told.stderr) == (
        0,
        True,
    )
    refused = machine.run("--memory", "1Gi")
    assert refused.returncode == DoesNotFitError.exit_code
    assert "kept for mode exclusive" in refused.stderr
    quiet = machine.set("soft,exclusive")
    assert (quiet.returncode, quiet.stderr) == (0, "")
    assert machine.run("--memory", "1Gi").returncode == 0


# ---- a pod that was placed before ----------------------------------------------------------------


def _placed_pod(machine: Machine) -> None:
    """Make the soft share of a pod for which a scheduler chose the GPU before anything was said."""
    owner = Owner(
        uid=PodUid("1"),
        namespace="default",
        pod="pod-1",
        container="main",
        kind=ContainerKind.REGULAR,
        resource="allotment.dev/gpu",
    )
    order = lives.Order(
        Request(parse_memory("1Gi")),
        Injection.ENVIRONMENT,
        machine=machine.file,
        owner=owner,
        devices=(machine.uuids[0],),
    )
    lives.create(machine.folder, order, SimulatedMachine(machine.file).devices())


def _end_pod(machine: Machine) -> None:
    [found] = lives.look(machine.folder)
    lives.destroy(machine.folder, found, force=True)


def _change(machine: Machine, *modes: str) -> ModeChange:
    [device, _] = SimulatedMachine(machine.file).devices()
    return ModeChange(folder=machine.folder, device=device, machine=machine.file, modes=modes)


def _modes(machine: Machine) -> frozenset[str]:
    return modes_on(lives.look(machine.folder), machine.uuids[0])


@pytest.fixture
def at_step(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, Callable[[], None]], None]:
    """Have something happen at a step, the first time that it is reached."""

    def at(name: str, what: Callable[[], None]) -> None:
        waiting = [what]

        def step(reached: str) -> None:
            if reached == name and waiting:
                waiting.pop()()

        monkeypatch.setattr(changing_modes, "step", step)

    return at


AtStep = Callable[[str, Callable[[], None]], None]


def test_one_that_comes_at_the_last_moment_has_the_gpu_to_itself(
    machine: Machine, at_step: AtStep
) -> None:
    at_step("modes.drained", lambda: _placed_pod(machine))
    with pytest.raises(BusyError, match="in use by share default/pod-1/main of mode soft"):
        _change(machine, "mig").carry_out(patience_s=None)
    assert machine.mig() == (False, 0)
    assert _modes(machine) == {"soft"}
    assert allowed_on(machine.folder, machine.uuids[0]) is None
    assert not Journal(machine.folder.mig / machine.uuids[0]).is_switched


def test_one_that_comes_at_the_last_moment_is_waited_for_as_well(
    machine: Machine, at_step: AtStep
) -> None:
    at_step("modes.drained", lambda: _placed_pod(machine))
    told: list[str] = []

    def tell(text: str) -> None:
        told.append(text)
        assert machine.mig() == (False, 0)
        _end_pod(machine)

    change = _change(machine, "mig")
    change.tell = tell
    assert change.carry_out(patience_s=120).endswith("MIG is switched on")
    assert told == ["waiting for share default/pod-1/main of mode soft"]
    assert machine.mig() == (True, 0)


def test_one_that_comes_after_that_is_refused(machine: Machine, at_step: AtStep) -> None:
    refused: list[str] = []

    def come() -> None:
        with pytest.raises(DoesNotFitError) as caught:
            _placed_pod(machine)
        refused.append(str(caught.value))

    at_step("modes.claimed", come)
    _change(machine, "mig").carry_out(patience_s=None)
    assert len(refused) == 1
    assert _modes(machine) == frozenset()
    assert machine.mig() == (True, 0)


@pytest.mark.parametrize("modes", ["mig", "soft", "soft,mig", "default"])
def test_a_claim_whose_maker_died_is_in_nobodys_way(machine: Machine, modes: str) -> None:
    done = machine.allot(*machine.words("mig"), ALLOTMENT_KILL_AT="modes.claimed")
    assert done.returncode == -signal.SIGKILL
    assert Journal(machine.folder.mig / machine.uuids[0]).is_switched
    again = machine.set(modes)
    assert again.returncode == 0, again.stderr
    assert machine.mig() == (modes == "mig", 0)
    assert Journal(machine.folder.mig / machine.uuids[0]).is_switched == (modes == "mig")
    right = ("--mig", "1g.10gb") if modes == "mig" else ("--memory", "1Gi")
    assert machine.run(*right).returncode == 0


# ---- other GPUs ----------------------------------------------------------------------------------


@pytest.mark.parametrize("patience_s", [None, 1.0])
def test_what_is_left_on_another_gpu_is_not_waited_for(
    machine: Machine, patience_s: float | None
) -> None:
    """Each driver may take its time, and is to be waited for by who wants something of it."""
    left = machine.share("--mig", "1g.10gb", gpu=1)
    os.killpg(left.pid, signal.SIGKILL)
    left.wait(timeout=30)
    with machine.folder.locked():
        lives.recover(machine.folder)
    assert machine.uuids[1] in slicing.in_need(machine.folder)
    _change(machine, "soft").carry_out(patience_s=patience_s)
    assert machine.mig(1) == (True, 1), "nobody has asked it anything"


def test_what_is_left_on_the_gpu_itself_is_removed(machine: Machine) -> None:
    left = machine.share("--mig", "1g.10gb")
    os.killpg(left.pid, signal.SIGKILL)
    left.wait(timeout=30)
    _change(machine, "soft").carry_out(patience_s=60)
    assert machine.mig() == (False, 0)


# ---- bad input -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        pytest.param(("UUID", "sofd"), 2, "there is no mode 'sofd'", id="no mode"),
        pytest.param(("UUID", "soft,"), 2, "there is no mode ''", id="comma"),
        pytest.param(("UUID", "default,soft"), 2, "no mode 'default'", id="default and others"),
        pytest.param(("UUID", "mig"), 2, "has no MIG", id="no MIG"),
        pytest.param(("UUID", "soft", "--timeout", "5m"), 2, "--timeout is of --drain", id="wait"),
        pytest.param(("UUID", "soft", "--drain", "--timeout", "5"), 2, "unit", id="unit"),
        pytest.param(("GPU-ffffffff", "soft"), NotFoundError.exit_code, "no GPU", id="no GPU"),
        pytest.param(("0", "soft"), NotFoundError.exit_code, "no GPU '0'", id="a number"),
        pytest.param(("gpu-", "soft"), UsageError.exit_code, "may be any of", id="several"),
    ],
)
def test_what_cannot_be_meant(
    allot: Allot, words: tuple[str, ...], code: int, message: str
) -> None:
    machine = Machine(allot, "t4:2")
    given = [machine.uuids[0] if word == "UUID" else word for word in words]
    done = allot("devices", "set-mode", "--simulated", machine.spec, *given)
    assert (done.returncode, done.stdout) == (code, "")
    assert message in done.stderr
    assert "hint:" in done.stderr
    assert machine.said() == (None, None, False)


def test_a_file_that_cannot_be_read_keeps_everybody_off_one_gpu_until_it_is_set(
    machine: Machine,
) -> None:
    assert machine.set("soft").returncode == 0
    path = machine.folder.root / "modes" / f"{machine.uuids[0]}.json"
    path.write_text('{"version": 1, "mod')
    refused = machine.run("--memory", "1Gi")
    assert (refused.returncode, str(path) in refused.stderr) == (3, True)
    assert machine.run("--memory", "1Gi", gpu=1).returncode == 0
    assert machine.allot("devices", "--simulated", SPEC).returncode == 0
    assert machine.set("soft").returncode == 0
    assert machine.run("--memory", "1Gi").returncode == 0


def test_what_the_node_says_is_not_changed_here(machine: Machine) -> None:
    machine.folder.prepare()
    with machine.folder.locked():
        write_allowed(machine.folder, machine.uuids[0], Allowed(("soft",), by="node"))
    for modes in ("mps", "default"):
        done = machine.set(modes)
        assert done.returncode == UsageError.exit_code
        assert "allotment.dev/device-modes" in done.stderr
    found = allowed_on(machine.folder, machine.uuids[0])
    assert found is not None
    assert found.modes == ("soft",)


def test_the_machine_of_a_gpu_is_found_by_its_name(machine: Machine) -> None:
    assert machine.run("--memory", "1Gi").returncode == 0
    done = machine.allot("devices", "set-mode", machine.uuids[1][:12].lower(), "soft")
    assert done.returncode == 0, done.stderr
    assert machine.said(1) == (None, ["soft"], False)


def test_a_drain_that_is_over_is_quickly_noticed(machine: Machine) -> None:
    share = machine.share("--memory", "1Gi")
    draining = machine.drain("mps")
    end(share)
    ended = time.monotonic()
    assert finished(draining)[0] == 0
    assert time.monotonic() - ended < 30, "and not by its time"
