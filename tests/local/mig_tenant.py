# SPDX-License-Identifier: Apache-2.0
"""A program on CUDA and NVML in a MIG slice: says what it sees, takes memory, waits to be ended.

    mig_tenant.py [MIB]     takes so much memory, and how much of it was had
    mig_tenant.py [MIB] -   and then waits for the end of its input

Prints one line of JSON. It imports nothing of allotment: a tenant has none of it.
"""

import ctypes
import json
import os
import sys

MULTIPROCESSORS = 16  # CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT
MIB = 1 << 20
CHUNK_MIB = 64


class Memory(ctypes.Structure):
    """`nvmlMemory_t`."""

    _fields_ = (
        ("total", ctypes.c_ulonglong),
        ("free", ctypes.c_ulonglong),
        ("used", ctypes.c_ulonglong),
    )


cuda = ctypes.CDLL("libcuda.so.1")
nvml = ctypes.CDLL("libnvidia-ml.so.1")


def done(code: int) -> None:
    """Ends the program where a call fails."""
    if code:
        sys.exit(f"a call failed with {code}")


def by_cuda() -> dict[str, object]:
    count, device, context, total = (
        ctypes.c_int(),
        ctypes.c_int(),
        ctypes.c_void_p(),
        ctypes.c_size_t(),
    )
    units, uuid = ctypes.c_int(), (ctypes.c_ubyte * 16)()
    done(cuda.cuInit(0))
    done(cuda.cuDeviceGetCount(ctypes.byref(count)))
    done(cuda.cuDeviceGet(ctypes.byref(device), 0))
    done(cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device))
    done(cuda.cuCtxSetCurrent(context))
    done(cuda.cuDeviceTotalMem_v2(ctypes.byref(total), device))
    done(cuda.cuDeviceGetAttribute(ctypes.byref(units), MULTIPROCESSORS, device))
    done(cuda.cuDeviceGetUuid_v2(ctypes.byref(uuid), device))
    return {
        "count": count.value,
        "total": total.value,
        "multiprocessors": units.value,
        "uuid": bytes(uuid).hex(),
    }


def by_nvml() -> dict[str, object]:
    count, handle, memory = ctypes.c_uint(), ctypes.c_void_p(), Memory()
    name = ctypes.create_string_buffer(96)
    done(nvml.nvmlInit_v2())
    done(nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)))
    done(nvml.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(handle)))
    done(nvml.nvmlDeviceGetUUID(handle, name, 96))
    done(nvml.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)))
    return {"count": count.value, "uuid": name.value.decode(), "total": memory.total}


def take(wanted_mib: int) -> int:
    """Returns how much of it was had, in MiB."""
    had = 0
    pointer = ctypes.c_ulonglong()
    while had < wanted_mib:
        if cuda.cuMemAlloc_v2(ctypes.byref(pointer), CHUNK_MIB * MIB):
            break
        had += CHUNK_MIB
    return had


def main(wanted_mib: str = "0", *rest: str) -> None:
    said = {
        "cuda": by_cuda(),
        "nvml": by_nvml(),
        "had_mib": take(int(wanted_mib)),
        "visible": os.environ.get("CUDA_VISIBLE_DEVICES"),
    }
    sys.stdout.write(json.dumps(said) + "\n")
    sys.stdout.flush()
    if rest:
        sys.stdin.read()


if __name__ == "__main__":
    main(*sys.argv[1:])
