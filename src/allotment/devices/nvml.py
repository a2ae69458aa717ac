# SPDX-License-Identifier: Apache-2.0
"""The GPUs that NVML reports, through nvidia-ml-py: real ones, or a simulated machine's.

    with Nvml() as source:                       # the GPUs of this computer
    with Nvml(machine=path) as source:           # a simulated machine
        source.inventory(), source.readings()

Each GPU is queried in its own thread with a time limit: a lost or hanging one becomes a `Problem`,
and the others are unaffected.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, Final, Self, TypeVar

from allotment.devices import loading
from allotment.devices.mig import MigView, mig_view, process_lists
from allotment.devices.packing import read_machine
from allotment.devices.sources import DeviceProcess, Inventory, Problem, Reading
from allotment.model.devices import Device, mps_clients
from allotment.model.errors import AllotError, NoDevicesError
from allotment.model.structs import replace

PATIENCE_S: Final = 3.0
"""Time for all GPUs together to answer."""

# NVML reports cores, not multiprocessors: cores per multiprocessor by compute capability.
_FEWER_CORES: Final = frozenset({(6, 0), (7, 0), (7, 2), (7, 5), (8, 0)})

_RECENT_US: Final = 2_000_000

Answer = TypeVar("Answer")
Handle = Any  # nvidia-ml-py's pointer to a device


class Nvml:
    """The devices of this computer or of a simulated machine, while it is entered."""

    __slots__ = ("_facts", "_machine", "_patience_s")

    def __init__(self, *, machine: Path | None = None, patience_s: float = PATIENCE_S) -> None:
        self._machine = machine
        self._patience_s = patience_s
        # Facts of simulated GPUs that NVML does not report.
        self._facts: Sequence[Device] = () if machine is None else read_machine(machine).devices

    def __enter__(self) -> Self:
        """Initialise NVML; raise `NoDevicesError` if it is unavailable."""
        with loading.nvml_of(self._machine) as nvml:
            if self._machine is None:
                _start(nvml)
        return self

    def __exit__(self, *_: object) -> None:
        loading.leave(self._machine)

    def inventory(self) -> Inventory:
        answers = self._ask(self._device)
        return Inventory(
            devices=tuple(answer for answer in answers if isinstance(answer, Device)),
            problems=tuple(answer for answer in answers if isinstance(answer, Problem)),
        )

    def readings(self) -> Mapping[str, Reading | Problem]:
        readings: dict[str, Reading | Problem] = {}
        for answer in self._ask(_named_reading):
            if not isinstance(answer, Problem):
                uuid, reading = answer
                readings[uuid] = reading
            elif answer.uuid is not None:
                readings[answer.uuid] = answer
        return readings

    def mig_views(self) -> Mapping[str, MigView]:
        """MIG state and users of each GPU with MIG, by UUID.

        GPUs that do not answer or hide it from this user are omitted (MIG is root's).
        """
        answers = self._ask(lambda nvml, handle, _: mig_view(nvml, handle))
        return {view.gpu.uuid: view for view in answers if isinstance(view, MigView)}

    def slices(self) -> tuple[Device, ...]:
        """The MIG devices of all answering GPUs, including foreign ones."""
        from allotment.devices.mig_slices import mig_slices  # late: few callers need them

        def question(nvml: ModuleType, handle: Handle, index: int) -> tuple[Device, ...]:
            gpu = self._device(nvml, handle, index)
            return mig_slices(nvml, handle, gpu) if gpu.mig else ()

        answers = self._ask(question)
        return tuple(
            device for answer in answers if not isinstance(answer, Problem) for device in answer
        )

    def _ask(self, question: Callable[[ModuleType, Handle, int], Answer]) -> list[Answer | Problem]:
        with loading.nvml_of(self._machine) as nvml:
            is_over = threading.Event()
            uuids = {index: self._known_uuid(index) for index in range(count_gpus(nvml))}

            def answer(index: int) -> Answer:
                handle = nvml.nvmlDeviceGetHandleByIndex(index)
                _check_in_time(is_over)
                uuids[index] = nvml.nvmlDeviceGetUUID(handle)
                _check_in_time(is_over)
                return question(nvml, handle, index)

            questions = {index: partial(answer, index) for index in uuids}
            answers = ask_each(questions, name="nvml", patience_s=self._patience_s)
            is_over.set()
            return [
                Problem(index, uuids[index], problem_text(nvml, result))
                if isinstance(result, Exception)
                else result
                for index, result in answers.items()
            ]

    def _known_uuid(self, index: int) -> str | None:
        return self._facts[index].uuid if index < len(self._facts) else None

    def _device(self, nvml: ModuleType, handle: Handle, index: int) -> Device:
        return describe(nvml, handle, index, facts=self._facts)


def ask_each(
    questions: Mapping[int, Callable[[], Answer]], *, name: str, patience_s: float
) -> dict[int, Answer | Exception]:
    """Ask all questions at once, each in a thread of its own; the answers by number.

    An error is an answer, too; `TimeoutError` if a GPU has not answered in time.
    """
    answers: dict[int, Answer | Exception] = {}

    def ask(number: int) -> None:
        try:
            answers[number] = questions[number]()
        except Exception as error:  # noqa: BLE001 - the caller handles it
            answers[number] = error

    threads = [
        # Daemon threads: the program can end although a GPU hangs.
        threading.Thread(target=ask, args=(number,), name=f"{name}-{number}", daemon=True)
        for number in questions
    ]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + patience_s
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    return {number: answers.get(number, TimeoutError()) for number in questions}


def problem_text(nvml: ModuleType, error: Exception) -> str:
    """Explain why a GPU gave no answer; raise an error that is neither NVML's nor a time-out."""
    if isinstance(error, TimeoutError):
        return "it has not answered in time"
    if isinstance(error, nvml.NVMLError):
        return f"NVML: {error}"
    raise error


def _check_in_time(is_over: threading.Event) -> None:
    if is_over.is_set():  # another library may be bound by now
        raise TimeoutError


def _start(nvml: ModuleType) -> None:
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        raise NoDevicesError(
            f"NVML does not start: {error}",
            hint="see `nvidia-smi` and `allot doctor`, or try without a GPU: --simulated a100-80gb",
        ) from error


def count_gpus(nvml: ModuleType) -> int:
    """Raises `NoDevicesError`."""
    try:
        return int(nvml.nvmlDeviceGetCount())
    except nvml.NVMLError as error:
        raise NoDevicesError(f"NVML does not count its GPUs: {error}") from error


def optional(nvml: ModuleType, call: Callable[..., Any], *arguments: object) -> Any:  # noqa: ANN401
    """None if the device or the driver does not support the call, or this user may not make it."""
    try:
        return call(*arguments)
    except (
        nvml.NVMLError_NotSupported,
        nvml.NVMLError_FunctionNotFound,
        nvml.NVMLError_NoPermission,
    ):
        return None


# ---- devices -------------------------------------------------------------------------------------


def describe(
    nvml: ModuleType, handle: Handle, index: int, *, facts: Sequence[Device] = ()
) -> Device:
    """Describe a GPU. `facts` are a simulated machine's: its GPU still has to answer.

    Raises nvidia-ml-py's errors, and `KeyError` for a GPU that `facts` lack.
    """
    if facts:
        # By name: a process that may use a part of the machine has other numbers.
        device = {fact.uuid: fact for fact in facts}[nvml.nvmlDeviceGetUUID(handle)]
    else:
        device = _real_device(nvml, handle, index)
    mig = optional(nvml, nvml.nvmlDeviceGetMigMode, handle)
    return replace(device, mig=True) if mig is not None and mig[0] else device


def _real_device(nvml: ModuleType, handle: Handle, index: int) -> Device:
    # Inside a share a MIG device is one of the GPUs; its bus id is its GPU's.
    is_slice = bool(optional(nvml, nvml.nvmlDeviceIsMigDeviceHandle, handle))
    whole = nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle) if is_slice else handle
    pci = nvml.nvmlDeviceGetPciInfo(whole)
    major, minor = nvml.nvmlDeviceGetCudaComputeCapability(handle)
    total, reserved, _ = _memory(nvml, handle)
    cuda = optional(nvml, nvml.nvmlSystemGetCudaDriverVersion) or 0
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
        mps_clients=mps_clients(int(cuda)),
    )


