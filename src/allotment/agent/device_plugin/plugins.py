# SPDX-License-Identifier: Apache-2.0
"""All resources of the node at the kubelet: servers that come and go, registered at all times.

    plugins = DevicePlugins(kubelet=..., duties=..., checkpoint=...)
    plugins.offer(resources)                       # as often as something changes
    await plugins.run()                            # until it is cancelled

A loop compares what is with what should be, a few times a second: a new kubelet (its socket is
another one), a folder that the kubelet has emptied, a stream that it has dropped, resources that
came, changed or went. There is no other state, so it does not matter what happened meanwhile.

A resource that is no longer offered is listed as empty for as long as containers have some of it:
the kubelet asks for `PreStartContainer` when one of them is restarted, and without an endpoint it
could not start. Only then its server ends, which the kubelet would otherwise take as devices that
have failed.
"""

import asyncio
import contextlib
import errno
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

import structlog

from allotment.agent.device_plugin.registering import KubeletSocket, register, socket_of
from allotment.agent.device_plugin.serving import (
    DRAFT_PREFIX,
    SOCKET_PREFIX,
    Duties,
    ResourceServer,
)
from allotment.agent.protocols import Checkpoint
from allotment.agent.resources import Resource
from allotment.model.errors import AllotError, PrerequisiteError, UsageError

__all__ = ["DevicePlugins"]

_log = structlog.get_logger("allotment.agent")

_POLL_S: Final = 0.25
_FIRST_PAUSE_S: Final = 0.1
_LONGEST_PAUSE_S: Final = 10.0
_LISTEN_S: Final = 5.0
"""The kubelet asks for the list at once when a plugin has registered."""
_LEAVE_S: Final = 1.0
"""From the empty list to the end of the server: the kubelet has read it by then."""
_SETTLE_S: Final = 1.0
"""For a kubelet to notice that a stream has ended."""
_HELD_S: Final = 30.0
"""How often the checkpoint is asked whether what is not offered is still held."""


@dataclass(slots=True)
class _Plugin:
    """One resource's server, and how things are between it and the kubelet."""

    server: ResourceServer
    kubelet: KubeletSocket | None = None
    """Where it is registered."""
    tried: KubeletSocket | None = None
    """Where it was tried last: another kubelet is tried at once."""
    registered_at: float = 0.0
    pause_s: float = 0.0
    next_try: float = 0.0
    retired_at: float | None = None
    """When it was last known to be wanted no more, or held by somebody."""
    told: set[str] = field(default_factory=set)
    """Problems that the node's events have by now."""


