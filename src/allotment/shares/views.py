# SPDX-License-Identifier: Apache-2.0
"""Shares as people and programs look at them: limits, use, processes, and what is really enforced.

The ledger says what the share's programs claim; the driver says which processes use the device; the
kernel says which of those are in the share. A process that the driver knows and the ledger does not
is one that the shim is not in: it is shown as not enforced, with the driver's figure.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path

from allotment.devices.sources import Problem, Reading
from allotment.ledger import DeviceUse, Ledger, ProcessUse, SeatAccount
from allotment.model.compute import Compute
from allotment.model.errors import AllotError, LedgerError, StateError, UsageError
from allotment.model.requests import EXCLUSIVE, MIG, MPS
from allotment.model.shares import Injection, Share, ShareDevice, ShareId, SuspendedBy
from allotment.modes import Turns, ledger_mode, mode_named
from allotment.modes.mps import Loss
from allotment.shares.folders import StateFolder
from allotment.shares.lives import Found, look, recover
from allotment.shares.processes import census, command_of, is_alive, pid_inside, start_time
from allotment.shares.sessions import inside_share

__all__ = [
    "ComputeView",
    "DeviceView",
    "LiveState",
    "LossView",
    "OutsideView",
    "Overview",
    "ProcessView",
    "Rates",
    "Readings",
    "ShareView",
    "current",
    "overview",
    "view",
]

Readings = Callable[[Path | None], Mapping[str, Reading | Problem]]
"""Asks the driver of a simulated machine (its file) or of the real one (None)."""


class LiveState(StrEnum):
    """Why a share is there."""

    RUNNING = "running"
    """Its `allot run` is; of a pod's, a program is in it."""
    LEFT = "left"
    """Its `allot run` has ended, or was killed, and processes are left in it."""
    SUSPENDED = "suspended"
    """Its programs are, until it is resumed."""
    KEPT = "kept"
    """It was made to stay until it is removed."""
    WAITING = "waiting"
    """It is a pod's, and no program is in it: its container has not started, or has ended."""
    DAMAGED = "damaged"
    """A file of it cannot be read."""


@dataclass(frozen=True, slots=True)
class ProcessView:
    """A process of a share that uses a device. Bytes; one figure for each device of the share."""

    pid: int | None
    """Its number on this machine; None where it cannot be found out."""
    pid_inside: int
    command: str
    is_enforced: bool
    used: tuple[int, ...]
    context: tuple[int, ...]
    peak: tuple[int, ...]
    refusals: int
    gpu_ns: int | None = None
    """GPU time, over all devices; None: nobody measures it."""
    held_ns: int | None = None
    throttled: int | None = None


@dataclass(frozen=True, slots=True)
class Rates:
    """What a share had of one device between two looks, in parts of that time."""

    gpu: float
    copy: float
    held: float
    """Over all threads: may be more than 1."""
    borrowed: float
    lent: float


@dataclass(frozen=True, slots=True)
class ComputeView:
    """What a share is promised of one device's compute, and what it has had since it was made."""

    promised: Compute
    is_suspended: bool
    is_measured: bool
    """GPU time is measured now: only where a share of the device asked for compute."""
    use: DeviceUse
    account: SeatAccount
    driver_percent: int | None
    """How busy its processes kept the device in the last second, by NVML."""
    read_ns: int
    rates: Rates | None = None
    """None until there is an earlier look to compare with."""
    takes_turns: bool = True
    """False: it computes at the same time as others (MPS), and nobody measures it."""

    @property
    def state(self) -> str | None:
        """What its processes do: hold the device, wait for it, or neither; None without turns."""
        if not self.takes_turns:
            return None
        if self.is_suspended:
            return "suspended"
        if self.account.holding:
            return "holding"
        return "waiting" if self.account.waiting else "idle"

    def since(self, before: "ComputeView") -> "ComputeView":
        """Return this view with its rates since an earlier one of the same share and device."""
        elapsed = self.read_ns - before.read_ns
        if elapsed <= 0 or not (self.is_measured and before.is_measured):
            return self

        def rate(later: int, earlier: int) -> float:
            return max(0, later - earlier) / elapsed

        rates = Rates(
            gpu=rate(self.use.gpu_ns, before.use.gpu_ns),
            copy=rate(self.use.copy_ns, before.use.copy_ns),
            held=rate(self.use.held_ns, before.use.held_ns),
            borrowed=rate(self.account.borrowed_ns, before.account.borrowed_ns),
            lent=rate(self.account.lent_ns, before.account.lent_ns),
        )
        return replace(self, rates=rates)


