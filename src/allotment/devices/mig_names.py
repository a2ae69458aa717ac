# SPDX-License-Identifier: Apache-2.0
"""What NVIDIA's tools call a profile of GPU instances: `1g.10gb+me`. The driver has no names."""

from typing import Final

__all__ = ["profile_name"]

_MIB: Final = 1 << 20
_GIB: Final = 1 << 30
_EIGHTHS: Final = 8


def profile_name(slices: int, memory_mib: int, total_bytes: int, attributes: str = "") -> str:
    """Name a profile as NVIDIA's tools do: memory in eighths of the GPU's whole gigabytes.

    Source: go-nvlib `pkg/nvlib/device/mig_profile.go`, v0.7.
    """
    eighths = -(-memory_mib * _MIB * _EIGHTHS // total_bytes)
    whole_gb = -(-total_bytes // _GIB)
    # Halves are rounded up: an eighth of a B200's 180 is 22.5, and its profile 1g.23gb.
    size_gb = (2 * eighths * whole_gb + _EIGHTHS) // (2 * _EIGHTHS)
    return f"{slices}g.{size_gb}gb{attributes}"