class DevicePlugins:
    """Every resource's server, and its registration."""

    def __init__(self, *, kubelet: Path, duties: Duties, checkpoint: Checkpoint) -> None:
        self._kubelet = kubelet
        self._duties = duties
        self._checkpoint = checkpoint
        self._offered: Mapping[str, Resource] = {}
        self._plugins: dict[str, _Plugin] = {}
        self._held: frozenset[str] = frozenset()
        self._held_asked = -_HELD_S
        self._is_held_known = False
        self._nudge = asyncio.Event()
        self._is_waiting = False

    def offer(self, resources: Sequence[Resource]) -> None:
        """Offer these resources, and no others, from now on. Servers follow at once."""
        self._offered = {resource.name: resource for resource in resources}
        for name, plugin in self._plugins.items():
            if name in self._offered:
                plugin.server.update(self._offered[name])
        self._nudge.set()

    @property
    def problem(self) -> str | None:
        """Why nothing can be registered at present; None: nothing is known to be in the way."""
        return f"waiting for the kubelet at {self._kubelet}" if self._is_waiting else None

    @property
    def registered(self) -> Mapping[str, bool]:
        """Say of each resource that is offered whether the kubelet knows it and listens."""
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
        # First the kubelet's socket, then the plugins': it removes theirs before it makes its own.
        kubelet = socket_of(self._kubelet)
        self._tell_waiting(is_there=kubelet is not None)
        await self._ask_who_holds()
        wanted = dict(self._offered)
        for name in self._held.difference(wanted):
            wanted[name] = Resource(name=name, mode="", slots=())
        for name, resource in wanted.items():
            if name not in self._plugins:
                server = ResourceServer(resource, folder=self._kubelet.parent, duties=self._duties)
                self._plugins[name] = _Plugin(server)
        await asyncio.gather(
            *(self._keep(name, plugin, kubelet) for name, plugin in self._plugins.items())
        )
        for name in [each for each in self._plugins if self._has_left(each)]:
            await self._plugins.pop(name).server.stop()

    def _tell_waiting(self, *, is_there: bool) -> None:
        """Say once that the kubelet is not there: nothing is offered without it."""
        if not is_there and not self._is_waiting:
            _log.warning(
                f"waiting for the kubelet at {self._kubelet}",
                hint="is it running on this machine? Where its socket is elsewhere:"
                " --kubelet-socket (KUBELET_SOCKET)",
            )
        self._is_waiting = not is_there

    async def _ask_who_holds(self) -> None:
        """Look for resources of ours that containers have; seldom, and when some are given up."""
        is_due = time.monotonic() - self._held_asked >= _HELD_S
        if not is_due and self._plugins.keys() <= self._offered.keys() | self._held:
            return
        self._held_asked = time.monotonic()
        try:
            entries = await asyncio.to_thread(self._checkpoint.entries)
        except AllotError:
            # Whoever needs it for a container tells of it. Nothing is given up until it is known.
            self._is_held_known = False
            return
        self._is_held_known = True
        self._held = frozenset(each.resource for each in entries if each.share is not None)

    def _has_left(self, name: str) -> bool:
        """Say whether a resource's server can end."""
        plugin = self._plugins[name]
        if name in self._offered:
            plugin.retired_at = None
            return False
        now = time.monotonic()
        plugin.server.update(replace(plugin.server.resource, slots=()))
        if plugin.retired_at is None or name in self._held or not self._is_held_known:
            plugin.retired_at = now
        return now - plugin.retired_at >= _LEAVE_S

    async def _keep(self, name: str, plugin: _Plugin, kubelet: KubeletSocket | None) -> None:
        """Bring one resource nearer to being served and registered."""
        now = time.monotonic()
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
                    # This kubelet has to notice first that the old server has ended: it would take
                    # that for the end of the new one, whose socket has the same name.
                    plugin.next_try = time.monotonic() + _SETTLE_S
                    return
            if kubelet is not None and self._is_to_register(plugin, kubelet, now):
                await register(plugin.server, self._kubelet)
                plugin.kubelet, plugin.registered_at = kubelet, time.monotonic()
                self._duties.reports.count("registrations", resource=name, result="registered")
                if name in self._offered:
                    _log.info("offering", **{name: _amount(self._offered[name])})
        except AllotError as error:
            plugin.kubelet = None
            self._duties.reports.count("registrations", resource=name, result="failed")
            plugin.pause_s = min(_LONGEST_PAUSE_S, max(_FIRST_PAUSE_S, plugin.pause_s * 2))
            plugin.next_try = time.monotonic() + plugin.pause_s
            self._tell(plugin, error)
        else:
            plugin.pause_s = plugin.next_try = 0.0
            plugin.told.clear()

    @staticmethod
    def _is_to_register(plugin: _Plugin, kubelet: KubeletSocket, now: float) -> bool:
        if plugin.kubelet != kubelet:
            return True
        # It has forgotten us without a restart.
        since = max(plugin.registered_at, plugin.server.unwatched_since)
        return not plugin.server.is_watched and now - since > _LISTEN_S

    def _tell(self, plugin: _Plugin, error: AllotError) -> None:
        """Tell people of what will not pass by itself, once, and of the rest when it goes on."""
        stays = isinstance(error, PrerequisiteError | UsageError)
        if (stays or plugin.pause_s >= _LONGEST_PAUSE_S) and error.message not in plugin.told:
            plugin.told.add(error.message)
            hint = f"; {error.hint}" if error.hint else ""
            message = f"{error.message}{hint}"
            self._duties.reports.node("DevicePluginNotRegistered", message, is_warning=True)


def _amount(resource: Resource) -> str:
    healthy = sum(each.is_healthy for each in resource.slots)
    whole = len(resource.slots)
    return f"{healthy}" if healthy == whole else f"{healthy} of {whole}"
