# SPDX-License-Identifier: Apache-2.0
"""Whatever is made, changed, removed and killed in between: no guarantee is given out twice, and
no seat is lost for ever.
"""

import os
import shutil
import tempfile
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from killing import kill_after

from allotment.ledger import read_contract
from allotment.model.compute import WHOLE, Compute
from allotment.model.devices import Device
from allotment.model.errors import DoesNotFitError
from allotment.model.quantities import parse_memory
from allotment.model.requests import Request
from allotment.model.shares import Injection
from allotment.shares import lifecycle, recovery
from allotment.shares.folders import StateFolder
from allotment.shares.placing import ShareOrder
from allotment.shares.process_tree import named
from allotment.shares.resize import LimitChange, resize

GI = 1 << 30
DEVICES = tuple(
    Device(
        uuid=f"GPU-{index}", name="T4", index=index, memory_bytes=100 * GI, sm_count=1,
        compute_capability=(7, 5), numa_node=None, pci_bus_id="", simulated=True, mig=False,
    )
    for index in range(2)
)  # fmt: skip
PROMISES = st.tuples(st.integers(0, 70), st.integers(1, 100), st.booleans()).map(
    lambda values: Compute(
        min(values[0], values[1]) * 100, values[1] * 100, is_governed=values[2] or values[0] > 0
    )
)


class Seats(RuleBasedStateMachine):
    """The state folder, and what is known of it: who is there, and what each was promised."""

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp())
        self.folder = StateFolder(self.root)
        self.folder.prepare()
        self.promised: dict[str, Compute] = {}
        self.is_swept = True
        """Nothing was killed since somebody swept."""

    def teardown(self) -> None:
        shutil.rmtree(self.root)

    def order(self, compute: Compute, count: int) -> ShareOrder:
        request = Request(parse_memory("1Gi"), count=count, compute=compute)
        return ShareOrder(request, Injection.ENVIRONMENT, runner=named(os.getpid()))

    def free(self, *, but: str = "") -> dict[str, int]:
        """What can be guaranteed of each device, beside those that are there."""
        free = {device.uuid: WHOLE for device in DEVICES}
        for found in recovery.list_shares(self.folder):
            if found.id != but:
                for uuid, guarantee in found.guarantees().items():
                    free[uuid] -= guarantee
        return free

    def adopt(self) -> None:
        """Takes what is there for true, after a kill."""
        self.is_swept = False
        found = {each.id: each for each in recovery.list_shares(self.folder)}
        for gone in set(self.promised) - set(found):
            del self.promised[gone]
        for name, each in found.items():
            self.promised[name] = next(iter(each.terms.values())).compute

    def pick(self, data: st.DataObject) -> str:
        # In the order of making: names are random, and a replay must meet the same share.
        made = {
            each.id: each.share.created for each in recovery.list_shares(self.folder) if each.share
        }
        return data.draw(st.sampled_from(sorted(made, key=lambda name: made[name])))

    @rule(compute=PROMISES, count=st.integers(1, 2))
    def create(self, compute: Compute, count: int) -> None:
        fitting = sum(left >= compute.guarantee for left in self.free().values())
        try:
            share, _ = lifecycle.create(self.folder, self.order(compute, count), DEVICES)
        except DoesNotFitError:
            assert fitting < count
        else:
            assert fitting >= count
            self.promised[share.id] = compute
        self.is_swept = True

    @precondition(lambda self: self.promised)
    @rule(data=st.data(), compute=PROMISES)
    def change(self, data: st.DataObject, compute: Compute) -> None:
        name = self.pick(data)
        free = self.free(but=name)
        (found,) = [each for each in recovery.list_shares(self.folder) if each.id == name]
        fits = all(free[uuid] >= compute.guarantee for uuid in found.limits())
        try:
            again = resize(self.folder, name, LimitChange(compute=compute), DEVICES, force=False)
        except DoesNotFitError:
            assert not fits
        else:
            assert fits
            self.promised[name] = Compute(compute.guarantee, compute.ceiling, is_governed=True)
            assert set(again.guarantees().values()) == {compute.guarantee}
        self.is_swept = True

    @precondition(lambda self: self.promised)
    @rule(data=st.data())
    def destroy(self, data: st.DataObject) -> None:
        name = self.pick(data)
        lifecycle.destroy(self.folder, lifecycle.find(self.folder, name), force=True)
        del self.promised[name]

    @rule(compute=PROMISES, count=st.integers(1, 2), steps=st.integers(0, 24))
    def create_is_killed(self, compute: Compute, count: int, steps: int) -> None:
        order = self.order(compute, count)
        kill_after(steps, self.root, lambda: lifecycle.create(self.folder, order, DEVICES))
        self.adopt()

    @precondition(lambda self: self.promised)
    @rule(data=st.data(), compute=PROMISES, steps=st.integers(0, 66))
    def change_is_killed(self, data: st.DataObject, compute: Compute, steps: int) -> None:
        name, change = self.pick(data), LimitChange(compute=compute)
        kill_after(
            steps, self.root, lambda: resize(self.folder, name, change, DEVICES, force=False)
        )
        # Some of its devices may have the new terms and others the old ones: what it was promised
        # is what is booked, until it is changed again.
        self.adopt()

    @precondition(lambda self: self.promised)
    @rule(data=st.data(), steps=st.integers(0, 16))
    def destroy_is_killed(self, data: st.DataObject, steps: int) -> None:
        found = lifecycle.find(self.folder, self.pick(data))
        kill_after(steps, self.root, lambda: lifecycle.destroy(self.folder, found, force=True))
        self.adopt()

    @rule()
    def recover(self) -> None:
        with self.folder.locked():
            recovery.recover(self.folder)
        self.is_swept = True

    @invariant()
    def promises_are_kept(self) -> None:
        found = {each.id: each for each in recovery.list_shares(self.folder)}
        assert set(found) == set(self.promised)
        seated: dict[str, set[str]] = {}
        for folder in self.folder.devices.iterdir():
            if folder.name.startswith("."):
                assert not self.is_swept
                continue
            contract = read_contract(folder / "contract")
            assert sum(each.terms.compute.guarantee for each in contract.seats) <= WHOLE
            names = [each.share_id for each in contract.seats]
            assert len(set(names)) == len(names)
            seated[folder.name] = set(names)
        for name, each in found.items():
            assert each.problem is None
            assert set(each.terms) == set(each.limits())
            for uuid, terms in each.terms.items():
                assert name in seated[uuid]
                assert each.guarantees()[uuid] >= terms.compute.guarantee
        if self.is_swept:
            assert set[str]().union(*seated.values()) == set(found)


TestSeats = Seats.TestCase
TestSeats.settings = settings(stateful_step_count=12, deadline=None)
