# SPDX-License-Identifier: Apache-2.0
"""What a pod's start waits for beside the driver, where its slice is cut for it.

The node agent's own parts in one process, on simulated GPUs: from the kubelet's question
(`PreStartContainer`) to the share and its CDI spec being there, less what the driver took to make
the instances. The kubelet, the API server and gRPC are not in it (`slice-pods` has these).
"""

from __future__ import annotations

import asyncio
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mig_node import SMALL, Node, asking, at

from allotment.devices.mig import GpuMig
from bench.harness.options import Options
from bench.harness.quantiles import summarize
from bench.harness.results import Result
from bench.harness.runner import NoRig

MAKING = ("create_gpu_instance", "create_compute_instance", "set_mode")


class DriverTime:
    """Seconds in the driver's calls that make slices, all threads together."""

    def __init__(self) -> None:
        self.spent_s = 0.0
        self._lock = threading.Lock()

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count the calls within the block."""
        original = {name: getattr(GpuMig, name) for name in MAKING}
        for name, call in original.items():
            setattr(GpuMig, name, self._timed(call))
        try:
            yield
        finally:
            for name, call in original.items():
                setattr(GpuMig, name, call)

    def _timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: object, **named: object) -> object:
            began = time.perf_counter()
            try:
                return call(*arguments, **named)
            finally:
                with self._lock:
                    self.spent_s += time.perf_counter() - began

        return timed


async def measured(node: Node, samples: int, driver: DriverTime) -> tuple[list[float], list[float]]:
    """Start pods on fresh slices; return milliseconds without the driver's calls, and with them."""
    # One slice stays all the time, so that the GPU stays in MIG mode.
    stays = node.admit("stays", asking(), annotations=at((node.uuids[0], SMALL, 6)))
    assert await node.start(stays) == ""
    ours, whole = [], []
    for number in range(samples):
        place = at((node.uuids[0], SMALL, number % 6))
        pod = node.admit(f"p{number}", asking(), annotations=place)
        before = driver.spent_s
        began = time.perf_counter()
        assert await node.start(pod) == ""
        took = time.perf_counter() - began
        whole.append(1000 * took)
        ours.append(1000 * (took - (driver.spent_s - before)))
        node.remove(pod)
        await node.until(lambda: len(node.there()) == 1, "its slice is gone")
    return ours, whole


async def _run(node: Node, samples: int, driver: DriverTime) -> tuple[list[float], list[float]]:
    await node.tenants.adopt()
    loops = [asyncio.create_task(node.tenants.run()), asyncio.create_task(node.slices.run())]
    try:
        return await measured(node, samples, driver)
    finally:
        for each in loops:
            each.cancel()
        await asyncio.gather(*loops, return_exceptions=True)
        await node.tenants.close()


def slice_start(_rig: NoRig, options: Options) -> Iterator[Result]:
    """Start pods one after the other, each on a fresh slice."""
    samples = options.samples or options.pick(30, 3)
    with tempfile.TemporaryDirectory() as folder:
        node = Node(Path(folder), "[{mode: mig, mig: {keep: 0s}}]", "h100-80gb")
        driver = DriverTime()
        with driver.counted():
            ours, whole = asyncio.run(_run(node, samples, driver))
    yield Result(
        name="a fresh slice, without the driver's calls that create it: p99",
        unit="ms",
        value=summarize(ours).p99,
        summary=summarize(ours),
        base=summarize(whole),
        samples=samples,
        method="pods one after the other; from the kubelet's question to the share and its CDI"
        " spec; p50 / p99",
    )
