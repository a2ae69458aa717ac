# SPDX-License-Identifier: Apache-2.0
"""Who has a GPU and what is cut from it, by name: for whoever is to cut or switch it.

The driver knows processes, and not whose they are; the state folder knows shares, a pod's too, and
the kernel which processes are in them.
"""

from collections.abc import Collection, Iterable, Mapping
from functools import cached_property

from allotment.devices.mig import MigDriver
from allotment.model.mig import MigGpu
from allotment.model.requests import MPS
from allotment.modes.mig.applying import Occupied, occupied_by
from allotment.modes.mig.journal import Journal
from allotment.shares import mps_daemons
from allotment.shares.folders import StateFolder
from allotment.shares.found import Found
from allotment.shares.processes import census, children_of

__all__ = ["Occupants"]


class Occupants:
    """The shares of a state folder at one moment, and what of a GPU each has."""

    def __init__(
        self, folder: StateFolder, shares: Iterable[Found], *, passes_idle_daemons: bool = False
    ) -> None:
        """Take the shares that there are.

        `passes_idle_daemons`: an MPS daemon that no share needs counts as gone, for it goes when it
        is asked to.
        """
        self._folder = folder
        self._shares = list(shares)
        self._passes_idle_daemons = passes_idle_daemons

    def of(self, driver: MigDriver, gpu: MigGpu) -> Occupied:
        """Say who has one GPU, and its instances; asks the driver."""
        return occupied_by(
            driver,
            gpu,
            Journal(self._folder.mig / gpu.uuid),
            shares=self._names,
            of_devices=self._of_devices,
            whose=self._whose,
        )

    @cached_property
    def _names(self) -> Mapping[str, str]:
        return {each.id: each.name for each in self._shares}

    @cached_property
    def _of_devices(self) -> Mapping[str, Collection[str]]:
        found: dict[str, list[str]] = {}
        for each in self._shares:
            for uuid in each.limits():
                found.setdefault(uuid, []).append(each.name)
        return found

    def _whose(self, pids: Collection[int]) -> Mapping[int, str | None]:
        """Say whose some processes are, as far as that is known; None: nobody's who counts."""
        if not pids:
            return {}
        known = {pid: name for pid, name in self._owners.items() if pid in pids}
        return {**known, **{pid: name for pid, name in self._servers.items() if pid in pids}}

    @cached_property
    def _owners(self) -> Mapping[int, str]:
        """All processes of shares. Costs a look at each process of the machine."""
        members = census((each.share, each.directory) for each in self._shares if each.share)
        return {
            pid: f"share {self._names[share]}" for share, pids in members.items() for pid in pids
        }

    @cached_property
    def _servers(self) -> Mapping[int, str | None]:
        """The MPS servers, which have contexts and are in no share."""
        needed = {
            device.uuid for each in self._shares if each.mode == MPS for device in each.devices()
        }
        return {
            pid: None
            if self._passes_idle_daemons and uuid not in needed
            else "the MPS control daemon"
            for uuid, status in mps_daemons.statuses(self._folder).items()
            if status.daemon is not None
            for pid in children_of(status.daemon)
        }
