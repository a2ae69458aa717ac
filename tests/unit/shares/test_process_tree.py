# SPDX-License-Identifier: Apache-2.0
"""Who lives, and who is in which share."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from allotment.model.devices import Device
from allotment.model.shares import Injection, Share
from allotment.model.structs import replace
from allotment.shares import lifecycle, process_tree
from allotment.shares.folders import StateFolder
from allotment.shares.placing import ShareOrder
from allotment.shares.run.namespace import can_unshare

Make = Callable[..., tuple[Share, Path]]
Sleeper = Callable[..., "subprocess.Popen[bytes]"]
Begin = Callable[..., int]
NOBODY = "65534"
BECOME_NOBODY = ("setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups")

needs_root = pytest.mark.skipif(
    os.geteuid() != 0 or not can_unshare() or shutil.which("setpriv") is None,
    reason="other users and mounts are root's to make, users by setpriv",
)


def test_this_process_lives_and_is_itself() -> None:
    me = process_tree.named(os.getpid())
    assert process_tree.is_alive(me)
    assert not process_tree.is_alive(replace(me, start_time=me.start_time + 1))
    assert not process_tree.is_alive(replace(me, boot_id="another"))
    assert process_tree.pid_inside(os.getpid()) == os.getpid()


def test_a_zombie_does_not_live(sleeper: Sleeper) -> None:
    process = sleeper()
    started = process_tree.start_time(process.pid)
    assert started is not None
    runner = replace(process_tree.named(os.getpid()), pid=process.pid, start_time=started)
    assert process_tree.is_alive(runner)
    process.send_signal(signal.SIGKILL)
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert not process_tree.is_alive(runner)


def test_stopped_is_who_goes_on_by_sigcont(sleeper: Sleeper) -> None:
    process = sleeper()
    assert not process_tree.is_stopped(process.pid)
    process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED)
    assert process_tree.is_stopped(process.pid)
    process.send_signal(signal.SIGCONT)
    os.waitid(os.P_PID, process.pid, os.WCONTINUED)
    assert not process_tree.is_stopped(process.pid)


def test_what_a_debugger_stops_is_not_stopped() -> None:
    traced = "import ctypes, os; ctypes.CDLL(None).ptrace(0, 0, 0, 0); os.kill(os.getpid(), 19)"
    with subprocess.Popen([sys.executable, "-c", traced]) as process:
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
        state = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0]
        is_stopped = process_tree.is_stopped(process.pid)
        # `Popen.kill` takes the stop for the end, and sends nothing.
        os.kill(process.pid, signal.SIGKILL)
        while not os.WIFSIGNALED(os.waitpid(process.pid, 0)[1]):
            pass
    assert (state, is_stopped) == ("t", False)


def test_a_command_with_a_name_that_looks_like_proc(tmp_path: Path) -> None:
    program = tmp_path / "a) R 1 (b"
    program.symlink_to("/bin/cat")
    with subprocess.Popen(
        [program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
    ) as process:
        assert process.stdin
        assert process.stdout
        process.stdin.write(b"x")
        assert process.stdout.read(1) == b"x"  # it runs: the kernel shows its command line
        assert process_tree.start_time(process.pid)
        assert process_tree.command_of(process.pid) == str(program)
        process.communicate()


def test_members_by_environment(make: Make, sleeper: Sleeper) -> None:
    share, directory = make(runner=None)
    member = sleeper(ALLOTMENT_SHARE=str(directory))
    sleeper(ALLOTMENT_SHARE="/elsewhere")
    assert process_tree.census([(share, directory)]) == {share.id: {member.pid}}


def test_an_environment_is_read_once_for_each_program(
    make: Make, sleeper: Sleeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    share, directory = make(runner=None)
    reads: list[int] = []
    read = process_tree._directory_of_environment  # noqa: SLF001 - to count its calls

    def counted(pid: int) -> str:
        reads.append(pid)
        return read(pid)

    monkeypatch.setattr(process_tree, "_directory_of_environment", counted)
    member = sleeper(ALLOTMENT_SHARE=str(directory))
    for _ in range(2):
        assert process_tree.census([(share, directory)]) == {share.id: {member.pid}}
    assert reads.count(member.pid) == 1


def test_a_process_that_becomes_another_program_is_looked_at_again(make: Make) -> None:
    share, directory = make(runner=None)
    script = f"echo; read _; exec env ALLOTMENT_SHARE={directory} sh -c 'echo; read _'"
    with subprocess.Popen(
        ["sh", "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdout.readline()
        assert process_tree.census([(share, directory)]) == {share.id: set()}
        process.stdin.write(b"\n")
        process.stdout.readline()
        assert process_tree.census([(share, directory)]) == {share.id: {process.pid}}
        process.stdin.write(b"\n")


@pytest.mark.parametrize("injection", sorted(set(Injection) - {Injection.ENVIRONMENT}))
def test_a_share_with_mounts_has_no_members_by_environment(
    make: Make, sleeper: Sleeper, injection: Injection
) -> None:
    share, directory = make(runner=None)
    sleeper(ALLOTMENT_SHARE=str(directory))
    assert process_tree.census([(replace(share, injection=injection), directory)]) == {
        share.id: set()
    }


@pytest.fixture
def begin() -> Iterator[Begin]:
    """Starts a program, and returns the process id that it writes when it is ready."""
    started: list[subprocess.Popen[str]] = []

    def start(*command: str, **variables: str) -> int:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **variables},
        )
        started.append(process)
        assert process.stdout
        return int(process.stdout.readline())

    yield start
    for process in started:
        process.communicate()


READY = "echo $$; exec cat"
AS_NOBODY = f"{' '.join(BECOME_NOBODY)} sh -c '{READY}'"
BECOME_ROOT = (
    "import os, sys; os.setresuid(0, 0, 0); print(os.getpid(), flush=True); sys.stdin.read()"
)


@needs_root
@pytest.mark.parametrize(
    "program",
    [
        (*BECOME_NOBODY, "sh", "-c", READY),
        # As a set-user-id program that a user calls.
        ("setpriv", f"--ruid={NOBODY}", sys.executable, "-c", BECOME_ROOT),
    ],
    ids=["as-itself", "by-sudo"],
)
def test_another_users_process_that_names_a_share_is_no_member(
    make: Make, begin: Begin, program: tuple[str, ...]
) -> None:
    share, directory = make(runner=None)
    begin(*program, ALLOTMENT_SHARE=str(directory))
    assert process_tree.census([(share, directory)]) == {share.id: set()}


@needs_root
def test_a_descendant_of_a_member_is_one_as_any_user(make: Make, begin: Begin) -> None:
    share, directory = make(runner=None)
    child = begin("sh", "-c", f"env -i {AS_NOBODY}; true", ALLOTMENT_SHARE=str(directory))
    assert child in process_tree.census([(share, directory)])[share.id]


def mounting(source: Path, then: str = READY) -> tuple[str, ...]:
    """A program with a file mounted as a container's runtime mounts a share's ledger."""
    target = "/run/allotment/share/usage"
    steps = ("mount -t tmpfs none /run", f"mkdir -p {Path(target).parent}", f"touch {target}")
    script = "; ".join((*steps, f"mount --bind '{source}' {target}", then))
    return ("unshare", "--mount", "sh", "-ec", script)


@pytest.fixture
def mounted_share(
    tmp_path: Path,
    devices: tuple[Device, ...],
    order: Callable[..., ShareOrder],
) -> tuple[Share, Path]:
    """A share of a container, in a folder with a blank in its name."""
    folder = StateFolder(tmp_path / "a folder")
    folder.prepare()
    made = replace(order(runner=None), injection=Injection.CDI)
    return lifecycle.create(folder, made, devices)


@needs_root
def test_a_mounted_ledger_makes_members_and_a_file_of_its_name_does_not(
    mounted_share: tuple[Share, Path], tmp_path: Path, begin: Begin
) -> None:
    share, directory = mounted_share
    inside = begin(*mounting(directory / "usage"))
    forged = tmp_path / "volume" / "shares" / share.id / "usage"
    forged.parent.mkdir(parents=True)
    forged.write_bytes(b"")
    begin(*mounting(forged))
    assert process_tree.census([mounted_share]) == {share.id: {inside}}


@needs_root
def test_a_program_that_leaves_the_namespace_of_its_share_stays_a_member(
    mounted_share: tuple[Share, Path], begin: Begin
) -> None:
    share, directory = mounted_share
    leave = f"unshare --mount sh -ec 'umount /run/allotment/share/usage; {READY}'; true"
    gone = begin(*mounting(directory / "usage", leave))
    assert gone in process_tree.census([mounted_share])[share.id]


@needs_root
def test_mounts_count_for_users_who_may_write_the_ledger(
    mounted_share: tuple[Share, Path], begin: Begin
) -> None:
    """In a folder for all users each of them could mount it."""
    made, directory = mounted_share
    share = replace(made, injection=Injection.NAMESPACE)
    usage = directory / "usage"
    own = begin(*mounting(usage))
    other = begin(*mounting(usage, f"exec {AS_NOBODY}"))
    assert process_tree.census([(share, directory)]) == {share.id: {own, other}}
    usage.chmod(0o644)
    assert process_tree.census([(share, directory)]) == {share.id: {own}}


@needs_root
def test_a_container_cannot_leave_its_share_by_another_owner_of_the_ledger(
    mounted_share: tuple[Share, Path], begin: Begin
) -> None:
    share, directory = mounted_share
    usage = directory / "usage"
    hide = f"chmod 600 /run/allotment/share/usage; chown {NOBODY} /run/allotment/share/usage"
    hidden = begin(*mounting(usage, f"{hide}; {READY}"))
    assert process_tree.census([mounted_share]) == {share.id: {hidden}}


def test_of_what_a_process_makes_endless_the_start_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A user can have 100,000 mounts in a namespace of its own, which are 370 MB of text."""
    (tmp_path / "7").mkdir()
    with (tmp_path / "7" / "cmdline").open("wb") as file:
        file.write(b"train")
        file.truncate(1 << 30)
    monkeypatch.setattr(process_tree, "_PROC", tmp_path)
    command = process_tree.command_of(7)
    assert command.startswith("train")
    assert len(command) < 8 << 20


