# SPDX-License-Identifier: Apache-2.0
"""Shares of mode `mps`: real processes side by side on a simulated GPU, and what goes wrong."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from mps_machine import CLIENT, SPEC, Machine, first_line, lines
from patience import wait_until
from rounds import undisturbed

from allotment.devices.compute_modes import ComputeMode, GpuSettings
from allotment.libraries import SIMULATED, library_path
from allotment.model.errors import BusyError, NotInModeError
from allotment.modes.mps.control import Control
from allotment.modes.mps.state import DaemonState

Allot = Any  # tests/conftest.py: CommandLine
CONNECTION_FAILED, RPC_FAILURE, TERMINATED = 805, 806, 810
ILLEGAL_ADDRESS, UNAVAILABLE = 700, 46

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(os.geteuid() != 0, reason="a GPU's compute mode is root's to set"),
]


@pytest.fixture
def machine(allot: Allot) -> Iterator[Machine]:
    allot.state.mkdir(exist_ok=True)
    assert allot("devices", "--simulated", SPEC).returncode == 0
    made = Machine(allot)
    yield made
    made.close()


@pytest.mark.measured
def test_shares_compute_at_the_same_time_each_on_its_part(machine: Machine) -> None:
    quarter = machine.start("spin", "1000", "10", "20", compute="25")
    assert lines(quarter)[0] == {"multiprocessors": 26, "is_client": True}
    assert machine.mode() is ComputeMode.EXCLUSIVE_PROCESS

    # 2 s of kernels each: side by side they take little more than one of them would, when both have
    # begun at about the same time; one after the other, twice that.
    def overlap_and_slowest() -> tuple[float, float]:
        both = [machine.start("spin", "20000", "100", "20") for _ in range(2)]
        ends = [lines(each) for each in both]
        assert [each[0] for each in ends] == [{"multiprocessors": 54, "is_client": True}] * 2
        since = max(end[1]["since"] for end in ends)
        until = min(end[1]["until"] for end in ends)
        return until - since, max(end[1]["seconds"] for end in ends)

    def are_side_by_side(found: tuple[float, float]) -> bool:
        overlap, slowest = found
        return overlap > 0.2 and slowest < 2.6 + 0.5 * (2.0 - min(overlap, 2.0))

    found = undisturbed(overlap_and_slowest, are_side_by_side)
    assert are_side_by_side(found), found


@pytest.mark.measured
def test_a_part_is_no_more_than_a_part(machine: Machine) -> None:
    def ratio() -> float:
        whole = lines(machine.start("spin", "10000", "40", "65535", compute="100"))
        half = lines(machine.start("spin", "10000", "40", "65535", compute="50"))
        return float(half[1]["seconds"] / whole[1]["seconds"])

    assert undisturbed(ratio, lambda ratio: ratio > 1.6) > 1.6


def test_the_daemon_is_back_after_it_was_killed_and_the_shares_are_named(
    machine: Machine,
) -> None:
    held = [machine.start("hold", options=("--name", name)) for name in ("left", "right")]
    other = machine.start("hold", gpu=1)
    for each in (*held, other):
        assert first_line(each)["is_client"]
    before = machine.status()
    neighbour = machine.status(1).daemon
    assert before.daemon is not None
    os.kill(before.daemon, signal.SIGKILL)
    for each in held:
        (said,) = lines(each)
        assert said["code"] == RPC_FAILURE
    wait_until(lambda: machine.status().restarts == 1, "it is not started again")
    status = machine.status()
    (loss,) = status.losses
    assert loss.shares == ("left", "right")
    assert status.daemon not in {None, before.daemon}
    assert loss.recovered_s is not None
    assert machine.status(1).daemon == neighbour
    assert other.poll() is None
    assert lines(machine.start("spin", "100", "10", "20"))[0]["is_client"]
    shown = machine.allot("doctor").stdout
    assert machine.uuids[0] in shown
    assert "left, right" in shown


def start_between_daemons(machine: Machine) -> tuple[subprocess.Popen[str], int]:
    """Start a program in a share without a daemon. Returns its stopped supervisor, too."""
    client = f"{sys.executable} {CLIENT}"
    shell = machine.script("--compute", "25", text=f"{client} hold; {client} spin 100 1 1")
    assert first_line(shell)["is_client"]
    status = machine.status()
    assert status.daemon is not None
    assert status.supervisor is not None
    os.kill(status.supervisor, signal.SIGSTOP)
    os.kill(status.daemon, signal.SIGKILL)
    assert first_line(shell)["code"] == RPC_FAILURE
    return shell, status.supervisor


def test_a_program_that_starts_between_two_daemons_waits_for_the_next(machine: Machine) -> None:
    shell, supervisor = start_between_daemons(machine)
    time.sleep(1)  # for the program to reach cuInit
    os.kill(supervisor, signal.SIGCONT)
    client, spun = lines(shell)
    assert client == {"multiprocessors": 26, "is_client": True}
    assert spun["seconds"] > 0


@pytest.mark.thorough
def test_a_program_without_a_daemon_ends_with_the_reason(machine: Machine) -> None:
    shell, supervisor = start_between_daemons(machine)
    out, errors = shell.communicate(timeout=120)  # the shim waits for a minute
    os.kill(supervisor, signal.SIGCONT)
    assert json.loads(out)["code"] == CONNECTION_FAILED
    assert errors.count("no MPS control daemon in CUDA_MPS_PIPE_DIRECTORY (") == 1
    assert "`allot doctor`" in errors


def test_what_a_share_lost_is_shown_with_it_and_not_with_the_next_of_its_name(
    machine: Machine,
) -> None:
    # A shell that outlives its program: the share is there to be shown.
    shell = machine.keep("kept")
    assert first_line(shell)["is_client"]
    other = machine.start("hold", options=("--name", "other"), gpu=1)
    assert first_line(other)["is_client"]
    daemon = machine.status().daemon
    assert daemon is not None
    os.kill(daemon, signal.SIGKILL)
    wait_until(lambda: machine.status().restarts == 1, "it is not started again")
    shares = {each["name"]: each for each in machine.shares()}
    (loss,) = shares["kept"]["losses"]
    assert loss["uuid"] == machine.uuids[0]
    assert loss["reason"] == "the control daemon ended"
    assert loss["recovered_seconds"] == machine.status().losses[0].recovered_s
    assert loss["time"] >= shares["kept"]["created"]
    assert shares["other"]["losses"] == []
    warned = machine.allot("ps").stderr
    assert "the control daemon ended" in warned
    assert "programs in kept lost their memory and contexts there" in warned
    shell.terminate()
    shell.communicate(timeout=60)
    again = machine.start("hold", options=("--name", "kept"))
    assert first_line(again)["is_client"]
    (share,) = [each for each in machine.shares() if each["name"] == "kept"]
    assert share["losses"] == []
    assert machine.allot("ps").stderr == ""


def test_the_part_of_each_process_is_shown(machine: Machine) -> None:
    held = machine.start("hold", options=("--name", "held", "--class", "besteffort"), compute="20")
    assert first_line(held)["is_client"]
    header, row, *_ = machine.allot("ps").stdout.splitlines()
    assert row[header.index("COMPUTE") :].startswith("20:20 besteffort")
    (share,) = machine.shares()
    compute = share["devices"][0]["compute"]
    assert (compute["guarantee_percent"], compute["ceiling_percent"]) == (20, 20)
    assert (compute["class"], compute["state"], compute["measured"]) == ("besteffort", None, False)
    assert "20:20 besteffort" in machine.allot("top", "--once").stdout


def test_a_fault_ends_all_clients_of_its_gpu_and_no_others(machine: Machine) -> None:
    victim, other = (
        machine.start("hold", options=("--name", "victim")),
        machine.start("hold", gpu=1),
    )
    assert first_line(victim)["is_client"]
    assert first_line(other)["is_client"]
    culprit = machine.start("trap", options=("--name", "culprit"))
    assert lines(culprit)[1]["code"] == ILLEGAL_ADDRESS
    assert lines(victim)[0]["code"] == ILLEGAL_ADDRESS
    assert other.poll() is None
    assert lines(machine.start("spin", "100", "10", "20"))[1]["seconds"] > 0


def test_who_goes_round_the_daemon_gets_nothing(machine: Machine) -> None:
    held = machine.start("hold")
    assert first_line(held)["is_client"]
    libraries = next((machine.allot.state / "simulated" / "lib").glob("[0-9a-f]*"))
    alone = subprocess.run(
        [sys.executable, CLIENT, "spin", "100", "1", "1"],
        env={
            **os.environ,
            "LD_LIBRARY_PATH": str(libraries),
            "ALLOTMENT_SIMULATED_MACHINE": str(machine.file),
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert json.loads(alone.stdout)["code"] == UNAVAILABLE


def test_who_keeps_the_daemon_is_in_no_share_and_no_stranger(machine: Machine) -> None:
    held = machine.start("hold", options=("--name", "alone"))
    assert first_line(held)["is_client"]
    seen = json.loads(machine.allot("ps", "-o", "json").stdout)
    (share,) = seen["shares"]
    assert share["enforced"]
    assert len(share["processes"]) == 1
    assert seen.get("outside", []) == []


def test_memory_is_held_for_the_share(machine: Machine) -> None:
    *_, last = lines(machine.start("take", "8192"))
    assert last["code"] == 2
    assert machine.allot("run", "--simulated", SPEC, "--memory", "200Gi", "--mode", "mps", "--",
                         "true").returncode == 3  # fmt: skip


def test_doctor_tells_who_holds_shares_to_their_compute(machine: Machine) -> None:
    held = machine.start("hold", options=("--name", "held"))
    assert first_line(held)["is_client"]
    checks = json.loads(machine.allot("doctor", "-o", "json").stdout)["checks"]
    [compute] = [each["detail"] for each in checks if each["name"] == "compute"]
    assert compute == "MPS limits shares to their multiprocessors; GPUs: 1"
    refused = machine.allot("resize", "held", "--compute", "20")
    assert refused.returncode == NotInModeError.exit_code, refused.stderr


def test_memory_grows_in_a_new_share_alone(machine: Machine) -> None:
    held = machine.start("hold", options=("--name", "held"))
    assert first_line(held)["is_client"]
    refused = machine.allot("resize", "held", "--memory", "6Gi")
    assert refused.returncode == NotInModeError.exit_code, refused.stderr
    assert "under MPS the memory of programs that run cannot be made more" in refused.stderr
    assert machine.allot("resize", "held", "--memory", "2Gi").returncode == 0
    (share,) = machine.shares()
    assert share["devices"][0]["memory_limit_bytes"] == 2 << 30


def test_what_a_program_undoes_is_its_part_and_not_the_shares_memory(machine: Machine) -> None:
    undone = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=100 exec env -u CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"
    program = machine.script(
        "--compute", "25", text=f"{undone} {sys.executable} {CLIENT} take 8192"
    )
    first, *_, last = lines(program)
    assert first["multiprocessors"] == 108  # docs/guides/mps.md says so
    assert last == {"failed": "cuMemAlloc_v2", "code": 2, "at": last["at"]}
    alone = machine.script(
        text=f"exec env -u CUDA_MPS_PIPE_DIRECTORY {sys.executable} {CLIENT} hold"
    )
    assert lines(alone)[0]["code"] == UNAVAILABLE


def test_a_daemon_without_shares_stops_and_puts_the_gpu_back(machine: Machine) -> None:
    held = machine.start("hold")
    assert first_line(held)["is_client"]
    daemon = machine.status().daemon
    held.terminate()
    wait_until(lambda: machine.status().state is DaemonState.STOPPED, "it goes on")
    assert machine.mode() is ComputeMode.DEFAULT
    assert daemon is not None
    with pytest.raises(ProcessLookupError):
        os.kill(daemon, 0)


def test_a_supervisor_that_was_killed_is_followed_by_one_that_goes_on(machine: Machine) -> None:
    held = machine.start("hold")
    assert first_line(held)["is_client"]
    before = machine.status()
    assert before.supervisor is not None
    os.kill(before.supervisor, signal.SIGKILL)
    assert lines(machine.start("spin", "100", "10", "20"))[0]["is_client"]
    after = machine.status()
    assert after.daemon == before.daemon
    assert after.supervisor != before.supervisor
    assert after.mode_before == 0
    assert held.poll() is None


def test_a_gpu_that_somebody_keeps_for_himself_is_refused(machine: Machine) -> None:
    GpuSettings(machine.uuids[0], machine=machine.file).set_compute_mode(
        ComputeMode.EXCLUSIVE_PROCESS
    )
    done = machine.start("spin", "100", "1", "1")
    out, errors = done.communicate(timeout=60)
    assert (done.returncode, out) == (BusyError.exit_code, "")
    assert "compute mode EXCLUSIVE_PROCESS, set outside Allotment" in errors
    assert "nvidia-smi -i" in errors
    assert machine.mode() is ComputeMode.EXCLUSIVE_PROCESS
    assert "No shares" in machine.allot("ps").stderr


@pytest.mark.parametrize("options", [(), ("--oversubscribe",)], ids=["plain", "oversubscribed"])
def test_a_share_is_not_suspended_and_runs_on(machine: Machine, options: tuple[str, ...]) -> None:
    held = machine.start("hold", options=("--name", "held", *options))
    assert first_line(held)["is_client"]
    done = machine.allot("suspend", "held", "--timeout", "5")
    assert done.returncode == NotInModeError.exit_code, done.stderr
    assert "its programs are clients of MPS" in done.stderr
    assert "--mode soft" in done.stderr
    (share,) = json.loads(machine.allot("ps", "-o", "json").stdout)["shares"]
    assert (share["state"], share["suspended"]) == ("running", None)
    (process,) = share["processes"]
    state = Path(f"/proc/{process['pid']}/stat").read_text().rpartition(")")[2].split()[0]
    assert state != "T"
    assert held.poll() is None


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        (("--compute", "0:0"), 2, "would never let it run"),
        (("--compute", "101"), 2, "more than a whole device"),
        (("--compute", "0.5"), 2, "less than MPS can enforce"),
        (("--count", "2"), 2, "is of one GPU, not of 2"),
    ],
)
def test_what_mps_cannot_give_is_refused(
    machine: Machine, words: tuple[str, ...], status: int, message: str
) -> None:
    done = machine.allot(
        "run", "--simulated", SPEC, "--mode", "mps", "--memory", "1Gi", *words, "--", "true"
    )
    assert done.returncode == status, done.stderr
    assert message in done.stderr
    assert "hint: " in done.stderr


def test_guarantees_of_a_gpu_are_no_more_than_the_gpu(machine: Machine) -> None:
    held = machine.start("hold", compute="70")
    assert first_line(held)["multiprocessors"] == 74
    done = machine.start("spin", "100", "1", "1", compute="40")
    _, errors = done.communicate(timeout=60)
    assert done.returncode == 3
    assert "compute" in errors


def control_of(machine: Machine, folder: Path) -> Control:
    pipes, logs = folder / "pipe", folder / "log"
    pipes.mkdir()
    return Control(
        pipes,
        logs,
        machine.uuids[0],
        str(library_path(SIMULATED) / "nvidia-cuda-mps-control"),
        {"ALLOTMENT_SIMULATED_MACHINE": str(machine.file)},
    )


def test_the_control_programs_commands(machine: Machine, tmp_path: Path) -> None:
    control = control_of(machine, tmp_path)
    daemon = control.start()
    try:
        wait_until(control.answers, "no answer")
        assert control.servers() == ()
        control.start_server()
        (server,) = control.servers()
        assert control.is_active(server)
        assert control.ask("get_default_active_thread_percentage") == "100.0"
        # As the real one: a value is taken as it comes.
        assert control.ask("set_default_active_thread_percentage 1000") == "1000.0"
        assert control.ask("set_default_device_pinned_mem_limit 0 2G") == "2048M"
        assert control.ask("get_default_device_pinned_mem_limit 0") == "2048M"
        assert control.ask(f"get_active_thread_percentage {server}") == "100.0"
        assert control.ask(f"get_client_list {server}") == ""
        assert control.ask("get_server_status 1") == "Server 1 not found"
        assert machine.uuids[0] in control.ask("device_query")
        assert machine.uuids[1] not in control.ask("device_query")
        assert control.ask("make_coffee").startswith("Unknown command")
        second = control.start()
        assert second.wait(timeout=60) == 1
        control.quit(0)
        assert daemon.wait(timeout=60) == 0
    finally:
        daemon.kill()
        daemon.wait()


CROWD = """
import ctypes, os, sys
go, ready = os.pipe(), os.pipe()
for _ in range(int(sys.argv[1])):
    if os.fork() == 0:
        code = ctypes.CDLL("libcuda.so.1").cuInit(0)
        os.write(ready[1], code.to_bytes(4, "little"))
        os.close(go[1])
        os.read(go[0], 1)
        os._exit(0)
