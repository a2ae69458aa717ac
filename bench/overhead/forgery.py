# SPDX-License-Identifier: Apache-2.0
"""Is a program that forges its share's ledger, and so passes its limit, ever shown as enforced?"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from typing import Any, Final

from bench.harness.options import Options
from bench.harness.programs import command_environment
from bench.harness.quantiles import summarize
from bench.harness.results import Result
from bench.overhead.rig import ShareRig

_ALLOT: Final = (sys.executable, "-m", "allotment")
_FORGE: Final = """
import ctypes, os, sys
cuda = ctypes.CDLL("libcuda.so.1")
context, address = ctypes.c_void_p(), ctypes.c_uint64()
assert cuda.cuInit(0) == 0
assert cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0
assert cuda.cuCtxSetCurrent(context) == 0
usage = os.path.join(os.environ.get("ALLOTMENT_SHARE", "/run/allotment/share"), "usage")
before = open(usage, "rb").read()
for _ in range(int(sys.argv[1])):
    assert cuda.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(512 << 20)) == 0
    if sys.argv[2] == "forged":
        with open(usage, "r+b") as file:
            file.write(before)
print("taken", flush=True)
sys.stdin.read()
"""
"""Takes so many times 512 MiB, and undoes in the ledger what each cost."""
_SIDES: Final = {"forged": 8, "honest": 1}


def forged_use(rig: ShareRig, options: Options) -> Iterator[Result]:
    """Look at a share of 1 GiB whose program has 4 GiB, and at one whose program is honest."""
    looks = 3 if options.is_quick else 10
    wrong, times = dict.fromkeys(_SIDES, 0), []
    for side, steps in _SIDES.items():
        with tempfile.TemporaryDirectory(prefix="allotment-bench-") as state:
            environment = command_environment(state)
            spec = ["--simulated", rig.spec] if rig.spec else []
            command = [*_ALLOT, "run", "--memory", "1Gi", "--inject", "environment", *spec, "--"]
            with subprocess.Popen(
                [*command, sys.executable, "-c", _FORGE, str(steps), side],
                env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            ) as program:  # fmt: skip
                if program.stdout is None or program.stdout.readline() != "taken\n":
                    message = f"the {side} program got no memory"
                    raise RuntimeError(message)
                for _ in range(looks):
                    started = time.monotonic()
                    share = _only_share(environment)
                    times.append((time.monotonic() - started) * 1000)
                    wrong[side] += share["enforced"] is not (side == "honest")
                program.communicate()
    yield Result(
        name="looks that call a forged share enforced",
        unit="looks",
        value=wrong["forged"],
        target=0.0,
        is_required=True,
        samples=looks,
        method="a program in a share of 1 GiB takes 4 GiB, and writes its ledger's file back after"
        " each 512 MiB; `allot ps` compares the driver's bytes",
    )
    yield Result(
        name="looks that call an honest share not enforced",
        unit="looks",
        value=wrong["honest"],
        target=0.0,
        is_required=True,
        samples=looks,
        method="the same program with 512 MiB, which leaves its ledger alone",
    )
    yield Result(
        name="`allot ps -o json`",
        unit="ms",
        value=summarize(times).p50,
        target=None,
        samples=len(times),
        method="start to end; the median",
        summary=summarize(times),
    )


def _only_share(environment: Mapping[str, str]) -> dict[str, Any]:
    done = subprocess.run(
        [*_ALLOT, "ps", "-o", "json"], env=dict(environment), check=True, capture_output=True
    )
    (share,) = json.loads(done.stdout)["shares"]
    return dict(share)