def test_members_by_descent_whatever_their_environment(make: Make) -> None:
    with subprocess.Popen(
        ["/bin/sh", "-c", "env -i /bin/sleep 50 & echo $!; wait"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as runner:
        assert runner.stdout is not None
        grandchild = int(runner.stdout.readline())
        named = replace(
            process_tree.named(os.getpid()),
            pid=runner.pid,
            start_time=process_tree.start_time(runner.pid) or 0,
        )
        share, directory = make(runner=named)
        assert grandchild in process_tree.census([(share, directory)])[share.id]
        os.kill(grandchild, signal.SIGKILL)
        runner.communicate()


SAY_UNSEEN = """
import sys
from allotment.shares import process_tree
process_tree.is_in_pod = lambda pid: pid == int(sys.argv[1])
print(process_tree.unseen_processes() or "all")
"""


def test_who_may_not_look_into_processes_of_pods_is_told(sleeper: Sleeper) -> None:
    if os.geteuid() != 0 or shutil.which("setpriv") is None:
        pytest.skip("capabilities are root's to drop, by setpriv")
    other = str(sleeper().pid)

    def said(*flags: str) -> str:
        command = [*flags, sys.executable, "-c", SAY_UNSEEN, other]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    # As a container gets them: root, with no capabilities but those that are named.
    few = ("setpriv", "--inh-caps", "-all", "--bounding-set", "-all,+sys_admin")
    assert "SYS_PTRACE" in said(*few)
    assert f"(PID {other})" in said(*few)
    assert said(*few[:-1], f"{few[-1]},+sys_ptrace") == "all"


ID = "8f0c" * 16


@pytest.mark.parametrize(
    ("group", "container"),
    [
        (f"0::/kubepods/besteffort/pod1b4e28ba-2fa1-11d2-883f-0016d3cca427/{ID}", ID),
        (f"5:cpu:/kubepods/pod1b4e28ba-2fa1-11d2-883f-0016d3cca427/{ID}/own", ID),
        (
            f"0::/a.slice/kubepods-pod1b4e28ba_2fa1_11d2_883f_0016d3cca427.slice/cri-{ID}.scope",
            ID,
        ),
        (f"0::/../../pod1b4e28ba-2fa1-11d2-883f-0016d3cca427/crio-{ID}", ID),
        ("0::/kubepods/pod1b4e28ba-2fa1-11d2-883f-0016d3cca427/main", ""),
        ("0::/../8f0c", None),
        ("0::/system.slice/podman.service", None),
    ],
)
def test_the_container_of_a_process_is_in_its_control_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, group: str, container: str | None
) -> None:
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "cgroup").write_text(f"9:name=systemd:/\n{group}\n")
    monkeypatch.setattr(process_tree, "_PROC", tmp_path)
    found = process_tree.pod_group(7)
    if container is None:
        assert found is None
    else:
        assert found == ("1b4e28ba-2fa1-11d2-883f-0016d3cca427", container)
    assert process_tree.pod_group(8) is None


