# SPDX-License-Identifier: Apache-2.0
"""Which libnvidia-ml.so.1 nvidia-ml-py talks to: the driver's, or ours on a simulated machine.

nvidia-ml-py knows one library per process, loaded by name. Both libraries have that name, and a
process may need both (`allot ps` with real and simulated shares). So it is told which one before
every use, and users take turns.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from allotment.devices.simulated import MACHINE_VARIABLE
from allotment.libraries import SIMULATED_NVML, load_library
from allotment.model.errors import NoDevicesError

__all__ = ["hold", "leave", "nvml_of", "release", "simulated_library"]

_NAME: Final = "libnvidia-ml.so.1"


class _Libraries:
    """The process's two libraries, and the machine that the simulated one is on."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.real: ctypes.CDLL | None = None
        self.simulated: ctypes.CDLL | None = None
        self.machine: Path | None = None
        self.looked = False

    def load_real(self) -> ctypes.CDLL | None:
        """Load the driver's library, once, and before ours: after it, the name would mean ours."""
        if not self.looked:
            self.looked = True
            try:
                self.real = ctypes.CDLL(_NAME)
            except OSError:
                self.real = None
        return self.real

    def load_simulated(self) -> ctypes.CDLL:
        if self.simulated is None:
            self.load_real()
            self.simulated = load_library(SIMULATED_NVML)
        return self.simulated


_libraries: Final = _Libraries()


def simulated_library() -> ctypes.CDLL:
    """Load our libnvidia-ml.so.1 for what it has beside NVML, without a word to nvidia-ml-py."""
    with _libraries.lock:
        return _libraries.load_simulated()


@contextmanager
def nvml_of(machine: Path | None) -> Iterator[ModuleType]:
    """Give nvidia-ml-py bound to the driver's library (None), or to a simulated machine.

    For the simulated machine it is also initialised; for the driver's that is the caller's to do,
    because it takes long on some computers. Raises `NoDevicesError` where there is none.
    """
    import pynvml  # late: it takes longer to import than most commands run

    with _libraries.lock:
        if machine is None:
            _bind(pynvml, _real())
        else:
            _bind(pynvml, _libraries.load_simulated())
            _move_to(pynvml, machine)
        yield pynvml


def leave(machine: Path | None) -> None:
    """Let go of the driver's library (None), or of a simulated machine if ours is still on it."""
    import pynvml

    with _libraries.lock:
        if machine is None:
            _bind(pynvml, _real())
            _shut_down(pynvml)
        elif machine == _libraries.machine:
            _bind(pynvml, _libraries.load_simulated())
            _shut_down(pynvml)
            _libraries.machine = None


def hold(machine: Path | None) -> ModuleType:
    """Give nvidia-ml-py initialised; so it stays until `release`, whoever else enters and leaves.

    For those who ask for as long as they live, without taking turns: only in a process that asks
    one library all the time. Raises `NoDevicesError`.
    """
    with nvml_of(machine) as pynvml:
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError as error:
            raise NoDevicesError(
                f"NVML does not start: {error}", hint="see `nvidia-smi` and `allot doctor`"
            ) from error
        return pynvml


def release(machine: Path | None) -> None:
    """Let go of what `hold` took. The simulated library forgets its machine, as in `leave`."""
    import pynvml

    with _libraries.lock:
        _bind(pynvml, _real() if machine is None else _libraries.load_simulated())
        _shut_down(pynvml)
        if machine is not None:
            leave(machine)


def _shut_down(pynvml: ModuleType) -> None:
    """End NVML. In a share both libraries may be one (the shim answers): it may have ended."""
    with contextlib.suppress(pynvml.NVMLError):
        pynvml.nvmlShutdown()


def _real() -> ctypes.CDLL:
    library = _libraries.load_real()
    if library is None:
        raise NoDevicesError(
            f"no NVIDIA driver here: {_NAME} cannot be loaded",
            hint="install the driver, or try without a GPU: --simulated a100-80gb",
        )
    return library


def _bind(pynvml: Any, library: ctypes.CDLL) -> None:  # noqa: ANN401 - its variables are set
    # Its two module-level variables are the only way to say which library is meant.
    if pynvml.nvmlLib is not library:
        pynvml.nvmlLib = library
        pynvml._nvmlGetFunctionPointer_cache.clear()  # noqa: SLF001 - see above


def _move_to(pynvml: ModuleType, machine: Path) -> None:
    """Put the simulated library on a machine: it reads the variable when it is initialised."""
    if _libraries.machine == machine:
        return
    if _libraries.machine is not None:
        _shut_down(pynvml)
        _libraries.machine = None
    before = os.environ.get(MACHINE_VARIABLE)
    os.environ[MACHINE_VARIABLE] = str(machine)
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        raise NoDevicesError(
            f"the simulated machine {machine} does not start: {error}",
            hint="`allot fault` tells whether its driver was made to fail",
        ) from error
    finally:
        if before is None:
            del os.environ[MACHINE_VARIABLE]
        else:
            os.environ[MACHINE_VARIABLE] = before
    _libraries.machine = machine
