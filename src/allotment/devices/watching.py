# SPDX-License-Identifier: Apache-2.0
"""Long-lived NVML access for daemons, in which no GPU delays another.

NVML is initialised once (`NvmlSession`), and each GPU has a thread with one question at a time
(`Asker`). A hanging GPU blocks only its thread. Nothing here takes the turns of `loading.nvml_of`,
so the process must keep to one library: the driver's, or one simulated machine's.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from types import ModuleType
from typing import Any, Final, TypeVar

import msgspec

from allotment.devices import loading
from allotment.devices.faults import read_faults
from allotment.devices.gauges import Gauges, field_values, read_gauges
from allotment.devices.mig_slices import mig_slices
from allotment.devices.nvml import count_gpus, describe, reading_of
from allotment.devices.packing import read_machine
from allotment.devices.sources import Reading
from allotment.model.devices import Device
from allotment.model.errors import NoDevicesError

Answer = TypeVar("Answer")

# NVML's errors that are not specific to one GPU, by their names in nvidia-ml-py.
_DRIVER: Final = (
    "NVML_ERROR_UNINITIALIZED",
    "NVML_ERROR_DRIVER_NOT_LOADED",
    "NVML_ERROR_LIB_RM_VERSION_MISMATCH",
)
_DRIVERS_GPUS: Final = "proc/driver/nvidia/gpus"
OFF_BUS: Final = "it has fallen off the bus (the kernel's driver lists it, and it does not answer)"
_BUS_DEVICES: Final = "sys/bus/pci/devices"
_ABSENT: Final = b"\xff\xff\xff\xff"
"""In place of a device's vendor and model."""
_ROOTS: Final = (Path("/"), Path("/proc/1/root"))


class Vitals(msgspec.Struct, frozen=True, kw_only=True):
    """A GPU's own health report. None: not reported by this model or driver.

    Counts of ECC errors and energy are since the GPU's last initialisation: a lower count means a
    reset or a driver reload.
    """

    ecc_corrected: int | None = None
    ecc_uncorrected: int | None = None
    is_repair_pending: bool | None = None
    """Rows to remap or pages to retire wait for a reset; programs may run meanwhile."""
    is_repair_failed: bool | None = None
    """Rows could not be remapped: no spare ones are left."""
    recovery_action: int | None = None
    """NVML_GPU_RECOVERY_ACTION_*, from driver R565 on; 0: no action needed."""
    energy_mj: int | None = None


class Look(msgspec.Struct, frozen=True):
    """A GPU's report at one moment."""

    device: Device
    vitals: Vitals
    slices: tuple[Device, ...] = ()
    """Its MIG devices, if MIG is on."""


class Report(msgspec.Struct, frozen=True):
    """A GPU's figures for metrics at one moment."""

    reading: Reading
    vitals: Vitals
    gauges: Gauges


class ReadFailure(msgspec.Struct, frozen=True, kw_only=True):
    """An immediate error in place of an answer (a hanging GPU gives neither)."""

    message: str
    is_lost: bool = False
    """The GPU has fallen off the bus."""
    needs_reset: bool = False
    is_driver: bool = False
    """It is not specific to this GPU: the driver is gone, or does not match this library."""


class Asker:
    """A thread that asks one question at a time, and may hang in it."""

    __slots__ = ("_asked_at", "_lock", "_name", "_questions", "_thread")

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._questions: SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = SimpleQueue()
        self._asked_at: float | None = None
        self._thread: threading.Thread | None = None

    @property
    def asked_at(self) -> float | None:
        """Time of the open question, in `time.monotonic` seconds."""
        return self._asked_at

    def ask(self, question: Callable[[], Answer]) -> Future[Answer] | None:
        """None: the previous question is still open."""
        with self._lock:
            if self._asked_at is not None:
                return None
            self._asked_at = time.monotonic()
            if self._thread is None:
                # A daemon thread: the program can end although its GPU hangs.
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
        future: Future[Answer] = Future()
        self._questions.put((question, future))
        return future

    def close(self) -> None:
        """Let the thread end after its answer; further questions are invalid."""
        with self._lock:
            self._asked_at = float("-inf")
        self._questions.put(None)

    def _run(self) -> None:
        while (asked := self._questions.get()) is not None:
            question, future = asked
            # From here on it cannot be cancelled, so the answer always arrives.
            if not future.set_running_or_notify_cancel():
                self._free()
                continue
            try:
                answer = question()
            except BaseException as error:  # noqa: BLE001 - the receiver of the answer handles it
                self._free()
                future.set_exception(error)
            else:
                self._free()
                future.set_result(answer)

    def _free(self) -> None:
        """Allow the next question, before the answer is given: its receiver may ask it."""
        with self._lock:
            if self._asked_at != float("-inf"):
                self._asked_at = None


