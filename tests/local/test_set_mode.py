# SPDX-License-Identifier: Apache-2.0
"""`allot devices set-mode`: what GPUs are for, said while shares are on them, by real processes."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
from modes_machine import SPEC, Machine, end, finished

from allotment.model.errors import BusyError, DoesNotFitError, NotFoundError, UsageError
from allotment.shares import mps_daemons
from allotment.shares.mode_policy import ModePolicy, mode_policy_of, write_mode_policy

Allot = Any  # tests/conftest.py: CommandLine
INTERRUPTED = 130


@pytest.fixture
def machine(allot: Allot) -> Iterator[Machine]:
    with Machine(allot) as made:
        yield made


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
    assert (new.returncode, "have shares of mode soft on it" in new.stderr) == (3, True)
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
    assert "continues to drain for mps" in errors
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
    assert "another command has changed" in errors
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
    share = machine.share("--memory", "1Gi", "--mode", "mps")
    keeper = mps_daemons.place_of(machine.folder, machine.uuids[0]).status().supervisor
    assert keeper is not None
    os.kill(keeper, signal.SIGSTOP)  # the daemon is there until it goes on
    try:
        end(share)
        setting = machine.start(*machine.words("soft"))
        assert setting.stderr is not None
        assert setting.stderr.readline() == "waiting for the MPS control daemon\n"
        assert setting.poll() is None
    finally:
        os.kill(keeper, signal.SIGCONT)
    code, _, errors = finished(setting)
    assert code == 0, errors
    assert machine.run("--memory", "1Gi").returncode == 0


@pytest.mark.parametrize("modes", ["exclusive", "exclusive,timeslice"])
def test_a_gpu_that_no_share_of_this_machine_comes_to_is_told(machine: Machine, modes: str) -> None:
    told = machine.set(modes)
    assert (told.returncode, "`allot run` and `allot cdi` create no shares" in told.stderr) == (
        0,
        True,
    )
    refused = machine.run("--memory", "1Gi")
    assert refused.returncode == DoesNotFitError.exit_code
    assert "kept for mode exclusive" in refused.stderr
    quiet = machine.set("soft,exclusive")
    assert (quiet.returncode, quiet.stderr) == (0, "")
    assert machine.run("--memory", "1Gi").returncode == 0


# ---- bad input -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        pytest.param(("UUID", "sofd"), 2, "there is no mode 'sofd'", id="no mode"),
        pytest.param(("UUID", "soft,"), 2, "there is no mode ''", id="comma"),
        pytest.param(("UUID", "default,soft"), 2, "no mode 'default'", id="default and others"),
        pytest.param(("UUID", "mig"), 2, "has no MIG", id="no MIG"),
        pytest.param(("UUID", "soft", "--timeout", "5m"), 2, "--timeout needs --drain", id="wait"),
        pytest.param(("UUID", "soft", "--drain", "--timeout", "5"), 2, "unit", id="unit"),
        pytest.param(("GPU-ffffffff", "soft"), NotFoundError.exit_code, "no GPU", id="no GPU"),
        pytest.param(("0", "soft"), NotFoundError.exit_code, "no GPU '0'", id="a number"),
        pytest.param(("gpu-", "soft"), UsageError.exit_code, "matches several GPUs", id="several"),
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
        write_mode_policy(machine.folder, machine.uuids[0], ModePolicy(("soft",), by="node"))
    for modes in ("mps", "default"):
        done = machine.set(modes)
        assert done.returncode == UsageError.exit_code
        assert "allotment.dev/device-modes" in done.stderr
    found = mode_policy_of(machine.folder, machine.uuids[0])
    assert found is not None
    assert found.modes == ("soft",)


def test_the_machine_of_a_gpu_is_found_by_its_name(machine: Machine) -> None:
    assert machine.run("--memory", "1Gi").returncode == 0
    done = machine.allot("devices", "set-mode", machine.uuids[1][:12].lower(), "soft")
    assert done.returncode == 0, done.stderr
    assert machine.said(1) == (None, ["soft"], False)


def test_a_drain_that_is_over_is_quickly_noticed(machine: Machine) -> None:
    share = machine.share("--memory", "1Gi")
    draining = machine.drain("mps", "--timeout", "1h")
    end(share)
    assert finished(draining)[0] == 0, "and not by its time"