@dataclass(frozen=True, slots=True)
class DeviceView:
    """One device of a share. Bytes."""

    uuid: str
    name: str
    limit: int
    used: int
    """By the ledger; and by the driver, what processes have that the shim is not in."""
    peak: int
    refusals: int
    is_oversubscribed: bool = False
    host_bytes: int = 0
    """Of its use, how much may lie on the host: all of it where the driver put it aside."""
    moved_bytes: int = 0
    compute: ComputeView | None = None
    """None: nothing is promised of it there, or nobody can tell."""


@dataclass(frozen=True, slots=True)
class LossView:
    """What programs of a share lost by the end or the fault of a GPU's MPS daemon."""

    uuid: str
    time: float
    """Seconds after the epoch."""
    reason: str
    recovered_s: float | None
    """Seconds until the daemon was ready again; None: it is not, or it never left."""


@dataclass(frozen=True, slots=True)
class ShareView:
    """A share as it is at one moment."""

    id: str
    name: str
    state: LiveState
    share: Share | None
    devices: tuple[DeviceView, ...]
    processes: tuple[ProcessView, ...]
    problem: AllotError | None
    remark: str = ""
    """Why nothing of it is enforced, where that is so by its mode or by how it was made."""
    program: str = ""
    """The command line of one of its processes, the first that uses a device if one does."""
    losses: tuple[LossView, ...] = ()
    """The last few, oldest first on each device."""

    @property
    def command(self) -> str:
        """What runs in it: as `allot run` was given it, or what is seen; empty if nothing is."""
        return " ".join(self.share.command if self.share else ()) or self.program

    @property
    def is_enforced(self) -> bool:
        """Are all of its processes held to the limit? A damaged share's are not known to be."""
        if self.problem is not None or self.remark:
            return False
        return all(process.is_enforced for process in self.processes)

    @property
    def enforcement(self) -> str:
        """Tell in a word whether its limits are in force: `yes`, `no`, or its mode has none."""
        if self.remark and self.problem is None and self.share is not None:
            return self.share.mode
        return "yes" if self.is_enforced else "no"


@dataclass(frozen=True, slots=True)
class OutsideView:
    """A process that uses a device and is in no share that can be seen. Bytes; None: not known."""

    pid: int
    command: str
    uuid: str
    used: int | None


@dataclass(frozen=True, slots=True)
class Overview:
    """The shares at one moment, and who uses GPUs outside of them."""

    shares: tuple[ShareView, ...]
    outside: tuple[OutsideView, ...]

    def since(self, before: "Overview") -> "Overview":
        """Return this overview with the rates since an earlier one."""
        earlier = {
            (share.id, device.uuid): device.compute
            for share in before.shares
            for device in share.devices
        }

        def compared(share: ShareView, device: DeviceView) -> DeviceView:
            old = earlier.get((share.id, device.uuid))
            if device.compute is None or old is None:
                return device
            return replace(device, compute=device.compute.since(old))

        shares = tuple(
            replace(share, devices=tuple(compared(share, each) for each in share.devices))
            for share in self.shares
        )
        return replace(self, shares=shares)


def current(folder: StateFolder) -> list[Found]:
    """Return the shares that live; those that ended are removed where that is possible.

    None from inside of a share: the kernel and the driver tell of that one alone there, and the
    others would look as if they had ended.
    """
    from allotment.shares.sessions import inside_share  # late: it starts programs as well

    if inside_share() or not folder.exists():
        return []
    try:
        with folder.locked():
            return recover(folder)
    except StateError:
        return look(folder)  # a folder that may only be read is still worth showing


def view(shares: Iterable[Found], readings: Readings) -> list[ShareView]:
    """Bring together what ledger, driver and kernel say about shares."""
    return list(overview(shares, readings, machines=()).shares)


