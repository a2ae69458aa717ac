# SPDX-License-Identifier: Apache-2.0
"""A GPU is of one mode at a time, and of one that it is for, whatever is made, ended and said."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from allotment.devices.mig_machine import MigMachine
from allotment.devices.simulated import SimulatedMachine, machine_path
from allotment.model.errors import BusyError, DoesNotFitError
from allotment.model.modes import (
    EXCLUSIVE,
    MIG,
    MPS,
    SOFT,
    TIMESLICE,
)
from allotment.model.quantities import parse_memory
from allotment.model.requests import Request
from allotment.model.shares import Injection, Share
from allotment.shares import lifecycle, recovery
from allotment.shares.drain import ModeChange
from allotment.shares.folders import StateFolder
from allotment.shares.mig import allocate
from allotment.shares.mode_policy import mode_policy_of, modes_on
from allotment.shares.placing import ShareOrder
from allotment.shares.process_tree import named

SPEC = "h100-80gb:2"
MODES = (SOFT, MPS, MIG, EXCLUSIVE, TIMESLICE)
GPUS = st.integers(0, 1)


class Modes(RuleBasedStateMachine):
    """A model of who is on which GPU and what that is for, beside a simulated machine."""

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp())
        self.folder = StateFolder(self.root)
        self.folder.prepare()
        self.machine = machine_path(self.root, SPEC)
        self.uuids = [each.uuid for each in SimulatedMachine(self.machine).devices()]
        self.there: dict[str, tuple[int, str]] = {}
        self.said: dict[int, tuple[str, ...]] = {}
        self.switched: set[int] = set()
        """Where MIG has been on since the GPU is for mig alone: once somebody is out of the way."""

    def teardown(self) -> None:
        shutil.rmtree(self.root)

    def modes_of(self, gpu: int) -> set[str]:
        return {mode for number, mode in self.there.values() if number == gpu}

    def is_open(self, gpu: int, mode: str) -> bool:
        if mode not in self.said.get(gpu, MODES):
            return False
        there = self.modes_of(gpu)
        if mode == EXCLUSIVE:
            return not there
        # Four slices of the profile are room for all that this test asks for.
        return there <= {mode}

    def order(self, gpu: int, mode: str) -> ShareOrder:
        request = Request(
            parse_memory("1Gi"),
            selectors=(self.uuids[gpu],),
            mode=mode,
            mig_profile="1g.10gb" if mode == MIG else "",
        )
        return ShareOrder(
            request, Injection.ENVIRONMENT, runner=named(os.getpid()), machine=self.machine
        )

    def make(self, gpu: int, mode: str) -> Share:
        devices = SimulatedMachine(self.machine).devices()
        order = self.order(gpu, mode)
        return lifecycle.create(self.folder, order, devices)[0]

    @precondition(lambda self: len(self.there) < 4)
    @rule(gpu=GPUS, mode=st.sampled_from(MODES))
    def create(self, gpu: int, mode: str) -> None:
        try:
            share = self.make(gpu, mode)
        except DoesNotFitError:
            assert not self.is_open(gpu, mode)
            return
        assert self.is_open(gpu, mode)
        self.there[share.id] = gpu, mode
        if mode == MIG and self.said.get(gpu) == (MIG,):
            self.switched.add(gpu)

    @precondition(lambda self: self.there)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(list(self.there)))
        lifecycle.destroy(self.folder, lifecycle.find(self.folder, name), force=True)
        allocate.free_orphans(self.folder)
        del self.there[name]

    @rule(gpu=GPUS, modes=st.sets(st.sampled_from(MODES), min_size=1), drains=st.booleans())
    def say(self, gpu: int, modes: set[str], *, drains: bool) -> None:
        wanted = tuple(mode for mode in MODES if mode in modes)
        try:
            self.change(gpu, wanted).carry_out(patience_s=0 if drains else None)
        except BusyError:
            assert not self.modes_of(gpu) <= modes
            if drains:
                self.said[gpu] = wanted
                self.switched.discard(gpu)
            return
        assert self.modes_of(gpu) <= modes
        self.said[gpu] = wanted
        if wanted == (MIG,):
            self.switched.add(gpu)

    @rule(gpu=GPUS)
    def take_back(self, gpu: int) -> None:
        self.change(gpu, None).carry_out(patience_s=None)
        self.said.pop(gpu, None)

    def change(self, gpu: int, modes: tuple[str, ...] | None) -> ModeChange:
        device = SimulatedMachine(self.machine).devices()[gpu]
        return ModeChange(folder=self.folder, device=device, machine=self.machine, modes=modes)

    @invariant()
    def a_gpu_is_of_one_mode_and_cut_where_it_is_mig(self) -> None:
        shares = recovery.list_shares(self.folder)
        assert {each.id for each in shares} == set(self.there)
        with MigMachine(self.machine) as gpus:
            found = gpus.ask(lambda device: device.driver.look(), patience_s=10)
        for gpu, uuid in enumerate(self.uuids):
            modes = modes_on(shares, uuid)
            assert modes == self.modes_of(gpu)
            assert len(modes) <= 1
            allowed = mode_policy_of(self.folder, uuid)
            assert (allowed.modes if allowed else None) == self.said.get(gpu)
            seen = found[gpu][1]
            assert not isinstance(seen, Exception)
            stays_on = self.said.get(gpu) == (MIG,) and gpu in self.switched
            assert seen.is_enabled == (modes == {MIG} or stays_on)


TestModes = Modes.TestCase
TestModes.settings = settings(stateful_step_count=12)
