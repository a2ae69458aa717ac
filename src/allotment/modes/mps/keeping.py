# SPDX-License-Identifier: Apache-2.0
"""A GPU kept for MPS clients by its compute mode.

A program that does not find the daemon would else run beside all shares and without a limit, in
silence. What the mode was before is written down before it is changed, and put back at the end,
unless somebody else has set another one meanwhile.
"""

from typing import Protocol

from allotment.devices.compute_modes import ComputeMode
from allotment.model.errors import AllotError, BusyError, PrerequisiteError
from allotment.modes.mps.places import DaemonState, Journal

__all__ = ["GpuAccess", "Keeping"]


class GpuAccess(Protocol):
    """What is asked of the GPU's driver."""

    def compute_mode(self) -> ComputeMode:
        """Return who may have a context."""
        ...

    def set_compute_mode(self, mode: ComputeMode) -> None:
        """Set it; raise `PrerequisiteError` where only root may."""
        ...

    def computing(self) -> tuple[int, ...]:
        """Return the process ids that have a context."""
        ...


class Keeping:
    """Keeps one GPU. For its daemon's supervisor."""

    def __init__(self, gpu: GpuAccess, uuid: str, journal: Journal) -> None:
        """Know the GPU; nothing is changed yet."""
        self._gpu = gpu
        self._uuid = uuid
        self._journal = journal

    def keep_for_clients(self) -> None:
        """Let nobody but MPS clients onto the GPU; raise `BusyError` where somebody is there."""
        mode = self._gpu.compute_mode()
        is_ours = self._journal.status.mode_before is not None
        ours = (
            {ComputeMode.DEFAULT, ComputeMode.EXCLUSIVE_PROCESS}
            if is_ours
            else {ComputeMode.DEFAULT}
        )
        if mode not in ours:
            raise BusyError(
                f"GPU {self._uuid} is in compute mode {mode.name}, which somebody else set:"
                " it is kept for their program",
                hint=f"if it is not needed: nvidia-smi -i {self._uuid} -c DEFAULT",
            )
        others = self._gpu.computing()
        if others and mode is ComputeMode.DEFAULT:
            raise BusyError(
                f"GPU {self._uuid} is in use by other programs"
                f" ({', '.join(map(str, others[:8]))}), which MPS would lock out",
                hint="end them first, or use another GPU",
            )
        if not is_ours:
            self._journal.write(mode_before=int(mode))
        try:
            self._gpu.set_compute_mode(ComputeMode.EXCLUSIVE_PROCESS)
        except PrerequisiteError as error:
            # Without root's right the daemon still serves; only a program that goes round it is
            # not held back, and that is this user's own.
            self._journal.write(mode_before=None, is_exclusive=False)
            self._journal.place.tell(f"the GPU is not kept for MPS clients: {error.message}")
        else:
            self._journal.write(is_exclusive=True)

    def let_go(self, state: DaemonState) -> None:
        """Put the compute mode back, and write down that nobody keeps a daemon: it is in `state`.

        A mode that cannot be put back stays written down. Raises `StateError`.
        """
        changes: dict[str, object] = {"daemon": None, "supervisor": None, "parts": ()}
        if state is DaemonState.STOPPED:  # who comes next begins anew
            changes |= {"protocol": 0}
        before = self._journal.status.mode_before
        try:
            if before is not None:
                self._put_back(ComputeMode(before))
        except AllotError as error:
            self._journal.place.tell(f"the compute mode is not put back: {error.message}")
        else:
            changes |= {"mode_before": None, "is_exclusive": False}
        self._journal.write(state=state, **changes)

    def _put_back(self, before: ComputeMode) -> None:
        """Put the compute mode back, unless somebody else has set another one meanwhile."""
        now = self._gpu.compute_mode()
        if now is ComputeMode.EXCLUSIVE_PROCESS:
            self._gpu.set_compute_mode(before)
        elif now is not before:
            self._journal.place.tell(f"compute mode {now.name}, which somebody else set, stays")
