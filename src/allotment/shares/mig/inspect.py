# SPDX-License-Identifier: Apache-2.0
"""The MIG state of GPUs for one order: instances, records, users, reasons against.

    survey = Survey(folder, order, devices, ended_before)
    states = survey.look(gpus, None)          # journal, driver and shares

A result may be outdated when it is used: then journal and driver refuse the cut (`cut`), which
looks again.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path

import msgspec

from allotment.devices.mig import MigDriver
from allotment.devices.mig_machine import LOOK_S, MigDevice, MigMachine, reset
from allotment.model.devices import Device
from allotment.model.errors import AllotError, StateError
from allotment.model.formats import format_pids
from allotment.model.mig import MigGpu, MigHold, MigInstance, MigLayout, MigSlice
from allotment.model.modes import MIG
from allotment.model.shares import ShareId
from allotment.model.structs import replace
from allotment.modes import traits_of
from allotment.modes.mig.apply import Occupied, occupied_by
from allotment.modes.mig.journal import Journal, SliceRecord, Stage, stands_for
from allotment.modes.mig.mode import takes_mode_at_once
from allotment.modes.mig.slices import Slices
from allotment.placement import is_selected
from allotment.shares import mps_daemons, recovery
from allotment.shares.folders import StateFolder
from allotment.shares.mode_policy import mode_policy_of, refusal
from allotment.shares.placing import ShareOrder
from allotment.shares.process_tree import census, children_of
from allotment.shares.record import LoadedShare, read_record


def slices_on(
    folder: StateFolder, device: MigDevice, machine: Path | None, *, may_reset: bool
) -> Slices:
    """The slices of a GPU; `may_reset`: it may be reset to change its MIG mode."""
    return Slices(
        device.driver,
        Journal(folder.mig / device.uuid),
        reset=partial(reset, machine, device.uuid) if may_reset else None,
    )


def is_share(folder: StateFolder, holder: str) -> bool:
    """True if a slice's holder exists."""
    return folder.share(ShareId(holder)).is_dir()


