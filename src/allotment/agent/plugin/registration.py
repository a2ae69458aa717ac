# SPDX-License-Identifier: Apache-2.0
"""The plugins of this node's resources: served on sockets and registered with the kubelet.

A loop compares the state with the offer a few times a second: a new kubelet (another socket), an
emptied folder, a dropped stream, changed resources. A resource that is no longer offered is listed
as empty while containers hold some of it: restarting them needs `PreStartContainer`. Then its
server stops.
"""

import asyncio
import contextlib
import errno
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

import grpc
import grpc.aio
import structlog

from allotment.agent.kubelet.proto import deviceplugin_pb2 as messages
from allotment.agent.kubelet.services import CHANNEL_OPTIONS, REGISTER
from allotment.agent.plugin.serving import (
    DRAFT_PREFIX,
    SOCKET_PREFIX,
    Duties,
    ResourceServer,
)
from allotment.agent.protocols import Checkpoint
from allotment.agent.resources import Resource
from allotment.files import FileIdentity, file_identity
from allotment.model.errors import AllotError, PrerequisiteError, StateError, UsageError
from allotment.model.reported import Reported

VERSION: Final = "v1beta1"

_PATIENCE_S: Final = 10.0
"""The kubelet calls the plugin back before it answers, and gives that 10 s."""


async def register(server: ResourceServer, kubelet: Path) -> None:
    """Register one resource at the kubelet's socket.

    Raises `PrerequisiteError` if the kubelet lacks this version of the interface, `UsageError` if
    it refuses the resource's name, `StateError` if it does not answer.
    """
    request = messages.RegisterRequest(
        version=VERSION,
        endpoint=server.endpoint,
        resource_name=server.resource.name,
        options=server.options,
    )
    async with grpc.aio.insecure_channel(f"unix:{kubelet}", options=CHANNEL_OPTIONS) as channel:
        try:
            await REGISTER.on_aio(channel)(request, timeout=_PATIENCE_S)
        except grpc.aio.AioRpcError as error:
            raise _explained(error, server.resource.name, kubelet) from error


def _explained(error: grpc.aio.AioRpcError, resource: str, kubelet: Path) -> AllotError:
    details = error.details() or error.code().name
    # The kubelet's text: pkg/kubelet/cm/devicemanager/plugin/v1beta1/api.go.
    if error.code() is grpc.StatusCode.UNIMPLEMENTED or "API version" in details:
        return PrerequisiteError(
            f"the kubelet refuses device plugins of version {VERSION}: {details}",
            hint="all kubelets since Kubernetes 1.10 accept it: look for a newer agent for this"
            " kubelet",
        )
    if "is invalid" in details:
        return UsageError(
            f"the kubelet refuses the resource {resource}: {details}",
            hint="a resource's name is DOMAIN/NAME, without kubernetes.io: see `resources` and"
            " `rename` in the configuration",
        )
    return StateError(
        f"the kubelet does not register {resource} at {kubelet}: {details}",
        hint="the agent tries again; see the kubelet's log if this goes on",
    )


_log = structlog.get_logger("allotment.agent")

_POLL_S: Final = 0.25
_FIRST_PAUSE_S: Final = 0.1
_LONGEST_PAUSE_S: Final = 10.0
_LISTEN_S: Final = 5.0
"""The kubelet reads the list right after a registration."""
_LEAVE_S: Final = 1.0
"""From the empty list to the server's end: time for the kubelet to read it."""
_SETTLE_S: Final = 1.0
"""For the kubelet to notice that a stream has ended."""
_HELD_S: Final = 30.0
"""How often the checkpoint is read for resources that are held but not offered."""


@dataclass(slots=True)
class _Plugin:
    """One resource's server, and its registration."""

    server: ResourceServer
    kubelet: FileIdentity | None = None
    """The kubelet it is registered with."""
    tried: FileIdentity | None = None
    """The kubelet of the last attempt: another one is tried at once."""
    registered_at: float = 0.0
    pause_s: float = 0.0
    next_try: float = 0.0
    retired_at: float | None = None
    """When it was last held by a container, once it is no longer offered."""
    reported: Reported[str] = field(default_factory=Reported)
    """Problems that the node's events report."""


