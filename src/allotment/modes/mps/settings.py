# SPDX-License-Identifier: Apache-2.0
"""What a share's programs may have by MPS, and are told by environment.

The variables and their meaning: docs.nvidia.com/deploy/mps, appendix on environment variables. All
of them hold for one process each, and are read when it makes its first context. Where the daemon
has namespaces it is told the same limits, which go before a program's own word (`namespaces`).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from allotment.model.compute import WHOLE, Compute, ComputeClass
from allotment.model.errors import NotInModeError
from allotment.model.formats import format_percent
from allotment.model.shares import ShareDevice

__all__ = [
    "PIPE_DIRECTORY",
    "VARIABLES",
    "Limits",
    "check_percentage",
    "client_environment",
    "limits_of",
]

PIPE_DIRECTORY: Final = "CUDA_MPS_PIPE_DIRECTORY"
_PERCENTAGE: Final = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
_MEMORY: Final = "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"
_PRIORITY: Final = "CUDA_MPS_CLIENT_PRIORITY"
VARIABLES: Final = frozenset({PIPE_DIRECTORY, _PERCENTAGE, _MEMORY, _PRIORITY})
"""Set for each share, and inherited by none."""

_BELOW_NORMAL: Final = "1"
_LEAST: Final = 100
"""Basis points. The driver takes less than 1 % for no limit at all."""


def check_percentage(compute: Compute) -> None:
    """Raise `NotInModeError` for a ceiling that the driver would take for no limit."""
    if compute.ceiling < _LEAST:
        raise NotInModeError(
            f"{format_percent(compute.ceiling)} % of a GPU's compute is less than MPS can hold to",
            hint="ask for --compute 1 or more, or for --mode soft, which gives parts of a percent",
        )


@dataclass(frozen=True, slots=True)
class Limits:
    """What each process of a share may have. None: no limit."""

    percentage: float | None = None
    """Of the multiprocessors, 1 to 100."""
    memory_mib: int | None = None
    is_below_normal: bool = False
    """Its kernels go after others'."""


def limits_of(device: ShareDevice) -> Limits:
    """Return what each process of a share may have of its device.

    The limit of memory is a second line behind the share's ledger, and what its programs began
    with: the driver changes none of one that runs. There is none where memory may live on the host.
    """
    compute = device.compute
    memory_bytes = device.memory_bytes if device.begun_bytes is None else device.begun_bytes
    return Limits(
        percentage=compute.ceiling / 100 if compute.ceiling < WHOLE else None,
        memory_mib=None if device.is_oversubscribed else -(-memory_bytes // (1 << 20)),
        is_below_normal=compute.kind is ComputeClass.BESTEFFORT,
    )


def client_environment(device: ShareDevice, pipes: str) -> Mapping[str, str]:
    """Return the variables of a share's programs, whose server's daemon is at `pipes`.

    Memory is named by the device's number: a client sees the one GPU that its daemon has, so that
    a name that it cannot see, which would make the driver drop all limits, cannot occur.
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
