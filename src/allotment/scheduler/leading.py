# SPDX-License-Identifier: Apache-2.0
"""Whether this process answers: it leads, and it knows of everything that was decided before.

A replica that follows hears of all pods and nodes as the leader does. When it takes over, it first
makes sure that it has heard of every binding that the one before has made.
"""

import asyncio
from collections.abc import Callable
from enum import StrEnum
from typing import NoReturn, Protocol

import structlog

from allotment.kube.errors import KubeError
from allotment.kube.leases import LeaseElection

__all__ = ["Duty", "Leading"]

_LOOK_S = 30.0
_AGAIN_S = 0.2
_log = structlog.get_logger(__name__)


class Duty(StrEnum):
    """What this process does."""

    STARTING = "starting"
    """The pods and nodes have not all been listed."""
    FOLLOWING = "following"
    LOOKING = "looking"
    """It leads, and makes sure that it knows everything."""
    LEADING = "leading"


class Feed(Protocol):
    """Where pods and nodes come from."""

    @property
    def is_synced(self) -> bool:
        """Everything has been listed once."""
        ...

    async def wait_synced(self) -> None:
        """Return when it has."""

    async def look(self) -> None:
        """Return when every pod is known as it was when this was called. Raises `KubeError`."""


class Leading:
    """This process's duty. `run` has to be running. May be asked from any thread."""

    def __init__(
        self,
        feed: Feed,
        election: LeaseElection | None,
        *,
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        """Without an election it leads alone. `on_end` is called when it leads no more."""
        self._feed = feed
        self._election = election
        self._on_end = on_end
        self._has_looked = False

    @property
    def duty(self) -> Duty:
        """What this process does now."""
        if not self._feed.is_synced:
            return Duty.STARTING
        if self._election is not None and not self._election.left_s():
            return Duty.FOLLOWING
        return Duty.LEADING if self._has_looked else Duty.LOOKING

    @property
    def leads(self) -> bool:
        """It answers, and it may bind."""
        return self.duty is Duty.LEADING

    def amiss(self) -> list[str]:
        """Say why it does not answer; nothing: it does."""
        duty = self.duty
        if duty is Duty.LEADING:
            return []
        if duty is Duty.FOLLOWING and self._election is not None:
            leader = self._election.candidate.leader
            return [f"another replica leads: {leader or 'not known yet which'}"]
        return [f"{duty}: pods and nodes are not all known yet"]

    async def run(self) -> NoReturn:
        """Do its duty for ever."""
        await self._feed.wait_synced()
        if self._election is None:
            self._has_looked = True
            await asyncio.Event().wait()
            raise AssertionError("nobody ends it")
        async for _ in self._election.signal.changes():
            if self._election.left_s() and not self._has_looked:
                await self._take_over(self._election)
            elif not self._election.left_s() and self._has_looked:
                self._give_up()
        raise AssertionError("nobody ends it")

    def resign(self) -> None:
        """Answer no more."""
        if self._has_looked:
            self._give_up()

    async def _take_over(self, election: LeaseElection) -> None:
        while election.left_s():
            try:
                async with asyncio.timeout(_LOOK_S):
                    await self._feed.look()
            except (KubeError, TimeoutError) as error:
                _log.warning("cannot make sure that all pods are known", error=str(error))
                await asyncio.sleep(_AGAIN_S)
                continue
            if election.left_s():
                self._has_looked = True
                _log.info("answering")
            return

    def _give_up(self) -> None:
        self._has_looked = False
        self._on_end()
        _log.warning("following: another replica may lead")
