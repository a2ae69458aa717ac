# SPDX-License-Identifier: Apache-2.0
"""What `allot run --mode mps` and `allot resize` take, and what they refuse rather than ignore."""

import subprocess
from typing import Any

import pytest

from allotment.model.errors import UsageError

Allot = Any  # tests/conftest.py: CommandLine
SPEC = ("--simulated", "a100-80gb")


@pytest.mark.parametrize(
    "option", [("--weight", "200"), ("--class", "latency"), ("--weight", "100")], ids=" ".join
)
def test_what_is_of_turns_is_refused(allot: Allot, option: tuple[str, str]) -> None:
    done: subprocess.CompletedProcess[str] = allot(
        "run", *SPEC, "--mode", "mps", "--memory", "1Gi", *option, "--", "true"
    )
    assert done.returncode == UsageError.exit_code
    assert "programs in mode mps take no turns" in done.stderr
    assert "hint: remove them" in done.stderr
    assert "No shares" in allot("ps").stderr
