# SPDX-License-Identifier: Apache-2.0
"""What `allot agent` refuses before it starts anything."""

from __future__ import annotations

import subprocess
import sys

import pytest
from click.testing import CliRunner

from allotment.cli import main

_MAIN = "import sys; from allotment.cli import main; sys.exit(main())"
_WHY = "is not a valid name of a Kubernetes node"


@pytest.mark.parametrize("name", ["Bad_Name!", "N1", "-n", "n.", "a..b", "a" * 64, "n\n"])
def test_a_name_that_no_node_can_have_is_refused(name: str) -> None:
    done = CliRunner().invoke(main, ["agent", f"--node-name={name}"])
    assert done.exit_code == 2
    assert _WHY in done.stderr
    assert "--node-name" in done.stderr


def test_a_refusal_is_the_processs_own_end() -> None:
    command = [sys.executable, "-c", _MAIN, "agent", "--node-name=N1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert _WHY in done.stderr
    assert "Traceback" not in done.stderr
