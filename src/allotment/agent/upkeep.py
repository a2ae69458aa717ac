# SPDX-License-Identifier: Apache-2.0
"""What is to be kept on the node beside shares: time slices, NVIDIA's CDI specs, order."""

import asyncio
from pathlib import Path
from typing import Final

import structlog

from allotment.agent.configuring import Configuring
from allotment.agent.device_plugin.nvidia_specs import NvidiaSpecs
from allotment.agent.offering import Offering
from allotment.agent.protocols import Reports
from allotment.agent.resources import Offer
from allotment.devices.timeslices import TimeSlice, set_time_slice
from allotment.model.errors import AllotError
from allotment.modes import take_damages
from allotment.shares.drivers import driver_edits
from allotment.shares.pods import PodShares

__all__ = ["Upkeep"]

_log = structlog.get_logger("allotment.agent")

_TIDY_S: Final = 60.0
"""What a container did to the files that it shares with others lasts no longer than this."""


class Upkeep:
    """Does it, as the offer changes."""

    def __init__(
        self,
        *,
        machine: Path | None,
        cdi_folder: Path,
        configuring: Configuring,
        offering: Offering,
        shares: PodShares,
        reports: Reports,
    ) -> None:
        """Take what it goes by. `machine`: the simulated machine, where there is no driver."""
        self._machine = machine
        self._configuring = configuring
        self._offering = offering
        self._shares = shares
        self._reports = reports
        self._nvidia_specs = NvidiaSpecs(cdi_folder, driver_edits)
        self._offered = asyncio.Event()
        self._described = asyncio.Event()
        offering.followers.append(self._follow)

    async def run(self) -> None:
        """Do all of it until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._set_slices())
            group.create_task(self._keep_nvidia_specs())
            group.create_task(self._tidy())

    def _follow(self, _: Offer) -> None:
        self._offered.set()
        self._described.set()

    async def _set_slices(self) -> None:
        """Give each GPU the time slice that its rule names."""
        done: dict[str, str] = {}
        while True:
            await self._offered.wait()
            self._offered.clear()
            wanted = self._offering.current.time_slices
            # A GPU whose rule names none any more goes back to the driver's own.
            for uuid in [*wanted, *(each for each in done if each not in wanted)]:
                length = wanted.get(uuid, TimeSlice.DEFAULT)
                if done.get(uuid) == length or uuid not in self._offering.devices:
                    continue
                try:
                    await asyncio.to_thread(
                        set_time_slice, uuid, TimeSlice(length), machine=self._machine
                    )
                except AllotError as error:
                    self._reports.node("TimeSliceNotSet", error.message, is_warning=True)
                done[uuid] = length

    async def _keep_nvidia_specs(self) -> None:
        """Describe NVIDIA's CDI names to the runtime, where the configuration answers by them."""
        if self._machine is not None:
            return  # there is no NVIDIA driver to describe
        told: set[str] = set()
        while True:
            await self._described.wait()
            self._described.clear()
            config = self._configuring.current
            if config is None:
                continue
            devices = tuple(self._offering.devices.values())
            try:
                problems = await asyncio.to_thread(self._nvidia_specs.keep, devices, config)
            except AllotError as error:
                problems = (error.message,)
            for problem in problems:
                if problem not in told:
                    self._reports.node("CdiSpecNotWritten", problem, is_warning=True)
            told = set(problems)

    async def _tidy(self) -> None:
        while True:
            await asyncio.sleep(_TIDY_S)
            try:
                await asyncio.to_thread(self._shares.tidy)
            except AllotError as error:
                _log.warning("could not tidy", error=error.message)
            for damage in take_damages():
                self._reports.node("SharedFileMended", damage.message, is_warning=True)
