# SPDX-License-Identifier: Apache-2.0
"""The GPUs as NVML tells of them, through nvidia-ml-py: the real ones, or a simulated machine's.

    with Nvml() as source:                       # the GPUs of this computer
    with Nvml(machine=path) as source:           # a simulated machine
        source.inventory(), source.readings()

Every GPU is asked in a thread of its own and given up on after a while: one that is lost, or that
hangs in its driver, becomes a `Problem`, and the others are listed as ever.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, Final, Generic, Self, TypeVar

from allotment.devices import loading
from allotment.devices.mig import MigView, mig_view
from allotment.devices.simulated import read_machine
from allotment.devices.sources import DeviceProcess, Inventory, Problem, Reading
from allotment.model.devices import Device
from allotment.model.errors import NoDevicesError

__all__ = ["Nvml", "describe"]

PATIENCE_S: Final = 3.0
"""How long the GPUs may take to answer, together, before the silent ones are given up on."""

# Multiprocessors are not NVML's to tell, cores are; how many cores one has, by compute capability.
_FEWER_CORES: Final = frozenset({(6, 0), (7, 0), (7, 2), (7, 5), (8, 0)})

_RECENT_US: Final = 2_000_000

Answer = TypeVar("Answer")
Handle = Any  # nvidia-ml-py's pointer to a device


class Nvml:
    """A `LiveSource`, while it is entered."""

    __slots__ = ("_facts", "_machine", "_patience_s")

    def __init__(self, *, machine: Path | None = None, patience_s: float = PATIENCE_S) -> None:
        self._machine = machine
        self._patience_s = patience_s
        # What NVML cannot tell of a simulated GPU, its description does.
        self._facts: Sequence[Device] = () if machine is None else read_machine(machine).devices

    def __enter__(self) -> Self:
        """Initialise NVML; raise `NoDevicesError` where it cannot be had."""
        with loading.nvml_of(self._machine) as nvml:
            if self._machine is None:
                _start(nvml)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Let NVML go."""
        loading.leave(self._machine)

    def inventory(self) -> Inventory:
        """Return the devices that answer, and those that do not."""
        answers = self._ask(self._device)
        return Inventory(
            devices=tuple(answer for answer in answers if isinstance(answer, Device)),
            problems=tuple(answer for answer in answers if isinstance(answer, Problem)),
        )

    def readings(self) -> Mapping[str, Reading | Problem]:
        """Return what each device does at the moment, by UUID (which a lost one may not tell)."""
        found: dict[str, Reading | Problem] = {}
        for answer in self._ask(_named_reading):
            if not isinstance(answer, Problem):
                uuid, reading = answer
                found[uuid] = reading
            elif answer.uuid is not None:
                found[answer.uuid] = answer
        return found

    def migs(self) -> Mapping[str, MigView]:
        """Return what each GPU that has MIG is cut into, by UUID, and who uses it.

        Left out are GPUs that do not answer, and those that do not tell this user (MIG is root's).
        """
        answers = self._ask(lambda nvml, handle, _: mig_view(nvml, handle))
        return {view.gpu.uuid: view for view in answers if isinstance(view, MigView)}

    def slices(self) -> tuple[Device, ...]:
        """Return the MIG devices of all GPUs that answer, whoever cut them; none told: none."""
        from allotment.devices.mig_slices import mig_slices  # late: few ask for them

        def question(nvml: ModuleType, handle: Handle, index: int) -> tuple[Device, ...]:
            gpu = self._device(nvml, handle, index)
            return mig_slices(nvml, handle, gpu) if gpu.mig else ()

        answers = self._ask(question)
        return tuple(each for found in answers if not isinstance(found, Problem) for each in found)

    def _ask(self, question: Callable[[ModuleType, Handle, int], Answer]) -> list[Answer | Problem]:
        """Ask all GPUs at once, each in a thread, for as long as patience lasts."""
        with loading.nvml_of(self._machine) as nvml:
            asked: list[_Question[Answer]] = [
                _Question(nvml, index, question, self._known_uuid(index))
                for index in range(_count(nvml))
            ]
            for each in asked:
                each.start()
            deadline = time.monotonic() + self._patience_s
            return [each.outcome(deadline) for each in asked]

    def _known_uuid(self, index: int) -> str | None:
        return self._facts[index].uuid if index < len(self._facts) else None

    def _device(self, nvml: ModuleType, handle: Handle, index: int) -> Device:
        return describe(nvml, handle, index, facts=self._facts)


