# SPDX-License-Identifier: Apache-2.0
"""Whether this process answers: it leads, and it knows of everything that was decided before.

A replica that follows hears of all pods, nodes and quotas as the leader does. When it takes over,
it first makes sure that it has heard of every binding that the one before has made.
"""

import asyncio
import math
from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import NoReturn, Protocol

import structlog

from allotment.kube.errors import KubeError
from allotment.kube.leases import LeaseElection

__all__ = ["Duty", "Leading", "Source"]

_LOOK_S = 30.0
_AGAIN_S = 0.2
_log = structlog.get_logger(__name__)


class Duty(StrEnum):
    """What this process does."""

    STARTING = "starting"
    """Pods, nodes and quotas have not all been listed."""
    FOLLOWING = "following"
    LOOKING = "looking"
    """It leads, and makes sure that it knows everything."""
    LEADING = "leading"


class Source(Protocol):
    """Where something comes from that has to be known."""

    @property
    def is_synced(self) -> bool:
        """Everything has been listed once."""
        ...

    async def wait_synced(self) -> None:
        """Return when it has."""


class Feed(Source, Protocol):
    """Where pods and nodes come from."""

    async def look(self) -> None:
        """Return when every pod is known as it was when this was called. Raises `KubeError`."""


class Leading:
    """This process's duty. `run` has to be running. May be asked from any thread."""

    def __init__(
        self,
        feed: Feed,
        election: LeaseElection | None,
        *,
        others: Sequence[Source] = (),
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        """Without an election it leads alone. `on_end` is called when it leads no more.

        `others`: what has to be known besides, before anything is answered.
        """
        self._feed = feed
        self._sources = (feed, *others)
        self._election = election
        self._on_end = on_end
        self._has_looked = False
        self._term = 0
        """In which it has looked: with another one, somebody else may have led in between."""

    @property
    def duty(self) -> Duty:
        """What this process does now."""
        if not self.is_synced:
            return Duty.STARTING
        if self._election is not None and not self._election.left_s():
            return Duty.FOLLOWING
        return Duty.LEADING if self._has_looked and not self._is_past() else Duty.LOOKING

    @property
    def is_synced(self) -> bool:
        """Everything has been listed once, as a replica that follows has it, too."""
        return all(each.is_synced for each in self._sources)

    async def wait_synced(self) -> None:
        """Return when it has."""
        for each in self._sources:
            await each.wait_synced()

    @property
    def leads(self) -> bool:
        """It answers, and it may bind."""
        return self.duty is Duty.LEADING

    def left_s(self) -> float:
        """Return for how long it leads as far as it knows now; 0: it does not."""
        if not self.leads:
            return 0.0
        return self._election.left_s() if self._election is not None else math.inf

    def amiss(self) -> list[str]:
        """Say why it does not answer kube-scheduler; nothing: it does."""
        duty = self.duty
        if duty is Duty.LEADING:
            return []
        if duty is Duty.FOLLOWING and self._election is not None:
            leader = self._election.candidate.leader
            return [f"another replica leads: {leader or 'not known yet which'}"]
        return [f"{duty}: pods, nodes and quotas are not all known yet"]

    async def run(self) -> NoReturn:
        """Do its duty for ever."""
        await self.wait_synced()
        if self._election is None:
            self._has_looked = True
            await asyncio.Event().wait()
            raise AssertionError("nobody ends it")
        async for _ in self._election.signal.changes():
            if self._has_looked and (self._is_past() or not self._election.left_s()):
                self._give_up()
            if self._election.left_s() and not self._has_looked:
                await self._take_over(self._election)
        raise AssertionError("nobody ends it")

    def resign(self) -> None:
        """Answer no more."""
        if self._has_looked:
            self._give_up()

    async def _take_over(self, election: LeaseElection) -> None:
        while election.left_s():
            self._term = election.candidate.term
            try:
                async with asyncio.timeout(_LOOK_S):
                    await self._feed.look()
            except (KubeError, TimeoutError) as error:
                _log.warning("cannot make sure that all pods are known", error=str(error))
                await asyncio.sleep(_AGAIN_S)
                continue
            if not election.left_s():
                return
            if not self._is_past():
                self._has_looked = True
                _log.info("answering")
                return

    def _is_past(self) -> bool:
        """Tell whether the Lease was lost, and taken anew, since this process has looked."""
        return self._election is not None and self._election.candidate.term != self._term

    def _give_up(self) -> None:
        self._has_looked = False
        self._on_end()
        _log.warning("following: another replica may lead")
