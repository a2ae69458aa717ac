# SPDX-License-Identifier: Apache-2.0
"""Puts the agent together, and runs it until it is told to end.

Here alone the parts meet: what each needs of another is given to it. Nothing is kept here that
another start would not find again, in the state folder, at the kubelet or at the API server.
"""

import asyncio
import contextlib
import fcntl
import os
import re
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Final

import structlog
from prometheus_client import disable_created_metrics

from allotment import __version__
from allotment.agent.announcing import Announcing
from allotment.agent.answering import Answering
from allotment.agent.compute_modes import ComputeModes
from allotment.agent.config.effective import Config
from allotment.agent.config.overlay import overlay
from allotment.agent.configuring import Configuring
from allotment.agent.device_modes import DeviceModes
from allotment.agent.device_plugin.plugins import DevicePlugins
from allotment.agent.device_plugin.preferred import Links
from allotment.agent.device_plugin.serving import Duties
from allotment.agent.ending import Ending
from allotment.agent.health.actions import policy_of
from allotment.agent.health.memory import Memory
from allotment.agent.health.watching import HealthWatch
from allotment.agent.inventory import GpuWatch
from allotment.agent.kubelet.checkpoint import KubeletCheckpoint
from allotment.agent.labels.publishing import Inputs, Publisher
from allotment.agent.migs import inherited
from allotment.agent.mps_keeping import MpsKeeping
from allotment.agent.offering import Offering
from allotment.agent.promptness import be_prompt, set_start_aside
from allotment.agent.reports import AgentReports
from allotment.agent.resources import GPU_COMPUTE, GPU_MEMORY
from allotment.agent.settings import AgentSettings
from allotment.agent.slices import NodeSlices
from allotment.agent.tenancy.node_shares import NodeShares
from allotment.agent.tenancy.tenants import Tenants
from allotment.agent.upkeep import Upkeep
from allotment.devices.facts import FactReader
from allotment.devices.simulated import machine_path, parse_spec
from allotment.devices.topology import read_pair_scores
from allotment.kube.clients import Api, connect
from allotment.kube.configmaps import FollowedConfigMap
from allotment.kube.events import Events
from allotment.kube.nodes import OwnNode
from allotment.kube.pods import NodePods
from allotment.metrics.agent import AgentMetrics
from allotment.metrics.logs import start_log
from allotment.metrics.serving import Probes, Server, parse_address
from allotment.model.errors import AllotError, NoDevicesError, UsageError
from allotment.model.pods import Owner
from allotment.modes.mig.own_slices import without_own
from allotment.shares.folders import StateFolder
from allotment.shares.pods import NodeFolders, PodShares
from allotment.shares.processes import unseen_processes

__all__ = ["run"]

_log = structlog.get_logger("allotment.agent")

