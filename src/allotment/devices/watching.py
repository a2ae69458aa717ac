# SPDX-License-Identifier: Apache-2.0
"""NVML held open for as long as a program lives, and GPUs asked so that none delays another.

`Nvml` answers a command line once and is gone; a daemon asks for months. So NVML is initialised
once (`Session`), and each GPU has a thread of its own that asks one question at a time (`Asker`): a
GPU that hangs in its driver keeps that one thread, its later questions are refused, and nobody else
notices. Nothing here takes the turns of `loading.nvml_of`, so a process with a `Session` has to
keep to one library: the driver's, or one simulated machine's.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from types import ModuleType
from typing import Any, Final, TypeVar

from allotment.devices import loading
from allotment.devices.mig_slices import mig_slices
from allotment.devices.nvml import describe
from allotment.devices.simulated import read_machine
from allotment.model.devices import Device
from allotment.model.errors import NoDevicesError

__all__ = ["Asker", "Failure", "Look", "Session", "Vitals", "failure_of"]

Answer = TypeVar("Answer")

# Which of NVML's errors say what. By name: each is a number of nvidia-ml-py's module.
_LOST: Final = ("NVML_ERROR_GPU_IS_LOST",)
_RESET: Final = ("NVML_ERROR_RESET_REQUIRED",)
_DRIVER: Final = (
    "NVML_ERROR_UNINITIALIZED",
    "NVML_ERROR_DRIVER_NOT_LOADED",
    "NVML_ERROR_LIB_RM_VERSION_MISMATCH",
)
_DRIVERS_GPUS: Final = Path("/proc/driver/nvidia/gpus")


@dataclass(frozen=True, slots=True, kw_only=True)
class Vitals:
    """How a GPU says that it is. None: this model or driver does not tell.

    Counts of ECC errors and energy are since the GPU was last initialised: whoever sees one go
    down sees that the GPU was reset or its driver loaded anew.
    """

    ecc_corrected: int | None = None
    ecc_uncorrected: int | None = None
    is_repair_pending: bool | None = None
    """Rows to be remapped or pages to be retired wait for a reset; programs may run meanwhile."""
    is_repair_failed: bool | None = None
    """Rows could not be remapped: there are no spare ones left."""
    recovery_action: int | None = None
    """NVML_GPU_RECOVERY_ACTION_*, from driver R565 on; 0: nothing has to be done."""
    energy_mj: int | None = None


@dataclass(frozen=True, slots=True)
class Look:
    """What a GPU said of itself at one moment."""

    device: Device
    vitals: Vitals
    slices: tuple[Device, ...] = ()
    """Its MIG devices, where it is in MIG mode."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """An error in place of an answer, at once (a GPU that hangs gives neither)."""

    message: str
    is_lost: bool = False
    """The GPU has fallen off the bus."""
    needs_reset: bool = False
    is_driver: bool = False
    """It is not about this GPU: the driver is gone, or another than this library is for."""


class Asker:
    """A thread that asks one question at a time, and may be stuck with it for ever."""

    __slots__ = ("_asked_at", "_lock", "_name", "_questions", "_thread")

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._questions: SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = SimpleQueue()
        self._asked_at: float | None = None
        self._thread: threading.Thread | None = None

    @property
    def asked_at(self) -> float | None:
        """When the question was asked that has no answer yet, in `time.monotonic` seconds."""
        return self._asked_at

    def ask(self, question: Callable[[], Answer]) -> Future[Answer] | None:
        """Ask, or return None as long as the question before has no answer."""
        with self._lock:
            if self._asked_at is not None:
                return None
            self._asked_at = time.monotonic()
            if self._thread is None:
                # A daemon: a program ends although its GPU hangs.
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
        future: Future[Answer] = Future()
        self._questions.put((question, future))
        return future

    def close(self) -> None:
        """Let the thread end once it has its answer; nothing may be asked any more."""
        with self._lock:
            self._asked_at = float("-inf")
        self._questions.put(None)

    def _run(self) -> None:
        while (asked := self._questions.get()) is not None:
            question, future = asked
            # From here on it cannot be cancelled, so the answer always finds its place.
            if not future.set_running_or_notify_cancel():
                self._free()
                continue
            try:
                answer = question()
            except BaseException as error:  # noqa: BLE001 - it is whoever waits who handles it
                self._free()
                future.set_exception(error)
            else:
                self._free()
                future.set_result(answer)

    def _free(self) -> None:
        """Allow the next question; before the answer is given, whose receiver may ask it."""
        with self._lock:
            if self._asked_at != float("-inf"):
                self._asked_at = None


class Session:
    """NVML, initialised once and held. Its calls block: they belong in an `Asker`."""

    __slots__ = ("_facts", "_machine", "_nvml")

    def __init__(self, machine: Path | None) -> None:
        self._machine = machine
        self._nvml: ModuleType | None = None
        self._facts: Sequence[Device] = ()

    @property
    def is_simulated(self) -> bool:
        """Whether it is a simulated machine's."""
        return self._machine is not None

    @property
    def nvml(self) -> ModuleType:
        """nvidia-ml-py, on the right library. Raises `NoDevicesError` while it is not open."""
        if self._nvml is None:
            raise NoDevicesError("NVML is not initialised")
        return self._nvml

    def open(self) -> None:
        """Initialise NVML; raise `NoDevicesError` where it cannot be had."""
        if self._nvml is None:
            self._nvml = loading.hold(self._machine)
            self.refresh()

    def close(self) -> None:
        """Let NVML go."""
        if self._nvml is not None:
            self._nvml = None
            loading.release(self._machine)

    def refresh(self) -> None:
        """Read again what NVML cannot tell of simulated GPUs."""
        if self._machine is not None:
            self._facts = read_machine(self._machine).devices

    def count(self) -> int:
        """Return how many GPUs NVML has; raise `NoDevicesError` if it does not say."""
        nvml = self.nvml
        try:
            return int(nvml.nvmlDeviceGetCount())
        except nvml.NVMLError as error:
            raise NoDevicesError(f"NVML does not count its GPUs: {error}") from error

    def signature(self) -> object:
        """Return what changes when NVML has to be initialised anew to see what is there.

        NVML finds GPUs when it is initialised. The kernel's module lists those it drives; a
        simulated machine may have been replaced by another file of the same name.
        """
        try:
            if self._machine is None:
                return tuple(sorted(each.name for each in _DRIVERS_GPUS.iterdir()))
            status = self._machine.stat()
        except OSError:
            return None
        return status.st_dev, status.st_ino

    def look(self, index: int) -> Look | Failure:
        """Ask a GPU, by NVML's number, what it is and how it is."""
        nvml = self.nvml
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            device = describe(nvml, handle, index, facts=self._facts)
            slices = mig_slices(nvml, handle, device) if device.mig else ()
            return Look(device, self._vitals(nvml, handle), slices)
        except nvml.NVMLError as error:
            return failure_of(nvml, error)
        except IndexError:
            return Failure(message="the simulated machine has no such GPU any more", is_lost=True)

    def _vitals(self, nvml: ModuleType, handle: object) -> Vitals:
        wanted = {
            "corrected": nvml.NVML_FI_DEV_ECC_SBE_VOL_TOTAL,
            "uncorrected": nvml.NVML_FI_DEV_ECC_DBE_VOL_TOTAL,
            "retiring": nvml.NVML_FI_DEV_RETIRED_PENDING,
            "remapping": nvml.NVML_FI_DEV_REMAPPED_PENDING,
            "failed": nvml.NVML_FI_DEV_REMAPPED_FAILURE,
        }
        if not self.is_simulated:
            # A simulated driver has no opinion of its GPUs: it says "none" whatever happened. And
            # its GPUs' meters cost a place among the machine's processes.
            wanted["action"] = nvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION
            wanted["energy"] = nvml.NVML_FI_DEV_TOTAL_ENERGY_CONSUMPTION
        # One call for all: each value comes with its own result.
        values = nvml.nvmlDeviceGetFieldValues(handle, list(wanted.values()))
        told = {
            name: _number(nvml, value)
            for name, value in zip(wanted, values, strict=True)
            if value.nvmlReturn == nvml.NVML_SUCCESS
        }
        repairs = [told[name] for name in ("retiring", "remapping") if name in told]
        return Vitals(
            ecc_corrected=told.get("corrected"),
            ecc_uncorrected=told.get("uncorrected"),
            is_repair_pending=any(repairs) if repairs else None,
            is_repair_failed=bool(told["failed"]) if "failed" in told else None,
            recovery_action=told.get("action"),
            energy_mj=told.get("energy"),
        )


