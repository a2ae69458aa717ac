# SPDX-License-Identifier: Apache-2.0
"""The front: a small process that the kubelet always finds, also while the agent is away.

It serves the resources of the agent's last offer and registers them with the kubelet. A loop
compares the state with the offer a few times a second: a new kubelet (another socket), an emptied
folder, a dropped stream, changed resources. docs/designs/front.md explains how a front takes over
from another one without a pod's failure. Few imports: it stays in memory beside the agent.
"""

import asyncio
import contextlib
import ctypes
import errno
import fcntl
import os
import signal
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

import grpc
import grpc.aio
import msgspec
import structlog

from allotment import __version__
from allotment.agent.kubelet.proto import deviceplugin_pb2 as messages
from allotment.agent.kubelet.services import CHANNEL_OPTIONS, REGISTER
from allotment.agent.plugin.serving import (
    AGENT_SOCKET,
    DRAFT_PREFIX,
    SOCKET_PREFIX,
    AgentChannel,
    OfferedResource,
    ResourceServer,
)
from allotment.files import FileIdentity, atomic_write, file_identity
from allotment.model.errors import AllotError, PrerequisiteError, StateError, UsageError
from allotment.model.reported import Reported
from allotment.model.structs import prepared

VERSION: Final = "v1beta1"
OFFER: Final = "allotment-offer.json"
"""In the kubelet's folder of plugins, which outlives a reboot: the agent's last offer."""
STATUS: Final = "front.json"
"""In the state folder: what the front did."""
LOCK: Final = "front.lock"
"""In the state folder; held while a front serves. It contains the mark of the latest front."""
ALIVE: Final = "front.alive"
"""In the state folder; each front shares its lock until it ends, and one that an agent starts from
before its start. One front takes over `LOCK` from another one some time after that one's end."""

_PATIENCE_S: Final = 10.0
"""The kubelet calls the plugin back before it answers, and gives that 10 s."""


class FrontOffer(msgspec.Struct, frozen=True, kw_only=True):
    """The content of the file `OFFER`."""

    resources: tuple[OfferedResource, ...] = ()
    relists: int = 0
    """Another number: send the lists again. The kubelet then writes its checkpoint from memory
    (pkg/kubelet/cm/devicemanager, v1.36)."""


class ResourceStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One resource at the kubelet."""

    is_registered: bool = False
    registered: int = 0
    failed: int = 0
    """How often the kubelet accepted and refused it."""
    problem: str | None = None
    """Why the kubelet does not take it, if that lasts."""


class FrontStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The content of the file `STATUS`."""

    pid: int = 0
    version: str = ""
    is_spawned: bool = False
    is_ready: bool = False
    """The kubelet has all of an agent's offer, and no end of another front disturbs that."""
    resources: dict[str, ResourceStatus] = {}


async def register(server: ResourceServer, kubelet: Path) -> None:
    """Register one resource at the kubelet's socket.

    Raises `PrerequisiteError` if the kubelet lacks this version of the interface, `UsageError` if
    it refuses the resource's name, `StateError` if it does not answer.
    """
    request = messages.RegisterRequest(
        version=VERSION,
        endpoint=server.endpoint,
        resource_name=server.resource.name,
        options=server.resource.options,
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
        hint="the front tries again; see the kubelet's log if this goes on",
    )


_log = structlog.get_logger("allotment.front")

_POLL_S: Final = 0.25
_FIRST_PAUSE_S: Final = 0.1
_LONGEST_PAUSE_S: Final = 10.0
_READY_S: Final = 10.0
_LISTEN_S: Final = 5.0
"""The kubelet reads the list right after a registration."""
_LEAVE_S: Final = 1.0
"""From the empty list to the server's end: time for the kubelet to read it."""
_SETTLE_S: Final = 1.0
"""For the kubelet to notice that a stream has ended."""
_TAKE_BACK_S: Final = 3.0
"""A successor that does not answer for this long has failed."""
BRIDGE_S: Final = 300.0
"""How long devices are offered without an agent. Then the kubelet lists them as unhealthy, so that
the scheduler sends no more pods."""
_ASKS: Final = 60
"""How often the front asks for the agent in that time."""


