# SPDX-License-Identifier: Apache-2.0
"""Follows the configuration's sources: a file, a ConfigMap or folder, the node's label, flags.

The state folder keeps the last good text of a ConfigMap. An agent that starts without the API
server uses it: it must not hand out whole GPUs on a node that shares them.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

import msgspec
import structlog

from allotment.agent.config.holder import ConfigHolder, ConfigOutcome, choice_rules
from allotment.agent.config.overlay import given_value
from allotment.agent.config.parsing import MAX_TEXT
from allotment.agent.config.schema import Config
from allotment.agent.kubelet import podresources
from allotment.agent.node_state import NodeState
from allotment.agent.protocols import Reports
from allotment.files import atomic_write
from allotment.kube.nodes import OwnNode
from allotment.kube.quotas import FollowedConfigMap
from allotment.kube.watching import Signal
from allotment.model.errors import AllotError, NotFoundError, StateError, UsageError

_T = TypeVar("_T")

PERIOD_S: Final = 0.5
PATIENCE_S: Final = 10.0
"""For one read: a missing network file system may block for ever."""
_HIDDEN: Final = ".."
"""The prefix of the kubelet's own files: `..data`, `..2026_11_21_18_00_00.123`."""


def watch_file(
    path: Path, *, period_s: float = PERIOD_S, patience_s: float = PATIENCE_S
) -> AsyncIterator[str | AllotError]:
    """Yield the file's text now and at each change; an error once while it cannot be read."""
    return _watched(lambda: _read(path), path, period_s, patience_s)


def watch_folder(
    path: Path, *, period_s: float = PERIOD_S, patience_s: float = PATIENCE_S
) -> AsyncIterator[Mapping[str, str] | AllotError]:
    """Yield the texts of the folder's files by name, likewise."""
    return _watched(lambda: _read_all(path), path, period_s, patience_s)


async def _watched(
    read: Callable[[], _T], path: Path, period_s: float, patience_s: float
) -> AsyncIterator[_T | AllotError]:
    last: object = None
    reading: asyncio.Task[_T] | None = None
    try:
        while True:
            # A read that hangs is awaited again; no second one starts beside it.
            reading = reading or asyncio.create_task(asyncio.to_thread(read))
            value: _T | AllotError
            await asyncio.wait({reading}, timeout=patience_s)
            if reading.done():
                value = _outcome(reading)
                reading = None
            else:
                value = StateError(f"{path}: no answer within {patience_s:.0f} s", hint=_MOUNTED)
            key = (type(value), str(value)) if isinstance(value, AllotError) else value
            if key != last:
                last = key
                yield value
            await asyncio.sleep(period_s)
    finally:
        if reading is not None:
            reading.cancel()


def _outcome(reading: asyncio.Task[_T]) -> _T | AllotError:
    try:
        return reading.result()
    except AllotError as error:
        return error


_MOUNTED: Final = (
    "name the file by --config-file (CONFIG_FILE); in a container, see that it is mounted there"
)


def _read(path: Path) -> str:
    try:
        with path.open("rb") as file:
            raw = file.read(4 * MAX_TEXT + 1)
    except FileNotFoundError as error:
        raise NotFoundError(
            f"error opening config file: {path} does not exist", hint=_MOUNTED
        ) from error
    except OSError as error:
        raise StateError(
            f"error opening config file: {path}: {error.strerror}", hint=_MOUNTED
        ) from error
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: it is not UTF-8 (byte {error.start})") from error


def _read_all(path: Path) -> Mapping[str, str]:
    try:
        files = sorted(each for each in path.iterdir() if not each.name.startswith(_HIDDEN))
    except OSError as error:
        raise StateError(
            f"error reading directory: {path}: {error.strerror}", hint=_MOUNTED
        ) from error
    return {each.name: _read(each) for each in files if each.is_file()}


PLUGIN_FOLDER = Path("/var/lib/kubelet/device-plugins")
"""Compiled into the kubelet (pkg/kubelet/apis/deviceplugin/v1beta1/constants.go)."""
KUBELET_SOCKET = PLUGIN_FOLDER / "kubelet.sock"
CHECKPOINT = "kubelet_internal_checkpoint"
"""In the plugin folder (pkg/kubelet/cm/devicemanager/types.go)."""


class CdiUse(StrEnum):
    """Whether containers get their shares as CDI devices."""

    AUTO = "auto"
    """If the node's runtime has CDI on by default."""
    ON = "on"
    OFF = "off"


class ConfigMapName(msgspec.Struct, frozen=True):
    """A ConfigMap with named configurations."""

    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


class AgentSettings(msgspec.Struct, frozen=True, kw_only=True):
    """`allot agent`'s own options, and the sources of NVIDIA's."""

    node: str
    kubeconfig: Path | None = None
    """None: the pod's service account."""
    state: Path | None = None
    simulated: str | None = None
    cdi: CdiUse = CdiUse.AUTO
    cdi_folder: Path = Path("/var/run/cdi")
    kubelet_socket: Path = KUBELET_SOCKET
    starts_front: bool = True
    """Start a front if none runs (`plugin.front_keeping`)."""
    config_file: Path | None = None
    config_map: ConfigMapName | None = None
    default_config: str | None = None
    """The configuration of a node without the label."""
    metrics_address: str | None = "127.0.0.1:9446"
    """None: no HTTP server."""
    options: Mapping[str, object] = msgspec.field(default_factory=dict)
    """NVIDIA's flags as given, by name."""
    environment: Mapping[str, str] = msgspec.field(default_factory=dict)
    otlp_endpoint: str | None = None
    """The collector of traces; None: as OpenTelemetry's variables say."""
    log_format: str = "text"
    verbose: bool = False

    @property
    def plugin_folder(self) -> Path:
        """The folder of the kubelet's socket, and of plugins' sockets."""
        return self.kubelet_socket.parent

    @property
    def pod_resources(self) -> Path:
        """The socket of the kubelet's podresources API."""
        return self.plugin_folder.parent / podresources.SOCKET

    @property
    def checkpoint(self) -> Path:
        """The kubelet's record of the allocated ids."""
        return self.plugin_folder / CHECKPOINT


