# SPDX-License-Identifier: Apache-2.0
"""The metrics of use of real programs, beside what `allot ps` shows."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from patience import wait_until

from allotment.agent.inventory import Sighting
from allotment.agent.node_state import NodeState
from allotment.agent.usage import UseReader, shares_in
from allotment.devices.simulated import SimulatedMachine
from allotment.devices.watching import NvmlSession, Report
from allotment.metrics.use import ShareUse, Use, bounded
from allotment.shares.folders import StateFolder

pytestmark = pytest.mark.usefixtures("native_dir")

Allot = Any  # tests/conftest.py: CommandLine
SPEC = "a100-80gb"
GI = 1 << 30


class _Session:
    """A driver that is asked without a watch around it."""

    def __init__(self, machine: Path) -> None:
        self.session = NvmlSession(machine)
        self.devices = SimulatedMachine(machine).devices()

    def subscribe(self, observer: Callable[[str, Sighting], None]) -> None:
        pass

    def reports(self, *, patience_s: float) -> Mapping[str, Report]:
        assert patience_s
        found = {each.uuid: self.session.report(each.index) for each in self.devices}
        return {uuid: each for uuid, each in found.items() if isinstance(each, Report)}


@contextmanager
def reader(state: Path) -> Iterator[Callable[[], Use]]:
    """Read the shares of a state folder, as an agent of this machine does."""
    (path,) = state.glob("simulated/*/machine")
    driver = _Session(path)
    driver.session.open()
    try:
        made = UseReader(
            node="n1",
            gpus=driver,
            state=NodeState(devices={each.uuid: each for each in driver.devices}),
            shares=shares_in(StateFolder(state), path),
            patience_s=50,
            clock=iter(range(10**6)).__next__,
        )
        yield lambda: bounded(made.read())
    finally:
        driver.session.close()


def burning(allot: Allot, *words: str) -> subprocess.Popen[bytes]:
    burn = (sys.executable, "-m", "allotment", "burn", "--seconds", "600", "-o", "json")
    return subprocess.Popen(
        [*allot.command("run", "--simulated", SPEC, *words), "--", *burn, "--memory", "2Gi"],
        env=allot.environment(),
        stdout=subprocess.DEVNULL,
    )


def test_a_scrape_shows_what_ps_shows(allot: Allot) -> None:
    programs = [
        burning(allot, "--name", name, "--memory", memory, "--compute", compute)
        for name, memory, compute in (("one", "4Gi", "30:60"), ("two", "6Gi", "50"))
    ]

    def listed() -> dict[str, Any]:
        document = json.loads(allot("ps", "-o", "json").stdout)
        return {each["id"]: each["devices"][0] for each in document["shares"]}

    try:
        wait_until(
            lambda: sum(each["memory_used_bytes"] >= 2 * GI for each in listed().values()) == 2,
        )
        with reader(allot.state) as read:
            first, before = read(), listed()
            wait_until(
                lambda: all(
                    (each["compute"]["gpu_seconds"] or 0)
                    > (before[share]["compute"]["gpu_seconds"] or 0)
                    for share, each in listed().items()
                )
            )
            use, after = read(), listed()
    finally:
        for each in programs:
            each.terminate()
            each.wait()
    assert use.are_shares_read
    (gpu,) = use.gpus
    assert gpu.memory_used is not None
    assert sum(each.memory_used or 0 for each in use.shares) <= gpu.memory_used
    assert gpu.memory_allocated == 10 * GI
    assert gpu.guaranteed == pytest.approx(0.8)
    earlier = {each.share: each for each in first.shares}
    for share in use.shares:
        shown = after[share.share]
        assert share.memory_used == shown["memory_used_bytes"]
        assert share.memory_limit == shown["memory_limit_bytes"]
        assert share.memory_peak == shown["memory_peak_bytes"]
        assert share.is_enforced
        assert before[share.share]["compute"]["gpu_seconds"] <= seconds(share)
        assert seconds(earlier[share.share]) < seconds(share)
        assert seconds(share) <= shown["compute"]["gpu_seconds"]
        assert sum(share.waits) > 0
        assert share.turns
    assert {each.ceiling for each in use.shares} == {0.6, 0.5}


def seconds(share: ShareUse) -> float:
    assert share.gpu_ns is not None
    return share.gpu_ns / 1e9
