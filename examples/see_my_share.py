# SPDX-License-Identifier: Apache-2.0
"""Show how much of the GPU this program has, by CUDA and by NVML.

pip install cuda-bindings nvidia-ml-py
allot run --simulated a100-80gb --memory 4Gi -- python see_my_share.py
"""

from __future__ import annotations

import pynvml
from cuda.bindings import driver

MIB = 1 << 20


def check(answer: tuple[object, ...]) -> tuple[object, ...]:
    """Take the result code off an answer; stop with its name when it is an error."""
    result, *values = answer
    if result != driver.CUresult.CUDA_SUCCESS:
        raise SystemExit(f"the driver says {driver.CUresult(result).name}")
    return tuple(values)


def main() -> None:
    """Ask both libraries the same question."""
    check(driver.cuInit(0))
    (device,) = check(driver.cuDeviceGet(0))
    (name,) = check(driver.cuDeviceGetName(128, device))
    (context,) = check(driver.cuDevicePrimaryCtxRetain(device))
    check(driver.cuCtxSetCurrent(context))
    free, total = check(driver.cuMemGetInfo())
    print(f"device: {bytes(name).split(bytes(1))[0].decode()}")
    print(f"CUDA:   {free // MIB} of {total // MIB} MiB free")

    pynvml.nvmlInit()
    memory = pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(0))
    print(f"NVML:   {memory.free // MIB} of {memory.total // MIB} MiB free")


if __name__ == "__main__":
    main()