_log = structlog.get_logger("allotment.agent")

_KEPT: Final = "config.yaml"
"""The last text in force, in the state folder."""
_API_WAIT_S: Final = 5.0
"""How long the agent waits for the ConfigMap before it uses the kept text."""


class Configuring:
    """Keeps `NodeState.config` up to date while `run` runs."""

    def __init__(
        self,
        settings: AgentSettings,
        *,
        folder: Path,
        state: NodeState,
        reports: Reports,
        node: OwnNode,
        config_map: FollowedConfigMap | None,
    ) -> None:
        """Raises `UsageError` for invalid flags."""
        options, environment = settings.options, settings.environment
        self._settings = settings
        self._kept = folder / _KEPT
        self._state = state
        self._reports = reports
        self._node = node
        self._config_map = config_map
        self._folder = str(
            given_value("config-file-srcdir", options=options, environment=environment) or ""
        )
        self._rules = choice_rules(
            default=settings.default_config, options=options, environment=environment
        )
        self._holder = ConfigHolder(
            options=options,
            environment=environment,
            rules=self._rules,
            source=f"ConfigMap {settings.config_map}" if settings.config_map else self._folder,
        )
        self._signal = Signal()
        self._was_invalid = False

    @property
    def problem(self) -> AllotError | None:
        """The error of the latest configuration."""
        return self._holder.problem

    async def changes(self) -> AsyncIterator[Config]:
        """Yield the configuration as soon as it is known, and at each change."""
        last = None
        async for _ in self._signal.changes():
            config = self._state.config
            if config is not None and config is not last:
                last = config
                yield config

    async def run(self) -> None:
        """Follow the sources until cancelled.

        Raises `AllotError` if flags alone are the configuration, and contradict one another.
        """
        if self._settings.config_file is not None:
            path = self._settings.config_file
            await self._follow(watch_file(path), partial(self._holder.file_changed, path=str(path)))
        elif self._config_map is not None or self._folder:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._follow(self._data(), self._holder.data_changed))
                group.create_task(self._follow_label())
                group.create_task(self._fall_back())
        else:
            outcome = self._holder.start()
            if outcome.problem is not None:
                raise outcome.problem
            self._take(outcome)

    async def _follow(
        self,
        source: AsyncIterator[_T | AllotError],
        changed: Callable[[_T], ConfigOutcome],
    ) -> None:
        async for value in source:
            if isinstance(value, AllotError):
                self._take(self._holder.failed(value))
            else:
                self._take(changed(value))

    def _data(self) -> AsyncIterator[Mapping[str, str] | AllotError | None]:
        """Follow the named configurations: of the ConfigMap, or of a folder."""
        if self._config_map is not None:
            return self._config_map.values()
        return watch_folder(Path(self._folder))

    async def _follow_label(self) -> None:
        async for _ in self._node.changes():
            if self._node.is_synced:
                node = self._node.current
                label = node.labels.get(self._rules.label) if node is not None else None
                self._take(self._holder.label_changed(label))

    async def _fall_back(self) -> None:
        """Use the kept text if no source answers in time."""
        await asyncio.sleep(_API_WAIT_S)
        if self._state.config is not None or self.problem is not None:
            return
        try:
            text = await asyncio.to_thread(self._kept.read_text, "utf-8")
        except OSError:
            return
        self._take(self._holder.file_changed(text, path=f"{self._kept} (last in force)"))

    def _take(self, outcome: ConfigOutcome) -> None:
        if outcome.config is not None:
            self._state.config = outcome.config
            self._reports.count("config_loads", result="applied")
            _log.info("configuration in force", source=outcome.config.source)
            if self._was_invalid:
                self._was_invalid = False
                self._reports.node(
                    "ConfigApplied", f"{outcome.config.source} is in force", is_warning=False
                )
            for note in outcome.config.notes:
                _log.warning("configuration", note=note)
            self._keep()
            self._signal.notify()
        if outcome.problem is not None and outcome.is_new_problem:
            self._reports.count("config_loads", result="invalid")
            self._was_invalid = True
            effect = (
                "; the previous configuration stays in force"
                if self._state.config
                else "; no GPU is offered until it is corrected"
            )
            problem = AllotError(f"{outcome.problem.message}{effect}", hint=outcome.problem.hint)
            self._reports.node("ConfigInvalid", problem.one_line(), is_warning=True)
        self._reports.gauge("config_valid", 0.0 if self.problem else 1.0)

    def _keep(self) -> None:
        """Keep the text for the next start; the agent works without it, too."""
        if self._config_map is None:
            return  # sources on this machine need no copy
        with contextlib.suppress(OSError):
            atomic_write(self._kept, self._holder.text)
