# SPDX-License-Identifier: Apache-2.0
"""The life of a share on one machine: `create` is the one call that every front door ends in.

A share is booked from the moment its directory appears (one rename, under the folder's lock) until
that directory is gone. One whose runner died stays as long as any process is in it, and is removed
by whoever looks next. What is damaged stays booked at its recorded size, is shown with its error,
and never keeps the others from working.
"""

import os
import re
import shutil
import time
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from allotment.devices.sources import Problem
from allotment.ledger import Ledger, Terms
from allotment.model.devices import Device
from allotment.model.errors import (
    AllotError,
    BusyError,
    DoesNotFitError,
    LedgerError,
    NotFoundError,
    StateError,
    UsageError,
)
from allotment.model.formats import format_count
from allotment.model.placements import DeviceState, Placement
from allotment.model.quantities import check_part
from allotment.model.requests import Request
from allotment.model.shares import Injection, Runner, Share, ShareDevice, ShareId
from allotment.modes import DEFAULT_MODE, mode_named
from allotment.placement import TOO_LITTLE_COMPUTE, choose, explain, unknown_selectors
from allotment.placement.host_memory import Promised, budget_left, default_budget
from allotment.shares.cdi import remove_spec, spec_name
from allotment.shares.folders import StateFolder, explained
from allotment.shares.processes import census, is_alive, named
from allotment.shares.records import read_record, write_record
from allotment.shares.traces import read_traces, write_traces

__all__ = [
    "Booking",
    "Found",
    "Order",
    "allotted",
    "booked",
    "create",
    "destroy",
    "find",
    "look",
    "recover",
    "states_of",
]

_DRAFT = ".new-"
_REMOVED = ".old-"
# As CDI has the names of devices.
_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?", re.ASCII)


@dataclass(frozen=True, slots=True)
class Order:
    """All that a front door knows about the share it wants."""

    request: Request
    injection: Injection
    name: str | None = None
    machine: Path | None = None
    spec: str | None = None
    runner: Runner | None = None
    command: tuple[str, ...] = ()
    mode: str = DEFAULT_MODE
    problems: tuple[Problem, ...] = ()
    """GPUs that do not answer: no share is placed on one, but a refusal names them."""
    cdi_folder: Path | None = None
    """Where the share's CDI spec will be, for a share that has one."""
    host_budget: int | None = None
    """Host memory that may stand for devices' memory, in bytes; None: the machine's own default."""


@dataclass(frozen=True, slots=True)
class Found:
    """A share's directory, and what could be read of it: `problem` says what could not."""

    id: ShareId
    directory: Path
    share: Share | None
    ledger: Ledger | None
    problem: AllotError | None = None
    terms: Mapping[str, Terms] = field(default_factory=dict)
    """The compute in force on each device, by UUID; not on those where it takes no turns."""

    @property
    def name(self) -> str:
        """The name it goes by."""
        return self.share.name if self.share else self.id

    def limits(self) -> dict[str, int]:
        """Return what is booked on each device, by UUID, in bytes.

        The greater of record and ledger where both can be read: a resize writes one after the
        other, and the booking must never be below the limit in force.
        """
        limits: dict[str, int] = {}
        if self.share:
            limits = {device.uuid: device.memory_bytes for device in self.share.devices}
        if self.ledger:
            for device in self.ledger.policy.devices:
                limits[device.uuid] = max(limits.get(device.uuid, 0), device.memory_limit)
        return limits

    def booked_memory(self) -> dict[str, int]:
        """Return what of each device nobody else can have, by UUID, in bytes.

        Its limits; nothing while it is suspended and its memory is off its devices.
        """
        is_off = self.share is not None and self.share.is_off_device
        return {uuid: 0 if is_off else limit for uuid, limit in self.limits().items()}

    def guarantees(self) -> dict[str, int]:
        """Return what compute is promised on each device, by UUID, in basis points.

        As with limits, the greater of what is recorded and what is in force.
        """
        booked = {device.uuid: device.compute.guarantee for device in self.devices()}
        for uuid, terms in self.terms.items():
            booked[uuid] = max(booked.get(uuid, 0), terms.compute.guarantee)
        return booked

    def devices(self) -> tuple[ShareDevice, ...]:
        """Return its devices as they were booked; none where its record cannot be read."""
        return self.share.devices if self.share else ()


