# SPDX-License-Identifier: Apache-2.0
"""MIG devices for shares: new slices, and unused ones of other tools.

    with cut(folder, order, devices) as placement:
        ...                         # build the share on it
    free_orphans(folder)            # any process, any time: removes slices without a share

The journal names the share before the first driver call, and the maker locks the slice until the
share exists. So other processes can tell a slice in the making from an orphan. There is no daemon:
each command frees orphans.
"""

import os
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from fractions import Fraction
from functools import partial
from pathlib import Path

import msgspec

from allotment.devices.mig import MigView
from allotment.devices.mig_machine import LOOK_S, MigDevice, MigMachine
from allotment.devices.nvml import Nvml
from allotment.devices.packing import read_machine
from allotment.model.accounting import overlap
from allotment.model.devices import Device
from allotment.model.errors import (
    AllotError,
    BusyError,
    DoesNotFitError,
    NotFoundError,
    NotInModeError,
    PrerequisiteError,
    StateError,
    UsageError,
)
from allotment.model.formats import format_pids, need_and_have
from allotment.model.modes import MIG
from allotment.model.placements import Placement
from allotment.model.quantities import MemoryAmount
from allotment.model.requests import Request
from allotment.model.shares import Injection, Share
from allotment.model.structs import replace
from allotment.modes import traits_of
from allotment.modes.mig.journal import Journal, SliceRecord, Stage, without_own
from allotment.modes.mig.slices import Slices
from allotment.placement import is_selected
from allotment.placement.mig import serving
from allotment.placement.views import slices_of
from allotment.shares import mps_daemons, recovery
from allotment.shares.failpoints import failpoint
from allotment.shares.folders import StateFolder
from allotment.shares.mig.cut import WORK_S, SliceAllocator
from allotment.shares.mig.inspect import Survey, is_share, slices_on
from allotment.shares.mode_policy import is_for, is_for_mig_alone
from allotment.shares.placing import ShareOrder, check_selectors, place_now


def free_orphans(
    folder: StateFolder, *, patience_s: float = WORK_S, keeps_warm: bool = True
) -> list[AllotError]:
    """Remove slices whose share has ended, unless they are kept warm; finish interrupted work.

    Only reads a few files if there is nothing to do. Returns the errors; the next caller tries
    again. `keeps_warm` False: remove warm slices at once.
    """
    uuids = in_need(folder) if keeps_warm else _with_journals(folder)
    if not uuids or not os.access(folder.mig, os.W_OK):
        return []
    problems: list[AllotError] = []
    for machine, own in _by_machine(folder, uuids).items():
        question = partial(
            _free_orphans, folder, own, machine, may_reset=False, keeps_warm=keeps_warm
        )
        try:
            with MigMachine(machine) as gpus:
                answers = gpus.ask(question, patience_s=patience_s)
        except AllotError as error:
            problems.append(error)
            continue
        for _, answer in answers:
            problems += [answer] if isinstance(answer, AllotError) else answer
    return problems


def free_orphans_on(
    folder: StateFolder,
    machine: Path | None,
    uuid: str,
    index: int,
    *,
    may_reset: bool,
    patience_s: float,
    keeps_warm: bool = True,
) -> list[AllotError]:
    """Like `free_orphans`, for one GPU by its number.

    `keeps_warm` False: remove warm slices at once. Raises `AllotError` if the GPU does not answer.
    """
    question = partial(
        _free_orphans, folder, {uuid}, machine, may_reset=may_reset, keeps_warm=keeps_warm
    )
    with MigMachine(machine) as gpus:
        return gpus.ask_one(index, question, patience_s=patience_s)


def in_need(folder: StateFolder) -> frozenset[str]:
    """The GPUs on which `free_orphans` has work, by files alone."""
    return frozenset(uuid for uuid in _with_journals(folder) if _needs_care(folder, uuid))


def _with_journals(folder: StateFolder) -> frozenset[str]:
    """The GPUs that were ever cut."""
    try:
        return frozenset(path.name for path in folder.mig.iterdir())
    except OSError:
        return frozenset()