def failure_of(nvml: ModuleType, error: Exception) -> Failure:
    """Read nvidia-ml-py's error."""
    value = getattr(error, "value", None)

    def is_one_of(names: Sequence[str]) -> bool:
        return value in {getattr(nvml, name, object()) for name in names}

    return Failure(
        message=f"NVML: {error}",
        is_lost=is_one_of(_LOST),
        needs_reset=is_one_of(_RESET),
        is_driver=is_one_of(_DRIVER),
    )


def _number(nvml: ModuleType, value: Any) -> int:  # noqa: ANN401 - a field value has no type
    """Read a field value by its own type: the driver chooses one, and the rest is stale bytes."""
    names = {
        nvml.NVML_VALUE_TYPE_UNSIGNED_INT: "uiVal",
        nvml.NVML_VALUE_TYPE_UNSIGNED_LONG: "ulVal",
        nvml.NVML_VALUE_TYPE_UNSIGNED_LONG_LONG: "ullVal",
        nvml.NVML_VALUE_TYPE_SIGNED_LONG_LONG: "sllVal",
        nvml.NVML_VALUE_TYPE_SIGNED_INT: "siVal",
        nvml.NVML_VALUE_TYPE_UNSIGNED_SHORT: "usVal",
    }
    return int(getattr(value.value, names.get(value.valueType, "ullVal")))
