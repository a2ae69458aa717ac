# SPDX-License-Identifier: Apache-2.0
"""What is left of a node's devices, as one container of a pod sees it.

A container does not see those of its pod that are never in use at the same time. The states are
those that the rules for one machine judge.
"""

from collections.abc import Sequence

from allotment.model.clusters import NodeInventory, PlacedContainer
from allotment.model.devices import Device
from allotment.model.mig import MigPlace
from allotment.model.placements import DeviceState
from allotment.placement.booking import Footprint, Load, Seen, footprint
from allotment.placement.constraints import link_score
from allotment.placement.host_memory import host_part
from allotment.placement.layouts import layout_of

__all__ = ["Hardware", "View"]


class Hardware:
    """A node's devices, whatever is on them."""

    def __init__(self, inventory: NodeInventory) -> None:
        self.inventory = inventory
        self.devices = tuple(_device_of(inventory, at) for at in range(len(inventory.devices)))
        self.columns = {each.uuid: column for column, each in enumerate(self.devices)}
        self._twins: dict[tuple[bool, bool], list[int]] = {}

    def twins(self, *, by_numa: bool, by_links: bool) -> list[int]:
        """Say which devices are as good as each other when they are free: they have one number.

        They are of one make and, where that makes a difference, on one NUMA node and have the same
        links to all others.
        """
        known = self._twins.get((by_numa, by_links))
        if known is None:
            known = []
            for column in range(len(self.devices)):
                earlier = (at for at in range(column) if known[at] == at)
                alike = (at for at in earlier if self._is_twin(at, column, by_numa, by_links))
                known.append(next(alike, column))
            self._twins[by_numa, by_links] = known
        return known

    def _is_twin(self, one: int, other: int, by_numa: bool, by_links: bool) -> bool:  # noqa: FBT001 - private
        first, second = (self.inventory.devices[column] for column in (one, other))
        if by_numa and first.numa_node != second.numa_node:
            return False
        if (first.model, first.memory_bytes) != (second.model, second.memory_bytes):
            return False
        links = self.inventory.links
        return not by_links or all(
            link_score(links, first.uuid, each.uuid) == link_score(links, second.uuid, each.uuid)
            for column, each in enumerate(self.devices)
            if column not in {one, other}
        )


def _device_of(inventory: NodeInventory, column: int) -> Device:
    """Return what the rules for one machine look at."""
    there = inventory.devices[column]
    return Device(
        uuid=there.uuid,
        name=there.model,
        index=there.index,
        memory_bytes=there.memory_bytes,
        sm_count=0,
        compute_capability=(0, 0),
        numa_node=there.numa_node,
        pci_bus_id="",
        simulated=False,
        mig=False,
    )


class View:
    """The node's devices under some load, for one pod of which some containers are placed."""

    def __init__(self, hardware: Hardware, loads: Sequence[Load]) -> None:
        self.hardware = hardware
        self._loads = loads
        self._base: list[DeviceState | None] = [None] * len(loads)
        self.may_overflow = any(load.oversubscribed for load in loads)
        promised = sum(
            load.on_host(device.memory_bytes)
            for load, device in zip(loads, hardware.inventory.devices, strict=True)
        )
        # A budget that was made smaller than what is booked leaves none, and takes none back.
        self.host_left = max(0, hardware.inventory.host_budget_bytes - promised)

    def states(self, own: dict[str, Seen], *, outside: int = 0) -> list[DeviceState]:
        """Return each device as a container sees it that has `own` of its pod beside it.

        `outside` is how much more host memory stands for the pod than without it.
        """
        left = self.host_left - outside
        return [
            self._state(column, own.get(device.uuid), left)
            if outside or device.uuid in own
            else self.state(column)
            for column, device in enumerate(self.hardware.devices)
        ]

    def state(self, column: int) -> DeviceState:
        """Return one device as a pod sees it that has nothing here."""
        known = self._base[column]
        if known is None:
            known = self._base[column] = self._state(column, None, self.host_left)
        return known

    def _state(self, column: int, own: Seen | None, left: int) -> DeviceState:
        load, device = self._loads[column], self.hardware.devices[column]
        there = self.hardware.inventory.devices[column]
        kept = reusable = 0
        other_modes: frozenset[str] = frozenset()
        own_slices: tuple[MigPlace, ...] = ()
        if own is not None:
            capacity = there.memory_bytes
            others = load
            load = load.copy()
            load.add(Footprint(own.part, own.shares, own.slices))
            kept, reusable, other_modes = own.kept, own.reusable, own.other_modes
            own_slices = own.handed_on
            # Promised for containers that are not in use with this one, on the same device.
            whole = host_part(
                capacity,
                others.fixed + own.whole.fixed,
                others.oversubscribed + own.whole.oversubscribed,
            )
            left += whole - load.on_host(capacity)
        return DeviceState(
            device,
            allotted_bytes=load.fixed + load.oversubscribed,
            problem=there.problem,
            mig_off=there.mig_off,
            oversubscribed_bytes=load.oversubscribed,
            host_budget_bytes=left,
            guaranteed=load.guarantee,
            shares=load.shares,
            mode=load.mode,
            reusable_bytes=reusable,
            most_shares=there.max_shares,
            seats_kept=kept,
            guaranteeable=there.guarantee,
            modes=frozenset(there.modes),
            affinities=frozenset(load.affinities),
            anti_affinities=frozenset(load.anti_affinities),
            exclusions=frozenset(load.exclusions),
            own_modes=other_modes,
            own_slices=own_slices,
            layout=None if there.mig is None else layout_of(there, load),
        )

    def on_host(self, placed: Sequence[PlacedContainer]) -> int:
        """Return how much more host memory stands for devices with these than without."""
        more = 0
        for uuid, there in footprint(placed).items():
            column = self.hardware.columns[uuid]
            load, capacity = (
                self._loads[column],
                self.hardware.inventory.devices[column].memory_bytes,
            )
            after = load.copy()
            after.add(there)
            more += after.on_host(capacity) - load.on_host(capacity)
        return more
