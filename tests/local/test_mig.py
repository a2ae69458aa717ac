# SPDX-License-Identifier: Apache-2.0
"""`allot mig` and the journal on simulated GPUs, in real processes that end at any step."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import pytest
import yaml

from allotment.devices import layout
from allotment.devices.mig_machine import MigDevice, MigMachine
from allotment.devices.simulated import SimulatedMachine, machine_path
from allotment.model.errors import BusyError
from allotment.model.mig import MigGpu
from allotment.modes.mig.applying import counts_of
from allotment.modes.mig.journal import Journal
from allotment.modes.mig.records import SliceRecord
from allotment.modes.mig.slices import Settled, Slices
from allotment.shares import mps_daemons
from allotment.shares.folders import StateFolder
from allotment.shares.modes_of_gpus import BY_NODE, Allowed, write_allowed

Allot = Any  # tests/conftest.py: CommandLine
T = TypeVar("T")

WORKER = Path(__file__).with_name("mig_worker.py")

# native/simulated/machine.h, ALLOT_MIG_*
CALLS = {
    "set mode": 0,
    "create GPU instance": 1,
    "create compute instance": 2,
    "destroy GPU instance": 3,
    "destroy compute instance": 4,
}

# In the shapes that NVIDIA ships for its models.
CONFIGURATIONS = """
version: v1
mig-configs:
  all-disabled:
    - devices: all
      mig-enabled: false
  all-enabled:
    - devices: all
      mig-enabled: true
      mig-devices: {}
  all-1g:
    - device-filter: ["0x233010DE", "0x20B210DE"]
      devices: all
      mig-enabled: true
      mig-devices: {"1g.10gb": 7}
    - device-filter: "0x20B710DE"
      devices: all
      mig-enabled: true
      mig-devices: {"1g.6gb": 4}
  all-1g.me:
    - device-filter: ["0x233010DE", "0x20B210DE"]
      devices: all
      mig-enabled: true
      mig-devices: {"1g.10gb+me": 1}
  all-1g.20gb:
    - devices: all
      mig-enabled: true
      mig-devices: {"1g.20gb": 4}
  all-3g.40gb:
    - devices: all
      mig-enabled: true
      mig-devices: {"3g.40gb": 2}
  all-7g.80gb:
    - devices: all
      mig-enabled: true
      mig-devices: {"7g.80gb": 1}
  all-balanced:
    - device-filter: ["0x233010DE", "0x20B210DE"]
      devices: all
      mig-enabled: true
      mig-devices: {"1g.10gb": 2, "2g.20gb": 1, "3g.40gb": 1}
    - device-filter: "0x20B710DE"
      devices: all
      mig-enabled: true
      mig-devices: {"1g.6gb": 2, "2g.12gb": 1}
  custom:
    - devices: [0, 1]
      mig-enabled: false
    - devices: [2]
      mig-enabled: true
      mig-devices: {"3g.40gb": 2}
    - devices: [3]
      mig-enabled: true
      mig-devices: {"1g.10gb": 2, "2g.20gb": 1, "3g.40gb": 1}
  impossible:
    - devices: all
      mig-enabled: true
      mig-devices: {"3g.40gb": 2, "1g.10gb": 1}
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text(CONFIGURATIONS, "utf-8")
    return path


def on_first(machine: Path, question: Callable[[MigDevice], T]) -> T:
    """Asks the first GPU of a machine."""
    with MigMachine(machine) as gpus:
        answer = gpus.ask(question, patience_s=30)[0][1]
    if isinstance(answer, Exception):
        raise answer
    return answer


def look(machine: Path) -> MigGpu:
    return on_first(machine, lambda device: device.driver.look())


def made_by_hand(machine: Path, name: str, start: int) -> str:
    """Makes an instance as nvidia-smi does, and returns its UUID."""

    def make(device: MigDevice) -> str:
        gpu = device.driver.look()
        if not gpu.is_enabled:
            device.driver.set_mode(is_on=True)
            gpu = device.driver.look()
        profile = next(each for each in gpu.profiles if each.name == name)
        made = device.driver.create_gpu_instance(profile, start)
        return device.driver.create_compute_instance(made, profile).uuid

    return on_first(machine, make)


