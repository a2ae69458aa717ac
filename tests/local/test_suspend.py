# SPDX-License-Identifier: Apache-2.0
"""Shares that are suspended and resumed, with programs in them that use simulated GPUs."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from patience import wait_until
from suspended_shares import (
    GI,
    HOLDER,
    SPEC,
    FakeDriver,
    Holders,
    gpu_ns,
    is_stopped,
    no_readings,
    ps,
)

from allotment.ledger import layout
from allotment.model.errors import BusyError
from allotment.model.formats import format_bytes
from allotment.shares.folders import StateFolder
from allotment.shares.lifecycle import find
from allotment.shares.process_tree import census
from allotment.shares.run.namespace import can_unshare
from allotment.shares.suspend import suspend

Allot = Any  # tests/conftest.py: CommandLine


@pytest.fixture
def folder(allot: Allot) -> StateFolder:
    return StateFolder(allot.state)


@pytest.fixture
def begin(allot: Allot) -> Iterator[Holders]:
    with Holders(allot) as made:
        yield made


def used_bytes(allot: Allot) -> int:
    """What the driver says of the only GPU."""
    done = allot("devices", "-o", "json")
    assert done.returncode == 0, done.stderr
    return int(json.loads(done.stdout)["devices"][0]["memory_used_bytes"])


def test_the_gpu_is_free_for_others_meanwhile(begin: Holders, allot: Allot) -> None:
    pids = begin("job", "60Gi", 2)
    before = used_bytes(allot)
    assert before > 2 * GI
    done = allot("suspend", "job")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("job: suspended, ")
    assert "booked" not in done.stdout
    assert used_bytes(allot) == 0
    (share,) = json.loads(allot("ps", "-o", "json").stdout)["shares"]
    assert share["state"] == "suspended"
    assert share["suspended"]
    (device,) = share["devices"]
    assert device["memory_host_bytes"] == device["memory_used_bytes"] == before
    assert done.stdout.endswith(f" stopped; {format_bytes(before)} moved from GPU to host\n")
    heading, row = allot("ps").stdout.splitlines()[:2]
    column = heading.index(" HOST") + 5
    assert row[:column].endswith(f" {format_bytes(before)}")
    whole = allot(
        "run", *SPEC, "--memory", "75Gi", "--inject", "environment",
        "--", sys.executable, "-m", "allotment", "burn", "--memory", "70Gi", "--seconds", "0.2",
    )  # fmt: skip
    assert whole.returncode == 0, whole.stderr
    done = allot("resume", "job")
    assert done.returncode == 0, done.stderr
    assert used_bytes(allot) == before
    ran = {pid: gpu_ns(allot, pid) for pid in pids}
    wait_until(lambda: all(gpu_ns(allot, pid) > ran[pid] for pid in pids))


@pytest.mark.skipif(not can_unshare(), reason="a pid namespace of its own needs CAP_SYS_ADMIN")
def test_programs_in_a_pid_namespace_are_found_and_checkpointed(allot: Allot) -> None:
    command = allot.command(
        "run", *SPEC, "--name", "job", "--memory", "8Gi", "--",
        "unshare", "--pid", "--fork", "--mount-proc", "--kill-child",
        sys.executable, HOLDER, "0", str(GI), "busy",
    )  # fmt: skip
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=allot.environment()
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        seen = json.loads(allot("ps", "-o", "json").stdout)
        assert seen["outside"] == []
        (share,) = seen["shares"]
        (holder,) = share["processes"]
        assert (holder["pid_inside"], holder["enforced"]) == (1, True)
        assert str(HOLDER) in Path(f"/proc/{holder['pid']}/cmdline").read_text()
        before = used_bytes(allot)
        assert [each["memory_used_bytes"] for each in share["devices"]] == [before]
        assert allot("suspend", "job").returncode == 0
        assert used_bytes(allot) == 0
        assert allot("resume", "job").returncode == 0
        assert used_bytes(allot) == before
        process.communicate()
        assert process.returncode == 0


@pytest.mark.skipif(not can_unshare(), reason="a time namespace needs CAP_SYS_ADMIN")
def test_programs_in_a_time_namespace_are_enforced(allot: Allot) -> None:
    command = allot.command(
        "run", *SPEC, "--memory", "8Gi", "--",
        "unshare", "--time", "--boottime", "1000", "--fork", "--kill-child",
        sys.executable, HOLDER, "0", str(GI),
    )  # fmt: skip
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=allot.environment()
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        (share,) = json.loads(allot("ps", "-o", "json").stdout)["shares"]
        assert [each["enforced"] for each in share["processes"]] == [True]
        assert [each["memory_used_bytes"] for each in share["devices"]] == [used_bytes(allot)]
        process.communicate()
        assert process.returncode == 0


def test_it_is_not_removed_under_its_programs(begin: Holders, allot: Allot) -> None:
    (pid,) = begin("job", "8Gi")
    assert allot("suspend", "job").returncode == 0
    for words in (("rm", "job"), ("rm", "job", "--force"), ("cdi", "rm", "job", "--force")):
        done = allot(*words)
        assert (done.returncode, done.stdout) == (7, ""), done.stderr
        assert "allot resume job" in done.stderr
    assert [each["state"] for each in ps(allot)] == ["suspended"]
    assert allot("resume", "job").returncode == 0
    ran = gpu_ns(allot, pid)
    wait_until(lambda: gpu_ns(allot, pid) > ran)
    assert allot("rm", "job", "--force").returncode == 0


def test_it_can_be_removed_when_its_programs_were_killed(
    begin: Holders, folder: StateFolder, allot: Allot
) -> None:
    begin("job", "8Gi")
    assert allot("suspend", "job").returncode == 0
    found = find(folder, "job")
    share = found.share
    assert share is not None
    assert share.runner is not None
    runner = share.runner.pid
    os.kill(runner, signal.SIGSTOP)  # it does not end the share then
    try:
        wait_until(lambda: is_stopped(runner))
        for pid in census([(share, found.directory)])[share.id]:
            os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not census([(share, found.directory)])[share.id])
        done = allot("rm", "job", "--force")
        assert done.returncode == 0, done.stderr
    finally:
        os.kill(runner, signal.SIGCONT)


def test_what_was_stopped_before_stays_so(
    begin: Holders, folder: StateFolder, allot: Allot, tmp_path: Path
) -> None:
    first, second = begin("job", "8Gi", 2)
    os.kill(first, signal.SIGSTOP)
    wait_until(lambda: is_stopped(first))
    refusing = FakeDriver(tmp_path / "driver", failing_step=2, code=1)
    with pytest.raises(BusyError, match="refused the checkpoint"):
        suspend(folder, "job", no_readings, patience_s=5, drivers=refusing.of)
    wait_until(lambda: is_stopped(first))
    assert not is_stopped(second)
    for _ in range(2):
        assert allot("suspend", "job").returncode == 0
        wait_until(lambda: is_stopped(second))
        done = allot("resume", "job")
        assert done.returncode == 0, done.stderr
        wait_until(lambda: is_stopped(first))
        assert not is_stopped(second)
    os.kill(first, signal.SIGCONT)
    ran = gpu_ns(allot, first)
    wait_until(lambda: gpu_ns(allot, first) > ran)


def test_one_without_programs_says_so(allot: Allot, tmp_path: Path) -> None:
    made = allot("cdi", "create", *SPEC, "--memory", "40Gi", "--name", "job",
                 "--cdi-dir", tmp_path / "cdi")  # fmt: skip
    assert made.returncode == 0, made.stderr
    done = allot("suspend", "job")
    assert done.returncode == 0, done.stderr
    assert "hint: no program runs in job" in done.stderr
    done = allot("resume", "job")
    assert done.returncode == 0, done.stderr
    assert "ended" not in done.stdout


def test_without_checkpoints_the_shim_moves_what_can_move(
    begin: Holders, allot: Allot, tmp_path: Path
) -> None:
    old = tmp_path / "old.yaml"
    old.write_text("cuda: 12.4\ngpus: [a100-80gb]\n")
    (pid,) = begin("job", "60Gi", 1, "--oversubscribe", spec=("--simulated", str(old)))
    begin("kept", "60Gi", 1, "--oversubscribe", spec=("--simulated", str(old)))
    done = allot("suspend", "job")
    assert done.returncode == 0, done.stderr
    assert "memory stays booked" in done.stdout
    wait_until(lambda: is_stopped(pid))
    again = allot("suspend", "job")
    assert (again.returncode, "is suspended already" in again.stderr) == (7, True)
    wait_until(lambda: used_bytes(allot) < 2 * GI)  # two contexts, and what the other has
    shares = {each["name"]: each for each in json.loads(allot("ps", "-o", "json").stdout)["shares"]}
    assert (shares["job"]["state"], shares["kept"]["state"]) == ("suspended", "running")
    assert shares["job"]["devices"][0]["memory_host_bytes"] == GI
    assert find(StateFolder(allot.state), "job").booked_memory().popitem()[1] == 60 * GI
    assert allot("resume", "job").returncode == 0
    wait_until(lambda: used_bytes(allot) > 2 * GI)
    assert not is_stopped(pid)


def test_a_program_without_the_shim_is_checkpointed_too(allot: Allot, folder: StateFolder) -> None:
    holder = f"unset LD_PRELOAD; exec {sys.executable} {HOLDER} 0 {GI} busy"
    command = allot.command(
        "run", *SPEC, "--name", "job", "--memory", "8Gi", "--inject", "environment",
        "--", "sh", "-c", holder,
    )  # fmt: skip
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=allot.environment()
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        before = used_bytes(allot)
        assert before > GI
        done = allot("suspend", "job")
        told = re.fullmatch(
            r"job: suspended, 1 process stopped; (.*) moved from GPU to host\n", done.stdout
        )
        assert told, done.stderr
        assert told[1] == format_bytes(before)
        assert used_bytes(allot) == 0
        assert find(folder, "job").booked_memory().popitem()[1] == 0
        done = allot("resume", "job")
        assert done.stdout == "job: resumed, 1 process continues\n", done.stderr
        assert "is in use by 1 process (" in allot("rm", "job").stderr
        assert used_bytes(allot) == before
        process.communicate()
        assert process.returncode == 0


def test_nothing_is_restored_where_outsiders_have_the_room(begin: Holders, allot: Allot) -> None:
    (pid,) = begin("job", "60Gi")
    inside = Path(f"/proc/{pid}/environ").read_text().split("\0")
    outside = dict(each.split("=", 1) for each in inside if "=" in each)
    del outside["ALLOTMENT_SHARE"], outside["LD_PRELOAD"]
    assert allot("suspend", "job").returncode == 0
    with subprocess.Popen(
        [sys.executable, HOLDER, "0", str(78 * GI)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=outside,
    ) as stranger:  # fmt: skip
        assert stranger.stdout is not None
        assert stranger.stdout.readline() == "ready\n"
        done = allot("resume", "job")
        assert done.returncode == 3, done.stderr
        assert "programs outside of shares use 78" in done.stderr
        assert is_stopped(pid)
        stranger.communicate()
    done = allot("resume", "job")
    assert done.returncode == 0, done.stderr
    assert not is_stopped(pid)


def test_what_a_neighbour_writes_into_its_ledger_keeps_none_suspended(
    begin: Holders, allot: Allot, folder: StateFolder
) -> None:
    (pid,) = begin("job", "60Gi")
    begin("other", "8Gi")
    inside = Path(f"/proc/{pid}/environ").read_text().split("\0")
    outside = dict(each.split("=", 1) for each in inside if "=" in each)
    del outside["ALLOTMENT_SHARE"], outside["LD_PRELOAD"]
    assert allot("suspend", "job").returncode == 0
    with (find(folder, "other").directory / "usage").open("r+b") as usage:
        usage.seek(layout.USAGE_DEVICES_AT + layout.USAGE_DEVICE_TOTAL_VALUE_AT)
        usage.write((1 << 60).to_bytes(8, "little"))
    with subprocess.Popen(
        [sys.executable, HOLDER, "0", str(GI)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=outside,
    ) as stranger:  # fmt: skip
        assert stranger.stdout is not None
        assert stranger.stdout.readline() == "ready\n"
        done = allot("resume", "job")
        assert done.returncode == 0, done.stderr
        stranger.communicate()


@pytest.mark.parametrize("may_move", [False, True])
def test_managed_memory_is_not_checkpointed(allot: Allot, *, may_move: bool) -> None:
    command = allot.command(
        "run", *SPEC, "--name", "job", "--memory", "8Gi", "--inject", "environment",
        *(["--oversubscribe"] if may_move else []),
        "--", sys.executable, "-m", "allotment", "burn", "--api", "managed", "--memory", "1Gi",
        "--seconds", "600",
    )  # fmt: skip
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, env=allot.environment()) as process:
        try:
            wait_until(lambda: "job" in allot("ps").stdout and used_bytes(allot) > GI)
            done = allot("suspend", "job")
            if may_move:
                assert done.returncode == 0, done.stderr
                wait_until(lambda: used_bytes(allot) < GI)
                assert allot("resume", "job").returncode == 0
                wait_until(lambda: used_bytes(allot) > GI)
            else:
                assert done.returncode == 8, done.stderr
                assert "has managed memory" in done.stderr
        finally:
            process.terminate()
