# SPDX-License-Identifier: Apache-2.0
"""Leading by a Lease: never two at once, whatever their clocks and the server do."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from allotment.kube.leases import LeaseCandidate, LeaseRecord, LeaseTimes

TIMES = LeaseTimes(lease_s=3, renew_s=1.0, margin_s=0.5)


def test_who_finds_no_lease_makes_it() -> None:
    one = LeaseCandidate("one", TIMES)
    assert one.wanted(now=0.0) is None  # it has not looked yet
    one.observe(LeaseRecord(), now=0.0)
    write = one.wanted(now=0.0)
    assert write is not None
    assert (write.record.holder, write.record.lease_s, write.is_new_holder) == ("one", 3, True)
    assert one.left_s(now=0.0) == 0
    one.written(write.record, began=0.0)
    assert one.left_s(now=0.0) == 2.5
    assert one.left_s(now=2.5) == 0


def test_a_follower_waits_as_long_as_the_lease_says_by_its_own_clock() -> None:
    two = LeaseCandidate("two", TIMES)
    held = LeaseRecord(holder="one", lease_s=10, version="5", transitions=4)
    two.observe(held, now=100.0)
    two.observe(held, now=105.0)  # nothing has changed since
    assert two.wanted(now=109.9) is None
    write = two.wanted(now=110.0)
    assert write is not None
    assert write.record.version == "5"
    assert write.record.transitions == 5
    two.observe(LeaseRecord(holder="one", lease_s=10, version="6"), now=110.0)  # renewed
    assert two.wanted(now=119.0) is None


def test_the_next_process_of_a_name_waits_for_the_lease_of_the_one_that_died() -> None:
    dead, alive = (LeaseCandidate.of_process("pod-0", TIMES) for _ in range(2))
    assert dead.identity.startswith("pod-0_")
    alive.observe(LeaseRecord(holder=dead.identity, lease_s=3, version="5"), now=1.0)
    assert alive.wanted(now=3.9) is None
    write = alive.wanted(now=4.0)
    assert write is not None
    assert (write.is_new_holder, write.record.transitions) == (True, 1)


def test_a_lease_that_was_given_up_is_free_at_once() -> None:
    two = LeaseCandidate("two", TIMES)
    two.observe(LeaseRecord(holder="", lease_s=1, version="9"), now=1.0)
    assert two.wanted(now=1.0) is not None
    assert two.wait_s(now=1.0) == TIMES.poll_s


def test_renewals_are_counted_from_before_they_were_asked_for() -> None:
    one = LeaseCandidate("one", TIMES)
    one.observe(LeaseRecord(), now=0.0)
    one.written(LeaseRecord(holder="one", lease_s=3, version="1"), began=10.0)
    assert one.wait_s(now=10.5) == 0.5
    assert one.left_s(now=12.4) > 0
    assert one.left_s(now=12.5) == 0
    one.observe(LeaseRecord(holder="two", lease_s=3, version="2"), now=12.6)
    assert one.left_s(now=12.6) == 0
    assert one.wanted(now=12.7) is None


@given(st.data())
def test_there_are_never_two_leaders(data: st.DataObject) -> None:
    """Three candidates whose clocks differ, requests that take long, answers that are lost."""
    offsets = {name: data.draw(st.floats(-1000, 1000)) for name in ("a", "b", "c")}
    them = {name: LeaseCandidate(name, TIMES) for name in offsets}
    server = LeaseRecord()
    version = 0
    now = 0.0
    for _ in range(data.draw(st.integers(1, 40))):
        now += data.draw(st.sampled_from([0.0, 0.1, 0.5, 1.0, 2.9, 3.0, 4.0]))
        name = data.draw(st.sampled_from(sorted(them)))
        each, ahead = them[name], offsets[name]
        if not each.left_s(now=now + ahead):
            each.observe(server, now=now + ahead)
        write = each.wanted(now=now + ahead)
        if write is not None:
            began = now
            now += data.draw(st.sampled_from([0.0, 0.2, 1.0, 2.0]))
            if write.record.version == server.version:
                version += 1
                server = LeaseRecord(
                    holder=write.record.holder,
                    lease_s=write.record.lease_s,
                    transitions=write.record.transitions,
                    version=str(version),
                )
                if data.draw(st.booleans()):
                    each.written(server, began=began + ahead)
            else:
                each.observe(server, now=now + ahead)
        leaders = [name for name, one in them.items() if one.left_s(now=now + offsets[name])]
        assert len(leaders) <= 1, leaders


def test_the_time_that_a_machine_sleeps_counts() -> None:
    # In a time namespace whose clock since the boot is a day ahead of the one that sleep stops.
    unshare = shutil.which("unshare")
    wrap = [str(unshare), "--user", "--map-root-user", "--time", "--boottime", "86400"]
    if unshare is None or subprocess.run([*wrap, "true"], check=False).returncode:
        pytest.skip("no time namespace can be made here")
    program = (
        "import inspect, time; from allotment.kube.leases import LeaseElection;"
        "clock = inspect.signature(LeaseElection).parameters['clock'].default;"
        "print(clock() - time.monotonic())"
    )
    ran = subprocess.run(
        [*wrap, sys.executable, "-c", program], check=True, capture_output=True, text=True
    )
    assert float(ran.stdout) > 86_000
