# SPDX-License-Identifier: Apache-2.0
"""A PyTorch program that wants all of the GPU: matrix products, one by one or as a CUDA graph.

    torch_load.py --size N --seconds S [--graph NODES] [--phases A-B[,A-B...]]
    torch_load.py --size N --seconds S --rate R

As programs/load.c (and service.c, with --rate): says "ready", starts when stdin ends, and prints
one JSON object with the same names. Work is counted in products. Knows nothing of Allotment.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections import deque
from collections.abc import Callable

import torch

_STEP_NS = 50_000_000
_BATCH_SECONDS = 0.001
_OUTSTANDING = 5


class Load:
    """Products of two square matrices, kept a few milliseconds ahead of the GPU."""

    def __init__(self, size: int, nodes: int) -> None:
        """Make the matrices, warm the library up, and find how many products a batch has."""
        self.left = torch.randn(size, size, device="cuda", dtype=torch.float16)
        self.right = torch.randn(size, size, device="cuda", dtype=torch.float16)
        self.result = torch.empty_like(self.left)
        self.done = 0
        self.progress: list[tuple[int, int]] = []
        self.longest_ns = 0
        for _ in range(3):
            self._product()
        torch.cuda.synchronize()
        self.launch: Callable[[], None]
        if nodes:
            self.launch, self.batch = self._captured(nodes), nodes
        else:
            self.batch = max(1, round(_BATCH_SECONDS / self._seconds()))
            self.launch = self._one_by_one

    def run(self, until_ns: int) -> None:
        """Work until then, and until what is queued has ended."""
        queued: deque[torch.cuda.Event] = deque()
        last_ns = time.monotonic_ns()
        while True:
            more = time.monotonic_ns() < until_ns
            if more:
                self.launch()
                event = torch.cuda.Event(blocking=True)
                event.record()
                queued.append(event)
            if not queued:
                return
            if not more or len(queued) >= _OUTSTANDING:
                queued.popleft().synchronize()
                self.done += self.batch
                last_ns = self._note(last_ns)

    def once(self) -> None:
        """Do one product, and wait for its end."""
        self._product()
        event = torch.cuda.Event(blocking=True)
        event.record()
        event.synchronize()

    def _note(self, last_ns: int) -> int:
        now = time.monotonic_ns()
        self.longest_ns = max(self.longest_ns, now - last_ns)
        if not self.progress or now >= self.progress[-1][0] + _STEP_NS:
            self.progress.append((now, self.done))
        return now

    def _product(self) -> None:
        torch.matmul(self.left, self.right, out=self.result)

    def _one_by_one(self) -> None:
        for _ in range(self.batch):
            self._product()

    def _captured(self, nodes: int) -> Callable[[], None]:
        stream = torch.cuda.Stream()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(nodes):
                self._product()
        graph.replay()
        torch.cuda.synchronize()

        def replay() -> None:
            graph.replay()

        return replay

    def _seconds(self) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(10):
            self._product()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1000 / 10


def sleep_until(time_ns: int) -> None:
    """Sleep until a moment of the monotonic clock."""
    left = time_ns - time.monotonic_ns()
    if left > 0:
        time.sleep(left / 1e9)


def serve(load: Load, began_ns: int, rate: float, seconds: float) -> list[int]:
    """Answer requests by one product each; their latencies, as service.c takes them."""
    latencies = []
    for number in range(int(rate * seconds)):
        came_ns = began_ns + int(number * 1e9 / rate)
        free_ns = time.monotonic_ns()
        sleep_until(came_ns)
        from_ns = came_ns if came_ns < free_ns else time.monotonic_ns()
        load.once()
        latencies.append(time.monotonic_ns() - from_ns)
    return latencies


def main() -> None:
    """Read the command line, wait for the start, work and report."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--size", type=int, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--graph", type=int, default=0)
    parser.add_argument("--phases")
    parser.add_argument("--rate", type=float, default=0)
    chosen = parser.parse_args()
    phases = [(0.0, chosen.seconds)]
    if chosen.phases:
        pairs = (phase.split("-") for phase in chosen.phases.split(","))
        phases = [(float(begin), float(end)) for begin, end in pairs]
    load = Load(chosen.size, chosen.graph)
    print("ready", flush=True)
    sys.stdin.read()
    began_ns = time.monotonic_ns()
    wakes, latencies = [], []
    if chosen.rate:
        latencies = serve(load, began_ns, chosen.rate, chosen.seconds)
    else:
        for begin, end in phases:
            sleep_until(began_ns + int(begin * 1e9))
            wakes.append(time.monotonic_ns())
            load.run(began_ns + int(end * 1e9))
    answer = {
        "pid": os.getpid(),
        "begun_ns": began_ns,
        "ended_ns": time.monotonic_ns(),
        "kernels": load.done,
        "work_ns": load.done,
        "wakes_ns": wakes,
        "latencies_ns": latencies,
        "gap_ns": {"p50": 0, "p99": 0, "max": load.longest_ns},
        "progress": load.progress,
    }
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