def overview(
    shares: Iterable[Found],
    readings: Readings,
    *,
    machines: Iterable[Path | None] = (None,),
    serving: Collection[int] = (),
    losses: Mapping[str, Collection[Loss]] | None = None,
) -> Overview:
    """Bring together what ledger, driver and kernel say about shares, and who is in none.

    Who uses a device of the shares' machines, or of these, and is in no share, is `outside`, but
    for `serving`: processes that serve the shares. `losses` are those of each GPU, by UUID.
    """
    known = list(shares)
    members = census((each.share, each.directory) for each in known if each.share)
    answers: dict[str | None, Mapping[str, Reading | Problem]] = {}
    views = []
    for each in known:
        machine = each.share.machine if each.share else None
        if machine not in answers:
            answers[machine] = readings(Path(machine) if machine else None) if each.share else {}
        own = members.get(each.id, set()) | _alone(each, members, answers[machine])
        lost = _losses(each, losses or {})
        views.append(replace(_view(each, own, answers[machine]), losses=lost))
    for path in machines:
        name = str(path) if path else None
        if name not in answers:
            answers[name] = readings(path)
    accounted = {
        (pid, device.driver_uuid if isinstance(device, ShareDevice) else device.uuid)
        for each in views
        for device in (each.share.devices if each.share else each.devices)
        for pid in {*members.get(ShareId(each.id), ()), *(one.pid for one in each.processes)}
    }
    if inside_share():  # the driver tells only of the share's own processes there
        answers.clear()
    found = {  # by names of its own: a machine that was asked by two paths is one machine
        (user.uuid, user.pid): user
        for answer in answers.values()
        for user in _outside(answer, accounted)
        if user.pid not in serving
    }
    return Overview(tuple(views), tuple(user for _, user in sorted(found.items())))


def _losses(found: Found, losses: Mapping[str, Collection[Loss]]) -> tuple[LossView, ...]:
    """Return what a share lost: not what one of its name did that was there before it."""
    if found.share is None:
        return ()
    return tuple(
        LossView(device.uuid, loss.time, loss.reason, loss.recovered_s)
        for device in found.share.devices
        for loss in losses.get(device.uuid, ())
        if found.name in loss.shares and loss.time >= found.share.created
    )


def _alone(
    found: Found,
    members: Mapping[ShareId, Collection[int]],
    readings: Mapping[str, Reading | Problem],
) -> set[int]:
    """Return who is on the devices of an exclusive share: nobody else has a right to be there."""
    if found.mode != EXCLUSIVE:
        return set()
    there = {
        process.pid
        for uuid in found.limits()
        if isinstance(reading := readings.get(uuid), Reading)
        for process in reading.processes
    }
    return there - {pid for share, pids in members.items() if share != found.id for pid in pids}


def _outside(
    readings: Mapping[str, Reading | Problem], accounted: Collection[tuple[int | None, str]]
) -> Iterator[OutsideView]:
    for uuid, reading in readings.items():
        for process in reading.processes if isinstance(reading, Reading) else ():
            if (process.pid, uuid) not in accounted:
                yield OutsideView(process.pid, command_of(process.pid), uuid, process.used_bytes)


def _view(found: Found, members: set[int], readings: Mapping[str, Reading | Problem]) -> ShareView:
    processes: tuple[ProcessView, ...] = ()
    if found.ledger:
        processes = _enforced(found.ledger, members)
    seen = {process.pid for process in processes}
    uuids = [device.driver_uuid for device in found.share.devices] if found.share else []
    strangers = members - {pid for pid in seen if pid}
    unenforced = _unenforced(uuids, strangers, readings, is_held=found.mode == MIG)
    processes += unenforced
    pids = members | {process.pid for process in processes if process.pid is not None}
    return ShareView(
        id=found.id,
        name=found.name,
        state=_state(found, is_used=bool(pids or processes)),
        share=found.share,
        devices=tuple(
            _with_driver(device, index, unenforced, pids, readings.get(device.uuid))
            for index, device in enumerate(_devices(found))
        ),
        processes=processes,
        problem=found.problem,
        remark=_remark(found),
        program=_program(processes, members),
    )


def _program(processes: Iterable[ProcessView], members: Iterable[int]) -> str:
    """Return the command line of one of a share's processes, if one can be had."""
    known = (process.command for process in processes)
    return next((each for each in (*known, *map(command_of, sorted(members))) if each), "")


def _remark(found: Found) -> str:
    """Tell why nothing of a share is enforced, whatever its programs do."""
    if found.share is None:
        return ""
    with suppress(UsageError):  # a mode of another release: its problem says so
        remark = mode_named(found.share.mode).remark
        if remark:
            return remark
    if found.share.injection is Injection.NONE:
        return "not enforced: its container started without Allotment"
    return ""


def _state(found: Found, *, is_used: bool) -> LiveState:
    if found.problem or not found.share:
        return LiveState.DAMAGED
    if found.share.suspension is not None and found.share.suspension.is_complete:
        return LiveState.SUSPENDED
    if found.share.runner is None:
        if found.share.owner is None:
            return LiveState.KEPT
        return LiveState.RUNNING if is_used else LiveState.WAITING
    return LiveState.RUNNING if is_alive(found.share.runner) else LiveState.LEFT