class GpuMigState(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU's MIG state, as far as a choice depends on it."""

    index: int
    uuid: str
    gpu: MigGpu | None = None
    layout: MigLayout | None = None
    """None: it cannot be chosen; see `why`."""
    why: str = ""
    warm: Mapping[tuple[int, int], SliceRecord] = msgspec.field(default_factory=dict)
    """Slices that can be reused, by the profile's number and the start."""
    siblings: Mapping[tuple[int, int], str] = msgspec.field(default_factory=dict)
    """Of these, the slices of other containers of the same pod, which never run at the same time;
    with the name of the share. They can be reused, but not removed: that container may restart."""
    is_changing: bool = False
    """Wait: a slice is being removed, or an MPS daemon that no share needs is stopping."""
    needs_reset: bool = False
    """MIG is off, and needs a reset that is not allowed here."""
    is_unclear: bool = False
    """Wait for moments: a slice's holder has just ended."""


class _OwnSlice(msgspec.Struct, frozen=True, kw_only=True):
    """One record, with its instance and user."""

    record: SliceRecord
    instance: MigInstance | None
    hold: MigHold
    user: str
    has_processes: bool = False
    """Its share has ended, and its programs still run."""

    @property
    def place(self) -> tuple[int, int]:
        return self.record.profile, self.record.start

    @property
    def is_warm(self) -> bool:
        is_ready = self.record.stage is Stage.READY and self.instance is not None
        return is_ready and self.hold is MigHold.IDLE


class Survey(msgspec.Struct, frozen=True):
    """The GPUs that may serve one order."""

    folder: StateFolder
    order: ShareOrder
    devices: Mapping[str, Device]
    """Whole GPUs by UUID."""
    ended_before: frozenset[str]
    """Shares that never run at the same time as this one: their slices may be reused."""

    def look(self, gpus: MigMachine, uuids: Collection[str] | None) -> list[GpuMigState]:
        """Query the GPUs, or those of `uuids`, all at once.

        For a command, GPUs outside of `devices` are queried as well, so that a refusal names them.
        """
        among = None
        if self.order.owner is not None:
            wanted = self.devices if uuids is None else uuids
            among = {self.devices[uuid].index for uuid in wanted if uuid in self.devices}
        question = partial(self._state_of, self._shares_by_gpu())
        return [
            GpuMigState(index=index, uuid=f"GPU {index}", why=answer.message)
            if isinstance(answer, AllotError)
            else answer
            for index, answer in gpus.ask(question, patience_s=LOOK_S, among=among)
        ]

    def _shares_by_gpu(self) -> dict[str, list[LoadedShare]]:
        """The shares on each GPU, also in its slices, by UUID."""
        shares: dict[str, list[LoadedShare]] = {}
        for share in recovery.list_shares(self.folder):
            gpus = {device.driver_uuid for device in share.devices()} | share.limits().keys()
            for uuid in gpus:
                shares.setdefault(uuid, []).append(share)
        return shares

    def _state_of(
        self, shares: Mapping[str, Collection[LoadedShare]], mig: MigDevice
    ) -> GpuMigState:
        state = GpuMigState(index=mig.index, uuid=mig.uuid)
        device = self.devices.get(mig.uuid)
        if device is None:
            return replace(state, why="it does not answer")
        if why := self._objection(device) or self.kept(device.uuid):
            return replace(state, why=why)
        journal = Journal(self.folder.mig / mig.uuid)
        # Before the look: a slice that becomes ready between the two is in one of them.
        records = journal.read().records
        gpu = mig.driver.look_if_any()
        if gpu is None:
            return replace(state, why="has no MIG")
        if not gpu.is_enabled and (why := self._why_off(mig, device, shares)):
            return replace(
                state,
                gpu=gpu,
                why=why,
                is_changing=why == mps_daemons.STOPS,
                needs_reset=not self._takes_mode(device),
            )
        if not gpu.profiles:
            gpu = replace(gpu, profiles=self.order.mig.profiles(device))
        if not gpu.profiles:
            why = "MIG is off, and the driver reports its profiles only while it is on"
            return replace(state, gpu=gpu, why=why)
        if any(each.stage is not Stage.READY and journal.is_free(each.id) for each in records):
            # The slice of a dead process may be all that is in the way.
            Slices(mig.driver, journal).free_orphans(partial(is_share, self.folder), keep_s=0)
            records, gpu = journal.read().records, mig.driver.look()
        own = [self._own_slice(record, mig.driver, gpu, journal) for record in records]
        return self._with_slices(state, gpu, own, journal)

    def _with_slices(
        self, state: GpuMigState, gpu: MigGpu, own: Sequence[_OwnSlice], journal: Journal
    ) -> GpuMigState:
        instances = {(instance.profile, instance.start) for instance in gpu.instances}
        holds = {
            each.instance.gpu_instance: (each.hold, each.user)
            for each in own
            if each.instance is not None
        }
        decided = [
            MigSlice(
                profile=each.record.profile,
                start=each.record.start,
                size=each.record.size,
                holder=each.user,
            )
            for each in own
            if each.record.stage in {Stage.INTENDED, Stage.CUT} and each.place not in instances
        ]
        return replace(
            state,
            gpu=gpu,
            layout=MigLayout.of(gpu, holds=holds, decided=decided),
            warm={each.place: each.record for each in own if each.is_warm},
            siblings={
                each.place: f"share {self._name_of(each.record.holder)}"
                for each in own
                if each.is_warm and each.record.holder in self.ended_before
            },
            is_changing=any(self._is_changing(each.record, journal) for each in own),
            is_unclear=any(each.has_processes or self._is_orphan(each.record) for each in own),
        )

    def _objection(self, device: Device) -> str:
        """Why the order does not use a GPU; empty: it may."""
        order = self.order
        if order.candidates is not None and device.uuid not in order.candidates:
            return f"not for mode {MIG}, by the node's configuration"
        return "" if order.devices or is_selected(device, order.request) else "not selected"

    def kept(self, uuid: str) -> str:
        """Why a GPU is restricted to other modes; a scheduler's choice was made before that."""
        return "" if self.order.devices else refusal(mode_policy_of(self.folder, uuid), MIG)

    def _own_slice(
        self, record: SliceRecord, driver: MigDriver, gpu: MigGpu, journal: Journal
    ) -> _OwnSlice:
        hold, user = self._hold(record, journal)
        own = _OwnSlice(
            record=record, instance=stands_for(record, gpu.instances), hold=hold, user=user
        )
        # Programs in a slice that a scheduler chose, or of a container before this one, are about
        # to end: the driver notices it a moment later.
        is_ending = self.order.devices or record.holder in self.ended_before
        if hold is not MigHold.IDLE or own.instance is None or is_ending:
            return own
        if pids := driver.users(own.instance.gpu_instance):
            what = "process" if len(pids) == 1 else "processes"
            user = f"{what} {format_pids(pids)}"
            return replace(own, hold=MigHold.USED, user=user, has_processes=True)
        return own

    def _hold(self, record: SliceRecord, journal: Journal) -> tuple[MigHold, str]:
        if record.stage is Stage.LEAVING:
            return MigHold.USED, "a slice that is being removed"
        if not record.holder or (record.stage is Stage.READY and self._is_left(record, journal)):
            return MigHold.IDLE, ""
        return MigHold.USED, f"share {self._name_of(record.holder)}"

    def _is_left(self, record: SliceRecord, journal: Journal) -> bool:
        """True if a slice's holder has ended, or never runs at the same time as the order.

        The slice's maker locks its record until the share exists.
        """
        if record.holder in self.ended_before:
            return True
        return journal.is_free(record.id) and not is_share(self.folder, record.holder)

    def _is_changing(self, record: SliceRecord, journal: Journal) -> bool:
        # An unfinished slice of this order is left by an earlier attempt, and is being freed.
        is_leaving = record.stage is Stage.LEAVING or (
            record.stage is not Stage.READY and record.holder == self.order.id
        )
        return is_leaving and not journal.is_free(record.id)

    def _is_orphan(self, record: SliceRecord) -> bool:
        has_holder = record.stage is Stage.READY and bool(record.holder)
        return has_holder and not is_share(self.folder, record.holder)

    def _name_of(self, share: str) -> str:
        try:
            return read_record(self.folder.share(ShareId(share))).name
        except (StateError, FileNotFoundError):
            return f"{share}, which is being made"

    def _takes_mode(self, device: Device) -> bool:
        return takes_mode_at_once(device) or device.uuid in self.order.mig.resets

    def _why_off(
        self, mig: MigDevice, device: Device, shares: Mapping[str, Collection[LoadedShare]]
    ) -> str:
        """Why MIG cannot be switched on for a slice; empty: it can."""
        off = "MIG is off, and"
        uuid = device.uuid
        if why := self.order.mig.paused.get(uuid) or self._why_no_reset(device, shares):
            return f"{off} {why}"
        # A share of a slice is not in the way: without MIG its slice is lost already.
        if whole := [share for share in shares.get(uuid, ()) if uuid in share.limits()]:
            return f"{off} cannot be switched on beside share {_names(whole)}"
        place = mps_daemons.place_of(self.folder, uuid)
        if place.status().holds_gpu and place.is_owned():
            place.ask_for_way()
            return mps_daemons.STOPS
        if pids := mig.driver.processes():
            return f"{off} cannot be switched on while processes use it: {format_pids(pids)}"
        return ""

    def _why_no_reset(self, device: Device, shares: Mapping[str, Collection[LoadedShare]]) -> str:
        """Why a GPU may not be reset for its mode; empty: it may, or needs no reset."""
        if takes_mode_at_once(device):
            return ""
        if not self._takes_mode(device):
            return "this GPU needs a reset for it, which is not allowed here"
        for peer in self.order.mig.peers.get(device.uuid, ()):
            if on_peer := shares.get(peer):
                return (
                    f"a reset would stop GPU {peer} as well, which NVLink connects and share"
                    f" {_names(on_peer)} uses"
                )
        return ""


def _names(shares: Iterable[LoadedShare]) -> str:
    return ", ".join(share.name for share in shares)


class GpuUsers:
    """Names the users of GPUs, by the shares of a state folder at one moment."""

    def __init__(
        self,
        folder: StateFolder,
        shares: Iterable[LoadedShare],
        *,
        passes_idle_daemons: bool = False,
    ) -> None:
        """`passes_idle_daemons`: do not count an MPS daemon that no share needs."""
        self._folder = folder
        self._shares = list(shares)
        self._passes_idle_daemons = passes_idle_daemons

    def of(self, driver: MigDriver, gpu: MigGpu) -> Occupied:
        """The users of one GPU and its instances; asks the driver."""
        of_devices: dict[str, list[str]] = {}
        for share in self._shares:
            for uuid in share.limits():
                of_devices.setdefault(uuid, []).append(share.name)
        return occupied_by(
            driver,
            gpu,
            Journal(self._folder.mig / gpu.uuid),
            shares=self._names,
            of_devices=of_devices,
            owners=self._owners_of,
        )

    @cached_property
    def _names(self) -> Mapping[str, str]:
        return {share.id: share.name for share in self._shares}

    def _owners_of(self, pids: Collection[int]) -> Mapping[int, str | None]:
        return {pid: owner for pid, owner in self._owners.items() if pid in pids} if pids else {}

    @cached_property
    def _owners(self) -> Mapping[int, str | None]:
        """The owners of all processes of shares and MPS daemons. Reads all of /proc."""
        members = census((each.share, each.directory) for each in self._shares if each.share)
        owners: dict[int, str | None] = {
            pid: f"share {self._names[share]}" for share, pids in members.items() for pid in pids
        }
        return {**owners, **dict(self._servers())}

    def _servers(self) -> Iterator[tuple[int, str | None]]:
        """The MPS servers, which use GPUs outside of any share; None: does not count."""
        needed = {
            device.uuid
            for share in self._shares
            if traits_of(share.mode).needs_daemon
            for device in share.devices()
        }
        for uuid, status in mps_daemons.statuses(self._folder).items():
            if status.daemon is not None:
                is_passed = self._passes_idle_daemons and uuid not in needed
                owner = None if is_passed else "the MPS control daemon"
                yield from ((pid, owner) for pid in children_of(status.daemon))
