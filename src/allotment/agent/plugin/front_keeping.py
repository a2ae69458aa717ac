# SPDX-License-Identifier: Apache-2.0
"""The agent's side of the front: writes the offer, answers the front's calls, keeps one running.

The front outlives the agent. What it did is read from its status file, for metrics and events.
"""

import asyncio
import contextlib
import fcntl
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import msgspec
import structlog

from allotment import __version__
from allotment.agent.kubelet import services
from allotment.agent.kubelet.proto import deviceplugin_pb2 as messages
from allotment.agent.kubelet.services import Context
from allotment.agent.plugin.front import (
    ALIVE,
    OFFER,
    STATUS,
    FrontOffer,
    FrontStatus,
    ResourceStatus,
    read_status,
)
from allotment.agent.plugin.preferred import Links, preferred
from allotment.agent.plugin.serving import (
    AGENT_SOCKET,
    ALLOCATED_KEY,
    RESOURCE_KEY,
    OfferedResource,
    SocketServer,
    refuse,
)
from allotment.agent.protocols import Checkpoint, Reports
from allotment.agent.resources import Resource
from allotment.files import FileIdentity, atomic_write, file_identity
from allotment.model.errors import AllotError, StateError
from allotment.model.reported import Reported

WITHHELD: Final = "ResourceWithheld"
"""The event on a node whose devices of a resource count as unhealthy."""

_log = structlog.get_logger("allotment.agent")

_POLL_S: Final = 0.25
_HELD_S: Final = 30.0
"""How often the checkpoint is read for resources that are held but not offered, and the offer is
written again: device nodes may have changed."""
_PREPARE_S: Final = 25.0
"""The front waits for 29 s, and then reports a timeout without the reason."""
_START_S: Final = 2.0
"""Between two attempts to start a front, which may end at once."""
_FRONT_LOG: Final = "front.log"


class Duties(msgspec.Struct, frozen=True, kw_only=True):
    """What the agent does for the kubelet."""

    offered: Callable[[Resource], OfferedResource]
    """Describes a resource for the front. May block; called in a thread."""
    pre_start: Callable[[str, frozenset[str]], Awaitable[None]]
    """Makes the shares of the containers that hold these ids of a resource. May be repeated. Raises
    `AllotError`: the container waits, and the kubelet asks again."""
    reports: Reports
    links: Callable[[], Links]
    """How well the devices are linked, as far as it is known yet."""
    policy: Callable[[], str]
    """`sharedDevicesAllocationPolicy` of the configuration in force."""
    modes: Callable[[], Mapping[str, str]] = dict
    """The mode of the shares on each device that has some, by its UUID."""
    allocated: Callable[[str, frozenset[str], str], None] | None = None
    """Gets when ids of a resource were given out (`ALLOCATED_KEY`), before `pre_start`."""


