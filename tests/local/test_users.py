# SPDX-License-Identifier: Apache-2.0
"""Programs of other users inside root's share, and the message to one that cannot use its share."""

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from mps_machine import CLIENT as CLIENT_FILE
from mps_machine import Machine, lines
from patience import wait_until

from allotment.shares.run.namespace import can_unshare

Allot = Any  # tests/conftest.py: CommandLine
Drop = Callable[..., list[str]]
# The tests' own may be in a folder that other users cannot enter.
PYTHON = shutil.which("python3", path="/usr/bin:/bin") or "python3"
NOBODY = 65534
CLIENT = CLIENT_FILE.read_text("utf-8")
OUT_OF_MEMORY, NOT_READY = 2, "802"
TWICE = "import ctypes; cuda = ctypes.CDLL('libcuda.so.1'); print(cuda.cuInit(0), cuda.cuInit(0))"
TOLD = "allotment: no CUDA in this program: "

SETPRIV = ("setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups")

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0 or not can_unshare(), reason="only root has other users"),
    pytest.mark.skipif(not Path(PYTHON).is_absolute(), reason="no Python that all users can run"),
]


def by_setpriv(*program: str) -> list[str]:
    return ["--", *SETPRIV, *program]


def by_su(*program: str) -> list[str]:
    return ["--", "su", "nobody", "-s", "/bin/sh", "-c", shlex.join(program)]


def by_option(*program: str) -> list[str]:
    return ["--user", "nobody", "--", *program]


def by_number(*program: str) -> list[str]:
    return ["--user", str(NOBODY), "--", *program]


ways = pytest.mark.parametrize("drop", [by_setpriv, by_su, by_option])


def run(allot: Allot, *words: str, umask: int = -1) -> "subprocess.CompletedProcess[str]":
    command = ("run", "--simulated", "a100-80gb", "--memory", "4Gi", *words)
    return subprocess.run(
        allot.command(*command),
        env=allot.environment(),
        capture_output=True,
        text=True,
        check=False,
        umask=umask,
    )


def said(done: "subprocess.CompletedProcess[str]") -> list[dict[str, Any]]:
    assert done.stderr == ""
    return [json.loads(line) for line in done.stdout.splitlines()]


@ways
@pytest.mark.parametrize("umask", [0o022, 0o077])
def test_another_user_has_the_shares_memory_and_turns(allot: Allot, drop: Drop, umask: int) -> None:
    take = drop(PYTHON, "-c", CLIENT, "take", "8192")
    *_, most, failed = said(run(allot, *take, umask=umask))
    assert failed["code"] == OUT_OF_MEMORY
    assert 2048 < most["taken"] < 4096
    spin = drop(PYTHON, "-c", CLIENT, "spin", "100", "4", "8")
    assert "seconds" in said(run(allot, "--compute", "30:80", *spin, umask=umask))[-1]


@ways
def test_a_daemon_of_another_user_stays_in_its_share_when_allot_is_killed(
    allot: Allot, drop: Drop
) -> None:
    script = "setsid sleep 60 </dev/null >/dev/null 2>&1 & echo $! $$; read line"
    share = ("--simulated", "a100-80gb", "--memory", "4Gi")
    process = subprocess.Popen(
        allot.command("run", *share, *drop("sh", "-c", script)),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=allot.environment(),
    )
    assert process.stdout
    daemon, shell = map(int, process.stdout.readline().split())
    process.kill()
    process.wait()
    os.kill(shell, signal.SIGKILL)
    process.communicate()
    wait_until(lambda: not Path(f"/proc/{shell}").exists())
    listed = json.loads(allot("ps", "-o", "json").stdout)["shares"]
    assert [each["state"] for each in listed] == ["left"]
    os.kill(daemon, signal.SIGKILL)
    wait_until(lambda: not json.loads(allot("ps", "-o", "json").stdout)["shares"])


@pytest.fixture
def machine(allot: Allot) -> Iterator[Machine]:
    made = Machine(allot)
    yield made
    made.close()


