# SPDX-License-Identifier: Apache-2.0
"""How kube-scheduler reaches the replica that leads: its address, in a Service without a selector.

Readiness cannot say it: it is what the API server's reviews go by, which every replica answers. So
the one that leads writes where it listens, in place of whoever led before, be that one alive or
not. A write goes over the version that was read just before: of two who write at a time, one is
refused and looks again, and the one that leads does so for ever.
"""

import asyncio
from collections.abc import Callable
from typing import Final, NoReturn, Protocol

import structlog

from allotment.kube.endpoints import Endpoint
from allotment.kube.errors import ConflictError, KubeError

__all__ = ["LeaderAddress"]

_LOOK_S: Final = 2.0
"""How often it is read whether it still says so."""
_AGAIN_S: Final = 0.5
_STEP_S: Final = 0.1
_log = structlog.get_logger(__name__)


class EndpointStore(Protocol):
    """Where the Service leads: `kube.endpoints.ServiceEndpoint`."""

    async def read(self) -> tuple[str, Endpoint | None]:
        """Return its version, and where it leads."""
        ...

    async def write(self, endpoint: Endpoint, *, version: str) -> None:
        """Lead there, and nowhere else."""
        ...


class LeaderAddress:
    """Keeps a Service leading here for as long as this replica leads."""

    def __init__(
        self,
        store: EndpointStore,
        own: Callable[[], Endpoint | None],
        *,
        leads: Callable[[], bool],
        look_s: float = _LOOK_S,
        step_s: float = _STEP_S,
    ) -> None:
        """Write nothing yet. `own` is where this replica listens; None: it does not yet."""
        self._store = store
        self._own = own
        self._leads = leads
        self._look_s = look_s
        self._step_s = step_s
        self.problem: KubeError | None = None
        """Why it could not be written last time."""

    async def run(self) -> NoReturn:
        """Keep it so for ever."""
        loop = asyncio.get_running_loop()
        next_look = 0.0
        while True:
            own = self._own()
            if own is None or not self._leads():
                next_look = 0.0
            elif loop.time() >= next_look:
                is_kept = await self._keep(own)
                next_look = loop.time() + (self._look_s if is_kept else _AGAIN_S)
            await asyncio.sleep(self._step_s)

    async def _keep(self, own: Endpoint) -> bool:
        try:
            version, there = await self._store.read()
            # Between the two nothing is waited for: who leads no more does not write.
            if there != own and self._leads():
                await self._store.write(own, version=version)
                _log.info("kube-scheduler is led here", address=own.address, port=own.port)
        except ConflictError:
            return False  # somebody wrote meanwhile: seen at the next look
        except KubeError as error:
            if self.problem is None or self.problem.message != error.message:
                _log.warning(error.message, hint=error.hint)
            self.problem = error
            return False
        self.problem = None
        return True
