# SPDX-License-Identifier: Apache-2.0
"""A program that has memory of a GPU and computes on it: `cuda_holder.py GPU BYTES [busy]`.

It prints `ready` and goes on until its standard input ends. The driver is whatever libcuda.so.1
the loader finds. It imports nothing of allotment: whoever watches it must see it as a stranger.
"""

from __future__ import annotations

import ctypes
import select
import sys

PTX = b""".version 7.0
.target sm_60
.address_size 64
.visible .entry allot_spin(.param .u64 nanoseconds) { ret; }
"""
KERNEL_NS = 5_000_000
ALL_FLAGS = 0


def check(result: int) -> None:
    if result != 0:
        sys.exit(f"CUDA error {result}")


def main() -> None:
    gpu, size, busy = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:] == ["busy"]
    cuda = ctypes.CDLL("libcuda.so.1")
    context, module, kernel = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
    pointer = ctypes.c_uint64()
    check(cuda.cuInit(ALL_FLAGS))
    check(cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), gpu))
    check(cuda.cuCtxSetCurrent(context))
    check(cuda.cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(size)))
    check(cuda.cuModuleLoadData(ctypes.byref(module), PTX))
    check(cuda.cuModuleGetFunction(ctypes.byref(kernel), module, b"allot_spin"))
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    duration = ctypes.c_uint64(KERNEL_NS)
    arguments = (ctypes.c_void_p * 1)(ctypes.addressof(duration))
    while not select.select([sys.stdin], [], [], 0 if busy else None)[0]:
        check(cuda.cuLaunchKernel(kernel, 1, 1, 1, 1, 1, 1, 0, None, arguments, None))
        check(cuda.cuCtxSynchronize())


if __name__ == "__main__":
    main()
