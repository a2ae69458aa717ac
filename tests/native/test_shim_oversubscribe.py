# SPDX-License-Identifier: Apache-2.0
"""Runs native/tests/shim/host_oversubscribe.c in shares whose memory may live on the host."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from allotment import ledger
from allotment.devices.packing import read_machine
from allotment.ledger import leases
from allotment.model.compute import Compute
from allotment.modes.turns import link_files
from shim_hosts import Share, ShimHosts, case_names

SANITIZED = ("address,undefined", "thread")
GIB = 1 << 30
LIMITS = {"more_than_the_device": 40 * GIB, "sets_take_turns": 3 * GIB}
#: Compares what was moved with what was computed: who is kept from computing moves more for it.
MEASURED = {"sets_take_turns"}
#: AddressSanitizer takes the stack of a cancelled thread for poisoned.
CANCELLED = {"cancelled_while_managed"}
#: How often a measured case is taken at most.
ROUNDS = 5
TURNS = {
    "sets_take_turns",
    "a_suspended_set_is_on_the_host",
    "a_set_is_used_while_contexts_are_made",
    "suspended_while_a_context_waits_for_memory",
}


def sit(folder: Path, directory: Path, uuid: str) -> leases.Seat:
    """Gives the share in `directory` turns on the device."""
    leases.create_device(folder, uuid)
    terms = leases.Terms(Compute(), is_oversubscribed=True)
    seat = leases.take(folder, "one", terms)
    link_files(folder.parent, folder.name, directory, 0, seat)
    return seat


def builds() -> list[object]:
    """The program in every build, and its measured cases by themselves."""
    found: list[object] = []
    for build in ("plain", *SANITIZED):
        thorough = [] if build == "plain" else [pytest.mark.thorough]
        found.append(pytest.param(build, False, id=build, marks=thorough))
        marks = [*thorough, pytest.mark.measured]
        found.append(pytest.param(build, True, id=f"{build}-measured", marks=marks))
    return found


@pytest.mark.parametrize(("build", "measured"), builds())
@pytest.mark.timeout(600)  # the first of a build compiles libraries and programs
def test_cases(
    build: str,
    *,
    measured: bool,
    machine: Callable[[str], Path],
    hosts_of: Callable[[str], ShimHosts],
    tmp_path: Path,
) -> None:
    def make_share(case: str) -> Share:
        path = machine("t4[memory=1474Mi]" if case in TURNS else "t4")
        return share_for(case, path.parent, path)

    hosts_of(build).expect_each(
        "host_oversubscribe",
        [
            case
            for case in case_names("host_oversubscribe")
            if (case in MEASURED) is measured
            and not (case in CANCELLED and build == "address,undefined")
        ],
        make_share,
        folder=tmp_path / "cases",
        rounds=ROUNDS if measured else 1,
    )


def share_for(case: str, folder: Path, path: Path) -> Share:
    """A share of the machine's GPU as the case wants it."""
    device = read_machine(path).devices[0]
    directory = folder / f"share-{case}"
    directory.mkdir()
    seat = None
    if case in TURNS:
        turns = folder / f"turns-{case}"
        turns.mkdir()
        seat = sit(turns, directory, device.uuid)
    one = ledger.DevicePolicy(
        uuid=device.uuid,
        memory_limit=LIMITS.get(case, GIB),
        context_bytes=device.context_bytes,
        seat=seat,
        is_oversubscribed=True,
    )
    ledger.create(directory, ledger.LedgerPolicy(share_id="one", share_name="one", devices=(one,)))
    return Share(directory, path, (device.uuid,))
