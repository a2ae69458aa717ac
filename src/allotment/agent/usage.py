# SPDX-License-Identifier: Apache-2.0
"""Reads the use of all shares and GPUs for a scrape, in bounded time.

The shares are read by the code of `allot ps`, with the driver's figures of each GPU as they are
asked here. Each GPU has its own thread, and so have the files of the shares and the kubelet: what
hangs is left out, and the metrics say so.
"""

import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Final, Protocol, TypeVar

import msgspec
import structlog

from allotment.agent.config.schema import Config
from allotment.agent.gpu_users import HeldDevices, Users, share_processes
from allotment.agent.inventory import Sighting
from allotment.agent.node_state import NodeState
from allotment.cost.prices import MICROS
from allotment.devices.events import GpuEvent
from allotment.devices.sources import Reading
from allotment.devices.watching import Asker, Report
from allotment.ledger import SeatAccount
from allotment.ledger.layout import WAIT_FIRST_NS
from allotment.metrics.use import ClaimUser, GpuUse, ShareUse, Use
from allotment.metrics.users import MOST_PROCESSES, GpuProcess
from allotment.model.compute import WHOLE
from allotment.model.devices import Device
from allotment.model.modes import traits_of
from allotment.model.pods import Owner, Pod
from allotment.model.reported import Reported
from allotment.model.shares import ShareDevice
from allotment.model.structs import replace
from allotment.shares.booking import Booking, booked
from allotment.shares.compute_view import utilization
from allotment.shares.folders import StateFolder
from allotment.shares.mps_daemons import servers
from allotment.shares.recovery import list_shares
from allotment.shares.status import DeviceView, LiveState, ShareStatus, ShareView, share_status

_log = structlog.get_logger("allotment.agent")

PATIENCE_S: Final = 2.0
"""How long a scrape waits for the GPUs, and again for the shares."""
_FRESH_S: Final = 1.0
"""Scrapes within this time share a reading: any pod may connect."""

Readings = Mapping[str, Reading]
_Answer = TypeVar("_Answer")


class GpuReports(Protocol):
    """The part of `inventory.GpuWatch` that is used here."""

    def subscribe(self, observer: Callable[[str, Sighting], None]) -> None: ...

    def reports(self, *, patience_s: float) -> Mapping[str, Report]:
        """Return the figures of the GPUs that answer in time, by UUID."""
        ...


SharesRead = Callable[[Readings], tuple[ShareStatus, Mapping[str, Booking]]]
"""Returns the shares' status by the driver's readings, and the bookings of each device."""


class _Lent(msgspec.Struct, frozen=True):
    """What the neighbours of a share have used of its guarantee."""

    sum_ns: int
    """Of those that were there at the last look."""
    total_ns: int
    """Since the first look."""
    fallen_ns: int | None = None
    """The sum at the last look, if it was less than before for the first time."""


