# SPDX-License-Identifier: Apache-2.0
"""The MIG slices of the node's GPUs: inspects GPUs, and removes slices without an owner.

    a driver's look + the GPU's journal ──► NodeState.cut_gpus
    journals with work ──► slices without an owner are removed, each GPU by itself

Each GPU is asked in its own thread with a time limit. Slices that others removed are reported, and
never cut again under a running container. If others switch MIG off twice within minutes, it stays
off for a pause (`conflicts`).
"""

import asyncio
import time
from collections.abc import Callable, Collection, Iterable
from functools import partial
from pathlib import Path
from typing import Final, NoReturn

from allotment.agent.mig.conflicts import MigConflicts
from allotment.agent.mig.state import CutGpu, cut_gpu
from allotment.agent.node_state import NodeState
from allotment.agent.protocols import Reports
from allotment.agent.resources import as_whole
from allotment.devices.mig_machine import LOOK_S, MigDevice, MigMachine
from allotment.devices.models import tabled_profiles
from allotment.model.devices import Device
from allotment.model.errors import AllotError, StateError
from allotment.model.mig import MigHold, MigProfile
from allotment.model.modes import has_only_slices
from allotment.model.reported import Reported
from allotment.model.shares import Share, ShareId
from allotment.model.structs import replace
from allotment.modes.mig.journal import Journal
from allotment.modes.mig.mode import takes_mode_at_once
from allotment.shares.folders import StateFolder
from allotment.shares.mig import allocate
from allotment.shares.mode_policy import is_for_mig_alone
from allotment.shares.placing import MigTerms

LOST: Final = "SliceGone"
"""Reason of events on the node, and on the pod whose slice others removed."""
STAYS: Final = "SliceNotRemoved"
UNKNOWN: Final = "SlicesNotKnown"
DAMAGED: Final = "SliceRecordDamaged"
_CONFIG: Final = "ConfigProblem"
"""Reasons of events on the node."""

_WATCH_S: Final = 0.5
"""How often the journals' folders are polled."""
LOOK_AGAIN_S: Final = 10.0
"""How often an unchanged GPU is inspected: others may cut it."""
_SETTLE_S: Final = 60.0
"""How long a driver may take to remove slices before that is reported."""
_CLEAR_S: Final = 15.0
"""How long a share of another mode waits for idle slices to go, on all its GPUs in parallel: its
start has some 20 s."""
_FIRST_RETRY_S: Final = 2.0
_LAST_RETRY_S: Final = 300.0


