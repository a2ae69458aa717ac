# SPDX-License-Identifier: Apache-2.0
"""GPM of simulated GPUs: what DCGM reads on Hopper and later."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pynvml
import pytest

from allotment.devices.loading import nvml_of
from allotment.devices.packing import read_machine
from allotment.devices.simulated import gpu_times

GRAPHICS, MEMORY, TENSOR = 1, 10, 5


def test_figures_are_those_of_the_interval(
    machine: Callable[[str], Path], native_dir: Path
) -> None:
    path = machine("h100-80gb")
    uuid = read_machine(path).devices[0].uuid
    with nvml_of(path) as nvml:
        handle = nvml.nvmlDeviceGetHandleByIndex(0)
        assert nvml.nvmlGpmQueryDeviceSupport(handle).isSupportedDevice
        asked = pynvml.c_nvmlGpmMetricsGet_t()
        asked.version, asked.numMetrics = pynvml.NVML_GPM_METRICS_GET_VERSION, 3
        asked.sample1, asked.sample2 = nvml.nvmlGpmSampleAlloc(), nvml.nvmlGpmSampleAlloc()
        for place, metric in enumerate((GRAPHICS, MEMORY, TENSOR)):
            asked.metrics[place].metricId = metric
        nvml.nvmlGpmSampleGet(handle, asked.sample1)
        before = gpu_times(path)[uuid]
        subprocess.run(
            [sys.executable, "-m", "allotment", "burn", "--memory", "64Mi", "--launches", "50"],
            env={
                **os.environ,
                "ALLOTMENT_SIMULATED_MACHINE": str(path),
                "LD_LIBRARY_PATH": str(native_dir / "simulated"),
            },
            check=True,
            capture_output=True,
        )
        after = gpu_times(path)[uuid]
        nvml.nvmlGpmSampleGet(handle, asked.sample2)
        nvml.nvmlGpmMetricsGet(asked)
        graphics, memory, tensor = asked.metrics[:3]
        nvml.nvmlGpmSampleFree(asked.sample1)
        nvml.nvmlGpmSampleFree(asked.sample2)
    least = 100 * (after.busy_ns - before.busy_ns) / (after.now_ns - before.now_ns)
    assert 0 < graphics.value <= least + 0.001
    assert graphics.metricInfo.unit == b"%"
    assert memory.value == pytest.approx(graphics.value * 0.45)
    assert tensor.nvmlReturn == pynvml.NVML_ERROR_NOT_SUPPORTED


def test_before_hopper_there_is_none(machine: Callable[[str], Path]) -> None:
    with nvml_of(machine("a100-80gb")) as nvml:
        handle = nvml.nvmlDeviceGetHandleByIndex(0)
        assert not nvml.nvmlGpmQueryDeviceSupport(handle).isSupportedDevice
        with pytest.raises(pynvml.NVMLError_NotSupported):
            nvml.nvmlGpmSampleGet(handle, nvml.nvmlGpmSampleAlloc())
