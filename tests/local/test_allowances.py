# SPDX-License-Identifier: Apache-2.0
"""`/etc/allotment/config.yaml` as the commands obey it: root starts shares of two users."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from allotment.shares.run.namespace import can_unshare

Allot = Any  # tests/conftest.py: CommandLine
CONFIG = """\
version: v1
everyone:
  share: {memory: 20Gi, compute: 10:50}
  ceilings: {memory: 40Gi, compute: 30:60, shares: 2, oversubscribe: false}
users:
  daemon:
    share: {memory: 10Gi}
    ceilings: {memory: 15Gi}
"""
RUN = ("run", "--simulated", "a100-80gb")

pytestmark = pytest.mark.skipif(not can_unshare(), reason="needs CAP_SYS_ADMIN")

Call = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def call(allot: Allot, tmp_path: Path) -> Call:
    """Runs `allot` where /etc is a copy with a configuration: `call(text, "run", ...)`."""
    etc = tmp_path / "etc"
    subprocess.run(["cp", "-a", "/etc", etc], check=True)
    (etc / "allotment").mkdir(mode=0o755, exist_ok=True)

    def run(text: str, *arguments: str, script: str = "") -> "subprocess.CompletedProcess[str]":
        (etc / "allotment" / "config.yaml").write_text(text, "utf-8")
        return subprocess.run(
            ["unshare", "--mount", "sh", "-c", f'mount --bind "$0" /etc && {script} exec "$@"', etc,
             *allot.command(*arguments)],
            env=allot.environment(), capture_output=True, text=True, check=False, timeout=100,
        )  # fmt: skip

    return run


def listed(done: "subprocess.CompletedProcess[str]") -> list[dict[str, Any]]:
    assert done.returncode == 0, done.stderr
    found: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])["shares"]
    return found


def test_each_user_gets_its_own_share_without_options(call: Call, allot: Allot) -> None:
    show = [*allot.command("ps", "-o", "json")]
    for user, memory in (("daemon", 10), ("nobody", 20)):
        held = f"{' '.join(allot.command(*RUN))} --user {user} -- sleep 8 & sleep 3;"
        done = call(CONFIG, "ps", "-o", "json", script=held)
        (share,) = [each for each in json.loads(done.stdout)["shares"] if each["state"] != "left"]
        (device,) = share["devices"]
        assert device["memory_limit_bytes"] == memory << 30, show
        call(CONFIG, "rm", "--force", share["id"])


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        (("--user", "daemon", "--memory", "16Gi"), 2, "need 16Gi, have 15Gi"),
        (("--user", "nobody", "--memory", "30Gi", "--compute", "30:90"), 2, "may have 60 %"),
        (("--user", "nobody", "--memory", "30Gi", "--oversubscribe"), 2, "may not have it"),
        (("--user", "nobody", "--memory", "40Gi"), 0, ""),
        (("--memory", "70Gi", "--compute", "90"), 0, ""),
    ],
)
def test_the_ceilings_are_those_of_the_share_s_user(
    call: Call, words: tuple[str, ...], status: int, said: str
) -> None:
    done = call(CONFIG, *RUN, *words, "--", "true")
    assert done.returncode == status, done.stderr
    assert said in done.stderr
    if status:
        assert "/etc/allotment/config.yaml, line " in done.stderr


def test_a_mistake_stops_commands_that_make_shares_and_no_others(call: Call) -> None:
    text = "version: v1\nusers:\n  nobody: {ceiling: {}}\n"
    done = call(text, *RUN, "--memory", "1Gi", "--", "true")
    assert done.returncode == 2
    assert "config.yaml, line 3: users.nobody.ceiling: unknown key" in done.stderr
    assert "hint: keys: share, ceilings" in done.stderr
    assert call(text, "ps").returncode == 0
    examined = call(text, "doctor", "-o", "json")
    assert examined.returncode == 8
    assert "line 3" in examined.stdout


def test_doctor_shows_ceilings_and_names_that_do_not_exist(call: Call) -> None:
    done = call(CONFIG.replace("daemon", "deamon"), "doctor")
    assert "ceilings of root (uid 0): none" in done.stdout
    assert "this machine has no user deamon" in done.stdout
