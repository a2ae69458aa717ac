# SPDX-License-Identifier: Apache-2.0
"""`allot mig` on simulated GPUs: configurations that are planned, applied, asserted, exported."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from mig_hands import look, made_by_hand, on_first

from allotment.devices.mig_machine import MigDevice
from allotment.devices.simulated import SimulatedMachine, machine_path
from allotment.model.structs import replace
from allotment.modes.mig.apply import counts_of
from allotment.modes.mig.journal import Journal, SliceRecord
from allotment.modes.mig.slices import Slices
from allotment.shares.folders import StateFolder
from allotment.shares.mode_policy import BY_NODE, ModePolicy, write_mode_policy

Allot = Any  # tests/conftest.py: CommandLine


@pytest.mark.parametrize("spec", ["h100-80gb:2", "h100-80gb,t4", "a100-80gb"])
def test_a_configuration_is_planned_applied_asserted_and_exported(
    allot: Allot, mig_file: Path, spec: str
) -> None:
    words = ("-f", mig_file, "-c", "all-balanced", "--simulated", spec)
    before = allot("mig", "assert", *words)
    assert before.returncode == 1
    assert "MIG is off, expected 2 x 1g.10gb, 1 x 2g.20gb, 1 x 3g.40gb" in before.stderr
    planned = allot("mig", "plan", *words, "-o", "json")
    assert planned.returncode == 0, planned.stderr
    steps = json.loads(planned.stdout)["gpus"][0]["steps"]
    assert [each["step"] for each in steps] == ["switch MIG on", *["make"] * 4]
    assert allot("mig", "assert", *words).returncode == 1, "a plan changes nothing"
    applied = allot("mig", "apply", *words, "--reset")
    assert applied.returncode == 0, applied.stderr
    assert allot("mig", "assert", *words).returncode == 0
    exported = allot("mig", "export", "--simulated", spec)
    again = Path(mig_file).with_name("exported.yaml")
    again.write_text(exported.stdout, "utf-8")
    entries = yaml.safe_load(exported.stdout)["mig-configs"]["current"]
    assert entries[0]["mig-devices"] == {"1g.10gb": 2, "2g.20gb": 1, "3g.40gb": 1}
    assert allot("mig", "assert", "-f", again, "--simulated", spec).returncode == 0
    assert "already as configured" in allot("mig", "apply", *words).stdout


@pytest.mark.timeout(600)  # twenty commands, on a machine that may be busy
def test_every_configuration_follows_every_other(allot: Allot, mig_file: Path) -> None:
    spec = "h100-80gb:4"
    order = ["all-1g", "custom", "all-7g.80gb", "all-1g.me", "all-1g.20gb", "all-3g.40gb"]
    for name in [*order, "all-enabled", "all-disabled"]:
        words = ("-f", mig_file, "-c", name, "--simulated", spec)
        applied = allot("mig", "apply", *words)
        assert applied.returncode == 0, (name, applied.stderr)
        asserted = allot("mig", "assert", *words)
        assert asserted.returncode == 0, (name, asserted.stderr)


def test_what_stays_keeps_its_uuid(allot: Allot, mig_file: Path) -> None:
    spec = "h100-80gb"
    machine = machine_path(allot.state, spec)
    allot("mig", "apply", "-f", mig_file, "-c", "all-1g", "--simulated", spec)
    before = {each.uuid for each in look(machine).instances}
    allot("mig", "apply", "-f", mig_file, "-c", "all-balanced", "--simulated", spec)
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
    allot: Allot, mig_file: Path, words: list[str], code: int, message: str
) -> None:
    done = allot("mig", "apply", "-f", mig_file, *words, "--simulated", "h100-80gb")
    assert done.returncode == code
    assert message in done.stderr
    assert "hint:" in done.stderr
    assert not look(machine_path(allot.state, "h100-80gb")).is_enabled


def test_a_plan_of_what_cannot_be_ends_as_applying_it_does(allot: Allot, mig_file: Path) -> None:
    words = ("-f", mig_file, "-c", "impossible", "--simulated", "h100-80gb")
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
        ("switch MIG on", "unused: `allot run --mig` does this automatically"),
        ("make", None),
    ]
    kept_for_soft = ("devices", "set-mode", switched[1]["uuid"], "soft")
    assert allot(*kept_for_soft, "--simulated", spec).returncode == 0
    kept = allot(*words, "3g.40gb").stdout
    assert "kept for mode soft by `allot devices set-mode`: `allot devices set-mode GPU-" in kept
    none = allot("mig", "plan", "--simulated", "t4", "--fit", "1g.10gb")
    assert (none.returncode, "no GPU of this machine supports MIG" in none.stderr) == (3, True)
    reset = allot("mig", "plan", "--simulated", "a100-80gb", "--fit", "1g.10gb")
    assert "needs a reset: `allot devices set-mode GPU-" in reset.stdout


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
        ("switch MIG on", "unused: `allot run --mig` does this automatically"),
        ("make", None),
    ]


def test_advice_does_not_send_to_a_command_that_the_nodes_annotation_overrules(
    allot: Allot,
) -> None:
    folder = StateFolder(allot.state)
    folder.prepare()
    [gpu] = SimulatedMachine(machine_path(allot.state, "h100-80gb")).devices()
    with folder.locked():
        write_mode_policy(folder, gpu.uuid, ModePolicy(("soft",), by=BY_NODE))
    [(_, remark), _] = advised(allot)
    assert remark.startswith("kept for mode soft by the node's annotation: add mig to its node's")
    assert "set-mode" not in remark


@pytest.mark.parametrize("verb", ["assert", "plan", "apply"])
def test_a_gpu_that_is_not_there_is_refused(allot: Allot, mig_file: Path, verb: str) -> None:
    words = ("-f", mig_file, "-c", "custom", "--simulated", "h100-80gb:2")
    done = allot("mig", verb, *words)
    assert done.returncode == 2
    assert "the configuration names GPU 2, and this machine has 2" in done.stderr


def test_a_file_comes_by_standard_input(allot: Allot) -> None:
    done = allot("mig", "assert", "-f", "-", "--simulated", "h100-80gb", stdin="version: v2")
    assert done.returncode == 2
    assert "<stdin>: unknown version: v2" in done.stderr


def test_an_amperes_mode_is_switched_by_a_reset(allot: Allot, mig_file: Path) -> None:
    spec = "a30"
    words = ("-f", mig_file, "-c", "all-balanced", "--simulated", spec)
    planned = allot("mig", "plan", *words)
    assert planned.returncode == 0
    assert "resets the GPU: `allot mig apply --reset`" in planned.stdout
    applied = allot("mig", "apply", *words, "--reset")
    assert applied.returncode == 0, applied.stderr
    assert counts_of(look(machine_path(allot.state, spec))) == {"1g.6gb": 2, "2g.12gb": 1}
    disabled = ("-f", mig_file, "-c", "all-disabled", "--simulated", spec)
    off = allot("mig", "apply", *disabled, "--reset")
    assert off.returncode == 0, off.stderr
    assert not look(machine_path(allot.state, spec)).is_enabled


def test_without_reset_no_gpu_is_changed_if_one_needs_it(allot: Allot, mig_file: Path) -> None:
    spec = "h100-80gb,a30"
    words = ("-f", mig_file, "-c", "all-balanced", "--simulated", spec)
    refused = allot("mig", "apply", *words)
    assert refused.returncode == 8
    assert "switches MIG on only with a reset" in refused.stderr
    assert "hint: add --reset" in refused.stderr
    assert not look(machine_path(allot.state, spec)).is_enabled
    assert allot("mig", "apply", *words, "--reset").returncode == 0


def test_a_pending_mode_is_told_and_ended_by_apply(allot: Allot, mig_file: Path) -> None:
    """Somebody asked for MIG and did not reset the GPU."""
    spec = "a30"
    machine = machine_path(allot.state, spec)
    assert on_first(machine, lambda device: device.driver.set_mode(is_on=True)) is False
    assert "switching MIG on is pending until the GPU is reset" in allot("doctor").stdout
    words = ("-f", mig_file, "-c", "all-disabled", "--simulated", spec)
    told = allot("mig", "assert", *words)
    assert (told.returncode, "switching MIG on is pending until a reset" in told.stderr) == (
        1,
        True,
    )
    assert allot("mig", "apply", *words).returncode == 0
    assert allot("mig", "assert", *words).returncode == 0


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


def test_devices_and_doctor_tell_of_slices(allot: Allot, mig_file: Path) -> None:
    spec = "h100-80gb,t4"
    machine = machine_path(allot.state, spec)
    enabled = allot("mig", "apply", "-f", mig_file, "-c", "all-enabled", "--simulated", spec)
    assert enabled.returncode == 0, enabled.stderr
    doctor = allot("doctor")
    assert "MIG is on without an instance" in doctor.stdout
    uuid = made_by_hand(machine, "3g.40gb", 4)
    gpu = look(machine).uuid
    record = on_first(machine, lambda device: cut_for(device, allot, "1g.10gb", 3))
    table = allot("devices", "--simulated", spec)
    assert f"{uuid[:12]}  3g.40gb, slots 4-7" in table.stdout
    document = json.loads(allot("devices", "--simulated", spec, "-o", "json").stdout)
    split, whole = document["devices"]
    assert (split["uuid"], split["mig"], split["memory_allottable_bytes"]) == (gpu, True, 0)
    assert (whole["mig"], whole["mig_slices"]) == (False, [])
    shown = [(each["profile"], each["start"], each["state"]) for each in split["mig_slices"]]
    assert shown == [("1g.10gb", 3, "warm"), ("3g.40gb", 4, "static")]
    placed = allot("run", "--simulated", spec, "--gpu", gpu, "--memory", "1Gi", "--", "true")
    assert placed.returncode == 3, "a GPU in MIG mode is given to nobody as a whole"
    assert "without an instance" not in allot("doctor").stdout
    on_first(machine, lambda device: remove_foreign(device, record.uuid))
    assert f"slice 1g.10gb {record.uuid} is missing" in allot("doctor").stdout


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