def create(folder: StateFolder, order: Order, devices: Iterable[Device]) -> tuple[Share, Path]:
    """Place a request on the devices and make its share; return it and its directory.

    Raises `DoesNotFitError` (with need and have per device), `NotFoundError` (a selector names no
    device), `UsageError` (the name), `StateError`. Nothing is left behind by a failure.
    """
    check_name(order.name)
    known = tuple(devices)
    broken = tuple(each.device for each in order.problems if each.device)
    unknown = unknown_selectors((*known, *broken), order.request)
    if unknown:
        there = "\n".join(f"  {device.uuid} ({device.name})" for device in known)
        raise NotFoundError(
            f"no GPU here is {' or '.join(map(repr, unknown))}; there are:\n{there}",
            hint="name a GPU by its UUID (or the start of it) or model, as `allot devices` has it",
        )
    folder.prepare()
    with folder.locked():
        others = recover(folder)
        _check_name_is_free(others, order.name)
        placement = _place(order, known, booked(others))
        return _build(folder, order, placement)


def check_name(name: str | None) -> None:
    """Raise `UsageError` unless the name can be a share's (it becomes a CDI device's name too)."""
    if name is not None and not _NAME.fullmatch(name):
        raise UsageError(
            f"{name!r} cannot be a share's name",
            hint="use up to 63 letters, digits, dots, dashes and underscores; a letter or digit at"
            " both ends",
        )


def _check_name_is_free(others: Iterable[Found], name: str | None) -> None:
    for other in others:
        if name is not None and name in {other.name, other.id}:
            raise UsageError(
                f"there is a share named {name!r} already ({other.id})",
                hint="choose another --name, or see it with `allot ps`",
            )


def allotted(shares: Iterable[Found]) -> dict[str, int]:
    """Return how much memory of each device is booked, by UUID, in bytes."""
    return {uuid: booking.memory for uuid, booking in booked(shares).items()}


@dataclass(slots=True)
class Booking:
    """What of one device is given to shares: bytes, and basis points of its time."""

    memory: int = 0
    oversubscribed: int = 0
    """Of `memory`, what may live on the host."""
    guaranteed: int = 0
    shares: int = 0


def booked(shares: Iterable[Found]) -> dict[str, Booking]:
    """Return what of each device is booked, by UUID."""
    totals: dict[str, Booking] = {}
    for found in shares:
        guarantees = found.guarantees()
        oversubscribed = {each.uuid for each in found.devices() if each.is_oversubscribed}
        for uuid, limit in found.booked_memory().items():
            booking = totals.setdefault(uuid, Booking())
            booking.memory += limit
            booking.oversubscribed += limit if uuid in oversubscribed else 0
            booking.guaranteed += guarantees.get(uuid, 0)
            booking.shares += 1
    return totals


def states_of(
    devices: Iterable[Device], bookings: Mapping[str, Booking], host_budget: int | None
) -> list[DeviceState]:
    """Return what is left of each device, beside what is booked.

    `host_budget` is how much host memory may stand for devices' memory on this machine, in bytes;
    None: its default. What is promised of it already counts over all devices.
    """
    known = [(device, bookings.get(device.uuid) or Booking()) for device in devices]
    left = budget_left(
        _default_budget(device for device, _ in known) if host_budget is None else host_budget,
        (
            Promised(device.allottable_bytes, one.memory - one.oversubscribed, one.oversubscribed)
            for device, one in known
        ),
    )
    return [
        DeviceState(
            device,
            allotted_bytes=one.memory,
            oversubscribed_bytes=one.oversubscribed,
            host_budget_bytes=max(0, left),
            guaranteed=one.guaranteed,
            shares=one.shares,
        )
        for device, one in known
    ]


def _default_budget(devices: Iterable[Device]) -> int:
    known = list(devices)
    return default_budget(
        host_bytes=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        simulated_bytes=[device.memory_bytes for device in known]
        if all(device.simulated for device in known)
        else None,
    )


