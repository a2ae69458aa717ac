# SPDX-License-Identifier: Apache-2.0
"""The drivers that a node needs: the one that its configuration names, and those of older claims.

A claim keeps the driver that it was allocated from. When the configuration names another one, the
former driver gives up its slices, and serves the kubelet until its last claim here has ended.
"""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, NoReturn

import msgspec

from allotment.agent.dra.driver import ResourceDriver
from allotment.model.pods import Owner
from allotment.shares.record import LoadedShare

_LOOK_S: Final = 1.0
"""How often the configuration's name is compared."""


class _Running(msgspec.Struct, frozen=True):
    driver: ResourceDriver
    task: asyncio.Task[Any]


class ResourceDrivers:
    """Runs a driver for each name that is needed. For one event loop; needs `run` running."""

    def __init__(
        self,
        make: Callable[[str], ResourceDriver],
        *,
        name: Callable[[], str | None],
        monitors: Callable[[], Iterable[Owner]] = tuple,
        look_s: float = _LOOK_S,
    ) -> None:
        """`make` returns the driver of a name; `name` the configured one, None: not known yet.

        `monitors` returns whose they are: a claim may have no share.
        """
        self._make = make
        self._name = name
        self._monitors = monitors
        self._look_s = look_s
        self._running: dict[str, _Running] = {}
        self._shares: Sequence[LoadedShare] | None = None

    async def run(self) -> NoReturn:
        async with asyncio.TaskGroup() as group:
            while True:
                self._look(group)
                await asyncio.sleep(self._look_s)

    def offer(self, shares: Sequence[LoadedShare]) -> None:
        """Renew the pools: shares, devices or their health may have changed."""
        self._shares = shares
        name = self._name()
        for each, running in self._running.items():
            running.driver.offer(shares, is_published=each == name)

    def _look(self, group: asyncio.TaskGroup) -> None:
        name = self._name()
        if name is None:
            return
        shares = self._shares or ()
        owners = (*(each.owner for each in shares), *self._monitors())
        needed = {name, *(each.resource for each in owners if each and each.is_claim)}
        for new in sorted(needed - self._running.keys()):
            driver = self._make(new)
            self._running[new] = _Running(driver, group.create_task(driver.run()))
        if self._shares is None:
            return
        self.offer(shares)
        for old in self._running.keys() - needed:
            if self._running[old].driver.is_settled:  # its slices are gone
                self._running.pop(old).task.cancel()
