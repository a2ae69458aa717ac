# SPDX-License-Identifier: Apache-2.0
"""The operations of each mode beyond a share's folder: devices, daemons, container content.

`modes` enforces a share in its folder and on its devices. Operations that need the state folder or
other shares are here, in `mps_daemons` and in `mig/`. Both are imported late, because most shares
need neither, and `allot run` starts often. `lifecycle` uses traits and lives.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import msgspec

from allotment.model.devices import Device
from allotment.model.modes import MIG, MPS
from allotment.model.placements import Placement
from allotment.model.shares import Share
from allotment.model.structs import replace
from allotment.shares.folders import StateFolder
from allotment.shares.placing import ShareOrder, check_selectors

if TYPE_CHECKING:
    from allotment.shares.cdi import CdiContent


class Acquired(msgspec.Struct, frozen=True):
    """A mode's devices for an order."""

    order: ShareOrder
    devices: Sequence[Device]
    """The share is placed on some of them."""
    placement: Placement | None = None
    """On slices that were cut for the share; None: not placed yet."""


class ModeLife:
    """The life of a share in a mode that needs only its devices."""

    @contextmanager
    def acquire(
        self, folder: StateFolder, order: ShareOrder, devices: Sequence[Device]
    ) -> Iterator[Acquired]:
        """Provide devices while the block runs, without the state folder's lock.

        Devices that the share does not take are free after the block. Raises an `AllotError` for an
        order that no share of this mode can serve.
        """
        del folder
        if order.owner is None and order.request.selectors:
            check_selectors(order, devices)
        yield Acquired(order, devices)

    def ready(self, folder: StateFolder, share: Share) -> Mapping[str, str]:
        """Wait until the share's programs can start; return the variables that they need.

        Here: until no MPS daemon holds its GPUs. Raises `AllotError`.
        """
        if folder.mps.is_dir():
            from allotment.shares import mps_daemons

            mps_daemons.release(folder, share)
        return {}

    def verify(
        self, folder: StateFolder, share: Share, order: ShareOrder, devices: Sequence[Device]
    ) -> None:
        """Raise `StateError` if devices of the share no longer exist."""

    def equip(self, content: "CdiContent", folder: StateFolder, share: Share) -> "CdiContent":
        """Return the content of the share's container with this mode's additions."""
        del folder, share
        return content


class _MpsLife(ModeLife):
    """The life of a share whose programs are clients of an MPS control daemon."""

    @contextmanager
    def acquire(
        self, folder: StateFolder, order: ShareOrder, devices: Sequence[Device]
    ) -> Iterator[Acquired]:
        """Refuse a container whose environment is fixed before its share is known."""
        from allotment.shares import mps_daemons

        mps_daemons.check_injection(order)
        with super().acquire(folder, order, devices) as acquired:
            yield acquired

    def ready(self, folder: StateFolder, share: Share) -> Mapping[str, str]:
        from allotment.shares import mps_daemons

        return mps_daemons.ready(folder, share)

    def equip(self, content: "CdiContent", folder: StateFolder, share: Share) -> "CdiContent":
        from allotment.shares import mps_daemons

        return mps_daemons.with_daemon(content, folder, share)


class _MigLife(ModeLife):
    """The life of a share in a MIG device."""

    @contextmanager
    def acquire(
        self, folder: StateFolder, order: ShareOrder, devices: Sequence[Device]
    ) -> Iterator[Acquired]:
        """Cut slices, take idle ones, or find an unused MIG device of another tool."""
        from allotment.shares.mig import allocate

        allocate.check(order)
        if order.owner is None and (static := allocate.find_static(folder, order)) is not None:
            yield Acquired(*static)
            return
        with allocate.cut(folder, order, devices) as placement:
            yield Acquired(order, [each.device for each in placement.devices], placement)

    def verify(
        self, folder: StateFolder, share: Share, order: ShareOrder, devices: Sequence[Device]
    ) -> None:
        from allotment.shares.mig import allocate

        allocate.verify(folder, share, order, devices)

    def equip(self, content: "CdiContent", folder: StateFolder, share: Share) -> "CdiContent":
        """Name the slice to programs without the shim, and to images that say `all`."""
        del folder
        named = ",".join(each.uuid for each in share.devices)
        return replace(content, environment=dict.fromkeys(_NAMING, named))


_NAMING = ("NVIDIA_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")
"""Variables that name devices: to NVIDIA's container runtime, and to CUDA."""
_DEFAULT = ModeLife()
_LIVES: Mapping[str, ModeLife] = {MPS: _MpsLife(), MIG: _MigLife()}


def life_of(mode: str) -> ModeLife:
    """Return the life of the shares of a mode."""
    return _LIVES.get(mode, _DEFAULT)
