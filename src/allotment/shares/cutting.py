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
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

from allotment.devices.mig_machine import MigDevice, MigMachine, reset
from allotment.model.devices import Device, DeviceSlice
from allotment.model.errors import (
    AllotError,
    BusyError,
    DoesNotFitError,
    NotFoundError,
    UnknownProfileError,
)
from allotment.model.mig import (
    MigHold,
    MigLayout,
    MigPlace,
    MigProfile,
    MigRequest,
)
from allotment.model.placements import Placed
from allotment.model.requests import SOFT
from allotment.modes.mig.journal import Journal, Work
from allotment.modes.mig.records import SliceRecord
from allotment.modes.mig.slices import Slices
from allotment.placement import most_telling
from allotment.placement.mig import MigChoice, MigRefusal, choose, serving
from allotment.shares import lives
from allotment.shares.folders import StateFolder
from allotment.shares.modes_of_gpus import KEPT
from allotment.shares.steps import step
from allotment.shares.surveying import Grounds, Seen, SliceOrder, Survey

__all__ = ["WORK_S", "Cut", "Cutter"]

WORK_S: Final = 120.0
"""How long a driver may take to make a slice, or to remove one."""
_TRIES: Final = 64
"""How often others may be first at what was chosen: each time one of them has a slice."""
_CLEARED_S: Final = 1.0
"""How long it may be unclear whether a slice is somebody's, before it is taken for that."""
_PAUSE_S: Final = 0.01
_NO_MIG: Final = (
    "MIG is in A100, A30, H100 and later data-centre GPUs; `allot devices` shows those that are"
    " here. In mode soft every GPU is shared"
)
_LONGEST_PAUSE_S: Final = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """A slice that is there, and its record, which is the caller's work."""

    work: Work
    placed: Placed


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
        self._survey = Survey(folder, order, grounds)

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
        chosen: "Callable[[Sequence[Seen]], MigChoice | DoesNotFitError]",
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
            seen = self._survey.look(self._gpus, uuids)
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

    def _choice(self, wanted: MigRequest, seen: Sequence[Seen]) -> MigChoice | DoesNotFitError:
        layouts = [each.layout for each in seen if each.layout is not None]
        chosen = choose(layouts, wanted)
        if not isinstance(chosen, MigRefusal):
            here = next(each for each in seen if each.uuid == chosen[0].gpu)
            if any((each.profile, each.start) in here.siblings for each in chosen[0].removes):
                apart = [_kept_apart(each.layout, each.siblings) for each in seen if each.layout]
                chosen = choose(apart, wanted)
        return self._refusal(chosen, seen) if isinstance(chosen, MigRefusal) else chosen[0]

    # ---- taking ----------------------------------------------------------------------------------

    def _take(self, here: Seen, choice: MigChoice) -> Cut:
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

    def _claim(self, here: Seen) -> None:
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
            if why := self._survey.kept(here.uuid):
                raise BusyError(f"GPU {here.uuid}: {why}")
            journal.note_switched()
        step("mig.claimed")

    def _cut_at(self, here: Seen, choice: MigChoice, device: MigDevice) -> tuple[Work, MigProfile]:
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

    def _refusal(self, refusal: MigRefusal, seen: Iterable[Seen]) -> DoesNotFitError:
        """Say of each GPU what is asked and why it does not have it, and the next step."""
        known = list(seen)
        reasons = dict(refusal.reasons)
        lines = [f"  {each.uuid}: {each.why or reasons.get(each.uuid, '')}" for each in known]
        asked = refusal.request
        is_served = any(serving(each.layout.profiles, asked) for each in known if each.layout)
        is_named = any(_has(each, asked.profile) for each in known)
        if is_named and not is_served:
            head = f"{asked.profile} is less than what is asked for with it"
        else:
            head = f"no GPU here has room for a slice of {asked}"
        kind = UnknownProfileError if _is_unknown(asked.profile, known) else DoesNotFitError
        hint = _next_step(asked, known, self._order.spec)
        whys = {each.uuid: each.why or reasons.get(each.uuid, "") for each in known}
        possible = {uuid: why for uuid, why in whys.items() if why != "not selected"} or whys
        return kind(
            "\n".join([f"{head}:", *lines]),
            hint=hint,
            reason=most_telling(possible),
            advises=SOFT if hint == _NO_MIG else "",
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


def _as_placed(uuid: str, place: MigPlace, seen: Sequence[Seen]) -> MigChoice | DoesNotFitError:
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


def _next_step(wanted: MigRequest, seen: Iterable[Seen], spec: str | None) -> str:
    """Return what to do about a refusal, by what there is."""
    there = list(seen)
    layouts = [each.layout for each in there if each.layout is not None]
    profiles = [each for layout in layouts for each in serving(layout.profiles, wanted)]
    if profiles:
        simulated = f" --simulated {spec}" if spec else ""
        return (
            f"`allot mig plan --fit {profiles[0].name}{simulated}` names who would have to end, and"
            " start again, for it to fit"
        )
    if any(_has(each, wanted.profile) for each in there):
        return _without_contradiction(wanted, layouts)
    if layouts:
        names = dict.fromkeys(each.name for layout in layouts for each in layout.profiles)
        return f"the profiles here are: {', '.join(names)}"
    return _without_layouts(there)


def _without_layouts(there: Sequence[Seen]) -> str:
    """Return what to do where no GPU can be cut as it is."""
    if by_reset := [each.uuid for each in there if each.needs_reset]:
        return (
            f"switch MIG on: `allot devices set-mode {by_reset[0]} mig --reset`, or `allot mig"
            " apply`; on a node `mig: {reset: true}` in the GPU's rule lets the agent"
        )
    if any(each.why.startswith(KEPT) for each in there):
        return "`allot devices` shows what GPUs are for, and `allot devices set-mode` changes that"
    if there and all(each.gpu is None for each in there):
        return _NO_MIG
    return "`allot devices` shows the GPUs, and `allot ps` who has them"


def _has(seen: Seen, profile: str) -> bool:
    """Tell whether a GPU that could be cut has a profile of that name."""
    return seen.layout is not None and any(each.name == profile for each in seen.layout.profiles)


def _is_unknown(profile: str, seen: Iterable[Seen]) -> bool:
    """Tell whether a profile is none of the GPUs', of which at least one can be cut.

    Whether a GPU that does not say what it can be cut into has it cannot be told.
    """
    told = [
        {each.name for each in (one.gpu if one.layout is None else one.layout).profiles}
        for one in seen
        if one.gpu is not None
    ]
    return bool(profile and told) and all(names and profile not in names for names in told)


def _without_contradiction(wanted: MigRequest, layouts: Sequence[MigLayout]) -> str:
    """Say how to ask who named a profile, and more beside it than that has."""
    anyhow = replace(wanted, profile="")
    able = (each for layout in layouts for each in serving(layout.profiles, anyhow))
    larger = next(able, None)
    instead = f"name {larger.name}" if larger is not None else "ask for less"
    return (
        "a profile says all of a slice, its memory and compute too: leave these out, or the profile"
        f" (the smallest slice that has them is taken), or {instead}"
    )


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
