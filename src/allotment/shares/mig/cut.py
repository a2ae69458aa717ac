# SPDX-License-Identifier: Apache-2.0
"""Cuts slices from GPUs for an order: chooses, claims, cuts.

    with MigMachine(machine) as gpus, ExitStack() as works:
        for placed in SliceAllocator(survey, gpus).cut(works):
            ...                            # the slices count as used until the block ends

A slice takes as long as its driver, and is made without the state folder's lock. The GPU's journal
keeps two processes from the same slots: the second one chooses again.
"""

import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Final

import msgspec

from allotment.devices.mig_machine import MigDevice, MigMachine
from allotment.model.devices import Device, DeviceSlice
from allotment.model.errors import (
    AllotError,
    BusyError,
    DoesNotFitError,
    NotFoundError,
    UnknownProfileError,
)
from allotment.model.mig import MigHold, MigLayout, MigPlace, MigProfile, MigRequest
from allotment.model.modes import SOFT
from allotment.model.placements import Placed
from allotment.model.structs import replace
from allotment.modes.mig.journal import Journal, SliceRecord, SliceWork
from allotment.placement.explain import most_telling
from allotment.placement.mig import MigChoice, MigRefusal, choose, serving
from allotment.placement.views import slices_of
from allotment.shares import recovery
from allotment.shares.failpoints import failpoint
from allotment.shares.mig.inspect import GpuMigState, Survey, slices_on
from allotment.shares.mode_policy import KEPT

WORK_S: Final = 120.0
"""Time for a driver to make or remove a slice."""
_TRIES: Final = 64
"""Most choices for one slice: other processes may take each one first."""
_CLEARED_S: Final = 1.0
"""How long to wait while a slice's user is unclear."""
_PAUSE_S: Final = 0.01
_LONGEST_PAUSE_S: Final = 0.2
_NO_MIG: Final = (
    "MIG is in A100, A30, H100 and later data-centre GPUs; `allot devices` shows those of this"
    " machine. In mode soft every GPU is shared"
)


class SliceAllocator(msgspec.Struct, frozen=True):
    """One search for the slices of an order."""

    survey: Survey
    gpus: MigMachine

    def cut(self, works: ExitStack) -> list[Placed]:
        """Cut or reuse all slices of the order; their locked records are entered into `works`.

        Raises `DoesNotFitError` with the reason of each GPU, and the drivers' errors. After an
        error, finished slices are orphans once `works` is left.
        """
        order = self.survey.order
        if order.devices:
            return [
                self._one(works, partial(_as_placed, uuid, place), {uuid})
                for uuid, place in zip(order.devices, order.slices, strict=True)
            ]
        request = slices_of(order.request)
        return [
            self._one(works, partial(self._choice, replace(request, count=missing)), None)
            for missing in range(request.count, 0, -1)
        ]

    def _one(
        self,
        works: ExitStack,
        chosen: Callable[[Sequence[GpuMigState]], MigChoice | DoesNotFitError],
        uuids: Collection[str] | None,
    ) -> Placed:
        """Choose and cut one slice; repeat if another process was first."""
        last: AllotError | None = None
        began = time.monotonic()
        for number in range(_TRIES):
            if time.monotonic() > began + WORK_S:
                break
            if number:
                time.sleep(min(_LONGEST_PAUSE_S, _PAUSE_S * number))
            states = self.survey.look(self.gpus, uuids)
            choice = chosen(states)
            if isinstance(choice, DoesNotFitError):
                last = choice
                is_unclear = any(state.is_unclear for state in states)
                if is_unclear and time.monotonic() < began + _CLEARED_S:
                    continue
                if not any(state.is_changing for state in states):
                    raise last
                continue
            state = next(state for state in states if state.uuid == choice.gpu)
            try:
                work, placed = self._take(state, choice)
            except (BusyError, DoesNotFitError, NotFoundError) as error:
                last = error
                continue
            works.enter_context(work)
            return placed
        raise last or AllotError("no slice could be cut")

    def _choice(
        self, request: MigRequest, states: Sequence[GpuMigState]
    ) -> MigChoice | DoesNotFitError:
        chosen = choose([state.layout for state in states if state.layout is not None], request)
        if not isinstance(chosen, MigRefusal):
            state = next(state for state in states if state.uuid == chosen[0].gpu)
            if any((each.profile, each.start) in state.siblings for each in chosen[0].removes):
                apart = [
                    _kept_apart(state.layout, state.siblings) for state in states if state.layout
                ]
                chosen = choose(apart, request)
        if isinstance(chosen, MigRefusal):
            return _refused(chosen, states, self.survey.order.spec)
        return chosen[0]

    def _take(self, state: GpuMigState, choice: MigChoice) -> tuple[SliceWork, Placed]:
        if state.gpu is None:
            raise NotFoundError(f"GPU {state.uuid} has not answered")
        if not state.gpu.is_enabled:
            self._claim(state.uuid)
        making = _Making(partial(self._cut_at, state, choice))
        try:
            work, profile = self.gpus.ask_one(state.index, making, patience_s=WORK_S)
        except BaseException:
            making.give_up()
            raise
        failpoint("mig.cut")
        return work, _placed(profile, work.record, self.survey.devices[state.uuid])

    def _claim(self, uuid: str) -> None:
        """Claim a GPU without MIG mode for slices, if it has no share.

        Under the folder's lock, but the driver switches the mode without it.
        """
        folder = self.survey.folder
        journal = Journal(folder.mig / uuid)
        with folder.locked():
            if journal.is_switched:
                return
            if any(uuid in share.limits() for share in recovery.recover(folder)):
                raise BusyError(f"GPU {uuid} has a share by now")
            if why := self.survey.kept(uuid):
                raise BusyError(f"GPU {uuid}: {why}")
            journal.note_switched()
        failpoint("mig.claimed")

    def _cut_at(
        self, state: GpuMigState, choice: MigChoice, device: MigDevice
    ) -> tuple[SliceWork, MigProfile]:
        order = self.survey.order
        may_reset = state.uuid in order.mig.resets
        slices = slices_on(self.survey.folder, device, order.machine, may_reset=may_reset)
        for removed in choice.removes:
            record = state.warm[removed.profile, removed.start]
            slices.remove(record.id, after=record.holder)
        keep_s = order.mig.keeps.get(state.uuid, 0.0)
        if choice.reused is not None:
            record = state.warm[choice.profile.number, choice.start]
            work = slices.bind(record.id, order.id, keep_s=keep_s, after=record.holder)
            return work, choice.profile
        is_off = state.gpu is None or not state.gpu.is_enabled
        work = slices.cut(
            choice.profile.name, choice.start, holder=order.id, keep_s=keep_s, switches=is_off
        )
        if not is_off:
            return work, choice.profile
        # The profiles of a GPU without MIG mode may come from a table; a share gets the driver's.
        profiles = {profile.number: profile for profile in device.driver.look().profiles}
        return work, profiles.get(work.record.profile, choice.profile)