class _Question(threading.Thread, Generic[Answer]):
    """One GPU and the question it was asked; a thread that may never come back."""

    def __init__(
        self,
        nvml: ModuleType,
        index: int,
        question: Callable[[ModuleType, Handle, int], Answer],
        uuid: str | None,
    ) -> None:
        super().__init__(name=f"nvml-{index}", daemon=True)
        self._index = index
        self._uuid = uuid
        self._answer: Answer | None = None
        self._problem = "it has not answered in time"
        self._given_up = threading.Event()
        self._nvml = nvml
        self._question = question

    def outcome(self, deadline: float) -> Answer | Problem:
        """Wait for the answer until `deadline` (monotonic seconds), and no longer."""
        self.join(max(0.0, deadline - time.monotonic()))
        self._given_up.set()
        if self._answer is None:
            return Problem(self._index, self._uuid, self._problem)
        return self._answer

    def run(self) -> None:
        nvml = self._nvml
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(self._index)
            if self._given_up.is_set():  # the library may be another one by now
                return
            self._uuid = nvml.nvmlDeviceGetUUID(handle)
            if self._given_up.is_set():
                return
            self._answer = self._question(nvml, handle, self._index)
        except nvml.NVMLError as error:
            self._problem = f"NVML: {error}"


def _start(nvml: ModuleType) -> None:
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        raise NoDevicesError(
            f"NVML does not start: {error}",
            hint="see `nvidia-smi` and `allot doctor`, or try without a GPU: --simulated a100-80gb",
        ) from error


def _count(nvml: ModuleType) -> int:
    try:
        return int(nvml.nvmlDeviceGetCount())
    except nvml.NVMLError as error:
        raise NoDevicesError(f"NVML does not count its GPUs: {error}") from error


def _optional(nvml: ModuleType, call: Callable[..., Any], *arguments: object) -> Any:  # noqa: ANN401
    """Return a figure, or None from a device or driver that does not have it."""
    try:
        return call(*arguments)
    except (nvml.NVMLError_NotSupported, nvml.NVMLError_FunctionNotFound):
        return None
    except nvml.NVMLError_NoPermission:
        return None


# ---- devices -------------------------------------------------------------------------------------


def describe(
    nvml: ModuleType, handle: Handle, index: int, *, facts: Sequence[Device] = ()
) -> Device:
    """Ask a GPU what it is. `facts` are a simulated machine's: its GPU has to answer all the same.

    Raises nvidia-ml-py's errors.
    """
    if facts:
        _ = nvml.nvmlDeviceGetMemoryInfo(handle)  # it answers; the rest is described
        device = facts[index]
    else:
        device = _real_device(nvml, handle, index)
    mig = _optional(nvml, nvml.nvmlDeviceGetMigMode, handle)
    if mig is not None and mig[0]:
        # Its memory belongs to its MIG devices; as a whole it can be given to nobody.
        return replace(device, mig=True, reserved_bytes=device.memory_bytes)
    return device


def _real_device(nvml: ModuleType, handle: Handle, index: int) -> Device:
    # Inside of a share a MIG device is one of the GPUs; its place on the bus is its GPU's.
    is_slice = bool(_optional(nvml, nvml.nvmlDeviceIsMigDeviceHandle, handle))
    whole = nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle) if is_slice else handle
    pci = nvml.nvmlDeviceGetPciInfo(whole)
    major, minor = nvml.nvmlDeviceGetCudaComputeCapability(handle)
    total, reserved, _ = _memory(nvml, handle)
    return Device(
        uuid=nvml.nvmlDeviceGetUUID(handle),
        name=nvml.nvmlDeviceGetName(handle),
        index=index,
        memory_bytes=total,
        sm_count=int(nvml.nvmlDeviceGetAttributes(handle).multiprocessorCount)
        if is_slice
        else _sm_count(nvml, handle, (major, minor)),
        compute_capability=(major, minor),
        numa_node=_numa_node(pci.busId),
        pci_bus_id=pci.busId,
        simulated=False,
        mig=False,
        reserved_bytes=reserved,
    )