class UseReader:
    """The use of a node's shares and GPUs. Any thread may read it."""

    def __init__(
        self,
        *,
        node: str,
        gpus: GpuReports,
        state: NodeState,
        shares: SharesRead,
        pods: Callable[[], Collection[Pod]] = tuple,
        held: HeldDevices = tuple,
        shows_processes: Callable[[], bool] = lambda: False,
        patience_s: float = PATIENCE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`shares` and `held` may block: `shares_in`, `held_devices`. `pods` returns the node's."""
        self._node = node
        self._gpus = gpus
        self._state = state
        self._shares = shares
        self._pods = pods
        self._held = held
        self._shows_processes = shows_processes
        self._patience_s = patience_s
        self._clock = clock
        self._asker = Asker("use")
        self._kubelet = Asker("podresources")
        self._failed = Reported[str]()
        self._lock = threading.Lock()
        self._read_at = float("-inf")
        self._last: Use | None = None
        self._xids: dict[str, int] = {}
        self._lent: dict[tuple[str, str], _Lent] = {}
        """By share and device."""
        gpus.subscribe(self._see)

    def _see(self, uuid: str, sighting: Sighting) -> None:
        if isinstance(sighting, GpuEvent) and sighting.xid is not None:
            self._xids[uuid] = sighting.xid

    def read(self) -> Use:
        """Read all of it, or return a reading that has just been made."""
        with self._lock:
            if self._last is None or self._clock() - self._read_at >= _FRESH_S:
                self._last = self._read()
                self._read_at = self._clock()
            return self._last

    def _read(self) -> Use:
        began = self._clock()
        asked = self._kubelet.ask(self._held)  # answered while the GPUs are
        reports = self._gpus.reports(patience_s=self._patience_s)
        readings = {uuid: report.reading for uuid, report in reports.items()}
        read = self._answer("shares", self._asker.ask(lambda: self._shares(readings)))
        held = self._answer("pods", asked)
        status, bookings = read or (ShareStatus((), ()), None)
        devices = tuple(self._state.devices.values())
        indices = {device.uuid: device.index for device in devices}
        pods = self._pods()
        users = claim_users(pods)
        made_for = {(each.namespace, each.claim): each.pod for each in users if each.is_only}
        shares = tuple(
            replace(each, pod=made_for.get((each.namespace, each.claim), ""))
            if each.claim
            else each
            for view in status.shares
            for each in self._uses_of(view, readings, indices)
        )
        claims = {(each.namespace, each.claim) for each in shares}
        others = Users(devices=devices, shares=shares, pods=pods, held=held)
        outside, apart = others.outside(status.outside, readings)
        processes = self._processes(status, shares, readings, apart)
        if read is not None:
            present = {(each.share, each.device) for each in shares}
            self._lent = {key: lent for key, lent in self._lent.items() if key in present}
        return Use(
            node=self._node,
            gpus=tuple(
                self._gpu(device, reports.get(device.uuid), bookings, status)
                for device in sorted(devices, key=lambda each: each.place)
                if device.slice_of is None
            ),
            shares=shares,
            claim_users=tuple(each for each in users if (each.namespace, each.claim) in claims),
            holders=tuple(others.holders),
            outside=tuple(outside),
            processes=None if processes is None else processes[:MOST_PROCESSES],
            processes_left_out=max(0, len(processes or ()) - MOST_PROCESSES),
            are_shares_read=read is not None,
            are_pods_read=held is not None,
            unreadable_shares=sum(each.state is LiveState.DAMAGED for each in status.shares),
            seconds=self._clock() - began,
        )

    def _answer(self, what: str, asked: Future[_Answer] | None) -> _Answer | None:
        """None: not in time, now or in a scrape before that still waits; or it failed."""
        if asked is None:
            return None
        try:
            answer = asked.result(timeout=self._patience_s)
        except TimeoutError:
            return None
        except Exception as error:  # noqa: BLE001 - the other metrics must not fail with it
            if self._failed.is_new(what):
                _log.warning("cannot be read for metrics", what=what, error=str(error))
            return None
        self._failed.over(what)
        return answer

    def _processes(
        self,
        status: ShareStatus,
        shares: Sequence[ShareUse],
        readings: Readings,
        apart: Sequence[GpuProcess],
    ) -> tuple[GpuProcess, ...] | None:
        """Return all processes, those with the most memory first; None: not asked for."""
        if not self._shows_processes():
            return None
        uses: dict[str, list[ShareUse]] = {}
        for share in shares:
            uses.setdefault(share.share, []).append(share)
        found = [
            each
            for view in status.shares
            for each in share_processes(view, uses.get(view.id, ()), readings)
        ]
        return tuple(
            sorted(
                (*found, *apart),
                key=lambda each: (-(each.memory_used or 0), each.pid, each.gpu, each.device),
            )
        )

    # ---- a share

    def _uses_of(
        self, view: ShareView, readings: Readings, indices: Mapping[str, int]
    ) -> list[ShareUse]:
        records = {each.uuid: each for each in view.share.devices} if view.share else {}
        owned = (
            _owned(view.share.owner)
            if view.share and view.share.owner
            else ShareUse(share=view.id, gpu="", device="")
        )
        uses = []
        for place, device in enumerate(view.devices):
            record = records.get(device.uuid)
            gpu = record.driver_uuid if record else device.uuid
            use = replace(
                owned,
                share=view.id,
                gpu=gpu,
                device=device.uuid,
                gpu_index=indices.get(gpu, 0),
                place=place,
                mode=view.share.mode if view.share else "",
                memory_limit=device.limit,
                is_enforced=view.is_enforced,
                is_suspended=view.state is LiveState.SUSPENDED,
            )
            if view.problem is None:
                use = self._measured(use, view, device, record, readings)
            uses.append(use)
        return uses

    def _measured(
        self,
        use: ShareUse,
        view: ShareView,
        device: DeviceView,
        record: ShareDevice | None,
        readings: Readings,
    ) -> ShareUse:
        busy = utilization(readings.get(use.gpu), view.pids)
        has_shim = traits_of(use.mode).has_shim
        has_host = device.is_oversubscribed or device.host_bytes > 0
        use = replace(
            use,
            memory_used=_on_device(device, record),
            memory_peak=device.peak if has_shim else None,
            memory_context=sum(
                each.context[use.place] for each in view.processes if use.place < len(each.context)
            )
            if has_shim
            else None,
            refusals=device.refusals if has_shim else None,
            host_bytes=device.host_bytes if has_host else None,
            moved_bytes=device.moved_bytes if device.is_oversubscribed else None,
            utilization=None if busy is None or use.gpu != use.device else busy / 100,
            processes=len(view.processes),
        )
        compute = device.compute
        if compute is None:
            return use
        use = replace(
            use,
            kind=str(compute.promised.kind),
            guarantee=compute.promised.guarantee / WHOLE,
            ceiling=compute.promised.ceiling / WHOLE,
        )
        if not compute.is_measured:
            return use
        use = replace(
            use,
            gpu_ns=compute.use.gpu_ns,
            copy_ns=compute.use.copy_ns,
            held_ns=compute.use.held_ns,
            launches=compute.use.launches,
            delayed_launches=compute.use.throttled,
            waits=compute.use.lease_waits,
            first_wait_ns=WAIT_FIRST_NS,
            wait_ns=compute.use.lease_wait_ns,
        )
        account = compute.account
        if compute.use.gpu_ns and account == SeatAccount():
            return use  # its file cannot be read now: its counters must not seem to begin again
        return replace(
            use,
            borrowed_ns=account.borrowed_ns,
            lent_ns=self._lent_by(use, account.lent_ns),
            turns=account.leases,
            turns_taken=account.evictions,
        )

    def _lent_by(self, use: ShareUse, lent_ns: int) -> int:
        """Return what a share has lent since the agent's start.

        Each neighbour tells how much it has used of it, and takes that along when it ends. A sum
        that falls counts anew only at the second look: at the first, one file may be unreadable.
        """
        key = (use.share, use.device)
        last = self._lent.get(key, _Lent(lent_ns, 0))
        if lent_ns >= last.sum_ns:
            new = _Lent(lent_ns, last.total_ns + lent_ns - last.sum_ns)
        elif last.fallen_ns is None:
            new = _Lent(last.sum_ns, last.total_ns, fallen_ns=lent_ns)
        else:
            new = _Lent(lent_ns, last.total_ns + max(0, lent_ns - last.fallen_ns))
        self._lent[key] = new
        return new.total_ns

    # ---- a GPU

    def _gpu(
        self,
        device: Device,
        report: Report | None,
        bookings: Mapping[str, Booking] | None,
        status: ShareStatus,
    ) -> GpuUse:
        uuid = device.uuid
        prices = (self._state.config or Config()).allotment.prices
        price = prices.of(device.name)
        slices = {
            each.uuid: each.slice_of.profile
            for each in tuple(self._state.devices.values())
            if each.slice_of is not None and each.slice_of.gpu == uuid
        }
        gpu = GpuUse(
            uuid=uuid,
            index=device.index,
            model=device.name,
            pci_bus_id=device.pci_bus_id,
            mode=self._state.offer.modes.get(uuid, ""),
            memory_total=device.memory_bytes,
            memory_reserved=device.reserved_bytes,
            slices=Counter(slices.values()),
            is_healthy=uuid not in self._state.unhealthy,
            last_xid=self._xids.get(uuid, 0),
            price=None if price is None else price / MICROS,
            currency=prices.currency,
        )
        if bookings is not None:
            of_gpu = [bookings[each] for each in (uuid, *slices) if each in bookings]
            outside = [each.used or 0 for each in status.outside if each.uuid == uuid]
            gpu = replace(
                gpu,
                mode=next((each.mode for each in of_gpu if each.mode), gpu.mode),
                memory_allocated=sum(each.memory for each in of_gpu),
                memory_oversubscribed=sum(each.oversubscribed for each in of_gpu),
                guaranteed=bookings.get(uuid, Booking()).guaranteed / WHOLE,
                shares=sum(each.shares for each in of_gpu),
                memory_outside=None if report is None else sum(outside),
            )
        if report is None:
            return gpu
        reading, vitals, gauges = report.reading, report.vitals, report.gauges
        return replace(
            gpu,
            answers=True,
            memory_used=reading.used_bytes,
            utilization=_ratio(reading.gpu_percent),
            memory_utilization=_ratio(reading.memory_percent),
            temperature_c=reading.temperature_c,
            memory_temperature_c=gauges.memory_temperature_c,
            power_mw=reading.power_mw,
            energy_mj=vitals.energy_mj,
            sm_clock_mhz=gauges.sm_clock_mhz,
            memory_clock_mhz=gauges.memory_clock_mhz,
            ecc_corrected=vitals.ecc_corrected,
            ecc_uncorrected=vitals.ecc_uncorrected,
            is_repair_pending=vitals.is_repair_pending,
            is_repair_failed=vitals.is_repair_failed,
            nvlink_sent_bytes=gauges.nvlink_sent_bytes,
            nvlink_received_bytes=gauges.nvlink_received_bytes,
            pcie_replays=gauges.pcie_replays,
        )


def shares_in(folder: StateFolder, machine: Path | None) -> SharesRead:
    """Return a reader of the shares in a folder. It takes no lock: no start waits for a scrape."""

    def read(readings: Readings) -> tuple[ShareStatus, Mapping[str, Booking]]:
        loaded = list_shares(folder) if folder.exists() else []
        serving = servers(folder) if folder.mps.is_dir() else ()
        status = share_status(loaded, lambda _: readings, machines=(machine,), serving=serving)
        return status, booked(loaded)

    return read


def claim_users(pods: Collection[Pod]) -> list[ClaimUser]:
    """Return the pods of each ResourceClaim, by name."""
    found = [
        ClaimUser(namespace=pod.namespace, claim=claim, pod=pod.name, is_only=is_only)
        for pod in pods
        if not pod.has_ended
        for claim, is_only in pod.claims.items()
    ]
    return sorted(found, key=lambda each: (each.namespace, each.claim, each.pod))


def _owned(owner: Owner) -> ShareUse:
    use = ShareUse(namespace=owner.namespace, share="", gpu="", device="")
    if owner.is_claim:
        return replace(use, claim=owner.pod, request=owner.container)
    return replace(use, pod=owner.pod, container=owner.container)


def _on_device(device: DeviceView, record: ShareDevice | None) -> int:
    """Return the part of a share's memory that is on the device, as far as is known.

    Its programs can write its ledger: beyond the limit counts only what the driver reports, or what
    `allot resize --force` found in use.
    """
    driver_used = device.driver_used or 0
    most = max(device.limit, driver_used, (record and record.most_bytes) or 0)
    certain = max(0, device.used - device.host_bytes)
    return min(most, max(certain, min(driver_used, device.used)))


def _ratio(percent: int | None) -> float | None:
    return None if percent is None else percent / 100