def _devices(found: Found) -> tuple[DeviceView, ...]:
    names = {device.uuid: device.name for device in found.share.devices} if found.share else {}
    if found.ledger is None:
        return tuple(
            DeviceView(uuid, names.get(uuid, ""), limit, 0, 0, 0)
            for uuid, limit in found.limits().items()
        )
    suspension = found.share.suspension if found.share else None
    is_aside = bool(
        suspension and suspension.is_complete and suspension.by is SuspendedBy.CHECKPOINT
    )
    turns: Mapping[str, Turns] = {}
    mode = ledger_mode(found.mode)
    with suppress(LedgerError):  # then nothing is told of turns; memory's figures are
        turns = mode.turns(found.directory, found.ledger) if mode else {}
    return tuple(
        DeviceView(
            uuid=policy.uuid,
            name=names.get(policy.uuid, ""),
            limit=policy.memory_limit,
            used=use.used,
            peak=use.peak,
            refusals=use.refusals,
            is_oversubscribed=policy.is_oversubscribed,
            host_bytes=use.used if is_aside else use.host_bytes,
            moved_bytes=use.moved_bytes,
            compute=_compute(found, policy.uuid, use, turns),
        )
        for policy, use in zip(found.ledger.policy.devices, found.ledger.devices, strict=True)
    )


def _compute(
    found: Found, uuid: str, use: DeviceUse, turns: Mapping[str, Turns]
) -> ComputeView | None:
    terms, had = found.terms.get(uuid), turns.get(uuid)
    if found.mode == MPS:
        return _side_by_side(found, uuid, use)
    if terms is None or had is None or found.ledger is None:
        return None
    return ComputeView(
        promised=terms.compute,
        is_suspended=terms.is_suspended,
        is_measured=had.is_governed,
        use=use,
        account=had.account,
        driver_percent=None,
        read_ns=found.ledger.read_ns,
    )


def _side_by_side(found: Found, uuid: str, use: DeviceUse) -> ComputeView | None:
    """Return what a share has that takes no turns; there is nothing that it has had."""
    promised = [each.compute for each in found.devices() if each.uuid == uuid]
    if found.ledger is None or not promised:
        return None
    return ComputeView(
        promised=promised[0],
        is_suspended=False,
        is_measured=False,
        use=use,
        account=SeatAccount(),
        driver_percent=None,
        read_ns=found.ledger.read_ns,
        takes_turns=False,
    )


def _with_driver(
    device: DeviceView,
    index: int,
    unenforced: Iterable[ProcessView],
    pids: Collection[int],
    reading: Reading | Problem | None,
) -> DeviceView:
    """Add what only the driver knows: what escaped the shim, and how busy all of it was."""
    used = device.used + sum(process.used[index] for process in unenforced)
    compute = device.compute
    if compute is not None and isinstance(reading, Reading):
        busy = [each.gpu_percent for each in reading.processes if each.pid in pids]
        known = [each for each in busy if each is not None]
        is_silent = bool(busy) and not known
        compute = replace(compute, driver_percent=None if is_silent else sum(known))
    return replace(device, used=used, peak=max(device.peak, used), compute=compute)


def _enforced(ledger: Ledger, members: set[int]) -> tuple[ProcessView, ...]:
    inside = {(pid_inside(pid), start_time(pid)): pid for pid in members}
    return tuple(
        ProcessView(
            pid=_host_pid(process, inside),
            pid_inside=process.pid,
            command=process.command,
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


def _host_pid(process: ProcessUse, inside: Mapping[tuple[int, int | None], int]) -> int | None:
    """Find a slot's process on the machine: the start time is the same in every namespace."""
    found = inside.get((process.pid, process.start_time))
    if found is None and start_time(process.pid) == process.start_time:
        return process.pid
    return found


def _unenforced(
    uuids: list[str],
    members: set[int],
    readings: Mapping[str, Reading | Problem],
    *,
    is_held: bool,
) -> tuple[ProcessView, ...]:
    """Find the members that the driver knows as users of the share's devices.

    The shim is not in these: they are beyond their limit's reach, unless the hardware holds them.
    """
    used: dict[int, list[int]] = {}
    for index, uuid in enumerate(uuids):
        reading = readings.get(uuid)
        if not isinstance(reading, Reading):
            continue
        for process in reading.processes:
            if process.pid in members:
                each = used.setdefault(process.pid, [0] * len(uuids))
                each[index] = process.used_bytes or 0
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
