# SPDX-License-Identifier: Apache-2.0
"""`allot events`: what the commands did, in their order."""

import json
import subprocess
from pathlib import Path
from typing import Any

from patience import wait_until

Allot = Any  # tests/conftest.py: CommandLine


def test_commands_leave_events(allot: Allot, tmp_path: Path) -> None:
    shown = tmp_path / "followed"
    with shown.open("w") as output:
        follower = subprocess.Popen(
            allot.command("events", "-f"), stdout=output, env=allot.environment()
        )
    try:
        share = ["--simulated", "t4", "--memory", "2Gi", "--name", "job"]
        with subprocess.Popen(
            allot.command("run", *share, "--", "cat"),
            stdin=subprocess.PIPE,
            env=allot.environment(),
        ) as job:
            wait_until(lambda: "job" in allot("ps", "-o", "name").stdout)
            assert allot("run", *share[:2], "--memory", "14Gi", "--", "true").returncode == 3
            for words in (["suspend"], ["resume"], ["resize", "--memory", "3Gi"]):
                done = allot(words[0], "job", *words[1:])
                assert done.returncode == 0, done.stderr
            job.communicate()
        wait_until(lambda: " ended " in shown.read_text())
    finally:
        follower.terminate()
        follower.wait()
    rows = [line.split(maxsplit=3) for line in shown.read_text().splitlines()]
    kinds = ["created", "refused", "suspended", "resumed", "resized", "ended"]
    assert [row[1] for row in rows] == kinds
    assert "need 14Gi, have" in rows[1][3]
    own = [json.loads(line) for line in allot("events", "job", "-o", "json").stdout.splitlines()]
    assert [each["kind"] for each in own] == [kind for kind in kinds if kind != "refused"]
    assert {key for each in own for key in each} == {"time", "kind", "share", "id", "text"}
    assert len({each["id"] for each in own}) == 1
    assert own[-2]["text"].startswith("3Gi of GPU-")
    assert allot("events", "nosuch").stderr == "no events of share 'nosuch'\n"
