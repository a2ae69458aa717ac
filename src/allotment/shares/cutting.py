# SPDX-License-Identifier: Apache-2.0
"""Slices for a share that is about to be made: chosen, or as they were chosen, and then cut.

    with MigMachine(machine) as gpus, ExitStack() as works:
        for cut in Cutter(folder, order, gpus, grounds).cut(works):
            ...                            # nobody takes these for left over until the block ends

A slice takes as long as its driver, and is made without the state folder's lock: what keeps two
from the same slots is the GPU's journal, and who comes second chooses again. Both front doors cut
by this: `allot run` (`slicing`) and the node agent (`pods`).
"""

import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Final

from allotment.devices.mig_machine import LOOK_S, MigDevice, MigMachine, reset
from allotment.model.devices import Device, DeviceSlice
from allotment.model.errors import (
    AllotError,
    BusyError,
    DoesNotFitError,
    NotFoundError,
    StateError,
)
from allotment.model.mig import (
    MigGpu,
    MigHold,
    MigInstance,
    MigLayout,
    MigPlace,
    MigProfile,
    MigRequest,
    MigSlice,
)
from allotment.model.placements import Placed
from allotment.model.requests import MIG
from allotment.model.shares import ShareId
from allotment.modes.mig.journal import Journal, Work
from allotment.modes.mig.judging import stands_for
from allotment.modes.mig.mode import takes_mode_at_once
from allotment.modes.mig.records import SliceRecord, Stage
from allotment.modes.mig.slices import Slices
from allotment.placement.mig import MigChoice, MigRefusal, choose, serving
from allotment.shares import lives, mps_daemons
from allotment.shares.folders import StateFolder
from allotment.shares.found import Found
from allotment.shares.modes_of_gpus import allowed_on, refusal
from allotment.shares.placing import MigTerms
from allotment.shares.records import read_record
from allotment.shares.steps import step

__all__ = ["WORK_S", "Cut", "Cutter", "Grounds", "SliceOrder"]

WORK_S: Final = 120.0
"""How long a driver may take to make a slice, or to remove one."""
_TRIES: Final = 64
"""How often others may be first at what was chosen: each time one of them has a slice."""
_CLEARED_S: Final = 1.0
"""How long it may be unclear whether a slice is somebody's, before it is taken for that."""
_PAUSE_S: Final = 0.01
_LONGEST_PAUSE_S: Final = 0.2


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
class Cut:
    """A slice that is there, and its record, which is the caller's work."""

    work: Work
    placed: Placed


@dataclass(frozen=True, slots=True, kw_only=True)
class _Seen:
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
    is_unclear: bool = False
    """Somebody makes a slice his own, or sees that it is nobody's: a matter of moments."""


