# SPDX-License-Identifier: Apache-2.0
"""The GPUs that a slice could be had of: what each has, who has what of it, and why not.

    survey = Survey(folder, order, grounds)
    seen = survey.look(gpus)                  # journal, driver and shares; nothing is changed

What is found may be old by the time that it is used. Whoever cuts by it (`cutting`) is refused then
by journal and driver, and looks again.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Final

from allotment.devices.mig_machine import LOOK_S, MigDevice, MigMachine
from allotment.model.devices import Device
from allotment.model.errors import AllotError, StateError
from allotment.model.mig import (
    MigGpu,
    MigHold,
    MigInstance,
    MigLayout,
    MigPlace,
    MigRequest,
    MigSlice,
)
from allotment.model.requests import MIG
from allotment.model.shares import ShareId
from allotment.modes.mig.journal import Journal
from allotment.modes.mig.judging import stands_for
from allotment.modes.mig.mode import takes_mode_at_once
from allotment.modes.mig.records import SliceRecord, Stage
from allotment.modes.mig.slices import Slices
from allotment.shares import lives, mps_daemons
from allotment.shares.folders import StateFolder
from allotment.shares.found import Found
from allotment.shares.modes_of_gpus import allowed_on, refusal
from allotment.shares.placing import MigTerms
from allotment.shares.records import read_record

__all__ = ["Grounds", "Seen", "SliceOrder", "Survey"]

_SHOWN: Final = 4
"""How many of the processes that use something are named."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SliceOrder:
    """What somebody wants of slices."""

    holder: str
    """The id of the share that they are for."""
    request: MigRequest
    places: tuple[tuple[str, MigPlace], ...] = ()
    """Whoever chose them already: on which GPU, by UUID, and where there. Empty: chosen here."""
    after: frozenset[str] = frozenset()
    """Shares that are never in use beside this one: it may have their slices, as they are."""
    machine: Path | None = None
    spec: str | None = None
    """What a simulated machine was described by, for hints."""


def _no_objection(_: Device) -> str:
    return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grounds:
    """What there is to be cut, and what may be done to it."""

    devices: Mapping[str, Device]
    """GPUs by UUID."""
    objection: Callable[[Device], str] = _no_objection
    """Why a GPU is not to serve; empty: it may."""
    terms: MigTerms = field(default_factory=MigTerms)
    asks_all: bool = False
    """A GPU that is not among `devices` is asked as well, so that a refusal names it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """One GPU, as far as a choice depends on it."""

    index: int
    uuid: str
    gpu: MigGpu | None
    layout: MigLayout | None = None
    """None: it is not to be chosen, and `why` says why not."""
    why: str = ""
    warm: Mapping[tuple[int, int], SliceRecord]
    """Slices that can be had as they are, by profile's number and start."""
    siblings: Mapping[tuple[int, int], str] = field(default_factory=dict)
    """Those of them that a container of the same pod has, never at once with this one, by place as
    well, and who. They may be had, and not be removed: that container may start again."""
    is_changing: bool = False
    """Wait: a slice is being removed, or may be, or an MPS daemon that no share needs stops."""
    needs_reset: bool = False
    """Its MIG is off, and is switched on by a reset, which is not allowed here."""
    is_unclear: bool = False
    """Somebody makes a slice his own, or sees that it is nobody's, or ends in one whose share has
    gone: a matter of moments."""