def _free_orphans(
    folder: StateFolder,
    uuids: Collection[str],
    machine: Path | None,
    device: MigDevice,
    *,
    may_reset: bool,
    keeps_warm: bool = True,
) -> list[AllotError]:
    if device.uuid not in uuids:
        return []
    slices = slices_on(folder, device, machine, may_reset=may_reset)
    # Called for each slice after its lock is taken: its share may be new.
    freed = slices.free_orphans(partial(is_share, folder), keep_s=0)
    failpoint("mig.settled")
    problems = [*(error for _, error in freed.stuck), *freed.problems]
    if not keeps_warm or not is_for(folder, device.uuid, MIG):
        problems += _remove_warm(slices)
    slices.switch_off(is_needed=partial(is_for_mig_alone, folder, device.uuid))
    return problems


def _remove_warm(slices: Slices) -> list[AllotError]:
    problems: list[AllotError] = []
    for record in slices.journal.read().records:
        if record.stage is Stage.READY and not record.holder:
            try:
                slices.remove(record.id)
            except NotFoundError:
                continue
            except AllotError as error:
                problems.append(error)
    return problems


def _needs_care(folder: StateFolder, uuid: str) -> bool:
    journal = Journal(folder.mig / uuid)
    try:
        contents = journal.read()
    except StateError:
        return False  # another user's
    if not contents.records:
        is_switched = journal.is_switched and not contents.problems
        return is_switched and not is_for_mig_alone(folder, uuid)
    return any(_is_left(folder, journal, record) for record in contents.records)


def _is_left(folder: StateFolder, journal: Journal, record: SliceRecord) -> bool:
    if record.stage is Stage.READY and record.holder:
        if is_share(folder, record.holder):
            return False
    elif record.stage is Stage.READY:
        is_over = time.time() >= (record.idle_since or 0.0) + record.keep_s
        return is_over or not is_for(folder, record.gpu, MIG)
    with suppress(StateError):
        return journal.is_free(record.id)
    return False


def _by_machine(folder: StateFolder, uuids: Collection[str]) -> Mapping[Path | None, set[str]]:
    """Group GPUs by their simulated machine; None: this computer."""
    machines: dict[Path | None, set[str]] = {}
    remaining = set(uuids)
    for path in sorted(folder.simulated.glob("*/machine")):
        with suppress(StateError):
            if own := remaining & {device.uuid for device in read_machine(path).devices}:
                machines[path] = own
                remaining -= own
    if remaining:
        machines[None] = remaining
    return machines


def check(order: ShareOrder) -> None:
    """Refuse orders that no slice can serve: `NotInModeError`, `UsageError`, `StateError`."""
    if order.owner is not None:
        _check_of_pod(order)
        return
    request = order.request
    problem = ""
    if request.count > 1:
        problem = "a program can use only one MIG device: start one program for each"
    elif request.may_oversubscribe:
        problem = "the memory of a slice cannot be promised twice"
    elif request.memory.part is not None:
        problem = "a percentage needs a known GPU: name a size or --mig"
    if problem:
        raise NotInModeError(problem, hint="see docs/guides/mig.md")


@contextmanager
def cut(folder: StateFolder, order: ShareOrder, devices: Sequence[Device]) -> Iterator[Placement]:
    """Cut the slices of an order, or reuse warm ones; they count as used while the block runs.

    MIG devices among `devices` are ignored. Raises `DoesNotFitError` with the reason of each GPU,
    and the drivers' errors.
    """
    whole = {device.uuid: device for device in devices if device.slice_of is None}
    is_command = order.owner is None
    if is_command:
        _prepare(folder, order, whole.values())
    for problem in order.problems:
        if problem.device is not None and problem.device.uuid in order.devices:
            raise DoesNotFitError(
                f"GPU {problem.device.uuid} was chosen for it: {problem.message}",
                hint="see `allot devices` on the node, and the node's events",
            )
    survey = Survey(folder, order, whole, _ended_before(folder, order))
    try:
        with MigMachine(order.machine) as gpus, ExitStack() as works:
            yield Placement(order.request, tuple(SliceAllocator(survey, gpus).cut(works)))
    except BaseException:
        if is_command:
            with suppress(AllotError):
                free_orphans(folder)
        raise


