# SPDX-License-Identifier: Apache-2.0
"""Shares of mode `mps` on a driver that has protocol 3: a namespace of the daemon's for each."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from mps_machine import CLIENT, Machine, first_line, lines
from patience import wait_until

from allotment.devices.compute_modes import ComputeMode
from allotment.libraries import SIMULATED, library_path
from allotment.model.structs import replace
from allotment.modes.mps.control import (
    Control,
    MpsUnreachableError,
    NamespaceControl,
    folder_of,
    with_namespaces,
)
from allotment.modes.mps.mode import Limits
from allotment.modes.mps.state import DaemonState, MpsPlace
from allotment.shares.folders import StateFolder
from allotment.shares.mps_daemons import control_of

Allot = Any  # tests/conftest.py: CommandLine
RPC_FAILURE, OUT_OF_MEMORY, NOT_PERMITTED = 806, 2, 800
ALL = 108
PERCENT_UNDONE = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=100"

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(os.geteuid() != 0, reason="a GPU's compute mode is root's to set"),
]


@pytest.fixture
def machine(allot: Allot, tmp_path: Path) -> Iterator[Machine]:
    allot.state.mkdir(exist_ok=True)
    description = tmp_path / "machine.yaml"
    description.write_text("driver: 615.71.09\ngpus: [{model: a100-80gb, count: 2}]\n")
    assert allot("devices", "--simulated", str(description)).returncode == 0
    made = Machine(allot, str(description))
    yield made
    made.close()


def control_for(machine: Machine) -> NamespaceControl:
    older: Control = control_of(
        StateFolder(machine.allot.state), machine.uuids[0], machine=machine.file
    )
    return with_namespaces(older)


def folders(place: MpsPlace) -> set[str]:
    return {path.name for path in place.parts.iterdir()}


@pytest.mark.parametrize("inject", ["namespace", "environment"])
def test_a_program_does_not_lift_its_ceiling(machine: Machine, inject: str) -> None:
    undone = f"{PERCENT_UNDONE} exec env -u CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"
    program = machine.script(
        "--inject", inject, "--compute", "25",
        text=f"{undone} {sys.executable} {CLIENT} take 8192",
    )  # fmt: skip
    first, *_, last = lines(program)
    assert first == {"multiprocessors": 26, "is_client": True}
    assert last["code"] == OUT_OF_MEMORY
    assert machine.status().protocol == 3


def test_what_a_program_undoes_of_the_older_way_is_undone_there(machine: Machine) -> None:
    # The daemon's own folder: who sees it comes by no share's namespace, and has next to nothing.
    pipes = machine.place().pipes
    undone = f"CUDA_MPS_PIPE_DIRECTORY={pipes} {PERCENT_UNDONE}"
    program = machine.script(
        "--inject", "environment", "--compute", "25",
        text=f"{undone} exec {sys.executable} {CLIENT} hold",
    )  # fmt: skip
    assert first_line(program) == {"multiprocessors": 2, "is_client": True}


def test_each_share_has_a_namespace_with_its_limits_while_it_is_there(machine: Machine) -> None:
    quarter = machine.start("hold", compute="25")
    best = machine.start("hold", compute="12.5", options=("--class", "besteffort"))
    for each in (quarter, best):
        assert first_line(each)["is_client"]
    ids = {share["id"]: share for share in machine.shares()}
    control = control_for(machine)
    assert control.namespaces() == set(ids) == folders(machine.place())
    limits = {
        name: tuple(
            control._do("namespace", "get", name, "shares", field)  # noqa: SLF001 - what it said
            for field in ("active-thread-percentage", "pinned-memory-limit", "client-priority")
        )
        for name in ids
    }
    # Whole percents are documented, and a ceiling is no less than what is given.
    assert sorted(limits.values()) == [("12", "4G", "1"), ("25", "4G", "0")]
    quarter.terminate()
    quarter.communicate(timeout=60)
    (left,) = (share["id"] for share in machine.shares())
    wait_until(lambda: control.namespaces() == {left}, "the namespace is left behind")
    wait_until(lambda: folders(machine.place()) == {left}, "the folder is left behind")
    assert best.poll() is None


def test_a_share_that_cannot_be_read_for_a_while_keeps_its_part(machine: Machine) -> None:
    kept, stays, ends = (
        machine.start("hold", compute="25", options=("--name", name))
        for name in ("kept", "stays", "ends")
    )
    for each in (kept, stays, ends):
        assert first_line(each)["is_client"]
    ids = {share["name"]: share["id"] for share in machine.shares()}
    part = machine.place().part(ids["kept"])
    before = (part.stat().st_ino, (part / "control").stat().st_ino)
    record = machine.allot.state / "shares" / ids["kept"] / "share.json"
    text = record.read_bytes()
    record.write_bytes(b"{")
    ends.terminate()
    ends.communicate(timeout=60)
    wait_until(lambda: ids["ends"] not in folders(machine.place()), "nobody looks")
    left = {ids["kept"], ids["stays"]}
    assert folders(machine.place()) == left
    # A namespace that has a client yet is deleted at a later look.
    wait_until(lambda: control_for(machine).namespaces() == left, "the namespace is left behind")
    record.write_bytes(text)
    assert (part.stat().st_ino, (part / "control").stat().st_ino) == before
    assert kept.poll() is None


def test_namespaces_are_there_again_after_the_daemon(machine: Machine) -> None:
    client = f"{sys.executable} {CLIENT}"
    shell = machine.script(
        "--name", "kept", "--compute", "25", text=f"{client} hold; {client} spin 100 1 1"
    )
    assert first_line(shell)["multiprocessors"] == 26
    before = machine.status()
    assert before.daemon is not None
    os.kill(before.daemon, signal.SIGKILL)
    assert first_line(shell)["code"] == RPC_FAILURE
    # The same share finds the next daemon where it found the first one, with its limits.
    *_, said, spun = lines(shell)
    assert said == {"multiprocessors": 26, "is_client": True}
    assert spun["seconds"] > 0
    assert machine.status().protocol == 3
    assert machine.status().losses[0].shares == ("kept",)


def test_a_supervisor_that_follows_goes_on_with_the_namespaces(machine: Machine) -> None:
    held = machine.start("hold", compute="25")
    assert first_line(held)["is_client"]
    before = machine.status()
    assert before.supervisor is not None
    os.kill(before.supervisor, signal.SIGKILL)
    assert lines(machine.start("spin", "100", "1", "1", compute="50"))[0]["multiprocessors"] == 54
    after = machine.status()
    assert (after.daemon, after.protocol) == (before.daemon, 3)
    assert after.supervisor != before.supervisor
    assert held.poll() is None


def test_a_server_that_ends_alone_is_followed_by_another(machine: Machine) -> None:
    shell = machine.keep("kept")
    assert first_line(shell)["is_client"]
    (server,) = control_for(machine).servers()
    os.kill(server, signal.SIGKILL)
    wait_until(lambda: machine.status().losses, "nobody noticed")
    assert lines(machine.start("spin", "100", "1", "1", compute="25"))[0]["multiprocessors"] == 26
    assert machine.status().losses[0].reason == "an MPS server ended"


def test_the_last_share_takes_it_all_with_it(machine: Machine) -> None:
    assert lines(machine.start("spin", "100", "10", "20"))[0]["is_client"]
    wait_until(lambda: machine.status().state is DaemonState.STOPPED, "it goes on")
    assert machine.mode() is ComputeMode.DEFAULT
    assert folders(machine.place()) == set()
    assert machine.status().protocol == 0


def test_doctor_says_who_holds_the_parts(machine: Machine) -> None:
    held = machine.start("hold")
    assert first_line(held)["is_client"]
    assert "the daemon limits each share (MPS v3)" in machine.allot("doctor").stdout


def test_it_is_the_daemon_that_says_which_protocol(machine: Machine) -> None:
    held = machine.start("hold")
    assert first_line(held)["is_client"]
    control = control_for(machine)
    done = subprocess.run(
        [control.program, "-p", "2", "client", "list", "--format=csv,noheader"],
        env={
            **os.environ,
            **control.environment,
            "CUDA_MPS_PIPE_DIRECTORY": str(control.pipes),
        },
        capture_output=True,
        text=True,
        check=True,
    )
    (share,) = machine.shares()
    (row,) = done.stdout.splitlines()
    assert row.split(",")[1:4] == ["shares", "0", share["id"]]
    assert json.dumps(share["processes"][0]["pid"]) == row.split(",")[0]


@contextmanager
def daemon_of(control: NamespaceControl) -> Iterator[None]:
    """A daemon of the test's own, with the namespaces `quarter` and `plain`."""
    daemon = control.start()
    try:
        wait_until(control.answers, "no answer")
        control.start_server()
        control.create("plain")
        control.create("quarter")
        control.limit("quarter", Limits(percentage=25, memory_mib=1024, is_below_normal=True))
        yield
    finally:
        daemon.kill()
        daemon.wait()