def end_callers(machine: Path, *, before: int = 0, after: int = 0) -> None:
    """Lets the simulated driver of the first GPU kill whoever makes these calls (a bit each)."""
    base = layout.FAULTS_AT + layout.FAULTS_FIELDS["gpus"][0]
    with machine.open("r+b") as opened:
        for name, bits in (("mig_ends_before", before), ("mig_ends_after", after)):
            opened.seek(base + layout.GPU_FAULTS_FIELDS[name][0])
            opened.write(bits.to_bytes(4, "little"))


# ---- the command line ----------------------------------------------------------------------------


@pytest.mark.parametrize("spec", ["h100-80gb:2", "h100-80gb,t4", "a100-80gb"])
def test_a_configuration_is_planned_applied_asserted_and_exported(
    allot: Allot, file: Path, spec: str
) -> None:
    words = ("-f", file, "-c", "all-balanced", "--simulated", spec)
    before = allot("mig", "assert", *words)
    assert before.returncode == 1
    assert "MIG is off, and not 2 x 1g.10gb, 1 x 2g.20gb, 1 x 3g.40gb" in before.stderr
    planned = allot("mig", "plan", *words, "-o", "json")
    assert planned.returncode == 0, planned.stderr
    steps = json.loads(planned.stdout)["gpus"][0]["steps"]
    assert [each["step"] for each in steps] == ["switch MIG on", *["make"] * 4]
    assert allot("mig", "assert", *words).returncode == 1, "a plan changes nothing"
    applied = allot("mig", "apply", *words)
    assert applied.returncode == 0, applied.stderr
    assert allot("mig", "assert", *words).returncode == 0
    exported = allot("mig", "export", "--simulated", spec)
    again = Path(file).with_name("exported.yaml")
    again.write_text(exported.stdout, "utf-8")
    entries = yaml.safe_load(exported.stdout)["mig-configs"]["current"]
    assert entries[0]["mig-devices"] == {"1g.10gb": 2, "2g.20gb": 1, "3g.40gb": 1}
    assert allot("mig", "assert", "-f", again, "--simulated", spec).returncode == 0
    assert "as it is wanted" in allot("mig", "apply", *words).stdout


@pytest.mark.timeout(240)  # twenty commands, on a machine that may be busy
def test_every_configuration_follows_every_other(allot: Allot, file: Path) -> None:
    spec = "h100-80gb:4"
    order = ["all-1g", "custom", "all-7g.80gb", "all-1g.me", "all-1g.20gb", "all-3g.40gb"]
    for name in [*order, "all-enabled", "all-disabled"]:
        words = ("-f", file, "-c", name, "--simulated", spec)
        applied = allot("mig", "apply", *words)
        assert applied.returncode == 0, (name, applied.stderr)
        asserted = allot("mig", "assert", *words)
        assert asserted.returncode == 0, (name, asserted.stderr)


def test_what_stays_keeps_its_uuid(allot: Allot, file: Path) -> None:
    spec = "h100-80gb"
    machine = machine_path(allot.state, spec)
    allot("mig", "apply", "-f", file, "-c", "all-1g", "--simulated", spec)
    before = {each.uuid for each in look(machine).instances}
    allot("mig", "apply", "-f", file, "-c", "all-balanced", "--simulated", spec)
    after = {each.uuid for each in look(machine).instances}
    assert (len(before), len(after), len(before & after)) == (7, 4, 2)


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["-c", "impossible"], 2, "nothing was done: GPU GPU-"),
        (["-c", "nix"], 4, "selected mig-config not present: nix"),
        ([], 2, "there is more than one configuration"),
    ],
)
def test_what_cannot_be_applied(
    allot: Allot, file: Path, words: list[str], code: int, message: str
) -> None:
    done = allot("mig", "apply", "-f", file, *words, "--simulated", "h100-80gb")
    assert done.returncode == code
    assert message in done.stderr
    assert "hint:" in done.stderr
    assert not look(machine_path(allot.state, "h100-80gb")).is_enabled


