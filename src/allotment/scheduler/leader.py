# SPDX-License-Identifier: Apache-2.0
"""Whether this replica answers: it leads and is in sync; and the endpoint that names it.

A follower receives all pods, nodes and quotas too. When it takes over, it first makes sure that it
has every bind of the earlier leader.
"""

import asyncio
import math
from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import Final, NoReturn, Protocol

import structlog

from allotment.kube.errors import ConflictError, KubeError
from allotment.kube.leases import Endpoint, LeaseElection

_LOOK_S = 30.0
_AGAIN_S = 0.2
_log = structlog.get_logger(__name__)


class Duty(StrEnum):
    """This replica's state."""

    STARTING = "starting"
    """Pods, nodes and quotas are still loading."""
    FOLLOWING = "following"
    LOOKING = "looking"
    """It leads, and makes sure that it has all binds."""
    LEADING = "leading"


class Source(Protocol):
    """A source of data that must be complete."""

    @property
    def is_synced(self) -> bool: ...

    async def wait_synced(self) -> None: ...


class Feed(Source, Protocol):
    """The source of pods and nodes."""

    async def look(self) -> None:
        """Return when every pod is at least as new as at the call. Raises `KubeError`."""


class Leadership:
    """This replica's duty. Needs `run` running. Thread-safe to read."""

    def __init__(
        self,
        feed: Feed,
        election: LeaseElection | None,
        *,
        others: Sequence[Source] = (),
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        """Without an election, this replica always leads. `on_end` is called when leadership ends.

        `others`: further sources that must be complete before the first answer.
        """
        self._feed = feed
        self._sources = (feed, *others)
        self._election = election
        self._on_end = on_end
        self._has_looked = False
        self._term = 0
        """The term in which it has looked: between two terms another replica may have led."""

    @property
    def duty(self) -> Duty:
        if not self.is_synced:
            return Duty.STARTING
        if self._election is not None and not self._election.left_s():
            return Duty.FOLLOWING
        return Duty.LEADING if self._has_looked and not self._is_past() else Duty.LOOKING

    @property
    def is_synced(self) -> bool:
        """All objects have been listed once, also on a follower."""
        return all(source.is_synced for source in self._sources)

    async def wait_synced(self) -> None:
        for source in self._sources:
            await source.wait_synced()

    @property
    def leads(self) -> bool:
        return self.duty is Duty.LEADING

    def left_s(self) -> float:
        """Return the seconds for which it certainly leads; 0 if it does not."""
        if not self.leads:
            return 0.0
        return self._election.left_s() if self._election is not None else math.inf

    def problems(self) -> list[str]:
        """Return why it does not answer kube-scheduler; empty if it does."""
        duty = self.duty
        if duty is Duty.LEADING:
            return []
        if duty is Duty.FOLLOWING and self._election is not None:
            leader = self._election.candidate.leader
            return [f"another replica leads: {leader or 'unknown'}"]
        return [f"{duty}: still loading pods, nodes and quotas"]

    async def run(self) -> NoReturn:
        await self.wait_synced()
        if self._election is None:
            self._has_looked = True
            await asyncio.Event().wait()
            raise AssertionError("the wait never ends")
        async for _ in self._election.signal.changes():
            if self._has_looked and (self._is_past() or not self._election.left_s()):
                self._give_up()
            if self._election.left_s() and not self._has_looked:
                await self._take_over(self._election)
        raise AssertionError("the wait never ends")

    def resign(self) -> None:
        if self._has_looked:
            self._give_up()

    async def _take_over(self, election: LeaseElection) -> None:
        while election.left_s():
            self._term = election.candidate.term
            try:
                async with asyncio.timeout(_LOOK_S):
                    await self._feed.look()
            except (KubeError, TimeoutError) as error:
                _log.warning("cannot make sure that all pods are loaded", error=str(error))
                await asyncio.sleep(_AGAIN_S)
                continue
            if not election.left_s():
                return
            if not self._is_past():
                self._has_looked = True
                _log.info("answering")
                return

    def _is_past(self) -> bool:
        """Return whether the Lease was lost and acquired again since this replica looked."""
        return self._election is not None and self._election.candidate.term != self._term

    def _give_up(self) -> None:
        self._has_looked = False
        self._on_end()
        _log.warning("following: another replica may lead")


_ENDPOINT_CHECK_S: Final = 2.0
"""How often the endpoint is checked."""
_ENDPOINT_RETRY_S: Final = 0.5
_STEP_S: Final = 0.1


class EndpointStore(Protocol):
    """The Service's endpoint: `kube.leases.ServiceEndpoint`."""

    async def read(self) -> tuple[str, Endpoint | None]: ...

    async def write(self, endpoint: Endpoint, *, version: str) -> None:
        """Make this the only endpoint."""
        ...


class LeaderAddress:
    """Keeps the Service's endpoint at this replica while it leads."""

    def __init__(
        self,
        store: EndpointStore,
        own: Callable[[], Endpoint | None],
        *,
        leads: Callable[[], bool],
        look_s: float = _ENDPOINT_CHECK_S,
        step_s: float = _STEP_S,
    ) -> None:
        """`own` is this replica's endpoint; None until it listens."""
        self._store = store
        self._own = own
        self._leads = leads
        self._look_s = look_s
        self._step_s = step_s
        self.problem: KubeError | None = None
        """Why the last write failed."""

    async def run(self) -> NoReturn:
        loop = asyncio.get_running_loop()
        next_look = 0.0
        while True:
            own = self._own()
            if own is None or not self._leads():
                next_look = 0.0
            elif loop.time() >= next_look:
                is_kept = await self._keep(own)
                next_look = loop.time() + (self._look_s if is_kept else _ENDPOINT_RETRY_S)
            await asyncio.sleep(self._step_s)

    async def _keep(self, own: Endpoint) -> bool:
        try:
            version, current = await self._store.read()
            # No await between check and write: only the leader writes.
            if current != own and self._leads():
                await self._store.write(own, version=version)
                _log.info(
                    "updated extender endpoint to this replica", address=own.address, port=own.port
                )
        except ConflictError:
            return False  # another write came first: the next check sees it
        except KubeError as error:
            if self.problem is None or self.problem.message != error.message:
                _log.warning(error.message, hint=error.hint)
            self.problem = error
            return False
        self.problem = None
        return True
