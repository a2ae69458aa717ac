# SPDX-License-Identifier: Apache-2.0
"""`allot run` with real processes: as if nothing were between, and the share as long as it."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from patience import wait_until

from allotment import ledger
from allotment.model.structs import replace
from allotment.shares import recovery
from allotment.shares.folders import StateFolder
from allotment.shares.process_tree import census
from allotment.shares.run.namespace import can_unshare

SPEC = ("--simulated", "a100-80gb:2")
_NEEDED = {"PATH", "PYTHONPATH", "ALLOTMENT_STATE"}
Allot = Any  # tests/conftest.py: CommandLine
LOADED = "/bin/grep -o 'liballotment-shim.so$' /proc/self/maps | /usr/bin/sort -u"

namespace = pytest.param(
    "namespace", marks=pytest.mark.skipif(not can_unshare(), reason="needs CAP_SYS_ADMIN")
)
both = pytest.mark.parametrize("inject", [namespace, "environment"])


def run(*command: str, inject: str = "environment", memory: str = "4Gi") -> list[str]:
    return ["run", *SPEC, "--memory", memory, "--inject", inject, "--", *command]


def shares(allot: Allot) -> list[dict[str, Any]]:
    done = allot("ps", "-o", "json")
    assert done.returncode == 0, done.stderr
    found: list[dict[str, Any]] = json.loads(done.stdout)["shares"]
    return found


@pytest.fixture
def begin(allot: Allot) -> Iterator[Callable[..., "subprocess.Popen[str]"]]:
    """Starts `allot run` and gives it pipes; ends what is left of it afterwards."""
    started: list[subprocess.Popen[str]] = []

    def start(*arguments: str) -> "subprocess.Popen[str]":
        process = subprocess.Popen(
            allot.command(*arguments),
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
        if process.poll() is None:
            process.terminate()
        process.communicate()


@both
def test_output_input_and_status_are_the_commands(allot: Allot, inject: str) -> None:
    done = allot(*run("sh", "-c", "cat; echo err >&2; exit 7", inject=inject), stdin="in\n")
    assert (done.stdout, done.stderr, done.returncode) == ("in\n", "err\n", 7)
    assert shares(allot) == []


@both
@pytest.mark.parametrize(
    "number",
    [
        signal.SIGTERM,
        pytest.param(signal.SIGKILL, marks=pytest.mark.thorough),
        signal.SIGSEGV,
    ],
)
def test_a_signal_that_ended_the_command_ends_allot(
    allot: Allot, inject: str, number: signal.Signals
) -> None:
    done = allot(*run("sh", "-c", f"kill -{int(number)} $$", inject=inject))
    assert done.returncode == -number
    assert shares(allot) == []


@both
def test_a_shell_sees_128_and_the_signal(allot: Allot, inject: str) -> None:
    command = " ".join(allot.command(*run("sh", "-c", "'kill -TERM $$'", inject=inject)))
    done = subprocess.run(
        ["sh", "-c", f"{command}; echo $?"],
        capture_output=True,
        text=True,
        check=False,
        env=allot.environment(),
    )
    assert done.stdout == "143\n"


@both
@pytest.mark.parametrize(
    "number",
    [
        signal.SIGTERM,
        signal.SIGINT,
        *(
            pytest.param(each, marks=pytest.mark.thorough)
            for each in (signal.SIGHUP, signal.SIGUSR1, signal.SIGQUIT)
        ),
    ],
)
def test_signals_are_passed_on(
    begin: Callable[..., "subprocess.Popen[str]"], inject: str, number: signal.Signals
) -> None:
    script = f"trap 'echo got; exit 5' {int(number)}; echo ready; while :; do sleep 0.05; done"
    process = begin(*run("sh", "-c", script, inject=inject))
    assert process.stdout
    assert process.stdout.readline() == "ready\n"
    process.send_signal(number)
    assert process.stdout.read() == "got\n"
    assert process.wait() == 5


@both
def test_the_programs_signals_are_as_for_any_other(allot: Allot, inject: str) -> None:
    look = "grep -E '^Sig(Blk|Ign)' /proc/self/status"
    plain = subprocess.run(["sh", "-c", look], capture_output=True, text=True, check=True)
    assert allot(*run("sh", "-c", look, inject=inject)).stdout == plain.stdout


@both
def test_a_parent_that_ignores_its_children_is_none_of_ours(allot: Allot, inject: str) -> None:
    command = allot.command(*run("sh", "-c", "true; exit 7", inject=inject))
    script = "import os, signal, sys; signal.signal(signal.SIGCHLD, signal.SIG_IGN);"
    done = subprocess.run(
        [sys.executable, "-c", f"{script} os.execv(sys.argv[1], sys.argv[1:])", *command],
        capture_output=True,
        text=True,
        check=False,
        env=allot.environment(),
    )
    assert (done.returncode, done.stderr) == (7, "")
    assert shares(allot) == []


def test_the_environment_is_the_users_and_nothing_else(allot: Allot) -> None:
    if not can_unshare():
        pytest.skip("needs CAP_SYS_ADMIN")
    given = {name: value for name, value in allot.environment().items() if name in _NEEDED}
    given |= {"LANG": "C", "ODD": "a=b\n c"}
    done = subprocess.run(
        allot.command(*run("env", "-0", inject="namespace")),
        capture_output=True,
        text=True,
        check=True,
        env=given,
    )
    found = dict(each.split("=", 1) for each in done.stdout.rstrip("\0").split("\0"))
    # Simulated GPUs have their nvidia-smi before the machine's.
    tools, _, found["PATH"] = found["PATH"].partition(":")
    assert tools.startswith("/run/allotment/simulated/lib/")
    assert found == given


@both
def test_no_descriptor_is_left_open(allot: Allot, inject: str) -> None:
    done = allot(*run("ls", "/proc/self/fd", inject=inject))
    assert set(done.stdout.split()) <= {"0", "1", "2", "3"}  # 3: the folder that ls lists


def test_a_scrubbed_environment_keeps_shim_and_libraries(allot: Allot) -> None:
    if not can_unshare():
        pytest.skip("needs CAP_SYS_ADMIN")
    script = "grep -o 'liballotment-shim.so$' /proc/self/maps | sort -u"
    libraries = "/sbin/ldconfig -p | grep -E 'libcuda.so.1|libnvidia-ml.so.1' | head -2"
    done = allot(
        *run("env", "-i", "/bin/sh", "-c", f"/bin/{script}; {libraries}", inject="namespace")
    )
    assert done.stdout.startswith("liballotment-shim.so\n")
    assert done.stdout.count("=> /run/allotment/simulated/lib/") == 2, done.stdout + done.stderr


def test_the_namespace_shows_one_share_and_nothing_to_write(allot: Allot) -> None:
    if not can_unshare():
        pytest.skip("needs CAP_SYS_ADMIN")
    script = """
        ls /run/allotment /run/allotment/share
        touch /run/allotment/new 2>/dev/null || echo refused
        echo x 2>/dev/null > /run/allotment/share/policy || echo refused
        echo x 2>/dev/null > /etc/ld.so.preload || echo refused
    """
    done = allot(*run("sh", "-c", script, inject="namespace"))
    assert done.stdout.count("refused") == 3
    assert {"policy", "usage"} <= set(done.stdout.splitlines())
    assert "shares\n" not in done.stdout


CHANGES_ITS_ROOT = """
import ctypes, os, sys
libraries = ctypes.CDLL(None)
os.chroot(sys.argv[1])
print(libraries.cuInit(0))
"""
# Landlock, by its system calls: no folder can be read but those below some of the root's.
MUST_NOT_READ = """
import ctypes, os, struct, sys
libc, may_list = ctypes.CDLL(None), 1 << 3
rules = libc.syscall(444, struct.pack("<Q", may_list), 8, 0)
for name in os.listdir("/"):
    if name != "run":
        below = os.open("/" + name, os.O_PATH)
        libc.syscall(445, rules, 1, struct.pack("<Qi", may_list, below), 0)