class Survey:
    """What one search for slices looks at, each time anew."""

    def __init__(self, folder: StateFolder, order: SliceOrder, grounds: Grounds) -> None:
        """Take what is wanted, and what may be used."""
        self._folder = folder
        self._order = order
        self._grounds = grounds

    def look(self, gpus: MigMachine, uuids: Collection[str] | None) -> list[Seen]:
        """Look at the GPUs that may serve, or at those of them that are named, all at once."""
        known = self._grounds.devices
        among = None
        if not self._grounds.asks_all:
            wanted = known if uuids is None else uuids
            among = {known[each].index for each in wanted if each in known}
        taken = self._taken()
        answers = gpus.ask(partial(self._see, taken), patience_s=LOOK_S, among=among)
        return [
            Seen(index=index, uuid=f"GPU {index}", gpu=None, warm={}, why=answer.message)
            if isinstance(answer, AllotError)
            else answer
            for index, answer in answers
        ]

    def _taken(self) -> dict[str, list[Found]]:
        """Return the shares that are on each GPU, in slices or not, by UUID."""
        taken: dict[str, list[Found]] = {}
        for found in lives.look(self._folder):
            gpus = {each.driver_uuid for each in found.devices()} | found.limits().keys()
            for uuid in gpus:
                taken.setdefault(uuid, []).append(found)
        return taken

    def _see(self, taken: Mapping[str, Collection[Found]], device: MigDevice) -> Seen:
        seen = Seen(index=device.index, uuid=device.uuid, gpu=None, warm={})
        here = self._grounds.devices.get(device.uuid)
        if here is None:
            return replace(seen, why="it does not answer")
        if why := self._grounds.objection(here) or self.kept(here.uuid):
            return replace(seen, why=why)
        gpu = device.driver.look_if_any()
        if gpu is None:
            return replace(seen, why="has no MIG")
        if not gpu.is_enabled and (why := self._why_off(device, here, taken)):
            return replace(
                seen,
                gpu=gpu,
                why=why,
                is_changing=why == mps_daemons.STOPS,
                needs_reset=not self._takes_mode(here),
            )
        if not gpu.profiles:
            gpu = replace(gpu, profiles=self._grounds.terms.profiles(here))
        if not gpu.profiles:
            why = "MIG is off, and its driver tells what it can be cut into only when it is on"
            return replace(seen, gpu=gpu, why=why)
        journal = Journal(self._folder.mig / device.uuid)
        records = journal.read().records
        if any(each.stage is not Stage.READY and journal.is_free(each.id) for each in records):
            # Of somebody who died at it: it may be all that is in the way.
            Slices(device.driver, journal).settle(self._is_there, keep_s=0)
            gpu, records = device.driver.look(), journal.read().records
        held = {each.id: self._hold(each, journal) for each in records}
        left_in = self._left_in(device, gpu, records, held)
        held |= left_in
        holds = {
            each.gpu_instance: held[record.id]
            for each in gpu.instances
            if (record := _record_at(records, each)) is not None
        }
        there = {(each.profile, each.start) for each in gpu.instances}
        decided = [
            MigSlice(
                profile=each.profile,
                start=each.start,
                size=each.size,
                holder=held[each.id][1],
            )
            for each in records
            if each.stage in {Stage.INTENDED, Stage.CUT} and (each.profile, each.start) not in there
        ]
        warm = [
            each
            for each in records
            if each.stage is Stage.READY
            and held[each.id][0] is MigHold.IDLE
            and stands_for(each, gpu.instances) is not None
        ]
        return replace(
            seen,
            gpu=gpu,
            layout=MigLayout.of(gpu, holds=holds, decided=decided),
            warm={(each.profile, each.start): each for each in warm},
            siblings={
                (each.profile, each.start): f"share {self._name_of(each.holder)}"
                for each in warm
                if each.holder in self._order.after
            },
            is_changing=any(
                # Nobody else makes one for this order: it is an earlier attempt's, being settled.
                each.stage is not Stage.READY
                and (each.stage is Stage.LEAVING or each.holder == self._order.holder)
                and not journal.is_free(each.id)
                for each in records
            ),
            is_unclear=bool(left_in)
            or any(
                each.stage is Stage.READY and each.holder and not self._is_there(each.holder)
                for each in records
            ),
        )

    def kept(self, uuid: str) -> str:
        """Say why a GPU is not for slices; whoever chose elsewhere did so before that was said."""
        return "" if self._order.places else refusal(allowed_on(self._folder, uuid), MIG)

    def _hold(self, record: SliceRecord, journal: Journal) -> tuple[MigHold, str]:
        if record.stage is Stage.LEAVING:
            return MigHold.USED, "a slice that is being removed"
        is_ready = record.stage is Stage.READY
        if record.holder and not (is_ready and self._is_left(record, journal)):
            return MigHold.USED, f"share {self._name_of(record.holder)}"
        return MigHold.IDLE, ""

    def _left_in(
        self,
        device: MigDevice,
        gpu: MigGpu,
        records: Iterable[SliceRecord],
        held: Mapping[str, tuple[MigHold, str]],
    ) -> dict[str, tuple[MigHold, str]]:
        """Return the slices whose share has gone and whose programs run on: they have it still.

        Where a slice was chosen already, and with a share that is never in use beside this one,
        they are about to end: the driver takes a moment to see that.
        """
        found: dict[str, tuple[MigHold, str]] = {}
        for each in () if self._order.places else records:
            if held[each.id][0] is not MigHold.IDLE or each.holder in self._order.after:
                continue
            instance = stands_for(each, gpu.instances)
            if instance and (users := device.driver.users(instance.gpu_instance)):
                what = "process" if len(users) == 1 else "processes"
                who = ", ".join(map(str, users[:_SHOWN]))
                found[each.id] = (MigHold.USED, f"{what} {who}")
        return found

    def _is_left(self, record: SliceRecord, journal: Journal) -> bool:
        """Tell whether who had a slice has it no more, or never beside the share of the order.

        Whoever is to settle it may not have come yet. Its maker keeps the lock on it until its
        share is there.
        """
        if record.holder in self._order.after:
            return True
        return journal.is_free(record.id) and not self._is_there(record.holder)

    def _is_there(self, share: str) -> bool:
        return self._folder.share(ShareId(share)).is_dir()

    def _name_of(self, share: str) -> str:
        try:
            return read_record(self._folder.share(ShareId(share))).name
        except (StateError, FileNotFoundError):
            return f"{share}, which is being made"

    def _takes_mode(self, here: Device) -> bool:
        return takes_mode_at_once(here) or here.uuid in self._grounds.terms.resets

    def _why_off(
        self, device: MigDevice, here: Device, taken: Mapping[str, Collection[Found]]
    ) -> str:
        """Tell why the MIG mode of a GPU cannot be switched on for a slice, if it cannot."""
        off = "MIG is off, and"
        why = self._grounds.terms.paused.get(here.uuid) or self._why_no_reset(here, taken)
        if why:
            return f"{off} {why}"
        # Who had a slice of a GPU whose MIG is off has lost it, and nothing to lose.
        if shares := [each for each in taken.get(here.uuid, ()) if here.uuid in each.limits()]:
            return f"{off} cannot be switched on beside share {_names(shares)}"
        place = mps_daemons.place_of(self._folder, here.uuid)
        if place.status().holds_gpu and place.is_owned():
            place.ask_for_way()
            return mps_daemons.STOPS
        if using := device.driver.processes():
            users = ", ".join(map(str, using[:_SHOWN]))
            return f"{off} cannot be switched on while processes use it: {users}"
        return ""

    def _why_no_reset(self, here: Device, taken: Mapping[str, Collection[Found]]) -> str:
        """Tell why a GPU may not be reset, if it needs that for its mode and may not."""
        if takes_mode_at_once(here):
            return ""
        if not self._takes_mode(here):
            return "this GPU takes it with a reset only, which is not allowed here"
        for peer in self._grounds.terms.peers.get(here.uuid, ()):
            if shares := taken.get(peer):
                return (
                    f"a reset would stop GPU {peer} as well, which NVLink joins to it and share"
                    f" {_names(shares)} has"
                )
        return ""


def _names(shares: Iterable[Found]) -> str:
    return ", ".join(each.name for each in shares)


def _record_at(records: Iterable[SliceRecord], instance: MigInstance) -> SliceRecord | None:
    return next((each for each in records if stands_for(each, (instance,))), None)
