# SPDX-License-Identifier: Apache-2.0
"""Random programs of several real processes in one share never pass its limit.

Processes (gpu_worker.py) start, fork, allocate by every way that the driver has, free, are killed
and end, one after the other and all at once, while the limit changes under them. After each step
the ledger, CUDA and NVML inside the share, NVML outside of it, and a model of what was granted
must tell the same story. The share is of the second GPU of its machine, so that numbers inside and
outside differ.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Sequence
from typing import Final

import pytest
from examples import examples
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)
from share_world import GRANULE, Tenant, World

from allotment import ledger
from allotment.model.errors import LimitBelowUseError

MIB: Final = 1 << 20
GIB: Final = 1 << 30
POOL_GROWTH: Final = 32 * MIB
MOST_TENANTS: Final = 4
OUT_OF_MEMORY: Final = 2
NOT_INITIALIZED: Final = 3

APIS: Final = (
    "plain",
    "pitched",
    "managed",
    "array",
    "array3d",
    "mipmap",
    "vmm",
    "async",
    "pool",
    "graph",
    "global",
)
POOLED: Final = {"async", "pool", "graph"}
SIZES: Final = st.one_of(
    st.integers(1, 64 * 1024),
    st.integers(MIB - 600, MIB + 600),
    st.integers(1, 300).map(lambda granules: granules * GRANULE),
    st.integers(1, 900 * MIB),
    st.just(7 * GIB),
)


def worst_charge(api: str, size: int) -> int:
    """The most that may be charged for a request: what a refusal can be justified by."""
    if api == "pitched":
        size = -(-size // 1000) * 1024
    rounded = -(-size // GRANULE) * GRANULE
    return max(POOL_GROWTH, rounded) if api in POOLED else rounded


class ShareMachine(RuleBasedStateMachine):
    """The rules: what can happen to a share, and what must hold after it."""

    world: World
    tenants: list[Tenant]

    @initialize(
        limit=st.integers(1 * GIB, 3 * GIB), release_us=st.sampled_from([0, 0, 20_000, 100_000])
    )
    def begin(self, limit: int, release_us: int) -> None:
        self.limit = limit
        self.allowed = limit  # more than the limit only after a forced resize
        self.most_allowed = limit
        self.world = World(limit)
        self.world.set_release(release_us)
        self.tenants = [self.world.start("dlsym"), self.world.start("procaddress")]

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        try:
            # After a failure there is no story to end, only processes.
            if sys.exc_info()[0] is None:
                self.end_of_the_story()
        finally:
            for tenant in self.tenants:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(tenant.pid, signal.SIGKILL)
                tenant.wait()
            self.world.close()

    def pick(self, index: int, *, is_open: bool) -> Tenant | None:
        found = [each for each in self.tenants if each.is_open == is_open and not each.inherited]
        return found[index % len(found)] if found else None

    # ---- rules ----------------------------------------------------------------------------------
    # Which rules may follow depends on the number of processes alone. What the processes get may
    # differ from run to run, and a rule that finds nothing to do does nothing.

    @precondition(lambda self: len(self.tenants) < MOST_TENANTS)
    @rule(resolving=st.sampled_from(["dlsym", "procaddress"]))
    def start(self, resolving: str) -> None:
        self.tenants.append(self.world.start(resolving))

    @precondition(lambda self: 0 < len(self.tenants) < MOST_TENANTS)
    @rule(index=st.integers(0, MOST_TENANTS - 1))
    def fork(self, index: int) -> None:
        parent = self.tenants[index % len(self.tenants)]
        parent.send({"do": "fork"})
        child = self.world.accept(None)
        assert parent.answer() == {"result": 0}
        child.inherited = parent.is_open or parent.inherited
        self.tenants.append(child)

    @rule(index=st.integers(0, MOST_TENANTS - 1))
    def open(self, index: int) -> None:
        tenant = self.pick(index, is_open=False)
        if tenant is None:
            return
        used = self.used()
        result = tenant.ask("open")["result"]
        if result == OUT_OF_MEMORY:
            assert used + self.world.device.context_bytes > self.limit
            return
        assert result == 0
        tenant.is_open = True

    @rule(
        index=st.integers(0, MOST_TENANTS - 1),
        api=st.sampled_from(APIS),
        size=SIZES,
    )
    def allocate(self, index: int, api: str, size: int) -> None:
        tenant = self.pick(index, is_open=True)
        if tenant is None:
            return
        used = self.used()
        answer = tenant.ask("allocate", api=api, bytes=size)
        if answer["result"] == OUT_OF_MEMORY:
            assert used + worst_charge(api, size) > self.limit, f"{api} {size} needlessly refused"
            return
        assert answer["result"] == 0, (api, size)
        tenant.held[answer["number"]] = (api, size)

    @rule(
        requests=st.lists(
            st.tuples(st.sampled_from(APIS), SIZES), min_size=MOST_TENANTS, max_size=MOST_TENANTS
        )
    )
    def allocate_together(self, requests: Sequence[tuple[str, int]]) -> None:
        able = [tenant for tenant in self.tenants if tenant.is_open]
        for tenant, (api, size) in zip(able, requests, strict=False):
            tenant.send({"do": "allocate", "api": api, "bytes": size})
        for tenant, (api, size) in zip(able, requests, strict=False):
            answer = tenant.answer()
            assert answer["result"] in (0, OUT_OF_MEMORY), (api, size)
            if answer["result"] == 0:
                tenant.held[answer["number"]] = (api, size)

    @rule(part=st.floats(0.5, 1.0, exclude_min=True))
    def storm(self, part: float) -> None:
        """Memory for one is there, for two it is not; all try at once, many times."""
        able = [tenant for tenant in self.tenants if tenant.is_open]
        size = int((self.limit - self.used()) * part) // GRANULE * GRANULE
        if size <= 0:
            return
        for tenant in able:
            tenant.send({"do": "storm", "bytes": size, "times": 300})
        granted = [tenant.answer() for tenant in able]
        assert all(answer["result"] == 0 for answer in granted)
        assert not able or sum(answer["granted"] for answer in granted) > 0

    @rule(index=st.integers(0, MOST_TENANTS - 1), which=st.integers(0, 99))
    def free(self, index: int, which: int) -> None:
        tenant = self.pick(index, is_open=True)
        if tenant is not None and tenant.held:
            self.give_back(tenant, list(tenant.held)[which % len(tenant.held)])

    @rule(index=st.integers(0, MOST_TENANTS - 1))
    def trim(self, index: int) -> None:
        tenant = self.pick(index, is_open=True)
        if tenant is not None:
            assert tenant.ask("trim") == {"result": 0}

    @precondition(lambda self: self.tenants)
    @rule(index=st.integers(0, MOST_TENANTS - 1))
    def kill(self, index: int) -> None:
        tenant = self.tenants[index % len(self.tenants)]
        os.kill(tenant.pid, signal.SIGKILL)
        self.forget(tenant)

    @precondition(lambda self: self.tenants)
    @rule(index=st.integers(0, MOST_TENANTS - 1), api=st.sampled_from(APIS), size=SIZES)
    def kill_in_the_middle(self, index: int, api: str, size: int) -> None:
        tenant = self.tenants[index % len(self.tenants)]
        if tenant.is_open:
            tenant.send({"do": "allocate", "api": api, "bytes": size})
        os.kill(tenant.pid, signal.SIGKILL)
        if tenant.is_open:
            with contextlib.suppress(ConnectionResetError):
                tenant.lines.readline()  # the answer, if there was time for one
        self.forget(tenant)

    @precondition(lambda self: self.tenants)
    @rule(index=st.integers(0, MOST_TENANTS - 1))
    def replace(self, index: int) -> None:
        """A program is killed and started again at once: it gets what the dead one had."""
        tenant = self.tenants[index % len(self.tenants)]
        bytes_held = sum(size for _, size in tenant.held.values())
        was_open = tenant.is_open
        os.kill(tenant.pid, signal.SIGKILL)
        self.forget(tenant)
        successor = self.world.start("dlsym")
        self.tenants.append(successor)
        if not was_open or self.used() > self.limit:
            return
        assert successor.ask("open") == {"result": 0}
        successor.is_open = True
        size = bytes_held // GRANULE * GRANULE
        if size == 0:
            return
        answer = successor.ask("allocate", api="plain", bytes=size)
        assert answer["result"] == 0
        successor.held[answer["number"]] = ("plain", size)

    @precondition(lambda self: self.tenants)
    @rule(index=st.integers(0, MOST_TENANTS - 1))
    def leave(self, index: int) -> None:
        self.end(self.tenants[index % len(self.tenants)])

    @rule(limit=st.integers(256 * MIB, 6 * GIB), force=st.booleans())
    def resize(self, limit: int, *, force: bool) -> None:
        used = self.used()
        try:
            ledger.set_limit(self.world.share, 0, limit, force=force)
        except LimitBelowUseError:
            assert used > limit
            assert not force
            return
        assert force or used <= limit
        self.limit = limit
        self.allowed = max(limit, used)
        self.most_allowed = max(self.most_allowed, limit)

    # ---- what must hold -------------------------------------------------------------------------

    @invariant()
    def all_tell_the_same_story(self) -> None:
        if not hasattr(self, "world"):
            return
        self.check_while_leaving()
        self.world.wait_for_driver(self.tenants)
        # A report may itself find that a pool has shrunk: what counts is the state after it.
        for tenant in self.tenants:
            if tenant.is_open:
                assert tenant.ask("report")["result"] == 0
        state = self.world.read()
        used = state.devices[0].used
        assert used == sum(process.used[0] for process in state.processes)
        assert used <= self.allowed
        assert state.devices[0].peak <= self.most_allowed
        self.allowed = max(self.limit, used)
        self.check_against_the_model(state)
        self.check_against_the_driver(used)
        for tenant in self.tenants:
            if tenant.is_open:
                self.check_reports(tenant, state)
            elif tenant.inherited:
                assert tenant.ask("open") == {"result": NOT_INITIALIZED}

    def check_while_leaving(self) -> None:
        """The driver's bytes are charged, those of the dead too."""
        physical = sum(self.world.outside()["processes"][2].values())
        assert physical <= self.used(), "memory that is not charged"
        assert physical <= self.allowed

    def check_against_the_model(self, state: ledger.Ledger) -> None:
        charged = {process.pid: process.used[0] for process in state.processes}
        for tenant in self.tenants:
            granted = sum(size for _, size in tenant.held.values())
            granted += self.world.device.context_bytes if tenant.is_open else 0
            assert charged.get(tenant.pid, 0) >= granted
        assert set(charged) <= {tenant.pid for tenant in self.tenants}

    def check_against_the_driver(self, used: int) -> None:
        outside = self.world.outside()
        physical = sum(outside["processes"][2].values())
        assert physical <= used, "memory that is not charged"
        assert physical <= self.allowed
        assert set(outside["processes"][2]) <= {str(tenant.pid) for tenant in self.tenants}

    def check_reports(self, tenant: Tenant, state: ledger.Ledger) -> None:
        used = state.devices[0].used
        free = max(0, self.limit - used)
        answer = tenant.ask("report")
        assert answer == {
            "result": 0,
            "free": free,
            "total": self.limit,
            "device_total": self.limit,
        }
        inside = tenant.ask("nvml", index=0)
        assert inside["devices"] == 1
        for version in ("v1", "v2"):
            assert inside[version]["total"] == self.limit
            assert inside[version]["free"] == free
            assert inside[version]["used"] in (used, self.limit)
        listed = {
            str(process.pid): process.used[0] for process in state.processes if process.used[0]
        }
        assert inside["processes"] == [listed] * 4
        assert self.world.read().devices == state.devices

    def end_of_the_story(self) -> None:
        """Everything is given back: first what was allocated, then all of it."""
        for tenant in self.tenants:
            if tenant.is_open:
                for number in list(tenant.held):
                    self.give_back(tenant, number)
                assert tenant.ask("trim") == {"result": 0}
        self.all_tell_the_same_story()
        for process in self.world.read().processes:
            assert process.used[0] == process.context[0]
        for tenant in list(self.tenants):
            self.end(tenant)
        self.world.wait_for_driver([])
        assert self.used() == 0
        assert self.world.outside()["processes"] == [{}] * 4

    # ---- steps ----------------------------------------------------------------------------------

    def used(self) -> int:
        return self.world.read().devices[0].used

    def give_back(self, tenant: Tenant, number: int) -> None:
        assert tenant.ask("free", number=number) == {"result": 0}, tenant.held[number]
        del tenant.held[number]

    def end(self, tenant: Tenant) -> None:
        tenant.send({"do": "exit"})
        self.forget(tenant)

    def forget(self, tenant: Tenant) -> None:
        self.tenants.remove(tenant)
        tenant.wait()


TestShares = pytest.mark.timeout(900)(ShareMachine.TestCase)
TestShares.settings = settings(
    max_examples=examples(1 / 2),  # each starts and ends a dozen processes
    stateful_step_count=25,
    suppress_health_check=list(HealthCheck),
    # A failure is rarely the same twice: what processes do at once is not Hypothesis's to choose.
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
)