def _memory(nvml: ModuleType, handle: Handle) -> tuple[int, int, int]:
    """Total, reserved and used (by processes) bytes."""
    second = optional(nvml, nvml.nvmlDeviceGetMemoryInfo, handle, nvml.nvmlMemory_v2)
    if second is not None:
        return second.total, second.reserved, second.used
    first = nvml.nvmlDeviceGetMemoryInfo(handle)
    return first.total, 0, first.used


def _sm_count(nvml: ModuleType, handle: Handle, capability: tuple[int, int]) -> int:
    cores = optional(nvml, nvml.nvmlDeviceGetNumGpuCores, handle) or 0
    return int(cores) // (64 if capability in _FEWER_CORES else 128)


def _numa_node(bus_id: str) -> int | None:
    """The GPU's NUMA node in the kernel. NVML's bus id has four more digits of domain."""
    address = bus_id.lower()[-12:]
    try:
        node = int(Path("/sys/bus/pci/devices", address, "numa_node").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None
    return None if node < 0 else node


# ---- what goes on --------------------------------------------------------------------------------


def _named_reading(nvml: ModuleType, handle: Handle, _index: int) -> tuple[str, Reading]:
    return nvml.nvmlDeviceGetUUID(handle), reading_of(nvml, handle)


def reading_of(nvml: ModuleType, handle: Handle) -> Reading:
    asked_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
    _, _, used = _memory(nvml, handle)
    rates = optional(nvml, nvml.nvmlDeviceGetUtilizationRates, handle)
    return Reading(
        used_bytes=used,
        gpu_percent=None if rates is None else rates.gpu,
        memory_percent=None if rates is None else rates.memory,
        temperature_c=optional(
            nvml, nvml.nvmlDeviceGetTemperature, handle, nvml.NVML_TEMPERATURE_GPU
        ),
        power_mw=optional(nvml, nvml.nvmlDeviceGetPowerUsage, handle),
        processes=_processes(nvml, handle),
        asked_ns=asked_ns,
    )


def _processes(nvml: ModuleType, handle: Handle) -> tuple[DeviceProcess, ...]:
    """Processes with memory on the device; compute and graphics count as one process."""
    used_bytes: dict[int, int | None] = {}
    for call in process_lists(nvml):
        for process in optional(nvml, call, handle) or ():
            amounts = (used_bytes.get(process.pid), process.usedGpuMemory)
            used_bytes[process.pid] = max((n for n in amounts if n is not None), default=None)
    busy = _utilizations(nvml, handle) if used_bytes else None
    return tuple(
        DeviceProcess(pid, used, None if busy is None else busy.get(pid, 0))
        for pid, used in sorted(used_bytes.items())
    )


def _utilizations(nvml: ModuleType, handle: Handle) -> dict[int, int] | None:
    """Recent use by each process, in percent; None: not reported.

    The driver lists only active ones, each sample with its time in microseconds.
    """
    since = time.time_ns() // 1000 - _RECENT_US
    try:
        samples = nvml.nvmlDeviceGetProcessUtilization(handle, since)
    except nvml.NVMLError as error:
        # Without a sample the result is "not found", or an error with the code of success.
        nothing = {nvml.NVML_SUCCESS, nvml.NVML_ERROR_NOT_FOUND}
        return {} if error.value in nothing else None
    ordered = sorted(samples, key=lambda sample: int(sample.timeStamp))
    return {int(sample.pid): int(sample.smUtil) for sample in ordered if sample.timeStamp >= since}


def readings(machine: Path | None) -> Mapping[str, Reading | Problem]:
    """Return the figures of a machine's devices by UUID; empty if NVML does not answer."""
    try:
        with Nvml(machine=machine) as source:
            return source.readings()
    except AllotError:
        return {}  # the figures of the ledger are still shown
