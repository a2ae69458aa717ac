# SPDX-License-Identifier: Apache-2.0
"""Joins devices, health and configuration into the node's offer, and publishes it.

GpuWatch ──┐
HealthWatch ├──► plan ──► device plugins, the node's quantities and condition, labels, slices
Configuring ┘
"""

import asyncio
from collections.abc import AsyncIterator

import structlog

from allotment.agent.configuring import Configuring
from allotment.agent.health.watching import HealthWatch, condition
from allotment.agent.inventory import GpuWatch
from allotment.agent.mig.strategy import inherited
from allotment.agent.node_state import NodeState
from allotment.agent.protocols import Reports
from allotment.agent.resources import Offer, plan
from allotment.kube.nodes import OwnNode
from allotment.model.reported import Reported

_log = structlog.get_logger("allotment.agent")


class Offering:
    """The node's current offer; `run` updates it."""

    def __init__(
        self,
        *,
        state: NodeState,
        gpus: GpuWatch,
        health: HealthWatch,
        configuring: Configuring,
        node: OwnNode,
        reports: Reports,
    ) -> None:
        self._state = state
        self._gpus = gpus
        self._health = health
        self._configuring = configuring
        self._node = node
        self._reports = reports
        self._reported = Reported[str]()
        self._wake = asyncio.Event()

    async def run(self) -> None:
        """Follow the sources until cancelled."""
        await self._gpus.first_look()
        async with asyncio.TaskGroup() as group:
            for source in (self._gpus.changes, self._health.changes, self._configuring.changes):
                group.create_task(self._listen(source()))
            group.create_task(self._follow_state())
            group.create_task(self._follow())

    async def _listen(self, changes: AsyncIterator[object]) -> None:
        async for _ in changes:
            self._wake.set()

    async def _follow_state(self) -> None:
        last = None
        async for _ in self._state.changed.changes():
            if (self._state.mode_policies, self._state.released) != last:
                last = (self._state.mode_policies, self._state.released)
                self._wake.set()

    async def _follow(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            await self._renew()

    async def _renew(self) -> None:
        state = self._state
        devices = (*self._gpus.current.devices, *self._gpus.current.slices)
        state.devices = {each.uuid: each for each in devices}
        unhealthy = self._health.unhealthy
        # A GPU that has just missed an answer takes nothing new, and is offered all the same.
        silent = {
            each.uuid: each.message for each in self._gpus.current.problems if each.uuid is not None
        }
        state.unusable = inherited({**silent, **unhealthy}, devices)
        offer = Offer()
        if state.config is not None:
            offer = plan(devices, unhealthy, state.config, allowed=state.mode_policies)
        health = condition(self._health.records, problem=self._gpus.problem)
        await self._node.set_condition(
            health.type, health.status, reason=health.reason, message=health.message
        )
        state.unhealthy = sick = inherited(unhealthy, devices)
        for uuid in state.devices:
            self._reports.gauge("device_healthy", float(uuid not in sick), device=uuid)
        if state.config is None:
            return  # the node keeps the capacity that it has
        for problem in self._reported.new_of(offer.problems):
            self._reports.node("ConfigProblem", problem, is_warning=True)
        if offer != state.offer:
            _log.info("offer changed", **{each.name: each.amount for each in offer.resources})
        state.offer = offer
        # kube-scheduler counts what pods asked for when they were created.
        await self._node.set_capacity(
            {
                name: max(0, amount + state.released.get(name, 0))
                for name, amount in offer.quantities.items()
            }
        )
        state.renew_offer(offer)
