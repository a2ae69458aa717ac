# SPDX-License-Identifier: Apache-2.0
"""Joins devices, health and configuration into what the node offers, and tells everyone.

GpuWatch ──┐
HealthWatch ├──► plan ──► device plugins, the node's quantities and condition, labels, slices
Configuring ┘
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any, Protocol

import structlog

from allotment.agent.config.effective import Config
from allotment.agent.configuring import Configuring
from allotment.agent.device_modes import DeviceModes
from allotment.agent.health.watching import HealthWatch, condition
from allotment.agent.inventory import GpuWatch
from allotment.agent.migs import inherited
from allotment.agent.protocols import Reports
from allotment.agent.resources import Offer, Resource, plan
from allotment.model.devices import Device

__all__ = ["NodeWrites", "Offering"]

_log = structlog.get_logger("allotment.agent")


class NodeWrites(Protocol):
    """What is written into this node's object (`kube.nodes.OwnNode`)."""

    async def set_capacity(self, quantities: Mapping[str, int]) -> None:
        """Have these quantities in the node's capacity."""
        ...

    async def set_condition(self, kind: str, status: Any, *, reason: str, message: str) -> None:  # noqa: ANN401 - kube's own words
        """Have this condition on the node."""
        ...


class Offering:
    """What the node offers at the moment; `run` keeps it."""

    def __init__(
        self,
        *,
        gpus: GpuWatch,
        health: HealthWatch,
        configuring: Configuring,
        node: NodeWrites,
        reports: Reports,
        modes: DeviceModes | None = None,
    ) -> None:
        """Take what it is made of, and where it goes besides `followers`."""
        self._gpus = gpus
        self._health = health
        self._configuring = configuring
        self._node = node
        self._reports = reports
        self._offer = Offer()
        self._devices: Mapping[str, Device] = {}
        self._told: frozenset[str] = frozenset()
        self._wake = asyncio.Event()
        self._modes = modes
        if modes is not None:
            modes.followers.append(self._wake.set)
        self.followers: list[Callable[[Offer], None]] = []
        """Called in the event loop with each new offer."""

    @property
    def current(self) -> Offer:
        """What is offered."""
        return self._offer

    @property
    def config(self) -> Config | None:
        """What is in force."""
        return self._configuring.current

    @property
    def devices(self) -> Mapping[str, Device]:
        """Every GPU that has answered and its MIG devices, by UUID; sick ones are among them."""
        return self._devices

    @property
    def unusable(self) -> Mapping[str, str]:
        """Why, by UUID, for those on which nothing new is to be placed at this moment.

        One that has just missed an answer is among them, and is offered until health says more.
        """
        silent = {
            each.uuid: each.message for each in self._gpus.current.problems if each.uuid is not None
        }
        return inherited({**silent, **self._health.unhealthy}, tuple(self._devices.values()))

    async def run(self) -> None:
        """Follow all three until cancelled."""
        await self._gpus.first_look()
        self._health.first_look_is_over()
        async with asyncio.TaskGroup() as group:
            for source in (self._gpus.changes, self._health.changes, self._configuring.changes):
                group.create_task(self._listen(source()))
            group.create_task(self._follow())

    async def _listen(self, changes: AsyncIterator[object]) -> None:
        async for _ in changes:
            self._wake.set()

    async def _follow(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            await self._renew()

    async def _renew(self) -> None:
        known = (*self._gpus.current.devices, *self._gpus.current.slices)
        self._devices = {each.uuid: each for each in known}
        unhealthy = self._health.unhealthy
        config = self._configuring.current
        allowed = self._modes.current if self._modes is not None else {}
        offer = Offer() if config is None else plan(known, unhealthy, config, allowed=allowed)
        state = condition(self._health.records, problem=self._gpus.problem)
        await self._node.set_condition(
            state.type, state.status, reason=state.reason, message=state.message
        )
        sick = inherited(unhealthy, known)
        for uuid in self._devices:
            self._reports.gauge("device_healthy", float(uuid not in sick), device=uuid)
        if config is None:
            return  # nothing has been said yet: what the node has stays as it is
        self._tell_problems(offer)
        if offer != self._offer:
            _log.info("to be offered", **{each.name: _amount(each) for each in offer.resources})
        self._offer = offer
        await self._node.set_capacity(offer.quantities)
        for follower in self.followers:
            follower(offer)

    def _tell_problems(self, offer: Offer) -> None:
        for problem in offer.problems:
            if problem not in self._told:
                self._reports.node("ConfigProblem", problem, is_warning=True)
        self._told = frozenset(offer.problems)


def _amount(resource: Resource) -> str:
    healthy = sum(each.is_healthy for each in resource.slots)
    whole = len(resource.slots)
    return f"{healthy}" if healthy == whole else f"{healthy} of {whole}"