def test_a_plan_of_what_cannot_be_ends_as_applying_it_does(allot: Allot, file: Path) -> None:
    words = ("-f", file, "-c", "impossible", "--simulated", "h100-80gb")
    refused = allot("mig", "apply", *words)
    planned = allot("mig", "plan", *words)
    assert planned.returncode == refused.returncode == 2
    [hint] = [line for line in refused.stderr.splitlines() if line.startswith("hint: ")]
    assert planned.stderr.startswith("GPU 0 GPU-")
    assert planned.stderr.endswith(f": {hint}\n")
    told = allot("mig", "plan", *words, "-o", "json")
    [gpu] = json.loads(told.stdout)["gpus"]
    assert f"hint: {gpu['hint']}" == hint


def test_advice_names_what_has_to_go_for_a_slice_to_fit(allot: Allot) -> None:
    spec = "h100-80gb,t4"
    machine = machine_path(allot.state, spec)
    for start in (0, 4):
        made_by_hand(machine, "1g.10gb", start)
    words = ("mig", "plan", "--simulated", spec, "--fit")
    done = allot(*words, "3g.40gb", "-o", "json")
    assert done.returncode == 0, done.stderr
    [split] = json.loads(done.stdout)["gpus"]
    steps = [(each["step"], each["profile"], each["slot"]) for each in split["steps"]]
    assert [each[0] for each in steps] == ["remove", "make"]
    assert steps[1][1] == "3g.40gb"
    assert len(look(machine).instances) == 2, "advice changes nothing"
    too_much = allot(*words, "3g.40gb:3")
    assert (too_much.returncode, "hint:" in too_much.stderr) == (3, True)
    assert allot(*words, "3g.40gb:x").returncode == 2
    assert allot("mig", "plan", "--simulated", spec).returncode == 2


def test_advice_uses_what_is_idle_and_what_could_be_switched(allot: Allot, tmp_path: Path) -> None:
    spec = "h100-80gb:2"
    whole = {"devices": [0], "mig-enabled": True, "mig-devices": {"7g.80gb": 1}}
    file = tmp_path / "first.yaml"
    file.write_text(yaml.safe_dump({"version": "v1", "mig-configs": {"a": [whole]}}), "utf-8")
    assert allot("mig", "apply", "-f", file, "--simulated", spec).returncode == 0
    [made] = look(machine_path(allot.state, spec)).instances
    words = ("mig", "plan", "--simulated", spec, "--fit")
    idle = allot(*words, "7g.80gb")
    assert f"{made.uuid}, cut by others: `allot run --mig 7g.80gb --mig-reuse`" in idle.stdout
    switched = json.loads(allot(*words, "3g.40gb", "-o", "json").stdout)["gpus"]
    assert [each["steps"] == [] for each in switched] == [True, False]
    steps = [(each["step"], each["remark"]) for each in switched[1]["steps"]]
    assert steps == [
        ("switch MIG on", "nobody uses it: `allot run --mig` does this by itself"),
        ("make", None),
    ]
    kept_for_soft = ("devices", "set-mode", switched[1]["uuid"], "soft")
    assert allot(*kept_for_soft, "--simulated", spec).returncode == 0
    kept = allot(*words, "3g.40gb").stdout
    assert "kept for mode soft by `allot devices set-mode`: `allot devices set-mode GPU-" in kept
    none = allot("mig", "plan", "--simulated", "t4", "--fit", "1g.10gb")
    assert (none.returncode, "no GPU here has MIG" in none.stderr) == (3, True)
    reset = allot("mig", "plan", "--simulated", "a100-80gb", "--fit", "1g.10gb")
    assert "by a reset: `allot devices set-mode GPU-" in reset.stdout


