# SPDX-License-Identifier: Apache-2.0
"""The status of shares: limits, use, processes, enforcement.

It combines the ledger (the programs' use), the driver (the processes on a device) and the kernel
(the processes of a share). A process that only the driver reports is without the shim: it is shown
as not enforced, with the driver's figure. A share that has more than its limit by the driver is not
enforced either, whatever its ledger says: its programs can write the ledger.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Final

import msgspec

from allotment.devices.sources import Problem, Reading
from allotment.ledger import Ledger
from allotment.ledger.leases import DeviceFiles
from allotment.model.errors import AllotError, LedgerError, StateError, UsageError
from allotment.model.formats import format_bytes
from allotment.model.shares import Injection, Share, ShareDevice, ShareId
from allotment.model.structs import replace
from allotment.modes import Turns, mode_named, traits_of
from allotment.modes.mps.state import Loss
from allotment.shares.compute_view import ComputeView, compute_of, utilization
from allotment.shares.folders import StateFolder
from allotment.shares.process_tree import (
    attached,
    began_after,
    clock_ticks,
    command_of,
    host_pid,
    is_in_pod,
    is_running,
    names_inside,
    pid_inside,
    take_census,
    whole_command,
)
from allotment.shares.record import LoadedShare, read_share
from allotment.shares.recovery import list_shares, recover, without_freed
from allotment.shares.run.command import inside_share

DRIVER_TOLERANCE_BYTES: Final = 256 << 20
"""For each process: what the driver takes for modules and stacks, which no ledger counts."""

Readings = Callable[[Path | None], Mapping[str, Reading | Problem]]
"""Queries the driver of a simulated machine (its file) or of the real one (None)."""


class LiveState(StrEnum):
    """Why a share exists."""

    RUNNING = "running"
    """Its `allot run` is running; for a pod: a program is running."""
    LEFT = "left"
    """Its `allot run` has ended, and processes are left."""
    SUSPENDED = "suspended"
    """Its programs are stopped until it is resumed."""
    KEPT = "kept"
    """It stays until it is removed."""
    WAITING = "waiting"
    """A pod's, without a program: its container has not started, or has ended."""
    DAMAGED = "damaged"
    """One of its files is unreadable."""


class ProcessView(msgspec.Struct, frozen=True):
    """A process of a share that uses a device. Bytes; one figure for each device of the share."""

    pid: int | None
    """Its PID on this machine; None: unknown."""
    pid_inside: int
    command: str
    is_enforced: bool
    used: tuple[int, ...]
    context: tuple[int, ...]
    peak: tuple[int, ...]
    refusals: int
    gpu_ns: int | None = None
    """GPU time, over all devices; None: not measured."""
    held_ns: int | None = None
    throttled: int | None = None


class DeviceView(msgspec.Struct, frozen=True):
    """One device of a share. Bytes."""

    uuid: str
    name: str
    limit: int
    used: int
    """By the ledger; for processes without the shim by the driver."""
    peak: int
    refusals: int
    is_oversubscribed: bool = False
    host_bytes: int = 0
    """The part of its use that may be on the host; all of it after a checkpoint."""
    moved_bytes: int = 0
    compute: ComputeView | None = None
    """None: nothing is promised, or it is unknown."""
    driver_used: int | None = None
    """What the share's processes have by the driver; None: it does not report that."""
    overuse: str = ""
    """How the share has more than its limit by the driver; empty: it has not."""
    raised: str = ""
    """How its ledger or contract allows more than was recorded; empty: neither does."""


class LossView(msgspec.Struct, frozen=True):
    """An end or fault of a GPU's MPS daemon, which ended programs of a share."""

    uuid: str
    time: float
    """Seconds after the epoch."""
    reason: str
    recovered_s: float | None
    """Seconds until the daemon was ready again; None: it is not, or it never stopped."""


