# SPDX-License-Identifier: Apache-2.0
"""`allot devices set-mode` where MIG is switched for it: slices that go, GPUs that need a reset."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from modes_machine import Machine, end, finished
from patience import wait_until

from allotment.devices.mig_machine import MigDevice
from allotment.devices.simulated import SimulatedMachine
from allotment.model.errors import BusyError, DoesNotFitError, PrerequisiteError
from allotment.modes.mig.journal import Journal
from allotment.modes.mig.slices import Slices
from allotment.shares.drain import ModeChange
from allotment.shares.mig import inspect

Allot = Any  # tests/conftest.py: CommandLine


@pytest.fixture
def machine(allot: Allot) -> Iterator[Machine]:
    with Machine(allot) as made:
        yield made


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


@pytest.fixture
def ampere(allot: Allot) -> Iterator[Machine]:
    """A GPU that is reset for its mode."""
    with Machine(allot, "a100-80gb") as made:
        yield made


def test_a_gpu_that_needs_a_reset_gets_one_if_it_may(ampere: Machine) -> None:
    machine = ampere
    refused = machine.set("mig")
    assert refused.returncode == PrerequisiteError.exit_code
    assert "only with a reset" in refused.stderr
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


@pytest.fixture
def joined(allot: Allot) -> Iterator[Machine]:
    """Two GPUs that a bridge joins; the second is for MIG alone, by a reset."""
    with Machine(allot, "a30:2") as made:
        assert made.set("mig", "--reset", gpu=1).returncode == 0
        yield made


def pending(machine: Machine) -> tuple[bool, bool]:
    """Whether MIG is on on the second GPU, and will be with its next reset."""
    seen = machine.on(lambda device: device.driver.look(), gpu=1)
    return seen.is_enabled, seen.is_pending


def test_who_has_a_gpu_that_is_reset_with_it_is_waited_for(joined: Machine) -> None:
    machine = joined
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


def test_a_program_on_a_gpu_that_is_reset_with_it_is_named(allot: Allot, joined: Machine) -> None:
    machine = joined
    lines = allot("env", "--simulated", machine.spec).stdout
    script = f'{lines}\nexec "$0" -m allotment burn --memory 64Mi --seconds 600'
    burn = subprocess.Popen(
        ["bash", "-c", script, sys.executable],
        env=allot.environment(CUDA_VISIBLE_DEVICES=machine.uuids[0]),
        stdout=subprocess.PIPE,
    )
    try:
        wait_until(
            lambda: burn.pid in machine.on(lambda device: device.driver.processes()),
            "it did not begin",
        )
        refused = machine.set("soft", "--reset", gpu=1)
        assert refused.returncode == BusyError.exit_code
        assert f"process {burn.pid} on GPU 0 (NVLink)" in refused.stderr
    finally:
        burn.kill()
        burn.communicate(timeout=30)


def test_a_reset_that_fails_takes_the_mode_back(
    joined: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = joined

    def fails(*_: object) -> None:
        raise PrerequisiteError("nvidia-smi does not reset it")

    monkeypatch.setattr(inspect, "reset", fails)
    device = SimulatedMachine(machine.file).devices()[1]
    change = ModeChange(
        folder=machine.folder, device=device, machine=machine.file, modes=("soft",), may_reset=True
    )
    with pytest.raises(PrerequisiteError, match="does not reset"):
        change.carry_out(patience_s=None)
    assert (machine.said(1)[1], pending(machine)) == (["mig"], (True, True))


def test_a_mode_that_was_to_go_with_the_next_reset_stays_where_that_is_said(
    joined: Machine,
) -> None:
    machine = joined
    machine.on(lambda device: device.driver.set_mode(is_on=False), gpu=1)
    assert pending(machine) == (True, False)
    assert machine.set("mig", "--reset", gpu=1).returncode == 0
    assert pending(machine) == (True, True)


def test_default_with_a_reset_switches_off_whoever_had_switched_on(ampere: Machine) -> None:
    machine = ampere
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
