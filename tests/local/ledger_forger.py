# SPDX-License-Identifier: Apache-2.0
"""A hostile program: takes 8 GiB in steps, and undoes in its share's ledger what each step cost.

With an argument it writes there at last that 60 GiB are in use, at that offset.
"""

import ctypes
import os
import sys
from pathlib import Path

STEP, STEPS = 512 << 20, 16


def main() -> None:
    cuda = ctypes.CDLL("libcuda.so.1")
    context, address = ctypes.c_void_p(), ctypes.c_uint64()
    assert cuda.cuInit(0) == 0
    assert cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0
    assert cuda.cuCtxSetCurrent(context) == 0
    usage = Path(os.environ["ALLOTMENT_SHARE"], "usage")
    before = usage.read_bytes()
    for _ in range(STEPS):
        assert cuda.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(STEP)) == 0
        with usage.open("r+b") as file:
            file.write(before)
    if len(sys.argv) > 1:
        with usage.open("r+b") as file:
            file.seek(int(sys.argv[1]))
            file.write((60 << 30).to_bytes(8, "little"))
    sys.stdout.write("taken\n")
    sys.stdout.flush()
    sys.stdin.read()


if __name__ == "__main__":
    main()