class _Making:
    """A slice in the making, whose caller may stop waiting for it."""

    def __init__(self, make: Callable[[MigDevice], tuple[SliceWork, MigProfile]]) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._work: SliceWork | None = None
        self._is_given_up = False

    def __call__(self, device: MigDevice) -> tuple[SliceWork, MigProfile]:
        work, profile = self._make(device)
        with self._lock:
            self._work = work
            if self._is_given_up:
                work.close()
        return work, profile

    def give_up(self) -> None:
        """Unlock its record, now or when it is made: the slice is an orphan."""
        with self._lock:
            self._is_given_up = True
            if self._work is not None:
                self._work.close()


def _as_placed(
    uuid: str, place: MigPlace, states: Sequence[GpuMigState]
) -> MigChoice | DoesNotFitError:
    """Follow a scheduler's choice: exactly that slice, warm or to be cut."""
    chosen = f"{place.profile} at slot {place.start} of GPU {uuid} was chosen for it"
    state = next((state for state in states if state.uuid == uuid), None)
    if state is None or state.layout is None:
        why = state.why if state is not None else "it is missing, or does not answer"
        why = why or (states[0].why if states else "")
        return DoesNotFitError(
            f"{chosen}: {why}",
            hint="it is tried again automatically; `allot devices` on the node shows the GPUs",
        )
    profiles = state.layout.profiles
    profile = next((profile for profile in profiles if profile.name == place.profile), None)
    if profile is None or place.start not in profile.starts:
        return DoesNotFitError(
            f"{chosen}, which this GPU cannot have; it has"
            f" {', '.join(profile.name for profile in profiles)}",
            hint="create the pod again without the annotation allotment.dev/placement: the node"
            " chooses",
        )
    key = profile.number, place.start
    end = place.start + profile.size
    overlapping = [
        slice_
        for slice_ in _kept_apart(state.layout, state.siblings, but=key).slices
        if slice_.start < end and place.start < slice_.start + slice_.size
    ]
    if taken := [slice_ for slice_ in overlapping if slice_.hold is not MigHold.IDLE]:
        users = "; ".join(
            f"slots {slice_.start} to {slice_.start + slice_.size - 1} of"
            f" {slice_.holder or 'others'}"
            for slice_ in taken
        )
        return DoesNotFitError(
            f"{chosen}, and is not free: {users}",
            hint="it waits for room: `allot ps` on the node shows the shares",
        )
    same = (slice_ for slice_ in overlapping if (slice_.profile, slice_.start) == key)
    reused = next(same, None)
    return MigChoice(
        gpu=uuid,
        profile=profile,
        start=place.start,
        reused=reused,
        removes=() if reused is not None else tuple(overlapping),
    )


