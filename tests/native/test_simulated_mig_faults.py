# SPDX-License-Identifier: Apache-2.0
"""Calls that change the MIG of a simulated GPU fail, take long and end their process on demand."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pynvml
import pytest
from mig_gpu import Gpu, minors, refused

from allotment.devices import faults
from allotment.devices.faults import MigCall, MigFault
from allotment.devices.packing import MACHINE_VARIABLE
from allotment.devices.simulated import reset_gpu
from allotment.model.errors import StateError


def test_calls_fail_on_demand_each_alone(hopper: Gpu) -> None:
    nvml, unknown = hopper.nvml, pynvml.NVML_ERROR_UNKNOWN
    faults.set_mig_fault(hopper.path, 0, MigCall.CREATE_COMPUTE, MigFault(error=unknown))
    gpu_instance = hopper.cut(19)
    with refused(unknown):
        nvml.nvmlGpuInstanceCreateComputeInstance(gpu_instance, 0)
    assert faults.read_faults(hopper.path)[0].mig == {
        MigCall.CREATE_COMPUTE: MigFault(error=unknown)
    }
    faults.clear_faults(hopper.path)
    assert faults.read_faults(hopper.path)[0].mig == {}
    compute = nvml.nvmlGpuInstanceCreateComputeInstance(gpu_instance, 0)
    for call in (MigCall.DESTROY_COMPUTE, MigCall.DESTROY_GPU, MigCall.SET_MODE):
        faults.set_mig_fault(hopper.path, 0, call, MigFault(error=pynvml.NVML_ERROR_TIMEOUT))
    with refused(pynvml.NVML_ERROR_TIMEOUT):
        nvml.nvmlComputeInstanceDestroy(compute)
    with refused(pynvml.NVML_ERROR_TIMEOUT):
        nvml.nvmlGpuInstanceDestroy(gpu_instance)
    with refused(pynvml.NVML_ERROR_TIMEOUT):
        nvml.nvmlDeviceSetMigMode(hopper.handle, 0)
    faults.set_mig_fault(hopper.path, 0, MigCall.RESET, MigFault(error=unknown))
    with pytest.raises(StateError, match="cannot be reset"):
        reset_gpu(hopper.path, 0)


def test_a_call_takes_long_on_demand(hopper: Gpu) -> None:
    faults.set_mig_fault(hopper.path, 0, MigCall.CREATE_GPU, MigFault(slow_us=300_000))
    begun = time.monotonic()
    hopper.cut(19)
    assert time.monotonic() - begun >= 0.3


def test_a_call_takes_no_longer_than_its_fault_stands(hopper: Gpu) -> None:
    faults.set_mig_fault(hopper.path, 0, MigCall.CREATE_GPU, MigFault(slow_us=3600 * 1_000_000))
    cutting = threading.Thread(target=hopper.cut, args=(19,), daemon=True)
    cutting.start()
    cutting.join(0.3)
    assert cutting.is_alive()
    faults.clear_faults(hopper.path)
    cutting.join(50)
    assert not cutting.is_alive()


@pytest.mark.parametrize(
    ("fault", "made"),
    [
        pytest.param(MigFault(ends_before=True), 0, id="before"),
        pytest.param(MigFault(ends_after=True), 1, id="after"),
    ],
)
def test_a_process_ends_at_a_call_on_demand(
    fault: MigFault, made: int, hopper: Gpu, native_dir: Path
) -> None:
    faults.set_mig_fault(hopper.path, 0, MigCall.CREATE_GPU, fault)
    code = "import pynvml as n; n.nvmlInit(); d = n.nvmlDeviceGetHandleByIndex(0); "
    code += "n.nvmlDeviceCreateGpuInstance(d, 19)"
    environment = {
        **os.environ,
        MACHINE_VARIABLE: str(hopper.path),
        "LD_LIBRARY_PATH": str(native_dir / "simulated"),
    }
    done = subprocess.run([sys.executable, "-c", code], env=environment, check=False)
    assert done.returncode == -signal.SIGKILL
    left = hopper.nvml.nvmlDeviceGetGpuInstanceRemainingCapacity(hopper.handle, 19)
    assert left == 7 - made
    # Its lock has gone with it, and the next one puts right what it has left undone.
    faults.clear_faults(hopper.path)
    hopper.cut(19)
    told = {name for name in minors(hopper.path) if name.endswith("access")}
    assert len(told) == 1 + made