def _prepare(folder: StateFolder, order: ShareOrder, devices: Iterable[Device]) -> None:
    """Free what other commands left: no daemon does it for commands."""
    if order.machine is None and os.geteuid() != 0:
        # Checked first: a journal of this user would block root's.
        raise PrerequisiteError(
            "MIG slices of real GPUs are root's to make", hint="run as root: sudo allot run ..."
        )
    check_selectors(order, devices)
    folder.prepare()
    with folder.locked():
        recovery.recover(folder)
    free_orphans(folder)


def verify(folder: StateFolder, share: Share, order: ShareOrder, devices: Sequence[Device]) -> None:
    """Raise `StateError` if another tool removed a slice of a share; asks journal and drivers.

    A new instance at the same place may belong to another tool, and has the device nodes that the
    share's container would get. Also raises `StateError` for a GPU that does not answer.
    """
    gpu_of = {device.uuid: device.gpu for device in share.devices if device.gpu}
    index = {device.uuid: device.index for device in devices if device.slice_of is None}
    gpus = set(gpu_of.values())
    among = {index[uuid] for uuid in gpus} if gpus <= index.keys() else None
    with MigMachine(order.machine) as machine:
        answers = machine.ask(_instances, patience_s=LOOK_S, among=among)
    instances = dict(answer for _, answer in answers if not isinstance(answer, AllotError))
    if silent := sorted(gpus - instances.keys()):
        raise StateError(
            f"share {share.name}: GPU {', '.join(silent)} does not report its slices",
            hint="it is tried again automatically; see `allot devices` on the node",
        )
    holders = {share.id, *_ended_before(folder, order)}
    gone = [
        uuid
        for uuid, gpu in gpu_of.items()
        if uuid not in instances[gpu] or not _is_held_by(Journal(folder.mig / gpu), uuid, holders)
    ]
    if gone:
        raise StateError(
            f"share {share.name}: its slice {', '.join(gone)} was removed by others",
            hint="delete the pod, so that it is placed again; another MIG manager works on this"
            " node: use only one of them",
        )


def _instances(device: MigDevice) -> tuple[str, frozenset[str]]:
    gpu = device.driver.look_if_any()
    instances = gpu.instances if gpu is not None else ()
    return device.uuid, frozenset(instance.uuid for instance in instances if instance.uuid)


def _is_held_by(journal: Journal, uuid: str, holders: Collection[str]) -> bool:
    """True if every record of a slice names one of `holders`; also for a foreign slice."""
    return all(record.holder in holders for record in journal.read().records if record.uuid == uuid)


def _ended_before(folder: StateFolder, order: ShareOrder) -> frozenset[str]:
    """The shares of the pod that never run at the same time as this one: init containers'.

    The scheduler counts one slice for both if it is large enough; the node reuses it likewise.
    """
    owner = order.owner
    if owner is None:
        return frozenset()
    return frozenset(
        share.id
        for share in recovery.list_shares(folder)
        if traits_of(share.mode).is_slice
        and share.owner is not None
        and share.owner.uid == owner.uid
        and not overlap(owner, share.owner)
    )


def _check_of_pod(order: ShareOrder) -> None:
    request = order.request
    if order.injection is Injection.MOUNTS:
        raise UsageError(
            "mode mig needs CDI: a container's slice is known only when it starts, too late for"
            " mounts",
            hint="turn CDI on in the container runtime (containerd 2, CRI-O 1.28 have it on), or"
            " use another mode on this node",
        )
    if request.may_oversubscribe:
        raise UsageError(
            "the memory of a slice cannot be promised twice",
            hint="remove allotment.dev/oversubscribe, or ask for another mode",
        )
    if len(order.devices) != len(order.slices):
        raise StateError(
            f"the slice of share {order.id} does not exist any more: {', '.join(order.devices)}",
            hint="delete the pod, so that it is placed again",
        )


