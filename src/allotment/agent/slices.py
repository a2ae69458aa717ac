# SPDX-License-Identifier: Apache-2.0
"""The node's GPUs that are cut for who asks: what they are cut into now, and what is to go.

    a driver's look + the GPU's journal ──► NodeSlices.current ──► announcing, the shares' terms
    journals with work ──► settled, each GPU by itself ──► slices that nobody has go in time

A GPU is asked in a thread of its own with a bound on its patience: one that hangs costs what is
told of it alone. What others do to slices of ours is seen here, and told, and left so: nothing is
cut again under a running container, and nothing is fought for: who switches MIG off under us twice
within minutes has it off, for a pause (`mig_fights`).
"""

import asyncio
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final, NoReturn

from allotment.agent.cut_gpus import CutGpu, cut_gpu
from allotment.agent.mig_fights import Fights
from allotment.agent.protocols import Reports
from allotment.agent.resources import Offer, as_whole
from allotment.devices.mig_machine import LOOK_S, MigDevice, MigMachine
from allotment.devices.mig_tables import tabled_profiles
from allotment.devices.topology import nvlink_peers
from allotment.model.devices import Device
from allotment.model.errors import AllotError, StateError
from allotment.model.mig import MigHold, MigProfile
from allotment.model.requests import MIG
from allotment.model.shares import Share, ShareId
from allotment.modes.mig.journal import Journal
from allotment.modes.mig.mode import takes_mode_at_once
from allotment.shares import slicing
from allotment.shares.folders import StateFolder
from allotment.shares.modes_of_gpus import is_for_mig_alone
from allotment.shares.placing import MigTerms

__all__ = ["NodeSlices"]

LOST: Final = "SliceGone"
"""Reason of events: on the pod whose slice others removed, and on the node."""
STAYS: Final = "SliceNotRemoved"
UNKNOWN: Final = "SlicesNotKnown"
DAMAGED: Final = "SliceRecordDamaged"
_CONFIG: Final = "ConfigProblem"
"""Reasons of events on the node."""

_WATCH_S: Final = 0.5
"""How often it is asked whether a journal has changed: one look at a folder's time for each GPU."""
LOOK_AGAIN_S: Final = 10.0
"""How often a GPU is looked at without news: others may cut it."""
_SETTLE_S: Final = 60.0
"""How long a driver may take to remove slices before others are told of it."""
_CLEAR_S: Final = 15.0
"""How long a share of another mode waits for warm slices to go, on all its GPUs side by side, and
for the look at them: its start has some 20 s."""
_FIRST_RETRY_S: Final = 2.0
_LAST_RETRY_S: Final = 300.0


