# SPDX-License-Identifier: Apache-2.0
"""Programs that know nothing of allotment, unchanged: on a simulated machine, and in a share of it.

On the machine they see the GPUs; in a share they see the share's memory and never the GPU's.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from allotment.devices.models import MODELS
from allotment.shares.run.namespace import can_unshare

SESSION = Path(__file__).with_name("client_session.py")
MIB = 1 << 20
HELD = 1024 * MIB
MODEL = MODELS["a100-80gb"]
SHARE_MIB = 4096
USED_MIB = 1024 + MODEL.context_mib

Allot = Any  # tests/conftest.py: CommandLine
Session = Callable[..., "Output"]


@dataclass(frozen=True, slots=True)
class Output:
    """What a client wrote, and the pid of the program that used the GPU meanwhile."""

    pid: int
    text: str


def output_of(done: subprocess.CompletedProcess[str]) -> Output:
    assert done.returncode == 0, done.stdout + done.stderr
    pid, _, text = done.stdout.partition("\n")
    return Output(int(pid), text)


def program(name: str) -> str:
    """The path of a client: a console script of this environment, or a program of the system."""
    beside = Path(sys.executable).with_name(name)
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        pytest.skip(f"no {name} here")
    return found


@pytest.fixture
def on_machine(machine: Callable[[str], Path], native_dir: Path) -> Session:
    """Runs a client on a machine with two A100 and a T4; the program is on the second A100."""
    environment = {
        **os.environ,
        "ALLOTMENT_SIMULATED_MACHINE": str(machine("a100-80gb:2,t4")),
        "LD_LIBRARY_PATH": str(native_dir / "simulated"),
        "COLUMNS": "160",
    }

    def session(*client: str) -> Output:
        command = [sys.executable, str(SESSION), "1", str(HELD), *client]
        return output_of(
            subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        )

    return session


@pytest.fixture(
    params=[
        pytest.param(
            "namespace", marks=pytest.mark.skipif(not can_unshare(), reason="needs CAP_SYS_ADMIN")
        ),
        "environment",
    ]
)
def in_share(allot: Allot, request: pytest.FixtureRequest) -> Session:
    """Runs a client in a share of 4 GiB of the same machine; the program is on its one GPU."""

    def session(*client: str) -> Output:
        share = ["--simulated", "a100-80gb:2,t4", "--gpu", "a100-80gb", "--memory", "4Gi"]
        command = [sys.executable, str(SESSION), "0", str(HELD), *client]
        return output_of(
            allot("run", *share, "--inject", request.param, "--", *command, COLUMNS="160")
        )

    return session


# ---- gpustat -------------------------------------------------------------------------------------


def gpustat(session: Session) -> tuple[Output, list[dict[str, Any]]]:
    output = session(program("gpustat"), "--json")
    gpus: list[dict[str, Any]] = json.loads(output.text)["gpus"]
    return output, gpus


def test_gpustat_sees_the_machine(on_machine: Session) -> None:
    output, gpus = gpustat(on_machine)
    assert [gpu["name"] for gpu in gpus] == [MODEL.name, MODEL.name, "Tesla T4"]
    assert [gpu["memory.total"] for gpu in gpus] == [81920, 81920, 15360]
    assert [gpu["processes"] == [] for gpu in gpus] == [True, False, True]
    (process,) = gpus[1]["processes"]
    assert process["pid"] == output.pid
    assert process["gpu_memory_usage"] >= USED_MIB


def test_gpustat_sees_the_share(in_share: Session) -> None:
    output, (gpu,) = gpustat(in_share)
    assert gpu["name"] == MODEL.name
    assert gpu["memory.total"] == SHARE_MIB
    assert USED_MIB <= gpu["memory.used"] < USED_MIB + 64
    (process,) = gpu["processes"]
    assert process["pid"] == output.pid
    assert USED_MIB <= process["gpu_memory_usage"] < USED_MIB + 64


# ---- nvitop --------------------------------------------------------------------------------------


def test_nvitop_sees_the_machine(on_machine: Session) -> None:
    output = on_machine(program("nvitop"), "--once", "--no-unicode")
    assert output.text.count("A100-SXM4-80GB") == 2
    assert "Tesla T4" in output.text
    assert re.search(r"\d+MiB / 80.00GiB", output.text)
    assert re.search(rf"\b1 +{output.pid} C ", output.text)


def test_nvitop_sees_the_share(in_share: Session) -> None:
    output = in_share(program("nvitop"), "--once", "--no-unicode")
    assert output.text.count("A100-SXM4-80GB") == 1
    assert "Tesla T4" not in output.text
    assert "80.00GiB" not in output.text
    (used,) = re.findall(r"(\d+)MiB / 4096MiB", output.text)
    assert USED_MIB <= int(used) < USED_MIB + 64
    assert re.search(rf"\b0 +{output.pid} C .* {used}MiB ", output.text)


# ---- nvtop (Debian) ------------------------------------------------------------------------------


def test_nvtop_sees_the_machine(on_machine: Session) -> None:
    text = on_machine("--terminal", r"15\.000Gi\]", program("nvtop"), "--no-plot").text
    assert text.count(f"[{MODEL.name}]") == 2
    assert "[Tesla T4]" in text
    assert "80.000Gi]" in text
    assert "15.000Gi]" in text


def test_nvtop_sees_the_share(in_share: Session) -> None:
    text = in_share("--terminal", r"/4\.000Gi\]", program("nvtop"), "--no-plot").text
    assert text.count(f"[{MODEL.name}]") == 1
    assert "Tesla T4" not in text
    assert "80.000Gi" not in text
    assert re.search(r"1\.4\d\dGi/4\.000Gi\]", text)


# ---- nvidia-ml-py --------------------------------------------------------------------------------

ML_PY = """
import json, pynvml
pynvml.nvmlInit()
found = []
for index in range(pynvml.nvmlDeviceGetCount()):
    handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    first = pynvml.nvmlDeviceGetMemoryInfo(handle)
    second = pynvml.nvmlDeviceGetMemoryInfo(handle, pynvml.nvmlMemory_v2)
    found.append({
        "name": pynvml.nvmlDeviceGetName(handle),
        "first": [first.total, first.used, first.free],
        "second": [second.total, second.reserved, second.used, second.free],
        "processes": {
            each.pid: each.usedGpuMemory
            for each in pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
        },
    })