class Cutter:
    """One search for slices."""

    def __init__(
        self, folder: StateFolder, order: SliceOrder, gpus: MigMachine, grounds: Grounds
    ) -> None:
        """Take what is wanted, the machine, which is open, and what of it may be used."""
        self._folder = folder
        self._order = order
        self._gpus = gpus
        self._grounds = grounds

    def cut(self, works: ExitStack) -> list[Cut]:
        """Have all slices of the order, in its order; each one's record is entered into `works`.

        Raises `DoesNotFitError` with what each GPU has, and what the drivers raise. What was made
        until then is nobody's once `works` is left, and for whoever settles.
        """
        if self._order.places:
            return [
                self._one(works, partial(_as_placed, *each), {each[0]})
                for each in self._order.places
            ]
        found: list[Cut] = []
        while len(found) < self._order.request.count:
            left = replace(self._order.request, count=self._order.request.count - len(found))
            found.append(self._one(works, partial(self._choice, left), None))
        return found

    def _one(
        self,
        works: ExitStack,
        chosen: "Callable[[Sequence[_Seen]], MigChoice | DoesNotFitError]",
        uuids: Collection[str] | None,
    ) -> Cut:
        """Choose and take until nobody else was first."""
        last: AllotError | None = None
        began = time.monotonic()
        deadline = began + WORK_S
        for number in range(_TRIES):
            if time.monotonic() > deadline:
                break
            if number:
                time.sleep(min(_LONGEST_PAUSE_S, _PAUSE_S * number))
            seen = self._look(uuids)
            choice = chosen(seen)
            if isinstance(choice, DoesNotFitError):
                last = choice
                is_unclear = any(each.is_unclear for each in seen)
                if is_unclear and time.monotonic() < began + _CLEARED_S:
                    continue
                if not any(each.is_changing for each in seen):
                    raise last
                continue
            here = next(each for each in seen if each.uuid == choice.gpu)
            try:
                cut = self._take(here, choice)
            except (BusyError, DoesNotFitError, NotFoundError) as error:
                last = error
                continue
            works.enter_context(cut.work)
            return cut
        raise last or AllotError("no slice could be had")

    def _choice(self, wanted: MigRequest, seen: Sequence[_Seen]) -> MigChoice | DoesNotFitError:
        layouts = [each.layout for each in seen if each.layout is not None]
        chosen = choose(layouts, wanted)
        if not isinstance(chosen, MigRefusal):
            here = next(each for each in seen if each.uuid == chosen[0].gpu)
            if any((each.profile, each.start) in here.siblings for each in chosen[0].removes):
                apart = [_kept_apart(each.layout, each.siblings) for each in seen if each.layout]
                chosen = choose(apart, wanted)
        return self._refusal(chosen, seen) if isinstance(chosen, MigRefusal) else chosen[0]

    # ---- looking ---------------------------------------------------------------------------------

    def _look(self, uuids: Collection[str] | None) -> list[_Seen]:
        known = self._grounds.devices
        among = None
        if not self._grounds.asks_all:
            wanted = known if uuids is None else uuids
            among = {known[each].index for each in wanted if each in known}
        taken = self._taken()
        answers = self._gpus.ask(partial(self._see, taken), patience_s=LOOK_S, among=among)
        return [
            _Seen(index=index, uuid=f"GPU {index}", gpu=None, warm={}, why=answer.message)
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

    def _see(self, taken: Mapping[str, Collection[Found]], device: MigDevice) -> _Seen:
        seen = _Seen(index=device.index, uuid=device.uuid, gpu=None, warm={})
        here = self._grounds.devices.get(device.uuid)
        if here is None:
            return replace(seen, why="it does not answer")
        if why := self._grounds.objection(here) or self._kept(here.uuid):
            return replace(seen, why=why)
        gpu = device.driver.look_if_any()
        if gpu is None:
            return replace(seen, why="has no MIG")
        if not gpu.is_enabled and (why := self._why_off(device, here, taken)):
            return replace(seen, gpu=gpu, why=why, is_changing=why == mps_daemons.STOPS)
        if not gpu.profiles:
            gpu = replace(gpu, profiles=self._grounds.terms.profiles(here))
        if not gpu.profiles:
            why = "MIG is off, and its driver tells what it can be cut into only when it is on"
            return replace(seen, gpu=gpu, why=why)
        journal = self._journal(device)
        records = journal.read().records
        if any(each.stage is not Stage.READY and journal.is_free(each.id) for each in records):
            # Of somebody who died at it: it may be all that is in the way.
            Slices(device.driver, journal).settle(self._is_there, keep_s=0)
            gpu, records = device.driver.look(), journal.read().records
        held = {each.id: self._hold(each, journal) for each in records}
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
            is_unclear=any(
                each.stage is Stage.READY and each.holder and not self._is_there(each.holder)
                for each in records
            ),
        )

    def _kept(self, uuid: str) -> str:
        """Say why a GPU is not for slices; whoever chose elsewhere did so before that was said."""
        return "" if self._order.places else refusal(allowed_on(self._folder, uuid), MIG)

    def _hold(self, record: SliceRecord, journal: Journal) -> tuple[MigHold, str]:
        if record.stage is Stage.LEAVING:
            return MigHold.USED, "a slice that is being removed"
        is_ready = record.stage is Stage.READY
        if record.holder and not (is_ready and self._is_left(record, journal)):
            return MigHold.USED, f"share {self._name_of(record.holder)}"
        return MigHold.IDLE, ""

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

    def _why_off(
        self, device: MigDevice, here: Device, taken: Mapping[str, Collection[Found]]
    ) -> str:
        """Tell why the MIG mode of a GPU cannot be switched on for a slice, if it cannot."""
        off = "MIG is off, and"
        if not takes_mode_at_once(here):
            if here.uuid not in self._grounds.terms.resets:
                return f"{off} this GPU takes it with a reset only, which is not allowed here"
            for peer in self._grounds.terms.peers.get(here.uuid, ()):
                if shares := taken.get(peer):
                    return (
                        f"{off} a reset would stop GPU {peer} as well, which NVLink joins to it"
                        f" and share {_names(shares)} has"
                    )
        # Who had a slice of a GPU whose MIG is off has lost it, and nothing to lose.
        if shares := [each for each in taken.get(here.uuid, ()) if here.uuid in each.limits()]:
            return f"{off} cannot be switched on beside share {_names(shares)}"
        place = mps_daemons.place_of(self._folder, here.uuid)
        if place.status().holds_gpu and place.is_owned():
            place.ask_for_way()
            return mps_daemons.STOPS
        if using := device.driver.processes():
            users = ", ".join(map(str, using[:4]))
            return f"{off} cannot be switched on while processes use it: {users}"
        return ""

    # ---- taking ----------------------------------------------------------------------------------

    def _take(self, here: _Seen, choice: MigChoice) -> Cut:
        if here.gpu is None:  # a choice is made of GPUs that were seen
            raise NotFoundError(f"{here.uuid} is not there")
        if not here.gpu.is_enabled:
            self._claim(here)
        making = _Making(partial(self._cut_at, here, choice))
        try:
            work, profile = self._gpus.ask_one(here.index, making, patience_s=WORK_S)
        except BaseException:
            making.give_up()
            raise
        step("mig.cut")
        whole = self._grounds.devices[here.uuid]
        return Cut(work=work, placed=_placed(profile, work.record, whole))

    def _claim(self, here: _Seen) -> None:
        """Take a GPU whose MIG mode is off for slices, where no share has it.

        Under the folder's lock for as long as that takes to see and to write down, and not for as
        long as the driver takes to switch.
        """
        journal = Journal(self._folder.mig / here.uuid)
        with self._folder.locked():
            if journal.is_switched:
                return
            if any(here.uuid in each.limits() for each in lives.recover(self._folder)):
                raise BusyError(f"GPU {here.uuid} has a share by now")
            if why := self._kept(here.uuid):
                raise BusyError(f"GPU {here.uuid}: {why}")
            journal.note_switched()
        step("mig.claimed")

    def _cut_at(self, here: _Seen, choice: MigChoice, device: MigDevice) -> tuple[Work, MigProfile]:
        can_reset = here.uuid in self._grounds.terms.resets
        slices = Slices(
            device.driver,
            self._journal(device),
            reset=partial(reset, self._order.machine, here.uuid) if can_reset else None,
        )
        for each in choice.removes:
            there = here.warm[each.profile, each.start]
            slices.remove(there.id, after=there.holder)
        order = self._order
        keep_s = self._grounds.terms.keeps.get(here.uuid, 0.0)
        place = choice.profile.number, choice.start
        if choice.reused is not None:
            there = here.warm[place]
            work = slices.bind(there.id, order.holder, keep_s=keep_s, after=there.holder)
            return work, choice.profile
        is_off = here.gpu is None or not here.gpu.is_enabled
        work = slices.cut(
            choice.profile.name,
            choice.start,
            holder=order.holder,
            keep_s=keep_s,
            switches=is_off,
        )
        if not is_off:
            return work, choice.profile
        # What a table says of a GPU whose driver did not tell is not to be what a share is told.
        told = {each.number: each for each in device.driver.look().profiles}
        return work, told.get(work.record.profile, choice.profile)

    def _journal(self, device: MigDevice) -> Journal:
        return Journal(self._folder.mig / device.uuid)

    # ---- refusing --------------------------------------------------------------------------------

    def _refusal(self, refusal: MigRefusal, seen: Iterable[_Seen]) -> DoesNotFitError:
        """Say of each GPU what is asked and why it does not have it, and the next step."""
        known = list(seen)
        reasons = dict(refusal.reasons)
        lines = [f"  {each.uuid}: {each.why or reasons.get(each.uuid, '')}" for each in known]
        return DoesNotFitError(
            "\n".join([f"no GPU here has room for a slice of {refusal.request}:", *lines]),
            hint=_next_step(refusal.request, known, self._order.spec),
        )