class FrontKeeping:
    """The agent's resources, as the front has them."""

    def __init__(
        self,
        *,
        kubelet: Path,
        state: Path,
        duties: Duties,
        checkpoint: Checkpoint,
        starts_front: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`starts_front`: start one if none runs, or if an agent of another version started it."""
        self._kubelet = kubelet
        self._state = state
        self._duties = duties
        self._checkpoint = checkpoint
        self._starts_front = starts_front
        self._clock = clock
        self._offered: Mapping[str, Resource] | None = None
        self._written: FrontOffer | None = None
        self._relists = 0
        self._next_write = 0.0
        self._status_read: FileIdentity | None = None
        self._status = FrontStatus()
        self._reported = Reported[str]()
        self._started_at = -_START_S
        self._front: subprocess.Popen[bytes] | None = None
        self._nudge = asyncio.Event()

    def offer(self, resources: Sequence[Resource]) -> None:
        """Replace the offered resources. The front follows at once."""
        self._offered = {resource.name: resource for resource in resources}
        self._next_write = 0.0
        self._nudge.set()

    def relist(self) -> None:
        """Let the kubelet write its checkpoint again, by a list of devices."""
        self._relists += 1
        self._next_write = 0.0
        self._nudge.set()

    @property
    def problem(self) -> str | None:
        """Why the kubelet has not what this agent offers."""
        if not self._is_front_running:
            return "no front is running"
        if not self._kubelet.exists():
            return f"waiting for the kubelet at {self._kubelet}"
        return "the resources are not known yet" if self._written is None else None

    @property
    def registered(self) -> Mapping[str, bool]:
        """Whether the kubelet has registered each offered resource and reads its list."""
        return {
            name: self._status.resources.get(name, ResourceStatus()).is_registered
            for name in self._offered or {}
        }

    async def run(self) -> None:
        """Serve the front until cancelled."""
        server = SocketServer(self._state / AGENT_SOCKET)
        await server.start(
            {
                services.OPTIONS: self._answer,
                services.PREFERRED: self._get_preferred,
                services.PRE_START: self._pre_start,
            }
        )
        try:
            while True:
                self._nudge.clear()
                try:
                    self._keep_front()
                except OSError as error:
                    if self._reported.is_new(_FRONT_LOG, str(error)):
                        _log.warning("cannot start a front", why=str(error))
                await self._write_offer()
                self._read_status()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_POLL_S):
                        await self._nudge.wait()
        finally:
            await server.stop()

    # ---- the offer -------------------------------------------------------------------------------

    async def _write_offer(self) -> None:
        path = self._kubelet.with_name(OFFER)
        # Kubelets before 1.33 remove every file of their plugins' folder when they start.
        is_gone = self._written is not None and file_identity(path) is None
        if self._offered is None or (self._clock() < self._next_write and not is_gone):
            return
        self._next_write = self._clock() + _HELD_S
        offered = self._offered
        try:
            offer = await asyncio.to_thread(self._describe, offered)
            if offer != self._written or is_gone:
                await asyncio.to_thread(
                    atomic_write,
                    path,
                    msgspec.json.encode(offer),
                    mode=0o600,
                )
                self._written = offer
        except OSError as error:
            self._next_write = self._clock() + _POLL_S
            if self._reported.is_new(OFFER, str(error)):
                _log.warning("cannot write the offer for the front", why=str(error))
        else:
            self._reported.over(OFFER)
            self._report_withheld(offer)

    def _describe(self, offered: Mapping[str, Resource]) -> FrontOffer:
        """Return the offer; a resource that containers hold stays in it, without devices.

        Restarting those containers needs `PreStartContainer`.
        """
        held = {each.name for each in self._written.resources} if self._written else set()
        try:
            entries = self._checkpoint.entries()
            held = {each.resource for each in entries if each.share is not None}
        except AllotError:
            # A starting container reports the unreadable file. No resource ends until it is read.
            self._next_write = self._clock() + _POLL_S
        described = [self._duties.offered(each) for each in offered.values()]
        described += [OfferedResource(name=name) for name in sorted(held - offered.keys())]
        return FrontOffer(resources=tuple(described), relists=self._relists)

    def _report_withheld(self, offer: FrontOffer) -> None:
        for each in offer.resources:
            key = f"offer of {each.name}"
            if each.problem is None:
                self._reported.over(key)
            elif self._reported.is_new(key, each.problem):
                self._duties.reports.node(
                    WITHHELD,
                    f"the devices of {each.name} count as unhealthy: {each.problem}",
                    is_warning=True,
                )

    # ---- the front -------------------------------------------------------------------------------

    @property
    def _is_front_running(self) -> bool:
        """Whether a front lives, also while one takes over from another one."""
        lock = os.open(self._state / ALIVE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(lock)
        return False

    def _keep_front(self) -> None:
        # A front that ended must not stay as a zombie.
        is_starting = self._front is not None and self._front.poll() is None
        if not self._starts_front or self._clock() - self._started_at < _START_S:
            return
        is_other = self._status.is_spawned and self._status.version != __version__
        if self._is_front_running and (is_starting or not is_other):
            return
        self._started_at = self._clock()
        words = ["--kubelet-socket", str(self._kubelet), "--state", str(self._state)]
        log_path = self._state / _FRONT_LOG
        with (self._state / ALIVE).open("ab") as alive, log_path.open("ab") as log:
            # Until it ends: while it imports its libraries, no agent must start a second one.
            fcntl.flock(alive, fcntl.LOCK_SH)
            # Of its own session: it must outlive the agent and its terminal.
            self._front = subprocess.Popen(
                [sys.executable, "-m", "allotment", "front", "--spawned", *words],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[alive.fileno()],
                start_new_session=True,
                cwd="/",
            )
        _log.info("front started", pid=self._front.pid, log=str(log_path))

    def _read_status(self) -> None:
        """Report what the front did since the last look."""
        identity = file_identity(self._state / STATUS)
        if identity is None or identity == self._status_read:
            return
        self._status_read = identity
        former, self._status = self._status, read_status(self._state)
        before = former.resources if former.pid == self._status.pid else {}
        for name, resource in self._status.resources.items():
            last = before.get(name, ResourceStatus())
            for result in ("registered", "failed"):
                for _ in range(getattr(resource, result) - getattr(last, result)):
                    self._duties.reports.count("registrations", resource=name, result=result)
            if resource.problem is None:
                self._reported.over(name)
            elif self._reported.is_new(name, resource.problem):
                self._duties.reports.node(
                    "DevicePluginNotRegistered", resource.problem, is_warning=True
                )

    # ---- the front's calls -----------------------------------------------------------------------

    async def _answer(
        self, _request: messages.Empty, _context: Context
    ) -> messages.DevicePluginOptions:
        """Show the front that this agent works: its event loop answers."""
        return messages.DevicePluginOptions()

    async def _get_preferred(
        self, request: messages.PreferredAllocationRequest, context: Context
    ) -> messages.PreferredAllocationResponse:
        duties = self._duties
        response = messages.PreferredAllocationResponse()
        async with self._answering(context, "preferred_seconds") as name:
            resource = (self._offered or {}).get(name)
            for each in request.container_requests if resource is not None else ():
                assert resource is not None  # noqa: S101 - for mypy
                chosen = preferred(
                    resource,
                    available=each.available_deviceIDs,
                    must_include=each.must_include_deviceIDs,
                    size=each.allocation_size,
                    links=duties.links(),
                    policy=duties.policy(),
                    modes=duties.modes(),
                )
                response.container_responses.add(deviceIDs=chosen)
        return response

    async def _pre_start(
        self, request: messages.PreStartContainerRequest, context: Context
    ) -> messages.PreStartContainerResponse:
        ids = frozenset(request.devices_ids)
        # `Tenants` knows the container, and has counted and reported its refusal.
        async with self._answering(context, "prepare_seconds", is_counted=False) as name:
            try:
                if self._duties.allocated is not None:
                    metadata = dict(context.invocation_metadata() or ())
                    self._duties.allocated(name, ids, str(metadata.get(ALLOCATED_KEY, "")))
                async with asyncio.timeout(_PREPARE_S):
                    await self._duties.pre_start(name, ids)
            except TimeoutError:
                self._duties.reports.count("refusals", reason=StateError.__name__)
                raise StateError(
                    f"the share was not ready within {_PREPARE_S:.0f} s",
                    hint="the kubelet asks again; see the agent's log for the cause",
                ) from None
        return messages.PreStartContainerResponse()

    @asynccontextmanager
    async def _answering(
        self, context: Context, figure: str, *, is_counted: bool = True
    ) -> AsyncIterator[str]:
        """Measure a call for a resource, and end it with the gRPC code of its error."""
        reports = self._duties.reports
        started = time.perf_counter()
        name = str(dict(context.invocation_metadata() or ()).get(RESOURCE_KEY, ""))
        try:
            yield name
        except AllotError as error:
            if is_counted:
                reports.count("refusals", reason=type(error).__name__)
            await refuse(error, context)
        finally:
            reports.observe(figure, time.perf_counter() - started, resource=name)
