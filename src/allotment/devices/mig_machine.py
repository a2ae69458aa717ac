# SPDX-License-Identifier: Apache-2.0
"""Queries all GPUs of a machine about MIG at once, each in its own thread.

    with MigMachine(machine) as gpus:
        gpus.ask(lambda gpu: gpu.driver.look(), patience_s=3)

A hanging GPU only loses its own answer. Meanwhile the process has to keep to one library, as with
`watching.NvmlSession`.
"""

import subprocess
from collections.abc import Callable, Collection, Iterable
from functools import partial
from pathlib import Path
from typing import Final, Self, TypeVar

import msgspec

from allotment.devices.mig import GpuMig
from allotment.devices.nvml import ask_each
from allotment.devices.packing import read_machine
from allotment.devices.simulated import reset_gpu
from allotment.devices.watching import NvmlSession
from allotment.model.errors import AllotError, NoDevicesError, PrerequisiteError

Answer = TypeVar("Answer")

LOOK_S: Final = 5.0
"""Time for GPUs to report their MIG state."""
_RESET_S: Final = 120.0


class MigDevice(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU, while its machine is open."""

    index: int
    """NVML's number of it."""
    name: str
    pci_id: int
    """Device and vendor in one number: 0x20B010DE."""
    pci_subsystem: int
    driver: GpuMig

    @property
    def uuid(self) -> str:
        return self.driver.uuid


class MigMachine:
    """The GPUs of this computer (None), or of a simulated machine, while it is entered."""

    __slots__ = ("_session",)

    def __init__(self, machine: Path | None) -> None:
        self._session = NvmlSession(machine)

    def __enter__(self) -> Self:
        """Initialise NVML; raise `NoDevicesError` if it is unavailable."""
        self._session.open()
        return self

    def __exit__(self, *_: object) -> None:
        """Release NVML, unless a GPU never answered: its thread may still be inside."""
        self._session.close()

    def ask(
        self,
        question: Callable[[MigDevice], Answer],
        *,
        patience_s: float,
        among: Collection[int] | None = None,
    ) -> list[tuple[int, Answer | AllotError]]:
        """Query all GPUs at once; each one's number with its answer, or the error.

        `among`: only these numbers. Raises `NoDevicesError` without GPUs.
        """
        count = self._session.count()
        if count == 0:
            raise NoDevicesError("this machine has no GPU", hint="see `allot doctor`")
        return self._ask(question, range(count) if among is None else sorted(among), patience_s)

    def ask_one(
        self, index: int, question: Callable[[MigDevice], Answer], *, patience_s: float
    ) -> Answer:
        """Query one GPU by its number; do not wait for others. Raises `AllotError`."""
        ((_, answer),) = self._ask(question, (index,), patience_s)
        if isinstance(answer, AllotError):
            raise answer
        return answer

    def _ask(
        self, question: Callable[[MigDevice], Answer], indices: Iterable[int], patience_s: float
    ) -> list[tuple[int, Answer | AllotError]]:
        questions = {index: partial(self._put, question, index) for index in indices}
        answers = ask_each(questions, name="mig", patience_s=patience_s)
        return [
            (index, self._error(index, answer, patience_s))
            if isinstance(answer, Exception)
            else (index, answer)
            for index, answer in answers.items()
        ]

    def _error(self, index: int, error: Exception, patience_s: float) -> AllotError:
        match error:
            case AllotError():
                return error
            case TimeoutError():
                return AllotError(
                    f"GPU {index} has not answered within {patience_s:g} s",
                    hint="see `nvidia-smi`: if it hangs as well, the GPU needs a reset",
                )
            case self._session.nvml.NVMLError():
                return AllotError(f"GPU {index}: NVML: {error}", hint="see `allot doctor`")
            case _:
                raise error

    def _put(self, question: Callable[[MigDevice], Answer], index: int) -> Answer:
        return question(self._device(index))

    def _device(self, index: int) -> MigDevice:
        nvml = self._session.nvml
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        pci = nvml.nvmlDeviceGetPciInfo(handle)
        return MigDevice(
            index=index,
            name=str(nvml.nvmlDeviceGetName(handle)),
            pci_id=int(pci.pciDeviceId),
            pci_subsystem=int(pci.pciSubSystemId),
            driver=GpuMig(nvml, str(nvml.nvmlDeviceGetUUID(handle))),
        )


def reset(machine: Path | None, uuid: str) -> None:
    """Reset an unused GPU, so that its pending MIG mode takes effect.

    NVML has no reset: nvidia-smi uses the kernel's module. Raises `BusyError` if the GPU or one
    joined by NVLink is in use, `PrerequisiteError` with nvidia-smi's message, or the errors of
    `reset_gpu` for a simulated one.
    """
    if machine is not None:
        devices = read_machine(machine).devices
        reset_gpu(machine, next(device.index for device in devices if device.uuid == uuid))
        return
    try:
        done = subprocess.run(
            ["nvidia-smi", "--gpu-reset", "-i", uuid],
            capture_output=True,
            text=True,
            check=False,
            timeout=_RESET_S,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise PrerequisiteError(f"nvidia-smi cannot reset GPU {uuid}: {error}") from error
    if done.returncode != 0:
        answer = " ".join((done.stdout + done.stderr).split()) or f"status {done.returncode}"
        raise PrerequisiteError(f"nvidia-smi does not reset GPU {uuid}: {answer}")