def _kept_apart(
    layout: MigLayout,
    siblings: Mapping[tuple[int, int], str],
    *,
    but: tuple[int, int] | None = None,
) -> MigLayout:
    """Count slices of the pod's other containers as used, except for the one at a place."""
    return replace(
        layout,
        slices=tuple(
            replace(slice_, hold=MigHold.USED, holder=siblings[place])
            if (place := (slice_.profile, slice_.start)) in siblings and place != but
            else slice_
            for slice_ in layout.slices
        ),
    )


def _refused(
    refusal: MigRefusal, states: Sequence[GpuMigState], spec: str | None
) -> DoesNotFitError:
    """The error of a refusal, with the reason of each GPU and the next step."""
    reasons = dict(refusal.reasons)
    request = refusal.request
    whys = {
        state.uuid: f"has no profile {request.profile}"
        if state.layout is None and _lacks(request.profile, state)
        else state.why or reasons.get(state.uuid, "")
        for state in states
    }
    lines = [f"  {uuid}: {why}" for uuid, why in whys.items()]
    is_unknown = _is_unknown(request.profile, states)
    layouts = [state.layout for state in states if state.layout is not None]
    serve = [profile for layout in layouts for profile in serving(layout.profiles, request)]
    names = {profile.name: None for layout in layouts for profile in layout.profiles}
    if request.profile in names and not serve:
        head = f"{request.profile} is smaller than the request beside it"
    else:
        head = f"no GPU here has room for a slice of {request}"
    if serve:
        simulated = f" --simulated {spec}" if spec else ""
        hint = (
            f"`allot mig plan --fit {serve[0].name}{simulated}` names the shares that would have to"
            " restart"
        )
    elif request.profile in names:
        hint = _without_contradiction(request, layouts)
    elif layouts or is_unknown:
        known = names or {name: None for state in states for name in _profiles(state)}
        hint = f"the profiles here are: {', '.join(known)}"
    else:
        hint = _without_layouts(states)
    kind = UnknownProfileError if is_unknown else DoesNotFitError
    possible = {uuid: why for uuid, why in whys.items() if why != "not selected"} or whys
    return kind(
        "\n".join([f"{head}:", *lines]),
        hint=hint,
        reason=most_telling(possible),
        advises=SOFT if hint == _NO_MIG else "",
    )


def _without_layouts(states: Sequence[GpuMigState]) -> str:
    """The next step if no GPU can be cut as it is."""
    if by_reset := [state.uuid for state in states if state.needs_reset]:
        return (
            f"switch MIG on: `allot devices set-mode {by_reset[0]} mig --reset`, or `allot mig"
            " apply`; on a node `mig: {reset: true}` in the GPU's rule lets the agent"
        )
    if any(state.why.startswith(KEPT) for state in states):
        return "`allot devices` shows what GPUs are for, and `allot devices set-mode` changes that"
    if states and all(state.gpu is None for state in states):
        return _NO_MIG
    return "`allot devices` shows the GPUs, and `allot ps` their shares"


def _is_unknown(profile: str, states: Sequence[GpuMigState]) -> bool:
    """True if no GPU has the profile, all report their profiles, and at least one has MIG."""
    known = [state for state in states if state.gpu is not None]
    return bool(known) and all(_lacks(profile, state) for state in known)


def _lacks(profile: str, state: GpuMigState) -> bool:
    """True if a GPU reports its profiles, also while MIG is off, and not this one."""
    names = _profiles(state)
    return bool(profile and names) and profile not in names


def _profiles(state: GpuMigState) -> list[str]:
    source = state.layout or state.gpu
    return [] if source is None else [profile.name for profile in source.profiles]


def _without_contradiction(request: MigRequest, layouts: Sequence[MigLayout]) -> str:
    """The next step for a profile and a larger amount beside it."""
    sized = replace(request, profile="")
    able = (profile for layout in layouts for profile in serving(layout.profiles, sized))
    larger = next(able, None)
    instead = f"name {larger.name}" if larger is not None else "ask for less"
    return (
        "a profile includes memory and compute: leave these out, or the profile (the smallest"
        f" slice with them is taken), or {instead}"
    )


def _placed(profile: MigProfile, record: SliceRecord, whole: Device) -> Placed:
    """A complete slice as the device of a share."""
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
            number=record.start,  # for people; NVML's number changes with other instances
            profile=profile.name,
            gpu_instance=record.gpu_instance or 0,
            compute_instance=record.compute_instance or 0,
        ),
    )
    return Placed(device, profile.memory_bytes, gpu=record.gpu, profile=profile.name)