_ALL = MemoryAmount("100%", part=Fraction(1))


class _Static(msgspec.Struct, frozen=True):
    """A MIG device of another tool, that no share has."""

    device: Device
    gpu: str
    view: MigView
    users: tuple[int, ...]

    def has_profile_for(self, request: Request) -> bool:
        """True if it has exactly the profile that would be cut for a request."""
        profiles = serving(self.view.gpu.profiles, slices_of(request))
        slice_ = self.device.slice_of
        return bool(profiles) and slice_ is not None and profiles[0].name == slice_.profile


def names_slices(request: Request) -> bool:
    """True if a request names MIG devices."""
    return any(selector.strip().lower().startswith("mig-") for selector in request.selectors)


def free_slices(folder: StateFolder, machine: Path | None) -> tuple[Device, ...]:
    """The MIG devices that Allotment did not cut, not even in part."""
    with Nvml(machine=machine) as source:
        slices = source.slices()
    return without_own(folder.mig, slices)


def find_static(
    folder: StateFolder, order: ShareOrder
) -> tuple[ShareOrder, Sequence[Device]] | None:
    """Find an unused MIG device of another tool, and the order for all of it.

    One that the order names, or an idle one of the profile that would be cut, if the order reuses
    such. None: cut a slice. Raises as `lifecycle.create`.
    """
    request = order.request
    if names_slices(request):
        return _find_named(folder, order)
    if not order.mig.reuses:
        return None
    for static in _unused(folder, order.machine):
        is_on_gpu = is_selected(replace(static.device, uuid=static.gpu), request)
        if is_on_gpu and not static.users and static.has_profile_for(request):
            with suppress(DoesNotFitError):  # a share is on it
                return _all_of(folder, order, static.device)
    return None


def _find_named(folder: StateFolder, order: ShareOrder) -> tuple[ShareOrder, Sequence[Device]]:
    request = order.request
    for device in free_slices(folder, order.machine):
        if is_selected(device, request):
            mps_daemons.await_way(folder, device.uuid)
    refusal: BusyError | DoesNotFitError | None = None
    for static in _unused(folder, order.machine):
        device = static.device
        if not is_selected(device, request):
            continue
        if static.users:
            refusal = BusyError(f"{device.uuid} is in use by processes {format_pids(static.users)}")
        elif request.mig_profile and not static.has_profile_for(request):
            refusal = DoesNotFitError(
                f"{device.uuid} is a {device.name}, not a {request.mig_profile}",
                hint="leave --mig out, or name another device",
            )
        else:
            try:
                return _all_of(folder, order, device)
            except DoesNotFitError as error:
                refusal = error
    raise refusal or NotFoundError(
        f"there is no unused MIG device {' or '.join(request.selectors)}",
        hint="`allot devices` shows them; a slice that was cut for a share is not available",
    )


def _all_of(
    folder: StateFolder, order: ShareOrder, device: Device
) -> tuple[ShareOrder, Sequence[Device]]:
    """The order for all of a MIG device. Raises `DoesNotFitError` if it is too small or used."""
    have = device.allottable_bytes
    need = order.request.memory.of(have)
    if need > have:
        raise DoesNotFitError(f"{device.uuid}: {need_and_have(need, have)}")
    whole = replace(order, request=replace(order.request, memory=_ALL, selectors=(device.uuid,)))
    folder.prepare()
    with folder.locked():
        place_now(folder, whole, [device], recovery.recover(folder))
    return whole, [device]


def _unused(folder: StateFolder, machine: Path | None) -> Sequence[_Static]:
    slices = free_slices(folder, machine)
    if not slices:
        return ()
    with Nvml(machine=machine) as source:
        views = source.mig_views()
    return [
        _Static(device, cut.gpu, views[cut.gpu], views[cut.gpu].users.get(cut.gpu_instance, ()))
        for device in sorted(slices, key=lambda device: device.place)
        if (cut := device.slice_of) is not None and cut.gpu in views
    ]
