# SPDX-License-Identifier: Apache-2.0
"""What `allot agent` refuses before it starts anything."""

from __future__ import annotations

import subprocess
import sys

import pytest

_MAIN = "import sys; from allotment.cli import main; sys.exit(main())"


@pytest.mark.parametrize("name", ["Bad_Name!", "N1", "-n", "n.", "a..b", "a" * 64, "n\n"])
def test_a_name_that_no_node_can_have_is_refused(name: str) -> None:
    command = [sys.executable, "-c", _MAIN, "agent", f"--node-name={name}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "cannot be the name of a Kubernetes node" in done.stderr
    assert "--node-name" in done.stderr
