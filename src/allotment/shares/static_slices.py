# SPDX-License-Identifier: Apache-2.0
"""MIG devices that others have cut, as they are: for shares of a part, or of all of one.

They are never removed, and have no record in the journal: what stands for a share in one is the
share alone, and when that has gone the device is as it was. So nobody takes one for ours.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path

from allotment.devices.mig import MigView
from allotment.devices.nvml import Nvml
from allotment.model.devices import Device
from allotment.model.errors import BusyError, DoesNotFitError, NotFoundError
from allotment.model.quantities import MemoryAmount
from allotment.model.requests import Request
from allotment.model.shares import Share
from allotment.modes.mig.own_slices import without_own
from allotment.placement import is_selected
from allotment.placement.layouts import slices_of
from allotment.placement.mig import serving
from allotment.shares import lives, mps_daemons
from allotment.shares.folders import StateFolder
from allotment.shares.placing import Order
from allotment.shares.slicing import check_request

__all__ = ["create_in_named", "create_in_static", "free_slices", "names_slices"]

_ALL = MemoryAmount("100%", part=Fraction(1))


@dataclass(frozen=True, slots=True)
class _Static:
    device: Device
    view: MigView

    @property
    def users(self) -> tuple[int, ...]:
        where = self.device.slice_of
        return self.view.users.get(where.gpu_instance, ()) if where is not None else ()

    def is_the_one_for(self, request: Request) -> bool:
        """Tell whether it is of exactly the profile that would be cut for a request."""
        where = self.device.slice_of
        profiles = serving(self.view.gpu.profiles, slices_of(request))
        return where is not None and bool(profiles) and profiles[0].name == where.profile

    def is_on(self, request: Request) -> bool:
        """Tell whether it is cut from a GPU that a request names, where that names any."""
        where = self.device.slice_of
        return where is not None and is_selected(replace(self.device, uuid=where.gpu), request)


def names_slices(request: Request) -> bool:
    """Tell whether a request names MIG devices, and no GPUs to be cut."""
    return any(each.strip().lower().startswith("mig-") for each in request.selectors)


def free_slices(folder: StateFolder, machine: Path | None) -> tuple[Device, ...]:
    """Return the MIG devices that were not cut for a share, be it half made and its maker dead."""
    with Nvml(machine=machine) as source:
        slices = source.slices()
    return without_own(folder.mig, slices)


def create_in_static(folder: StateFolder, order: Order) -> tuple[Share, Path] | None:
    """Make a share of all of an idle static device of the very profile that would be cut for it.

    None where there is none. Raises as `lives.create`.
    """
    check_request(order.request)
    for each in _known(folder, order.machine):
        if each.users or not (each.is_on(order.request) and each.is_the_one_for(order.request)):
            continue
        try:
            return _create(folder, order, each.device)
        except DoesNotFitError:
            continue  # a share has come there
    return None


def create_in_named(folder: StateFolder, order: Order) -> tuple[Share, Path]:
    """Make a share of all of the static device that the order names. Raises as `lives.create`."""
    check_request(order.request)
    for device in free_slices(folder, order.machine):
        if is_selected(device, order.request):
            mps_daemons.await_way(folder, device.uuid)
    named = [
        each for each in _known(folder, order.machine) if is_selected(each.device, order.request)
    ]
    if not named:
        raise NotFoundError(
            f"there is no MIG device {' or '.join(order.request.selectors)} that is nobody's",
            hint="`allot devices` shows them; what was cut for a share is that share's alone",
        )
    last: BusyError | DoesNotFitError | None = None
    for each in named:
        if each.users:
            pids = ", ".join(map(str, each.users[:8]))
            last = BusyError(f"{each.device.uuid} is in use by processes {pids}")
            continue
        if order.request.mig_profile and not each.is_the_one_for(order.request):
            last = DoesNotFitError(
                f"{each.device.uuid} is a {each.device.name}, not a {order.request.mig_profile}",
                hint="leave --mig out, or name another device",
            )
            continue
        try:
            return _create(folder, order, each.device)
        except DoesNotFitError as error:
            last = error
    raise last or DoesNotFitError("no MIG device that was named is free")


def _create(folder: StateFolder, order: Order, device: Device) -> tuple[Share, Path]:
    floor = order.request.memory.of(device.allottable_bytes)
    if floor > device.allottable_bytes:
        raise DoesNotFitError(
            f"{device.uuid} has {device.allottable_bytes} bytes, less than {order.request.memory}"
        )
    request = replace(order.request, memory=_ALL, selectors=(device.uuid,))
    return lives.create(folder, replace(order, request=request), [device])


def _known(folder: StateFolder, machine: Path | None) -> Sequence[_Static]:
    slices = free_slices(folder, machine)
    if not slices:
        return ()
    with Nvml(machine=machine) as source:
        views = source.migs()
    return [
        _Static(each, views[each.slice_of.gpu])
        for each in sorted(slices, key=lambda device: device.place)
        if each.slice_of is not None and each.slice_of.gpu in views
    ]