class DevicePlugins:
    """Every resource's server, and its registration."""

    def __init__(
        self,
        *,
        kubelet: Path,
        duties: Duties,
        checkpoint: Checkpoint,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._kubelet = kubelet
        self._duties = duties
        self._checkpoint = checkpoint
        self._clock = clock
        self._offered: Mapping[str, Resource] = {}
        self._plugins: dict[str, _Plugin] = {}
        self._held: frozenset[str] = frozenset()
        self._held_asked = -_HELD_S
        self._is_held_known = False
        self._nudge = asyncio.Event()
        self._is_waiting = False

    def offer(self, resources: Sequence[Resource]) -> None:
        """Replace the offered resources. Servers follow at once."""
        self._offered = {resource.name: resource for resource in resources}
        for name, plugin in self._plugins.items():
            if name in self._offered:
                plugin.server.update(self._offered[name])
        self._nudge.set()

    def relist(self) -> None:
        """Let the kubelet write its checkpoint again (pkg/kubelet/cm/devicemanager, v1.36)."""
        for plugin in self._plugins.values():
            plugin.server.relist()

    @property
    def problem(self) -> str | None:
        """Why no resource can be registered at present."""
        return f"waiting for the kubelet at {self._kubelet}" if self._is_waiting else None

    @property
    def registered(self) -> Mapping[str, bool]:
        """Whether the kubelet has registered each offered resource and reads its list."""
        return {
            name: (plugin := self._plugins.get(name)) is not None
            and plugin.kubelet is not None
            and plugin.server.is_watched
            for name in self._offered
        }

    async def run(self) -> None:
        """Serve until cancelled; then stop all servers."""
        self._clean_up()
        try:
            while True:
                self._nudge.clear()
                await self._compare()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_POLL_S):
                        await self._nudge.wait()
        finally:
            await asyncio.gather(*(plugin.server.stop() for plugin in self._plugins.values()))
            self._plugins.clear()

    def _clean_up(self) -> None:
        """Remove the sockets of an agent that was killed."""
        folder = self._kubelet.parent
        for pattern in (f"{SOCKET_PREFIX}*.sock", f"{DRAFT_PREFIX}*"):
            for path in folder.glob(pattern):
                with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as client:
                    if client.connect_ex(str(path)) == errno.ECONNREFUSED:
                        path.unlink()

    async def _compare(self) -> None:
        # The kubelet's socket first: a starting kubelet removes ours before it makes its own.
        kubelet = file_identity(self._kubelet)
        self._report_waiting(is_waiting=kubelet is None)
        await self._read_held()
        wanted = dict(self._offered)
        for name in self._held.difference(wanted):
            wanted[name] = Resource(name=name, mode="", slots=())
        for name, resource in wanted.items():
            if name not in self._plugins:
                server = ResourceServer(
                    resource,
                    folder=self._kubelet.parent,
                    duties=self._duties,
                    clock=self._clock,
                )
                self._plugins[name] = _Plugin(server)
        await asyncio.gather(
            *(self._keep(name, plugin, kubelet) for name, plugin in self._plugins.items())
        )
        for name in [each for each in self._plugins if self._has_left(each)]:
            await self._plugins.pop(name).server.stop()

    def _report_waiting(self, *, is_waiting: bool) -> None:
        """Log once that the kubelet is missing: no resource can be offered without it."""
        if is_waiting and not self._is_waiting:
            _log.warning(
                f"waiting for the kubelet at {self._kubelet}",
                hint="check that it runs on this machine, or name its socket by --kubelet-socket"
                " (KUBELET_SOCKET)",
            )
        self._is_waiting = is_waiting

    async def _read_held(self) -> None:
        """Read which of our resources containers hold: seldom, and when an offer ends."""
        is_due = self._clock() - self._held_asked >= _HELD_S
        if not is_due and self._plugins.keys() <= self._offered.keys() | self._held:
            return
        self._held_asked = self._clock()
        try:
            entries = await asyncio.to_thread(self._checkpoint.entries)
        except AllotError:
            # A starting container reports this. No server stops until the file can be read.
            self._is_held_known = False
            return
        self._is_held_known = True
        self._held = frozenset(each.resource for each in entries if each.share is not None)

    def _has_left(self, name: str) -> bool:
        """Return whether a resource's server can stop; list it as empty meanwhile."""
        plugin = self._plugins[name]
        if name in self._offered:
            plugin.retired_at = None
            return False
        now = self._clock()
        plugin.server.update(replace(plugin.server.resource, slots=()))
        if plugin.retired_at is None or name in self._held or not self._is_held_known:
            plugin.retired_at = now
        return now - plugin.retired_at >= _LEAVE_S

    async def _keep(self, name: str, plugin: _Plugin, kubelet: FileIdentity | None) -> None:
        """Start or register one resource, if that is due."""
        now = self._clock()
        if kubelet is None:
            plugin.kubelet = None
        if now < plugin.next_try and plugin.tried == kubelet:
            return
        plugin.tried = kubelet
        try:
            if not plugin.server.has_socket:
                is_known = kubelet is not None and plugin.kubelet == kubelet
                plugin.kubelet = None
                await plugin.server.start()
                if is_known:
                    # The kubelet must notice the old server's end first: it would take that for
                    # the end of the new one, whose socket has the same name.
                    plugin.next_try = self._clock() + _SETTLE_S
                    return
            if kubelet is not None and self._is_to_register(plugin, kubelet, now):
                await register(plugin.server, self._kubelet)
                plugin.kubelet, plugin.registered_at = kubelet, self._clock()
                self._duties.reports.count("registrations", resource=name, result="registered")
                if name in self._offered:
                    _log.info("offering", **{name: self._offered[name].amount})
        except AllotError as error:
            plugin.kubelet = None
            self._duties.reports.count("registrations", resource=name, result="failed")
            plugin.pause_s = min(_LONGEST_PAUSE_S, max(_FIRST_PAUSE_S, plugin.pause_s * 2))
            plugin.next_try = self._clock() + plugin.pause_s
            self._report(plugin, error)
        else:
            plugin.pause_s = plugin.next_try = 0.0
            plugin.reported.all_over()

    @staticmethod
    def _is_to_register(plugin: _Plugin, kubelet: FileIdentity, now: float) -> bool:
        if plugin.kubelet != kubelet:
            return True
        # The kubelet dropped the plugin without a restart.
        since = max(plugin.registered_at, plugin.server.unwatched_since)
        return not plugin.server.is_watched and now - since > _LISTEN_S

    def _report(self, plugin: _Plugin, error: AllotError) -> None:
        """Report a lasting problem once, and a passing one if it goes on."""
        stays = isinstance(error, PrerequisiteError | UsageError)
        is_due = stays or plugin.pause_s >= _LONGEST_PAUSE_S
        if is_due and plugin.reported.is_new(error.message):
            self._duties.reports.node(
                "DevicePluginNotRegistered", error.one_line(), is_warning=True
            )
