# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: ANN401 - nvidia-ml-py has no types
"""A simulated GPU with MIG on, cut by nvidia-ml-py, and programs of CUDA on it."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pynvml
import pytest

from allotment.devices.packing import MACHINE_VARIABLE
from allotment.devices.simulated import capabilities_path

SLICE = Path(__file__).parents[1] / "native" / "cuda_slice.py"


@dataclass(frozen=True)
class Gpu:
    """A GPU with MIG on."""

    nvml: Any
    path: Path
    handle: Any

    def cut(self, number: int, start: int | None = None, size: int = 1) -> Any:
        if start is None:
            return self.nvml.nvmlDeviceCreateGpuInstance(self.handle, number)
        placement = pynvml.c_nvmlGpuInstancePlacement_t(start, size)
        return self.nvml.nvmlDeviceCreateGpuInstanceWithPlacement(
            self.handle, number, ctypes.byref(placement)
        )

    def slice(self, number: int, start: int | None = None, size: int = 1) -> tuple[Any, Any, str]:
        """A GPU instance with one compute instance of all its slices, and its UUID."""
        gpu_instance = self.cut(number, start, size)
        slices = {19: 0, 20: 0, 15: 0, 14: 1, 9: 2, 5: 3, 0: 4}[number]
        compute = self.nvml.nvmlGpuInstanceCreateComputeInstance(gpu_instance, slices)
        device = self.nvml.nvmlComputeInstanceGetInfo_v2(compute).device
        return gpu_instance, compute, self.nvml.nvmlDeviceGetUUID(device)

    def place(self, gpu_instance: Any) -> tuple[int, int, int]:
        info = self.nvml.nvmlGpuInstanceGetInfo(gpu_instance)
        return info.id, info.placement.start, info.placement.size


@contextlib.contextmanager
def refused(error: int) -> Iterator[None]:
    with pytest.raises(pynvml.NVMLError) as caught:
        yield
    assert caught.value.value == error


class Program:
    """cuda_slice.py in a process of its own."""

    def __init__(self, machine: Path, library: Path, **variables: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, SLICE],
            env={
                **os.environ,
                MACHINE_VARIABLE: str(machine),
                "LD_LIBRARY_PATH": str(library),
                **variables,
            },
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.has = self.answer()

    def answer(self) -> Any:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())

    def give(self, order: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(order + "\n")
        self.process.stdin.flush()

    def ask(self, order: str) -> Any:
        self.give(order)
        return self.answer()

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


def minors(path: Path) -> dict[str, int]:
    """Each capability file's device minor, by its path."""
    top = capabilities_path(path)
    return {
        str(file.relative_to(top)): int(file.read_text().split()[1])
        for file in top.rglob("*")
        if file.is_file()
    }