class ShareView(msgspec.Struct, frozen=True):
    """One share at one moment."""

    id: str
    name: str
    state: LiveState
    share: Share | None
    devices: tuple[DeviceView, ...]
    processes: tuple[ProcessView, ...]
    problem: AllotError | None
    remark: str = ""
    """Why it is not enforced, by its mode or by its injection; empty: it is."""
    program: str = ""
    """The command line of one of its processes, preferably one that uses a device.

    Empty for a share of `allot run`, whose command is recorded.
    """
    losses: tuple[LossView, ...] = ()
    """The last few, oldest first on each device."""
    pids: tuple[int, ...] = ()
    """Its processes by the kernel that use a device: a ledger can name any others."""
    remaining: tuple[tuple[int, str], ...] = ()
    """PID and command of its processes without a device, once its `allot run` has ended."""

    @property
    def command(self) -> str:
        """The command of `allot run`, or of a process; empty: none runs."""
        return " ".join(self.share.command if self.share else ()) or self.program

    @property
    def excess(self) -> str:
        """How it has more memory than its limits, or its files allow more; empty: neither."""
        texts = (each.raised or each.overuse for each in self.devices)
        return "; ".join(text for text in texts if text)

    @property
    def overuse(self) -> str:
        """How it has more memory than its limits by the driver; empty: it has not."""
        return "; ".join(each.overuse for each in self.devices if each.overuse)

    @property
    def without_turns(self) -> str:
        """Which shares take no turns with it; empty: all do."""
        return "; ".join(
            f"GPU {each.uuid}: its file of turns is damaged or it did not give way, so"
            f" {', '.join(each.compute.distrusted_by)} computes without turns with it"
            for each in self.devices
            if each.compute and each.compute.distrusted_by
        )

    @property
    def is_enforced(self) -> bool:
        """True if all of its processes are held to the limit; false for a damaged share."""
        if self.problem is not None or self.remark or self.excess or self.without_turns:
            return False
        return all(process.is_enforced for process in self.processes)

    @property
    def enforcement(self) -> str:
        """`yes`, `no`, or the name of a mode without enforcement."""
        if self.remark and self.problem is None and self.share is not None:
            return self.share.mode
        return "yes" if self.is_enforced else "no"


class OutsideView(msgspec.Struct, frozen=True):
    """A process that uses a device outside of all visible shares. Bytes; None: unknown."""

    pid: int
    command: str
    uuid: str
    used: int | None


class ShareStatus(msgspec.Struct, frozen=True):
    """All shares at one moment, and the GPU users outside of them."""

    shares: tuple[ShareView, ...]
    outside: tuple[OutsideView, ...]

    def since(self, before: "ShareStatus") -> "ShareStatus":
        """This status with the rates since an earlier one."""
        earlier = {
            (share.id, device.uuid): device.compute
            for share in before.shares
            for device in share.devices
        }

        def with_rates(share: ShareView, device: DeviceView) -> DeviceView:
            old = earlier.get((share.id, device.uuid))
            if device.compute is None or old is None:
                return device
            compute = device.compute.since(old)
            return device if compute is device.compute else replace(device, compute=compute)

        shares = []
        for share in self.shares:
            devices = tuple(with_rates(share, device) for device in share.devices)
            is_same = devices == share.devices
            shares.append(share if is_same else replace(share, devices=devices))
        return replace(self, shares=tuple(shares))


def current(folder: StateFolder) -> list[LoadedShare]:
    """The live shares; ended ones are removed if possible.

    Empty inside a share: kernel and driver report only that one there, and the others would seem
    to have ended.
    """
    if inside_share() or not folder.exists():
        return []
    try:
        with folder.locked():
            return recover(folder)
    except StateError:
        return list_shares(folder)  # a read-only folder can still be shown


def view(shares: Iterable[LoadedShare], readings: Readings) -> list[ShareView]:
    """The status of some shares."""
    return list(share_status(shares, readings, machines=()).shares)


