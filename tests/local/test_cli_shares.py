# SPDX-License-Identifier: Apache-2.0
"""The commands about shares, while programs use simulated GPUs in them."""

import itertools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from patience import wait_until

from allotment.ledger import layout
from allotment.shares.run.namespace import can_unshare

Allot = Any  # tests/conftest.py: CommandLine
Begin = Callable[..., "subprocess.Popen[str]"]
GI = 1 << 30
SPEC = ("--simulated", "a100-80gb")
FORGER = Path(__file__).with_name("ledger_forger.py")
BURN = (sys.executable, "-m", "allotment", "burn", "-o", "json")
AT_ONCE = ("--seconds", "600", "--chunk")
"""Who sees so much of it sees all of it."""

needs_root = pytest.mark.skipif(not can_unshare(), reason="needs CAP_SYS_ADMIN")
both = pytest.mark.parametrize(
    "inject", [pytest.param("namespace", marks=needs_root), "environment"]
)


def shares(allot: Allot) -> list[dict[str, Any]]:
    done = allot("ps", "-o", "json")
    assert done.returncode == 0, done.stderr
    found: list[dict[str, Any]] = json.loads(done.stdout)["shares"]
    return found


def used(allot: Allot) -> int:
    """What the only share uses, or 0 before it is there."""
    return sum(share["devices"][0]["memory_used_bytes"] for share in shares(allot))


