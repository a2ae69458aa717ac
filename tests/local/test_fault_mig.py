# SPDX-License-Identifier: Apache-2.0
"""`allot fault` with a GPU's MIG calls, and as the one that resets it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

Allot = Callable[..., Any]
SPEC = ("fault", "--simulated", "a100-40gb:2")


def test_mig_calls_are_broken_and_mended(allot: Allot) -> None:
    broken = allot(
        *SPEC, "--mig-slow", "create-gpu=2s", "--mig-error", "create-compute=23", "--reset"
    )
    assert broken.returncode == 0, broken.stderr
    assert broken.stdout.count(": create-gpu is delayed by 2s\n") == 2
    assert broken.stdout.count(": create-compute fails with 23\n") == 2
    kept = allot(*SPEC, "--mig-slow", "create-compute=1s", "--mig-error", "create-gpu=0")
    assert kept.stdout.count(": create-compute fails with 23\n") == 2
    assert "create-" not in allot(*SPEC, "--clear").stdout


def test_a_reset_begins_the_counters_anew(allot: Allot) -> None:
    counters = ("ecc_volatile_uncorrected", "ecc_volatile_corrected", "ecc_aggregate_corrected")
    broken = allot(*SPEC, *(word for name in counters for word in ("--counter", f"{name}=5")))
    assert broken.stdout.count("=5") == 6, broken.stderr
    shown = allot(*SPEC, "--reset").stdout
    assert shown.count("ecc_aggregate_corrected=5") == 2
    assert shown.count("=5") == 2
    assert shown.count(" 48 ") == 2


def test_clear_leaves_nothing_to_show(allot: Allot) -> None:
    allot(*SPEC, "--xid", "43", "--lost", "--counter", "ecc_volatile_uncorrected=1")
    heading, *rows = allot(*SPEC, "--clear").stdout.splitlines()
    assert heading.split() == ["GPU", "LOST", "HANG", "XIDS", "COUNTERS"]
    assert [row.split()[1:] for row in rows] == [["no", "no", "none", "none"]] * 2


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        pytest.param(("--mig-slow", "nonsense=2s"), "calls: set-mode, create-gpu", id="call"),
        pytest.param(("--mig-slow", "reset"), "is not CALL=VALUE", id="no value"),
        pytest.param(("--mig-slow", "reset=soon"), "soon", id="time"),
        pytest.param(("--release", "soon"), "soon", id="release"),
        pytest.param(("--mig-error", "reset=-1"), "nvmlReturn_t", id="error"),
    ],
)
def test_nonsense_is_refused(arguments: tuple[str, str], said: str, allot: Allot) -> None:
    refused = allot(*SPEC, *arguments)
    assert refused.returncode == 2
    assert said in refused.stderr
    assert arguments[0] in refused.stderr
