# SPDX-License-Identifier: Apache-2.0
"""Several shares in one MIG device that an administrator cut, by turns or by MPS."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from allotment.devices.compute_modes import ComputeMode, GpuSettings
from allotment.devices.mig_machine import MigDevice, MigMachine
from allotment.devices.simulated import machine_path
from allotment.model.errors import DoesNotFitError, NotFoundError
from allotment.model.modes import MIG
from allotment.model.quantities import parse_memory
from allotment.model.requests import Request
from allotment.model.shares import Injection
from allotment.model.structs import replace
from allotment.modes.mig.journal import Journal, SliceRecord, Stage, new_id
from allotment.shares import lifecycle
from allotment.shares.folders import StateFolder
from allotment.shares.mig.allocate import find_static, free_slices
from allotment.shares.placing import MigTerms, ShareOrder

Allot = Any  # tests/conftest.py: CommandLine
SPEC = "h100-80gb"
TENANT = Path(__file__).with_name("mig_tenant.py")
WAITS = (sys.executable, TENANT, "64", "-")
CLIENT = Path(__file__).with_name("mps_client.py")
CONFIGURATION = """\
version: v1
mig-configs:
  halves: [{devices: all, mig-enabled: true, mig-devices: {3g.40gb: 2}}]
"""


class Halves:
    """A simulated GPU that is cut in two, and programs in its MIG devices."""

    def __init__(self, allot: Allot, file: Path) -> None:
        self.allot = allot
        file.write_text(CONFIGURATION)
        assert allot("mig", "apply", "-f", file, "--simulated", SPEC).returncode == 0
        self.machine = machine_path(allot.state, SPEC)
        self.slices = [each["uuid"] for each in self.rows()]
        self._programs: list[subprocess.Popen[str]] = []

    def rows(self) -> list[dict[str, Any]]:
        done = self.allot("devices", "--simulated", SPEC, "-o", "json")
        found: list[dict[str, Any]] = json.loads(done.stdout)["devices"][0]["mig_slices"]
        return found

    def words(self, *options: str, place: int = 0) -> list[str]:
        where = ["--simulated", SPEC, "--gpu", self.slices[place]]
        return ["run", *where, *options, "--", sys.executable]

    def run(self, *options: str, place: int = 0) -> subprocess.CompletedProcess[str]:
        done: subprocess.CompletedProcess[str] = self.allot(
            *self.words(*options, place=place), TENANT, "50000"
        )
        return done

    def start(self, *options: str, place: int = 0, what: tuple[str, ...]) -> dict[str, Any]:
        return self.start_words(*self.words(*options, place=place), *what)

    def start_words(self, *words: str | Path) -> dict[str, Any]:
        program = self.begin_words(*words)
        assert program.stdout is not None
        line = program.stdout.readline()
        assert line, program.communicate()[1]
        found: dict[str, Any] = json.loads(line)
        return found

    def begin(self, *options: str, place: int = 0, what: tuple[str, ...]) -> subprocess.Popen[str]:
        """A program that runs in a share, once it has a context."""
        program = self.begin_words(*self.words(*options, place=place), *what)
        assert program.stdout is not None
        assert program.stdout.readline(), program.communicate()[1]
        return program

    def begin_words(self, *words: str | Path) -> subprocess.Popen[str]:
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

    def hold(self, *options: str, place: int = 0) -> dict[str, Any]:
        """A share whose program has 64 MiB and waits."""
        return self.start(*options, place=place, what=(str(TENANT), "64", "-"))

    def reuse(self, *options: str) -> dict[str, Any]:
        """A share of all of a MIG device, wherever."""
        return self.start_words("run", "--simulated", SPEC, *options, "--", *WAITS)

    def close(self) -> None:
        for program in self._programs:
            if program.poll() is None:
                os.killpg(program.pid, signal.SIGKILL)
            if program.stdout is not None and not program.stdout.closed:
                program.communicate(timeout=60)


@pytest.fixture
def halves(allot: Allot, tmp_path: Path) -> Iterator[Halves]:
    made = Halves(allot, tmp_path / "halves.yaml")
    yield made
    made.close()


@pytest.mark.parametrize("mode", ["soft", "mps"])
def test_shares_of_one_slice_have_their_parts_of_it(halves: Halves, mode: str) -> None:
    first = halves.hold("--memory", "30Gi", "--mode", mode, "--name", "one")
    second = halves.run("--memory", "9Gi", "--mode", mode)
    assert second.returncode == 0, second.stderr
    seen = json.loads(second.stdout)
    assert first["nvml"]["uuid"] == seen["nvml"]["uuid"] == halves.slices[0]
    assert (seen["cuda"]["total"], seen["cuda"]["count"]) == (9 << 30, 1)
    assert 8000 < seen["had_mib"] < 9 << 10
    refused = halves.run("--memory", "12Gi", "--mode", mode)
    assert refused.returncode == DoesNotFitError.exit_code
    assert "12Gi" in refused.stderr
    other = halves.run("--memory", "30Gi", "--mode", mode, place=1)
    assert other.returncode == 0, other.stderr
    [share] = json.loads(halves.allot("ps", "-o", "json").stdout)["shares"]
    [device] = share["devices"]
    assert (share["name"], share["mode"], share["enforced"]) == ("one", mode, True)
    assert device["uuid"] == halves.slices[0]
    assert device["memory_used_bytes"] > 64 << 20
    assert halves.rows()[0]["share"] == "one"


def test_a_slice_is_of_one_mode_at_a_time(halves: Halves) -> None:
    halves.hold("--memory", "4Gi", "--name", "one")
    refused = halves.run("--memory", "4Gi", "--mode", "mps")
    assert refused.returncode == DoesNotFitError.exit_code
    assert "shares of mode soft on it (one)" in refused.stderr
    assert halves.run("--memory", "4Gi", "--mode", "mps", place=1).returncode == 0


def test_an_mps_share_has_its_part_of_the_slices_multiprocessors(halves: Halves) -> None:
    whole = halves.run("--memory", "4Gi", place=1)
    said = halves.start(
        *("--memory", "4Gi", "--mode", "mps", "--compute", "0:50"), what=(str(CLIENT), "hold")
    )
    assert said["is_client"] is True
    assert said["multiprocessors"] == json.loads(whole.stdout)["cuda"]["multiprocessors"] // 2


def test_one_slice_is_kept_for_its_clients_and_not_the_other(halves: Halves) -> None:
    halves.hold("--memory", "4Gi", "--mode", "mps")
    kept, other = (
        GpuSettings(uuid, machine=halves.machine).compute_mode() for uuid in halves.slices
    )
    assert (kept, other) == (ComputeMode.EXCLUSIVE_PROCESS, ComputeMode.DEFAULT)
    assert halves.run("--memory", "4Gi", place=1).returncode == 0


def test_a_fault_ends_the_clients_of_its_slice_and_of_no_other(halves: Halves) -> None:
    mps = ("--memory", "4Gi", "--mode", "mps")
    beside = halves.begin(*mps, what=(str(CLIENT), "hold"))
    elsewhere = halves.begin(*mps, place=1, what=(str(CLIENT), "hold"))
    trap = halves.begin(*mps, what=(str(CLIENT), "trap"))
    assert trap.wait(timeout=120) == 3
    assert beside.wait(timeout=120) == 3, "they share a server"
    assert elsewhere.poll() is None
    again = halves.allot(*halves.words(*mps, place=1), CLIENT, "spin", "1000", "20", "10")
    assert again.returncode == 0, again.stderr
    assert elsewhere.poll() is None


def test_turns_are_taken_within_a_slice(halves: Halves) -> None:
    halves.hold("--memory", "4Gi", "--compute", "60", "--name", "one")
    refused = halves.run("--memory", "4Gi", "--compute", "50")
    assert refused.returncode == DoesNotFitError.exit_code
    assert "(60 % guaranteed)" in refused.stderr
    assert halves.run("--memory", "4Gi", "--compute", "50", place=1).returncode == 0


def test_what_was_cut_for_a_share_is_nobody_elses(allot: Allot) -> None:
    words = ("run", "--simulated", SPEC, "--mig", "3g.40gb", "--", sys.executable, "-c")
    code = "import os, sys;print(os.environ['CUDA_VISIBLE_DEVICES'], flush=True); sys.stdin.read()"
    with subprocess.Popen(
        allot.command(*words, code),
        env=allot.environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as program:
        assert program.stdout is not None
        uuid = program.stdout.readline().strip()
        assert uuid.startswith("MIG-")
        done = allot("run", "--simulated", SPEC, "--gpu", uuid, "--memory", "1Gi", "--", "true")
        assert done.returncode == NotFoundError.exit_code
        program.communicate("", timeout=120)


def test_what_is_half_made_is_not_free_and_no_share_comes_into_it(
    allot: Allot, native_dir: Path
) -> None:
    """Its maker died when the driver had made all of it, and the record did not say so yet."""
    assert native_dir.is_dir()
    folder, machine = StateFolder(allot.state), machine_path(allot.state, SPEC)
    folder.prepare()

    def die_making(device: MigDevice) -> str:
        device.driver.set_mode(is_on=True)
        seen = device.driver.look()
        profile = next(each for each in seen.profiles if each.name == "1g.10gb")
        journal = Journal(folder.mig / device.uuid)
        record = SliceRecord(
            id=new_id(),
            gpu=device.uuid,
            profile=profile.number,
            name=profile.name,
            start=3,
            size=profile.size,
            stage=Stage.INTENDED,
            holder="deadbeef0000",
        )
        with journal.locked():
            work = journal.begin(record)
        with work:
            made = device.driver.create_gpu_instance(profile, 3)
            work.write(replace(record, stage=Stage.CUT, gpu_instance=made))
            device.driver.create_compute_instance(made, profile)
        others = device.driver.create_gpu_instance(profile, 5)
        return device.driver.create_compute_instance(others, profile).uuid

    assert allot("devices", "--simulated", SPEC).returncode == 0
    with MigMachine(machine) as gpus:
        static = gpus.ask_one(0, die_making, patience_s=60)
    assert [each.uuid for each in free_slices(folder, machine)] == [static]
    request = Request(parse_memory("1Gi"), mode=MIG, mig_profile="1g.10gb")
    terms = MigTerms(reuses=True)
    order = ShareOrder(request, Injection.ENVIRONMENT, machine=machine, mig=terms)
    made, _ = lifecycle.create(folder, order, ())
    assert [each.uuid for each in made.devices] == [static]
    assert find_static(folder, replace(order, name="next")) is None


# ---- all of one ----------------------------------------------------------------------------------


def test_an_idle_device_of_the_very_profile_is_had_and_stays(halves: Halves) -> None:
    first = halves.reuse("--mig", "3g.40gb", "--mig-reuse", "--name", "one")
    second = halves.reuse("--mode", "mig", "--memory", "30Gi", "--mig-reuse", "--name", "two")
    assert {each["nvml"]["uuid"] for each in (first, second)} == set(halves.slices)
    shares = json.loads(halves.allot("ps", "-o", "json").stdout)["shares"]
    assert {each["mode"] for each in shares} == {"mig"}
    assert {each["share"] for each in halves.rows()} == {"one", "two"}
    soft = halves.run("--memory", "1Gi")
    assert soft.returncode == DoesNotFitError.exit_code, "all of it is somebody's"
    halves.close()
    assert halves.allot("ps").stderr == "No shares.\n"
    assert [each["uuid"] for each in halves.rows()] == halves.slices
    assert {each["state"] for each in halves.rows()} == {"static"}


@pytest.mark.parametrize(
    "options", [("--mig", "1g.10gb", "--mig-reuse"), ("--mig", "3g.40gb")], ids=["other", "not"]
)
def test_nothing_else_is_had_of_what_others_cut(halves: Halves, options: tuple[str, ...]) -> None:
    refused = halves.allot("run", "--simulated", SPEC, *options, "--", "true")
    assert refused.returncode == DoesNotFitError.exit_code
    assert "of others" in refused.stderr


def test_a_device_or_a_gpu_that_mps_has_just_had_is_waited_for(
    halves: Halves, allot: Allot, tmp_path: Path
) -> None:
    assert halves.run("--memory", "4Gi", "--mode", "mps", place=1).returncode == 0
    done = halves.run("--mode", "mig", place=1)
    assert done.returncode == 0, done.stderr
    words = ("run", "--simulated", SPEC, "--state", tmp_path / "whole")
    mps = allot(*words, "--memory", "4Gi", "--mode", "mps", "--", "true")
    assert mps.returncode == 0, mps.stderr
    cut = allot(*words, "--mig", "1g.10gb", "--", "true")
    assert cut.returncode == 0, cut.stderr


def test_a_device_is_had_by_its_name(halves: Halves) -> None:
    done = halves.run("--mode", "mig", place=1)
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert seen["nvml"]["uuid"] == halves.slices[1]
    assert seen["had_mib"] > 38 << 10
    for options, code, words in (
        (("--mode", "mig", "--memory", "60Gi"), 3, "need 60Gi, have"),
        (("--mig", "1g.10gb"), 3, "not a 1g.10gb"),
        (("--memory", "1Gi", "--mig-reuse"), 2, "this command requests none"),
    ):
        refused = halves.run(*options)
        assert (refused.returncode, words in refused.stderr) == (code, True), refused.stderr


def test_it_is_had_on_the_gpu_that_is_named(allot: Allot, tmp_path: Path) -> None:
    spec = "h100-80gb:3"
    file = tmp_path / "second.yaml"
    cut = "mig-configs: {two: [{devices: [1, 2], mig-enabled: true, mig-devices: {3g.40gb: 1}}]}"
    file.write_text(f"version: v1\n{cut}\n")
    assert allot("mig", "apply", "-f", file, "--simulated", spec).returncode == 0
    folder, machine = StateFolder(allot.state), machine_path(allot.state, spec)
    rows = json.loads(allot("devices", "--simulated", spec, "-o", "json").stdout)["devices"]
    request = Request(parse_memory("1Gi"), mode=MIG, mig_profile="3g.40gb")

    def had(*selectors: str) -> list[str] | None:
        chosen = replace(request, selectors=selectors)
        terms = MigTerms(reuses=True)
        order = ShareOrder(chosen, Injection.ENVIRONMENT, machine=machine, mig=terms)
        found = find_static(folder, order)
        return None if found is None else [each.uuid for each in found[1]]

    assert had(rows[0]["uuid"]) is None
    assert had(rows[2]["uuid"]) == [rows[2]["mig_slices"][0]["uuid"]]
