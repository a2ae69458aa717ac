# SPDX-License-Identifier: Apache-2.0
"""Who may have a context on a GPU: everybody, one process, or nobody (nvml.h, nvmlComputeMode_t).

It is the GPU's setting and holds for contexts that begin; it stays until it is made another or the
driver is loaded again. Setting it is root's. A MIG device has its own, where the driver has that:
CUDA 13's nvml.h takes a MIG device's handle, earlier ones do not.
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

__all__ = ["ComputeMode", "GpuSettings"]


class ComputeMode(IntEnum):
    """Who may have a context."""

    DEFAULT = 0
    EXCLUSIVE_THREAD = 1
    PROHIBITED = 2
    EXCLUSIVE_PROCESS = 3
    """One process; all clients of an MPS server are one."""


class GpuSettings:
    """One GPU's compute mode and who computes there, by NVML. `machine`: a simulated one's file.

    `uuid` may be a MIG device's.
    """

    __slots__ = ("_machine", "_uuid")

    def __init__(self, uuid: str, *, machine: Path | None = None) -> None:
        self._uuid = uuid
        self._machine = machine

    def compute_mode(self) -> ComputeMode:
        """Return the mode; raise `NoDevicesError` where the GPU does not answer."""
        with self._asked("tell its compute mode") as (nvml, handle):
            try:
                return ComputeMode(nvml.nvmlDeviceGetComputeMode(handle))
            except (nvml.NVMLError_NotSupported, nvml.NVMLError_InvalidArgument):
                if not self._is_slice:
                    raise
                return ComputeMode.DEFAULT

    def set_compute_mode(self, mode: ComputeMode) -> None:
        """Set the mode; raise `PrerequisiteError` without permission, or `NoDevicesError`."""
        with self._asked("set its compute mode") as (nvml, handle):
            try:
                nvml.nvmlDeviceSetComputeMode(handle, int(mode))
            except nvml.NVMLError_NoPermission as error:
                raise PrerequisiteError(
                    f"{self._uuid}: only root may set a GPU's compute mode",
                    hint="run as root, so that no program can go past the share",
                ) from error
            except (nvml.NVMLError_NotSupported, nvml.NVMLError_InvalidArgument) as error:
                if not self._is_slice:
                    raise
                raise PrerequisiteError(
                    f"{self._uuid}: this driver has no compute mode for MIG devices",
                    hint="let nobody else into the slice: its device nodes are its key",
                ) from error

    def computing(self) -> tuple[int, ...]:
        """Return the process ids that have a context there; raise `NoDevicesError`."""
        with self._asked("tell its processes") as (nvml, handle):
            return tuple(
                sorted(each.pid for each in nvml.nvmlDeviceGetComputeRunningProcesses(handle))
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
