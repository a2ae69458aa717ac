# SPDX-License-Identifier: Apache-2.0
"""A CUDA program for tests of MPS: kernels on some multiprocessors, and what became of them.

    mps_client.py spin US COUNT BLOCKS    so many kernels, 20 of them under way at once
    mps_client.py hold                    short kernels until a call fails
    mps_client.py trap                    one kernel that faults
    mps_client.py take MIB                memory, and how much of it was had

Prints one line of JSON for its start and one for its end.
"""

import ctypes
import json
import sys
import time

PTX = b""".version 7.0
.target sm_50
.address_size 64
.visible .entry allot_spin(.param .u64 nanoseconds)
{
  ret;
}
.visible .entry allot_trap()
{
  ret;
}
"""
MULTIPROCESSORS, MPS_ENABLED = 16, 133
cuda = ctypes.CDLL("libcuda.so.1")


class RefusedError(Exception):
    """A call that failed, with its code."""


def call(name: str, *arguments: object) -> None:
    code = getattr(cuda, name)(*arguments)
    if code:
        raise RefusedError(name, code)


def attribute(number: int, device: ctypes.c_int) -> int:
    value = ctypes.c_int()
    call("cuDeviceGetAttribute", ctypes.byref(value), number, device)
    return value.value


def say(**facts: object) -> None:
    sys.stdout.write(json.dumps(facts) + "\n")
    sys.stdout.flush()


def begin() -> None:
    device, context = ctypes.c_int(), ctypes.c_void_p()
    call("cuInit", 0)
    call("cuDeviceGet", ctypes.byref(device), 0)
    call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    call("cuCtxSetCurrent", context)
    say(
        multiprocessors=attribute(MULTIPROCESSORS, device),
        is_client=bool(attribute(MPS_ENABLED, device)),
    )


def function(name: bytes) -> ctypes.c_void_p:
    module, found = ctypes.c_void_p(), ctypes.c_void_p()
    call("cuModuleLoadData", ctypes.byref(module), PTX)
    call("cuModuleGetFunction", ctypes.byref(found), module, name)
    return found


def launch(kernel: ctypes.c_void_p, blocks: int, microseconds: int) -> None:
    duration = ctypes.c_uint64(microseconds * 1000)
    parameters = (ctypes.c_void_p * 1)(ctypes.cast(ctypes.byref(duration), ctypes.c_void_p))
    call("cuLaunchKernel", kernel, blocks, 1, 1, 1024, 1, 1, 0, None, parameters, None)


def spin(microseconds: int, count: int, blocks: int) -> None:
    kernel = function(b"allot_spin")
    began = time.monotonic()
    for done in range(count):
        launch(kernel, blocks, microseconds)
        if done % 20 == 19:
            call("cuCtxSynchronize")
    call("cuCtxSynchronize")
    say(seconds=time.monotonic() - began, until=time.monotonic(), since=began)


def hold() -> None:
    kernel = function(b"allot_spin")
    while True:
        launch(kernel, 20, 1000)
        call("cuCtxSynchronize")


def take(mib: int) -> None:
    address = ctypes.c_uint64()
    taken = 0
    while taken < mib:
        call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(64 << 20))
        taken += 64
        say(taken=taken)


def main() -> None:
    what, *numbers = sys.argv[1:]
    try:
        begin()
        if what == "spin":
            spin(*map(int, numbers))
        elif what == "take":
            take(*map(int, numbers))
        elif what == "trap":
            launch(function(b"allot_trap"), 1, 1)
            call("cuCtxSynchronize")
        else:
            hold()
    except RefusedError as error:
        name, code = error.args
        say(failed=name, code=code, at=time.monotonic())
        sys.exit(3)


if __name__ == "__main__":
    main()
