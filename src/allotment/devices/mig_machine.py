# SPDX-License-Identifier: Apache-2.0
"""All GPUs of a machine asked about MIG at once, each in a thread of its own.

    with MigMachine(machine) as gpus:
        gpus.ask(lambda gpu: gpu.driver.look(), patience_s=3)

What one GPU answers does not wait for another, and one that hangs costs its own answer alone. The
process has to keep to one library meanwhile, as with every `watching.Session`.
"""

import subprocess
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final, Self, TypeVar

from allotment.devices.mig import GpuMig
from allotment.devices.simulated import read_machine, reset_gpu
from allotment.devices.watching import Asker, Session
from allotment.model.errors import AllotError, NoDevicesError, PrerequisiteError

__all__ = ["LOOK_S", "MigDevice", "MigMachine", "reset"]

Answer = TypeVar("Answer")

LOOK_S: Final = 5.0
"""How long GPUs may take to tell what they have."""
_RESET_S: Final = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class MigDevice:
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
        """The whole GPU's."""
        return self.driver.uuid


class MigMachine:
    """The GPUs of this computer (None), or of a simulated machine, while it is entered."""

    __slots__ = ("_session",)

    def __init__(self, machine: Path | None) -> None:
        """Name the machine; nothing is opened yet."""
        self._session = Session(machine)

    def __enter__(self) -> Self:
        """Initialise NVML; raise `NoDevicesError` where it cannot be had."""
        self._session.open()
        return self

    def __exit__(self, *_: object) -> None:
        """Let NVML go, but for a GPU that never answered: its thread may still be inside."""
        self._session.close()

    def ask(
        self,
        question: Callable[[MigDevice], Answer],
        *,
        patience_s: float,
        among: Collection[int] | None = None,
    ) -> list[tuple[int, Answer | AllotError]]:
        """Ask every GPU, all at once; return each one's number with its answer, or why it has none.

        `among`: only those of these numbers. Raises `NoDevicesError` where there is no GPU.
        """
        count = self._session.count()
        if count == 0:
            raise NoDevicesError("this machine has no GPU", hint="see `allot doctor`")
        asked = []
        for index in range(count) if among is None else sorted(among):
            asker = Asker(f"mig-{index}")
            future = asker.ask(partial(self._put, question, index))
            asked.append((index, asker, future))
        deadline = time.monotonic() + patience_s
        answers: list[tuple[int, Answer | AllotError]] = []
        for index, asker, future in asked:
            answer: Answer | AllotError
            try:
                if future is None:
                    raise TimeoutError  # noqa: TRY301 - a fresh thread is never busy
                answer = future.result(max(0.0, deadline - time.monotonic()))
            except TimeoutError:
                answer = _silent(index, patience_s)
            except AllotError as error:
                answer = error
            except self._session.nvml.NVMLError as error:
                answer = _failed(index, error)
            asker.close()
            answers.append((index, answer))
        return answers

    def ask_one(
        self, index: int, question: Callable[[MigDevice], Answer], *, patience_s: float
    ) -> Answer:
        """Ask one GPU by its number; the others are not waited for. Raises `AllotError`."""
        asker = Asker(f"mig-{index}")
        future = asker.ask(partial(self._put, question, index))
        try:
            if future is None:
                raise TimeoutError  # noqa: TRY301 - a fresh thread is never busy
            return future.result(patience_s)
        except TimeoutError:
            raise _silent(index, patience_s) from None
        except self._session.nvml.NVMLError as error:
            raise _failed(index, error) from error
        finally:
            asker.close()

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


def _silent(index: int, patience_s: float) -> AllotError:
    return AllotError(
        f"GPU {index} has not answered within {patience_s:g} s",
        hint="see `nvidia-smi`: if it hangs as well, the GPU needs a reset",
    )


def _failed(index: int, error: Exception) -> AllotError:
    return AllotError(f"GPU {index}: NVML: {error}", hint="see `allot doctor`")


def reset(machine: Path | None, uuid: str) -> None:
    """Reset a GPU that nobody uses, so that its pending MIG mode is in force.

    NVML cannot do that: nvidia-smi asks the kernel's module. Raises `BusyError` where the GPU or
    one that NVLink joins to it is in use, `PrerequisiteError` with what nvidia-smi says, or what
    `reset_gpu` raises for a simulated one.
    """
    if machine is not None:
        here = read_machine(machine).devices
        reset_gpu(machine, next(each.index for each in here if each.uuid == uuid))
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
        said = " ".join((done.stdout + done.stderr).split()) or f"status {done.returncode}"
        raise PrerequisiteError(f"nvidia-smi does not reset GPU {uuid}: {said}")
