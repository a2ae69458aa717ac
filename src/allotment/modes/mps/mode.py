# SPDX-License-Identifier: Apache-2.0
"""The mode `mps`: a share's ledger, its limits, and its programs' variables.

The ledger and the shim limit memory, as in mode `soft`, for all processes of the share together;
the driver's own limit for each process backs it up. The driver limits compute, to a part of the
multiprocessors for each process; there are no turns.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec

from allotment.model.compute import WHOLE, Compute, ComputeClass
from allotment.model.devices import Device
from allotment.model.errors import NotInModeError
from allotment.model.formats import format_percent, need_and_have
from allotment.model.modes import MPS, traits_of
from allotment.model.placements import Placement
from allotment.model.shares import ShareDevice, ShareId
from allotment.modes.soft import SoftMode, create_ledger

_VOLTA = (7, 0)


class MpsMode(SoftMode):
    """Limits memory by ledger and shim, and compute by MPS."""

    name = MPS

    def fits(self, device: Device) -> str:
        """Clients have separate address spaces since Volta."""
        if device.compute_capability < _VOLTA:
            return "MPS shares no GPU before Volta safely"
        if device.mig:
            return "it is cut by MIG: name one of its MIG devices"
        return ""

    def create(
        self, directory: Path, placement: Placement, *, share: ShareId, name: str, devices: Path
    ) -> None:
        """Create the ledger. Without a seat the shim takes no turns.

        Raises `NotInModeError` for parts of several GPUs, or of less than a percent.
        """
        del devices  # without turns
        if len(placement.devices) != 1:
            raise NotInModeError(
                f"a share of mode {MPS} is of one GPU, not of {len(placement.devices)}: each has a"
                " control daemon of its own, and a program finds one of them",
                hint="ask for one GPU, or for --mode soft",
            )
        (placed,) = placement.devices
        check_percentage(placed.compute or placement.request.compute)
        create_ledger(directory, placement, share=share, name=name, is_of_mps=True)

    def check_change(self, device: ShareDevice, *, memory_bytes: int, of_compute: bool) -> None:
        """The driver fixes a process's limits when it starts.

        Its memory limit would refuse memory that a larger ledger grants. Oversubscribed memory has
        no such limit.
        """
        if of_compute:
            raise NotInModeError(
                f"{device.uuid} ({device.name}): under MPS the compute of programs that run cannot"
                " be changed: the driver has given each its part when it began",
                hint="run them in a new share: allot run --mode mps --compute ...; shares of mode"
                " soft can change theirs",
            )
        most = device.memory_bytes if device.begun_bytes is None else device.begun_bytes
        if memory_bytes > most and not device.is_oversubscribed:
            raise NotInModeError(
                f"{device.uuid} ({device.name}): {need_and_have(memory_bytes, most)}: under MPS"
                " the memory of programs that run cannot be made more than they began with, because"
                " the driver holds each of them to that",
                hint="run them in a new share: allot run --mode mps --memory ...",
            )


PIPE_DIRECTORY: Final = "CUDA_MPS_PIPE_DIRECTORY"
_PERCENTAGE: Final = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
_MEMORY: Final = "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"
_PRIORITY: Final = "CUDA_MPS_CLIENT_PRIORITY"
VARIABLES: Final = frozenset({PIPE_DIRECTORY, _PERCENTAGE, _MEMORY, _PRIORITY})
"""Set for each share, never inherited."""

_BELOW_NORMAL: Final = "1"


def check_percentage(compute: Compute) -> None:
    """Raise `NotInModeError` for a ceiling that the driver would treat as no limit."""
    if compute.ceiling < traits_of(MPS).least_ceiling:
        raise NotInModeError(
            f"{format_percent(compute.ceiling)} % of a GPU's compute is less than MPS can enforce",
            hint="ask for --compute 1 or more, or for --mode soft, which gives parts of a percent",
        )


class Limits(msgspec.Struct, frozen=True):
    """Limits of each process of a share. None: no limit."""

    percentage: float | None = None
    """Of the multiprocessors, 1 to 100."""
    memory_mib: int | None = None
    is_below_normal: bool = False
    """Its kernels run after those of other shares."""


def limits_of(device: ShareDevice) -> Limits:
    """Return the limits of each process on a share's device.

    The memory limit backs up the share's ledger and is the one at the programs' start: the driver
    cannot change it later. Oversubscribed memory has none.
    """
    compute = device.compute
    memory_bytes = device.memory_bytes if device.begun_bytes is None else device.begun_bytes
    return Limits(
        percentage=compute.ceiling / 100 if compute.ceiling < WHOLE else None,
        memory_mib=None if device.is_oversubscribed else -(-memory_bytes // (1 << 20)),
        is_below_normal=compute.kind is ComputeClass.BESTEFFORT,
    )


def client_environment(device: ShareDevice, pipes: str) -> Mapping[str, str]:
    """Return the variables of a share's programs, for the daemon at `pipes`.

    The memory limit names device 0, the daemon's only GPU: with an unknown device the driver would
    drop all limits.
    """
    limits = limits_of(device)
    environment = {PIPE_DIRECTORY: pipes}
    if limits.percentage is not None:
        environment[_PERCENTAGE] = format_percent(device.compute.ceiling)
    if limits.memory_mib is not None:
        environment[_MEMORY] = f"0={limits.memory_mib}M"
    if limits.is_below_normal:
        environment[_PRIORITY] = _BELOW_NORMAL
    return environment
