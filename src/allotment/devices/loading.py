# SPDX-License-Identifier: Apache-2.0
"""Binds nvidia-ml-py to the driver's libnvidia-ml.so.1, or to ours on a simulated machine.

nvidia-ml-py supports one library per process, loaded by name. Both libraries have that name, and a
process may need both (`allot ps` with real and simulated shares). So it is rebound before each use,
and users take turns.
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

from allotment.devices.packing import MACHINE_VARIABLE
from allotment.libraries import SIMULATED_NVML, load_library
from allotment.model.errors import NoDevicesError

_NAME: Final = "libnvidia-ml.so.1"


class _Libraries:
    """The process's two libraries, and the simulated one's machine."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.real: ctypes.CDLL | None = None
        self.simulated: ctypes.CDLL | None = None
        self.machine: Path | None = None
        self.looked = False

    def load_real(self) -> ctypes.CDLL | None:
        """Load the driver's library once, before ours: afterwards the name would mean ours."""
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
    """Load our libnvidia-ml.so.1 for its own functions, without nvidia-ml-py."""
    with _libraries.lock:
        return _libraries.load_simulated()


@contextmanager
def nvml_of(machine: Path | None) -> Iterator[ModuleType]:
    """Yield nvidia-ml-py bound to the driver's library (None), or to a simulated machine.

    A simulated machine is also initialised; the driver's is left to the caller, because it can be
    slow. Raises `NoDevicesError`.
    """
    import pynvml  # late: importing it takes longer than most commands run

    with _libraries.lock:
        if machine is None:
            _bind(pynvml, _real())
        else:
            _bind(pynvml, _libraries.load_simulated())
            _move_to(pynvml, machine)
        yield pynvml


def leave(machine: Path | None) -> None:
    """Release the driver's library (None), or a simulated machine if ours is still on it."""
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
    """Return nvidia-ml-py, initialised until `release` regardless of other users.

    For long-lived users that take no turns: only in a process with one library. Raises
    `NoDevicesError`.
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
    """Release what `hold` took. The simulated library forgets its machine, as in `leave`."""
    import pynvml

    with _libraries.lock:
        _bind(pynvml, _real() if machine is None else _libraries.load_simulated())
        _shut_down(pynvml)
        if machine is not None:
            leave(machine)


def _shut_down(pynvml: ModuleType) -> None:
    """Shut NVML down. In a share both libraries may be one (the shim): it may be down already."""
    with contextlib.suppress(pynvml.NVMLError):
        pynvml.nvmlShutdown()


def _real() -> ctypes.CDLL:
    library = _libraries.load_real()
    if library is None:
        raise NoDevicesError(
            f"no NVIDIA driver found: {_NAME} cannot be loaded",
            hint="install the driver, or try without a GPU: --simulated a100-80gb",
        )
    return library


def _bind(pynvml: Any, library: ctypes.CDLL) -> None:  # noqa: ANN401 - its variables are set
    # Its two module-level variables are the only way to choose the library.
    if pynvml.nvmlLib is not library:
        pynvml.nvmlLib = library
        pynvml._nvmlGetFunctionPointer_cache.clear()  # noqa: SLF001 - see above


def _move_to(pynvml: ModuleType, machine: Path) -> None:
    """Move the simulated library to a machine: it reads the variable at initialisation."""
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
            hint="`allot fault` shows whether its driver is set to fail",
        ) from error
    finally:
        if before is None:
            del os.environ[MACHINE_VARIABLE]
        else:
            os.environ[MACHINE_VARIABLE] = before
    _libraries.machine = machine
