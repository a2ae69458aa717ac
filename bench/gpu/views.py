# SPDX-License-Identifier: Apache-2.0
"""What a program inside a share sees of the GPU: CUDA, NVML and nvidia-smi, as one JSON object.

Needs only nvidia-ml-py and the driver, so it runs on simulated GPUs as well.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import subprocess
from typing import Any

import pynvml


def cuda() -> dict[str, Any]:
    """Ask the driver API, with a context and 256 MiB allocated."""
    library = ctypes.CDLL("libcuda.so.1")
    device, context, address = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_uint64()
    free, total, whole = ctypes.c_size_t(), ctypes.c_size_t(), ctypes.c_size_t()
    count = ctypes.c_int()
    steps = [
        library.cuInit(0),
        library.cuDeviceGetCount(ctypes.byref(count)),
        library.cuDeviceGet(ctypes.byref(device), 0),
        library.cuDevicePrimaryCtxRetain(ctypes.byref(context), device),
        library.cuCtxSetCurrent(context),
        library.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(256 << 20)),
        library.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total)),
        library.cuDeviceTotalMem_v2(ctypes.byref(whole), device),
    ]
    return {
        "results": steps,
        "devices": count.value,
        "free_bytes": free.value,
        "total_bytes": total.value,
        "device_bytes": whole.value,
    }


def nvml() -> dict[str, Any]:
    """Ask NVML in both versions, and for the list of processes."""
    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByIndex(0)
    first = pynvml.nvmlDeviceGetMemoryInfo(handle)
    second = pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2)
    return {
        "devices": pynvml.nvmlDeviceGetCount(),
        "v1": {"total_bytes": first.total, "used_bytes": first.used, "free_bytes": first.free},
        "v2": {"total_bytes": second.total, "used_bytes": second.used, "free_bytes": second.free},
        "processes": {
            str(each.pid): each.usedGpuMemory
            for each in pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
        },
    }


def nvidia_smi() -> dict[str, Any] | None:
    """Ask nvidia-smi, where the driver brought it."""
    if shutil.which("nvidia-smi") is None:
        return None
    asked = ["--query-gpu=memory.total,memory.used", "--format=csv,noheader,nounits"]
    answer = subprocess.run(
        ["nvidia-smi", *asked], check=True, capture_output=True, text=True, timeout=60
    )
    lines = [[int(word) for word in line.split(",")] for line in answer.stdout.splitlines()]
    return {"devices": len(lines), "total_mib": lines[0][0], "used_mib": lines[0][1]}


if __name__ == "__main__":
    seen = {"pid": os.getpid(), "cuda": cuda(), "nvml": nvml(), "nvidia_smi": nvidia_smi()}
    print(json.dumps(seen), flush=True)
