# SPDX-License-Identifier: Apache-2.0
"""Compute on the command line: in force as asked for, shown, changed live, and given back."""

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
from rounds import undisturbed

from allotment.ledger import Contract, read_contract
from allotment.shares.run.namespace import can_unshare

Allot = Any  # tests/conftest.py: CommandLine
Begin = Callable[..., "subprocess.Popen[str]"]
SPEC = ("--simulated", "a100-80gb")
BURN = (sys.executable, "-m", "allotment", "burn", "-o", "json", "--memory", "64Mi")

needs_root = pytest.mark.skipif(not can_unshare(), reason="needs CAP_SYS_ADMIN")
both = pytest.mark.parametrize(
    "inject", [pytest.param("namespace", marks=needs_root), "environment"]
)


def shares(allot: Allot, command: str = "ps") -> dict[str, dict[str, Any]]:
    """The shares by name, their only device's figures among their own."""
    done = allot(command, "-o", "json")
    assert done.returncode == 0, done.stderr
    return {
        share["name"]: {**(share["devices"][0]["compute"] or {}), **share}
        for share in json.loads(done.stdout)["shares"]
    }


def contracts(allot: Allot) -> list[Contract]:
    return [read_contract(path / "contract") for path in (allot.state / "devices").iterdir()]


@pytest.fixture
def begin(allot: Allot) -> Iterator[Begin]:
    """Starts `allot run`, and ends it afterwards."""
    started: list[subprocess.Popen[str]] = []

    def start(*words: str) -> "subprocess.Popen[str]":
        process = subprocess.Popen(
            allot.command("run", *SPEC, "--memory", "1Gi", *words),
            stdout=subprocess.PIPE,
            text=True,
            env=allot.environment(),
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.terminate()
        process.communicate()


@pytest.mark.measured
@both
def test_a_ceiling_holds_whatever_gets_the_shim_in(allot: Allot, inject: str) -> None:
    def part() -> float:
        done = allot(
            *("run", *SPEC, "--memory", "1Gi", "--compute", "25", "--inject", inject, "--"),
            *(*BURN, "--kernel", "500us", "--seconds", "2"),
        )
        assert done.returncode == 0, done.stderr
        report = json.loads(done.stdout)
        part = float(report["kernels"] * 500e-6 / report["wall_seconds"])
        assert part < 0.3
        return part

    assert undisturbed(part, lambda part: part > 0.15) > 0.15


def test_without_compute_nobody_takes_turns(allot: Allot, begin: Begin) -> None:
    begin("--name", "plain", "--", *BURN, "--kernel", "1ms", "--seconds", "600")
    wait_until(lambda: shares(allot).get("plain", {}).get("processes"))
    plain = shares(allot)["plain"]
    assert (plain["governed"], plain["measured"]) == (False, False)
    assert (plain["guarantee_percent"], plain["ceiling_percent"]) == (0, 100)
    assert plain["leases"] == 0
    (line,) = [line for line in allot("ps").stdout.splitlines() if line.startswith("plain")]
    assert line.split()[2] == "soft"
    assert line.split()[7:9] == ["-", "-"]
    assert "GPU TIME" not in allot("top", "--once").stdout


@pytest.mark.measured
def test_shares_are_shown_with_what_they_were_promised_and_had(allot: Allot, begin: Begin) -> None:
    burn = (*BURN, "--kernel", "1ms", "--seconds", "600")
    begin("--compute", "60:90", "--name", "much", "--", *burn)
    begin(
        "--compute", "20", "--class", "besteffort", "--weight", "7", "--name", "little", "--", *burn
    )
    wait_until(
        lambda: (
            len(found := shares(allot)) == 2
            and all(share["gpu_seconds"] > 0.3 for share in found.values())
            # What a share left unused in the last second is its own first.
            and found["much"]["borrowed_seconds"] > 0
        )
    )
    found = undisturbed(
        lambda: shares(allot, "top"),
        lambda found: (
            found["much"]["gpu_percent"] > 1.5 * found["little"]["gpu_percent"] > 0
            and found["little"]["processes"][0]["gpu_seconds"]
            == pytest.approx(found["little"]["gpu_seconds"], rel=0.2)
        ),
    )
    much, little = found["much"], found["little"]
    assert (much["guarantee_percent"], much["ceiling_percent"], much["weight"]) == (60, 90, 100)
    assert (little["class"], little["weight"], little["ceiling_percent"]) == ("besteffort", 7, 20)
    assert much["measured"]
    assert much["gpu_percent"] > 1.5 * little["gpu_percent"] > 0
    assert little["held_seconds"] > 0
    assert little["throttled"] > 0
    assert much["borrowed_seconds"] > 0
    assert much["driver_gpu_percent"] is not None
    assert sum(wait["count"] for wait in little["lease_waits"]) > 0
    states = {share["devices"][0]["compute"]["state"] for share in (much, little)}
    assert states <= {"holding", "waiting", "idle"}
    assert little["processes"][0]["gpu_seconds"] == pytest.approx(little["gpu_seconds"], rel=0.2)
    table = allot("ps").stdout
    assert "60:90" in table
    assert "20:20 besteffort weight 7" in table
    screen = allot("top", "--once").stdout
    assert "HELD BACK" in screen
    assert "20:20 besteffort" in screen
    assert "shares take turns by their promised compute; GPUs: 1" in allot("doctor").stdout
    row = json.loads(allot("devices", "-o", "json").stdout)["devices"][0]
    assert row["compute_guaranteed_percent"] == 80


def test_a_wait_is_shown_while_it_lasts(allot: Allot, begin: Begin) -> None:
    """A kernel is a debt of some ten seconds: the next one is held back for about that long."""
    burn = (*BURN, "--kernel", "300ms", "--launches", "3")
    begin("--compute", "2:2", "--name", "debtor", "--", *burn)
    held: set[float] = set()

    def grows() -> bool:
        held.add(shares(allot).get("debtor", {}).get("held_seconds") or 0)
        return len(held - {0}) > 2  # not only when a wait ends: two are left

    wait_until(grows)


def test_guarantees_are_given_out_once(allot: Allot, begin: Begin) -> None:
    begin("--compute", "60", "--name", "first", "--", "sleep", "600")
    wait_until(lambda: shares(allot))
    run = ("run", *SPEC, "--memory", "1Gi", "--compute")
    done = allot(*run, "50:80", "--", "true")
    assert done.returncode == 3
    assert "need 50 % of compute, have 40 % (60 % guaranteed)" in done.stderr
    assert "hint: guarantee less" in done.stderr
    assert allot(*run, "40:80", "--", "true").returncode == 0
    done = allot("resize", "first", "--compute", "60:101")
    assert done.returncode == 2


def test_resize_changes_what_is_named_and_nothing_else(allot: Allot, begin: Begin) -> None:
    begin("--compute", "30:80", "--name", "train", "--", "sleep", "600")
    begin("--compute", "50", "--name", "other", "--", "sleep", "600")
    wait_until(lambda: len(shares(allot)) == 2)
    done = allot("resize", "train", "--compute", "60")
    assert done.returncode == 3
    assert "need 60 % of compute, have 50 % beside the other shares" in done.stderr
    assert shares(allot)["train"]["guarantee_percent"] == 30
    done = allot("resize", "train", "--class", "latency")
    assert done.stdout.split()[2:] == ["1Gi", "30:80", "latency"]
    done = allot("resize", "other", "--weight", "300")
    assert done.stdout.split()[2:] == ["1Gi", "50:50", "weight", "300"]
    assert allot("resize", "train", "--compute", "12.5:100", "--memory", "2Gi").returncode == 0
    train = shares(allot)["train"]
    assert (train["guarantee_percent"], train["class"], train["weight"]) == (12.5, "latency", 100)
    assert train["devices"][0]["memory_limit_bytes"] == 2 << 30
    (contract,) = contracts(allot)
    assert sorted(each.terms.compute.guarantee for each in contract.seats) == [1250, 5000]


@pytest.mark.measured
def test_a_new_ceiling_is_in_force_at_once(allot: Allot, begin: Begin) -> None:
    begin("--compute", "90", "--name", "train", "--", *BURN, "--kernel", "1ms", "--seconds", "600")
    wait_until(lambda: shares(allot).get("train", {}).get("gpu_seconds", 0) > 0.5)
    assert allot("resize", "train", "--compute", "10").returncode == 0
    # `top` looks twice, with a moment between them.
    percent = undisturbed(
        lambda: float(shares(allot, "top")["train"]["gpu_percent"]),
        lambda percent: 0 < percent < 20,
    )
    assert 0 < percent < 20


def test_who_is_killed_leaves_no_seat(allot: Allot, begin: Begin) -> None:
    process = begin("--compute", "70", "--name", "first", "--", "sleep", "600")
    wait_until(lambda: shares(allot))
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    (pid,) = wait_until(lambda: children.read_text().split(), "it begins no program")
    process.kill()
    process.wait()
    assert shares(allot)["first"]["state"] == "left"  # its program runs on, by its promise
    assert contracts(allot)[0].seats
    os.kill(int(pid), signal.SIGKILL)
    wait_until(lambda: not shares(allot))
    assert contracts(allot)[0].seats == ()


def test_several_gpus_each_have_their_seat(allot: Allot) -> None:
    script = "cd /proc/self && ls -l $ALLOTMENT_SHARE; cat $ALLOTMENT_SHARE/share.json"
    done = allot(
        *("run", "--simulated", "a100-80gb:3", "--memory", "1Gi", "--count", "2"),
        *("--compute", "30:80", "--inject", "environment", "--", "sh", "-c", script),
    )
    assert done.returncode == 0, done.stderr
    for name in ("contract-0", "contract-1", "seat-0", "seat-1"):
        assert name in done.stdout
    assert "contract-2" not in done.stdout
    assert done.stdout.count('"guarantee": 3000') == 2
    assert [contract.seats for contract in contracts(allot)] == [(), ()]


def test_containers_take_turns_too(allot: Allot, tmp_path: Path) -> None:
    done = allot("cdi", "create", *SPEC, "--memory", "1Gi", "--compute", "30:80", "--name", "box",
                 "--cdi-dir", tmp_path)  # fmt: skip
    assert done.returncode == 0, done.stderr
    (path,) = tmp_path.glob("*.json")
    (device,) = json.loads(path.read_text())["devices"]
    mounts = {mount["containerPath"]: mount for mount in device["containerEdits"]["mounts"]}
    inside = f"/run/allotment/share/{shares(allot)['box']['id']}"
    contract = mounts[f"{inside}/contract-0"]
    leases = mounts[f"{inside}/seat-0"]
    assert "ro" in contract["options"]
    assert "rw" in leases["options"]
    assert Path(leases["hostPath"]).stat().st_mode & 0o777 == 0o666
    assert Path(contract["hostPath"]).stat().st_mode & 0o777 == 0o644
    assert shares(allot)["box"]["guarantee_percent"] == 30
    assert allot("rm", "box").returncode == 0
    assert contracts(allot)[0].seats == ()


def test_a_damaged_contract_keeps_nobody_else_from_working(allot: Allot, begin: Begin) -> None:
    begin("--compute", "30", "--name", "first", "--", "sleep", "600")
    wait_until(lambda: shares(allot))
    (device,) = (allot.state / "devices").iterdir()
    (device / "contract").write_bytes(b"")
    first = shares(allot)["first"]
    assert (first["state"], first["enforced"]) == ("damaged", False)
    assert str(first["problem"]).endswith("0 bytes, 5232 are needed")
    checks = {
        each["name"]: each for each in json.loads(allot("doctor", "-o", "json").stdout)["checks"]
    }
    found = checks[f"turns on GPU {device.name}"]
    assert (found["outcome"], "rm -r" in found["fix"]) == ("note", True)
    done = allot("run", *SPEC, "--memory", "1Gi", "--", "true")
    assert done.returncode == 6
    assert "hint: end the shares on this GPU (`allot ps`)" in done.stderr
    assert allot("run", "--simulated", "t4", "--memory", "1Gi", "--", "true").returncode == 0
    assert allot("rm", "first", "--force").returncode == 0
    assert allot("run", *SPEC, "--memory", "1Gi", "--compute", "90", "--", "true").returncode == 0