libc.prctl(38, 1, 0, 0, 0)
if libc.syscall(446, rules, 0) != 0:
    sys.exit("no landlock")
os.environ["ALLOTMENT_SHARE"] = sys.argv[1]
use = "import ctypes; print(ctypes.CDLL('libcuda.so.1').cuInit(0))"
os.execv(sys.executable, [sys.executable, "-c", use])
"""


@pytest.mark.parametrize(
    ("program", "why"),
    [(CHANGES_ITS_ROOT, "is gone"), (MUST_NOT_READ, "must not use")],
    ids=["chroot", "landlock"],
)
def test_who_leads_the_shim_elsewhere_has_no_gpu(
    allot: Allot, tmp_path: Path, program: str, why: str
) -> None:
    """The share is where it was when the program was loaded, or nowhere."""
    if not can_unshare():
        pytest.skip("needs CAP_SYS_ADMIN")
    of_its_own = tmp_path / "ledger"
    of_its_own.mkdir()
    ledger.create(
        of_its_own, ledger.LedgerPolicy("x", "x", (ledger.DevicePolicy("GPU-0", 1 << 40),))
    )
    # Loaded with the program: no call has looked for a share before the first of CUDA.
    command = ("env", "LD_PRELOAD=libcuda.so.1", sys.executable, "-c", program, str(of_its_own))
    done = allot(*run(*command, inject="namespace"))
    if "no landlock" in done.stderr:
        pytest.skip("this kernel has no Landlock")
    assert done.stdout == "802\n"
    assert "/run/allotment/share" in done.stderr
    assert why in done.stderr


@pytest.mark.parametrize("file", ["usage", "seat-0"])
def test_no_program_runs_from_a_file_that_programs_write(allot: Allot, file: str) -> None:
    """While one did, no agent could repair the file, nor cut off what was appended."""
    if not can_unshare():
        pytest.skip("needs CAP_SYS_ADMIN")
    script = f"""
        cat /bin/sleep > /run/allotment/share/{file}
        chmod a+x /run/allotment/share/{file}
        /run/allotment/share/{file} 0 || echo refused
    """
    assert allot(*run("sh", "-c", script, inject="namespace")).stdout == "refused\n"


def test_the_machine_is_untouched_by_the_namespace(allot: Allot) -> None:
    if not can_unshare():
        pytest.skip("needs CAP_SYS_ADMIN")
    before = Path("/proc/self/mounts").read_text()
    cache = Path("/etc/ld.so.cache").stat()
    assert allot(*run("true", inject="namespace")).returncode == 0
    assert Path("/proc/self/mounts").read_text() == before
    assert Path("/etc/ld.so.cache").stat() == cache
    assert Path("/etc/ld.so.preload").read_bytes() == b""


def test_without_privilege_the_environment_carries_the_share(allot: Allot) -> None:
    done = allot(*run("env"), LD_LIBRARY_PATH="/mine", LD_PRELOAD="libm.so.6")
    lines = dict(line.split("=", 1) for line in done.stdout.splitlines() if "=" in line)
    own, _, shim = lines["LD_PRELOAD"].partition(":")
    assert own == "libm.so.6"  # what stands before the driver without Allotment stays there
    assert shim.endswith("/liballotment-shim.so")
    assert Path(lines["ALLOTMENT_SHARE"]).parent == allot.state / "shares"
    assert lines["LD_LIBRARY_PATH"].endswith(":/mine")
    assert Path(lines["ALLOTMENT_SIMULATED_MACHINE"]).exists()


@both
def test_a_share_is_seen_while_it_lives(
    allot: Allot, begin: Callable[..., "subprocess.Popen[str]"], inject: str
) -> None:
    process = begin("run", *SPEC, "--name", "train", "--memory", "25%", "--count", "2",
                    "--inject", inject, "--", "cat")  # fmt: skip
    wait_until(lambda: shares(allot))
    (share,) = shares(allot)
    assert share["name"] == "train"
    assert share["state"] == "running"
    assert share["injection"] == inject
    assert share["enforced"] is True
    assert share["runner_pid"] == process.pid
    assert share["command"] == ["cat"]
    assert len({device["uuid"] for device in share["devices"]}) == 2
    table = allot("ps").stdout
    assert "train" in table
    assert inject in table
    process.communicate("")
    assert shares(allot) == []


@both
def test_a_killed_allot_leaves_its_command_in_the_share_until_it_ends(
    allot: Allot, begin: Callable[..., "subprocess.Popen[str]"], inject: str
) -> None:
    process = begin(*run("sh", "-c", "echo $$; exec cat", inject=inject, memory="60Gi"))
    assert process.stdout
    child = int(process.stdout.readline())
    process.kill()
    process.wait()
    os.kill(child, 0)
    assert [share["state"] for share in shares(allot)] == ["left"]
    remaining = allot("ps", "-o", "wide").stdout.splitlines()[-1].split()
    assert remaining == [str(child), "cat"]
    full = allot(
        "run", "--simulated", "a100-80gb:2", "--memory", "60Gi", "--count", "2", "--", "true"
    )
    assert full.returncode == 3, "its memory has to stay booked"
    process.communicate()  # its input ends, and with it the command
    wait_until(lambda: not Path(f"/proc/{child}").exists())
    assert shares(allot) == []


@both
def test_a_share_lasts_as_long_as_what_the_command_left_behind(allot: Allot, inject: str) -> None:
    script = "(exec 0<&- 1>&- 2>&-; exec sleep 50) & echo $!"
    done = allot(*run("sh", "-c", script, inject=inject))
    child = int(done.stdout)
    assert [share["state"] for share in shares(allot)] == ["left"]
    os.kill(child, signal.SIGKILL)
    wait_until(lambda: not shares(allot))


def test_inside_of_a_share_the_others_are_not_seen(allot: Allot) -> None:
    if not can_unshare():
        pytest.skip("needs CAP_SYS_ADMIN")
    inner = allot.command("ps", "--state", "/run/allotment")
    done = allot(*run(*inner, inject="namespace"))
    assert (done.stdout, done.stderr) == ("", "No shares are visible from inside a share.\n")


@both
def test_shares_do_not_nest(allot: Allot, inject: str) -> None:
    inner = allot.command("run", *SPEC, "--memory", "1Gi", "--", "true")
    done = allot(*run(*inner, inject=inject))
    assert done.returncode == 2
    assert "do not nest" in done.stderr
    assert "hint:" in done.stderr


@both
@pytest.mark.parametrize(
    ("name", "status"),
    [("no-such-command", 127), ("/etc/passwd", 126), ("/etc", 126), ("./x", 127)],
)
def test_what_cannot_run_leaves_nothing(allot: Allot, inject: str, name: str, status: int) -> None:
    done = allot(*run(name, inject=inject))
    assert done.returncode == status
    assert done.stderr.startswith("error: ")
    assert not (allot.state / "shares").exists()
    if status == 127:
        # It was written after `--`: the hint is not to do so.
        assert "for example: allot run" not in done.stderr
        assert ("no such file" if "/" in name else "PATH") in done.stderr.partition("hint: ")[2]


@pytest.mark.parametrize(("memory", "is_told"), [("511Mi", True), ("512Mi", False)])
def test_a_share_that_cuda_fills_is_remarked_upon(
    allot: Allot, memory: str, *, is_told: bool
) -> None:
    done = allot("run", *SPEC, "--memory", memory, "--name", "it", "--", "true")
    assert done.returncode == 0
    assert done.stderr.startswith("warning: share it: it has 511Mi of a GPU") == is_told
    assert (done.stderr == "") != is_told


def test_a_warning_that_nobody_can_read_stops_nothing(allot: Allot) -> None:
    command = [*allot.command("run", *SPEC, "--memory", "64Mi", "--", "true")]
    closed = subprocess.run(
        ["sh", "-c", 'exec "$@" 2>&-', "sh", *command], env=allot.environment(), check=False
    )
    assert closed.returncode == 0


@both
def test_a_missing_interpreter_is_126_and_leaves_nothing(
    allot: Allot, inject: str, tmp_path: Path
) -> None:
    script = tmp_path / "script"
    script.write_text("#!/no/such/interpreter\n")
    script.chmod(0o755)
    done = allot(*run(str(script), inject=inject))
    assert done.returncode == 126
    assert "interpreter" in done.stderr
    assert shares(allot) == []


def test_runs_at_once_never_overcommit(
    allot: Allot, begin: Callable[..., "subprocess.Popen[str]"]
) -> None:
    processes = [
        begin("run", "--simulated", "t4", "--memory", "40%", "--", "sh", "-c", "echo in; cat")
        for _ in range(4)
    ]
    wait_until(lambda: sum(process.poll() == 3 for process in processes) == 2)
    assert len(shares(allot)) == 2
    for process in processes:
        out, err = process.communicate("")
        assert (out == "in\n") != (process.returncode == 3)
        assert process.returncode == 0 or "need" in err


@pytest.mark.parametrize("name", ["a b", "a:b", "a;b", "a$LIB", "a\tb"])
def test_a_state_folder_that_the_environment_cannot_carry_is_refused(
    allot: Allot, name: str
) -> None:
    folder = allot.state / name
    options = ("--state", folder, "--memory", "1Gi", *SPEC)
    done = allot("run", *options, "--inject", "environment", "--", "echo", "ran")
    assert (done.returncode, done.stdout) == (6, "")
    assert done.stderr.startswith("error: ")
    assert "\n\nhint: choose" in done.stderr
    assert not folder.exists()
    if can_unshare():
        done = allot("run", *options, "--inject", "namespace", "--", "sh", "-c", LOADED)
        assert done.stdout == "liballotment-shim.so\n", done.stderr


def test_a_shell_cannot_carry_such_a_folder_either(allot: Allot) -> None:
    done = allot("env", "--state", allot.state / "a:b", "--simulated", "t4")
    assert (done.returncode, done.stdout) == (6, "")
    assert allot("env", "--state", allot.state / "a b", "--simulated", "t4").returncode == 0


def test_a_removed_working_folder_keeps_the_namespace(allot: Allot, tmp_path: Path) -> None:
    if not can_unshare():
        pytest.skip("needs CAP_SYS_ADMIN")
    command = allot.command("run", *SPEC, "--memory", "1Gi", "--", "env", "-i", "sh", "-c", LOADED)
    (tmp_path / "gone").mkdir()
    done = subprocess.run(
        ["sh", "-c", 'cd "$0" && rmdir "$0" && exec "$@"', tmp_path / "gone", *command],
        capture_output=True,
        text=True,
        check=False,
        env=allot.environment(),
    )
    assert done.stdout == "liballotment-shim.so\n", done.stderr
    assert "warning" not in done.stderr


def test_a_working_folder_that_is_covered_keeps_the_namespace(allot: Allot) -> None:
    if not can_unshare():
        pytest.skip("needs CAP_SYS_ADMIN")
    script = """
        mount -t tmpfs none /run && mkdir -p /run/allotment/here && cd /run/allotment/here && "$@"
    """
    command = allot.command("run", *SPEC, "--memory", "1Gi", "--", "pwd", "-P")
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", script, "sh", *command],
        capture_output=True,
        text=True,
        check=False,
        env=allot.environment(),
    )
    assert (done.stdout, done.stderr) == ("/run/allotment\n", "")


BURN = f"{sys.executable} -m allotment burn --memory 3Gi --seconds 600 >/dev/null 2>&1 </dev/null"


def test_a_daemon_that_scrubbed_its_environment_is_shown_and_booked(
    allot: Allot, begin: Callable[..., "subprocess.Popen[str]"]
) -> None:
    kept = " ".join(
        f'{name}="${name}"'
        for name in ("ALLOTMENT_SIMULATED_MACHINE", "LD_LIBRARY_PATH", "PYTHONPATH")
    )
    process = begin(*run("sh", "-c", f"(setsid env -i {kept} {BURN} &); cat"))

    def seen() -> list[tuple[int, bool]]:
        return [
            (each["pid"], each["enforced"])
            for share in shares(allot)
            for each in share["processes"]
            if each["devices"][0]["memory_used_bytes"] > 3 << 30
        ]

    wait_until(seen)
    ((daemon, is_enforced),) = seen()
    assert not is_enforced
    assert shares(allot)[0]["enforced"] is False
    process.communicate("")
    assert process.returncode == 0
    assert [share["state"] for share in shares(allot)] == ["left"]
    assert seen() == [(daemon, False)]
    assert allot("run", *SPEC, "--memory", "78Gi", "--count", "2", "--", "true").returncode == 3
    os.kill(daemon, signal.SIGKILL)
    wait_until(lambda: not shares(allot))


@both
def test_adopted_processes_are_let_go_when_they_end(
    begin: Callable[..., "subprocess.Popen[str]"], inject: str
) -> None:
    process = begin(*run("sh", "-c", "(setsid sh -c 'echo $$; exec sleep 0.1' &); cat; exit 7",
                         inject=inject))  # fmt: skip
    assert process.stdout
    orphan = int(process.stdout.readline())
    status = Path(f"/proc/{orphan}/status")
    wait_until(lambda: not status.exists())  # nor is it a zombie
    process.communicate("")
    assert process.returncode == 7


def test_children_that_allot_had_before_are_not_its_shares(allot: Allot) -> None:
    command = " ".join(allot.command(*run("true")))
    done = subprocess.run(
        ["sh", "-c", f"sleep 60 >/dev/null 2>&1 & echo $!; exec {command}"],
        capture_output=True,
        text=True,
        check=True,
        env=allot.environment(),
    )
    assert shares(allot) == []
    os.kill(int(done.stdout), signal.SIGKILL)


@pytest.mark.parametrize("is_recorded", [True, False])
def test_members_of_a_namespace_whatever_their_root_folder_is(
    allot: Allot,
    begin: Callable[..., "subprocess.Popen[str]"],
    tmp_path: Path,
    is_recorded: bool,  # noqa: FBT001 - a parameter
) -> None:
    if not can_unshare():
        pytest.skip("needs CAP_SYS_ADMIN")
    (tmp_path / "root").mkdir()
    chroot = f"env -i {shutil.which('chroot')} {tmp_path}/root /bin/sleep 60"
    # The first by number is in a root folder of its own, in which the share is not mounted.
    second = chroot if is_recorded else "sleep 60"
    script = f"mount --bind / {tmp_path}/root; (setsid {second} & echo $$ $!); exec {chroot}"
    process = begin(*run("sh", "-c", script, inject="namespace"))
    assert process.stdout
    pids = set(map(int, process.stdout.readline().split()))
    (found,) = recovery.list_shares(StateFolder(allot.state))
    assert found.share
    traces = found.directory / "processes.json"
    wait_until(traces.exists)
    if not is_recorded:
        traces.unlink()
    orphan = replace(found.share, runner=None)

    def are_changed() -> bool:
        roots = [str(Path(f"/proc/{pid}/root").readlink()) for pid in pids]
        return roots.count(f"{tmp_path}/root") == (2 if is_recorded else 1)

    wait_until(are_changed)
    assert census([(orphan, found.directory)])[found.id] == pids
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
