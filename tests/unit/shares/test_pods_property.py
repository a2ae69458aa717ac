# SPDX-License-Identifier: Apache-2.0
"""Pods come, start, restart, end and are cut off anywhere; whoever asks again finds all in order.

What fits is compared with Kubernetes' count of each pod, what is there with what was asked for, and
what is in force with what a device has.
"""

import atexit
import shutil
import tempfile
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from killing import kill_after

from allotment.devices.packing import read_machine
from allotment.devices.simulated import machine_path
from allotment.ledger import read_contract
from allotment.model.compute import WHOLE, Compute
from allotment.model.errors import DoesNotFitError
from allotment.model.pods import ContainerKind, Owner, PodUid
from allotment.model.quantities import MemoryAmount
from allotment.model.requests import Request
from allotment.model.shares import Injection, ShareId
from allotment.shares import booking, recovery
from allotment.shares.folders import StateFolder
from allotment.shares.placing import ShareOrder
from allotment.shares.pods import NodeFolders, NodePolicy, PodShares

GI = 1 << 30
INIT, SIDECAR, REGULAR = ContainerKind.INIT, ContainerKind.SIDECAR, ContainerKind.REGULAR
KINDS = (INIT, SIDECAR, INIT, REGULAR, REGULAR)
PODS = 3
AMOUNTS = st.lists(st.integers(1, 9), min_size=len(KINDS), max_size=len(KINDS))
PLACES = st.integers(0, len(KINDS) - 1)
MACHINE = Path(tempfile.mkdtemp())
atexit.register(shutil.rmtree, MACHINE, ignore_errors=True)


def counted(amounts: dict[int, int]) -> int:
    """What Kubernetes counts for the containers that are there, by their place."""
    sidecars = most = 0
    for place in sorted(amounts):
        if KINDS[place] is SIDECAR:
            sidecars += amounts[place]
            most = max(most, sidecars)
        elif KINDS[place] is INIT:
            most = max(most, sidecars + amounts[place])
    regular = sum(amount for place, amount in amounts.items() if KINDS[place] is REGULAR)
    return max(most, sidecars + regular)


