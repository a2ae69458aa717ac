# SPDX-License-Identifier: Apache-2.0
"""What a scrape of the agent's metrics of use costs, with a crowd of shares at work."""

from __future__ import annotations

import asyncio
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from subprocess import PIPE, Popen
from typing import Final

from allotment.agent.inventory import GpuWatch
from allotment.agent.latency_tuning import freeze_startup_objects, tune_latency
from allotment.agent.node_state import NodeState
from allotment.agent.usage import UseReader, shares_in
from allotment.devices.simulated import SimulatedMachine, machine_path
from allotment.metrics.agent import AgentMetrics
from allotment.metrics.aliases import ALIASES
from allotment.metrics.serving import Probes, Server
from allotment.metrics.use import UseMetrics
from allotment.model.compute import Compute
from allotment.model.quantities import parse_memory
from allotment.model.requests import Request
from allotment.model.shares import Injection
from allotment.shares.booking import Bookings
from allotment.shares.folders import StateFolder
from allotment.shares.lifecycle import FrontDoor, create
from allotment.shares.placing import ShareOrder
from bench.harness.options import Options
from bench.harness.programs import bare_environment
from bench.harness.quantiles import quantile
from bench.harness.results import Result
from bench.overhead.rig import ShareRig

_MACHINE: Final = "a100-80gb:16"
_CROWD: Final = 60
_EVERY_S: Final = 15
_MIB: Final = 1 << 20


def scrape(rig: ShareRig, options: Options) -> Iterator[Result]:
    """Scrape over HTTP, in the process that serves: its processor time includes the client's."""
    shares, runs = options.pick(_CROWD, 4), options.pick(40, 3)
    with tempfile.TemporaryDirectory(prefix="allotment-bench-") as work:
        folder = StateFolder(Path(work))
        folder.prepare()
        machine = machine_path(folder.root, _MACHINE)
        with _crowd(rig, folder, machine, shares):
            for aliases in ((), tuple(ALIASES)):
                yield from _results(folder, machine, shares, runs, aliases)


def _results(
    folder: StateFolder, machine: Path, shares: int, runs: int, aliases: tuple[str, ...]
) -> Iterator[Result]:
    walls, times, size = asyncio.run(_scrapes(folder, machine, runs, aliases))
    what = f"{shares} shares, 16 GPUs" + (", with aliases" if aliases else "")
    method = "the whole metrics of use over HTTP; one program in each share"
    yield Result(
        topic="scrapes",
        name=f"a scrape, {what}",
        unit="ms",
        seen=f"{size / 1000:.0f} kB, median {quantile(walls, 0.5):.0f} ms",
        value=min(walls),
        target=50,
        samples=runs,
        method=method + ", by the wall clock; the least",
    )
    yield Result(
        topic="scrapes' cost",
        name=f"scrapes every {_EVERY_S} s, {what}",
        unit="% of a core",
        seen=f"{quantile(times, 0.5):.0f} ms a scrape",
        value=quantile(times, 0.5) / (_EVERY_S * 1000) * 100,
        target=1,
        samples=runs,
        method=method + ", by user and system time of the process, client included; the median",
    )


async def _scrapes(
    folder: StateFolder, machine: Path, runs: int, aliases: tuple[str, ...]
) -> tuple[list[float], list[float], int]:
    """Return wall and processor time of each scrape in ms, and the size of the last."""
    watch = GpuWatch(machine=machine, poll_s=3600)
    task = asyncio.create_task(watch.run())
    found = await watch.first_look()
    reader = UseReader(
        node="node-1",
        gpus=watch,
        state=NodeState(devices={each.uuid: each for each in found.devices}),
        shares=shares_in(folder, machine),
        clock=iter(range(0, 10**9, 100)).__next__,  # each scrape reads
    )
    metrics = AgentMetrics()
    tune_latency()  # as the agent does
    freeze_startup_objects()
    use = UseMetrics(reader.read, lambda: [ALIASES[each] for each in aliases])

    def once(port: int) -> tuple[float, float, int]:
        wall, used = time.perf_counter(), time.process_time()
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
            size = len(answer.read())
        return (time.perf_counter() - wall) * 1e3, (time.process_time() - used) * 1e3, size

    try:
        with Server("127.0.0.1:0", metrics.registry, Probes(), use.text) as server:
            # The first fills caches.
            seen = [await asyncio.to_thread(once, server.port) for _ in range(runs + 1)][1:]
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    return [each[0] for each in seen], [each[1] for each in seen], seen[-1][2]


@contextmanager
def _crowd(rig: ShareRig, folder: StateFolder, machine: Path, count: int) -> Iterator[None]:
    """Make shares with guarantees, and a program with memory in each."""
    devices = SimulatedMachine(machine).devices()
    door = FrontDoor(locked=folder.locked, known_shares=Bookings(folder).read)
    bare = bare_environment(machine)
    with ExitStack() as stack:
        programs = []
        for number in range(count):
            order = ShareOrder(
                request=Request(parse_memory("2Gi"), compute=Compute(1000, is_governed=True)),
                injection=Injection.ENVIRONMENT,
                name=f"share-{number}",
                machine=machine,
            )
            share, _ = create(folder, order, devices, door=door)
            program = Popen(
                rig.program("hold", _MIB),
                env=bare | rig.added(folder.share(share.id)),
                stdin=PIPE,
                stdout=PIPE,
            )
            stack.enter_context(program)
            stack.callback(program.kill)
            programs.append(program)
        for program in programs:
            assert program.stdout is not None
            program.stdout.readline()  # it has its memory
        yield
