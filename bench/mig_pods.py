# SPDX-License-Identifier: Apache-2.0
"""What a pod's start waits for beside the driver, where its slice is cut for it.

    python bench/mig_pods.py [--samples 30]

The node agent's own parts in one process, on simulated GPUs: from the kubelet's question
(`PreStartContainer`) to the share and its CDI spec being there, less what the driver took to make
the instances. The kubelet, the API server and gRPC are not in it (`node_agent.py` has these).
"""

import argparse
import asyncio
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "tests" / "twins"))

from mig_node import SMALL, Node, asking, at  # noqa: E402 - found by the line above

from allotment.devices.mig import GpuMig  # noqa: E402

MAKING = ("create_gpu_instance", "create_compute_instance", "set_mode")


class DriverTime:
    """Seconds in the driver's calls that make slices, all threads together."""

    def __init__(self) -> None:
        self.spent_s = 0.0
        self._lock = threading.Lock()
        for name in MAKING:
            setattr(GpuMig, name, self._timed(getattr(GpuMig, name)))

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
    """Start pods one after the other, each on a fresh slice; seconds without the driver's, with."""
    # Somebody has a slice all the time, so that the GPU stays in MIG mode.
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
        whole.append(took)
        ours.append(took - (driver.spent_s - before))
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


def _shown(values: list[float]) -> str:
    ordered = sorted(values)
    last = ordered[min(len(ordered) - 1, round(0.99 * len(ordered)))]
    return f"p50 {statistics.median(ordered) * 1e3:.0f} ms, p99 {last * 1e3:.0f} ms"


def main() -> None:
    """Measure, and print two lines."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=30)
    samples = parser.parse_args().samples
    with tempfile.TemporaryDirectory() as folder:
        node = Node(Path(folder), "[{mode: mig, mig: {keep: 0s}}]", "h100-80gb")
        ours, whole = asyncio.run(_run(node, samples, DriverTime()))
    print(f"a fresh slice, without the driver's calls that make it: {_shown(ours)}")
    print(f"with them: {_shown(whole)}")


if __name__ == "__main__":
    main()
