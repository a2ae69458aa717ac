# SPDX-License-Identifier: Apache-2.0
"""The MIG slices of GPUs as `allot devices` shows them, and what `allot doctor` has to say."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from allotment.cli.documents import Document
from allotment.devices.mig import MigView
from allotment.devices.nvml import Nvml
from allotment.model.errors import AllotError
from allotment.model.mig import MigGpu
from allotment.modes.mig.journal import Journal
from allotment.modes.mig.judging import stands_for
from allotment.modes.mig.records import SliceRecord, Stage
from allotment.shares.folders import StateFolder

__all__ = ["Complaint", "MigRow", "mig_complaints", "mig_rows"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MigRow:
    """One GPU instance, with its compute instance where that has been made."""

    uuid: str
    """Of the MIG device; empty where the instance is half made."""
    profile: str
    start: int
    size: int
    memory_bytes: int | None
    """None: the driver has no profile of its number."""
    gpu_instance: int
    compute_instance: int | None
    state: str
    """`ours`, `warm`, `being made`, `being removed`, or `static`: of no share, and it stays."""
    share: str | None
    """The name of the share that has it."""
    processes: tuple[int, ...]

    @property
    def place(self) -> str:
        """Its slots, for people."""
        last = self.start + self.size - 1
        return f"slot {self.start}" if last == self.start else f"slots {self.start}-{last}"

    @property
    def user(self) -> str:
        """Say who has it, or in which state it is."""
        if self.share:
            return f"share {self.share}"
        if self.processes:
            return "processes " + ", ".join(map(str, self.processes))
        return self.state

    def to_document(self) -> Document:
        """Describe it as `allot devices -o json` does."""
        return {
            "uuid": self.uuid or None,
            "profile": self.profile,
            "start": self.start,
            "size": self.size,
            "memory_bytes": self.memory_bytes,
            "gpu_instance": self.gpu_instance,
            "compute_instance": self.compute_instance,
            "state": self.state,
            "share": self.share,
            "processes": list(self.processes),
        }


def mig_rows(
    folder: StateFolder,
    machines: Collection[Path | None],
    *,
    shares: Mapping[str, str],
    of_devices: Mapping[str, str] | None = None,
) -> dict[str, tuple[MigRow, ...]]:
    """Return the slices of every GPU in MIG mode of these machines, by the GPU's UUID.

    `shares`: the names of the shares that there are, by id; `of_devices`: by the UUIDs of what they
    have. A machine that cannot be asked has none: its GPUs are shown all the same.
    """
    found: dict[str, tuple[MigRow, ...]] = {}
    for machine in machines:
        try:
            with Nvml(machine=machine) as source:
                views = source.migs()
        except AllotError:
            continue
        for uuid, view in views.items():
            if view.gpu.is_enabled:
                try:
                    records = Journal(folder.mig / uuid).read().records
                except AllotError:
                    records = ()  # of another user: `allot doctor` says so
                found[uuid] = tuple(_rows(view, records, shares, of_devices or {}))
    return found


def _rows(
    view: MigView,
    records: Sequence[SliceRecord],
    shares: Mapping[str, str],
    of_devices: Mapping[str, str],
) -> list[MigRow]:
    profiles = {each.number: each for each in view.gpu.profiles}
    rows = []
    for instance in view.gpu.instances:
        record = next((each for each in records if stands_for(each, (instance,))), None)
        profile = profiles.get(instance.profile)
        rows.append(
            MigRow(
                uuid=instance.uuid,
                profile="?" if profile is None else profile.name,
                start=instance.start,
                size=instance.size,
                memory_bytes=None if profile is None else profile.memory_bytes,
                gpu_instance=instance.gpu_instance,
                compute_instance=instance.compute_instance,
                state=_state(record),
                # What the kubelet gave is of the share alone: whoever cut it keeps no record here.
                share=of_devices.get(instance.uuid)
                if record is None
                else shares.get(record.holder),
                processes=view.users.get(instance.gpu_instance, ()),
            )
        )
    return rows


def _state(record: SliceRecord | None) -> str:
    if record is None:
        return "static"
    match record.stage:
        case Stage.READY:
            return "ours" if record.holder else "warm"
        case Stage.LEAVING:
            return "being removed"
        case _:
            return "being made"


class Complaint(NamedTuple):
    """What is wrong about a GPU's MIG, and what to do."""

    name: str
    detail: str
    fix: str


def mig_complaints(folder: StateFolder, machines: Collection[Path | None]) -> Iterator[Complaint]:
    """Yield what is wrong about MIG on these machines; nothing of one that cannot be asked."""
    for machine in machines:
        try:
            with Nvml(machine=machine) as source:
                views = source.migs()
        except AllotError:
            continue
        for uuid, view in views.items():
            yield from _of_gpu(uuid, view.gpu)
            yield from _of_journal(uuid, view.gpu, Journal(folder.mig / uuid))


def _of_gpu(uuid: str, gpu: MigGpu) -> Iterator[Complaint]:
    name = f"MIG on GPU {uuid}"
    if gpu.is_enabled != gpu.is_pending:
        word = "on" if gpu.is_pending else "off"
        yield Complaint(
            name,
            f"it is to be {word}, and is not before the GPU's next reset",
            f"end what uses the GPU, then: nvidia-smi --gpu-reset -i {uuid}",
        )
    if gpu.is_enabled and not gpu.instances:
        yield Complaint(
            name,
            "it is on, and there is no instance: no program can use this GPU",
            "make instances, or switch it off: allot mig apply",
        )
    half = [each for each in gpu.instances if not each.uuid]
    for each in half:
        yield Complaint(
            name,
            f"GPU instance {each.gpu_instance} at slot {each.start} has no compute instance: no"
            " program can use it",
            f"remove it: nvidia-smi mig -dgi -gi {each.gpu_instance} -i {uuid}",
        )


def _of_journal(uuid: str, gpu: MigGpu, journal: Journal) -> Iterator[Complaint]:
    try:
        found = journal.read()
    except AllotError as error:
        yield Complaint(f"MIG on GPU {uuid}", error.message, error.hint or "")
        return
    for problem in found.problems:
        yield Complaint(f"MIG on GPU {uuid}", problem.message, problem.hint or "")
    for record in found.records:
        if record.stage is Stage.READY and stands_for(record, gpu.instances) is None:
            yield Complaint(
                f"MIG on GPU {uuid}",
                f"the slice {record.name} {record.uuid} is not there any more: others removed it",
                "keep other managers of MIG off this node; `allot mig apply` forgets the slice",
            )