class NvmlSession:
    """NVML, initialised once and held. Its calls block: make them in an `Asker`."""

    __slots__ = ("_facts", "_machine", "_nvml")

    def __init__(self, machine: Path | None) -> None:
        self._machine = machine
        self._nvml: ModuleType | None = None
        self._facts: Sequence[Device] = ()

    @property
    def is_simulated(self) -> bool:
        return self._machine is not None

    @property
    def nvml(self) -> ModuleType:
        """nvidia-ml-py, on the right library. Raises `NoDevicesError` while it is not open."""
        if self._nvml is None:
            raise NoDevicesError("NVML is not initialised")
        return self._nvml

    def open(self) -> None:
        """Initialise NVML; raise `NoDevicesError` if it is unavailable."""
        if self._nvml is None:
            self._nvml = loading.hold(self._machine)
            self.refresh()

    def close(self) -> None:
        if self._nvml is not None:
            self._nvml = None
            loading.release(self._machine)

    def refresh(self) -> None:
        """Read again the facts of simulated GPUs that NVML lacks."""
        if self._machine is not None:
            self._facts = read_machine(self._machine).devices

    def count(self) -> int:
        """Number of NVML's GPUs; raises `NoDevicesError`."""
        return count_gpus(self.nvml)

    def signature(self) -> object:
        """A value that changes when NVML needs a new initialisation.

        NVML finds GPUs at initialisation. The kernel's module lists its GPUs; another file of the
        same name may have replaced a simulated machine.
        """
        try:
            if self._machine is None:
                return tuple(sorted(os.listdir(_ROOTS[0] / _DRIVERS_GPUS)))  # noqa: PTH208 - names
            status = self._machine.stat()
        except OSError:
            return None
        return status.st_dev, status.st_ino

    def driver_gpus(self) -> Mapping[str, bool]:
        """As the function, also for simulated GPUs."""
        machine = self._machine
        if machine is None:
            return driver_gpus()
        devices = read_machine(machine).devices
        faults = read_faults(machine)
        return {gpu.uuid: its.lost for gpu, its in zip(devices, faults, strict=True)}

    def look(self, index: int) -> Look | ReadFailure:
        nvml = self.nvml
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            device = describe(nvml, handle, index, facts=self._facts)
            slices = mig_slices(nvml, handle, device) if device.mig else ()
            return Look(device, self._vitals(nvml, handle), slices)
        except nvml.NVMLError as error:
            return failure_of(nvml, error)
        except KeyError:
            return ReadFailure(message="the simulated machine no longer has this GPU", is_lost=True)

    def report(self, index: int) -> Report | ReadFailure:
        nvml = self.nvml
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            return Report(
                reading_of(nvml, handle), self._vitals(nvml, handle), read_gauges(nvml, handle)
            )
        except nvml.NVMLError as error:
            return failure_of(nvml, error)

    def _vitals(self, nvml: ModuleType, handle: object) -> Vitals:
        fields = {
            "corrected": nvml.NVML_FI_DEV_ECC_SBE_VOL_TOTAL,
            "uncorrected": nvml.NVML_FI_DEV_ECC_DBE_VOL_TOTAL,
            "retiring": nvml.NVML_FI_DEV_RETIRED_PENDING,
            "remapping": nvml.NVML_FI_DEV_REMAPPED_PENDING,
            "failed": nvml.NVML_FI_DEV_REMAPPED_FAILURE,
            "energy": nvml.NVML_FI_DEV_TOTAL_ENERGY_CONSUMPTION,
        }
        if not self.is_simulated:  # a simulated driver's recovery action is always "none"
            fields["action"] = nvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION
        counts = field_values(nvml, handle, fields)
        repairs = [counts[name] for name in ("retiring", "remapping") if name in counts]
        return Vitals(
            ecc_corrected=counts.get("corrected"),
            ecc_uncorrected=counts.get("uncorrected"),
            is_repair_pending=any(repairs) if repairs else None,
            is_repair_failed=bool(counts["failed"]) if "failed" in counts else None,
            recovery_action=counts.get("action"),
            energy_mj=counts.get("energy"),
        )