@pytest.fixture
def begin(allot: Allot) -> Iterator[Begin]:
    """Starts `allot run` with a program that burns for a long time; ends it afterwards."""
    started: list[subprocess.Popen[str]] = []

    def start(*words: str, inject: str = "environment") -> "subprocess.Popen[str]":
        process = subprocess.Popen(
            allot.command("run", *SPEC, "--inject", inject, *words),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=allot.environment(),
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.terminate()
        process.communicate()


@both
def test_a_greedy_program_is_told_its_part_and_stopped_there(allot: Allot, inject: str) -> None:
    done = allot(
        "run", *SPEC, "--memory", "2Gi", "--inject", inject, "--", *BURN, "--memory", "6Gi"
    )
    assert done.returncode == 9, done.stderr
    (process,) = json.loads(done.stdout)["processes"]
    assert process["device"]["total_bytes"] == 2 * GI
    assert [error["name"] for error in process["errors"]] == ["CUDA_ERROR_OUT_OF_MEMORY"]
    assert process["got_bytes"] < 2 * GI
    assert shares(allot) == []


def test_ps_of_one_share(allot: Allot, begin: Begin) -> None:
    for name in ("train", "other"):
        begin("--memory", "1Gi", "--name", name, "--", "sleep", "600")
    wait_until(lambda: len(shares(allot)) == 2)
    assert sorted(allot("ps", "-o", "name").stdout.splitlines()) == ["other", "train"]
    assert allot("ps", "train", "-o", "name").stdout == "train\n"
    document = json.loads(allot("ps", "train", "-o", "json").stdout)
    assert [each["name"] for each in document["shares"]] == ["train"]
    assert document["outside"] == []
    missing = allot("ps", "trian")
    assert (missing.returncode, missing.stdout) == (4, "")
    assert "did you mean 'train'?" in missing.stderr
    refused = allot("ps", "--watch", "-o", "json")
    assert (refused.returncode, "--watch shows a table" in refused.stderr) == (2, True)
    uuids = [each["uuid"] for each in json.loads(allot("devices", "-o", "json").stdout)["devices"]]
    assert allot("devices", "-o", "name").stdout.splitlines() == uuids
    assert uuids[0] in allot("devices", "-o", "wide").stdout
    assert uuids[0] not in allot("devices").stdout


@both
def test_ps_tells_of_a_program_at_work(allot: Allot, begin: Begin, inject: str) -> None:
    begin("--memory", "4Gi", "--name", "train", "--", *BURN, "--memory", "1Gi", *AT_ONCE, "1Gi",
          inject=inject)  # fmt: skip
    wait_until(lambda: used(allot) >= GI)
    (share,) = shares(allot)
    (device,) = share["devices"]
    assert device["memory_limit_bytes"] == 4 * GI
    assert device["memory_used_bytes"] == device["memory_peak_bytes"] > GI  # with its context
    (process,) = share["processes"]
    assert process["enforced"] is True
    assert "burn" in process["command"]
    assert process["devices"][0]["memory_used_bytes"] == device["memory_used_bytes"]
    assert process["devices"][0]["context_bytes"] > 0
    assert Path(f"/proc/{process['pid']}").exists()
    (row,) = json.loads(allot("devices", "-o", "json").stdout)["devices"]
    assert row["memory_allotted_bytes"] == 4 * GI
    assert row["memory_used_bytes"] == device["memory_used_bytes"]
    assert row["shares"] == ["train"]
    assert [each["pid"] for each in row["processes"]] == [process["pid"]]
    top = allot("top", "--once").stdout
    assert "train" in top
    assert "1.4Gi of 4Gi" in top
    assert "\x1b" not in top
    assert json.loads(allot("top", "--once", "-o", "json").stdout)["shares"]


def test_a_program_without_the_shim_is_shown_as_not_enforced(allot: Allot, begin: Begin) -> None:
    begin("--memory", "1Gi", "--name", "open", "--", "env", "-u", "LD_PRELOAD", *BURN,
          "--memory", "3Gi", "--seconds", "600")  # fmt: skip

    def used_by_programs() -> int:
        programs = [each for share in shares(allot) for each in share["processes"]]
        return sum(each["devices"][0]["memory_used_bytes"] for each in programs)

    wait_until(lambda: used_by_programs() > 3 * GI)
    (share,) = shares(allot)
    assert share["enforced"] is False
    assert [process["enforced"] for process in share["processes"]] == [False]
    assert share["devices"][0]["memory_used_bytes"] > 3 * GI  # by the driver: more than its limit
    table = allot("ps").stdout.splitlines()
    assert [line.split()[-1] for line in table if " no " in line]
    assert " no " in allot("top", "--once").stdout


@needs_root
def test_who_takes_the_shim_away_in_the_namespace_is_seen_too(allot: Allot, begin: Begin) -> None:
    burn = " ".join((*BURN, "--memory", "3Gi", "--seconds", "600"))
    scrubbed = f"env -i PYTHONPATH={os.environ.get('PYTHONPATH', '')}"
    script = f"umount /etc/ld.so.preload && exec {scrubbed} {burn}"
    begin("--memory", "1Gi", "--", "sh", "-c", script, inject="namespace")
    wait_until(lambda: any(share["processes"] for share in shares(allot)))
    assert shares(allot)[0]["enforced"] is False


def test_a_program_that_writes_its_ledger_is_shown_as_not_enforced(
    allot: Allot, begin: Begin
) -> None:
    forger = begin("--memory", "1Gi", "--name", "forger", "--", sys.executable, FORGER)
    assert forger.stdout is not None
    assert forger.stdout.readline() == "taken\n"
    (share,) = shares(allot)
    (device,) = share["devices"]
    assert device["memory_used_bytes"] < GI
    assert device["memory_driver_bytes"] > 8 * GI
    assert share["enforced"] is False
    assert "by the driver" in share["remark"]
    assert "the limit is 1Gi" in share["remark"]
    shown = allot("ps")
    assert f"warning: share forger: {share['remark']}" in shown.stderr
    assert " no " in shown.stdout
    assert " no " in allot("top", "--once").stdout


def test_a_forged_use_above_the_limit_allows_nothing(allot: Allot, begin: Begin) -> None:
    at = layout.USAGE_DEVICES_AT + layout.USAGE_DEVICE_TOTAL_VALUE_AT
    forger = begin("--memory", "1Gi", "--", sys.executable, FORGER, str(at))
    assert forger.stdout is not None
    assert forger.stdout.readline() == "taken\n"
    (share,) = shares(allot)
    assert share["devices"][0]["memory_used_bytes"] >= 60 * GI
    assert share["enforced"] is False
    assert "the limit is 1Gi" in share["remark"]


def test_programs_that_exceed_their_limit_can_be_stopped(allot: Allot, begin: Begin) -> None:
    forger = begin("--memory", "1Gi", "--on-excess", "stop", "--", sys.executable, FORGER)
    assert forger.wait(50) == -signal.SIGKILL
    assert forger.stderr is not None
    assert "the limit is 1Gi; its programs are killed (--on-excess stop)" in forger.stderr.read()
    assert shares(allot) == []


@needs_root
def test_a_process_in_its_own_pid_namespace_is_found_on_the_machine(
    allot: Allot, begin: Begin
) -> None:
    begin("--memory", "1Gi", "--", "unshare", "--pid", "--fork", "--mount-proc", *BURN,
          "--memory", "256Mi", "--seconds", "600", inject="namespace")  # fmt: skip
    wait_until(lambda: used(allot) >= 256 << 20)
    (process,) = shares(allot)[0]["processes"]
    assert process["pid_inside"] < 100
    assert process["pid"] != process["pid_inside"]
    assert "burn" in Path(f"/proc/{process['pid']}/cmdline").read_text()
    os.kill(process["pid"], signal.SIGKILL)  # `unshare` passes no signal on


def test_resize_is_seen_by_the_program_and_refused_below_its_use(
    allot: Allot, begin: Begin
) -> None:
    begin("--memory", "4Gi", "--name", "train", "--", *BURN, "--memory", "2Gi", *AT_ONCE, "2Gi")
    wait_until(lambda: used(allot) >= 2 * GI)
    small = allot("resize", "train", "--memory", "1Gi")
    assert small.returncode == 7
    assert "more than the new limit of 1Gi" in small.stderr
    assert "--force" in small.stderr
    assert shares(allot)[0]["devices"][0]["memory_limit_bytes"] == 4 * GI
    large = allot("resize", "train", "--memory", "90Gi")
    assert large.returncode == 3
    assert "need 90Gi, have" in large.stderr
    for amount, limit in (("6Gi", 6 * GI), ("3Gi", 3 * GI)):
        assert allot("resize", "train", "--memory", amount).returncode == 0
        assert shares(allot)[0]["devices"][0]["memory_limit_bytes"] == limit
    assert allot("resize", "train", "--memory", "1Gi", "--force").returncode == 0
    (lowered,) = shares(allot)
    share = lowered["devices"][0]
    assert share["memory_limit_bytes"] == GI
    assert share["memory_used_bytes"] > 2 * GI
    assert (lowered["enforced"], lowered["remark"]) == (True, None)  # it takes nothing more
    again = allot("run", *SPEC, "--memory", "77Gi", "--", "true")
    assert again.returncode == 0, "what was given back can be allotted"


def test_rm_refuses_what_runs(allot: Allot, begin: Begin) -> None:
    program = ("sh", "-c", "echo here; exec sleep 600")
    process = begin("--memory", "1Gi", "--name", "busy", "--", *program)
    assert process.stdout is not None
    assert process.stdout.readline() == "here\n"
    done = allot("rm", "busy")
    assert done.returncode == 7
    assert "in use" in done.stderr
    assert allot("rm", "busy", "--force").returncode == 0
    assert shares(allot) == []
    assert process.poll() is None


def test_ps_shows_what_is_left_of_the_only_share(allot: Allot, begin: Begin) -> None:
    begin("--memory", "4Gi", "--name", "left", "--", *BURN, "--memory", "1Gi", "--seconds", "600")
    wait_until(lambda: used(allot) >= GI)
    (process,) = shares(allot)[0]["processes"]
    assert allot("rm", "left", "--force").returncode == 0
    document = json.loads(allot("ps", "-o", "json").stdout)
    assert document["shares"] == []
    assert [each["pid"] for each in document["outside"]] == [process["pid"]]
    done = allot("ps")
    assert done.stderr == "No shares.\n"
    assert str(process["pid"]) in done.stdout
    assert str(process["pid"]) in allot("top", "--once").stdout


def test_ps_says_that_the_named_folder_has_no_state(allot: Allot, tmp_path: Path) -> None:
    for named in (tmp_path / "none", tmp_path):
        for done in (allot("ps", "--state", named), allot("ps", ALLOTMENT_STATE=str(named))):
            assert (done.returncode, done.stdout) == (0, "")
            assert done.stderr.startswith(f"No shares.\nnote: {named} is not a state folder")
    allot("run", *SPEC, "--memory", "1Gi", "--", "true")
    assert allot("ps").stderr == "No shares.\n"


def test_a_shell_with_simulated_gpus(allot: Allot) -> None:
    def lines(*arguments: str) -> str:
        done = allot("env", *arguments)
        assert done.returncode == 0, done.stderr
        return str(done.stdout)

    burn = " ".join((*BURN, "--memory", "256Mi", "--seconds", "0.1"))
    script = f"set -e\n{lines('--simulated', 't4:2')}\n{burn}\n{lines('--unset')}\nenv"
    done = subprocess.run(
        ["sh", "-c", script], capture_output=True, text=True, check=False, env=allot.environment()
    )
    assert done.returncode == 0, done.stderr
    report, end = json.JSONDecoder().raw_decode(done.stdout)
    assert report["processes"][0]["device"]["name"] == "Tesla T4"
    assert report["processes"][0]["device"]["total_bytes"] > 14 * GI
    assert "ALLOTMENT_SIMULATED" not in done.stdout[end:]
    assert "LD_LIBRARY_PATH" not in done.stdout[end:]


def test_env_quotes_for_the_shell(allot: Allot, tmp_path: Path) -> None:
    folder = tmp_path / 'it\'s a "folder" $HOME'
    folder.mkdir()
    (folder / "m.yaml").write_text("gpus: [t4]\n")
    done = allot("env", "--simulated", str(folder / "m.yaml"))
    shown = subprocess.run(
        ["sh", "-c", done.stdout + 'printf %s "$ALLOTMENT_SIMULATED"'],
        capture_output=True,
        text=True,
        check=True,
    )
    assert shown.stdout == str(folder / "m.yaml")


def test_a_gpu_that_is_lost_and_found(allot: Allot) -> None:
    burn = ("run", "--simulated", "t4", "--memory", "1Gi", "--", *BURN, "--seconds", "0.1")
    broken = allot("fault", "--simulated", "t4", "--lost")
    assert broken.returncode == 0, broken.stderr
    assert "79" in broken.stdout
    assert allot(*burn).returncode not in {0, 9}
    row = allot("devices", "--simulated", "t4")
    assert row.returncode == 0
    assert "Tesla T4" in row.stdout
    assert allot("fault", "--simulated", "t4", "--clear").returncode == 0
    assert allot(*burn).returncode == 0
    assert allot("fault", "--simulated", "t4", "--gpu", "h100", "--lost").returncode == 4


def test_the_demo_ends_well(allot: Allot) -> None:
    done = allot("demo", "--seconds", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    seen = done.stdout.partition("Checks:\n")[2].splitlines()
    assert len(seen) == 5
    assert all(line.startswith("  yes  ") for line in seen)
    assert shares(allot) == []


def test_the_demo_says_when_it_cannot_be(allot: Allot) -> None:
    done = allot("demo", "--simulated", "no-such-gpu")
    assert done.returncode == 1
    assert "could not run" in done.stderr
    assert "hint:" in done.stderr
    if not Path("/proc/driver/nvidia/version").exists():
        assert allot("demo", "--real").returncode == 5


def test_doctor_names_what_is_missing_and_the_fix(allot: Allot) -> None:
    done = allot("doctor", "-o", "json")
    document = json.loads(done.stdout)
    assert done.returncode == 0, done.stdout
    assert document["usable"] is True
    names = {check["name"]: check for check in document["checks"]}
    assert names["state folder"]["detail"].startswith(str(allot.state))
    for check in document["checks"]:
        assert check["outcome"] in {"ok", "note", "missing"}
        assert check["fix"] or check["outcome"] == "ok"
    lines = allot("doctor").stdout.splitlines()
    assert all(
        not before.startswith("ok ")
        for before, line in itertools.pairwise(lines)
        if line.strip().startswith("fix:")
    )
    (allot.state / "version").write_text("9\n")
    broken = allot("doctor")
    assert broken.returncode == 8
    assert "newer" in broken.stdout
    assert "fix:" in broken.stdout


def test_a_program_outside_any_share_is_shown(allot: Allot, begin: Begin) -> None:
    begin("--memory", "1Gi", "--name", "quiet", "--", "sleep", "600")
    wait_until(lambda: shares(allot))
    lines = allot("env", *SPEC).stdout
    burn = " ".join((*BURN, "--memory", "3Gi", *AT_ONCE, "3Gi"))
    with subprocess.Popen(
        ["sh", "-c", f"{lines}\nexec {burn}"],
        stdout=subprocess.DEVNULL,
        env=allot.environment(),
    ) as process:
        try:

            def outside() -> list[dict[str, Any]]:
                found: list[dict[str, Any]] = json.loads(allot("ps", "-o", "json").stdout)[
                    "outside"
                ]
                return [each for each in found if each["memory_used_bytes"] > 3 * GI]

            wait_until(outside)
            assert [each["pid"] for each in outside()] == [process.pid]
            assert shares(allot)[0]["processes"] == []
            (row,) = json.loads(allot("devices", "-o", "json").stdout)["devices"]
            assert [each["pid"] for each in row["outside"]] == [process.pid]
            for command in (["ps"], ["top", "--once"], ["devices"], ["devices", *SPEC]):
                (line,) = [
                    each for each in allot(*command).stdout.splitlines() if "outside" in each
                ]
                assert str(process.pid) in line
                assert "3.4Gi" in line
        finally:
            process.terminate()
    for command in (["ps"], ["top", "--once"], ["devices"]):
        assert "outside" not in allot(*command).stdout
    assert json.loads(allot("ps", "-o", "json").stdout)["outside"] == []
