# SPDX-License-Identifier: Apache-2.0
"""The node's GPUs that are cut for who asks: what they are cut into now, and what is to go.

    a driver's look + the GPU's journal ──► NodeSlices.current ──► announcing, the shares' terms
    journals with work ──► settled, each GPU by itself ──► slices that nobody has go in time

A GPU is asked in a thread of its own with a bound on its patience: one that hangs costs what is
told of it alone. What others do to slices of ours is seen here, and told, and left so: nothing is
cut again under a running container, and nothing is fought for.
"""

import asyncio
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final, NoReturn

import structlog

from allotment.agent.protocols import Reports
from allotment.agent.resources import Offer
from allotment.devices.mig_machine import LOOK_S, MigDevice, MigMachine
from allotment.devices.mig_tables import tabled_profiles
from allotment.model.devices import Device
from allotment.model.errors import AllotError, StateError
from allotment.model.mig import MigGpu, MigHold, MigProfile, MigSlice
from allotment.model.shares import Share, ShareId
from allotment.modes.mig.journal import Journal
from allotment.modes.mig.judging import foreign, stands_for
from allotment.modes.mig.records import SliceRecord, Stage
from allotment.shares import slicing
from allotment.shares.folders import StateFolder
from allotment.shares.placing import MigTerms

__all__ = ["CutGpu", "NodeSlices", "cut_gpu"]

_log = structlog.get_logger("allotment.agent")

LOST: Final = "SliceGone"
STAYS: Final = "SliceNotRemoved"
"""Reasons of events: on the pod whose slice others removed, and on the node."""
_CONFIG: Final = "ConfigProblem"

_WATCH_S: Final = 0.5
"""How often it is asked whether a journal has changed: one look at a folder's time for each GPU."""
_LOOK_S: Final = 10.0
"""How often a GPU is looked at without news: others may cut it."""
_SETTLE_S: Final = 60.0
"""How long a driver may take to remove slices before others are told of it."""
_FIRST_RETRY_S: Final = 2.0
_LAST_RETRY_S: Final = 300.0
_NVLINK: Final = 100
"""The least score of two GPUs that NVLink joins (`devices.topology`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CutGpu:
    """What one GPU is cut into, as far as it is known."""

    profiles: tuple[MigProfile, ...]
    is_enabled: bool
    slices: tuple[MigSlice, ...] = ()
    """All that are there or being made; who has one is its share's id."""
    lost: tuple[SliceRecord, ...] = ()
    """Ours, of shares, which others have removed."""

    @property
    def names(self) -> Mapping[int, str]:
        """The profiles' names by their numbers."""
        return {each.number: each.name for each in self.profiles}