_PRIVATE: Final = 0o700
_BEAT_S: Final = 1.0
_HANGS_S: Final = 30.0
"""A loop that has not turned for so long is not coming back: the probe fails."""
_FIGURES_S: Final = 15.0
_GOODBYE_S: Final = 2.0
_NODE_NAME: Final = re.compile(
    r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?(\.[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?)*"
)
"""RFC 1123, as the API server checks it."""
_MOST_NAME: Final = 253
_LOCK: Final = "agent.lock"
_WORKER: Final = "agent-worker"
_WORKERS: Final = (_WORKER, "tenancy")


def run(settings: AgentSettings) -> None:
    """Run the agent until SIGTERM or SIGINT. Raises `AllotError` where it cannot start."""
    _check(settings)
    start_log(as_json=settings.log_format == "json", is_verbose=settings.verbose)
    # When each series began: as many lines again, and of no use.
    disable_created_metrics()  # type: ignore[no-untyped-call]
    be_prompt()
    ending = Ending()
    ending.listen()
    try:
        asyncio.run(_main(settings, ending))
    except* AllotError as group:
        raise _first(group) from None
    finally:
        ending.begin()  # the interpreter's own end waits for threads, too


def _check(settings: AgentSettings) -> None:
    """Refuse what can be seen to be wrong before anything is started. Raises `UsageError`."""
    overlay(options=settings.options, environment=settings.environment)
    if len(settings.node) > _MOST_NAME or not _NODE_NAME.fullmatch(settings.node):
        raise UsageError(
            f"{settings.node!r} cannot be the name of a Kubernetes node",
            hint="it has lowercase letters, digits, `-` and `.` only, and begins and ends with one"
            " of the first two; see `kubectl get nodes`, and give --node-name (NODE_NAME)",
        )
    if settings.simulated:
        parse_spec(settings.simulated)
    if settings.metrics_address is not None:
        parse_address(settings.metrics_address)
    if settings.config_file is not None and settings.config_map is not None:
        raise UsageError(
            f"the configuration is to be {settings.config_file} and the ConfigMap"
            f" {settings.config_map}: only one of them can be",
            hint="leave out --config-file (CONFIG_FILE) or --config-map (CONFIG_MAP)",
        )


def _first(group: BaseExceptionGroup[AllotError]) -> AllotError:
    """Return the first of the errors that ended the agent."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, AllotError)  # noqa: S101 - `except*` has seen to it
    return error


async def _main(settings: AgentSettings, ending: Ending) -> None:
    # Threads of the loop's own making would be waited for at its end.
    workers = ThreadPoolExecutor(thread_name_prefix=_WORKER)
    asyncio.get_running_loop().set_default_executor(workers)
    api = connect(settings.kubeconfig)
    try:
        agent = _Agent(settings, api)
        task = asyncio.create_task(agent.run())
        waiting = asyncio.create_task(ending.wait())
        await asyncio.wait({task, waiting}, return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        if not task.done():
            _log.info("ending")
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
    finally:
        await api.aclose()
        workers.shutdown(wait=False, cancel_futures=True)
        if ending.has_begun:
            await _leave_hung_threads()


async def _leave_hung_threads() -> None:
    """End the process at once where a thread is stuck in a driver or a file system.

    Python waits for every thread of an executor, and such a one may never come back.
    """
    deadline = time.monotonic() + _GOODBYE_S
    while stuck := [each for each in threading.enumerate() if each.name.startswith(_WORKERS)]:
        if time.monotonic() > deadline:
            _log.warning("left threads that do not answer", threads=len(stuck))
            sys.stderr.flush()
            os._exit(0)
        await asyncio.sleep(0.05)


class _Agent:
    """All parts, for one run."""

    def __init__(self, settings: AgentSettings, api: Api) -> None:
        self._settings = settings
        folder = StateFolder.at(settings.state)
        self._root = folder.root
        folder.prepare(mode=_PRIVATE)
        spec = settings.simulated
        self._machine = machine_path(folder.root, spec) if spec else None
        self._metrics = AgentMetrics()
        self._events = Events(
            api,
            component="allotment-agent",
            node=settings.node,
            on_drop=lambda: self._metrics.count("events_dropped"),
        )
        self._reports = AgentReports(node=settings.node, metrics=self._metrics, events=self._events)
        self._node = OwnNode(api, name=settings.node, owned=frozenset({GPU_MEMORY, GPU_COMPUTE}))
        self._pods = NodePods(api, node=settings.node)
        named = settings.config_map
        self._config_map = (
            FollowedConfigMap(api, namespace=named.namespace, name=named.name) if named else None
        )
        self._configuring = Configuring(
            settings,
            state=folder.root,
            reports=self._reports,
            node=self._node,
            config_map=self._config_map,
        )
        self._gpus = GpuWatch(machine=self._machine, offerable=partial(without_own, folder.mig))
        self._health = HealthWatch(
            gpus=self._gpus,
            policy=policy_of(Config().allotment.health, settings.environment),
            reports=self._reports,
            owners=self._owners,
            memory=Memory(folder.root),
        )
        self._modes = DeviceModes(
            folder,
            node=self._node,
            devices=lambda: self._offering.devices,
            offered=lambda: self._slices.served(self._offering.current),
            reports=self._reports,
        )
        self._offering = Offering(
            modes=self._modes,
            gpus=self._gpus,
            health=self._health,
            configuring=self._configuring,
            node=self._node,
            reports=self._reports,
        )
        self._shares = PodShares(
            folder,
            machine=self._machine,
            spec=spec,
            folders=NodeFolders(cdi=settings.cdi_folder),
        )
        self._answering = Answering(
            settings.cdi,
            cdi_folder=settings.cdi_folder,
            node=self._node,
            configuring=self._configuring,
            offering=self._offering,
            shares=self._shares,
            reports=self._reports,
        )
        self._upkeep = Upkeep(
            machine=self._machine,
            cdi_folder=settings.cdi_folder,
            configuring=self._configuring,
            offering=self._offering,
            shares=self._shares,
            reports=self._reports,
        )
        self._links: Links = {}
        self._slices = NodeSlices(
            folder,
            machine=self._machine,
            offer=lambda: self._offering.current,
            devices=lambda: self._offering.devices,
            links=lambda: self._links,
            shares=lambda: self._tenants.shares,
            reports=self._reports,
        )
        self._compute_modes = ComputeModes(
            folder, machine=self._machine, gpus=lambda: self._offering.current.parted
        )
        self._announcing = Announcing(
            folder,
            slices=self._slices,
            modes=self._modes,
            compute_modes=self._compute_modes,
            offering=self._offering,
            node=self._node,
            pods=self._pods,
            links=lambda: self._links,
            reports=self._reports,
        )
        self._mps = MpsKeeping(folder, reports=self._reports, machine=self._machine)
        checkpoint = KubeletCheckpoint(settings.checkpoint)
        self._tenants = Tenants(
            checkpoint=checkpoint,
            pods=self._pods,
            offer=lambda: self._offering.current,
            reports=self._reports,
            store=NodeShares(
                self._shares,
                devices=lambda: tuple(map(self._slices.as_it_is, self._offering.devices.values())),
                unhealthy=lambda: self._offering.unusable,
                problems=lambda: tuple(
                    each for each in self._gpus.current.problems if each.device is None
                ),
                injection=self._answering.injection,
                cordoned=lambda: self._announcing.cordoned,
                kept=lambda: self._announcing.kept,
                mig=self._slices.terms,
                unfit=self._mps.unfit,
            ),
            respond=self._answering.respond,
            ready=self._mps.ready,
            clear=self._slices.clear,
        )
        self._plugins = DevicePlugins(
            kubelet=settings.kubelet_socket,
            duties=Duties(
                tenancy=self._tenants,
                reports=self._reports,
                links=lambda: self._links,
                policy=self._policy,
            ),
            checkpoint=checkpoint,
        )
        self._facts = FactReader(machine=self._machine)
        self._publisher = Publisher(inputs=self._inputs, node=self._node, reports=self._reports)
        self._offering.followers += [
            lambda offer: self._plugins.offer(offer.resources),
            lambda _: self._publisher.wake(),
        ]
        self._beat = time.monotonic()
        self._is_serving = False
        self._unseen: str | None = None
        """Why this agent could not tell whether a share is still in use."""
        self._lock = os.open(folder.root / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    # ---- what it does ----

    async def run(self) -> None:
        """Run all loops until cancelled, or until one of them cannot go on."""
        settings = self._settings
        _log.info("starting", version=__version__, node=settings.node, state=str(self._root))
        server = None
        if settings.metrics_address is not None:
            probes = Probes(is_healthy=self._amiss, is_ready=self._not_ready)
            server = Server(settings.metrics_address, self._metrics.registry, probes)
        try:
            await self._be_alone()
            self._unseen = await asyncio.to_thread(unseen_processes)
            if self._unseen is not None:
                _log.warning("processes of containers are not seen", why=self._unseen)
            await asyncio.to_thread(self._shares.tidy)
            await self._tenants.adopt()
            async with asyncio.TaskGroup() as group:
                for loop in (
                    self._node.run,
                    self._pods.run,
                    self._events.run,
                    self._configuring.run,
                    self._gpus.run,
                    self._health.run,
                    self._offering.run,
                    self._follow_config,
                    self._find_node,
                    self._insist_on_gpus,
                    self._upkeep.run,
                    self._announcing.run,
                    self._compute_modes.run,
                    self._modes.run,
                    self._slices.run,
                    self._mps.run,
                    self._turn,
                    self._show_figures,
                    self._serve,
                ):
                    group.create_task(loop())
                if self._config_map is not None:
                    group.create_task(self._config_map.run())
        finally:
            os.close(self._lock)
            if server is not None:
                server.close()
            await self._tenants.close()
            await asyncio.to_thread(self._mps.close)
            self._facts.close()
            self._reports.pass_on_all()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_GOODBYE_S):
                    await self._events.flush(timeout_s=_GOODBYE_S / 2)

    async def _be_alone(self) -> None:
        """Wait until no other agent works on this state folder: an upgrade may overlap."""
        has_told = False
        while True:
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if not has_told:
                    has_told = True
                    _log.warning("another agent runs on this node: waiting until it has ended")
                await asyncio.sleep(_BEAT_S / 4)
            else:
                return

    async def _serve(self) -> None:
        """Answer the kubelet, once it is known how."""
        await self._gpus.first_look()
        await self._answering.settle()
        set_start_aside()
        async with asyncio.TaskGroup() as group:
            group.create_task(self._follow_links())
            group.create_task(self._plugins.run())
            group.create_task(self._tenants.run())
            group.create_task(self._publisher.run())
            self._is_serving = True

    async def _follow_links(self) -> None:
        """Read how the GPUs are linked, for aligned allocation, again when there are others."""
        read: frozenset[str] = frozenset()
        async for inventory in self._gpus.changes():
            working = [
                each for each in inventory.devices if each.uuid not in self._offering.unusable
            ]
            found = frozenset(each.uuid for each in working)
            if found <= read or len(found) < 2:  # noqa: PLR2004 - a pair
                continue
            read = found
            with contextlib.suppress(NoDevicesError):  # it goes without where it must
                self._links = await asyncio.to_thread(
                    read_pair_scores, working, machine=self._machine
                )
                self._announcing.wake()

    async def _follow_config(self) -> None:
        async for config in self._configuring.changes():
            health = config.allotment.health
            self._health.reconfigure(
                policy_of(health, self._settings.environment), auto_recover=health.auto_recover
            )
            self._publisher.wake()

    async def _find_node(self) -> None:
        """Say so where there is no node of that name: nothing else would."""
        has_told = False
        async for _ in self._node.changes():
            if self._is_nowhere() and not has_told:
                _log.warning(
                    "there is no node of that name",
                    node=self._settings.node,
                    hint="see `kubectl get nodes`, and name this one by --node-name (NODE_NAME)",
                )
            has_told = self._is_nowhere()

    def _is_nowhere(self) -> bool:
        return self._node.is_synced and self._node.current is None

    async def _insist_on_gpus(self) -> None:
        """End the agent where there are no GPUs at its start and `failOnInitError` is on."""
        await self._gpus.first_look()
        async for config in self._configuring.changes():
            if self._gpus.problem is not None and config.fail_on_init_error:
                raise NoDevicesError(
                    self._gpus.problem,
                    hint="on nodes that may have no GPU: failOnInitError: false",
                )
            return

    async def _turn(self) -> None:
        while True:
            self._beat = time.monotonic()
            await asyncio.sleep(_BEAT_S)

    async def _show_figures(self) -> None:
        while True:
            self._metrics.forget("shares")
            modes = [share.mode for share in self._tenants.shares]
            for mode in set(modes):
                self._reports.gauge("shares", modes.count(mode), mode=mode)
            for what, part in (("pods", self._pods), ("node", self._node)):
                self._reports.gauge("api_synced", float(part.problem is None), what=what)
            await asyncio.sleep(_FIGURES_S)

    # ---- what its parts ask ----

    def _policy(self) -> str:
        config = self._configuring.current or Config()
        return config.plugin.shared_devices_allocation_policy

    def _owners(self, uuid: str) -> Sequence[Owner]:
        there = {uuid, *inherited({uuid: ""}, tuple(self._offering.devices.values()))}
        return [
            share.owner
            for share in self._tenants.shares
            if share.owner is not None
            and any(there & {each.uuid, each.driver_uuid} for each in share.devices)
        ]

    async def _inputs(self) -> Inputs:
        config = self._configuring.current
        if config is None:
            raise NoDevicesError(
                "there is no configuration yet: the labels stay as they are until there is one"
            )
        facts = await asyncio.to_thread(self._facts.read)
        return Inputs(facts=facts, offer=self._offering.current, config=config)

    # ---- probes, in threads of their own ----

    def _amiss(self) -> Sequence[str]:
        for_s = time.monotonic() - self._beat
        return [f"the event loop has hung for {for_s:.0f} s"] if for_s > _HANGS_S else []

    def _not_ready(self) -> Sequence[str]:
        found = []
        if not self._is_serving:
            found.append("starting")
        if self._is_nowhere():
            found.append(f"there is no node {self._settings.node!r}: see --node-name")
        found += [each for each in (self._answering.problem, self._unseen) if each is not None]
        if self._configuring.current is None:
            problem = self._configuring.problem
            found.append(f"no configuration: {problem.message if problem else 'none heard of yet'}")
        config = self._configuring.current
        if self._gpus.problem and (config is None or config.fail_on_init_error):
            found.append(f"GPUs: {self._gpus.problem}")
        if self._is_serving and self._plugins.problem is not None:
            found.append(self._plugins.problem)
        found += [
            f"{name} is not registered at the kubelet"
            for name, is_registered in self._plugins.registered.items()
            if not is_registered
        ]
        return found