print(json.dumps(found))
"""


def test_nvidia_ml_py_sees_the_share(in_share: Session) -> None:
    output = in_share(sys.executable, "-c", ML_PY)
    (gpu,) = json.loads(output.text)
    used = gpu["processes"][str(output.pid)]
    assert set(gpu["processes"]) == {str(output.pid)}
    assert USED_MIB * MIB <= used < (USED_MIB + 64) * MIB
    limit = SHARE_MIB * MIB
    assert gpu["first"] == [limit, used, limit - used]
    assert gpu["second"] == [limit, 0, used, limit - used]


# ---- cuda-bindings: the driver API, found by cuGetProcAddress ------------------------------------

BINDINGS = """
import json
from cuda.bindings import driver

def check(result):
    error, *values = result
    assert error == driver.CUresult.CUDA_SUCCESS, error
    return values[0] if len(values) == 1 else values

check(driver.cuInit(0))
device = check(driver.cuDeviceGet(0))
context = check(driver.cuDevicePrimaryCtxRetain(device))
check(driver.cuCtxSetCurrent(context))
total = check(driver.cuDeviceTotalMem(device))
before = check(driver.cuMemGetInfo())
pointer = check(driver.cuMemAlloc(512 << 20))
after = check(driver.cuMemGetInfo())
refused, _ = driver.cuMemAlloc(8 << 30)
check(driver.cuMemFree(pointer))
print(json.dumps({
    "count": check(driver.cuDeviceGetCount()),
    "name": check(driver.cuDeviceGetName(96, device)).split(bytes(1))[0].decode(),
    "total": total, "before": before, "after": after, "refused": int(refused),
    "end": check(driver.cuMemGetInfo()),
}))
"""


def test_cuda_bindings_get_the_share(in_share: Session) -> None:
    pytest.importorskip("cuda.bindings.driver", reason="no cuda-bindings here")
    said = json.loads(in_share(sys.executable, "-c", BINDINGS).text)
    limit = SHARE_MIB * MIB
    assert (said["count"], said["name"]) == (1, MODEL.name)
    assert said["total"] == limit
    free, total = said["before"]
    assert total == limit
    # Two contexts and the other program's memory are gone already.
    assert free == pytest.approx(limit - (USED_MIB + MODEL.context_mib) * MIB, abs=64 * MIB)
    assert said["after"] == [free - 512 * MIB, limit]
    assert said["refused"] == 2, "CUDA_ERROR_OUT_OF_MEMORY"
    assert said["end"] == said["before"]


def test_what_clients_saw_is_gone_with_them(allot: Allot) -> None:
    machine = ["--simulated", "a100-80gb"]
    command = [sys.executable, str(SESSION), "0", str(HELD), sys.executable, "-c", "pass"]
    assert allot("run", *machine, "--memory", "4Gi", "--", *command).returncode == 0
    (device,) = json.loads(allot("devices", *machine, "-o", "json").stdout)["devices"]
    assert device["memory_used_bytes"] == 0


# ---- nvidia-smi ----------------------------------------------------------------------------------


def processes_of(output: Output) -> list[list[str]]:
    return [line.split(", ") for line in output.text.splitlines()]


APPS = ("--query-compute-apps=pid,used_memory,gpu_name", "--format=csv,noheader,nounits")


def test_nvidia_smi_sees_the_machine(on_machine: Session, native_dir: Path) -> None:
    smi = str(native_dir / "simulated" / "nvidia-smi")
    output = on_machine(smi, *APPS)
    ((pid, used, name),) = processes_of(output)
    assert (int(pid), name) == (output.pid, MODEL.name)
    assert int(used) >= USED_MIB
    table = on_machine("sh", "-c", f"{smi}; {smi} pmon -c 1 -s um")
    assert re.search(rf"\|    1   N/A  N/A +{table.pid} +C .* {used}MiB \|", table.text)
    assert re.search(rf"^ +1 +{table.pid} +C .* {used} +python", table.text, re.MULTILINE)


def test_nvidia_smi_sees_the_share(in_share: Session) -> None:
    output = in_share("nvidia-smi", *APPS)
    ((pid, used, _),) = processes_of(output)
    assert int(pid) == output.pid
    assert int(used) >= USED_MIB
    table = in_share("sh", "-c", "nvidia-smi -L; nvidia-smi").text
    assert table.count("(UUID: GPU-") == 1
    assert re.search(r" \d+MiB / 4096MiB \|", table)
    assert "81920" not in table
