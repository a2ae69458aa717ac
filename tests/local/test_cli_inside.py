# SPDX-License-Identifier: Apache-2.0
"""The commands inside of a share: no others to be seen, none changed, and no crash."""

import json
import subprocess
from typing import Any

import pytest

from allotment.shares.run.namespace import can_unshare

Allot = Any  # tests/conftest.py: CommandLine
GI = 1 << 30
NO_SHARES = "No shares are visible from inside a share."

both = pytest.mark.parametrize(
    "inject",
    [
        pytest.param(
            "namespace",
            marks=pytest.mark.skipif(not can_unshare(), reason="needs CAP_SYS_ADMIN"),
        ),
        "environment",
    ],
)


def inside(allot: Allot, inject: str, *words: str) -> "subprocess.CompletedProcess[str]":
    """Run an `allot` command in a share of 1 GiB of a simulated T4."""
    run = ("run", "--simulated", "t4", "--memory", "1Gi", "--inject", inject, "--")
    done: subprocess.CompletedProcess[str] = allot(*run, *allot.command(*words))
    assert done.returncode == 0, done.stderr
    return done


@both
def test_ps_says_that_no_shares_can_be_seen(allot: Allot, inject: str) -> None:
    done = inside(allot, inject, "ps")
    assert (done.stdout, done.stderr) == ("", f"{NO_SHARES}\n")
    assert json.loads(inside(allot, inject, "ps", "-o", "json").stdout)["shares"] == []


@both
@pytest.mark.parametrize("words", [(), ("--simulated", "t4")])
def test_devices_shows_the_shares_part(allot: Allot, inject: str, words: tuple[str, ...]) -> None:
    done = inside(allot, inject, "devices", *words, "-o", "json")
    (device,) = json.loads(done.stdout)["devices"]
    assert device["memory_total_bytes"] == GI
    assert device["simulated"] is True
    assert device["memory_used_bytes"] == 0


@both
def test_top_shows_the_part_and_says_that_no_shares_can_be_seen(allot: Allot, inject: str) -> None:
    done = inside(allot, inject, "top", "--once")
    assert NO_SHARES in done.stdout
    assert "1 GPU," in done.stdout
    assert json.loads(inside(allot, inject, "top", "-o", "json").stdout)["shares"] == []


@both
@pytest.mark.parametrize(
    "words",
    [
        ("resize", "own", "--memory", "8Gi"),
        ("rm", "own", "--force"),
        ("cdi", "rm", "own", "--force"),
        ("suspend", "own"),
        ("resume", "own"),
    ],
)
def test_no_share_is_changed_from_inside_of_one(
    allot: Allot, inject: str, words: tuple[str, ...]
) -> None:
    run = ("run", "--simulated", "t4", "--memory", "1Gi", "--name", "own", "--inject", inject, "--")
    state = ("--state", str(allot.state))
    done = allot(*run, *allot.command(*words, *state))
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert "not changed from inside of one" in done.stderr
    assert "outside of every share: allot " in done.stderr
