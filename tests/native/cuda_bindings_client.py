# SPDX-License-Identifier: Apache-2.0
"""A program on cuda-bindings, which finds every entry point through cuGetProcAddress.

It prints one JSON document of what it saw. The driver is whatever libcuda.so.1 the loader finds.
"""

from __future__ import annotations

import ctypes
import json
import sys
from typing import Any

from cuda.bindings import driver

PTX = b""".version 7.0
.target sm_60
.address_size 64
.visible .entry allot_spin(.param .u64 nanoseconds) { ret; }
\0"""
KERNEL_NS = 3_000_000
HEAD_START_NS = 500_000_000
MIB = 1 << 20


def ok(answer: tuple[Any, ...]) -> Any:  # noqa: ANN401 - the bindings have no types
    result, *values = answer
    if result != driver.CUresult.CUDA_SUCCESS:
        sys.exit(f"{result!r}")
    return values[0] if len(values) == 1 else values


def launch(kernel: object, stream: object, duration_ns: int = KERNEL_NS) -> None:
    arguments = ((duration_ns,), (ctypes.c_uint64,))
    ok(driver.cuLaunchKernel(kernel, 1, 1, 1, 1, 1, 1, 0, stream, arguments, 0))


def timed(kernel: object, stream: object) -> float:
    start, end = ok(driver.cuEventCreate(0)), ok(driver.cuEventCreate(0))
    # Behind it all that is timed is submitted before it begins.
    launch(kernel, stream, HEAD_START_NS)
    ok(driver.cuEventRecord(start, stream))
    launch(kernel, stream)
    ok(driver.cuEventRecord(end, stream))
    ok(driver.cuEventSynchronize(end))
    elapsed: float = ok(driver.cuEventElapsedTime(start, end))
    return elapsed


def graph_nodes(kernel: object, stream: object) -> int:
    ok(
        driver.cuStreamBeginCapture(
            stream, driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL
        )
    )
    launch(kernel, stream)
    launch(kernel, stream)
    graph = ok(driver.cuStreamEndCapture(stream))
    executable = ok(driver.cuGraphInstantiate(graph, 0))
    ok(driver.cuGraphLaunch(executable, stream))
    ok(driver.cuStreamSynchronize(stream))
    _, count = ok(driver.cuGraphGetNodes(graph, 8))
    return int(count)


def main() -> None:
    ok(driver.cuInit(0))
    context = ok(driver.cuDevicePrimaryCtxRetain(0))
    ok(driver.cuCtxSetCurrent(context))
    stream = ok(driver.cuStreamCreate(1))
    kernel = ok(driver.cuModuleGetFunction(ok(driver.cuModuleLoadData(PTX)), b"allot_spin"))
    free, total = ok(driver.cuMemGetInfo())
    pointer = ok(driver.cuMemAlloc(64 * MIB))
    pooled = ok(driver.cuMemAllocAsync(MIB, stream))
    after, _ = ok(driver.cuMemGetInfo())
    sent, received = bytes(range(256)), bytearray(256)
    ok(driver.cuMemcpyHtoD(pointer, sent, 256))
    ok(driver.cuMemcpyDtoDAsync(pooled, pointer, 256, stream))
    ok(driver.cuMemcpyDtoHAsync(received, pooled, 256, stream))
    ok(driver.cuStreamSynchronize(stream))
    too_much, _ = driver.cuMemAlloc(total)
    seen = {
        "name": ok(driver.cuDeviceGetName(96, 0)).rstrip(b"\0 ").decode(),
        "devices": ok(driver.cuDeviceGetCount()),
        "version": ok(driver.cuDriverGetVersion()),
        "total": total,
        "taken": free - after,
        "same": bytes(received) == sent,
        "too_much": too_much.name,
        # A host that is kept from submitting misses the head start.
        "kernel_ms": min(timed(kernel, stream) for _ in range(5)),
        "nodes": graph_nodes(kernel, stream),
    }
    sys.stdout.write(json.dumps(seen))


if __name__ == "__main__":
    main()