def share_status(
    shares: Iterable[LoadedShare],
    readings: Readings,
    *,
    machines: Iterable[Path | None] = (None,),
    serving: Collection[int] = (),
    losses: Mapping[str, Collection[Loss]] | None = None,
) -> ShareStatus:
    """The status of shares, and the users of the same and of `machines` outside of them.

    `serving`: processes that serve the shares, and do not count as outside. `losses`: by the GPU's
    UUID.
    """
    known = list(shares)
    begun = clock_ticks()
    members, running = take_census((each.share, each.directory) for each in known if each.share)
    users_of_any: set[int] = set().union(*members.values())
    answers: dict[str | None, Mapping[str, Reading | Problem]] = {}
    files = DeviceFiles()
    views = []
    for each in known:
        machine = each.share.machine if each.share else None
        if machine not in answers:
            answers[machine] = readings(Path(machine) if machine else None) if each.share else {}
        users = members.get(each.id, set()) | _by_driver(each, users_of_any, answers[machine])
        users |= attached(each.ledger.processes if each.ledger else (), each.directory, users)
        show = partial(
            _view,
            readings=answers[machine],
            losses=losses,
            files=files,
            has_runner=each.id in running,
        )
        shown = show(each, members=users)
        if any(not process.is_enforced for process in shown.processes):
            # It may have entered its ledger since that was read, and before the driver was asked.
            again = read_share(each.directory, written=each.share, files=files) or each
            shown = show(again, members={pid for pid in users if is_running(pid)})
        views.append(shown)
    for path in machines:
        name = str(path) if path else None
        if name not in answers:
            answers[name] = readings(path)
    if inside_share():  # the driver reports only the share's own processes there
        answers.clear()
    found = [user for each in answers.values() for user in _outside(each, views, members)]
    if any(began_after(user.pid, begun) for user in found):  # perhaps in a share
        members, _ = take_census((each.share, each.directory) for each in known if each.share)
        found = [user for each in answers.values() for user in _outside(each, views, members)]
    # A machine may have been queried by two paths.
    outside = {(user.uuid, user.pid): user for user in found if user.pid not in serving}
    return ShareStatus(tuple(views), tuple(user for _, user in sorted(outside.items())))


def _losses(found: LoadedShare, losses: Mapping[str, Collection[Loss]]) -> tuple[LossView, ...]:
    """A share's losses, without those of an earlier share of its name."""
    if found.share is None:
        return ()
    return tuple(
        LossView(device.uuid, loss.time, loss.reason, loss.recovered_s)
        for device in found.share.devices
        for loss in losses.get(device.uuid, ())
        if found.name in loss.shares and loss.time >= found.share.created
    )


def _by_driver(
    found: LoadedShare,
    members: Collection[int],
    readings: Mapping[str, Reading | Problem],
) -> set[int]:
    """All processes on an exclusive share's devices; of a pod's share those with other mounts."""
    owner, is_exclusive = found.owner, traits_of(found.mode).is_exclusive
    users = {
        process.pid
        for device in found.devices()
        if isinstance(reading := readings.get(device.driver_uuid), Reading)
        for process in reading.processes
    }
    users = users.difference(members)
    return {pid for pid in users if is_exclusive or (owner and is_in_pod(pid, owner.uid))}


def _outside(
    readings: Mapping[str, Reading | Problem],
    views: Iterable[ShareView],
    members: Mapping[ShareId, Collection[int]],
) -> Iterator[OutsideView]:
    accounted = {
        (pid, device.driver_uuid if isinstance(device, ShareDevice) else device.uuid)
        for each in views
        for device in (each.share.devices if each.share else each.devices)
        for pid in {*members.get(ShareId(each.id), ()), *(one.pid for one in each.processes)}
    }
    for uuid, reading in readings.items():
        for process in reading.processes if isinstance(reading, Reading) else ():
            if (process.pid, uuid) not in accounted:
                yield OutsideView(process.pid, command_of(process.pid), uuid, process.used_bytes)


