# SPDX-License-Identifier: Apache-2.0
"""Reserves a GPU for MPS clients by its compute mode.

Otherwise a program that misses the daemon would silently run beside all shares without a limit. The
previous mode is recorded before the change and restored at the end, unless another tool has changed
it meanwhile.
"""

from typing import Protocol

from allotment.devices.compute_modes import ComputeMode
from allotment.model.errors import AllotError, BusyError, PrerequisiteError
from allotment.model.formats import format_pids
from allotment.modes.mps.state import DaemonState, MpsJournal


class GpuAccess(Protocol):
    """The driver's part."""

    def compute_mode(self) -> ComputeMode: ...

    def set_compute_mode(self, mode: ComputeMode) -> None:
        """Raises `PrerequisiteError` if only root may."""
        ...

    def computing(self) -> tuple[int, ...]:
        """Return the process ids with a context."""
        ...


class Reservation:
    """Reserves one GPU. For its daemon's supervisor."""

    def __init__(self, gpu: GpuAccess, uuid: str, journal: MpsJournal) -> None:
        self._gpu = gpu
        self._uuid = uuid
        self._journal = journal

    def reserve(self) -> None:
        """Admit only MPS clients to the GPU; raise `BusyError` if it is in use."""
        mode = self._gpu.compute_mode()
        is_ours = self._journal.status.mode_before is not None
        ours = (
            {ComputeMode.DEFAULT, ComputeMode.EXCLUSIVE_PROCESS}
            if is_ours
            else {ComputeMode.DEFAULT}
        )
        if mode not in ours:
            raise BusyError(
                f"GPU {self._uuid} is in compute mode {mode.name}, set outside Allotment:"
                " it is kept for their program",
                hint=f"if it is not needed: nvidia-smi -i {self._uuid} -c DEFAULT",
            )
        others = self._gpu.computing()
        if others and mode is ComputeMode.DEFAULT:
            raise BusyError(
                f"GPU {self._uuid} is in use by other programs ({format_pids(others)}), which MPS"
                " would lock out",
                hint="end them first, or use another GPU",
            )
        if not is_ours:
            self._journal.write(mode_before=int(mode))
        try:
            self._gpu.set_compute_mode(ComputeMode.EXCLUSIVE_PROCESS)
        except PrerequisiteError as error:
            # The daemon serves without root's rights too; only this user's own programs can then
            # bypass it.
            self._journal.write(mode_before=None, is_exclusive=False)
            self._journal.place.log(f"the GPU is not kept for MPS clients: {error.message}")
        else:
            self._journal.write(is_exclusive=True)

    def release(self, state: DaemonState) -> None:
        """Restore the compute mode, and record `state` without a daemon.

        A mode that cannot be restored stays recorded. Raises `StateError`.
        """
        changes: dict[str, object] = {"daemon": None, "supervisor": None, "parts": ()}
        if state is DaemonState.STOPPED:  # the next daemon chooses its protocol again
            changes |= {"protocol": 0}
        before = self._journal.status.mode_before
        try:
            if before is not None:
                self._restore(ComputeMode(before))
        except AllotError as error:
            self._journal.place.log(f"the compute mode is not put back: {error.message}")
        else:
            changes |= {"mode_before": None, "is_exclusive": False}
        self._journal.write(state=state, **changes)

    def _restore(self, before: ComputeMode) -> None:
        """Restore the compute mode, unless another tool has changed it meanwhile."""
        mode = self._gpu.compute_mode()
        if mode is ComputeMode.EXCLUSIVE_PROCESS:
            self._gpu.set_compute_mode(before)
        elif mode is not before:
            self._journal.place.log(f"compute mode {mode.name}, set outside Allotment, stays")
