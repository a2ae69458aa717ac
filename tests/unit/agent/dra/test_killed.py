# SPDX-License-Identifier: Apache-2.0
"""The agent is killed at any step of a claim's preparation and release, or the step fails.

On real folders. The next call completes it: nothing is booked twice, and after the release nothing
is left.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from killing import killed_at
from kubelet_twin import KubeletTwin, PodsTwin, ReportsTwin
from mig_node import Node as MigNode
from pod_node import GI, Node

from allotment.agent.allocation import Patience, Tenants
from allotment.agent.evictions import Evictions
from allotment.agent.resources import Offer
from allotment.model.compute import Compute
from allotment.model.errors import StateError
from allotment.model.mig import MigPlace
from allotment.model.modes import EXCLUSIVE, MIG
from allotment.model.pods import ContainerKind, Owner, PodUid
from allotment.model.quantities import parse_memory
from allotment.model.requests import Request, whole_devices
from allotment.model.shares import Injection, ShareId
from allotment.shares.booking import booked
from allotment.shares.cdi import spec_name
from allotment.shares.placing import ShareOrder
from allotment.shares.pods import NodeFolders, NodePolicy, PodShares
from allotment.shares.recovery import list_shares

CLAIM = PodUid("11111111-2222-3333-4444-555555555555")
HASTE = Patience(deadline=20, pod=0.05, room=(0.0,), departure=(), look=0.05)
MAKING = (
    "prepare.begun",
    "create.placed",
    "create.drafted",
    "create.enforced",
    "create.filled",
    "create.recorded",
    "create.shown",
    "prepare.made",
    "publish.drafted",
    "publish.shown",
    "tenancy.prepared",
)
ENDING = (
    "tenancy.ending",
    "end.begun",
    "remove.unpublished",
    "remove.hidden",
    "remove.freed",
    "remove.cleared",
    "tenancy.ended",
)
CUTTING = ("mig.cut", "mig.claimed", "prepare.sliced", "publish.drafted")


def owner(request: str) -> Owner:
    return Owner(
        uid=CLAIM,
        namespace="lab",
        pod="mine",
        container=request,
        kind=ContainerKind.REGULAR,
        resource="gpu.allotment.dev",
        is_claim=True,
    )


def order(number: int, wanted: Request, *uuids: str, **fields: Any) -> ShareOrder:  # noqa: ANN401
    return ShareOrder(
        wanted,
        Injection.CDI,
        id=ShareId(f"{number:012x}"),
        owner=owner(f"request-{number}"),
        devices=uuids,
        candidates=uuids,
        **fields,
    )


def orders(node: Node) -> Sequence[ShareOrder]:
    """Two parts of a GPU, and a whole one."""
    first, second = (each.uuid for each in node.devices)
    return [
        order(
            1, Request(parse_memory("4Gi"), compute=Compute(3000, 3000, is_governed=True)), first
        ),
        order(2, Request(parse_memory("2Gi")), first),
        order(3, whole_devices(1, mode=EXCLUSIVE), second),
    ]


def agent(node: Node, shares: PodShares | None = None) -> Tenants:
    """The agent that starts next."""
    pods, reports = PodsTwin(), ReportsTwin()
    pods.is_synced = True
    shares = shares or node.restarted()
    shares.tidy()
    return Tenants(
        checkpoint=KubeletTwin(),
        pods=pods,
        evictions=Evictions(pods=pods, reports=reports),
        offer=Offer,
        reports=reports,
        store=shares,
        policy=lambda _: NodePolicy(devices=node.devices),
        patience=HASTE,
    )


def told(tenants: Callable[[], Tenants], *calls: Callable[[Tenants], Awaitable[object]]) -> None:
    """What an agent does from its start on."""

    async def main() -> None:
        running = tenants()
        await running.adopt()
        try:
            for call in calls:
                await call(running)
        finally:
            await running.close()

    asyncio.run(main())


async def release(tenants: Tenants) -> None:
    await tenants.release_claim(CLAIM)


@pytest.fixture
def node(tmp_path: Path, native_dir: Path) -> Node:
    assert native_dir.is_dir()
    return Node(tmp_path)


def preparing(wanted: Sequence[ShareOrder]) -> Callable[[Tenants], Awaitable[object]]:
    return lambda tenants: tenants.prepare_claim(CLAIM, wanted)


def check_made(node: Node) -> None:
    node.check()
    found = list_shares(node.folder)
    assert [each.id for each in found] == [f"{number:012x}" for number in (1, 2, 3)]
    first, second = (each.uuid for each in node.devices)
    bookings = booked(found)
    assert (bookings[first].memory, bookings[first].guaranteed) == (6 * GI, 3000)
    assert bookings[second].shares == 1


def check_gone(node: Node) -> None:
    node.check()
    assert list_shares(node.folder) == []
    assert node.specs() == []


@pytest.mark.parametrize("passed", [1, 3])
@pytest.mark.parametrize("point", MAKING)
def test_killed_while_a_claim_is_prepared(node: Node, point: str, passed: int) -> None:
    """At its first share, and at its last one, a whole GPU."""
    wanted = orders(node)
    assert killed_at(f"{point}:{passed}", lambda: told(lambda: agent(node), preparing(wanted)))
    told(lambda: agent(node), preparing(wanted), preparing(wanted))
    check_made(node)
    told(lambda: agent(node), release, release)
    check_gone(node)


@pytest.mark.parametrize("point", ["create.drafted", "create.shown", "publish.drafted"])
def test_killed_while_a_claim_is_prepared_that_is_never_asked_for_again(
    node: Node, point: str
) -> None:
    wanted = orders(node)
    assert killed_at(point, lambda: told(lambda: agent(node), preparing(wanted)))
    told(lambda: agent(node), release)
    check_gone(node)


@pytest.mark.parametrize("passed", [1, 3])
@pytest.mark.parametrize("point", ENDING)
def test_killed_while_a_claim_is_released(node: Node, point: str, passed: int) -> None:
    wanted = orders(node)
    told(lambda: agent(node), preparing(wanted))
    assert killed_at(f"{point}:{passed}", lambda: told(lambda: agent(node), release))
    told(lambda: agent(node), release)
    check_gone(node)


def without_folder(node: Node) -> Path:
    """Give the CDI folder's name to a file."""
    node.cdi.touch()
    return node.cdi