def driver_gpus(roots: Sequence[Path] = _ROOTS) -> Mapping[str, bool]:
    """Return the UUIDs of the kernel driver's GPUs, and whether each has fallen off the bus.

    NVML lists only those whose device nodes a process may open. In a container, NVIDIA's runtime
    covers the driver's list with the container's GPUs, too (libnvidia-container, nvc_mount.c). The
    machine's first process has the whole list; a process sees that one with `hostPID`.
    """
    found = dict[str, bool]()
    for root in roots:
        with suppress(OSError):  # without a driver, or not permitted
            for bus in os.listdir(root / _DRIVERS_GPUS):  # noqa: PTH208 - names
                if uuid := driver_facts(root, bus).get("GPU UUID"):
                    found[uuid] = found.get(uuid, False) or _is_off_bus(root, bus)
    return found


def _is_off_bus(root: Path, bus: str) -> bool:
    """Return whether no device answers at a bus address, where the driver lists one.

    The bus answers a read of an absent device's configuration with ones. The kernel wakes a
    sleeping device for this read (drivers/pci/pci-sysfs.c, `pci_read_config`).
    """
    try:
        # Not buffered: each word of the rest may wait for a device that is gone.
        with (root / _BUS_DEVICES / bus / "config").open("rb", buffering=0) as file:
            return file.read(len(_ABSENT)) == _ABSENT
    except OSError:
        return False


def hidden_gpus(listed: Mapping[str, bool], shown: Sequence[str | None]) -> frozenset[str]:
    """Return the GPUs of `driver_gpus` on the bus that NVML does not show to this process.

    `shown` has NVML's GPUs; None: one that was lost before its UUID was known. Any missing GPU may
    be that one, so GPUs are hidden only if more are missing.
    """
    missing = listed.keys() - set(shown)
    lost = {uuid for uuid in missing if listed[uuid]}
    unknown = max(0, shown.count(None) - len(lost))
    return frozenset(missing - lost if len(missing - lost) > unknown else ())


def driver_facts(root: Path, bus: str) -> Mapping[str, str]:
    """Return the kernel's table of the GPU at a bus address; empty: it has none."""
    try:
        text = (root / _DRIVERS_GPUS / bus / "information").read_text("utf-8", "replace")
    except OSError:
        return {}
    lines = (line.partition(":") for line in text.splitlines())
    return {name.strip(): value.strip() for name, _, value in lines}


def driver_minor(device: Device) -> int | None:
    """Return the number N of a GPU's `/dev/nvidiaN`; None: the kernel's driver does not list it."""
    if device.simulated:
        return device.index
    bus = device.pci_bus_id.lower()[-len("0000:00:00.0") :]
    for root in _ROOTS:
        if (text := driver_facts(root, bus).get("Device Minor", "")).isdecimal():
            return int(text)
    return None


def failure_of(nvml: ModuleType, error: Exception) -> ReadFailure:
    value = getattr(error, "value", None)

    def is_one_of(*names: str) -> bool:
        return value in {getattr(nvml, name, object()) for name in names}

    return ReadFailure(
        message=f"NVML: {error}",
        is_lost=is_one_of("NVML_ERROR_GPU_IS_LOST"),
        needs_reset=is_one_of("NVML_ERROR_RESET_REQUIRED"),
        is_driver=is_one_of(*_DRIVER),
    )
