# SPDX-License-Identifier: Apache-2.0
"""What a share's programs are told of MPS by environment, as the driver's libraries read it.

The variables and their meaning: docs.nvidia.com/deploy/mps, appendix on environment variables. All
of them hold for one process each, and are read when it makes its first context.
"""

from collections.abc import Mapping
from typing import Final

from allotment.model.compute import WHOLE, Compute, ComputeClass
from allotment.model.errors import UsageError
from allotment.model.formats import format_percent
from allotment.model.shares import ShareDevice

__all__ = ["MPS_CLIENTS", "PIPE_DIRECTORY", "VARIABLES", "check_percentage", "client_environment"]

MPS_CLIENTS: Final = 48
"""Of a server, from Volta on, on every driver; since CUDA 13.1 it takes 60."""

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
    """Raise `UsageError` for a ceiling that the driver would take for no limit."""
    if compute.ceiling < _LEAST:
        raise UsageError(
            f"{format_percent(compute.ceiling)} % of a GPU's compute is less than MPS can hold to",
            hint="ask for --compute 1 or more, or for --mode soft, which gives parts of a percent",
        )


def client_environment(device: ShareDevice, pipes: str) -> Mapping[str, str]:
    """Return the variables of a share's programs, whose server's daemon is at `pipes`.

    The limit of memory is for each process, as a second line behind the share's ledger, and named
    by number: a client sees the one GPU that its daemon has, so that a name that it cannot see,
    which would make the driver drop all limits, cannot occur. It is left out where memory may live
    on the host.
    """
    environment = {PIPE_DIRECTORY: pipes}
    if device.compute.ceiling < WHOLE:
        environment[_PERCENTAGE] = format_percent(device.compute.ceiling)
    if not device.is_oversubscribed:
        environment[_MEMORY] = f"0={-(-device.memory_bytes // (1 << 20))}M"
    if device.compute.kind is ComputeClass.BESTEFFORT:
        environment[_PRIORITY] = _BELOW_NORMAL
    return environment
