# SPDX-License-Identifier: Apache-2.0
"""The names of the modes: how a share is enforced. What a mode does is in `allotment.modes`."""

from typing import Final, Literal, get_args

SOFT: Final = "soft"
MPS: Final = "mps"
MIG: Final = "mig"
EXCLUSIVE: Final = "exclusive"
TIMESLICE: Final = "timeslice"

PartMode = Literal["soft", "mps", "mig"]
"""A share of this mode has a part of a GPU."""
PodMode = Literal[PartMode, "exclusive"]
"""A GPU may be in this mode by turns, as `allotment.dev/gpu` is asked for."""
ModeName = Literal[PodMode, "timeslice"]

PART_MODES: Final[tuple[PartMode, ...]] = get_args(PartMode)
POD_MODES: Final[tuple[PodMode, ...]] = get_args(PodMode)
MODES: Final[tuple[ModeName, ...]] = get_args(ModeName)
"""All, in the order in which they are shown and stored."""
STRONGEST_FIRST: Final = (MIG, SOFT, MPS)
"""Apart by hardware; by turns; side by side, where one's fault ends the others."""
