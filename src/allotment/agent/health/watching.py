# SPDX-License-Identifier: Apache-2.0
"""The loop of health: passes each sighting to its GPU's state machine, and reports decisions.

    health = HealthWatch(gpus=watch, policy=policy_of(config.allotment.health, os.environ), ...)
    async for unhealthy in health.changes():    # {UUID: reason}: their slots are not offered

All slots and shares of a GPU inherit its health. Running containers are never ended here: their
owners are informed.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Collection, Mapping, Sequence
from typing import Final, Protocol

import msgspec

from allotment.agent.config.schema import EvictPolicy
from allotment.agent.health.machine import (
    Event,
    Note,
    Probed,
    PutBack,
    TakeOut,
    XidSeen,
    complaint_of,
    step,
)
from allotment.agent.health.records import HealthState, Memory, Need, Record, Rules
from allotment.agent.health.xids import Action, XidPolicy
from allotment.agent.inventory import Gone, Sighting
from allotment.agent.protocols import Reports
from allotment.devices.events import GpuEvent
from allotment.devices.watching import Look
from allotment.kube.nodes import ConditionStatus
from allotment.kube.watching import Signal
from allotment.model.devices import Device
from allotment.model.errors import AllotError
from allotment.model.pods import Owner
from allotment.model.structs import replace

GPU_UNHEALTHY: Final = "GpuUnhealthy"
GPU_RECOVERED: Final = "GpuRecovered"
GPU_TESTED: Final = "GpuTested"
GPU_XID: Final = "GpuXid"
_NOTE_AGAIN_S: Final = 60.0
"""The shortest time between equal events: a bad program causes thousands of errors."""
CONDITION: Final = "GpuHealthy"
_LONGEST_MESSAGE: Final = 1024


class Gpus(Protocol):
    """The part of `inventory.GpuWatch` that health uses."""

    def subscribe(self, hearer: Callable[[str, Sighting], None]) -> None:
        """Call `hearer` in the event loop with each GPU's UUID and each later sighting of it."""
        ...

    async def test(self, uuid: str) -> Look | str:
        """Ask a GPU at once; return its answer, or the problem, within bounded time."""
        ...


class HealthCondition(msgspec.Struct, frozen=True, kw_only=True):
    """A condition of the node, as the API server has it."""

    status: ConditionStatus
    reason: str
    message: str
    type: str = CONDITION


