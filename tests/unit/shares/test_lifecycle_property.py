# SPDX-License-Identifier: Apache-2.0
"""Any sequence of creating, resizing, ending and crashing keeps the books right."""

import os
import shutil
import tempfile
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from allotment.ledger import read
from allotment.model.devices import Device
from allotment.model.errors import DoesNotFitError, NotFoundError
from allotment.model.quantities import parse_memory
from allotment.model.requests import Request
from allotment.model.shares import Injection, Runner
from allotment.shares import booking, lifecycle, recovery
from allotment.shares.folders import StateFolder
from allotment.shares.placing import ShareOrder
from allotment.shares.process_tree import named
from allotment.shares.resize import LimitChange, resize

MI = 1 << 20
TOTAL = 100 * MI
AMOUNTS = st.integers(MI, 110 * MI)
DEVICES = tuple(
    Device(
        uuid=f"GPU-{index}", name="T4", index=index, memory_bytes=TOTAL, sm_count=1,
        compute_capability=(7, 5), numa_node=None, pci_bus_id="", simulated=True, mig=False,
    )
    for index in range(2)
)  # fmt: skip
DEAD = Runner(1, 1, "another boot")


class Books(RuleBasedStateMachine):
    """A model of what is given out, beside the state folder."""

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp())
        self.folder = StateFolder(self.root)
        self.folder.prepare()
        self.given: dict[str, dict[str, int]] = {}
        self.crashed: set[str] = set()

    def teardown(self) -> None:
        shutil.rmtree(self.root)

    def free(self, uuid: str, *, but: str = "") -> int:
        return TOTAL - sum(each.get(uuid, 0) for name, each in self.given.items() if name != but)

    def sweep(self) -> None:
        """Whoever comes next removes what ended."""
        for name in self.crashed:
            del self.given[name]
        self.crashed.clear()

    @rule(amount=AMOUNTS, count=st.integers(1, 3), crashes=st.booleans())
    def create(self, *, amount: int, count: int, crashes: bool) -> None:
        self.sweep()
        runner = DEAD if crashes else named(os.getpid())
        request = Request(parse_memory(str(amount)), count=count)
        order = ShareOrder(request, Injection.ENVIRONMENT, runner=runner)
        fitting = sum(self.free(device.uuid) >= amount for device in DEVICES)
        try:
            share, _ = lifecycle.create(self.folder, order, DEVICES)
        except DoesNotFitError:
            assert fitting < count
            return
        assert fitting >= count
        self.given[share.id] = {device.uuid: amount for device in share.devices}
        if crashes:
            self.crashed.add(share.id)

    @precondition(lambda self: self.given)
    @rule(data=st.data(), amount=AMOUNTS)
    def change(self, data: st.DataObject, amount: int) -> None:
        # In the order of making: names are random, and a replay must meet the same share.
        name = data.draw(st.sampled_from(list(self.given)))
        ended = name in self.crashed
        self.sweep()
        fits = not ended and all(
            self.free(uuid, but=name) >= amount for uuid in self.given.get(name, {})
        )
        try:
            change = LimitChange(memory=parse_memory(str(amount)))
            resize(self.folder, name, change, DEVICES, force=False)
        except (DoesNotFitError, NotFoundError) as error:
            assert not fits
            assert isinstance(error, NotFoundError) == ended  # noqa: PT017
            return
        assert fits
        self.given[name] = dict.fromkeys(self.given[name], amount)

    @precondition(lambda self: self.given)
    @rule(data=st.data())
    def destroy(self, data: st.DataObject) -> None:
        # In the order of making: names are random, and a replay must meet the same share.
        name = data.draw(st.sampled_from(list(self.given)))
        lifecycle.destroy(self.folder, lifecycle.find(self.folder, name), force=True)
        del self.given[name]
        self.crashed.discard(name)

    @rule()
    def recover(self) -> None:
        with self.folder.locked():
            recovery.recover(self.folder)
        self.sweep()

    @rule()
    def crash_while_making(self) -> None:
        draft = self.folder.shares / ".new-0"
        draft.mkdir(exist_ok=True)
        (draft / "policy").write_bytes(b"half")

    @invariant()
    def books_are_right(self) -> None:
        found = {each.id: each for each in recovery.list_shares(self.folder)}
        assert set(found) == set(self.given)
        for name, each in found.items():
            assert each.problem is None
            assert each.limits() == self.given[name]
            in_force = read(each.directory).policy.devices
            assert {one.uuid: one.memory_limit for one in in_force} == self.given[name]
        for uuid, booked in booking.allotted(found.values()).items():
            assert booked <= TOTAL, uuid


TestBooks = Books.TestCase
TestBooks.settings = settings(stateful_step_count=20, deadline=None)