def _place(order: Order, devices: Iterable[Device], bookings: Mapping[str, Booking]) -> Placement:
    mode = mode_named(order.mode)
    broken = {each.device: each.message for each in order.problems if each.device}
    serving = [device for device in devices if not mode.fits(device)]
    states = [
        replace(state, problem=broken.get(state.device, ""))
        for state in states_of([*serving, *broken], bookings, order.host_budget)
    ]
    working = len(serving)
    decision = choose(states, order.request)
    if isinstance(decision, Placement):
        for placed in decision.devices:
            check_part(order.request.memory, placed.device.allottable_bytes)
        return decision
    count = order.request.count
    if count > len(states):
        hint = f"this machine has {format_count(len(states), 'GPU')}: ask for at most that --count"
    elif count > working:
        hint = "a GPU with a problem takes no share: see `allot devices`, and `allot fault` for one"
        hint += " that is simulated"
    elif all(one.reason == TOO_LITTLE_COMPUTE for one in decision.verdicts if not one.fits):
        hint = "guarantee less (`--compute 0:100` takes what others leave), or make room: `allot"
        hint += " ps` shows the shares, `allot resize` changes one"
    elif order.request.may_oversubscribe:
        hint = "ask for less, make room (`allot ps` shows the shares), or let more host memory"
        hint += " stand for the GPUs' by --host-memory"
    elif any(
        order.request.memory.of(one.device.allottable_bytes) <= one.device.allottable_bytes
        for one in states
    ):
        hint = "ask for less, or make room: `allot ps` shows the shares, `allot resize` shrinks one"
    else:
        hint = "ask for less: no GPU here is that large, even when empty"
    nameless = [
        f"  {each.uuid or f'GPU number {each.index}'}: {each.message}"
        for each in order.problems
        if not each.device
    ]
    raise DoesNotFitError("\n".join([explain(decision), *nameless]), hint=hint)


def _build(folder: StateFolder, order: Order, placement: Placement) -> tuple[Share, Path]:
    """Make the share's directory out of sight, then show it whole."""
    share_id = ShareId(os.urandom(6).hex())
    share = Share(
        id=share_id,
        name=order.name or share_id,
        created=time.time(),
        mode=order.mode,
        devices=tuple(
            ShareDevice(
                placed.device.uuid,
                placed.device.name,
                placed.memory_bytes,
                compute=order.request.compute,
                is_oversubscribed=order.request.may_oversubscribe,
            )
            for placed in placement.devices
        ),
        injection=order.injection,
        machine=str(order.machine) if order.machine else None,
        spec=order.spec,
        runner=order.runner,
        command=order.command,
        user_id=os.geteuid(),
        cdi_spec=str(order.cdi_folder / spec_name(share_id)) if order.cdi_folder else None,
    )
    directory = folder.share(share_id)
    draft = folder.shares / f"{_DRAFT}{share_id}"
    try:
        draft.mkdir()
        draft.chmod(0o755)
        mode = mode_named(order.mode)
        mode.create(draft, placement, share=share_id, name=share.name, devices=folder.devices)
        if order.cdi_folder:
            # Whatever user a container's programs run as, they take slots and turns in it.
            for path in (draft / "usage", *draft.glob("leases-*")):
                path.chmod(0o666)
        write_record(draft, share)
        draft.rename(directory)
    except OSError as error:
        _abandon(folder, draft, share)
        raise explained(error, directory, "make the share") from error
    except BaseException:
        _abandon(folder, draft, share)
        raise
    return share, directory


def _abandon(folder: StateFolder, draft: Path, share: Share) -> None:
    """Undo a share that was not to be: with the lock held, so that nobody saw it."""
    shutil.rmtree(draft, ignore_errors=True)
    mode_named(share.mode).destroy(share.id, devices=folder.devices)


def look(folder: StateFolder) -> list[Found]:
    """Return every share, oldest first; nothing is changed but dead processes' use reclaimed."""
    try:
        names = sorted(path.name for path in folder.shares.iterdir())
    except FileNotFoundError:
        return []
    except OSError as error:
        raise explained(error, folder.shares, "list the shares") from error
    found = [_read(folder.share(ShareId(name))) for name in names if not name.startswith(".")]
    present = [each for each in found if each is not None]
    return sorted(present, key=lambda each: (each.share.created if each.share else 0.0, each.id))


def _read(directory: Path) -> Found | None:
    """Read one share; None when it went away meanwhile."""
    share_id = ShareId(directory.name)
    share: Share | None = None
    problem: AllotError | None = None
    try:
        share = read_record(directory)
    except FileNotFoundError:
        return None
    except StateError as error:
        problem = error
    snapshot: Ledger | None = None
    terms: Mapping[str, Terms] = {}
    try:
        mode = mode_named(share.mode if share else DEFAULT_MODE)
        snapshot = mode.reconcile(directory)
        terms = mode.terms(directory, snapshot)
    except (LedgerError, UsageError) as error:
        if not directory.is_dir():
            return None
        problem = problem or error
    return Found(share_id, directory, share, snapshot, problem, terms)


