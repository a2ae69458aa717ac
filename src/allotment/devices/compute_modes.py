# SPDX-License-Identifier: Apache-2.0
"""A GPU's compute mode: contexts for all processes, for one, or for none (nvmlComputeMode_t).

The mode applies to new contexts, and stays until it is changed or the driver reloads. Only root may
set it. MIG devices have their own mode if the driver supports it: CUDA 13's nvml.h accepts a MIG
device's handle, earlier ones do not.
"""

from __future__ import annotations

from contextlib import contextmanager
from enum import IntEnum
from typing import TYPE_CHECKING, Any

from allotment.devices import loading
from allotment.model.errors import NoDevicesError, PrerequisiteError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path
    from types import ModuleType


class ComputeMode(IntEnum):
    """Which processes may have a context."""

    DEFAULT = 0
    EXCLUSIVE_THREAD = 1
    PROHIBITED = 2
    EXCLUSIVE_PROCESS = 3
    """One process; all clients of an MPS server count as one."""


class GpuSettings:
    """One GPU's compute mode and processes, by NVML. `machine`: a simulated one's file.

    `uuid` may be a MIG device's.
    """

    __slots__ = ("_machine", "_uuid")

    def __init__(self, uuid: str, *, machine: Path | None = None) -> None:
        self._uuid = uuid
        self._machine = machine

    def compute_mode(self) -> ComputeMode:
        """Raises `NoDevicesError` if the GPU does not answer."""
        with self._asked("report its compute mode") as (nvml, handle):
            try:
                return ComputeMode(nvml.nvmlDeviceGetComputeMode(handle))
            except (nvml.NVMLError_NotSupported, nvml.NVMLError_InvalidArgument):
                if not self._is_slice:
                    raise
                return ComputeMode.DEFAULT

    def set_compute_mode(self, mode: ComputeMode) -> None:
        """Raises `PrerequisiteError` without permission, or `NoDevicesError`."""
        with self._asked("set its compute mode") as (nvml, handle):
            try:
                nvml.nvmlDeviceSetComputeMode(handle, int(mode))
            except nvml.NVMLError_NoPermission as error:
                raise PrerequisiteError(
                    f"{self._uuid}: only root may set a GPU's compute mode",
                    hint="run as root, so that no program can bypass the share",
                ) from error
            except (nvml.NVMLError_NotSupported, nvml.NVMLError_InvalidArgument) as error:
                if not self._is_slice:
                    raise
                raise PrerequisiteError(
                    f"{self._uuid}: this driver has no compute mode for MIG devices",
                    hint="restrict access to the slice by its device nodes",
                ) from error

    def computing(self) -> tuple[int, ...]:
        with self._asked("report its processes") as (nvml, handle):
            return tuple(
                sorted(process.pid for process in nvml.nvmlDeviceGetComputeRunningProcesses(handle))
            )

    @property
    def _is_slice(self) -> bool:
        return self._uuid.startswith("MIG-")

    @contextmanager
    def _asked(self, doing: str) -> Iterator[tuple[ModuleType, Any]]:
        with loading.nvml_of(self._machine) as nvml:
            try:
                if self._machine is None:
                    nvml.nvmlInit()
                try:
                    yield nvml, nvml.nvmlDeviceGetHandleByUUID(self._uuid)
                finally:
                    loading.leave(self._machine)
            except nvml.NVMLError as error:
                raise NoDevicesError(
                    f"{self._uuid} does not {doing}: {error}", hint="see `allot doctor`"
                ) from error
