# SPDX-License-Identifier: Apache-2.0
"""Builds the agent's parts and runs them until a signal.

The parts meet only here, and share a `NodeState`. An agent that restarts finds everything again: in
the state folder, at the kubelet or at the API server.
"""

import asyncio
import contextlib
import fcntl
import os
import re
import resource
import sys
import threading
import time
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Final

import structlog
from prometheus_client import disable_created_metrics

from allotment import __version__
from allotment.agent.allocation.start_traces import TracedTenants, open_starts
from allotment.agent.allocation.tenants import Tenants
from allotment.agent.config.overlay import overlay
from allotment.agent.config.schema import Config, HealthConfig
from allotment.agent.configuring import AgentSettings, Configuring
from allotment.agent.device_modes import ComputeModes, DeviceModes
from allotment.agent.dra.driver import ResourceDriver
from allotment.agent.dra.drivers import ResourceDrivers
from allotment.agent.evictions import Evictions, note_evicted
from allotment.agent.gpu_users import held_devices
from allotment.agent.health.records import Memory
from allotment.agent.health.watching import HealthWatch
from allotment.agent.health.xids import policy_of
from allotment.agent.inventory import GpuWatch
from allotment.agent.inventory_publisher import InventoryPublisher
from allotment.agent.kubelet.checkpoint import KubeletCheckpoint
from allotment.agent.labels.publisher import Inputs, Publisher
from allotment.agent.latency_tuning import freeze_startup_objects, tune_latency
from allotment.agent.maintenance import Maintenance
from allotment.agent.mig.slices import NodeSlices
from allotment.agent.mig.strategy import inherited
from allotment.agent.mps_keeping import MpsKeeping
from allotment.agent.node_state import NodeState
from allotment.agent.offering import Offering
from allotment.agent.plugin.allocate_response import AllocateAnswers
from allotment.agent.plugin.front_keeping import Duties, FrontKeeping
from allotment.agent.reports import AgentReports
from allotment.agent.resources import GPU_COMPUTE, GPU_MEMORY
from allotment.agent.shutdown import Shutdown
from allotment.agent.usage import PATIENCE_S, UseReader, shares_in
from allotment.devices.facts import FactReader
from allotment.devices.simulated import machine_path, parse_spec
from allotment.devices.timeslices import set_time_slice
from allotment.devices.topology import read_links
from allotment.kube.clients import Api, connect
from allotment.kube.events import Events
from allotment.kube.nodes import NodePods, OwnNode
from allotment.kube.quotas import FollowedConfigMap
from allotment.metrics import start_log
from allotment.metrics.agent import AgentMetrics
from allotment.metrics.aliases import ALIASES
from allotment.metrics.serving import Probes, Server
from allotment.metrics.use import Aliases, UseMetrics
from allotment.model.addresses import parse_address
from allotment.model.errors import AllotError, NoDevicesError, UsageError
from allotment.model.pods import Owner
from allotment.model.reported import Reported
from allotment.model.shares import Injection
from allotment.modes.mig.journal import without_own
from allotment.shares.folders import StateFolder
from allotment.shares.monitors import Monitors
from allotment.shares.placing import ShareOrder
from allotment.shares.pods import NodeFolders, NodePolicy, PodShares
from allotment.shares.process_tree import unseen_processes

_log = structlog.get_logger("allotment.agent")

_PRIVATE: Final = 0o700
_LOCK: Final = "agent.lock"
"""In the state folder; held while an agent works."""
_BEAT_S: Final = 1.0
_HANGS_S: Final = 30.0
"""The liveness probe fails when the event loop has hung for this long."""
_FIGURES_S: Final = 15.0
_GOODBYE_S: Final = 2.0
_NODE_NAME: Final = re.compile(
    r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?(\.[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?)*"
)
"""RFC 1123, as the API server checks it."""
_MOST_NAME: Final = 253
_OPEN_FILES: Final = 65_536
_WORKER: Final = "agent-worker"
_WORKERS: Final = (_WORKER, "tenancy")


def run(settings: AgentSettings) -> None:
    """Run the agent until SIGTERM or SIGINT. Raises `AllotError` if it cannot start."""
    _check(settings)
    start_log(as_json=settings.log_format == "json", is_verbose=settings.verbose)
    # The creation time of each series would double the output.
    disable_created_metrics()  # type: ignore[no-untyped-call]
    tune_latency()
    _allow_open_files()
    ending = Shutdown()
    ending.listen()
    try:
        asyncio.run(_main(settings, ending))
    except* AllotError as group:
        raise _first(group) from None
    finally:
        ending.begin()  # the interpreter's exit waits for threads, too


def _allow_open_files() -> None:
    """Allow more open files than the usual 1024: those of every share stay open (`KeptFiles`)."""
    few, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(few, min(most, _OPEN_FILES)), most))