class _Plugin(msgspec.Struct):
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
    """Since when it is not offered."""
    is_detached: bool = False
    """The end of the former front's stream has no effect on it."""
    registered: int = 0
    failed: int = 0
    problem: str | None = None

    @property
    def is_served(self) -> bool:
        return self.kubelet is not None and self.server.is_watched


class Front:
    """Every resource's server, and its registration."""

    def __init__(
        self,
        *,
        kubelet: Path,
        state: Path,
        ready_file: Path | None = None,
        is_spawned: bool = False,
        bridge_s: float = BRIDGE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`ready_file` exists while all is registered. `is_spawned`: end when it is not needed."""
        self._kubelet = kubelet
        self._folder = kubelet.parent
        self._state = state
        self._ready_file = ready_file
        self._is_spawned = is_spawned
        self._bridge_s = bridge_s
        self._clock = clock
        self._agent: AgentChannel
        self._offer_read: FileIdentity | None = None
        self._offered: Mapping[str, OfferedResource] = {}
        self._relists = 0
        self._plugins: dict[str, _Plugin] = {}
        self._nudge = asyncio.Event()
        self._lock: int | None = None
        self._has_lock = False
        self._mark = os.urandom(8).hex().encode()
        self._agent_seen = clock()
        self._answered_for: float | None = None
        """When a successor's sockets answered last; None: there is no successor."""
        self._status = FrontStatus()
        self._reported = Reported[str]()

    async def run(self) -> None:
        """Serve until cancelled; then stop all servers."""
        self._state.mkdir(mode=0o700, parents=True, exist_ok=True)
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        alive = os.open(self._state / ALIVE, flags, 0o600)
        fcntl.flock(alive, fcntl.LOCK_SH)  # an agent that looks has it for a moment
        self._lock = os.open(self._state / LOCK, flags, 0o600)
        self._has_lock = self._try_lock()
        self._become_latest()
        _log.info("starting", takes_over=not self._has_lock)
        self._clean_up()
        self._agent = AgentChannel(self._state / AGENT_SOCKET)
        if _SYSTEMD in os.environ:
            # The kubelet, which makes the folder, starts after this front.
            with contextlib.suppress(OSError):
                self._folder.mkdir(mode=0o750, parents=True, exist_ok=True)
        asking = asyncio.create_task(self._ask_for_agent())
        watch = _FolderWatch(self._folder, self._nudge.set)
        began = self._clock()
        try:
            while not self._is_over():
                self._nudge.clear()
                problem = watch.renew()
                await self._compare()
                if problem is None or self._clock() - began > _READY_S:
                    _notify_systemd()
                self._report_watch(problem)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_POLL_S):
                        await self._nudge.wait()
        finally:
            asking.cancel()
            watch.close()
            if self._ready_file is not None:
                self._ready_file.unlink(missing_ok=True)
            await asyncio.gather(*(plugin.server.stop() for plugin in self._plugins.values()))
            self._plugins.clear()
            await self._agent.close()
            os.close(self._lock)
            os.close(alive)

    def _try_lock(self) -> bool:
        assert self._lock is not None  # noqa: S101 - `run` opens it
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def _become_latest(self) -> None:
        lock = os.open(self._state / LOCK, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        os.pwrite(lock, self._mark, 0)
        os.close(lock)

    @property
    def _is_latest(self) -> bool:
        """Whether no other front began after this one: of two fronts, the later one serves."""
        try:
            # By path: the folder may have been emptied under this front, and another one be there.
            return (self._state / LOCK).read_bytes() == self._mark
        except FileNotFoundError:
            return True

    def _clean_up(self) -> None:
        """Remove the sockets of a front that was killed."""
        for pattern in (f"{SOCKET_PREFIX}*.sock", f"{DRAFT_PREFIX}*"):
            for path in self._folder.glob(pattern):
                if not _answers(path):
                    with contextlib.suppress(OSError):
                        path.unlink()

    def _is_over(self) -> bool:
        """Return whether a front that an agent started is not needed any more."""
        if not self._is_spawned:
            return False
        if self._answered_for is not None:
            status = read_status(self._state)
            return status.is_ready and status.pid != os.getpid()
        return self._is_abandoned

    @property
    def _is_abandoned(self) -> bool:
        return self._clock() - self._agent_seen > self._bridge_s

    # ---- the loop --------------------------------------------------------------------------------

    async def _compare(self) -> None:
        # The kubelet's socket first: a starting kubelet removes ours before it makes its own.
        kubelet = file_identity(self._kubelet)
        self._report_kubelet(is_there=kubelet is not None)
        self._read_offer()
        self._report_agent()
        for name, resource in self._offered.items():
            if name not in self._plugins:
                server = ResourceServer(
                    resource, folder=self._folder, agent=self._agent, clock=self._clock
                )
                self._plugins[name] = _Plugin(server)
            self._plugins[name].server.update(resource, is_withdrawn=self._is_abandoned)
        if not self._is_replaced():
            await asyncio.gather(
                *(self._keep(name, plugin, kubelet) for name, plugin in self._plugins.items())
            )
            self._follow_predecessor()
            self._write_status(has_kubelet=kubelet is not None)
        for name in [each for each in self._plugins if self._has_left(each)]:
            await self._plugins.pop(name).server.stop()

    def _report_kubelet(self, *, is_there: bool) -> None:
        """Log once that the kubelet is missing: no resource can be offered without it."""
        if is_there:
            self._reported.over("kubelet")
        elif self._reported.is_new("kubelet"):
            _log.warning(
                f"waiting for the kubelet at {self._kubelet}",
                hint="check that it runs on this machine, or name its socket by --kubelet-socket"
                " (KUBELET_SOCKET)",
            )

    def _report_watch(self, problem: str | None) -> None:
        if problem is None:
            self._reported.over("watch")
        elif self._reported.is_new("watch", problem):
            _log.warning(
                f"cannot watch {self._folder}: {problem}",
                hint="a kubelet that starts may not find the front in time: `sysctl fs.inotify`",
            )

    def _read_offer(self) -> None:
        path = self._folder / OFFER
        identity = file_identity(path)
        if identity is None or identity == self._offer_read:
            return
        try:
            offer = msgspec.json.decode(path.read_bytes(), type=prepared(FrontOffer))
        except (OSError, msgspec.DecodeError) as error:
            if self._reported.is_new(OFFER, str(error)):
                _log.warning(f"cannot read {path}: the last offer stays in force", why=str(error))
            return
        self._offer_read = identity
        self._offered = {each.name: each for each in offer.resources}
        if offer.relists != self._relists:
            self._relists = offer.relists
            for plugin in self._plugins.values():
                plugin.server.relist()
        _log.info("offering", resources=sorted(self._offered))

    async def _ask_for_agent(self) -> None:
        """Note when an agent answered last: one that hangs, or ends at each start, never does."""
        pause_s = self._bridge_s / _ASKS
        while True:
            if await self._agent.answers(within_s=pause_s):
                self._agent_seen = self._clock()
            await asyncio.sleep(pause_s)

    def _report_agent(self) -> None:
        if not self._is_abandoned:
            self._reported.over("agent")
        elif self._reported.is_new("agent"):
            _log.warning(
                f"no agent for {self._bridge_s:g} s: the devices are listed as unhealthy",
                hint="look at the agent's log on this node",
            )

    # ---- another front ---------------------------------------------------------------------------

    def _is_replaced(self) -> bool:
        """Return whether a later front has put its sockets in place of these.

        This one keeps its streams until it ends. It takes its place back if the other one fails.
        """
        if self._is_latest:
            return False
        listeners = [plugin.server.listener for plugin in self._plugins.values()]
        lost = [each.path for each in listeners if each.was_started and not each.has_socket]
        if any(_answers(path) for path in lost):
            if self._answered_for is None:
                _log.info("another front takes over")
            self._answered_for = self._clock()
        elif self._answered_for is not None and (self._clock() - self._answered_for > _TAKE_BACK_S):
            _log.warning("the other front does not answer: taking its place")
            self._answered_for = None
            self._become_latest()
        return self._answered_for is not None

    def _follow_predecessor(self) -> None:
        """Register again, in full, once the former front has ended."""
        if self._has_lock or not self._try_lock():
            return
        self._has_lock = True
        for plugin in self._plugins.values():
            plugin.kubelet, plugin.is_detached = None, False
            # The kubelet must notice the end of the former front's stream first.
            plugin.next_try = self._clock() + _SETTLE_S

    async def _detach(self, plugin: _Plugin) -> None:
        """Let the kubelet forget whose stream counts, so that the former front's end does not.

        When a stream ends, the kubelet ends the plugin that is registered by then, whichever it is
        (runClient in pkg/kubelet/cm/devicemanager/plugin/v1beta1/handler.go, v1.25 to v1.36). A
        registration that fails takes the entry away; devices and connection stay.
        """
        plugin.server.refuses_options = True
        try:
            with contextlib.suppress(StateError):  # as intended
                await register(plugin.server, self._kubelet)
        finally:
            plugin.server.refuses_options = False
        plugin.is_detached = True

    # ---- one resource ----------------------------------------------------------------------------

    def _has_left(self, name: str) -> bool:
        """Return whether a resource's server can stop; list it as empty meanwhile."""
        plugin = self._plugins[name]
        if name in self._offered:
            plugin.retired_at = None
            return False
        plugin.server.update(OfferedResource(name=name))
        if plugin.retired_at is None:
            plugin.retired_at = self._clock()
        return self._clock() - plugin.retired_at >= _LEAVE_S

    async def _keep(self, name: str, plugin: _Plugin, kubelet: FileIdentity | None) -> None:
        """Start or register one resource, if that is due."""
        now = self._clock()
        if kubelet is None:
            plugin.kubelet = None
        if now < plugin.next_try and plugin.tried == kubelet:
            return
        plugin.tried = kubelet
        try:
            if not await self._has_place(plugin, kubelet):
                return
            if kubelet is not None and self._is_to_register(plugin, kubelet, now):
                await register(plugin.server, self._kubelet)
                plugin.kubelet, plugin.registered_at = kubelet, self._clock()
                plugin.registered += 1
                _log.info("registered", resource=name)
            if plugin.is_served and not self._has_lock and not plugin.is_detached:
                await self._detach(plugin)
        except AllotError as error:
            plugin.kubelet = None
            plugin.failed += 1
            plugin.pause_s = min(_LONGEST_PAUSE_S, max(_FIRST_PAUSE_S, plugin.pause_s * 2))
            plugin.next_try = self._clock() + plugin.pause_s
            is_lasting = isinstance(error, PrerequisiteError | UsageError)
            if is_lasting or plugin.pause_s >= _LONGEST_PAUSE_S:
                plugin.problem = error.one_line()
        else:
            plugin.pause_s = plugin.next_try = 0.0
            plugin.problem = None

    async def _has_place(self, plugin: _Plugin, kubelet: FileIdentity | None) -> bool:
        """Return whether a resource can be registered; make its socket if it is missing."""
        listener = plugin.server.listener
        if listener.has_socket:
            return True
        if not self._is_latest and _answers(listener.path):
            return False  # a later front came since the last look
        is_known = kubelet is not None and plugin.kubelet == kubelet
        plugin.kubelet = None
        await plugin.server.start()
        if is_known:
            # The kubelet must notice the old server's end first: it would take that for the end of
            # the new one.
            plugin.next_try = self._clock() + _SETTLE_S
        return not is_known

    @staticmethod
    def _is_to_register(plugin: _Plugin, kubelet: FileIdentity, now: float) -> bool:
        if plugin.kubelet != kubelet:
            return True
        # The kubelet dropped the plugin without a restart.
        since = max(plugin.registered_at, plugin.server.unwatched_since)
        return not plugin.server.is_watched and now - since > _LISTEN_S

    # ---- what others see -------------------------------------------------------------------------

    def _write_status(self, *, has_kubelet: bool) -> None:
        offered = {name: self._plugins[name] for name in self._offered}
        status = FrontStatus(
            pid=os.getpid(),
            version=__version__,
            is_spawned=self._is_spawned,
            is_ready=has_kubelet
            and self._offer_read is not None
            and all(
                plugin.is_served and (self._has_lock or plugin.is_detached)
                for plugin in offered.values()
            ),
            resources={
                name: ResourceStatus(
                    is_registered=plugin.is_served,
                    registered=plugin.registered,
                    failed=plugin.failed,
                    problem=plugin.problem,
                )
                for name, plugin in offered.items()
            },
        )
        if status == self._status and (self._state / STATUS).exists():
            return
        with contextlib.suppress(OSError):  # tried again at the next look
            atomic_write(self._state / STATUS, msgspec.json.encode(status), mode=0o600)
            if self._ready_file is not None and status.is_ready:
                self._ready_file.touch()
            elif self._ready_file is not None:
                self._ready_file.unlink(missing_ok=True)
            self._status = status


_SYSTEMD: Final = "NOTIFY_SOCKET"
"""The variable by which systemd names its socket to a service."""


def _notify_systemd() -> None:
    """Let systemd start the kubelet, which must find a front that watches its folder."""
    name = os.environ.pop(_SYSTEMD, None)
    if name is not None:
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as one:
            one.sendto(b"READY=1", f"\0{name[1:]}" if name.startswith("@") else name)


def read_status(state: Path) -> FrontStatus:
    """Return what the serving front wrote last; an empty status if it wrote none."""
    try:
        return msgspec.json.decode((state / STATUS).read_bytes(), type=prepared(FrontStatus))
    except (OSError, msgspec.DecodeError):
        return FrontStatus()


def _answers(path: Path) -> bool:
    """Return whether a process listens at a socket."""
    with socket.socket(socket.AF_UNIX) as client:
        client.setblocking(False)  # a full queue answers, too
        return client.connect_ex(str(path)) not in {errno.ECONNREFUSED, errno.ENOENT}


_APPEARS_OR_LEAVES: Final = 0x100 | 0x80 | 0x200  # IN_CREATE, IN_MOVED_TO, IN_DELETE
_READ: Final = 64 * 1024


class _FolderWatch:
    """Calls `notify` when a file appears in a folder or leaves it.

    A kubelet that starts admits its pods some milliseconds after its socket is there.
    """

    def __init__(self, folder: Path, notify: Callable[[], None]) -> None:
        self._folder = os.fsencode(folder)
        self._notify = notify
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._queue = -1

    def renew(self) -> str | None:
        """Watch the folder, also one that was made again; return why the kernel refuses."""
        if self._queue < 0:
            self._queue = self._libc.inotify_init1(os.O_CLOEXEC | os.O_NONBLOCK)
            if self._queue < 0:
                return os.strerror(ctypes.get_errno())
            asyncio.get_running_loop().add_reader(self._queue, self._read)
        if self._libc.inotify_add_watch(self._queue, self._folder, _APPEARS_OR_LEAVES) < 0:
            return os.strerror(ctypes.get_errno())
        return None

    def _read(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._queue, _READ)
        self._notify()

    def close(self) -> None:
        if self._queue >= 0:
            asyncio.get_running_loop().remove_reader(self._queue)
            os.close(self._queue)


def run(front: Front) -> None:
    """Run a front until SIGTERM or SIGINT."""
    asyncio.run(_until_signal(front))


async def _until_signal(front: Front) -> None:
    task = asyncio.create_task(front.run())
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    with contextlib.suppress(asyncio.CancelledError):
        await task
