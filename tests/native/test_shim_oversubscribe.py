# SPDX-License-Identifier: Apache-2.0
"""Runs native/tests/shim/host_oversubscribe.c in shares whose memory may live on the host."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

import build_native
from allotment import ledger
from allotment.devices import simulated
from allotment.ledger import leases
from allotment.model.compute import Compute
from shim_hosts import Share

SOURCE = build_native.NATIVE / "tests" / "shim" / "host_oversubscribe.c"
CASES = re.findall(r'^    \{"(\w+)",', SOURCE.read_text(), re.MULTILINE)
GIB = 1 << 30
LIMITS = {"more_than_the_device": 40 * GIB, "sets_take_turns": 3 * GIB}
TURNS = {"sets_take_turns", "a_suspended_set_is_on_the_host"}


def sit(folder: Path, directory: Path, uuid: str) -> leases.Seat:
    """Gives the share in `directory` turns on the device."""
    leases.create_device(folder, uuid)
    terms = leases.Terms(Compute(), is_oversubscribed=True)
    seat = leases.take(folder, "one", terms)
    for name in ("contract", "leases"):
        os.link(folder / name, directory / f"{name}-0")
    return seat


@pytest.mark.parametrize("build", ["plain", "address,undefined", "thread"])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.timeout(300)  # the first of a build compiles libraries and programs
def test_case(
    case: str,
    build: str,
    *,
    machine: Callable[[str], Path],
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    if build == "plain":
        hosts = request.getfixturevalue("shim_hosts")
    else:
        hosts = request.getfixturevalue("sanitized_hosts")(build)
    path = machine("t4[memory=1474Mi]" if case in TURNS else "t4")
    device = simulated.read_machine(path).devices[0]
    directory = tmp_path / "share"
    directory.mkdir()
    one = ledger.DevicePolicy(
        uuid=device.uuid,
        memory_limit=LIMITS.get(case, GIB),
        context_bytes=device.context_bytes,
        seat=sit(tmp_path, directory, device.uuid) if case in TURNS else None,
        is_oversubscribed=True,
    )
    ledger.create(directory, ledger.Policy(share_id="one", share_name="one", devices=(one,)))
    hosts.expect("host_oversubscribe", case, Share(directory, path, (device.uuid,)), cwd=tmp_path)