codes = [int.from_bytes(os.read(ready[0], 4), "little") for _ in range(int(sys.argv[1]))]
print(codes.count(0), sorted({code for code in codes if code}))
"""


def outside_environment(machine: Machine, pipes: Path) -> dict[str, str]:
    """The environment of a program that is no share's, at a daemon of the test's own."""
    return {
        **os.environ,
        "LD_LIBRARY_PATH": str(library_path(SIMULATED)),
        "ALLOTMENT_SIMULATED_MACHINE": str(machine.file),
        "CUDA_MPS_PIPE_DIRECTORY": str(pipes),
    }


@contextmanager
def daemon_of(control: Control) -> Iterator[None]:
    daemon = control.start()
    try:
        wait_until(control.answers, "no answer")
        yield
    finally:
        daemon.kill()
        daemon.wait()


def test_a_server_takes_so_many_clients_and_no_more(machine: Machine, tmp_path: Path) -> None:
    control = control_of(machine, tmp_path)
    with daemon_of(control):
        done = subprocess.run(
            [sys.executable, "-c", CROWD, "52"],
            env=outside_environment(machine, control.pipes),
            capture_output=True,
            text=True,
            check=True,
        )
    # CUDA before 13.1: 48, and the others are told so.
    assert done.stdout == "48 [808]\n"


def test_a_client_can_be_ended_by_the_control_program(machine: Machine, tmp_path: Path) -> None:
    control = control_of(machine, tmp_path)
    with (
        daemon_of(control),
        subprocess.Popen(
            [sys.executable, CLIENT, "hold"],
            env=outside_environment(machine, control.pipes),
            stdout=subprocess.PIPE,
            text=True,
        ) as client,
    ):
        assert first_line(client)["is_client"]
        (server,) = control.servers()
        assert control.ask(f"get_client_list {server}") == str(client.pid)
        assert str(client.pid) in control.ask("ps")
        assert control.ask(f"terminate_client {server} 1") == "Client not found"
        control.ask(f"terminate_client {server} {client.pid}")
        assert lines(client)[0]["code"] == TERMINATED


def test_another_users_programs_wait_until_the_first_users_have_ended(
    machine: Machine, tmp_path: Path
) -> None:
    python = shutil.which("python3", path="/usr/bin:/bin")
    if python is None:
        pytest.skip("the tests' own Python is in a folder that other users cannot enter")
    for folder in (*tmp_path.parents, tmp_path, machine.allot.state, *machine.file.parents):
        if folder != Path("/") and folder.is_relative_to("/tmp"):  # noqa: S108 - the test's own
            folder.chmod(folder.stat().st_mode | 0o055)
    machine.file.chmod(0o666)
    control = control_of(machine, tmp_path)
    started: list[subprocess.Popen[Any]] = []
    single = subprocess.Popen(
        [control.program, "-f"],
        env={
            **outside_environment(machine, control.pipes),
            "CUDA_MPS_LOG_DIRECTORY": str(control.logs),
        },
    )
    started.append(single)
    try:
        wait_until(control.answers, "no answer")
        environment = outside_environment(machine, control.pipes)
        first = subprocess.Popen(
            [sys.executable, CLIENT, "hold"], env=environment, stdout=subprocess.PIPE, text=True
        )
        started.append(first)
        assert first_line(first)["is_client"]
        shutil.copy(CLIENT, tmp_path / "client.py")
        second = subprocess.Popen(
            [python, tmp_path / "client.py", "spin", "100", "1", "1"],
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
            user=65534,
        )
        started.append(second)
        with pytest.raises(subprocess.TimeoutExpired):
            second.wait(timeout=2)
        first.terminate()
        first.communicate()
        assert lines(second)[0]["is_client"]
    finally:
        for each in started:
            each.kill()
            each.wait()


def test_the_next_share_of_another_mode_has_the_gpu_at_once(machine: Machine) -> None:
    assert lines(machine.start("spin", "100", "10", "20"))[0]["is_client"]
    assert machine.mode() is ComputeMode.EXCLUSIVE_PROCESS  # its daemon waits for the next share
    soft = machine.allot(
        "run", "--simulated", SPEC, "--memory", "4Gi", "--gpu", machine.uuids[0],
        "--", sys.executable, str(CLIENT), "spin", "100", "10", "20",
    )  # fmt: skip
    first, last = map(json.loads, soft.stdout.splitlines())
    assert first == {"multiprocessors": 108, "is_client": False}
    assert last["seconds"] > 0
    assert machine.mode() is ComputeMode.DEFAULT
    assert machine.status().state is DaemonState.STOPPED


def test_what_a_killed_supervisor_left_is_cleared_for_the_next_share(machine: Machine) -> None:
    assert lines(machine.start("spin", "100", "10", "20"))[0]["is_client"]
    left = machine.status()
    assert left.supervisor is not None
    os.kill(left.supervisor, signal.SIGKILL)
    soft = machine.allot(
        "run", "--simulated", SPEC, "--memory", "4Gi", "--gpu", machine.uuids[0],
        "--", sys.executable, str(CLIENT), "spin", "100", "10", "20",
    )  # fmt: skip
    assert not json.loads(soft.stdout.splitlines()[0])["is_client"]
    assert machine.mode() is ComputeMode.DEFAULT