def without_the_last(node: Node) -> Path:
    """Let the spec of the last share fail once, as where the disk becomes full."""
    node.cdi.mkdir()
    draft = node.cdi / f".{spec_name(ShareId(f'{3:012x}'))}.new"
    draft.symlink_to(node.cdi / "absent" / "draft")
    return draft


@pytest.mark.parametrize("spoil", [without_folder, without_the_last])
def test_a_claim_whose_cdi_spec_cannot_be_written_has_no_share_until_it_can(
    node: Node, spoil: Callable[[Node], Path]
) -> None:
    obstacle = spoil(node)

    async def refused(tenants: Tenants) -> None:
        with pytest.raises(StateError, match=r"cannot write the CDI spec: .* directory"):
            await tenants.prepare_claim(CLAIM, orders(node))
        obstacle.unlink(missing_ok=True)
        check_gone(node)

    told(lambda: agent(node), refused, preparing(orders(node)))
    check_made(node)


class Stuck(PodShares):
    """Cannot end one share, as where the CDI folder becomes read-only."""

    def __init__(self, node: Node, stuck: ShareId) -> None:
        super().__init__(node.folder, machine=node.machine, folders=NodeFolders(cdi=node.cdi))
        self.stuck: ShareId | None = stuck

    def end(self, share: ShareId) -> None:
        if share == self.stuck:
            raise StateError("cannot remove the CDI spec: Read-only file system")
        super().end(share)


def test_a_release_ends_the_shares_that_can_be_ended(node: Node) -> None:
    wanted = orders(node)
    store = Stuck(node, wanted[0].id)

    async def story(tenants: Tenants) -> None:
        with pytest.raises(StateError, match="Read-only file system"):
            await tenants.release_claim(CLAIM)
        assert [each.id for each in list_shares(node.folder)] == [wanted[0].id]

    told(lambda: agent(node, store), preparing(wanted), story)


def test_a_share_that_cannot_be_ended_hides_neither_the_reason_nor_the_other_shares(
    node: Node,
) -> None:
    """The claim's release ends it."""
    wanted = orders(node)
    without_the_last(node)
    store = Stuck(node, wanted[0].id)

    async def story(tenants: Tenants) -> None:
        with pytest.raises(StateError, match="No such file or directory"):
            await tenants.prepare_claim(CLAIM, wanted)
        assert [each.id for each in list_shares(node.folder)] == [wanted[0].id]
        store.stuck = None

    told(lambda: agent(node, store), story, release)
    check_gone(node)


@pytest.mark.parametrize("point", CUTTING)
def test_killed_while_a_slice_is_cut(tmp_path: Path, native_dir: Path, point: str) -> None:
    assert native_dir.is_dir()
    node = MigNode(tmp_path)
    place = MigPlace("1g.10gb", 2)
    request = Request(parse_memory("1Mi"), mode=MIG, mig_profile=place.profile)
    wanted = [order(1, request, node.uuids[0], slices=(place,))]

    def again() -> Tenants:
        node.start_agent()
        return node.tenants

    assert killed_at(point, lambda: told(again, preparing(wanted)))
    told(again, preparing(wanted), preparing(wanted))
    assert node.there() == [("1g.10gb", 2)], "no second slice was cut"
    (share,) = list_shares(node.folder)
    assert share.share is not None
    assert node.spec_of(share.id).exists()
    told(again, release)
    assert list_shares(node.folder) == []
    assert not node.spec_of(share.id).exists()
