# SPDX-License-Identifier: Apache-2.0
"""A machine with many shares at work, whose agent's metrics are served. Without a cluster."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future, wait
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final, TypeVar

from allotment.agent.config.schema import AllotmentConfig, Config
from allotment.agent.inventory import GpuWatch
from allotment.agent.node_state import NodeState
from allotment.agent.usage import UseReader, shares_in
from allotment.cost.prices import prices_of
from allotment.devices.simulated import SimulatedMachine, machine_path
from allotment.libraries import SHIM, library_path
from allotment.metrics.agent import AgentMetrics
from allotment.metrics.aliases import ALIASES
from allotment.metrics.serving import Probes, Server
from allotment.metrics.use import UseMetrics
from allotment.model.compute import Compute
from allotment.model.modes import EXCLUSIVE, SOFT, TIMESLICE
from allotment.model.pods import ContainerKind, Owner, PodUid
from allotment.model.quantities import parse_memory
from allotment.model.requests import Request
from allotment.model.shares import Injection
from allotment.shares.booking import Bookings
from allotment.shares.folders import StateFolder
from allotment.shares.lifecycle import FrontDoor, create
from allotment.shares.placing import ShareOrder

MACHINE: Final = "a100-80gb:16"
NODE: Final = "node-1"
PRICES: Final = prices_of({"a100-80gb": 2.5}, "EUR")
SHARES: Final = 60

T = TypeVar("T")


@contextmanager
def loop_in_a_thread() -> Iterator[Callable[[Coroutine[Any, Any, T]], Future[T]]]:
    """Run coroutines in an event loop of its own until the end of the `with`."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield lambda work: asyncio.run_coroutine_threadsafe(work, loop)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


class Machine:
    """Its state folder, and the shares in it."""

    def __init__(self, work: Path) -> None:
        self.folder = StateFolder(work)
        self.folder.prepare()
        self.path = machine_path(work, MACHINE)
        self.devices = SimulatedMachine(self.path).devices()
        self._door = FrontDoor(locked=self.folder.locked, known_shares=Bookings(self.folder).read)

    def share(self, request: Request, number: int, *, is_claim: bool = False) -> Path:
        """Make the share of a container, or of a claim."""
        owner = Owner(
            uid=PodUid(f"uid-{number}"),
            namespace=f"team-{number % 3}",
            pod=f"train-{number}",
            container="main",
            kind=ContainerKind.REGULAR,
            resource="allotment.dev/gpu",
            is_claim=is_claim,
        )
        order = ShareOrder(
            request=request,
            injection=Injection.ENVIRONMENT,
            machine=self.path,
            owner=owner,
        )
        _, made = create(self.folder, order, self.devices, door=self._door)
        return made

    @contextmanager
    def burning(self, share: Path, *words: str) -> Iterator[subprocess.Popen[bytes]]:
        """Run a program in a share."""
        from bench.harness.programs import bare_environment

        inside = {"LD_PRELOAD": str(library_path(SHIM)), "ALLOTMENT_SHARE": str(share)}
        command = [sys.executable, "-m", "allotment", "burn", "--seconds", "600", *words]
        program = subprocess.Popen(
            command, env=bare_environment(self.path) | inside, stdout=subprocess.DEVNULL
        )
        try:
            yield program
        finally:
            program.terminate()
            program.wait(30)


def _governed(percent: int) -> Compute:
    return Compute(percent * 100, is_governed=True)


@contextmanager
def crowd(machine: Machine) -> Iterator[None]:
    """Sixty shares of five kinds; a program works in three of them."""
    small = Request(parse_memory("2Gi"), compute=_governed(10))
    oversubscribed = Request(parse_memory("60Gi"), compute=_governed(20), may_oversubscribe=True)
    kinds = (
        (small, ("--memory", "1Gi", "--kernel", "1ms", "--rate", "100")),
        (oversubscribed, ("--memory", "3Gi", "--rate", "20")),
        # Of what it asks for, a part is refused.
        (small, ("--memory", "3Gi", "--kernel", "0")),
        # Without a shim the processes of a share are known by their container: there is none here.
        (Request(parse_memory("1Gi"), mode=TIMESLICE), ()),
        (Request(parse_memory("100%"), mode=EXCLUSIVE), ()),
    )
    with ExitStack() as stack:
        for number, (request, words) in enumerate(kinds):
            share = machine.share(request, number, is_claim=number == 2)
            if words:
                stack.enter_context(machine.burning(share, *words))
        for number in range(len(kinds), SHARES):
            machine.share(small, number)
        yield


@contextmanager
def agent(machine: Machine) -> Iterator[tuple[int, AgentMetrics]]:
    """Serve the metrics of the machine's agent, aliases among them; yield the port, too."""
    metrics = AgentMetrics()
    state = NodeState(
        devices={each.uuid: each for each in machine.devices},
        config=Config(allotment=AllotmentConfig(prices=PRICES)),
    )
    with loop_in_a_thread() as run:
        watch = GpuWatch(machine=machine.path, poll_s=3600)
        watching = run(watch.run())
        run(watch.first_look()).result(60)
        reader = UseReader(
            node=NODE, gpus=watch, state=state, shares=shares_in(machine.folder, machine.path)
        )
        use = UseMetrics(reader.read, lambda: list(ALIASES.values()))
        _count_some(metrics)
        try:
            with Server("127.0.0.1:0", metrics.registry, Probes(), use.text) as server:
                yield server.port, metrics
        finally:
            watching.cancel()
            wait([watching], timeout=30)
            run(asyncio.sleep(0)).result(30)


def _count_some(metrics: AgentMetrics) -> None:
    """What an agent counts after its start, and at each container."""
    for what in ("pods", "node"):
        metrics.set("api_synced", 1, what)
    metrics.set("config_valid", 1)
    metrics.set("shares", SHARES, SOFT)
    metrics.set("shares_exceeding", 0)
    metrics.count("shares_made", SOFT, by=SHARES)
    metrics.observe("prepare_seconds", 0.01, "allotment.dev/gpu")