def _check(settings: AgentSettings) -> None:
    """Raise `UsageError` for settings that are wrong in themselves."""
    overlay(options=settings.options, environment=settings.environment)
    if len(settings.node) > _MOST_NAME or not _NODE_NAME.fullmatch(settings.node):
        raise UsageError(
            f"{settings.node!r} is not a valid name of a Kubernetes node",
            hint="it has only lowercase letters, digits, `-` and `.`, and begins and ends with a"
            " letter or digit; see `kubectl get nodes`, and set --node-name (NODE_NAME)",
        )
    if settings.simulated:
        parse_spec(settings.simulated)
    if settings.metrics_address is not None:
        parse_address(settings.metrics_address)
    if settings.config_file is not None and settings.config_map is not None:
        raise UsageError(
            f"two configurations: file {settings.config_file} and ConfigMap {settings.config_map}",
            hint="leave out --config-file (CONFIG_FILE) or --config-map (CONFIG_MAP)",
        )


def _first(group: BaseExceptionGroup[AllotError]) -> AllotError:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, AllotError)  # noqa: S101 - `except*` guarantees it
    return error


async def _main(settings: AgentSettings, ending: Shutdown) -> None:
    # The loop waits at its end for threads of its default executor.
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
    """Exit at once if a thread hangs in a driver or a file system: Python would wait for it."""
    deadline = time.monotonic() + _GOODBYE_S
    while stuck := [thread for thread in threading.enumerate() if thread.name.startswith(_WORKERS)]:
        if time.monotonic() > deadline:
            _log.warning("exiting with hung threads", threads=len(stuck))
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
        self._state = state = NodeState()
        self._configuring = Configuring(
            settings,
            folder=folder.root,
            state=state,
            reports=self._reports,
            node=self._node,
            config_map=self._config_map,
        )
        self._gpus = GpuWatch(
            machine=self._machine,
            offerable=partial(without_own, folder.mig),
            expected=self._expected_gpus,
        )
        self._health = HealthWatch(
            gpus=self._gpus,
            policy=policy_of(Config().allotment.health, settings.environment),
            reports=self._reports,
            owners=self._owners,
            memory=Memory(folder.root),
        )
        use = UseReader(
            node=settings.node,
            gpus=self._gpus,
            state=state,
            shares=shares_in(folder, self._machine),
            pods=self._pods.all,
            held=held_devices(settings.pod_resources, patience_s=PATIENCE_S),
            shows_processes=lambda: (state.config or Config()).allotment.has_process_metrics,
        )
        self._use = UseMetrics(use.read, self._aliases)
        self._modes = DeviceModes(folder, state=state, node=self._node, reports=self._reports)
        self._offering = Offering(
            state=state,
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
        self._answers = AllocateAnswers(
            settings.cdi,
            cdi_folder=settings.cdi_folder,
            node=self._node,
            state=state,
            shares=self._shares,
            reports=self._reports,
            is_simulated=self._machine is not None,
        )
        self._maintenance = Maintenance(
            machine=self._machine,
            cdi_folder=settings.cdi_folder,
            state=state,
            shares=self._shares,
            reports=self._reports,
            pod=self._pods.get,
        )
        self._slices = NodeSlices(
            folder,
            machine=self._machine,
            state=state,
            shares=lambda: self._tenants.shares,
            reports=self._reports,
        )
        self._compute_modes = ComputeModes(folder, state=state, machine=self._machine)
        self._evictions = Evictions(
            pods=self._pods,
            reports=self._reports,
            sick=lambda: self._health.to_evict(self._health_config().evict),
            after_s=lambda: self._health_config().evict_after_s,
            owners=self._owners,
            on_due=state.renew_evicted,
            on_evicted=lambda pod, why: note_evicted(folder, self._tenants.shares, pod, why),
        )
        self._mps = MpsKeeping(folder, reports=self._reports, machine=self._machine)
        checkpoint = KubeletCheckpoint(settings.checkpoint)
        starts = self._starts = open_starts(
            settings,
            folder=folder,
            pods=self._pods,
            checkpoint=checkpoint,
            shares=lambda: self._tenants.shares,
        )
        self._tenants = (Tenants if starts is None else partial(TracedTenants, starts))(
            checkpoint=checkpoint,
            pods=self._pods,
            offer=lambda: state.offer,
            reports=self._reports,
            store=self._shares,
            policy=self._policy_for,
            evictions=self._evictions,
            ready=self._mps.ready,
            clear=self._slices.clear,
            on_resized=state.renew_resizes,
            renew=self._renew_checkpoint,
        )
        self._front = FrontKeeping(
            kubelet=settings.kubelet_socket,
            state=folder.root,
            starts_front=settings.starts_front,
            duties=Duties(
                offered=self._answers.offered,
                pre_start=self._tenants.pre_start,
                reports=self._reports,
                links=lambda: state.links.scores,
                policy=self._policy,
                modes=self._tenants.modes,
                allocated=starts.allocated if starts is not None else None,
            ),
            checkpoint=checkpoint,
        )
        self._facts = FactReader(machine=self._machine)
        monitors = Monitors(folder, cdi_folder=settings.cdi_folder, sight=self._shares.sight)
        self._drivers = ResourceDrivers(
            lambda driver: ResourceDriver(
                api,
                driver=driver,
                node=self._node,
                name=settings.node,
                state=state,
                tenants=self._tenants,
                pods=self._pods,
                monitors=monitors,
                reports=self._reports,
                facts=self._facts.read,
                set_time_slice=partial(set_time_slice, machine=self._machine),
                kubelet=settings.kubelet_socket.parent.parent,
            ),
            name=lambda: state.config.allotment.driver_name if state.config else None,
            monitors=lambda: monitors.owners().values(),
        )
        self._inventory = InventoryPublisher(
            folder,
            state=state,
            node=self._node,
            pods=self._pods,
            reports=self._reports,
            on_shares=self._drivers.offer,
        )
        self._publisher = Publisher(inputs=self._inputs, node=self._node, reports=self._reports)
        self._beat = time.monotonic()
        self._is_serving = False
        self._stands_by = False
        self._unseen: str | None = None
        """Why the processes of containers are not visible."""
        self._lock = os.open(folder.root / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def _policy_for(self, order: ShareOrder) -> NodePolicy:
        """Return the policy for an order; called in threads."""
        mode = order.request.mode
        is_open = not order.devices and order.injection is not Injection.NONE
        return NodePolicy(
            devices=tuple(map(self._slices.as_it_is, self._state.devices.values())),
            injection=self._answers.injection(mode),
            problems=tuple(each for each in self._gpus.current.problems if each.device is None),
            unhealthy=self._state.unusable,
            cordoned=self._state.cordoned,
            kept=self._state.reserved_whole(),
            unfit=self._mps.unfit(mode, order.candidates or ()) if is_open else {},
            mig=self._slices.terms(),
        )

    async def run(self) -> None:
        """Run all loops until cancelled, or until one of them cannot go on."""
        settings = self._settings
        _log.info("starting", version=__version__, node=settings.node, state=str(self._root))
        server = None
        if settings.metrics_address is not None:
            probes = Probes(is_healthy=self._liveness_problems, is_ready=self._readiness_problems)
            registry = self._metrics.registry
            server = Server(settings.metrics_address, registry, probes, self._use.text)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._turn())
                await self._be_alone()
                self._unseen = await asyncio.to_thread(unseen_processes)
                if self._unseen is not None:
                    _log.warning("processes of containers are not visible", why=self._unseen)
                await asyncio.to_thread(self._shares.tidy)
                await self._tenants.adopt()
                for loop in (
                    self._node.run,
                    self._pods.run,
                    self._events.run,
                    self._configuring.run,
                    self._gpus.run,
                    self._health.run,
                    self._offering.run,
                    self._follow_config,
                    self._follow_offer,
                    self._find_node,
                    self._insist_on_gpus,
                    self._maintenance.run,
                    self._inventory.run,
                    self._compute_modes.run,
                    self._modes.run,
                    self._slices.run,
                    self._mps.run,
                    self._evictions.run,
                    self._show_figures,
                    self._serve,
                ):
                    group.create_task(loop())
                for part in (self._config_map, self._starts):
                    if part is not None:
                        group.create_task(part.run())
        finally:
            if server is not None:
                server.close()
            await self._tenants.close()
            await asyncio.to_thread(self._mps.close)
            self._facts.close()
            if self._starts is not None:
                await self._starts.close()
            os.close(self._lock)  # nothing changes the node after this: the next agent begins
            self._reports.send_all()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_GOODBYE_S):
                    await self._events.flush(timeout_s=_GOODBYE_S / 2)

    async def _be_alone(self) -> None:
        """Wait until no other agent uses this state folder: upgrades may overlap."""
        reported = Reported[str]()
        while True:
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                self._stands_by = True
                if reported.is_new("other agent"):
                    _log.warning("another agent runs on this node: waiting until it has ended")
                await asyncio.sleep(_BEAT_S / 4)
            else:
                self._stands_by = False
                return

    async def _serve(self) -> None:
        """Serve the kubelet, once GPUs and container runtime are known."""
        await self._gpus.first_look()
        await self._answers.wait_for_runtime()
        freeze_startup_objects()
        async with asyncio.TaskGroup() as group:
            group.create_task(self._follow_links())
            group.create_task(self._front.run())
            group.create_task(self._tenants.run())
            group.create_task(self._publisher.run())
            group.create_task(self._drivers.run())
            self._is_serving = True

    async def _follow_links(self) -> None:
        """Read the links between GPUs, for aligned allocation, again for new GPUs."""
        read: frozenset[str] = frozenset()
        async for inventory in self._gpus.changes():
            usable = [gpu for gpu in inventory.devices if gpu.uuid not in self._state.unusable]
            uuids = frozenset(gpu.uuid for gpu in usable)
            if uuids <= read or len(uuids) < 2:  # noqa: PLR2004 - a pair
                continue
            read = uuids
            with contextlib.suppress(NoDevicesError):  # allocation works without links
                self._state.links = await asyncio.to_thread(
                    read_links, usable, machine=self._machine
                )
                self._state.changed.notify()

    async def _follow_config(self) -> None:
        async for config in self._configuring.changes():
            health = config.allotment.health
            policy = policy_of(health, self._settings.environment)
            for note in policy.notes:
                _log.warning("health", note=note)
            self._health.reconfigure(policy, auto_recover=health.auto_recover)
            self._publisher.wake()

    async def _follow_offer(self) -> None:
        async for offer in self._state.offers():
            self._front.offer(offer.resources)
            self._publisher.wake()

    async def _find_node(self) -> None:
        """Report a node name that does not exist: nothing else would."""
        reported = Reported[str]()
        name = self._settings.node
        async for _ in self._node.changes():
            for node in reported.new_of([name] if self._is_nowhere() else []):
                _log.warning(
                    "no node of this name exists",
                    node=node,
                    hint="see `kubectl get nodes`, and set --node-name (NODE_NAME)",
                )

    def _is_nowhere(self) -> bool:
        return self._node.is_synced and self._node.current is None

    async def _insist_on_gpus(self) -> None:
        """End the agent if it has no GPUs at its start and `failOnInitError` is on."""
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

    def _renew_checkpoint(self) -> None:
        self._front.relist()

    def _health_config(self) -> HealthConfig:
        return (self._state.config or Config()).allotment.health

    def _aliases(self) -> Collection[Aliases]:
        config = self._state.config or Config()
        return [ALIASES[name] for name in config.allotment.metric_aliases]

    def _policy(self) -> str:
        config = self._state.config or Config()
        return config.plugin.shared_devices_allocation_policy

    def _expected_gpus(self) -> Collection[str]:
        """Return the GPUs that a former agent saw: they may be lost since."""
        devices = (device for share in self._tenants.shares for device in share.devices)
        return {*self._health.remembered, *(device.driver_uuid for device in devices)}

    def _owners(self, uuid: str) -> Sequence[Owner]:
        uuids = {uuid, *inherited({uuid: ""}, tuple(self._state.devices.values()))}
        return [
            share.owner
            for share in self._tenants.shares
            if share.owner is not None
            and any(uuids & {device.uuid, device.driver_uuid} for device in share.devices)
        ]

    async def _inputs(self) -> Inputs:
        config = self._state.config
        if config is None:
            raise NoDevicesError("no configuration yet: the labels stay as they are")
        facts = await asyncio.to_thread(self._facts.read)
        return Inputs(facts=facts, offer=self._state.offer, config=config)

    # ---- probes, in threads of their own ----

    def _liveness_problems(self) -> Sequence[str]:
        for_s = time.monotonic() - self._beat
        return [f"the event loop has hung for {for_s:.0f} s"] if for_s > _HANGS_S else []

    def _readiness_problems(self) -> Sequence[str]:
        if self._stands_by:
            return []  # a rolling upgrade ends the other agent once this one is ready
        missing = []
        if not self._is_serving:
            missing.append("starting")
        if self._is_nowhere():
            missing.append(f"no node {self._settings.node!r} exists: see --node-name")
        missing += [each for each in (self._answers.problem, self._unseen) if each is not None]
        if self._state.config is None:
            problem = self._configuring.problem
            missing.append(f"no configuration: {problem.message if problem else 'none received'}")
        config = self._state.config
        if self._gpus.problem and (config is None or config.fail_on_init_error):
            missing.append(f"GPUs: {self._gpus.problem}")
        if self._is_serving and self._front.problem is not None:
            missing.append(self._front.problem)
        missing += [
            f"{name} is not registered at the kubelet"
            for name, is_registered in self._front.registered.items()
            if not is_registered
        ]
        return missing