@pytest.mark.parametrize(
    ("group", "is_pods"),
    [
        ("0::/kubepods/besteffort/pod1b4e28ba-2fa1-11d2-883f-0016d3cca427/8f0c", True),
        (
            "0::/kubepods.slice/kubepods-pod1b4e28ba_2fa1_11d2_883f_0016d3cca427.slice/cri-8.scope",
            True,
        ),
        ("0::/../../pod1b4e28ba-2fa1-11d2-883f-0016d3cca427/8f0c", True),
        ("0::/../8f0c", True),
        ("4:memory:/x/kubepods/podfe6bf2ce5ad1d2ea7e9e6a6e0d8a2cb8/8f0c", True),
        ("0::/", False),
        ("0::/system.slice/podman.service", False),
        ("0::/user.slice/pods", False),
    ],
)
def test_processes_of_pods_are_told_by_their_control_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, group: str, *, is_pods: bool
) -> None:
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "cgroup").write_text(f"9:name=systemd:/\n{group}\n")
    monkeypatch.setattr(process_tree, "_PROC", tmp_path)
    assert process_tree.is_in_pod(7) is is_pods
    uid = "1b4e28ba-2fa1-11d2-883f-0016d3cca427"
    assert process_tree.is_in_pod(7, uid) is any(each in group for each in (uid, "1b4e28ba_2fa1"))
    assert not process_tree.is_in_pod(7, uid.replace("1", "2"))
    assert not process_tree.is_in_pod(8)