def recover(folder: StateFolder) -> list[Found]:
    """Remove what ended without its runner's care; return the shares that remain.

    The caller holds the folder's lock: then whatever is half made or half removed is left over.
    """
    for path in folder.shares.iterdir():
        if path.name.startswith((_DRAFT, _REMOVED)):
            shutil.rmtree(path, ignore_errors=True)
    shares = look(folder)
    there = {each.id: tuple(each.limits()) for each in shares}
    mode_named(DEFAULT_MODE).sweep(there, devices=folder.devices)
    orphans = [each for each in shares if each.share and _is_orphan(each.share)]
    if not orphans:
        return shares
    members = census((each.share, each.directory) for each in orphans if each.share)
    ended = {
        each.id
        for each in orphans
        if not members[each.id] and not (each.ledger and each.ledger.processes)
    }
    for each in orphans:
        if each.id in ended:
            _remove(folder, each)
        else:
            _remember(each.directory, members[each.id])
    return [each for each in shares if each.id not in ended]


def _is_orphan(share: Share) -> bool:
    return share.runner is not None and not is_alive(share.runner)


def _remember(directory: Path, members: Iterable[int]) -> None:
    """Write down who is in a share that no runner stands for any more: nothing else may tell."""
    before = read_traces(directory)
    after = replace(before, members=tuple(map(named, sorted(members))))
    if after != before:
        with suppress(StateError):  # another user's share: its owner sees to it
            write_traces(directory, after)


def end(folder: StateFolder, share: Share, *, strangers: Collection[int] = ()) -> bool:
    """End a share whose command has ended, unless processes are left in it; tell if it is gone.

    What is left is written down. `strangers` are children of the runner that are not the share's.
    """
    directory = folder.share(share.id)
    with folder.locked():
        found = _read(directory)
        if found is None:
            return True
        left = census([(share, directory)], strangers=strangers)[share.id]
        left.discard(os.getpid())
        if left or (found.ledger and found.ledger.processes):
            _remember(directory, left)
            return False
        _remove(folder, found)
    return True


def destroy(folder: StateFolder, found: Found, *, force: bool) -> None:
    """Remove a share that nothing uses; with `force`, one in use as well.

    Programs that run in it keep the memory limit that they have, but it is booked no longer, and
    they have the compute that others leave. Those of a suspended share would be lost: nothing else
    tells that they can be resumed. Raises `BusyError` for these, and without `force`; `StateError`
    when it cannot be removed.
    """
    with folder.locked():
        again = _read(found.directory)
        if again is None:
            return
        users = _users(again)
        some = ", ".join(map(str, sorted(users)[:8]))
        if again.share and again.share.suspension and users - {_runner_pid(again.share)}:
            raise BusyError(
                f"share {again.name} is suspended, and its processes ({some}) could never go on"
                " without it",
                hint=f"bring it back first (allot resume {again.name}), or end them by kill -9",
            )
        if users and not force:
            raise BusyError(
                f"share {again.name} is in use by"
                f" {format_count(len(users), 'process', 'processes')} ({some})",
                hint="end them first, or add --force: they keep running, with memory that is booked"
                " no longer and the compute that others leave",
            )
        _remove(folder, again)


def _runner_pid(share: Share) -> int | None:
    return share.runner.pid if share.runner else None


def _users(found: Found) -> set[int]:
    users = {process.pid for process in found.ledger.processes} if found.ledger else set()
    if found.share:
        members = census([(found.share, found.directory)])[found.id]
        if members:
            return members
        if found.share.runner and is_alive(found.share.runner):
            users.add(found.share.runner.pid)
    return users


def _remove(folder: StateFolder, found: Found) -> None:
    """Take a share out of sight in one step, then delete it and what names it elsewhere."""
    grave = found.directory.with_name(f"{_REMOVED}{found.id}")
    try:
        found.directory.rename(grave)
    except FileNotFoundError:
        return
    except OSError as error:
        raise explained(error, found.directory, "remove the share") from error
    mode = mode_named(found.share.mode if found.share else DEFAULT_MODE)
    mode.destroy(found.id, devices=folder.devices)
    if found.share and found.share.cdi_spec:
        remove_spec(Path(found.share.cdi_spec))
    shutil.rmtree(grave, ignore_errors=True)


def find(folder: StateFolder, name: str) -> Found:
    """Return the share of that name, id or beginning of an id; raise `NotFoundError`."""
    shares = look(folder) if folder.exists() else []
    exact = [each for each in shares if name in {each.name, each.id}]
    begins = [each for each in shares if name and each.id.startswith(name)]
    matches = exact or begins
    if len(matches) == 1:
        return matches[0]
    if matches:
        ids = ", ".join(each.id for each in matches)
        raise UsageError(f"{name!r} may be any of {ids}", hint="write more of the id")
    there = ", ".join(each.name for each in shares) or "none"
    raise NotFoundError(f"there is no share {name!r}", hint=f"the shares are: {there}")
