# SPDX-License-Identifier: Apache-2.0
"""A node of two simulated GPUs whose shares are pods', and the orders of its containers."""

from pathlib import Path

from allotment.devices.packing import read_machine
from allotment.devices.simulated import machine_path
from allotment.ledger import read_contract
from allotment.model.compute import Compute
from allotment.model.modes import SOFT
from allotment.model.pods import ContainerKind, Owner, PodUid
from allotment.model.quantities import parse_memory
from allotment.model.requests import Request
from allotment.model.shares import Injection, Share, ShareId
from allotment.shares import recovery
from allotment.shares.folders import StateFolder
from allotment.shares.placing import ShareOrder
from allotment.shares.pods import NodeFolders, NodePolicy, PodShares

GI = 1 << 30


class Node:
    """A node of two simulated T4, and orders of its pods."""

    def __init__(self, root: Path) -> None:
        self.folder = StateFolder(root / "state")
        self.machine = machine_path(root, "t4:2")
        self.devices = read_machine(self.machine).devices
        self.cdi = root / "cdi"
        self.shares = self.restarted()

    def restarted(self) -> PodShares:
        return PodShares(
            self.folder, machine=self.machine, spec="t4:2", folders=NodeFolders(cdi=self.cdi)
        )

    def prepare(self, order: ShareOrder) -> Share:
        return self.shares.prepare(order, NodePolicy(devices=self.devices))

    def specs(self) -> list[Path]:
        return sorted(self.cdi.iterdir()) if self.cdi.exists() else []

    def check(self) -> None:
        """Nothing is half there, and every seat is some share's."""
        assert [path.name for path in self.folder.shares.iterdir() if "-" in path.name] == []
        found = recovery.list_shares(self.folder)
        assert [each.problem for each in found] == [None] * len(found)
        seats = [
            (seat.share_id, path.name)
            for path in self.folder.devices.iterdir()
            for seat in read_contract(path / "contract").seats
        ]
        shares = [each.share for each in found if each.share]
        expected = [
            (share.id, device.uuid)
            for share in shares
            if share.mode == SOFT
            for device in share.devices
        ]
        assert sorted(seats) == sorted(expected)
        specs = [Path(share.cdi_spec) for share in shares if share.cdi_spec]
        assert self.specs() == sorted(specs)
        for spec in specs:
            share = spec.name.removeprefix("allotment.dev-share-").removesuffix(".json")
            assert spec.read_bytes() == (self.folder.shares / share / "cdi.json").read_bytes()


def owner(
    container: str = "train",
    *,
    pod: str = "one",
    kind: ContainerKind = ContainerKind.REGULAR,
    place: int | None = None,
) -> Owner:
    return Owner(
        uid=PodUid(f"uid-{pod}"),
        namespace="lab",
        pod=pod,
        container=container,
        kind=kind,
        resource="allotment.dev/gpu",
        place=place,
    )


def order(
    number: int = 1,
    memory: str = "4Gi",
    *,
    whose: Owner | None = None,
    request: Request | None = None,
    guarantee: int = 0,
    injection: Injection = Injection.CDI,
    devices: tuple[str, ...] = (),
    candidates: frozenset[str] | None = None,
) -> ShareOrder:
    compute = Compute(guarantee * 100, is_governed=guarantee > 0)
    return ShareOrder(
        request or Request(parse_memory(memory), compute=compute),
        injection,
        id=ShareId(f"{number:012x}"),
        owner=whose or owner(pod=f"pod-{number}"),
        devices=devices,
        candidates=candidates,
    )


def in_force(node: Node, share: Share) -> int:
    (device,) = share.devices
    contract = read_contract(node.folder.devices / device.uuid / "contract")
    (found,) = [each for each in contract.seats if each.share_id == share.id]
    return found.terms.compute.guarantee // 100


def pair() -> tuple[ShareOrder, ShareOrder]:
    """An init container's order, and that of the one that follows it on the same device."""
    init = owner("fetch", kind=ContainerKind.INIT, place=0)
    return (
        order(1, "12Gi", whose=init, guarantee=80),
        order(2, "10Gi", whose=owner("train", place=1), guarantee=60),
    )
