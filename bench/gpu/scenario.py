# SPDX-License-Identifier: Apache-2.0
"""What a PyTorch program does inside a share, one scenario a run: `scenario.py NAME`.

Prints one JSON object. Then waits for a line on stdin with everything still allocated, so that
the caller can look at the process from outside. Knows nothing of Allotment.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any, Final

import torch

MIB: Final = 1 << 20
CHUNK: Final = 64 * MIB
SMALLEST: Final = MIB  # PyTorch takes 2 MiB from the driver for tensors up to this size

kept: list[torch.Tensor] = []


def fill() -> dict[str, Any]:
    """Take tensors until PyTorch raises its out-of-memory error, large ones first."""
    free, total = torch.cuda.mem_get_info()
    refusals = [_fill_with(CHUNK), _fill_with(SMALLEST)]
    left, _ = torch.cuda.mem_get_info()
    return {
        "total_bytes": total,
        "free_bytes": free,
        "device_bytes": torch.cuda.get_device_properties(0).total_memory,
        "got_bytes": sum(each.numel() for each in kept),
        "reserved_bytes": torch.cuda.memory_reserved(),
        "left_bytes": left,
        "refusal": refusals[-1],
    }


def refill() -> dict[str, Any]:
    """Allocate all memory, free it, and allocate again: the second time gets as much."""
    first = fill()
    kept.clear()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    emptied, _ = torch.cuda.mem_get_info()
    second = fill()
    return second | {"first_got_bytes": first["got_bytes"], "emptied_free_bytes": emptied}


def graphs() -> dict[str, Any]:
    """Capture and replay a CUDA graph, then one that needs more than the share has."""
    source = torch.zeros(MIB, device="cuda")
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        (source * 2 + 1).relu()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = (source * 2 + 1).relu()
    wrong = 0
    for value in range(100):
        source.fill_(value)
        graph.replay()
        wrong += int(result[0].item() != 2 * value + 1)
    _, total = torch.cuda.mem_get_info()
    too_large = torch.cuda.CUDAGraph()
    refusal = None
    try:
        with torch.cuda.graph(too_large):
            torch.empty(total, dtype=torch.uint8, device="cuda")
    except torch.cuda.OutOfMemoryError as error:
        refusal = type(error).__name__
    return {"total_bytes": total, "replays": 100, "wrong": wrong, "refusal": refusal}


def train() -> dict[str, Any]:
    """Train a small network for three seconds; its rate is compared with that of a whole GPU."""
    torch.manual_seed(0)
    network = torch.nn.Sequential(
        torch.nn.Linear(1024, 4096), torch.nn.ReLU(), torch.nn.Linear(4096, 1024)
    ).cuda()
    optimizer = torch.optim.AdamW(network.parameters())
    batch = torch.randn(256, 1024, device="cuda")

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        torch.nn.functional.mse_loss(network(batch), batch).backward()
        optimizer.step()

    for _ in range(50):
        step()
    torch.cuda.synchronize()
    steps, started = 0, time.monotonic()
    while time.monotonic() - started < 3:
        for _ in range(20):
            step()
        torch.cuda.synchronize()
        steps += 20
    return {"steps_per_second": steps / (time.monotonic() - started)}


def _fill_with(size: int) -> str:
    while True:
        try:
            kept.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
        except torch.cuda.OutOfMemoryError as error:
            return type(error).__name__


SCENARIOS: Final[dict[str, Callable[[], dict[str, Any]]]] = {
    "fill": fill,
    "refill": refill,
    "graphs": graphs,
    "train": train,
}


if __name__ == "__main__":
    answer = SCENARIOS[sys.argv[1]]()
    print(json.dumps({"pid": os.getpid(), **answer}), flush=True)
    sys.stdin.readline()