class Pods(RuleBasedStateMachine):
    """A node with two T4 of 15 GiB; a pod's containers are all on one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp())
        self.folder = StateFolder(self.root / "state")
        self.folder.prepare()
        machine = machine_path(MACHINE, "t4:2")
        self.devices = read_machine(machine).devices
        self.shares = PodShares(
            self.folder, machine=machine, folders=NodeFolders(cdi=self.root / "cdi")
        )
        self.amounts: dict[int, list[int]] = {}
        """Of each pod that is there, what its containers ask for: so many GiB and times 7 %."""
        self.made: dict[int, set[int]] = {}
        """Which of them are known to have a share."""
        self.unsure: set[tuple[int, int]] = set()
        """Which were cut off while they got one, or lost it."""
        self.ready: set[ShareId] = set()
        """Whose container may start: nothing was cut off since it was told so."""
        self.serial: dict[int, int] = {}

    def teardown(self) -> None:
        shutil.rmtree(self.root)

    def id_of(self, pod: int, place: int) -> ShareId:
        return ShareId(f"{self.serial[pod] * 100 + pod * 10 + place:012x}")

    def order(self, pod: int, place: int) -> ShareOrder:
        amount = self.amounts[pod][place]
        owner = Owner(
            uid=PodUid(f"{pod}-{self.serial[pod]}"),
            namespace="lab",
            pod=f"pod-{pod}",
            container=f"c{place}",
            kind=KINDS[place],
            resource="allotment.dev/gpu",
            place=place,
        )
        compute = Compute(amount * 700, is_governed=True)
        return ShareOrder(
            Request(MemoryAmount(f"{amount}Gi", size_bytes=amount * GI), compute=compute),
            Injection.CDI,
            id=self.id_of(pod, place),
            owner=owner,
            devices=(self.devices[pod % 2].uuid,),
        )

    def fits(self, pod: int, place: int) -> bool:
        total = 0
        for other, amounts in self.amounts.items():
            if other % 2 == pod % 2:
                there = self.made[other] | ({place} if other == pod else set())
                total += counted({each: amounts[each] for each in there})
        whole = self.devices[0].allottable_bytes
        return total * GI <= whole and total * 700 <= WHOLE

    @precondition(lambda self: len(self.amounts) < PODS)
    @rule(amounts=AMOUNTS)
    def come(self, amounts: list[int]) -> None:
        pod = min(set(range(PODS)) - set(self.amounts))
        self.amounts[pod], self.made[pod] = amounts, set()
        self.serial[pod] = self.serial.get(pod, 0) + 1

    def settle_doubts(self, pod: int, place: int) -> None:
        """Finds out what became of what was cut off, except of one that is asked for now."""
        for doubt in self.unsure - {(pod, place)}:
            if self.folder.share(self.id_of(*doubt)).exists():
                self.made[doubt[0]].add(doubt[1])
            else:
                self.made[doubt[0]].discard(doubt[1])
        self.unsure &= {(pod, place)}

    @precondition(lambda self: self.amounts)
    @rule(data=st.data(), place=PLACES)
    def start(self, data: st.DataObject, place: int) -> None:
        pod = data.draw(st.sampled_from(sorted(self.amounts)))
        self.settle_doubts(pod, place)
        there = self.folder.share(self.id_of(pod, place)).exists()
        self.unsure.clear()
        try:
            share = self.shares.prepare(self.order(pod, place), NodePolicy(devices=self.devices))
        except DoesNotFitError:
            assert not there
            assert not self.fits(pod, place)
            self.made[pod].discard(place)
            return
        assert there or self.fits(pod, place)
        self.made[pod].add(place)
        assert share.id == self.id_of(pod, place)
        self.ready.add(share.id)
        assert share.devices[0].memory_bytes == self.amounts[pod][place] * GI
        (seat,) = [each for each in self.seats(pod) if each[0] == share.id]
        assert seat[1] == self.amounts[pod][place] * 700

    @precondition(lambda self: self.amounts)
    @rule(data=st.data(), place=PLACES, steps=st.integers(0, 40))
    def start_is_killed(self, data: st.DataObject, place: int, steps: int) -> None:
        pod = data.draw(st.sampled_from(sorted(self.amounts)))
        self.settle_doubts(pod, place)
        order = self.order(pod, place)
        kill_after(
            steps, self.root, lambda: self.shares.prepare(order, NodePolicy(devices=self.devices))
        )
        if place not in self.made[pod]:
            self.unsure.add((pod, place))

    @precondition(lambda self: any(self.made.values()))
    @rule(data=st.data(), steps=st.none() | st.integers(0, 12))
    def end(self, data: st.DataObject, steps: int | None) -> None:
        there = [(pod, place) for pod, places in self.made.items() for place in sorted(places)]
        pod, place = data.draw(st.sampled_from(sorted(there)))
        share = self.id_of(pod, place)
        self.ready.discard(share)
        if steps is None:
            self.shares.end(share)
            self.made[pod].discard(place)
            self.unsure.discard((pod, place))
            return
        kill_after(steps, self.root, lambda: self.shares.end(share))
        self.made[pod].discard(place)
        self.unsure.add((pod, place))

    @precondition(lambda self: self.amounts)
    @rule(data=st.data())
    def go(self, data: st.DataObject) -> None:
        """A pod is deleted, and all that may be there of it."""
        pod = data.draw(st.sampled_from(sorted(self.amounts)))
        for place in range(len(KINDS)):
            self.shares.end(self.id_of(pod, place))
            self.ready.discard(self.id_of(pod, place))
        self.unsure = {each for each in self.unsure if each[0] != pod}
        del self.amounts[pod], self.made[pod]

    @rule()
    def tidy(self) -> None:
        self.shares.tidy()
        self.settle_doubts(-1, -1)
        names = {share.id for share in self.shares.owned()}
        assert {path.name for path in self.folder.shares.iterdir()} == names
        seated = [share for pod in range(2) for share, _ in self.seats(pod)]
        assert sorted(seated) == sorted(names)
        cdi = self.root / "cdi"
        specs = {path.name for path in cdi.iterdir()} if cdi.exists() else set()
        assert specs <= {f"allotment.dev-share-{name}.json" for name in names}

    def seats(self, pod: int) -> list[tuple[str, int]]:
        path = self.folder.devices / self.devices[pod % 2].uuid / "contract"
        if not path.exists():
            return []
        return [(each.share_id, each.terms.compute.guarantee) for each in read_contract(path).seats]

    @invariant()
    def nobody_has_what_another_has(self) -> None:
        found = {each.id: each for each in recovery.list_shares(self.folder)}
        sure = {self.id_of(pod, place) for pod, places in self.made.items() for place in places}
        doubted = {self.id_of(*each) for each in self.unsure}
        assert sure - doubted <= set(found) <= sure | doubted
        for each in found.values():
            assert each.problem is None
        for booked in booking.booked(found.values()).values():
            assert booked.memory <= self.devices[0].allottable_bytes
            assert booked.guaranteed <= WHOLE
        for pod in range(2):
            assert sum(guarantee for _, guarantee in self.seats(pod)) <= WHOLE
        cdi = self.root / "cdi"
        for path in cdi.glob("*.json") if cdi.exists() else ():
            name = path.name.removeprefix("allotment.dev-share-").removesuffix(".json")
            if ShareId(name) in found:
                assert path.read_bytes() == (self.folder.shares / name / "cdi.json").read_bytes()
        for share in self.ready:
            assert (cdi / f"allotment.dev-share-{share}.json").exists()


TestPods = Pods.TestCase
TestPods.settings = settings(stateful_step_count=15, deadline=None)