class HealthWatch:
    """The health of the node's GPUs. For one event loop."""

    def __init__(
        self,
        *,
        gpus: Gpus,
        policy: XidPolicy,
        reports: Reports,
        owners: Callable[[str], Sequence[Owner]] = lambda _: (),
        memory: Memory | None = None,
        auto_recover: bool = True,
        rules: Rules | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`owners` returns the owners of shares on a GPU; `clock` is monotonic, in seconds."""
        self._gpus = gpus
        self._reports = reports
        self._owners = owners
        self._memory = memory
        self._clock = clock
        self._base = Rules() if rules is None else rules
        self._records: dict[str, Record] = {}
        self._devices: dict[str, Device] = {}
        self._testing: set[str] = set()
        self._noted: dict[tuple[str, str], float] = {}
        self._signal = Signal()
        self._due = asyncio.Event()
        self._configure(policy, auto_recover=auto_recover)
        if memory is not None:
            self._records.update(memory.read())
        gpus.subscribe(self.see)

    @property
    def records(self) -> Mapping[str, Record]:
        """The records of GPUs that have answered, or are lost or hidden, by UUID."""
        return {
            uuid: each
            for uuid, each in self._records.items()
            if uuid in self._devices or each.is_lost or each.is_hidden
        }

    @property
    def remembered(self) -> Collection[str]:
        """The GPUs of which a former agent kept a record, or of which this one has one."""
        return self._records.keys()

    @property
    def unhealthy(self) -> Mapping[str, str]:
        """The reason, by UUID, of each GPU that is not offered."""
        if self._policy.is_off:
            return {}
        return {
            uuid: record.reason for uuid, record in self.records.items() if not record.is_offered
        }

    def to_evict(self, policy: EvictPolicy) -> Mapping[str, str]:
        """Return why, by UUID, GPUs lose their pods. A hidden one never does."""
        if policy == "never":
            return {}
        return {
            uuid: self._records[uuid].reason
            for uuid in self.unhealthy
            if self._records[uuid].is_lost
            or (policy == "unhealthy" and not self._records[uuid].is_hidden)
        }

    async def changes(self) -> AsyncGenerator[Mapping[str, str], None]:
        """Yield `unhealthy`, now and at each change."""
        last: Mapping[str, str] | None = None
        async for _ in self._signal.changes():
            unhealthy = self.unhealthy
            if unhealthy != last:
                last = unhealthy
                yield unhealthy

    def reconfigure(self, policy: XidPolicy, *, auto_recover: bool) -> None:
        """Change the policy; unhealthy GPUs stay so until they recover."""
        self._configure(policy, auto_recover=auto_recover)
        self._signal.notify()
        self._due.set()

    def see(self, uuid: str, sighting: Sighting) -> None:
        if isinstance(sighting, Gone) and sighting.is_replaced:
            self._forget(uuid)
            return
        if isinstance(sighting, Look):
            if uuid not in self._devices:
                self._signal.notify()
            self._devices[uuid] = sighting.device
        event = self._xid(sighting) if isinstance(sighting, GpuEvent) else sighting
        if event is not None:
            self._take(uuid, event)

    async def run(self) -> None:
        """Run due tests until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                self._due.clear()
                now = self._clock()
                for uuid, record in self._records.items():
                    due = record.test_at is not None and record.test_at <= now
                    if due and uuid not in self._testing:
                        self._testing.add(uuid)
                        tasks.create_task(self._test(uuid))
                await self._sleep()

    def _configure(self, policy: XidPolicy, *, auto_recover: bool) -> None:
        self._policy = policy
        self._rules = replace(
            self._base,
            recovers=auto_recover,
            memory_errors=policy.action(_XID_MEMORY),
            failed_repairs=policy.action(_XID_REPAIR),
            drivers_word=policy.action(_XID_DRIVERS_WORD),
        )

    def _xid(self, event: GpuEvent) -> XidSeen | None:
        if event.xid is None:
            return None  # corrected memory errors: the GPU counts them
        self._reports.count("device_xids", device=event.uuid, xid=str(event.xid))
        action = self._policy.action(event.xid)
        return None if action is Action.IGNORE else XidSeen(event.xid, action)

    def _take(self, uuid: str, event: Event) -> None:
        now = self._clock()
        before = self._records.get(uuid, Record(since=now))
        after = step(before, event, now=now, rules=self._rules)
        self._records[uuid] = after.record
        for decision in after.decisions:
            match decision:
                case TakeOut():
                    self._report_unhealthy(uuid, decision.reason)
                case PutBack():
                    self._report_recovery(uuid, decision.reason)
                case Note():
                    self._note(uuid, decision)
        if _lasting(after.record) != _lasting(before):
            self._remember()
            self._signal.notify()
        if after.record.reason != before.reason or after.record.is_offered != before.is_offered:
            self._signal.notify()
        if after.record.test_at != before.test_at:
            self._due.set()

    def _forget(self, uuid: str) -> None:
        self._devices.pop(uuid, None)
        if self._records.pop(uuid, None) is not None:
            self._remember()
            self._signal.notify()

    async def _sleep(self) -> None:
        """Wait for the next due test, or a change."""
        now = self._clock()
        due = [
            max(0.0, record.test_at - now)
            for uuid, record in self._records.items()
            if record.test_at is not None and uuid not in self._testing
        ]
        try:
            async with asyncio.timeout(min(due, default=None)):
                await self._due.wait()
        except TimeoutError:
            pass  # it is due

    async def _test(self, uuid: str) -> None:
        try:
            answer = await self._gpus.test(uuid)
        finally:
            self._testing.discard(uuid)
            self._due.set()
        if isinstance(answer, str):
            self._take(uuid, Probed(answer))
            return
        complaint = complaint_of(answer.vitals, self._rules)
        self._take(uuid, Probed(None if complaint is None else complaint[0]))

    def _name(self, uuid: str) -> str:
        device = self._devices.get(uuid)
        return uuid if device is None else f"{uuid} ({device.name})"

    def _report_unhealthy(self, uuid: str, reason: str) -> None:
        if self._policy.is_off:
            return
        owners = self._owners(uuid)
        self._reports.node(
            GPU_UNHEALTHY,
            f"{self._name(uuid)}: {reason}; no new container gets it{_affected(owners)}",
            is_warning=True,
        )
        for owner in owners:
            text = f"the GPU of container {owner.container}, {uuid}, is unhealthy: {reason}"
            self._reports.pod(owner, GPU_UNHEALTHY, text, is_warning=True)

    def _report_recovery(self, uuid: str, reason: str) -> None:
        if self._policy.is_off:
            return
        self._reports.count("device_recoveries", device=uuid)
        text = f"{self._name(uuid)} is healthy again: {reason}"
        self._reports.node(GPU_RECOVERED, text, is_warning=False)
        for owner in self._owners(uuid):
            text = f"the GPU of container {owner.container}, {uuid}, is healthy again"
            self._reports.pod(owner, GPU_RECOVERED, text, is_warning=False)

    def _note(self, uuid: str, note: Note) -> None:
        now = self._clock()
        last = self._noted.get((uuid, note.reason))
        if last is not None and now - last < _NOTE_AGAIN_S:
            return
        self._noted = {key: at for key, at in self._noted.items() if now - at < _NOTE_AGAIN_S}
        self._noted[uuid, note.reason] = now
        word = GPU_TESTED if note.xid is None else GPU_XID
        text = f"{self._name(uuid)}: {note.reason}"
        self._reports.node(word, text, is_warning=note.xid is not None)
        if note.is_programs:
            for owner in self._owners(uuid):
                text = (
                    f"a program on the GPU of container {owner.container}, {uuid}, met"
                    f" {note.reason}; NVML does not say whose program"
                )
                self._reports.pod(owner, GPU_XID, text, is_warning=True)

    def _remember(self) -> None:
        if self._memory is None:
            return
        try:
            self._memory.write(self._records)
        except AllotError as error:
            # Health works without the file, except after a restart.
            self._reports.node("HealthNotKept", error.one_line(), is_warning=True)


def _lasting(record: Record) -> tuple[Need, bool, bool]:
    """Return what decides whether a record is kept, and shown without an answer."""
    return record.need, record.is_lost, record.is_hidden


_XID_MEMORY: Final = 48
_XID_REPAIR: Final = 64
_XID_DRIVERS_WORD: Final = 154


def _affected(owners: Sequence[Owner]) -> str:
    if not owners:
        return ""
    names = ", ".join(sorted(str(owner) for owner in owners)[:5])
    more = "" if len(owners) <= 5 else f" and {len(owners) - 5} more"  # noqa: PLR2004 - a few
    return f"; its programs continue: {names}{more}"


def condition(records: Mapping[str, Record], *, problem: str | None = None) -> HealthCondition:
    """Return the node's condition. `problem`: why no GPU can be inspected."""
    if problem is not None:
        return HealthCondition(status="Unknown", reason="NoInventory", message=problem)
    if not records:
        return HealthCondition(status="Unknown", reason="NoGpus", message="no GPU has answered")
    bad = {uuid: record for uuid, record in records.items() if not record.is_offered}
    if not bad:
        text = f"{len(records)} of {len(records)} GPUs are healthy"
        return HealthCondition(status="True", reason="AllHealthy", message=text)
    parts = [f"{len(records) - len(bad)} of {len(records)} GPUs are healthy"]
    for uuid, record in sorted(bad.items()):
        state = "being tested after" if record.state is HealthState.RECOVERING else "unhealthy:"
        parts.append(f"{uuid} is {state} {record.reason}")
    text = "; ".join(parts)
    if len(text) > _LONGEST_MESSAGE:
        text = text[: _LONGEST_MESSAGE - 1] + "…"
    return HealthCondition(status="False", reason="Unhealthy", message=text)
