# SPDX-License-Identifier: Apache-2.0
"""The shares of one machine as they are, without a past: ledgers know peaks and sums alone.

A peak is that since the share began. The time that a share used is its mean since then, or the
driver's figure of the last second: no peak of it is known, so less compute is never advised.
"""

from collections import Counter
from collections.abc import Iterable, Mapping

from allotment.cost.bills import Bill
from allotment.cost.prices import Prices
from allotment.cost.splitting import OUTSIDE, GpuHour, ShareHour, accounts, unpriced_models
from allotment.cost.workloads import ShareHistory, workload_name
from allotment.devices.sources import Reading
from allotment.model.compute import WHOLE
from allotment.model.devices import Device
from allotment.model.modes import traits_of
from allotment.model.shares import Share
from allotment.shares.compute_view import utilization
from allotment.shares.status import DeviceView, ShareStatus, ShareView

_NS = 1e9


def share_histories(
    status: ShareStatus, gpus: Iterable[Device], prices: Prices, *, now: float
) -> list[ShareHistory]:
    """Return what is known of each share on each device; `now` in seconds after the epoch."""
    known = {gpu.uuid: gpu for gpu in gpus}
    return [
        _history(view, view.share, device, known.get(_gpu(view.share, device)), prices, now)
        for view in status.shares
        if view.share is not None and view.problem is None
        for device in view.devices
    ]


def _history(
    view: ShareView,
    share: Share,
    device: DeviceView,
    gpu: Device | None,
    prices: Prices,
    now: float,
) -> ShareHistory:
    owner, compute = share.owner, device.compute
    is_measured = compute is not None and compute.is_measured
    has_shim = traits_of(share.mode).has_shim
    is_slice = _gpu(share, device) != device.uuid
    return ShareHistory(
        namespace=owner.namespace if owner else "",
        workload=workload_name(owner.pod) if owner else view.name,
        container=owner.container if owner else "",
        share=view.id,
        mode=share.mode,
        gpu_memory=_memory(gpu) if gpu else 0,
        price=prices.of(device.name),
        limit=device.limit,
        guarantee=compute.promised.guarantee / WHOLE if compute and not is_slice else 0.0,
        ceiling=compute.promised.ceiling / WHOLE if compute else 1.0,
        peak=device.peak if has_shim else device.used,
        gpu_seconds=compute.use.gpu_ns / _NS if compute and is_measured else None,
        refusals=device.refusals,
        held_seconds=compute.use.held_ns / _NS if compute and is_measured else 0.0,
        watched_s=(max(0.0, now - share.created),),
        is_sampled=not has_shim,
    )


def present_bill(
    status: ShareStatus,
    gpus: Iterable[Device],
    readings: Mapping[str, Reading],
    prices: Prices,
    *,
    now: float,
) -> Bill:
    """Return an hour of these GPUs, if their shares went on as they are at `now`."""
    known = tuple(gpus)
    hours = gpu_hours(status, known, readings, prices, now=now)
    return Bill(
        accounts=accounts(hours),
        models=Counter(gpu.name for gpu in known),
        currency=prices.currency,
        is_present=True,
        begin=now,
        end=now,
        unpriced_models=unpriced_models(hours),
    )


def gpu_hours(
    status: ShareStatus,
    gpus: Iterable[Device],
    readings: Mapping[str, Reading],
    prices: Prices,
    *,
    now: float,
) -> list[GpuHour]:
    """Return an hour of each GPU, if its shares went on as they are."""
    parts: dict[str, list[ShareHour]] = {}
    known = {gpu.uuid: gpu for gpu in gpus}
    for view in status.shares:
        for device in view.devices:
            gpu = known.get(_gpu(view.share, device))
            if gpu is not None:
                part = _share_hour(view, device, gpu, readings.get(gpu.uuid), now)
                parts.setdefault(gpu.uuid, []).append(part)
    for user in status.outside:
        if user.uuid in known and user.used:
            used = user.used / (_memory(known[user.uuid]) or 1)
            part = ShareHour(namespace=OUTSIDE, memory=used, memory_used=used)
            parts.setdefault(user.uuid, []).append(part)
    return [
        GpuHour(model=gpu.name, price=prices.of(gpu.name), shares=tuple(parts.get(gpu.uuid, ())))
        for gpu in known.values()
    ]


def _share_hour(
    view: ShareView, device: DeviceView, gpu: Device, reading: Reading | None, now: float
) -> ShareHour:
    share, compute, memory = view.share, device.compute, _memory(gpu)
    is_slice = device.uuid != gpu.uuid
    is_whole = share is not None and traits_of(share.mode).is_exclusive and not is_slice
    time: float | None = None
    if compute is not None and compute.is_measured and share is not None:
        time = compute.use.gpu_ns / _NS / max(1.0, now - share.created)
    elif not is_slice and (busy := utilization(reading, view.pids)) is not None:
        time = busy / 100
    return ShareHour(
        namespace=share.owner.namespace if share and share.owner else "",
        memory=1.0 if is_whole else device.limit / memory if memory else 0.0,
        guarantee=compute.promised.guarantee / WHOLE if compute and not is_slice else 0.0,
        memory_used=device.used / memory if memory else 0.0,
        time_used=time,
    )


def _gpu(share: Share | None, device: DeviceView) -> str:
    """Return the UUID of the whole GPU."""
    records = share.devices if share else ()
    return next((each.driver_uuid for each in records if each.uuid == device.uuid), device.uuid)


def _memory(gpu: Device) -> int:
    """What its shares can have; in MIG mode that of its slices, which `allottable_bytes` is not."""
    return gpu.memory_bytes - gpu.reserved_bytes
