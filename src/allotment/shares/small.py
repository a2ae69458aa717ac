# SPDX-License-Identifier: Apache-2.0
"""Shares that are too small for CUDA itself: given as they were asked for, and remarked upon."""

from allotment.model.formats import format_bytes
from allotment.model.requests import SOFT
from allotment.model.shares import Share

__all__ = ["too_small"]

_SMALL_BYTES = 512 << 20
"""A CUDA context alone takes 300 to 500 MiB of it."""


def too_small(share: Share) -> str:
    """Say that a share is hardly more than CUDA takes for itself; empty: it is not."""
    least = min((each.memory_bytes for each in share.devices), default=_SMALL_BYTES)
    if share.mode != SOFT or least >= _SMALL_BYTES:
        return ""
    return (
        f"it has {format_bytes(least)} of a GPU, and CUDA takes 300 to 500 MiB for itself in each"
        " process, so that programs may find no memory when they start; hint: ask for at least"
        " 512Mi of each GPU"
    )