class NodeSlices:
    """Keeps it. All of it belongs to one event loop; `run` has to be running."""

    def __init__(
        self,
        folder: StateFolder,
        *,
        machine: Path | None,
        offer: Callable[[], Offer],
        devices: Callable[[], Mapping[str, Device]],
        links: Callable[[], Mapping[frozenset[str], int]],
        shares: Callable[[], Collection[Share]],
        reports: Reports,
        look_s: float = LOOK_AGAIN_S,
    ) -> None:
        """Take whom to ask. `devices` are the node's by UUID, `shares` those of containers.

        `look_s`: how often a GPU is looked at without news.
        """
        self._look_s = look_s
        self._folder = folder
        self._machine = machine
        self._offer = offer
        self._devices = devices
        self._links = links
        self._shares = shares
        self._reports = reports
        self._current: dict[str, CutGpu] = {}
        self._profiles: dict[str, tuple[MigProfile, ...]] = {}
        """Those that each GPU has told of last, for when it does not."""
        self._looking: dict[str, asyncio.Task[None]] = {}
        self._settling: dict[str, asyncio.Task[None]] = {}
        self._looked: dict[str, tuple[int, float]] = {}
        """When each was looked at, and how its journal was then."""
        self._retry: dict[tuple[str, str], tuple[float, float]] = {}
        """Of GPUs that did not do something: when they are asked again, and how long that waits."""
        self._told: dict[tuple[str, str], str] = {}
        """What was told last of a GPU, by the reason of its event."""
        self._lost: set[tuple[str, str]] = set()
        """Slices of which the node has been told that others removed them, by holder and UUID."""
        self._told_owners: set[tuple[str, str]] = set()
        self._fights = Fights(
            folder, machine=machine, reports=reports, changed=self._tell_followers
        )
        self._without: set[str] = set()
        """GPUs that have no MIG."""
        self._off: set[str] = set()
        """GPUs whose mode was switched off for somebody, which their inventory may not know yet."""
        self.followers: list[Callable[[], None]] = []
        """Called in the event loop when anything changed."""

    @property
    def current(self) -> Mapping[str, CutGpu]:
        """What each GPU that is cut for who asks is cut into, by UUID; not those without MIG."""
        return self._current

    def terms(self) -> MigTerms:
        """Say how GPUs may be cut, by the configuration in force. From any thread."""
        migs = self._offer().migs
        return MigTerms(
            keeps={uuid: use.keep_s for uuid, use in migs.items()},
            resets=frozenset(uuid for uuid, use in migs.items() if use.may_reset),
            peers=nvlink_peers(self._links()),
            paused=self._fights.paused,
            profiles=self.profiles,
        )

    @property
    def paused(self) -> Mapping[str, str]:
        """Why, by UUID, of GPUs whose MIG mode is not switched on again for now."""
        return self._fights.paused

    def profiles(self, device: Device) -> tuple[MigProfile, ...]:
        """Return what a GPU can be cut into that does not tell now: as it told, or by its model."""
        return self._profiles.get(device.uuid) or tabled_profiles(device)

    def served(self, offer: Offer) -> Mapping[str, tuple[str, ...]]:
        """Return in which modes each device is offered, by UUID; in mig, if it has that."""
        return {
            uuid: tuple(
                each
                for each in offer.shared.get(uuid, (mode,))
                if each != MIG or uuid not in self._without
            )
            for uuid, mode in offer.modes.items()
        }

    def as_it_is(self, device: Device) -> Device:
        """Return a device as it is since `clear` has been there. From any thread."""
        if device.slice_of is None and device.uuid in self._off:
            return as_whole(device)
        return device

    async def clear(self, uuids: Iterable[str]) -> None:
        """Have the warm slices of GPUs go at once that somebody chose for a share of another mode.

        A GPU of which anybody has a slice stays as it is, and so does one whose MIG mode is others'
        affair: the share is refused then, with the reason.
        """
        devices = (self._devices().get(uuid) for uuid in dict.fromkeys(uuids))
        there = [each for each in devices if each is not None and each.uuid in self._current]
        giving = [each for each in there if self._current[each.uuid].gives_way]
        await asyncio.gather(*map(self._clear_one, giving))  # each has the same time

    async def _clear_one(self, device: Device) -> None:
        uuid, settle_s = device.uuid, _CLEAR_S - LOOK_S
        try:
            problems = await asyncio.to_thread(
                self._settled, device, patience_s=settle_s, keeps_warm=False
            )
        except AllotError as error:
            problems = [error]
        if problems:
            self._failed(uuid, STAYS, problems[0], more=len(problems) - 1)
        else:
            self._works(uuid, STAYS)
            if not Journal(self._folder.mig / uuid).is_switched:
                self._off.add(uuid)
        try:
            found = await asyncio.to_thread(self._seen, device)
        except AllotError as error:
            self._failed(uuid, UNKNOWN, error)
            return
        if found is not None and not found.is_enabled:
            self._off.add(uuid)
        self._take_in(device, found)

    async def run(self) -> NoReturn:
        """Look and settle until cancelled."""
        try:
            while True:
                self._forget_others()
                self._fights.end_pauses()
                self._begin_looks()
                await self._begin_settling()
                self._tell_lost()
                await asyncio.sleep(_WATCH_S)
        finally:
            for task in (*self._looking.values(), *self._settling.values()):
                task.cancel()
            self._fights.close()

    # ---- looking ---------------------------------------------------------------------------------

    def _forget_others(self) -> None:
        devices = self._devices()
        self._off = {uuid for uuid in self._off if uuid in devices and devices[uuid].mig}
        gone = set(self._current) - set(self._offer().migs)
        for uuid in gone:
            del self._current[uuid]
            self._looked.pop(uuid, None)
            self._show(uuid, None)
        if gone:
            self._tell_followers()

    def _begin_looks(self) -> None:
        now = time.monotonic()
        for uuid in self._offer().migs:
            device = self._devices().get(uuid)
            if device is None or uuid in self._looking or self._waits(uuid, UNKNOWN, now):
                continue
            stamp = _stamp(self._folder.mig / uuid)
            before, when = self._looked.get(uuid, (-1, 0.0))
            if stamp != before or now - when >= self._look_s:
                self._looked[uuid] = (stamp, now)
                self._looking[uuid] = asyncio.create_task(self._look(device))

    async def _look(self, device: Device) -> None:
        uuid = device.uuid
        try:
            found = await asyncio.to_thread(self._seen, device)
        except AllotError as error:
            self._failed(uuid, UNKNOWN, error)
            return
        finally:
            self._looking.pop(uuid, None)
        self._works(uuid, UNKNOWN)
        self._take_in(device, found)

    def _take_in(self, device: Device, found: CutGpu | None) -> None:
        uuid = device.uuid
        if found is None:
            self._without.add(uuid)
            if self._current.pop(uuid, None) is not None:
                self._tell_followers()
            text = f"GPU {device.index} ({uuid}) has no MIG: mode mig of its rule has no effect"
            self._say(uuid, _CONFIG, text)
            return
        self._without.discard(uuid)
        if found.is_enabled:
            self._off.discard(uuid)
        self._fights.judge(device, found)
        if found.problems:
            self._say(uuid, DAMAGED, f"{'; '.join(found.problems)}: its slice is left alone")
        else:
            self._told.pop((uuid, DAMAGED), None)
        if self._waits(uuid, STAYS, time.monotonic()):
            found = replace(found, gives_way=False)  # it did not, whatever the reason
        if self._current.get(uuid) != found:
            self._current[uuid] = found
            self._show(uuid, found)
            self._tell_lost()
            self._tell_followers()

    def _show(self, uuid: str, found: CutGpu | None) -> None:
        holds = [each.hold for each in found.slices] if found is not None else []
        for hold in MigHold:
            amount = holds.count(hold)
            self._reports.gauge("mig_slices", amount, device=uuid, hold=hold.value)
        lost = len(found.lost) if found is not None else 0
        self._reports.gauge("mig_slices", lost, device=uuid, hold="lost")

    def _seen(self, device: Device) -> CutGpu | None:
        with MigMachine(self._machine) as gpus:
            return gpus.ask_one(device.index, partial(self._see, device), patience_s=LOOK_S)

    def _see(self, device: Device, there: MigDevice) -> CutGpu | None:
        if there.uuid != device.uuid:
            raise StateError(f"GPU {device.index} is {there.uuid} by now, not {device.uuid}")
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
        # For its reset, an older one would have to be free of all that NVLink joins to it.
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
        """Tell whether a GPU serves a mode besides mig, by its rule and by what was said of it."""
        modes = self.served(self._offer()).get(uuid, ())
        return any(each != MIG for each in modes) and not is_for_mig_alone(self._folder, uuid)

    def _tell_lost(self) -> None:
        """Tell owners whose slice others have removed; once, and nothing is done about it."""
        lost = {
            (record.holder, record.uuid): record
            for each in self._current.values()
            for record in each.lost
        }
        self._lost.intersection_update(lost)
        self._told_owners.intersection_update(lost)
        for key in lost.keys() - self._told_owners:
            record = lost[key]
            text = (
                f"the slice {record.name} ({record.uuid}) of GPU {record.gpu} was removed by"
                " others: another manager of MIG works on this node. Its programs fail; delete the"
                " pod, so that it is placed anew"
            )
            if waiting := self._waiting_for(record.gpu):
                text += f". Until then {waiting} cannot be reset for its MIG mode"
            if key not in self._lost:
                self._lost.add(key)
                self._reports.node(LOST, text, is_warning=True)
                self._reports.count("mig_losses", device=record.gpu)
            share = next((each for each in self._shares() if each.id == ShareId(key[0])), None)
            if share is not None and share.owner is not None:
                # Shares are not known in the first moments of an agent: then it is told later.
                self._told_owners.add(key)
                self._reports.pod(share.owner, LOST, text, is_warning=True)

    def _waiting_for(self, uuid: str) -> str:
        """Name the GPUs whose reset is this one's, too, and waits until nobody has that."""
        devices = self._devices()
        peers = self.terms().peers.get(uuid, frozenset())
        waiting = sorted(
            each
            for each in peers & self._offer().migs.keys()
            if each in devices and not takes_mode_at_once(devices[each])
        )
        return f"GPU {', '.join(waiting)}, which NVLink joins to it," if waiting else ""

    # ---- settling --------------------------------------------------------------------------------

    async def _begin_settling(self) -> None:
        if not self._folder.mig.is_dir():
            return
        now = time.monotonic()
        for uuid in await asyncio.to_thread(slicing.in_need, self._folder):
            device = self._devices().get(uuid)
            if device is None or uuid in self._settling or self._waits(uuid, STAYS, now):
                continue
            self._settling[uuid] = asyncio.create_task(self._settle(device))

    async def _settle(self, device: Device) -> None:
        try:
            problems = await asyncio.to_thread(self._settled, device, patience_s=_SETTLE_S)
        except AllotError as error:
            problems = [error]
        finally:
            self._settling.pop(device.uuid, None)
        if problems:
            self._failed(device.uuid, STAYS, problems[0], more=len(problems) - 1)
        else:
            self._works(device.uuid, STAYS)

    def _settled(
        self, device: Device, *, patience_s: float, keeps_warm: bool = True
    ) -> list[AllotError]:
        use = self._offer().migs.get(device.uuid)
        return slicing.settle_one(
            self._folder,
            self._machine,
            device.uuid,
            device.index,
            may_reset=use is not None and use.may_reset,
            patience_s=patience_s,
            keeps_warm=keeps_warm,
        )

    # ---- telling ---------------------------------------------------------------------------------

    def _waits(self, uuid: str, what: str, now: float) -> bool:
        return now < self._retry.get((uuid, what), (0.0, 0.0))[0]

    def _failed(self, uuid: str, what: str, error: AllotError, *, more: int = 0) -> None:
        """Ask it again later, and ever more seldom: a GPU that hangs keeps a thread each time."""
        _, waited = self._retry.get((uuid, what), (0.0, 0.0))
        wait = min(max(_FIRST_RETRY_S, waited * 2), _LAST_RETRY_S)
        self._retry[uuid, what] = (time.monotonic() + wait, wait)
        doing = "is not known" if what == UNKNOWN else "is not removed yet where nobody has it"
        others = f" (and {more} more)" if more else ""
        text = f"what MIG has cut GPU {uuid} into {doing}: {error.message}{others}"
        self._reports.count("mig_failures", device=uuid, reason=what)
        self._say(uuid, what, text)
        there = self._current.get(uuid)
        if what == STAYS and there is not None and there.gives_way:
            self._current[uuid] = replace(there, gives_way=False)
            self._tell_followers()

    def _works(self, uuid: str, what: str) -> None:
        """Have what fails next be told again, and tried again soon."""
        self._told.pop((uuid, what), None)
        self._retry.pop((uuid, what), None)

    def _say(self, uuid: str, reason: str, text: str) -> None:
        if self._told.get((uuid, reason)) != text:
            self._told[uuid, reason] = text
            self._reports.node(reason, text, is_warning=True)

    def _tell_followers(self) -> None:
        for each in self.followers:
            each()


def _stamp(journal: Path) -> int:
    """Return what changes when slices come, go or change hands; 0: there is no journal."""
    try:
        times = [journal.stat().st_mtime_ns]
        times += [each.stat().st_mtime_ns for each in journal.iterdir()]
    except OSError:
        return 0
    return sum(times) ^ len(times)
