# SPDX-License-Identifier: Apache-2.0
"""A program for the bench of MPS: small kernels for some seconds, twenty under way at once.

load.py US BLOCKS SECONDS

Says `ready`, begins when a line comes on standard input, and prints how many kernels ended.
"""

from __future__ import annotations

import ctypes
import sys
import time

_PTX = (
    b".version 7.0\n.target sm_50\n.address_size 64\n"
    b".visible .entry allot_spin(.param .u64 nanoseconds)\n{\n  ret;\n}\n"
)
_UNDER_WAY = 20
_FAILED = 3

_cuda = ctypes.CDLL("libcuda.so.1")


def _call(name: str, *arguments: object) -> None:
    code = getattr(_cuda, name)(*arguments)
    if code:
        sys.stdout.write(f"{name}: {code}\n")
        sys.exit(_FAILED)


def main() -> None:
    """Run kernels until the time is over or a call fails."""
    microseconds, blocks, seconds = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    device, context = ctypes.c_int(), ctypes.c_void_p()
    module, kernel = ctypes.c_void_p(), ctypes.c_void_p()
    _call("cuInit", 0)
    _call("cuDeviceGet", ctypes.byref(device), 0)
    _call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    _call("cuCtxSetCurrent", context)
    _call("cuModuleLoadData", ctypes.byref(module), _PTX)
    _call("cuModuleGetFunction", ctypes.byref(kernel), module, b"allot_spin")
    duration = ctypes.c_uint64(microseconds * 1000)
    parameters = (ctypes.c_void_p * 1)(ctypes.cast(ctypes.byref(duration), ctypes.c_void_p))
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    sys.stdin.readline()
    done, end = 0, time.monotonic() + seconds
    while time.monotonic() < end:
        for _ in range(_UNDER_WAY):
            _call("cuLaunchKernel", kernel, blocks, 1, 1, 1024, 1, 1, 0, None, parameters, None)
        _call("cuCtxSynchronize")
        done += _UNDER_WAY
    sys.stdout.write(f"{done}\n")


if __name__ == "__main__":
    main()
