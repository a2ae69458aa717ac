# SPDX-License-Identifier: Apache-2.0
"""A program that says what device it has, then takes orders: `cuda_slice.py`.

Its first line is what it has as JSON, or the error of cuInit. Then, a line each: `take BYTES`
(the result), `run MILLISECONDS` (kernels for so long; how many nanoseconds they took), `end`.
The driver is whatever libcuda.so.1 the loader finds.
"""

from __future__ import annotations

import ctypes
import json
import sys
import time

PTX = b""".version 7.0
.target sm_60
.address_size 64
.visible .entry allot_spin(.param .u64 nanoseconds) { ret; }
"""
KERNEL_NS = 5_000_000
MULTIPROCESSORS = 16


def check(result: int) -> None:
    if result != 0:
        sys.exit(f"CUDA error {result}")


def say(value: object) -> None:
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


def what_is_there(cuda: ctypes.CDLL) -> dict[str, object]:
    count, multiprocessors = ctypes.c_int(), ctypes.c_int()
    name, total = ctypes.create_string_buffer(128), ctypes.c_size_t()
    uuids = []
    check(cuda.cuDeviceGetCount(ctypes.byref(count)))
    check(cuda.cuDeviceGetName(name, 128, 0))
    check(cuda.cuDeviceTotalMem_v2(ctypes.byref(total), 0))
    check(cuda.cuDeviceGetAttribute(ctypes.byref(multiprocessors), MULTIPROCESSORS, 0))
    for ask in (cuda.cuDeviceGetUuid_v2, cuda.cuDeviceGetUuid):
        raw = (ctypes.c_ubyte * 16)()
        check(ask(raw, 0))
        uuids.append(bytes(raw).hex())
    return {
        "count": count.value,
        "name": name.value.decode(),
        "total": total.value,
        "multiprocessors": multiprocessors.value,
        "uuid": uuids[0],
        "parent": uuids[1],
    }


def run(cuda: ctypes.CDLL, kernel: ctypes.c_void_p, milliseconds: int) -> int:
    duration = ctypes.c_uint64(KERNEL_NS)
    arguments = (ctypes.c_void_p * 1)(ctypes.addressof(duration))
    begun = time.monotonic_ns()
    for _ in range(milliseconds * 1_000_000 // KERNEL_NS):
        check(cuda.cuLaunchKernel(kernel, 10000, 1, 1, 1024, 1, 1, 0, None, arguments, None))
    check(cuda.cuCtxSynchronize())
    return time.monotonic_ns() - begun


def main() -> None:
    cuda = ctypes.CDLL("libcuda.so.1")
    began = cuda.cuInit(0)
    if began != 0:
        say(began)
        return
    say(what_is_there(cuda))
    context, module, kernel = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
    for line in sys.stdin:
        order, _, value = line.strip().partition(" ")
        if order == "begin":
            say(cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0))
            check(cuda.cuCtxSetCurrent(context))
            check(cuda.cuModuleLoadData(ctypes.byref(module), PTX))
            check(cuda.cuModuleGetFunction(ctypes.byref(kernel), module, b"allot_spin"))
        elif order == "take":
            pointer = ctypes.c_uint64()
            say(cuda.cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(int(value))))
        elif order == "free":
            free, total = ctypes.c_size_t(), ctypes.c_size_t()
            check(cuda.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total)))
            say([free.value, total.value])
        elif order == "run":
            say(run(cuda, kernel, int(value)))
        elif order == "retain":
            say(cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0))
        else:
            return


if __name__ == "__main__":
    main()
