# SPDX-License-Identifier: Apache-2.0
"""Pods' shares get other amounts while their containers run."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from killing import kill_after
from pod_node import GI, Node, in_force, order, pair

from allotment.model.compute import Compute, ComputeClass
from allotment.model.errors import DoesNotFitError, LimitBelowUseError, NotInModeError
from allotment.model.modes import MPS
from allotment.model.quantities import parse_memory
from allotment.model.requests import Request
from allotment.model.shares import Share
from allotment.model.structs import replace
from allotment.shares.lifecycle import find
from allotment.shares.pods import NodePolicy
from allotment.shares.record import LoadedShare

Hold = Callable[[Path], AbstractContextManager[subprocess.Popen[bytes]]]


def asked(memory: str, compute: Compute | None = None) -> Request:
    return Request(parse_memory(memory), compute=compute or Compute())


def resized(node: Node, share: Share, request: Request) -> Share:
    return node.shares.resize(share.id, request, NodePolicy(devices=node.devices))


def test_a_share_has_what_its_pod_asks_for_and_forgets_nothing(node: Node) -> None:
    share = node.prepare(order(1, "4Gi", guarantee=30))
    compute = Compute(5000, 8000, kind=ComputeClass.LATENCY, is_governed=True)
    for _ in range(2):
        changed = resized(node, share, asked("10Gi", compute))
        (device,) = changed.devices
        assert (device.memory_bytes, device.compute) == (10 * GI, compute)
        assert changed.is_resized
        assert in_force(node, changed) == 50
        node.check()
    assert find(node.folder, share.id).limits() == {device.uuid: 10 * GI}
    assert node.restarted().owned() == (changed,)
    back = resized(node, share, asked("4Gi", Compute(3000, is_governed=True)))
    assert back.devices[0].memory_bytes == 4 * GI
    assert in_force(node, back) == 30


def test_what_does_not_fit_beside_the_others_changes_nothing(node: Node) -> None:
    first = node.prepare(order(1, "4Gi", guarantee=30))
    (device,) = first.devices
    node.prepare(order(2, "8Gi", guarantee=50, devices=(device.uuid,)))
    with pytest.raises(DoesNotFitError, match=r"need 8Gi, have 6\.\d+Gi beside the other shares"):
        resized(node, first, asked("8Gi", Compute(3000, is_governed=True)))
    with pytest.raises(DoesNotFitError, match="need 60 % of compute, have 50 %"):
        resized(node, first, asked("4Gi", Compute(6000, is_governed=True)))
    assert node.shares.owned()[0].devices == first.devices
    assert in_force(node, first) == 30
    node.check()


def test_memory_in_use_is_refused_with_the_next_step_of_a_pod_s_author(
    node: Node, hold: Hold
) -> None:
    share = node.prepare(order(1, "4Gi"))
    with (
        hold(node.folder.share(share.id)),
        pytest.raises(LimitBelowUseError, match="3Gi") as caught,
    ):
        resized(node, share, asked("2Gi"))
    assert caught.value.hint == caught.value.hint_for_pod()
    assert limit_of(find(node.folder, share.id)) == 4 * GI


def limit_of(found: LoadedShare) -> int:
    assert found.ledger is not None
    (device,) = found.ledger.policy.devices
    return device.memory_limit


def test_a_killed_resize_is_carried_out_by_the_next_agent(node: Node) -> None:
    """Whatever was in force when it was killed, is booked."""
    share = node.prepare(order(1, "4Gi", guarantee=30))
    small = asked("4Gi", Compute(3000, is_governed=True))
    large = asked("10Gi", Compute(6000, is_governed=True))
    kills = {"4Gi": 0, "10Gi": 0}
    for request in (large, small):
        key, steps = request.memory.text, 0
        while kill_after(steps, node.folder.root, lambda: resized(node, share, request)):  # noqa: B023
            found = find(node.folder, share.id)
            assert found.share is not None
            (booked,) = found.share.devices
            assert booked.memory_bytes >= limit_of(found)
            assert booked.compute.guarantee >= in_force(node, share) * 100
            node.shares = node.restarted()
            (done,) = resized(node, share, request).devices
            assert done.memory_bytes == limit_of(find(node.folder, share.id))
            assert in_force(node, share) == request.compute.guarantee // 100
            node.check()
            resized(node, share, small if request is large else large)
            steps += 1
        kills[key] = steps
    assert min(kills.values()) >= 4  # the record is written before and after the ledger


def test_mps_fixes_compute(node: Node) -> None:
    request = Request(parse_memory("4Gi"), mode=MPS)
    share = node.prepare(order(1, request=request))
    assert resized(node, share, replace(request, memory=parse_memory("2Gi"))).devices[
        0
    ].memory_bytes == (2 * GI)
    with pytest.raises(NotInModeError, match="compute of programs that run cannot be changed"):
        resized(node, share, replace(request, compute=Compute(0, 5000, is_governed=True)))


def test_containers_that_run_in_turn_keep_their_guarantees(node: Node) -> None:
    """The guarantee of the first one is booked, and not in force while the second one has it."""
    first, second = pair()
    init, train = node.prepare(first), node.prepare(second)
    (device,) = init.devices
    assert (in_force(node, init), in_force(node, train)) == (0, 60)
    changed = resized(node, init, asked("13Gi", device.compute))
    assert changed.devices[0].compute == device.compute
    assert changed.devices[0].memory_bytes == 13 * GI
    assert (in_force(node, init), in_force(node, train)) == (0, 60)
    node.check()
    more = resized(node, init, asked("13Gi", replace(device.compute, guarantee=9000)))
    assert more.devices[0].compute.guarantee == 9000
    assert (in_force(node, init), in_force(node, train)) == (0, 60)
    node.check()