def advised(allot: Allot) -> list[tuple[str, str]]:
    done = allot("mig", "plan", "--simulated", "h100-80gb", "--fit", "1g.10gb", "-o", "json")
    assert done.returncode == 0, done.stderr
    [gpu] = json.loads(done.stdout)["gpus"]
    return [(each["step"], each["remark"]) for each in gpu["steps"]]


def test_advice_passes_an_mps_daemon_that_no_share_needs(allot: Allot) -> None:
    """It goes when a slice is asked for; until then its server is on the GPU."""
    words = ("--simulated", "h100-80gb", "--mode", "mps", "--memory", "1Gi", "--", "true")
    assert allot("run", *words).returncode == 0
    assert advised(allot) == [
        ("switch MIG on", "nobody uses it: `allot run --mig` does this by itself"),
        ("make", None),
    ]


def test_advice_does_not_send_to_a_command_that_the_nodes_annotation_overrules(
    allot: Allot,
) -> None:
    folder = StateFolder(allot.state)
    folder.prepare()
    [gpu] = SimulatedMachine(machine_path(allot.state, "h100-80gb")).devices()
    with folder.locked():
        write_allowed(folder, gpu.uuid, Allowed(("soft",), by=BY_NODE))
    [(_, remark), _] = advised(allot)
    assert remark.startswith("kept for mode soft by the node's annotation: have mig in its node's")
    assert "set-mode" not in remark


@pytest.mark.parametrize("verb", ["assert", "plan", "apply"])
def test_a_gpu_that_is_not_there_is_refused(allot: Allot, file: Path, verb: str) -> None:
    words = ("-f", file, "-c", "custom", "--simulated", "h100-80gb:2")
    done = allot("mig", verb, *words)
    assert done.returncode == 2
    assert "the configuration names GPU 2, and this machine has 2" in done.stderr


def test_a_file_comes_by_standard_input(allot: Allot) -> None:
    done = allot("mig", "assert", "-f", "-", "--simulated", "h100-80gb", stdin="version: v2")
    assert done.returncode == 2
    assert "<stdin>: unknown version: v2" in done.stderr


def test_an_amperes_mode_is_switched_by_a_reset(allot: Allot, file: Path) -> None:
    spec = "a30"
    words = ("-f", file, "-c", "all-balanced", "--simulated", spec)
    applied = allot("mig", "apply", *words)
    assert applied.returncode == 0, applied.stderr
    assert counts_of(look(machine_path(allot.state, spec))) == {"1g.6gb": 2, "2g.12gb": 1}
    off = allot("mig", "apply", "-f", file, "-c", "all-disabled", "--simulated", spec)
    assert off.returncode == 0, off.stderr
    assert not look(machine_path(allot.state, spec)).is_enabled


def test_a_pending_mode_is_told_and_ended_by_apply(allot: Allot, file: Path) -> None:
    """Somebody asked for MIG and did not reset the GPU."""
    spec = "a30"
    machine = machine_path(allot.state, spec)
    assert on_first(machine, lambda device: device.driver.set_mode(is_on=True)) is False
    assert "it is to be on, and is not before the GPU's next reset" in allot("doctor").stdout
    words = ("-f", file, "-c", "all-disabled", "--simulated", spec)
    told = allot("mig", "assert", *words)
    assert (told.returncode, "MIG is to be on after a reset" in told.stderr) == (1, True)
    assert allot("mig", "apply", *words).returncode == 0
    assert allot("mig", "assert", *words).returncode == 0