def _memory(nvml: ModuleType, handle: Handle) -> tuple[int, int, int]:
    """Return total, reserved and used (by processes) bytes."""
    second = _optional(nvml, nvml.nvmlDeviceGetMemoryInfo, handle, nvml.nvmlMemory_v2)
    if second is not None:
        return second.total, second.reserved, second.used
    first = nvml.nvmlDeviceGetMemoryInfo(handle)
    return first.total, 0, first.used


def _sm_count(nvml: ModuleType, handle: Handle, capability: tuple[int, int]) -> int:
    cores = _optional(nvml, nvml.nvmlDeviceGetNumGpuCores, handle) or 0
    return int(cores) // (64 if capability in _FEWER_CORES else 128)


def _numa_node(bus_id: str) -> int | None:
    """Return the node the kernel puts the GPU on. NVML's bus id has four digits of domain more."""
    address = bus_id.lower()[-12:]
    try:
        node = int(Path("/sys/bus/pci/devices", address, "numa_node").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None
    return None if node < 0 else node


# ---- what goes on --------------------------------------------------------------------------------


def _named_reading(nvml: ModuleType, handle: Handle, _index: int) -> tuple[str, Reading]:
    return nvml.nvmlDeviceGetUUID(handle), _reading(nvml, handle)


def _reading(nvml: ModuleType, handle: Handle) -> Reading:
    _, _, used = _memory(nvml, handle)
    rates = _optional(nvml, nvml.nvmlDeviceGetUtilizationRates, handle)
    return Reading(
        used_bytes=used,
        gpu_percent=None if rates is None else rates.gpu,
        memory_percent=None if rates is None else rates.memory,
        temperature_c=_optional(
            nvml, nvml.nvmlDeviceGetTemperature, handle, nvml.NVML_TEMPERATURE_GPU
        ),
        power_mw=_optional(nvml, nvml.nvmlDeviceGetPowerUsage, handle),
        processes=_processes(nvml, handle),
    )


def _processes(nvml: ModuleType, handle: Handle) -> tuple[DeviceProcess, ...]:
    """Return who has memory of the device; a process that computes and draws is one process."""
    found: dict[int, int | None] = {}
    for call in (
        nvml.nvmlDeviceGetComputeRunningProcesses,
        nvml.nvmlDeviceGetGraphicsRunningProcesses,
        nvml.nvmlDeviceGetMPSComputeRunningProcesses,
    ):
        for process in _optional(nvml, call, handle) or ():
            known, more = found.get(process.pid), process.usedGpuMemory
            found[process.pid] = max((v for v in (known, more) if v is not None), default=None)
    busy = _utilizations(nvml, handle) if found else None
    return tuple(
        DeviceProcess(pid, used, None if busy is None else busy.get(pid, 0))
        for pid, used in sorted(found.items())
    )


def _utilizations(nvml: ModuleType, handle: Handle) -> dict[int, int] | None:
    """Return how busy each process kept the device of late, in percent; None: the driver is silent.

    The driver lists only those that ran something, each sample with its time in microseconds.
    """
    since = time.time_ns() // 1000 - _RECENT_US
    try:
        samples = nvml.nvmlDeviceGetProcessUtilization(handle, since)
    except nvml.NVMLError as error:
        # Without a sample it is "not found", or an error that says success.
        nothing = {nvml.NVML_SUCCESS, nvml.NVML_ERROR_NOT_FOUND}
        return {} if error.value in nothing else None
    ordered = sorted(samples, key=lambda sample: int(sample.timeStamp))
    return {int(sample.pid): int(sample.smUtil) for sample in ordered if sample.timeStamp >= since}