class _Making:
    """A slice that is being made for somebody who may not wait for it to the end."""

    def __init__(self, make: Callable[[MigDevice], tuple[Work, MigProfile]]) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._work: Work | None = None
        self._is_given_up = False

    def __call__(self, device: MigDevice) -> tuple[Work, MigProfile]:
        work, profile = self._make(device)
        with self._lock:
            self._work = work
            if self._is_given_up:
                work.close()
        return work, profile

    def give_up(self) -> None:
        """Let whoever settles have it, now or when it is there: its record is nobody's work."""
        with self._lock:
            self._is_given_up = True
            if self._work is not None:
                self._work.close()


def _as_placed(uuid: str, place: MigPlace, seen: Sequence[_Seen]) -> MigChoice | DoesNotFitError:
    """Follow whoever has chosen a slice: exactly that one, warm or to be cut."""
    wanted = f"{place.profile} at slot {place.start} of GPU {uuid}"
    here = next((each for each in seen if each.uuid == uuid), None)
    if here is None or here.layout is None:
        why = here.why if here is not None else "it is not here, or does not answer"
        why = why or (seen[0].why if seen else "")
        return DoesNotFitError(
            f"{wanted} was chosen for it: {why}",
            hint="it is tried again by itself; `allot devices` on the node shows the GPUs",
        )
    profile = next((each for each in here.layout.profiles if each.name == place.profile), None)
    if profile is None or place.start not in profile.starts:
        names = ", ".join(each.name for each in here.layout.profiles)
        return DoesNotFitError(
            f"{wanted} was chosen for it, which this GPU cannot have; it has {names}",
            hint="remove the annotation allotment.dev/placement, so that the node chooses",
        )
    covered = range(place.start, place.start + profile.size)
    within = [
        each
        for each in _kept_apart(
            here.layout, here.siblings, but=(profile.number, place.start)
        ).slices
        if each.start < covered.stop and covered.start < each.start + each.size
    ]
    if taken := [each for each in within if each.hold is not MigHold.IDLE]:
        there = "; ".join(
            f"slots {each.start} to {each.start + each.size - 1} of {each.holder or 'others'}"
            for each in taken
        )
        return DoesNotFitError(
            f"{wanted} was chosen for it, and is not free: {there}",
            hint="it waits until there is room: `allot ps` on the node shows the shares",
        )
    same = (each for each in within if (each.profile, each.start) == (profile.number, place.start))
    reused = next(same, None)
    return MigChoice(
        gpu=uuid,
        profile=profile,
        start=place.start,
        reused=reused,
        removes=() if reused is not None else tuple(within),
    )