@pytest.fixture
def burning(allot: Allot) -> Iterator[Callable[[str, str], int]]:
    """Starts a program on a MIG device: `burning(spec, uuid)` is its process; ends it at last."""
    started: list[subprocess.Popen[str]] = []

    def start(spec: str, uuid: str) -> int:
        lines = allot("env", "--simulated", spec).stdout
        script = f'{lines}\nexec "$0" -m allotment burn --memory 64Mi --seconds 45'
        process = subprocess.Popen(
            ["bash", "-c", script, sys.executable],
            env=allot.environment(CUDA_VISIBLE_DEVICES=uuid),
            stdout=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        machine = machine_path(allot.state, spec)
        deadline = time.monotonic() + 40
        while process.pid not in on_first(machine, lambda device: device.driver.processes()):
            assert process.poll() is None, "it ended"
            assert time.monotonic() < deadline, "it did not begin"
            time.sleep(0.1)
        return process.pid

    yield start
    for process in started:
        process.kill()
        process.communicate()


def test_programs_stay_in_their_slices(
    allot: Allot, file: Path, burning: Callable[[str, str], int]
) -> None:
    spec = "h100-80gb"
    machine = machine_path(allot.state, spec)
    used = made_by_hand(machine, "1g.10gb", 2)
    made_by_hand(machine, "3g.40gb", 4)
    pid = burning(spec, used)
    before = look(machine)
    refused = allot("mig", "apply", "-f", file, "-c", "all-7g.80gb", "--simulated", spec)
    assert refused.returncode == BusyError.exit_code
    assert f"1g.10gb at slot 2 by process {pid}" in refused.stderr
    off = allot("mig", "apply", "-f", file, "-c", "all-disabled", "--simulated", spec)
    assert off.returncode == BusyError.exit_code
    assert f"in use by process {pid}" in off.stderr
    assert look(machine) == before, "a refusal changes nothing"
    assert f"processes {pid}" in allot("devices", "--simulated", spec).stdout
    done = allot("mig", "apply", "-f", file, "-c", "all-1g", "--simulated", spec)
    assert done.returncode == 0, done.stderr
    after = look(machine)
    assert counts_of(after) == {"1g.10gb": 7}
    assert used in {each.uuid for each in after.instances}
    assert pid in on_first(machine, lambda device: device.driver.processes())


def test_mode_is_not_switched_under_a_share(allot: Allot, file: Path) -> None:
    spec = "h100-80gb"
    held = subprocess.Popen(
        allot.command("run", "--simulated", spec, "--memory", "1Gi", "--name", "held", "--", "cat"),
        env=allot.environment(),
        stdin=subprocess.PIPE,
    )
    try:
        deadline = time.monotonic() + 30
        while "held" not in allot("ps").stdout:
            assert time.monotonic() < deadline
        words = ("-f", file, "-c", "all-1g", "--simulated", spec)
        refused = allot("mig", "apply", *words)
        assert refused.returncode == BusyError.exit_code
        assert "MIG cannot be switched on while it is in use by share held" in refused.stderr
    finally:
        held.communicate()
    assert allot("mig", "apply", *words).returncode == 0


def test_whose_a_process_is_in_the_way_is_told(allot: Allot, file: Path) -> None:
    """The share of a slice that others cut, and of the GPU: by name, with their processes."""
    spec = "h100-80gb:2"
    machine = machine_path(allot.state, spec)
    uuid = made_by_hand(machine, "1g.10gb", 0)
    options = ("run", "--simulated", spec, "--gpu", uuid, "--memory", "1Gi", "--name", "inner")
    burn = (sys.executable, "-m", "allotment", "burn", "--memory", "64Mi", "--seconds", "45")
    inner = subprocess.Popen(
        allot.command(*options, "--", *burn), env=allot.environment(), stdout=subprocess.DEVNULL
    )
    try:
        deadline = time.monotonic() + 40
        while not (pids := on_first(machine, lambda device: device.driver.processes())):
            assert (inner.poll(), time.monotonic() < deadline) == (None, True)
            time.sleep(0.1)
        words = ("-f", file, "-c", "all-7g.80gb", "--simulated", spec)
        refused = allot("mig", "apply", *words)
        assert refused.returncode == BusyError.exit_code
        assert f"1g.10gb at slot 0 by share inner (process {pids[0]})" in refused.stderr
    finally:
        inner.terminate()
        inner.communicate()


def test_an_mps_daemon_that_no_share_needs_makes_way(allot: Allot, file: Path) -> None:
    spec = "h100-80gb"
    options = ("--mode", "mps", "--memory", "1Gi", "--compute", "0:50")
    served = allot(
        *("run", "--simulated", spec, *options, "--", sys.executable, "-m", "allotment"),
        *("burn", "--memory", "64Mi", "--seconds", "0.2"),
    )
    assert served.returncode == 0, served.stderr
    machine = machine_path(allot.state, spec)
    uuid = look(machine).uuid
    folder = StateFolder(allot.state)
    assert mps_daemons.place_of(folder, uuid).status().holds_gpu, "it waits for the next share"
    words = ("-f", file, "-c", "all-1g", "--simulated", spec)
    planned = allot("mig", "plan", *words)
    assert planned.returncode == 0, planned.stdout
    assert mps_daemons.place_of(folder, uuid).status().holds_gpu, "a plan changes nothing"
    done = allot("mig", "apply", *words)
    assert done.returncode == 0, done.stderr
    assert not mps_daemons.place_of(folder, uuid).status().holds_gpu
    assert counts_of(look(machine)) == {"1g.10gb": 7}


def test_a_configuration_beside_one_with_parts_of_instances(allot: Allot, tmp_path: Path) -> None:
    file = tmp_path / "parts.yaml"
    wants = {"whole": {"1g.10gb": 7}, "parts": {"1c.3g.40gb": 1}}
    configurations = {
        name: [{"devices": "all", "mig-enabled": True, "mig-devices": counts}]
        for name, counts in wants.items()
    }
    file.write_text(yaml.safe_dump({"version": "v1", "mig-configs": configurations}), "utf-8")
    words = ("--simulated", "h100-80gb", "-f", file, "-c")
    refused = allot("mig", "apply", *words, "parts")
    assert (refused.returncode, "'1c.3g.40gb' is a part" in refused.stderr) == (2, True)
    assert allot("mig", "apply", *words, "whole").returncode == 0


def test_devices_and_doctor_tell_of_slices(allot: Allot, file: Path) -> None:
    spec = "h100-80gb,t4"
    machine = machine_path(allot.state, spec)
    enabled = allot("mig", "apply", "-f", file, "-c", "all-enabled", "--simulated", spec)
    assert enabled.returncode == 0, enabled.stderr
    doctor = allot("doctor")
    assert "it is on, and there is no instance" in doctor.stdout
    uuid = made_by_hand(machine, "3g.40gb", 4)
    gpu = look(machine).uuid
    record = on_first(machine, lambda device: cut_for(device, allot, "1g.10gb", 3))
    table = allot("devices", "--simulated", spec)
    assert f"{uuid}  3g.40gb, slots 4-7" in table.stdout
    document = json.loads(allot("devices", "--simulated", spec, "-o", "json").stdout)
    split, whole = document["devices"]
    assert (split["uuid"], split["mig"], split["memory_allottable_bytes"]) == (gpu, True, 0)
    assert (whole["mig"], whole["mig_slices"]) == (False, [])
    shown = [(each["profile"], each["start"], each["state"]) for each in split["mig_slices"]]
    assert shown == [("1g.10gb", 3, "warm"), ("3g.40gb", 4, "static")]
    placed = allot("run", "--simulated", spec, "--gpu", gpu, "--memory", "1Gi", "--", "true")
    assert placed.returncode == 3, "a GPU in MIG mode is given to nobody as a whole"
    assert "no instance" not in allot("doctor").stdout
    on_first(machine, lambda device: remove_foreign(device, record.uuid))
    assert f"the slice 1g.10gb {record.uuid} is not there any more" in allot("doctor").stdout


def cut_for(device: MigDevice, allot: Allot, name: str, start: int) -> SliceRecord:
    slices = Slices(device.driver, Journal(allot.state / "mig" / device.uuid))
    with slices.cut(name, start, holder="nobody") as work:
        work.write(replace(work.record, holder="", idle_since=time.time()))
    return work.record


def remove_foreign(device: MigDevice, uuid: str) -> None:
    """What a manager of MIG beside ours does."""
    for each in device.driver.look().instances:
        if each.uuid == uuid:
            device.driver.destroy_compute_instances(each.gpu_instance)
            device.driver.destroy_gpu_instance(each.gpu_instance)


# ---- processes that end --------------------------------------------------------------------------

WHEN = pytest.mark.parametrize("when", ["before", "after"])


@WHEN
@pytest.mark.parametrize("call", CALLS)
def test_apply_goes_on_where_it_was_ended(allot: Allot, file: Path, call: str, when: str) -> None:
    spec = "h100-80gb"
    machine = machine_path(allot.state, spec)
    if call != "set mode":  # from there to here, with something to remove
        assert made_by_hand(machine, "2g.20gb", 0)
    words = ("-f", file, "-c", "all-3g.40gb", "--simulated", spec)
    end_callers(machine, **{when: 1 << CALLS[call]})
    assert allot("mig", "apply", *words).returncode == -signal.SIGKILL
    end_callers(machine)
    done = allot("mig", "apply", *words)
    assert done.returncode == 0, done.stderr
    assert counts_of(look(machine)) == {"3g.40gb": 2}
    assert Journal(allot.state / "mig" / look(machine).uuid).read().records == ()


@WHEN
@pytest.mark.parametrize("call", [name for name in CALLS if name != "set mode"])
def test_a_process_that_ends_costs_no_slice_and_touches_no_others(
    machine: Callable[[str], Path], tmp_path: Path, call: str, when: str
) -> None:
    path = machine("h100-80gb")
    foreign = made_by_hand(path, "1g.10gb", 0)
    journal = tmp_path / "mig" / "GPU"

    def work(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(WORKER), str(path), str(journal), *words]
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=50)

    def settle(*held: str) -> Settled:
        return on_first(
            path,
            lambda device: Slices(device.driver, Journal(journal)).settle(
                held.__contains__, keep_s=0
            ),
        )

    words = ["cut", "3g.40gb", "4", "share-1"]
    if call.startswith("destroy"):
        made = work(*words)
        assert made.returncode == 0, made.stderr
        words = ["remove", made.stdout.strip()]
    end_callers(path, **{when: 1 << CALLS[call]})
    assert work(*words).returncode == -signal.SIGKILL
    end_callers(path)
    assert len(Journal(journal).read().records) == 1, "it was written down before"
    settled = settle("share-1")
    assert [each.uuid for each in settled.foreign] == [foreign]
    assert [each.uuid for each in look(path).instances] == [foreign]
    assert Journal(journal).read().records == ()


def test_one_that_is_being_made_is_left_alone(
    machine: Callable[[str], Path], tmp_path: Path
) -> None:
    """Another process holds what it works on, and gives it back by ending, however it ends."""
    path = machine("h100-80gb")
    made_by_hand(path, "1g.10gb", 0)
    journal = Journal(tmp_path / "mig" / "GPU")
    here, there = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            with MigMachine(path) as gpus:
                gpus.ask(
                    lambda device: Slices(device.driver, journal).cut("1g.10gb", 6, holder="x"),
                    patience_s=30,
                )
                os.write(there, b"made")
                signal.pause()
        finally:
            os._exit(1)
    assert os.read(here, 4) == b"made"

    def settle() -> Settled:
        return on_first(
            path,
            lambda device: Slices(device.driver, journal).settle(lambda _: False, keep_s=0),
        )

    try:
        settled = settle()
        assert (settled.removed, len(settled.foreign)) == ((), 1)
        [record] = journal.read().records
        with pytest.raises(BusyError):
            on_first(path, lambda device: Slices(device.driver, journal).remove(record.id))
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert [each.id for each in settle().removed] == [record.id]