def _view(
    read: LoadedShare,
    *,
    members: set[int],
    readings: Mapping[str, Reading | Problem],
    losses: Mapping[str, Collection[Loss]] | None,
    files: DeviceFiles,
    has_runner: bool,
) -> ShareView:
    """`members` are its processes by the kernel and the driver. `has_runner`: its runner lives."""
    found = without_freed(read, readings)
    processes = _enforced(found.ledger, members) if found.ledger else ()
    uuids = [device.driver_uuid for device in found.devices()]
    without_shim = members - {process.pid for process in processes}
    unenforced = _unenforced(uuids, without_shim, readings, is_held=traits_of(found.mode).is_slice)
    processes += unenforced
    state = _state(found, is_used=bool(members or processes), has_runner=has_runner)
    shown = {process.pid for process in processes}
    devices = _devices(found, files, members, readings)
    remaining = sorted(members - shown) if state is LiveState.LEFT else ()
    return ShareView(
        id=found.id,
        name=found.name,
        state=state,
        share=found.share,
        devices=_compared(devices, found, unenforced, members, readings),
        processes=processes,
        problem=found.problem,
        remark=_remark(found),
        program="" if found.share and found.share.command else _program(processes, members),
        losses=_losses(found, losses or {}),
        pids=tuple(sorted(members & {one.pid for one in processes})),
        remaining=tuple((pid, command_of(pid)) for pid in remaining),
    )


def _program(processes: Iterable[ProcessView], members: Iterable[int]) -> str:
    """The command line of one of a share's processes; empty: unknown."""
    commands = (process.command for process in processes)
    return next((each for each in (*commands, *map(command_of, sorted(members))) if each), "")


def _remark(found: LoadedShare) -> str:
    """Why a share is not enforced, whatever its programs do; empty: it is."""
    if found.share is None:
        return ""
    with suppress(UsageError):  # a mode of another release: see its problem
        if remark := mode_named(found.share.mode).remark:
            return remark
    if found.share.injection is Injection.NONE:
        return "not enforced: its container started without Allotment"
    return ""


def _state(found: LoadedShare, *, is_used: bool, has_runner: bool) -> LiveState:
    if found.problem or not found.share:
        return LiveState.DAMAGED
    if found.share.suspension is not None and found.share.suspension.is_complete:
        return LiveState.SUSPENDED
    if found.share.runner is None:
        if found.share.owner is None:
            return LiveState.KEPT
        return LiveState.RUNNING if is_used else LiveState.WAITING
    return LiveState.RUNNING if has_runner else LiveState.LEFT


def _devices(
    found: LoadedShare,
    files: DeviceFiles,
    pids: Collection[int],
    readings: Mapping[str, Reading | Problem],
) -> tuple[DeviceView, ...]:
    names = {device.uuid: device.name for device in found.devices()}
    if found.ledger is None:
        return tuple(
            DeviceView(uuid, names.get(uuid, ""), limit, 0, 0, 0)
            for uuid, limit in found.limits().items()
        )
    is_off_device = found.share is not None and found.share.is_off_device
    turns: Mapping[str, Turns] = {}
    mode = mode_named(found.mode)
    with suppress(LedgerError):  # then only memory is shown
        turns = mode.turns(found.directory, found.ledger, files)
    return tuple(
        DeviceView(
            uuid=policy.uuid,
            name=names.get(policy.uuid, ""),
            limit=policy.memory_limit,
            used=use.used,
            peak=use.peak,
            refusals=use.refusals,
            is_oversubscribed=policy.is_oversubscribed,
            host_bytes=use.used if is_off_device else use.host_bytes,
            moved_bytes=use.moved_bytes,
            compute=compute_of(
                found,
                found.ledger,
                policy.uuid,
                use,
                turns.get(policy.uuid),
                driver_percent=utilization(readings.get(policy.uuid), pids),
            ),
        )
        for policy, use in zip(found.ledger.policy.devices, found.ledger.devices, strict=True)
    )