@pytest.fixture
def control(machine: Machine, tmp_path: Path) -> NamespaceControl:
    pipes = tmp_path / "pipe"
    pipes.mkdir()
    return replace(control_for(machine), pipes=pipes, logs=tmp_path / "log")


def client(control: NamespaceControl, *words: str, at: Path, **own: str) -> list[dict[str, Any]]:
    """What a program says that is no share's, with variables of its own."""
    done = subprocess.run(
        [sys.executable, CLIENT, *words],
        env={
            **os.environ,
            **control.environment,
            "LD_LIBRARY_PATH": str(library_path(SIMULATED)),
            "CUDA_MPS_PIPE_DIRECTORY": str(at),
            **own,
        },
        capture_output=True,
        text=True,
        check=False,
    )
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize(
    ("where", "own", "multiprocessors", "had_mib"),
    [
        ("shares/quarter", {}, 26, 1024),
        ("shares/quarter", {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "75"}, 26, 1024),
        ("shares/quarter", {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "10"}, 26, 1024),
        ("shares/quarter", {"CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "0=8G"}, 26, 1024),
        ("shares/quarter", {"CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "0=512M"}, 26, 512),
        ("shares/quarter", {"CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "GPU-none=1G"}, 26, 2048),
        ("shares/plain", {}, ALL, 2048),
        ("shares/plain", {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "50"}, 54, 2048),
        ("shares", {}, 2, 2048),
        (".", {}, 2, 2048),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_what_a_client_of_a_namespace_may_have(
    control: NamespaceControl, where: str, own: dict[str, str], multiprocessors: int, had_mib: int
) -> None:
    with daemon_of(control):
        first, *said = client(control, "take", "2048", at=control.pipes / where, **own)
    assert first == {"multiprocessors": multiprocessors, "is_client": True}
    had = max(each.get("taken", 0) for each in said)
    # A context takes some of what there is.
    assert had_mib - 1024 < had <= had_mib if had_mib > 512 else had < 512
    assert ("failed" in said[-1]) == (had < 2048)


def test_a_daemon_for_one_user_refuses_others(control: NamespaceControl, machine: Machine) -> None:
    python = shutil.which("python3", path="/usr/bin:/bin")
    if python is None:
        pytest.skip("the tests' own Python is in a folder that other users cannot enter")
    for folder in (*control.pipes.parents, control.pipes, *machine.file.parents):
        if folder != Path("/") and folder.is_relative_to("/tmp"):  # noqa: S108 - the test's own
            folder.chmod(folder.stat().st_mode | 0o055)
    machine.file.chmod(0o666)
    environment = {
        **os.environ,
        **control.environment,
        "LD_LIBRARY_PATH": str(library_path(SIMULATED)),
        "CUDA_MPS_PIPE_DIRECTORY": str(control.pipes),
        "CUDA_MPS_LOG_DIRECTORY": str(control.logs),
    }
    with subprocess.Popen([control.program, "-p", "3", "-f"], env=environment) as single:
        try:
            wait_until(control.answers, "no answer")
            control.start_server()
            control.create("plain")
            done = subprocess.run(
                [python, "-c", "import ctypes; print(ctypes.CDLL('libcuda.so.1').cuInit(0))"],
                env={
                    **environment,
                    "CUDA_MPS_PIPE_DIRECTORY": str(folder_of(control.pipes, "plain")),
                },
                capture_output=True,
                text=True,
                check=True,
                user=65534,
            )
        finally:
            single.kill()
    assert done.stdout.strip() == str(NOT_PERMITTED)


def test_a_namespace_with_clients_is_not_deleted(control: NamespaceControl) -> None:
    with (
        daemon_of(control),
        subprocess.Popen(
            [sys.executable, CLIENT, "hold"],
            env={
                **os.environ,
                **control.environment,
                "LD_LIBRARY_PATH": str(library_path(SIMULATED)),
                "CUDA_MPS_PIPE_DIRECTORY": str(folder_of(control.pipes, "plain")),
            },
            stdout=subprocess.PIPE,
            text=True,
        ) as held,
    ):
        assert first_line(held)["is_client"]
        with pytest.raises(MpsUnreachableError, match="it has clients: plain"):
            control.delete("plain")
        control.delete("quarter")
        assert control.namespaces() == {"plain"}
        control.quit(0)
        assert lines(held)[0]["code"] == RPC_FAILURE