def cut_gpu(gpu: MigGpu, before: Collection[SliceRecord], after: Collection[SliceRecord]) -> CutGpu:
    """Join what a driver says of a GPU with what its journal did before and after. Pure.

    What came, went or changed meanwhile is nobody else's doing, and is looked at again.
    """
    slices = [
        MigSlice(profile=each.profile, start=each.start, size=each.size, hold=MigHold.FOREIGN)
        for each in foreign(after, foreign(before, gpu.instances))
    ]
    lost = []
    for record in after:
        is_there = stands_for(record, gpu.instances) is not None
        if record.stage is Stage.READY and not is_there and record in before:
            if record.holder:
                lost.append(record)
            continue
        if record.stage is Stage.LEAVING and not is_there:
            continue
        slices.append(
            MigSlice(
                profile=record.profile,
                start=record.start,
                size=record.size,
                hold=MigHold.USED if record.holder else MigHold.IDLE,
                holder=record.holder,
            )
        )
    return CutGpu(
        profiles=gpu.profiles,
        is_enabled=gpu.is_enabled,
        slices=tuple(sorted(slices, key=lambda each: (each.start, each.size))),
        lost=tuple(lost),
    )


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
    ) -> None:
        """Take whom to ask. `devices` are the node's by UUID, `shares` those of containers."""
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
        self._retry: dict[str, tuple[float, float]] = {}
        """Of GPUs that did not do it: when they are asked again, and how long that waits."""
        self._told: dict[str, str] = {}
        self._lost: frozenset[tuple[str, str]] = frozenset()
        self.followers: list[Callable[[], None]] = []
        """Called in the event loop when anything changed."""

    @property
    def current(self) -> Mapping[str, CutGpu]:
        """What each GPU that is cut for who asks is cut into, by UUID; not those without MIG."""
        return self._current

    def terms(self) -> MigTerms:
        """Say how GPUs may be cut, by the configuration in force. From any thread."""
        migs = self._offer().migs
        joined: dict[str, set[str]] = {}
        for pair, points in self._links().items():
            if points >= _NVLINK:
                for uuid in pair:
                    joined.setdefault(uuid, set()).update(pair - {uuid})
        return MigTerms(
            keeps={uuid: use.keep_s for uuid, use in migs.items()},
            resets=frozenset(uuid for uuid, use in migs.items() if use.may_reset),
            peers={uuid: frozenset(peers) for uuid, peers in joined.items()},
            profiles=self.profiles,
        )

    def profiles(self, device: Device) -> tuple[MigProfile, ...]:
        """Return what a GPU can be cut into that does not tell now: as it told, or by its model."""
        return self._profiles.get(device.uuid) or tabled_profiles(device)

    async def run(self) -> NoReturn:
        """Look and settle until cancelled."""
        try:
            while True:
                self._forget_others()
                self._begin_looks()
                await self._begin_settling()
                await asyncio.sleep(_WATCH_S)
        finally:
            for task in (*self._looking.values(), *self._settling.values()):
                task.cancel()

    # ---- looking ---------------------------------------------------------------------------------

    def _forget_others(self) -> None:
        gone = set(self._current) - set(self._offer().migs)
        for uuid in gone:
            del self._current[uuid]
            self._looked.pop(uuid, None)
        if gone:
            self._tell_followers()

    def _begin_looks(self) -> None:
        now = time.monotonic()
        for uuid in self._offer().migs:
            device = self._devices().get(uuid)
            if device is None or uuid in self._looking or self._waits(uuid, now):
                continue
            stamp = _stamp(self._folder.mig / uuid)
            before, when = self._looked.get(uuid, (-1, 0.0))
            if stamp != before or now - when >= _LOOK_S:
                self._looked[uuid] = (stamp, now)
                self._looking[uuid] = asyncio.create_task(self._look(device))

    async def _look(self, device: Device) -> None:
        uuid = device.uuid
        try:
            found = await asyncio.to_thread(self._seen, device)
        except AllotError as error:
            self._failed(uuid, "look", error)
            return
        finally:
            self._looking.pop(uuid, None)
        if found is None:
            if self._current.pop(uuid, None) is not None:
                self._tell_followers()
            text = f"GPU {device.index} ({uuid}) has no MIG: mode mig of its rule has no effect"
            self._say(uuid, text, reason=_CONFIG)
            return
        if self._current.get(uuid) != found:
            self._current[uuid] = found
            self._tell_lost()
            self._tell_followers()

    def _seen(self, device: Device) -> CutGpu | None:
        with MigMachine(self._machine) as gpus:
            return gpus.ask_one(device.index, partial(self._see, device), patience_s=LOOK_S)

    def _see(self, device: Device, there: MigDevice) -> CutGpu | None:
        if there.uuid != device.uuid:
            raise StateError(f"GPU {device.index} is {there.uuid} by now, not {device.uuid}")
        journal = Journal(self._folder.mig / device.uuid)
        before = journal.read().records
        gpu = there.driver.look_if_any()
        if gpu is None:
            return None
        found = cut_gpu(gpu, before, journal.read().records)
        if found.profiles:
            self._profiles[device.uuid] = found.profiles
            return found
        return CutGpu(
            profiles=self.profiles(device),
            is_enabled=found.is_enabled,
            slices=found.slices,
            lost=found.lost,
        )

    def _tell_lost(self) -> None:
        """Tell owners whose slice others have removed; once, and nothing is done about it."""
        lost = {
            (record.holder, record.uuid): record
            for each in self._current.values()
            for record in each.lost
        }
        for (holder, uuid), record in lost.items():
            if (holder, uuid) in self._lost:
                continue
            text = (
                f"the slice {record.name} ({uuid}) of GPU {record.gpu} was removed by others:"
                " another manager of MIG works on this node. Its programs fail; delete the pod, so"
                " that it is placed anew"
            )
            self._reports.node(LOST, text, is_warning=True)
            share = next((each for each in self._shares() if each.id == ShareId(holder)), None)
            if share is not None and share.owner is not None:
                self._reports.pod(share.owner, LOST, text, is_warning=True)
        self._lost = frozenset(lost)

    # ---- settling --------------------------------------------------------------------------------

    async def _begin_settling(self) -> None:
        if not self._folder.mig.is_dir():
            return
        now = time.monotonic()
        for uuid in await asyncio.to_thread(slicing.in_need, self._folder):
            device = self._devices().get(uuid)
            if device is None or uuid in self._settling or self._waits(uuid, now):
                continue
            self._settling[uuid] = asyncio.create_task(self._settle(device))

    async def _settle(self, device: Device) -> None:
        uuid = device.uuid
        use = self._offer().migs.get(uuid)
        try:
            problems = await asyncio.to_thread(
                slicing.settle_one,
                self._folder,
                self._machine,
                uuid,
                device.index,
                may_reset=use is not None and use.may_reset,
                patience_s=_SETTLE_S,
            )
        except AllotError as error:
            problems = [error]
        finally:
            self._settling.pop(uuid, None)
        if problems:
            self._failed(uuid, "settle", problems[0])
        else:
            self._retry.pop(uuid, None)
            self._told.pop(uuid, None)

    def _waits(self, uuid: str, now: float) -> bool:
        return now < self._retry.get(uuid, (0.0, 0.0))[0]

    def _failed(self, uuid: str, what: str, error: AllotError) -> None:
        """Ask it again later, and ever more seldom: a GPU that hangs keeps a thread each time."""
        _, waited = self._retry.get(uuid, (0.0, 0.0))
        wait = min(max(_FIRST_RETRY_S, waited * 2), _LAST_RETRY_S)
        self._retry[uuid] = (time.monotonic() + wait, wait)
        doing = "is not known" if what == "look" else "is not removed yet where nobody has it"
        self._say(uuid, f"what MIG has cut GPU {uuid} into {doing}: {error.message}")

    def _say(self, uuid: str, text: str, *, reason: str = STAYS) -> None:
        if self._told.get(uuid) != text:
            self._told[uuid] = text
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