class NodeSlices:
    """Keeps `NodeState.cut_gpus`. For one event loop; needs `run` running."""

    def __init__(
        self,
        folder: StateFolder,
        *,
        machine: Path | None,
        state: NodeState,
        shares: Callable[[], Collection[Share]],
        reports: Reports,
        look_s: float = LOOK_AGAIN_S,
    ) -> None:
        """`shares` are those of containers; `look_s`: how often an unchanged GPU is inspected."""
        self._look_s = look_s
        self._folder = folder
        self._machine = machine
        self._state = state
        self._shares = shares
        self._reports = reports
        self._profiles: dict[str, tuple[MigProfile, ...]] = {}
        """The profiles that each GPU last reported."""
        self._looking: dict[str, asyncio.Task[None]] = {}
        self._settling: dict[str, asyncio.Task[None]] = {}
        self._looked: dict[str, tuple[int, float]] = {}
        """The stamp of each GPU's journal at the latest look, and the time."""
        self._retry: dict[tuple[str, str], tuple[float, float]] = {}
        """By GPU and reason of the failure: when to retry, and the pause before that."""
        self._reported = Reported[tuple[str, str]]()
        """By GPU and the reason of its event."""
        self._lost: set[tuple[str, str]] = set()
        """Reported slices that others removed, by holder and UUID."""
        self._reported_owners: set[tuple[str, str]] = set()
        self._conflicts = MigConflicts(folder, machine=machine, reports=reports, state=state)
        self._off: set[str] = set()
        """GPUs whose MIG mode `clear` switched off; the inventory may still show it on."""

    def terms(self) -> MigTerms:
        """Return how GPUs may be cut, by the configuration in force. From any thread."""
        mig_uses = self._state.offer.mig_uses
        return MigTerms(
            keeps={uuid: use.keep_s for uuid, use in mig_uses.items()},
            resets=frozenset(uuid for uuid, use in mig_uses.items() if use.may_reset),
            peers=self._state.links.peers,
            paused=self._state.mig_paused,
            profiles=self.profiles,
        )

    def profiles(self, device: Device) -> tuple[MigProfile, ...]:
        """Return a GPU's profiles, as it last reported or by its model."""
        return self._profiles.get(device.uuid) or tabled_profiles(device)

    def as_it_is(self, device: Device) -> Device:
        """Return a device as it is after `clear`. From any thread."""
        if device.slice_of is None and device.uuid in self._off:
            return as_whole(device)
        return device

    async def clear(self, uuids: Iterable[str]) -> None:
        """Remove the idle slices of GPUs that were chosen for a share of another mode.

        A GPU with used slices, or whose MIG mode others switched on, stays as it is: then the share
        is refused.
        """
        state = self._state
        giving_way = [
            state.devices[uuid]
            for uuid in dict.fromkeys(uuids)
            if uuid in state.devices and uuid in state.cut_gpus and state.cut_gpus[uuid].gives_way
        ]
        await asyncio.gather(*map(self._clear_one, giving_way))  # each has the same time

    async def _clear_one(self, device: Device) -> None:
        uuid = device.uuid
        is_free = await self._free_orphans(device, patience_s=_CLEAR_S - LOOK_S, keeps_warm=False)
        if is_free and not Journal(self._folder.mig / uuid).is_switched:
            self._off.add(uuid)
        try:
            found = await asyncio.to_thread(self._inspect, device)
        except AllotError as error:
            self._failed(uuid, UNKNOWN, error)
            return
        if found is not None and not found.is_enabled:
            self._off.add(uuid)
        self._take_in(device, found)

    async def run(self) -> NoReturn:
        try:
            while True:
                self._forget_others()
                self._conflicts.end_pauses()
                self._begin_looks()
                await self._begin_settling()
                self._report_lost()
                await asyncio.sleep(_WATCH_S)
        finally:
            for task in (*self._looking.values(), *self._settling.values()):
                task.cancel()
            self._conflicts.close()

    def _forget_others(self) -> None:
        devices = self._state.devices
        self._off = {uuid for uuid in self._off if uuid in devices and devices[uuid].mig}
        gone = set(self._state.cut_gpus) - set(self._state.offer.mig_uses)
        for uuid in gone:
            del self._state.cut_gpus[uuid]
            self._looked.pop(uuid, None)
            self._show(uuid, None)
        if gone:
            self._state.changed.notify()

    def _begin_looks(self) -> None:
        now = time.monotonic()
        for uuid in self._state.offer.mig_uses:
            device = self._state.devices.get(uuid)
            if device is None or uuid in self._looking or self._is_paused(uuid, UNKNOWN, now):
                continue
            stamp = _stamp(self._folder.mig / uuid)
            before, when = self._looked.get(uuid, (-1, 0.0))
            if stamp != before or now - when >= self._look_s:
                self._looked[uuid] = (stamp, now)
                self._looking[uuid] = asyncio.create_task(self._look(device))

    async def _look(self, device: Device) -> None:
        uuid = device.uuid
        try:
            found = await asyncio.to_thread(self._inspect, device)
        except AllotError as error:
            self._failed(uuid, UNKNOWN, error)
            return
        finally:
            self._looking.pop(uuid, None)
        self._succeeded(uuid, UNKNOWN)
        self._take_in(device, found)

    def _take_in(self, device: Device, found: CutGpu | None) -> None:
        uuid = device.uuid
        if found is None:
            self._state.without_mig.add(uuid)
            if self._state.cut_gpus.pop(uuid, None) is not None:
                self._state.changed.notify()
            text = f"GPU {device.index} ({uuid}) has no MIG: mode mig of its rule has no effect"
            self._report(uuid, _CONFIG, text)
            return
        self._state.without_mig.discard(uuid)
        if found.is_enabled:
            self._off.discard(uuid)
        self._conflicts.judge(device, found)
        if found.problems:
            self._report(uuid, DAMAGED, f"{'; '.join(found.problems)}: its slice is left alone")
        else:
            self._reported.over((uuid, DAMAGED))
        if self._is_paused(uuid, STAYS, time.monotonic()):
            found = replace(found, gives_way=False)  # its slices could not be removed
        if self._state.cut_gpus.get(uuid) != found:
            self._state.cut_gpus[uuid] = found
            self._show(uuid, found)
            self._report_lost()
            self._state.changed.notify()

    def _show(self, uuid: str, found: CutGpu | None) -> None:
        holds = [each.hold for each in found.slices] if found is not None else []
        for hold in MigHold:
            amount = holds.count(hold)
            self._reports.gauge("mig_slices", amount, device=uuid, hold=hold.value)
        lost = len(found.lost) if found is not None else 0
        self._reports.gauge("mig_slices", lost, device=uuid, hold="lost")

    def _inspect(self, device: Device) -> CutGpu | None:
        with MigMachine(self._machine) as gpus:
            return gpus.ask_one(
                device.index, partial(self._inspect_with, device), patience_s=LOOK_S
            )

    def _inspect_with(self, device: Device, there: MigDevice) -> CutGpu | None:
        if there.uuid != device.uuid:
            raise StateError(f"GPU {device.index} is now {there.uuid}, not {device.uuid}")
        journal = Journal(self._folder.mig / device.uuid)
        before, claim = journal.read().records, journal.claim
        gpu = there.driver.look_if_any()
        if gpu is None:
            return None
        read = journal.read()
        found = cut_gpu(gpu, before, read.records)
        if found.profiles:
            self._profiles[device.uuid] = found.profiles
        is_ours = claim and claim == journal.claim
        # An older GPU needs a reset for it, with all GPUs that NVLink joins to it.
        gives_way = is_ours and takes_mode_at_once(device) and not read.problems
        return replace(
            found,
            profiles=found.profiles or self.profiles(device),
            claim=claim if is_ours else 0,
            times_switched=journal.times_switched if is_ours else 0,
            problems=tuple(each.message for each in read.problems),
            gives_way=bool(
                gives_way
                and found.is_enabled
                and found.is_free
                and self._has_other_modes(device.uuid)
            ),
        )

    def _has_other_modes(self, uuid: str) -> bool:
        """Return whether a GPU serves a mode besides mig, by its rule and its mode policy."""
        modes = self._state.served_modes().get(uuid, ())
        is_for_mig = has_only_slices(modes) or is_for_mig_alone(self._folder, uuid)
        return bool(modes) and not is_for_mig

    def _report_lost(self) -> None:
        """Report each slice that others removed, once, to the node and its owner."""
        lost = {
            (record.holder, record.uuid): record
            for each in self._state.cut_gpus.values()
            for record in each.lost
        }
        self._lost.intersection_update(lost)
        self._reported_owners.intersection_update(lost)
        for key in lost.keys() - self._reported_owners:
            record = lost[key]
            text = (
                f"the slice {record.name} ({record.uuid}) of GPU {record.gpu} was removed by"
                " others: another MIG manager works on this node. Its programs fail; delete the pod"
                " to have it placed again"
            )
            if waiting := self._waiting_for(record.gpu):
                text += f". Until then {waiting} cannot be reset for its MIG mode"
            if key not in self._lost:
                self._lost.add(key)
                self._reports.node(LOST, text, is_warning=True)
                self._reports.count("mig_losses", device=record.gpu)
            share = next((each for each in self._shares() if each.id == ShareId(key[0])), None)
            if share is not None and share.owner is not None:
                # An agent that has just started does not know all shares: it reports later.
                self._reported_owners.add(key)
                self._reports.pod(share.owner, LOST, text, is_warning=True)

    def _waiting_for(self, uuid: str) -> str:
        """Name the GPUs whose reset needs this one to be free, too."""
        devices = self._state.devices
        peers = self.terms().peers.get(uuid, frozenset())
        waiting = sorted(
            each
            for each in peers & self._state.offer.mig_uses.keys()
            if each in devices and not takes_mode_at_once(devices[each])
        )
        return f"GPU {', '.join(waiting)}, which NVLink joins to it," if waiting else ""

    async def _begin_settling(self) -> None:
        if not self._folder.mig.is_dir():
            return
        now = time.monotonic()
        for uuid in await asyncio.to_thread(allocate.in_need, self._folder):
            device = self._state.devices.get(uuid)
            if device is None or uuid in self._settling or self._is_paused(uuid, STAYS, now):
                continue
            self._settling[uuid] = asyncio.create_task(self._settle(device))

    async def _settle(self, device: Device) -> None:
        try:
            await self._free_orphans(device, patience_s=_SETTLE_S)
        finally:
            self._settling.pop(device.uuid, None)

    async def _free_orphans(
        self, device: Device, *, patience_s: float, keeps_warm: bool = True
    ) -> bool:
        """Remove the slices without an owner; return whether that worked. Reports a failure."""
        use = self._state.offer.mig_uses.get(device.uuid)
        try:
            problems = await asyncio.to_thread(
                allocate.free_orphans_on,
                self._folder,
                self._machine,
                device.uuid,
                device.index,
                may_reset=use is not None and use.may_reset,
                patience_s=patience_s,
                keeps_warm=keeps_warm,
            )
        except AllotError as error:
            problems = [error]
        if problems:
            self._failed(device.uuid, STAYS, problems[0], more=len(problems) - 1)
        else:
            self._succeeded(device.uuid, STAYS)
        return not problems

    def _is_paused(self, uuid: str, reason: str, now: float) -> bool:
        return now < self._retry.get((uuid, reason), (0.0, 0.0))[0]

    def _failed(self, uuid: str, reason: str, error: AllotError, *, more: int = 0) -> None:
        """Retry later, with a growing pause: a hung GPU blocks one more thread each time."""
        _, waited = self._retry.get((uuid, reason), (0.0, 0.0))
        wait = min(max(_FIRST_RETRY_S, waited * 2), _LAST_RETRY_S)
        self._retry[uuid, reason] = (time.monotonic() + wait, wait)
        action = "read the slices" if reason == UNKNOWN else "remove unused slices"
        others = f" (and {more} more)" if more else ""
        text = f"cannot {action} of GPU {uuid}: {error.message}{others}"
        self._reports.count("mig_failures", device=uuid, reason=reason)
        self._report(uuid, reason, text)
        cut_gpu = self._state.cut_gpus.get(uuid)
        if reason == STAYS and cut_gpu is not None and cut_gpu.gives_way:
            self._state.cut_gpus[uuid] = replace(cut_gpu, gives_way=False)
            self._state.changed.notify()

    def _succeeded(self, uuid: str, reason: str) -> None:
        """Report and retry the next failure at once."""
        self._reported.over((uuid, reason))
        self._retry.pop((uuid, reason), None)

    def _report(self, uuid: str, reason: str, text: str) -> None:
        if self._reported.is_new((uuid, reason), text):
            self._reports.node(reason, text, is_warning=True)


def _stamp(journal: Path) -> int:
    """Return a number that changes with the journal; 0: no journal."""
    try:
        times = [journal.stat().st_mtime_ns]
        times += [each.stat().st_mtime_ns for each in journal.iterdir()]
    except OSError:
        return 0
    return sum(times) ^ len(times)
