# SPDX-License-Identifier: Apache-2.0
"""`allot run` in MIG slices: real processes on simulated GPUs, and what is left of them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest
from patience import wait_until

from allotment.devices.faults import MigCall, MigFault, clear_faults, set_mig_fault
from allotment.devices.mig_machine import MigDevice, MigMachine
from allotment.devices.simulated import SimulatedMachine, machine_path
from allotment.model.errors import AllotError, DoesNotFitError
from allotment.model.mig import MigGpu
from allotment.model.quantities import parse_memory
from allotment.model.requests import Request
from allotment.model.shares import Injection
from allotment.modes.mig.journal import Journal, Stage
from allotment.shares import lifecycle
from allotment.shares.folders import StateFolder
from allotment.shares.placing import ShareOrder

Allot = Any  # tests/conftest.py: CommandLine
T = TypeVar("T")
TENANT = Path(__file__).with_name("mig_tenant.py")
SPEC = "h100-80gb:2"
MIB = 1 << 20


class Machine:
    """Two simulated GPUs that can be cut, and the programs that were started on them."""

    def __init__(self, allot: Allot, spec: str = SPEC) -> None:
        self.allot = allot
        self.spec = spec
        self.file = machine_path(allot.state, spec)
        self.uuids = [each.uuid for each in SimulatedMachine(self.file).devices()]
        self._programs: list[subprocess.Popen[str]] = []

    def on(self, gpu: int, question: Callable[[MigDevice], T]) -> T:
        with MigMachine(self.file) as gpus:
            return gpus.ask_one(gpu, question, patience_s=30)

    def look(self, gpu: int = 0) -> MigGpu:
        return self.on(gpu, lambda device: device.driver.look())

    def journal(self, gpu: int = 0) -> Journal:
        return Journal(self.allot.state / "mig" / self.uuids[gpu])

    def stages(self, gpu: int = 0) -> set[Stage]:
        return {each.stage for each in self.journal(gpu).read().records}

    def profiles(self, gpu: int = 0) -> list[str]:
        seen = self.look(gpu)
        names = {each.number: each.name for each in seen.profiles}
        return sorted(names[each.profile] for each in seen.instances)

    def words(self, *options: str, gpu: int | None = 0) -> list[str]:
        which = [] if gpu is None else ["--gpu", self.uuids[gpu]]
        return ["run", "--simulated", self.spec, *which, *options, "--", sys.executable]

    def run(
        self, *options: str, mib: int = 0, gpu: int | None = 0, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        done: subprocess.CompletedProcess[str] = self.allot(
            *self.words(*options, gpu=gpu), TENANT, str(mib), **variables
        )
        return done

    def start(self, *options: str, gpu: int | None = 0) -> subprocess.Popen[str]:
        return self.start_words(*self.words(*options, gpu=gpu), TENANT, "64", "-")

    def start_words(self, *words: str | Path) -> subprocess.Popen[str]:
        program = subprocess.Popen(
            self.allot.command(*words),
            env=self.allot.environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._programs.append(program)
        return program

    def is_as_before(self) -> None:
        """Nothing is left of any slice, and the GPUs are as they were."""
        for gpu in range(len(self.uuids)):
            seen = self.look(gpu)
            assert (seen.is_enabled, seen.instances) == (False, ())
            assert self.journal(gpu).read().records == ()
            assert not self.journal(gpu).is_switched
        assert json.loads(self.allot("ps", "-o", "json").stdout)["shares"] == []

    def close(self) -> None:
        for program in self._programs:
            if program.poll() is None:
                program.kill()
            if program.stdout is not None and not program.stdout.closed:
                program.communicate(timeout=60)


@pytest.fixture
def machine(allot: Allot) -> Iterator[Machine]:
    made = Machine(allot)
    yield made
    made.close()


def said(text: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(text)
    return found


def first_line(program: subprocess.Popen[str]) -> dict[str, Any]:
    assert program.stdout is not None
    line = program.stdout.readline()
    assert line, program.communicate()[1]
    return said(line)


def end(program: subprocess.Popen[str]) -> None:
    _, errors = program.communicate("", timeout=60)
    assert (program.returncode, errors) == (0, "")


# ---- what a program has --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "injection",
    [
        pytest.param(
            "namespace",
            marks=pytest.mark.skipif(os.geteuid() != 0, reason="mounting is root's"),
        ),
        "environment",
    ],
)
def test_a_program_sees_its_slice_and_nothing_else(machine: Machine, injection: str) -> None:
    done = machine.run("--mig", "1g.10gb", "--inject", injection, mib=20_000)
    assert done.returncode == 0, done.stderr
    seen = said(done.stdout)
    profile = next(each for each in machine.look().profiles if each.name == "1g.10gb")
    uuid = seen["nvml"]["uuid"]
    assert uuid.startswith("MIG-")
    assert seen["visible"] == uuid
    assert (seen["cuda"]["count"], seen["nvml"]["count"]) == (1, 1)
    assert seen["cuda"]["uuid"] == uuid.removeprefix("MIG-").replace("-", "")
    assert seen["cuda"]["multiprocessors"] == profile.multiprocessors
    assert (seen["cuda"]["total"], seen["nvml"]["total"]) == (profile.memory_bytes,) * 2
    # A context and the last piece are less than a gigabyte.
    assert profile.memory_bytes - 1024 * MIB < seen["had_mib"] * MIB < profile.memory_bytes
    machine.is_as_before()


@pytest.mark.parametrize(
    ("options", "profile"),
    [
        pytest.param(("--mode", "mig", "--memory", "9Gi"), "1g.10gb", id="by memory"),
        pytest.param(("--mode", "mig", "--memory", "10Gi"), "1g.20gb", id="less than its name"),
        pytest.param(("--mode", "mig", "--memory", "9Gi", "--compute", "40"), "3g.40gb", id="both"),
        pytest.param(("--mig", "2g.20gb", "--memory", "18Gi"), "2g.20gb", id="by name, and enough"),
    ],
)
def test_the_smallest_profile_that_serves_is_cut(
    machine: Machine, options: tuple[str, ...], profile: str
) -> None:
    program = machine.start(*options)
    first_line(program)
    assert machine.profiles() == [profile]
    [share] = said(machine.allot("ps", "-o", "json").stdout)["shares"]
    [device] = share["devices"]
    assert (share["mode"], share["enforced"]) == ("mig", True)
    assert device["name"].endswith(f"MIG {profile}")
    assert device["memory_used_bytes"] > 64 * MIB
    assert "share " + share["name"] in machine.allot("devices", "--simulated", SPEC).stdout
    end(program)
    machine.is_as_before()


def test_seven_run_and_the_eighth_is_told_why(machine: Machine) -> None:
    seven = [machine.start("--mig", "1g.10gb", "--name", f"s{number}") for number in range(7)]
    uuids = {first_line(each)["nvml"]["uuid"] for each in seven}
    assert len(uuids) == 7
    assert machine.profiles() == ["1g.10gb"] * 7
    eighth = machine.run("--mig", "1g.10gb")
    assert eighth.returncode == DoesNotFitError.exit_code
    assert "has the most 1g.10gb or profiles with its engines that fit" in eighth.stderr
    assert all(f" of share s{number}" in eighth.stderr for number in range(7))
    assert f"hint: `allot mig plan --fit 1g.10gb --simulated {SPEC}`" in eighth.stderr
    end(seven.pop(3))
    again = machine.run("--mig", "1g.10gb")
    assert again.returncode == 0, again.stderr
    assert said(again.stdout)["nvml"]["uuid"] not in uuids
    for each in seven:
        end(each)
    machine.is_as_before()


def test_the_hardware_holds_a_program_without_the_shim(machine: Machine) -> None:
    scrubbed = ("env", "-u", "LD_PRELOAD", "-u", "ALLOTMENT_SHARE", sys.executable, TENANT)
    program = machine.start_words(
        *machine.words("--mig", "1g.10gb", "--inject", "environment")[:-1], *scrubbed, "20000", "-"
    )
    seen = first_line(program)
    assert seen["cuda"]["count"] == 1
    assert 8192 < seen["had_mib"] < 10 * 1024
    overview = said(machine.allot("ps", "-o", "json").stdout)
    [share] = overview["shares"]
    [process] = share["processes"]
    assert (share["enforced"], process["enforced"], overview["outside"]) == (True, True, [])
    assert process["devices"][0]["memory_used_bytes"] >= seen["had_mib"] * MIB
    end(program)
    machine.is_as_before()


def test_of_eight_at_once_seven_run(machine: Machine) -> None:
    eight = [machine.start("--mig", "1g.10gb") for _ in range(8)]
    lines = [each.stdout.readline() for each in eight if each.stdout is not None]
    assert len({said(line)["nvml"]["uuid"] for line in lines if line}) == 7
    [refused] = [each for each, line in zip(eight, lines, strict=True) if not line]
    _, errors = refused.communicate(timeout=60)
    assert (refused.returncode, "engines that fit" in errors) == (DoesNotFitError.exit_code, True)
    for each in eight:
        if each is not refused:
            end(each)
    machine.is_as_before()


def test_other_gpus_are_shared_as_ever(machine: Machine) -> None:
    cut = machine.start("--mig", "3g.40gb")
    first_line(cut)
    soft = machine.start("--memory", "4Gi", "--name", "soft", gpu=None)
    assert first_line(soft)["nvml"]["uuid"] == machine.uuids[1]
    shares = said(machine.allot("ps", "-o", "json").stdout)
    assert {each["mode"] for each in shares["shares"]} == {"mig", "soft"}
    assert shares["outside"] == [], "who is in a slice is in its share"
    refused = machine.run("--memory", "4Gi")
    assert refused.returncode == DoesNotFitError.exit_code
    no_switch = machine.run("--mig", "1g.10gb", gpu=1)
    assert no_switch.returncode == DoesNotFitError.exit_code
    assert "MIG is off, and cannot be switched on beside share soft" in no_switch.stderr
    end(soft)
    end(cut)
    machine.is_as_before()


def test_a_driver_that_takes_its_time_keeps_nobody_else_waiting(machine: Machine) -> None:
    first = machine.start("--mig", "1g.10gb")
    first_line(first)
    set_mig_fault(machine.file, 0, MigCall.CREATE_GPU, MigFault(slow_us=100_000_000))
    slow = machine.start("--mig", "2g.20gb")
    wait_until(lambda: Stage.INTENDED in machine.stages(), "it is not begun")
    assert machine.run("--memory", "1Gi", gpu=1).returncode == 0
    end(first)
    assert Stage.INTENDED in machine.stages(), "all that was while one slice was being made"
    clear_faults(machine.file)
    first_line(slow)
    end(slow)
    machine.is_as_before()


def test_a_share_with_an_older_look_does_not_come_to_a_gpu_that_is_cut(machine: Machine) -> None:
    before = SimulatedMachine(machine.file).devices()[:1]
    program = machine.start("--mig", "1g.10gb")
    first_line(program)
    order = ShareOrder(Request(parse_memory("1Gi")), Injection.ENVIRONMENT, machine=machine.file)
    with pytest.raises(DoesNotFitError):
        lifecycle.create(StateFolder(machine.allot.state), order, before)
    end(program)


def test_allots_own_commands_see_the_slice(machine: Machine) -> None:
    words = ("--mig", "1g.10gb", "--", sys.executable, "-m", "allotment", "devices", "-o", "json")
    done = machine.allot("run", "--simulated", SPEC, *words)
    assert done.returncode == 0, done.stderr
    found = said(done.stdout)
    [device] = found["devices"]
    assert (device["uuid"][:4], device["sm_count"], found["problems"]) == ("MIG-", 16, [])
    assert device["name"].endswith(" MIG 1g.10gb")


# ---- what is left --------------------------------------------------------------------------------


def test_a_warm_slice_is_had_again_and_makes_room_for_others(machine: Machine) -> None:
    first = said(machine.run("--mig", "1g.10gb", "--mig-keep", "1h").stdout)
    assert machine.profiles() == ["1g.10gb"]
    second = said(machine.run("--mig", "1g.10gb", "--mig-keep", "1h").stdout)
    assert second["nvml"]["uuid"] == first["nvml"]["uuid"]
    whole = machine.run("--mig", "7g.80gb", "--mig-keep", "1ms")
    assert whole.returncode == 0, whole.stderr
    assert machine.allot("ps").returncode == 0
    machine.is_as_before()


def test_a_slice_goes_when_its_time_is_over_and_somebody_looks(machine: Machine) -> None:
    began = time.monotonic()
    assert machine.run("--mig", "1g.10gb", "--mig-keep", "3s").returncode == 0
    assert machine.profiles() == ["1g.10gb"] or time.monotonic() - began > 3.0
    wait_until(lambda: machine.allot("ps").returncode == 0 and not machine.profiles())
    machine.is_as_before()


def test_a_slice_stays_for_who_is_left_in_it(machine: Machine) -> None:
    program = machine.start("--mig", "1g.10gb", "--name", "orphan")
    first_line(program)
    program.kill()
    program.wait(timeout=30)
    [share] = said(machine.allot("ps", "-o", "json").stdout)["shares"]
    assert share["state"] == "left"
    assert machine.profiles() == ["1g.10gb"]
    refused = machine.allot("rm", "orphan")
    assert refused.returncode == 7
    for process in share["processes"]:
        os.kill(process["pid"], signal.SIGKILL)
    wait_until(lambda: not said(machine.allot("ps", "-o", "json").stdout)["shares"])
    machine.is_as_before()


def test_a_slice_of_no_share_with_programs_in_it_is_in_nobodys_way(machine: Machine) -> None:
    program = machine.start("--mig", "1g.10gb", "--name", "orphan")
    here = first_line(program)
    removed = machine.allot("rm", "orphan", "--force")
    assert removed.returncode == 0, removed.stderr
    whole = machine.run("--mig", "7g.80gb", gpu=None)
    assert whole.returncode == 0, whole.stderr
    beside = machine.run("--mig", "1g.10gb")
    assert said(beside.stdout)["nvml"]["uuid"] != here["nvml"]["uuid"], "that one is had already"
    refused = machine.run("--mig", "7g.80gb")
    assert refused.returncode == DoesNotFitError.exit_code
    [record] = machine.journal().read().records
    [user] = machine.on(0, lambda device: device.driver.users(record.gpu_instance or 0))
    assert f"process {user}" in refused.stderr
    program.communicate("", timeout=60)
    assert machine.run("--mig", "7g.80gb").returncode == 0
    machine.is_as_before()


def test_what_others_made_is_left_alone(machine: Machine) -> None:
    def make(device: MigDevice) -> str:
        device.driver.set_mode(is_on=True)
        profile = next(each for each in device.driver.look().profiles if each.name == "1g.10gb")
        made = device.driver.create_gpu_instance(profile, 6)
        return device.driver.create_compute_instance(made, profile).uuid

    theirs = machine.on(0, make)
    refused = machine.run("--mig", "7g.80gb")
    assert refused.returncode == DoesNotFitError.exit_code
    assert "slot 6 of others" in refused.stderr
    done = machine.run("--mig", "1g.10gb")
    assert done.returncode == 0, done.stderr
    assert said(done.stdout)["nvml"]["uuid"] != theirs
    after = machine.look()
    assert (after.is_enabled, [each.uuid for each in after.instances]) == (True, [theirs])


STEPS = [
    "mig.claimed",
    "mig.cut",
    "create.drafted",
    "create.enforced",
    "create.recorded",
    "create.shown",
    "remove.unpublished",
    "remove.hidden",
    "remove.cleared",
    "mig.settled",
]


@pytest.mark.parametrize("step", STEPS)
def test_the_next_command_settles_what_a_killed_one_left(machine: Machine, step: str) -> None:
    killed = machine.run("--mig", "1g.10gb", ALLOTMENT_KILL_AT=step)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert machine.allot("ps").stderr == "No shares.\n"
    machine.is_as_before()
    assert machine.run("--mig", "7g.80gb").returncode == 0


@pytest.mark.parametrize("is_after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize(
    "call",
    [
        MigCall.SET_MODE,
        MigCall.CREATE_GPU,
        MigCall.CREATE_COMPUTE,
        MigCall.DESTROY_COMPUTE,
        MigCall.DESTROY_GPU,
    ],
    ids=lambda call: call.name.lower(),
)
def test_a_crash_in_the_driver_costs_nothing(
    machine: Machine, call: MigCall, *, is_after: bool
) -> None:
    fault = MigFault(ends_before=not is_after, ends_after=is_after)
    set_mig_fault(machine.file, 0, call, fault)
    killed = machine.run("--mig", "2g.20gb")
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    clear_faults(machine.file)
    again = machine.run("--mig", "7g.80gb")  # needs all of the GPU
    assert again.returncode == 0, again.stderr
    machine.is_as_before()


@pytest.mark.parametrize("call", [MigCall.CREATE_GPU, MigCall.CREATE_COMPUTE])
def test_a_driver_that_refuses_leaves_no_share(machine: Machine, call: MigCall) -> None:
    set_mig_fault(machine.file, 0, call, MigFault(error=999))  # NVML_ERROR_UNKNOWN
    done = machine.run("--mig", "1g.10gb")
    assert done.returncode == AllotError.exit_code
    assert machine.uuids[0] in done.stderr
    clear_faults(machine.file)
    machine.allot("ps")
    machine.is_as_before()


# ---- what cannot be ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        pytest.param(("--mig", "9g.90gb"), 3, "has no profile 9g.90gb", id="no such profile"),
        pytest.param(
            ("--mig", "1g.10gb", "--memory", "20Gi"),
            3,
            "1g.10gb has 9.8Gi and 12.12 %, need 20Gi\n",
            id="more memory than it has",
        ),
        pytest.param(
            ("--mig", "1g.10gb", "--compute", "30"), 3, ", need 30 %\n", id="more compute"
        ),
        pytest.param(
            ("--mig", "1g.10gb", "--memory", "20Gi", "--compute", "30"),
            3,
            "(the smallest slice with them is taken), or name 3g.40gb",
            id="what would do",
        ),
        pytest.param(
            ("--mig", "1g.10gb", "--compute", "10:80"), 2, "slice has no ceiling", id="ceiling"
        ),
        pytest.param(("--mode", "mig,sof", "--memory", "1Gi"), 2, "'sof' is not one", id="modes"),
        pytest.param(("--mode", "mig,mig", "--memory", "1Gi"), 2, "a mode twice", id="twice"),
        pytest.param(
            ("--mig", "1g.10gb", "--mode", "mig,soft"),
            2,
            "missing --memory",
            id="soft has no slice",
        ),
        pytest.param(
            ("--mig", "9g.90gb", "--mode", "mig,soft", "--memory", "1Gi"),
            3,
            "hint: the profiles here are: 1g.10gb",
            id="no such profile, or soft",
        ),
        pytest.param(
            ("--mig", "bogus", "--mode", "mig,soft", "--memory", "1Gi"),
            2,
            "'bogus' is not a MIG profile",
            id="no profile at all",
        ),
        pytest.param(("--mode", "mig", "--memory", "200Gi"), 3, "at most", id="too much"),
        pytest.param(("--mode", "mig", "--memory", "25%"), 2, "name a size or --mig", id="a part"),
        pytest.param(("--mode", "mig"), 2, "missing --memory", id="nothing said"),
        pytest.param(("--mig", "1g.10gb", "--count", "2"), 2, "one MIG device", id="several"),
        pytest.param(
            ("--mig", "1g.10gb", "--mode", "soft"), 2, "mode soft creates none", id="soft"
        ),
        pytest.param(("--mig", "1g.10gb", "--weight", "3"), 2, "take no turns", id="weight"),
        pytest.param(("--mig", "1g.10gb", "--oversubscribe"), 2, "promised twice", id="oversub"),
        pytest.param(("--mig", "1g.10gb", "--mig-keep", "3"), 2, "unit is missing", id="keep"),
        pytest.param(
            ("--memory", "1Gi", "--mig-keep", "3s"), 2, "command requests none", id="keep, soft"
        ),
    ],
)
def test_what_is_refused_and_what_to_do(
    machine: Machine, options: tuple[str, ...], code: int, message: str
) -> None:
    done = machine.run(*options)
    assert (done.returncode, done.stdout) == (code, "")
    assert message in done.stderr
    assert "hint:" in done.stderr
    machine.is_as_before()


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        pytest.param("t4", ("has no MIG", "hint: MIG is in A100, A30, H100"), id="no MIG"),
        pytest.param(
            "a100-80gb",
            ("needs a reset for it", "`allot devices set-mode GPU-", " mig --reset`"),
            id="a reset is needed",
        ),
    ],
)
def test_gpus_that_cannot_be_cut(allot: Allot, spec: str, message: tuple[str, ...]) -> None:
    done = allot("run", "--simulated", spec, "--mode", "mig", "--memory", "4Gi", "--", "true")
    assert done.returncode == DoesNotFitError.exit_code
    for each in message:
        assert each in done.stderr


def test_a_profile_that_no_gpu_has_is_not_a_matter_of_a_reset(allot: Allot) -> None:
    done = allot("run", "--simulated", "a100-80gb", "--mig", "9g.90gb", "--", "true")
    assert done.returncode == DoesNotFitError.exit_code
    assert "has no profile 9g.90gb" in done.stderr
    assert "hint: the profiles here are: 1g.10gb" in done.stderr
    assert "reset" not in done.stderr


# ---- several modes that would do -----------------------------------------------------------------


def test_a_list_that_is_refused_advises_no_mode_of_it(machine: Machine) -> None:
    program = machine.start("--mig", "3g.40gb")
    first_line(program)
    refused = machine.run("--mode", "mig,soft", "--memory", "70Gi")
    assert refused.returncode == DoesNotFitError.exit_code
    assert "hint: `allot mig plan --fit 7g.80gb" in refused.stderr
    words = ("--mode", "mps", "--compute", "100", "--memory", "4Gi")
    first_line(machine.start(*words, gpu=1))
    refused = machine.run("--mode", "mps,soft", "--compute", "20", "--memory", "4Gi", gpu=1)
    assert refused.returncode == DoesNotFitError.exit_code
    assert "hint: guarantee less" in refused.stderr
    unable = machine.allot(
        "run", "--simulated", "t4", "--mode", "mig,soft", "--memory", "70Gi", "--", "true"
    )
    assert "hint: ask for less: no GPU here is that large" in unable.stderr


def test_the_first_mode_that_can_be_had_is_taken(machine: Machine) -> None:
    program = machine.start("--mode", "mig,soft", "--memory", "4Gi", "--name", "one")
    first_line(program)
    assert machine.profiles() == ["1g.10gb"]
    second = machine.start("--mig", "7g.80gb", "--mode", "mig,soft", "--memory", "1Gi", gpu=1)
    first_line(second)
    shares = json.loads(machine.allot("ps", "-o", "json").stdout)["shares"]
    assert [each["mode"] for each in shares] == ["mig", "mig"]
    refused = machine.run("--mig", "7g.80gb", "--mode", "mig,soft", "--memory", "1Gi", gpu=1)
    assert refused.returncode == DoesNotFitError.exit_code
    assert "mode mig: no GPU here has room for a slice of 7g.80gb" in refused.stderr
    assert "\nmode soft: no room for a GPU with 1Gi" in refused.stderr


def test_where_there_is_no_slice_the_next_mode_is_taken_and_told(allot: Allot) -> None:
    words = ("--mode", "mig,soft", "--memory", "1Gi", "--name", "train")
    done = allot("run", "--simulated", "t4", *words, "--", "true")
    assert done.returncode == 0, done.stderr
    assert done.stderr == "warning: share train is of mode soft, and not mig: has no MIG\n"


def test_a_profile_does_not_keep_gpus_without_mig_from_the_next_mode(allot: Allot) -> None:
    words = ("--mode", "mig,soft", "--mig", "1g.10gb", "--memory", "1Gi", "--name", "train")
    done = allot("run", "--simulated", "t4", *words, "--", "true")
    assert (done.returncode, "is of mode soft, and not mig: has no MIG" in done.stderr) == (0, True)


def test_an_ampere_that_is_on_is_cut(allot: Allot, tmp_path: Path) -> None:
    file = tmp_path / "on.yaml"
    file.write_text(
        "{version: v1, mig-configs: {on: [{devices: all, mig-enabled: true, mig-devices: {}}]}}"
    )
    applied = allot("mig", "apply", "-f", file, "--simulated", "a100-80gb", "--reset")
    assert applied.returncode == 0, applied.stderr
    machine = Machine(allot, "a100-80gb")
    done = machine.run("--mig", "1g.10gb")
    assert done.returncode == 0, done.stderr
    after = machine.look()
    assert (after.is_enabled, after.instances) == (True, ()), "whoever switched it on has its mode"


def test_a_slice_is_neither_resized_nor_suspended(machine: Machine) -> None:
    program = machine.start("--mig", "1g.10gb", "--name", "train")
    first_line(program)
    for words in (("resize", "train", "--memory", "1Gi"), ("suspend", "train")):
        refused = machine.allot(*words)
        assert refused.returncode == 2, refused.stderr
        assert "of mode mig" in refused.stderr
    end(program)