@ways
def test_another_user_is_a_client_of_mps(machine: Machine, drop: Drop) -> None:
    client = drop(PYTHON, "-c", CLIENT, "spin", "100", "4", "8")
    first, last = lines(machine.run("--compute", "50", *client))
    assert first["is_client"]
    assert "seconds" in last


def test_a_user_by_name_or_number_has_no_rights_of_root(allot: Allot) -> None:
    text = "id -u; id -g; id -G; grep CapEff /proc/self/status; echo $USER $LOGNAME $HOME"
    for user in (by_option, by_number):
        done = run(allot, *user("sh", "-c", text))
        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines() == [
            *("65534", "65534", "65534", "CapEff:\t0000000000000000"),
            "nobody nobody /nonexistent",
        ]


def test_a_user_who_is_not_there_is_refused(allot: Allot) -> None:
    for user in ("no-such-user", "4000000000", "-1"):
        done = run(allot, "--user", user, "--", "true")
        assert done.returncode == 2
        assert f"there is no user '{user}'" in done.stderr


def test_a_user_needs_the_shares_mounts(allot: Allot) -> None:
    done = run(allot, "--user", "nobody", "--inject", "environment", "--", "true")
    assert done.returncode == 2
    assert "hint: remove --inject environment" in done.stderr


@pytest.fixture
def reachable() -> Iterator[Path]:
    """The state folder, where all users can reach it. Those of pytest are closed to others."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        folder = Path(name) / "state"
        folder.mkdir()
        yield folder


def run_in(state: Path, allot: Allot, words: Sequence[str]) -> "subprocess.CompletedProcess[str]":
    return run(allot, "--state", str(state), *words)


def test_nobody_outside_reaches_the_files(allot: Allot, reachable: Path) -> None:
    for name in ("usage", "seat-0", "policy"):
        # By its path on the machine: environment variables give a share no mounts.
        look = f'test -e "$ALLOTMENT_SHARE/{name}"'
        script = f"{look} && echo there; exec {' '.join(SETPRIV)} {look}"
        done = run_in(reachable, allot, ["--inject", "environment", "--", "sh", "-c", script])
        assert (done.returncode, done.stdout) == (1, "there\n"), done.stderr


@pytest.mark.parametrize("inject", ["environment", "namespace"])
def test_a_program_that_cannot_use_its_share_is_told_once(
    allot: Allot, reachable: Path, inject: str
) -> None:
    # In a folder for all users a share's files are its creator's.
    reachable.chmod(0o1777 if inject == "namespace" else 0o755)
    words = ["--inject", inject, *by_setpriv(PYTHON, "-c", TWICE)]
    done = run_in(reachable, allot, words)
    assert done.stdout == f"{NOT_READY} {NOT_READY}\n"
    assert done.stderr.startswith(f"{TOLD}user {NOBODY} must not use the ledger of its share (")
    assert done.stderr.endswith("); as root, start it with `allot run --user NAME`\n")
    assert done.stderr.count("\n") == 1


def test_the_next_step_helps_in_a_folder_for_all_users(allot: Allot, reachable: Path) -> None:
    reachable.chmod(0o1777)
    done = run_in(reachable, allot, by_option(PYTHON, "-c", TWICE))
    assert (done.stdout, done.stderr) == ("0 0\n", "")


def test_another_user_is_outside_of_shares_beside_roots_own_folder() -> None:
    """It has the name of the folder of shares inside of containers, and is closed."""
    asked = (
        "import os; from allotment.shares.run.command import inside_share;"
        f" os.seteuid({NOBODY}); print(repr(inside_share()))"
    )
    steps = "mount -t tmpfs none /run && mkdir -m 700 /run/allotment && exec "
    steps += shlex.join([sys.executable, "-c", asked])
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", steps], capture_output=True, text=True, check=False
    )
    assert (done.stdout, done.stderr) == ("''\n", "")