def _kept_apart(
    layout: MigLayout,
    siblings: Mapping[tuple[int, int], str],
    *,
    but: tuple[int, int] | None = None,
) -> MigLayout:
    """Count the slices of the pod's other containers as used, except for the one at a place."""
    return replace(
        layout,
        slices=tuple(
            replace(each, hold=MigHold.USED, holder=siblings[place])
            if (place := (each.profile, each.start)) in siblings and place != but
            else each
            for each in layout.slices
        ),
    )


def _next_step(wanted: MigRequest, seen: Iterable[_Seen], spec: str | None) -> str:
    """Return what to do about a refusal, by what there is."""
    layouts = [each.layout for each in seen if each.layout is not None]
    profiles = [each for layout in layouts for each in serving(layout.profiles, wanted)]
    if profiles:
        simulated = f" --simulated {spec}" if spec else ""
        return (
            f"`allot mig plan --fit {profiles[0].name}{simulated}` names who would have to end, and"
            " start again, for it to fit"
        )
    if layouts:
        names = dict.fromkeys(each.name for layout in layouts for each in layout.profiles)
        return f"the profiles here are: {', '.join(names)}"
    return "`allot devices` shows the GPUs; `allot mig apply` switches MIG on where it is off"


def _names(shares: Iterable[Found]) -> str:
    return ", ".join(each.name for each in shares)


def _record_at(records: Iterable[SliceRecord], instance: MigInstance) -> SliceRecord | None:
    return next((each for each in records if stands_for(each, (instance,))), None)


def _placed(profile: MigProfile, record: SliceRecord, whole: Device) -> Placed:
    """Return a slice that is there as the device that a share has all of."""
    device = replace(
        whole,
        uuid=record.uuid,
        name=f"{whole.name} MIG {profile.name}",
        memory_bytes=profile.memory_bytes,
        sm_count=profile.multiprocessors,
        mig=True,
        reserved_bytes=0,
        slice_of=DeviceSlice(
            gpu=record.gpu,
            number=record.start,  # for people; NVML's changes as others come and go
            profile=profile.name,
            gpu_instance=record.gpu_instance or 0,
            compute_instance=record.compute_instance or 0,
        ),
    )
    return Placed(device, profile.memory_bytes, gpu=record.gpu, profile=profile.name)