def _compared(
    devices: Sequence[DeviceView],
    found: LoadedShare,
    unenforced: Sequence[ProcessView],
    pids: Collection[int],
    readings: Mapping[str, Reading | Problem],
) -> tuple[DeviceView, ...]:
    """Compare the share's devices with the driver and with its record."""
    recorded = {device.uuid: device for device in found.devices()}
    used = [
        device.used + sum(process.used[index] for process in unenforced)
        for index, device in enumerate(devices)
    ]
    on_gpu: dict[str, list[int]] = {}  # the driver counts a process once on a GPU with its slices
    for index, device in enumerate(devices):
        record = recorded.get(device.uuid)
        on_gpu.setdefault(record.driver_uuid if record else device.uuid, []).append(index)
    compared = {}
    for gpu, places in on_gpu.items():
        reading = readings.get(gpu)
        own = reading.processes if isinstance(reading, Reading) else ()
        sizes = [
            each.used_bytes for each in own if each.pid in pids and each.used_bytes is not None
        ]
        most = sum(_most_allowed(devices[place], recorded) for place in places)
        for place in places:
            device, record = devices[place], recorded.get(devices[place].uuid)
            overuse = ""
            if sum(sizes) > most + DRIVER_TOLERANCE_BYTES * len(sizes):
                overuse = (
                    f"its programs have {format_bytes(sum(sizes))} of {gpu} by the driver,"
                    f" {format_bytes(device.used)} by its ledger; the limit is"
                    f" {format_bytes(_limit(device, recorded))}"
                )
            raised = _raised(device, record) if record else ""
            if sizes or overuse or raised or used[place] != device.used:
                device = replace(
                    device,
                    used=used[place],
                    peak=max(device.peak, used[place]),
                    driver_used=sum(sizes) if sizes else None,
                    overuse=overuse,
                    raised=raised,
                )
            compared[place] = device
    return tuple(compared[place] for place in range(len(devices)))


def _raised(device: DeviceView, record: ShareDevice) -> str:
    """How the share's files allow more than its record; empty: they do not."""
    more = []
    if device.limit > record.memory_bytes:
        more.append(
            f"its ledger's limit of {device.uuid} is {format_bytes(device.limit)}, not"
            f" {format_bytes(record.memory_bytes)} as recorded"
        )
    if device.compute and (beyond := device.compute.beyond(record.compute)):
        more.append(f"its contract's compute of {device.uuid} is {beyond}")
    return "; ".join(more)


def _limit(device: DeviceView, recorded: Mapping[str, ShareDevice]) -> int:
    """The limit that counts: the record's, if the ledger's is above it."""
    record = recorded.get(device.uuid)
    return min(device.limit, record.memory_bytes) if record else device.limit


def _most_allowed(device: DeviceView, recorded: Mapping[str, ShareDevice]) -> int:
    """The limit, or the use of a share whose limit was lowered below it (`allot resize --force`).

    Its programs write the use, so it counts up to what was in use then.
    """
    record = recorded.get(device.uuid)
    # A resize that was killed after it lowered the limit has not lowered the record yet.
    most = max(record.memory_bytes, record.most_bytes or 0) if record else 0
    return max(_limit(device, recorded), min(device.used, most))


def _enforced(ledger: Ledger, members: set[int]) -> tuple[ProcessView, ...]:
    if not ledger.processes:
        return ()
    inside = {name: pid for pid in members for name in names_inside(pid)}
    return tuple(
        ProcessView(
            pid=(pid := host_pid(process, inside)),
            pid_inside=process.pid,
            command=whole_command(process.command, pid),
            is_enforced=True,
            used=process.used,
            context=process.context,
            peak=process.peak,
            refusals=process.refusals,
            gpu_ns=process.gpu_ns,
            held_ns=process.held_ns,
            throttled=process.throttled,
        )
        for process in ledger.processes
    )


def _unenforced(
    uuids: list[str],
    members: set[int],
    readings: Mapping[str, Reading | Problem],
    *,
    is_held: bool,
) -> tuple[ProcessView, ...]:
    """The members without the shim that use the share's devices, by the driver.

    No limit holds them, unless the hardware does (`is_held`).
    """
    used: dict[int, list[int]] = {}
    for index, uuid in enumerate(uuids):
        reading = readings.get(uuid)
        if not isinstance(reading, Reading):
            continue
        for process in reading.processes:
            if process.pid in members:
                amounts = used.setdefault(process.pid, [0] * len(uuids))
                amounts[index] = process.used_bytes or 0
    return tuple(
        ProcessView(
            pid=pid,
            pid_inside=pid_inside(pid),
            command=command_of(pid),
            is_enforced=is_held,
            used=tuple(amounts),
            context=(0,) * len(uuids),
            peak=tuple(amounts),
            refusals=0,
        )
        for pid, amounts in sorted(used.items())
    )
